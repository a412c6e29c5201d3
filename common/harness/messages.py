"""Prompts and completions, as text or as messages: checking them, and telling one from the other in a row of data."""

from itertools import takewhile
from typing import Any

from common.errors import InputError
from common.harness.rows import CONVERSATION, PROMPT_COLUMNS

ASSISTANT_TURN = "\n\nAssistant:"  # as hh-rlhf marks it in plain text


def split_pair(row: dict, args, where: str) -> tuple[str | list[dict], str, str]:
    """(prompt, chosen text, rejected text) of a row in any of the formats."""
    answers = [join_parts(row.get(name), where) for name in ("chosen", "rejected")]
    messages = all(isinstance(answer, list) and answer and all(map(is_message, answer)) for answer in answers)
    if not messages and not all(isinstance(answer, str) for answer in answers):
        has = ", ".join(row)
        raise InputError(f"{where}: chosen and rejected must both be text, or both lists of messages; it has {has}")
    if messages:
        answers = [without_none(answer) for answer in answers]
    if args.prompt_column and args.prompt_column not in row:
        raise InputError(f"{where}: no column {args.prompt_column!r} but {', '.join(row)}: see --prompt_column")
    prompt_column = args.prompt_column or next((name for name in PROMPT_COLUMNS if name in row), None)
    prompt = join_parts(row.get(prompt_column), where)
    if prompt_column == CONVERSATION:
        prompt, _ = split_answer(prompt)
    whole = messages and len(answers[0]) > 1 and isinstance(prompt, str)  # the messages hold the prompt as well
    own = prompt is not None and not whole
    prompt = check_prompt(prompt if own else shared_prompt(*answers), where)
    if not own or (messages and all(answer[: len(prompt)] == prompt for answer in answers)):
        answers = [answer[len(prompt) :] for answer in answers]
    if messages:
        if any(len(answer) != 1 or answer[0]["role"] != "assistant" for answer in answers):
            raise InputError(f"{where}: after the prompt, chosen and rejected must be one assistant message each")
        answers = [answer[0]["content"] for answer in answers]
    check_unicode("".join(answers), "a completion", where)
    return prompt, *answers


def shared_prompt(chosen: Any, rejected: Any) -> str | list[dict] | None:
    """The prompt of a pair that has no prompt column: what both completions share, up to the last assistant turn."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        return None
    shared = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    if isinstance(chosen, list):
        while shared and is_message(shared[-1]) and shared[-1]["role"] == "assistant":
            shared.pop()
        return shared
    before, turn, _ = "".join(shared).rpartition(ASSISTANT_TURN)
    return before + turn or "".join(shared).rpartition(" ")[0]  # no turns: as far as whole words agree


def join_parts(messages: Any, where: str) -> Any:
    """Messages in which a content that is a list of text parts is joined to one text; anything else unchanged."""
    if not isinstance(messages, list):
        return messages
    joined = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                if kind != "text":
                    raise InputError(f"{where}: a message has a part of type {kind}; only parts of type text are read")
                if not isinstance(text := part.get("text"), str | None):
                    raise InputError(f"{where}: a message has a part whose text is of type {type(text).__name__}")
            message = message | {"content": "".join(part.get("text") or "" for part in content)}
        joined.append(message)
    return joined


def split_answer(messages: Any) -> tuple[Any, str | None]:
    """(turns before, text of the last one) if the last turn is the assistant's, else (conversation, None)."""
    if isinstance(messages, list) and messages and is_message(messages[-1]) and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"]
    return messages, None


def check_prompt(prompt: Any, where: str) -> str | list[dict]:
    """The prompt, without keys that are None; InputError unless it is text or messages, not empty, valid Unicode."""
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
    """The value without dictionary entries of None, which Arrow adds where only other rows have the key."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return list(map(without_none, value)) if isinstance(value, list) else value


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def prompt_key(prompt: str | list[dict]) -> Any:
    """A hashable key, equal for equal prompts: the text, or role and content of each message."""
    return prompt if isinstance(prompt, str) else tuple((m["role"], m["content"]) for m in prompt)
