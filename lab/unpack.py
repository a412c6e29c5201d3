"""Gives the old files of lab/results back, byte for byte: python lab/unpack.py FOLDER

Each run had a file of its own up to commit 44715d4. Now NAME.jsonl has the rows of the folder NAME, each with the name
of its old file as `run`, and documents.jsonl has the text of what was no file of rows. `sha256sum --check manifest.txt`
in FOLDER compares all of them with what they were. No row of a pack is changed or deleted.
"""

import functools
import json
import pathlib
import sys

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


@functools.cache
def runs(pack):
    """{old name: rows} of a pack, which is empty where there is no such file."""
    found = {}
    for line in pack.read_text(encoding="utf-8").splitlines() if pack.exists() else ():
        row = json.loads(line)
        found.setdefault(row.pop("run"), []).append(row)
    return found


def files():
    """{old path: text} of all old files."""
    starts = RESULTS.glob("*/starts.jsonl")  # which stay files of their own
    found = {f"{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in starts}
    for pack in RESULTS.glob("*.jsonl"):
        for name, rows in runs(pack).items():
            if pack.stem == "documents":
                found[name] = rows[0]["text"]
            else:
                found[f"{pack.stem}/{name}"] = "".join(json.dumps(row) + "\n" for row in rows)
    return found


def main(folder):
    texts = files() | {"manifest.txt": (RESULTS / "manifest.txt").read_text(encoding="utf-8")}
    for name, text in texts.items():
        path = pathlib.Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
