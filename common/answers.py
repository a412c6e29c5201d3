r"""Where the answer is in a text, and whether two answers are the same.

`extract_answer` finds the text of the answer, `answers_match` decides whether two such texts mean the same. Nothing is
executed: model text meets only regular expressions that cannot backtrack far, on bounded lengths, and `Fraction` on
numbers of bounded size, so every call ends within milliseconds whatever the text is.

How answers compare:
- Numbers compare as exact rationals, without tolerance: `0.5`, `.50`, `1/2` and `5e-1` are equal; 0.333 is not 1/3.
  A comma, a blank or LaTeX's `,\!` may stand between groups of three digits: `5,600` and `5 600` are 5600; `1 2` and
  `1 234 5` are no numbers, and `3 1/2` is three and a half.
- A unit counts only where both sides have one: `5 cm` matches `5`, not `5 m`. So does a name: `x = 3` matches `3`, not
  `y = 3`. Percent is a unit like any other: `50%` matches `50` and `50 pct`, not `0.5`. Any noun may be one, but no
  number, and nothing that changes one: `5 dozen`, `5 fifths` and `5 doubled` are text.
- Of a chain of arithmetic the last side counts: `2+40 = 42` matches `42`. With an unknown, as in `2x = 6`, it is text.
- `3 or 4`, `3, 4` and `\{3, 4\}` match lists alone, in any order. Tuples and intervals keep their order and brackets.
- Everything else compares as a string, without what does not change the meaning: LaTeX spacing and styles, Markdown,
  a pair of quotes, an end-of-text token with what follows it, and the doubling of every backslash by JSON.
"""

import functools
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_TEXT = 100_000  # only so many characters at the end of a completion are read
MAX_EMPTY = 10  # at most so many markers are tried, since nothing may follow the last ones
MAX_BOX = 10_000  # a box that is not closed within so many characters is unfinished
MAX_ANSWER = 1_000  # longer answers compare as plain strings

# ---------------------------------------------------------------------------------------------------- extraction

END_OF_TEXT = re.compile(  # with the brace or tag that closes right after it
    r"<(?:\|(?:endoftext|im_end|eot_id|eom_id|end_of_text|end|return)\||end_of_turn|eos|/s"
    r"|\uff5cend\u2581of\u2581sentence\uff5c)>(\}|(?i:</answer>))?"
)
ANSWER_WORD = r"(?i:nswer)\*{0,3} ?(?:is\b|[:\uff1a])"
MARKER = re.compile(  # each begins with a literal character: five times faster than with a group or a lookbehind
    rf"\\boxed(?![A-Za-z])|\\fbox(?![A-Za-z])|<(?i:answer)>|a{ANSWER_WORD}|A{ANSWER_WORD}"
    r"|#(?<!##)#{0,5} {0,3}\*{0,3}(?i:(?:the )?(?:final )?answer)\*{0,3}[ \r]{0,3}\n|####(?<!#####)(?!#)"
    r"|\u7b54\u6848(?:\u3011|\*{0,3} ?[\u662f\u4e3a:\uff1a])|\u7b54(?<![\u4e00-\u9fff].)\*{0,3} ?[:\uff1a]"
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
    "Answer:", a heading "# Final Answer", the Chinese forms; of boxes in boxes the outermost. Text before `</think>`,
    after an end-of-text token or in an unclosed `<think>` does not count. An unfinished last box or tag is no answer.
    Neither is an answer that runs to the very end of a `truncated` completion: it may be half a number. A box or tag
    that closes there is complete, even if an end-of-text token stands right before the brace or tag that closes it.
    """
    text = text[-MAX_TEXT:]
    end, closing = END_OF_TEXT.search(text), ""
    if end:
        text, closing, truncated = text[: end.start()], end[1] or "", False
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    stop = len(text)  # where the next marker begins
    markers = list(MARKER.finditer(text))[-MAX_EMPTY:]
    for marker in reversed(markers):
        if marker[0][0] == "\\":
            return _boxed(text + closing, [box for box in markers if box[0][0] == "\\"], truncated)
        if marker[0][0] == "<":
            close = ANSWER_END.search(text + closing, marker.end())
            return _trim(text[marker.end() : close.start()]) or None if close else None
        start = BEFORE_ANSWER.match(text, marker.end(), stop).end()
        end = (LINE_END if marker[0] == "####" else SENTENCE_END).search(text, start, stop)
        if truncated and end is None and stop == len(text):
            return None
        if answer := _trim(text[start : end.start() if end else stop]):
            return answer
        stop = marker.start()
    return None


def _boxed(text: str, boxes: list[re.Match], truncated: bool) -> str | None:
    r"""What stands in the braces of the last box, or of the one around it, or the one word after it: `\boxed 3`."""
    words = [BOX_START.match(text, box.end()) for box in boxes]
    if not words[-1][1]:
        return None if truncated and words[-1].end() == len(text) else _trim(words[-1][2]) or None
    last, opened, answer = words[-1].start(1), [], ""
    starts = [word.start(1) for word in words if word[1] and word.start(1) > last - MAX_BOX]
    for brace in BRACE.finditer(text, starts[0], last + MAX_BOX):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened and (start := opened.pop()) in starts and brace.start() > last:
            answer = text[start + 1 : brace.start()]
    return _trim(answer) or None


def _trim(answer: str) -> str:
    """`answer` without blanks, Markdown emphasis, a final period, quotes, and what makes it a formula: `$`, `\\(`."""
    answer = answer.strip(" \t\r\n*`").rstrip(".\u3002").rstrip(" *`")
    return _inside(MATH_WRAPPER, _inside(QUOTED, answer))


def _inside(wrapper: re.Pattern, answer: str) -> str:
    """`answer` without a wrapper around all of it: `5"` and `"a" or "b"` keep their quotes."""
    match = wrapper.fullmatch(answer)
    return match[match.lastindex].strip() if match else answer


# --------------------------------------------------------------------------------------------------- equivalence

CHARACTERS = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # fullwidth forms of ASCII
CHARACTERS |= {code: str(unicodedata.decimal(chr(code))) for code in range(0x660, 0xE50) if chr(code).isdecimal()}
CHARACTERS |= dict.fromkeys([0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF])  # unseen
CHARACTERS |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63"), "-")
CHARACTERS |= {ord(c): " " + unicodedata.normalize("NFKC", c).replace("\u2044", "/") for c in "¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
CHARACTERS |= str.maketrans({
    "\u3000": " ", "\u00a0": " ", "\u2044": "/", "\uffe5": "¥", "\u3001": ",", "\u3002": ".", "²": "^{2}", "³": "^{3}",
    "°": r"\degree ", "\u00d7": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "±": r"\pm ", "π": r"\pi ",
    "√": r"\sqrt ", "∞": r"\infty ", "\u222a": r"\cup ", "\u2009": r"\,", "\u202f": r"\,",
})  # fmt: skip
JSON_ESCAPED = re.compile(r"[^\\]*(?:\\\\(?:\\\\|(?=[^\\\s]))[^\\]*)+")  # `\\ ` is a line break, not a doubled `\ `
DIGIT_SEPARATOR = re.compile(r"(?<=[0-9])(?:,\\!|\\,) ?(?=[0-9]{3}(?![0-9]))")
INVISIBLE = re.compile(r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|\\[!()\[\]]")
LATEX_SPACE = re.compile(r"\\(?:q?quad(?![A-Za-z])|[,;: ])|~")
DEGREE = re.compile(r"\^?(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\\degree(?![A-Za-z]))")
GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*+\})*+)\}"
ARGUMENT = rf"\s*(?:{GROUP}|([0-9A-Za-z]|\\[a-z]+))"
FRACTION = re.compile(rf"(?:([/^])\s*)?\\[dtc]?frac(?![A-Za-z]){ARGUMENT}{ARGUMENT}(?=\s*([0-9^!]|\.[0-9])?)")
ATOM = re.compile(r"[0-9.,]+|[A-Za-z]|\\[a-z]+")
WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it)|mbox|operatorname|boxed|fbox)\s*" + GROUP)
POWER = re.compile(r"\^([+-]?(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z]|\\[A-Za-z]++(?! ?\{)))")
INDEX = re.compile(r"_([0-9](?!\.?[0-9])|[A-Za-z])")  # one token, as in LaTeX; not `_23`, which may mean `_{23}`
ROOT = re.compile(r"\\sqrt ?(\w)")

NUMBER = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
SPACED = r"[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?:\.[0-9]*)?"
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
QUANTITY = re.compile(
    rf"""(?x)(?P<sign>[+-]?)\ ?(?P<currency>[$€£¥]?)\ ?(?P<second_sign>[+-]?)
    (?: (?:(?P<whole>[0-9]+)\ )? (?P<top>{NUMBER}|\([+-]?{NUMBER}\))\ ?/\ ?(?P<bottom>[+-]?{NUMBER}|\([+-]?{NUMBER}\))
      | (?:(?P<mantissa>{SPACED}|{NUMBER})\ ?(?:\\times|\\cdot|\*|x)\ ?)? 10\^\{{(?P<power>[+-]?[0-9]{{1,3}})\}}
      | (?P<decimal>{SPACED}|{NUMBER}(?:[eE][+-]?[0-9]{{1,3}})?) )
    (?:\ (?P<scale>(?i:{"|".join(SCALES)}))(?![^\ ]))? (?P<gap>\ ?)
    (?P<unit>[$€£¥]|[^\W\d_]+(?:[ /-][^\W\d_]+){{0,7}}(?:\^\{{[23]\}})?)?"""
)
UNITS = """$:dollar usd:dollar €:euro eur:euro £:pound ¥:yuan cny:yuan pct:percent percentage:percent
    mm:millimeter cm:centimeter m:meter metre:meter km:kilometer in:inch ft:foot feet:foot yd:yard mg:milligram g:gram
    kg:kilogram lb:lb oz:ounce ml:milliliter l:liter litre:liter s:second sec:second min:minute h:hour hr:hour mph:mph
    kmh:kmh am:am pm:pm"""
UNITS = dict(pair.split(":") for pair in UNITS.split())  # one name for what has several
LINKING_WORDS = {"a", "an", "of", "in", "at", "on", "c", "f"}  # pieces of a cake, degrees C
NOT_UNITS = re.compile(  # number words in any form (five, fives, fifth, fifths, fivefold), and what changes a number
    r"""(?xi)\b(?: (?:hundred|thou(?:sand)?|\w*illion|(?:b|m|tr)(?:il|ln)|dozen|lakh|crore|myriad|grand)(?:s|ths?|fold)?
    |(?:one|two|twen|three|thir|four|for(?=t)|five|fif|six(?:es)?|seven|eight?|nine?|ten|eleven|twel[fv]e?)
     (?:teen|ty|tie)?(?:s|ths?|fold)?\b(?!-) |zero|infinity|thirds?|hal(?:fs?|ves?|ved|ving)|quarter(?:s|ed)?|fold|gross
    |once|twice|thrice|(?:doub|treb|trip|quadrup|\w+tup)l(?:e[ds]?|ing)|negat(?:ive|ed)|inver(?:se|ted)|opposite
    |reciprocal|itself|multiplied|divided|squared|cubed|factorial|repeating|recurring|plus|minus|over|under|below|mod
    |base|choose|or|and|but|not|nor|to|if|is|was|pi|sqrt|log|exp|sin|cos|tan|(?-i:MM?) )\b
    |[或和与及不十百千万亿萬億兆半又]|分之|点[一二三四五六七八九零]|^[的成折打]"""
)

OPEN, CLOSE = "([{⦃", ")]}⦄"  # ⦃ ⦄ stand for LaTeX's escaped braces
ITEMS = re.compile(rf"[{re.escape(OPEN + CLOSE)}]|,(?!(?<=[0-9],)[0-9]{{3}}(?![0-9]))|;|\\cup|\b(?:or|and)\b|[或和与]")
COMMAS = re.compile(rf"[{re.escape(OPEN + CLOSE)}]|,")
NAME = re.compile(
    r"(\\?[A-Za-z]+(?:_(?:\{\w+\})?\w*+)?(?:\([A-Za-z, ]+\))?|\([A-Za-z](?:, ?[A-Za-z])+\)) ?(?:=|\\in(?![A-Za-z])) ?"
)
STEPS = re.compile(  # arithmetic with plain numbers, each with `=` after it
    rf"""(?x)(?: (?:[ ({{+-]|\\sqrt)*+ [$€£¥]?{NUMBER} [ )}}!]*+
    (?: (?:[-+*/^(]|\\times|\\cdot|\\div) (?:[ ({{+-]|\\sqrt)*+ [$€£¥]?{NUMBER} [ )}}!]*+ )*+ =[ ]? )*+"""
)
UNKNOWN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")  # a letter that belongs to no LaTeX command
# What can be left out: a blank, but not between two digits or words; the brackets of `(3\pi)/4` and `1/(\sqrt{2})`.
WORD = "[A-Za-zÀ-ӿ]{2}"
LOOSE_SPACE = re.compile(rf"(\\[A-Za-z]++) | (?!(?<=[0-9] )[0-9]|(?<={WORD} ){WORD}|(?<=\b[aAI] ){WORD}\w)")
PRODUCT = r"[+-]?(?:(?:[0-9.]+|\\pi|\\sqrt\{[^{}]*\}|[A-Za-z](?![A-Za-z]))(?:\^\{\w+\})?)++"
NEEDLESS = re.compile(
    rf"(?<![^-+=([{{])\(({PRODUCT})\)(?=/)|(?<=/)\((-?[0-9.]+|\\sqrt\{{[^{{}}]*\}})\)(?![\w\\(^!{{])|^\+(?=\\infty$)"
)


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


@functools.lru_cache(maxsize=4096)  # a gold is asked for with each completion of its group
def _parse_answer(answer: str) -> Parsed:
    text = _clean(answer)
    return _parse(text, depth=0) if text else _text(answer)  # of `**` nothing is left; so it equals no other answer


def _clean(answer: str) -> str:
    """One spelling for what has several: unicode signs, LaTeX spacing and wrappers, fractions (`a/b`), blanks."""
    text = re.sub("√ ?([0-9.]*[0-9])", r"\\sqrt{\1}", END_OF_TEXT.split(answer, 1)[0]).translate(CHARACTERS)
    if "\\\\" in text and JSON_ESCAPED.fullmatch(text):
        text = text.replace("\\\\", "\\")
    text = text.replace(r"\$", "\ue000")
    if text.count("$") % 2 == 0:  # pairs delimit formulas, a lone one is money
        text = text.replace("$", "")
    text = text.replace("\ue000", "$")
    if "\\" in text or "{" in text:
        text = LATEX_SPACE.sub(" ", INVISIBLE.sub("", DIGIT_SEPARATOR.sub("", text)))
        text = DEGREE.sub(" degree ", text)
        text = text.replace(r"\%", "%").replace("{,}", ",").replace(r"\{", "⦃").replace(r"\}", "⦄")
        text = ROOT.sub(r"\\sqrt{\1}", text)
        for _ in range(5):  # each may hold another
            text = FRACTION.sub(_as_quotient, WRAPPER.sub(r" \1 ", text))
    text = re.sub(r"(?<=[({^_]) | (?=[)}^])", "", " ".join(text.replace("%", " percent ").split()))
    text = INDEX.sub(r"_{\1}", POWER.sub(r"^{\1}", text))
    return _inside(QUOTED, text.lstrip(" *`:,;").rstrip(" *`:,;.")).rstrip(".")


def _as_quotient(fraction: re.Match) -> str:
    """`a/b`, in brackets where its neighbour would join a part of it, as the 3 of `\\frac123` would."""
    before, *parts, after = fraction.groups()
    parts = (part.strip() for part in parts if part is not None)
    quotient = "/".join(part if ATOM.fullmatch(part) else f"({part})" for part in parts)
    return f"{before or ''}({quotient})" if before or after else f" {quotient}"


def _parse(text: str, depth: int) -> Parsed:
    text = text.strip()
    quantity = _quantity(text)
    items = _split(text, ITEMS)
    if quantity or not items or depth > 4:
        return quantity or _text(text)
    brackets, inner = "⦃⦄", items
    if len(items) == 1:
        if side := _last_side(text, depth):
            return side
        brackets = text[0] + text[-1]
        inner = _split(text[1:-1], ITEMS) if text[0] in OPEN and text[-1] in CLOSE else None
        if not inner:
            return _text(text)
        if len(inner) == 1:  # 1,234 is a number, (1,234) a pair
            inner = _split(text[1:-1], COMMAS)
        if brackets in ("()", "{}") and len(inner) == 1:
            return _parse(inner[0], depth + 1)
    parsed = tuple(_parse(item, depth + 1) for item in inner)
    if brackets in ("⦃⦄", "{}"):
        return Parsed("list", tuple(sorted(parsed, key=lambda item: (item.kind, str(item.value)))))
    return Parsed(brackets, parsed)


def _last_side(text: str, depth: int) -> Parsed | None:
    """The last side of `x = 42`, `2+40 = 42` or `x = 2+40 = 42`; None for text of another form."""
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


def _split(text: str, separators: re.Pattern) -> list[str] | None:
    """The pieces between separators outside all brackets, empty ones left out; None if the brackets do not pair."""
    pieces, start, depth = [], 0, 0
    for token in separators.finditer(text):
        depth += (token[0] in OPEN) - (token[0] in CLOSE)
        if depth < 0:
            return None
        if depth == 0 and token[0] not in CLOSE:
            pieces.append(text[start : token.start()])
            start = token.end()
    pieces.append(text[start:])
    return [piece for piece in pieces if piece.strip()] if depth == 0 else None


def _text(text: str) -> Parsed:
    text = NEEDLESS.sub(r"\1\2", LOOSE_SPACE.sub(r"\1", text))
    return Parsed("text", text.lower() if text.replace(" ", "").isalpha() else text)


def _quantity(text: str) -> Parsed | None:
    """A number with its sign, currency and unit, or None."""
    match = QUANTITY.fullmatch(text)
    if match is None or NOT_UNITS.search(match["unit"] or ""):
        return None
    part = {name: (value or "").replace(",", "") for name, value in match.groupdict().items()}
    part |= {name: part[name].replace(" ", "") for name in ("mantissa", "decimal")}
    if part["bottom"]:
        top, bottom = (Fraction(part[name].strip("()")) for name in ("top", "bottom"))
        if bottom == 0 or (part["whole"] and not part["top"].isdigit()):
            return None
        value = int(part["whole"] or 0) + top / bottom
    elif part["power"]:
        value = Fraction(part["mantissa"] or 1) * Fraction(10) ** int(part["power"])
    else:
        value = Fraction(part["decimal"])
    if (part["sign"] == "-") != (part["second_sign"] == "-"):
        value = -value
    value *= SCALES.get(part["scale"].lower(), 1)
    names = [UNITS[part["currency"]]] if part["currency"] else []
    for index, word in enumerate(re.findall("[^ /-]+", part["unit"].lower())):
        word, _, power = word.partition("^")
        key = word.removesuffix("s") if len(word) > 2 else word  # mins, lbs
        known = len(word) > 2 or key in UNITS or not word.isascii() or (index > 0 and word in LINKING_WORDS)
        if index == 0 and not part["gap"] and word < "\u0400":  # 5cm, 5pct and 5$, but 5m may be five times m, as 5θ is
            known = key in UNITS.values() or (key in UNITS and word not in set("mgshl"))
        if not known or not (word.isalpha() or word in UNITS):  # 5 x⁴
            return None
        names.append(UNITS.get(key, word).rstrip("s").rstrip("e") + power)  # 3 boxes, 1 box
    return Parsed("number", value, unit=" ".join(names))
