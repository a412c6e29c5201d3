"""What a script needs to be one of the family, beside itself, its page, its test and its file of settings: an entry.

A script is found by its presence: a file beside grpo.py that has a `class Args`. `python tools/refresh.py` names what
its entry lacks. The suites run over it by its `kind`, without any list.
"""

import re
from dataclasses import dataclass, field

EQUATIONS = {  # the left side of an equation in a docstring, and the functions that compute it
    "J": "policy_loss token_weights",
    "KL_it": "policy_loss",
    "A_i": "compute_advantages",
    "R_i": "compute_rewards overlong_penalty",
    "s_i": "policy_loss",
}


@dataclass
class Entry:
    paper: str = ""  # what it is about, with its link: the first paragraph in docs/diffs.md
    kind: str = "groups"  # of its advantages: `groups`, `critic`; `pairs` has none, and options of its own
    column: tuple = ()  # in docs/algorithms.md, a cell for each of ROWS; a missing row of the READMEs is made of it
    budget: tuple = (60, 120, 20)  # most lines removed, added, and hunks against grpo.py, without help texts
    # {function with another text than grpo.py's: (why, most lines removed and added together)}
    differs: dict = field(default_factory=dict)
    equations: dict = field(default_factory=dict)  # those that EQUATIONS does not have
    inert: dict = field(default_factory=dict)  # {option of grpo.py that changes nothing here: why it is not refused}
    results: dict = field(default_factory=dict)  # {name of the files: command}, if not the bare command alone
    settings: bool = True  # the paper has settings, in configs/<script>-paper.yaml


ROWS = ("problem it addresses", "models", "sampling", "reward", "value and return", "advantage", "KL", "ratio", "clip",
        "weights", "default sizes")  # fmt: skip
FAMILY = {
    "grpo.py": Entry(
        column=(
            "the critic is a second model that must be accurate before it helps",
            "policy: trained; reference: frozen",
            "G per prompt",
            "any",
            "none",
            "(R - mean) / std of the group",
            "in the loss: k3, current policy against reference, 0.04",
            "token",
            "0.2 / 0.2",
            "mean over rows of the mean over tokens",
            "32 x 8, one update",
        ),
        budget=(0, 0, 0),
    ),
    "dr_grpo.py": Entry(
        paper="Dr. GRPO ([arXiv 2503.20783](https://arxiv.org/abs/2503.20783)) takes two divisions out of GRPO, by a "
        "completion's length and by the group's standard deviation, because both bias what is learned.",
        column=(
            "GRPO divides by length and deviation, and so favours long wrong answers and lopsided questions",
            "policy: trained",
            "G per prompt",
            "any; truncated: 0",
            "none",
            "R - mean",
            "none",
            "token",
            "0.2 / 0.2",
            "1 / max_new_tokens / rows",
            "32 x 8, 4 updates",
        ),
        budget=(15, 15, 12),
        differs={
            "compute_rewards": ("truncated rows score 0", 4),
            "token_weights": ("a constant in place of the length", 6),
            "main": ("its name, and the loss mask without truncated rows", 5),
        },
    ),
    "dapo.py": Entry(
        paper="DAPO ([arXiv 2503.14476](https://arxiv.org/abs/2503.14476)) keeps entropy up, every group informative "
        "and long completions in check: clip-higher, dynamic sampling, a token mean, and overlong reward shaping.",
        column=(
            "long reasoning: the entropy falls, groups agree, answers are cut off",
            "policy: trained",
            "until the batch is full of groups with 0 < correct < G",
            "accuracy +1 / -1, soft overlong punishment",
            "none",
            "as GRPO",
            "none",
            "token",
            "0.2 / 0.28",
            "1 / tokens of the optimizer step",
            "32 x 8, 4 updates",
        ),
        budget=(60, 160, 25),
        differs={
            "compute_rewards": ("+1/-1", 8),
            "token_weights": ("one weight for every token", 10),
            "main": ("its name, checks of its options, and dynamic sampling", 60),
        },
        equations={"over": "dynamic_batch"},
    ),
    "gspo.py": Entry(
        paper="GSPO ([arXiv 2507.18071](https://arxiv.org/abs/2507.18071)) has one importance ratio for a whole "
        "completion, because that is what the reward judges.",
        column=(
            "the reward judges completions, but the ratio corrects tokens",
            "policy: trained",
            "G per prompt",
            "any",
            "none",
            "as GRPO",
            "none",
            "sequence, length-normalised",
            "3e-4 / 4e-4",
            "mean over rows",
            "32 x 8, 4 updates",
        ),
        differs={"policy_loss": ("the ratio is that of the row", 28), "main": ("its name", 2)},
        equations={"s_it": "policy_loss"},
    ),
    "dcpo.py": Entry(
        paper="DCPO ([arXiv 2509.02333](https://arxiv.org/abs/2509.02333)) gives each token clip bounds by its own "
        "probability, and each prompt an advantage that remembers its earlier visits.",
        column=(
            "a fixed clip holds rare tokens back, and groups that agree are wasted",
            "policy: trained; a table of statistics",
            "G per prompt",
            "accuracy 1 / 0 / -1",
            "none",
            "(R - mean) / std of the group and of all visits of the prompt, mixed",
            "none",
            "token",
            "per token, by its old probability; cap 10",
            "sum over the group of the mean over tokens, mean over prompts",
            "32 x 8, 4 updates",
        ),
        differs={
            "compute_rewards": ("-1 without an answer", 3),
            "compute_advantages": ("smoothed by the prompt's history", 14),
            "policy_loss": ("bounds of each token, one cap", 22),
            "token_weights": ("the sum over a group", 4),
            "main": ("its name, checks of its options, and the history", 22),
        },
        equations={"lo(q)": "clip_bounds", "SA_new": "smoothed_advantages compute_advantages"},
        inert={"dual_clip": "acts with --no_dynamic_clip; else --max_ratio is the cap, for both signs"},
    ),
    "ppo.py": Entry(
        paper="PPO ([arXiv 1707.06347](https://arxiv.org/abs/1707.06347)) is older than GRPO, which is PPO without its "
        "critic. Read from GRPO, a second model predicts the reward at every token, and the advantage is measured "
        "against that prediction.",
        kind="critic",
        column=(
            "a step that is large and still safe, by first derivatives alone; an advantage for each token",
            "policy: trained; critic: trained; (reward model), (reference): frozen",
            "1 per prompt",
            "any, or a reward model",
            "values by the critic; return = A + old value, the critic's target",
            "GAE per token from a critic, whitened over the rollout",
            "none; if asked in the reward (k1, old policy against reference), in the loss (k3, current policy against "
            "reference), or in place of the clip (old policy against current)",
            "token",
            "0.2 / 0.2; values 0.2",
            "1 / tokens of the optimizer step",
            "256 x 1, 4 updates",
        ),
        budget=None,
        differs={
            "compute_advantages": ("GAE in place of the group", 40),
            "policy_loss": ("Eq. 8 too, and coefficients that controllers move", 42),
            "token_weights": ("one weight for every token", 8),
            "update": ("advantages here, the critic, target_kl", 66),
            "main": ("its name, checks, the critic and the controllers", 44),
        },
        equations={
            "R_t": "shape_rewards",
            "delta_t": "compute_advantages gae",
            "A_t": "compute_advantages gae",
            "min(r_t": "policy_loss",
        },
        results={
            "ppo": "ppo.py",
            "reward_model": "reward_model.py",
            "ppo-kl": "ppo.py {reward_model} --kl_coef 0.05 --gae_lambda 0.95",
            "ppo-no_kl": "ppo.py {reward_model}",
            "ppo-critic": "ppo.py {reward_model} {critic} --kl_coef 0.05 --gae_lambda 0.95 --max_steps 25",
        },
    ),
    "reward_model.py": Entry(
        paper="A reward model ([arXiv 1706.03741](https://arxiv.org/abs/1706.03741)) is trained on given pairs, "
        "without any sampling. It shares with grpo.py only what runs the steps.",
        kind="pairs",
        budget=None,
        differs={"main": ("steps over given pairs, no completions; another model is saved", 84)},
        equations={"L": "reward_loss"},
        settings=False,
    ),
    "dpo.py": Entry(
        paper="DPO ([arXiv 2305.18290](https://arxiv.org/abs/2305.18290)) trains on pairs of completions by their "
        "log-probs alone. From prompts it samples the pairs itself, by the rollout and the rewards of grpo.py.",
        kind="pairs",
        column=(
            "preferences, without a reward model and without sampling in the updates",
            "policy: trained; reference: its start, log-probs precomputed",
            "8 per prompt in each round, best against worst; none for given pairs",
            "any, for its own pairs",
            "none",
            "none: preference pairs",
            "none: it is in the closed form, by beta",
            "summed log-ratio to the reference",
            "none",
            "1 per pair, tokens summed",
            "32 pairs per step, one pass",
        ),
        budget=None,
        differs={
            "main": ("rounds of pairs in place of rollouts", 119),
            "pair_losses": ("log-probs against the reference in place of scores", 18),
            "pair_batch": ("each prompt once, and the log-probs of the reference", 22),
        },
        equations={
            "h": "preference_loss",
            "sigmoid": "preference_loss",
            "with": "preference_loss",
            "robust": "preference_loss",
            "ipo": "preference_loss",
        },
        results={
            "dpo": "dpo.py --rounds 4",
            "dpo-pairs": "dpo.py --dataset common/tiny/pairs --eval_dataset embedded",
            "dpo-nll": "dpo.py --dataset common/tiny/pairs --eval_dataset embedded --nll_coef 1",
        },
        settings=False,
    ),
}

# What a script changes in grpo.py, and why: the sentences of docs/side_by_side.html, and of docs/diffs.md, which has
# the siblings alone. `python tools/refresh.py` prints the key of a hunk that has none.

# what reward_model.py and dpo.py change alike
PAIR_STEP = {
    "update_pairs": (
        "One optimizer step on a number of pairs. The loss is a mean over pairs, so that no token needs a weight, and "
        "how the pairs are split changes nothing."
    ),
    "evaluate_pairs": (
        "Held-out pairs are measured like those of a step. Processes that have none left get a copy, which is not "
        "counted."
    ),
    "compute_advantages": "There are no advantages: a pair says itself which completion is the better one.",
    "policy_loss": "No ratio and no clip: the loss does not correct for an old policy that sampled the pairs.",
    "token_weights": "The loss is that of a pair, and each pair of a step weighs the same.",
    "update": "`update_pairs` takes its place.",
    "spread_pairs": (
        "Pairs of about the same length share a forward, and each process has as many forwards as the others; what "
        "fills up the last one is marked."
    ),
    "pair_metrics": "There is no rollout to measure: the lengths are those of the given completions.",
}
# what ppo.py and reward_model.py do alike with a classifier of one output
CLASSIFIER = {
    "load_classifier": (
        "A model with a scalar head instead of a vocabulary. It reads its score at the last token that is not padding, "
        "so the token that ends a completion must not be the one that pads."
    ),
    "reads_last_token": (
        "A classifier that looks elsewhere, as BERT does at the first token, is found by gradients, for any "
        "architecture."
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
        "Args 3c2cd1": "The help names the released script's 0.95; the default is that of all scripts.",
        "Args 185cd9": "The released code's `ignore_no_eos`, an option that is off.",
        "compute_rewards cdf296": (
            "A truncated completion scores 0, as in the released code: the whole weighted sum is set to 0, so that no "
            "part of a reward is earned by running into the cap."
        ),
        "token_weights 2fd4c6": (
            "A constant of the run takes the place of the row's length (Listing 1). Divided by its length, a long "
            "wrong completion is pushed down less per token than a short one, and wrong answers grow longer."
        ),
        "main 423eb7": "The name of the run.",
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
        "Args d74806": "The help names the paper's 20 steps; the default is that of all scripts.",
        "Args 06f30f": (
            "Clip-higher: more room above than below, so that unlikely tokens can grow and entropy lasts (Section 3.1)."
        ),
        "Args a2360e": (
            "No KL, so no reference model: a policy that learns to reason at length has to leave its start (Section "
            "2.3)."
        ),
        "Args c0058a": "The options of overlong reward shaping, of dynamic sampling, and of the token mean.",
        "compute_rewards 40c581": (
            "What decides correctness is +1 or -1 (Eq. 7), the scale on which the overlong penalty of at most 1 is "
            "meant; `correct` stays 1 or 0."
        ),
        "overlong_penalty": (
            "A completion that comes near the cap loses up to 1, more with each token, so that the policy learns to "
            "stop before it is cut off (Eq. 13)."
        ),
        "dynamic_batch": (
            "Dynamic sampling: rounds go on until the batch is full of groups with some but not all completions "
            "correct (Eq. 11), because the others have no gradient, and they become more frequent as the policy learns."
        ),
        "pack_group": "A kept group as it is sent to the process that trains on it: without padding.",
        "unpack_groups": "The batch of the groups that this process got, with the columns of a rollout.",
        "sample_round": (
            "A round of it: grpo.py's rollout and rewards, then the penalty, and which groups are worth training on."
        ),
        "token_weights aacb87": (
            "Every token of the optimizer step has one weight, because under a mean over rows each token of a long "
            "completion counts less (Section 3.3); `group` is Eq. 8 as printed."
        ),
        "main 667f9a": (
            "Options that cannot work are refused before a model is loaded; and gold answers are needed whatever the "
            "reward is, as long as accuracy decides which groups are kept."
        ),
        "main 308da4": "Which prompts a process samples is now the matter of `dynamic_batch`.",
        "main edcf7d": (
            "The rollout becomes `dynamic_batch`, and what it kept decides. With fewer groups than minibatches (of all "
            "processes) there is no update in this step; with none at all the run ends, with exit code 1 if it has "
            "never made an update."
        ),
        "imports 8c8df5": (
            "For binding the model and the rewards, for collecting the kept groups of all processes, for Eq. 7 and for "
            "Eq. 13."
        ),
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
        "policy_loss f2bca0": (
            "One ratio s for a row, the exponential of its mean log-ratio (Eq. 7), because the reward judges the row "
            "and the ratio of one token is noise; the clip and its metrics follow s, and each token carries its row's "
            "loss, so that GRPO's weights give Eq. 5."
        ),
        "main 4b95a3": "The name of the run.",
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
        "History": (
            "What the advantage remembers of each prompt, the same on all processes and part of the checkpoint."
        ),
        "standardize": (
            "GRPO's standardization with the statistics as arguments, since they are now those of the group (A_new) or "
            "of all visits (A_tot)."
        ),
        "smoothed_advantages": (
            "Smooth advantage standardization: the group is pooled with the prompt's earlier visits (Eq. 29-30) and "
            "standardized both ways, and the two are mixed by the number of visits, so that a single unusual group "
            "weighs less and one that agrees still trains."
        ),
        "compute_advantages 23d15c": (
            "Of the two mixtures each completion takes the one of smaller magnitude, which damps the swings of both."
        ),
        "clip_bounds": (
            "The bounds of each token by its old probability q, from |r - 1| r q = eps (Eq. 4, 27), because a fixed "
            "band keeps an unlikely token at nearly its old probability."
        ),
        "policy_loss 703e0b": (
            "The clip and its metrics follow the bounds of each token, and one cap holds the ratio for both signs, "
            "because no bound stops one that grows under a negative advantage."
        ),
        "token_weights 5033b1": (
            "The sum over a group of its rows' token means, G times GRPO's loss, as Eq. 8 has it; the mean over "
            "prompts is ours."
        ),
        "main 5797ce": "Options that cannot work are refused before a model is loaded; and the run, with the metric "
        "that is 0 where no completion has an advantage.",
        "main 5d7df7": "The history is saved and restored with the rest.",
        "main 8ac395": (
            "The history is read for this visit's advantages and written after them, by the prompts of the draw; the "
            "paper's response utilization (Eq. 10) and the share of SA_new are logged."
        ),
        "imports 9109bb": "`deciding_part` names what is coded, `extract_answer` tells a wrong answer from none.",
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
        "ValueHead": (
            "The head starts at zero, so that the first advantages come from the rewards alone, and computes in "
            "float32, because bfloat16 has too few digits for a value that is fitted by regression."
        ),
        "Critic": "The value of every token from the states of a backbone, the policy's or one of its own.",
        "ActorCritic": (
            "Accelerate (DDP, FSDP2, DeepSpeed) wraps one module. The value of a token comes from the state before it, "
            "as its log-prob does: a baseline must not have seen the action."
        ),
        "load_critic": (
            "A separate critic starts as a copy of the policy's backbone or as a trained reward model; a shared one is "
            "a head on the policy."
        ),
        "load_scorer": "A reward model as the start of a critic has to read the policy's token ids.",
        "learned_reward": (
            "A reward model in place of rules. It reads text by its own tokenizer and template, so it may be of "
            "another family than the policy, and it scores a completion as it was trained to: at the end of the turn."
        ),
        **CLASSIFIER,
        "shape_rewards": (
            "The reward of a completion stands on its last token, less `--missing_eos_penalty` if it was cut off. With "
            "`--kl_coef` each token also pays for its log-ratio to the reference: GRPO has the KL in the loss, PPO in "
            "the reward, unless `--kl_in loss`."
        ),
        "compute_advantages 92504e": (
            "GAE (arXiv 1506.02438, Eq. 16) in place of the group: an advantage for each token, and the returns that "
            "the critic is trained on."
        ),
        "gae": "The sum, from the last token to the first. Nothing follows the last one: there an episode ends.",
        "policy_loss 5f225c": (
            "Eq. 7 is GRPO's clipped objective; Eq. 8 has a penalty on KL(old, new) in its place. The coefficients are "
            "arguments, since controllers move them."
        ),
        "value_loss": (
            "Two squared errors, of the value and of the value held within `--value_clip` of its old one. The larger "
            "one counts, so a value gains nothing by moving farther than that in one rollout."
        ),
        "token_weights da0546": "PPO's expectation is over time steps (Eq. 7): all tokens of a step weigh the same.",
        "Coefficients": (
            "Two coefficients that may move once per rollout: that of the KL to the reference (arXiv 1909.08593, "
            "section 2.2), and that of the penalty on KL(old, new) (section 4). A resumed run needs them."
        ),
        "assign_advantages": (
            "GRPO knows its advantages when the rewards are there. Here they need the old critic's values and the old "
            "policy's log-probs, from a forward over the whole rollout before the first update. The advantages are "
            "then whitened over all tokens of the rollout, on all processes."
        ),
        "update 8b90d2": (
            "Policy and critic take one step together. The critic may train alone at first (`--critic_warmup_steps`), "
            "and a minibatch whose KL is past `--target_kl` ends the updates of this rollout."
        ),
        "clip_gradients": (
            "A separate critic is clipped by its own norm, because its gradients have another size and would shrink "
            "the policy's. With a shared one there is one norm."
        ),
        "add_policy_change": (
            "How far all updates of this rollout together have moved the policy, KL(old, new), which decides how the "
            "penalty moves (section 4)."
        ),
        "check_own_args": "Options that cannot work together are refused before a model is loaded.",
        "main 67949a": (
            "The critic is loaded beside the policy, with a learning rate of its own; a learned reward may take the "
            "place of the rules."
        ),
        "main 49f397": (
            "The advantages move into `update`, because they need the old values. The rates of both models and the "
            "coefficients are set and logged in each step."
        ),
        "main 195454": "The critic's memory is freed with the rest.",
        "imports eafc59": "For the critic, the learned reward and the whitening.",
    },
    "reward_model.py": {
        "Args e02aaf": (
            "Nothing is sampled, so the base class is `RunArgs`, which has no options of sampling. A step counts "
            "pairs, and the default is three passes over them."
        ),
        "Args 716c63": "No `--micro_batch_tokens`: sorted by length, a fixed number of pairs has little padding.",
        **PAIR_STEP,
        **CLASSIFIER,
        "Args 453d8c": (
            "Nothing is sampled. The learning rate is a preset for the small model, and its schedule runs over the "
            "passes, which may end before `--max_steps`."
        ),
        "Args 48a045": "The loss has one option, which holds the scores around 0 (arXiv 2312.09244).",
        "Args 0faa34": (
            "No ratio, no KL and no advantage, so none of their options. `RunArgs` has none of an evaluation either, "
            "since most of those are of sampling. A forward has to hold both completions of a pair."
        ),
        "pair_batch": "Both completions of a pair are rows of one forward.",
        "RewardModel": (
            "The score is read at the last token of the completion, its end, where the model has seen everything."
        ),
        "load_reward_model": (
            "A classifier with one label, so that transformers, TRL and ppo.py load what is saved. A causal language "
            "model gets a head of zeros, with which the loss starts at ln 2; a classifier keeps its own."
        ),
        "reward_loss": (
            "Bradley-Terry: the difference of two scores is the log-odds that the first completion is preferred."
        ),
        "pair_losses": "The scores of both completions of each pair come from one forward.",
        "main d217f5": "A loop over steps of pairs, with an evaluation on held-out pairs; nothing is sampled.",
        "imports d867db": "The loading of pairs and of classifiers in place of sampling and rewards.",
        "rollout": "Nothing is sampled.",
        "compute_rewards": "Nothing is scored by rules: this model is to become the reward.",
        "evaluate": "`evaluate_pairs` takes its place.",
    },
    "dpo.py": {
        "Args 6de989": (
            "A step counts pairs. Given pairs that are longer than `--max_length` are cut, from the start of the "
            "prompt first; to evaluate by sampling as well, `--eval_dataset` names prompts."
        ),
        "Args 54e25e": "A step is one update: no minibatches.",
        **PAIR_STEP,
        "Args 601cac": (
            "The options of the pairs that a round samples. No `--micro_batch_tokens`: sorted by length, a fixed "
            "number of pairs has little padding."
        ),
        "Args ea6004": (
            "The defaults of all scripts with another help: how many pairs a round will give is not known before, so "
            "a schedule over own pairs needs `--max_steps`; and the paper warms up over 150 steps."
        ),
        "Args c27773": (
            "The options of the loss. `beta` is the weight of the KL penalty from which the loss is derived; the loss "
            "itself has no KL term. A forward has to hold both completions of a pair."
        ),
        "holds_pairs": "`--dataset` may be pairs to train on, or prompts to make pairs from.",
        "pair_batch": (
            "Both completions of a pair are rows of one forward and have the prompt in common, which is computed once. "
            "The reference's log-probs come with them."
        ),
        "last_step": (
            "How long a run is follows from the pairs and the passes over them, and a schedule of the learning rate "
            "has to know it."
        ),
        "Round": "A resumed run needs the pairs of its round: the policy that sampled them is gone.",
        "make_pairs": (
            "The best against the worst completion of a prompt, by their rewards. Completions that were cut off are "
            "left out, and a prompt whose completions have one and the same reward gives no pair."
        ),
        "preference_row": "The pairs are written in TRL's format, to be used again.",
        "with_reference": (
            "The reference is the policy before the round, so its log-probs are computed once and no second model is "
            "kept."
        ),
        "preference_loss": (
            "Eq. 7 and its relatives, from log-probs that are sums over a completion. A mean over its tokens would be "
            "another model of preference."
        ),
        "pair_losses": (
            "Both completions of each pair are in one forward, and both log-probs are logged: the margin also grows "
            "when both fall."
        ),
        "evaluate_both": "On held-out pairs where pairs are given, and by sampling where there are prompts.",
        "load_data": "A dataset with columns of pairs is trained on as it is; of prompts, pairs are made.",
        "check_loss": "Options without an effect on the loss are refused, and one sample for a pair.",
        "main e5401a": (
            "Rounds in place of rollouts: pairs are made or taken once, with the reference's log-probs, and then "
            "trained on for many steps."
        ),
        "imports 0c2c08": "The loading and the batches of pairs in place of groups and masks of the loss.",
    },
}


def found(tree):
    """{script: source} of the scripts that are there: those of the table in its order, then the others."""
    sources = {name: tree.read(name) for name in tree.glob("*.py")}
    scripts = [name for name, source in sources.items() if re.search(r"^class Args\b", source, re.MULTILINE)]
    order = list(FAMILY)
    return {n: sources[n] for n in sorted(scripts, key=lambda n: (order.index(n) if n in order else len(order), n))}


def entry(script):
    """Its entry; of a script that has none yet, one with nothing in it."""
    return FAMILY.get(script, Entry())


def names(tree, *kinds):
    """The scripts of these kinds, or all, without .py."""
    return [name.removesuffix(".py") for name in found(tree) if not kinds or entry(name).kind in kinds]
