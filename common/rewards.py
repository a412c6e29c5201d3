"""Rewards: rules (accuracy, format), functions of the user as TRL calls them, and their weighted sum."""

import asyncio
import contextlib
import copy
import functools
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from common.answers import answers_match, extract_answer
from common.errors import InputError, one_line, world_size
from common.harness.command_line import load_tool

MAX_REWARD = 1e15  # ppo's value loss and the norm of a gradient square it in float32, whose largest number is 3e38


def accuracy_reward(completion: str, answer: str, truncated: bool = False) -> float:
    """1.0 if the final answer of the completion matches the gold, an answer or a whole solution with one, else 0.0."""
    predicted = extract_answer(completion, truncated)
    return float(predicted is not None and answers_match(predicted, extract_answer(answer) or answer))


def format_reward(completion: str, answer: str | None = None, truncated: bool = False) -> float:
    """1.0 if `extract_answer` finds an answer, else 0.0. For think tags take TRL's `think_format_reward`."""
    return float(extract_answer(completion, truncated) is not None)


RULES = {"accuracy": accuracy_reward, "format": format_reward, "math_verify": None}  # from tools/


@dataclass
class Reward:
    """One part of the reward: its name in the metrics, its weight, and a rule of `RULES` or a user's function."""

    name: str
    weight: float
    function: Callable
    logged: dict[str, list[float]] = field(default_factory=dict)  # by `log_metric`, since metrics were last written
    run: object = None  # set by `Run`; the function reads it through `trainer_state`

    @property
    def built_in(self):
        return self.function in RULES.values()

    def log_metric(self, name: str, value: float) -> None:
        """What TRL passes as `log_metric`: the value counts towards the mean `logged/<name>`."""
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): give a finite number")
        self.logged.setdefault(str(name), []).append(float(value))


def load_rewards(args) -> list[Reward]:
    """The rewards that `args.reward` names, weighted by `args.reward_weights` (None: 1.0 each): `RULES`, or the user's
    `file.py:function` or `package.module:function`. Raises InputError for what does not fit."""
    count, weights = len(args.reward), args.reward_weights or [1.0] * len(args.reward)
    if not 0 < count == len(weights) or not all(map(math.isfinite, weights)):
        raise InputError(f"--reward names {count}: --reward_weights must be as many finite numbers, not {weights}")
    names = [spec.rpartition(":")[2] for spec in args.reward]
    for spec, name in zip(args.reward, names, strict=True):
        if names.count(name) > 1 or (name in RULES and name != spec):
            raise InputError(f"--reward {spec}: another reward has the same name in the metrics; rename it")
    functions = [load_function(spec, type(args)) for spec in args.reward]
    return [Reward(*parts) for parts in zip(names, map(float, weights), functions, strict=True)]


def load_function(spec: str, cls: type) -> Callable:
    """The function that a value of --reward names; `cls`, the script's `Args`, says where its tools/ is."""
    source, _, name = spec.rpartition(":")
    if spec == "math_verify":
        RULES[spec] = load_tool(cls, "math_verify_reward", needed_by="--reward math_verify").load()
    if spec in RULES:
        return RULES[spec]
    if not source or not name:
        raise InputError(f"--reward '{spec}': not {', '.join(RULES)}, file.py:function or package.module:function")
    if source.endswith(".py") and not os.path.isfile(source):
        raise InputError(f"--reward '{spec}': there is no file {source}")
    with users_code(f"--reward '{spec}': the import"):
        if source.endswith(".py"):
            found = importlib.util.spec_from_file_location(f"reward_file_{os.path.basename(source)[:-3]}", source)
            module = importlib.util.module_from_spec(found)
            sys.modules[found.name] = module  # dataclasses and pickle look a class's module up there
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward '{spec}': {source} has no function {name}")
    return function


TORCH = (  # what is set for the whole process in torch: (what reads it, what sets it)
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


def _modes() -> tuple:
    nesting = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
    return torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda")), nesting


@contextlib.contextmanager
def users_code(what: str, completions: list = ()):
    """Run code of the user. What it sets for the whole process is undone: `TORCH`, and the working directory, to which
    the run's paths are relative; not random generators. What it raises, but Ctrl-C, is an InputError with its row."""
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(os.curdir))
            for get, put in TORCH:
                stack.callback(put, get())
            before = _modes()
            yield
            if _modes() != before:
                raise RuntimeError("it left torch.autocast or torch.inference_mode on: enter them by `with`")
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:  # also SystemExit, and what libraries in Rust raise
        held = {id(value) for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()}
        rows = [i for i, text in enumerate(completions) if id(text) in held or len(completions) == 1]
        where = f" on row {rows[0]}" if len(rows) == 1 else f" on {len(completions)} rows" if completions else ""
        message = f"{what} failed{where}: {type(error).__name__}: {one_line(error)}"
        if "string indices must be integers" in message and isinstance(completions[0], str):
            message += "; completions are text here; completion[0]['content'] needs data whose prompts are messages"
        raise InputError(message) from error


def score_rewards(reward_functions: list[Reward], prompts: list, texts: list[str], truncated: torch.Tensor):
    """The parts {name: (R,)} of the rewards of R completions, in which rows of one prompt are adjacent, and `correct`
    (R,): 1.0 or 0.0 by `deciding_part` or else by accuracy, NaN for a row without a gold, None if no row has one."""
    rows = [prompt for prompt in prompts for _ in range(len(texts) // len(prompts))]
    truncated = torch.as_tensor(truncated).tolist()
    parts = {reward.name: score(reward, rows, texts, truncated) for reward in reward_functions}
    if all(prompt.answer is None for prompt in prompts):
        return parts, None
    name = deciding_part(parts)
    return parts, parts[name] if name else score(Reward("accuracy", 1.0, accuracy_reward), rows, texts, truncated)


def score(reward: Reward, rows: list, texts: list[str], truncated: list[bool]) -> torch.Tensor:
    """The unweighted values (R,) of one reward, float64; NaN where it does not apply to a row. A user's function is
    called once; an InputError names it, and the row, where it fails or returns no finite number up to `MAX_REWARD`."""
    values = []
    if reward.built_in:
        for row, text, cut in zip(rows, texts, truncated, strict=True):
            applies = row.answer is not None or reward.function is format_reward
            text = "<think>" + text if row.thinks else text
            values.append(reward.function(text, row.answer, cut) if applies else math.nan)
        return torch.tensor(values, dtype=torch.float64)  # (R,)
    keywords = trl_keywords(reward, rows, texts, truncated)
    completions = list(keywords["completions"])  # the function may change its own list
    who = f"reward '{reward.name}'" + (f" on process {os.environ['RANK']}" if world_size() > 1 else "")
    with users_code(who, completions):
        found = reward.function(**keywords)
        found = asyncio.run(found) if asyncio.iscoroutine(found) else found  # TRL takes async functions too
        found = found.tolist() if hasattr(found, "tolist") else found  # tensors and arrays
        if not isinstance(found, list | tuple) or len(found) != len(rows):
            raise InputError(f"{who} returned {one_line(repr(found)):.80}: return a list of {len(rows)} values")
        for _completion, value in zip(completions, found, strict=True):  # `users_code` names the row that it is of
            number = math.nan if value is None or isinstance(value, str | bytes) else float(value)
            if value is not None and not abs(number) * max(1, abs(reward.weight)) <= MAX_REWARD:
                advice = f"return a finite number, with its weight not beyond {MAX_REWARD:g}, or None for no reward"
                raise InputError(f"{who} returned {one_line(repr(value)):.80} for row {len(values)}; {advice}")
            values.append(number)
    return torch.tensor(values, dtype=torch.float64)  # (R,)


def trl_keywords(reward: Reward, rows: list, texts: list[str], truncated: list[bool]) -> dict:
    r"""What TRL's GRPOTrainer passes to the function of `reward` (docs/running.md), and `truncated`: copies, which it
    may change. TRL's own functions get messages alone, and dollar signs around the gold: without, 2\sqrt{2} is 2."""
    from transformers import TrainerState

    from_trl = (getattr(reward.function, "__module__", None) or "").startswith("trl.")  # also what its factories make
    prompts, completions = [copy.deepcopy(row.prompt) for row in rows], [str(text) for text in texts]
    if from_trl:
        prompts = [[{"role": "user", "content": x}] if isinstance(x, str) else x for x in prompts]
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    golds = [row.answer for row in rows]
    latex = [f"${gold}$" if from_trl and gold and gold[0] != "$" else gold for gold in golds]
    keywords = {"answer": golds, "solution": latex} if any(gold is not None for gold in golds) else {}
    for name in dict.fromkeys(name for row in rows for name in row.columns):
        keywords[name] = [copy.deepcopy(row.columns.get(name)) for row in rows]
    keywords |= {"prompts": prompts, "completions": completions, "truncated": list(truncated)}
    keywords["completion_ids"] = [list(getattr(text, "ids", ())) for text in texts]
    steps = dict(global_step=reward.run.step, max_steps=reward.run.args.max_steps) if reward.run else {}
    keywords |= {"trainer_state": TrainerState(**steps), "log_metric": reward.log_metric}
    return keywords | {"log_extra": functools.partial(log_extra, texts)}


def log_extra(texts: list, column: str, values: list) -> None:
    """What TRL passes as `log_extra`, with the completions bound: values go to rows of samples.jsonl, NaN as null."""
    for text, value in zip(texts, values, strict=True):
        text.extra[str(column)] = None if isinstance(value, float) and not math.isfinite(value) else value


def deciding_part(parts: dict[str, torch.Tensor]) -> str | None:
    """The name of the part that decides what is correct: `math_verify`, else `accuracy`, else None."""
    return next((name for name in ("math_verify", "accuracy") if name in parts), None)


def weighted_sum(reward_functions: list[Reward], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of weight x part (R,). A NaN, where a function returned None, adds nothing; NaN alone makes NaN. A part
    of weight 0 only watches: it gives no row a reward that would have none without it."""
    weighing = [reward for reward in reward_functions if reward.weight] or reward_functions
    values = torch.stack([reward.weight * parts[reward.name] for reward in weighing])  # (functions, R)
    return values.nansum(dim=0).masked_fill(values.isnan().all(dim=0), math.nan)
