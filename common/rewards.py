"""Rewards: rules such as accuracy, functions of the user as TRL calls them, and their sum."""

import asyncio
import contextlib
import copy
import functools
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import torch

from common.answers import answers_match, extract_answer
from common.errors import InputError, one_line, world_size
from common.tools import load_tool

# The value loss of ppo.py and the norm of a gradient square rewards in float32, which ends at 3e38.
MAX_REWARD = 1e15


# --- rules ---


def accuracy_reward(completion: str, answer: str, truncated: bool = False) -> float:
    """1.0 if the final answer of the completion matches the gold, else 0.0.

    The gold, `answer`, is an answer or a whole solution that ends in one.
    """
    predicted = extract_answer(completion, truncated)
    if predicted is None:
        return 0.0
    gold = extract_answer(answer) or answer
    return float(answers_match(predicted, gold))


def format_reward(completion: str, answer: str | None = None, truncated: bool = False) -> float:
    """1.0 if `extract_answer` finds an answer, else 0.0.

    For think tags there is TRL's `think_format_reward`.
    """
    return float(extract_answer(completion, truncated) is not None)


# `load_function` puts the rule `math_verify` of tools/ here when --reward names it.
RULES = {"accuracy": accuracy_reward, "format": format_reward, "math_verify": None}


# --- the functions that --reward names ---


@dataclass
class Reward:
    """One part of the reward; its function is a rule of `RULES` or a function of the user."""

    name: str  # in the metrics
    weight: float
    function: Callable
    # What `log_metric` got since metrics were last written, by name.
    logged: dict[str, list[float]] = field(default_factory=dict)
    run: object = None  # `Run` sets it; the function reads it through `trainer_state`

    @property
    def built_in(self):
        return self.function in RULES.values()

    def log_metric(self, name: str, value: float) -> None:
        """What TRL passes as `log_metric`: the value counts towards the mean `logged/<name>`."""
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}, {value!r}): give a finite number")
        values = self.logged.setdefault(str(name), [])
        values.append(float(value))


def load_rewards(args) -> list[Reward]:
    """The rewards that `args.reward` names, with `args.reward_weights` (None: each has weight 1).

    Each is a name of `RULES`, or the user's `file.py:function` or `package.module:function`. What
    does not fit is an InputError.
    """
    count = len(args.reward)
    weights = args.reward_weights or [1.0] * count
    if count == 0 or len(weights) != count or not all(map(math.isfinite, weights)):
        needed = "--reward_weights must be as many finite numbers"
        raise InputError(f"--reward names {count}: {needed}, not {weights}")
    names = [spec.rpartition(":")[2] for spec in args.reward]
    for spec, name in zip(args.reward, names, strict=True):
        if names.count(name) > 1 or (name in RULES and name != spec):
            problem = "another reward has the same name in the metrics"
            raise InputError(f"--reward {spec}: {problem}; rename it")
    rewards = []
    for spec, name, weight in zip(args.reward, names, weights, strict=True):
        rewards.append(Reward(name, float(weight), load_function(spec, type(args))))
    return rewards


def load_function(spec: str, cls: type) -> Callable:
    """The function that a value of --reward names.

    The class of the script's options, `cls`, tells where the script and its tools/ are.
    """
    if spec == "math_verify":
        RULES[spec] = load_tool(cls, "math_verify_reward", needed_by="--reward math_verify").load()
    if spec in RULES:
        return RULES[spec]
    source, _, name = spec.rpartition(":")
    if not source or not name:
        known = f"{', '.join(RULES)}, file.py:function or package.module:function"
        raise InputError(f"--reward '{spec}': not {known}")
    is_file = source.endswith(".py")
    if is_file and not os.path.isfile(source):
        raise InputError(f"--reward '{spec}': there is no file {source}")
    with users_code(f"--reward '{spec}': the import"):
        module = import_file(source) if is_file else importlib.import_module(source)
        function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward '{spec}': {source} has no function {name}")
    return function


def import_file(path: str):
    """Import a file of the user as the module `reward_file_<name of the file>`."""
    name = "reward_file_" + os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module of a class there
    spec.loader.exec_module(module)
    return module


# --- code of the user ---


def _set_default_device(device):
    """Set torch's default device; None means the CPU, and costs nothing in each call of torch."""
    torch.set_default_device(None if device.type == "cpu" else device)


# What torch keeps for the whole process: the functions that read it and that set it.
TORCH_SETTINGS = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_default_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


def _entered_modes() -> tuple:
    """Which modes of torch are on, with the number of nested `autocast`."""
    torch.autocast_increment_nesting()  # torch can only read the number while it changes it
    nested = torch.autocast_decrement_nesting()
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return torch.is_inference_mode_enabled(), autocast, nested


@contextlib.contextmanager
def users_code(what: str, completions: list = ()):
    """Run code of the user. An error in it becomes an InputError that names the row; Ctrl-C passes.

    What the code sets for the whole process is undone: `TORCH_SETTINGS`, and the working directory,
    to which the paths of the run are relative. Random generators stay as the code leaves them.
    """
    try:
        with contextlib.ExitStack() as at_exit:
            at_exit.enter_context(contextlib.chdir(os.curdir))
            for read, write in TORCH_SETTINGS:
                at_exit.callback(write, read())
            before = _entered_modes()
            yield
            if _entered_modes() != before:
                left_on = "it left torch.autocast or torch.inference_mode on"
                raise RuntimeError(f"{left_on}: enter them by `with`")
    except (KeyboardInterrupt, InputError):
        raise
    except BaseException as error:  # also SystemExit, and what libraries in Rust raise
        place = place_of_error(error, completions)
        message = f"{what} failed{place}: {type(error).__name__}: {one_line(error)}"
        reads_text = completions and isinstance(completions[0], str)
        if reads_text and "string indices must be integers" in message:
            message += "; completions are text here"
            message += "; completion[0]['content'] needs data whose prompts are messages"
        raise InputError(message) from error


def place_of_error(error: BaseException, completions: list) -> str:
    """The row whose completion was in a variable at the error, else the number of rows."""
    if not completions:
        return ""
    if len(completions) == 1:
        return " on row 0"
    held = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        held.update(map(id, frame.f_locals.values()))
    rows = [i for i, completion in enumerate(completions) if id(completion) in held]
    return f" on row {rows[0]}" if len(rows) == 1 else f" on {len(completions)} rows"


# --- whether a user's function can be called ---


def check_signatures(reward_functions: list[Reward], *prompt_lists: list) -> None:
    """Refuse a function of the user that could not be called for the prompts of one of the lists.

    So a mistake in its `def` does not cost the loading of the model, or judges that were paid.
    """
    for reward in reward_functions:
        for prompts in filter(None, prompt_lists):
            if not reward.built_in:
                check_signature(reward, keyword_names(reward, prompts))


def keyword_names(reward: Reward, prompts: list) -> list[str]:
    """The names of all keywords that the function gets for some of the prompts."""
    names = dict.fromkeys(trl_keywords(reward, prompts[:1], [""], [False]))
    names |= gold_keywords([prompt.answer for prompt in prompts], from_trl=False)
    names |= dict.fromkeys(chain.from_iterable(prompt.columns for prompt in prompts))
    return list(names)


def check_signature(reward: Reward, names: list[str]) -> None:
    """Refuse a function that cannot be called with these keywords, and show its mended `def`.

    A wrapper is judged by its own parameters, since it may pass on others than it gets.
    """
    try:
        signature = inspect.signature(reward.function, follow_wrapped=False)
    except (TypeError, ValueError):  # code that is not Python has none
        return
    try:
        signature.bind(**dict.fromkeys(names))
        return
    except TypeError:
        pass
    missing = []
    for parameter in signature.parameters.values():
        is_filled = parameter.name in names and parameter.kind != parameter.POSITIONAL_ONLY
        is_needed = parameter.default is parameter.empty and parameter.kind in NAMED
        if is_needed and not is_filled:
            missing.append(parameter.name)
    problem = f"it gets more than it takes: {', '.join(names)}"
    if missing:
        problem = f"it needs {', '.join(missing)}, and gets {', '.join(names)}"
    raise InputError(f"reward '{reward.name}': {problem}; write: {mended(reward, signature, names)}")


# The kinds of parameters that have one value.
NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


def mended(reward: Reward, signature: inspect.Signature, names: list[str]) -> str:
    """The line `def` of a function with those of its parameters that it gets, and `**kwargs`.

    def right(text, answer) -> "def right(completions, answer, **kwargs)"
    """
    function = reward.function
    needed = []
    optional = []
    for name, parameter in signature.parameters.items():
        if name not in names or parameter.kind not in NAMED:
            continue
        if parameter.default is parameter.empty:
            needed.append(name)
        else:
            optional.append(f"{name}={parameter.default!r}")
    if "completions" not in signature.parameters:
        needed.insert(0, "completions")
    is_object = inspect.ismethod(function.__call__)
    called = reward.name
    if isinstance(function, type):
        called = "__init__"
    elif is_object:
        called = "__call__"
    if called != reward.name:
        needed.insert(0, "self")
    is_async = inspect.iscoroutinefunction(function.__call__ if is_object else function)
    start = "async def" if is_async else "def"
    return f"{start} {called}({', '.join([*needed, *optional, '**kwargs'])})"


# --- scores ---


def score_rewards(reward_functions: list[Reward], prompts: list, texts: list[str], truncated):
    """The parts {name: (R,)} of the rewards of R completions, and `correct` (R,).

    Rows of one prompt are adjacent. `correct` is 1.0 or 0.0 by `deciding_part`, or else by
    accuracy. It is NaN for a row without a gold answer, and None if no row has one.
    """
    rows_of_prompt = len(texts) // len(prompts)
    row_prompts = []
    for prompt in prompts:
        row_prompts += [prompt] * rows_of_prompt
    truncated = torch.as_tensor(truncated).tolist()
    parts = {}
    for reward in reward_functions:
        parts[reward.name] = score(reward, row_prompts, texts, truncated)
    if all(prompt.answer is None for prompt in prompts):
        return parts, None
    name = deciding_part(parts)
    if name:
        return parts, parts[name]
    accuracy = Reward("accuracy", 1.0, accuracy_reward)
    return parts, score(accuracy, row_prompts, texts, truncated)


def score(reward: Reward, row_prompts: list, texts: list[str], truncated: list[bool]):
    """The values (R,), float64, of one reward, which are not weighted yet.

    `row_prompts` has the prompt of each row. A row to which the reward does not apply gets NaN.
    """
    read_values = rule_values if reward.built_in else function_values
    return torch.tensor(read_values(reward, row_prompts, texts, truncated), dtype=torch.float64)


def rule_values(reward: Reward, row_prompts: list, texts: list[str], truncated: list[bool]):
    """What a rule of `RULES` gives to each row. Without a gold only `format_reward` applies."""
    values = []
    for prompt, text, is_truncated in zip(row_prompts, texts, truncated, strict=True):
        if prompt.answer is None and reward.function is not format_reward:
            values.append(math.nan)
            continue
        if prompt.thinks:  # the completion begins within the thought that the prompt has opened
            text = "<think>" + text
        values.append(reward.function(text, prompt.answer, is_truncated))
    return values


def function_values(reward: Reward, row_prompts: list, texts: list[str], truncated: list[bool]):
    """What a user's function gives to each row.

    It is called once, even if it fails: a call may cost money.
    """
    keywords = trl_keywords(reward, row_prompts, texts, truncated)
    completions = list(keywords["completions"])  # a copy: the function may change its list
    who = f"reward '{reward.name}'"
    if world_size() > 1:
        who += f" on process {os.environ['RANK']}"
    values = []
    with users_code(who, completions):
        returned = reward.function(**keywords)
        if asyncio.iscoroutine(returned):  # TRL takes async functions too
            returned = asyncio.run(returned)
        if hasattr(returned, "tolist"):  # a tensor or an array
            returned = returned.tolist()
        if not isinstance(returned, list | tuple) or len(returned) != len(texts):
            shown = one_line(repr(returned))
            raise InputError(f"{who} returned {shown:.80}: return a list of {len(texts)} values")
        # `users_code` names the row of the completion that a variable holds, here `_completion`.
        for _completion, value in zip(completions, returned, strict=True):
            values.append(as_number(value, reward.weight, who, row=len(values)))
    return values


def as_number(value, weight: float, who: str, row: int) -> float:
    """A value that a user's function returned, as a number; None, which means no reward, is NaN.

    A number that is not finite is an InputError, and so is one above `MAX_REWARD`, weighted or not.
    """
    if value is None:
        return math.nan
    number = math.nan if isinstance(value, str | bytes) else float(value)
    size = abs(number) * max(1, abs(weight))
    if math.isnan(size) or size > MAX_REWARD:
        limit = f"with its weight not beyond {MAX_REWARD:g}"
        advice = f"return a finite number, {limit}, or None for no reward"
        raise InputError(f"{who} returned {one_line(repr(value)):.80} for row {row}; {advice}")
    return number


# --- what a user's function is called with ---


def trl_keywords(reward: Reward, row_prompts: list, texts: list[str], truncated: list[bool]):
    """What TRL's GRPOTrainer passes to the function of `reward` (docs/running.md), and `truncated`.

    All values are copies, which the function may change. Functions of TRL itself understand
    messages alone, so a text becomes a message for them.
    """
    from transformers import TrainerState

    # The module of what a factory of TRL has made is also TRL's.
    from_trl = (getattr(reward.function, "__module__", None) or "").startswith("trl.")
    prompts = [copy.deepcopy(prompt.prompt) for prompt in row_prompts]
    completions = [str(text) for text in texts]
    if from_trl:
        prompts = [as_message("user", x) if isinstance(x, str) else x for x in prompts]
    if not isinstance(prompts[0], str):
        completions = [as_message("assistant", completion) for completion in completions]
    state = TrainerState()
    if reward.run:
        state = TrainerState(global_step=reward.run.step, max_steps=reward.run.args.max_steps)
    return {
        **gold_keywords([prompt.answer for prompt in row_prompts], from_trl),
        **column_keywords([prompt.columns for prompt in row_prompts]),
        "prompts": prompts,
        "completions": completions,
        "truncated": list(truncated),
        "completion_ids": [list(getattr(text, "ids", ())) for text in texts],
        "trainer_state": state,
        "log_metric": reward.log_metric,
        "log_extra": functools.partial(log_extra, texts),
    }


def as_message(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def gold_keywords(golds: list, from_trl: bool) -> dict:
    r"""The gold answers as `answer` and `solution`, if there are any.

    Functions of TRL get them as a formula: without dollar signs they would take 2\sqrt{2} for 2.
    """
    if all(gold is None for gold in golds):
        return {}
    solutions = list(golds)
    if from_trl:
        solutions = [f"${gold}$" if gold and gold[0] != "$" else gold for gold in golds]
    return {"answer": golds, "solution": solutions}


def column_keywords(rows: list[dict]) -> dict:
    """The columns of the data, as {name: values}; a row that lacks one has None there.

    [{"level": 1}, {"tests": "2"}] -> {"level": [1, None], "tests": [None, "2"]}
    """
    names = dict.fromkeys(chain.from_iterable(rows))  # each name once, in the order of the rows
    keywords = {}
    for name in names:
        keywords[name] = [copy.deepcopy(columns.get(name)) for columns in rows]
    return keywords


def log_extra(texts: list, column: str, values: list) -> None:
    """What TRL passes as `log_extra`, once `texts`, the completions, are bound.

    The values go to the rows of samples.jsonl; what is not finite goes there as null.
    """
    for text, value in zip(texts, values, strict=True):
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        text.extra[str(column)] = value


# --- the sum ---


def deciding_part(parts: dict[str, torch.Tensor]) -> str | None:
    """The name of the part that decides what is correct; None if neither of the two is there."""
    for name in ("math_verify", "accuracy"):
        if name in parts:
            return name
    return None


def weighted_sum(reward_functions: list[Reward], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum (R,) of weight x part.

    A NaN, where a function returned None, adds nothing to it; a row that has nothing but NaN is
    NaN. A part of weight 0 only watches: it gives no row a reward that would have none without it.
    """
    weighing = [reward for reward in reward_functions if reward.weight] or reward_functions
    weighted = torch.stack([reward.weight * parts[reward.name] for reward in weighing])
    unscored = weighted.isnan().all(dim=0)
    return weighted.nansum(dim=0).masked_fill(unscored, math.nan)
