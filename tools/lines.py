"""The links from the pages to lines of code. Every numbered detail of a page links to the lines that it is about.

The text of a link says which lines it means: [`policy_loss`](../grpo.py#L181-L208). It is the name of a function, a
class or an assignment of that file (a method is `Policy.forward`, an option is `Args.kl_coef`), or a piece of exactly
one line. So tools/refresh.py can always find the line numbers; only what was renamed has to be edited by hand.
"""

import ast
import functools
import posixpath
import re

LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)(#[-L\d]*)?\)")
DETAIL = re.compile(r"^\d+\. .*\n(?:(?: .*)?\n)*", re.MULTILINE)  # with its indented lines
TEST = re.compile(r"`(test_\w+)`")
FOLDERS = "benchmarks|common|configs|docs|examples|lab|tests|tools"
FILE = re.compile(rf"(?<![\w/])((?:{FOLDERS})/(?:[\w-]+/)*[\w-]+\.(?:py|md|yaml|txt))\b|\]\(([\w./-]+)(?:#[^)]*)?\)")


def pages(tree):
    """The pages whose links are checked; docs/diffs.md is written as a whole and has none."""
    return [path for path in tree.glob("*.md", "docs/*.md", "benchmarks/*.md") if path != "docs/diffs.md"]


@functools.cache
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


def beside(page, target):
    """The path of what a link of a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def anchor(tree, path, code):
    """`#L3-L9`, the lines of `path` that `code` names; a ValueError says why there are none."""
    if not tree.exists(path):
        raise ValueError("there is no such file")
    source = tree.read(path)
    first, last = named_lines(source).get(code, (0, 0))
    if not first:
        lines = [number for number, line in enumerate(source.splitlines(), 1) if code in line]
        if len(lines) != 1:
            raise ValueError(f"no function, class or assignment has this name, and {len(lines)} lines hold this text")
        first = last = lines[0]
    return f"#L{first}" + (f"-L{last}" if last > first else "")


def corrected(tree, page, text):
    """The text of a page with correct line numbers, and what cannot be corrected."""
    found = []

    def correct(link):
        code, target, _ = link.groups()
        if target.endswith(code):  # a link to the file as a whole
            return link[0]
        try:
            return f"[`{code}`]({target}{anchor(tree, beside(page, target), code)})"
        except ValueError as error:
            found.append(f"{page}: {link[0]}: {error}; edit the text of the link")
            return link[0]

    return LINK.sub(correct, text), found


def problems(tree, page, text, tests):
    """What is wrong with a page beside line numbers: details without a link, tests and files that do not exist."""
    details = DETAIL.findall(text) if page.startswith("docs/") else []
    found = [f"no link to lines in: {detail.splitlines()[0]}" for detail in details if "#L" not in detail]
    found += [f"there is no test {name}" for name in TEST.findall(text) if f"def {name}(" not in tests]
    for path, target in FILE.findall(text):
        if not tree.exists(path or beside(page, target)):
            found.append(f"there is no file {path or target}")
    return [f"{page}: {problem}" for problem in found]


def refresh(tree):
    found, tests = [], "".join(map(tree.read, tree.glob("tests/**/*.py")))
    for page in pages(tree):
        text, unknown = corrected(tree, page, tree.read(page))
        tree.write(page, text)
        found += unknown + problems(tree, page, text, tests)
    return found
