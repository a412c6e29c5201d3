"""GRPO with a calculator: a completion may have several turns, between which a tool writes.

`]` is an additional stop token. A row that ends with it gets the result of its call, as token ids.
All such rows are then prefilled again and continue until each has ended or has --max_new_tokens.
The sampled ids are never decoded and encoded again: other ids for the same text would have other
log-probs. In the batch, completion_mask covers the whole row, since later tokens attend to it, and
loss_mask has a hole where the calculator wrote. The recipe needs a vocabulary in which one token
ends a call. examples/calculator_task.py builds such a task.
"""

import re
from dataclasses import replace

LINES = {
    'batch = samples.batch | {"loss_mask": samples.loss_mask}': """
        batch = samples.batch | {"loss_mask": samples.batch["sampled_mask"]}
    """
}

sample_turn = rollout


def calculate(text):
    """Return what the calculator writes after a turn: =132 after [47+85], =? if it is no sum."""
    call = re.search(r"\[(\d{1,9})([+-]\d{1,9})\]$", text)
    return f"={int(call[1]) + int(call[2])}\n" if call else "=?\n"


def add_turn(rows, active, turn, tokenizer, call_end):
    """Append the sampled tokens to the `active` rows, and after a call its result."""
    lengths = turn["completion_mask"].sum(dim=1).tolist()
    for i, row in enumerate(active):
        ids = turn["completions"][i, : lengths[i]].tolist()
        rows[row] += [(id, True) for id in ids]
        if ids[-1] == call_end:
            result = calculate(tokenizer.decode(ids))
            written = tokenizer.encode(result, add_special_tokens=False)
            rows[row] += [(id, False) for id in written]


def rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
    """Return the batch of `sample_turn` with all turns of a completion in one row.

    Its sampled_mask (R, T) is false where the calculator wrote.
    """
    call_end = getattr(lm, "call_end", None)  # of `load_policy`
    stop_tokens = [token for token in lm.generation_config.eos_token_id if token != call_end]
    rows = [[] for _ in range(n * len(prompts))]  # (id, was it sampled) of each token
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
        add_turn(rows, active, turn, tokenizer, call_end)
        called = [row for row in active if not rows[row][-1][1]]
        active = [row for row in called if len(rows[row]) < args.max_new_tokens]
        turn_prompts = []
        for row in active:
            prompt = prompts[row // n]
            turn_prompts.append(replace(prompt, ids=prompt.ids + [id for id, _ in rows[row]]))
        copies = 1
    rows = [torch.tensor(row[: args.max_new_tokens]) for row in rows]  # (length, 2) each
    ids, sampled = pad_sequence(rows, True).to(lm.device).unbind(dim=2)  # 0 after a stop token
    mask, truncated = completion_mask(ids, stop_tokens)
    return turns[0] | {
        "completions": ids,
        "completion_mask": mask,
        "sampled_mask": sampled.bool() & mask,
        "truncated": truncated,
    }


load_plain_policy = load_policy


def load_policy(args, accelerator):
    """Load the policy, which also stops at the end of a call."""
    tokenizer, lm = load_plain_policy(args, accelerator)
    lm.call_end = tokenizer.convert_tokens_to_ids("]")
    lm.generation_config.eos_token_id.append(lm.call_end)
    return tokenizer, lm
