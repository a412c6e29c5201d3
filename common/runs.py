"""What is not algorithm: arguments, launch check, metrics file and trackers, checkpoints, clean exit."""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import itertools
import json
import logging
import math
import os
import pathlib
import pickle
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import ClassVar

import filelock
import numpy as np
import torch
import yaml
from safetensors import SafetensorError
from tqdm import tqdm

from common.masked import agree

SMALL_MODEL = 3e6  # weights; below, a second thread makes a step at most 1.2 times as fast


class InputError(ValueError):
    """Bad input: the scripts print its message as one line and exit with code 2."""


class Process:
    """What a signal and an error have to know of the run of this process, of which there is one at a time."""

    step = None  # the last finished one; None before there is a run
    bar = None
    training = False  # a signal waits for the end of the step; before, nothing would be lost
    signal = 0  # the one that came

    ECHO = 1.0  # seconds in which a second signal is the first one again, which a launcher passed on


def on_signal(number, frame):
    """The first SIGINT (Ctrl-C) or SIGTERM: end the run after the step that is being made, or at once before the first.

    The next one has its default action, which ends the process at once, in whatever it waits.
    """
    if not Process.training:
        set_handlers(signal.SIG_DFL)
        raise KeyboardInterrupt(number)
    set_handlers(signal.SIG_IGN)
    Process.signal = number
    if int(os.environ.get("RANK", 0)) == 0:  # not by print(), which the signal may have interrupted
        text = f"\n{script_name()}: {signal.Signals(number).name}: stops after this step; a second one ends at once\n"
        os.write(2, text.encode())
    time.sleep(Process.ECHO)
    set_handlers(signal.SIG_DFL)


def set_handlers(action):
    """Give SIGINT and SIGTERM this action each; return {signal: the one before}. Only the main thread may."""
    if threading.current_thread() is threading.main_thread():
        return {number: signal.signal(number, action) for number in (signal.SIGINT, signal.SIGTERM)}
    return {}


@contextlib.contextmanager
def clean_exit():
    """End on an InputError with its message as one line and exit code 2; other exceptions keep their traceback.

    A signal ends the run after its step (`on_signal`). One of several processes leaves at once, without the
    interpreter's clean-up: freeing a process group that a wrapped model still uses can hang, and the launcher stops the
    others only when this one is gone.
    """
    Process.step, Process.bar, Process.training, Process.signal = None, None, False, 0
    before = set_handlers(on_signal)
    try:
        yield
        return
    except (Exception, KeyboardInterrupt) as error:
        set_handlers(signal.SIG_DFL)
        code = report(error)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    sys.stdout.flush()
    sys.stderr.flush()
    if world_size() > 1:
        os._exit(code)
    raise SystemExit(code)


def report(error):
    """Print why the run ends, below its progress bar; return the exit code.

    An error that all processes have is printed by the first of each machine: it waits least, and the launcher ends the
    others once it is gone. So it does with one that fails only because another one is gone.
    """
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if world_size() > 1 and not isinstance(error, KeyboardInterrupt):
        time.sleep(1 if first else 3)
    if Process.bar is not None:
        Process.bar.close()
        if int(os.environ.get("RANK", 0)) > 0:  # its own bar is hidden, that of the first process may be in the line
            print(file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        if first:
            print(f"{script_name()}: {signal.Signals(number).name} before the first step", file=sys.stderr)
        return 128 + number
    if not isinstance(error, InputError):
        traceback.print_exception(error)
        return 1
    if error.__cause__ is not None:  # the user's own code failed: they need to see where
        traceback.print_exception(error.__cause__)
    when = "" if Process.step is None else f" (after step {Process.step})"
    print(f"{script_name()}: error: {error}{when}", file=sys.stderr)
    return 2


def script_name():
    return pathlib.Path(sys.argv[0]).name


def one_line(error):
    """The message of an exception of a library, in one line."""
    return " ".join(str(error).split())


def world_size():
    """The number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


# --- arguments ---


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


def pair_equation(args, accelerator):
    """Devices and sizes of a step over preference pairs, once, as an equation."""
    pairs, processes = args.pairs_per_step, accelerator.num_processes
    return (
        f"processes: {processes} on {device_and_threads(accelerator)}\n"
        f"a step: {pairs} pairs = {2 * pairs} completions, {2 * pairs // processes} on each process, at most "
        f"{args.micro_batch_size // 2} pairs in a forward; {args.num_epochs} passes over the pairs"
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


def stream_seed(*key):
    """One seed out of several numbers, such as (seed, rank, step, round): streams of unequal keys are independent."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)


# --- metrics ---


class Metrics:
    """The metrics of one step: each a global sum over a global count, a global maximum, or a quantile of all values.

    Every process adds the same names in the same order, whatever its data, so that one reduction serves all.
    """

    def __init__(self, step=0):
        self.step = step  # for messages
        self.sums, self.maxima = {}, {}  # {(name, kind): (numerator, denominator)}, {name: value}
        self.values = {}  # {name: [values]} of which quantiles are taken; NaN does not count

    def add(self, name, values, mask=None):
        """Count `values` (any shape), or those where `mask` is true, towards the mean `name`."""
        values = torch.as_tensor(values).detach().double()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.expand_as(values)
        self.add_ratio(name, torch.where(mask, values, 0).sum(), mask.sum())

    def add_max(self, name, values, mask=None):
        """Count `values` (any shape), or those where `mask` is true, towards the maximum `name`."""
        values = torch.as_tensor(values).detach().double()
        value = (values if mask is None else torch.where(mask, values, -math.inf)).max()
        self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def add_stats(self, group, stats, mask):
        """Count {name: values} as `group/name`: means over the tokens of `mask` (R, T), of values (R, 1) over its rows.

        Names in `_max` are maxima; of `x_quantiles` the 50th, 90th and 99th percentile are `x_p50`, `x_p90`, `x_p99`.
        """
        for name, values in stats.items():
            counted = mask if values.shape == mask.shape else mask.any(dim=1, keepdim=True)
            if name.endswith("_quantiles"):
                values = torch.where(counted, values.detach().double(), math.nan).flatten()
                self.values.setdefault(f"{group}/{name.removesuffix('_quantiles')}", []).append(values)
                continue
            add = self.add_max if name.endswith("_max") else self.add
            add(f"{group}/{name}", values, counted)

    def add_ratio(self, name, numerator, denominator, kind="mean"):
        """Count towards `name` = sum of numerators / sum of denominators; stays on the device, nothing waits for it."""
        total, count = self.sums.get((name, kind), (0.0, 0.0))
        self.sums[name, kind] = total + numerator, count + denominator

    def add_std(self, name, values):
        """Count `values` (R,) towards their standard deviation (ddof 0), computed from sums."""
        values = values.detach().double()
        self.add_ratio(name, values.sum(), len(values), kind="std")
        self.add_ratio(name, values.square().sum(), len(values), kind="square")

    def reduce(self, accelerator):
        """{name: float} over all processes; a name without anything to count is left out."""
        result = {}
        if self.sums:
            pairs = [float(x) for pair in self.sums.values() for x in pair]
            pairs = torch.tensor(pairs, dtype=torch.float64, device=accelerator.device).view(-1, 2)
            pairs = accelerator.reduce(pairs, "sum").tolist()
            means = {key: total / count for key, (total, count) in zip(self.sums, pairs, strict=True) if count}
            for (name, kind), mean in means.items():
                if kind == "std":
                    mean = max(0.0, means[name, "square"] - mean**2) ** 0.5
                if kind != "square":
                    result[name] = mean
        if self.maxima:
            maxima = [[float(value) for value in self.maxima.values()]]
            maxima = torch.tensor(maxima, dtype=torch.float64, device=accelerator.device)
            maxima = accelerator.gather(maxima).amax(dim=0).tolist()
            result |= {name: value for name, value in zip(self.maxima, maxima, strict=True) if value > -math.inf}
        for name, parts in self.values.items():  # processes hold unequally many
            values = accelerator.pad_across_processes(torch.cat(parts), pad_index=math.nan)
            values = accelerator.gather(values)
            values = values[~values.isnan()].cpu()
            if len(values):
                result |= {f"{name}_p{p}": float(np.percentile(values.numpy(), p)) for p in (50, 90, 99)}
        return result


def rollout_metrics(metrics, batch, rewards, correct, parts, group_size):
    """The reward/, reward_part/, completion/ and advantage/ metrics of a rollout, over all that was drawn.

    With `rewards` None without those of `reward_metrics`, for a script that trains on some of it only.
    """
    if rewards is not None:
        reward_metrics(metrics, rewards, group_size)
    lengths = batch["completion_mask"].sum(dim=1).cpu()
    right = torch.full(lengths.shape, math.nan, dtype=torch.float64) if correct is None else correct
    metrics.add("reward/accuracy", right, ~right.isnan())
    for name, part in parts.items():
        metrics.add(f"reward_part/{name}", part, ~part.isnan())
    metrics.add("completion/length", lengths)
    metrics.add("completion/length_correct", lengths, right == 1)
    metrics.add("completion/length_incorrect", lengths, right == 0)
    metrics.add("completion/truncated", batch["truncated"].cpu())
    if group_size == 1:
        return
    rows = [tuple(ids[:length]) for ids, length in zip(batch["completions"].tolist(), lengths.tolist(), strict=True)]
    for start in range(0, len(rows), group_size):
        metrics.add("completion/unique", len(set(rows[start : start + group_size])) / group_size)


def reward_metrics(metrics, rewards, group_size):
    """The metrics of what the advantage sees."""
    metrics.add("reward/mean", rewards)
    metrics.add_std("reward/std", rewards)
    groups = rewards.view(-1, group_size)
    if group_size > 1:
        metrics.add("advantage/zero_groups", agree(*groups.aminmax(dim=1)))


def pair_metrics(metrics, pairs, start, device):
    """Lengths of this process's pairs of a step, seconds and tokens per second of its update, and peak memory.

    The tokens count the prompt once for each of the two completions.
    """
    metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
    metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
    tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    seconds = time.perf_counter() - start
    metrics.add("time/update_s", seconds)
    metrics.add_ratio("time/update_tokens_per_s", tokens * world_size(), seconds)
    metrics.add_max("memory/peak_gb", peak_memory_gb(device))


def time_metrics(metrics, batch, start, rollout_end, args, drawn_tokens=None):
    """Seconds and tokens per second of the rollout (rewards included) and of the update just done, and peak memory.

    `drawn_tokens`: the completion tokens of the rollout, where `batch` does not hold all of them.
    """
    seconds = {"rollout": rollout_end - start, "update": time.perf_counter() - rollout_end}
    # Local tokens x processes over the sum of seconds is all tokens over the mean of seconds.
    tokens = float(batch["completion_mask"].sum())
    tokens = {"rollout": tokens if drawn_tokens is None else drawn_tokens, "update": tokens * args.num_epochs}
    for phase in ("rollout", "update"):
        metrics.add(f"time/{phase}_s", seconds[phase])
        metrics.add_ratio(f"time/{phase}_tokens_per_s", tokens[phase] * world_size(), seconds[phase])
    metrics.add_max("memory/peak_gb", peak_memory_gb(batch["completions"].device))


def samples(prompts, texts, rewards, parts, group_size):
    """The completions of this process's first prompt, for samples.jsonl."""
    return [
        {
            "prompt": prompts[0].prompt,
            "completion": texts[i],
            "answer": prompts[0].answer,
            "reward": float(rewards[i]),
            "parts": {name: None if part[i].isnan() else float(part[i]) for name, part in parts.items()},
        }
        for i in range(group_size)
    ]


# --- a run ---


def launch(args):
    """The Accelerator of this process, after a check that the launcher and it agree on the number of processes."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import set_seed

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)  # until the size of the model is known: `set_threads`
    patience = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=2))  # of a process whose rewards are ready early
    try:
        accelerator = Accelerator(cpu=on_cpu, log_with=args.report_to or None, kwargs_handlers=[patience])
    except ValueError as error:
        raise InputError(f"--report_to {' '.join(args.report_to)}: {error}") from None
    if world_size() != accelerator.num_processes:
        raise InputError(
            f"the launcher started {world_size()} processes but Accelerate sees {accelerator.num_processes}: each "
            "would train alone and write the same files; on CPU set ACCELERATE_USE_CPU=true"
        )
    if accelerator.distributed_type not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"):
        raise InputError(f"{accelerator.distributed_type.value} is not supported: DDP, FSDP2 or DeepSpeed (configs/)")
    if accelerator.gradient_accumulation_steps != 1:  # backward() would divide the loss by it
        raise InputError("gradient_accumulation_steps of accelerate must be 1: use --micro_batch_size")
    if accelerator.mixed_precision == "fp16":
        raise InputError("mixed precision fp16 is not supported (no loss scaling here): use bf16 or no")
    if accelerator.parallelism_config is not None:  # the processes of a tensor or sequence group need the same prompts
        raise InputError("parallelism_config of accelerate is not supported: each process has prompts of its own")
    if accelerator.distributed_type == "FSDP":
        set_up_fsdp(accelerator.state.fsdp_plugin, accelerator.mixed_precision)
    if accelerator.distributed_type == "DEEPSPEED":
        set_up_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, args)
    missing = set(args.report_to) - {str(tracker) for tracker in accelerator.log_with}
    if missing:
        raise InputError(f"--report_to {' '.join(sorted(missing))}: the package is not installed")
    set_seed(args.seed)
    return accelerator


def set_threads(weights):
    """Choose the threads on CPU for a model of so many weights: its share of the cores, or one for a small model.

    Threads wait for each other by spinning. Beside a busy process that takes a small model, whose operations are short,
    tens of times as long as one thread does, and a second thread would gain it little (docs/performance.md).
    """
    if torch.cuda.is_available():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(1 if weights < SMALL_MODEL else share)  # `accelerate launch` sets OMP_NUM_THREADS=1


def device_and_threads(accelerator):
    """Where this process computes, for the lines at start."""
    if accelerator.device.type != "cpu":
        return accelerator.device.type
    return f"cpu (threads of each: {torch.get_num_threads()})"


def set_up_fsdp(plugin, mixed_precision):
    """Refuse what FSDP cannot do here, and keep what `forward` returns in float32."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    if plugin.fsdp_version != 2:
        raise InputError("FSDP 1 is not supported: set fsdp_version: 2 (configs/fsdp2.yaml)")
    if plugin.cpu_ram_efficient_loading:  # only the first process would have weights, the reference stays unsharded
        raise InputError("fsdp_cpu_ram_efficient_loading is not supported: set it to false (configs/fsdp2.yaml)")
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise InputError("fsdp_offload_params is not supported: set it to false (configs/fsdp2.yaml)")
    if mixed_precision == "bf16":
        # Accelerate's policy rounds what leaves `forward`, float32 log-probs, to bfloat16, and sums gradients in that.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def set_up_deepspeed(config, args):
    """Refuse what DeepSpeed cannot do here, and complete its configuration."""
    from transformers.integrations import unset_hf_deepspeed_config

    zero = config["zero_optimization"]
    if config.get("gradient_accumulation_steps", "auto") not in ("auto", 1):
        raise InputError("gradient_accumulation_steps of DeepSpeed must be 1: use --micro_batch_size")
    clipping = config.get("gradient_clipping", "auto")
    if clipping not in ("auto", args.max_grad_norm):
        raise InputError(
            f"gradient_clipping {clipping} of DeepSpeed is not --max_grad_norm {args.max_grad_norm}: leave it out"
        )
    if zero["stage"] == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise InputError("ZeRO-3 cannot write model/: set zero3_save_16bit_model: true (configs/zero3.yaml)")
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        raise InputError("offload_param of DeepSpeed is not supported: set it to none (configs/zero3.yaml)")
    config["gradient_clipping"] = args.max_grad_norm
    config["train_micro_batch_size_per_gpu"] = 1  # asked for where no DataLoader is prepared; micro-batches are ours
    unset_hf_deepspeed_config()  # else ZeRO-3 partitions every model that is loaded, the frozen reference too


def strategy(accelerator):
    """How the weights lie on the processes."""
    if accelerator.distributed_type == "DEEPSPEED":
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return {"NO": "single", "FSDP": "FSDP2"}.get(accelerator.distributed_type.value, "DDP")


@contextlib.contextmanager
def gradient_sync(accelerator, model, last):
    """Around forward and backward of a micro-batch: gradients add up, and are averaged over processes at the last one.

    FSDP2 averages at each: otherwise every process would collect the gradients of the whole model.
    """
    accelerator.sync_gradients = last  # the prepared optimizer's step() reads it; DeepSpeed steps where it is true
    with contextlib.nullcontext() if last or accelerator.is_fsdp2 else accelerator.no_sync(model):
        yield


def clip_grad_norm(accelerator, parameters, max_norm):
    """The norm (0-d) of the gradients over all processes, before they are scaled down to `max_norm` (0: off).

    DeepSpeed has done both at the last backward, over all parameters together, and stepped; this is then its norm.
    """
    norm = accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)


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


class Run:
    """The folder of a run: args.json, metrics.jsonl, samples.jsonl, checkpoints/ and, at the end, model/.

    The first process locks the folder for as long as the run lives: a second run would mix its rows with these. `step`
    counts the finished steps. What an algorithm has to keep besides weights and optimizer it gives to `keep`.
    """

    FILES = ("args.json", "metrics.jsonl", "samples.jsonl", "pairs-round-*.jsonl", "checkpoints", "model")
    # On a resume these may differ from the checkpoint's; max_steps only where the schedule does not depend on it.
    MAY_CHANGE = ("output_dir", "resume", "save_every", "keep_checkpoints", "report_to")
    lock = None  # on the folder of the run of this process

    def __init__(self, accelerator, args, script):
        from accelerate.utils import broadcast_object_list

        self.accelerator, self.args, self.script = accelerator, args, script
        self.step, self.first_eval, self.last_eval, self.saved_step = 0, None, None, None
        self.kept = {"run": self}
        self.exit_code, self.interrupted = 0, False
        self.started = time.perf_counter()
        folder = [None]
        with agreed(accelerator):
            if accelerator.is_main_process:
                with writing("the folder of the run"):
                    folder = [str(self.claim_folder())]
        self.folder = pathlib.Path(broadcast_object_list(folder)[0])
        if args.report_to:
            accelerator.project_configuration.set_directories(str(self.folder))
            config = {k: " ".join(v) if isinstance(v, list) else v for k, v in dataclasses.asdict(args).items()}
            accelerator.init_trackers(script, config=config)

    def claim_folder(self):
        """Make the folder of the run and lock it. InputError where another run holds it, or it holds other things."""
        unlock_folder()  # of an earlier run in this process, which ended with an exception
        if self.args.output_dir:
            folder = pathlib.Path(self.args.output_dir)
            self.check_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = new_folder(f"runs/{self.script}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        Run.lock = filelock.FileLock(folder / "lock", blocking=False)
        try:
            Run.lock.acquire()
        except filelock.Timeout:
            raise InputError(f"--output_dir {folder}: another run is at work in it") from None
        self.check_folder(folder)  # again: that run may have ended between the first look and the lock
        return folder

    def check_folder(self, folder):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output_dir {folder}: is not a folder")
        found = [path.name for pattern in self.FILES for path in sorted(folder.glob(pattern))]
        if found and "args.json" not in found:
            raise InputError(
                f"--output_dir {folder} is not the folder of a run and holds {', '.join(found)}: a run would overwrite "
                "that, take another folder"
            )
        if found and not self.args.resume:
            raise InputError(
                f"--output_dir {folder} holds a run already: --resume goes on with it, another folder starts afresh"
            )
        if "model" in found and not find_checkpoints(folder):
            raise InputError(
                f"--output_dir {folder} holds a finished run without checkpoints (--save_every): nothing to go on from"
            )

    def keep(self, **parts):
        """Make `parts` part of each checkpoint: {name: object}, equal on all processes.

        `state_dict()` of an object gives what JSON can hold, so that loading a checkpoint runs no code;
        `load_state_dict` takes it back. Floats return bit by bit, tuples as lists.
        """
        self.kept |= parts

    def state_dict(self):
        return {"step": self.step, "first_eval": self.first_eval, "last_eval": self.last_eval}

    def load_state_dict(self, state):
        self.step, self.first_eval, self.last_eval = state["step"], state["first_eval"], state["last_eval"]

    def print(self, text):
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def restore(self):
        """With --resume: load the last checkpoint, cut the files back to it. Call after `keep`."""
        from accelerate.utils import broadcast_object_list

        main, path = self.accelerator.is_main_process, [None]
        with agreed(self.accelerator):
            if main and self.args.resume:
                path = [self.last_checkpoint()]
        path = broadcast_object_list(path)[0]
        if path:
            self.load(path)
            self.print(f"resumed {path}")
        elif self.args.resume:
            self.print(f"no checkpoint in {self.folder}: starting at step 0")
        with agreed(self.accelerator):
            if main:
                names = ("metrics.jsonl", "samples.jsonl")
                texts = [rows_up_to(self.folder / name, self.step if path else -1) for name in names]
                write_text(self.folder / "args.json", json.dumps(dataclasses.asdict(self.args), indent=2) + "\n")
                for name, text in zip(names, texts, strict=True):
                    write_text(self.folder / name, text)
        hidden = not main or self.args.max_steps == 0
        total = self.args.max_steps if self.args.max_steps > 0 else None
        self.bar = tqdm(total=total, initial=self.step, unit="step", disable=hidden)
        Process.step, Process.bar, Process.training = self.step, self.bar, self.first_eval is not None

    def last_checkpoint(self):
        """The last checkpoint, complete and of this very run; None without one."""
        done = find_checkpoints(self.folder)
        if done:
            self.check_checkpoint(done[-1])
            return done[-1]

    def check_checkpoint(self, path):
        meta = read_meta(path)
        then = f"{meta['script']}.py on {meta['processes']} processes ({meta['strategy']})"
        now = f"{self.script}.py on {self.accelerator.num_processes} processes ({strategy(self.accelerator)})"
        if then != now:
            raise InputError(f"{path} is of {then}, this is {now}: an exact resume is impossible")
        now = self.accelerator.mixed_precision
        if meta["mixed_precision"] != now:
            raise InputError(f"{path} was trained with mixed precision {meta['mixed_precision']}, this run has {now}")
        if meta["threads"] != torch.get_num_threads():
            self.print(f"{meta['threads']} threads before, {torch.get_num_threads()} now: not bit by bit the same run")
        old, new = meta["args"], dataclasses.asdict(self.args)
        may_change = self.MAY_CHANGE + (("max_steps",) if self.args.lr_scheduler == "constant" else ())
        differing = [name for name in new if old.get(name) != new[name]]
        differing = [name for name in differing if name not in may_change and not name.startswith("eval_")]
        if differing:
            values = ", ".join(f"--{name} was {old.get(name)}, is {new[name]}" for name in differing)
            raise InputError(f"{path} is of a run with other options: {values}")
        damaged = [name for name, checksum in meta["files"].items() if file_checksum(path / name) != checksum]
        if damaged:
            raise InputError(f"{path}: missing or damaged: {', '.join(damaged)}")

    def load(self, path):
        """Load a checkpoint. Of one process and of DDP nothing is unpickled but tensors and plain data."""
        from accelerate.utils import load

        try:
            self.accelerator.load_state(str(path))
            # load_state() goes on with other random numbers where it cannot read them.
            load(path / f"random_states_{self.accelerator.process_index}.pkl")
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            for name, part in self.kept.items():
                part.load_state_dict(state[name])
        except InputError:
            raise
        except pickle.UnpicklingError:
            raise InputError(f"{path}: a file holds more than tensors and plain data, it is not loaded") from None
        except Exception as error:  # each format has its own way to fail
            raise InputError(f"{path} cannot be loaded: {type(error).__name__}: {one_line(error)}") from None
        self.saved_step = self.step

    def log(self, metrics, samples=()):
        """Write the row of `self.step` to metrics.jsonl and the trackers, and sample completions to samples.jsonl."""
        if self.accelerator.is_main_process:
            append(self.folder / "metrics.jsonl", [{"step": self.step, **metrics}])
            append(self.folder / "samples.jsonl", [{"step": self.step, **sample} for sample in samples])
        self.accelerator.log(metrics, step=self.step)
        if samples and self.step & (self.step - 1) == 0:  # steps 1, 2, 4, 8, ...
            sample = samples[0]
            reward = f"step {self.step}, reward {sample['reward']:g}"
            self.print(f"{reward}: {sample['prompt']!r} -> {sample['completion']!r}")

    def log_evaluation(self, result):
        """Remember an evaluation: the first and the last one make the closing line."""
        self.first_eval = self.first_eval or result
        self.last_eval = result
        Process.training = True
        self.print(f"step {self.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))

    def progress(self, metrics):
        """Advance the progress bar."""
        shown = {"reward": "reward/mean", "length": "completion/length", "entropy": "policy/entropy"}
        shown |= {"margin": "rewards/margin", "accuracy": "rewards/accuracy"}
        self.bar.set_postfix({short: f"{metrics[name]:.3f}" for short, name in shown.items() if name in metrics})
        self.bar.update()
        Process.step = self.step

    def due(self, every, at_end):
        """Whether what is done every so many steps (0: never) is due; `at_end`: also after the last step."""
        return (at_end and self.step >= self.args.max_steps) or (every > 0 and self.step % every == 0)

    def stop_asked(self):
        """At the end of a step: whether any process was sent a signal, so that all of them save and stop now."""
        number = torch.tensor([Process.signal], device=self.accelerator.device)
        number = int(self.accelerator.gather(number).max())
        self.interrupted, self.exit_code = number > 0, 128 + number if number else 0
        return self.interrupted

    def save(self):
        """Write checkpoints/step-N, unless it is there; into a temporary folder first, renamed when it is complete."""
        if self.saved_step == self.step:
            return
        accelerator, root = self.accelerator, self.folder / "checkpoints"
        temporary, final = root / "tmp", root / f"step-{self.step:08d}"
        with writing(final):
            if accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            accelerator.wait_for_everyone()
            logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # it warns of tied heads: they return
            accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()  # save_state has no barrier at its end
            if accelerator.is_main_process:
                self.complete(temporary)
                put_in_place(temporary, final)
                done = [path for path in find_checkpoints(self.folder) if (path / "meta.json").exists()]
                for old in done[: -self.args.keep_checkpoints]:  # after the new one is there
                    shutil.rmtree(old)
        self.saved_step = self.step
        accelerator.wait_for_everyone()

    def complete(self, folder):
        """Write into a checkpoint what Accelerate does not: what is kept, whose it is, and what its files hold."""
        state = {name: part.state_dict() for name, part in self.kept.items()}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        files = [path for path in folder.rglob("*") if path.is_file()]
        meta = {
            "script": self.script,
            "processes": self.accelerator.num_processes,
            "strategy": strategy(self.accelerator),
            "args": dataclasses.asdict(self.args),
            "mixed_precision": self.accelerator.mixed_precision,
            "threads": torch.get_num_threads(),
            "files": {str(path.relative_to(folder)): file_checksum(path) for path in files},
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")

    def finish(self, model, policy, tokenizer):
        """Write model/ where steps were made, and print the closing line: the score before and after, or how to go on.

        Where model/ cannot be written, a checkpoint is written and an InputError raised: a resume does the rest.
        """
        self.bar.close()
        if self.interrupted:
            self.print(f"stopped at step {self.step}: --resume --output_dir {self.folder} goes on")
            return
        if self.step > 0:
            try:
                self.write_model(model, policy, tokenizer)
            except InputError as error:
                try:
                    self.save()
                except InputError as also:
                    raise InputError(f"{error}; {also}; the steps since the last checkpoint are lost") from None
                raise InputError(
                    f"{error}; the training is kept in checkpoints/: make room, --resume then writes model/"
                ) from None
        name = next(
            (name for name in ("eval/pass@1", "eval/accuracy", "eval/reward") if name in (self.last_eval or {})), None
        )
        scores = f"{name} before {self.first_eval[name]:.3f}, after {self.last_eval[name]:.3f}; " if name else ""
        seconds = time.perf_counter() - self.started
        self.print(f"{scores}{self.step} steps, {seconds:.1f} s, in {self.folder}")

    def write_model(self, model, policy, tokenizer):
        from common.model import save_pretrained

        temporary, final = self.folder / "model.tmp", self.folder / "model"
        with agreed(self.accelerator):
            try:
                with writing(final):
                    if self.accelerator.is_main_process:
                        shutil.rmtree(temporary, ignore_errors=True)
                    save_pretrained(self.accelerator, model, policy, tokenizer, temporary)
                    if self.accelerator.is_main_process:
                        shutil.rmtree(final, ignore_errors=True)  # of a run that a resume made longer
                        put_in_place(temporary, final)
            except InputError:
                shutil.rmtree(temporary, ignore_errors=True)  # room for a checkpoint
                raise


def close(accelerator, exit_code=0):
    """The end of every process. Delete each name that holds the prepared model first: gloo can hang otherwise."""
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()
    unlock_folder()
    if exit_code:
        raise SystemExit(exit_code)


def unlock_folder():
    """Let go of the folder of this process's run, if it has one."""
    if Run.lock:
        Run.lock.release(force=True)
        Run.lock = None


@contextlib.contextmanager
def agreed(accelerator):
    """Around what the first process does alone: an InputError there is raised on all processes."""
    from accelerate.utils import broadcast_object_list

    problem = None
    try:
        yield
    except InputError as error:
        if not accelerator.is_main_process:
            raise
        problem = str(error)
    problem = broadcast_object_list([problem])[0]
    if problem:
        raise InputError(problem)


@contextlib.contextmanager
def writing(what):
    """Around what writes `what`: an InputError where that fails (disk full, no permission, a name too long)."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # the last one is torch.save's
        raise InputError(f"{what} cannot be written: {one_line(error)}") from None


def new_folder(name):
    """Make a folder that was not there: `name`, or, where another run was faster, `name`-2, `name`-3, ..."""
    for number in itertools.count(1):
        folder = pathlib.Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def find_checkpoints(folder):
    """The folders checkpoints/step-N of a run, oldest first. What has any other name is not the run's."""
    root = folder / "checkpoints"
    paths = sorted(root.iterdir()) if root.is_dir() else []
    return [path for path in paths if re.fullmatch("step-[0-9]{8}", path.name) and path.is_dir()]


def read_meta(path):
    """What meta.json says of a checkpoint."""
    names = ("script", "processes", "strategy", "args", "mixed_precision", "threads", "files")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        meta = {name: meta[name] for name in names}
        return meta | {name: dict(meta[name]) for name in ("args", "files")}
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(f"{path}: missing or damaged: meta.json") from None


def file_checksum(path):
    """SHA-256 of a file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def put_in_place(temporary, final):
    """Rename a folder once all its files are on the disk: a crash leaves `final` whole or not at all."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    os.replace(temporary, final)


def append(path, rows):
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_rows(path, rows):
    """A JSONL file of these rows alone."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def rows_up_to(path, step):
    """The text of a JSONL file up to `step`, and without a last line that is cut: the rest came after the checkpoint.

    Raises InputError where a line is not a row of a run.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}") from None
    kept = []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                text = line.decode()
                later = json.loads(text)["step"] > step
            except (ValueError, LookupError, TypeError):
                raise InputError(f"{path}, line {number}: damaged, not a row that a run wrote") from None
            kept += [] if later else [text]
    return "".join(kept)


def write_text(path, text):
    """Write a file in one act: there is the old one or the new one, never a part."""
    temporary = path.with_suffix(".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def peak_memory_gb(device):
    """Peak memory of this process so far in GB: allocated on the GPU, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
