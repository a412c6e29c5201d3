"""What docs/claims.md says in words: names of runs and metrics, what a claim does not show, what became of the pilot.

Verdicts and numbers of registered runs are report.py's, from the rows, but for those in LIMITS that were looked at
afterwards.
"""

ALGORITHMS = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO", "gspo": "GSPO", "dcpo": "DCPO", "ppo": "PPO",
              "dpo": "DPO in rounds"}  # fmt: skip

RUNS = {  # of registered.json; best-... and tune-... are named by report.py
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "gspo-paper_band": "GSPO, the paper's band",
    "gspo-wide_band": "GSPO, ten times the paper's band",
    "dapo-all_groups": "all groups",
    "dapo-all_groups-punished": "all groups, long answers punished",
    "dapo-dynamic_sampling": "dynamic sampling",
    "ppo": "PPO, 256 x 1",
    "ppo-critic_still": "PPO, critic does not learn",
    "ppo-32x8": "PPO, 32 x 8",
    "coin-tight_below": "clip 0.1 below, 0.2 above",
    "coin-tight_above": "clip 0.2 below, 0.1 above",
    "dcpo-8_visits": "DCPO",
    "grpo-8_visits": "GRPO",
    "learned_reward-kl_0": "no KL",
    "learned_reward-kl_0.05": "KL coefficient 0.05",
    "clip-0.2": "clip 0.2",
    "clip-0.4": "clip 0.4",
}
IN_CLAIM = {"kl_estimator": {"grpo": "no penalty"}}  # where a run has another name

METRICS = {
    "accuracy": "held-out accuracy",
    "eval/pass@1": "held-out pass@1",
    "eval/pass@64": "held-out pass@64",
    "eval/reward": "learned reward, held out",
    "reward/mean": "learned reward",
    "reward/accuracy": "accuracy in training",
    "cpu_seconds": "seconds of one core",
    "policy/entropy": "entropy, nats a token",
    "policy/kl_ref": "KL to the base model, nats a token",
    "policy/clipped_tokens": "share of clipped tokens",
    "policy/token_clip_ratio": "share of clipped tokens",
    "value/explained_variance": "explained variance of the critic",
    "completion/length": "tokens of an answer",
    "completion/length_incorrect": "tokens of a wrong answer",
    "completion/truncated": "share of answers that are cut",
    "sampling/rounds": "rounds a step",
    "sampling/keep_rate": "share of groups with right and wrong answers",
    "sampling/surplus": "good groups thrown away, a step",
    "overlong/fraction": "share of answers that are punished",
    "dcpo/response_utilization": "share of answers that train",
}

# What is drawn over the steps beside the values that decide; a second axis for claims on equal completions.
CURVES = {
    "sequence_ratio": ("reward/accuracy", "policy/clipped_tokens"),
    "dynamic_sampling-steps": ("reward/accuracy",),
    "dynamic_sampling-completions": ("reward/accuracy",),
    "overlong": ("overlong/fraction", "completion/length", "reward/accuracy"),
    "critic": ("value/explained_variance", "reward/accuracy"),
    "batch_shape": ("reward/accuracy",),
    "length": ("completion/length_incorrect",),
    "clip_alone": ("policy/entropy",),
    "dcpo": ("reward/accuracy", "dcpo/response_utilization"),
    "hacking": ("reward/accuracy", "reward/mean"),
    "clip_0.4": ("policy/entropy", "reward/accuracy"),
    "gspo_entropy": ("policy/entropy",),
}
OVER_COMPLETIONS = ("dynamic_sampling-completions",)

LIMITS = {
    "sequence_ratio": (
        "Whether sequence ratios help where token ratios do harm: here these hardly leave 1 (GRPO clips 0.001 of its "
        "tokens). No run clips the paper's share of tokens, 0.15, which lies between the two bands. The paper gives "
        "no lengths; its benchmarks suggest thousands of tokens, these answers have some 40: nothing here is about the "
        "paper's band at the paper's lengths. Looked at afterwards, which decides nothing: wrong answers under the "
        "wide band were 0.60 tokens shorter than GRPO's (0.80 to 0.39)."
    ),
    "dynamic_sampling-steps": (
        "What of dynamic sampling does it: a step trains on 32 groups with right and wrong answers, without it on "
        "some 23 of 32, and draws twice as many prompts (7.5 passes over the list, 3.75 without). A larger batch "
        "without a filter is not tried, nor a learning rate for each. What is bought with steps is paid in sampling: "
        "the next claim has equal completions. The three claims on these runs share the 13 runs of all groups. Looked "
        "at afterwards, which decides nothing: one of these (seed 52) ended at 0.519, 0.05 below the next; without it "
        "the effect is +0.026, p = 0.0006 before Holm."
    ),
    "dynamic_sampling-completions": (
        "That the paper is wrong: it says that more is sampled and fewer steps are needed, and claims nothing for "
        "equal completions. At 15,360 completions dynamic sampling has made 30 steps and all groups 60, so half "
        "as many optimizer steps, at one constant learning rate that was tuned for neither. Of 64 groups that a step "
        "samples 47 are good and 32 are used; sampling in smaller rounds is not tried. Looked at afterwards, which "
        "decides nothing: if only the rounds that are needed were counted (1.37 a step, so 44 steps), it would be at "
        "0.558 on the straight line between two evaluations, 0.032 behind (0.050 to 0.015). 12 seeds have exactly "
        "15,360 completions at an evaluation; the other is interpolated, which makes it 0.003 lower. Accuracy in "
        "training is a mean over five steps, which are twice as many completions with dynamic sampling: about "
        "0.008 of that difference comes from this."
    ),
    "overlong": (
        "Much of a punishment: after the first steps one answer in 200 is punished, and over the second half it "
        "takes 0.0007 from the mean reward of an answer, so little could differ. The paper punishes answers that are "
        "cut off, and here hardly any is. The filter is not tried, nor a cap that cuts right answers: there, in the "
        "pilot, without dynamic sampling and punished from 51 tokens, the punishment cost 0.10 of accuracy; with "
        "dynamic sampling what it cost was inconclusive. Looked at afterwards, which decides nothing: seed 52 of the "
        "runs without it, at 0.519, is low; without that run the effect is -0.009 (-0.021 to +0.004), and equivalent "
        "too."
    ),
    "critic": (
        "Whether the critic credits tokens or is only a baseline for each prompt: without it the mean of the batch is "
        "the only one, and no other is tried. Lambda is 1, the learning rates are not tuned, and the curves still "
        "rise: this is speed, not an end. The next claim shares PPO's 13 runs. Looked at afterwards, which decides "
        "nothing: the class of a sum alone explains 0.31 of the variance of held-out rewards at the start, and 0.20 at "
        "PPO's end; the gain is mostly in hard sums, +0.063 (0.043 to 0.082)."
    ),
    "batch_shape": (
        "Anything about fresh prompts: the list has 512, and both runs draw 40 answers to each, in 40 visits or in "
        "five of eight. What differs is how many prompts share a step (256 or 32) and an optimizer step (64 or 8). 32 "
        "x 8 makes no use of its groups here, so this is not about GRPO, and GRPO cannot take the other shape, as a "
        "group of one has no baseline. Rates are not tuned, and the curves still rise. Looked at afterwards, which "
        "decides nothing: a run of 256 x 1 took 156 seconds of a core, one of 32 x 8 120, on a machine that did other "
        "work."
    ),
    "length": (
        "That the difference is Dr. GRPO's weights: it also leaves out the deviation. The pilot had the four "
        "combinations, and there the weights alone made +1.28 tokens and the deviation alone -0.30. An interval above"
        " 1 would also pass the pilot's margin of one token."
    ),
    "clip_alone": (
        "Which of the two bounds does more, as there is no run at 0.2 and 0.2 (the pilot has one); and nothing about "
        "rewards that say something."
    ),
    "dcpo": (
        "That there is no gain: the interval of this effect alone lies above 0. What is ruled out is an advantage of "
        "0.03, the pilot's estimate (by a paired t -0.004 to +0.063). Which of DCPO's changes does it: the pilot took "
        "three of them out one by one (not the reward of -1 for an answer that cannot be found); smoothing bought "
        "0.046 (+0.028 to +0.063 by a paired t), the bounds of each token nothing that could be seen. One learning "
        "rate, which was tuned for neither; more visits, where more groups have an earlier one to learn from, are not "
        "tried. Looked at afterwards, which decides nothing: the difference is in the hard sums, +0.025 (+0.004 to "
        "+0.046), for which 0.03 is not ruled out."
    ),
    "hacking": (
        "One reward model for each seed, of one size, on sums of four to six terms; which coefficient is best; whether "
        "fewer steps would do as well as a KL. The pilot saw an effect of 0.91, so this repeats it rather than "
        "finding it."
    ),
    "clip_0.4": "One epoch, where ratios hardly leave 1 and no clip acts. 0.4 on one side alone.",
    "gspo_entropy": (
        "Lower entropy is only one sign of less exploration; pass@k is not compared. The rule is hearsay, without a "
        "source. In the pilot, with the paper's band, GSPO's entropy was higher, as it is here, so the rule was "
        "expected to fail. Much of that gap is slower learning: entropy falls as accuracy rises."
    ),
    "best-dr_grpo": (
        "That the paper is wrong: it claims fewer tokens at the same accuracy, so “a paper's” in the registration says "
        "too much, and “equivalent” would be what the paper says."
    ),
    "best-dapo": (
        "That the paper is wrong: its 30 to 50 is not at equal completions. In two rounds a step DAPO makes 160 "
        "optimizer steps where GRPO makes 320; dynamic sampling alone lost 0.09 that way at one rate, which was known "
        "before these runs, so the claim was expected to fail. Where a step takes three rounds 20,480 completions come "
        "earlier, and the value lies on the line between two evaluations; the cap of 96 is that of its evaluations "
        "too. Looked at afterwards, which decides nothing: after as many optimizer steps (160) DAPO was 0.064 ahead in "
        "training (0.032 to 0.096), so it is behind for each completion, not for each step. Most of the difference is "
        "in the hard sums, -0.085 (-0.138 to -0.033)."
    ),
    "best-gspo": (
        "Whether a band that is tuned with the rate does better: this one was set with 1e-4 in mind, where the two "
        "were 0.006 apart (`sequence_ratio`, known before these runs); at a higher rate it clips more."
    ),
    "best-dcpo": (
        "More visits: each prompt has five here, where `dcpo` had eight (and DCPO was 0.014 ahead at 1e-4, known "
        "before these runs), so smoothing has less to remember."
    ),
    "best-ppo": (
        "Whether it is the critic, the group or the batch: PPO draws 256 prompts once and GRPO 32 eight times, and "
        "[what the lead is made of](#what-ppos-lead-is-made-of) has its own section. The critic's own rate, 1e-3, is "
        "not tuned. DPO, which decides nothing, makes fewer optimizer steps by far from as many completions. Looked at "
        "afterwards, which decides nothing: that PPO is ahead is plain, that it is ahead by more than the margin is "
        "not. The interval of 99.7% contains that margin: p is small enough only at Holm's ninth step, after eight "
        "claims with smaller p. PPO takes 1.8 times the seconds."
    ),
}

# What stands beside a verdict in the first tables.
NOTES = {
    "sequence_ratio": "at one rate, 1e-4, tuned for neither; [at the best of six](#each-algorithm-best-of-six): {best}",
    "gspo_entropy": "at one rate, 1e-4, tuned for neither",
    "dynamic_sampling-completions": "the paper's Fig. 6 is over steps; it prints nothing at equal completions",
    "overlong": "{punished:.1%} of the answers were punished in the second half of the steps: hardly a treatment"
    "{without}",
    "critic": "at one rate, 1e-4, tuned for neither",
    "batch_shape": "at one rate; smaller than the 0.03 that counts as no difference elsewhere on this page",
    "length": "at one rate; Dr. GRPO differs in more than its weights",
    "hacking": "five seeds of one reward model each, and normality is assumed: by sign flips p is not below 0.05",
    "dcpo": "the interval lies above 0: a gain of 0.03 is ruled out, a smaller one is not",
    "best-dr_grpo": "the paper claims fewer tokens at the same accuracy",
    "best-dapo": "the paper prints AIME 30 to 50 (Table 1), not at equal completions",
    "best-ppo": "no paper prints this comparison; 256 prompts once against 32 eight times: "
    "[what the lead is made of](#what-ppos-lead-is-made-of)",
}
BELOW = "What none of these five claims shows stands [below](#each-algorithm-best-of-six)."

BEST = (
    "p and interval are those of ten fresh seeds at the rates that were chosen on two: they leave out the noise of the "
    "choice, and GRPO's enters all five. So a verdict is about these rates, not about the true best of each algorithm. "
    "Tuning and the comparison share the "
    "held-out problems, not the seeds; they share the base model too, for which the table has two others. 20,480 "
    "completions are 80 steps: nothing here is about where the curves end. Runs at the chosen rates vary by 0.013 to "
    "0.039 across seeds, where 0.018 was assumed, so less is seen than was planned. Half of GRPO's deviation is one "
    "run (seed 74, 0.577; without it 0.014)."
)

# What happened after the first run of a claim, printed beside its verdict.
BESIDE = {
    "sequence_ratio": "While these runs were made the program that decides was mended.",
    "hacking": "Run out of the registered order. Two starts of its first reward model were stopped, and a PPO run that "
    "found none ended at once.",
    "dcpo": "Run out of the registered order, seeds 45 to 47 before the others, 48 and 49 beside 40 and 41. The first "
    "start of seed 40 was stopped before it had rows, and was made again.",
}
BESIDE["gspo_entropy"] = BESIDE["sequence_ratio"]
for name in ("length", "clip_alone", "clip_0.4"):
    BESIDE[name] = "Run out of the registered order."
for name in ("critic", "batch_shape"):
    BESIDE[name] = (
        "Made later than registered, after the runs of `length`, `hacking` and `clip_alone`; between the fourth of "
        "them and the others came those of `clip_0.4`."
    )
for name in ("dynamic_sampling-steps", "dynamic_sampling-completions", "overlong"):
    BESIDE[name] = (
        "Made later than registered, after the runs of `length`, `hacking` and `clip_alone`; the first start of "
        "`dapo-all_groups`, seed 40, was stopped before it had rows, and was made again."
    )

# Each claim of the pilot: the registered claims that take its place, or the word for what became of it; and why.
PILOT = {
    "critic": (
        ("critic", "batch_shape", "best-ppo"),
        "Its title tested three things at once: the critic, the shape of the batch and the weights. They are separate"
        " now, and PPO and GRPO are compared at their best.",
    ),
    "length": (
        ("length",),
        "Decided by a rule that was moved with its first data. Now it is the paper's own comparison against a margin "
        "of 0; one token as the margin would have a power of 0.06 with ten seeds.",
    ),
    "deviation": (
        "an illustration, not counted",
        "True by construction: a group's weight is multiplied by 1 / std. What is measured is the size.",
    ),
    "clip_higher": (
        "inconclusive, not run again",
        "Its 0.002 nats would need some fifty seeds for a power of 0.8. The clip's work on the entropy is tested "
        "under random rewards (`clip_alone`), and a wide one by `clip_0.4`.",
    ),
    "clip_alone": (
        ("clip_alone",),
        "One effect in place of two; fresh seeds.",
    ),
    "token_mean": (
        "inconclusive, not run again",
        "By t the interval is -1.9 to +0.07, so that not even the sign is certain. No fresh seeds.",
    ),
    "overlong": (
        ("overlong",),
        "A strawman: the cap of 64 was one that right answers need, and punishment began at 51. Now it is 96, "
        "and answers of more than 64 tokens are punished.",
    ),
    "dynamic_sampling": (
        ("dynamic_sampling-steps", "dynamic_sampling-completions"),
        "A strawman: its baseline was crippled by the punishment. At equal completions the same step against a "
        "healthy one lost 0.06 of the accuracy in training (`ladder-6-no_punishment` - `ladder-3`).",
    ),
    "ladder": (
        "dropped",
        "Five effects had to hold together, so that one in three such ladders would have shown a rung that fails if "
        "none of them did anything; two of its runs were never finished; and its cap is that of `overlong`. The "
        "techniques are tested one by one.",
    ),
    "sequence_ratio": (
        ("sequence_ratio", "gspo_entropy", "best-gspo"),
        "A strawman: the paper's band on much shorter answers, and a count of rows called one of tokens.",
    ),
    "dcpo": (
        ("dcpo", "best-dcpo"),
        "Its first effect, the share of answers that train, is near certain by construction: an illustration. The new"
        " one is accuracy against GRPO.",
    ),
    "kl_estimator": (
        "withdrawn",
        "The title was “In a loss, k1 does nothing, and k2 and k3 hold the policy near the reference”. But three KLs,"
        " each logged by its own estimator, are compared as if they were one, and the run without a penalty logs "
        "none; no model was kept, so that one estimator for all cannot be computed from what is there.",
    ),
    "ppo_details": (
        "dropped",
        "Never decided: five of its runs have one or two seeds.",
    ),
    "hacking": (
        ("hacking",),
        "One effect in place of two: the reward's interval by t contains 0.",
    ),
    "preference_pairs": (
        "as in the pilot, not run again",
        "The title was “Under DPO both log-probs fall, and online pairs beat offline ones”: what was changed is the "
        "data, the number of samples and the reference together.",
    ),
    "sharpening": (
        "withdrawn",
        "A ceiling: 64 samples of the untrained model have a right answer for 0.99 of the problems, so pass@64 cannot"
        " rise, and a rule that wants it to fall can only be inconclusive.",
    ),
}

PILOT_RUNS = {
    "grpo": "GRPO", "grpo-no_std": "without the deviation", "clip-0.2_0.2": "clip 0.2, 0.2",
    "clip-0.2_0.28": "clip 0.2, 0.28", "clip-0.1_0.2": "clip 0.1, 0.2", "clip-1_1000": "no clip",
    "grpo-token_mean": "mean over the step's tokens", "grpo-group_mean": "mean over a group's tokens",
    "kl-k1": "k1", "kl-k2": "k2", "kl-k3": "k3", "pairs": "fixed pairs", "pairs-nll": "fixed pairs, NLL term",
    "pairs-ipo": "fixed pairs, IPO loss", "pairs-once": "pairs of one round, twice",
    "pairs-rounds": "new pairs each round", "pass_at_64": "GRPO",
}  # fmt: skip
PILOT_FIGURES = ("deviation", "clip_higher", "token_mean", "kl_estimator", "preference_pairs", "sharpening")

PILOT_HISTORY = """`git show` has each of these commits.

- `length`: before any data (d8f2897) two effects decided, that of grpo on dr_grpo, the paper's own comparison,
  and that of grpo on dr_grpo-std. The commit that brought the first data (a7dcc4b) made the first of them a
  number that is only reported. With +1.04 (+0.81 to +1.27) against its margin of 1 it is inconclusive. **Under
  the rule that stood, so is the claim: the pilot's "holds" rests on the changed rule.**
- `critic`: the same commit did the same to `value/explained_variance` > 0.3 (0.21). The verdict is the same
  under both.
- The same commit is the first that has report.py, whose text said that its rules were written before the runs.
- `deviation`: four rows were added after its seed 0 had run; they were only reported. Rungs of `ladder` too
  came after seeds of other rungs.
- `sequence_ratio`: a run with a wider band, gspo-wide, was planned (8d93c24) and dropped (5635a9f).
- After the registration `kl_estimator` and `preference_pairs` got titles that say what was compared, and the
  five runs of `pairs` were made again for two more metrics; all else in their rows came out the same, digit by
  digit."""

HISTORY = """`git show` has each of these commits; [the pilot's page](../lab/results/pilot.md) has that of its rules.

- A first registration of the same day, commit b0edb95, was replaced after one of its 418 runs had been made and
  before its result was read; its seeds are not used. `kl_coefficient` was dropped from it: it compared 0.1 with no
  KL, where the pilot had -0.127 for that very run, and the rule of thumb ranks 0.05, 0.1, 0.2 and 0.3.
- The second registration changed more than seeds and titles. In `overlong` the punishment begins after 64 tokens, where
  it was 77 (`--overlong_cache` 32 in place of 19), and a check was added, without which the claim counts as not tested.
  DAPO's and GSPO's own knobs went out of the tuning: of six settings two each had been a cap of 128 and no punishment,
  the paper's band and a band of 0.03; now all six are learning rates. A closing date and rules for which results count
  are new too.
- decide.py and registry.py were mended after an audit (9446c06) when 17 of the first 39 runs had begun; no row was in
  a commit, and that none was read is our word. It changes neither of the two verdicts of these runs.
- Until all claims were decided, a verdict that results to come might have changed had the words “so far”. The commit
  that brought the rows of these 39 (c38f6b0) changed when they were printed; and `dcpo` and `clip_0.4` had them though
  by then no result could have changed these two any more, as a referee found.
- The registered order of the runs was left after these 39 (15:41): next came `length`, whose baseline they are,
  `hacking`, whose runs are short, and `clip_alone`. At these changes the first runs of `dapo-all_groups` and of `dcpo`
  and the reward model of seed 40 had just begun and were stopped, to begin again; a PPO run that found no reward model
  ended at once. None of them had rows. Between the first runs
  the machine was needed for a measurement of time (33 minutes) and other work.
- `dynamic_sampling` and `overlong`, registered second, came after these, among themselves in the registered order,
  with 40 minutes between two runs for another measurement. After the first four runs of `critic` and `batch_shape`,
  of two and a half minutes each, came `clip_0.4`, its two runs in turns.
- The other 35 runs of `critic` and `batch_shape`, registered third, came last of these, 45 minutes later; the rows of
  the first four were in commits by then. While the last five were made, those of `dcpo` had begun on another core, from
  seed 45 on.
- When `dcpo` was complete the queue was stopped, one second into its first tuning run, and goes on with later commits:
  docstrings, what `--dry_run` says and what concerns GPUs and bfloat16 had changed. Short runs of all eight scripts,
  with a resume, came out the same before and after, bit by bit.
- What the claims of `dynamic_sampling`, `overlong`, `critic` and `batch_shape` do not show was written again after a
  referee's reports on their verdicts; that of `dcpo` too, later. The limits of the five claims “at the best of six”
  were written before the first of their runs and after another such report; the tunings were running.
- The other 83 tunings, the 70 runs at their best and those on two more base models came in the registered order, two
  and at the end three at a time, all of commit 3fc1798, while other work took part of the two cores. What the limits of
  these five claims say of single runs and classes was added after their verdicts.
- A referee recomputed these five verdicts from the rows and found the numbers right. The sentences on equal steps and
  equal seconds, on Holm's ninth step and on what “inconclusive” is worth there were added after that report.
- The first tuning run is of earlier code than the others (docstrings, and what `--dry_run` says); another one was begun
  with it, stopped after a second and made again.
- The times in starts.jsonl and in git are this machine's own: a digest proves an order of commits, not a
  date.""".split("\n")

INTRO = """What papers and rules of thumb claim, measured with the scripts of this repository on a small task: sums of
one-digit numbers, learnt by a model of 0.1 million weights. Each claim has **one effect that decides, registered before
its runs** with its margin, its seeds and its statistics ([registered.json](../lab/registered.json)). A claim **holds**
or **does not hold** if its effect can be told from a margin, which is 0 mostly; it is **equivalent** if the difference
is smaller than a registered one, 0.03 of accuracy mostly; and else it is **inconclusive**, which does not mean that
there is no difference. What does not hold here may hold for large models, and of the three claims that do not hold no
paper prints the comparison. Three findings first:""".split("\n")

FINDINGS = """- **A good reward curve does not mean that the code is right.** Seven of ten bugs that people write change
  pass@1 by less than 0.02 on the first task ([which curve has the bug?](exercises.md#which-curve-has-the-bug)).
- **A gain at one learning rate is no ranking.** At 1e-4 Dr. GRPO ends above GRPO in held-out accuracy, by
  {one_rate}, p = {p}, uncorrected. At 2e-4, the best of six rates for both, the difference is {tuned}: inconclusive. On
  two other base models, at that rate, it is {bases}, with three seeds each.
- **GRPO ends {lead} behind PPO ({low} to {high}), and it is not the algorithm alone.** That is at the best of six rates
  and after as many completions; in a step `ppo.py` samples 256 prompts once, `grpo.py` 32 prompts eight times. PPO with
  32 x 8 cannot be told from Dr. GRPO at 1e-4; at equal seconds of training, from 40 on, GRPO is ahead; and counted by
  base models, of which there are three, and not by seeds, the lead is {mean} ± {half} (95 %):
  [what it is made of](#what-ppos-lead-is-made-of) was registered for itself, and both of its effects hold.

What these three say beyond the verdicts below was looked at afterwards or reported beside them, and decides nothing."""

COUNTED = {
    True: "Registered as **a paper's** are {all} claims, {replications} of them as replications of a known effect "
    "({counts}):",
    False: "Registered as **no paper's** are {all}: {thumb} rules of thumb that practitioners pass on, and questions "
    "of our own ({counts}):",
}

KNOWN = (
    "The pilot, with other seeds, had seen the sign of {same} of the {firm} effects that hold or do not hold: these "
    "runs confirm and measure what was expected. The last column but one says how many of its runs, each left out "
    "alone, would flip a verdict; it was looked at afterwards."
)

LEAD = """Looked at before that experiment, which decides nothing: runs of other claims, at one learning rate. A
[critic that learns](#a-critic-that-learns-makes-ppo-learn-better) and
[256 prompts once](#256-prompts-once-are-better-than-32-prompts-eight-times) each hold as claims of their own. With a
critic that learns nothing PPO is still ahead of GRPO, from which it then differs in the shape of the batch, in the
weights of its tokens and in its baseline and scaling. With GRPO's shape and a critic it cannot be told from Dr. GRPO.
So no single part explains the lead. The second table is at the best rates and in training, on prompts that were
trained on before, with ten seeds; its clock is the wall's, on two cores that two runs shared, and it stands still in
evaluations.""".split("\n")

LEAD_ON_BASES = (
    "On the three base models the lead, at rates that were tuned on the first, is {bases}. With the base model as the "
    "unit, as for a statement on base models in general, that is {mean:.3f} ± {half:.3f} (95 %, Student's t with two "
    "degrees of freedom)."
)

TASK = """The task is `embedded-hard` ([common/tiny_hard/build.py](../common/tiny_hard/build.py)): sums of two to eight
terms, without those of five, learnt from a careless teacher. A run is 80 steps of 32 prompts x 8 completions with four
optimizer steps each, if its command does not say otherwise. **Held-out accuracy** is pass@1 on 1,582 problems that are
in none of the lists, two completions each, weighted by the shares of their classes. **One small base model, one kind of
task**: [two more base models](#each-algorithm-best-of-six), built with other seeds, show only signs.""".split("\n")

SEEN = (
    "Held out means held out from RL. The base model's own training, which drew problems at random, had drawn {easy} "
    "easy, {medium} medium and {hard} hard ones of these. No harm is seen: of the four-term sums, of which some were "
    "drawn, the base model gets {drawn_before} of the drawn and {not_drawn_before} of the others, and GRPO (1e-4, "
    "{seeds} seeds) {drawn_after} and {not_drawn_after}; the standard error of these differences is at most "
    "{error:.2f} ([seen.py](../lab/seen.py), after the verdicts)."
)

RULES = """SHA-256 of the registration: `{digest}`. Each file of results names it with the digest of the code that ran
and the commit, which has the last commit of registered.json among its ancestors. Each start of a run is a line of
starts.jsonl, beside the results. Nothing is decided before all runs of a claim are there.

- **The test** is Welch's t over seeds, two-sided, against the margin, which is 0 if none is named. Seeds 0 to 9
  were seen before the registration (the pilot, below) and {seeds} tune; what decides has fresh ones.
- **The correction** is Holm's over all {claims} claims.
- The verdict is the first of these that applies. **Holds**: p after Holm is below 0.05, on the claimed side. **Does not
  hold**: on the other side. **Equivalent**: two one-sided tests say, after Holm, that the difference is smaller than
  the claim's margin of equivalence; for a claim of “better” an advantage as large as that is ruled out, so the claim is
  not supported. **Inconclusive**: none of these.
- The margin of equivalence for accuracies, 0.03, is a tenth of what GRPO gains in its 80 steps.
- The tests of equivalence are a second family of Holm's: the chance that any of these three firm verdicts is wrong
  is at most 0.05 + 0.05 = 0.10.
- **Not tested**: what a claim is about did not take place, by a check that is registered with it. **Abandoned**:
  given up before it was complete, with the reason. Runs begun after {closing} count for nothing, and what is not
  complete by then is given up.
- A run whose loss is not finite counts with an accuracy of 0. In other metrics it has no value, and a claim that
  needs one is inconclusive. Runs of one claim by two versions of the code decide nothing.
- Intervals are of 95 % and of one effect alone, not corrected. What a table shows without bold decides nothing. In the
  figures a dot or a thin line is one seed, thick lines are means.

```bash
python lab/run.py --registered --list   # what is still to be run; without --list it runs
python lab/report.py --figures          # draws the figures (matplotlib)
python tools/refresh.py                 # writes this page, and the counts in the READMEs (scipy)
```""".split("\n")

POWER = """Two columns say what the seeds can see: the effect that they see in 80 of 100 experiments at Holm's first
step, and the chance of “equivalent” where there is no difference at all. They were planned with a deviation across
seeds of 0.018 for accuracies: the pilot's is 0.020, pooled over 42 runs (`deviations()` of
[pilot.py](../lab/pilot.py)), and has more sampling noise, about 0.011 against 0.006; for other metrics with that of the
pilot's two runs. A smaller effect may be there and yet be inconclusive. For the two claims with a margin the registered
chance is too high, as it leaves out that the claim's own test comes first; what is shown is computed with it. Sign
flips of the seeds decide nothing.""".split("\n")

HISTORY_SHORT = """A rule of the pilot was moved with its first data, which is one reason why the pilot counts for
nothing. A first registration was replaced by a second one, with other rules too, after one run. The registered order of
the runs was left, and the program that decides was mended once while runs were made; of the second registration no run
that ended was dropped.""".split("\n")

AT_BEST = """The same six learning rates for each algorithm, on two tuning seeds; the best of six by held-out accuracy
at 20,480 sampled completions is run with ten fresh seeds, and with three on each of two more base models: the hard task
built with two more seeds. All claims of this kind share GRPO's ten runs, so they are not independent. Nothing but the
learning rate is tuned: GSPO has ten times the paper's band, DAPO a cap of 96 and answers of more than 77 tokens
punished, and it samples in whole rounds of 32 prompts, so that it makes 40 steps. PPO draws 256 prompts once; DPO makes
pairs in ten rounds of 256 prompts.

On the two other base models three seeds seldom show a difference below some 0.04, and the rates were chosen on the
first; PPO, DAPO and DPO differ from GRPO with the same sign on all three, the others do not. The seconds are those of
one core, of a whole run with its evaluations. At equal seconds runs can only be compared in training: by the accuracy
of the completions that each samples when the shortest of all these runs, one of DPO's, ends.""".split("\n")

TUNING = """The tuning is no result: the highest of six means of two seeds is too high by the choice. A best rate that
is the lowest or the highest of the six is not known to be the best, and is marked.

Accuracies at equal seconds are means over five steps (of DPO a round) on prompts that were trained on before. The clock
(`python lab/clock.py`) stands still in evaluations; it is the wall's, with two runs at a time on two cores, and by it
like runs differ by up to 47 % (DPO's by 85 %). That column was added after the registration, while the tunings ran and
before the first run at its best.""".split("\n")

RULES_OF_THUMB = """## Rules of thumb

Of two more than those that are registered something is known without a test:

**GRPO needs 25 % less memory than PPO with a reward model, and 50 % less without one**, says the rule; here
it is what the last two rows say. A measurement, not a verdict: the share depends on how much of the peak is models and
how much is activations. Measured is a run of two steps on CPU, computed is the peak on one GPU with gradient
checkpointing; in all of them the models are most of it (`python lab/memory_of_ppo.py`). `grpo.py` has no reward model
of its own: its last row adds what one took of PPO's memory.""".split("\n")

REWARD_SCALE = """**PPO is sensitive to the scale of the reward, GRPO is not.** For GRPO this is true by construction
(`test_advantages_do_not_depend_on_the_scale_of_the_reward_but_for_the_epsilon`). For `ppo.py` it is not measured; its
advantages are whitened too, but its critic has to follow the scale.""".split("\n")

PILOT_INTRO = """The first laboratory: five seeds (0 to 4, or 5 to 9), one learning rate of 1e-4 for all, 16 claims
with 32 deciding effects, no correction, and bootstrap intervals that cover 84 % in place of 95 %. **Its
verdicts count for nothing**; it is kept because the registered design rests on its deviations, and because what
it decided must not vanish. Commands: [claims.py](../lab/claims.py); rules: [pilot.py](../lab/pilot.py); rows:
`lab/results/claims`; what was found: [pilot.md](../lab/results/pilot.md); `python lab/run.py NAME` runs a claim
again.""".split("\n")

PILOT_PAGE = """The first laboratory of [docs/claims.md](../../docs/claims.md#the-pilot), whose verdicts count for
nothing: 16 claims, five seeds, one learning rate of 1e-4 for all. `python tools/refresh.py` writes this
page.""".split("\n")

NUMBERS_PAGE = """What stands behind each claim of [docs/claims.md](../../docs/claims.md): what was compared, how the
runs were made, all statistics, the commands, the tuning, and the history of the rules. `python tools/refresh.py` writes
this page.""".split("\n")

PILOT_EFFECTS = """As they were decided, and with the interval that five values allow. By a paired t two of the
effects that decided change: the reward of `hacking`, whose interval has 0 in it, and the rung 5 - 4 of
`ladder`.""".split("\n")

NOT_DONE = """- Rules of thumb: group sizes at equal completions (`grpo.py --group_size 16 --prompts_per_step 16` and so
  on); the scale of the reward under `ppo.py`; a KL coefficient of 0.1 in place of 0.05, 0.2 or 0.3.
- Dynamic sampling in rounds as small as what is still needed; held-out accuracy at equal seconds, as runs are evaluated
  at their ends; findings repeated on a pretrained language model.
- One KL estimator logged for all of `kl_estimator`, with a run without a penalty; `sharpening` on a task
  without a ceiling.""".split("\n")
