"""The links from the pages to code. Every numbered detail of a page links to the code that it is about.

The text of a link says what it means: [`policy_loss`](../grpo.py). It is the name of a function, a class or an
assignment of that file (a method is `Policy.forward`, an option is `Args.kl_coef`), or, where none is meant, a piece of
exactly one line: [`losses = -objective`](../grpo.py#L160). Names get no line numbers, so that a page changes only when
they do; tools/refresh.py writes those of the pieces, and says what was renamed and has to be edited by hand.
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


def place(tree, path, code):
    """The first and the last line of `path` that `code` names, and whether it is a name; a ValueError says why not."""
    if not tree.exists(path):
        raise ValueError("there is no such file")
    source = tree.read(path)
    if code in named_lines(source):
        return *named_lines(source)[code], True
    lines = [number for number, line in enumerate(source.splitlines(), 1) if code in line]
    if len(lines) != 1:
        raise ValueError(f"no function, class or assignment has this name, and {len(lines)} lines hold this text")
    return lines[0], lines[0], False


def to_code(text):
    """[(code, target)] of the links to code in a text, without those to files as a whole."""
    return [(code, target) for code, target, _ in LINK.findall(text) if not target.endswith(code)]


def corrected(tree, page, text):
    """The text of a page with line numbers where no name is linked, and what cannot be corrected."""
    found = []

    def correct(link):
        code, target, _ = link.groups()
        if target.endswith(code):  # a link to the file as a whole
            return link[0]
        try:
            first, _, named = place(tree, beside(page, target), code)
            return f"[`{code}`]({target}{'' if named else f'#L{first}'})"
        except ValueError as error:
            found.append(f"{page}: {link[0]}: {error}; edit the text of the link")
            return link[0]

    return LINK.sub(correct, text), found


def problems(tree, page, text, tests):
    """What is wrong with a page beside line numbers: details without a link, tests and files that do not exist."""
    details = DETAIL.findall(text) if page.startswith("docs/") else []
    found = [f"no link to code in: {detail.splitlines()[0]}" for detail in details if not to_code(detail)]
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
