"""Options: how a script declares them, which values are refused, the sizes and rate of a step."""

import dataclasses
import math
import operator
from typing import Literal

from common.errors import InputError, count, refuse, world_size

GROUPS = {  # of --help, with their titles
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
# Bounds of a value: functions of `operator`, and how an error says them.
BOUNDS = {"gt": "above", "ge": "at least", "le": "at most", "lt": "below"}


def option(default, help, group="algorithm", *, several=False, **bounds):
    """A field of `Args` with its help text, its group in `--help` and its bounds, as `gt=0`.

    With `several` it takes one value or more on the command line.
    """
    metadata = {"help": help.replace("%", "%%"), "group": group, "bounds": bounds}
    if several:
        metadata["nargs"] = "+"
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class RunArgs:
    """The options of all scripts.

    A subclass says what a step is: `step_size` names the option of its size, `num_minibatches` cuts
    it, and `describe_step` tells it.
    """

    model_name_or_path: str = option("embedded", "hub id or folder of a causal LM; or `embedded-hard`", "model")
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of weights; bfloat16 loses small updates", "model")
    attn_implementation: str = option("sdpa", "attention of transformers: sdpa (or what the model has), eager", "model")
    gradient_checkpointing: bool = option(False, "recompute activations in backward: less memory, slower", "model")
    lora_rank: int = option(0, "rank of LoRA adapters on all linear layers (0: train the weights)", "model", ge=0)
    lora_alpha: int = option(32, "adapters are scaled by this / --lora_rank", "model", gt=0)
    lora_merge: bool = option(False, "write models with the adapters merged, not as PEFT adapter folders", "model")

    dataset: str = option("embedded", "hub id, folder, or .jsonl .json .csv .parquet files", "data", several=True)
    dataset_config: str | None = option(None, "configuration of a hub dataset, such as main for openai/gsm8k", "data")
    dataset_split: str = option("train", "split to train on", "data")
    eval_dataset: str | None = option(None, "like --dataset [its test split or file, or 5 %]", "data", several=True)
    eval_split: str | None = option(None, "split to evaluate on [test, then validation]", "data")
    prompt_column: str | None = option(None, "column of the prompts [recognized by its name]", "data")
    system_prompt: str | None = option(None, "system message; without a chat template, text before the prompt", "data")
    prompt_template: str | None = option(None, "text around the user's prompt; it must contain {prompt}", "data")
    chat_template_kwargs: str | None = option(None, 'JSON for the template, as {"enable_thinking": false}', "data")

    output_dir: str | None = option(None, "folder of the run [runs/<script>-<time>]", "run")
    seed: int = option(0, "seed of data order, sampling and evaluation", "run", ge=0, lt=2**32)  # numpy's bound
    resume: bool = option(False, "continue from the last checkpoint in --output_dir", "run")
    max_steps: int = option(50, "rollouts with their updates; 0 only evaluates", "run", ge=0)
    save_every: int = option(0, "steps between checkpoints (0: none)", "run", ge=0)
    keep_checkpoints: int = option(2, "how many checkpoints to keep", "run", gt=0)
    save_model_every: int = option(0, "steps between model-step-N/ folders (0: none)", "run", ge=0)
    report_to: list[str] = option([], "experiment trackers: tensorboard, wandb, trackio", "run")
    dry_run: bool = option(False, "print an estimate of the memory that a step takes, and stop", "run")
    reward_changed: bool = option(False, "with --resume: go on although a file of --reward has changed", "run")

    learning_rate: float = option(1e-4, "peak learning rate", "optimizer", gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = option("constant", "schedule over max_steps", "optimizer")
    warmup_steps: int = option(0, "steps of linear warm-up", "optimizer", ge=0)
    weight_decay: float = option(0.0, "decoupled weight decay", "optimizer", ge=0)
    adam_beta1: float = option(0.9, "decay of the first moment", "optimizer", ge=0, lt=1)
    adam_beta2: float = option(0.999, "decay of the second moment", "optimizer", ge=0, lt=1)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm (0: off)", "optimizer", ge=0)

    def check(self):
        """Refuse values out of bounds, options that need others, and sizes that do not divide."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for item in value if isinstance(value, list) else [value]:
                check_value(field.name, item, field.metadata["bounds"])
        needs = {"resume": "output_dir", "reward_changed": "resume", "lora_merge": "lora_rank"}
        for name, needed in needs.items():
            if getattr(self, name) and not getattr(self, needed):
                raise InputError(f"--{name} needs --{needed}")
        if getattr(self, self.step_size) % (world_size() * self.num_minibatches):
            processes = count(world_size(), "process")
            minibatches = count(self.num_minibatches, "minibatch")
            refuse(self, self.step_size, f"not a multiple of {processes} x {minibatches}")


@dataclasses.dataclass
class RolloutArgs(RunArgs):
    """The options of all scripts with a rollout: `RunArgs`, reward, sampling and evaluation."""

    step_size = "prompts_per_step"
    # The options that count the prompts of a rollout, and the samples of each.
    sampled_by = "prompts_per_step", "group_size"

    answer_column: str | None = option(None, "column of the gold answers [recognized by its name]", "data")
    max_prompt_tokens: int = option(512, "prompts with more tokens are dropped", "data", gt=0)
    reward: list[str] = option(["accuracy"], "accuracy, format, math_verify, file.py:name or module:name", "reward")
    reward_weights: list[float] | None = option(None, "one weight for each --reward [1 each]", "reward")
    rollout: Literal["shared", "no_graphs", "hf"] = option(
        "shared", "shared: each prompt once, CUDA graphs; no_graphs: without these; hf: stock generate()", "sampling"
    )
    generate_batch_size: int = option(0, "most completions in a generate() of a process (0: all)", "sampling", ge=0)
    eval_every: int = option(25, "steps between evaluations (0: only before and after training)", "evaluation", ge=0)
    eval_prompts: int = option(0, "prompts per evaluation (0: all)", "evaluation", ge=0)
    eval_samples: int = option(8, "completions per evaluation prompt", "evaluation", gt=0)
    eval_k: int = option(4, "k of pass@k", "evaluation", gt=0)
    eval_temperature: float = option(1.0, "temperature in evaluation (0: greedy, no pass@k)", "evaluation", ge=0)
    eval_top_p: float = option(1.0, "top-p of evaluation", "evaluation", gt=0, le=1)

    @property
    def needs_answers(self):
        """Whether a reward compares with gold answers."""
        return "accuracy" in self.reward or "math_verify" in self.reward

    def check(self):
        super().check()
        if self.eval_k > self.eval_samples and self.eval_temperature > 0:
            most = f"--eval_samples {self.eval_samples}"
            raise InputError(f"--eval_k {self.eval_k} is more than {most}")
        if 0 < getattr(self, "dual_clip", 0) <= 1:
            refuse(self, "dual_clip", "must be above 1 (0 turns it off)")
        _, samples = self.sampled_by
        needed = max(getattr(self, samples), self.eval_samples)
        if 0 < self.generate_batch_size < needed:
            problem = f"a prompt needs {needed}, by --{samples} or --eval_samples"
            refuse(self, "generate_batch_size", problem)

    def describe_step(self, processes):
        """The batch sizes of a step as one line."""
        rows = self.prompts_per_step * self.group_size
        prompts = count(self.prompts_per_step, "prompt")
        completions = count(self.group_size, "completion")
        update_rows = rows // self.num_minibatches
        epochs = count(self.num_epochs, "epoch")
        minibatches = count(self.num_minibatches, "minibatch")
        return (
            f"{prompts} x {completions} = {count(rows, 'row')}; "
            f"{epochs} x {minibatches} of {count(update_rows, 'row')}, "
            f"{update_rows // processes} on each process"
        )


def check_value(name, value, bounds):
    """Refuse text that is not UTF-8, and a number out of its bounds.

    NaN is refused too, and a number so large that a product with it would overflow.
    """
    if isinstance(value, str) and value != value.encode(errors="ignore").decode():
        raise InputError(f"--{name} {value!r}: has bytes that are not UTF-8")
    if type(value) not in (int, float):
        return
    large = 2**31 if isinstance(value, int) else 1e31
    for bound, limit in ({"gt": -large, "lt": large} | bounds).items():
        is_within = getattr(operator, bound)
        if not is_within(value, limit):
            raise InputError(f"--{name} {value}: must be {BOUNDS[bound]} {limit}")


def learning_rate(step, args, last=None):
    """The learning rate of a step, from 0: linear warm-up times a schedule that ends at `last`.

    Without `last` it ends at --max_steps.
    """
    if last is None:
        last = args.max_steps
    warmup = 1.0
    if args.warmup_steps:
        warmup = min(1.0, (step + 1) / args.warmup_steps)
    progress = step / max(last, 1)
    schedule = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return args.learning_rate * warmup * schedule[args.lr_scheduler]
