"""Write a recipe of docs/your_own.md as a script that runs, by the diff that the page prints or links.

python examples/recipes.py --list       their names, and the sections that explain them
python examples/recipes.py cispo        writes cispo.py beside grpo.py; then: python cispo.py
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = (ROOT / "docs" / "your_own.md").read_text(encoding="utf-8")


def blocks(page, kind):
    """The code blocks of one kind in the text of a page, without the indentation of a list."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def is_comment(line):
    return line.lstrip().startswith("#")


def changed(diff, sources=()):
    """The script that a diff makes of another: (name, source, lines changed). The other one is a script of
    this project, or one of `sources` {name: source}. A ValueError if a hunk is not in it once."""
    header, *hunks = re.split(r"^@@ .*\n", diff, flags=re.MULTILINE)
    old_name, new_name = re.findall(r"^[+-]{3} (\S+)$", header, re.MULTILINE)
    source = sources[old_name] if old_name in sources else (ROOT / old_name).read_text(encoding="utf-8")
    source, changes = source.splitlines(), 0
    for hunk in hunks:
        lines = hunk.splitlines()
        old = [line[1:] for line in lines if line[0] != "+" and not is_comment(line[1:])]
        kept = [i for i, line in enumerate(source) if not is_comment(line)]  # a new comment is no conflict
        places = [kept[i : i + len(old)] for i in range(len(kept))]
        places = [place for place in places if [source[i] for i in place] == old]
        if len(places) != 1:
            raise ValueError("\n".join([f"this is not in {old_name} once:", *old]))
        source[places[0][0] : places[0][-1] + 1] = [line[1:] for line in lines if line[0] != "-"]
        changes += sum(line[0] != " " for line in lines)
    return new_name, "\n".join(source) + "\n", changes


def diffs():
    """The diffs of the page in its order, the printed and the linked ones: (where it stands, diff)."""
    found = [(PAGE.index(diff), diff) for diff in blocks(PAGE, "diff")]
    for link in re.finditer(r"\]\(\.\./examples/(\w+\.diff)\)", PAGE):
        found.append((link.start(), (HERE / link[1]).read_text(encoding="utf-8")))
    return sorted(found)


def recipes():
    """{name: (source, lines changed, title of its section)}, each made of grpo.py or of a recipe before it."""
    made = {}
    for place, diff in diffs():
        title = PAGE[:place].rpartition("\n## ")[2].splitlines()[0]
        name, source, changes = changed(diff, {name: source for name, (source, *_) in made.items()})
        made[name] = source, changes, title
    return made


def main(name):
    made = recipes()
    if name == "--list":
        for recipe, (_, changes, title) in made.items():
            print(f"{recipe.removesuffix('.py'):14} {changes:3} lines, docs/your_own.md: {title}")
        return
    path = ROOT / f"{name.removesuffix('.py')}.py"
    if path.name not in made:
        raise SystemExit(f"no recipe {name}: --list has their names")
    if path.exists():
        raise SystemExit(f"{path} is there already: take it away first")
    path.write_text(made[path.name][0], encoding="utf-8", newline="\n")
    print(f"wrote {path.name}: docs/your_own.md, {made[path.name][2]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
