"""Same name, same text: what stands in two scripts under one name has one text, and a sibling is a small diff.

python tools/same_text.py                  each script against grpo.py in numbers
python tools/same_text.py --fix grpo.py    rewrite the copies of its functions in the others, but those of `differs`

tools/refresh.py copies what changed since the last commit, and says what is wrong. A line that is only a comment counts
nowhere here: it is copied, and nothing else.
"""

import ast
import collections
import difflib
import functools
import itertools
import re
import shutil
import subprocess
import sys

import family
from tree import Tree

OPTIONS = re.compile(r"^    (\w+): .*? = option\(", re.MULTILINE)


@functools.cache
def blocks(source):
    """{name: (first line, last line)}, counted from 0, the last not included, of what stands at top level, with its
    decorators and the comments above; imports, the docstring and `Args` are checked otherwise."""
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) or getattr(node, "name", "") == "Args":
            continue
        first = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1
        while lines[first - 1].startswith("#"):
            first -= 1
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        name = getattr(node, "name", None) or getattr(targets[0], "id", type(node).__name__)
        found[name] = (first, node.end_lineno)
    return found


@functools.cache
def texts(source):
    return {name: source.splitlines()[slice(*place)] for name, place in blocks(source).items()}


@functools.cache
def imports(source):
    """{name: the import that gives it}"""
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return {a.asname or a.name: f"{getattr(n, 'module', '')}: {a.name}" for n in nodes for a in n.names}


@functools.cache
def arguments(source):
    """The fields of `Args`: the node, and {name: type} in their order."""
    node = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "Args")
    return node, {n.target.id: ast.unparse(n.annotation) for n in node.body if isinstance(n, ast.AnnAssign)}


@functools.cache
def methods(source):
    """{name: text} of what `Args` computes."""
    return {n.name: ast.unparse(n) for n in arguments(source)[0].body if isinstance(n, ast.FunctionDef)}


@functools.cache
def numbered(source):
    """[(number, line)] without module docstring and help texts, each field of `Args` on one line."""
    lines, (node, _) = list(enumerate(source.splitlines(), 1)), arguments(source)
    for field in reversed([n for n in node.body if isinstance(n, ast.AnnAssign)]):
        default = ast.unparse(field.value.args[0])
        text = f"    {field.target.id}: {ast.unparse(field.annotation)} = option({default})"
        lines[field.lineno - 1 : field.end_lineno] = [(field.lineno, text)]
    return lines[ast.parse(source).body[0].end_lineno :]


def bare(source):
    return [line for _, line in numbered(source)]


def is_comment(line):
    return line.lstrip().startswith("#")


def code(lines):
    """The lines that are not only a comment."""
    return [line for line in lines if not is_comment(line)]


def changes(old, new):
    """Removed lines, added lines and hunks, as `diff -U0` counts them, of code."""
    old, new = code(old), code(new)
    if old == new:
        return 0, 0, 0
    parts = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    parts = [p for p in parts if p[0] != "equal"]
    return sum(p[2] - p[1] for p in parts), sum(p[4] - p[3] for p in parts), len(parts)


def excused(script, name):
    return name in family.entry(script).differs


def copies_of(sources):
    """{name: {script: lines}} of what scripts share, those aside that may differ; the first is the original."""
    found = {}
    for script, source in sources.items():
        for name, text in texts(source).items():
            if not excused(script, name):
                found.setdefault(name, {})[script] = text
    return found


# --- what is wrong ---


def problems(sources, inherited=()):
    """What a person has to decide, one line each; `inherited`: the options of RunArgs and RolloutArgs."""
    shared = copies_of(sources)
    return [
        line
        for script, source in sources.items()
        for line in (
            *text_problems(script, source, shared),
            *budget_problems(script, source, sources),
            *option_problems(script, source, sources["grpo.py"], inherited),
        )
    ] + [*import_problems(sources), *method_problems(sources)]


def text_problems(script, source, shared):
    own, differs = texts(source), family.entry(script).differs
    for name, text in own.items():
        original, expected = next(iter(shared.get(name, {script: text}).items()))
        removed, added, _ = changes(expected, text)
        if name not in differs and removed + added:
            copy = f", or copy it: python tools/same_text.py --fix {original}" if script in family.FAMILY else ""
            yield (
                f"{script}: {name} is not the text of {original} (-{removed} +{added}): say why under `differs` of its "
                f"entry in tools/family.py{copy}"
            )
        elif name in differs and original != script and not removed + added:
            yield f"{script}: {name} is the text of {original}: take it out of `differs` in tools/family.py"
        elif name in differs and removed + added > differs[name][1]:
            yield f"{script}: {name} differs from {original} by {removed + added} lines, allowed are {differs[name][1]}"
    for name in differs:
        if name not in own:
            yield f"{script}: there is no {name}: take it out of `differs` in tools/family.py"


def budget_problems(script, source, sources):
    budget, numbers = family.entry(script).budget, changes(bare(sources["grpo.py"]), bare(source))
    if budget and any(number > most for number, most in zip(numbers, budget, strict=True)):
        yield f"{script}: lines removed, added, hunks are {numbers}, the budget is {budget}"


def option_problems(script, source, original, inherited):
    options, own = arguments(original)[1], arguments(source)[1]
    pairs = family.entry(script).kind == "pairs"
    kept = {name: kind for name, kind in own.items() if name in options}
    expected = {name: kind for name, kind in options.items() if not pairs or name in own}
    if list(kept.items()) != list(expected.items()):
        yield f"{script}: the options of grpo.py are not all there with their types and in their order"
    names, new = list(own), [name for name in own if name not in [*options, *inherited]]
    if not pairs and "std_eps" in names and names[(start := names.index("std_eps") + 1) : start + len(new)] != new:
        yield f"{script}: its own options ({', '.join(new)}) must follow std_eps"


def import_problems(sources):
    return [
        f"{two}: {name} is imported otherwise than in {one}"
        for (one, a), (two, b) in itertools.combinations(sources.items(), 2)
        for name, where in imports(a).items()
        if where != imports(b).get(name, where)
    ]


def method_problems(sources):
    """A method of `Args` is no block of its own, which could be copied; it has one text all the same."""
    own = [(script, methods(source)) for script, source in sources.items() if script in family.FAMILY]
    return [
        f"{two}: Args.{name} is not the text of {one}"
        for (one, a), (two, b) in itertools.combinations(own, 2)
        for name, text in a.items()
        if text != b.get(name, text)
    ]


# --- copies ---


def committed(tree):
    """{script: source} of the last commit; nothing without git."""

    def git(*words):
        return subprocess.run(["git", *words], cwd=tree.root, capture_output=True, text=True)

    if not shutil.which("git"):
        return {}
    sources, changed = family.found(tree), git("diff", "--name-only", "--relative", "HEAD", "--", "*.py")
    if changed.returncode or git("rev-parse", "--show-prefix").stdout.strip():  # the project of its own, or none
        return {}
    new = git("ls-files", "--others", "--", "*.py").stdout.split()
    old = {name: git("show", f"HEAD:{name}") for name in sources if name in changed.stdout.split()}
    old = {name: shown.stdout for name, shown in old.items() if not shown.returncode}
    return {name: old.get(name, source) for name, source in sources.items() if name not in new}


def copied(sources, base):
    """{script: source} with one text again for what scripts share, and what a person has to decide.

    What changed since `base`, the sources of the last commit, is the new text, and else that of the first script. It
    takes the place of copies of the old text, and of those that differ in comments alone. New comments also go to where
    a text may differ, if the lines around them are equal. A script without an entry in tools/family.py is someone's
    own: nothing is copied into it, nor out of it.
    """
    others = {script: source for script, source in sources.items() if script not in family.FAMILY}
    sources = {script: source for script, source in sources.items() if script in family.FAMILY}
    new, problems = {script: dict(texts(source)) for script, source in sources.items()}, []
    for name, now in copies_of(sources).items():
        before = {script: texts(base[script]).get(name) for script in now if script in base}
        edited = {s: text for s, text in now.items() if before.get(s) not in (None, text)}
        if len({"\n".join(text) for text in edited.values()}) > 1:
            problems.append(f"{name} has different new texts in {', '.join(edited)}: make them one")
            continue
        source = next(iter(edited or now))
        counts = collections.Counter("\n".join(text) for text in now.values())
        olds = [before[source]] if edited else []
        for script, text in now.items():
            stale = text in olds or code(text) == code(now[source]) or (not base and counts["\n".join(text)] > 1)
            if stale and text != now[source]:
                new[script][name] = now[source]
                olds.append(text)
        for script in sources if olds else ():
            if excused(script, name) and name in new[script]:
                new[script][name] = carry(olds[0], now[source], new[script][name])
    return {script: rewritten(source, new[script]) for script, source in sources.items()} | others, problems


def rewritten(source, new):
    """The source with these texts of its blocks."""
    lines = source.splitlines()
    for name, place in reversed(blocks(source).items()):
        lines[slice(*place)] = new[name]
    return "\n".join(lines) + "\n"


def carry(old, new, own):
    """`own` with the comments that were added or removed from `old` to `new`, where the code around them is its own."""
    was, now, mine = (dict(gaps(lines)) for lines in (old, new, own))
    once = [{place for place, n in collections.Counter(p for p, _ in gaps(x)).items() if n == 1} for x in (new, own)]
    lines = []
    for place, comments in gaps(own):
        if place in once[0] & once[1] and mine[place] == was.get(place, []):
            comments = now[place]
        lines += [*comments, *place[1:]]
    return lines[:-1]  # the end of the text, after the last line


def gaps(lines):
    """[((line of code, the next one), comments between them)]; "" is before the first line, and after the last."""
    found, last, comments = [], "", []
    for line in [*lines, ""]:
        if is_comment(line):
            comments.append(line)
        else:
            found.append(((last, line), comments))
            last, comments = line, []
    return found


def fix(original, sources):
    """{script: source} of the family with every copy of a top-level block of `original` rewritten, those of `differs`
    aside."""
    right = {name: text for name, text in texts(sources[original]).items() if not excused(original, name)}
    return {
        script: rewritten(source, {n: t if excused(script, n) else right.get(n, t) for n, t in texts(source).items()})
        for script, source in sources.items()
        if script in family.FAMILY
    }


def main(words):
    tree = Tree()
    sources = family.found(tree)
    if words[:1] == ["--fix"] and words[1:] and words[1] in sources and words[1] in family.FAMILY:
        for script, source in fix(words[1], sources).items():
            tree.write(script, source)
        print(*(f"written: {name}" for name in tree.new), sep="\n")
        tree.save()
    elif words:
        raise SystemExit(__doc__)
    for script, source in family.found(tree).items():
        numbers = changes(bare(sources["grpo.py"]), bare(source))
        budget = "/".join(map(str, family.entry(script).budget or ("-",) * 3))
        print(f"{script:16} removed {numbers[0]:3}  added {numbers[1]:3}  hunks {numbers[2]:3}   budget {budget}")


if __name__ == "__main__":
    main(sys.argv[1:])
