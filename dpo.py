"""DPO: Direct Preference Optimization (arXiv 2305.18290, Eq. 7); cDPO, IPO, robust DPO; rounds of its own pairs.

From pairs of a chosen completion y_w and a rejected one y_l of a prompt x, and no reward model, critic or sampling in
training: the reward that a policy is optimal for under a KL penalty beta is r(x, y) = beta log(pi / pi_ref) + const(x),
which is put into Bradley-Terry. With l(y) = sum_t log pi(y_t | x, y_<t) over the completion, its end included,

    h = (l(y_w) - l(y_l)) - (l_ref(y_w) - l_ref(y_l))
    sigmoid    L = -log sigmoid(beta h)                                                             Eq. 7
               with label_smoothing e (cDPO)   -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h)
    robust     L = (-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2e)                 arXiv 2403.00409
    ipo        L = (h - 1 / (2 beta))^2                                                             2310.12036, Eq. 17

and the mean over the pairs of a step is minimized. The reference is the policy at its start: its log-probs are computed
once, and it is not kept. At the first step h = 0 and the first two losses are ln 2, whatever beta is. h also grows
when both log-probs fall, the rejected one faster: watch logps/chosen; nll_coef adds -l(y_w) / |y_w| against it.

The data are preference pairs, or prompts with a rule reward. From prompts it makes its own pairs: the best against the
worst of pair_samples completions of the current policy, for each prompt where these differ, written to
pairs-round-1.jsonl as a preference dataset that can be used again. Each further round makes new pairs with the current
policy, which is also the reference of that round: so the pairs stay on-policy.

Deviations from the paper: AdamW instead of RMSprop, no warm-up by default; dropout is off; sizes and rates are presets.

Left out: SimPO, KTO, hinge and other relatives, which are other objectives and no form of Eq. 7; a reference other than
the starting policy, for which the derivation of Eq. 7 does not hold.

    accelerate launch dpo.py                     the embedded model and pairs of its own; nothing is downloaded
    accelerate launch dpo.py --rounds 4          again and again, each time with the current policy
    accelerate launch dpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset trl-lib/ultrafeedback_binarized --learning_rate 5e-7 --warmup_steps 150 --pairs_per_step 64 \\
        --micro_batch_size 8

docs/dpo.md has usage, results, and the details of the implementation one by one.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from accelerate.utils import gather_object
from torch.nn.functional import logsigmoid

from common.batches import completion_texts, left_pad, rollout_batch
from common.errors import InputError, clean_exit, count, refuse
from common.generation import decode, eval_mode, sampling_config, seeded
from common.harness.args import RolloutArgs, learning_rate, option
from common.harness.command_line import parse_args
from common.harness.data import DataDigest, PromptSampler
from common.harness.distributed import clip_grad_norm, gradient_sync, launch, own_places, unsharded
from common.harness.evaluation import evaluate
from common.harness.loading import load_policy, load_tokenizer
from common.harness.metrics import Metrics
from common.harness.pairs import (
    Pair,
    add_pair_metrics,
    evaluate_pairs,
    load_prompts_or_pairs,
    pair_batch,
    pair_tokens,
    preference_row,
    spread_pairs,
)
from common.harness.run import Run
from common.masked import nearly_equal
from common.rewards import check_signatures, load_rewards, score_rewards, weighted_sum


@dataclass
class Args(RolloutArgs):  # the options that no algorithm changes are declared there, once for all scripts
    step_size, num_minibatches = "pairs_per_step", 1  # a step is one update on that many pairs
    sampled_by = "pair_prompts", "pair_samples"

    eval_dataset: str | None = option(
        None,
        "evaluation data, like --dataset [its test split, a test file beside it, or 5 % of it]; prompts: by sampling",
        "data",
        several=True,
    )
    max_prompt_tokens: int = option(
        512, "prompts with more tokens are dropped; for given pairs see --max_length", "data", gt=0
    )
    max_steps: int = option(
        -1, "maximum optimizer steps over all rounds (-1: no limit); 0 only makes pairs and evaluates", "run", ge=-1
    )
    eval_every: int = option(
        0, "steps between evaluations; one is always done before training and after each round", "evaluation", ge=0
    )
    eval_prompts: int = option(0, "prompts, or given pairs, per evaluation (0: all)", "evaluation", ge=0)

    max_length: int = option(
        1024,
        "maximum tokens of prompt plus completion of a given pair; the prompt's start is cut first",
        "data",
        ge=3,
    )

    pairs_per_step: int = option(32, "pairs per optimizer step (paper: 64)", "batch", gt=0)
    num_epochs: int = option(1, "passes over the pairs of a round", "batch", gt=0)
    micro_batch_size: int = option(
        64, "completions in one forward pass of a process; does not change the gradient", "batch", gt=0
    )
    rounds: int = option(1, "how often pairs are made with the current policy and trained on", "batch", gt=0)
    pair_prompts: int = option(512, "prompts in a round", "batch", gt=0)
    pair_samples: int = option(
        8, "completions per prompt; the best and the worst make a pair if their rewards differ", "batch", gt=0
    )

    temperature: float = option(1.0, "temperature of sampling pairs; the loss has log-probs at 1", "sampling", gt=0)
    max_new_tokens: int = option(64, "maximum tokens in a completion, including its stop token", "sampling", gt=0)

    learning_rate: float = option(1e-4, "peak learning rate (paper: 1e-6, RMSprop)", "optimizer", gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = option(
        "constant",
        "schedule of the learning rate over the run, multiplied by the warm-up (own pairs: needs --max_steps)",
        "optimizer",
    )
    warmup_steps: int = option(0, "steps of linear warm-up (paper: 150)", "optimizer", ge=0)

    beta: float = option(0.1, "strength of the pull to the reference (paper: 0.1; TL;DR 0.5); IPO's tau", gt=0)
    loss: Literal["sigmoid", "ipo", "robust"] = option("sigmoid", "sigmoid is DPO, or cDPO with --label_smoothing")
    label_smoothing: float = option(0.0, "assumed share of pairs whose labels are swapped", ge=0, lt=0.5)
    reference_free: bool = option(False, "the reference's log-probs count as 0: no pull to it")
    ipo_per_token: bool = option(False, "IPO on log-probs divided by the completion's length, as TRL has it")
    nll_coef: float = option(0.0, "weight of -log p(chosen) / length, against falling log-probs", ge=0)

    def check(self):
        super().check()
        if self.micro_batch_size < 2:
            refuse(self, "micro_batch_size", "a pair is two completions in one forward")

    def describe_step(self, processes):
        """The batch sizes of a step as one line."""
        pairs = self.pairs_per_step
        passes = count(self.num_epochs, "pass")
        return f"{count(pairs, 'pair')}, {pairs // processes} on each process; {passes} over the pairs"


@torch.no_grad()
def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """Sample n completions of each prompt from `policy`; rows of one prompt are adjacent.

    `seed`, one or several numbers, selects the random stream. Returns a batch of R = n x len(prompts) rows: prompts
    (R, P) padded on the left, prompt_mask (R, P), completions (R, T), completion_mask (R, T) and truncated (R,). Where
    an update may compute a prompt once for all its rows, prompt_index (R, 1) numbers the prompts. Unless stock
    `generate` sampled, rollout_logprobs (R, T) has the log-probs of the tokens.
    """
    ids, mask = left_pad([prompt.ids for prompt in prompts], policy.pad_token, policy.lm.device)  # (R / n, P)
    stock_generate = args.rollout == "hf" or not policy.plain_cache
    config = sampling_config(policy, temperature, top_p, args.max_new_tokens, n if stock_generate else 1)
    prompts_per_call = len(prompts)
    if args.generate_batch_size:
        prompts_per_call = max(1, args.generate_batch_size // n)
    completions, logprobs = [], []
    with eval_mode(policy), seeded(seed, policy.lm.device):
        for start in range(0, len(prompts), prompts_per_call):
            part = slice(start, start + prompts_per_call)
            inputs = dict(input_ids=ids[part], attention_mask=mask[part].long(), generation_config=config)
            if stock_generate:
                tokens = policy.lm.generate(**inputs)[:, ids.shape[1] :]
            else:
                tokens, token_logprobs = policy.lm.generate(
                    **inputs, custom_generate=decode, **policy.decoding(n, args)
                )
                logprobs.extend(token_logprobs.unbind())
            completions.extend(tokens.unbind())
    return rollout_batch(policy, ids, mask, completions, logprobs, n)


def compute_rewards(reward_functions, prompts, texts, truncated):
    """Score R completions; rows of one prompt are adjacent. A reward is the weighted sum of its parts.

    Returns rewards (R,); correct (R,), which is 1 or 0 whatever the rewards are, or None without gold answers; and
    parts {name: (R,)}. NaN marks rows without a gold answer, or to which a reward function does not apply.
    """
    parts, correct = score_rewards(reward_functions, prompts, texts, truncated)
    rewards = weighted_sum(reward_functions, parts)
    return rewards, correct, parts


class Round:
    """What a checkpoint keeps of a round: its number, pairs with the reference's log-probs, and how far they are used.

    Steps draw from endless permutations of the pairs, so what does not fill a step is left for the next pass.
    """

    def __init__(self, args):
        self.args = args
        self.number = 0
        self.pairs = []
        self.eval_pairs = []
        self.sampler = PromptSampler(self.pairs, args.seed)

    def begin(self, pairs, eval_pairs):
        self.number += 1
        self.pairs = pairs
        self.eval_pairs = eval_pairs
        self.sampler = PromptSampler(pairs, self.args.seed)

    def steps_left(self):
        return (len(self.pairs) * self.args.num_epochs - self.sampler.drawn) // self.args.pairs_per_step

    def state_dict(self):
        return {
            "number": self.number,
            "sampler": self.sampler.state_dict(),
            "pairs": [tuple(pair) for pair in self.pairs],
            "eval_pairs": [tuple(pair) for pair in self.eval_pairs],
        }

    def load_state_dict(self, state):
        self.number = state["number"]
        self.pairs = [Pair(*pair) for pair in state["pairs"]]
        self.eval_pairs = [Pair(*pair) for pair in state["eval_pairs"]]
        self.sampler = PromptSampler(self.pairs, self.args.seed)
        self.sampler.load_state_dict(state["sampler"])


def make_pairs(accelerator, policy, tokenizer, reward_functions, prompts, number, args, metrics):
    """Sample pair_samples completions of each prompt and pair the best with the worst where their rewards differ.

    Returns [Pair] and the same as rows of a preference dataset, both in the order of the prompts and the same on all
    processes. Completions without a stop token are in no pair: the file could not say that they are truncated.
    """
    n = args.pair_samples
    places = own_places(len(prompts), accelerator)
    own_prompts = [prompts[place % len(prompts)] for place in places]
    with accelerator.autocast():
        seed = (args.seed, accelerator.process_index, number, 1)
        batch = rollout(policy, own_prompts, n, args.temperature, 1.0, seed, args)
    texts = completion_texts(tokenizer, batch)
    truncated = batch["truncated"].tolist()
    rewards, correct, _ = compute_rewards(reward_functions, own_prompts, texts, batch["truncated"])
    if correct is None:
        correct = torch.full_like(rewards, torch.nan)
    made = []
    for i, (place, prompt) in enumerate(zip(places, own_prompts, strict=True)):
        if place >= len(prompts):  # a filler, which keeps the processes in step
            continue
        start, end = i * n, (i + 1) * n
        best, worst = best_and_worst(range(start, end), rewards, truncated)
        right = correct[start:end]
        metrics.add("pairs/yield", float(best is not None))
        metrics.add("pairs/truncated", truncated[start:end])
        metrics.add("pairs/unscored", rewards[start:end].isnan())
        metrics.add("pairs/accuracy", right, ~right.isnan())
        if best is not None:
            pair = Pair(prompt.ids, texts[best].ids, texts[worst].ids)
            made.append((place, pair, preference_row(prompt, str(texts[best]), str(texts[worst]))))
    made = sorted(gather_object(made), key=lambda item: item[0])
    return [pair for _, pair, _ in made], [row for _, _, row in made]


def best_and_worst(rows, rewards, truncated):
    """The rows of a prompt with the highest and the lowest reward, of equal ones the first; None, None if all agree.

    Only completions with a stop token and a reward are looked at.
    """
    ended = [row for row in rows if not truncated[row] and not rewards[row].isnan()]
    if not ended:
        return None, None
    best = max(ended, key=lambda row: float(rewards[row]))
    worst = min(ended, key=lambda row: float(rewards[row]))
    if nearly_equal(rewards[worst], rewards[best]):
        return None, None
    return best, worst


@torch.no_grad()
def with_reference(accelerator, model, pairs, args):
    """The pairs with the summed log-probs that `model` gives their completions now, the same on all processes."""
    if args.reference_free:
        return pairs
    # The reference is the policy before the round, so no second model is kept.
    found = []
    for indices, _, batch in spread_pairs(accelerator, pairs, args):
        logprobs, _ = model(batch, with_entropy=False)
        found += zip(indices, *logprobs.sum(dim=1).view(2, -1).tolist(), strict=True)
    pairs = list(pairs)
    for index, chosen, rejected in gather_object(found):
        pairs[index] = pairs[index]._replace(ref_chosen=chosen, ref_rejected=rejected)
    return pairs


def preference_loss(chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths, args):
    """The loss of each pair (B,), from log-probs (B,) summed over the completions and their lengths (B,) in tokens."""
    chosen_ratio = chosen if args.reference_free else chosen - ref_chosen
    rejected_ratio = rejected if args.reference_free else rejected - ref_rejected
    if args.ipo_per_token:
        chosen_ratio = chosen_ratio / chosen_lengths
        rejected_ratio = rejected_ratio / rejected_lengths
    # Of sums over the tokens: their means would be another model of preference.
    h = chosen_ratio - rejected_ratio
    smoothing = args.label_smoothing
    if args.loss == "ipo":
        losses = (h - 1 / (2 * args.beta)).square()
    elif args.loss == "robust":
        losses = -(1 - smoothing) * logsigmoid(args.beta * h) + smoothing * logsigmoid(-args.beta * h)
        losses = losses / (1 - 2 * smoothing)
    else:
        losses = -(1 - smoothing) * logsigmoid(args.beta * h) - smoothing * logsigmoid(-args.beta * h)  # Eq. 7
    return losses - args.nll_coef * chosen / chosen_lengths


def pair_losses(model, batch, args):
    """Losses (B,) and diagnostics {name: (B,)} of the B pairs of a forward."""
    logprobs, _ = model(batch, with_entropy=False)  # (2B, T), 0 outside the mask
    chosen, rejected = logprobs.sum(dim=1).chunk(2)
    ref_chosen, ref_rejected = batch["ref_logprobs"].chunk(2)
    chosen_lengths, rejected_lengths = batch["completion_mask"].sum(dim=1).chunk(2)
    losses = preference_loss(chosen, rejected, ref_chosen, ref_rejected, chosen_lengths, rejected_lengths, args)
    chosen_rewards = args.beta * (chosen - ref_chosen)
    rejected_rewards = args.beta * (rejected - ref_rejected)
    margins = (chosen_rewards - rejected_rewards).detach()
    stats = {
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/margin": margins,
        "rewards/accuracy": (margins.sign() + 1) / 2,  # a tie counts half
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }
    return losses, stats


def update_pairs(accelerator, model, optimizer, pairs, step, args, metrics):
    """One optimizer step on the mean loss of pairs_per_step pairs, of which `pairs` are this process's."""
    pairs = sorted(pairs, key=pair_tokens)  # the rows of one forward then need little padding
    size = args.micro_batch_size // 2
    step_loss = 0.0
    for start in range(0, len(pairs), size):
        batch = pair_batch(pairs[start : start + size], accelerator.device)
        with gradient_sync(accelerator, model, last=start + size >= len(pairs)):
            losses, stats = pair_losses(model, batch, args)
            loss = losses.sum() / args.pairs_per_step
            # Accelerate averages gradients over processes, but the weights count all processes: make it a sum.
            accelerator.backward(loss * accelerator.num_processes)
        step_loss = step_loss + loss.detach()
        for name, values in stats.items():
            metrics.add(name, values)
    norm = clip_grad_norm(accelerator, model.parameters(), args.max_grad_norm)
    if not torch.isfinite(norm + step_loss):
        raise InputError(f"step {step}: loss {float(step_loss)}, gradient norm {float(norm)}: not finite")
    optimizer.step()
    optimizer.zero_grad()
    metrics.add("optim/loss", step_loss * accelerator.num_processes)
    metrics.add("optim/grad_norm", norm)


def evaluate_both(accelerator, model, policy, tokenizer, reward_functions, prompts, current, args):
    """Evaluate on the held-out pairs of the round and by sampling on prompts, each where there are any.

    Returns what `evaluate` does.
    """
    result = {}
    shown = None
    if current.eval_pairs:
        result, _ = evaluate_pairs(accelerator, model, current.eval_pairs, args, pair_losses)
    if prompts:
        sampled, shown = evaluate(
            accelerator, model, policy, tokenizer, reward_functions, prompts, args, rollout, compute_rewards
        )
        result = result | sampled
    return result, shown


def check_loss(args):
    """Refuse options of the loss that would have no effect, or no sensible one."""
    if args.label_smoothing and args.loss == "ipo":
        raise InputError(f"--label_smoothing {args.label_smoothing}: the ipo loss has none")
    if args.ipo_per_token and args.loss != "ipo":
        raise InputError(f"--ipo_per_token needs --loss ipo, not {args.loss}")
    if args.pair_samples < 2:
        raise InputError(f"--pair_samples {args.pair_samples}: a pair is made of at least 2 completions")


def last_step(args, pairs):
    """The number of steps of a run: what `pairs` fill in all epochs, at most max_steps; without pairs max_steps."""
    if pairs:
        steps = len(pairs) * args.num_epochs // args.pairs_per_step
        return steps if args.max_steps < 0 else min(steps, args.max_steps)
    if args.max_steps < 0 and args.lr_scheduler != "constant":
        refuse(args, "lr_scheduler", "needs to know the end of the run: give --max_steps")
    return args.max_steps


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    check_loss(args)
    reward_functions = load_rewards(args)
    accelerator = launch(args)
    run = Run(accelerator, args, "dpo", reward_functions)
    tokenizer = load_tokenizer(args)
    train_prompts, given_pairs, eval_prompts, eval_pairs, data_summary = load_prompts_or_pairs(args, tokenizer)
    check_signatures(reward_functions, train_prompts, eval_prompts)
    end = last_step(args, given_pairs)
    # The log-probs are those of the model itself, at whatever temperature the pairs are sampled.
    policy = load_policy(args, tokenizer, accelerator, temperature=1.0)
    betas = (args.adam_beta1, args.adam_beta2)
    fused = True if accelerator.device.type == "cuda" else None  # the fused kernel copies no second moments
    optimizer = torch.optim.AdamW(
        policy.parameters(), args.learning_rate, betas, weight_decay=args.weight_decay, fused=fused
    )
    # `model` wraps `policy` (DDP, FSDP2) and runs what needs a gradient. `policy` samples completions and is saved.
    model, optimizer = accelerator.prepare(policy, optimizer)
    current = Round(args)
    sampler = PromptSampler(train_prompts or given_pairs, args.seed)
    # These are parts of every checkpoint.
    run.keep(data=DataDigest(train_prompts or given_pairs), round=current, sampler=sampler)
    run.start(data_summary, *policy.notes(tokenizer))
    run.save_step_model(model, policy, tokenizer)  # if a crash has prevented that of the step that is resumed
    rank, processes = accelerator.process_index, accelerator.num_processes

    evaluation = partial(
        evaluate_both, accelerator, model, policy, tokenizer, reward_functions, eval_prompts, current, args
    )
    for number in range(max(1, current.number), args.rounds + 1):
        round_metrics = {}
        if number > current.number:  # a resumed run has the pairs of its round
            # Make pairs with the current policy, or take the given ones.
            metrics = Metrics()
            start = time.perf_counter()
            pairs = given_pairs
            if train_prompts:
                prompts = [train_prompts[i] for i in sampler.draw(min(args.pair_prompts, len(train_prompts)))]
                with unsharded(accelerator, model):
                    pairs, rows = make_pairs(
                        accelerator, policy, tokenizer, reward_functions, prompts, number, args, metrics
                    )
                run.write_rows(f"pairs-round-{number}.jsonl", rows, "w")
                metrics.add("pairs/made", len(pairs))
            # The policy as it is now is the reference of the round.
            eval_pairs = with_reference(accelerator, model, eval_pairs, args)
            pairs = with_reference(accelerator, model, pairs, args)
            metrics.add("time/pairs_s", time.perf_counter() - start)
            round_metrics = metrics.reduce(accelerator, reward_functions)
            if train_prompts:
                round_metrics["reward/skipped"] = float(round_metrics["pairs/unscored"] == 1)
            run.check_scored(round_metrics)  # a run that ends here makes the pairs of this round anew
            current.begin(pairs, eval_pairs)
            run.print(f"round {number}: {len(pairs)} pairs, {current.steps_left()} steps")
            if round_metrics.get("reward/skipped"):
                run.log(round_metrics)
                continue
            if train_prompts and rows:
                run.print("{prompt!r} -> {chosen!r} rather than {rejected!r}".format_map(rows[0]))
            if current.steps_left() == 0 and args.max_steps != 0:
                visits = f"{count(len(pairs), 'pair')} x {count(args.num_epochs, 'pass')}"
                sizes = f"{visits} do not fill a step of {args.pairs_per_step}"
                if run.step == 0:
                    pair = "two finished completions of a prompt with different rewards are a pair"
                    raise InputError(f"{sizes} pairs: lower --pairs_per_step or raise --num_epochs; {pair}")
                run.print(f"round {number}: {sizes}: the run ends")
                break
        if run.first_eval is None:
            run.first_evaluation(evaluation, tokenizer, beside=round_metrics)
            round_metrics = {}
        # Update the model, and log the metrics.
        while current.steps_left() > 0 and not run.interrupted and not 0 <= args.max_steps <= run.step:
            step = run.step + 1
            metrics = Metrics()
            start = time.perf_counter()
            pairs = [current.pairs[i] for i in current.sampler.draw(args.pairs_per_step)[rank::processes]]
            lr = learning_rate(run.step, args, end)
            for group in optimizer.param_groups:
                group["lr"] = lr
            update_pairs(accelerator, model, optimizer, pairs, step, args, metrics)
            run.step = step
            add_pair_metrics(metrics, pairs, start, accelerator.device)
            result = round_metrics | metrics.reduce(accelerator) | {"optim/lr": lr}
            round_metrics = {}
            run.end_step(result, evaluation, last=current.steps_left() == 0 or step == args.max_steps)
            run.save_step_model(model, policy, tokenizer)
        if run.interrupted or 0 <= args.max_steps <= run.step:
            break

    run.finish(model, policy, tokenizer)
    # gloo can hang if the prepared model outlives Accelerate's end.
    del policy, model, optimizer, evaluation
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
