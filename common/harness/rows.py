"""The rows of data files and datasets, each with its place for error messages, and the columns known by name."""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import InputError, one_line

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
PROMPT_COLUMNS = ("prompt", "question", "problem")
CONVERSATION = "messages"  # the column of whole conversations, which end with the answer
ANSWER_COLUMNS = ("answer", "reward_model", "reward_model.ground_truth", "ground_truth", "solution")
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
TEXT_COLUMNS = (*PROMPT_COLUMNS, *ANSWER_COLUMNS, "chosen", "rejected")  # text in a CSV file, whatever it looks like
TEXT_MARK = "\0"  # before the text of such a cell on its way through pandas, which reads `None` and `NA` as missing


class Source(NamedTuple):
    name: str  # in messages
    data: Any  # a list of files, or a datasets.Dataset


class JsonFloat(float):
    """A float whose `str` is the text of the JSON file, from which no digit is lost."""

    __slots__ = ("text",)

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text


def read_rows(source: Source, *text_columns: str | None) -> Iterator[tuple[str, dict]]:
    """(where, row) of every row. In a CSV file the cells of TEXT_COLUMNS and of `text_columns` are text."""
    if not isinstance(source.data, list):
        yield from read_dataset(source.name, source.data)
        return
    for path, kind in [(path, file_type(path)) for path in source.data]:  # all types, before the first file is read
        if kind in ("json", "jsonl"):
            yield from read_json(path, kind)
        else:
            yield from read_dataset(str(path), load_table(path, kind, text_columns))


def file_type(path: Path) -> str:
    """json, jsonl, parquet or csv, by the extension; InputError for any other."""
    if not path.name.endswith(EXTENSIONS):
        raise InputError(f"{path}: unknown file type, known are {', '.join(EXTENSIONS)}")
    return path.name.removesuffix(".gz").rpartition(".")[2]


def read_json(path: Path, kind: str) -> Iterator[tuple[str, dict]]:
    """(where, row) of JSON lines or, in a .json file, of one JSON array.

    Not through datasets: it turns "2024-01-02" into a datetime and 1 beside 2.5 into 1.0, fails on a column whose
    type changes late in the file, and its errors name no line.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            start = file.read(64).removeprefix(codecs.BOM_UTF8)  # json.loads skips this mark
            file.seek(0)
            if kind == "json" and start.lstrip().startswith(b"["):
                array = parse_json(file.read(), str(path))
                items = ((f"{path}, row {number}", item) for number, item in enumerate(array, 1))
            else:
                lines = ((f"{path}, line {number}", line) for number, line in enumerate(file, 1))
                items = ((where, parse_json(line, where)) for where, line in lines if line.strip())
            for where, row in items:
                if not isinstance(row, dict):
                    raise InputError(f"{where}: not a JSON object but {type(row).__name__}")
                yield where, row
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def parse_json(text: bytes, where: str) -> Any:
    try:
        return json.loads(text, parse_float=JsonFloat)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None


def find_columns(name: str, columns: list[str], args, needs_answers: bool) -> tuple[str | None, str | None]:
    """The prompt column (None: what `chosen` and `rejected` share) and the answer column (None: no answers)."""

    def find(kind, asked, known, optional):
        wanted = [asked] if asked else known
        column = next((column for column in wanted if column in columns), None)
        if column is None and (asked or not optional):
            raise InputError(
                f"{name}: no {kind} column, looked for {', '.join(wanted)} and found {', '.join(columns)}:"
                f" name it with --{kind}_column"
            )
        return column

    pairs = "chosen" in columns and "rejected" in columns
    prompt = find("prompt", args.prompt_column, PROMPT_COLUMNS if pairs else (*PROMPT_COLUMNS, CONVERSATION), pairs)
    optional = not needs_answers or prompt == CONVERSATION
    return prompt, find("answer", args.answer_column, ANSWER_COLUMNS, optional)


def load_splits(name: str, config: str | None) -> dict[str, Source]:
    """The splits of a hub dataset, of a local copy of one, or of a folder that `save_to_disk` made."""
    import datasets  # imported here, because it takes seconds and bad input should be reported first

    saved = any(Path(name, marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    try:
        loaded = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, config)
    except Exception as error:  # of nearly any type, and often only its cause says what is wrong
        raise InputError(f"cannot load the dataset {name}: {one_line(error.__cause__ or error)}") from None
    if isinstance(loaded, datasets.Dataset):
        loaded = {"train": loaded}
    return {split: Source(f"{name} [{split}]", dataset) for split, dataset in loaded.items()}


def load_table(path: Path, kind: str, text_columns: tuple[str | None, ...]) -> Any:
    """A parquet or CSV file as a datasets.Dataset."""
    import datasets

    as_text = dict.fromkeys({*TEXT_COLUMNS, *text_columns} - {None}, TEXT_MARK.__add__)
    options = {"converters": as_text} if kind == "csv" else {}
    try:
        return datasets.load_dataset(kind, data_files={"train": str(path)}, split="train", **options)
    except Exception as error:
        raise InputError(f"{path}: cannot be read: {one_line(error.__cause__ or error)}") from None


def read_dataset(name: str, dataset: Any) -> Iterator[tuple[str, dict]]:
    """(where, row) of a datasets.Dataset, read in batches: much faster than row by row."""
    number = 0
    for batch in dataset.iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            number += 1
            values = [value.removeprefix(TEXT_MARK) if isinstance(value, str) else value for value in values]
            yield f"{name}, row {number}", dict(zip(batch, values, strict=True))
