"""--config FILE.yaml: the options of a file, as arguments of a command line."""

import json
import re
from typing import ClassVar

import yaml

from common.errors import InputError, one_line


class PlainLoader(yaml.SafeLoader):
    """Keeps scalars as they are written, so that they mean what they mean on the command line; null stays None.

    YAML's own rules read 010 as 8, 1:30 as 90, no as False and 1e-6 as a string.
    """

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        names = [str(key.value).replace("-", "_") for key, _ in node.value]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise yaml.YAMLError(f"{repeated[0]} is given twice")
        return super().construct_mapping(node, deep)


class JsonLoader(yaml.SafeLoader):
    """YAML's own rules, which tell false from a text as JSON does; but a date is text, JSON has none."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def yaml_arguments(path):
    """The content of the file as arguments of a command line."""
    name = "chat_template_kwargs"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        values = yaml.load(text, PlainLoader) or {}
        if isinstance(values, dict) and isinstance(values.get(name), dict):
            values[name] = json.dumps(yaml.load(text, JsonLoader)[name])
    except Exception as error:  # explicit tags, as `!!set`, and json raise nearly every type there is
        raise InputError(f"--config {path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: expected `option: value` lines")
    if "config" in values:
        raise InputError(f"--config {path}: config: a file cannot name another one")
    arguments = []
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(item, str) for item in items):
            raise InputError(f"--config {path}: {name}: expected a value or a list of values")
        if isinstance(value, list) and value:
            if options := [item for item in value if re.match(r"-[^\d.]", item)]:
                raise InputError(f"--config {path}: {name}: {options[0]} would be an option, not a value")
            arguments += [f"--{name}", *value]
        elif isinstance(value, str):
            arguments.append(f"--{name}={value}")
    return arguments
