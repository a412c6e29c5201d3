"""Functions that several scripts share have one text, so that a script can be read alone and a diff shows the paper.

python tools/same_text.py                  say which copies are not equal
python tools/same_text.py --fix grpo.py    write the functions of grpo.py into the other scripts

A function that is to differ stands under `differs` in tools/family.py with its reason: it is neither
compared nor written. Scripts of your own, which are not in that file, are left alone.
"""

import ast
import sys

import family


def places(source):
    """{name: (first line, last line)}, counted from 1, of the functions, classes and constants at top level.

    The decorators and the comment lines above belong to it; a constant is an assignment.
    """
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            continue
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
        while lines[first - 2].startswith("#"):
            first -= 1
        found[name] = (first, node.end_lineno)
    return found


def texts(source):
    """{name: text} of what scripts may share: all but `Args`, whose options are a script's own."""
    lines = source.splitlines()
    own = {name: place for name, place in places(source).items() if name != "Args"}
    return {name: "\n".join(lines[first - 1 : last]) for name, (first, last) in own.items()}


def option_types(source):
    """{option: its type} in the order of `Args`."""
    args = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    return {node.target.id: ast.unparse(node.annotation) for node in args.body if isinstance(node, ast.AnnAssign)}


def members(sources):
    """The scripts of tools/family.py alone."""
    return {script: source for script, source in sources.items() if script in family.FAMILY}


def problems(sources):
    """What is wrong, a sentence each."""
    found, own = [], {script: texts(source) for script, source in members(sources).items()}
    differs = {script: family.entry(script).differs for script in own}
    for name in dict.fromkeys(name for script in own for name in own[script]):
        having = [script for script in own if name in own[script]]
        equal = [script for script in having if name not in differs[script]]
        original = (equal or having)[0]
        text = own[original][name]
        stale = [script for script in equal if own[script][name] != text]
        if stale:
            found.append(
                f"{name} has another text in {', '.join(stale)} than in {original}. If that of {original} is the new "
                f"one: python tools/same_text.py --fix {original}. If it is to differ in a script, write why under "
                "`differs` of that script in tools/family.py."
            )
        for script in having:
            if script not in equal and script != original and own[script][name] == text:
                found.append(f"{name} of {script} is that of {original}: take it out of `differs` in tools/family.py.")
    for script in own:
        gone = [name for name in differs[script] if name not in own[script]]
        found += [f"{script} has no {name}: take it out of `differs` in tools/family.py." for name in gone]
        found += order_problems(script, sources[script], sources["grpo.py"])
    return found


def order_problems(script, source, grpo):
    """The options of grpo.py stand in every script in one order, so that a diff shows only those that change."""
    expected, own = option_types(grpo), option_types(source)
    if family.entry(script).kind == "pairs":  # it has only some of them
        expected = {name: kind for name, kind in expected.items() if name in own}
    if list(expected.items()) != [(name, kind) for name, kind in own.items() if name in expected]:
        yield f"{script}: `Args` must have the options of grpo.py with their types and in their order."


def fixed(original, sources):
    """{script: source} of the scripts that change when they get the functions of `original`."""
    right, new = texts(sources[original]), {}
    kept = family.entry(original).differs
    for script, source in members(sources).items():
        text = source
        for name, old in texts(source).items():
            if name in right and name not in kept and name not in family.entry(script).differs:
                text = text.replace(f"\n{old}\n", f"\n{right[name]}\n")
        if text != source:
            new[script] = text
    return new


def main(words):
    sources = family.found()
    if words and (len(words) != 2 or words[0] != "--fix"):
        raise SystemExit(__doc__)
    if words:
        original = words[1]
        if original not in members(sources):
            raise SystemExit(f"{original} is not one of the scripts {', '.join(members(sources))}.")
        new = fixed(original, sources)
        for script, source in new.items():
            (family.ROOT / script).write_text(source, encoding="utf-8", newline="\n")
        print(f"Copied from {original} into {', '.join(new)}." if new else f"All copies already equal {original}.")
        sources |= new
    found = problems(sources)
    print("\n".join(found) or "Every function that scripts share has one text.")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
