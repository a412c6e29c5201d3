"""Prompts from any common dataset format, and the sampler that draws them without end."""

import csv
import gzip
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path

import numpy as np

from common.answers import extract_answer
from common.errors import InputError, one_line, refuse
from common.harness.embedded import EMBEDDED_FOLDERS
from common.harness.prompts import TEMPLATE_COLUMNS, read_prompt, tokenize

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")  # TRL and verl, GSM8K, MATH, SFT
ANSWER_COLUMNS = ("answer", "reward_model", "reward_model.ground_truth", "ground_truth", "solution")


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # what the model is given
    prompt: str | list[dict]  # as it stands in the row, for reward functions
    answer: str | None  # gold: what `extract_answer` finds in the answer column, else its whole text
    columns: dict  # the row's other columns, the answer column among them
    thinks: bool = False  # it ends with `<think>`, in a thought


def load_prompts(args, tokenizer, needs_answers, train=None):
    """Training prompts, evaluation prompts, and a line about them (`load_rows`). Errors name file and row."""
    return load_rows("prompts", read_prompts, args, tokenizer, train, args.eval_prompts, needs_answers)


def load_rows(what, read, args, tokenizer, train, most_eval, *options):
    """Training rows, evaluation rows (at most `most_eval`; 0: all), and a line on where they come from. `read(source,
    args, tokenizer, *options)` returns [(key of the prompt, row)] and {what to tell: how many}. Without evaluation data
    5 % of the prompts, at most 512, are held out by `seed`; `train` False reads training data for this alone."""
    if args.prompt_template and "{prompt}" not in args.prompt_template:
        refuse(args, "prompt_template", "does not contain {prompt}")
    source, eval_source = find_sources(args, args.max_steps != 0 or args.resume if train is None else train)

    def load(source):
        rows, counts = read(source, args, tokenizer, *options)
        return rows, ", ".join([source[0], *(f"{count} {what}" for what, count in counts.items() if count)])

    rows, note = load(source) if source else ([], "")
    if eval_source:
        evaluation, eval_note = load(eval_source)
    else:
        keys = list(dict.fromkeys(key for key, _ in rows))
        if len(keys) < 2:
            raise InputError("no prompt is left to be held out: give --eval_dataset")
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
    """(training data, evaluation data): None where the first is not needed, or the second is to be held out of it."""
    name, config, wanted = args.dataset, args.dataset_config, ["test", "validation"]
    splits = find_splits(name, config, siblings=True) if train or not args.eval_dataset else {}
    choices = {split: splits[split] for split in splits if split != args.dataset_split or args.eval_split}
    if args.eval_dataset:
        name, wanted = args.eval_dataset, [*wanted, "train"]
        choices = find_splits(name, config if name == args.dataset else None)
    wanted = [args.eval_split] if args.eval_split else wanted
    evaluation = next((choices[split] for split in wanted if split in choices), None)
    if not evaluation and (args.eval_dataset or args.eval_split):
        refuse(args, "eval_split", f"{name} has the splits {', '.join(choices)}")
    if evaluation and not train:
        return None, evaluation
    if args.dataset_split not in splits:
        refuse(args, "dataset_split", f"{args.dataset} has the splits {', '.join(splits)}")
    return splits[args.dataset_split], evaluation


def find_splits(name, config, siblings=False):
    """{split: (name, tables)} of files or what `datasets` loads; `siblings`: with `train.*` test and validation too."""
    paths = [Path(EMBEDDED_FOLDERS.get(x, x)).expanduser() for x in (name if isinstance(name, list) else [name])]
    first, splits = paths[0], {}
    folder = first.parent if siblings and first.name.removeprefix("train") in EXTENSIONS else first
    beside = [folder / (split + end) for split in ("train", "test", "validation") for end in EXTENSIONS]
    for path in filter(Path.is_file, beside):
        splits.setdefault(path.name.partition(".")[0], (str(path), [path]))
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        splits["train"] = f"{first} and {len(paths) - 1} more" if paths[1:] else str(first), paths
    elif paths[1:] or (not first.is_dir() and (first.name.endswith(EXTENSIONS) or first.is_absolute())):
        raise InputError(f"{missing[0]}: no such file or folder")
    if splits:
        return splits
    import datasets  # which takes a second

    try:
        saved = (first / "dataset_dict.json").is_file() or (first / "state.json").is_file()  # by save_to_disk
        loaded = datasets.load_from_disk(first) if saved else datasets.load_dataset(str(first), config)
    except Exception as error:  # often only its cause says what is wrong
        raise InputError(f"{first}: cannot be read: {one_line(error.__cause__ or error)}") from None
    loaded = loaded if isinstance(loaded, dict) else {"train": loaded}
    return {split: (f"{first} [{split}]", [dataset]) for split, dataset in loaded.items()}


def read_rows(source):
    """Yield (where, row) of every row of a source that `find_splits` found."""
    name, tables = source
    for table in tables:
        name, number = table if isinstance(table, Path) else name, 0
        unit = "line" if ".jsonl" in str(table) else "row"
        try:
            for number, row in enumerate(raw_rows(table), 1):
                if row is not None:
                    yield f"{name}, {unit} {number}", row
        except Exception as error:  # of the disk, the compression, the format
            raise InputError(f"{name}, {unit} {number + 1}: cannot be read: {one_line(error)}") from None


def raw_rows(data):
    """The rows of a file, None for a blank line, or of a `datasets.Dataset`. Files are not read by `datasets`, which
    makes a datetime of "2024-01-02" and 1.0 of 1 beside 2.5. All cells of a CSV file are text."""
    if not isinstance(data, Path) or data.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        batches = ParquetFile(data).iter_batches() if isinstance(data, Path) else data.with_format("arrow").iter(1000)
        yield from chain.from_iterable(batch.to_pylist() for batch in batches)
        return
    if not data.name.endswith(EXTENSIONS):
        raise ValueError(f"unknown file type, known are {', '.join(EXTENSIONS)}")
    options = dict(encoding="utf-8-sig", errors="surrogateescape", newline="")  # `read_text` refuses those
    with (gzip.open if data.suffix == ".gz" else open)(data, "rt", **options) as file:
        array = file.read(64).lstrip().startswith("[")
        file.seek(0)
        if ".csv" in data.suffixes:
            rows = csv.DictReader(file, strict=True)
        elif array:
            rows = json.load(file, parse_float=JsonFloat)
        else:
            rows = (json.loads(line, parse_float=JsonFloat) if line.strip() else None for line in file)
        for row in rows:
            if row is not None and (not isinstance(row, dict) or None in row):
                raise ValueError("not an object, or in CSV more fields than the header")
            yield row


class JsonFloat(float):
    """A float whose `str` is the text of the JSON file, from which no digit is lost."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def find_column(kind, asked, known, row, source, needed=True):
    """The column that was asked for, else the first known one in the row; None if it has none."""
    wanted = [asked] if asked else known
    column = next((column for column in wanted if column in row), None)
    if column is None and (asked or needed):
        hint = " (convert ShareGPT's to messages of role and content)" if "conversations" in row else ""
        looked = f"no {kind} column of {[*wanted]} in {[*row]}{hint}"
        raise InputError(f"{source[0]}: {looked}: name it with --{kind}_column")
    return column


def read_prompts(source, args, tokenizer, needs_answers):
    """[(key, Prompt)] of the prompts that fit `--max_prompt_tokens`, and {what was merged or dropped: how many}. Rows
    with the same prompt and answer merge first: one in a hundred of DAPO-Math-17k's is left."""
    marked, most, rows, counts, prompts = cache(extract_answer), args.max_prompt_tokens, {}, Counter(), []
    for where, row in read_rows(source):
        if not rows:
            needed = not {"chosen", "rejected"} <= row.keys()
            column = find_column("prompt", args.prompt_column, PROMPT_COLUMNS, row, source, needed)
            needed = needs_answers and column != "messages"
            answer_column = find_column("answer", args.answer_column, ANSWER_COLUMNS, row, source, needed)
        prompt, last = read_prompt(row, column, where)
        value = row.get(answer_column) if answer_column else last
        value = value.get("ground_truth") if isinstance(value, dict) else value  # verl
        value = value[0] if isinstance(value, list) and len(value) == 1 else value  # verl, too
        value = value if isinstance(value, str | int) or (isinstance(value, float) and np.isfinite(value)) else ""
        answer = marked(str(value).strip()) or str(value).strip() or None
        if needs_answers and answer is None:
            raise InputError(f"{where}: no answer (text or number) in {answer_column or 'the last turn'}")
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
        raise InputError(f"{source[0]}: none of its {len(rows)} prompts fits --max_prompt_tokens {most}")
    return prompts, counts


class PromptSampler:
    """Draws indices of `rows` (prompts or pairs) from a new permutation each epoch, which depends on `seed` alone."""

    def __init__(self, rows, seed):
        self.rows, self.seed, self.drawn = rows, seed, 0

    @cached_property
    def digest(self):
        """SHA-256 of the rows. Of what JSON cannot hold, as an image, only the type counts."""
        digest = hashlib.sha256()
        for row in self.rows:
            row = vars(row) if isinstance(row, Prompt) else row
            digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode() + b"\n")
        return digest.hexdigest()

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
        return {"digest": self.digest, "drawn": self.drawn}

    def load_state_dict(self, state):
        """Raises InputError if the state is of other rows, among which an index means nothing."""
        if state["digest"] != self.digest:
            raise InputError(f"the checkpoint is of other data than this run's {len(self.rows)} rows")
        self.drawn = state["drawn"]
