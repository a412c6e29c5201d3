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
file (the imports come last), each after a sentence that says what changes and why. Left out: the module docstrings, the
help texts of `Args` (a field is shown with its type and default), and everything that is `grpo.py`'s word for word.

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
    "ppo.py": (
        "PPO ([arXiv 1707.06347](https://arxiv.org/abs/1707.06347)) is older than GRPO, which is PPO without its "
        "critic. Read from GRPO, a second model predicts the reward at every token, and the advantage is measured "
        "against that prediction."
    ),
    "reward_model.py": (
        "A reward model ([arXiv 1706.03741](https://arxiv.org/abs/1706.03741)) is trained on given pairs, without any "
        "sampling. It shares with grpo.py only what runs the steps."
    ),
    "dpo.py": (
        "DPO ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290)) trains on pairs of completions by their log-probs "
        "alone. From prompts it samples the pairs itself, by the rollout and the rewards of grpo.py."
    ),
}
# what reward_model.py and dpo.py change alike
PAIR_STEP = {
    "update_pairs 4ff946": (
        "One optimizer step on a number of pairs. The loss is a mean over pairs, so that no token needs a weight, and "
        "how the pairs are split changes nothing."
    ),
    "evaluate_pairs 3b54d0": (
        "Held-out pairs are measured like those of a step. Processes that have none left get a copy, which is not "
        "counted."
    ),
    "compute_advantages 55e03e": "There are no advantages: a pair says itself which completion is the better one.",
    "policy_loss 468f48": "No ratio and no clip: the loss does not correct for an old policy that sampled the pairs.",
    "token_weights 14365a": "The loss is that of a pair, and each pair of a step weighs the same.",
    "update f2f092": "`update_pairs` takes its place.",
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
            "A truncated completion scores 0, as in the released code: the whole weighted sum is set to 0, so that no "
            "part of a reward is earned by running into the cap."
        ),
        "token_weights 2fd4c6": (
            "A constant of the run takes the place of the row's length (Listing 1). Divided by its length, a long "
            "wrong completion is pushed down less per token than a short one, and wrong answers grow longer."
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
            "After 20 steps most groups have only right answers, and further steps would mostly sample. The paper "
            "evaluates with top-p 0.7; training samples with 1."
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
            "stop before it is cut off (Eq. 13)."
        ),
        "dynamic_batch 5b0c33": (
            "Dynamic sampling: rounds go on until the batch is full of groups with some but not all completions "
            "correct (Eq. 11), because the others have no gradient, and they become more frequent as the policy learns."
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
            "The rollout becomes `dynamic_batch`, and what it kept decides. With fewer groups than minibatches (of all "
            "processes) there is no update in this step; with none at all the run ends, with exit code 1 if it has "
            "never made an update."
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
            "Of the two mixtures each completion takes the one of smaller magnitude, which damps the swings of both."
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
            "paper's response utilization (Eq. 10) and the share of SA_new are logged."
        ),
        "imports a1eacb": "`deciding_part` names what is coded, `extract_answer` tells a wrong answer from none.",
    },
    "ppo.py": {
        "Args 1a9fd4": (
            "One completion for each of more prompts: the critic gives the baseline, so a prompt needs no group."
        ),
        "Args 99ff2c": "Four updates a rollout: with one the ratio is 1 and no clip acts.",
        "Args a2360e": (
            "No KL, so no reference model, because the default reward is a rule; a learned reward needs one "
            "(`--kl_coef`)."
        ),
        "Args dee42c": (
            "The options of the critic, of GAE, of the KL in the reward, of the penalty objective, of the controllers "
            "and of a learned reward. The epsilon is now added to the variance of all tokens."
        ),
        "ValueHead 5b40aa": (
            "The head starts at zero, so that the first advantages come from the rewards alone, and computes in "
            "float32, because bfloat16 has too few digits for a value that is fitted by regression."
        ),
        "Critic 41db29": "The value of every token from the states of a backbone, the policy's or one of its own.",
        "ActorCritic c05094": (
            "Accelerate (DDP, FSDP2, DeepSpeed) wraps one module. The value of a token comes from the state before it, "
            "as its log-prob does: a baseline must not have seen the action."
        ),
        "load_critic 9de9b2": (
            "A separate critic starts as a copy of the policy's backbone or as a trained reward model; a shared one is "
            "a head on the policy."
        ),
        "shape_rewards b3ba5a": (
            "The reward of a completion stands on its last token, less `--missing_eos_penalty` if it was cut off. With "
            "`--kl_coef` each token also pays for its log-ratio to the reference: GRPO has the KL in the loss, PPO in "
            "the reward, unless `--kl_in loss`."
        ),
        "compute_advantages 54e657": (
            "GAE (arXiv 1506.02438, Eq. 16) in place of the group: an advantage for each token, and the returns that "
            "the critic is trained on."
        ),
        "gae 909fff": "The sum, from the last token to the first. Nothing follows the last one: there an episode ends.",
        "policy_loss dfadc0": (
            "Eq. 7 is GRPO's clipped objective; Eq. 8 has a penalty on KL(old, new) in its place. The coefficients are "
            "arguments, since controllers move them."
        ),
        "value_loss 9fcd25": (
            "Two squared errors, of the value and of the value held within `--value_clip` of its old one. The larger "
            "one counts, so a value gains nothing by moving farther than that in one rollout."
        ),
        "token_weights da0546": "PPO's expectation is over time steps (Eq. 7): all tokens of a step weigh the same.",
        "Coefficients f00905": (
            "Two coefficients that may move once per rollout: that of the KL to the reference (arXiv 1909.08593, "
            "section 2.2), and that of the penalty on KL(old, new) (section 4). A resumed run needs them."
        ),
        "assign_advantages 76d1de": (
            "GRPO knows its advantages when the rewards are there. Here they need the old critic's values and the old "
            "policy's log-probs, from a forward over the whole rollout before the first update. The advantages are "
            "then whitened over all tokens of the rollout, on all processes."
        ),
        "update 0d314d": (
            "Policy and critic take one step together. The critic may train alone at first (`--critic_warmup_steps`), "
            "and a minibatch whose KL is past `--target_kl` ends the updates of this rollout."
        ),
        "clip_gradients 9f0ebe": (
            "A separate critic is clipped by its own norm, because its gradients have another size and would shrink "
            "the policy's. With a shared one there is one norm."
        ),
        "add_policy_change c97ca6": (
            "How far all updates of this rollout together have moved the policy, KL(old, new), which decides how the "
            "penalty moves (section 4)."
        ),
        "check_own_args 10e989": "Options that cannot work together are refused before a model is loaded.",
        "main 4a8b90": (
            "The critic is loaded beside the policy, with a learning rate of its own; a learned reward may take the "
            "place of the rules."
        ),
        "main b530df": (
            "The advantages move into `update`, because they need the old values. The rates of both models and the "
            "coefficients are set and logged in each step."
        ),
        "main 195454": "The critic's memory is freed with the rest.",
        "imports 390b75": "For the critic, the learned reward and the whitening.",
    },
    "reward_model.py": {
        "Args c1c6bc": (
            "Nothing is sampled, so the base class is `RunArgs`, which has no options of sampling. A step counts "
            "pairs, and the default is three passes over them."
        ),
        "Args 716c63": "No `--micro_batch_tokens`: sorted by length, a fixed number of pairs has little padding.",
        **PAIR_STEP,
        "Args 0e6b79": "Nothing is sampled. The learning rate is a preset for the small model.",
        "Args c38767": (
            "The loss has one option, which holds the scores around 0 (arXiv 2312.09244). An evaluation is cheap, so "
            "it comes more often."
        ),
        "RewardModel 9bc4cf": (
            "The score is read at the last token of the completion, its end, where the model has seen everything."
        ),
        "load_reward_model 7fe329": (
            "A classifier with one label, so that transformers, TRL and ppo.py load what is saved. A causal language "
            "model gets a head of zeros, with which the loss starts at ln 2; a classifier keeps its own."
        ),
        "reward_loss 6bd774": (
            "Bradley-Terry: the difference of two scores is the log-odds that the first completion is preferred."
        ),
        "pair_losses cc7c5d": "The scores of both completions of each pair come from one forward.",
        "main f195a9": "A loop over steps of pairs, with an evaluation on held-out pairs; nothing is sampled.",
        "imports 26c496": "The loading of pairs and of classifiers in place of sampling and rewards.",
        "rollout b45282": "Nothing is sampled.",
        "compute_rewards 0738c8": "Nothing is scored by rules: this model is to become the reward.",
        "evaluate a53faf": "`evaluate_pairs` takes its place.",
    },
    "dpo.py": {
        "Args 82caa2": (
            "A step counts pairs. Given pairs that are longer than `--max_length` are cut, from the start of the "
            "prompt first; to evaluate by sampling as well, `--eval_dataset` names prompts."
        ),
        "Args 54e25e": "A step is one update: no minibatches.",
        **PAIR_STEP,
        "Args 601cac": (
            "The options of the pairs that a round samples. No `--micro_batch_tokens`: sorted by length, a fixed "
            "number of pairs has little padding."
        ),
        "Args 9e5f53": (
            "The options of the loss. `beta` is the weight of the KL penalty from which the loss is derived; the loss "
            "itself has no KL term."
        ),
        "Round 1f5dd5": "A resumed run needs the pairs of its round: the policy that sampled them is gone.",
        "make_pairs ec20f0": (
            "The best against the worst completion of a prompt, by their rewards. Completions that were cut off are "
            "left out, and a prompt whose completions have one and the same reward gives no pair."
        ),
        "preference_row 8457e1": "The pairs are written in TRL's format, to be used again.",
        "with_reference 5a6f4a": (
            "The reference is the policy before the round, so its log-probs are computed once and no second model is "
            "kept."
        ),
        "preference_loss cf57e6": (
            "Eq. 7 and its relatives, from log-probs that are sums over a completion. A mean over its tokens would be "
            "another model of preference."
        ),
        "pair_losses 746ba9": (
            "Both completions of each pair are in one forward, and both log-probs are logged: the margin also grows "
            "when both fall."
        ),
        "evaluate_both e18302": "On held-out pairs where pairs are given, and by sampling where there are prompts.",
        "load_data 022a80": "A dataset with columns of pairs is trained on as it is; of prompts, pairs are made.",
        "check_loss 7cc355": "Options without an effect on the loss are refused, and one sample for a pair.",
        "main ab9aa9": (
            "Rounds in place of rollouts: pairs are made or taken once, with the reference's log-probs, and then "
            "trained on for many steps."
        ),
        "imports aad42d": "The loading and the batches of pairs in place of groups and masks of the loss.",
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
        own, used, gone, last = sentences.get(script, {}), set(), [], None
        removed, added, _ = same_text.changes(same_text.bare(grpo), same_text.bare(sources[script]))
        texts, originals = same_text.texts(sources[script]), same_text.texts(grpo)
        same = ", ".join(f"`{name}`" for name in texts if texts[name] == originals.get(name) and name != "If")
        counts = f"{removed} lines removed, {added} added. Word for word as in grpo.py: {same or 'no function'}."
        page += [f"## {script}\n", textwrap.fill(paper, 120) + "\n", textwrap.fill(counts, 120) + "\n"]
        for place, key, lines in hunks(grpo, sources[script]):
            if place not in places(sources[script]):
                gone.append(f"- `{place}`: {own.get(key, '')}")
            else:
                if place != last:
                    page.append(f"### {script}: {place}\n")
                page += [textwrap.fill(own.get(key, ""), 120), "\n```diff", *lines, "```\n"]
            last = place
            used.add(key)
            if key not in own:
                say = "say what the paper changes there and why, in SENTENCES of docs/diffs.py under this key:"
                found.append("\n    ".join([f'{script}: no sentence for "{key}"; {say}', *lines]))
        if gone:
            page += [f"### Gone from {script}\n", *gone, ""]
        for key in own.keys() - used:
            say = "the code changed or is gone; if the sentence still fits, give it the hunk's new key, else remove it:"
            found.append(f'{script}: no hunk for the sentence "{key}" in docs/diffs.py; {say}\n    {own[key]}')
    found += [f"{script}: has sentences and no line in PAPERS of docs/diffs.py" for script in sentences.keys() - papers]
    return "\n".join(page).rstrip() + "\n", found


def main(arguments):
    page, found = build(same_text.load())
    if arguments == ["--write"] and not found:
        PAGE.write_text(page, encoding="utf-8", newline="\n")
    elif arguments not in ([], ["--write"]):
        raise SystemExit(__doc__)
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
        found.append("docs/diffs.md is not what the scripts say: python docs/diffs.py --write")
    print("\n".join(found) or "docs/diffs.md is fresh")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
