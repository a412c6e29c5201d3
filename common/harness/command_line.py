"""The command line: options from it and from a YAML file, and what is loaded from tools/ when an option asks for it."""

import argparse
import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from common.errors import InputError, one_line
from common.harness.args import GROUPS


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
    """The options of a script as its `Args`, of the command line and the file of `--config`. An InputError names what
    is wrong. With --dry_run the estimate is printed, and this is the end."""
    argv = sys.argv[1:] if argv is None else argv
    formatter, text = argparse.RawDescriptionHelpFormatter, sys.modules[cls.__module__].__doc__
    parser = Parser(cls, allow_abbrev=False, description=text, formatter_class=formatter)
    parser.add_argument("--config", help="YAML file with defaults for the options below; the command line wins")
    how = dict(return_remaining_strings=True, look_for_args_file=False)
    args, own, unknown = parser.parse_args_into_dataclasses(argv, **how)
    if own.config is not None:  # through argparse too, which converts types and refuses unknown names
        args, _, unknown = parser.parse_args_into_dataclasses([*yaml_arguments(own.config), *argv], **how)
    if unknown:
        names = load_tool(cls, "names")
        parser.error(names.answer(unknown, vars(args)) if names else f"unknown option {unknown[0]}")
    for field in dataclasses.fields(cls):
        if "nargs" in field.metadata and len(getattr(args, field.name) or []) == 1:  # one is not a list
            setattr(args, field.name, getattr(args, field.name)[0])
    args.check()
    if args.dry_run:
        if not (tool := load_tool(cls, "dry_run")):
            raise InputError("--dry_run needs tools/ (beside the script)")
        tool.dry_run(args)
        raise SystemExit(0)
    return args


def load_tool(cls, name):
    """The module tools/NAME.py beside the script of `cls`, or None; by its path, because `tools` is a common name."""
    path = Path(getattr(sys.modules[cls.__module__], "__file__", "")).parent / "tools" / f"{name}.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"tools.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def yaml_arguments(path):
    """The options of a YAML file as arguments of a command line, each word as it is spelled: YAML itself would read 010
    as 8, 1:30 as 90, no as False and 1e-6 as a text. A null is left out."""
    arguments, names = [], ["config"]
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
        if root and not isinstance(root, yaml.MappingNode):
            raise ValueError("expected `option: value` lines")
        for key, node in root.value if root else []:
            name, is_list = str(key.value).replace("-", "_"), isinstance(node, yaml.SequenceNode)
            words = [part.value for part in (node.value if is_list else [node])]
            if name in names:
                raise ValueError(f"{name} is given twice, or is no option of a file")
            if any(not isinstance(word, str) or (is_list and re.match(r"-[^\d.]", word)) for word in words):
                raise ValueError(f"{name}: expected a value, or a list of values that are no options")
            names.append(name)
            if words and node.tag != "tag:yaml.org,2002:null":
                arguments += [f"--{name}", *words] if is_list else [f"--{name}={node.value}"]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: {one_line(error)}") from None
    return arguments
