"""Print the numbers of docs/one_step.md: a step of grpo.py, and its rows in other algorithms.

python examples/one_step.py

It takes by hand, with the functions of the scripts and on a CPU, the step of

python grpo.py --prompts_per_step 2 --group_size 4 --max_new_tokens 27 --num_epochs 2 \\
    --max_steps 1 --seed 51 --fast

With --fast this seed samples the rows of the page; the update is computed without it.
"""

import argparse
import copy
import math
import signal
import sys
from pathlib import Path

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
from common.load import PromptSampler, load_policy, load_prompts
from common.masked import Means, trim_rows
from common.pairs import Pair, pair_batches
from common.rewards import decode_completions, load_rewards
from fast import speed_up

SIZES = dict(prompts_per_step=2, group_size=4, max_new_tokens=27)
WRONG, LONG, SHORT, CUT = 0, 1, 2, 5  # rows: wrong; right with 25 tokens; right with 7; cut off
TOKEN = 5  # of row SHORT: the answer


def accelerator():
    return Accelerator(cpu=True)  # all instances share one state


def digits(number, places=4):
    """Format a number with this many places, and zero without a minus."""
    return f"{round(float(number), places) + 0.0:.{places}f}"


def table(title, *rows):
    """Print rows of cells as aligned columns, floats with four places."""
    cells = [
        [digits(cell) if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}\n")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def rows_of(module, args, functions, prompts, texts, batch):
    """Return the micro-batch of a script for the rollout, and the totals of its step."""
    rewards, _ = module.compute_rewards(functions, prompts, texts, args.group_size)
    if module is dapo:
        rewards = rewards + dapo.overlong_penalty(batch["completion_mask"].sum(dim=1), args)
    batch = batch | {"rewards": rewards, "loss_mask": batch["completion_mask"]}
    if module is dcpo:
        no_history = torch.zeros(len(prompts), 3, dtype=torch.float64)
        batch["advantages"] = dcpo.compute_advantages(rewards, args, no_history)[0].float()
    elif module is not ppo:  # add_advantages computes them, with a critic
        batch["advantages"] = module.compute_advantages(rewards, args).float()
    if module is dapo:  # trains on groups whose rewards differ: the first one
        batch = {name: column[: args.group_size] for name, column in batch.items()}
    rows = range(len(batch["rewards"]))
    _, totals = module.split(accelerator(), batch, rows, args)
    return trim_rows(batch, list(rows)), totals


def backward(module, args, model, micro, totals):
    """Run a forward and backward of a script, and return what it computed."""
    model.zero_grad()
    logprobs, *_ = module.completion_logprobs(model, micro, args)
    mask = micro["loss_mask"]
    ref_logprobs = micro.get("ref_logprobs")
    losses, stats = module.policy_loss(
        logprobs, micro["old_logprobs"], micro["advantages"], mask, args, ref_logprobs
    )
    weights = module.token_weights(mask, totals, args)
    loss = (losses * weights).sum()
    loss.backward()
    found = stats | {"logprobs": logprobs, "losses": losses, "weights": weights, "loss": loss}
    return {name: value.detach() for name, value in found.items()}


def norm_of(model, max_norm=math.inf):
    """Return the norm of the gradient, and then clip it to `max_norm`."""
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def second_update(module, tokenizer, old, new, functions, rollout):
    """Return a column of the last table: the second update of a script, from `old` to `new`."""
    args = module.Args(**SIZES, num_minibatches=1)
    if module is dapo:
        args.overlong_cache = 7  # a quarter of max_new_tokens
    micro, totals = rows_of(module, args, functions, *rollout)
    with torch.no_grad():
        micro["old_logprobs"], *_ = module.completion_logprobs(old, micro, args)
    if args.kl_coef:
        micro["ref_logprobs"] = micro["old_logprobs"]  # in the first step
    if module is ppo:
        model = ppo.ActorCritic(old, *ppo.load_critic(args, old, tokenizer))
        ppo.add_advantages(accelerator(), model, None, [micro], args, Means())
    found = backward(module, args, new, micro, totals)
    low, high = 1 - args.clip_low, 1 + args.clip_high
    if module is dcpo:
        bounds = dcpo.clip_bounds(micro["old_logprobs"], micro["loss_mask"], args)
        low, high = (bound[SHORT, TOKEN] for bound in bounds)
    ratio = found["ratio_max"].expand_as(found["losses"])
    rows = len(found["losses"])
    cells = [module.__name__]
    for column in (micro["rewards"].view(-1, 1), micro["advantages"]):
        cells += [
            digits(column[row, 0], 3) if row < rows else "-" for row in (WRONG, LONG, SHORT, CUT)
        ]
    cells += [
        digits(ratio[SHORT, TOKEN]),
        f"{low:.4f} to {high:.4f}",
        digits(found["losses"][SHORT, TOKEN]),
    ]
    cells += [digits(found["weights"][SHORT, TOKEN], 5), digits(found["weights"][LONG, 0], 5)]
    return [*cells, rows, digits(found["loss"], 5), digits(norm_of(new), 3)]


def pair_update(old, new, rollout):
    """Print the update of dpo.py: row LONG, the first right one, is chosen, row WRONG rejected."""
    prompts, completions, _ = rollout
    args = dpo.Args(pairs_per_step=1, max_new_tokens=27, nll_coef=0.0)
    pair = Pair(prompts[0].ids, completions[LONG].ids, completions[WRONG].ids)
    pairs = dpo.add_ref_logprobs(accelerator(), old, [pair], args)
    new.zero_grad()
    (batch,) = pair_batches(pairs, args, "cpu")
    losses, stats = dpo.pair_losses(new, batch, args)
    losses.sum().backward()
    margin = digits(stats["rewards/margin"].item())
    loss, norm = digits(losses.sum().item(), 5), digits(norm_of(new), 3)
    print(f"\ndpo: margin {margin}, loss {loss}, norm {norm}")


def main():
    torch.set_printoptions(precision=3, sci_mode=False, linewidth=250)
    args = grpo.Args(**SIZES, num_epochs=2, seed=51, generate_batch_size=0, eval_prompts=8)
    functions = load_rewards(args)
    tokenizer, policy = load_policy(args, accelerator())
    train_prompts, _ = load_prompts(args, tokenizer)
    reference = copy.deepcopy(policy)
    prompts = PromptSampler(train_prompts, args.seed, accelerator()).draw(args.prompts_per_step)
    speed_up(policy, accelerator())
    n, seed = args.group_size, (args.seed, 0, 1)
    batch = grpo.rollout(policy, tokenizer, prompts, n, args.temperature, 1.0, seed, args)
    texts = decode_completions(tokenizer, batch)
    lengths = batch["completion_mask"].sum(dim=1).tolist()
    shown = [repr(text.text) + (" is cut off" if text.truncated else "") for text in texts]
    table(
        "1. Sample",
        *([row, prompts[row // 4].prompt, shown[row], lengths[row]] for row in range(8)),
    )
    print(f"\ncompletions\n{batch['completions']}")

    micro, totals = rows_of(grpo, args, functions, prompts, texts, batch)
    groups = micro["rewards"].view(-1, args.group_size)
    mean = groups.mean(dim=1).repeat_interleave(4)
    std = groups.std(dim=1).repeat_interleave(4)
    columns = micro["rewards"], mean, std, micro["advantages"][:, 0]
    rows = zip(range(8), *(column.tolist() for column in columns), strict=True)
    table("2. Rewards and advantages", ["row", "R", "mean of the group", "std", "A"], *rows)

    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=0.0)
    with torch.no_grad():
        micro["old_logprobs"], _ = grpo.completion_logprobs(policy, micro, args)
        micro["ref_logprobs"], _ = grpo.completion_logprobs(reference, micro, args)
    first = backward(grpo, args, policy, micro, totals)
    first_norm = norm_of(policy, args.max_grad_norm)
    optimizer.step()
    loss = digits(first["loss"])
    norm = digits(first_norm, 3)
    print(f"\n3. The first update\n\ntotals {totals}, loss {loss}, gradient norm {norm}")

    second = backward(grpo, args, policy, micro, totals) | {"old": micro["old_logprobs"]}
    second_norm = norm_of(policy)
    second["loss x weight"] = second["losses"] * second["weights"]
    names = "old", "logprobs", "ratio_max", "kl_ref", "losses"
    columns = [second[name][SHORT, : lengths[SHORT]].tolist() for name in names]
    for name in ("weights", "loss x weight"):
        columns.append([digits(x, 5) for x in second[name][SHORT, : lengths[SHORT]]])
    rows = zip(*columns, strict=True)
    table(
        f"4. The second update: the tokens of row {SHORT}",
        [*names, "weights", "loss x weight"],
        *rows,
    )
    for name in ("old", "logprobs", "ratio_max", "losses"):
        print(f"\n{name}\n{second[name].round(decimals=3) + 0.0}")  # no minus before a zero
    sums = second["losses"].sum(dim=1).tolist()
    terms = second["loss x weight"].sum(dim=1).tolist()
    rows = [
        [row, lengths[row], sums[row], sums[row] / lengths[row], digits(terms[row], 5)]
        for row in range(8)
    ]
    table("Row by row", ["row", "tokens", "sum of the losses", "mean", "mean / 8"], *rows)
    print(f"\nloss {digits(second['loss'])}, gradient norm {digits(second_norm, 3)}")
    mean_loss = digits((first["loss"] + second["loss"]) / 2)
    print(f"means of both updates: {mean_loss}, {digits((first_norm + second_norm) / 2, 3)}")

    names = [f"{letter} of row {row}" for letter in "RA" for row in (WRONG, LONG, SHORT, CUT)]
    names += ["ratio", "clipped to", "loss of the token", "its weight", f"weight in row {LONG}"]
    names += ["rows", "sum", "norm"]
    rollout = prompts, texts, batch
    found = []
    for module in (grpo, dr_grpo, dapo, gspo, dcpo, ppo):
        found.append(second_update(module, tokenizer, reference, policy, functions, rollout))
    title = f"5. The same rows in the other algorithms; the token is number {TOKEN} of row {SHORT}"
    table(title, *zip(["", *names], *found, strict=True))
    pair_update(reference, policy, rollout)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `| head` ends it without a traceback; Windows has none
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    about = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=about).parse_args()
    main()
