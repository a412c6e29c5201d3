"""Write the kept rows of each run to a file of its own, for tools/plot.py.

    python lab/unpack.py FOLDER [--over completions]

A pack, results/PACK.jsonl, holds one run per line. FOLDER/PACK/RUN gets one JSON object per row,
like the metrics.jsonl of a run. tools/plot.py draws over `step`; with --over completions that field
holds the number of completions sampled so far.
"""

import argparse
import functools
import json
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


@functools.cache
def runs(pack):
    """Return {run: [header, *rows]} of a pack, or {} if there is no such file.

    `columns` of a line has one list per metric, with null in rows that lack the metric.
    """
    if not pack.exists():
        return {}
    found = {}
    for line in pack.read_text(encoding="utf-8").splitlines():
        header = json.loads(line)
        columns = header.pop("columns")
        rows = []
        for values in zip(*columns.values(), strict=True):
            row = dict(zip(columns, values, strict=True))
            rows.append({name: x for name, x in row.items() if x is not None})
        found[header.pop("run")] = [header, *rows]
    return found


def unpack(folder, over):
    """Write the rows that have `over`, a column, with its value as their `step`."""
    for pack in RESULTS.glob("*.jsonl"):
        for name, (_, *rows) in runs(pack).items():
            rows = [row | {"step": row[over]} for row in rows if over in row]
            if rows:
                path = folder / pack.stem / name
                path.parent.mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(row) + "\n" for row in rows)
                path.write_text(text, encoding="utf-8", newline="\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--over", choices=["step", "completions"], default="step")
    args = parser.parse_args()
    unpack(args.folder, args.over)


if __name__ == "__main__":
    main()
