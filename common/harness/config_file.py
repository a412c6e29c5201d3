"""--config FILE.yaml: the options of a file, as arguments of a command line."""

import json
import re
from typing import ClassVar

import yaml

from common.errors import InputError, one_line


def rules(*types):
    """PyYAML's rules by which an unquoted word is a null, a number ..., for these types alone; other words are text."""
    known = yaml.SafeLoader.yaml_implicit_resolvers
    return {first: [rule for rule in known[first] if rule[0].endswith(types)] for first in known}


class PlainLoader(yaml.SafeLoader):
    """Takes words as they are spelled, so that they mean what they mean on the command line; null stays None.

    YAML's own rules read 010 as 8, 1:30 as 90, no as False and 1e-6 as a string.
    """

    yaml_implicit_resolvers: ClassVar = rules(":null")

    def construct_mapping(self, node, deep=False):
        names = [str(key.value).replace("-", "_") for key, _ in node.value]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"{repeated[0]} is given twice")
        return super().construct_mapping(node, deep)


class JsonLoader(yaml.SafeLoader):
    """YAML's own rules, which tell false from a text as JSON does; but a date is text, JSON has none."""

    yaml_implicit_resolvers: ClassVar = rules(":null", ":bool", ":int", ":float", ":merge", ":value")


def yaml_arguments(path):
    """The options of the file as arguments of a command line; one that is null is left out."""
    kwargs = "chat_template_kwargs"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        values = yaml.load(text, PlainLoader) or {}
        if isinstance(values, dict) and isinstance(values.get(kwargs), dict):
            values[kwargs] = json.dumps(yaml.load(text, JsonLoader)[kwargs])
    except Exception as error:  # explicit tags, as `!!set`, and json raise nearly every type there is
        raise InputError(f"--config {path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: expected `option: value` lines")
    if "config" in values:
        raise InputError(f"--config {path}: config: a file cannot name another one")
    arguments = []
    for name, value in values.items():
        if isinstance(value, str):
            arguments.append(f"--{name}={value}")
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            if options := [item for item in value if re.match(r"-[^\d.]", item)]:
                raise InputError(f"--config {path}: {name}: {options[0]} would be an option, not a value")
            arguments += [f"--{name}", *value] if value else []
        elif value is not None:
            raise InputError(f"--config {path}: {name}: expected a value or a list of values")
    return arguments
