"""Evaluation by sampling: what a policy scores on prompts that it is not trained on."""

import torch

from common.batches import completion_texts
from common.harness.distributed import own_places, unsharded
from common.harness.metrics import Metrics
from common.masked import pass_at_k

SHOWN_PROMPTS = 4  # of an evaluation, in samples.jsonl


def evaluate(accelerator, model, policy, tokenizer, reward_functions, prompts, args, rollout, compute_rewards):
    """pass@1, the unbiased pass@k, mean reward and length over all evaluation prompts, spread over the processes.

    `model` is `policy` as Accelerate has prepared it; `rollout` and `compute_rewards` are those of the script. Returns
    the metrics {name: value}; and some prompts to show, with their completions, rewards and parts of rewards.
    """
    n = args.eval_samples if args.eval_temperature > 0 else 1
    places = own_places(len(prompts), accelerator)
    own_prompts = [prompts[place % len(prompts)] for place in places]
    counted = torch.tensor([place < len(prompts) for place in places])  # false for fillers
    with accelerator.autocast(), unsharded(accelerator, model):  # sharded weights are whole while it samples
        seed = (
            args.seed,
            accelerator.process_index,
            0,
            0,
        )  # training uses (seed, rank, step, round), with steps from 1
        batch = rollout(policy, own_prompts, n, args.eval_temperature, args.eval_top_p, seed, args)
    texts = completion_texts(tokenizer, batch)
    rewards, correct, parts = compute_rewards(reward_functions, own_prompts, texts, batch["truncated"])
    metrics = Metrics()
    if correct is None:
        correct = torch.full_like(rewards, torch.nan)
    correct = correct.view(-1, n)
    answered = counted & ~correct.isnan().any(dim=1)
    metrics.add("eval/pass@1", correct.mean(dim=1), answered)
    if n > 1:
        metrics.add(f"eval/pass@{args.eval_k}", pass_at_k(correct, args.eval_k), answered)
    by_prompt = rewards.view(-1, n)
    metrics.add("eval/reward", by_prompt, counted[:, None] & ~by_prompt.isnan())
    lengths = batch["completion_mask"].sum(dim=1).cpu().double()
    metrics.add("eval/length", lengths.view(-1, n).mean(dim=1), counted)
    shown = (own_prompts[:SHOWN_PROMPTS], texts[: SHOWN_PROMPTS * n], rewards, parts)
    return metrics.reduce(accelerator, reward_functions), shown
