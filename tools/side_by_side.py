"""Two scripts side by side in a browser, function by function, with what differs marked.

python tools/side_by_side.py grpo dapo             make the page in a temporary file and open it
python tools/side_by_side.py grpo dapo -o FILE     write it there and open nothing
python tools/side_by_side.py grpo dapo --text      print the same in the terminal
python tools/side_by_side.py --play                begin with its tabs to play with: one token, one group

The page is one file that loads nothing. It has all scripts beside grpo.py, so that any two can be chosen
on it, and every function of them all. A function may have one code in both and compute another thing,
since it reads an option with another default: then it says which. tools/side_by_side/ has the frame of
the page, its style, its programs and the equations.
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
from piped import end_with_the_reader

PARTS = pathlib.Path(__file__).parent / "side_by_side"
LEXER = pygments.lexers.PythonLexer(stripnl=False, ensurenl=False)
COLOURS = [
    (Comment, "c"),
    (Literal.String, "s"),
    (Literal.Number, "m"),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (Name.Function, "f"),
    (Name.Class, "f"),
    (Name.Decorator, "f"),
]
WORD = re.compile(r"\w+|[=!<>]=|[^\w\s]")
RANGES = {"clip_low", "clip_high", "max_ratio"}  # the options with which the sliders begin


def fields(source, name="Args"):
    """The options that a class of a script declares with `option(default, ...)`."""
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    body = found[0].body if found else []
    options = [node for node in body if isinstance(node, ast.AnnAssign)]
    return [node for node in options if isinstance(node.value, ast.Call) and node.value.args]


def without_help(source):
    """[(line number, line)] of a script in which each option of `Args` is one line, without its help text."""
    lines = list(enumerate(source.splitlines(), 1))
    for field in reversed(fields(source)):
        default = ast.unparse(field.value.args[0])
        line = f"    {field.target.id}: {ast.unparse(field.annotation)} = option({default})"
        lines[field.lineno - 1 : field.end_lineno] = [(field.lineno, line)]
    return lines


def defaults(source):
    """{option: its default, as it is written} of a script, those of common/args.py included."""
    shared = (same_text.ROOT / "common" / "args.py").read_text(encoding="utf-8")
    args = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    declared = fields(shared, "TrainArgs")
    if "RunArgs" in map(ast.unparse, args.bases):
        declared += fields(shared, "RunArgs")
    declared += fields(source)
    return {field.target.id: ast.unparse(field.value.args[0]) for field in declared}


def options_read(text):
    """The options that a piece of code reads, in the order in which it does."""
    return list(dict.fromkeys(re.findall(r"\bargs\.(\w+)", text)))


def places(source):
    """{place: [(line number, line)]}: each function, class and constant, `Args` and `imports`."""
    lines = without_help(source)
    spans = same_text.places("\n".join(line for _, line in lines))
    found = {name: lines[first - 1 : last] for name, (first, last) in spans.items()}
    body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
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
    old, new = words_of(old), words_of(new)
    texts = [text for *_, text in old], [text for *_, text in new]
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    in_old, in_new = set(), set()  # the numbers of the words that are the same
    for block in matcher.get_matching_blocks():
        in_old |= set(range(block.a, block.a + block.size))
        in_new |= set(range(block.b, block.b + block.size))
    return [marks_of(old, in_old), marks_of(new, in_new)]


def words_of(lines):
    """[(line, start, end, text)] of the words of some lines."""
    found = []
    for row, line in enumerate(lines):
        found += [(row, word.start(), word.end(), word[0]) for word in WORD.finditer(line)]
    return found


def marks_of(words, same):
    """The marks of one side: of its words [(line, start, end, text)] those whose numbers are not in `same`."""
    found = []
    for row, numbered in itertools.groupby(enumerate(words), key=lambda item: item[1][0]):
        line = list(numbered)
        different = [
            (number, start, end) for number, (_, start, end, _) in line if number not in same
        ]
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
        # The number stands behind two spaces, at the end.
        text, *number = re.split(r" {2,}(?=\w\S*(?: \S+)*$)", line.strip(), maxsplit=1)
        text = " ".join(text.split())
        left = line.split()[:1]
        is_known = text in known["mathml"] or (left and left[0] in known["functions"])
        if line.startswith("    ") and is_known:
            shown = known["mathml"].get(text) or html.escape(text)
            names = [name for name in known["functions"].get(left[0], []) if name in functions]
            for name in names or [""]:
                found.setdefault(name, []).append([shown, *number])
    return found


def collect(sources):
    """What the page shows, as page.js reads it."""
    known = tomllib.loads((PARTS / "equations.toml").read_text(encoding="utf-8"))
    scripts = {}
    texts = {}  # a text that several scripts have is stored once, under its number
    changed = {}
    for script, source in sources.items():
        docstring = ast.get_docstring(ast.parse(source)) or ""
        own = {}
        for name, lines in places(source).items():
            text = "\n".join(line for _, line in lines)
            numbers = [number for number, _ in lines]
            own[name] = {"text": texts.setdefault(text, len(texts)), "numbers": numbers}
        scripts[script.removesuffix(".py")] = {
            "docstring": docstring,
            "places": own,
            "equations": equations(docstring, own, known),
            "ranges": ranges(source),
            "defaults": defaults(source),
        }
    lines = [text.split("\n") for text in texts]
    for one, two in itertools.combinations(scripts.values(), 2):
        for name, place in one["places"].items():
            a, b = place["text"], two["places"].get(name, place)["text"]
            if a != b and f"{a} {b}" not in changed:
                changed[f"{a} {b}"] = changes(lines[a], lines[b])
    return {
        "scripts": scripts,
        "texts": [coloured(text) for text in texts],
        "reads": [options_read(text) for text in texts],
        "changes": changed,
        "play": known["play"],
    }


def page(one, two, sources, play=False):
    """The HTML; it begins with these two scripts, or with the tab "One token"."""
    pair = f"{one}-{two}"
    data = collect(sources) | {"pair": pair, "start": "play" if play else pair}
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", "objectives.js", "groups.js", "play.js", "group.js", "page.js"):
        text = text.replace(f"/*{name}*/", (PARTS / name).read_text(encoding="utf-8"))
    return text.replace("/*data*/", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def as_text(one, two, sources):
    """The lines of the comparison of two scripts in a terminal: each place in the order of the page."""
    sides = [places(sources[f"{name}.py"]) for name in (one, two)]
    own_defaults = [defaults(sources[f"{name}.py"]) for name in (one, two)]
    for name in order_of(*sides):
        texts = [[line for _, line in side.get(name, [])] for side in sides]
        read = own_defaults[0] if name == "Args" else options_read("\n".join(texts[0] + texts[1]))
        notes = other_defaults(read, *own_defaults)
        if not texts[0] or not texts[1]:
            status = f"only in {one if texts[0] else two}.py"
        elif texts[0] != texts[1]:
            status = "differs" + (f"; other default: {notes}" if notes else "")
        else:
            status = f"same code, other default: {notes}" if notes else "identical"
        yield f"== {name}: {status}"
        if texts[0] != texts[1]:
            diff = difflib.unified_diff(*texts, n=2, lineterm="")
            yield from itertools.islice(diff, 2, None)  # without the names of files
            yield ""


def order_of(one, two):
    """The places of both scripts in the order of the second, options first and imports last."""
    order = list(two)
    names = list(one)
    for i, name in enumerate(names):
        if name not in order:
            order.insert(order.index(names[i - 1]) + 1 if i else 0, name)
    middle = [name for name in order if name not in ("Args", "imports")]
    return ["Args", *middle, "imports"]


def other_defaults(names, one, two):
    """`normalize_std True -> False` of these options, where the defaults of two scripts differ."""
    names = [name for name in names if name in one and name in two and one[name] != two[name]]
    return ", ".join(f"{name} {one[name]} -> {two[name]}" for name in names)


def main(words=None):
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    parser.add_argument("--play", action="store_true", help="begin with the sliders of one token")
    parser.add_argument("--text", action="store_true", help="print the comparison of the code")
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
    if options.text:
        return print("\n".join(as_text(one, two, sources)))
    file = options.output
    if not file:
        file = pathlib.Path(tempfile.mkdtemp(prefix="side_by_side-")) / "side_by_side.html"
    file.write_text(page(one, two, sources, options.play), encoding="utf-8")
    print(f"written: {file}")
    if not options.output:
        webbrowser.open(file.as_uri())


if __name__ == "__main__":
    end_with_the_reader()
    main()
