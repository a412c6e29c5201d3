"""docs/diffs.md: what each sibling changes in grpo.py, hunk by hunk, with a sentence of what and why for each.

tools/refresh.py writes it. The sentences are in tools/family.py; those of ppo.py, reward_model.py and dpo.py stand on
the page side by side alone.
"""

import ast
import difflib
import functools
import hashlib
import re
import textwrap

import family
import same_text
from tree import ROOT

PAGE = "docs/diffs.md"
SHOWN = re.compile(r"(?<=^```diff\n)diff (\w+\.py) (\w+\.py)\b.*\n(?:.*\n)*?(?=```$)", re.MULTILINE)  # in the READMEs
INTRO = """# What each script changes in grpo.py

{siblings} are `grpo.py` with the changes of one paper each. Here these are, in the
order of the file, each after a sentence that says what changes and why. An option is shown with its default. Left out:
what is `grpo.py`'s word for word, what differs in comments, docstrings, help texts or the name of the run alone,
imports, and code around a change beyond one line (`@@` stands for it between two changes).

{others} are programs of their own. What they share with `grpo.py` and what not is on
the page [side by side](side_by_side.html), with the same sentences; it shows all lines of any two scripts. Open it in a
browser, from a clone: `docs/side_by_side.html#grpo-ppo`.

Written by `python tools/refresh.py`; a test compares it with the scripts.
"""


@functools.cache
def places(source):
    """{place: lines} of a script: `Args`, each top-level block under its name, and the imports."""
    lines = same_text.bare(source)
    text = "\n".join(lines)
    node, _ = same_text.arguments(text)
    start = node.lineno - 1 - len(node.decorator_list)
    found = {"Args": lines[start : node.end_lineno]}
    found |= {name: lines[slice(*place)] for name, place in same_text.blocks(text).items()}
    return found | {"imports": [line for line in lines[:start] if line]}


def starts(lines):
    """Where each line of code starts, with the comments above it, and where the last one ends."""
    ends = [i + 1 for i, line in enumerate(lines) if not same_text.is_comment(line)]
    return [0, *ends[:-1], len(lines)]


def groups(place, old, new):
    """[[(kind, i, i_end, j, j_end)]]: the hunks of two texts of a place, with the lines that they are about.

    Only code is compared; a comment belongs to the code below it. In functions as `diff -u` joins them; in `Args` each
    run of changed fields is a hunk, and all imports are one.
    """
    matcher = difflib.SequenceMatcher(None, same_text.code(old), same_text.code(new), autojunk=False)
    found = list(matcher.get_grouped_opcodes(0 if place in ("Args", "imports") else 3))
    if place == "imports" and found:
        found = [[change for group in found for change in group]]
    a, b = starts(old), starts(new)
    return [[part for op in group for part in without_comments(old, new, op, a, b)] for group in found]


def without_comments(old, new, op, a, b):
    """A change in lines; comments at its start that both texts have are no part of it."""
    kind, i, i_end, j, j_end = op[0], a[op[1]], a[op[2]], b[op[3]], b[op[4]]
    if kind == "replace":
        start = i, j
        while same_text.is_comment(old[i]) and old[i] == new[j]:
            i, j = i + 1, j + 1
        if (i, j) != start:
            yield "equal", start[0], i, start[1], j
    yield kind, i, i_end, j, j_end


@functools.cache
def hunks(old, new):
    """[(place, key, lines)] of the changes from one source to another, place by place.

    The key of a function that only one of them has is its name. That of another hunk does not change when the hunk
    moves or gets a comment, and changes with its code.
    """
    old, new, found = places(old), places(new), []
    for place in [*new, *(name for name in old if name not in new)]:
        a, b = old.get(place, []), new.get(place, [])
        for group in groups(place, a, b):
            lines = []
            for kind, i, i_end, j, j_end in group:
                if kind == "equal":
                    lines += [f"  {line}".rstrip() for line in b[j:j_end]]
                else:
                    lines += [f"- {line}".rstrip() for line in a[i:i_end]]
                    lines += [f"+ {line}".rstrip() for line in b[j:j_end]]
            changed = [line for line in lines if line[:1] in ("-", "+") and not same_text.is_comment(line[2:])]
            digest = hashlib.sha256("\n".join(changed).encode()).hexdigest()
            found.append((place, f"{place} {digest[:6]}" if a and b else place, lines))
    return found


def docstrings(source):
    """The lines of the docstrings of its functions, and the empty line."""
    return set(source.splitlines()) - set(without_docstrings(source).splitlines()) | {""}


def shown(lines):
    """The lines of a hunk with one line of context at most; `@@` stands for lines that are left out between changes."""
    near = [any(line[:1] in ("-", "+") for line in lines[max(i - 1, 0) : i + 2]) for i in range(len(lines))]
    kept = []
    for line, keep in zip(lines, near, strict=True):
        if keep:
            kept.append(line)
        elif kept[-1:] != ["@@"]:
            kept.append("@@")
    return kept[kept[:1] == ["@@"] : len(kept) - (kept[-1:] == ["@@"])]


def renames(script, lines):
    """Whether a hunk changes nothing, or the name of the run alone."""
    old, new = ([line[2:] for line in lines if line.startswith(sign)] for sign in "-+")
    return [line.replace('"grpo"', f'"{script.removesuffix(".py")}"') for line in old] == new


def options(lines):
    """What a hunk of `Args` changes, in a line: each option with its default, and with grpo.py's where it has one."""
    found = {}
    for line in changing(lines):
        option = re.match(r"([-+])     (\w+): .* = option\((.*)\)$", line)
        if option:
            found.setdefault(option[2], {})[option[1]] = option[3].strip("'")
    words = []
    for name, value in found.items():
        words.append(f"`{name} {' -> '.join(value[sign] for sign in '-+' if sign in value)}`")
        words[-1] += "" if "+" in value else " (gone)"
    return ", ".join(words)


def section(script, grpo, source, own):
    """The part of the page that is about one script."""
    removed, added, _ = same_text.changes(same_text.bare(grpo), same_text.bare(source))
    texts, originals = same_text.texts(source), same_text.texts(grpo)
    same = ", ".join(f"`{name}`" for name in texts if texts[name] == originals.get(name) and name != "If")
    counts = f"{removed} lines removed, {added} added. Word for word as in grpo.py: {same or 'no function'}."
    page, gone, last, said = [f"## {script}\n"], [], None, docstrings(grpo) | docstrings(source)
    page += [textwrap.fill(text, 120) + "\n" for text in (family.entry(script).paper, counts)]
    for place, key, lines in hunks(grpo, source):
        sentence, both = own.get(key, ""), key != place
        lines = [line for line in lines if line[2:] not in said] if both else lines
        if place not in places(source):
            gone.append(f"- `{place}`: {sentence}")
        elif place == "Args" and options(lines):
            page += [f"### {script}: Args\n"] * (last != place)
            page.append(textwrap.fill(f"- {options(lines)}: {sentence}", 120, subsequent_indent="  "))
            last = place
        elif place not in ("Args", "imports") and not renames(script, lines):
            page += [""] * (last == "Args") + [f"### {script}: {place}\n"] * (last != place)
            page += [textwrap.fill(sentence, 120), "\n```diff", *shown(lines), "```\n"]
            last = place
    return page + ([f"### Gone from {script}\n", *gone, ""] if gone else [])


def build(sources, sentences=family.SENTENCES):
    """The page, and which sentences are missing or left over, also of scripts that the page leaves to side_by_side."""
    found, grpo = [], sources["grpo.py"]
    scripts = [name for name in sources if name != "grpo.py"]
    siblings = [name for name in scripts if family.entry(name).kind == "groups"]
    names = {
        "siblings": ", ".join(f"`{name}`" for name in siblings),
        "others": ", ".join(f"`{name}`" for name in scripts if name not in siblings),
    }
    page = [INTRO.format(**names)]
    for script in scripts:
        own, used = sentences.get(script, {}), set()
        if script in siblings:
            page += section(script, grpo, sources[script], own)
        for _, key, lines in hunks(grpo, sources[script]):
            used.add(key)
            if key not in own:
                say = "say what the paper changes there and why, in SENTENCES of tools/family.py under this key:"
                found.append("\n    ".join([f'{script}: no sentence for "{key}"; {say}', *lines]))
        for key in own.keys() - used:
            say = "the code changed or is gone; if the sentence still fits, give it the hunk's new key, else remove it:"
            found.append(f'{script}: no hunk for the sentence "{key}" in tools/family.py; {say}\n    {own[key]}')
    return "\n".join(page).rstrip() + "\n", found


def without_docstrings(source):
    """The source less the docstrings of its functions."""
    lines = source.splitlines()
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
    for text in sorted((n.body[0] for n in nodes), key=lambda n: -n.lineno):
        del lines[text.lineno - 1 : text.end_lineno]
    return "\n".join(lines)


@functools.cache
def inherited():
    """The options of the base classes, without their help texts."""
    source = (ROOT / "common/harness/args.py").read_text(encoding="utf-8")
    fields = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign) and node.value]
    return {f"{n.target.id}: {ast.unparse(n.annotation)} = option({ast.unparse(n.value.args[0])})" for n in fields}


def changing(lines):
    """The lines without options that are declared again for their help text alone, with the inherited default."""
    return [line for line in lines if line.lstrip("+- ") not in inherited()]


def changed_code(old_name, new_name, sources):
    """What makes one script out of another, for a README: the lines of code that change, under the names of places."""
    old, new = (without_docstrings(sources[name]) for name in (old_name, new_name))
    removed, added, _ = same_text.changes(*map(changing, (same_text.bare(old), same_text.bare(new))))
    shown, last = [f"diff {old_name} {new_name}    # {removed} lines removed, {added} added"], None
    for place, _, lines in hunks(old, new):
        shown += [f"@@ {place}"] * (place != last)
        shown += changing([line[0] + line[2:] for line in lines if line[:1] in ("-", "+")])
        last = place
    return "".join(f"{line}\n" for line in shown)


def refresh(tree):
    sources = family.found(tree)
    page, found = build(sources)
    tree.write(PAGE, page)
    for readme in ("README.md", "README.zh.md"):
        tree.write(readme, SHOWN.sub(lambda names: changed_code(*names.groups(), sources), tree.read(readme)))
    return found
