"""Online DPO: the policy samples the pairs that it trains on (arXiv 2402.04792).

Of the completions of a prompt, the best and the worst by --reward form a pair if their rewards
differ. Truncated completions are in no pair. When the pairs are used up, the current policy samples
new ones and becomes the new reference, so --beta pulls towards the policy of the last round.
pairs-N.jsonl holds the pairs of round N; dpo.py and reward_model.py can train on them.
"""

from common.masked import all_equal
from harness.chat import TEMPLATE_COLUMNS
from harness.data import load_prompts
from harness.launch import shard_indices


class Args:
    del dataset, eval_dataset, max_steps  # as in harness/args.py: prompts, and 50 steps
    nll_coef: float = option(0.0, "c, weight of -log p(chosen) / length", ge=0)
    num_epochs: int = option(1, "passes over the pairs of a round", gt=0)
    pair_prompts: int = option(512, "prompts of a round, over all processes", gt=0)
    pair_samples: int = option(8, "completions of each prompt", gt=1)
    pair_temperature: float = option(1.0, "sampling temperature of the pairs", gt=0)


class PairBuffer:
    """The pairs of a round and the order of their draws, as part of each checkpoint."""

    def __init__(self, args, rank, processes):
        self.args = args
        self.shard = rank, processes
        self.round = 0
        self.sampler = PromptSampler([], args.seed)

    def fill(self, pairs):
        self.round += 1
        self.sampler = PromptSampler(pairs, self.args.seed, *self.shard)

    def steps_left(self):
        draws = len(self.sampler.prompts) * self.args.num_epochs - self.sampler.drawn
        return draws // self.args.pairs_per_step

    def state_dict(self):
        pairs = [tuple(pair) for pair in self.sampler.prompts]
        return {"round": self.round, "pairs": pairs, "drawn": self.sampler.drawn}

    def load_state_dict(self, state):
        self.fill([Pair(*pair) for pair in state["pairs"]])
        self.round = state["round"]
        self.sampler.drawn = state["drawn"]


def make_pairs(accelerator, sample_and_score, prompts, seed, args, metrics):
    """Pair the best completion of each prompt with the worst, where their rewards differ.

    Return [Pair], and the same as rows of a preference dataset, on all processes.
    """
    n = args.pair_samples
    indices = shard_indices(len(prompts), accelerator)
    shard = [prompts[index % len(prompts)] for index in indices]
    samples = sample_and_score(shard, n, args.pair_temperature, 1.0, seed)
    metrics.add("pairs/truncated", samples.batch["truncated"].cpu())
    made = []  # (index of the prompt, pair, row)
    for i, (index, prompt) in enumerate(zip(indices, shard, strict=True)):
        if index >= len(prompts):  # a filler
            continue
        rewards = samples.rewards[i * n : (i + 1) * n]
        completions = samples.completions[i * n : (i + 1) * n]
        pair = best_and_worst(rewards, completions)
        metrics.add("pairs/yield", pair is not None)
        if pair is not None:
            best, worst = pair
            row = preference_row(prompt, best.text, worst.text)
            made.append((index, Pair(prompt.ids, best.ids, worst.ids), row))
    made = sorted(gather_object(made), key=lambda item: item[0])
    made = [item for item in made if item[1].length() <= args.max_length]
    return [pair for _, pair, _ in made], [row for _, _, row in made]


def best_and_worst(rewards, completions):
    """Return the completions with the highest and the lowest reward, or None if all are equal."""
    ended = [i for i, completion in enumerate(completions) if not completion.truncated]
    if not ended or all_equal(rewards[None, ended]):
        return None
    best = max(ended, key=lambda i: float(rewards[i]))
    worst = min(ended, key=lambda i: float(rewards[i]))
    return completions[best], completions[worst]


def preference_row(prompt, chosen, rejected):
    """Return a row of a preference dataset. Completions are messages if the prompt is."""
    row = {"prompt": prompt.prompt, "chosen": chosen, "rejected": rejected}
    if isinstance(prompt.prompt, list):
        row["chosen"] = [{"role": "assistant", "content": chosen}]
        row["rejected"] = [{"role": "assistant", "content": rejected}]
    columns = [name for name in TEMPLATE_COLUMNS if name in prompt.columns]
    return row | {name: prompt.columns[name] for name in columns}


def main(argv=None):
    args = parse_args(Args, argv)
    run = Run("online_dpo", args)
    accelerator = run.accelerator
    train_prompts, eval_prompts = load_prompts(args, run.tokenizer)
    policy = load_policy(args, run.tokenizer, accelerator)
    # `model` wraps `policy` for training (DDP, FSDP2); `policy` itself samples.
    model, optimizer = accelerator.prepare(policy, adamw(policy, args))
    sampler = PromptSampler(train_prompts, args.seed)  # of all processes
    buffer = PairBuffer(args, run.rank, run.processes)

    def sample_and_score(prompts, n, temperature, top_p, seed):
        with accelerator.autocast(), summon_full_params(accelerator, model):
            batch = rollout(policy, prompts, n, temperature, top_p, seed, args)
        completions = decode_completions(run.tokenizer, batch)
        rewards, terms = compute_rewards(run.reward_functions, prompts, completions, n)
        return Samples(batch, prompts, completions, rewards, terms)

    run.start(model, sampler=sampler, buffer=buffer)
    if run.evaluates(step=0):
        run.log_scores(evaluate(run, eval_prompts, sample_and_score))
    for step in run.steps():
        metrics = Metrics(run)
        if buffer.steps_left() == 0:
            # Sample pairs from the current policy, which is their reference.
            prompts = sampler.draw(min(args.pair_prompts, len(train_prompts)))
            seed = (args.seed, run.rank, buffer.round + 1, 1)
            with metrics.timed("pairs"):
                pairs, rows = make_pairs(
                    accelerator, sample_and_score, prompts, seed, args, metrics
                )
                buffer.fill(add_ref_logprobs(accelerator, model, pairs, args) if pairs else [])
            run.log.write(f"pairs-{buffer.round}.jsonl", rows, mode="w")
            metrics.add("pairs/made", len(pairs))
        if buffer.steps_left() == 0:
            run.end_early(metrics, f"{len(pairs)} pairs do not fill a step")
            run.log_scores(evaluate(run, eval_prompts, sample_and_score))
            run.end_step()
            break
        # Update the policy on the next pairs; a process takes its share of them.
        pairs = buffer.sampler.draw(args.pairs_per_step)
        set_learning_rate(optimizer, learning_rate(step - 1, args))
        with metrics.timed("update"):
            update(accelerator, model, optimizer, pairs, args, metrics)
        metrics.add_pairs(pairs)
        run.log_step(metrics)
        if run.evaluates(step):
            run.log_scores(evaluate(run, eval_prompts, sample_and_score))
        run.end_step()
    run.finish(policy)
