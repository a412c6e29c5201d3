"""Writes the YAML of a run here from a script or a configuration for TRL 1.16.

    python tools/from_trl.py train.py > run.yaml
    python tools/from_trl.py config.yaml --num_processes 8 --rows 7473 > run.yaml
    python tools/from_trl.py - < pasted.txt > run.yaml

The file is a Python script with a GRPOConfig, a DPOConfig or a RewardConfig, a configuration in
YAML, or a pasted piece of either. It is read as text, and nothing in it runs. Options of TRL may
follow, and win. Each option has a line in what is written: the option here and where its value
comes from, or why it was left out. TRL's defaults are written where they are not those here.

  --num_processes N   of TRL's run; the run here may have another number [1]
  --rows N            rows of the training data, by which epochs become steps
  --trainer NAME      grpo, dpo or reward, if the file does not tell
"""

import importlib
import json
import math
import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "examples")]

import recipes

import names
import trl_files
from harness.args import check
from harness.errors import InputError, clean_exit
from piped import end_with_the_reader

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DEFAULTS = {kind: TABLE["common"] | TABLE[kind] for kind in trl_files.CONFIGS}
TRAINERS = dict(zip(("grpo", "dpo", "reward"), trl_files.CONFIGS, strict=True))
# What decides which script has the loss.
LOSS = ("loss_type", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation")
SIZES = TABLE["sizes"]
IS_OFF = "with this value it does nothing"
TRACKERS = ("tensorboard", "wandb", "trackio")


class Move:
    """The options of a run here, and what became of each option of TRL."""

    def __init__(self, source, kind, processes, rows):
        self.kind = kind
        self.processes = processes
        self.rows = rows
        self.given = {}  # {option of TRL: value}
        self.lines = {}  # {option here: value}
        self.why = {}  # {option here: where its value comes from}
        self.left_out = {}  # {option of TRL: why nothing here is needed}
        self.missing = {}  # {option of TRL: why it is not here}
        self.to_do = list(source.to_do)
        self.used = set()
        self.pieces = self.updates = 1  # forwards and optimizer steps of TRL in a step here
        self.total = None  # optimizer steps of TRL in the run
        for name, value in source.given.items():
            if isinstance(value, trl_files.Code):
                self.used.add(name)
                self.to_do.append(f"{name} = {value} is no literal: add --{name} VALUE")
            else:
                self.given[name] = value
        settings = self.given.pop("model_init_kwargs", None) or {}
        self.given |= yaml.safe_load(settings) if isinstance(settings, str) else settings
        self.script, self.recipe = choose_script(self)
        if self.recipe:
            self.args = recipes.load(recipes.made(self.recipe, self.script), self.recipe).Args
        else:
            self.args = importlib.import_module(self.script.removesuffix(".py")).Args
        self.fields = [field.name for field in fields(self.args)]

    def get(self, name):
        """The value of an option of TRL: the given one, or its default."""
        self.used.add(name)
        return self.given.get(name, DEFAULTS[self.kind].get(name))

    def said(self, *options):
        """Options of TRL with their values, as "beta 0.04, epsilon 0.2 by default"."""
        values = {name: self.get(name) for name in options if self.get(name) is not None}
        ends = {name: "" if name in self.given else " by default" for name in values}
        return ", ".join(f"{name} {shown(values[name])}{ends[name]}" for name in values)

    def put(self, here, value, *options, why=None):
        """Write an option, unless it is the script's default and nobody gave it."""
        is_given = any(name in self.given for name in options)
        if here in self.fields and (is_given or value != getattr(self.args(), here)):
            self.lines[here] = json.dumps(value) if isinstance(value, dict) else value
            self.why[here] = why or self.said(*options)

    def put_count(self, here, steps, *options):
        """Write an option that counts steps: in TRL optimizer steps, or a share of all of them."""
        if steps is not None and 0 < steps < 1:
            steps = self.total and steps * self.total
        if steps is None:
            self.to_do.append(f"{here}: {self.said(*options)}: add --rows N, those of the data")
            return
        why = self.said(*options)
        if self.updates > 1:
            why += f", {self.updates} optimizer steps a rollout"
        self.put(here, math.ceil(steps / self.updates), *options, why=why)


def choose_script(move):
    """The script of the loss, and the recipe that is put into it; what they do not do is noted."""
    if move.kind != "GRPOConfig":
        return {"DPOConfig": "dpo.py", "RewardConfig": "reward_model.py"}[move.kind], None
    is_masked = move.given.get("mask_truncated_completions", False)
    script, recipe, is_same = loss_here(*map(move.get, LOSS), is_masked)
    if not is_same:
        move.to_do.append(f"no script has {move.said(*LOSS)}: {recipe or script} is near it")
    return script, recipe


def loss_here(loss, level, scale, aggregation, is_masked):
    """(script, recipe or None, whether the two are the same loss) of a loss of TRL."""
    by_row = level == "sequence"
    is_token_mean = loss in ("dapo", "bnpo")
    if aggregation == "normalize_then_sum":
        return "grpo.py", "gdpo", loss == "grpo" and not by_row
    if scale == "batch":
        return "grpo.py", "lite_ppo", is_token_mean and not by_row
    if loss in ("cispo", "sapo"):
        return "grpo.py", loss, not by_row
    if loss == "dr_grpo":
        return "dr_grpo.py", None, not by_row
    if is_token_mean and is_masked and not by_row:
        return "dapo.py", None, True
    script = "gspo.py" if by_row else "grpo.py"
    return script, "token_mean" if is_token_mean else None, is_token_mean or loss == "grpo"


def move_batch(move):
    """Pairs or prompts of a step; `move.updates` becomes the optimizer steps of TRL in it."""
    rows = move.get("per_device_train_batch_size")
    accumulated = move.get("gradient_accumulation_steps")
    parts = [move.said("per_device_train_batch_size")]
    if move.processes > 1:
        parts.append(f"{move.processes} processes")
    if move.kind == "GRPOConfig":
        move_rollout(move, rows, accumulated, parts)
        return
    move.put("micro_batch_size", 2 * rows, *SIZES, why=f"{parts[0]}, and a pair has two rows")
    why = " x ".join([*parts, move.said("gradient_accumulation_steps")])
    move.put("pairs_per_step", rows * accumulated * move.processes, *SIZES, why=why)


def move_rollout(move, rows, accumulated, parts):
    """Prompts of a rollout and its updates.

    TRL counts forwards: a rollout is cut into `pieces`, each trained on `passes` times, and
    `accumulated` of them are an optimizer step: a part of a rollout, or several as one.
    """
    group = move.get("num_generations")
    passes = move.get("num_iterations")
    pieces = move.get("steps_per_generation") or accumulated
    if move.get("generation_batch_size"):
        pieces = move.get("generation_batch_size") // (rows * move.processes)
    move.pieces = pieces
    size = rows * move.processes * pieces
    if size % group or not size:
        problem = f"a rollout of {size} rows is no multiple of num_generations {group}"
        raise InputError(f"{problem}: add --num_processes N, or other sizes")
    for forwards in (pieces, pieces * passes):
        if max(forwards, accumulated) % min(forwards, accumulated):
            step = f"an optimizer step {accumulated} (gradient_accumulation_steps)"
            raise InputError(f"{forwards} forwards in a rollout, {step}: one must divide the other")
    move.updates = max(1, forwards // accumulated)
    rollouts = max(1, accumulated // forwards)
    minibatches = max(1, pieces // accumulated)
    parts.append(move.said("steps_per_generation") or move.said("gradient_accumulation_steps"))
    why = move.said("generation_batch_size") or " x ".join(parts)
    if rollouts > 1:
        why += f" x {rollouts} rollouts of an optimizer step"
    why += f" / {move.said('num_generations')}"
    move.put("prompts_per_step", size * rollouts // group, *SIZES, why=why)
    why = f"{pieces} forwards of a rollout, {move.said('gradient_accumulation_steps')}"
    move.put("num_minibatches", minibatches, *SIZES[1:], why=why)
    why = f"{move.said('num_iterations')}, {why}"
    move.put("num_epochs", move.updates // minibatches, "num_iterations", why=why)
    move.put("micro_batch_size", rows, "per_device_train_batch_size")


def steps_of_epoch(move):
    """Optimizer steps of TRL in a pass over the data; None without --rows."""
    if not move.rows:
        return None
    rows = move.get("per_device_train_batch_size") * move.processes
    forwards = math.ceil(move.rows / rows)
    if move.kind == "GRPOConfig":
        rollouts = move.rows // (rows * move.pieces // move.get("num_generations"))
        forwards = rollouts * move.pieces * move.get("num_iterations")
    return max(1, math.ceil(forwards / move.get("gradient_accumulation_steps")))


def move_steps(move):
    """The length of the run, and all that counts optimizer steps in TRL."""
    epoch = steps_of_epoch(move)
    most = move.get("max_steps")
    passes = move.get("num_train_epochs")
    move.total = most if most > 0 else epoch and math.ceil(passes * epoch)
    length = "max_steps" if most > 0 else "num_train_epochs"
    if move.kind == "GRPOConfig" or most > 0 or passes % 1:
        move.put_count("max_steps", move.total, length)
    if move.kind != "GRPOConfig":
        passes = most / (epoch or 1) if most > 0 else passes  # at least as many as max_steps needs
        move.put("num_epochs", math.ceil(passes), length)
    for what in ("eval", "save"):
        options = (f"{what}_strategy", f"{what}_steps")
        strategy, steps = map(move.get, options)
        if strategy == "no":
            move.put(f"{what}_every", 0, options[0])
            continue
        steps = epoch if strategy == "epoch" else steps or move.get("logging_steps")
        move.put_count(f"{what}_every", steps, *options)
    warmup = "warmup_steps" if move.get("warmup_steps") else "warmup_ratio"
    move.put_count("warmup_steps", move.get(warmup) or 0, warmup)
    schedule = move.get("lr_scheduler_type").removesuffix("_with_warmup")
    if schedule in ("constant", "linear", "cosine"):
        move.put("lr_scheduler", schedule, "lr_scheduler_type")
    else:
        move.missing["lr_scheduler_type"] = "--lr_scheduler is constant, linear or cosine"


def move_objective(move):
    """What the loss of a rollout is made of: deviation, clip, KL."""
    move.put("normalize_std", move.get("scale_rewards") not in (False, "none"), "scale_rewards")
    move.put("std_eps", 1e-4, why="TRL adds 1e-4 to a deviation")
    upper = "epsilon" if move.get("epsilon_high") is None else "epsilon_high"
    if move.recipe == "cispo":
        move.put("clip_high", move.get(upper) - 1, upper, why=f"{move.said(upper)} - 1")
    else:
        move.put("clip_low", move.get("epsilon"), "epsilon")
        move.put("clip_high", move.get(upper), upper)
    move.put("kl_coef", move.get("beta"), "beta")
    if move.get("beta"):
        estimator = "k3_weighted" if move.get("use_bias_correction_kl") else "k3"
        move.put("kl_estimator", estimator, "use_bias_correction_kl")
    if move.script == "dapo.py":
        move.put("overlong", "filter", "mask_truncated_completions")
        move.put("max_sampling_rounds", 1, why="TRL samples once")


def move_preferences(move):
    """The loss of dpo.py."""
    loss, *others = listed(move.get("loss_type"))
    if loss in ("sigmoid", "ipo", "robust") and not others:
        move.put("loss", loss, "loss_type")
    else:
        move.missing["loss_type"] = "--loss is sigmoid, ipo or robust; for sft see --nll_coef"
    if loss == "robust":
        move.put("label_smoothing", move.get("label_smoothing"), "label_smoothing")


def move_model(move):
    """Weights and adapters."""
    name = "torch_dtype" if "torch_dtype" in move.given else "dtype"
    if move.get(name) in ("float32", "bfloat16"):
        move.put("dtype", move.get(name), name)
    elif move.get(name):
        move.missing[name] = "--dtype is float32 or bfloat16"
    if move.kind == "RewardConfig" and move.get("use_peft"):
        move.missing["use_peft"] = "reward_model.py trains all weights"
    elif move.get("use_peft"):  # 16 and 32 are those of TRL's command line
        move.put("lora_rank", move.get("lora_r") or 16, "use_peft", "lora_r")
        move.put("lora_alpha", move.get("lora_alpha") or 32, "lora_alpha")
        targets = listed(move.get("lora_target_modules"))
        why = "lora_target_modules" if targets else "peft's for Llama and Qwen; see other models"
        targets = targets or ["q_proj", "v_proj"]
        move.put("lora_targets", targets, "lora_target_modules", why=why)


def listed(value):
    """A value that TRL takes alone or in a list, as a list."""
    return value if isinstance(value, list) else [value] if value else []


def move_rewards(move):
    """--reward of functions and models."""
    rewards = list(map(reward_here, listed(move.get("reward_funcs"))))
    if rewards:
        move.put("reward", rewards, "reward_funcs", why="reward_funcs")
    else:
        move.to_do.append("reward: nothing names one; accuracy, the default, needs gold answers")


def reward_here(name):
    """What --reward calls a reward of TRL, a dotted path, or what is already named as here."""
    module, _, function = name.rpartition(".")
    if ":" not in name:
        name = f"{module or 'trl.rewards'}:{function}"
    return "accuracy" if name == "trl.rewards:accuracy_reward" else name


def move_evaluation(move):
    """TRL evaluates as it samples."""
    if move.get("eval_strategy") == "no":
        return
    name = "num_generations_eval" if move.get("num_generations_eval") else "num_generations"
    move.put("eval_samples", move.get(name), name)
    move.put("eval_k", min(4, move.get(name)), why="at most --eval_samples")
    move.put("eval_temperature", move.get("temperature"), "temperature")


def move_rest(move):
    """Options that keep their value, trackers, and others, with their sentences of names.toml."""
    trackers = [name for name in TRACKERS if name in listed(move.get("report_to"))]
    if trackers:
        move.put("report_to", trackers, "report_to")
    for name, here in TABLE["names"].items():
        value = move.given.get(name, DEFAULTS[move.kind].get(name))
        if here in move.fields and value is not None:
            move.used.add(name)
            move.put(here, value, name)
    for name, value in move.given.items():
        if name not in move.used | move.left_out.keys() | move.missing.keys():
            sort_out(move, name, value)
    mentioned = re.findall(r"\w+", str([move.why, move.left_out, move.missing, move.to_do]))
    for name, value in move.given.items():
        if name not in mentioned:
            move.left_out[name] = IS_OFF if is_off(name, value) else "see the lines above"


def note(move):
    """What to look at first: sentences of the table on what this run has, or does not name."""
    named = [move.kind, move.script, *listed(move.get("loss_type")), *move.lines.get("reward", [])]
    named += [name for name, value in move.given.items() if value]
    move.to_do += [text for name, text in TABLE["notes"].items() if name in named]
    move.to_do += [text for name, text in TABLE["needed"].items() if name not in move.given]


def is_off(name, value):
    """Whether an option with this value does nothing."""
    return not value or value in ("no", "none") or value in listed(TABLE["neutral"].get(name))


def sort_out(move, name, value):
    """Say of an option that is not moved whether it is missed."""
    sentence = names.name_here(name, str(value), move.fields)
    sentence = sentence or "neither TRL 1.16 nor this project knows it"
    use, _, reason = sentence.partition("; ")
    if sentence.startswith("start the script ") and not is_off(name, value):
        move.to_do.append(f"{name} {value}: {sentence}")
    elif sentence.startswith("leave it out: "):
        move.left_out[name] = sentence.removeprefix("leave it out: ")
    elif use.removeprefix("use --") in move.lines:
        move.left_out[name] = reason or f"see {use.removeprefix('use --')} above"
    elif is_off(name, value):
        move.left_out[name] = IS_OFF
    else:
        move.missing[name] = sentence.removeprefix("this is not here: ")


def commands(move):
    """The lines that start the run."""
    words = ["accelerate launch"]
    if move.processes > 1:
        words.append(f"--num_processes {move.processes}")
    if move.get("fp16"):
        move.missing["fp16"] = "a scaled loss is not here; there is --mixed_precision bf16"
    elif move.get("bf16") is not False:
        words.append("--mixed_precision bf16")
    if move.get("use_cpu"):
        words.append("--cpu")
    start = (
        f"{' '.join(words)} {move.recipe or move.script.removesuffix('.py')}.py --config run.yaml"
    )
    made = f"python examples/recipes.py {move.recipe} {move.script}    (writes {move.recipe}.py)"
    return [made, start] if move.recipe else [start]


def shown(value):
    """A value as YAML has it in a line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def written(move, start, command):
    """The text of the YAML file. `start` are the lines that start the run."""
    start = [f"#     {line}" for line in start]
    lines = [f"# Written by: {command}", "# To start the run:", *start]
    if move.kind == "GRPOConfig":
        decided = [name for name in LOSS[1:] if name in move.given]
        lines.append(f"# The script is that of {move.said('loss_type', *decided)}")
    if move.to_do:
        lines += ["#", "# Look at this first (what is to be added belongs into the first line):"]
        lines += [f"# - {sentence}" for sentence in move.to_do]
    lines.append("")
    texts = {name: f"{name}: {shown(value)}" for name, value in move.lines.items()}
    width = min(48, max(map(len, texts.values())))
    for name in sorted(texts, key=move.fields.index):
        is_same = move.why[name] == texts[name].replace(": ", " ", 1)
        lines.append(texts[name] if is_same else f"{texts[name].ljust(width)}  # {move.why[name]}")
    for title, entries in (("Not needed here:", move.left_out), ("Not here:", move.missing)):
        if entries:
            lines += ["", f"# {title}"]
        for name, why in entries.items():
            lines.append(f"# - {name} {shown(move.given[name])}: {why}")
    return "\n".join(lines) + "\n"


def moved(source, kind, processes=1, rows=None):
    """The `Move` of what a file says, and the lines that start the run."""
    move = Move(source, kind, processes, rows)
    move_batch(move)
    move_steps(move)
    if kind == "GRPOConfig":
        move_objective(move)
        move_rewards(move)
        move_evaluation(move)
    elif kind == "DPOConfig":
        move_preferences(move)
    move_model(move)
    start = commands(move)
    move_rest(move)
    note(move)
    try:
        check(move.args(**move.lines))
    except InputError as error:
        raise InputError(f"{move.script} refuses it: {error}") from None
    return move, start


def class_of(source, trainer):
    """The class of a configuration; without a name it is that whose own options it has."""
    kind = TRAINERS.get(trainer, source.kind)
    found = [name for name, own in TABLE["own"].items() if source.given.keys() & own]
    if not kind and len(found) != 1:
        raise InputError("which trainer is it for? add --trainer grpo, or dpo, or reward")
    return kind or found[0]


def command_line(words):
    """{option: value} of words as --beta 0.1; --x alone is True, and --no_x makes x False."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            values = found[name[2:].replace("-", "_")] = [value] if equals else []
        elif found:
            values.append(word)
        else:
            raise InputError(f"{word}: one file, and options behind it")
    options = {}
    for name, values in found.items():
        values = [trl_files.number(yaml.safe_load(value)) for value in values]
        if len(values) > 1:
            options[name] = values
        elif name.startswith("no_") and not values:
            options[name.removeprefix("no_")] = False
        else:
            options[name] = values[0] if values else True
    return options


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    is_file = words[0] == "-" or not words[0].startswith("-")
    source = trl_files.read(words[0]) if is_file else trl_files.Source()
    options = command_line(words[is_file:])
    processes, rows = options.pop("num_processes", 1), options.pop("rows", 0)
    if not isinstance(processes, int) or not isinstance(rows, int):
        raise InputError("--num_processes and --rows are whole numbers")
    trainer = options.pop("trainer", None)
    source.given |= options
    move, start = moved(source, class_of(source, trainer), processes, rows)
    print(written(move, start, f"python tools/from_trl.py {' '.join(words)}"), end="")


if __name__ == "__main__":
    end_with_the_reader()
    with clean_exit():
        main()
