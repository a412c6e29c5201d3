"""One command after a change: writes everything that can be generated, and says what a person still has to write.

python tools/refresh.py            write: copies of identical functions, links to code, docs/diffs.md, the page side by
                                   side (with pygments, latex2mathml), one step, tables of results, verdicts,
                                   rows of tables
python tools/refresh.py --check    change nothing, and say the same: exit code 1 if anything is due
"""

import ast
import re
import sys

from tree import ROOT, Tree

sys.path[1:1] = [str(ROOT), str(ROOT / "lab")]

import family  # noqa: E402
import same_text  # noqa: E402

METRIC = re.compile(r"[a-z_]+/[\w@]+")


def copies(tree):
    """Identical functions, and what no program can decide between two texts."""
    sources, found = same_text.copied(family.found(tree), same_text.committed(tree))
    for script, source in sources.items():
        tree.write(script, source)
    inherited = same_text.OPTIONS.findall(tree.read("common/harness/args.py"))
    return found + same_text.problems(sources, inherited)


def members(tree):
    """What a script lacks to be one of the family."""
    found, sources = [], family.found(tree)
    for script, source in sources.items():
        name, entry = script.removesuffix(".py"), family.entry(script)
        if script not in family.FAMILY:
            found.append(f"{script}: no entry in FAMILY of tools/family.py; its fields are explained there")
        elif not entry.paper and script != "grpo.py":
            found.append(f"{script}: no `paper` in its entry in tools/family.py")
        cells = len(entry.column)
        if script in family.FAMILY and cells != len(family.ROWS) and (cells or entry.kind != "pairs"):
            found.append(f"{script}: no `column` of {len(family.ROWS)} cells in its entry in tools/family.py")
        settings = [f"configs/{name}-paper.yaml"] if entry.settings else []
        for path in (f"docs/{name}.md", f"tests/test_{name}.py", *settings):
            if not tree.exists(path):
                found.append(f"{script}: no {path}")
        if re.findall(r'Run\(accelerator, args, "(\w+)"', source) != [name]:
            found.append(f'{script}: its run has another name: Run(accelerator, args, "{name}")')
        found += equations(script, source, family.EQUATIONS | entry.equations)
    gone = family.FAMILY.keys() - sources
    return found + [f"{script}: an entry in tools/family.py, and no script" for script in gone]


def equations(script, source, computed_in):
    """Numbered equations of the docstring whose functions are not named."""
    own, found = same_text.blocks(source), []
    for line in ast.get_docstring(ast.parse(source)).splitlines():
        if re.search(r"^    .* {3,}.*\bEq\. [\d-]+$", line):
            left = line.split()[0]
            if not any(function in own for function in computed_in.get(left, "").split()):
                where = "`equations` of its entry in tools/family.py"
                found.append(f"{script}: which function computes “{left} ...”? Name it under {where}: {line.strip()}")
    return found


def metrics(tree):
    """Metrics whose names stand in the code, and not in the glossary."""
    documented = set(re.findall(r"^\| `(\S+)` \|", tree.read("docs/metrics.md"), re.MULTILINE)) | {"eval/logged"}
    groups, found = {name.split("/")[0] for name in documented}, []
    for file in [*family.found(tree), *tree.glob("common/*.py", "common/harness/*.py")]:
        nodes = list(ast.walk(ast.parse(tree.read(file))))
        parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and n not in parts}
        names = {text for text in texts if METRIC.fullmatch(text) and text.split("/")[0] in groups}
        found += [f"{file}: no row in docs/metrics.md for the metric `{name}`" for name in sorted(names - documented)]
    return found


def rows(tree):
    """A column or a row for each script in the tables of algorithms, and each page in the contents."""
    page, columns = "docs/algorithms.md", {name: family.entry(name).column for name in family.found(tree)}
    whole = {name.removesuffix(".py"): column for name, column in columns.items() if len(column) == len(family.ROWS)}
    table = [["", *(f"[`{name}.py`](../{name}.py) · [details]({name}.md)" for name in whole)]]
    table += [["---"] * len(table[0]), *zip((f"**{row}**" for row in family.ROWS), *whole.values(), strict=True)]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    tree.write(page, re.sub(r"(?:^\|.*\n)+", lambda _: lines, tree.read(page), count=1, flags=re.MULTILINE))
    for page in ("README.md", "README.zh.md"):
        for name, column in whole.items():
            cells = dict(zip(family.ROWS, column, strict=True))
            rest = f" {cells['advantage']} | {cells['ratio']}, {cells['clip']} | {cells['weights']} |"
            add_line(tree, page, r"^\| \[\w+\.py\]\(.*\n", f"| [{name}.py]({name}.py) |", rest)
    contents = "docs/README.md"
    linked = set(re.findall(r"\]\(([^)#]+)\)", tree.read(contents)))
    for name in family.names(tree):
        if tree.exists(f"docs/{name}.md") and f"{name}.md" not in linked:
            add_line(tree, contents, r"^- \[\w+\.py\]\(.*\n", f"- [{name}.py]({name}.md)", ".")
            linked.add(f"{name}.md")
    pages = [path.removeprefix("docs/") for path in tree.glob("docs/*.md", "docs/*.html") if path != contents]
    return [f"{contents}: no link to {page}" for page in pages if page not in linked]


def add_line(tree, page, like, start, rest):
    """Put a line after the last one that is `like` it, unless one with this start is there."""
    text = tree.read(page)
    there = list(re.finditer(like, text, re.MULTILINE))
    if there and not any(line[0].startswith(start) for line in there):
        tree.write(page, text[: there[-1].end()] + start + rest + "\n" + text[there[-1].end() :])


def steps():
    """In this order: scripts, what is made of them, links to their code, and the page that shows all of it."""
    yield from (copies, members, metrics, rows)
    import diffs
    import kl_estimators
    import lead
    import lines
    import memory
    import monitoring
    import real_model
    import report
    import results
    import side_by_side

    programs = [memory, kl_estimators, results, real_model, report, lead]
    programs += [monitoring, lines, diffs]
    yield from (program.refresh for program in (*programs, side_by_side))


def refresh(tree, check=True):
    """What a person has to write, a line each; what is written stays in the tree."""
    found = []
    for step in steps():
        found += step(tree)
        if step is copies and not check:
            save(tree)  # the options and the step are those of the modules
    return found


def save(tree):
    """Write what is new to the files, and say so."""
    for name in tree.save():
        print(f"written: {name}")


def due(tree, by_hand):
    """The list of all that is due after a check."""
    lines = [f"python tools/refresh.py writes {', '.join(sorted(tree.new))}"] if tree.new else []
    return lines + (["to be written by hand:", *(f"  {line}" for line in by_hand)] if by_hand else [])


def main(words):
    if words not in ([], ["--check"]):
        raise SystemExit(__doc__)
    tree = Tree()
    by_hand = refresh(tree, check=bool(words))
    if not words:
        save(tree)
    lines = due(tree, by_hand)
    print("\n".join(lines) or "nothing is due")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
