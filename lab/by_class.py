"""Accuracy by class of difficulty, for --reward beside `accuracy`, with a weight of 0.

`lab/by_class.py:easy` and so on are parts of the reward in training; `lab/by_class.py:log_classes` logs all classes, in
the evaluation too, where its means are eval/logged/easy and so on.
"""

from common.rewards import accuracy_reward

CLASSES = ("easy", "medium", "hard")


def accuracy_of(wanted, completions, difficulties, answers, truncated):
    rows = zip(completions, difficulties, answers, truncated, strict=True)
    return [accuracy_reward(text, answer, cut) if name == wanted else None for text, name, answer, cut in rows]


def easy(completions, difficulty, answer, truncated, **columns):
    return accuracy_of("easy", completions, difficulty, answer, truncated)


def medium(completions, difficulty, answer, truncated, **columns):
    return accuracy_of("medium", completions, difficulty, answer, truncated)


def hard(completions, difficulty, answer, truncated, **columns):
    return accuracy_of("hard", completions, difficulty, answer, truncated)


def log_classes(completions, difficulty, answer, truncated, log_metric, **columns):
    for name in CLASSES:
        parts = [part for part in accuracy_of(name, completions, difficulty, answer, truncated) if part is not None]
        if parts:
            log_metric(name, sum(parts) / len(parts))
    return [0.0] * len(completions)
