"""Accuracy by class of difficulty, as rewards of weight 0: --reward accuracy lab/by_class.py:easy ..."""

from common.rewards import accuracy_reward


def accuracy_of(wanted, completions, difficulties, answers):
    rows = zip(completions, difficulties, answers, strict=True)
    return [accuracy_reward(text, answer) if difficulty == wanted else None for text, difficulty, answer in rows]


def easy(completions, difficulty, answer, **columns):
    return accuracy_of("easy", completions, difficulty, answer)


def medium(completions, difficulty, answer, **columns):
    return accuracy_of("medium", completions, difficulty, answer)


def hard(completions, difficulty, answer, **columns):
    return accuracy_of("hard", completions, difficulty, answer)
