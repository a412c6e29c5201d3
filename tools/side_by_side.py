"""Compare two scripts function by function: as text, or in a browser with the papers' equations.

python tools/side_by_side.py grpo dr_grpo --text   print what differs
python tools/side_by_side.py grpo dapo             write a page to a temporary file and open it
python tools/side_by_side.py grpo dapo -o FILE     write the page to FILE and open nothing
python tools/side_by_side.py --play                open the page at its sliders: one token, one group

The page is one file that loads nothing; writing it needs pygments. It holds all scripts next to
grpo.py, and you can choose any two. Two functions with the same code can still compute different
things if they read an option whose defaults differ: the page marks this as well. The HTML, CSS,
JavaScript and equations are in tools/side_by_side/.
"""

import argparse
import ast
import difflib
import html
import itertools
import json
import pathlib
import re
import signal
import tempfile
import tomllib
import webbrowser

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ROOT / "tools" / "side_by_side"
ORDER = ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo", "reward_model")
WORD = re.compile(r"\w+|[=!<>]=|[^\w\s]")
RANGES = {"clip_low", "clip_high", "max_ratio"}  # the sliders start at their defaults


def script_sources(folder=ROOT):
    """Return {script: source} of files with a `class Args`: those in ORDER first."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    scripts = [name for name in sources if re.search(r"^class Args\b", sources[name], re.MULTILINE)]
    known = [f"{name}.py" for name in ORDER if f"{name}.py" in scripts]
    others = [name for name in scripts if name not in known]
    return {name: sources[name] for name in known + others}


def line_spans(source):
    """Return {name: (first line, last line)}, from 1, of top-level functions, classes and constants.

    Decorators and the comment lines above are included.
    """
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
        while lines[first - 2].startswith("#"):
            first -= 1
        found[name] = (first, node.end_lineno)
    return found


def fields(source, name="Args"):
    """Return the nodes of the options that a class declares with `option(default, ...)`."""
    found = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    body = found[0].body if found else []
    options = [node for node in body if isinstance(node, ast.AnnAssign)]
    return [node for node in options if isinstance(node.value, ast.Call) and node.value.args]


def without_help(source):
    """Return [(line number, line)] of a script, each option of `Args` as one line without its help."""
    lines = list(enumerate(source.splitlines(), 1))
    for field in reversed(fields(source)):
        default = ast.unparse(field.value.args[0])
        line = f"    {field.target.id}: {ast.unparse(field.annotation)} = option({default})"
        lines[field.lineno - 1 : field.end_lineno] = [(field.lineno, line)]
    return lines


def defaults(source):
    """Return {option: its default as written} of a script, including options of common/run.py."""
    shared = (ROOT / "common" / "run.py").read_text(encoding="utf-8")
    classes = {getattr(node, "name", ""): node for node in ast.parse(shared).body}
    args = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    declared = fields(source)
    while args and args.bases:
        base = ast.unparse(args.bases[0])
        declared = fields(shared, base) + declared
        args = classes.get(base)
    return {field.target.id: ast.unparse(field.value.args[0]) for field in declared}


def options_read(text):
    """Return the options that a piece of code reads, in order of first use."""
    return list(dict.fromkeys(re.findall(r"\bargs\.(\w+)", text)))


def places(source):
    """Return {name: [(line number, line)]} of functions, classes, constants, `Args` and `imports`."""
    lines = without_help(source)
    spans = line_spans("\n".join(line for _, line in lines))
    found = {name: lines[first - 1 : last] for name, (first, last) in spans.items()}
    body = ast.parse(source).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    numbers = {number for node in imports for number in range(node.lineno, node.end_lineno + 1)}
    return {"imports": [(number, line) for number, line in lines if number in numbers]} | found


def ranges(source):
    """Return {option: default} of the options in RANGES whose default is a plain number."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AnnAssign):
            continue
        name = ast.unparse(node.target)
        arguments = getattr(node.value, "args", [])
        if name in RANGES and arguments and isinstance(arguments[0], ast.Constant):
            found[name] = arguments[0].value
    return found


def highlighted(texts):
    """Return each text of Python code as lines [class, piece, class, piece, ...]."""
    import pygments.lexers
    from pygments.token import Comment, Keyword, Literal, Name, Operator

    lexer = pygments.lexers.PythonLexer(stripnl=False, ensurenl=False)
    classes = {
        Comment: "c",
        Literal.String: "s",
        Literal.Number: "m",
        Keyword: "k",
        Operator.Word: "k",
        Name.Function: "f",
        Name.Class: "f",
        Name.Decorator: "f",
    }
    found = []
    for text in texts:
        rows = [[]]
        for token, value in lexer.get_tokens(text):
            css_class = next((classes[parent] for parent in classes if token in parent), "")
            for number, piece in enumerate(value.split("\n")):
                if number:
                    rows.append([])
                if piece:
                    rows[-1] += [css_class, piece]
        found.append(rows)
    return found


def changes(old, new):
    """Return [[i, i_end, j, j_end, marks, marks]]: lines i to i_end of old become j to j_end of new."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    found = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        if kind != "equal":
            found.append([i, i_end, j, j_end, *marks(old[i:i_end], new[j:j_end])])
    return found


def marks(old, new):
    """Return the words that differ between two lists of lines, [[line, start, end]] for each.

    A line gets no marks if more than 40 % of its words differ.
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
    """Return [(line, start, end, text)] of the words of some lines."""
    found = []
    for row, line in enumerate(lines):
        found += [(row, word.start(), word.end(), word[0]) for word in WORD.finditer(line)]
    return found


def marks_of(words, same):
    """Return the marks of one side: its words [(line, start, end, text)] not numbered in `same`."""
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
    """Return {function: [[HTML of an equation, its number in the paper]]} of a docstring.

    An equation that equations.toml lacks is shown as text; without a known function it is under "".
    """
    found = {}
    for line in docstring.splitlines():
        # Two spaces precede the number, at the end of the line.
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
    """Return what the page shows, as page.js reads it."""
    known = tomllib.loads((PARTS / "equations.toml").read_text(encoding="utf-8"))
    scripts = {}
    texts = {}  # {text: number}, so that a text of several scripts is stored once
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
        "texts": highlighted(texts),
        "reads": [options_read(text) for text in texts],
        "changes": changed,
        "play": known["play"],
    }


def page(one, two, sources, play=False):
    """Return the HTML, which opens with these two scripts or with the tab "One token"."""
    pair = f"{one}-{two}"
    data = collect(sources) | {"pair": pair, "start": "play" if play else pair}
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    for name in ("style.css", "objectives.js", "groups.js", "play.js", "group.js", "page.js"):
        text = text.replace(f"/*{name}*/", (PARTS / name).read_text(encoding="utf-8"))
    return text.replace("/*data*/", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def as_text(one, two, sources):
    """Yield the lines of the comparison: what differs, and the names of what does not."""
    sides = [places(sources[f"{name}.py"]) for name in (one, two)]
    own_defaults = [defaults(sources[f"{name}.py"]) for name in (one, two)]
    identical = []
    for name in order_of(*sides):
        texts = [[line for _, line in side.get(name, [])] for side in sides]
        read = [] if name == "Args" else options_read("\n".join(texts[0] + texts[1]))
        others = other_defaults(read, *own_defaults)
        if texts[0] == texts[1] and not others:
            identical.append(name)
            continue
        notes = [f"only in {one if texts[0] else two}.py"] if not all(texts) else []
        notes += ["same code"] if texts[0] == texts[1] else []
        notes += [f"another default: {others}"] if others else []
        yield f"== {name}" + (f": {', '.join(notes)}" if notes else "")
        diff = difflib.unified_diff(*texts, n=0 if name == "Args" else 1, lineterm="")
        for number, line in enumerate(diff):
            if not line.startswith("@@"):
                yield from [] if number < 2 else [line.rstrip()]  # the first two are names of files
            elif number > 2 and name != "Args":
                yield "  ..."
    yield f"== identical: {', '.join(identical)}"


def order_of(one, two):
    """Return the names in both scripts in the order of the second, Args first and imports last."""
    order = list(two)
    names = list(one)
    for i, name in enumerate(names):
        if name not in order:
            order.insert(order.index(names[i - 1]) + 1 if i else 0, name)
    middle = [name for name in order if name not in ("Args", "imports")]
    return ["Args", *middle, "imports"]


def other_defaults(names, one, two):
    """Return `normalize_std True -> False` for the options whose defaults differ."""
    names = [name for name in names if name in one and name in two and one[name] != two[name]]
    return ", ".join(f"{name} {one[name]} -> {two[name]}" for name in names)


def main(words=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT")
    parser.add_argument("--play", action="store_true", help="open the page at its sliders")
    parser.add_argument("--text", action="store_true", help="print what differs")
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, help="open nothing")
    options = parser.parse_args(words)
    sources = script_sources()
    if options.play and not options.scripts:
        options.scripts = ["grpo", "dapo"]
    if len(options.scripts) != 2:
        parser.error("name two scripts")
    one, two = (name.removesuffix(".py") for name in options.scripts)
    for name in (one, two):
        if f"{name}.py" not in sources:
            parser.error(f"no script {name}.py among {', '.join(sources)}")
    if one == two:
        parser.error("name two different scripts")
    if options.text:
        if hasattr(signal, "SIGPIPE"):  # `--text | head` ends without a traceback
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return print("\n".join(as_text(one, two, sources)))
    file = options.output
    if not file:
        file = pathlib.Path(tempfile.mkdtemp(prefix="side_by_side-")) / "side_by_side.html"
    file.write_text(page(one, two, sources, options.play), encoding="utf-8")
    print(f"wrote {file}")
    if not options.output:
        webbrowser.open(file.as_uri())


if __name__ == "__main__":
    main()
