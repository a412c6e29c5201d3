"""What the user's reward functions are called with: what TRL's GRPOTrainer passes, by the same names."""

import contextlib
import functools
import math
import os
from collections.abc import Callable
from itertools import chain

import torch

from common.batches import Completion


def _matmul_precision():
    with contextlib.suppress(RuntimeError):  # torch's older and newer switches were mixed
        return torch.get_float32_matmul_precision()


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


TORCH = (  # what is set for the whole process in torch: (what reads it, what sets it)
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (_matmul_precision, torch.set_float32_matmul_precision),
)


@contextlib.contextmanager
def undone():
    """Undo what the user's code sets for the whole process: the working directory, since the run's paths are relative,
    and `TORCH`. Random generators stay as it leaves them: the run's sampling has its own.
    """
    before = [get() for get, _ in TORCH]
    with contextlib.chdir(os.curdir):
        try:
            yield
        finally:
            for (get, put), value in zip(TORCH, before, strict=True):
                if value is not None and get() != value:
                    put(value)


def trl_keywords(reward, rows: list, texts: list[str], truncated: list[bool]) -> dict:
    """The keyword arguments of the function of `reward` for these rows, which hold `prompt`, `answer` and `columns`.

    As in TRL: prompts and completions, as messages in conversational data; completion_ids, the sampled tokens with the
    stop token; all columns; trainer_state, log_metric and log_extra. Besides: truncated, and the gold as `answer` and
    `solution` unless the data has columns of these names. TRL's own functions read messages alone and parse the
    solution as LaTeX, so they get messages for plain prompts too, and the gold between dollar signs.
    Messages, columns and ids are copies, one for each row: what a function does to them must not reach later steps.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    keywords = {name: [_copy(row.columns.get(name)) for row in rows] for name in names}
    from_trl = is_from_trl(reward.function)
    if any(row.answer is not None for row in rows):
        golds = [row.answer for row in rows]
        keywords.setdefault("answer", golds)
        keywords.setdefault("solution", [_latex(gold) for gold in golds] if from_trl else list(golds))
    keywords |= {"prompts": [], "completions": [], "truncated": list(truncated)}
    for row, text in zip(rows, texts, strict=True):
        prompt, completion = _copy(row.prompt), str(text)
        if from_trl and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        plain = isinstance(prompt, str)
        keywords["prompts"].append(prompt)
        keywords["completions"].append(completion if plain else [{"role": "assistant", "content": completion}])
    if all(isinstance(text, Completion) for text in texts):
        keywords["completion_ids"] = [list(text.ids) for text in texts]
    keywords["trainer_state"] = trainer_state(reward.run)
    keywords["log_metric"] = functools.partial(_log_metric, reward.logged)
    return keywords | {"log_extra": functools.partial(_log_extra, texts)}


def is_from_trl(function: Callable) -> bool:
    """Whether a function is TRL's own: defined there, made by a factory there, or a `functools.partial` of such."""
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or "").startswith("trl.")


def _latex(gold: str | None) -> str | None:
    r"""The gold between dollar signs, as in TRL's own datasets: without them math-verify reads 2\sqrt{2} as 2."""
    return gold if gold is None or gold.startswith("$") else f"${gold}$"


def trainer_state(run):
    """Transformers' TrainerState with the finished steps of `run` and its --max_steps; a step is one rollout."""
    from transformers import TrainerState

    return TrainerState(global_step=run.step, max_steps=run.args.max_steps) if run else TrainerState(max_steps=0)


def _log_metric(logged: dict, name: str, value: float) -> None:
    """What TRL passes as `log_metric`, with a reward's `logged` bound: the value counts in the mean `logged/<name>`."""
    if not math.isfinite(value):
        raise ValueError(f"log_metric({name!r}, {value!r}): give a finite number")
    logged.setdefault(str(name), []).append(float(value))


def take_logged(accelerator, rewards: list, beside: dict[str, float]) -> dict[str, float]:
    """{logged/name: mean over all processes} of the values that these rewards gave to `log_metric` since the last call,
    the same on all processes. It is eval/logged/name if the metrics `beside` it are those of an evaluation."""
    from accelerate.utils import gather_object

    values = {}
    for name, numbers in chain.from_iterable(logged.items() for logged in gather_object([r.logged for r in rewards])):
        values.setdefault(name, []).extend(numbers)
    for reward in rewards:
        reward.logged = {}
    group = "eval/logged" if any(name.startswith("eval/") for name in beside) else "logged"
    return {f"{group}/{name}": sum(values[name]) / len(values[name]) for name in sorted(values)}


def _log_extra(texts: list, column: str, values: list) -> None:
    """What TRL passes as `log_extra`, with the completions bound: the values go to their rows in samples.jsonl.

    JSON has no NaN and no infinity: they become null.
    """
    if len(values) != len(texts):
        raise ValueError(f"log_extra({column!r}): {len(values)} values for {len(texts)} completions")
    for text, value in zip(texts, values, strict=True):
        if isinstance(text, Completion):
            value = None if isinstance(value, float) and not math.isfinite(value) else value
            text.extra[str(column)] = value if isinstance(value, str | int | float | None) else str(value)


def _copy(value):
    """A deep copy of the lists and dicts that JSON and Arrow give; the values in them are immutable."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
