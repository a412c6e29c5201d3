"""docs/side_by_side.html: the page on which the scripts are compared, function by function.

The page is one file. tools/refresh.py writes it: what it shows is collected here, which are the functions of the
scripts with their syntax classes, the changes between every two scripts, the sentences of tools/family.py, the
equations of the docstrings, the numbered details of docs/*.md at their lines, the definitions in common/, the options
and the keys of the batch. tools/side_by_side/ has its HTML, its style, the equations in LaTeX, and the program that
shows one state (`#grpo-dapo/policy_loss`). Needs pygments for the colours and latex2mathml for the equations.
"""

import ast
import contextlib
import difflib
import functools
import html
import itertools
import json
import re
import tomllib

import batch_keys
import diffs
import family
import lines
import options
import same_text

PAGE, PARTS = "docs/side_by_side.html", "tools/side_by_side"
EQUATIONS = f"{PARTS}/equations.toml"
WORD = re.compile(r"\d[\d.]*(?:e-?\d+)?|\w+|\s+|[=!<>]=|[^\w\s]")
# What takes the place of a function in the scripts that do not have it.
ELSEWHERE = {"token_weights": "The loss is the mean over the pairs of a step: [`update_pairs`](#all/update_pairs)."}


def inline(text):
    """HTML of a line of Markdown: code, bold, links."""
    text = html.escape(text, quote=False)
    text = re.sub(r"\[(`[^`]+`|[^][`]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)


def paragraphs(text):
    """HTML of a numbered detail, given without its number; a table stays as it is printed."""
    parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    return "".join(
        f"<pre>{html.escape(part, quote=False)}</pre>"
        if part.lstrip().startswith("|")
        else f"<p>{inline(' '.join(part.split()))}</p>"
        for part in parts
    )


def details(tree):
    """The numbered details of docs/*.md: a list of ({label, title, html}, [(file, first line, last line)])."""
    found = []
    for page in lines.pages(tree):
        if not page.startswith("docs/"):
            continue
        for detail in lines.DETAIL.findall(tree.read(page)):
            number, text = detail.split(". ", 1)
            bold = re.match(r"\*\*(.+?)\*\*", " ".join(text.split()))
            title = bold[1].rstrip(".:") if bold else " ".join(text.split()[:7]) + " …"
            label = page.removeprefix("docs/").removesuffix(".md")
            note = {"label": f"{label} {number}", "title": inline(title), "html": paragraphs(text)}
            places = []
            for code, target in lines.to_code(text):
                with contextlib.suppress(ValueError):  # tools/lines.py names it
                    file = lines.beside(page, target)
                    places.append((file, *lines.place(tree, file, code)[:2]))
            found.append((note, places))
    return found


def used_names(tree, local=frozenset()):
    """{(line, column)} of the names that are read, but for parameters and what a function assigns itself."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        inside = local
        if isinstance(node, ast.FunctionDef):
            own = [n for part in node.body for n in ast.walk(part) if isinstance(n, ast.Name)]
            inside |= {n.id for n in own if isinstance(n.ctx, ast.Store)}
            inside |= {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in local:
            found.add((node.lineno, node.col_offset))
        found |= used_names(node, inside)
    return found


try:
    import latex2mathml.converter
    import pygments.lexers
    from pygments.token import Comment, Keyword, Literal, Name, Operator

    LEXER = pygments.lexers.PythonLexer(stripnl=False, ensurenl=False)
    KINDS = [(Comment, "c"), (Literal.String, "s"), (Literal.Number, "m"), (Keyword, "k"), (Operator.Word, "k")]
    KINDS += [(Name.Function, "f"), (Name.Class, "f"), (Name.Decorator, "d"), (Name.Builtin, "b")]
except ImportError:  # what the page says can be compared, its colours and MathML cannot
    LEXER = None


@functools.cache
def tokens(text):
    """The names that Python code uses, as `used_names` has them, and [(class, text)]."""
    pieces = [("", text)]
    if LEXER:
        found = LEXER.get_tokens(text)
        pieces = [(next((kind for parent, kind in KINDS if token in parent), ""), value) for token, value in found]
    return used_names(ast.parse(text)), pieces


def coloured(text, linked):
    """For each line of Python code [class, text, class, text, ...]; a name in `linked` has the class given there."""
    (names, pieces), rows, column = tokens(text), [[]], 0
    for kind, value in pieces:
        for i, piece in enumerate(value.split("\n")):
            if i:
                rows.append([])
                column = 0
            used = linked[piece] if (len(rows), column) in names and piece in linked else kind
            if piece and rows[-1] and rows[-1][-2] == used:
                rows[-1][-1] += piece
            elif piece:
                rows[-1] += [used, piece]
            column += len(piece.encode())
    return rows


class Blocks:
    """What the page stores once: each line, and each text of a function with the details that are about its lines."""

    def __init__(self):
        self.lines, self.line_ids, self.blocks, self.block_ids = [], {}, [], {}

    def add(self, texts, rows):
        key = "\n".join(texts)
        if key not in self.block_ids:
            ids = [self.line_ids.setdefault(json.dumps(row), len(self.line_ids)) for row in rows]
            for row, number in zip(rows, ids, strict=True):
                if number == len(self.lines):
                    self.lines.append(row)
            self.block_ids[key] = len(self.blocks)
            self.blocks.append({"lines": ids, "notes": []})
        return self.block_ids[key]

    def annotate(self, block, numbers, first, last, note):
        """Put a detail at the lines of a block that have these numbers; whether it has any."""
        found = [i for i, number in enumerate(numbers) if first <= number <= last]
        if found and [found[0], found[-1], note] not in self.blocks[block]["notes"]:
            self.blocks[block]["notes"] = sorted([*self.blocks[block]["notes"], [found[0], found[-1], note]])
        return bool(found)


def parts(text):
    """The words and signs of a text, without its spaces: [(token, start, end)]."""
    return [(found[0], *found.span()) for found in WORD.finditer(text) if not found[0].isspace()]


@functools.cache
def likeness(old, new):
    """How much of two texts is the same, from 0 to 1, by their names and numbers alone."""
    a, b = (re.findall(r"\w+", text) for text in (old, new))
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return matcher.ratio() if a and b and matcher.quick_ratio() >= 0.6 else 0


def partners(old, new):
    """The lines that are one line, changed: [(i, j, line i of old, line j of new)] in order.

    Where one line was broken into several, all of both are one entry.
    """
    whole = "\n".join(old), "\n".join(new)
    if 1 in (len(old), len(new)) and likeness(*whole) >= 0.8:
        return [(0, 0, *whole)]
    best = [[(0, [])] * (len(new) + 1) for _ in range(len(old) + 1)]  # of the first i and j lines
    for i, one in enumerate(old):
        for j, two in enumerate(new):
            like, (sum_, found) = likeness(one, two), best[i][j]
            pair = [(sum_ + like, [*found, (i, j, one, two)])] if like >= 0.6 else []
            best[i + 1][j + 1] = max(best[i][j + 1], best[i + 1][j], *pair, key=lambda entry: entry[0])
    return best[-1][-1][1]


@functools.cache
def words(old, new):
    """[[line, start, end]] of the words that differ, in each of two lists of lines.

    Only where a line is in both in nearly the same words; other lines differ as a whole, and have no marks.
    """
    marks = ([], [])
    for i, j, *texts in partners(old, new):
        a, b = map(parts, texts)
        matcher = difflib.SequenceMatcher(None, [token for token, *_ in a], [token for token, *_ in b], autojunk=False)
        for kind, *ends in matcher.get_opcodes():
            spans = ((a, *ends[:2], i, texts[0], marks[0]), (b, *ends[2:], j, texts[1], marks[1]))
            for tokens_, first, end, line, text, found in spans if kind != "equal" else ():
                lines_ = {}
                for _, start, stop in tokens_[first:end]:
                    row, column = text.count("\n", 0, start), start - (text.rfind("\n", 0, start) + 1)
                    lines_.setdefault(row, [line + row, column, 0])[2] = column + stop - start
                found += lines_.values()
    return marks


@functools.cache
def docstring(text):
    """Where the docstring of a function or class is or would be: its first line, and the one after its last."""
    node = ast.parse(text).body[-1]
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return 0, 0
    first = node.body[0].lineno - 1
    return first, node.body[0].end_lineno if ast.get_docstring(node) else first


def split(change, place, old, new):
    """A change (i, i_end, j, j_end) in parts, each with whether it is read as code.

    Not so read: a docstring, which is then given as a whole, and in `Args` options that are declared again for another
    help text.
    """
    i, i_end, j, j_end = change
    if place == "Args":
        return [(*change, bool(diffs.changing(old[i:i_end] + new[j:j_end])))]
    one, two = docstring("\n".join(old)), docstring("\n".join(new))
    a, a_end = (min(max(line, i), i_end) for line in one)
    b, b_end = (min(max(line, j), j_end) for line in two)
    parts = [(i, a, j, b, True), (a_end, i_end, b_end, j_end, True)]
    if a < a_end or b < b_end:
        parts.insert(1, (*one, *two, False))
    return [part for part in parts if part[0] < part[1] or part[2] < part[3]]


def changes(old, new, place, sentences):
    """[[i, i_end, j, j_end, sentence or -1, marks, marks, read as code]] of two texts of a place.

    Equal runs are left out. The first change of code in a hunk of tools/diffs.py has the index of its sentence;
    comments alone have none.
    """
    found, ends, rest = [], (0, 0), [("equal", len(old), len(old), len(new), len(new))]
    for number, group in enumerate([*diffs.groups(place, old, new), rest]):
        own = []
        for kind, i, i_end, j, j_end in group:
            found += comments(old, new, (ends[0], i), (ends[1], j))  # what lies between two groups
            if kind == "equal":
                found += comments(old, new, (i, i_end), (j, j_end))
            else:
                for a, a_end, b, b_end, is_code in split((i, i_end, j, j_end), place, old, new):
                    marks = words(tuple(old[a:a_end]), tuple(new[b:b_end]))
                    change = [a, a_end, b, b_end, -1, *marks, is_code]
                    if change not in own:  # a docstring that differs twice
                        own.append(change)
                        found.append(change)
            ends = (i_end, j_end)
        if own and sentences:
            next((change for change in own if change[7]), own[0])[4] = number
    return found


def comments(old, new, a, b):
    """The changes of two runs of lines with the same code."""
    found, (i, j) = [], (a[0], b[0])
    if old[slice(*a)] == new[slice(*b)]:
        return found
    while i < a[1] or j < b[1]:
        start = i, j
        while i < a[1] and same_text.is_comment(old[i]):
            i += 1
        while j < b[1] and same_text.is_comment(new[j]):
            j += 1
        if old[start[0] : i] != new[start[1] : j]:
            found.append([start[0], i, start[1], j, -1, [], [], True])
        i, j = i + 1, j + 1
    return found


def equations(docstring, computed_in):
    """[(functions, [text, its number in the paper])] of the indented lines of a docstring that are equations."""
    found = []
    for line in docstring.splitlines():
        left = line.split()[:1]
        if line.startswith("    ") and left and left[0] in computed_in:
            text, *number = re.split(r" {3,}(?=\w\S*(?: \S+)*$)", line.strip(), maxsplit=1)
            found.append((computed_in[left[0]].split(), [" ".join(text.split()), *number]))
    return found


def in_latex(tree):
    """{equation of a docstring: its LaTeX}"""
    return {text: " ".join(latex.split()) for text, latex in tomllib.loads(tree.read(EQUATIONS)).items()}


def mathml(latex):
    return latex2mathml.converter.convert(latex, display="block") if LEXER else ""


def unset(tree, scripts):
    """The equations of the docstrings that have no LaTeX, and LaTeX that has no equation."""
    there = {text: name for name, own in scripts.items() for _, (text, *_) in own["equations"]}
    latex = in_latex(tree)
    missing = [f"no LaTeX for an equation of {there[text]}.py: {text}" for text in there if text not in latex]
    left_over = [f"no docstring has this equation: {text}" for text in latex if text not in there]
    return [f"{EQUATIONS}: {line}" for line in missing + left_over]


def own_args(sources):
    """{script: the text of its `Args`}"""
    return {name: "\n".join(diffs.places(own)["Args"]) for name, own in sources.items()}


def option_states(table, scripts, common):
    """[[name, state that shows it, default, HTML of what it does]] of the table of tools/options.py.

    `scripts` and `common`: {name: text} of each `Args`, and of the definitions in common/.
    """
    row = re.compile(r"^\| `--(\w+)`(?:<br>[^|]*)? \| (.*?) \| .*? \| (.*) \|$", re.MULTILINE)
    found = []
    for name, *said in row.findall(table):
        field = re.compile(rf"^    {name}: ", re.MULTILINE)
        inherited = [f"common/{kind}" for kind, text in common.items() if kind.endswith("Args") and field.search(text)]
        state = "all/Args" if any(field.search(text) for text in scripts.values()) else inherited[0]
        found.append([name, f"{state}/{name}", *(inline(html.unescape(text.split("<br>")[0])) for text in said)])
    return found


def common_names(tree, scripts, notes, uses):
    """{name: file} of what the scripts import from common/, what the details link to there, and what uses the batch."""
    found = {}
    for source in scripts.values():
        for where in same_text.imports(source).values():
            module, _, original = where.partition(": ")
            if module.startswith("common"):
                found[original] = module.replace(".", "/") + ".py"
    for _, places in notes:
        for file, first, _ in places:
            if file.startswith("common/"):
                blocks = same_text.blocks(tree.read(file))
                found |= {name: file for name, (start, end) in blocks.items() if start < first <= end}
    for used in uses.values():
        for name, places in [*used["writes"].items(), *used["reads"].items()]:
            found |= {name.split(".")[0]: file for file in places if file.startswith("common/")}
    return dict(sorted(found.items(), key=lambda item: (item[1].count("/"), item[1], item[0].lower())))


def summary(text):
    """The first sentence of the docstring of a function or class."""
    node = ast.parse(text).body[0]
    docstring = ast.get_docstring(node) if hasattr(node, "name") else ""
    return re.split(r"(?<=\.)(?<!Eq\.)\s", " ".join((docstring or "").split()))[0]


def summaries(sources):
    """{place: the first sentence of its docstring}, of the first script that has it."""
    found = {}
    for source in sources.values():
        for name, text in same_text.texts(source).items():
            found.setdefault(name, inline(summary("\n".join(text))))
    return found


def script_page(script, source, store, common):
    """What the page has of a script: its docstring, and {place: [block, line numbers]}."""
    numbers, kept = zip(*same_text.numbered(source), strict=True)
    text, docstring = "\n".join(kept), ast.get_docstring(ast.parse(source))
    linked = {name: "C" for name in same_text.imports(source) if name in common}
    linked |= {name: "O" for name in same_text.blocks(text)}
    places = {}
    node, _ = same_text.arguments(text)
    start = node.lineno - 1 - len(node.decorator_list)
    spans = {"imports": [i for i in range(start) if kept[i]], "Args": range(start, node.end_lineno)}
    spans |= {name: range(*place) for name, place in same_text.blocks(text).items() if name != "If"}
    for name, span in spans.items():
        own = [kept[i] for i in span]
        block = store.add(own, coloured("\n".join(own), linked))
        places[name] = [block, [numbers[i] for i in span]]
    computed_in = family.EQUATIONS | family.entry(script).equations
    return {"docstring": docstring, "equations": equations(docstring, computed_in), "places": places}


def collect(tree):
    """Everything that the page shows, as it is given to page.js."""
    sources, store, found = family.found(tree), Blocks(), details(tree)
    uses = batch_keys.uses(tree)
    names = common_names(tree, sources, found, uses)
    scripts = {name.removesuffix(".py"): script_page(name, source, store, names) for name, source in sources.items()}
    common, texts = {}, {}
    for name, file in names.items():
        source = tree.read(file)
        first, end = same_text.blocks(source)[name]
        linked = {other: "C" for other in names if other in same_text.imports(source) or names[other] == file}
        text = source.splitlines()[first:end]
        texts[name] = "\n".join(text)
        block = store.add(text, coloured(texts[name], linked))
        users = [script for script, own in sources.items() if name in same_text.imports(own)]
        common[name] = {"file": file, "place": [block, list(range(first + 1, end + 1))], "used": users}
        common[name]["summary"] = inline(summary(texts[name]))
    notes = []
    for note, places in found:
        shown = False
        for file, first, last in places:
            own = scripts[file.removesuffix(".py")]["places"].values() if file in sources else []
            own = own or [entry["place"] for entry in common.values() if entry["file"] == file]
            shown = sum(store.annotate(*place, first, last, len(notes)) for place in own) > 0 or shown
        notes.append(note | {"shown": shown})
    return {
        "scripts": scripts,
        "common": common,
        "lines": store.lines,
        "blocks": store.blocks,
        "pairs": pairs(sources),
        "why": why(sources),
        "notes": notes,
        "summaries": summaries(sources),
        "options": option_states(options.table(tuple(family.names(tree))), own_args(sources), texts),
        "math": {text: [latex, mathml(latex)] for text, latex in in_latex(tree).items()},
        "elsewhere": {name: inline(text) for name, text in ELSEWHERE.items()},
        "batch": [
            {"key": key, "shape": shape, "what": inline(what)} | uses[key]
            for key, (shape, what) in batch_keys.KEYS.items()
            if key in uses
        ],
    }


def why(sources):
    """{script: {place: sentences}} against grpo.py, those of tools/family.py."""
    found = {script.removesuffix(".py"): {} for script in sources}
    for script, own in sources.items():
        for place, key, _ in diffs.hunks(sources["grpo.py"], own):
            sentence = inline(family.SENTENCES.get(script, {}).get(key, ""))
            found[script.removesuffix(".py")].setdefault(place, []).append(sentence)
    return found


def pairs(sources):
    """{"grpo dapo": {place: changes}} for every two scripts, the places that both have in different texts."""
    found = {}
    for (one, old), (two, new) in itertools.combinations(sources.items(), 2):
        a, b = diffs.places(old), diffs.places(new)
        found[f"{one} {two}".replace(".py", "")] = {
            place: changes(a[place], b[place], place, one == "grpo.py")
            for place in a
            if place != "If" and place in b and a[place] != b[place]
        }
    return found


def states(data):
    """The part after # of every state of the page."""
    found, scripts = ["map", "batch", "help", "common"], data["scripts"]
    for one, two in itertools.permutations(scripts, 2):
        both = scripts[one]["places"] | scripts[two]["places"]
        found += [f"{one}-{two}", *(f"{one}-{two}/{place}" for place in both)]
    found += [f"all/{place}" for place in dict.fromkeys(p for own in scripts.values() for p in own["places"])]
    found += [f"common/{name}" for name in data["common"]]
    return found + [state for _, state, *_ in data["options"]] + [f"batch/{row['key']}" for row in data["batch"]]


def build(tree, data):
    """The page: the template with its style, its program and what it shows in place of their names."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = tree.read(f"{PARTS}/page.html")
    for name, part in (("STYLE", "style.css"), ("PROGRAM", "page.js")):
        page = page.replace(f"/*{name}*/", tree.read(f"{PARTS}/{part}").strip())
    return page.replace("/*DATA*/", text)


def stored(tree):
    """What the page that is there shows; nothing but the standard library is needed to read it."""
    text = tree.read(PAGE).split('<script id="data" type="application/json">')[1]
    return json.loads(text.split("</script>")[0])


def without_colours(data):
    """What a page says: each block with its lines as text, and the equations in LaTeX."""
    texts = ["".join(row[1::2]) for row in data["lines"]]
    blocks = [block | {"lines": [texts[i] for i in block["lines"]]} for block in data["blocks"]]
    return data | {"lines": [], "blocks": blocks, "math": {text: latex for text, (latex, _) in data["math"].items()}}


def refresh(tree):
    data = collect(tree)
    found = batch_keys.unknown(tree) + unset(tree, data["scripts"])
    if LEXER:
        tree.write(PAGE, build(tree, data))
    elif without_colours(stored(tree)) != without_colours(json.loads(json.dumps(data))):
        found.append(f"{PAGE}: is not what the scripts say; to write it: pip install pygments latex2mathml")
    return found
