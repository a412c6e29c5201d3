"""The command line: options from it and from a YAML file, and `--dry_run`, which is answered here."""

import argparse
import copy
import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import yaml

from common.errors import InputError, one_line
from common.harness.args import GROUPS

NULL = "tag:yaml.org,2002:null"


def parse_args(cls, argv=None):
    """The options of a script as an instance of its `Args`, from the command line and, for what that does not name,
    from the file of `--config`; an InputError names what is wrong.

    Everything goes through argparse, the file too, so that types are converted, choices checked and unknown names
    refused. With --dry_run this is the end: the estimate is printed before a model is loaded or a folder is made.
    """
    from transformers import HfArgumentParser

    used, groups = {field.metadata["group"] for field in dataclasses.fields(cls)}, {}

    class Parser(HfArgumentParser):
        def _parse_dataclass_field(self, parser, field):  # called for each field
            if not groups:
                groups.update({name: self.add_argument_group(title) for name, title in GROUPS.items() if name in used})
            field = copy.copy(field)
            group, field.metadata = groups[field.metadata["group"]], field.metadata["parsed"]
            super()._parse_dataclass_field(group, field)

        def error(self, message):
            raise InputError(f"{message} (--help lists the options)")

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(cls, allow_abbrev=False, description=sys.modules[cls.__module__].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", help="YAML file with defaults for the options below; the command line wins")
    namespace, unknown = parser.parse_known_args(argv)
    if namespace.config is not None:
        namespace, unknown = parser.parse_known_args(yaml_arguments(namespace.config) + argv)
    if unknown:
        names = load_tool(cls, "names")
        here = names.name_here(unknown[0], vars(namespace)) if names else ""
        raise InputError(f"unknown option {unknown[0]}{here} (--help lists the options)")
    args = cls(**{name: value for name, value in vars(namespace).items() if name != "config"})
    args.check()
    if args.dry_run:
        estimate = load_tool(cls, "dry_run")
        if estimate is None:
            raise InputError("--dry_run needs tools/ (beside the script)")
        estimate.dry_run(args)
        raise SystemExit(0)
    return args


def load_tool(cls, name):
    """The module tools/NAME.py beside the script whose options are `cls`; None where the script was copied without it.

    It is loaded by its path, because `tools` is a common name. An error inside it shows as it is.
    """
    path = Path(getattr(sys.modules[cls.__module__], "__file__", ".")).parent / "tools" / f"{name}.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"tools.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def yaml_arguments(path):
    """The options of a YAML file as arguments of a command line, each word as it is spelled; a null is left out.

    YAML itself would read 010 as 8, 1:30 as 90, no as False and 1e-6 as a text. argparse knows the types of options.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
        return arguments_of(root) if root else []
    except Exception as error:  # explicit tags, as `!!timestamp`, and json raise nearly every type there is
        raise InputError(f"--config {path}: {one_line(error)}") from None


def arguments_of(root):
    """The same of the root node of a file; a ValueError says what a command line could not."""
    if not isinstance(root, yaml.MappingNode) or not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
        raise ValueError("expected `option: value` lines")
    names = [key.value.replace("-", "_") for key, _ in root.value]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{repeated[0]} is given twice")
    if "config" in names:
        raise ValueError("config: a file cannot name another one")
    arguments = []
    for name, (_, node) in zip(names, root.value, strict=True):
        words = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if name == "chat_template_kwargs" and isinstance(node, yaml.MappingNode):  # JSON, with the types of YAML
            values = yaml.safe_load(yaml.serialize(node))
            arguments.append(f"--{name}={json.dumps(values, default=str)}")  # it has no dates
        elif node.tag == NULL:
            continue
        elif any(not isinstance(word, yaml.ScalarNode) or word.tag == NULL for word in words):
            raise ValueError(f"{name}: expected a value or a list of values")
        elif words == [node]:
            arguments.append(f"--{name}={node.value}")
        elif options := [word.value for word in words if re.match(r"-[^\d.]", word.value)]:
            raise ValueError(f"{name}: {options[0]} would be an option, not a value")
        elif words:
            arguments += [f"--{name}", *(word.value for word in words)]
    return arguments
