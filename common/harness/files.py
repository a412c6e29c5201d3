"""Files of a run: replaced atomically, or rows appended; one line where they cannot be written."""

import contextlib
import itertools
import json
import os
import pathlib

from safetensors import SafetensorError

from common.errors import InputError, one_line


def new_folder(name):
    """Make a new folder: `name` or, if another run has that one, `name`-2, `name`-3, ..."""
    for number in itertools.count(1):
        folder = pathlib.Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def put_in_place(temporary, final):
    """Rename a folder once all its files are on the disk: a crash leaves `final` whole or not at all."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:  # Windows flushes what may be written only
                os.fsync(file.fileno())
    os.replace(temporary, final)


def rows_up_to(path, step):
    """The text of a JSONL file up to `step`, without an incomplete last line: the rest came after the checkpoint.

    Raises InputError where a line is not a row of a run.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}") from None
    kept = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                text = line.decode()
                later = json.loads(text)["step"] > step
            except (ValueError, LookupError, TypeError):
                raise InputError(f"{path}, line {number}: damaged, not a row that a run wrote") from None
            kept += [] if later else [text]
    return "".join(kept)


def write_text(path, text):
    """Write a file atomically: there is the old one or the new one, never a part."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8", newline="\n")  # Windows would make \r\n of it at each resume
        os.replace(temporary, path)


@contextlib.contextmanager
def writing(what):
    """Put around code that writes `what`: an InputError if it fails (disk full, no permission, a name too long)."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # the last one is torch.save's
        raise InputError(f"{what} cannot be written: {one_line(error)}") from None


def append_rows(path, rows):
    """Add rows at the end of a JSONL file."""
    with writing(path), open(path, "a", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_rows(path, rows):
    """A JSONL file of these rows alone."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
