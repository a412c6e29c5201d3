"""Prompts from any common dataset format, and the sampler that draws them without end.

A source, where data comes from, is a pair: a name to tell, and its tables (files or datasets).
"""

import csv
import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.answers import extract_answer
from common.errors import InputError, count, one_line, refuse
from common.harness.embedded import EMBEDDED_FOLDERS
from common.harness.prompts import (
    PLAIN,
    TEMPLATE_COLUMNS,
    begins_answer,
    count_plain,
    read_prompt,
    read_text,
    tokenize,
)

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
COLUMNS = {  # by which a prompt or an answer is recognized
    "prompt": ["prompt", "question", "problem", "messages"],  # TRL and verl, GSM8K, MATH, SFT
    "answer": ["answer", "reward_model", "reward_model.ground_truth", "ground_truth", "solution"],
}


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # what the model is given
    prompt: str | list[dict]  # as it stands in the row, for reward functions
    answer: str | None  # the gold: what `extract_answer` finds in its column, else all its text
    columns: dict  # the row's other columns, the answer column among them
    thinks: bool = False  # whether it ends with `<think>`, so that the model begins in a thought


# --- rows to train and to evaluate on ---


def load_prompts(args, tokenizer, needs_answers, train=None):
    """Training prompts, evaluation prompts, and a line about them: `load_rows`."""
    most_eval = args.eval_prompts
    return load_rows("prompt", read_prompts, args, tokenizer, train, most_eval, needs_answers)


def load_rows(what, read, args, tokenizer, train, most_eval, *options):
    """Training rows, evaluation rows, and a line on where they come from; `what` they are: "pair".

    `read(source, args, tokenizer, *options)` returns [(key, row)], in which rows of one prompt have
    one key, and {what to tell: how many}. There are at most `most_eval` evaluation rows (0: all).
    Without evaluation data some prompts are held out of the training data. `train` says whether the
    run trains (None: what `args` say); if not, training data is read only to hold some of it out.
    """
    if args.prompt_template and "{prompt}" not in args.prompt_template:
        refuse(args, "prompt_template", "does not contain {prompt}")
    if train is None:
        train = args.max_steps != 0 or args.resume
    train_source, eval_source = find_sources(args, train)

    def load(source):
        rows, counts = read(source, args, tokenizer, *options)
        told = [f"{count} {kind}" for kind, count in counts.items() if count]
        return rows, ", ".join([source[0], *told])

    train_rows = []
    train_note = ""
    if train_source:
        train_rows, train_note = load(train_source)
    if eval_source:
        eval_rows, eval_note = load(eval_source)
    else:
        train_rows, eval_rows, eval_note = hold_out(train_rows, args.seed)
    if 0 < most_eval < len(eval_rows):
        eval_note += f", chosen from {len(eval_rows)}"
        eval_rows = choose(eval_rows, most_eval, args.seed)
    train_keys = {key for key, _ in train_rows}
    also_in_training = sum(key in train_keys for key, _ in eval_rows)
    if also_in_training:
        eval_note += f", {also_in_training} also in training"
    summary = f"evaluation: {count(len(eval_rows), what)} ({eval_note})"
    if train_source:
        summary = f"training: {count(len(train_rows), what)} ({train_note}); {summary}"
    return [row for _, row in train_rows], [row for _, row in eval_rows], summary


def hold_out(rows, seed):
    """Split rows for training and evaluation, and tell of it.

    The evaluation gets all rows of 5 % of the prompts, but of 512 at most; `seed` chooses them.
    """
    keys = list(dict.fromkeys(key for key, _ in rows))
    if len(keys) < 2:
        raise InputError("no prompt is left to be held out: give --eval_dataset")
    number = min(512, max(1, len(keys) // 20))
    held_out = set(choose(keys, number, seed))
    note = "held out of these by prompt"
    if number < 16:
        note += ", very few: give --eval_dataset"
    train_rows = [row for row in rows if row[0] not in held_out]
    eval_rows = [row for row in rows if row[0] in held_out]
    return train_rows, eval_rows, note


def choose(rows, number, seed):
    """So many of the rows, drawn by `seed`, in the order in which they stand."""
    permutation = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in sorted(permutation[:number])]


# --- where data is ---


def find_sources(args, train=True):
    """(source of training data, source of evaluation data).

    The first is None if it is not needed, the second if rows of the first are to be held out.
    """
    splits = {}
    if train or not args.eval_dataset:
        splits = find_splits(args.dataset, args.dataset_config, siblings=True)
    evaluation = find_evaluation(args, splits)
    if evaluation and not train:
        return None, evaluation
    if args.dataset_split not in splits:
        refuse(args, "dataset_split", f"{args.dataset} has the splits {', '.join(splits)}")
    return splits[args.dataset_split], evaluation


def find_evaluation(args, splits):
    """The source to evaluate on, of --eval_dataset or of these splits of --dataset, or None."""
    name = args.dataset
    choices = splits
    wanted = ["test", "validation"]
    if args.eval_dataset:
        name = args.eval_dataset
        choices = find_splits(name, args.dataset_config if name == args.dataset else None)
        wanted.append("train")
    elif not args.eval_split:  # what is trained on is evaluated on only if somebody asks for it
        choices = {split: splits[split] for split in splits if split != args.dataset_split}
    if args.eval_split:
        wanted = [args.eval_split]
    for split in wanted:
        if split in choices:
            return choices[split]
    if args.eval_dataset or args.eval_split:
        refuse(args, "eval_split", f"{name} has the splits {', '.join(choices)}")
    return None


def find_splits(name, config, siblings=False):
    """{split: source} of files, a folder, or what `datasets` loads.

    With `siblings` the files test.* and validation.* beside a file train.* are splits too:

        "train.jsonl" -> {"train": ("train.jsonl", [Path("train.jsonl")]), "test": ...}
    """
    names = name if isinstance(name, list) else [name]
    paths = [Path(EMBEDDED_FOLDERS.get(name, name)).expanduser() for name in names]
    first = paths[0]
    is_train_file = first.name.removeprefix("train") in EXTENSIONS
    splits = files_of_splits(first.parent if siblings and is_train_file else first)
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        told = f"{first} and {len(paths) - 1} more" if len(paths) > 1 else str(first)
        splits["train"] = told, paths
        return splits
    means_file = first.name.endswith(EXTENSIONS) or first.is_absolute()
    if len(paths) > 1 or (means_file and not first.is_dir()):
        raise InputError(f"{missing[0]}: no such file or folder")
    return splits or load_splits(first, config)


def files_of_splits(folder):
    """{split: source} of the files train.*, test.* and validation.* of a folder."""
    splits = {}
    for split in ("train", "test", "validation"):
        paths = [folder / (split + extension) for extension in EXTENSIONS]
        path = next(filter(Path.is_file, paths), None)
        if path:
            splits[split] = str(path), [path]
    return splits


def load_splits(path, config):
    """{split: source} of what `datasets` loads from a folder or from the hub."""
    import datasets  # which takes a second

    try:
        saved_files = [path / "dataset_dict.json", path / "state.json"]
        if any(file.is_file() for file in saved_files):
            loaded = datasets.load_from_disk(path)
        else:
            loaded = datasets.load_dataset(str(path), config)
    except Exception as error:  # often only its cause says what is wrong
        problem = one_line(error.__cause__ or error)
        raise InputError(f"{path}: cannot be read: {problem}") from None
    if not isinstance(loaded, dict):
        loaded = {"train": loaded}
    return {split: (f"{path} [{split}]", [dataset]) for split, dataset in loaded.items()}


# --- rows of files and datasets ---


def read_rows(source):
    """Yield (where, row) of every row of a source: ("data.jsonl, line 3", {"prompt": "1+1?"})."""
    name, tables = source
    is_empty = True
    for table in tables:
        place = table if isinstance(table, Path) else name
        unit = "line" if ".jsonl" in str(table) else "row"
        number = 0
        try:
            for number, row in enumerate(raw_rows(table), 1):
                if row is not None:
                    is_empty = False
                    yield f"{place}, {unit} {number}", row
        except Exception as error:  # of the disk, the compression, the format
            where = f"{place}, {unit} {number + 1}"
            raise InputError(f"{where}: cannot be read: {one_line(error)}") from None
    if is_empty:
        raise InputError(f"{name}: has no rows")


def raw_rows(table):
    """The rows of a file, None for a blank line, or of a `datasets.Dataset`.

    `datasets` reads no files: it would make a datetime of "2024-01-02", and 1.0 of 1 beside 2.5.
    """
    if not isinstance(table, Path):
        batches = table.with_format("arrow").iter(1000)
    elif table.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        batches = ParquetFile(table).iter_batches()
    else:
        yield from text_rows(table)
        return
    for batch in batches:
        yield from batch.to_pylist()


def text_rows(path):
    """The rows of a file of JSON or CSV, whose cells are all text."""
    if not path.name.endswith(EXTENSIONS):
        raise ValueError(f"unknown file type, known are {', '.join(EXTENSIONS)}")
    open_text = gzip.open if path.suffix == ".gz" else open
    # A byte that is not UTF-8 becomes half a surrogate, which `read_text` refuses with its row.
    options = dict(encoding="utf-8-sig", errors="surrogateescape", newline="")
    with open_text(path, "rt", **options) as file:
        rows = csv_rows(file) if ".csv" in path.suffixes else json_rows(file)
        for row in rows:
            # A CSV reader puts the fields beyond the header under the key None.
            if row is not None and (not isinstance(row, dict) or None in row):
                raise ValueError("not an object, or in CSV more fields than the header")
            yield row


def csv_rows(file):
    """The rows of a CSV file, whose columns must be separated by commas."""
    rows = csv.DictReader(file, strict=True)
    header = rows.fieldnames or []
    for separator in (";", "\t", "|"):
        if len(header) == 1 and separator in header[0]:
            raise ValueError(f"its columns are separated by {separator!r}: separate them by commas")
    return rows


def json_rows(file):
    """The values of a file that is an array, or has a value on each line; None for a blank line."""
    is_array = file.read(64).lstrip().startswith("[")
    file.seek(0)
    if is_array:
        yield from json.load(file, parse_float=JsonFloat)
        return
    for line in file:
        try:
            yield json.loads(line, parse_float=JsonFloat) if line.strip() else None
        except json.JSONDecodeError as error:  # its own text calls this line 1
            raise ValueError(f"{error.msg}: column {error.colno}") from None


class JsonFloat(float):
    """A float whose `str` is the text of the JSON file, from which no digit is lost."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def find_column(kind, args, row, source, needed=True):
    """The column of a row that has the `kind`, prompt or answer, or None.

    It is the one that an option names, or else the first of `COLUMNS` that is there.
    """
    asked = getattr(args, f"{kind}_column")
    wanted = [asked] if asked else COLUMNS[kind]
    for column in wanted:
        if column in row:
            return column
    if not asked and not needed:
        return None
    if asked:
        raise InputError(f"{source[0]}: --{kind}_column {asked}: the columns are {[*row]}")
    problem = f"no {kind} column of {wanted} in {[*row]}"
    if "conversations" in row:
        problem += " (convert ShareGPT's to messages of role and content)"
    raise InputError(f"{source[0]}: {problem}: name it with --{kind}_column")


# --- prompts ---


class Row(NamedTuple):
    """A row of the data, in which prompt and answer were found."""

    where: str  # its file and line, for errors
    prompt: str | list[dict]
    columns: dict  # the others
    answer: str | None


def read_prompts(source, args, tokenizer, needs_answers):
    """[(key, Prompt)] of the prompts that are not too long, and {what to tell: how many}."""
    rows, merged, differing = merge_repeated(find_prompts(source, args, needs_answers))
    encoded = tokenize([(row.where, row.prompt, row.columns) for row in rows], args, tokenizer)
    prompts = []
    for row, ids in zip(rows, encoded, strict=True):
        if len(ids) <= args.max_prompt_tokens:
            thinks = tokenizer.decode(ids[-8:]).rstrip().endswith("<think>")
            prompt = Prompt(ids, row.prompt, row.answer, row.columns, thinks)
            prompts.append((repr(row.prompt), prompt))
    if not prompts:
        limit = f"--max_prompt_tokens {args.max_prompt_tokens}"
        raise InputError(f"{source[0]}: none of its {count(len(rows), 'prompt')} fits {limit}")
    unknown = tokenizer.unk_token_id
    return prompts, {
        "repeated rows merged": merged,
        "of them with other values in other columns": differing,
        PLAIN: count_plain([row.prompt for row in rows], tokenizer),
        "begin the assistant's answer": sum(begins_answer(row.prompt) for row in rows),
        f"longer than {args.max_prompt_tokens} tokens dropped": len(rows) - len(prompts),
        "with characters unknown to the tokenizer": sum(unknown in row.ids for _, row in prompts),
    }


def find_prompts(source, args, needs_answers):
    """Yield each row of a source as a `Row`. The columns of the first row are those of all rows."""
    find_answer = cache(extract_answer)  # data may repeat a row a hundred times
    found_columns = None
    for where, columns in read_rows(source):
        if found_columns is None:
            found_columns = find_columns(columns, source, args, needs_answers)
        prompt_column, answer_column = found_columns
        prompt, last_turn = read_prompt(columns, prompt_column, where)
        text = gold_text(columns.get(answer_column) if answer_column else last_turn)
        read_text(text, "the answer", where)  # no completion could match bytes that are not UTF-8
        answer = find_answer(text) or text or None
        if needs_answers and answer is None:
            place = answer_column or "the last turn"
            raise InputError(f"{where}: no answer (text or number) in {place}")
        columns.pop(prompt_column, None)
        yield Row(where, prompt, columns, answer)


def find_columns(row, source, args, needs_answers):
    """(column of the prompts, column of the answers); None for what a row can do without.

    Two completions may share their prompt, and a dialogue of `messages` may end with the answer.
    """
    has_pair = {"chosen", "rejected"} <= row.keys()
    prompt_column = find_column("prompt", args, row, source, needed=not has_pair)
    needs_column = needs_answers and prompt_column != "messages"
    answer_column = find_column("answer", args, row, source, needed=needs_column)
    return prompt_column, answer_column


def gold_text(value):
    """The text of a gold answer, "" if it is neither a text nor a finite number.

    verl has {"ground_truth": "4"} or {"ground_truth": ["4"]} in the place of "4".
    """
    if isinstance(value, dict):
        value = value.get("ground_truth")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and not np.isfinite(value):
        return ""
    return str(value).strip() if isinstance(value, str | int | float) else ""


def merge_repeated(rows):
    """One row for all that have its prompt and answer: of a hundred of DAPO-Math-17k one is left.

    Returns the rows, how many were merged into them, and how many of those differ in other columns.
    """
    first_rows = {}
    merged = 0
    differing = 0
    for row in rows:
        for_template = [row.columns.get(name) for name in TEMPLATE_COLUMNS]
        key = repr(row.prompt), row.answer, repr(for_template)
        if key not in first_rows:
            first_rows[key] = row
            continue
        merged += 1
        if row.columns != first_rows[key].columns:
            differing += 1
    return list(first_rows.values()), merged, differing


# --- what a checkpoint knows of the data, and the order in which rows are drawn ---


class DataDigest:
    """Keeps a digest of the rows of a run in its checkpoints, whatever sampler draws them."""

    def __init__(self, rows):
        self.rows = rows

    @cached_property
    def digest(self):
        """SHA-256 of the rows. Of what JSON cannot hold, as an image, only the type counts."""
        digest = hashlib.sha256()
        for row in self.rows:
            values = vars(row) if isinstance(row, Prompt) else row
            text = json.dumps(values, default=lambda value: type(value).__name__)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()

    def state_dict(self):
        return {"digest": self.digest}

    def load_state_dict(self, state):
        """Refuse other rows: among them an index means nothing."""
        if state["digest"] != self.digest:
            rows = count(len(self.rows), "row")
            raise InputError(f"the checkpoint is of other data than this run's {rows}")


class PromptSampler:
    """Draws indices of `rows` (prompts or pairs); each epoch has a permutation, by `seed` alone."""

    def __init__(self, rows, seed):
        self.rows = rows
        self.seed = seed
        self.drawn = 0  # how many indices were drawn

    def draw(self, k):
        """The next k indices, across the end of an epoch if need be."""
        indices = []
        while len(indices) < k:
            epoch, start = divmod(self.drawn + len(indices), len(self.rows))
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
            indices += order[start : start + k - len(indices)].tolist()
        self.drawn += k
        return indices

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]
