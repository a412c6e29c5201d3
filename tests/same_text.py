"""Same name, same text: what stands in two scripts under one name has one text, and a sibling is a small diff.

python tests/same_text.py                  each script against grpo.py in numbers, and what is wrong
python tests/same_text.py --fix grpo.py    rewrite the copies of its functions in the other scripts, but DIFFERS
"""

import ast
import difflib
import functools
import itertools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = (
    "grpo.py dr_grpo.py dapo.py gspo.py dcpo.py ppo.py reward_model.py dpo.py".split()
)  # the first is the original
OWN_OPTIONS = ("reward_model.py", "dpo.py")  # their option set is another one
# (script, name): (why its text is another one, most lines removed and added together)
DIFFERS = {
    ("dr_grpo.py", "compute_rewards"): ("truncated rows score 0", 4),
    ("dr_grpo.py", "token_weights"): ("a constant in place of the length", 6),
    ("dr_grpo.py", "main"): ("its name, and the loss mask without truncated rows", 5),
    ("gspo.py", "policy_loss"): ("the ratio is that of the row", 28),
    ("gspo.py", "main"): ("its name", 2),
    ("dapo.py", "compute_rewards"): ("+1/-1", 8),
    ("dapo.py", "token_weights"): ("one weight for every token", 10),
    ("dapo.py", "main"): ("its name, checks of its options, and dynamic sampling", 60),
    ("dcpo.py", "compute_rewards"): ("-1 without an answer", 3),
    ("dcpo.py", "compute_advantages"): ("smoothed by the prompt's history", 14),
    ("dcpo.py", "policy_loss"): ("bounds of each token, one cap", 22),
    ("dcpo.py", "token_weights"): ("the sum over a group", 4),
    ("ppo.py", "compute_advantages"): ("GAE in place of the group", 40),
    ("ppo.py", "policy_loss"): ("Eq. 8 too, and coefficients that controllers move", 42),
    ("ppo.py", "token_weights"): ("one weight for every token", 8),
    ("ppo.py", "update"): ("advantages here, the critic, target_kl", 66),
    ("ppo.py", "main"): ("its name, checks, the critic and the controllers", 44),
    ("dcpo.py", "main"): ("its name, checks of its options, and the history", 22),
    ("reward_model.py", "main"): (
        "steps over given pairs, no rollout, no completions to show; another model is saved",
        84,
    ),
    ("dpo.py", "main"): ("rounds of pairs in place of rollouts", 118),
    ("dpo.py", "pair_losses"): ("log-probs against the reference in place of scores", 18),
}
# Removed lines, added lines and hunks against grpo.py, the module docstring and the help texts left out.
BUDGETS = {"dr_grpo.py": (15, 15, 12), "dapo.py": (60, 160, 25), "gspo.py": (60, 120, 20), "dcpo.py": (60, 120, 20)}


def load(root=ROOT):
    """{script: source} of the scripts that exist."""
    return {name: (root / name).read_text(encoding="utf-8") for name in SCRIPTS if (root / name).exists()}


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
def bare(source):
    """The lines without module docstring and help texts, each field of `Args` on one line."""
    lines, (node, _) = source.splitlines(), arguments(source)
    for field in reversed([n for n in node.body if isinstance(n, ast.AnnAssign)]):
        default = ast.unparse(field.value.args[0])
        text = f"    {field.target.id}: {ast.unparse(field.annotation)} = option({default})"
        lines[field.lineno - 1 : field.end_lineno] = [text]
    return lines[ast.parse(source).body[0].end_lineno :]


def changes(old, new):
    """Removed lines, added lines and hunks, as `diff -U0` counts them."""
    if old == new:
        return 0, 0, 0
    parts = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    parts = [p for p in parts if p[0] != "equal"]
    return sum(p[2] - p[1] for p in parts), sum(p[4] - p[3] for p in parts), len(parts)


def originals(sources, differs):
    """{name: (script, text)}: the first script that has it and is not excused."""
    found = {}
    for script, source in sources.items():
        for name, text in texts(source).items():
            if (script, name) not in differs:
                found.setdefault(name, (script, text))
    return found


def problems(sources, differs=DIFFERS, budgets=BUDGETS):
    """What is wrong, one line each."""
    found, first = [], originals(sources, differs)
    for script, source in sources.items():
        own = texts(source)
        for name, text in own.items():
            original, expected = first.get(name, (script, text))
            removed, added, _ = changes(expected, text)
            if (script, name) not in differs and text != expected:
                found.append(f"{script}: {name} is not the text of {original} (-{removed} +{added})")
            elif (script, name) in differs and original != script and text == expected:
                found.append(f"{script}: {name} is the text of {original}, DIFFERS still excuses it")
            elif (script, name) in differs and removed + added > differs[script, name][1]:
                most = differs[script, name][1]
                found.append(f"{script}: {name} differs from {original} by {removed + added} lines, allowed are {most}")
        found += [
            f"{script}: DIFFERS names {n}, which is not there" for s, n in differs if s == script and n not in own
        ]
        if script in budgets:
            numbers = changes(bare(sources["grpo.py"]), bare(source))
            if any(number > most for number, most in zip(numbers, budgets[script], strict=True)):
                found.append(f"{script}: lines removed, added, hunks are {numbers}, the budget is {budgets[script]}")
    for (one, a), (two, b) in itertools.combinations(sources.items(), 2):
        names, others = imports(a), imports(b)
        found += [
            f"{two}: {n} is imported otherwise than in {one}" for n in names if names[n] != others.get(n, names[n])
        ]
    options = arguments(sources["grpo.py"])[1]
    inherited = re.findall(
        r"^    (\w+): .*? = option\(", (ROOT / "common/harness/args.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    for script, source in sources.items():
        own = arguments(source)[1]
        kept = {name: kind for name, kind in own.items() if name in options}
        expected = {name: kind for name, kind in options.items() if script not in OWN_OPTIONS or name in own}
        if list(kept.items()) != list(expected.items()):
            found.append(f"{script}: the options of grpo.py are not all there with their types and in their order")
        names, new = list(own), [name for name in own if name not in [*options, *inherited]]
        if script not in OWN_OPTIONS and names[(start := names.index("std_eps") + 1) : start + len(new)] != new:
            found.append(f"{script}: its own options ({', '.join(new)}) must follow std_eps")
    return found


def fix(original, sources, differs=DIFFERS):
    """{script: source} with every copy of a top-level block of `original` rewritten, those of `differs` aside."""
    right, fixed = texts(sources[original]), {}
    for script, source in sources.items():
        lines = source.splitlines()
        for name, place in reversed(blocks(source).items()):
            if name in right and (script, name) not in differs and (original, name) not in differs:
                lines[slice(*place)] = right[name]
        fixed[script] = "\n".join(lines) + "\n"
    return fixed


def main(arguments):
    sources = load()
    if arguments[:1] == ["--fix"] and arguments[1:] and arguments[1] in sources:
        for script, source in fix(arguments[1], sources).items():
            if source != sources[script]:
                (ROOT / script).write_text(source, encoding="utf-8", newline="\n")
                print(f"rewritten: {script}")
        sources = load()
    elif arguments:
        raise SystemExit(__doc__)
    for script, source in sources.items():
        numbers = changes(bare(sources["grpo.py"]), bare(source))
        budget = "/".join(map(str, BUDGETS.get(script, ("-",) * 3)))
        print(f"{script:16} removed {numbers[0]:3}  added {numbers[1]:3}  hunks {numbers[2]:3}   budget {budget}")
    found = problems(sources)
    print("\n".join(found) or "one name, one text")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
