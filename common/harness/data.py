"""Prompts from any common dataset format, and the sampler that draws them without end."""

import glob
import gzip
import hashlib
import json
import zlib
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.answers import extract_answer
from common.errors import InputError, one_line, refuse
from common.harness.prompts import TEMPLATE_COLUMNS, read_prompt, tokenize

EMBEDDED = Path(__file__).parents[1] / "tiny"
EMBEDDED_FOLDERS = {"embedded": EMBEDDED, "embedded-hard": EMBEDDED.with_name("tiny_hard")}
EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")  # TRL and verl, GSM8K, MATH, data for SFT
ANSWER_COLUMNS = ("answer", "reward_model", "reward_model.ground_truth", "ground_truth", "solution")
TEXT_COLUMNS = (*PROMPT_COLUMNS, *ANSWER_COLUMNS, "chosen", "rejected")  # text in a CSV file, whatever it looks like
TEXT_MARK = "\0"  # before the text of such a cell on its way through pandas, which reads `None` and `NA` as missing


class Source(NamedTuple):
    name: str  # in messages
    tables: list  # of files, or one datasets.Dataset


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # the token ids the model is given
    prompt: str | list[dict]  # what reward functions see: the row's own text or messages, no template or system prompt
    answer: str | None  # gold: `extract_answer` of the answer column, or its whole text when it has no marker
    columns: dict  # the row's other columns, for the user's reward functions; the raw answer column is among them
    thinks: bool = False  # whether it ends with `<think>`, as some templates do: the completion begins in the thought


def load_prompts(args, tokenizer, needs_answers, train=None):
    """Training prompts, evaluation prompts, and a line about them, by the rules of `load_rows`.

    With `needs_answers` a row without an answer is an error. Bad input is an InputError that names file and row.
    """
    return load_rows("prompts", read_prompts, args, tokenizer, train, args.eval_prompts, needs_answers)


def load_rows(what, read, args, tokenizer, train, most_eval, *options):
    """Training rows, evaluation rows, and a line on where they come from, what was merged and dropped.

    `read(source, args, tokenizer, *options)` returns [(key of the prompt, row)] and counts to be told. Without data for
    evaluation 5 % of the prompts, at most 512, are held out by `seed`. `most_eval` (0: all) does not change training.
    If `train` is false (None: in a run that only evaluates), training data is read only to hold some of it out.
    """
    if args.prompt_template and "{prompt}" not in args.prompt_template:
        refuse(args, "prompt_template", "does not contain {prompt}")
    source, eval_source = find_sources(args, args.max_steps != 0 or args.resume if train is None else train)

    def load(source):
        rows, counts = read(source, args, tokenizer, *options)
        return rows, ", ".join([source.name, *(f"{count} {what}" for what, count in counts.items() if count)])

    rows, note = load(source) if source else ([], "")
    if eval_source:
        evaluation, eval_note = load(eval_source)
    else:
        keys = list(dict.fromkeys(key for key, _ in rows))
        if len(keys) < 2:
            raise InputError("a single prompt cannot be trained on and held out: give --eval_dataset")
        held_out = set(choose(keys, min(512, max(1, len(keys) // 20)), args.seed))
        evaluation = [row for row in rows if row[0] in held_out]
        eval_note = "held out of these by prompt" + (", very few: give --eval_dataset" if len(held_out) < 16 else "")
        rows = [row for row in rows if row[0] not in held_out]
    if 0 < most_eval < len(evaluation):
        eval_note += f", chosen from {len(evaluation)}"
        evaluation = choose(evaluation, most_eval, args.seed)
    trained = {key for key, _ in rows}
    if seen := sum(key in trained for key, _ in evaluation):
        eval_note += f", {seen} also in training"
    summary = f"training: {len(rows)} {what} ({note}); " if source else ""
    summary += f"evaluation: {len(evaluation)} {what} ({eval_note})"
    return [row for _, row in rows], [row for _, row in evaluation], summary


def choose(rows, number, seed):
    return [rows[i] for i in sorted(np.random.default_rng(seed).permutation(len(rows))[:number])]


def find_sources(args, train=True):
    """(training data, evaluation data): None where the first is not needed, or the second is to be held out of it.

    Evaluation data: `--eval_dataset` and `--eval_split`; else the dataset's test split, then its validation split.
    """
    splits = find_splits(args.dataset, args.dataset_config, siblings=True) if train or not args.eval_dataset else {}
    name, choices = args.dataset, {key: splits[key] for key in splits if key != args.dataset_split or args.eval_split}
    if args.eval_dataset:
        name = args.eval_dataset
        choices = find_splits(name, args.dataset_config if name == args.dataset else None)
    single = choices if args.eval_dataset and len(choices) == 1 else ("test", "validation")
    wanted = [args.eval_split] if args.eval_split else single
    evaluation = next((choices[split] for split in wanted if split in choices), None)
    if not evaluation and (args.eval_dataset or args.eval_split):
        refuse(args, "eval_split", f"{name} has the splits {', '.join(choices)}")
    if evaluation and not train:
        return None, evaluation
    if args.dataset_split not in splits:
        refuse(args, "dataset_split", f"{args.dataset} has the splits {', '.join(splits)}")
    return splits[args.dataset_split], evaluation


def find_splits(name, config, siblings=False):
    """{split: Source} of an embedded task, a folder, a hub id, or files: one, several or a pattern are a split `train`.
    With `siblings`, a file `train.*` brings `test.*` and `validation.*` beside it."""
    names = name if isinstance(name, list) else [name]
    paths = [Path(EMBEDDED_FOLDERS.get(name, name)).expanduser() for name in names]
    found = [[file for file in map(Path, sorted(glob.glob(str(path)))) if file.is_file()] for path in paths]
    files, folder, splits = list(chain(*found)), paths[0] if paths[0].is_dir() and not paths[1:] else None, {}
    if siblings and files and files[0].name.removeprefix("train") in EXTENSIONS:
        folder = files[0].parent
    for split in ("train", "test", "validation") if folder else ():
        if beside := [path for path in (folder / (split + end) for end in EXTENSIONS) if path.is_file()]:
            splits[split] = Source(str(beside[0]), beside[:1])
    if all(found):
        splits["train"] = Source(str(files[0]) + (f" and {len(files) - 1} more" if files[1:] else ""), files)
    elif not folder:
        missing = names[found.index([])]
        if names[1:] or missing.endswith(EXTENSIONS) or missing.startswith(("/", ".", "~")) or glob.has_magic(missing):
            raise InputError(f"{missing}: no such file{'' if names[1:] else ' or folder'}")
    return splits or load_splits(str(paths[0]), str(paths[0]), config)


def load_splits(name, *arguments, **options):
    """{split: Source} of what `datasets` loads: a hub id, a local copy of one, a folder of `save_to_disk`, a file."""
    import datasets  # imported here, because it takes a second and bad input should be reported first

    saved = any(Path(name, marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(*arguments, **options)
    except Exception as error:  # of nearly any type, and often only its cause says what is wrong
        raise InputError(f"{name}: cannot be read: {one_line(error.__cause__ or error)}") from None
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    return {split: Source(f"{name} [{split}]", [dataset]) for split, dataset in splits.items()}


def read_rows(source, *text_columns):
    """Yield (where, row) of every row. In a CSV file the cells of TEXT_COLUMNS and of `text_columns` are text."""
    as_text = dict.fromkeys({*TEXT_COLUMNS, *text_columns} - {None}, TEXT_MARK.__add__)
    for table in source.tables:
        name = str(table) if isinstance(table, Path) else source.name
        if isinstance(table, Path) and not name.endswith(EXTENSIONS):
            raise InputError(f"{name}: unknown file type, known are {', '.join(EXTENSIONS)}")
        if name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")):
            yield from read_json(table)
            continue
        if isinstance(table, Path):
            kind, options = ("csv", {"converters": as_text}) if ".csv" in name[-7:] else ("parquet", {})
            (table,) = load_splits(name, kind, data_files=name, **options)["train"].tables
            if kind == "csv" and "__index_level_0__" in table.column_names:  # pandas took a field for an index
                raise InputError(f"{name}, line 2: more fields than the header: quote a text that has commas")
        batches = (zip(*batch.values(), strict=True) for batch in table.iter(batch_size=1000))  # not row by row: slow
        for number, values in enumerate(chain.from_iterable(batches), 1):
            values = [value.removeprefix(TEXT_MARK) if isinstance(value, str) else value for value in values]
            yield f"{name}, row {number}", dict(zip(table.column_names, values, strict=True))


class JsonFloat(float):
    """A float whose `str` is the text of the JSON file, from which no digit is lost."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def read_json(path):
    """Yield (where, row) of JSON lines or one JSON array. Not through datasets: it turns "2024-01-02" into a datetime,
    1 beside 2.5 into 1.0, and fails on a column whose type changes late in the file."""
    where = path
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            array = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            file.seek(0)
            lines = enumerate(json.loads(file.read(), parse_float=JsonFloat) if array else file, 1)
            for number, row in lines:
                where = f"{path}, {'row' if array else 'line'} {number}"
                if array or row.strip():
                    row = row if array else json.loads(row, parse_float=JsonFloat)
                    if not isinstance(row, dict):
                        raise TypeError(f"not an object but {type(row).__name__}")
                    yield where, row
    except (OSError, EOFError, zlib.error, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{where}: cannot be read as JSON: {error}") from None


def find_column(kind, asked, known, row, source, needed=True):
    """The column that was asked for, else the first known one of a source with such rows; None if it has none."""
    wanted = [asked] if asked else known
    column = next((column for column in wanted if column in row), None)
    if column is None and (asked or needed):
        looked = f"looked for {', '.join(wanted)} and found {', '.join(row)}"
        if "conversations" in row:
            looked += " (convert ShareGPT's to a column messages of role and content)"
        raise InputError(f"{source.name}: no {kind} column, {looked}: name it with --{kind}_column")
    return column


def read_prompts(source, args, tokenizer, needs_answers):
    """[(key, Prompt)] of the prompts that fit `--max_prompt_tokens`, and {what was merged or dropped: how many}.

    Rows with the same prompt and answer merge before tokenization: one in a hundred of DAPO-Math-17k's is left.
    """
    gold = cache(lambda text: extract_answer(text) or text)
    rows, counts, most, prompts = {}, Counter(), args.max_prompt_tokens, []
    for where, row in read_rows(source, args.prompt_column, args.answer_column):
        if not rows:
            pairs = {"chosen", "rejected"} <= row.keys()
            column = find_column("prompt", args.prompt_column, PROMPT_COLUMNS, row, source, needed=not pairs)
            needed = needs_answers and column != "messages"
            answer_column = find_column("answer", args.answer_column, ANSWER_COLUMNS, row, source, needed)
        prompt, last = read_prompt(row, column, where)
        text = gold_text(row.get(answer_column) if answer_column else last, where)
        if needs_answers and text is None:
            place = repr(answer_column) if answer_column else "the last turn"
            raise InputError(f"{where}: no answer (text or number) in {place}, and the reward needs one")
        answer = text and gold(text)
        row.pop(column, None)
        key = repr(prompt), answer, repr([row.get(name) for name in TEMPLATE_COLUMNS])
        _, _, first, _ = rows.setdefault(key, (where, prompt, row, answer))
        counts["repeated rows merged"] += first is not row
        counts["of them with other values in other columns"] += first != row
    encoded = tokenize([row[:3] for row in rows.values()], args, tokenizer)
    for (_, prompt, columns, answer), ids in zip(rows.values(), encoded, strict=True):
        counts["begin the assistant's answer"] += isinstance(prompt, list) and prompt[-1]["role"] == "assistant"
        counts[f"longer than {most} tokens dropped"] += len(ids) > most
        if len(ids) <= most:
            counts["with characters unknown to the tokenizer"] += tokenizer.unk_token_id in ids
            thinks = tokenizer.decode(ids[-8:]).rstrip().endswith("<think>")
            prompts.append((repr(prompt), Prompt(ids, prompt, answer, columns, thinks)))
    if not prompts:
        shortest = f"all {len(rows)} prompts are longer, the shortest has {min(map(len, encoded), default=0)} tokens"
        raise InputError(f"{source.name}: " + (f"--max_prompt_tokens {most}: {shortest}" if rows else "no rows"))
    return prompts, counts


def gold_text(value, where):
    """The value of an answer column as text; None if it holds no answer."""
    value = value.get("ground_truth") if isinstance(value, dict) else value  # verl's reward_model
    value = value[0] if isinstance(value, list) and len(value) == 1 else value  # so in some of verl's data
    if isinstance(value, float) and not np.isfinite(value):
        raise InputError(f"{where}: the answer {value} is not a finite number: write it as text, or null for no answer")
    return str(value).strip() or None if isinstance(value, str | int | float) else None


class PromptSampler:
    """Draws indices of `rows` (prompts or pairs) from permutations, a new one each epoch, that depend on `seed` alone.
    The state holds a digest of the rows, because an index means nothing among other rows."""

    def __init__(self, rows, seed):
        self.rows, self.n, self.seed, self.drawn = rows, len(rows), seed, 0

    @cached_property
    def digest(self):
        """SHA-256 of the rows. Of a value that JSON cannot hold, such as an image, only the type counts."""
        digest = hashlib.sha256()
        for row in self.rows:
            if isinstance(row, Prompt):
                row = {name: value for name, value in vars(row).items() if name != "thinks"}  # its ids say that
            digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode() + b"\n")
        return digest.hexdigest()

    def draw(self, k):
        """The next k indices, across the end of an epoch if need be."""
        indices = []
        while len(indices) < k:
            epoch, start = divmod(self.drawn + len(indices), self.n)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.n)
            indices += order[start : start + k - len(indices)].tolist()
        self.drawn += k
        return indices

    def state_dict(self):
        return {"n": self.n, "seed": self.seed, "digest": self.digest, "drawn": self.drawn}

    def load_state_dict(self, state):
        """Raises InputError if the state is of other data or another seed: the order would be another."""
        if state != self.state_dict() | {"drawn": state["drawn"]}:
            told = f"{state['n']} rows, --seed {state['seed']}; this run has {self.n}, --seed {self.seed}"
            raise InputError(f"the checkpoint is of other data or another order of it: {told}")
        self.drawn = state["drawn"]
