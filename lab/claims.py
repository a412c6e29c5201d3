"""The pilot: the claims as they were measured first, with five seeds; registered.json has those that decide today.

RUNS has a command for each name. A claim has effects: each is the difference of a metric between two runs, seed by
seed, and the difference that the paper's claim lets one expect. `pilot.py` has the rules; docs/claims.md has their
history, which of them were changed after a run of the claim had ended, and what became of each claim.
"""

from dataclasses import dataclass

HARD = "--model_name_or_path embedded-hard --dataset embedded-hard --max_new_tokens 128 --learning_rate 1e-4"
HARD += " --num_minibatches 4 --kl_coef 0 --max_steps 80 --eval_every 40 --eval_top_p 1"
CLASSES = "--reward accuracy lab/by_class.py:easy lab/by_class.py:medium lab/by_class.py:hard"
CLASSES += " --reward_weights 1 0 0 0"
COIN = "--reward lab/random_rewards.py:coin --max_steps 60 --eval_every 30 --num_minibatches 8 --num_epochs 2"
MANY = "--num_minibatches 8 --num_epochs 2"
EIGHT_VISITS = "--max_steps 128 --eval_every 64"
# The longest gold answer of the hard task, in steps, has 63 tokens; a fifth of the cap is punished, as in the paper.
CAP = "--max_new_tokens 64 --overlong_cache 13 --max_steps 60 --eval_every 0 --eval_samples 16"
LADDER = f"dapo.py {HARD} {CAP}"
PATCHED, PATCHES = "lab/patched.py", "lab/patches"
ALL_GROUPS, ROW_MEAN = f"{PATCHES}/all_groups.py", f"{PATCHES}/row_mean.py"
STACKED = f"{PATCHES}/stacked_overlong.py"
RM = "--reward_model_path runs/claims/reward_model-seed{seed}/model --gae_lambda 0.95"
PAIRS = "dpo.py --dataset common/tiny/pairs --eval_dataset embedded --max_steps 30"
SWAPPED = f"{PATCHED} {PATCHES}/swapped_pairs.py {PAIRS}"

RUNS = {
    # All algorithms on the hard task: 256 completions a step, 20,480 in all
    "grpo": f"grpo.py {HARD} {CLASSES}",
    "dr_grpo": f"dr_grpo.py {HARD}",
    "gspo": f"gspo.py {HARD}",
    "dcpo": f"dcpo.py {HARD}",
    "ppo": f"ppo.py {HARD}",
    "dapo": f"dapo.py {HARD} --max_steps 50 --eval_every 25",  # some 1.7 rounds of 256 completions a step
    "dpo": f"dpo.py {HARD.replace(' --num_minibatches 4 --kl_coef 0 --max_steps 80 --eval_every 40', '')}"
    " --rounds 10 --pair_prompts 256",
    # critic
    "ppo-no_critic": f"ppo.py {HARD} --critic_learning_rate 1e-12",
    "ppo-lambda_0.95": f"ppo.py {HARD} --gae_lambda 0.95",
    "ppo-decoupled": f"ppo.py {HARD} --gae_lambda 0.95 --gae_lambda_critic 1",
    "ppo-not_whitened": f"ppo.py {HARD} --no_normalize_std",
    "ppo-no_value_clip": f"ppo.py {HARD} --value_clip 0",
    "ppo-warm_critic": f"ppo.py {HARD} --critic_warmup_steps 5",
    # the two changes of Dr. GRPO, each alone
    "grpo-no_std": f"grpo.py {HARD} {CLASSES} --no_normalize_std",
    "dr_grpo-std": f"dr_grpo.py {HARD} --normalize_std",
    # the gradient of the untrained model, by difficulty
    "gradient_share-std": "lab/gradient_share.py",
    "gradient_share-no_std": "lab/gradient_share.py --no_normalize_std",
    # clips
    **{
        f"{name}-{low}_{high}": f"grpo.py {HARD} {options} --clip_low {low} --clip_high {high}"
        for name, options in (("clip", MANY), ("coin", COIN))
        for low, high in ((0.2, 0.2), (0.2, 0.28), (0.1, 0.2), (1, 1000))
    },
    "coin-0.2_0.1": f"grpo.py {HARD} {COIN} --clip_low 0.2 --clip_high 0.1",
    # averages over tokens
    "grpo-token_mean": f"{PATCHED} {PATCHES}/token_mean.py grpo.py {HARD} {CLASSES}",
    "grpo-group_mean": f"{PATCHED} {PATCHES}/group_token_mean.py grpo.py {HARD} {CLASSES}",
    # DAPO's ladder, its rungs in the paper's order, and each rung taken out of the full one
    "ladder-1": f"{PATCHED} {ALL_GROUPS} {ROW_MEAN} {LADDER} --overlong none --clip_high 0.2",
    "ladder-2": f"{PATCHED} {ALL_GROUPS} {ROW_MEAN} {LADDER} --overlong filter --clip_high 0.2",
    "ladder-3": f"{PATCHED} {ALL_GROUPS} {ROW_MEAN} {LADDER} --overlong filter --clip_high 0.28",
    "ladder-4": f"{PATCHED} {ALL_GROUPS} {ROW_MEAN} {STACKED} {LADDER} --overlong filter --clip_high 0.28",
    "ladder-5": f"{PATCHED} {ALL_GROUPS} {STACKED} {LADDER} --overlong filter --clip_high 0.28",
    "ladder-6": f"{PATCHED} {STACKED} {LADDER} --overlong filter --clip_high 0.28",
    "ladder-6-no_filter": f"{LADDER} --overlong soft --clip_high 0.28",
    "ladder-6-no_punishment": f"{LADDER} --overlong filter --clip_high 0.28",
    "ladder-6-clip_0.2": f"{PATCHED} {STACKED} {LADDER} --overlong filter --clip_high 0.2",
    "ladder-6-row_mean": f"{PATCHED} {ROW_MEAN} {STACKED} {LADDER} --overlong filter --clip_high 0.28",
    # sequence ratios
    "grpo-16": f"grpo.py {HARD} --num_minibatches 16",
    "gspo-16": f"gspo.py {HARD} --num_minibatches 16",
    "grpo-noise": f"{PATCHED} {PATCHES}/noisy_old_logprobs.py grpo.py {HARD}",
    "gspo-noise": f"{PATCHED} {PATCHES}/noisy_old_logprobs.py gspo.py {HARD}",
    # DCPO and each of its changes taken out, over eight visits of each prompt
    "dcpo-8": f"dcpo.py {HARD} {EIGHT_VISITS}",
    "dcpo-8-fixed_clip": f"dcpo.py {HARD} {EIGHT_VISITS} --no_dynamic_clip --clip_low 0.2",
    "dcpo-8-no_smoothing": f"dcpo.py {HARD} {EIGHT_VISITS} --no_smooth_advantage",
    "dcpo-8-row_mean": f"dcpo.py {HARD} {EIGHT_VISITS} --no_only_token_mean",
    "grpo-8": f"grpo.py {HARD} {EIGHT_VISITS}",
    # KL estimators in the loss
    "kl-k1": f"grpo.py {HARD} --kl_coef 0.1 --kl_estimator k1",
    "kl-k2": f"grpo.py {HARD} --kl_coef 0.1 --kl_estimator k2",
    "kl-k3": f"grpo.py {HARD} --kl_coef 0.1 --kl_estimator k3",
    # a learned reward, on the first task
    "reward_model": "reward_model.py",
    **{f"learned-kl_{kl}": f"ppo.py {RM} --kl_coef {kl}" for kl in (0, 0.01, 0.05, 0.2)},
    # preference pairs, on the first task
    "pairs": PAIRS,
    "pairs-nll": f"{PAIRS} --nll_coef 1",
    "pairs-ipo": f"{PAIRS} --loss ipo",
    "pairs-once": "dpo.py --num_epochs 2",  # the pairs of the first round, for as many steps
    "pairs-rounds": "dpo.py --rounds 4",
    "pairs-swapped": SWAPPED,
    "pairs-swapped-smoothed": f"{SWAPPED} --label_smoothing 0.2",
    "pairs-swapped-robust": f"{SWAPPED} --label_smoothing 0.2 --loss robust",
    "pairs-swapped-ipo": f"{SWAPPED} --loss ipo",
    # what is there before: 64 samples of each problem of the test split, before and after
    "pass_at_64": f"grpo.py {HARD} --eval_every 0 --eval_samples 64 --eval_k 64",
}

ALL = ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo")  # the figure of all algorithms


@dataclass
class Effect:
    """The mean of `metric` in `run`, less that in `against` (None: itself), is at least (most) so much."""

    metric: str
    run: str
    against: str | None = None
    least: float | None = None
    most: float | None = None
    # late: the mean of the second half of the steps; end, start: the last value, the first; equal_completions: the mean
    # of the last quarter before the number of completions that the cheaper one of the runs has sampled at its end
    over: str = "late"
    decides: bool = True  # else it is only reported


@dataclass
class Claim:
    name: str
    title: str
    paper: str  # where it stands, and its number there
    effects: list[Effect]
    curves: tuple  # the metrics that are drawn, for these runs
    runs: tuple  # those that are drawn
    axes: tuple = ("step",)  # or "completions", those sampled until then: each metric is drawn over each of them
    first_seed: int = 0
    why: str = ""  # two sentences, written after the runs

    def needs(self):
        """The names of its runs: those that are drawn, and those that are compared."""
        compared = [name for effect in self.effects for name in (effect.run, effect.against) if name]
        return {*self.runs, *(name.removesuffix(":start") for name in compared)}


CLAIM_LIST = [
    Claim(
        "critic",
        "A group baseline in place of a critic costs nothing",
        "DeepSeekMath (2402.03300), Section 4.1: the critic goes, to save memory; a comparison with PPO is not printed",
        [
            Effect("eval/pass@1", "grpo", "ppo", least=-0.03, over="end"),
            Effect("value/explained_variance", "ppo", least=0.3, decides=False),
            Effect("eval/pass@1", "ppo", "ppo-no_critic", least=0.03, over="end", decides=False),
        ],
        ("reward/accuracy", "value/explained_variance"),
        ("grpo", "ppo", "ppo-no_critic"),
        why="PPO is ahead at equal completions, and about two thirds of its lead remain with a critic that does "
        "not learn (its rate is 1e-12); the rest may be the critic's work. The two also differ in what a step "
        "sees, 256 prompts once or 32 prompts eight times, and in their token weights and whitening; these "
        "runs do not tell which of them it is. Longer episodes were not tried.",
    ),
    Claim(
        "length",
        "GRPO's 1/length makes wrong answers longer",
        "Dr. GRPO (2503.20783), Fig. 5: wrong answers grow under GRPO, and hardly under Dr. GRPO",
        [
            Effect("completion/length_incorrect", "grpo", "dr_grpo-std", least=1.0),
            Effect("completion/length_incorrect", "grpo", "dr_grpo", least=1.0, decides=False),
            Effect("completion/length_incorrect", "grpo", "grpo-no_std", least=1.0, decides=False),
            Effect("eval/pass@1", "dr_grpo", "grpo", least=0.0, over="end", decides=False),
        ],
        ("completion/length_incorrect", "reward/accuracy"),
        ("grpo", "grpo-no_std", "dr_grpo-std", "dr_grpo"),
        why="By a rule that was changed with its first data (see the history of the rules); under the rule "
        "that stood before, it is inconclusive. The effect is that of the weights alone: both runs divide "
        "by the deviation. It comes in the first ten steps and then stays, some 3 % of the length. Wrong "
        "answers also grow under Dr. GRPO, unlike in the paper: perhaps they have little to gain here "
        "from words beyond their steps.",
    ),
    Claim(
        "deviation",
        "The standard deviation overweights easy and hard questions",
        "Dr. GRPO (2503.20783), Section 3.1: named a difficulty bias, without a figure",
        [
            Effect("share/per_reward_hard", "gradient_share-std", "gradient_share-no_std", least=0.0, over="end"),
            Effect("share/per_reward_easy", "gradient_share-std", "gradient_share-no_std", least=0.0, over="end"),
            *(
                Effect(f"share/{kind}_{name}", "gradient_share-std", "gradient_share-no_std", 0.0, None, "end", False)
                for kind in ("weight", "norm2")
                for name in ("easy", "hard")
            ),
            Effect("reward_part/hard", "grpo-no_std", "grpo", least=0.0, decides=False),
            Effect("reward_part/medium", "grpo-no_std", "grpo", least=0.0, decides=False),
        ],
        ("reward_part/medium", "reward_part/hard"),
        ("grpo", "grpo-no_std"),
        why="A group's weight is multiplied by 1 / std, so the sign is certain by construction; the size is what is "
        "measured: a fifth more weight for each unit of reward deviation on easy and hard questions than on medium "
        "ones. The accuracy that it costs or buys on medium and hard ones is inconclusive in 80 steps. The four "
        "rows of `share/weight_` and `share/norm2_`, which decide nothing, were added after seed 0 had run.",
    ),
    Claim(
        "clip_higher",
        "A higher upper clip keeps the entropy up",
        "DAPO (2503.14476), Fig. 2 and Table 1: AIME 36 to 38",
        [
            Effect("policy/entropy", "clip-0.2_0.28", "clip-0.2_0.2", least=0.0),
            Effect("policy/entropy", "clip-1_1000", "clip-0.2_0.2", least=0.0, decides=False),
            Effect("policy/entropy", "clip-0.1_0.2", "clip-0.2_0.2", least=0.0, decides=False),
            Effect("eval/pass@1", "clip-0.2_0.28", "clip-0.2_0.2", least=0.0, over="end", decides=False),
        ],
        ("policy/entropy", "reward/accuracy"),
        ("clip-0.2_0.2", "clip-0.2_0.28", "clip-0.1_0.2", "clip-1_1000"),
        why="The upper clip acts on few tokens, so 0.28 in place of 0.2 changes little. A tighter lower bound and "
        "no clip at all do keep entropy higher, and without a clip the accuracy is worse. Under random "
        "rewards, below, the same higher clip does more.",
    ),
    Claim(
        "clip_alone",
        "The clip moves the entropy even under random rewards",
        "2509.26114: a tighter lower clip raises it, a tighter upper one lowers it",
        [
            Effect("policy/entropy", "coin-0.1_0.2", "coin-0.2_0.2", least=0.0),
            Effect("policy/entropy", "coin-0.2_0.1", "coin-0.2_0.2", most=0.0),
            Effect("policy/entropy", "coin-0.2_0.28", "coin-0.2_0.2", least=0.0, decides=False),
            Effect("policy/entropy", "coin-1_1000", "coin-0.2_0.2", least=0.0, decides=False),
        ],
        ("policy/entropy", "policy/clip_fraction_low", "policy/clip_fraction_high"),
        ("coin-0.2_0.2", "coin-0.2_0.28", "coin-0.1_0.2", "coin-0.2_0.1", "coin-1_1000"),
        why="The rewards say nothing, so what moves the entropy is the noise of the updates and the clip. It "
        "rises at 0.2 / 0.2, more with the tighter lower bound or the higher upper one, most without a clip, "
        "and falls with the tighter upper one. Sixty steps of it cost accuracy: of the 0.34 at the start 0.13 "
        "is left at 0.2 / 0.2, and 0.01 without a clip. All seeds have the same tosses of the coin.",
    ),
    Claim(
        "token_mean",
        "The mean over tokens tames length",
        "DAPO (2503.14476), Fig. 4 and Table 1: AIME 41 to 42",
        [
            Effect("completion/length_incorrect", "grpo-token_mean", "grpo", most=-1.0),
            Effect("policy/entropy", "grpo-token_mean", "grpo", most=0.0, decides=False),
            Effect("completion/length_incorrect", "grpo-group_mean", "grpo", most=-1.0, decides=False),
            Effect("eval/pass@1", "grpo-token_mean", "grpo", least=0.0, over="end", decides=False),
        ],
        ("completion/length_incorrect", "policy/entropy", "reward/accuracy"),
        ("grpo", "grpo-token_mean", "grpo-group_mean"),
        why="Wrong answers are shorter under both means over tokens, by somewhat less than the one token that was asked"
        " for. Their entropy does not differ, and these answers have little room to ramble.",
    ),
    Claim(
        "overlong",
        "Filtering or punishing answers that are too long helps",
        "DAPO (2503.14476), Fig. 5 and Table 1: AIME 30 to 36 by the filter, 38 to 41 by the punishment",
        [
            Effect("eval/pass@1", "ladder-2", "ladder-1", least=0.0, over="end"),
            Effect("eval/pass@1", "ladder-4", "ladder-3", least=0.0, over="end"),
            Effect("completion/truncated", "ladder-2", "ladder-1", least=0.0, decides=False),
            Effect("completion/truncated", "ladder-4", "ladder-3", most=0.0, decides=False),
        ],
        ("completion/truncated", "completion/length", "reward/accuracy", "policy/entropy"),
        ("ladder-1", "ladder-2", "ladder-3", "ladder-4"),
        why="The filter takes 2 to 3 % of the rows out of the loss; what that does is inconclusive. The punishment "
        "begins at 51 tokens, which right answers to the longest sums need: completions shrink from 37 to 27 "
        "tokens, hardly any is cut off, and a tenth of the accuracy is lost. That happens without dynamic "
        "sampling, where groups that are all wrong differ by the punishment alone; with it (below, `ladder-6` "
        "against `ladder-6-no_punishment`) the cost is inconclusive.",
    ),
    Claim(
        "dynamic_sampling",
        "Dynamic sampling needs fewer steps",
        "DAPO (2503.14476), Fig. 3 and 6, Table 1: AIME 42 to 50",
        [
            Effect("eval/pass@1", "ladder-6", "ladder-5", least=0.0, over="end"),
            Effect("reward/accuracy", "ladder-6", "ladder-5", least=0.0, over="equal_completions", decides=False),
        ],
        ("reward/accuracy",),
        ("ladder-5", "ladder-6"),
        axes=("step", "completions"),
        why="Of two rounds a step the groups with right and wrong answers fill the batch, so a step samples twice "
        "as much. With equal steps it gains 0.18 of pass@1, with equal completions 0.04 of accuracy in "
        "training, so more data is most of it. Both runs have the soft punishment, which without dynamic "
        "sampling also trains on groups that are all wrong: a part of the gain may be that these are left "
        "out.",
    ),
    Claim(
        "ladder",
        "Each of DAPO's techniques adds to the others",
        "DAPO (2503.14476), Table 1: AIME 30, 36, 38, 41, 42, 50",
        [
            *(Effect("eval/pass@1", f"ladder-{i + 1}", f"ladder-{i}", least=0.0, over="end") for i in range(1, 6)),
            *(
                Effect("reward/accuracy", f"ladder-{i + 1}", f"ladder-{i}", least=0.0, decides=False)
                for i in range(1, 6)
            ),
            *(
                Effect("eval/pass@1", "ladder-6", f"ladder-6-{without}", least=0.0, over="end", decides=False)
                for without in ("no_filter", "no_punishment", "clip_0.2", "row_mean")
            ),
        ],
        ("reward/accuracy", "policy/entropy"),
        tuple(f"ladder-{i}" for i in range(1, 7)),
        why="The filter and clip-higher alone are inconclusive. The punishment costs 0.10 and the token mean 0.03 "
        "on top of it, and dynamic sampling, with twice the completions, gains 0.18: the last rung is the "
        "best one, the way to it is not, and at equal completions the third rung is ahead of the last by 0.06 "
        "in training. Taken out of the full one, neither the punishment nor the filter is missed; the other "
        "two of these runs have not been made yet. With five rungs and five seeds, one in three such ladders "
        "would show a rung that fails if none of them did anything; the two that fail here do so in training "
        "accuracy too.",
    ),
    Claim(
        "sequence_ratio",
        "Sequence ratios clip a hundred times more tokens, and learn better",
        "GSPO (2507.18071), Fig. 2: 0.15 of the tokens against 0.0013",
        [
            Effect("policy/clipped", "gspo", "grpo", least=0.05),
            Effect("eval/pass@1", "gspo", "grpo", least=0.0, over="end"),
            Effect("eval/pass@1", "gspo-16", "grpo-16", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "gspo-noise", "grpo-noise", least=0.0, over="end", decides=False),
        ],
        ("policy/clipped", "reward/accuracy", "policy/entropy"),
        ("grpo", "gspo", "grpo-16", "gspo-16", "grpo-noise", "gspo-noise"),
        why="GSPO clips 0.20 of its rows and GRPO 0.0009 of its tokens, close to the paper's figures, but it "
        "learns more slowly: with 4 and with 16 minibatches, and also with noise of 0.05 on the old "
        "log-probs, which a mean over the row was to bear better. The band is the paper's, 3e-4 and 4e-4, for "
        "completions of thousands of tokens; a mean of a few dozen log-ratios moves more. Other noise and "
        "other lengths were not tried.",
    ),
    Claim(
        "dcpo",
        "DCPO uses more of the responses and clips fewer tokens",
        "DCPO (2509.02333), Table 3: 28 % more responses, a tenth of the clipped tokens",
        [
            Effect("dcpo/response_utilization", "dcpo-8", "dcpo-8-no_smoothing", least=0.1),
            Effect("policy/token_clip_ratio", "dcpo-8", "dcpo-8-fixed_clip", most=0.0),
            Effect("eval/pass@1", "dcpo-8", "dcpo-8-no_smoothing", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "dcpo-8", "dcpo-8-fixed_clip", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "dcpo-8", "dcpo-8-row_mean", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "dcpo-8", "grpo-8", least=0.0, over="end", decides=False),
        ],
        ("dcpo/response_utilization", "policy/token_clip_ratio", "reward/accuracy"),
        ("dcpo-8", "dcpo-8-fixed_clip", "dcpo-8-no_smoothing", "dcpo-8-row_mean", "grpo-8"),
        why="Smoothing lets 0.99 of the responses train in place of 0.69, which is near certain by construction "
        "once a prompt has been answered both ways, and it buys 0.05 of pass@1. The bounds of each token clip "
        "0.0003 of the tokens against 0.0011 under GRPO's clip, a quarter and not a tenth, and what that buys "
        "is inconclusive. The third change is the mean over rows times the group size: under AdamW "
        "only the clipped gradient norm tells them apart, by 0.01.",
    ),
    Claim(
        "kl_estimator",
        "In a loss, the KLs that k2 and k3 log of themselves stay below the one that k1 logs",
        "papers on KL estimators in RL (2506.09477): the gradient of k1 has mean zero, that of k2 is KL(pi, ref)'s",
        [
            Effect("policy/kl_ref", "kl-k2", "kl-k1", most=0.0),
            Effect("policy/kl_ref", "kl-k3", "kl-k1", most=0.0),
            Effect("eval/pass@1", "kl-k1", "grpo", least=-0.03, over="end", decides=False),
        ],
        ("policy/kl_ref", "reward/accuracy"),
        ("kl-k1", "kl-k2", "kl-k3", "grpo"),
        why="Each run logs the KL by the estimator of its own loss (on fresh samples k1 and k3 are unbiased, k2 is "
        "not), and the run without a penalty logs none. So these numbers do not say whether k1 does anything, nor "
        "which KL is the smallest; no model was kept from which one estimator could compute all of them. What k1, k2 "
        "and k3 do in a loss is computed by enumeration, without any sampling, in "
        "[kl_estimators.md](../lab/results/kl_estimators.md): the gradient of k1 has mean zero.",
    ),
    Claim(
        "ppo_details",
        "PPO's details matter: the whitened scale, lambda 1 for the critic, a warm critic",
        "the implementation details of PPO; VC-PPO (2503.01491) and VAPO (2504.05118) for lambda and warm-up",
        [
            Effect("eval/pass@1", "ppo", "ppo-not_whitened", least=0.0, over="end"),
            Effect("eval/pass@1", "ppo-decoupled", "ppo-lambda_0.95", least=0.0, over="end"),
            Effect("eval/pass@1", "ppo-warm_critic", "ppo", least=0.0, over="end"),
            Effect("eval/pass@1", "ppo", "ppo-lambda_0.95", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "ppo", "ppo-no_value_clip", least=0.0, over="end", decides=False),
        ],
        ("reward/accuracy", "value/explained_variance"),
        ("ppo", "ppo-not_whitened", "ppo-lambda_0.95", "ppo-decoupled", "ppo-no_value_clip", "ppo-warm_critic"),
    ),
    Claim(
        "hacking",
        "Without a KL a learned reward is hacked",
        "InstructGPT (2203.02155) and after",
        [
            Effect("eval/pass@1", "learned-kl_0.05", "learned-kl_0", least=0.3, over="end"),
            Effect("eval/reward", "learned-kl_0", "learned-kl_0.05", least=0.0, over="end"),
        ],
        ("reward/accuracy", "reward/mean"),
        ("learned-kl_0", "learned-kl_0.01", "learned-kl_0.05", "learned-kl_0.2"),
        first_seed=5,  # those before were known from docs/ppo.md when the margins were written
        why="Without a KL the learned reward ends highest and the true accuracy lowest, after a good start. A "
        "coefficient of 0.01 saves some seeds, and 0.05 and 0.2 save all, at nearly the same reward. The "
        "seeds are 5 to 9, because docs/ppo.md had shown the others when the margins were written.",
    ),
    Claim(
        "preference_pairs",
        "On fixed pairs both log-probs fall; new pairs with more samples and a moving reference end higher",
        "DPO (2305.18290) and after (2402.13228): the log-prob of the chosen answers falls too",
        [
            Effect("logps/chosen", "pairs", "pairs:start", most=0.0),
            Effect("logps/rejected", "pairs", "pairs:start", most=0.0),
            Effect("rewards/chosen", "pairs", most=0.0, decides=False),  # 0 at the start, on the same pairs
            Effect("rewards/rejected", "pairs", most=0.0, decides=False),
            Effect("eval/pass@1", "pairs-rounds", "pairs-once", least=0.0, over="end"),
            Effect("eval/pass@1", "pairs-rounds", "pairs", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "pairs-nll", "pairs", least=0.0, over="end", decides=False),
            Effect("eval/pass@1", "pairs-ipo", "pairs", least=0.0, over="end", decides=False),
            *(
                Effect("eval/pass@1", f"pairs-swapped-{name}", "pairs-swapped", least=0.0, over="end", decides=False)
                for name in ("smoothed", "robust", "ipo")
            ),
        ],
        ("logps/chosen", "logps/rejected"),
        ("pairs", "pairs-nll", "pairs-ipo", "pairs-once", "pairs-rounds"),
        first_seed=5,  # those before were known from docs/dpo.md when the margins were written
        why="On fixed pairs both log-probs fall: by 0.98 and 11.7 nats from the mean of steps 1 to 5, the first that "
        "was kept, and by 0.59 and 12.2 from the start, on the same pairs. Pass@1 ends lower than with an NLL term or "
        "with the IPO loss. Rounds end best, with a chosen log-prob that rises; the pairs of their first round, used "
        "twice, end far below. New pairs, more samples and a reference that moves come together here: which of them "
        "it is, these runs do not tell. With a fifth of the labels swapped pass@1 ends higher than without, perhaps "
        "because the margins grow less; label smoothing adds to that, its robust correction and IPO take away. The "
        "seeds are 5 to 9, because docs/dpo.md had shown the others when the claim was written.",
    ),
    Claim(
        "sharpening",
        "RL sharpens what is there: pass@1 rises, pass@64 does not",
        "the debate on pass@k after RL (2504.13837)",
        [
            Effect("eval/pass@1", "pass_at_64", "pass_at_64:start", least=0.1, over="end"),
            Effect("eval/pass@64", "pass_at_64", "pass_at_64:start", most=0.0, over="end"),
        ],
        ("eval/pass@1", "eval/pass@64"),
        ("pass_at_64",),
        why="Nearly every problem of the test split has a right answer among 64 samples of the untrained model, so "
        "pass@64 has no room to rise, and training does not lower it: 0.99 before and after, which this rule can only "
        "call unseen. What the claim says of pass@1 holds.",
    ),
]
CLAIMS = {claim.name: claim for claim in CLAIM_LIST}
