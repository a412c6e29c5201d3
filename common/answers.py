r"""Where the answer is in a text, and whether two answers are the same.

`extract_answer` finds the text of the answer, `answers_match` decides whether two such texts mean the same. Nothing is
executed: model text meets only regular expressions that cannot backtrack far, on bounded lengths, and `Fraction` on
numbers of bounded size, so every call ends within milliseconds whatever the text is.

How answers compare:
- Numbers compare as exact rationals, without tolerance: `0.5`, `.50`, `1/2` and `5e-1` are equal; 0.333 is not 1/3.
  A comma, a blank or LaTeX's `,\!` may stand between groups of three digits: `5,600` and `5 600` are 5600; `1 2` and
  `1 234 5` are no numbers, and `3 1/2` is three and a half.
- A unit counts only where both sides have one: `5 cm` matches `5`, not `5 m`. So does a name: `x = 3` matches `3`, not
  `y = 3`. Percent is a unit like any other: `50%` matches `50` and `50 pct`, not `0.5`.
- Of steps of arithmetic the last side counts: `2+40 = 42` matches `42`. With an unknown, as in `2x = 6`, it is text.
- `3 or 4`, `3, 4` and `\{3, 4\}` are lists. They match lists alone, in any order. Tuples and intervals match element by
  element and by their brackets.
- Everything else compares as a string, after what does not change the meaning is removed: LaTeX for the eye,
  Markdown, a pair of quotes, an end-of-text token with what follows it, and the doubling of every backslash by JSON.
"""

import functools
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_TEXT = 100_000  # characters at the end of a completion that are read
MAX_EMPTY = 10  # markers with nothing behind them that are passed over
MAX_BOX = 10_000  # a box that is not closed after so many characters is unfinished
MAX_ANSWER = 1_000  # longer answers compare as plain strings

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
    return _parse(text, depth=0) if text else _text(answer)  # nothing is left of `**`: it equals no other answer


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
