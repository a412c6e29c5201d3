"""The table of docs/names.md: options here and their names in TRL and verl, as the hints of the command line have it.

tools/refresh.py writes it into the page.
"""

import re

from common.harness.names import NAMES

PAGE = "docs/names.md"
HEAD = "| here | TRL | verl | |\n|---|---|---|---|\n"


def code(names):
    return " ".join(f"`{name}`" for name in names.split())


def table():
    rows = (f"| {code(row.here)} | {code(row.trl)} | {code(row.verl)} | {row.note} |\n" for row in NAMES)
    return HEAD + "".join(rows)


def refresh(tree):
    tree.write(PAGE, re.sub(r"(?:^\|.*\n)+", lambda _: table(), tree.read(PAGE), count=1, flags=re.MULTILINE))
    return []
