"""Prompts from any common dataset format, and the endless prompt sampler.

`load_prompts` finds the splits, reads the rows, merges those that repeat, puts `--prompt_template` and
`--system_prompt` around the text, and tokenizes. It goes by the columns:

    GSM8K           question, answer (gold after ####)
    MATH            problem, answer or solution (gold in the last \\boxed{})
    verl            prompt, reward_model (a dict with ground_truth), as in DAPO-Math-17k; or reward_model.ground_truth
    TRL             prompt; prompt, chosen, rejected; or chosen, rejected alone (as in hh-rlhf); plain text or messages;
                    messages alone (data for SFT), whose last assistant turn is the gold
    anything else   --prompt_column and --answer_column

The columns `tools` and `chat_template_kwargs` go to the chat template, as in TRL.
"""

import codecs
import glob
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.answers import extract_answer
from common.errors import InputError

EMBEDDED = Path(__file__).parents[1] / "tiny"
EMBEDDED_FOLDERS = {"embedded": EMBEDDED, "embedded-hard": EMBEDDED.with_name("tiny_hard")}
EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
PROMPT_COLUMNS = ("prompt", "question", "problem")
CONVERSATION = "messages"  # the column of whole conversations, which end with the answer
ANSWER_COLUMNS = ("answer", "reward_model", "reward_model.ground_truth", "ground_truth", "solution")
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
TEXT_COLUMNS = (*PROMPT_COLUMNS, *ANSWER_COLUMNS, "chosen", "rejected")  # text in a CSV file, whatever it looks like
TEXT = "\0"  # put before such a cell while pandas has it, which takes `None` and `NA` for nothing
ASSISTANT_TURN = "\n\nAssistant:"  # as hh-rlhf marks it in plain text
UNREAD = "not read, --max_steps 0 only evaluates"
PROBE = "Elephants are grey."  # an answer that no chat template holds itself


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # the token ids the model is given
    prompt: str | list[dict]  # what reward functions see: the row's own text or messages, no template or system prompt
    answer: str | None  # gold: `extract_answer` of the answer column, or its whole text when it has no marker
    columns: dict  # the row's other columns, for the user's reward functions; the raw answer column is among them


class Written(float):
    """A number of a JSON file, spelled in `str` as in the file: the float itself may be rounded."""

    __slots__ = ("text",)

    def __new__(cls, text):
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self):
        return self.text


class Source(NamedTuple):
    name: str  # as messages call it
    data: Any  # the path of a file, a datasets.Dataset, or a list of Sources


class Row(NamedTuple):
    where: str  # file and line, for messages
    prompt: str | list[dict]
    answer: str | None
    columns: dict


def load_prompts(args, tokenizer, needs_answers: bool) -> tuple[list[Prompt], list[Prompt], str]:
    """Training prompts, evaluation prompts, and one line on where they come from and what was merged and dropped.

    Evaluation data: `--eval_dataset` and `--eval_split`; else the dataset's test split, then its validation split (for
    a local `train.*` the file `test.*` or `validation.*` beside it); else 5 % of the training prompts, at most 512,
    held out by `seed`. Training does not depend on `--eval_prompts`, so a resumed run may change it. A run that only
    evaluates reads training data only to hold some of it out.
    With `needs_answers` a row without an answer is an error. Bad input is an InputError that names file and row.
    """
    if args.prompt_template and "{prompt}" not in args.prompt_template:
        raise InputError(f"--prompt_template {args.prompt_template!r} does not contain {{prompt}}")
    source, eval_source = find_sources(args)
    train, note = read_prompts(source, args, tokenizer, needs_answers) if source else ([], UNREAD)
    if eval_source:
        evaluation, eval_note = read_prompts(eval_source, args, tokenizer, needs_answers)
    else:
        train, evaluation = hold_out(train, args.seed)
        eval_note = "held out of these"
    evaluation, eval_note = limit(evaluation, args.eval_prompts, args.seed, eval_note)
    trained = {prompt_key(p.prompt) for p in train}
    if seen := sum(prompt_key(p.prompt) in trained for p in evaluation):
        eval_note += f", {seen} also in training"
    return train, evaluation, f"training: {len(train)} prompts ({note}); evaluation: {len(evaluation)} ({eval_note})"


def load_eval_prompts(args, tokenizer, needs_answers: bool) -> tuple[list[Prompt], str]:
    """The prompts of `--eval_dataset` alone, for a script that trains on something else, and a line on them."""
    evaluation, note = read_prompts(find_eval_source(args, {}), args, tokenizer, needs_answers)
    evaluation, note = limit(evaluation, args.eval_prompts, args.seed, note)
    return evaluation, f"evaluation: {len(evaluation)} prompts ({note})"


def limit(rows: list, most: int, seed: int, note: str) -> tuple[list, str]:
    """`most` of the rows (0: all), chosen by `seed`, in their order."""
    if not 0 < most < len(rows):
        return rows, note
    chosen = np.random.default_rng(seed).permutation(len(rows))[:most]
    return [rows[i] for i in sorted(chosen)], f"{note}, chosen from {len(rows)}"


def find_sources(args) -> tuple[Source | None, Source | None]:
    """The training data, None where a run only evaluates and needs none of it, and the evaluation data, None where it
    is to be held out. dpo.py makes pairs of the training data at --max_steps 0 too, and a resumed run compares it."""
    alone = args.max_steps == 0 and not args.resume and not hasattr(args, "pair_prompts")
    splits = {} if alone and args.eval_dataset else find_splits(args.dataset, args.dataset_config, siblings=True)
    eval_source = find_eval_source(args, splits)
    if alone and eval_source:
        return None, eval_source
    return get_split(splits, args.dataset_split, args.dataset, "--dataset_split"), eval_source


def find_splits(name: str | list[str], config: str | None, siblings: bool) -> dict[str, Source]:
    """The splits of an embedded task, a local file or folder, or a hub id. A file is a split `train`; with `siblings`,
    those beside a file named `train.*` are further splits. Several files, or those that a pattern such as
    `data/*.jsonl` names, are one split `train`."""
    if not isinstance(name, list):
        path = EMBEDDED_FOLDERS.get(name) or Path(name).expanduser()
        if path.is_file():
            beside = split_files(path.parent) if siblings and path.name == f"train{file_type(path)}" else {}
            return beside | {"train": Source(str(path), path)}
        if path.is_dir():
            return split_files(path) or load_splits(str(path), config)
        if not glob.has_magic(name):
            if path.name.endswith(EXTENSIONS) or name.startswith(("/", "./", "../", "~")):
                raise InputError(f"{path}: no such file or folder")
            return load_splits(name, config)
    files = []
    for pattern in name if isinstance(name, list) else [name]:
        path = Path(pattern).expanduser()
        found = [path] if path.is_file() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        found = [Source(str(file), file) for file in found if file.is_file() and file_type(file)]
        if not found:
            raise InputError(f"{pattern}: no such file; several are given as files or as a pattern, not as hub ids")
        files += found
    return {"train": Source(f"{files[0].name} and {len(files) - 1} more" if files[1:] else files[0].name, files)}


def file_type(path: Path) -> str:
    """The ending of a file, such as .jsonl or .jsonl.gz; InputError for an unknown one."""
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if ending not in EXTENSIONS:
        raise InputError(f"{path}: unknown file type, known are {', '.join(EXTENSIONS)}")
    return ending


def split_files(folder: Path) -> dict[str, Source]:
    splits = {}
    for split in ("train", "test", "validation"):
        paths = [folder / (split + suffix) for suffix in EXTENSIONS]
        if path := next(filter(Path.is_file, paths), None):
            splits[split] = Source(str(path), path)
    return splits


def load_splits(name: str, config: str | None) -> dict[str, Source]:
    """The splits of a hub dataset, of a local copy of one, or of a folder that `save_to_disk` made."""
    import datasets  # imported here, because it takes seconds and bad input should be reported first

    saved = any(Path(name, marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config)
    except Exception as error:  # datasets raises nearly every type there is
        raise InputError(f"cannot load the dataset {name}: {describe(error)}") from None
    if isinstance(loaded, datasets.Dataset):
        loaded = {"train": loaded}
    return {split: Source(f"{name} [{split}]", dataset) for split, dataset in loaded.items()}


def describe(error: Exception) -> str:
    """A datasets error in one line; what went wrong is often in its cause only."""
    cause = error.__cause__ or error
    return " ".join(str(cause).split()) or type(cause).__name__


def get_split(splits: dict[str, Source], split: str, name: str, option: str) -> Source:
    if split not in splits:
        raise InputError(f"{name} has no split {split!r} but {', '.join(splits)}: choose with {option}")
    return splits[split]


def find_eval_source(args, splits: dict[str, Source]) -> Source | None:
    """The evaluation data that `load_prompts` describes; None where it is to be held out of the training data."""
    name, others = args.dataset, {split: splits[split] for split in splits if split != args.dataset_split}
    if args.eval_dataset:
        name = args.eval_dataset
        splits = others = find_splits(name, args.dataset_config if name == args.dataset else None, siblings=False)
    if args.eval_split:
        return get_split(splits, args.eval_split, name, "--eval_split")
    for split in ("test", "validation"):
        if split in others:
            return others[split]
    if not args.eval_dataset:
        return None
    if len(splits) > 1:
        raise InputError(f"{name} has the splits {', '.join(splits)}: choose with --eval_split")
    return next(iter(splits.values()))


def read_prompts(source: Source, args, tokenizer, needs_answers: bool) -> tuple[list[Prompt], str]:
    """The prompts of a source that fit `--max_prompt_tokens`, and a note on what was merged and dropped."""
    rows, merged = merge_rows(source, args, needs_answers)
    encoded = tokenize(rows, args, tokenizer, args.max_prompt_tokens)
    prompts = [
        Prompt(ids, row.prompt, row.answer, row.columns)
        for ids, row in zip(encoded, rows, strict=True)
        if len(ids) <= args.max_prompt_tokens
    ]
    if not prompts:
        raise InputError(
            f"{source.name}: all {len(rows)} prompts are longer than --max_prompt_tokens {args.max_prompt_tokens},"
            f" the shortest has at least {min(map(len, encoded))} tokens"
        )
    note = source.name
    if begun := sum(isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant" for row in rows):
        note += f", {begun} begin the assistant's answer"
    if merged:
        note += f", {merged} repeated rows merged"
    if len(prompts) < len(rows):
        note += f", {len(rows) - len(prompts)} longer than {args.max_prompt_tokens} tokens dropped"
    if unknown := sum(tokenizer.unk_token_id in prompt.ids for prompt in prompts):
        note += f", {unknown} with characters unknown to the tokenizer"
    return prompts, note


def merge_rows(source: Source, args, needs_answers: bool) -> tuple[list[Row], int]:
    """The first row of each prompt and answer, and the number of rows that only repeat one.

    This comes before tokenization: of the 1.8 million rows of DAPO-Math-17k one in a hundred is left. Of the column
    `messages` the last turn is cut off if it is the assistant's: it is the gold unless there is an answer column.
    """
    rows = read_rows(source, args.prompt_column, args.answer_column)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source.name}: no rows")
    prompt_column, answer_column = find_columns(source.name, list(first[1]), args, needs_answers)
    gold = cache(lambda text: extract_answer(text) or text)
    kept: dict[Any, Row] = {}
    repeated = 0
    for where, row in chain([first], rows):
        row = row | {
            name: join_parts(row[name], where) for name in ("chosen", "rejected", prompt_column) if name in row
        }
        raw = row.get(prompt_column) if prompt_column else shared_prompt(row.get("chosen"), row.get("rejected"))
        last = None
        if prompt_column == CONVERSATION:
            raw, last = split_answer(raw)
        prompt = check_prompt(raw, where)
        text = answer_text(row.get(answer_column) if answer_column else last, where)
        if needs_answers and text is None:
            place = repr(answer_column) if answer_column else f"the last turn of {CONVERSATION!r}"
            raise InputError(f"{where}: no answer (text or number) in {place}, and the reward needs one")
        answer = None if text is None else gold(text)
        key = prompt_key(prompt), answer, repr([row.get(name) for name in TEMPLATE_COLUMNS])
        if key in kept:
            repeated += 1
        else:
            kept[key] = Row(where, prompt, answer, {k: v for k, v in row.items() if k != prompt_column})
    return list(kept.values()), repeated


def read_rows(source: Source, *columns: str | None) -> Iterator[tuple[str, dict]]:
    """(where, row) of a source of any kind; in a CSV file the cells of these columns are text, like TEXT_COLUMNS."""
    if isinstance(source.data, list):
        return chain.from_iterable(read_rows(part, *columns) for part in source.data)
    if isinstance(source.data, Path) and ".json" in file_type(source.data):
        return read_json(source.data)
    return read_dataset(source, columns)


def read_json(path: Path) -> Iterator[tuple[str, dict]]:
    """(where, row) of JSON lines or of one JSON array.

    Not through datasets: it turns "2024-01-02" into a datetime and 1 beside 2.5 into 1.0, fails on a column that
    changes its type late in the file, and its errors name no line.
    """
    kind = file_type(path)
    try:
        with gzip.open(path) if kind.endswith(".gz") else open(path, "rb") as file:
            start = file.read(64).removeprefix(codecs.BOM_UTF8)  # a mark that json.loads passes over
            array = kind in (".json", ".json.gz") and start.lstrip().startswith(b"[")
            file.seek(0)
            for number, item in enumerate(parse_json(file.read(), str(path)) if array else file, 1):
                if not array and not item.strip():
                    continue
                where = f"{path}, {'row' if array else 'line'} {number}"
                row = item if array else parse_json(item, where)
                if not isinstance(row, dict):
                    raise InputError(f"{where}: not a JSON object but {type(row).__name__}")
                yield where, row
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text, parse_float=Written)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None


def read_dataset(source: Source, text_columns: Sequence[str | None]) -> Iterator[tuple[str, dict]]:
    """(where, row) of a parquet or CSV file or of a loaded dataset."""
    import datasets

    data = source.data
    if isinstance(data, Path):
        try:
            kind = file_type(data).split(".")[1]
            as_text = dict.fromkeys({*TEXT_COLUMNS, *text_columns} - {None}, TEXT.__add__)
            options = {"converters": as_text} if kind == "csv" else {}
            data = datasets.load_dataset(kind, data_files={"train": str(data)}, split="train", **options)
        except Exception as error:
            raise InputError(f"{source.name}: cannot be read: {describe(error)}") from None
    columns = data.column_names
    batches = (zip(*batch.values(), strict=True) for batch in data.iter(batch_size=1000))
    for number, values in enumerate(chain.from_iterable(batches), 1):
        values = [value.removeprefix(TEXT) if isinstance(value, str) else value for value in values]
        yield f"{source.name}, row {number}", dict(zip(columns, values, strict=True))


def find_columns(name: str, columns: list[str], args, needs_answers: bool) -> tuple[str | None, str | None]:
    """The prompt column (None: what `chosen` and `rejected` share) and the answer column (None: no answers)."""
    has_pairs = "chosen" in columns and "rejected" in columns
    found = []
    prompts = PROMPT_COLUMNS if has_pairs else (*PROMPT_COLUMNS, CONVERSATION)
    for kind, asked, known, optional in (
        ("prompt", args.prompt_column, prompts, has_pairs),
        ("answer", args.answer_column, ANSWER_COLUMNS, not needs_answers),
    ):
        wanted = (asked,) if asked else known
        optional = optional or found == [CONVERSATION]
        found.append(next((column for column in wanted if column in columns), None))
        if found[-1] is None and (asked or not optional):
            raise InputError(
                f"{name}: no {kind} column, looked for {', '.join(wanted)} and found {', '.join(columns)}:"
                f" name it with --{kind}_column"
            )
    return found[0], found[1]


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


def answer_text(value: Any, where: str) -> str | None:
    if isinstance(value, dict):  # verl's reward_model
        value = value.get("ground_truth")
    if isinstance(value, list) and len(value) == 1:  # as some of verl's data write it
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}: the answer {value} is not a finite number: write it as text, or null for no answer")
    return str(value).strip() or None if isinstance(value, str | int | float) else None


def hold_out(prompts: list, seed: int) -> tuple[list, list]:
    if len(prompts) < 2:
        raise InputError("a single prompt cannot be trained on and held out: give --eval_dataset")
    size = min(512, max(1, len(prompts) // 20))
    held = set(np.random.default_rng(seed).permutation(len(prompts))[:size].tolist())
    return [p for i, p in enumerate(prompts) if i not in held], [prompts[i] for i in sorted(held)]


def tokenize(rows: list[Row], args, tokenizer, most: int = 0) -> list[list[int]]:
    """Token ids of each row: through the chat template where the tokenizer has one, else of the plain text.

    With `most`, a row of more tokens may come back with only its first ones, still more than `most`.
    """
    chat, given = bool(tokenizer.chat_template), template_kwargs(args)
    if given and not chat:
        raise InputError("--chat_template_kwargs: the tokenizer has no chat template")
    conversations = [(build_messages(row.prompt, args), row) for row in rows]
    texts = [chat_text(*both, tokenizer, given) if chat else plain_text(*both) for both in conversations]
    if most:
        texts = [beginning(text, most, tokenizer) for text in texts]
    encoded = encode(texts, tokenizer, add_special_tokens=not chat)  # a template writes them itself
    if not chat:
        encoded = [trim_special(ids, tokenizer) for ids in encoded]
    for ids, row in zip(encoded, rows, strict=True):
        if not ids:
            raise InputError(f"{row.where}: the tokenizer makes no token of the prompt")
    return encoded


def encode(texts: list[str], tokenizer, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each text, a thousand texts at a time: in a call the tokenizer takes some 400 bytes a token."""
    encoded = []
    for start in range(0, len(texts), 1000):
        part = texts[start : start + 1000]
        encoded += tokenizer(part, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return encoded


def beginning(text: str, most: int, tokenizer) -> str:
    """`text`, or its first characters where they alone have more than 2 x `most` tokens: what follows may change the
    last tokens of them, and does not halve their number. A text of 5 MB takes 2 GB otherwise, only to be dropped."""
    start = text[: 16 * most]
    if len(start) < len(text) and len(encode([start], tokenizer, add_special_tokens=False)[0]) > 2 * most:
        return start
    return text


def build_messages(prompt: str | list[dict], args) -> list[dict]:
    """The conversation, with `--prompt_template` around its last user message and `--system_prompt` in front, in place
    of a system message of the data (templates accept one)."""
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
    """The conversation through the chat template, with the row's tools, and its own kwargs above the given ones."""
    begun = messages[-1]["role"] == "assistant"  # the data begins the answer, and the model goes on with it
    try:
        tools, own = (row.columns.get(name) for name in TEMPLATE_COLUMNS)
        tools, own = (json.loads(value) if isinstance(value, str) else value for value in (tools, own))
        tools, kwargs = without_none(tools or None), given | without_none(own or {})
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            tokenize=False,
            **kwargs,
        )
    except Exception as error:  # a template is a program and may raise anything
        raise InputError(f"{row.where}: the chat template refuses the prompt: {describe(error)}") from None


def plain_text(messages: list[dict], row: Row) -> str:
    """System and user text with a blank line between; only a template knows how the turns of a dialogue are marked."""
    if row.columns.get("tools"):
        raise InputError(f"{row.where}: tools need a chat template, and the tokenizer has none")
    if any(message["role"] not in ("system", "user") for message in messages):
        raise InputError(
            f"{row.where}: a dialogue of several turns, and the tokenizer has no chat template:"
            " take a model that has one, or write the dialogue as plain text"
        )
    return "\n\n".join(message["content"] for message in messages)


def trim_special(ids: list[int], tokenizer) -> list[int]:
    """Without the EOS that some tokenizers append (it would end the prompt) and without a BOS twice."""
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    return ids


def end_token(tokenizer) -> int | None:
    """The id that ends a completion: what the chat template puts behind an assistant's answer, else EOS."""
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
        raise InputError(f"the chat template refuses a question with its answer: {describe(error)}") from None
    _, answer, after = text.rpartition(PROBE)
    if not answer:  # a template that leaves the answer out says nothing about its end
        return None
    ids = tokenizer(after.lstrip(), add_special_tokens=False)["input_ids"]
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    return ids[0] if ids and ids[0] in added else None


def encode_text(texts: list[str], tokenizer) -> list[list[int]]:
    """Token ids of completions; a special token that is spelled in one is text and not that token.

    Such a token is cut behind its first character and the parts are tokenized apart. (`split_special_tokens=True` does
    not reach every tokenizer: a unigram model has special tokens among its ordinary pieces.)
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= {*tokenizer.all_special_tokens, tokenizer.convert_ids_to_tokens(end_token(tokenizer))}
    spelled, parts = re.compile("|".join(map(re.escape, special))), []
    for text in texts:
        cuts = [match.start() + 1 for match in spelled.finditer(text)]
        parts.append([text[start:end] for start, end in pairwise([0, *cuts, len(text)])])
    encoded = iter(encode(list(chain(*parts)), tokenizer, add_special_tokens=False))
    return [list(chain.from_iterable(islice(encoded, len(part)))) for part in parts]


class PromptSampler:
    """Endless permutations of the indices of `rows` (prompts or pairs), a new one each epoch, by `seed` alone.

    Every process draws the whole global batch and takes its own part of it, so the order and the state are the same for
    any number of processes. Its state holds a digest of the rows, because an index means nothing among other rows.
    """

    def __init__(self, rows: Sequence, seed: int):
        self.rows, self.n, self.seed, self.drawn = rows, len(rows), seed, 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the rows; of a value that JSON does not know, such as an image, only the type counts."""
        digest = hashlib.sha256()
        for row in self.rows:
            row = vars(row) if isinstance(row, Prompt) else row
            digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode() + b"\n")
        return digest.hexdigest()

    def draw(self, k: int) -> list[int]:
        """The next k indices, across the end of an epoch if need be."""
        indices: list[int] = []
        while len(indices) < k:
            epoch, start = divmod(self.drawn + len(indices), self.n)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.n)
            indices += order[start : start + k - len(indices)].tolist()
        self.drawn += k
        return indices

    def state_dict(self) -> dict:
        return {"n": self.n, "seed": self.seed, "digest": self.digest, "drawn": self.drawn}

    def load_state_dict(self, state: dict) -> None:
        """Raises InputError where the state belongs to other data or another seed: the order would be another."""
        for name, value in (("n", self.n), ("seed", self.seed)):
            if state[name] != value:
                raise InputError(f"the checkpoint's prompt order has {name} {state[name]}, this run {value}")
        if state["digest"] != self.digest:
            raise InputError(
                f"the checkpoint is of other data, with as many rows ({self.n}): an exact resume is impossible"
            )
        self.drawn = state["drawn"]
