"""Two scripts side by side in a browser, function by function, with what differs marked.

python tools/side_by_side.py grpo dapo                  make the page in a temporary file and open it
python tools/side_by_side.py grpo dapo -o FILE          write it there and open nothing
python tools/side_by_side.py --play                     open its tab "Play with it"

The page is one file that loads nothing. It has all scripts beside grpo.py, so that any two can be chosen on it, and
every function of them all. tools/side_by_side/ has its frame, its style, its programs and the equations.
"""

import argparse
import ast
import difflib
import html
import itertools
import json
import pathlib
import re
import tempfile
import tomllib
import webbrowser

import pygments.lexers
from pygments.token import Comment, Keyword, Literal, Name, Operator

import same_text

PARTS = pathlib.Path(__file__).parent / "side_by_side"
LEXER = pygments.lexers.PythonLexer(stripnl=False, ensurenl=False)
COLOURS = [(Comment, "c"), (Literal.String, "s"), (Literal.Number, "m"), (Keyword, "k"), (Operator.Word, "k")]
COLOURS += [(Name.Function, "f"), (Name.Class, "f"), (Name.Decorator, "f")]
WORD = re.compile(r"\w+|[=!<>]=|[^\w\s]")
RANGES = {"clip_low", "clip_high", "max_ratio"}  # the options with which the sliders begin


def without_help(source):
    """[(line number, line)] of a script in which each option of `Args` is one line, without its help text."""
    lines = list(enumerate(source.splitlines(), 1))
    args = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    for field in reversed(args.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Call) and field.value.args:
            default = ast.unparse(field.value.args[0])
            line = f"    {field.target.id}: {ast.unparse(field.annotation)} = option({default})"
            lines[field.lineno - 1 : field.end_lineno] = [(field.lineno, line)]
    return lines


def places(source):
    """{place: [(line number, line)]}: each function, class and constant, `Args` and `imports`."""
    lines = without_help(source)
    spans = same_text.places("\n".join(line for _, line in lines))
    found = {name: lines[first - 1 : last] for name, (first, last) in spans.items()}
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    numbers = {number for node in imports for number in range(node.lineno, node.end_lineno + 1)}
    return {"imports": [(number, line) for number, line in lines if number in numbers]} | found


def ranges(source):
    """{option: default} of the options in RANGES that a script has; only of defaults that are plain numbers."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AnnAssign):
            continue
        name = ast.unparse(node.target)
        arguments = getattr(node.value, "args", [])
        if name in RANGES and arguments and isinstance(arguments[0], ast.Constant):
            found[name] = arguments[0].value
    return found


def coloured(text):
    """For each line of Python code [class, text, class, text, ...]."""
    rows = [[]]
    for token, value in LEXER.get_tokens(text):
        colour = next((name for parent, name in COLOURS if token in parent), "")
        first, *rest = value.split("\n")
        for number, piece in enumerate([first, *rest]):
            if number:
                rows.append([])
            if piece:
                rows[-1] += [colour, piece]
    return rows


def changes(old, new):
    """[[i, i_end, j, j_end, marks of old, marks of new]]: lines i to i_end of old become lines j to j_end of new."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    found = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind != "equal":
            found.append([i, i_end, j, j_end, *marks(old[i:i_end], new[j:j_end])])
    return found


def marks(old, new):
    """The words that differ, in two lists of lines: [[line, start, end]] of each.

    A line in which more than 40 % of the words differ has no marks: it differs as a whole.
    """
    words = [
        [(row, word.start(), word.end(), word[0]) for row, line in enumerate(lines) for word in WORD.finditer(line)]
        for lines in (old, new)
    ]
    matcher = difflib.SequenceMatcher(None, *([text for *_, text in side] for side in words), autojunk=False)
    blocks = matcher.get_matching_blocks()
    same = [
        {number for block in blocks for number in range(block.a, block.a + block.size)},
        {number for block in blocks for number in range(block.b, block.b + block.size)},
    ]
    return [marks_of(side, equal) for side, equal in zip(words, same, strict=True)]


def marks_of(words, same):
    """The marks of one side: of its words [(line, start, end, text)] those whose numbers are not in `same`."""
    found = []
    for row, numbered in itertools.groupby(enumerate(words), key=lambda item: item[1][0]):
        line = list(numbered)
        different = [(number, start, end) for number, (_, start, end, _) in line if number not in same]
        if len(different) > 0.4 * len(line):
            continue
        for number, start, end in different:
            if found and found[-1][0] == row and number - 1 not in same and number != line[0][0]:
                found[-1][2] = end  # the word before it differs too: one mark
            else:
                found.append([row, start, end])
    return found


def equations(docstring, functions, known):
    """{function: [[HTML of an equation, its number in the paper]]} of the indented lines of a docstring.

    What the file of equations does not know is shown as it stands: below its function, or under "".
    """
    found = {}
    for line in docstring.splitlines():
        text, *number = re.split(r" {3,}(?=\w\S*(?: \S+)*$)", line.strip(), maxsplit=1)  # 3 spaces, then to the end
        text, left = " ".join(text.split()), line.split()[:1]
        if line.startswith("    ") and (text in known["mathml"] or (left and left[0] in known["functions"])):
            shown = known["mathml"].get(text) or html.escape(text)
            names = [name for name in known["functions"].get(left[0], []) if name in functions]
            for name in names or [""]:
                found.setdefault(name, []).append([shown, *number])
    return found


def collect(sources):
    """What the page shows, as page.js reads it."""
    known = tomllib.loads((PARTS / "equations.toml").read_text(encoding="utf-8"))
    texts, scripts, changed = {}, {}, {}  # a text that several scripts have is stored once, under its number
    for script, source in sources.items():
        docstring, own = ast.get_docstring(ast.parse(source)) or "", {}
        for name, lines in places(source).items():
            text = "\n".join(line for _, line in lines)
            own[name] = {"text": texts.setdefault(text, len(texts)), "numbers": [number for number, _ in lines]}
        shown = equations(docstring, own, known)
        parts = {"docstring": docstring, "places": own, "equations": shown, "ranges": ranges(source)}
        scripts[script.removesuffix(".py")] = parts
    lines = [text.split("\n") for text in texts]
    for one, two in itertools.combinations(scripts.values(), 2):
        for name, place in one["places"].items():
            a, b = place["text"], two["places"].get(name, place)["text"]
            if a != b and f"{a} {b}" not in changed:
                changed[f"{a} {b}"] = changes(lines[a], lines[b])
    tokens = [coloured(text) for text in texts]
    return {"scripts": scripts, "texts": tokens, "changes": changed, "play": known["play"]}


def page(one, two, sources, play=False):
    """The HTML; it begins with these two scripts, or with the tab "Play with it"."""
    pair = f"{one}-{two}"
    data = collect(sources) | {"pair": pair, "start": "play" if play else pair}
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", "objectives.js", "play.js", "page.js"):
        text = text.replace(f"/*{name}*/", (PARTS / name).read_text(encoding="utf-8"))
    return text.replace("/*data*/", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    parser.add_argument("--play", action="store_true", help="begin with the tab of sliders and curves")
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path)
    options = parser.parse_args(words)
    sources = same_text.found()
    if options.play and not options.scripts:
        options.scripts = ["grpo", "dapo"]
    if len(options.scripts) != 2:
        parser.error("name two scripts")
    one, two = (name.removesuffix(".py") for name in options.scripts)
    for name in (one, two):
        if f"{name}.py" not in sources:
            parser.error(f"there is no script {name}.py; there are {', '.join(sources)}")
    if one == two:
        parser.error("name two different scripts")
    file = options.output or pathlib.Path(tempfile.mkdtemp(prefix="side_by_side-")) / "side_by_side.html"
    file.write_text(page(one, two, sources, options.play), encoding="utf-8")
    print(f"written: {file}")
    if not options.output:
        webbrowser.open(file.as_uri())


if __name__ == "__main__":
    main()
