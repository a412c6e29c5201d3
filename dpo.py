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
Left out: SimPO, KTO, hinge and other relatives; a reference other than the starting policy.

    accelerate launch dpo.py                     the embedded model and pairs of its own; nothing is downloaded
    accelerate launch dpo.py --rounds 4          again and again, each time with the current policy
    accelerate launch dpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset trl-lib/ultrafeedback_binarized --learning_rate 5e-7 --warmup_steps 150 --pairs_per_step 64 \\
        --micro_batch_size 8

docs/dpo.md has usage, results, and the details of the implementation one by one.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Literal

import torch
from accelerate.utils import gather_object
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from common.batches import completion_texts, left_pad
from common.errors import InputError, clean_exit, refuse
from common.generation import decode, sampling_config, seeded
from common.harness.args import RolloutArgs, learning_rate, option
from common.harness.command_line import parse_args
from common.harness.data import PromptSampler, find_sources, load_prompts, read_rows
from common.harness.distributed import clip_grad_norm, gradient_sync, launch, unsharded
from common.harness.loading import load_policy, load_tokenizer
from common.harness.metrics import Metrics, peak_memory_gb
from common.harness.pairs import Pair, load_pairs, pair_tokens
from common.harness.prompts import TEMPLATE_COLUMNS
from common.harness.run import Run
from common.masked import completion_mask, nearly_equal, pass_at_k
from common.rewards import load_rewards, score_rewards, weighted_sum


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
        return f"{pairs} pairs, {pairs // processes} on each process; {self.num_epochs} passes over the pairs"


@torch.no_grad()
def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """Sample n completions of each prompt from `policy`; rows of one prompt are adjacent.

    `seed`, one or several numbers, selects the random stream. Returns a batch of R = n x len(prompts) rows: prompts
    (R, P) padded on the left, prompt_mask (R, P), completions (R, T), completion_mask (R, T) and truncated (R,). It
    also has prompt_index (R, 1), equal for rows of one prompt, if the update may compute a prompt once for all its
    rows; and rollout_logprobs (R, T), unless stock `generate` sampled.
    """
    ids, mask = left_pad([prompt.ids for prompt in prompts], policy.pad_token, policy.lm.device)  # (R / n, P)
    stock_generate = args.rollout == "hf" or not policy.plain_cache
    config = sampling_config(policy, temperature, top_p, args.max_new_tokens, n if stock_generate else 1)
    size = max(1, args.generate_batch_size // n) if args.generate_batch_size else len(prompts)
    completions, logprobs = [], []
    training = policy.training
    policy.eval()  # generate() does not do this; in training mode gradient checkpointing silently drops the cache
    with seeded(seed, policy.lm.device):
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            inputs = dict(input_ids=ids[part], attention_mask=mask[part].long(), generation_config=config)
            if stock_generate:
                completions += policy.lm.generate(**inputs)[:, ids.shape[1] :]
            else:
                graphs = policy.graphs and args.rollout == "shared"
                own = dict(custom_generate=decode, n=n, head_is_last=policy.head_is_last, graphs=graphs)
                tokens, token_logprobs = policy.lm.generate(**inputs, **own)
                completions += tokens
                logprobs += token_logprobs
    policy.train(training)
    batch = {"prompts": ids.repeat_interleave(n, dim=0), "prompt_mask": mask.repeat_interleave(n, dim=0)}
    batch["completions"] = pad_sequence(completions, batch_first=True, padding_value=policy.pad_token)
    batch["completion_mask"], batch["truncated"] = completion_mask(batch["completions"], policy.stop_tokens)
    batch |= policy.prompt_columns(len(prompts), n)
    if not stock_generate:
        batch["rollout_logprobs"] = pad_sequence(logprobs, batch_first=True)
    return batch


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
        self.args, self.number, self.pairs, self.eval_pairs = args, 0, [], []
        self.sampler = PromptSampler(self.pairs, args.seed)

    def begin(self, pairs, eval_pairs):
        self.number, self.pairs, self.eval_pairs = self.number + 1, pairs, eval_pairs
        self.sampler = PromptSampler(pairs, self.args.seed)

    def steps_left(self):
        return (len(self.pairs) * self.args.num_epochs - self.sampler.drawn) // self.args.pairs_per_step

    def state_dict(self):
        pairs = {name: [tuple(pair) for pair in getattr(self, name)] for name in ("pairs", "eval_pairs")}
        return {"number": self.number, "sampler": self.sampler.state_dict(), **pairs}

    def load_state_dict(self, state):
        self.number = state["number"]
        self.pairs, self.eval_pairs = ([Pair(*pair) for pair in state[name]] for name in ("pairs", "eval_pairs"))
        self.sampler = PromptSampler(self.pairs, self.args.seed)
        self.sampler.load_state_dict(state["sampler"])


def make_pairs(accelerator, policy, tokenizer, reward_functions, prompts, number, args, metrics):
    """Sample pair_samples completions of each prompt and pair the best with the worst where their rewards differ.

    Returns [Pair] and the same as rows of a preference dataset, both in the order of the prompts and the same on all
    processes. Completions without a stop token are in no pair: the file could not say that they are truncated.
    """
    rank, processes, n = accelerator.process_index, accelerator.num_processes, args.pair_samples
    indices = range(rank, -(-len(prompts) // processes) * processes, processes)
    mine = [prompts[i % len(prompts)] for i in indices]  # fillers keep the processes in step
    with accelerator.autocast():
        seed = (args.seed, rank, number, 1)
        batch = rollout(policy, mine, n, args.temperature, 1.0, seed, args)
    texts, truncated = completion_texts(tokenizer, batch), batch["truncated"].tolist()
    rewards, correct, _ = compute_rewards(reward_functions, mine, texts, batch["truncated"])
    found = []
    for i, prompt, start in zip(indices, mine, range(0, len(texts), n), strict=True):
        if i >= len(prompts):
            continue
        ended = [row for row in range(start, start + n) if not truncated[row] and not rewards[row].isnan()]
        best = max(ended, key=lambda row: float(rewards[row]), default=None)  # of equal ones the first, as below
        worst = min(ended, key=lambda row: float(rewards[row]), default=None)
        differ = best is not None and not nearly_equal(rewards[worst], rewards[best])
        metrics.add("pairs/yield", float(differ))
        metrics.add("pairs/truncated", truncated[start : start + n])
        metrics.add("pairs/unscored", rewards[start : start + n].isnan())
        right = torch.full((n,), torch.nan) if correct is None else correct[start : start + n]
        metrics.add("pairs/accuracy", right, ~right.isnan())
        if differ:
            pair = Pair(prompt.ids, texts[best].ids, texts[worst].ids)
            found.append((i, pair, preference_row(prompt, str(texts[best]), str(texts[worst]))))
    found = sorted(gather_object(found), key=lambda item: item[0])
    return [pair for _, pair, _ in found], [row for _, _, row in found]


def preference_row(prompt, chosen, rejected):
    """A row of a preference dataset in TRL's format: plain text, or messages where the prompt is; with the columns that
    a chat template reads."""
    if isinstance(prompt.prompt, list):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    columns = {name: prompt.columns[name] for name in TEMPLATE_COLUMNS if name in prompt.columns}
    return {"prompt": prompt.prompt, "chosen": chosen, "rejected": rejected} | columns


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
    chosen_ratio, rejected_ratio = chosen - ref_chosen, rejected - ref_rejected
    if args.reference_free:
        chosen_ratio, rejected_ratio = chosen, rejected
    if args.ipo_per_token:
        chosen_ratio, rejected_ratio = chosen_ratio / chosen_lengths, rejected_ratio / rejected_lengths
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
    chosen_rewards, rejected_rewards = args.beta * (chosen - ref_chosen), args.beta * (rejected - ref_rejected)
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
    size, step_loss = args.micro_batch_size // 2, 0.0
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


def pair_batch(pairs, device):
    """B pairs as a batch of 2B rows for one forward, first the chosen completions, then the rejected ones: what
    `Policy.forward` reads, and `ref_logprobs` (2B,), the reference's log-probs of whole completions."""
    prompts, chosen, rejected, ref_chosen, ref_rejected = zip(*pairs, strict=True)
    prompt_ids, prompt_mask = left_pad(prompts * 2, 0, device)  # (2B, P)
    lengths = [(len(prompt), len(row)) for prompt, row in zip(prompts * 2, chosen + rejected, strict=True)]
    ids = pad_sequence([torch.tensor(row) for row in chosen + rejected], batch_first=True)  # (2B, T)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, 1:]  # (2B, T)
    return {
        "prompts": prompt_ids,
        "prompt_mask": prompt_mask,
        "completions": ids.to(device, non_blocking=True),
        "completion_mask": mask.to(device, non_blocking=True),
        "prompt_index": torch.arange(len(pairs), device=device).repeat(2)[:, None],
        "ref_logprobs": torch.tensor(ref_chosen + ref_rejected).to(device, non_blocking=True),
        "lengths": lengths,
        "groups": [*range(len(pairs))] * 2,
    }


@torch.no_grad()
def evaluate_pairs(accelerator, model, pairs, args):
    """Loss, accuracy and margin on all evaluation pairs, spread over the processes."""
    metrics = Metrics()
    for _, real, batch in spread_pairs(accelerator, pairs, args):
        losses, stats = pair_losses(model, batch, args)
        metrics.add("eval/loss", losses, real)
        metrics.add("eval/accuracy", stats["rewards/accuracy"], real)
        metrics.add("eval/margin", stats["rewards/margin"], real)
    return metrics.reduce(accelerator)


def spread_pairs(accelerator, pairs, args):
    """This process's pairs by length, a forward at a time: (indices, real, batch); `real` (B,) is false for fillers."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    order = sorted(range(len(pairs)), key=lambda i: pair_tokens(pairs[i]))
    places = range(rank, -(-len(pairs) // processes) * processes, processes)
    size = args.micro_batch_size // 2
    for part in (places[start : start + size] for start in range(0, len(places), size)):
        indices = [order[place % len(pairs)] for place in part]
        real = torch.tensor([place < len(pairs) for place in part], device=accelerator.device)
        yield indices, real, pair_batch([pairs[i] for i in indices], accelerator.device)


def evaluate(accelerator, policy, tokenizer, reward_functions, prompts, args):
    """pass@1, the unbiased pass@k, mean reward and length over all evaluation prompts, spread over the processes.

    Returns the metrics {name: value}; and four prompts to show, with their completions, rewards and parts of rewards.
    """
    n = args.eval_samples if args.eval_temperature > 0 else 1
    rank, processes = accelerator.process_index, accelerator.num_processes
    indices = range(rank, -(-len(prompts) // processes) * processes, processes)
    real = torch.tensor([i < len(prompts) for i in indices])  # fillers keep the processes in step and are not counted
    mine = [prompts[i % len(prompts)] for i in indices]
    with accelerator.autocast():
        seed = (args.seed, rank, 0, 0)  # training uses (seed, rank, step, round), and steps count from 1
        batch = rollout(policy, mine, n, args.eval_temperature, args.eval_top_p, seed, args)
    texts = completion_texts(tokenizer, batch)
    rewards, correct, parts = compute_rewards(reward_functions, mine, texts, batch["truncated"])
    correct = (torch.full_like(rewards, torch.nan) if correct is None else correct).view(-1, n)
    answered, metrics = real & ~correct.isnan().any(dim=1), Metrics()
    metrics.add("eval/pass@1", correct.mean(dim=1), answered)
    if n > 1:
        metrics.add(f"eval/pass@{args.eval_k}", pass_at_k(correct, args.eval_k), answered)
    metrics.add("eval/reward", rewards.view(-1, n), real[:, None] & ~rewards.view(-1, n).isnan())
    metrics.add("eval/length", batch["completion_mask"].sum(dim=1).cpu().double().view(-1, n).mean(dim=1), real)
    return metrics.reduce(accelerator, reward_functions), (mine[:4], texts[: 4 * n], rewards, parts)


def evaluate_both(accelerator, model, policy, tokenizer, reward_functions, prompts, pairs, args):
    """Evaluate on held-out pairs and by sampling on prompts, each where there are any; returns what `evaluate` does."""
    result, sampled = evaluate_pairs(accelerator, model, pairs, args) if pairs else {}, None
    if prompts:
        with unsharded(accelerator, model):
            metrics, sampled = evaluate(accelerator, policy, tokenizer, reward_functions, prompts, args)
        result |= metrics
    return result, sampled


def load_data(args, tokenizer):
    """(prompts, pairs, eval_prompts, eval_pairs, summary): training on prompts, or on pairs where --dataset has them.

    Given pairs are evaluated on held-out pairs, and by sampling too where --eval_dataset has prompts.
    """
    source, eval_source = find_sources(args)
    if not holds_pairs(source):
        prompts, eval_prompts, summary = load_prompts(args, tokenizer, args.needs_answers, train=True)
        return prompts, [], eval_prompts, [], summary
    if args.rounds > 1:
        raise InputError(f"--rounds {args.rounds}: {args.dataset} holds pairs, and rounds make their own from prompts")
    if not args.eval_dataset or holds_pairs(eval_source):
        pairs, eval_pairs, summary = load_pairs(args, tokenizer, args.eval_prompts, train=True)
        return [], pairs, [], eval_pairs, summary
    own = dataclasses.replace(args, eval_dataset=None, eval_split=None)
    pairs, eval_pairs, summary = load_pairs(own, tokenizer, args.eval_prompts, train=True)
    _, eval_prompts, note = load_prompts(args, tokenizer, args.needs_answers, train=False)
    return [], pairs, eval_prompts, eval_pairs, f"{summary}\n{note}"


def holds_pairs(source):
    """Whether a source has preference pairs, by the columns of its first row."""
    return {"chosen", "rejected"} <= next(read_rows(source), ("", {}))[1].keys()


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


def pair_metrics(metrics, pairs, start, device):
    """Lengths of this process's pairs of a step, seconds and tokens (of the prompt with each completion) per second of
    its update, and peak memory."""
    metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
    metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
    tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    metrics.add_speed("update", time.perf_counter() - start, tokens)
    metrics.add_max("memory/peak_gb", peak_memory_gb(device))


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    check_loss(args)
    reward_functions = load_rewards(args)
    accelerator = launch(args)
    run = Run(accelerator, args, "dpo", reward_functions)
    tokenizer = load_tokenizer(args)
    train_prompts, given_pairs, eval_prompts, eval_pairs, data_summary = load_data(args, tokenizer)
    end = last_step(args, given_pairs)
    # The log-probs are those of the model itself, at whatever temperature the pairs are sampled.
    policy = load_policy(args, tokenizer, accelerator, temperature=1.0)
    betas = (args.adam_beta1, args.adam_beta2)
    fused = accelerator.device.type == "cuda" or None  # there it makes no copy of the second moments
    optimizer = torch.optim.AdamW(
        policy.parameters(), args.learning_rate, betas, weight_decay=args.weight_decay, fused=fused
    )
    # `model` wraps `policy` (DDP, FSDP2) and runs what needs a gradient. `policy` samples completions and is saved.
    model, optimizer = accelerator.prepare(policy, optimizer)
    current, sampler = Round(args), PromptSampler(train_prompts or given_pairs, args.seed)
    run.keep(round=current, sampler=sampler)  # parts of every checkpoint
    run.start(data_summary, *policy.notes(tokenizer))
    run.save_step_model(model, policy, tokenizer)  # of the resumed step, where a crash came before it
    rank, processes = accelerator.process_index, accelerator.num_processes

    for number in range(max(1, current.number), args.rounds + 1):
        round_metrics = {}
        # Make pairs with the current policy, or take the given ones, and compute the reference's log-probs.
        if number > current.number:  # a resumed run has the pairs of its round
            metrics, start, pairs = Metrics(), time.perf_counter(), given_pairs
            if train_prompts:
                prompts = [train_prompts[i] for i in sampler.draw(min(args.pair_prompts, len(train_prompts)))]
                with unsharded(accelerator, model):
                    pairs, rows = make_pairs(
                        accelerator, policy, tokenizer, reward_functions, prompts, number, args, metrics
                    )
                run.write_rows(f"pairs-round-{number}.jsonl", rows, "w")
                metrics.add("pairs/made", len(pairs))
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
                sizes = f"{len(pairs)} pairs x {args.num_epochs} passes do not fill a step of {args.pairs_per_step}"
                if run.step == 0:
                    pair = "two finished completions of a prompt with different rewards are a pair"
                    raise InputError(f"{sizes} pairs: lower --pairs_per_step or raise --num_epochs; {pair}")
                run.print(f"round {number}: {sizes}: the run ends")
                break
        if run.first_eval is None:
            result, sampled = evaluate_both(
                accelerator, model, policy, tokenizer, reward_functions, eval_prompts, current.eval_pairs, args
            )
            run.log_evaluation(result, sampled, tokenizer)
            run.log(round_metrics | result)
            round_metrics = {}
        # Update the model, and log the metrics.
        while current.steps_left() > 0 and not run.interrupted and not 0 <= args.max_steps <= run.step:
            step, metrics, start = run.step + 1, Metrics(), time.perf_counter()
            pairs = [current.pairs[i] for i in current.sampler.draw(args.pairs_per_step)[rank::processes]]
            lr = learning_rate(run.step, args, end)
            for group in optimizer.param_groups:
                group["lr"] = lr
            update_pairs(accelerator, model, optimizer, pairs, step, args, metrics)
            run.step = step
            pair_metrics(metrics, pairs, start, accelerator.device)
            result = round_metrics | metrics.reduce(accelerator) | {"optim/lr": lr}
            round_metrics = {}
            run.progress(result)
            last = current.steps_left() == 0 or run.step == args.max_steps  # of the round
            if last or run.due(args.eval_every, at_end=False):
                evaluation, sampled = evaluate_both(
                    accelerator, model, policy, tokenizer, reward_functions, eval_prompts, current.eval_pairs, args
                )
                run.log_evaluation(evaluation, sampled)
                result |= evaluation
            run.log(result)
            if run.stop_asked() or (args.save_every and (last or run.due(args.save_every, at_end=False))):
                run.save()
            run.save_step_model(model, policy, tokenizer)
        if run.interrupted or 0 <= args.max_steps <= run.step:
            break

    run.finish(model, policy, tokenizer)
    del policy, model, optimizer
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
