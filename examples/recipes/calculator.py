"""GRPO with a calculator: a completion may have several turns, between which a tool writes.

`]` is an additional stop token. A row that ends with it gets the result of its call, as token ids.
All such rows are then prefilled again and continue until each has ended or has --max_new_tokens.
The sampled ids are never decoded and encoded again: other ids for the same text would have other
log-probs. In the batch, completion_mask covers the whole row, since later tokens attend to it, and
loss_mask has a hole where the calculator wrote.

With --bad_call_penalty a turn has a reward of its own, as in MT-GRPO (arXiv 2505.11821): minus the
penalty for a call that the calculator cannot read, which is added to the advantages of that turn's
tokens alone. The right turns of the same completion keep the credit of its answer.

The recipe needs a vocabulary in which one token
ends a call. examples/calculator_task.py builds such a task.
"""

import re
from dataclasses import replace


class Args:
    bad_call_penalty: float = option(0.0, "penalty of a call that is no sum, on its turn", ge=0)


LINES = {
    'batch = samples.batch | {"loss_mask": samples.loss_mask}': """
        batch = samples.batch | {"loss_mask": samples.loss_mask & samples.batch["sampled_mask"]}
        metrics.add("calculator/bad_calls", batch["bad_call"], batch["loss_mask"])
    """,
    'batch["advantages"] = advantages.float().to(accelerator.device)': """
        advantages = advantages.float().to(accelerator.device)
        batch["advantages"] = advantages - args.bad_call_penalty * batch["bad_call"]  # (R, T)
    """,
}

sample_turn = rollout
NO_SUM = "=?\n"


def calculate(text):
    """Return what the calculator writes after a turn: =132 after [47+85], =? if it is no sum."""
    call = re.search(r"\[(\d{1,9})([+-]\d{1,9})\]$", text)
    return f"={int(call[1]) + int(call[2])}\n" if call else NO_SUM


def add_turn(rows, active, turn, tokenizer, call_end, limit):
    """Append the sampled tokens to the `active` rows, up to a limit, and after a call its result."""
    lengths = turn["completion_mask"].sum(dim=1).tolist()
    for i, row in enumerate(active):
        ids = turn["completions"][i, : lengths[i]].tolist()[: limit - len(rows[row])]
        if ids[-1] != call_end:
            rows[row] += [(id, True, False) for id in ids]
            continue
        result = calculate(tokenizer.decode(ids))
        written = tokenizer.encode(result, add_special_tokens=False)
        rows[row] += [(id, True, result == NO_SUM) for id in ids]
        rows[row] += [(id, False, False) for id in written]


def rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
    """Return the batch of `sample_turn` with all turns of a completion in one row.

    Its sampled_mask (R, T) is false where the calculator wrote, and bad_call (R, T) is true on the
    tokens of a turn that ends with a call that is no sum.
    """
    call_end = getattr(lm, "call_end", None)  # of `load_policy`
    stop_tokens = [token for token in lm.generation_config.eos_token_id if token != call_end]
    rows = [
        [] for _ in range(n * len(prompts))
    ]  # (id, was it sampled, in a bad call) of each token
    active = list(range(len(rows)))  # rows that have not ended
    turn_prompts, copies = prompts, n
    turns = []
    while active:
        budget = args.max_new_tokens - min(len(rows[row]) for row in active)
        turn_args = replace(args, max_new_tokens=budget)
        turn_seed = (*seed, len(turns))
        turn = sample_turn(
            lm, tokenizer, turn_prompts, copies, temperature, top_p, turn_seed, turn_args
        )
        turns.append(turn)
        add_turn(rows, active, turn, tokenizer, call_end, args.max_new_tokens)
        called = [row for row in active if not rows[row][-1][1]]
        active = [row for row in called if len(rows[row]) < args.max_new_tokens]
        turn_prompts = []
        for row in active:
            prompt = prompts[row // n]
            turn_prompts.append(replace(prompt, ids=prompt.ids + [id for id, *_ in rows[row]]))
        copies = 1
    rows = [torch.tensor(row[: args.max_new_tokens]) for row in rows]  # (length, 3) each
    ids, sampled, bad_call = (
        pad_sequence(rows, True).to(lm.device).unbind(dim=2)
    )  # 0 after a stop token
    mask, truncated = completion_mask(ids, stop_tokens)
    return turns[0] | {
        "completions": ids,
        "completion_mask": mask,
        "sampled_mask": sampled.bool() & mask,
        "bad_call": bad_call.bool() & mask,
        "truncated": truncated,
    }


load_plain_policy = load_policy


def load_policy(args, accelerator):
    """Load the policy, which also stops at the end of a call."""
    tokenizer, lm = load_plain_policy(args, accelerator)
    lm.call_end = tokenizer.convert_tokens_to_ids("]")
    lm.generation_config.eos_token_id.append(lm.call_end)
    return tokenizer, lm
