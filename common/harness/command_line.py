"""The command line, and what is loaded from tools/ when an option asks for it."""

import argparse
import dataclasses
import sys

from transformers import HfArgumentParser

from common.errors import InputError
from common.harness.args import GROUPS
from common.tools import load_tool


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
    """The `Args` of the command line and --config, or an InputError. With --dry_run print an estimate and exit."""
    argv = sys.argv[1:] if argv is None else argv
    formatter, text = argparse.RawDescriptionHelpFormatter, sys.modules[cls.__module__].__doc__
    parser = Parser(cls, allow_abbrev=False, description=text, formatter_class=formatter)
    parser.add_argument("--config", help="YAML file with defaults for the options below; the command line wins")
    how = dict(return_remaining_strings=True, look_for_args_file=False)
    args, own, unknown = parser.parse_args_into_dataclasses(argv, **how)
    if own.config is not None:  # through argparse too, which converts types and refuses unknown names
        given = load_tool(cls, "config", needed_by="--config").arguments(own.config)
        args, _, unknown = parser.parse_args_into_dataclasses([*given, *argv], **how)
    if unknown:
        names = load_tool(cls, "names")
        parser.error(names.answer(unknown, vars(args)) if names else f"unknown option {unknown[0]}")
    for field in dataclasses.fields(cls):
        if "nargs" in field.metadata and len(getattr(args, field.name) or []) == 1:  # one is not a list
            setattr(args, field.name, getattr(args, field.name)[0])
    args.check()
    if args.dry_run:
        load_tool(cls, "dry_run", needed_by="--dry_run").dry_run(args)
        raise SystemExit(0)
    return args
