"""The command line: options from it and from a YAML file, and what is loaded from tools/ when an option asks for it."""

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from common.errors import InputError, one_line
from common.harness.args import GROUPS

NULL = "tag:yaml.org,2002:null"


class Parser(HfArgumentParser):
    """Puts each option into its group of `--help`, and raises an InputError where argparse would exit."""

    groups = None

    def add_argument(self, *names, group=None, bounds=None, **options):
        if group and not self.groups:
            self.groups = {name: self.add_argument_group(title) for name, title in GROUPS.items()}
        return (self.groups[group] if group else super()).add_argument(*names, **options)

    def error(self, message):
        raise InputError(f"{message} (--help lists the options)")


def parse_args(cls, argv=None):
    """The options of a script as an instance of its `Args`, from the command line and, for what that does not name,
    from the file of `--config`, which goes through argparse too; an InputError names what is wrong.

    With --dry_run this is the end: the estimate is printed before a model is loaded or a folder is made.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(cls, allow_abbrev=False, description=sys.modules[cls.__module__].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", help="YAML file with defaults for the options below; the command line wins")
    found, unknown = parser.parse_known_args(argv)
    if found.config is not None:
        found, unknown = parser.parse_known_args(yaml_arguments(found.config) + argv)
    values = vars(found)
    del values["config"]
    if unknown:
        names = load_tool(cls, "names")
        parser.error(f"unknown option {unknown[0]}{names.name_here(unknown[0], values) if names else ''}")
    for field in dataclasses.fields(cls):
        if "nargs" in field.metadata and len(values[field.name] or []) == 1:  # one is not a list
            (values[field.name],) = values[field.name]
    args = cls(**values)
    args.check()
    if args.dry_run:
        if not (tool := load_tool(cls, "dry_run")):
            raise InputError("--dry_run needs tools/ (beside the script)")
        tool.dry_run(args)
        raise SystemExit(0)
    return args


def load_tool(cls, name):
    """The module tools/NAME.py beside the script that declares the options `cls`; None where it was copied without.

    It is loaded by its path, because `tools` is a common name. An error inside it shows as it is.
    """
    path = Path(getattr(sys.modules[cls.__module__], "__file__", "")).parent / "tools" / f"{name}.py"
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
    arguments, names = [], ["config"]
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
        if root and not (isinstance(root, yaml.MappingNode) and all(is_word(key) for key, _ in root.value)):
            raise ValueError("expected `option: value` lines")
        for key, node in root.value if root else []:
            name, values = key.value.replace("-", "_"), node.value if isinstance(node, yaml.SequenceNode) else None
            if name in names:
                raise ValueError(f"{name} is given twice, or is no option of a file")
            names.append(name)
            if name == "chat_template_kwargs" and isinstance(node, yaml.MappingNode):  # JSON, with the types of YAML
                arguments.append(f"--{name}={json.dumps(yaml.safe_load(yaml.serialize(node)), default=str)}")
            elif values and all(is_word(value) and not re.match(r"-[^\d.]", value.value) for value in values):
                arguments += [f"--{name}", *(value.value for value in values)]
            elif is_word(node):
                arguments.append(f"--{name}={node.value}")
            elif values != [] and node.tag != NULL:
                raise ValueError(f"{name}: expected a value, or a list of values that are no options")
    except Exception as error:  # explicit tags, as `!!timestamp`, and json raise nearly every type there is
        raise InputError(f"--config {path}: {one_line(error)}") from None
    return arguments


def is_word(node):
    return isinstance(node, yaml.ScalarNode) and node.tag != NULL
