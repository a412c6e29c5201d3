"""--config FILE.yaml: the options of a file, as arguments of a command line."""

import json
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


def yaml_arguments(path):
    """The content of the file as arguments of a command line."""
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, PlainLoader) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: expected `option: value` lines")
    if "config" in values:
        raise InputError(f"--config {path}: config: a file cannot name another one")
    arguments = []
    for name, value in values.items():
        if name == "chat_template_kwargs" and isinstance(value, dict):
            with open(path, encoding="utf-8") as file:  # JSON tells false from a text, so YAML's own rules hold here
                value = json.dumps(yaml.safe_load(file)[name])
        items = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(item, str) for item in items):
            raise InputError(f"--config {path}: {name}: expected a value or a list of values")
        if isinstance(value, list) and value:
            arguments += [f"--{name}", *value]
        elif isinstance(value, str):
            arguments.append(f"--{name}={value}")
    return arguments
