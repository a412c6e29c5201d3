"""Gives the old files of lab/results back, byte for byte: python lab/unpack.py FOLDER

Each run had a file of its own up to commit 44715d4. Now NAME.jsonl has the rows of the folder NAME,
each with the name of its old file as `run`, and documents.jsonl has the text of what was no file of
rows. `sha256sum --check manifest.txt` in FOLDER compares all of them with what they were. No row of
a pack is changed or deleted.
"""

import functools
import json
import pathlib
import sys

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def rows_of(path):
    """The rows of a file; none where there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@functools.cache
def runs(pack):
    """{name of an old file: its rows} of a pack."""
    found = {}
    for row in rows_of(pack):
        found.setdefault(row.pop("run"), []).append(row)
    return found


def files():
    """{old path: text} of all old files."""
    found = {}
    for path in RESULTS.glob("*/starts.jsonl"):  # which stay files of their own
        found[f"{path.parent.name}/{path.name}"] = path.read_text(encoding="utf-8")
    for pack in RESULTS.glob("*.jsonl"):
        for name, rows in runs(pack).items():
            if pack.stem == "documents":
                found[name] = rows[0]["text"]
            else:
                found[f"{pack.stem}/{name}"] = "".join(json.dumps(row) + "\n" for row in rows)
    return found


def main(folder):
    texts = files()
    texts["manifest.txt"] = (RESULTS / "manifest.txt").read_text(encoding="utf-8")
    for name, text in texts.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
