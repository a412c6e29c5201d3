"""Online DPO: the policy samples the pairs that it trains on (arXiv 2402.04792).

Of the completions of a prompt, the best and the worst by --reward form a pair if their rewards
differ. Completions that are truncated or have no reward are in no pair. When the pairs are used up,
the current policy samples new ones and becomes the new reference, so --beta pulls towards the
policy of the last round. pairs-N.jsonl holds the pairs of round N; dpo.py and reward_model.py can
train on them. The recipe is long because a loop over rounds is another `main`, and a round has to
survive a resume.
"""

import json

from common.load import TEMPLATE_COLUMNS, load_data, read_prompts
from common.masked import all_equal


class Args:
    del dataset, eval_dataset, max_steps  # as in common/run.py: prompts, and 50 steps
    nll_coef: float = option(0.0, "c, weight of -log p(chosen) / length", ge=0)
    num_epochs: int = option(1, "passes over the pairs of a round", gt=0)
    pair_prompts: int = option(512, "prompts of a round, over all processes", gt=0)
    pair_samples: int = option(8, "completions of each prompt", gt=1)
    pair_temperature: float = option(1.0, "sampling temperature of the pairs", gt=0)


class PairBuffer:
    """The pairs of a round and the order of their draws, as part of each checkpoint."""

    def __init__(self, args, accelerator):
        self.args = args
        self.accelerator = accelerator
        self.round = 0
        self.sampler = PromptSampler([], args.seed, accelerator)

    def fill(self, pairs):
        self.round += 1
        self.sampler = PromptSampler(pairs, self.args.seed, self.accelerator)

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
    """Pair the best completion of each prompt of this process with the worst, if they differ.

    Return [Pair], and the same as rows of a preference dataset, of all processes.
    """
    n = args.pair_samples
    samples = sample_and_score(prompts, n, args.pair_temperature, 1.0, seed)
    metrics.add("pairs/truncated", samples.batch["truncated"].cpu())
    made = []  # (index of the prompt, pair, row)
    for i, prompt in enumerate(prompts):
        index = i * accelerator.num_processes + accelerator.process_index
        rewards = samples.rewards[i * n : (i + 1) * n]
        completions = samples.completions[i * n : (i + 1) * n]
        pair = best_and_worst(rewards, completions, samples.is_scored[i * n : (i + 1) * n])
        metrics.add("pairs/yield", pair is not None)
        if pair is not None:
            best, worst = pair
            row = preference_row(prompt, best.text, worst.text)
            made.append((index, Pair(prompt.ids, best.ids, worst.ids), row))
    made = sorted(gather_object(made), key=lambda item: item[0])
    made = [item for item in made if item[1].length() <= args.max_length]
    return [pair for _, pair, _ in made], [row for _, _, row in made]


def best_and_worst(rewards, completions, is_scored):
    """Return the completions with the highest and the lowest reward, or None if all are equal."""
    ended = [i for i, x in enumerate(completions) if is_scored[i] and not x.truncated]
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
    args = run.parse_args(Args, argv)
    accelerator = run.make_accelerator(args)
    folder = run.open_folder(accelerator, args)
    reward_functions = load_rewards(args)
    tokenizer, lm = load_policy(args, accelerator)
    if args.fast:
        from fast import speed_up

        speed_up(lm, accelerator)
    train_prompts, eval_prompts = load_data(read_prompts, args, tokenizer)
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights,
        args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.weight_decay,
        fused=accelerator.device.type == "cuda",
    )
    # `model` wraps `lm` for training (DDP, FSDP2); `lm` itself samples.
    model, optimizer = accelerator.prepare(lm, optimizer)
    sampler = PromptSampler(train_prompts, args.seed, accelerator)
    buffer = PairBuffer(args, accelerator)
    checkpoints = run.Checkpoints(accelerator, folder, args, sampler=sampler, buffer=buffer)
    first_step = checkpoints.resume()
    log = run.Log(accelerator, folder, args)

    def sample_and_score(prompts, n, temperature, top_p, seed):
        with accelerator.autocast(), gathered_weights(model):
            batch = rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args)
        completions = decode_completions(tokenizer, batch)
        log.print_once("first completion", repr(tokenizer.decode(completions[0].ids)))
        total, terms = compute_rewards(reward_functions, prompts, completions, n)
        return Samples(batch, prompts, completions, total, terms)

    if first_step == 0:
        scores, records = evaluate(accelerator, eval_prompts, sample_and_score, args)
        log.write(0, {}, records, scores)
    signals = run.listen(accelerator)
    for step in log.steps(first_step):
        metrics = Means()
        if buffer.steps_left() == 0:
            # Sample pairs from the current policy, which is their reference.
            processes = accelerator.num_processes
            count = min(args.pair_prompts, len(train_prompts)) // processes * processes
            prompts = sampler.draw(count)
            seed = (args.seed, accelerator.process_index, buffer.round + 1, 1)
            with metrics.timed("pairs"):
                pairs, rows = make_pairs(
                    accelerator, sample_and_score, prompts, seed, args, metrics
                )
                buffer.fill(add_ref_logprobs(accelerator, model, pairs, args) if pairs else [])
            if accelerator.is_main_process:
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / f"pairs-{buffer.round}.jsonl").write_text(text, encoding="utf-8")
            metrics.add("pairs/made", len(pairs))
        if buffer.steps_left() == 0:
            run.print0(f"step {step}: {len(pairs)} pairs do not fill a step: training ends")
            scores, records = evaluate(accelerator, eval_prompts, sample_and_score, args)
            log.write(step, metrics.reduce(accelerator), records, scores)
            break
        # Update the policy on the next pairs; a process takes its share of them.
        pairs = buffer.sampler.draw(args.pairs_per_step)
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate(step - 1, args)
        with metrics.timed("update"):
            update(accelerator, model, optimizer, pairs, args, metrics)
        metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
        metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
        records, scores = [], {}
        if run.is_due(step, args.eval_every, args.max_steps):
            scores, records = evaluate(accelerator, eval_prompts, sample_and_score, args)
        log.write(step, metrics.reduce(accelerator), records, scores)
        checkpoints.end_step(step, signals)
    if args.max_steps:
        save_model(accelerator, model, tokenizer, folder)
    log.summary()
    run.finish(accelerator)
