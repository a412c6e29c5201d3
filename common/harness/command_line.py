"""The command line: options from words and from a YAML file."""

import argparse
import dataclasses
import re
import sys

import yaml
from transformers import HfArgumentParser

from common.errors import InputError, one_line
from common.harness.args import GROUPS
from common.tools import load_tool


class Parser(HfArgumentParser):
    """Puts options into the groups of `--help`, and raises an InputError where argparse exits."""

    groups = None

    def add_argument(self, *names, group=None, bounds=None, **options):
        """Add an option to its group; its `bounds` are for `check_value`, and argparse has none."""
        if group is None:
            return super().add_argument(*names, **options)
        if self.groups is None:
            self.groups = {name: self.add_argument_group(title) for name, title in GROUPS.items()}
        return self.groups[group].add_argument(*names, **options)

    def error(self, message):
        raise InputError(f"{message} (--help lists the options)")

    def parse(self, words):
        """(`Args`, options that are none of its fields, words that are no option)."""
        how = dict(return_remaining_strings=True, look_for_args_file=False)
        return self.parse_args_into_dataclasses(words, **how)


def parse_args(cls, argv=None):
    """The `Args` of the command line and of the file of --config, or an InputError.

    With --dry_run it prints an estimate of the memory, and ends the process.
    """
    if argv is None:
        argv = sys.argv[1:]
    parser = Parser(
        cls,
        allow_abbrev=False,
        description=sys.modules[cls.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config = "YAML file with defaults for the options below; the command line wins"
    parser.add_argument("--config", help=config)
    args, others, unknown = parser.parse(argv)
    if others.config is not None:
        words = words_of_file(others.config)
        check_words(parser, words, others.config)
        # The words of the file stand first: of an option that is given twice the last value counts.
        args, _, unknown = parser.parse([*words, *argv])
    refuse_unknown(parser, args, unknown)
    for field in dataclasses.fields(cls):
        value = getattr(args, field.name)
        if "nargs" in field.metadata and isinstance(value, list) and len(value) == 1:
            setattr(args, field.name, value[0])  # one dataset is no list of datasets
    args.check()
    if args.dry_run:
        load_tool(cls, "dry_run", needed_by="--dry_run").dry_run(args)
        raise SystemExit(0)
    return args


def refuse_unknown(parser, args, unknown):
    """Refuse `unknown` words, with what tools/ says of them."""
    if not unknown:
        return
    names = load_tool(type(args), "names")
    parser.error(names.answer(unknown, vars(args)) if names else f"unknown option {unknown[0]}")


def check_words(parser, words, path):
    """Refuse the words of a file of --config where they are no options or have wrong values."""
    try:
        args, _, unknown = parser.parse(words)
        refuse_unknown(parser, args, unknown)
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None


def words_of_file(path):
    """The options of a YAML file as words of a command line: "seed: 3" -> ["--seed=3"].

    So argparse converts their types and refuses unknown names. A word is as it is spelled in the
    file: `yaml.safe_load`, which HfArgumentParser uses too, reads 010 as 8, 1:30 as 90, no as
    False, and 1e-6 as a text. An option that is null is left out.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, yaml.SafeLoader)
        return words_of_mapping(root) if root else []
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: {one_line(error)}") from None


def words_of_mapping(root):
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("expected `option: value` lines")
    words = []
    names = ["config"]  # a file names no other file
    for key, node in root.value:
        name = str(key.value).replace("-", "_")
        if name == "script":  # args.json, which is such a file too, names its script
            continue
        if name in names:
            raise ValueError(f"{name} is given twice, or is no option of a file")
        names.append(name)
        words += words_of_option(name, node)
    return words


def words_of_option(name, node):
    """["--seed=3"] of a value; ["--reward", "accuracy", "format"] of a list, [] if it is empty."""
    is_list = isinstance(node, yaml.SequenceNode)
    values = [part.value for part in node.value] if is_list else [node.value]
    for value in values:
        is_text = isinstance(value, str)
        if not is_text or (is_list and re.match(r"-[^\d.]", value)):
            raise ValueError(f"{name}: expected a value, or a list of values that are no options")
    if not values or node.tag == "tag:yaml.org,2002:null":
        return []
    return [f"--{name}", *values] if is_list else [f"--{name}={node.value}"]
