"""Rewards: rules (accuracy, format, math-verify, the overlong punishment), the user's own functions, and their sum."""

import asyncio
import atexit
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.answers import MAX_ANSWER, answers_match, extract_answer
from common.errors import InputError, one_line
from common.user_rewards import trl_keywords, undone

MAX_REWARD = 1e15  # ppo's value loss and the norm of a gradient square it in float32, whose largest number is 3e38
MATH_VERIFY_SECONDS = 5.0  # then a comparison counts as wrong
MATH_VERIFY_START_SECONDS = 120.0  # its process imports the running script, torch and sympy first


def accuracy_reward(completion: str, answer: str, truncated: bool = False) -> float:
    """1.0 if the completion's final answer matches the gold `answer`, else 0.0.

    The gold is the answer itself, or a whole solution with a marker, which `extract_answer` finds.
    """
    predicted = extract_answer(completion, truncated)
    return float(predicted is not None and answers_match(predicted, extract_answer(answer) or answer))


def format_reward(completion: str, truncated: bool = False) -> float:
    """1.0 if `extract_answer` finds an answer, else 0.0. For think tags take TRL's `think_format_reward`."""
    return float(extract_answer(completion, truncated) is not None)


def math_verify_reward(completion: str, answer: str, truncated: bool = False) -> float:
    """Like `accuracy_reward`, but what that does not accept is compared symbolically by the package `math-verify`.

    math-verify's own timeouts are signals: they work in the main thread alone and cannot interrupt one large power. So
    it runs without them in a process of its own. After `MATH_VERIFY_SECONDS` that is killed, which counts as wrong and
    is logged. Raises InputError if the package is missing.
    """
    _require_math_verify()
    predicted, gold = extract_answer(completion, truncated), extract_answer(answer) or answer
    if predicted is None or answers_match(predicted, gold):
        return float(predicted is not None)
    if max(len(predicted), len(gold)) > MAX_ANSWER:
        return 0.0
    try:
        return _math_verify_process().apply_async(_math_verify, (predicted, gold)).get(MATH_VERIFY_SECONDS)
    except multiprocessing.TimeoutError:
        _math_verify_process().terminate()
        _math_verify_process.cache_clear()
        message = "math-verify took over %s s on %.80r: scored 0"
        logging.getLogger(__name__).warning(message, MATH_VERIFY_SECONDS, predicted)
        return 0.0


def _require_math_verify() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise InputError("reward math_verify needs the package math-verify: pip install 'math-verify[antlr4_13_2]'")


@functools.cache
def _math_verify_process():
    pool = multiprocessing.get_context("spawn").Pool(1)  # a fork would copy the threads' locks and the GPU's state
    atexit.register(pool.terminate)
    try:
        pool.apply_async(_math_verify, ("0", "1")).get(MATH_VERIFY_START_SECONDS)
    except multiprocessing.TimeoutError as error:
        pool.terminate()
        message = "math-verify's process did not start; the running script needs an `if __name__ == '__main__':` guard"
        raise InputError(message) from error
    return pool


def _math_verify(predicted: str, gold: str) -> float:
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    texts = (f"${gold}$", f"${predicted}$")
    gold_parsed, predicted_parsed = (parse(text, parsing_timeout=None) for text in texts)
    return float(verify(gold_parsed, predicted_parsed, timeout_seconds=None))


def soft_overlong_punishment(lengths: torch.Tensor, max_length: int, cache: int) -> torch.Tensor:
    """DAPO Eq. 13 of `lengths` (R,) in tokens, EOS included: 0 up to `max_length - cache`, then linearly down to -1 at
    `max_length`, and -1 beyond. Returns (R,) float64, to be added to the reward."""
    if not 0 < cache <= max_length:
        raise InputError(f"overlong cache of {cache} tokens: it must be between 1 and the maximum length, {max_length}")
    return ((max_length - cache - lengths.double()) / cache).clamp(-1.0, 0.0)  # (R,)


# ------------------------------------------------------------------------------------------- choosing and scoring


def as_reward(rule: Callable, compares: bool = True) -> Callable:
    """A rule for one completion as a reward function of many, which returns None where a gold answer is missing."""

    def reward(completions, answer, truncated):
        rows = zip(completions, answer, truncated, strict=True)
        if not compares:
            return [rule(text, cut) for text, _, cut in rows]
        return [None if gold is None else rule(text, gold, cut) for text, gold, cut in rows]

    return reward


BUILT_IN = {
    "accuracy": as_reward(accuracy_reward),
    "format": as_reward(format_reward, compares=False),
    "math_verify": as_reward(math_verify_reward),
}


@dataclass
class Reward:
    """One part of the reward: its name in the metrics, its weight, and a function called as TRL calls it."""

    name: str
    weight: float
    function: Callable
    logged: dict[str, list[float]] = field(default_factory=dict)  # by `log_metric`, since metrics were last written
    run: object = None  # set by `Run`; the function reads it through `trainer_state`

    def __post_init__(self):
        self.built_in = self.function in BUILT_IN.values()  # else it is the user's


ACCURACY = Reward("accuracy", 1.0, BUILT_IN["accuracy"])


def load_rewards(args) -> list[Reward]:
    """The functions that `args.reward` names, weighted by `args.reward_weights` (None: 1.0 each).

    A name is `accuracy`, `format`, `math_verify`, or the user's `file.py:function` or `package.module:function`, which
    has the signature of reward functions in TRL's GRPOTrainer; in the metrics it has the function's name. Raises
    InputError for what cannot be found or does not fit.
    """
    weights = [1.0] * len(args.reward) if args.reward_weights is None else args.reward_weights
    if not args.reward or len(weights) != len(args.reward):
        raise InputError(f"--reward names {len(args.reward)}, --reward_weights has {len(weights)}; give one each")
    if not all(map(math.isfinite, weights)):
        raise InputError(f"--reward_weights must be finite numbers, not {weights}")
    names = [spec.rpartition(":")[2] for spec in args.reward]
    if len(set(names)) < len(names):
        raise InputError(f"--reward {' '.join(args.reward)}: two have the same name in the metrics: rename one")
    taken = [spec for spec, name in zip(args.reward, names, strict=True) if name in BUILT_IN and spec != name]
    if taken:
        raise InputError(f"--reward {taken[0]}: your function has the name of a built-in reward; rename it")
    if "math_verify" in args.reward:
        _require_math_verify()
    functions = [BUILT_IN.get(spec) or _load_function(spec) for spec in args.reward]
    return [Reward(*parts) for parts in zip(names, map(float, weights), functions, strict=True)]


def _load_function(spec: str) -> Callable:
    source, _, name = spec.rpartition(":")
    if not source or not name:
        choices = ", ".join([*BUILT_IN, "file.py:function", "package.module:function"])
        raise InputError(f"--reward '{spec}': it must be one of {choices}")
    if source.endswith(".py") and not Path(source).is_file():
        raise InputError(f"--reward '{spec}': there is no file {source}")
    try:
        with undone():
            module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        function = getattr(module, name, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and what libraries in Rust raise
        message = f"--reward '{spec}': importing {source} failed: {type(error).__name__}: {one_line(error)}"
        raise InputError(message) from error
    if not callable(function):
        raise InputError(f"--reward '{spec}': {source} has no function {name}")
    return function


def _load_file(path: Path):
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def score_rewards(reward_functions: list[Reward], prompts: list, texts: list[str], truncated: torch.Tensor):
    """The parts {name: (R,)} of the rewards of R completions, in which rows of one prompt are adjacent, and `correct`.

    `correct` (R,) is 1.0 or 0.0 whatever the rewards are, NaN for a row without a gold answer, and None if no row has
    one. If a part of the reward decides it (`deciding_part`), that part is taken, and nothing is scored twice.
    """
    rows = [prompt for prompt in prompts for _ in range(len(texts) // len(prompts))]
    truncated = torch.as_tensor(truncated).tolist()
    parts = {reward.name: score(reward, rows, texts, truncated) for reward in reward_functions}
    if all(prompt.answer is None for prompt in prompts):
        return parts, None
    name = deciding_part(parts)
    return parts, parts[name] if name else score(ACCURACY, rows, texts, truncated)


def score(reward: Reward, rows: list, texts: list[str], truncated: list[bool]) -> torch.Tensor:
    """The unweighted values (R,) of one reward, float64; NaN where it returned None: it does not apply to that row.

    `rows` hold `prompt`, `answer` and `columns`; a built-in that needs an answer does not apply where it is None. The
    user's function gets copies of messages and columns, and what it sets for the process ends with the call (`undone`).
    InputError, with function and row, for whatever it raises but Ctrl-C, for too few or too many values, and for one
    that is not a finite number or whose weighted size is beyond `MAX_REWARD`.
    """
    try:
        values = _call(reward, "all rows together", rows, texts, truncated)
    except InputError:
        for i in range(len(rows)):  # each row alone: the InputError then names it
            _call(reward, f"row {i}", rows[i : i + 1], texts[i : i + 1], truncated[i : i + 1])
        raise
    if not reward.built_in:
        values = _check_values(reward, values, len(rows))
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)  # (R,)


def _check_values(reward: Reward, values, rows: int) -> list:
    """What a user's function returned, as a list of floats and None, one for each row."""
    if not isinstance(values, (list, tuple)) or len(values) != rows:
        found = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
        rows_text = f"rows 0 to {rows - 1}"
        raise InputError(f"reward '{reward.name}' returned {found} for {rows_text}; return a list, one value per row")
    return [value if value is None else _number(reward, i, value) for i, value in enumerate(values)]


def _call(reward: Reward, where: str, rows: list, texts: list[str], truncated: list[bool]):
    try:
        if reward.built_in:
            texts = ["<think>" + text if row.thinks else text for row, text in zip(rows, texts, strict=True)]
            return reward.function(texts, [row.answer for row in rows], truncated)
        with undone():
            values = reward.function(**trl_keywords(reward, rows, texts, truncated))
            values = asyncio.run(values) if inspect.iscoroutine(values) else values  # TRL takes async functions too
            return values.tolist() if hasattr(values, "tolist") else values  # tensors and arrays
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(_failure(reward, where, rows, error)) from error


def _failure(reward: Reward, where: str, rows: list, error: BaseException) -> str:
    """What a reward raised, with advice on the two errors that functions written for TRL raise here."""
    message = f"reward '{reward.name}' failed on {where}: {type(error).__name__}: {one_line(error)}"
    problem, plain = str(error) if isinstance(error, TypeError) else "", isinstance(rows[0].prompt, str)
    if "unexpected keyword argument" in problem:
        message += "; let it take **kwargs, as in TRL"
    if "string indices must be integers" in problem and plain:
        message += "; completions are text here, since the prompts of the data are text: write completion for "
        message += 'completion[0]["content"], or give data whose prompts are messages'
    return message


def _number(reward: Reward, row: int, value) -> float:
    """A value of any type as a float; InputError if it is not a finite number, or too large."""
    number, shown, cause = math.nan, f"a value of type {type(value).__name__}", None
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
        if abs(number) * max(1, abs(reward.weight)) <= MAX_REWARD:
            return number
        shown = f"{one_line(repr(value)):.80}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        cause = error
    message = f"reward '{reward.name}' returned {shown} for row {row}"
    if math.isfinite(number):
        raise InputError(f"{message}, weight {reward.weight:g}; beyond {MAX_REWARD:g} the loss would overflow")
    raise InputError(f"{message}; return a finite number, or None where it does not apply") from cause


def deciding_part(parts: dict[str, torch.Tensor]) -> str | None:
    """The name of the part that decides what is correct: `math_verify`, else `accuracy`, else None."""
    return next((name for name in ("math_verify", "accuracy") if name in parts), None)


def weighted_sum(reward_functions: list[Reward], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of weight x part (R,). A NaN, where a function returned None, adds nothing; NaN alone makes NaN.

    A part of weight 0 only watches: it gives no row a reward that would have none without it.
    """
    weighing = [reward for reward in reward_functions if reward.weight] or reward_functions
    values = torch.stack([reward.weight * parts[reward.name] for reward in weighing])  # (functions, R)
    return values.nansum(dim=0).masked_fill(values.isnan().all(dim=0), math.nan)
