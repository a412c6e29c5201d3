"""Files of a run: replaced atomically, or rows appended; one line where they cannot be written."""

import contextlib
import itertools
import json
import os
import pathlib

from safetensors import SafetensorError

from common.errors import InputError, one_line


def new_folder(name):
    """The path of a folder that this call has made: `name` or, where that exists, `name`-2, `name`-3, ..."""
    for number in itertools.count(1):
        folder = pathlib.Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def put_in_place(temporary, final):
    """Rename the folder `temporary` to `final` once its files are on the disk: a crash leaves it whole or absent."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:  # Windows flushes what may be written only
                os.fsync(file.fileno())
    os.replace(temporary, final)


def rows_up_to(path, step):
    """The lines of a JSONL file with rows up to `step`, as one text; an incomplete last line is left out.

    The rest came after the checkpoint that is resumed. An InputError names a line that is no row of a run.
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
    """Replace a file atomically: a crash leaves the old text or the new one, never a part."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8", newline="\n")  # Windows would make \r\n of it at each resume
        os.replace(temporary, path)


@contextlib.contextmanager
def writing(what):
    """A context in which a failed write of `what` (disk full, no permission, a name too long) is an InputError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # the last one is torch.save's
        raise InputError(f"{what} cannot be written: {one_line(error)}") from None


def append_rows(path, rows):
    """Add rows at the end of a JSONL file; what JSON cannot hold, such as a date in a prompt's message, as text."""
    with writing(path), open(path, "a", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def write_rows(path, rows):
    """Replace a JSONL file by one of these rows."""
    write_text(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))
