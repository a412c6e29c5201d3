"""Options: their declaration with bounds, the command line, and what sizes a step has."""

import argparse
import copy
import dataclasses
import math
import sys
from dataclasses import dataclass
from typing import Literal

from common.errors import InputError, world_size
from common.harness.config_file import yaml_arguments
from common.harness.distributed import device_and_threads, strategy
from common.harness.names import name_here

GROUPS = {  # of --help, in this order
    "model": "model",
    "data": "data",
    "reward": "reward",
    "run": "run",
    "batch": "batch (sizes are global: over all processes)",
    "sampling": "sampling",
    "optimizer": "optimizer (AdamW)",
    "algorithm": "algorithm",
    "evaluation": "evaluation",
}


class OneOrMore(argparse.Action):
    """With nargs="+": one value is itself, several are a list."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def option(default, help, group="algorithm", *, above=None, least=None, most=None, below=None, several=False):
    """A field of `Args`: its help text, its group in `--help`, bounds for `check_value`; `several` values or one."""
    factory = isinstance(default, list)
    default = {"default_factory": default.copy} if factory else {"default": default}
    bounds = dict(above=above, least=least, most=most, below=below)
    parsed = {"help": help.replace("%", "%%")} | ({"nargs": "+", "action": OneOrMore} if several else {})
    return dataclasses.field(**default, metadata={"group": group, "bounds": bounds, "parsed": parsed})


@dataclass
class RunArgs:
    """The options of every script: model, data, run, optimizer."""

    model_name_or_path: str = option(
        "embedded",
        "hub id or folder of a causal LM; or `embedded`, `embedded-hard`",
        "model",
    )
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "dtype of the weights; bfloat16 keeps no float32 copy and loses small updates: prefer accelerate's bf16",
        "model",
    )
    attn_implementation: str = option(
        "sdpa",
        "attention of transformers: sdpa (eager where a model lacks it), eager, ... (flash needs a GPU and bfloat16)",
        "model",
    )
    gradient_checkpointing: bool = option(
        False, "recompute activations in the backward pass: less memory, slower", "model"
    )
    lora_rank: int = option(
        0, "train LoRA adapters of this rank on all linear layers in place of the weights (0: off)", "model", least=0
    )
    lora_alpha: int = option(32, "adapters are scaled by this / --lora_rank", "model", above=0)
    lora_merge: bool = option(False, "write models with the adapters merged, not as PEFT adapter folders", "model")

    dataset: str = option(
        "embedded",
        "hub id, folder, .jsonl .json .csv .parquet files, or a pattern; or `embedded`, `embedded-hard`",
        "data",
        several=True,
    )
    dataset_config: str | None = option(None, "configuration of a hub dataset, such as main for openai/gsm8k", "data")
    dataset_split: str = option("train", "split to train on", "data")
    eval_dataset: str | None = option(
        None,
        "evaluation data, like --dataset [its test split, a test file beside it, or 5 % of it]",
        "data",
        several=True,
    )
    eval_split: str | None = option(None, "split to evaluate on [test, then validation]", "data")
    prompt_column: str | None = option(None, "column of the prompts [recognized by its name]", "data")
    system_prompt: str | None = option(None, "system message; without a chat template, text before the prompt", "data")
    prompt_template: str | None = option(None, "text around the user's prompt; it must contain {prompt}", "data")
    chat_template_kwargs: str | None = option(None, 'JSON for the template, as {"enable_thinking": false}', "data")

    output_dir: str | None = option(None, "folder of the run [runs/<script>-<time>]", "run")
    seed: int = option(0, "seed of data order, sampling and evaluation", "run", least=0, below=2**32)  # numpy's bound
    resume: bool = option(False, "continue from the last checkpoint in --output_dir", "run")
    max_steps: int = option(50, "rollouts with their updates; 0 only evaluates", "run", least=0)
    save_every: int = option(0, "steps between checkpoints (0: none)", "run", least=0)
    keep_checkpoints: int = option(2, "how many checkpoints to keep", "run", above=0)
    save_model_every: int = option(
        0, "steps between model-step-N/ folders, as model/ at the end (0: none)", "run", least=0
    )
    report_to: list[str] = option([], "experiment trackers: tensorboard, wandb, trackio", "run")
    dry_run: bool = option(False, "print an estimate of the memory that a step takes, and stop", "run")
    reward_changed: bool = option(False, "with --resume: go on although a file of --reward has changed", "run")

    learning_rate: float = option(1e-4, "peak learning rate", "optimizer", above=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = option(
        "constant", "schedule of the learning rate over max_steps, multiplied by the warm-up", "optimizer"
    )
    warmup_steps: int = option(0, "steps of linear warm-up", "optimizer", least=0)
    weight_decay: float = option(0.0, "decoupled weight decay", "optimizer", least=0)
    adam_beta1: float = option(0.9, "decay of the first moment", "optimizer", least=0, below=1)
    adam_beta2: float = option(0.999, "decay of the second moment", "optimizer", least=0, below=1)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm (0: off)", "optimizer", least=0)

    @classmethod
    def parse(cls, argv=None):
        """The options of the command line (`parse_args`). With --dry_run this is the end."""
        args = parse_args(cls, argv)
        if args.dry_run:
            from common.harness.dry_run import dry_run

            dry_run(args)
            raise SystemExit(0)
        return args


@dataclass
class RolloutArgs(RunArgs):
    """The options of every script that samples: those of `RunArgs`, reward, sampling and evaluation."""

    answer_column: str | None = option(None, "column of the gold answers [recognized by its name]", "data")
    max_prompt_tokens: int = option(512, "prompts with more tokens are dropped", "data", above=0)

    reward: list[str] = option(
        ["accuracy"], "accuracy, format, math_verify, file.py:function or module:function", "reward"
    )
    reward_weights: list[float] | None = option(None, "one weight for each --reward [1 each]", "reward")

    rollout: Literal["shared", "stock"] = option(
        "shared", "shared: compute each prompt once, drop finished rows; stock: generate() of transformers", "sampling"
    )
    rollout_batch_size: int = option(
        0, "at most this many completions in one generate() call of a process (0: all)", "sampling", least=0
    )

    eval_every: int = option(
        25,
        "steps between evaluations; one before and one after training are always done (0: only these)",
        "evaluation",
        least=0,
    )
    eval_prompts: int = option(0, "prompts per evaluation (0: all)", "evaluation", least=0)
    eval_samples: int = option(8, "completions per evaluation prompt", "evaluation", above=0)
    eval_k: int = option(4, "k of pass@k", "evaluation", above=0)
    eval_temperature: float = option(
        1.0, "sampling temperature (0: greedy, one completion, no pass@k)", "evaluation", least=0
    )
    eval_top_p: float = option(1.0, "top-p of the evaluation's sampling", "evaluation", above=0, most=1)

    @property
    def needs_answers(self):
        """Whether a reward compares with gold answers."""
        return "accuracy" in self.reward or "math_verify" in self.reward


def parse_args(cls, argv=None):
    """`cls` from the command line, checked; `--config FILE.yaml` gives defaults that the command line overrides.

    Everything goes through argparse, the file too, so that types are converted, choices checked and unknown names
    refused.
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
    check_args(args)
    return args


def check_args(args):
    """Refuse values out of bounds, sizes that do not divide, and options that exclude each other."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        for item in value if isinstance(value, list) else [value]:
            check_value(field.name, item, **field.metadata["bounds"])
    if args.resume and not args.output_dir:
        raise InputError("--resume needs --output_dir, the folder of the run to continue")
    if args.reward_changed and not args.resume:
        raise InputError("--reward_changed needs --resume: it accepts another reward file than the checkpoint's")
    if args.lora_merge and not args.lora_rank:
        raise InputError("--lora_merge needs --lora_rank: without it there are no adapters")
    if hasattr(args, "pairs_per_step"):
        check_pairs(args)
    else:
        check_rollouts(args)
    if hasattr(args, "eval_samples"):
        check_sampling(args)


def check_value(name, value, above, least, most, below):
    """Refuse text that is no Unicode, and a number that is not finite, not within the bounds of its option, or so large
    that sizes would overflow int64 and rates float32 once they are multiplied."""
    if isinstance(value, str) and value != value.encode(errors="ignore").decode():
        raise InputError(f"--{name} {value!r}: has bytes that are not UTF-8")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not abs(value) < math.inf:
        raise InputError(f"--{name} {value}: must be a finite number")
    largest = 1e30 if isinstance(value, float) else 2**31 - 1
    if most is None and below is None and value > largest:
        raise InputError(f"--{name} {value}: must be at most {largest}")
    too_low = (above is not None and value <= above) or (least is not None and value < least)
    too_high = (below is not None and value >= below) or (most is not None and value > most)
    if not too_low and not too_high:
        return
    low, high = least if above is None else above, most if below is None else below
    if low is not None and high is not None:
        rule = f"lie in {'(' if above is not None else '['}{low}, {high}{']' if most is not None else ')'}"
    elif low is not None:
        rule = f"be above {above}" if above is not None else "not be negative" if least == 0 else f"be at least {least}"
    else:
        rule = f"be below {below}" if below is not None else f"be at most {most}"
    raise InputError(f"--{name} {value}: must {rule}")


def check_rollouts(args):
    num_processes = world_size()
    if args.prompts_per_step % (num_processes * args.num_minibatches):
        raise InputError(
            f"--prompts_per_step {args.prompts_per_step} is not a multiple of {num_processes} processes x "
            f"--num_minibatches {args.num_minibatches} = {num_processes * args.num_minibatches}"
        )
    if args.dual_clip and args.dual_clip <= 1:
        raise InputError(f"--dual_clip {args.dual_clip}: must be above 1 (0 turns it off)")


def check_pairs(args):
    num_processes = world_size()
    if args.pairs_per_step % num_processes:
        raise InputError(f"--pairs_per_step {args.pairs_per_step} is not a multiple of {num_processes} processes")
    if args.micro_batch_size < 2:
        raise InputError("--micro_batch_size 1: a pair is two completions in one forward, at least 2 are needed")
    if args.max_length < 3:
        raise InputError(f"--max_length {args.max_length}: a prompt, a completion and its end are at least 3 tokens")


def check_sampling(args):
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
    """The step at which a run over given preference pairs ends; max_steps if the script makes its own pairs."""
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
    processes = accelerator.num_processes
    where = f"processes: {processes} on {device_and_threads(accelerator)}, {strategy(accelerator)}"
    if hasattr(args, "pairs_per_step"):
        pairs = args.pairs_per_step
        return (
            f"{where}\n"
            f"a step: {pairs} pairs = {2 * pairs} completions, {2 * pairs // processes} on each process, at most "
            f"{args.micro_batch_size // 2} pairs in a forward; {args.num_epochs} passes over the pairs"
        )
    rows, updates = args.prompts_per_step * args.group_size, args.num_epochs * args.num_minibatches
    step_rows = rows // args.num_minibatches
    limit = f"{args.micro_batch_tokens} tokens" if args.micro_batch_tokens else f"{args.micro_batch_size} rows"
    return (
        f"{where}\n"
        f"a step: {args.prompts_per_step} prompts x {args.group_size} completions = {rows} rows; "
        f"{args.num_epochs} epochs x {args.num_minibatches} minibatches = {updates} updates of {step_rows} rows, "
        f"{step_rows // processes} on each process, at most {limit} in a forward"
    )
