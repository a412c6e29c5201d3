"""docs/diffs.md: what each script changes in grpo.py, hunk by hunk, with a sentence of what and why for each.

python docs/diffs.py            whether each hunk has its sentence, and the page is fresh
python docs/diffs.py --write    write the page
"""

import difflib
import hashlib
import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import same_text  # noqa: E402

PAGE = ROOT / "docs" / "diffs.md"
INTRO = """# What each script changes in grpo.py

Every script of the family is `grpo.py` with the changes of one paper. Here they are, hunk by hunk, in the order of the
file, each after a sentence that says what changes and why. Left out: the module docstrings, the help texts of `Args` (a
field is shown with its type and default), and everything that is `grpo.py`'s word for word.

Written by `python docs/diffs.py --write`; a test compares it with the scripts.
"""
# {script: its paper}: the scripts of the page, in this order
PAPERS = {
    "dr_grpo.py": (
        "Dr. GRPO ([arXiv 2503.20783](https://arxiv.org/abs/2503.20783)) takes two divisions out of GRPO, by a "
        "completion's length and by the group's standard deviation, because both bias what is learned."
    ),
    "dapo.py": (
        "DAPO ([arXiv 2503.14476](https://arxiv.org/abs/2503.14476)) keeps entropy up, every group informative and "
        "long completions in check: clip-higher, dynamic sampling, a token mean, and overlong reward shaping."
    ),
    "gspo.py": (
        "GSPO ([arXiv 2507.18071](https://arxiv.org/abs/2507.18071)) has one importance ratio for a whole completion, "
        "because that is what the reward judges."
    ),
    "dcpo.py": (
        "DCPO ([arXiv 2509.02333](https://arxiv.org/abs/2509.02333)) gives each token clip bounds by its own "
        "probability, and each prompt an advantage that remembers its earlier visits."
    ),
}
# {script: {key: sentence}}; a key is the place and a digest of the changed lines, as `hunks` makes it
SENTENCES = {
    "dr_grpo.py": {
        "Args 99ff2c": "Four updates a rollout (the released script: eight): with one the ratio is 1 and no clip acts.",
        "Args a2360e": (
            "No KL, so no reference model: a rule that checks answers stays valid however far the policy moves."
        ),
        "Args e37daf": (
            "The advantage is R - mean(R): divided by the standard deviation, questions that are nearly always or "
            "nearly never solved would weigh more than the others."
        ),
        "Args 185cd9": "The released code's `ignore_no_eos`, an option that is off.",
        "compute_rewards 0d123b": (
            "A truncated completion scores 0, as in the released code: its whole sum does, so that no part of a reward "
            "is earned by running into the cap."
        ),
        "token_weights 2fd4c6": (
            "A constant of the run takes the place of the row's length (Listing 1), under which a long wrong "
            "completion is pushed down less per token than a short one, and wrong answers grow longer."
        ),
        "main 5879ce": "The name of the run.",
        "main 372cd2": (
            "`--mask_truncated` takes truncated rows out of the loss; they still count as rows, and in the mean of "
            "their group."
        ),
    },
    "dapo.py": {
        "Args 99ff2c": "Four updates a rollout (the paper: 16): with one the ratio is 1 and no clip acts.",
        "Args da5bdb": (
            "After 20 steps most groups are all right, and what more steps do is sampling. The paper evaluates with "
            "top-p 0.7; training samples with 1."
        ),
        "Args 06f30f": (
            "Clip-higher: more room above than below, so that unlikely tokens can grow and entropy lasts (Section 3.1)."
        ),
        "Args a2360e": (
            "No KL, so no reference model: a policy that learns to reason at length has to leave its start (Section "
            "2.3)."
        ),
        "Args c0058a": "The options of overlong reward shaping, of dynamic sampling, and of the token mean.",
        "compute_rewards 40c581": (
            "What decides correctness is +1 or -1 (Eq. 7), the scale on which the overlong punishment of at most 1 is "
            "meant; `correct` stays 1 or 0."
        ),
        "overlong_penalty 6b2664": (
            "A completion that comes near the cap loses up to 1, more with each token, so that the policy learns to "
            "stop before a cut would teach it (Eq. 13)."
        ),
        "dynamic_batch 5b0c33": (
            "Dynamic sampling: rounds go on until the batch is full of groups with some but not all completions "
            "correct (Eq. 11), because the others have no gradient, and more and more groups are such as the policy "
            "learns."
        ),
        "token_weights aacb87": (
            "Every token of the optimizer step has one weight, because under a mean over rows each token of a long "
            "completion counts less (Section 3.3); `group` is Eq. 8 as printed."
        ),
        "main 72d2a3": (
            "Options that cannot work are refused before a model is loaded; and gold answers are needed whatever the "
            "reward is, as long as accuracy decides which groups are kept."
        ),
        "main 308da4": "Which prompts a process samples is now the matter of `dynamic_batch`.",
        "main 6577e3": (
            "The rollout becomes `dynamic_batch`, and what it kept decides: too few groups, no update in this step; "
            "none at all, the end of the run, with exit code 1 where it never found a group to train on."
        ),
        "imports 0c4d55": "For collecting the kept groups of all processes, for Eq. 7 and for Eq. 13.",
    },
    "gspo.py": {
        "Args 99ff2c": "Four updates a rollout, as in the paper: with one every s is 1, and GSPO is GRPO.",
        "Args 41f660": (
            "The paper's band, some 600 times narrower: s is a mean of logs and moves by 1e-4 where the ratios of "
            "single tokens move by 1e-1."
        ),
        "Args a2360e": "No KL, so no reference model: the paper omits the term.",
        "Args ea3203": (
            "GSPO-token (Eq. 13-14), for advantages of single tokens; without such it is the same algorithm."
        ),
        "policy_loss 52122d": (
            "One ratio s for a row, the exponential of its mean log-ratio (Eq. 7), because the reward judges the row "
            "and the ratio of one token is noise; the clip and its metrics follow s, and each token carries its row's "
            "loss, so that GRPO's weights give Eq. 5."
        ),
        "main 1a7cc4": "The name of the run.",
    },
    "dcpo.py": {
        "Args 99ff2c": "Four updates a rollout (the paper: 16): with one the ratio is 1 and no clip acts.",
        "Args 397d7f": (
            "0.16 below and 0.2 above make the bounds meet GRPO's, 0.8 for a token of probability 1 and 1.2 for one of "
            "1/1.2 (Eq. 28)."
        ),
        "Args a2360e": "No KL, so no reference model.",
        "Args c8c0b5": (
            "The paper's statistics are those of the population, which pool exactly over visits, without an epsilon "
            "(Eq. 29-30); and its cap, and a switch for each of its parts."
        ),
        "compute_rewards b4a10d": (
            "A completion without an answer gets -1, a wrong answer 0, so that format and correctness are told apart "
            "(Eq. 15)."
        ),
        "History baa832": (
            "What the advantage remembers of each prompt, the same on all processes and part of the checkpoint."
        ),
        "standardize ff49b6": (
            "GRPO's standardization with the statistics as arguments, since they are now those of the group (A_new) or "
            "of all visits (A_tot)."
        ),
        "smoothed_advantages 4f24f8": (
            "Smooth advantage standardization: the group is pooled with the prompt's earlier visits (Eq. 29-30) and "
            "standardized both ways, and the two are mixed by the number of visits, so that a single unusual group "
            "weighs less and one that agrees still trains."
        ),
        "compute_advantages e0cab3": (
            "Of the two mixtures each completion takes the smaller one, which damps the swings of both."
        ),
        "clip_bounds 710022": (
            "The bounds of each token by its old probability q, from |r - 1| r q = eps (Eq. 4, 27), because a fixed "
            "band keeps an unlikely token at nearly its old probability."
        ),
        "policy_loss e5bb00": (
            "The clip and its metrics follow the bounds of each token, and one cap holds the ratio for both signs, "
            "because no bound stops one that grows under a negative advantage."
        ),
        "token_weights 5033b1": (
            "The sum over a group of its rows' token means, G times GRPO's loss, as Eq. 8 has it; the mean over "
            "prompts is ours."
        ),
        "main 9882f4": "Options that cannot work are refused before a model is loaded; and the name of the run.",
        "main 5d7df7": "The history is saved and restored with the rest.",
        "main 8ac395": (
            "The history is read for this visit's advantages and written after them, by the prompts of the draw; the "
            "paper's measures of both are logged."
        ),
        "imports a1eacb": "`deciding_part` names what is coded, `extract_answer` tells a wrong answer from none.",
    },
}


def places(source):
    """{place: lines} of a script: `Args`, each top-level block under its name, and the imports."""
    lines = same_text.bare(source)
    text = "\n".join(lines)
    node, _ = same_text.arguments(text)
    start = node.lineno - 1 - len(node.decorator_list)
    found = {"Args": lines[start : node.end_lineno]}
    found |= {name: lines[slice(*place)] for name, place in same_text.blocks(text).items()}
    return found | {"imports": [line for line in lines[:start] if line]}


def hunks(old, new):
    """[(place, key, lines)] of the changes from one source to another, place by place.

    In functions as `diff -u` joins them; in `Args` each run of changed fields is a hunk, and all imports are one. The
    key does not change when the hunk moves, and changes with it.
    """
    old, new, found = places(old), places(new), []
    for place in [*new, *(name for name in old if name not in new)]:
        a, b = old.get(place, []), new.get(place, [])
        matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
        groups = list(matcher.get_grouped_opcodes(0 if place in ("Args", "imports") else 3))
        if place == "imports" and groups:
            groups = [[change for group in groups for change in group]]
        for group in groups:
            lines = []
            for kind, i, i_end, j, j_end in group:
                if kind == "equal":
                    lines += [f"  {line}".rstrip() for line in a[i:i_end]]
                else:
                    lines += [f"- {line}".rstrip() for line in a[i:i_end]]
                    lines += [f"+ {line}".rstrip() for line in b[j:j_end]]
            changed = "\n".join(line for line in lines if line[:1] in ("-", "+"))
            found.append((place, f"{place} {hashlib.sha256(changed.encode()).hexdigest()[:6]}", lines))
    return found


def build(sources, papers=PAPERS, sentences=SENTENCES):
    """The page, and what is wrong with the sentences."""
    page, found, grpo = [INTRO], [], sources["grpo.py"]
    for script, paper in papers.items():
        own, used, last = sentences.get(script, {}), set(), None
        removed, added, _ = same_text.changes(same_text.bare(grpo), same_text.bare(sources[script]))
        texts, originals = same_text.texts(sources[script]), same_text.texts(grpo)
        same = ", ".join(f"`{name}`" for name in texts if texts[name] == originals.get(name) and name != "If")
        counts = f"{removed} lines removed, {added} added. Word for word as in grpo.py: {same}."
        page += [f"## {script}\n", textwrap.fill(paper, 120) + "\n", textwrap.fill(counts, 120) + "\n"]
        for place, key, lines in hunks(grpo, sources[script]):
            if place != last:
                page.append(f"### {script}: {place}\n")
            page += [textwrap.fill(own.get(key, ""), 120), "\n```diff", *lines, "```\n"]
            last = place
            used.add(key)
            if key not in own:
                say = "say what the paper changes there and why, in SENTENCES of docs/diffs.py under this key:"
                found.append("\n    ".join([f'{script}: no sentence for "{key}"; {say}', *lines]))
        for key in own.keys() - used:
            say = "the code changed or is gone; if the sentence still fits, give it the hunk's new key, else remove it:"
            found.append(f'{script}: no hunk for the sentence "{key}" in docs/diffs.py; {say}\n    {own[key]}')
    found += [f"{script}: has sentences and no line in PAPERS of docs/diffs.py" for script in sentences.keys() - papers]
    return "\n".join(page).rstrip() + "\n", found


def main(arguments):
    page, found = build(same_text.load())
    if arguments == ["--write"] and not found:
        PAGE.write_text(page, encoding="utf-8")
    elif arguments not in ([], ["--write"]):
        raise SystemExit(__doc__)
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        found.append("docs/diffs.md is not what the scripts say: python docs/diffs.py --write")
    print("\n".join(found) or "docs/diffs.md is fresh")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
