"""What an option of TRL, verl or OpenRLHF is called here. harness/args.py asks at an unknown option.

The table is names.toml, beside this file.
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
OF_TRL = {name.partition("=")[0] for row in ROWS for name in row[1].split()}


def hints(cls, unknown):
    """What follows `unknown option WORD` in an error: "; ..." on its name here, or "".

    `unknown` has all unknown words of a command line, and WORD is the first. Another option among
    them has a line of its own. `cls` is the `Args` of the script.
    """
    fields = [field.name for field in dataclasses.fields(cls)]
    lines = []
    for word, name, value in options(unknown):
        hint = name_here(name, value, fields)
        lines.append(f"unknown option {word}" + (f"; {hint}" if hint else ""))
    if sum(name in OF_TRL for _, name, _ in options(unknown)) > 3:
        lines.append("python tools/from_trl.py writes TRL's options as a file for --config")
    return "\n".join(lines).removeprefix(f"unknown option {unknown[0]}")


def options(words):
    """[(word, name, value)] of unknown words; what follows an option is its value, unless it is one too."""
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


def names(row):
    """The names of other projects in a row, between the option here and a sentence."""
    return " ".join(row[1:-1]).split()


def rows_of(name):
    """The rows with this name; or a pattern for it; or of the option here; or a key that ends with it."""
    whole = [row for row in ROWS if name in names(row)]
    alike = [row for row in ROWS if any(fnmatch.fnmatchcase(name, key) for key in names(row))]
    own = [row for row in ROWS if row[0] == name]
    ends = []
    if "_" in name or "." in name:  # `steps` or `path` is the end of too many keys
        ends = [row for row in ROWS if any(key.endswith(f".{name}") for key in names(row))]
    return whole or alike or own or ends


def name_here(name, value, fields):
    """What is said of an unknown option, or "". `fields` are the options of the script."""
    if name in BEFORE:
        return BEFORE[name]
    rows = rows_of(f"{name}={value}") or rows_of(name)
    if not rows:
        return misspelt(name, value, fields)
    here, *_, sentence = next((row for row in rows if row[0] in fields), rows[-1])
    if here == name:  # an option of another script
        return "; ".join(
            ["this script does not have it", *[sentence] * sentence.startswith("only ")]
        )
    if not here:
        return sentence
    use = (
        f"use --{here}"
        if here in fields
        else f"here it is --{here}, which this script does not have"
    )
    return f"{use}; {sentence}" if sentence else use


def misspelt(name, value, fields):
    """The known option that is nearest to the name, here or elsewhere, if one is near."""
    others = [key for row in ROWS for key in names(row) if not re.search(r"[.*=]", key)]
    known = [*fields, *(f"no_{field}" for field in fields), *others]
    close = difflib.get_close_matches(name, known, 1, 0.8)
    if not close:
        return ""
    here = name_here(close[0], value, fields) if close[0] in others else ""
    return f"did you mean --{close[0]}? {here}".rstrip()
