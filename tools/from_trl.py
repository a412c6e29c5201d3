"""Writes the YAML of a run here from a script or a configuration for TRL 1.16.

    python tools/from_trl.py train.py > run.yaml
    python tools/from_trl.py config.yaml --num_processes 8 --rows 7473 > run.yaml
    python tools/from_trl.py - < pasted.txt > run.yaml

The file is a Python script with a GRPOConfig, a DPOConfig or a RewardConfig, a configuration in YAML,
or a pasted piece of either. It is read as text, and nothing in it runs. Options of TRL may follow, as on
TRL's own command line; they win over the file.

Each option of TRL has a line in what is written: the option here and where its value comes from, or why
it was left out. Where TRL has another default than the script here, TRL's is written down. The first
lines have the command that starts the run.

  --num_processes N   of TRL's run; the run here may have another number [1]
  --rows N            rows of the training data, by which epochs become steps
  --trainer NAME      grpo, dpo or reward, if the file does not tell
"""

import argparse
import importlib
import json
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "examples")]

import names
import recipes
import trl_files
from common.args import check
from common.errors import InputError, clean_exit
from piped import end_with_the_reader

# What TRL 1.16 takes where nothing is said, of the options that become options here.
COMMON = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": True,
    "seed": 42,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
    "logging_steps": 10,
}
GRPO = COMMON | {
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "temperature": 1.0,
    "num_iterations": 1,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "mask_truncated_completions": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
}
DPO = COMMON | {
    "learning_rate": 1e-6,
    "beta": 0.1,
    "loss_type": ["sigmoid"],
    "label_smoothing": 0.0,
    "max_length": 1024,
}
REWARD = COMMON | {"learning_rate": 1e-4, "max_length": 1024}
DEFAULTS = {"GRPOConfig": GRPO, "DPOConfig": DPO, "RewardConfig": REWARD}
TRAINERS = {"grpo": "GRPOConfig", "dpo": "DPOConfig", "reward": "RewardConfig"}
# A configuration without a name belongs to the trainer whose options it has.
OWN = {
    "GRPOConfig": {"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon"},
    "DPOConfig": {"precompute_ref_log_probs", "loss_weights", "label_smoothing", "f_divergence_type"},
    "RewardConfig": {"center_rewards_coefficient"},
}
# Options that have only another name here.
SAME = {
    "model_name_or_path": "model_name_or_path",
    "attn_implementation": "attn_implementation",
    "dataset_name": "dataset",
    "dataset_config": "dataset_config",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "output_dir": "output_dir",
    "seed": "seed",
    "gradient_checkpointing": "gradient_checkpointing",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "max_grad_norm": "max_grad_norm",
    "num_generations": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "temperature": "temperature",
    "delta": "dual_clip",
    "entropy_coef": "entropy_coef",
    "reward_weights": "reward_weights",
    "per_device_eval_batch_size": "generate_batch_size",
    "center_rewards_coefficient": "center_coef",
    "max_length": "max_length",
}
# Values with which an option does nothing, beside 0, False and None.
NEUTRAL = {
    "top_p": 1,
    "top_k": -1,
    "repetition_penalty": 1,
    "top_entropy_quantile": 1,
    "adam_epsilon": 1e-8,
    "optim": "adamw_torch",
    "f_divergence_type": "reverse_kl",
    "model_revision": "main",
}
# What decides which script has the loss.
LOSS = ("loss_type", "importance_sampling_level", "scale_rewards", "multi_objective_aggregation")
SCHEDULES = {"constant_with_warmup": "constant"} | {name: name for name in ("constant", "linear", "cosine")}
TRACKERS = ("tensorboard", "wandb", "trackio")


class Loss(NamedTuple):
    """Where a loss of TRL is here: a script, the recipe that is put into it, and whether it is the same."""

    script: str
    recipe: str | None = None
    is_same: bool = True


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
        for name, value in source.given.items():
            if isinstance(value, trl_files.Code):
                self.used.add(name)
                self.to_do.append(f"{name} = {value} is no literal: add --{name} VALUE to this command")
            else:
                self.given[name] = value
        self.script, self.recipe = choose_loss(self)
        self.args = args_of(self.script, self.recipe)
        self.fields = [field.name for field in fields(self.args)]

    def get(self, name):
        """The value of an option of TRL: the given one, or its default."""
        self.used.add(name)
        return self.given.get(name, DEFAULTS[self.kind].get(name))

    def said(self, *options):
        """Options of TRL with their values, as "beta 0.04, epsilon 0.2 by default"."""
        parts = []
        for name in options:
            value = self.get(name)
            if value is not None:
                parts.append(f"{name} {shown(value)}" + ("" if name in self.given else " by default"))
        return ", ".join(parts)

    def put(self, here, value, *options, why=None):
        """Write an option, unless it is the script's default and nobody gave it."""
        if here not in self.fields:
            return
        is_given = any(name in self.given for name in options)
        if is_given or value != getattr(self.args(), here):
            self.lines[here] = value
            self.why[here] = why or self.said(*options)


def args_of(script, recipe):
    """The class of the options of a script, with what a recipe changes."""
    if recipe:
        return recipes.load(recipes.made(recipe, script), recipe).Args
    return importlib.import_module(script.removesuffix(".py")).Args


# --- which script ---


def choose_loss(move):
    """The script and the recipe of the loss that TRL is asked for; what they do not do is noted."""
    if move.kind != "GRPOConfig":
        return ("dpo.py" if move.kind == "DPOConfig" else "reward_model.py"), None
    loss, level, scale, aggregation = map(move.get, LOSS)
    is_masked = move.get("mask_truncated_completions")
    found = loss_here(loss, level == "sequence", scale == "batch", aggregation == "normalize_then_sum", is_masked)
    if not found.is_same:
        move.to_do.append(f"no script has {move.said(*LOSS)}: {found.recipe or found.script} is near it")
    if loss == "bnpo":
        move.to_do.append("bnpo is a mean over the tokens of a forward; here it is that of an optimizer step")
    if found.script == "dapo.py":
        move.to_do.append("dapo.py leaves groups of equal rewards out, and its accuracy is 1 or -1")
    elif is_masked:
        move.missing["mask_truncated_completions"] = "only dapo.py has it: --overlong filter"
    if found.script == "dr_grpo.py":
        move.to_do.append("dr_grpo.py gives a truncated completion the reward 0, and TRL does not")
    return found.script, found.recipe


def loss_here(loss, by_row, by_batch, parts_first, is_masked):
    """The `Loss` of a loss_type, whose ratio may be that of a row, and whose deviation that of the batch."""
    near_grpo = "gspo.py" if by_row else "grpo.py"
    if parts_first:
        return Loss("grpo.py", "gdpo", loss == "grpo" and not by_row)
    if by_batch:
        return Loss("grpo.py", "lite_ppo", loss in ("dapo", "bnpo") and not by_row)
    if loss in ("cispo", "sapo"):
        return Loss("grpo.py", loss, not by_row)
    if loss in ("dapo", "bnpo") and is_masked and not by_row:
        return Loss("dapo.py")
    if loss in ("dapo", "bnpo"):
        return Loss(near_grpo, "token_mean")
    if loss == "dr_grpo":
        return Loss("dr_grpo.py", is_same=not by_row)
    return Loss(near_grpo, is_same=loss == "grpo")


# --- batches and steps ---


def move_pairs(move):
    """Pairs of an optimizer step. Returns the optimizer steps of TRL that a step here is."""
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows, accumulated = map(move.get, sizes)
    move.put("micro_batch_size", 2 * rows, sizes[0], why=f"{move.said(sizes[0])}, and a pair has two rows")
    why = " x ".join([*map(move.said, sizes), *processes_of(move)])
    move.put("pairs_per_step", rows * accumulated * move.processes, *sizes, why=why)
    return 1


def processes_of(move):
    return [f"{move.processes} processes"] if move.processes > 1 else []


def forwards_of_rollout(move):
    """Into how many forwards TRL cuts a rollout: steps_per_generation."""
    rows = move.get("per_device_train_batch_size") * move.processes
    pieces = move.get("steps_per_generation")
    size = move.get("generation_batch_size")
    if size and pieces:
        raise InputError("generation_batch_size and steps_per_generation: TRL takes one of them")
    if size and size % rows:
        raise InputError(f"generation_batch_size {size} is no multiple of the {rows} rows of a forward")
    if size:
        return size // rows
    return pieces or move.get("gradient_accumulation_steps")


def move_rollout(move):
    """Prompts of a rollout and its updates. Returns the optimizer steps of TRL that a step here is.

    TRL counts forwards: a rollout is cut into `pieces`, each trained on `passes` times, and
    `accumulated` of them are an optimizer step. That may be a part of a rollout, or several rollouts,
    which are then one of all their prompts.
    """
    rows = move.get("per_device_train_batch_size")
    accumulated = move.get("gradient_accumulation_steps")
    group = move.get("num_generations")
    passes = move.get("num_iterations")
    pieces = forwards_of_rollout(move)
    size = rows * move.processes * pieces
    if size % group:
        raise InputError(f"a rollout of {size} rows is no multiple of num_generations {group}")
    forwards = pieces * passes
    if any(max(number, accumulated) % min(number, accumulated) for number in (pieces, forwards)):
        raise InputError(
            f"a rollout has {pieces} x {passes} forwards (steps_per_generation x num_iterations), "
            f"and an optimizer step {accumulated} (gradient_accumulation_steps): one must divide the other"
        )
    updates = max(1, forwards // accumulated)
    rollouts = max(1, accumulated // forwards)
    minibatches = max(1, pieces // accumulated)
    sizes = ("per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps")
    parts = [move.said(sizes[0]), *processes_of(move), move.said(sizes[1]) or move.said(sizes[2])]
    if move.get("generation_batch_size"):
        parts = [move.said("generation_batch_size")]
    if rollouts > 1:
        parts.append(f"{rollouts} rollouts of an optimizer step")
    why = f"{' x '.join(parts)} / {move.said('num_generations')}"
    move.put("prompts_per_step", size * rollouts // group, *sizes, "generation_batch_size", why=why)
    why = f"{pieces} forwards of a rollout, {move.said('gradient_accumulation_steps')}"
    move.put("num_minibatches", minibatches, *sizes[1:], "generation_batch_size", why=why)
    epochs = updates // minibatches
    why = move.said("num_iterations") if epochs == passes else f"num_iterations {passes}, {why}"
    move.put("num_epochs", epochs, "num_iterations", why=why)
    move.put("micro_batch_size", rows, "per_device_train_batch_size")
    return updates


def steps_of_epoch(move):
    """Optimizer steps of TRL in a pass over the data; None without --rows."""
    if not move.rows:
        return None
    rows = move.get("per_device_train_batch_size") * move.processes
    if move.kind == "GRPOConfig":
        pieces = forwards_of_rollout(move)
        rollouts = move.rows // (rows * pieces // move.get("num_generations"))
        forwards = rollouts * pieces * move.get("num_iterations")
    else:
        forwards = math.ceil(move.rows / rows)
    return max(1, math.ceil(forwards / move.get("gradient_accumulation_steps")))


def move_steps(move, updates):
    """The length of the run, and all that counts optimizer steps in TRL."""
    epoch = steps_of_epoch(move)
    most = move.get("max_steps")
    total = most if most > 0 else epoch and math.ceil(move.get("num_train_epochs") * epoch)
    if move.kind == "GRPOConfig":
        move_length(move, updates, total)
    else:
        move_passes(move, most, epoch)
    move_every(move, "eval", updates, total, epoch)
    move_every(move, "save", updates, total, epoch)
    move_warmup(move, updates, total)
    schedule = move.get("lr_scheduler_type")
    if schedule in SCHEDULES:
        move.put("lr_scheduler", SCHEDULES[schedule], "lr_scheduler_type")
    else:
        move.missing["lr_scheduler_type"] = "--lr_scheduler is constant, linear or cosine"


def move_length(move, updates, total):
    """--max_steps of rollouts."""
    is_counted = move.get("max_steps") > 0
    why = move.said("max_steps" if is_counted else "num_train_epochs")
    if not is_counted:
        why += f" of {move.rows} rows"
    if updates > 1:
        why += f", {updates} optimizer steps a rollout"
    if total:
        move.put("max_steps", math.ceil(total / updates), "max_steps", "num_train_epochs", why=why)
    else:
        epochs = move.said("num_train_epochs")
        move.to_do.append(f"max_steps: {epochs}: add --rows N, the rows of the data, to this command")


def move_passes(move, most, epoch):
    """--num_epochs over pairs, and --max_steps."""
    passes = move.get("num_train_epochs")
    if most > 0:
        move.left_out["num_train_epochs"] = "max_steps ends the run"
        move.put("max_steps", most, "max_steps")
        enough = math.ceil(most / epoch) if epoch else most
        move.put("num_epochs", enough, "max_steps", why="at least as many as --max_steps needs")
        return
    move.put("num_epochs", math.ceil(passes), "num_train_epochs")
    if passes != math.ceil(passes):
        steps = math.ceil(passes * epoch) if epoch else "the steps of them"
        move.to_do.append(f"num_train_epochs {passes}: here passes are whole: --max_steps {steps}")
    pairs = move.lines.get("pairs_per_step", move.args().pairs_per_step)
    if move.rows and move.rows % pairs:
        here = move.rows * math.ceil(passes) // pairs
        there = math.ceil(passes * epoch)
        move.to_do.append(f"the last step of an epoch is smaller in TRL: {there} steps there, {here} here")


def move_every(move, what, updates, total, epoch):
    """--eval_every or --save_every."""
    here = f"{what}_every"
    options = (f"{what}_strategy", f"{what}_steps")
    strategy, steps = map(move.get, options)
    if strategy == "no":
        move.put(here, 0, options[0])
        return
    if strategy == "epoch":
        steps = epoch
    elif strategy == "steps" and steps is None:
        steps = move.get("logging_steps")
    if steps and steps < 1:  # a share of the run
        steps = total and total * steps
    if strategy not in ("epoch", "steps"):
        move.missing[options[0]] = f"--{here} counts steps"
    elif steps:
        count = f", {updates} optimizer steps a rollout" if updates > 1 else ""
        move.put(here, max(1, round(steps / updates)), *options, why=f"{move.said(*options)}{count}")
    else:
        move.to_do.append(f"{here}: {move.said(*options)}: add --rows N, the rows of the data, to this command")


def move_warmup(move, updates, total):
    """--warmup_steps, of a number of steps or of a share of the run."""
    name = "warmup_steps" if move.get("warmup_steps") else "warmup_ratio"
    steps = move.get(name) or 0
    if 0 < steps < 1 and not total:
        move.to_do.append(f"warmup_steps: {move.said(name)}: add --rows N, the rows of the data, to this command")
        return
    if 0 < steps < 1:
        steps = math.ceil(steps * total)
    move.put("warmup_steps", math.ceil(steps / updates), name)


# --- losses ---


def move_objective(move):
    """What the loss of a rollout is made of: deviation, clip, KL."""
    move.put("normalize_std", move.get("scale_rewards") not in (False, "none"), "scale_rewards")
    move.put("std_eps", 1e-4, why="TRL adds 1e-4 to a deviation")
    low = move.get("epsilon")
    high = low if move.get("epsilon_high") is None else move.get("epsilon_high")
    if move.recipe == "cispo":
        move.put("clip_high", high - 1, "epsilon_high", why=f"{move.said('epsilon_high')} - 1")
    else:
        move.put("clip_low", low, "epsilon")
        move.put("clip_high", high, "epsilon_high", why=move.said("epsilon_high") or move.said("epsilon"))
    move.put("kl_coef", move.get("beta"), "beta")
    if move.get("beta"):
        estimator = "k3_weighted" if move.get("use_bias_correction_kl") else "k3"
        move.put("kl_estimator", estimator, "use_bias_correction_kl")
    elif "use_bias_correction_kl" in move.given:
        move.left_out["use_bias_correction_kl"] = "beta is 0"
    move.put("tau_positive", move.get("sapo_temperature_pos"), "sapo_temperature_pos")
    move.put("tau_negative", move.get("sapo_temperature_neg"), "sapo_temperature_neg")
    if move.script == "dapo.py":
        move.put("overlong", "filter", "mask_truncated_completions")
        move.put("max_sampling_rounds", 1, why="TRL samples once")
    if move.given.get("entropy_coef"):
        move.to_do.append("entropy_coef: in TRL a mean over the tokens of a forward; here each token has its weight")


def move_preferences(move):
    """The loss of dpo.py."""
    losses = move.get("loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    weights = dict(zip(losses, move.get("loss_weights") or [1.0] * len(losses), strict=False))
    likelihood = weights.pop("sft", 0.0)
    move.put("beta", move.get("beta"), "beta")
    if len(weights) != 1 or not weights.keys() <= {"sigmoid", "ipo", "robust"}:
        move.missing["loss_type"] = "--loss is one of sigmoid, ipo and robust"
        return
    ((loss, weight),) = weights.items()
    move.put("loss", loss, "loss_type")
    if likelihood:
        why = f"{move.said('loss_type', 'loss_weights')}; a mean over pairs, and in TRL over tokens"
        move.put("nll_coef", likelihood / weight, "loss_type", why=why)
    if loss == "robust":
        move.put("label_smoothing", move.get("label_smoothing"), "label_smoothing")
    elif "label_smoothing" in move.given:
        move.left_out["label_smoothing"] = f"TRL does not read it with {loss}; here it would be cDPO"
        move.used.add("label_smoothing")
    if loss == "ipo":
        move.to_do.append("TRL divides the log-ratios of ipo by the length; dpo.py does not, as the paper")


# --- model, data, rewards ---


def move_model(move):
    """Weights and adapters."""
    settings = move.get("model_init_kwargs") or {}
    settings = yaml.safe_load(settings) if isinstance(settings, str) else dict(settings)
    of_config = move.get("dtype") or move.get("torch_dtype")
    dtype = settings.pop("torch_dtype", None) or settings.pop("dtype", None) or of_config
    if dtype in ("float32", "bfloat16"):
        move.put("dtype", dtype, "dtype", "model_init_kwargs", why=f"dtype {dtype}")
    elif dtype:
        move.missing["dtype"] = f"{dtype}: --dtype is float32 or bfloat16"
    attention = settings.pop("attn_implementation", None)
    if attention:
        move.put("attn_implementation", attention, why=f"attn_implementation {attention}")
    for name, value in settings.items():
        move.missing[f"model_init_kwargs {name}"] = f"{value}: {names.name_here('model_init_kwargs', '', [])}"
    if "model_name_or_path" not in move.given:
        move.to_do.append("model_name_or_path: nothing here names the model")
    if move.get("use_peft") and move.kind == "RewardConfig":
        move.missing["use_peft"] = "reward_model.py trains all weights"
    elif move.get("use_peft"):
        move_adapter(move)


def move_adapter(move):
    # 16 and 32 are those of TRL's command line.
    move.put("lora_rank", move.get("lora_r") or 16, "use_peft", "lora_r")
    move.put("lora_alpha", move.get("lora_alpha") or 32, "lora_alpha")
    targets = move.get("lora_target_modules")
    if targets:
        targets = targets if isinstance(targets, list) else [targets]
        move.put("lora_targets", targets, "lora_target_modules")
    else:
        move.put("lora_targets", ["q_proj", "v_proj"], why="peft's default for Llama and Qwen; see other models")


def move_data(move):
    if move.kind == "GRPOConfig" and "max_prompt_length" not in move.given:
        most = move.args().max_prompt_tokens
        move.to_do.append(f"prompts of more than {most} tokens are dropped here: --max_prompt_tokens")
    if move.kind == "DPOConfig":
        move.to_do.append("pairs of more than --max_length tokens are dropped here; TRL cuts them")
    if "dataset_name" not in move.given:
        move.to_do.append("dataset: nothing here names the data")
    settings = move.get("chat_template_kwargs")
    if settings:
        text = settings if isinstance(settings, str) else json.dumps(settings)
        move.put("chat_template_kwargs", text, "chat_template_kwargs")


def move_rewards(move):
    """--reward of functions and models."""
    functions = move.get("reward_funcs") or []
    functions = functions if isinstance(functions, list) else [functions]
    found = [reward_here(name) for name in functions]
    if move.get("reward_model_name_or_path"):
        found.append(f"rm:{move.get('reward_model_name_or_path')}")
    if not found:
        move.to_do.append("reward: nothing here names a reward; accuracy, the default, needs gold answers")
        return
    if "accuracy" in found:
        move.to_do.append("reward: accuracy stands for TRL's accuracy_reward; see --answer_column")
    if any(name.startswith("trl.") for name in found):
        move.to_do.append("reward: trl.rewards is imported, so that TRL has to be installed")
    options = [name for name in ("reward_funcs", "reward_model_name_or_path") if name in move.given]
    move.put("reward", found, *options, why=" and ".join(options))


def reward_here(name):
    """What --reward calls a reward of TRL's own, a dotted path, or what is already named as here."""
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
    move.put("eval_top_p", 1.0, why="TRL evaluates as it samples")


# --- what is left ---


def move_rest(move):
    """Options with another name, trackers, and all that is left, with its sentence in names.toml."""
    for name, here in SAME.items():
        value = move.given.get(name, DEFAULTS[move.kind].get(name))
        if here in move.fields and value is not None:
            move.used.add(name)
            move.put(here, value, name)
    trackers = move.get("report_to") or []
    trackers = [name for name in TRACKERS if name in trackers]
    if trackers:
        move.put("report_to", trackers, "report_to")
    elif move.given.get("report_to"):
        move.left_out["report_to"] = "without --report_to there is no tracker"
    for name, value in move.given.items():
        if name not in move.used and name not in move.left_out and name not in move.missing:
            sort_out(move, name, value)


def sort_out(move, name, value):
    """Say of an option that is not moved whether it is missed."""
    sentence = names.name_here(name, str(value), move.fields) or "neither TRL 1.16 nor this project knows it"
    use, _, reason = sentence.partition("; ")
    is_off = value in (None, False, 0, "no", "none", "", []) or value == NEUTRAL.get(name)
    if sentence.startswith("start the script ") and not is_off:
        move.to_do.append(f"{name} {value}: {sentence}")
    elif sentence.startswith("leave it out: "):
        move.left_out[name] = sentence.removeprefix("leave it out: ")
    elif use.removeprefix("use --") in move.lines:
        move.left_out[name] = reason or f"see {use.removeprefix('use --')} above"
    elif is_off or str(value).startswith("adamw_torch"):
        move.left_out[name] = "with this value it does nothing"
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
    script = f"{move.recipe}.py" if move.recipe else move.script
    lines = [f"{' '.join(words)} {script} --config run.yaml"]
    if move.recipe:
        lines.insert(0, f"python examples/recipes.py {move.recipe} {move.script}    (writes {script})")
    return lines


# --- writing ---


def shown(value):
    """A value as YAML has it in a line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def written(move, start, command):
    """The text of the YAML file; `start` are the lines that start the run, `command` is what wrote it."""
    lines = [f"# Written by: {command}", "# To start the run:", *(f"#     {line}" for line in start)]
    if move.kind == "GRPOConfig":
        lines.append(f"# The script is that of {move.said(*LOSS)}")
    if move.to_do:
        lines += ["#", "# Look at this first:", *(f"# - {sentence}" for sentence in move.to_do)]
    options = [name for name in move.fields if name in move.lines]
    texts = [f"{name}: {shown(move.lines[name])}" for name in options]
    width = min(48, max(map(len, texts)))
    lines.append("")
    for name, text in zip(options, texts, strict=True):
        lines.append(f"{text.ljust(width)}  # {move.why[name]}")
    said = "\n".join(lines) + str(move.missing)
    for name in move.given:
        if name not in said:
            move.left_out.setdefault(name, "it is in the lines above")
    for title, entries in (("Not needed here:", move.left_out), ("Not here:", move.missing)):
        if entries:
            lines += ["", f"# {title}"]
        for name, why in entries.items():
            value = f" {shown(move.given[name])}" if name in move.given else ""
            lines.append(f"# - {name}{value}: {why}")
    return "\n".join(lines) + "\n"


def moved(source, kind, processes=1, rows=None):
    """The `Move` of what a file says, and the lines that start the run."""
    move = Move(source, kind, processes, rows)
    updates = move_rollout(move) if kind == "GRPOConfig" else move_pairs(move)
    move_steps(move, updates)
    if kind == "GRPOConfig":
        move_objective(move)
        move_rewards(move)
        move_evaluation(move)
    elif kind == "DPOConfig":
        move_preferences(move)
    move_model(move)
    move_data(move)
    start = commands(move)
    move_rest(move)
    try:
        check(move.args(**move.lines))
    except InputError as error:
        raise InputError(f"{move.script} refuses it: {error}") from None
    return move, start


def class_of(source, trainer):
    """The class of a configuration."""
    if trainer:
        return TRAINERS[trainer]
    kinds = [source.kind] if source.kind else [kind for kind in OWN if OWN[kind] & source.given.keys()]
    if len(kinds) != 1:
        raise InputError("which trainer is it for? add --trainer grpo, --trainer dpo or --trainer reward")
    return kinds[0]


def command_line(words):
    """{option: value} of words of a command line; an option without a value is True."""
    found = {}
    for _, name, value in names.options(words):
        found[name] = trl_files.number(yaml.safe_load(value)) if value else True
    return found


def without_no(given):
    """The same options, with `no_x: true`, as transformers has it, as `x: false`."""
    negated = {name.removeprefix("no_"): False for name, value in given.items() if name[:3] == "no_" and value is True}
    return {name: value for name, value in given.items() if name.removeprefix("no_") not in negated} | negated


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        print(__doc__)
        return
    is_file = words[0] == "-" or not words[0].startswith("-")
    source = trl_files.read(words[0]) if is_file else trl_files.Source()
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--trainer", choices=TRAINERS)
    options, others = parser.parse_known_args(words[is_file:])
    source.given = without_no(source.given | command_line(others))
    kind = class_of(source, options.trainer)
    move, start = moved(source, kind, options.num_processes, options.rows)
    print(written(move, start, f"python tools/from_trl.py {' '.join(words)}"), end="")


if __name__ == "__main__":
    end_with_the_reader()
    with clean_exit():
        main()
