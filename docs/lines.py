"""The links from the pages to lines of code. Every numbered detail of a page links to the lines that it is about.

python docs/lines.py            check that the links are fresh
python docs/lines.py --write    correct the line numbers of all links

The text of a link says which lines it means: [`policy_loss`](../grpo.py#L181-L208). It is the name of a function, a
class or an assignment of that file (a method is `Policy.forward`, an option is `Args.kl_coef`), or a piece of exactly
one line. So the line numbers can always be found again; only what was renamed has to be edited by hand.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)(#[-L\d]*)?\)")
DETAIL = re.compile(r"^\d+\. .*\n(?:(?: .*)?\n)*", re.MULTILINE)  # with its indented lines
TEST = re.compile(r"`(test_\w+)`")
FOLDERS = "benchmarks|common|configs|docs|tests"
FILE = re.compile(rf"\b((?:{FOLDERS})/(?:[\w-]+/)*[\w-]+\.(?:py|md|yaml|txt))\b|\]\(([\w./-]+)(?:#[^)]*)?\)")


def pages(root=ROOT):
    """The pages whose links are checked; docs/diffs.md is written by docs/diffs.py and has none."""
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("benchmarks/*.md")]
    return sorted(path for path in files if path.name != "diffs.md")


def named_lines(source):
    """{name: (first line, last line)}, counted from 1, of functions, classes and assignments, also in classes."""
    found, blocks = {}, [("", ast.parse(source))]
    for prefix, block in blocks:
        for node in block.body:
            target = getattr(node, "targets", [getattr(node, "target", None)])[0]
            name = prefix + (getattr(node, "name", None) or getattr(target, "id", ""))
            first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
            found[name] = (first, node.end_lineno)
            if isinstance(node, ast.ClassDef):
                blocks.append((f"{name}.", node))
    return found


def anchor(path, code):
    """`#L3-L9`, the lines of `path` that `code` names; a ValueError says why there are none."""
    if not path.exists():
        raise ValueError("there is no such file")
    source = path.read_text(encoding="utf-8")
    first, last = named_lines(source).get(code, (0, 0))
    if not first:
        lines = [number for number, line in enumerate(source.splitlines(), 1) if code in line]
        if len(lines) != 1:
            raise ValueError(f"no function, class or assignment has this name, and {len(lines)} lines hold this text")
        first = last = lines[0]
    return f"#L{first}" + (f"-L{last}" if last > first else "")


def refresh(page, text):
    """The text of a page with correct line numbers, and what cannot be corrected."""
    found = []

    def corrected(link):
        code, target, _ = link.groups()
        if target.endswith(code):  # a link to the file as a whole
            return link[0]
        try:
            return f"[`{code}`]({target}{anchor(page.parent / target, code)})"
        except ValueError as error:
            found.append(f"{page.name}: {link[0]}: {error}; edit the text of the link")
            return link[0]

    return LINK.sub(corrected, text), found


def problems(page, text, root=ROOT):
    """What is wrong with a page beside line numbers: details without a link, tests and files that do not exist."""
    tests = "".join(path.read_text(encoding="utf-8") for path in root.glob("tests/**/*.py"))
    details = DETAIL.findall(text) if page.parent.name == "docs" else []
    found = [f"no link to lines in: {detail.splitlines()[0]}" for detail in details if "#L" not in detail]
    found += [f"there is no test {name}" for name in TEST.findall(text) if f"def {name}(" not in tests]
    for path, target in FILE.findall(text):
        if not ((root / path) if path else (page.parent / target)).exists():
            found.append(f"there is no file {path or target}")
    return [f"{page.name}: {problem}" for problem in found]


def main(arguments):
    if arguments not in ([], ["--write"]):
        raise SystemExit(__doc__)
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh, unknown = refresh(page, text)
        if arguments and fresh != text:
            page.write_text(fresh, encoding="utf-8", newline="\n")
            print(f"written: {page.relative_to(ROOT)}")
        elif fresh != text:
            found.append(f"{page.name}: line numbers have changed: python docs/lines.py --write")
        found += unknown + problems(page, fresh)
    print("\n".join(found) or "all links are fresh")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
