"""What an option of TRL, verl or OpenRLHF is called here. The scripts ask at an unknown option.

names.toml beside this file has the table, which docs/algorithms.md shows too.
"""

import difflib
import fnmatch
import re
import tomllib
from pathlib import Path

ROWS = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))["names"]


def names(row):
    """The names of other projects in a row, between the option here and a sentence."""
    return " ".join(row[1:-1]).split()


def rows_of(name):
    """The rows with this name; or with a pattern for it; or with a key that ends with it."""
    whole = [row for row in ROWS if name in names(row)]
    alike = [row for row in ROWS if any(fnmatch.fnmatchcase(name, key) for key in names(row))]
    return whole or alike or [row for row in ROWS if any(key.endswith(f".{name}") for key in names(row))]


def name_here(name, value, fields):
    """What is said of an unknown option, or "". `fields` are the options of the script."""
    name = name.lstrip("-+").replace("-", "_").removeprefix("actor_rollout_ref.")
    rows = rows_of(f"{name}={value}") or rows_of(name) or [row for row in ROWS if row[0] == name]
    if not rows:
        return misspelt(name, value, fields)
    here, *_, sentence = next((row for row in rows if row[0] in fields), rows[-1])
    if not here:
        return f": {sentence}"
    use = f"use --{here}" if here in fields else f"here it is --{here}, which this script does not have"
    return f": {use}; {sentence}" if sentence else f": {use}"


def misspelt(name, value, fields):
    """The known option that is nearest to the name, here or elsewhere, if one is near."""
    others = [key for row in ROWS for key in names(row) if not re.search(r"[.*=]", key)]
    known = [*fields, *(f"no_{field}" for field in fields), *others]
    for close in difflib.get_close_matches(name, known, 1, 0.8):
        here = name_here(close, value, fields).removeprefix(": ") if close in others else ""
        return f": did you mean --{close}? {here}".rstrip()
    return ""


def answer(unknown, fields):
    """One line on all unknown words of a command line.

    The word after an option is its value, unless it is an option too.
    """
    found, words = [], list(unknown)
    while words:
        name, equals, value = words.pop(0).partition("=")
        shown = name + equals + value
        if not equals and words and not re.match(r"[-+]+[a-zA-Z]|[\w.]+=", words[0]):
            value = words.pop(0)
        found.append(f"option {shown}{name_here(name, value, fields)}")
    return "unknown " + ". Unknown ".join(found).replace("?. ", "? ")
