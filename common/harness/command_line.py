"""The command line: options from it and from a YAML file, and `--dry_run`, which is answered here."""

import argparse
import copy
import dataclasses
import sys

from common.errors import InputError
from common.harness.args import GROUPS
from common.harness.config_file import yaml_arguments
from common.harness.dry_run import dry_run
from common.harness.names import name_here


def parse_args(cls, argv=None):
    """`cls` from the command line, checked; `--config FILE.yaml` gives defaults that the command line overrides.

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
        here = name_here(unknown[0], vars(namespace))
        raise InputError(f"unknown option {unknown[0]}{here} (--help lists the options)")
    args = cls(**{name: value for name, value in vars(namespace).items() if name != "config"})
    args.check()
    if args.dry_run:
        dry_run(args)
        raise SystemExit(0)
    return args
