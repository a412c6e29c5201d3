"""Every option of every script in one table, from the classes that the command line is made of.

The search of the page side by side shows it (tools/side_by_side.py), and tests/test_options.py reads it.
"""

import dataclasses
import functools
import importlib
import typing

from common.harness.args import GROUPS, RolloutArgs, RunArgs


def fields(scripts):
    """{option: {script: its field}}, in the order of the classes: RunArgs, RolloutArgs, then script by script."""
    found = {field.name: {} for kind in (RunArgs, RolloutArgs) for field in dataclasses.fields(kind)}
    for script in scripts:
        for field in dataclasses.fields(importlib.import_module(script).Args):
            found.setdefault(field.name, {})[script] = field
    return found


def default(field):
    if field.default_factory is not dataclasses.MISSING:
        words = field.default_factory()
        return f"`{' '.join(words)}`" if words else "none"
    if field.default is None or isinstance(field.default, bool):
        return {None: "none", True: "on", False: "off"}[field.default]
    return f"`{number(field.default) if isinstance(field.default, float) else field.default}`"


def number(value):
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def values(field):
    """Type, choices and bounds, as a reader of a command line thinks of them."""
    kind = field.type
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(kind))
    kind = next((part for part in typing.get_args(kind) if typing.get_origin(part) is list), kind)  # list | None
    parts = [part for part in typing.get_args(kind) or (kind,) if part is not type(None)]
    several = typing.get_origin(kind) is list or "nargs" in field.metadata
    name = {str: "text", int: "whole number", float: "number", bool: "switch"}[parts[0]]
    signs = {"gt": ">", "ge": "≥", "le": "≤", "lt": "<"}
    bounds = [f"{signs[key]} {number(bound)}" for key, bound in field.metadata["bounds"].items() if bound is not None]
    return " ".join([f"{name}, or several" if several else name, ", ".join(bounds)]).strip()


def said(by_script, what):
    """What the first script says of an option, then what others say instead, with their names.

    Where a text differs from the first one only in its note in parentheses, that alone is repeated.
    """
    scripts = {}
    for script, field in by_script.items():
        scripts.setdefault(what(field), []).append(script)
    first, *others = scripts
    start, found = first.partition(" (")[0], [first]
    for text in others:
        note = text.removeprefix(start) if text.startswith(f"{start} (") else text
        found += [f"{', '.join(scripts[text])}: {note.strip()}"] if text != start else []
    return "<br>".join(found)


def help_text(field):
    return field.metadata["help"].replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")


def row(name, by_script, scripts):
    """A row of the table; under the name of the option stands which scripts have it, unless that is all, or one."""
    missing, who = [script for script in scripts if script not in by_script], ""
    if missing and len(by_script) > 1:
        who = "<br>not in " + ", ".join(missing) if len(missing) < 4 else "<br>only in " + ", ".join(by_script)
    cells = [f"`--{name}`{who}", *(said(by_script, what) for what in (default, values, help_text))]
    return f"| {' | '.join(cells)} |\n"


@functools.cache
def table(scripts):
    """The rows in the groups of --help: an option, its default, its values, what it does."""
    found = dict.fromkeys(GROUPS, "")
    for name, by_script in fields(scripts).items():
        found[next(iter(by_script.values())).metadata["group"]] += row(name, by_script, scripts)
    return "".join(found.values())
