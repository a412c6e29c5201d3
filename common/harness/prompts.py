"""Prompts and completions as text or messages: read from the rows of data, and made token ids."""

import json
import re
from itertools import chain

from common.errors import InputError, one_line

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # what a chat template may read of a row

# --- what stands in a row ---


def read_text(value, what, where):
    """A text, or messages, in which lists of text parts are joined; else an InputError.

    [{"role": "user", "content": [{"text": "1"}, {"text": "+1"}]}] -> the content "1+1"
    """
    try:
        if not isinstance(value, list):
            check_text(value)
            return value
        messages = without_none(value)
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
            check_text(message["role"])
            check_text(message["content"])
        return messages
    except UnicodeEncodeError:
        raise InputError(f"{where}: {what} is not valid UTF-8: save the file as UTF-8") from None
    except (TypeError, KeyError):
        valid = "valid text nor a list of messages of role and content"
        raise InputError(f"{where}: {what} is neither {valid}") from None


def check_text(text):
    if not isinstance(text, str):
        raise TypeError
    text.encode()  # no tokenizer accepts half a surrogate


def without_none(value):
    """The value without entries of None, which Arrow adds where only other rows have the key."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def read_prompt(row, column, where):
    """(prompt, answer): the column's text, and the last turn of the assistant if `messages` end so.

    Without a column the prompt is what `chosen` and `rejected` share. The answer may be None.
    """
    if column:
        prompt = read_text(row.get(column) or "", "the prompt", where)
    else:
        chosen = read_text(row.get("chosen"), "chosen", where)
        rejected = read_text(row.get("rejected"), "rejected", where)
        prompt = shared_prompt(chosen, rejected)
    answer = None
    if column == "messages" and begins_answer(prompt):
        answer = prompt[-1]["content"]
        prompt = prompt[:-1]
    text = prompt
    if isinstance(prompt, list):
        text = prompt[-1]["content"] if prompt else ""
    if not text.strip():
        raise InputError(f"{where}: the prompt is empty")
    return prompt, answer


def begins_answer(prompt):
    """Whether a prompt ends with a turn of the assistant, which the model then goes on with."""
    return isinstance(prompt, list) and prompt[-1]["role"] == "assistant"


def shared_prompt(chosen, rejected):
    """What both share, up to the last turn of the assistant. A text without turns is cut at a word:

    ("The sky is blue.", "The sky is brown.") -> "The sky is"
    """
    shared = []
    for a, b in zip(chosen, rejected, strict=False):
        if a != b:
            break
        shared.append(a)
    if isinstance(chosen, list):
        while shared and shared[-1]["role"] == "assistant":
            shared.pop()
        return shared
    text = "".join(shared)
    before, turn, _ = text.rpartition("\n\nAssistant:")  # as hh-rlhf marks it
    return before + turn if turn else text.rpartition(" ")[0]


# --- token ids ---


def tokenize(rows, args, tokenizer):
    """Token ids of the prompts of rows (where, prompt, columns), by the chat template if any."""
    plain = not tokenizer.chat_template  # a template writes special tokens itself
    texts = [prompt_text(*row, args, tokenizer) for row in rows]
    encoded = encode(texts, tokenizer, add_special_tokens=plain)
    for (where, _, _), ids in zip(rows, encoded, strict=True):
        if plain and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # it would end the prompt
            del ids[-1]
        if plain and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]
        if not ids:
            raise InputError(f"{where}: the tokenizer makes no token of the prompt")
    return encoded


def encode(texts, tokenizer, add_special_tokens):
    """Token ids of each text, by a thousand texts: the tokenizer needs some 400 bytes a token."""
    options = dict(add_special_tokens=add_special_tokens, verbose=False)
    encoded = []
    for start in range(0, len(texts), 1000):
        part = texts[start : start + 1000]
        encoded += tokenizer(part, **options)["input_ids"]
    return encoded


def encode_completions(texts, tokenizer):
    """Token ids of completions, in which a spelled special token, as `</s>`, is plain text.

    It is cut after its first character: "1</s>" is encoded as "1<" and "/s>". The tokenizer's own
    `split_special_tokens=True` does not reach those among the ordinary pieces of a unigram model.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special.update(tokenizer.all_special_tokens)
    special.add(tokenizer.convert_ids_to_tokens(end_token(tokenizer)))
    cuts = [f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in special]
    cut = re.compile("|".join(cuts))
    pieces = [cut.split(text) for text in texts]
    encoded = encode(list(chain.from_iterable(pieces)), tokenizer, add_special_tokens=False)
    completions = []
    start = 0
    for pieces_of_text in pieces:
        end = start + len(pieces_of_text)
        completions.append(list(chain.from_iterable(encoded[start:end])))
        start = end
    return completions


def count_plain(prompts, tokenizer):
    """How many prompts are messages that become plain text, as there is no chat template."""
    if tokenizer.chat_template:
        return 0
    return sum(isinstance(prompt, list) for prompt in prompts)


PLAIN = "of messages, which become plain text: the tokenizer has no chat template"


def prompt_text(where, prompt, columns, args, tokenizer):
    """What the model reads of a row: its messages by the chat template, or one after the other."""
    messages = prompt_messages(prompt, args)
    try:
        run_options = from_json(args.chat_template_kwargs)
        tools = from_json(columns.get("tools"))
        row_options = from_json(columns.get("chat_template_kwargs"))
        if tokenizer.chat_template:
            options = {**(run_options or {}), **(row_options or {})}
            begun = begins_answer(messages)
            return tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=not begun,
                continue_final_message=begun,
                tokenize=False,
                **options,
            )
    except Exception as error:  # a template is a program and may raise anything
        problem = f"the chat template or --chat_template_kwargs: {one_line(error)}"
        raise InputError(f"{where}: {problem}") from None
    roles = {message["role"] for message in messages}
    if run_options or tools or roles - {"system", "user"}:
        problem = "no chat template for dialogues, tools or --chat_template_kwargs"
        raise InputError(f"{where}: {problem}")
    return "\n\n".join(message["content"] for message in messages)


def from_json(value):
    """A value of the data, or of its text in JSON."""
    return without_none(json.loads(value) if isinstance(value, str) else value)


def prompt_messages(prompt, args):
    """The messages of a prompt, with --system_prompt, and --prompt_template in the user's last."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if args.prompt_template and users:
        last = messages[users[-1]]
        text = args.prompt_template.replace("{prompt}", last["content"])  # its other braces stay
        messages[users[-1]] = last | {"content": text}
    if args.system_prompt:  # templates accept only one
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    return messages


def end_token(tokenizer):
    """The id that ends a completion: the added token that a chat template puts there, else EOS."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    answer = "Elephants are grey."
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:
        problem = f"the chat template refuses a question with its answer: {one_line(error)}"
        raise InputError(problem) from None
    after = text.partition(answer)[2].lstrip()  # empty where a template leaves answers out
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else tokenizer.eos_token_id
