"""The settings of settings.toml: tried on their cases, and printed as a table."""

import pathlib
import re
import tomllib

HERE = pathlib.Path(__file__).resolve().parent
LIBRARIES = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}
OPTIONS = {"L": "constant", "W": "weights", "S": "label_smoothing"}


def load_methods():
    """Return {name: method} of settings.toml."""
    content = tomllib.loads((HERE / "settings.toml").read_text(encoding="utf-8"))
    return {method["name"]: method for method in content["method"]}


def base_of(method, library, methods):
    """Return the settings of the method that this one adds to."""
    if "adds_to" not in method:
        return []
    return methods[method["adds_to"]][library]


def for_case(setting, case):
    """Return a setting with the letter at its end replaced by a number of the case."""
    found = re.fullmatch(r"(.*[= ])([GLWKS])", setting)
    if not found:
        return setting
    return found[1] + repr(number_of(found[2], case["inputs"], case["options"]))


def number_of(letter, inputs, options):
    if letter in OPTIONS:
        return options.get(OPTIONS[letter])
    if letter == "K":
        return [f"part {number}" for number in range(len(inputs.get("parts", [])))]
    groups = inputs.get("rewards") or inputs.get("parts", [[]])[0]
    if groups:
        return len(groups[0])
    return len(inputs["logprobs"]) // len(set(inputs["groups"]))


# --- tests ---


def problems(library, adapter, cases, is_right):
    """Return what is wrong in a library's column: wrong answers and needless settings.

    `is_right(adapter, case)` tells whether the adapter with its `settings` answers a case right.
    """
    methods = load_methods()
    found = []
    for name, method in methods.items():
        own = method[library]
        if isinstance(own, str):
            continue
        base = base_of(method, library, methods)
        chosen = [cases[case] for case in method.get(f"{library}_cases", method["cases"])]
        for case in chosen:
            if not with_settings(adapter, base + own, case, is_right):
                found.append(f"{name}: {case['id']} has another answer")
        for setting in own:
            rest = [other for other in base + own if other != setting]
            if all(is_right_without(adapter, rest, case, is_right) for case in chosen):
                found.append(f"{name}: {setting} is not needed")
    return found


def is_right_without(adapter, rest, case, is_right):
    try:
        return with_settings(adapter, rest, case, is_right)
    except Exception:  # the library itself rejects the remaining settings
        return False


def with_settings(adapter, settings, case, is_right):
    adapter.settings = adapter.parsed([for_case(setting, case) for setting in settings])
    try:
        return is_right(adapter, case)
    finally:
        adapter.settings = None


# --- the table ---


def table():
    """Return the lines of a table with a row per method."""
    lines = ["| | " + " | ".join(LIBRARIES.values()) + " |", "|---" * 4 + "|"]
    for name, method in load_methods().items():
        title = f"**{name}**"
        if "adds_to" in method:
            title = f"{method['adds_to']} with {title}"
        cells = [cell(method, library) for library in LIBRARIES]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return lines


def cell(method, library):
    settings = method[library]
    if isinstance(settings, str):
        return settings
    parts = [f"`{setting}`" for setting in settings]
    if "adds_to" in method:
        parts.insert(0, f"{method['adds_to']}'s")
    if f"{library}_note" in method:
        parts.append(method[f"{library}_note"])
    return ", ".join(parts) or "the default"
