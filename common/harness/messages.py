"""Prompts and completions as text or as messages: checks, the text of parts, and where the prompt ends."""

from itertools import takewhile
from typing import Any

from common.errors import InputError

ASSISTANT_TURN = "\n\nAssistant:"  # as hh-rlhf marks it in plain text


def shared_prompt(chosen: Any, rejected: Any) -> str | list[dict] | None:
    """The prompt of a preference pair that has none of its own: what both share, up to the last assistant turn."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        return None
    shared = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    if isinstance(chosen, list):
        while shared and is_message(shared[-1]) and shared[-1]["role"] == "assistant":
            shared.pop()
        return shared
    before, turn, _ = "".join(shared).rpartition(ASSISTANT_TURN)
    return before + turn or "".join(shared).rpartition(" ")[0]  # without turns, as far as whole words agree


def join_parts(messages: Any, where: str) -> Any:
    """Messages whose content is a list of parts, with the text of the parts; other values as they are."""
    if not isinstance(messages, list):
        return messages
    joined = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
            if others := [str(kind) for kind in kinds if kind != "text"]:
                raise InputError(f"{where}: a message has a part of type {others[0]}; only parts of type text are read")
            texts = [part.get("text") for part in content]
            if others := [type(text).__name__ for text in texts if not isinstance(text, str | None)]:
                raise InputError(f"{where}: a message has a part whose text is of type {others[0]}")
            message = message | {"content": "".join(filter(None, texts))}
        joined.append(message)
    return joined


def split_answer(messages: Any) -> tuple[Any, str | None]:
    """A conversation without its last turn, and the text of that, if it is the assistant's."""
    if isinstance(messages, list) and messages and is_message(messages[-1]) and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None


def check_prompt(prompt: Any, where: str) -> str | list[dict]:
    """The prompt, text or messages, checked."""
    if isinstance(prompt, list) and all(map(is_message, prompt)):
        prompt = without_none(prompt)
        texts = [message["content"] for message in prompt]
    elif isinstance(prompt, str | None):
        texts = [prompt or ""]
    else:
        raise InputError(f"{where}: the prompt is neither text nor a list of messages with role and content")
    if not texts or not texts[-1].strip():
        raise InputError(f"{where}: the prompt is empty")
    check_unicode("".join(texts), "the prompt", where)
    return prompt


def check_unicode(text: str, what: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold half a surrogate pair, which no tokenizer accepts
        raise InputError(f"{where}: {what} is not valid Unicode: {error}") from None


def without_none(value: Any) -> Any:
    """Lists and dicts without the keys that are None, which Arrow adds where only other rows have them."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return list(map(without_none, value)) if isinstance(value, list) else value


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def prompt_key(prompt: str | list[dict]) -> Any:
    return prompt if isinstance(prompt, str) else tuple((m["role"], m["content"]) for m in prompt)
