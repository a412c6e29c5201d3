"""GRPO with a calculator: a completion may have several turns, between which a tool writes.

`]` is an additional stop token. A row that ends with it gets the result of its call, as token ids.
All such rows are then prefilled again and continue until each has ended or has --max_new_tokens.
The sampled ids are never decoded and encoded again: other ids for the same text would have other
log-probs. In the batch, completion_mask covers the whole row, since later tokens attend to it, and
loss_mask has a hole where the calculator wrote. The recipe needs the sampler of fast/, and a
vocabulary in which one token ends a call. examples/calculator_task.py builds such a task.
"""

import re
from dataclasses import replace

from common.masked import completion_mask
from harness.errors import InputError

LINES = {
    'samples.batch["loss_mask"] = samples.loss_mask': """
        samples.batch["loss_mask"] = samples.batch.pop("sampled_mask")
    """
}

sample_turn = rollout


def calculate(text):
    """Return what the calculator writes after a turn: =132 after [47+85], =? if it is no sum."""
    call = re.search(r"\[(\d{1,9})([+-]\d{1,9})\]$", text)
    return f"={int(call[1]) + int(call[2])}\n" if call else "=?\n"


def add_turn(rows, active, turn, policy, call_end):
    """Append the sampled tokens to the `active` rows, and after a call its result."""
    lengths = turn["completion_mask"].sum(dim=1).tolist()
    for i, row in enumerate(active):
        ids = turn["completions"][i, : lengths[i]].tolist()
        logprobs = turn["rollout_logprobs"][i, : lengths[i]].tolist()
        rows[row] += [(id, logprob, True) for id, logprob in zip(ids, logprobs, strict=True)]
        if ids[-1] == call_end:
            result = calculate(policy.tokenizer.decode(ids))
            written = policy.tokenizer.encode(result, add_special_tokens=False)
            rows[row] += [(id, 0.0, False) for id in written]


def column(rows, field, padding, device):
    """Return one field of each token as a padded tensor (R, T)."""
    values = [torch.tensor([token[field] for token in row]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
    return padded.to(device)


def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """Return the batch of `sample_turn` with all turns of a completion in one row.

    Its sampled_mask (R, T) is false where the calculator wrote.
    """
    *stop_tokens, call_end = policy.stop_tokens
    rows = [[] for _ in range(n * len(prompts))]  # (id, log-prob, was it sampled) of each token
    active = list(range(len(rows)))  # rows that have not ended
    turn_prompts, copies = prompts, n
    turns = []
    while active:
        budget = args.max_new_tokens - min(len(rows[row]) for row in active)
        turn_args = replace(args, max_new_tokens=budget)
        turn_seed = (*seed, len(turns))
        turn = sample_turn(policy, turn_prompts, copies, temperature, top_p, turn_seed, turn_args)
        if "rollout_logprobs" not in turn:
            raise InputError("--no_fast: stock generate does not return the log-probs")
        turns.append(turn)
        add_turn(rows, active, turn, policy, call_end)
        called = [row for row in active if not rows[row][-1][2]]
        active = [row for row in called if len(rows[row]) < args.max_new_tokens]
        turn_prompts = []
        for row in active:
            prompt = prompts[row // n]
            ids = prompt.ids + [token[0] for token in rows[row]]
            turn_prompts.append(replace(prompt, ids=ids))
        copies = 1
    rows = [row[: args.max_new_tokens] for row in rows]
    batch = turns[0]
    device = policy.lm.device
    batch["completions"] = column(rows, 0, policy.pad_token, device)
    batch["rollout_logprobs"] = column(rows, 1, 0.0, device)
    batch["sampled_mask"] = column(rows, 2, False, device)
    batch["completion_mask"], batch["truncated"] = completion_mask(
        batch["completions"], stop_tokens
    )
    return batch


load_plain_policy = load_policy


def load_policy(args, tokenizer, accelerator, temperature=1.0):
    """Load the policy, which also stops at the end of a call and can decode the call."""
    policy = load_plain_policy(args, tokenizer, accelerator, temperature)
    policy.tokenizer = tokenizer
    call_end = tokenizer.convert_tokens_to_ids("]")
    policy.stop_tokens = [*policy.stop_tokens, call_end]  # `rollout` takes the last one
    return policy
