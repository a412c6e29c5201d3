"""docs/side_by_side.html: the page on which the scripts are compared, function by function. Needs pygments.

python docs/side_by_side.py            write the page

The page is one file. This program collects what it shows: the functions of the scripts with their syntax classes, the
changes between every two scripts, the sentences of docs/diffs.py, the equations of the docstrings, the numbered details
of docs/*.md at their lines, the definitions in common/ and the keys of the batch. docs/side_by_side/ has its HTML, its
style, and the program that shows one state (`#grpo-dapo/policy_loss`) of it.
"""

import ast
import difflib
import functools
import html
import itertools
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs")]

import batch_keys  # noqa: E402
import diffs  # noqa: E402
import lines  # noqa: E402

import same_text  # noqa: E402

PAGE = ROOT / "docs" / "side_by_side.html"
PARTS = ROOT / "docs" / "side_by_side"
WORD = re.compile(r"\d[\d.]*(?:e-?\d+)?|\w+|\s+|[=!<>]=|[^\w\s]")
# The left side of an equation in a docstring, and the functions that compute it.
COMPUTED_IN = {
    "J": "policy_loss token_weights",
    "over": "dynamic_batch",
    "KL_it": "policy_loss",
    "A_i": "compute_advantages",
    "R_i": "compute_rewards overlong_penalty",
    "s_i": "policy_loss",
    "s_it": "policy_loss",
    "lo(q)": "clip_bounds",
    "SA_new": "smoothed_advantages compute_advantages",
    "R_t": "shape_rewards",
    "delta_t": "compute_advantages gae",
    "A_t": "compute_advantages gae",
    "min(r_t": "policy_loss",
    "h": "preference_loss",
    "sigmoid": "preference_loss",
    "with": "preference_loss",
    "robust": "preference_loss",
    "ipo": "preference_loss",
    "L": "reward_loss",
}
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


def details():
    """The numbered details of docs/*.md: a list of ({label, title, html}, [(file, first line, last line)])."""
    found = []
    for page in lines.pages():
        if page.parent.name != "docs":
            continue
        for detail in lines.DETAIL.findall(page.read_text(encoding="utf-8")):
            number, text = detail.split(". ", 1)
            bold = re.match(r"\*\*(.+?)\*\*", " ".join(text.split()))
            title = bold[1].rstrip(".:") if bold else " ".join(text.split()[:7]) + " …"
            note = {"label": f"{page.stem} {number}", "title": inline(title), "html": paragraphs(text)}
            places = []
            for _, target, anchor in lines.LINK.findall(text):
                if anchor:
                    first, _, last = anchor.removeprefix("#L").partition("-L")
                    file = (page.parent / target).resolve().relative_to(ROOT.resolve()).as_posix()
                    places.append((file, int(first), int(last or first)))
            found.append((note, places))
    return found


def numbered(source):
    """The lines of `same_text.bare`, which are those that are compared, and the number of each in its file."""
    numbers = list(range(1, len(source.splitlines()) + 1))
    for field in reversed(same_text.arguments(source)[0].body):
        if isinstance(field, ast.AnnAssign):
            numbers[field.lineno - 1 : field.end_lineno] = [field.lineno]
    return "\n".join(same_text.bare(source)), numbers[ast.parse(source).body[0].end_lineno :]


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


def coloured(text, linked):
    """For each line of Python code [class, text, class, text, ...]; a name in `linked` has the class given there."""
    import pygments.lexers
    from pygments.token import Comment, Keyword, Literal, Name, Operator

    kinds = [(Comment, "c"), (Literal.String, "s"), (Literal.Number, "m"), (Keyword, "k"), (Operator.Word, "k")]
    kinds += [(Name.Function, "f"), (Name.Class, "f"), (Name.Decorator, "d"), (Name.Builtin, "b")]
    names, rows, column = used_names(ast.parse(text)), [[]], 0
    for token, value in pygments.lexers.PythonLexer(stripnl=False, ensurenl=False).get_tokens(text):
        kind = next((short for parent, short in kinds if token in parent), "")
        for i, piece in enumerate(value.split("\n")):
            if i:
                rows.append([])
                column = 0
            at_name = (len(rows), column) in names and piece in linked
            used = linked[piece] if at_name else kind
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


@functools.cache
def words(old, new):
    """[[line, start, end]] of what differs in each of two lists of lines, word by word; nothing if little is common."""
    a, b = (WORD.findall("\n".join(text)) for text in (old, new))
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    if not a or not b or matcher.quick_ratio() < 0.4 or matcher.ratio() < 0.4:
        return [], []
    marks = ([], [])
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        for tokens, start, end, found in ((a, i, i_end, marks[0]), (b, j, j_end, marks[1])):
            if kind == "equal" or start == end:
                continue
            before = "".join(tokens[:start])
            line, column = before.count("\n"), len(before) - before.rfind("\n") - 1
            for offset, piece in enumerate("".join(tokens[start:end]).split("\n")):
                left = len(piece) - len(piece.lstrip()) + (0 if offset else column)
                if piece.strip():
                    found.append([line + offset, left, left + len(piece.strip())])
    return marks


def changes(old, new, place, sentences):
    """[[i, i_end, j, j_end, sentence or -1, marks, marks]] of two texts of a place; equal runs are left out.

    The first change of a hunk of docs/diffs.py has the index of its sentence.
    """
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    groups = list(matcher.get_grouped_opcodes(0 if place in ("Args", "imports") else 3))
    if place == "imports":
        groups = [[op for group in groups for op in group]]
    found = []
    for number, group in enumerate(groups):
        first = number if sentences else -1
        for kind, i, i_end, j, j_end in group:
            if kind != "equal":
                found.append([i, i_end, j, j_end, first, *words(tuple(old[i:i_end]), tuple(new[j:j_end]))])
                first = -1
    return found


def equations(docstring):
    """[(functions, [text, its number in the paper])] of the indented lines of a docstring that are equations."""
    found = []
    for line in docstring.splitlines():
        left = line.split()[:1]
        if line.startswith("    ") and left and left[0] in COMPUTED_IN:
            text = re.split(r" {3,}(?=\w\S*(?: \S+)*$)", line.removeprefix("    ").rstrip(), maxsplit=1)
            found.append((COMPUTED_IN[left[0]].split(), text))
    return found


def common_names(scripts):
    """{name: file} of what the scripts import from common/, what the details link to there, and what uses the batch."""
    found = {}
    for source in scripts.values():
        for where in same_text.imports(source).values():
            module, _, original = where.partition(": ")
            if module.startswith("common"):
                found[original] = module.replace(".", "/") + ".py"
    for _, places in details():
        for file, first, _ in places:
            if file.startswith("common/"):
                source = (ROOT / file).read_text(encoding="utf-8")
                found |= {n: file for n, (start, end) in same_text.blocks(source).items() if start < first <= end}
    for used in batch_keys.uses(files()).values():
        for name, places in [*used["writes"].items(), *used["reads"].items()]:
            found |= {name.split(".")[0]: file for file in places if file.startswith("common/")}
    return dict(sorted(found.items(), key=lambda item: (item[1].count("/"), item[1], item[0].lower())))


def summary(text):
    """The first sentence of the docstring of a function or class."""
    node = ast.parse(text).body[0]
    docstring = ast.get_docstring(node) if hasattr(node, "name") else ""
    return re.split(r"(?<=\.)\s", " ".join((docstring or "").split()))[0]


def script_page(source, store, common):
    """What the page has of a script: its docstring, and {place: [block, line numbers]}."""
    text, numbers = numbered(source)
    docstring = ast.get_docstring(ast.parse(source))
    linked = {name: "C" for name in same_text.imports(source) if name in common}
    linked |= {name: "O" for name in same_text.blocks(text)}
    rows, places = coloured(text, linked), {}
    node, _ = same_text.arguments(text)
    start = node.lineno - 1 - len(node.decorator_list)
    spans = {"imports": [i for i in range(start) if text.splitlines()[i]], "Args": range(start, node.end_lineno)}
    spans |= {name: range(*place) for name, place in same_text.blocks(text).items() if name != "If"}
    for name, span in spans.items():
        block = store.add([text.splitlines()[i] for i in span], [rows[i] for i in span])
        places[name] = [block, [numbers[i] for i in span]]
    return {"docstring": docstring, "equations": equations(docstring), "places": places}


def collect():
    """Everything that the page shows, as it is given to page.js."""
    sources, store = same_text.load(), Blocks()
    names = common_names(sources)
    scripts = {name.removesuffix(".py"): script_page(source, store, names) for name, source in sources.items()}
    common = {}
    for name, file in names.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        first, end = same_text.blocks(source)[name]
        linked = {other: "C" for other in names if other in same_text.imports(source) or names[other] == file}
        text = source.splitlines()[first:end]
        block = store.add(text, coloured("\n".join(text), linked))
        users = [script for script, own in sources.items() if name in same_text.imports(own)]
        common[name] = {"file": file, "place": [block, list(range(first + 1, end + 1))], "used": users}
        common[name]["summary"] = inline(summary("\n".join(text)))
    notes = []
    for note, places in details():
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
        "elsewhere": {name: inline(text) for name, text in ELSEWHERE.items()},
        "batch": [
            {"key": key, "shape": batch_keys.KEYS[key][0], "what": inline(batch_keys.KEYS[key][1])} | found
            for key, found in batch_keys.uses(files()).items()
        ],
    }


def files():
    return [*same_text.SCRIPTS, *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("common/**/*.py"))]


def why(sources):
    """{script: {place: sentences}} against grpo.py, those of docs/diffs.py."""
    found = {script.removesuffix(".py"): {} for script in sources}
    for script, own in diffs.SENTENCES.items():
        for place, key, _ in diffs.hunks(sources["grpo.py"], sources[script]):
            found[script.removesuffix(".py")].setdefault(place, []).append(inline(own[key]))
    return found


def pairs(sources):
    """{"grpo dapo": {place: changes}} for every two scripts, the places that both have in different texts."""
    found = {}
    for (one, old), (two, new) in itertools.combinations(sources.items(), 2):
        a, b = diffs.places(old), diffs.places(new)
        sentences = one == "grpo.py" and two in diffs.SENTENCES
        found[f"{one} {two}".replace(".py", "")] = {
            place: changes(a[place], b[place], place, sentences)
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
    return found + [f"common/{name}" for name in data["common"]]


def build(data):
    """The page: the template with its style, its program and what it shows in place of their names."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = (PARTS / "page.html").read_text(encoding="utf-8")
    for name, part in (("STYLE", "style.css"), ("PROGRAM", "page.js")):
        page = page.replace(f"/*{name}*/", (PARTS / part).read_text(encoding="utf-8").strip())
    return page.replace("/*DATA*/", text)


def stored():
    """What the page that is there shows; nothing but the standard library is needed to read it."""
    text = PAGE.read_text(encoding="utf-8").split('<script id="data" type="application/json">')[1]
    return json.loads(text.split("</script>")[0])


if __name__ == "__main__":
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    PAGE.write_text(build(collect()), encoding="utf-8", newline="\n")
    print(f"written: {PAGE.relative_to(ROOT)}, {PAGE.stat().st_size / 1e6:.2f} MB")
