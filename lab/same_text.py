"""Keep functions that scripts share identical, so that a diff of two scripts shows only the papers.

python lab/same_text.py                  list copies that differ
python lab/same_text.py --fix grpo.py    copy the functions of grpo.py into the scripts that share them

Intended differences are listed in DIFFERS with a reason, and are neither compared nor copied.
Scripts that are not in DIFFERS, such as your own, are ignored.
"""

import ast
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tools"))

from side_by_side import ROOT, line_spans, script_sources

PAIRS = "pairs instead of rollouts"
DIFFERS = {  # {script: {function that differs from the others': why}}
    "grpo.py": {},
    "dr_grpo.py": {
        "compute_rewards": "a truncated completion has reward 0",
        "token_weights": "a constant instead of the length",
    },
    "dapo.py": {
        "compute_rewards": "+1 and -1",
        "token_weights": "one weight for all tokens",
        "main": "dynamic sampling",
    },
    "gspo.py": {"policy_loss": "the ratio of a whole completion"},
    "dcpo.py": {
        "compute_rewards": "-1 without an answer",
        "compute_advantages": "smoothed by the history of the prompt",
        "policy_loss": "bounds for each token",
        "token_weights": "the sum over a group",
        "main": "the history",
    },
    "ppo.py": {
        "compute_advantages": "GAE instead of the group",
        "policy_loss": "the dual clip and the entropy bonus",
        "token_weights": "one weight for all tokens",
        "completion_logprobs": "also values",
        "split": "--fast does not share prompts in its update",
        "update": "the critic, and advantages that need it",
        "main": "the critic",
    },
    "dpo.py": {
        "completion_logprobs": "no temperature and no entropy",
        "update": PAIRS,
        "main": PAIRS,
    },
    "reward_model.py": {
        "pair_losses": "scores instead of log-probs against the reference",
        "update": PAIRS,
        "main": PAIRS,
    },
}
ALSO_EQUAL = [("update", "dpo.py", "reward_model.py")]  # but not to the other scripts


def members(sources):
    """Return the sources of the scripts in DIFFERS."""
    return {script: source for script, source in sources.items() if script in DIFFERS}


def texts(source):
    """Return {name: text} of all but `Args`."""
    lines = source.splitlines()
    spans = {name: span for name, span in line_spans(source).items() if name != "Args"}
    return {name: "\n".join(lines[first - 1 : last]) for name, (first, last) in spans.items()}


def options(source):
    """Return {option: type} in the order of `Args`."""
    args = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "Args")
    fields = [node for node in args.body if isinstance(node, ast.AnnAssign)]
    return {field.target.id: ast.unparse(field.annotation) for field in fields}


def problems(sources):
    """Return what is wrong, one line each."""
    own = {script: texts(source) for script, source in members(sources).items()}
    found = []
    for name in dict.fromkeys(name for script in own for name in own[script]):
        having = [script for script in own if name in own[script]]
        sharing = [script for script in having if name not in DIFFERS[script]]
        first = (sharing or having)[0]
        for script in having:
            is_equal = own[script][name] == own[first][name]
            if script in sharing and not is_equal:
                found.append(another_text(name, script, first))
            if script != first and script not in sharing and is_equal:
                found.append(f"{name} of {script} equals that of {first}: take it out of DIFFERS.")
    for script in own:
        gone = [name for name in DIFFERS[script] if name not in own[script]]
        found += [f"{script} has no {name}: take it out of DIFFERS." for name in gone]
        found += order_problems(script, sources[script], sources["grpo.py"])
    for name, one, other in ALSO_EQUAL:
        if one in own and other in own and own[one].get(name) != own[other].get(name):
            found.append(another_text(name, other, one))
    return found


def another_text(name, script, first):
    advice = f"copy it (--fix {first} or --fix {script}), or say why in DIFFERS"
    return f"{name} differs between {script} and {first}: {advice}."


def order_problems(script, source, grpo):
    """Yield a line if options shared with grpo.py have another order or other types."""
    expected = options(grpo)
    own = options(source)
    shared = [(name, kind) for name, kind in own.items() if name in expected]
    if shared != [(name, kind) for name, kind in expected.items() if name in own]:
        yield f"{script}: options shared with grpo.py must have its types and its order."


def fixed(original, sources):
    """Return {script: source} of the scripts that change when they get the functions of `original`."""
    right = texts(sources[original])
    changed = {}
    for script, source in members(sources).items():
        text = source
        for name, old in texts(source).items():
            if name in right and shares(name, original, script):
                text = text.replace(f"\n{old}\n", f"\n{right[name]}\n")
        if text != source:
            changed[script] = text
    return changed


def shares(name, original, script):
    """Return whether two scripts must have the same text of a function."""
    if any(name == both and {original, script} == set(pair) for both, *pair in ALSO_EQUAL):
        return True
    return name not in DIFFERS[original] and name not in DIFFERS[script]


def main(words):
    sources = script_sources()
    if words and (len(words) != 2 or words[0] != "--fix"):
        raise SystemExit(__doc__)
    if words:
        original = words[1]
        if original not in members(sources):
            raise SystemExit(f"{original} is not one of the scripts {', '.join(members(sources))}.")
        changed = fixed(original, sources)
        for script, source in changed.items():
            (ROOT / script).write_text(source, encoding="utf-8", newline="\n")
        scripts = ", ".join(changed) or "no script"
        print(f"Copied from {original} into {scripts}.")
        sources |= changed
    wrong = problems(sources)
    print("\n".join(wrong) or "All shared functions are equal.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
