"""The project as a site that needs no clone: its pages, scripts side by side, both panels, a run.

python tools/website.py OUT                    write it into the folder OUT; open OUT/index.html
python tools/website.py OUT --max_steps 5      with these options of grpo.py for its run

It wants `pip install pygments markdown-it-py latex2mathml`. It begins with README.md, and takes
each page, source and picture that a link leads to. No page loads anything from elsewhere. The run
is a default run of grpo.py with --record_tokens, and takes about a minute.
tools/website/ has the frame of a page and its style.
"""

import argparse
import html
import itertools
import os
import pathlib
import re
import string
import subprocess
import sys
import tempfile
from urllib.parse import unquote

import markdown_it
import pygments.formatters
import pygments.lexers
import pygments.util
from latex2mathml.converter import convert

import look
import same_text
import side_by_side

ROOT = same_text.ROOT
PARTS = pathlib.Path(__file__).parent / "website"
FORMATTER = pygments.formatters.HtmlFormatter(nowrap=True)
FIRST = pathlib.Path("README.md")
COPIED = {".png", ".svg", ".json", ".jsonl"}  # what a browser shows by itself


def highlighted(text, language, _=None):
    """The HTML of code; pygments' names of languages are the endings of their files."""
    try:
        lexer = pygments.lexers.get_lexer_by_name(language, stripnl=False)
    except pygments.util.ClassNotFound:
        lexer = pygments.lexers.TextLexer(stripnl=False)
    return pygments.highlight(text, lexer, FORMATTER)


MARKDOWN = markdown_it.MarkdownIt("commonmark", {"highlight": highlighted}).enable("table")


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def show_formulas(tokens):
    """Make MathML of each `formula` that stands between two dollar signs, as GitHub does."""
    for before, code, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        in_dollars = before.content.endswith("$") and after.content.startswith("$")
        if code.type == "code_inline" and in_dollars:
            before.content = before.content[:-1]
            after.content = after.content[1:]
            code.type, code.content = "html_inline", convert(code.content)


def place_of(path):
    """Where a file or folder of the project stands in the site."""
    if path == FIRST:
        return "index.html"
    if path.suffix == ".md":
        return str(path.with_suffix(".html"))
    if (ROOT / path).is_dir():
        return f"{path}/index.html"
    return str(path) if path.suffix in COPIED else f"{path}.html"


def link_to(address, name):
    return f'<a href="{address}">{name}</a>'


def pairs():
    """Links to each pair of scripts side by side."""
    names = [name.removesuffix(".py") for name in same_text.found()]
    found = itertools.combinations(names, 2)
    links = [link_to(f"side_by_side.html#{one}-{two}", f"{one} and {two}") for one, two in found]
    return f"<h2>Two scripts side by side</h2><p>{' · '.join(links)}</p>"


def with_home(page):
    """Another tool's page, with a link to the first page of the site."""
    home = f'<p style="margin:0.3rem 1.2rem">{link_to("index.html", "PlainPO")}</p>'
    return page.replace("<body>", f"<body>{home}", 1)


class Site:
    """A folder, and the files of the project that stand in it: those that its pages have links to."""

    def __init__(self, out):
        self.out = out
        self.found = [FIRST, pathlib.Path("docs/README.md"), pathlib.Path("docs/conventions.md")]

    def make(self):
        for path in self.found:  # grows as links are found
            place = place_of(path)
            if path.suffix in COPIED:
                self.put(place, (ROOT / path).read_bytes())
            else:
                self.put(place, self.in_frame(place, *self.content(path)))

    def content(self, path):
        """The title and the HTML of a page, a folder or a source."""
        if (ROOT / path).is_dir():
            return str(path), f"<h1>{path}</h1><ul>{self.listing(path)}</ul>"
        text = (ROOT / path).read_text(encoding="utf-8")
        if path.suffix == ".md":
            return self.page(path, text)
        code = highlighted(text, path.suffix.removeprefix("."))
        return str(path), f"<h1>{path}</h1><pre><code>{code}</code></pre>"

    def put(self, place, content):
        file = self.out / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def in_frame(self, place, title, content):
        """A page of the site; tools/website/page.html has what stands at the top of every page."""
        frame = string.Template((PARTS / "page.html").read_text(encoding="utf-8"))
        style = (PARTS / "style.css").read_text(encoding="utf-8")
        home = "../" * place.count("/")
        title = html.escape(title)
        return frame.substitute(title=title, style=style, home=home, content=content)

    def page(self, path, text):
        """The title and the HTML of a page in Markdown."""
        tokens = MARKDOWN.parse(text)
        title = ""
        for heading, inline in itertools.pairwise(tokens):
            if heading.type == "heading_open":
                name = "".join(token.content for token in inline.children)
                heading.attrSet("id", slug(name))
                title = title or name
        for token in tokens:
            if token.type == "fence" and token.info == "math":
                token.type = "html_block"
                formula = convert(token.content, display="block")
                token.content = f'<div class="formula">{formula}</div>'
            show_formulas(token.children or [])
            for child in token.children or []:
                for name in {"href", "src"} & child.attrs.keys():
                    child.attrs[name] = self.link(path, child.attrs[name])
        content = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        return title, content + (pairs() if path == FIRST else "")

    def listing(self, path):
        names = sorted(file.name for file in (ROOT / path).iterdir() if file.name != "__pycache__")
        return "".join(f"<li>{link_to(self.link(path / 'x', name), name)}</li>" for name in names)

    def link(self, page, address):
        """A link of a page to a file of the project, as a link to its place in the site."""
        target, hash_sign, anchor = address.partition("#")
        if not target or re.match(r"\w+:", target):
            return address
        path = pathlib.Path(os.path.normpath(page.parent / unquote(target)))
        if not (ROOT / path).exists():
            print(f"{page}: no {path}", file=sys.stderr)
            return "#"
        if (ROOT / path / "README.md").exists():
            path /= "README.md"
        if path not in self.found:
            self.found.append(path)
        return os.path.relpath(place_of(path), page.parent) + hash_sign + anchor


def run_page(options):
    """The page of tools/look.py for a run of grpo.py."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "grpo"
        command = [sys.executable, "grpo.py", "--record_tokens", "--output_dir", run, *options]
        subprocess.run(command, cwd=ROOT, check=True)
        return look.page(look.collect(run))


def main(words=None):
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("out", metavar="OUT", type=pathlib.Path)
    options, run_options = parser.parse_known_args(words)
    site = Site(options.out)
    site.make()
    both = side_by_side.page("grpo", "dapo", same_text.found())
    site.put("side_by_side.html", with_home(both))
    site.put("run.html", with_home(run_page(run_options)))
    print(f"written: {options.out / 'index.html'}, {len(site.found)} pages and other files")


if __name__ == "__main__":
    main()
