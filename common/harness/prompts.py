"""Prompts and completions as text or messages: read from the rows of data, and made token ids."""

import json
import re
from itertools import chain, islice, takewhile

from common.errors import InputError, one_line

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")


def read_text(value, what, where):
    """A text, or messages with lists of text parts joined; InputError for anything else."""
    messages = without_none(value) if isinstance(value, list) else [{"role": "", "content": value}]
    try:
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
            (message["role"] + message["content"]).encode()
    except (TypeError, KeyError, UnicodeEncodeError):  # no tokenizer accepts half a surrogate
        raise InputError(f"{where}: {what} is neither valid text nor a list of messages of role and content") from None
    return messages if isinstance(value, list) else value


def without_none(value):
    """The value without entries of None, which Arrow adds where only other rows have the key."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return list(map(without_none, value)) if isinstance(value, list) else value


def read_prompt(row, column, where):
    """(prompt, None) of the column, or what `chosen` and `rejected` share; (prompt, answer) if `messages` have one."""
    last = None
    if column:
        prompt = read_text(row.get(column) or "", "the prompt", where)
    else:
        prompt = shared_prompt(*(read_text(row.get(name), name, where) for name in ("chosen", "rejected")))
    if column == "messages" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        *prompt, last = prompt
    if not (prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt[-1:])).strip():
        raise InputError(f"{where}: the prompt is empty")
    return prompt, last and last["content"]


def shared_prompt(chosen, rejected):
    """What both share, up to the last assistant turn; in a text without turns, as far as words agree."""
    shared = [a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    if isinstance(chosen, list):
        while shared and shared[-1]["role"] == "assistant":
            shared.pop()
        return shared
    before, turn, _ = "".join(shared).rpartition("\n\nAssistant:")  # as hh-rlhf marks it
    return before + turn or "".join(shared).rpartition(" ")[0]


def tokenize(rows, args, tokenizer):
    """Token ids of the prompts of rows (place for errors, prompt, columns), by the chat template if there is one."""
    plain = not tokenizer.chat_template  # a template writes special tokens itself
    texts = [prompt_text(*row, args, tokenizer) for row in rows]
    encoded = encode(texts, tokenizer, add_special_tokens=plain)
    for (where, *_), ids in zip(rows, encoded, strict=True):
        if plain and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # it would end the prompt
            del ids[-1]
        if plain and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]
        if not ids:
            raise InputError(f"{where}: the tokenizer makes no token of the prompt")
    return encoded


def encode(texts, tokenizer, add_special_tokens):
    """Token ids of each text, a thousand texts a call: the tokenizer needs some 400 bytes a token while it works."""
    parts = (texts[start : start + 1000] for start in range(0, len(texts), 1000))
    options = dict(add_special_tokens=add_special_tokens, verbose=False)
    return [ids for part in parts for ids in tokenizer(part, **options)["input_ids"]]


def encode_completions(texts, tokenizer):
    """Token ids of completions, in which a spelled special token, as `</s>`, is plain text: it is cut after its first
    character. (`split_special_tokens=True` does not reach those among the ordinary pieces of a unigram model.)"""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens, tokenizer.convert_ids_to_tokens(end_token(tokenizer))}
    inside = re.compile("|".join(f"(?<={re.escape(x[0])})(?={re.escape(x[1:])})" for x in special))
    parts = [inside.split(text) for text in texts]
    encoded = iter(encode(list(chain(*parts)), tokenizer, add_special_tokens=False))
    return [list(chain(*islice(encoded, len(part)))) for part in parts]


def prompt_text(where, prompt, columns, args, tokenizer):
    """What the model reads of a row: `--prompt_template` in its last user turn, `--system_prompt`, chat template."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if args.prompt_template and users:  # not str.format: texts hold braces
        text = args.prompt_template.replace("{prompt}", messages[users[-1]]["content"])
        messages[users[-1]] = messages[users[-1]] | {"content": text}
    if args.system_prompt:  # templates accept only one
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    values = [args.chat_template_kwargs, *(columns.get(name) for name in TEMPLATE_COLUMNS)]
    begun = messages[-1]["role"] == "assistant"  # the model continues it
    try:
        given, tools, own = (without_none(json.loads(value) if isinstance(value, str) else value) for value in values)
        if tokenizer.chat_template:
            ends = dict(add_generation_prompt=not begun, continue_final_message=begun, tools=tools or None)
            return tokenizer.apply_chat_template(messages, tokenize=False, **ends, **{**(given or {}), **(own or {})})
    except Exception as error:  # a template is a program and may raise anything
        raise InputError(f"{where}: the chat template or --chat_template_kwargs: {one_line(error)}") from None
    if given or tools or {message["role"] for message in messages} - {"system", "user"}:
        raise InputError(f"{where}: no chat template for dialogues, tools or --chat_template_kwargs")
    return "\n\n".join(message["content"] for message in messages)


def end_token(tokenizer):
    """The id that ends a completion: the added token right after an answer in the chat template, else EOS."""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "Elephants are grey."}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False) if tokenizer.chat_template else ""
    except Exception as error:
        raise InputError(f"the chat template refuses a question with its answer: {one_line(error)}") from None
    after = text.partition(turns[1]["content"])[2].lstrip()  # empty where a template leaves answers out
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else tokenizer.eos_token_id
