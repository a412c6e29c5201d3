"""Options: their declaration with bounds, the command line and its YAML file, and what sizes a step has."""

import argparse
import dataclasses
import math
import sys
from typing import ClassVar

import yaml

from common.errors import InputError, one_line, world_size
from common.harness.distributed import device_and_threads, strategy


def option(default, help):
    """A field of `Args` with its help text."""
    factory = isinstance(default, list)
    default = {"default_factory": default.copy} if factory else {"default": default}
    return dataclasses.field(**default, metadata={"help": help.replace("%", "%%")})


def parse_args(cls, argv=None):
    """`cls` from the command line; `--config FILE.yaml` gives defaults that the command line overrides.

    Everything goes through argparse, the file too, so that types are converted, choices checked and unknown names
    refused.
    """
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message):
            raise InputError(f"{message} (--help lists the options)")

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(cls, allow_abbrev=False, description=sys.modules[cls.__module__].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", help="YAML file with defaults for the options below; the command line wins")
    namespace, unknown = parser.parse_known_args(argv)
    if namespace.config:
        namespace, unknown = parser.parse_known_args(yaml_arguments(namespace.config) + argv)
    if unknown:
        raise InputError(f"unknown option {unknown[0]} (--help lists the options)")
    values = {name: value for name, value in vars(namespace).items() if name != "config"}
    return cls(**values)


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
            raise yaml.YAMLError(f"{repeated[0]} stands there twice")
        return super().construct_mapping(node, deep)


def yaml_arguments(path):
    """The command line that says what the file says."""
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
        items = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(item, str) for item in items):
            raise InputError(f"--config {path}: {name}: expected a value or a list of values")
        if isinstance(value, list) and value:
            arguments += [f"--{name}", *value]
        elif isinstance(value, str):
            arguments.append(f"--{name}={value}")
    return arguments


def check_args(args):
    """Refuse sizes that do not divide, ranges that make no sense, and options that exclude each other."""
    positive = (
        "prompts_per_step group_size num_epochs num_minibatches micro_batch_size max_new_tokens max_prompt_tokens"
    )
    positive += " keep_checkpoints temperature learning_rate clip_high eval_samples eval_k"
    positive += " pairs_per_step rounds pair_prompts pair_samples max_length beta"
    not_negative = "warmup_steps save_every eval_every eval_prompts micro_batch_tokens rollout_batch_size seed"
    not_negative += " weight_decay max_grad_norm kl_coef entropy_coef std_eps eval_temperature adam_beta1 adam_beta2"
    not_negative += " nll_coef center_coef"
    names = {field.name for field in dataclasses.fields(args)}  # dpo.py and reward_model.py lack some of these
    for name in positive.split():
        if name in names and not 0 < getattr(args, name) < math.inf:
            raise InputError(f"--{name} {getattr(args, name)}: must be above 0")
    for name in not_negative.split():
        if name in names and not 0 <= getattr(args, name) < math.inf:
            raise InputError(f"--{name} {getattr(args, name)}: must not be negative")
    if args.seed >= 2**32:  # numpy's bound
        raise InputError(f"--seed {args.seed}: must be below 2**32 = 4294967296")
    if max(args.adam_beta1, args.adam_beta2) >= 1:
        raise InputError(f"--adam_beta1 {args.adam_beta1} --adam_beta2 {args.adam_beta2}: must lie in [0, 1)")
    if args.resume and not args.output_dir:
        raise InputError("--resume needs --output_dir, the folder of the run to go on with")
    if "pairs_per_step" in names:
        check_pairs(args)
    else:
        check_rollouts(args)
    if "eval_samples" in names:
        check_sampling(args)


def check_rollouts(args):
    if not 0 < args.clip_low <= 1:
        raise InputError(f"--clip_low {args.clip_low}: must lie in (0, 1], the ratio is clipped below 1 - clip_low")
    if args.max_steps < 0:
        raise InputError(f"--max_steps {args.max_steps}: must not be negative")
    num_processes = world_size()
    if args.prompts_per_step % (num_processes * args.num_minibatches):
        raise InputError(
            f"--prompts_per_step {args.prompts_per_step} is not a multiple of {num_processes} processes x "
            f"--num_minibatches {args.num_minibatches} = {num_processes * args.num_minibatches}"
        )
    if args.dual_clip and args.dual_clip <= 1:
        raise InputError(f"--dual_clip {args.dual_clip}: must be above 1 (0 turns it off)")


def check_pairs(args):
    if args.max_steps < -1:
        raise InputError(f"--max_steps {args.max_steps}: must be -1 (no cap), 0 or more")
    num_processes = world_size()
    if args.pairs_per_step % num_processes:
        raise InputError(f"--pairs_per_step {args.pairs_per_step} is not a multiple of {num_processes} processes")
    if args.micro_batch_size < 2:
        raise InputError("--micro_batch_size 1: a pair is two completions in one forward, at least 2 are needed")
    if args.max_length < 3:
        raise InputError(f"--max_length {args.max_length}: a prompt, a completion and its end are at least 3 tokens")


def check_sampling(args):
    if not 0 < args.eval_top_p <= 1:
        raise InputError(f"--eval_top_p {args.eval_top_p}: must lie in (0, 1]")
    if args.eval_k > args.eval_samples and args.eval_temperature > 0:
        raise InputError(f"--eval_k {args.eval_k} is more than --eval_samples {args.eval_samples}")
    samples = "group_size" if hasattr(args, "group_size") else "pair_samples"
    most = max(getattr(args, samples), args.eval_samples)
    if 0 < args.rollout_batch_size < most:
        raise InputError(
            f"--rollout_batch_size {args.rollout_batch_size}: the completions of one prompt are sampled together, "
            f"{most} are needed (the larger of --{samples} and --eval_samples)"
        )


def last_step(args, pairs):
    """The step at which a run over given preference pairs ends; max_steps without any, where a script makes its own."""
    if not pairs:
        if args.max_steps < 0 and args.lr_scheduler != "constant":
            raise InputError(f"--lr_scheduler {args.lr_scheduler} needs to know the end of the run: give --max_steps")
        return args.max_steps
    steps = len(pairs) * args.num_epochs // args.pairs_per_step
    return steps if args.max_steps < 0 else min(steps, args.max_steps)


def learning_rate(step, args, last=None):
    """The rate of step `step` (counted from 0): linear warm-up, times the schedule, constant within a step.

    The schedule ends at step `last` [max_steps].
    """
    warmup = min(1.0, (step + 1) / args.warmup_steps) if args.warmup_steps else 1.0
    progress = step / max(args.max_steps if last is None else last, 1)
    schedule = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return args.learning_rate * warmup * schedule[args.lr_scheduler]


def batch_equation(args, accelerator):
    """Devices and sizes of a step, once, as an equation."""
    rows, processes = args.prompts_per_step * args.group_size, accelerator.num_processes
    updates = args.num_epochs * args.num_minibatches
    step_rows = rows // args.num_minibatches
    limit = f"{args.micro_batch_tokens} tokens" if args.micro_batch_tokens else f"{args.micro_batch_size} rows"
    return (
        f"processes: {processes} on {device_and_threads(accelerator)}, {strategy(accelerator)}\n"
        f"a step: {args.prompts_per_step} prompts x {args.group_size} completions = {rows} rows; "
        f"{args.num_epochs} epochs x {args.num_minibatches} minibatches = {updates} updates of {step_rows} rows, "
        f"{step_rows // processes} on each process, at most {limit} in a forward"
    )


def pair_equation(args, accelerator):
    """Devices and sizes of a step over preference pairs, once, as an equation."""
    pairs, processes = args.pairs_per_step, accelerator.num_processes
    return (
        f"processes: {processes} on {device_and_threads(accelerator)}\n"
        f"a step: {pairs} pairs = {2 * pairs} completions, {2 * pairs // processes} on each process, at most "
        f"{args.micro_batch_size // 2} pairs in a forward; {args.num_epochs} passes over the pairs"
    )
