"""Token ids of prompts, through the chat template or as plain text; of completions; and of the token that ends one."""

import json
import re
from itertools import chain, islice, pairwise
from typing import NamedTuple

from common.errors import InputError, one_line
from common.harness.messages import without_none
from common.harness.rows import TEMPLATE_COLUMNS

PROBE = "Elephants are grey."  # an answer that occurs in no chat template


class Row(NamedTuple):
    """A row of the data, before its prompt is tokenized."""

    where: str  # file and row number, for error messages
    prompt: str | list[dict]
    answer: str | None
    columns: dict


def tokenize(rows: list[Row], args, tokenizer, most: int = 0) -> list[list[int]]:
    """Token ids of each row's prompt: through the chat template if the tokenizer has one, else of the plain text.

    A prompt that exceeds `most` tokens (0: no limit) may be cut, but still exceeds it: the caller drops it.
    """
    chat, kwargs = bool(tokenizer.chat_template), template_kwargs(args)
    if kwargs and not chat:
        raise InputError("--chat_template_kwargs: the tokenizer has no chat template")
    texts = []
    for row in rows:
        messages = build_messages(row.prompt, args)
        text = chat_text(messages, row, tokenizer, kwargs) if chat else plain_text(messages, row)
        texts.append(beginning(text, most, tokenizer) if most else text)
    encoded = encode(texts, tokenizer, add_special_tokens=not chat)  # a template writes them itself
    if not chat:
        encoded = [trim_special(ids, tokenizer) for ids in encoded]
    for ids, row in zip(encoded, rows, strict=True):
        if not ids:
            raise InputError(f"{row.where}: the tokenizer makes no token of the prompt")
    return encoded


def encode(texts: list[str], tokenizer, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each text, a thousand texts a call: the tokenizer needs some 400 bytes a token while it works."""
    encoded = []
    for start in range(0, len(texts), 1000):
        part = texts[start : start + 1000]
        encoded += tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return encoded


def beginning(text: str, most: int, tokenizer) -> str:
    """The text; or its first 16 x `most` characters if these alone make more than 2 x `most` tokens, since the rest can
    change the last of these tokens, but not halve their number. A text of 5 MB would take 2 GB, only to be dropped."""
    start = text[: 16 * most]
    if len(start) < len(text) and len(encode([start], tokenizer, add_special_tokens=False)[0]) > 2 * most:
        return start
    return text


def build_messages(prompt: str | list[dict], args) -> list[dict]:
    """The conversation, with `--prompt_template` around its last user message, and with `--system_prompt` in place of
    any system message of the data (chat templates accept only one)."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if args.prompt_template and users:
        last = messages[users[-1]]
        # not str.format: prompts and templates hold braces of their own
        messages[users[-1]] = last | {"content": args.prompt_template.replace("{prompt}", last["content"])}
    if args.system_prompt:
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    return messages


def template_kwargs(args) -> dict:
    """--chat_template_kwargs as a dict."""
    try:
        kwargs = json.loads(args.chat_template_kwargs or "{}")
    except ValueError as error:
        raise InputError(f"--chat_template_kwargs {args.chat_template_kwargs}: not valid JSON: {error}") from None
    if not isinstance(kwargs, dict):
        raise InputError(f"--chat_template_kwargs {args.chat_template_kwargs}: must be a JSON object")
    return kwargs


def chat_text(messages: list[dict], row: Row, tokenizer, given: dict) -> str:
    """The conversation through the chat template, with the row's tools and kwargs; these win over the `given` ones."""
    begun = messages[-1]["role"] == "assistant"  # the data begins the answer, and the model continues it
    try:
        values = (row.columns.get(name) for name in TEMPLATE_COLUMNS)
        tools, own = (without_none(json.loads(value) if isinstance(value, str) else value) for value in values)
        return tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            tokenize=False,
            **given | (own or {}),
        )
    except Exception as error:  # a template is a program and may raise anything
        raise InputError(f"{row.where}: the chat template refuses the prompt: {one_line(error)}") from None


def plain_text(messages: list[dict], row: Row) -> str:
    """System and user text with a blank line between them; only a template knows how to mark turns of a dialogue."""
    if row.columns.get("tools"):
        raise InputError(f"{row.where}: tools need a chat template, and the tokenizer has none")
    if any(message["role"] not in ("system", "user") for message in messages):
        raise InputError(
            f"{row.where}: a dialogue of several turns, and the tokenizer has no chat template:"
            " take a model that has one, or write the dialogue as plain text"
        )
    return "\n\n".join(message["content"] for message in messages)


def trim_special(ids: list[int], tokenizer) -> list[int]:
    """The ids without the EOS that some tokenizers append, which would end the prompt, and without a second BOS."""
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    return ids


def end_token(tokenizer) -> int | None:
    """The id that ends a completion: what the chat template puts after an assistant's answer, else EOS."""
    closing = end_of_turn(tokenizer)
    return tokenizer.eos_token_id if closing is None else closing


def end_of_turn(tokenizer) -> int | None:
    """The added token that directly follows an assistant's answer in the chat template; None where there is none."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template is a program and may raise anything
        raise InputError(f"the chat template refuses a question with its answer: {one_line(error)}") from None
    _, answer, after = text.rpartition(PROBE)
    if not answer:  # a template that leaves the answer out says nothing about its end
        return None
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else None


def encode_completions(texts: list[str], tokenizer) -> list[list[int]]:
    """Token ids of the texts of completions, in which a special token that is spelled out, as `</s>`, is ordinary text.

    Its spelling is cut after the first character, and the parts are tokenized apart. (`split_special_tokens=True` does
    not work for every tokenizer: a unigram model has special tokens among its ordinary pieces.)
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens, tokenizer.convert_ids_to_tokens(end_token(tokenizer))}
    spelled, parts = re.compile("|".join(map(re.escape, special))), []
    for text in texts:
        cuts = [match.start() + 1 for match in spelled.finditer(text)]
        parts.append([text[start:end] for start, end in pairwise([0, *cuts, len(text)])])
    encoded = iter(encode(list(chain(*parts)), tokenizer, add_special_tokens=False))
    return [list(chain.from_iterable(islice(encoded, len(part)))) for part in parts]
