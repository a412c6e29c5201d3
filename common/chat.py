"""Messages, chat templates and token ids: what a model reads of a row, and what it is to write."""

import json

from common.errors import InputError, one_line

TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # what a chat template may read of a row
TEXT_KEYS = ("content", "reasoning_content", "thinking")  # of a message
NEED_TEMPLATE = {"tool_calls", "reasoning_content", "thinking"}

# --- messages ---


def read_text(value, what):
    """A text, or messages whose contents are texts: lists of text parts are joined, null is "".

    [{"role": "user", "content": [{"text": "1"}, {"text": "+1"}]}] -> the content "1+1"
    """
    messages = from_json(value)
    if isinstance(value, str) and not are_messages(messages):
        return value
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{what} is neither text nor a list of messages")
    return [
        read_message(message, f"message {i} of {what}") for i, message in enumerate(messages, 1)
    ]


def are_messages(value):
    is_list = isinstance(value, list) and len(value) > 0
    return is_list and all(isinstance(message, dict) and "role" in message for message in value)


def read_message(message, place):
    """A message with all its keys, such as tool_calls, which templates may read."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{place}: no text under 'role'")
    message = {"content": ""} | without_none(message)
    parts = message["content"]
    if isinstance(parts, list) and all(isinstance(part, dict) and "text" in part for part in parts):
        message["content"] = "".join(str(part["text"]) for part in parts)
    for key in TEXT_KEYS:
        if not isinstance(message.get(key, ""), str):
            raise InputError(f"{place}: no text under '{key}'")
    return message


def from_json(value):
    """What a text spells in JSON, as a CSV file has messages; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{", "null")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def without_none(value):
    """The value without entries of None, which Arrow adds where only other rows have the key."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def check_words(prompt):
    """Refuse a prompt in which nothing is said."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if not "".join(texts).strip():
        raise InputError("the prompt is empty")


def as_answer(completion):
    """A completion, text or messages, as one message of the assistant."""
    if isinstance(completion, str):
        return {"role": "assistant", "content": completion}
    if [message["role"] for message in completion] != ["assistant"]:
        raise InputError("chosen and rejected must end in one answer of the assistant each")
    return completion[0]


# --- what the model reads ---


def dialogue_text(prompt, row, args, tokenizer, answer=None):
    """What the model reads: messages by the chat template, or without one their contents.

    With `answer`, a message that follows the prompt, it is the text of the whole dialogue.
    """
    messages = prompt_messages(prompt, args)
    is_begun = messages[-1]["role"] == "assistant"  # the model goes on with a begun answer
    own_options = row_options(row)
    if not tokenizer.chat_template:
        turns = [*messages, answer] if answer else messages
        if "tools" in own_options or any(NEED_TEMPLATE & turn.keys() for turn in turns):
            raise InputError("tools, calls and thoughts need a tokenizer with a chat template")
        text = "\n\n".join(message["content"] for message in messages)
        return text + answer["content"] if answer else text
    how = dict(add_generation_prompt=not is_begun, continue_final_message=is_begun)
    if answer:
        how = {}
        begun = messages.pop() if is_begun else {"content": ""}
        messages.append(begun | answer | {"content": begun["content"] + answer["content"]})
    try:
        options = json.loads(args.chat_template_kwargs or "{}") | own_options
        return tokenizer.apply_chat_template(messages, tokenize=False, **how, **options)
    except Exception as error:  # a template is a program and may raise anything
        problem = f"the chat template, or --chat_template_kwargs: {one_line(error)}"
        raise InputError(problem) from None


def row_options(row):
    """What a chat template reads of the columns of a row."""
    options = without_none(from_json(row.get("chat_template_kwargs"))) or {}
    tools = without_none(from_json(row.get("tools"))) or []
    if not isinstance(options, dict) or not isinstance(tools, list):
        raise InputError("the column tools has lists, and chat_template_kwargs has objects")
    return options | {"tools": tools} if tools else options


def prompt_messages(prompt, args):
    """The messages of a prompt, with --system_prompt, and --prompt_template in the user's last."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if args.prompt_template and users:
        last = messages[users[-1]]
        text = args.prompt_template.replace("{prompt}", last["content"])  # its other braces stay
        messages[users[-1]] = last | {"content": text}
    if args.system_prompt:  # templates accept only one
        others = [message for message in messages if message["role"] != "system"]
        messages = [{"role": "system", "content": args.system_prompt}, *others]
    return messages


def answer_text(text, prompt, answer, row, args, tokenizer):
    """The text with which `answer`, a message, goes on after `text`, that of the prompt.

    It is what the whole dialogue has behind the prompt, so an answer stands where the chat template
    puts it: behind a thought that the prompt has opened, in a channel.
    """
    whole = dialogue_text(prompt, row, args, tokenizer, answer)
    if not whole.startswith(text):
        shown = f"{text[-60:]!r} is no beginning of {whole[-60:]!r}"
        raise InputError(f"the chat template changes the prompt once it is answered: {shown}")
    return whole.removeprefix(text)


# --- token ids ---


def encode_prompts(texts, tokenizer):
    """Token ids of the texts of prompts. A template has written the special tokens itself."""
    plain = not tokenizer.chat_template
    encoded = tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
    for text, ids in zip(texts, encoded, strict=True):
        if plain and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # it would end the prompt
            del ids[-1]
        # The text may spell BOS, too.
        if plain and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            del ids[0]
        if not ids:
            raise InputError(f"the tokenizer makes no token of the prompt {text!r}")
    return encoded


def encode_completions(texts, tokenizer):
    """Token ids of completions. The first end token or EOS of each is its end, as the end token.

    A completion that its template ends with another special token keeps that: gpt-oss ends a call
    with <|call|>.
    """
    end = end_token(tokenizer)
    added = tokenizer.added_tokens_decoder if tokenizer.chat_template else {}
    other_ends = {token for token, about in added.items() if about.special}
    other_ends -= {tokenizer.unk_token_id}
    completions = []
    for ids in encode_behind(texts, tokenizer):
        ends = [i for i, token in enumerate(ids) if token in (end, tokenizer.eos_token_id)]
        ids = ids[: ends[0]] if ends else ids
        is_ended = not ends and ids and ids[-1] in other_ends
        completions.append(ids if is_ended else [*ids, end])
    return completions


def encode_behind(texts, tokenizer):
    """Token ids of texts that go on after others.

    Some tokenizers put a blank before every text (Llama 2, Mistral v0.1). So each is encoded behind
    a line break, which is then cut off; or behind a digit, if the two make one token with it.
    """
    found = {}
    for anchor in ("\n", "1", ""):
        left = [text for text in dict.fromkeys(texts) if text not in found]
        behind = [anchor, *(anchor + text for text in left)]
        start, *rows = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"]
        for text, ids in zip(left, rows, strict=True):
            if ids[: len(start)] == start and bool(start) == bool(anchor):
                found[text] = ids[len(start) :]
    return [found[text] for text in texts]


def end_token(tokenizer):
    """The id that ends a completion: the added token that a chat template puts there, else EOS."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    answer = "Elephants are grey."  # which stands in no system prompt
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception as error:  # a template is a program and may raise anything
        problem = f"the chat template refuses a question with its answer: {one_line(error)}"
        raise InputError(problem) from None
    after = text.partition(answer)[2].lstrip()  # empty where a template leaves answers out
    ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else tokenizer.eos_token_id
