"""Prints the numbers of docs/one_step.md: a step of grpo.py, and its rows in other algorithms.

python examples/one_step.py

The step is that of `python grpo.py --prompts_per_step 2 --group_size 4 --max_new_tokens 27 --num_epochs 2
--max_steps 1 --seed 51`, taken here by hand with the functions of the scripts, on a CPU.
"""

import copy
import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the scripts are

import dapo
import dcpo
import dpo
import dr_grpo
import grpo
import gspo
import ppo
from common.batches import completion_texts, split_rollout
from common.harness.data import PromptSampler, load_prompts
from common.harness.distributed import clip_grad_norm
from common.harness.loading import load_policy, load_tokenizer
from common.harness.metrics import Metrics
from common.masked import group_statistics
from common.rewards import load_rewards

SIZES = dict(prompts_per_step=2, group_size=4, max_new_tokens=27)
WRONG, LONG, SHORT, CUT = 0, 1, 2, 5  # rows: wrong; right with 25 tokens; right with 7; cut off
TOKEN = 5  # of row SHORT: the answer


def accelerator():
    return Accelerator(cpu=True)  # all of them share one state


def table(title, *rows):
    """Rows of cells under each other; a number that has no digits of its own gets four."""
    cells = [[f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def rows_of(module, args, functions, prompts, texts, batch):
    """The micro-batch that a script makes of the rollout, with its own rewards and advantages; its totals."""
    rewards, _, _ = module.compute_rewards(functions, prompts, texts, batch["truncated"])
    if module is dapo:
        rewards = rewards + dapo.overlong_penalty(batch["completion_mask"].sum(dim=1), args)
    batch = batch | {"rewards": rewards, "loss_mask": batch["completion_mask"]}
    if module is dcpo:
        no_history = torch.zeros(len(prompts), 5, dtype=torch.float64)
        batch["advantages"] = dcpo.compute_advantages(rewards, args, no_history)[0].float()
    elif module is not ppo:  # its advantages are those of tokens, and need a critic
        batch["advantages"] = module.compute_advantages(rewards, args).float()
    if module is dapo:  # it trains on groups with right and with wrong completions: here on the first one
        packed = batch.pop("packed")  # a fact of the whole batch
        batch = {name: column[: args.group_size] for name, column in batch.items()} | {"packed": packed}
    ((micro_batches, totals),) = split_rollout(accelerator(), batch, args)
    (micro,) = micro_batches
    return micro, totals


def backward(module, args, model, micro, totals):
    """One forward and backward of a script; what it computed on the way."""
    model.zero_grad()
    logprobs, entropy = model(micro)
    mask, ref_logprobs = micro["loss_mask"], micro.get("ref_logprobs")
    losses, stats = module.policy_loss(
        logprobs, micro["old_logprobs"], micro["advantages"], mask, args, ref_logprobs, entropy
    )
    weights = module.token_weights(mask, totals | {"group_tokens": micro["group_tokens"]}, args)
    loss = (losses * weights).sum()
    loss.backward()
    found = stats | {"logprobs": logprobs, "losses": losses, "weights": weights, "loss": loss}
    return {name: value.detach() for name, value in found.items()}


def norm_of(model, most=0):
    """The norm of the gradient, which is then cut to `most` (0: it is left as it is)."""
    return float(clip_grad_norm(accelerator(), model.parameters(), most))


def second_update(module, old, new, reference, functions, rollout):
    """A column of the last table: what a script makes of the second update."""
    args = module.Args(**SIZES, num_minibatches=1)
    if module is dapo:
        args.overlong_cache = 7  # a quarter of max_new_tokens
    micro, totals = rows_of(module, args, functions, *rollout)
    if module is ppo:
        model = ppo.ActorCritic(old, ppo.load_critic(args, old))
        ppo.assign_advantages(accelerator(), model, None, [micro], args, Metrics(), ppo.Coefficients(args))
    with torch.no_grad():
        micro["old_logprobs"], _ = old(micro, with_entropy=False)
        if args.kl_coef:
            micro["ref_logprobs"], _ = reference(micro, with_entropy=False)
    found = backward(module, args, new, micro, totals)
    low, high = 1 - args.clip_low, 1 + args.clip_high
    if module is dcpo:
        low, high = (bound[SHORT, TOKEN] for bound in dcpo.clip_bounds(micro["old_logprobs"], micro["loss_mask"], args))
    ratio, rows = found["ratio_max"].expand_as(found["losses"]), len(found["losses"])
    cells = [module.__name__]
    for column in (micro["rewards"].view(-1, 1), micro["advantages"]):
        cells += [f"{column[row, 0]:.3f}" if row < rows else "-" for row in (WRONG, LONG, SHORT, CUT)]
    cells += [f"{ratio[SHORT, TOKEN]:.4f}", f"{low:.4f} to {high:.4f}", f"{found['losses'][SHORT, TOKEN]:.4f}"]
    cells += [f"{found['weights'][SHORT, TOKEN]:.5f}", f"{found['weights'][LONG, 0]:.5f}"]
    return [*cells, rows, f"{found['loss']:.5f}", f"{norm_of(new):.3f}"]


def pair_update(old, new, tokenizer, functions, rollout):
    """The same of dpo.py: row LONG is chosen, the first of the right ones, and row WRONG rejected."""
    prompts, _, batch = rollout
    args = dpo.Args(pair_samples=4, pairs_per_step=1, max_new_tokens=27)
    with mock.patch.object(dpo, "rollout", lambda *arguments: batch):  # the rows that are there
        pairs, _ = dpo.make_pairs(accelerator(), old, tokenizer, functions, prompts, 1, args, Metrics())
    pairs = dpo.with_reference(accelerator(), old, pairs, args)
    new.zero_grad()
    losses, stats = dpo.pair_losses(new, dpo.pair_batch(pairs, "cpu"), args)
    losses.sum().backward()
    margin, loss = stats["rewards/margin"].item(), losses.sum().item()
    print(f"\ndpo: margin {margin:.4f}, loss {loss:.5f}, norm {norm_of(new):.3f}")


def main():
    args = grpo.Args(**SIZES, num_epochs=2, seed=51)
    tokenizer, functions = load_tokenizer(args), load_rewards(args)
    train_prompts, *_ = load_prompts(args, tokenizer, args.needs_answers)
    policy = load_policy(args, tokenizer)
    reference = copy.deepcopy(policy)
    prompts = [train_prompts[i] for i in PromptSampler(train_prompts, args.seed).draw(args.prompts_per_step)]
    batch = grpo.rollout(policy, prompts, args.group_size, args.temperature, 1.0, (args.seed, 0, 1, 0), args)
    texts, lengths = completion_texts(tokenizer, batch), batch["completion_mask"].sum(dim=1).tolist()
    shown = [repr(str(text)) + (" is cut off" if text.truncated else "") for text in texts]
    table("1. Sample", *([row, prompts[row // 4].prompt, shown[row], lengths[row]] for row in range(8)))
    print(f"\ncompletions\n{batch['completions']}")

    micro, totals = rows_of(grpo, args, functions, prompts, texts, batch)
    mean, _, std, _ = group_statistics(micro["rewards"].view(-1, args.group_size), args.std_ddof)
    columns = micro["rewards"], mean.repeat_interleave(4), std.repeat_interleave(4), micro["advantages"][:, 0]
    rows = zip(range(8), *(column.tolist() for column in columns), strict=True)
    table("2. Rewards and advantages", ["row", "R", "mean of the group", "std", "A"], *rows)

    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=args.weight_decay)
    with torch.no_grad():
        micro["old_logprobs"], _ = policy(micro, with_entropy=False)
        micro["ref_logprobs"], _ = reference(micro, with_entropy=False)
    first = backward(grpo, args, policy, micro, totals)
    first_norm = norm_of(policy, args.max_grad_norm)
    optimizer.step()
    print(f"\n3. The first update\n\ntotals {totals}, loss {first['loss']:.4f}, gradient norm {first_norm:.3f}")

    second = backward(grpo, args, policy, micro, totals) | {"old": micro["old_logprobs"]}
    second_norm = norm_of(policy)
    second["loss x weight"] = second["losses"] * second["weights"]
    names = "old", "logprobs", "ratio_max", "kl_ref", "losses"
    columns = [second[name][SHORT, : lengths[SHORT]].tolist() for name in names]
    for name in ("weights", "loss x weight"):
        columns.append([f"{x:.5f}" for x in second[name][SHORT, : lengths[SHORT]]])
    rows = zip(*columns, strict=True)
    table(f"4. The second update: the tokens of row {SHORT}", [*names, "weights", "loss x weight"], *rows)
    for name in ("old", "logprobs", "ratio_max", "losses"):
        print(f"\n{name}\n{second[name]}")
    sums, terms = second["losses"].sum(dim=1).tolist(), second["loss x weight"].sum(dim=1).tolist()
    rows = [[row, lengths[row], sums[row], sums[row] / lengths[row], f"{terms[row]:.5f}"] for row in range(8)]
    table("Row by row", ["row", "tokens", "sum of the losses", "mean", "mean / 8"], *rows)
    print(f"\nloss {second['loss']:.4f}, gradient norm {second_norm:.3f}")
    print(f"means of both updates: {(first['loss'] + second['loss']) / 2:.4f}, {(first_norm + second_norm) / 2:.3f}")

    names = [f"{letter} of row {row}" for letter in "RA" for row in (WRONG, LONG, SHORT, CUT)]
    names += ["ratio", "clipped to", "loss of the token", "its weight", f"weight in row {LONG}", "rows", "sum", "norm"]
    rollout, old, new = (prompts, texts, batch), copy.deepcopy(reference), policy
    scripts = grpo, dr_grpo, dapo, gspo, dcpo, ppo
    found = [second_update(module, old, new, reference, functions, rollout) for module in scripts]
    title = f"5. The same rows in the other algorithms; the token is number {TOKEN} of row {SHORT}"
    table(title, *zip(["", *names], *found, strict=True))
    pair_update(old, new, tokenizer, functions, rollout)


if __name__ == "__main__":
    torch.set_printoptions(precision=3, sci_mode=False, linewidth=250)
    main()
