"""Hints on unknown options: what an option of TRL, verl or OpenRLHF is called here.

harness/args.py asks for hints when it sees an unknown option. The table is names.toml, next to this
file.
"""

import dataclasses
import difflib
import fnmatch
import re
import tomllib
from pathlib import Path

TABLE = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
ROWS = TABLE["names"]
BEFORE = TABLE["before"]
RECIPES = TABLE["recipes"]
OF_TRL = {name.partition("=")[0] for row in ROWS for name in row[1].split()}


def hints(cls, unknown):
    """Return what follows "unknown option WORD" in an error: "; HINT", or "" if there is none.

    `unknown` lists all unknown words of the command line, WORD is the first. Each further option
    gets a line of its own. `cls` is the `Args` of the script.
    """
    fields = [field.name for field in dataclasses.fields(cls)]
    lines = []
    for word, name, value in options(unknown):
        hint = hint_for(name, value, fields)
        lines.append(f"unknown option {word}" + (f"; {hint}" if hint else ""))
    if sum(name in OF_TRL for _, name, _ in options(unknown)) > 3:
        lines.append('docs/run.md, "Coming from TRL", has a table and what else differs')
    return "\n".join(lines).removeprefix(f"unknown option {unknown[0]}")


def options(words):
    """Return [(word, option, value)] of unknown words.

    The word after an option is its value, unless it looks like an option itself.
    """
    found = []
    words = list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not equals and words and not re.match(r"[-+]+[a-zA-Z]|[\w.]+=", words[0]):
            value = words.pop(0)
        name = name.lstrip("-+").replace("-", "_").removeprefix("actor_rollout_ref.")
        found.append((word, name, value))
    return found


def foreign_names(row):
    """Return the names of other projects in a row, which stand between our option and the note."""
    return " ".join(row[1:-1]).split()


def find_rows(name):
    """Return the rows that match a name: exactly, by pattern, as our option, or as a key's end."""
    equal = [row for row in ROWS if name in foreign_names(row)]
    alike = [row for row in ROWS if any(fnmatch.fnmatchcase(name, x) for x in foreign_names(row))]
    own = [row for row in ROWS if row[0] == name]
    ends = []
    if "_" in name or "." in name:  # too many keys end in `steps` or `path`
        ends = [row for row in ROWS if any(x.endswith(f".{name}") for x in foreign_names(row))]
    return equal or alike or own or ends


def hint_for(name, value, fields):
    """Return the hint on one unknown option, or "". `fields` are the options of the script."""
    if name in BEFORE:
        return BEFORE[name]
    if name in RECIPES:
        return f"it is an option of a recipe: python examples/recipes.py {RECIPES[name]}"
    rows = find_rows(f"{name}={value}") or find_rows(name)
    if not rows:
        return misspelt(name, value, fields)
    option, *_, note = next((row for row in rows if row[0] in fields), rows[-1])
    if not option:
        return note
    if option not in fields and option in RECIPES:
        recipe = f"python examples/recipes.py {RECIPES[option]}"
        return f"here it is --{option}, an option of a recipe: {recipe}"
    if option == name:  # an option of another script
        return "this script does not have it" + (f"; {note}" if note.startswith("only ") else "")
    use = f"use --{option}"
    if option not in fields:
        use = f"here it is --{option}, which this script does not have"
    return f"{use}; {note}" if note else use


def misspelt(name, value, fields):
    """Return a hint on the known option, ours or foreign, that the name resembles most, or ""."""
    foreign = [x for row in ROWS for x in foreign_names(row) if not re.search(r"[.*=]", x)]
    known = [*fields, *(f"no_{field}" for field in fields), *foreign]
    close = difflib.get_close_matches(name, known, 1, 0.8)
    if not close:
        return ""
    hint = hint_for(close[0], value, fields) if close[0] in foreign else ""
    return f"did you mean --{close[0]}? {hint}".rstrip()
