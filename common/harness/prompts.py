"""Prompts and completions as text or as messages: read from the rows of data, and made token ids."""

import json
import re
from itertools import chain, islice, pairwise, takewhile
from typing import Any

from common.errors import InputError, one_line, refuse

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
PLAIN_TEMPLATE = (  # of a tokenizer without one: only a template knows how to mark tools and the turns of a dialogue
    "{% if tools or messages | map(attribute='role') | reject('in', ['system', 'user']) | list %}"
    "{{ raise_exception('the tokenizer has no chat template, which tools and a dialogue need') }}{% endif %}"
    "{{ messages | map(attribute='content') | join('\n\n') }}"
)
ASSISTANT_TURN = "\n\nAssistant:"  # as hh-rlhf marks it in plain text
PROBE = "Elephants are grey."  # an answer that occurs in no chat template


def read_text(value: Any, what: str, where: str) -> str | list[dict]:
    """A text, or messages with each list of text parts joined to one text; InputError for anything else."""
    if isinstance(value, list):
        value = [message if isinstance(message, dict) else {} for message in without_none(value)]
        for message in value:
            parts = message.get("content")
            if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
                message["content"] = "".join(str(part.get("text", "")) for part in parts)
    texts = [turn.get(key) for turn in value for key in ("role", "content")] if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where}: {what} is neither text nor a list of messages with role and content, both text")
    if re.search("[\ud800-\udfff]", "".join(texts)):  # in JSON; no tokenizer accepts it
        raise InputError(f"{where}: {what} is not valid Unicode but has half a surrogate pair")
    return value


def without_none(value: Any) -> Any:
    """The value without dictionary entries of None, which Arrow adds where only other rows have the key."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return list(map(without_none, value)) if isinstance(value, list) else value


def read_prompt(row: dict, column: str | None, where: str) -> tuple[str | list[dict], str | None]:
    """The prompt in the column, or without one what `chosen` and `rejected` share; and the answer that followed it in
    the column `messages`."""
    if column:
        prompt = read_text(row.get(column) or "", "the prompt", where)
    else:
        prompt = shared_prompt(*(read_text(row.get(name), name, where) for name in ("chosen", "rejected")))
    answer = None
    if column == "messages" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        *prompt, answer = prompt
    if not (prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt[-1:])).strip():
        raise InputError(f"{where}: the prompt is empty")
    return prompt, answer and answer["content"]


def shared_prompt(chosen: str | list[dict], rejected: str | list[dict]) -> str | list[dict]:
    """What both completions share, up to the last assistant turn; in a text without turns, as far as words agree."""
    shared = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    if isinstance(chosen, list):
        while shared and shared[-1]["role"] == "assistant":
            shared.pop()
        return shared
    before, turn, _ = "".join(shared).rpartition(ASSISTANT_TURN)
    return before + turn or "".join(shared).rpartition(" ")[0]


def split_pair(row: dict, column: str | None, where: str) -> tuple[str | list[dict], str, str]:
    """(prompt, chosen text, rejected text) of a row in any of the formats."""
    answers = [read_text(row.get(name), name, where) for name in ("chosen", "rejected")]
    dialogues = isinstance(answers[0], list)
    if dialogues != isinstance(answers[1], list):
        raise InputError(f"{where}: chosen and rejected must both be text, or both lists of messages")
    if row.get(column) is None or (dialogues and len(answers[0]) > 1 and isinstance(row[column], str)):
        column = None  # the completions hold the prompt
    prompt, _ = read_prompt(row, column, where)
    if column is None or (dialogues and all(answer[: len(prompt)] == prompt for answer in answers)):
        answers = [answer[len(prompt) :] for answer in answers]
    if dialogues:
        if any([message["role"] for message in answer] != ["assistant"] for answer in answers):
            raise InputError(f"{where}: after the prompt, chosen and rejected must be one assistant message each")
        answers = [answer[0]["content"] for answer in answers]
    return prompt, *answers


def tokenize(rows: list[tuple[str, str | list[dict], dict]], args, tokenizer) -> list[list[int]]:
    """Token ids of the prompts of rows (place for error messages, prompt, other columns): through the chat template if
    the tokenizer has one, else of the plain text."""
    plain = not tokenizer.chat_template  # a template writes special tokens itself
    if plain and args.chat_template_kwargs:
        refuse(args, "chat_template_kwargs", "the tokenizer has no chat template")
    encoded = encode([prompt_text(*row, args, tokenizer) for row in rows], tokenizer, add_special_tokens=plain)
    for (where, *_), ids in zip(rows, encoded, strict=True):
        if plain and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # it would end the prompt
            del ids[-1]
        if plain and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]
        if not ids:
            raise InputError(f"{where}: the tokenizer makes no token of the prompt")
    return encoded


def encode(texts: list[str], tokenizer, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each text, a thousand texts a call: the tokenizer needs some 400 bytes a token while it works."""
    parts = (texts[start : start + 1000] for start in range(0, len(texts), 1000))
    options = dict(add_special_tokens=add_special_tokens, verbose=False)
    return [ids for part in parts for ids in tokenizer(part, **options)["input_ids"]]


def prompt_text(where: str, prompt: str | list[dict], columns: dict, args, tokenizer) -> str:
    """What the model reads of a row: `--prompt_template` around the last user message, `--system_prompt` in place of a
    system message of the data, and all of it through the chat template, with the row's tools and kwargs."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if args.prompt_template and users:  # not str.format: prompts and templates hold braces of their own
        text = args.prompt_template.replace("{prompt}", messages[users[-1]]["content"])
        messages[users[-1]] = messages[users[-1]] | {"content": text}
    if args.system_prompt:  # templates accept only one
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    begun = messages[-1]["role"] == "assistant"  # the data begins the answer, and the model continues it
    ends = dict(add_generation_prompt=not begun, continue_final_message=begun)
    template = tokenizer.chat_template or PLAIN_TEMPLATE
    values = [args.chat_template_kwargs, *(columns.get(name) for name in TEMPLATE_COLUMNS)]
    try:
        given, tools, own = (without_none(json.loads(value) if isinstance(value, str) else value) for value in values)
        kwargs = dict(chat_template=template, tools=tools or None, tokenize=False) | ends
        return tokenizer.apply_chat_template(messages, **kwargs, **{**(given or {}), **(own or {})})
    except Exception as error:  # a template is a program and may raise anything
        what = "the prompt, its tools or --chat_template_kwargs"
        raise InputError(f"{where}: the chat template refuses {what}: {one_line(error)}") from None


def end_token(tokenizer) -> int | None:
    """The id that ends a completion: the added token that directly follows an answer in the chat template, else EOS."""
    text, turns = "", [{"role": "user", "content": "question"}, {"role": "assistant", "content": PROBE}]
    try:
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:
        raise InputError(f"the chat template refuses a question with its answer: {one_line(error)}") from None
    after = text.rpartition(PROBE)[2] if PROBE in text else ""  # a template may leave the answer out
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else tokenizer.eos_token_id


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
