r"""Rule rewards: find the final answer in a completion, compare it with the gold, or ask the user's own function.

`extract_answer` finds the text of the answer, `answers_match` decides whether two such texts mean the same. Nothing is
executed: model text meets only regular expressions that cannot backtrack far, on bounded lengths, and `Fraction` on
numbers of bounded size, so every call ends within milliseconds whatever the text is.

How answers compare:
- Numbers compare as exact rationals, without tolerance: `0.5`, `.50`, `1/2` and `5e-1` are one; 0.333 is not 1/3.
  A comma, a blank or LaTeX's `,\!` may stand between groups of three digits: `5,600` and `5 600` are 5600; `1 2` and
  `1 234 5` are no numbers, and `3 1/2` is three and a half.
- A unit counts only where both sides have one: `5 cm` matches `5`, not `5 m`. So does a name: `x = 3` matches `3`, not
  `y = 3`. Percent is a unit like any other: `50%` matches `50` and `50 pct`, not `0.5`.
- Of steps of arithmetic the last side counts: `2+40 = 42` matches `42`. With an unknown, as in `2x = 6`, it is text.
- `3 or 4`, `3, 4` and `\{3, 4\}` are lists. They match lists alone, in any order. Tuples and intervals match element by
  element and by their brackets.
- Everything else compares as a string, after what does not change the meaning is taken away: LaTeX for the eye,
  Markdown, a pair of quotes, an end-of-text token with what follows it, and the doubling of every backslash by JSON.
"""

import asyncio
import atexit
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import multiprocessing
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch

from common.runs import InputError, one_line

MAX_TEXT = 100_000  # characters at the end of a completion that are read
MAX_EMPTY = 10  # markers with nothing behind them that are passed over
MAX_BOX = 10_000  # a box that is not closed after so many characters is unfinished
MAX_ANSWER = 1_000  # longer answers compare as plain strings
MAX_REWARD = 1e15  # ppo's value loss and the norm of a gradient square it in float32, whose largest number is 3e38
MATH_VERIFY_SECONDS = 5.0  # then a comparison counts as wrong
MATH_VERIFY_START_SECONDS = 120.0  # its process imports the running script, torch and sympy first

# ---------------------------------------------------------------------------------------------------- extraction

END_OF_TEXT = re.compile(  # with the brace or tag that closes right behind it
    r"<(?:\|(?:endoftext|im_end|eot_id|eom_id|end_of_text|end|return)\||end_of_turn|eos|/s"
    r"|\uff5cend\u2581of\u2581sentence\uff5c)>(\}|(?i:</answer>))?"
)
ANSWER_WORD = r"(?i:nswer)\*{0,3} ?(?:is\b|[:\uff1a])"
MARKER = re.compile(  # each begins with a letter of its own: five times faster than with a group or a lookbehind
    rf"\\boxed(?![A-Za-z])|\\fbox(?![A-Za-z])|<(?i:answer)>|a{ANSWER_WORD}|A{ANSWER_WORD}"
    r"|#(?<!##)#{0,5} {0,3}\*{0,3}(?i:(?:the )?(?:final )?answer)\*{0,3}[ \r]{0,3}\n|####(?<!#####)(?!#)"
    r"|\u7b54\u6848(?:\u3011|\*{0,3} ?[\u662f\u4e3a:\uff1a])"
    r"|\u7b54(?<![\u4e00-\u9fff].)\*{0,3} ?[:\uff1a]"
)
BEFORE_ANSWER = re.compile(r"(?:[\s*_`:\uff1a]|\$\$|\\\[)*")  # between the marker and its answer
ANSWER_END = re.compile(r"(?i:</answer>)")
LINE_END = re.compile(r"\n|(?i:</answer>)")
SENTENCE_END = re.compile(r"\n|(?i:</answer>)|\.\s|[\u3002\u3010]")
BOX_START = re.compile(r"\s*(\{?)([^\s$]*)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
QUOTED = re.compile(r"""(["'])([^"']*)\1|\u201c([^\u201c\u201d]*)\u201d|\u2018([^\u2018\u2019]*)\u2019""")
MATH_WRAPPER = re.compile(r"\$\$?([^$]*)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)


def extract_answer(text: str, truncated: bool = False) -> str | None:
    r"""The text of the final answer, or None.

    The last complete marker counts, of whatever kind: `\boxed{}`, `<answer></answer>`, `####`, "the answer is",
    "Answer:", a heading "# Final Answer", and the Chinese forms. Text before `</think>`, after an end-of-text token or
    in an unclosed `<think>` does not count. An unfinished last box or tag is no answer. Neither is an answer that runs
    to the very end of a `truncated` completion: it may be half a number. A box or tag that is closed there is whole,
    also where an end-of-text token stands right before it closes.
    """
    text = text[-MAX_TEXT:]
    end, closing = END_OF_TEXT.search(text), ""
    if end:
        text, closing, truncated = text[: end.start()], end[1] or "", False
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    stop = len(text)  # where the next marker begins
    for marker in reversed(list(MARKER.finditer(text))[-MAX_EMPTY:]):
        if marker[0][0] == "\\":
            return _boxed(text + closing, marker.end(), truncated)
        if marker[0][0] == "<":
            close = ANSWER_END.search(text + closing, marker.end())
            return _trim(text[marker.end() : close.start()]) or None if close else None
        start = BEFORE_ANSWER.match(text, marker.end(), stop).end()
        end = (LINE_END if marker[0] == "####" else SENTENCE_END).search(text, start, stop)
        if truncated and end is None and stop == len(text):
            return None
        answer = _trim(text[start : end.start() if end else stop])
        if answer:
            return answer
        stop = marker.start()
    return None


def _boxed(text: str, start: int, truncated: bool) -> str | None:
    r"""What follows `\boxed` at `start`: a group with its nested braces closed, or one word, as in `\boxed 3`."""
    word = BOX_START.match(text, start)
    if not word[1]:
        return None if truncated and word.end() == len(text) else _trim(word[2]) or None
    depth = 0
    for brace in BRACE.finditer(text, word.start(1), word.start(1) + MAX_BOX):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            return _trim(text[word.end(1) : brace.start()]) or None
    return None


def _trim(answer: str) -> str:
    """`answer` without blanks, Markdown emphasis, a final period, quotes, and what makes it a formula: `$`, `\\(`."""
    answer = _unquote(answer.strip(" \t\r\n*`").rstrip(".\u3002").rstrip(" *`"))
    wrapper = MATH_WRAPPER.fullmatch(answer)
    return (wrapper[1] or wrapper[2] or wrapper[3] or "").strip() if wrapper else answer


def _unquote(answer: str) -> str:
    """`answer` without the quotes around the whole of it: `5"` and `"a" or "b"` keep theirs."""
    quoted = QUOTED.fullmatch(answer)
    return (quoted[2] or quoted[3] or quoted[4] or "").strip() if quoted else answer


# --------------------------------------------------------------------------------------------------- equivalence

CHARACTERS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # fullwidth forms of ASCII
CHARACTERS |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63"), "-")
CHARACTERS |= dict.fromkeys(map(ord, "\u2009\u202f"), r"\,")  # thin spaces
CHARACTERS |= {ord(c): " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
CHARACTERS |= str.maketrans({
    "\u3000": " ", "\u00a0": " ", "\u2044": "/", "\uffe5": "¥", "\u3001": ",", "\u3002": ".", "²": "^2", "³": "^3",
    "°": r"\degree ", "\u00d7": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "±": r"\pm ", "π": r"\pi ",
    "√": r"\sqrt ", "∞": r"\infty ", "\u222a": r"\cup ",
})  # fmt: skip
JSON_ESCAPED = re.compile(r"[^\\]*(?:\\\\(?:\\\\|(?=[^\\\s]))[^\\]*)+")  # `\\ ` is a line break, not a doubled `\ `
DIGIT_SEPARATOR = re.compile(r"(?<=[0-9])(?:,\\!|\\,) ?(?=[0-9]{3}(?![0-9]))")
INVISIBLE = re.compile(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|\\[!()\[\]]")
LATEX_SPACE = re.compile(r"\\(?:q?quad(?![A-Za-z])|[,;: ])|~")
DEGREE = re.compile(r"\^?(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\\degree(?![A-Za-z]))")
ARGUMENT = r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*+)\}|([0-9A-Za-z]|\\[a-z]+))"
FRACTION = re.compile(r"\\[dtc]?frac(?![A-Za-z])" + ARGUMENT + ARGUMENT)
ATOM = re.compile(r"[+-]?[0-9.,]+|[A-Za-z]|\\[a-z]+")
WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname|boxed|fbox)\s*\{([^{}]*)\}")
EXPONENT = re.compile(r"\^ ?\{ ?([+-]?\w+) ?\}")
ROOT = re.compile(r"\\sqrt ?(\w)")

NUMBER = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
SPACED = r"[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?:\.[0-9]*)?"
QUANTITY = re.compile(
    rf"""(?P<sign>[+-]?)\ ?(?P<currency>[$€£¥]?)\ ?(?P<second_sign>[+-]?)
    (?: (?:(?P<whole>[0-9]+)\ )? (?P<top>{NUMBER})\ ?/\ ?(?P<bottom>[+-]?{NUMBER})
      | (?:(?P<mantissa>{SPACED}|{NUMBER})\ ?(?:\\times|\\cdot|\*|x)\ ?)? 10\^(?P<power>[+-]?[0-9]{{1,3}})
      | (?P<decimal>{SPACED}|{NUMBER}(?:[eE][+-]?[0-9]{{1,3}})?) )
    (?P<gap>\ ?)(?P<unit>[$€£¥]|[^\W\d_]+(?:[ /-][^\W\d_]+){{0,7}}(?:\^[23])?)?""",
    re.VERBOSE,
)
CURRENCY = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yuan"}
UNITS = CURRENCY | {"pct": "percent", "percentage": "percent"}  # one name for what has several
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SHORT_UNITS = set("m g s h l mm cm km kg mg ml lb lbs oz ft in yd hr hrs mph kmh min sec am pm".split())
LINKING_WORDS = {"a", "an", "of", "in", "at", "on", "c", "f"}  # pieces of a cake, degrees C
NOT_UNITS = set(
    "or and not but nor to if is was pi sqrt log exp sin cos tan mod base choose plus minus over squared cubed "
    "factorial half halves third thirds quarter quarters fourth fourths fifth fifths repeating recurring".split()
) | set(SCALES)
NOT_CHINESE_UNITS = re.compile("[或和与及不十百千万亿]")

OPEN, CLOSE = "([{⦃", ")]}⦄"  # ⦃ ⦄ stand for LaTeX's escaped braces
ITEMS = re.compile(rf"[{re.escape(OPEN + CLOSE)}]|,(?!(?<=[0-9],)[0-9]{{3}}(?![0-9]))|;|\\cup|\b(?:or|and)\b|[或和与]")
COMMAS = re.compile(rf"[{re.escape(OPEN + CLOSE)}]|,")
NAME = re.compile(
    r"(\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z, ]+\))?|\([A-Za-z](?:, ?[A-Za-z])+\)) ?(?:=|\\in(?![A-Za-z])) ?"
)
STEPS = re.compile(  # arithmetic with plain numbers, each with `=` behind it
    rf"""(?: (?:[ ({{+-]|\\sqrt)*+ [$€£¥]?{NUMBER} [ )}}!]*+
    (?: (?:[-+*/^(]|\\times|\\cdot|\\div) (?:[ ({{+-]|\\sqrt)*+ [$€£¥]?{NUMBER} [ )}}!]*+ )*+ =[ ]? )*+""",
    re.VERBOSE,
)
UNKNOWN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")  # a letter that belongs to no LaTeX command
LOOSE_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")  # a blank between two digits holds them apart


class Parsed(NamedTuple):
    """An answer of kind `number`, `text`, `list` or its brackets, as `(]`; `name` stands before `=`, `unit` after."""

    kind: str
    value: Fraction | str | tuple
    name: str = ""
    unit: str = ""


def answers_match(predicted: str, gold: str) -> bool:
    """Whether two answers mean the same, by the rules at the top of this file. Symmetric; an empty one matches none."""
    if not predicted.strip() or not gold.strip():
        return False
    if max(len(predicted), len(gold)) > MAX_ANSWER:
        return predicted.strip() == gold.strip()
    return _same(_parse_answer(predicted), _parse_answer(gold))


def _same(a: Parsed, b: Parsed) -> bool:
    if a.kind != b.kind or (a.name and b.name and a.name != b.name) or (a.unit and b.unit and a.unit != b.unit):
        return False
    if isinstance(a.value, tuple):
        return len(a.value) == len(b.value) and all(map(_same, a.value, b.value))
    return a.value == b.value


@functools.lru_cache(maxsize=4096)  # a gold comes back for each completion of its group
def _parse_answer(answer: str) -> Parsed:
    text = _clean(answer)
    return _parse(text, depth=0) if text else _text(answer)  # nothing is left of `**`: it is no other's equal


def _clean(answer: str) -> str:
    """One spelling for what has several: unicode signs, LaTeX spacing and wrappers, fractions (`a/b`), blanks."""
    text = END_OF_TEXT.split(answer, maxsplit=1)[0] if "<" in answer else answer
    text = text if text.isascii() else text.translate(CHARACTERS)
    if "\\\\" in text and JSON_ESCAPED.fullmatch(text):
        text = text.replace("\\\\", "\\")
    if "$" in text:
        text = text.replace(r"\$", "\ue000")
        if text.count("$") % 2 == 0:  # pairs delimit formulas, a lone one is money
            text = text.replace("$", "")
        text = text.replace("\ue000", "$")
    if "\\" in text or "{" in text:
        text = LATEX_SPACE.sub(" ", INVISIBLE.sub("", DIGIT_SEPARATOR.sub("", text)))
        text = DEGREE.sub(" degree ", text)
        text = text.replace(r"\%", "%").replace("{,}", ",").replace(r"\{", "⦃").replace(r"\}", "⦄")
        text = EXPONENT.sub(r"^\1", ROOT.sub(r"\\sqrt{\1}", text))
        for _ in range(5):  # nested wrappers open from the inside
            text = WRAPPER.sub(r" \1 ", FRACTION.sub(_as_quotient, text))
    text = " ".join(text.replace("%", " percent ").split()).replace(" ^", "^")
    return _unquote(text.lstrip(" *`:,;").rstrip(" *`:,;.")).rstrip(".")


def _as_quotient(fraction: re.Match) -> str:
    top, bottom = fraction[1] or fraction[2] or "", fraction[3] or fraction[4] or ""
    top, bottom = (part.strip() if ATOM.fullmatch(part.strip()) else f"({part})" for part in (top, bottom))
    return f" {top}/{bottom}"


def _parse(text: str, depth: int) -> Parsed:
    text = text.strip()
    quantity = _quantity(text)
    items = _split(text, ITEMS)
    if quantity or not items or depth > 4:
        return quantity or _text(text)
    if len(items) > 1:
        return _list(items, depth)
    side = _last_side(text, depth)
    if side:
        return side
    brackets = text[0] + text[-1]
    inner = _split(text[1:-1], ITEMS) if text[0] in OPEN and text[-1] in CLOSE else None
    if not inner:
        return _text(text)
    if len(inner) == 1:  # 1,234 is a number, (1,234) a pair
        inner = _split(text[1:-1], COMMAS)
    if brackets in ("()", "{}") and len(inner) == 1:
        return _parse(inner[0], depth + 1)
    if brackets in ("⦃⦄", "{}"):
        return _list(inner, depth)
    return Parsed(brackets, tuple(_parse(item, depth + 1) for item in inner))


def _last_side(text: str, depth: int) -> Parsed | None:
    """What `x = 42`, `2+40 = 42` or `x = 2+40 = 42` come to; None for text of another kind."""
    name = NAME.match(text)
    start = name.end() if name else 0
    end = STEPS.match(text, start).end()
    last = text[end:]
    if end == 0 or not last or "=" in last or _split(last, ITEMS) is None:
        return None
    side = _parse(last, depth + 1)
    if end > start and (side.name or (side.kind != "number" and UNKNOWN.search(last))):
        return None
    steps = [_parse(step, depth + 1) for step in text[start:end].split("=") if "/" not in step]  # 2/3 may be rounded
    if any(step.kind == "number" and step.value != side.value for step in steps):  # `3 = 4` is no arithmetic
        return None
    return side._replace(name=name[1].replace(" ", "")) if name else side


def _list(items: list[str], depth: int) -> Parsed:
    parsed = [_parse(item, depth + 1) for item in items]
    return Parsed("list", tuple(sorted(parsed, key=lambda item: (item.kind, str(item.value)))))


def _split(text: str, separators: re.Pattern) -> list[str] | None:
    """The pieces between separators outside all brackets, empty ones left out; None if the brackets do not pair."""
    pieces, start, depth = [], 0, 0
    for token in separators.finditer(text):
        if token[0] in OPEN:
            depth += 1
        elif token[0] in CLOSE:
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0:
            pieces.append(text[start : token.start()])
            start = token.end()
    pieces.append(text[start:])
    return [piece for piece in pieces if piece.strip()] if depth == 0 else None


def _text(text: str) -> Parsed:
    text = LOOSE_SPACE.sub("", text)
    return Parsed("text", text.lower() if text.isalpha() else text)


def _quantity(text: str) -> Parsed | None:
    """A number with its sign, currency and unit, or None."""
    match = QUANTITY.fullmatch(text)
    if match is None:
        return None
    part = {name: (value or "").replace(",", "") for name, value in match.groupdict().items()}
    part |= {name: part[name].replace(" ", "") for name in ("mantissa", "decimal")}
    if part["bottom"]:
        if Fraction(part["bottom"]) == 0 or (part["whole"] and not part["top"].isdigit()):
            return None
        value = int(part["whole"] or 0) + Fraction(part["top"]) / Fraction(part["bottom"])
    elif part["power"]:
        value = Fraction(part["mantissa"] or 1) * Fraction(10) ** int(part["power"])
    else:
        value = Fraction(part["decimal"])
    if (part["sign"] == "-") != (part["second_sign"] == "-"):
        value = -value
    words = [UNITS.get(word, word) for word in re.split(r"[ /-]", part["unit"].lower()) if word]
    if words and words[0] in SCALES and part["gap"]:
        value *= SCALES[words.pop(0)]
    if words and not _is_unit(words, glued=not part["gap"]):
        return None
    words = [CURRENCY[part["currency"]], *words] if part["currency"] else words
    return Parsed("number", value, unit=" ".join(word.rstrip("s").rstrip("e") for word in words))  # 3 boxes, 1 box


def _is_unit(words: list[str], glued: bool) -> bool:
    """Whether words after a number name what it counts; in `3x`, `3 or so` and `5 choose 2` they do not."""
    if NOT_CHINESE_UNITS.search("".join(words)) or not NOT_UNITS.isdisjoint(words):
        return False
    first, *others = (word.removesuffix("^2").removesuffix("^3") for word in words)
    if glued and first.isascii():  # 5cm, 5pct and 5$, but 5m may be five times m
        return first in UNITS.values() or (first in SHORT_UNITS and len(first) > 1)
    others = [word for word in others if word not in LINKING_WORDS]
    return all(len(word) > 2 or word in SHORT_UNITS or not word.isascii() for word in (first, *others))


# ------------------------------------------------------------------------------------------------------- rewards


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
    """As `accuracy_reward`; what it does not accept, the `math-verify` package judges symbolically.

    math-verify's own timeouts are signals: they work in the main thread alone and do not interrupt one long power. So
    it runs without them in a process of its own, killed after `MATH_VERIFY_SECONDS`; that counts as wrong and is
    logged. Raises InputError if the package is missing.
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
    """DAPO Eq. 13: 0 up to `max_length - cache` tokens, then linearly down to -1 at `max_length`, and -1 beyond.

    `lengths` (R,) counts the tokens of each completion, EOS included. Returns (R,) float64, to be added to the reward.
    """
    if not 0 < cache <= max_length:
        raise InputError(f"overlong cache of {cache} tokens: it must be between 1 and the maximum length, {max_length}")
    return ((max_length - cache - lengths.double()) / cache).clamp(-1.0, 0.0)  # (R,)


# ------------------------------------------------------------------------------------------- choosing and scoring

BUILT_IN = {"accuracy": accuracy_reward, "format": format_reward, "math_verify": math_verify_reward}


class Reward(NamedTuple):
    """One part of the reward: its name in the metrics, its weight, and a built-in function or one of TRL's kind."""

    name: str
    weight: float
    function: Callable


def load_rewards(args) -> list[Reward]:
    """The functions that `args.reward` names, weighted by `args.reward_weights` (None: 1.0 each).

    A name is `accuracy`, `format`, `math_verify`, or the user's `file.py:function` or `package.module:function`, which
    has the signature of reward functions in TRL's GRPOTrainer; in the metrics it bears the function's name. Raises
    InputError for what cannot be found or does not fit.
    """
    weights = [1.0] * len(args.reward) if args.reward_weights is None else args.reward_weights
    if not args.reward or len(weights) != len(args.reward):
        raise InputError(f"--reward names {len(args.reward)}, --reward_weights has {len(weights)}; give one each")
    if not all(map(math.isfinite, weights)):
        raise InputError(f"--reward_weights must be finite numbers, not {weights}")
    names = [spec.rpartition(":")[2] for spec in args.reward]
    if len(set(names)) < len(names):
        raise InputError(f"--reward {' '.join(args.reward)}: two have one name, which the metrics need; rename one")
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
        with contextlib.chdir(os.curdir):  # as in `_call_user`
            module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        function = getattr(module, name, None)
    except (Exception, SystemExit) as error:
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


def score(reward: Reward, rows: list, texts: list[str], truncated: list[bool]) -> torch.Tensor:
    """The unweighted values (R,) of one reward, float64; NaN where it returned None: it does not apply to that row.

    `rows` hold `prompt`, `answer` and `columns`; a built-in that needs an answer does not apply where it is None. The
    user's function gets copies of messages and columns, and may change the working directory for itself alone. An
    exception or `sys.exit` in it, a value that is not a finite number or, weighted, is beyond `MAX_REWARD`, and too few
    or too many values raise InputError with function and row.
    """
    if reward.function in BUILT_IN.values():
        triples = enumerate(zip(rows, texts, truncated, strict=True))
        values = [_call(reward, f"row {i}", _score_row, reward.function, *triple) for i, triple in triples]
    else:
        values = _score_together(reward, rows, texts, truncated)
    return torch.tensor([_number(reward, i, value) for i, value in enumerate(values)], dtype=torch.float64)  # (R,)


def _score_row(function: Callable, row, text: str, truncated: bool) -> float | None:
    if function is format_reward:
        return format_reward(text, truncated)
    return None if row.answer is None else function(text, row.answer, truncated)


def _score_together(reward: Reward, rows: list, texts: list[str], truncated: list[bool]) -> list:
    try:
        values = _call(reward, "all rows together", _call_user, reward.function, _keywords(rows, texts, truncated))
    except InputError:
        for i in range(len(rows)):  # the run stops anyway: find the row
            one = slice(i, i + 1)
            keywords = _keywords(rows[one], texts[one], truncated[one])
            _call(reward, f"row {i}", _call_user, reward.function, keywords)
        raise
    values = values.tolist() if hasattr(values, "tolist") else values  # tensors and arrays
    if not isinstance(values, (list, tuple)) or len(values) != len(rows):
        found = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"a {type(values).__name__}"
        rows_text = f"rows 0 to {len(rows) - 1}"
        raise InputError(f"reward '{reward.name}' returned {found} for {rows_text}; return a list, one value per row")
    return list(values)


def _call_user(function: Callable, keywords: dict):
    with contextlib.chdir(os.curdir):  # comes back to where it was: paths of the run are relative
        result = function(**keywords)
        return asyncio.run(result) if inspect.iscoroutine(result) else result  # TRL takes async functions too


def _call(reward: Reward, where: str, function: Callable, *arguments):
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        message = f"reward '{reward.name}' failed on {where}: {type(error).__name__}: {one_line(error)}"
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            message += "; let it take **kwargs, as in TRL"
        raise InputError(message) from error


def _keywords(rows: list, texts: list[str], truncated: list[bool]) -> dict[str, list]:
    """What GRPOTrainer passes: prompts and completions, as messages in conversational data, and all columns.

    Messages and columns are copies, one for each row: the prompts of later steps are the originals.
    """
    names = dict.fromkeys(name for row in rows for name in row.columns)
    columns = {name: [_copy(row.columns.get(name)) for row in rows] for name in names}
    if any(row.answer is not None for row in rows):
        columns.setdefault("answer", [row.answer for row in rows])
    completions = [
        text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    return columns | {
        "prompts": [_copy(row.prompt) for row in rows],
        "completions": completions,
        "truncated": list(truncated),
    }


def _copy(value):
    """A deep copy of the lists and dicts that JSON and Arrow give; what they hold cannot be changed."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _number(reward: Reward, row: int, value) -> float:
    if value is None:
        return math.nan
    try:
        number = float("nan" if isinstance(value, (str, bytes)) else value)
    except Exception:
        number = math.nan
    if abs(number) * max(1, abs(reward.weight)) <= MAX_REWARD:
        return number
    message = f"reward '{reward.name}' returned {one_line(repr(value)):.80} for row {row}"
    if math.isfinite(number):
        raise InputError(f"{message}, weight {reward.weight:g}; beyond {MAX_REWARD:g} the loss would overflow")
    raise InputError(f"{message}; return a finite number, or None where it does not apply")


def correctness(parts: dict[str, torch.Tensor], rows: list, texts: list[str], truncated: list[bool]):
    """Whether each answer is right, 1.0 or 0.0 (R,), whatever the rewards are; NaN for a row without an answer.

    None if no row has one.

    It is the part that decides where there is one, so that nothing is scored twice. Call it before a part is recoded.
    """
    if all(row.answer is None for row in rows):
        return None
    if name := deciding_part(parts):
        return parts[name]
    return score(Reward("accuracy", 1.0, accuracy_reward), rows, texts, truncated)


def deciding_part(parts: dict[str, torch.Tensor]) -> str | None:
    """The name of the part that decides what is correct: `math_verify`, else `accuracy`; None if neither is there."""
    return next((name for name in ("math_verify", "accuracy") if name in parts), None)


def weighted_sum(reward_functions: list[Reward], parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of weight x part (R,). NaN, where a function returned None, counts as nothing; a row of NaN only is an
    InputError."""
    values = torch.stack([reward.weight * parts[reward.name] for reward in reward_functions])  # (functions, R)
    unscored = values.isnan().all(dim=0).nonzero().flatten().tolist()
    if unscored:
        raise InputError(f"row {unscored[0]}: every reward ({', '.join(parts)}) returned None; one must score each row")
    return values.nansum(dim=0)
