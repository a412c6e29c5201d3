"""GRPO with a calculator: a completion may have several turns, between which a tool writes.

`]` is one more stop token. A row that ends with it gets the result of its call, as token ids; then
all such rows are prefilled again and go on, until each has ended or has --max_new_tokens. The ids
that were sampled are never decoded and encoded again: other ids for the same text would have other
log-probs. In the batch, completion_mask covers all of a row, since later tokens attend to it;
loss_mask has a hole where the calculator wrote. It needs the sampler of fast/, and a vocabulary in
which one token ends a call. examples/calculator_task.py makes a task.
"""

import re
from dataclasses import replace

from common.masked import completion_mask
from harness.errors import InputError

sample_turn = rollout


def calculate(text):
    """What is written after a turn: =132 after [47+85], and =? after what is no such sum."""
    call = re.search(r"\[(\d{1,9})([+-]\d{1,9})\]$", text)
    return f"={int(call[1]) + int(call[2])}\n" if call else "=?\n"


def add_turn(rows, going, turn, policy, call_end):
    """Add what was sampled to the rows that are `going`, and after a call its result."""
    lengths = turn["completion_mask"].sum(dim=1).tolist()
    for i, row in enumerate(going):
        ids = turn["completions"][i, : lengths[i]].tolist()
        logprobs = turn["rollout_logprobs"][i, : lengths[i]].tolist()
        rows[row] += [(id, logprob, True) for id, logprob in zip(ids, logprobs, strict=True)]
        if ids[-1] == call_end:
            result = calculate(policy.tokenizer.decode(ids))
            written = policy.tokenizer.encode(result, add_special_tokens=False)
            rows[row] += [(id, 0.0, False) for id in written]


def column(rows, which, fill, device):
    """One of the three numbers of each token, as a tensor (R, T)."""
    values = [torch.tensor([token[which] for token in row]) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill).to(device)


def rollout(policy, prompts, n, temperature, top_p, seed, args):
    """The batch of `sample_turn` with all turns in a row.

    Its own_mask (R, T) is false on what the calculator wrote.
    """
    *stop_tokens, call_end = policy.stop_tokens
    rows = [[] for _ in range(n * len(prompts))]  # tokens so far: (id, log-prob, was it sampled)
    going = list(range(len(rows)))  # rows that have not ended
    asked, copies = prompts, n
    turns = []
    while going:
        left = args.max_new_tokens - min(len(rows[row]) for row in going)
        turn_args = replace(args, max_new_tokens=left)
        turn_seed = (*seed, len(turns))
        turn = sample_turn(policy, asked, copies, temperature, top_p, turn_seed, turn_args)
        if "rollout_logprobs" not in turn:
            raise InputError("--fast false: stock generate does not give the sampler's log-probs")
        turns.append(turn)
        add_turn(rows, going, turn, policy, call_end)
        called = [row for row in going if not rows[row][-1][2]]
        going = [row for row in called if len(rows[row]) < args.max_new_tokens]
        asked = []
        for row in going:
            prompt = prompts[row // n]
            asked.append(replace(prompt, ids=prompt.ids + [token[0] for token in rows[row]]))
        copies = 1
    rows = [row[: args.max_new_tokens] for row in rows]
    batch = turns[0]
    device = policy.lm.device
    batch["completions"] = column(rows, 0, policy.pad_token, device)
    batch["rollout_logprobs"] = column(rows, 1, 0.0, device)
    batch["own_mask"] = column(rows, 2, False, device)
    batch["completion_mask"], batch["truncated"] = completion_mask(
        batch["completions"], stop_tokens
    )
    return batch


train_on = update


def update(accelerator, model, reference, optimizer, batch, args, metrics):
    """Train on the tokens that were sampled."""
    batch["loss_mask"] = batch.pop("own_mask")
    train_on(accelerator, model, reference, optimizer, batch, args, metrics)


load_plain_policy = load_policy


def load_policy(args, tokenizer, accelerator):
    """The policy, which stops at the end of a call too, and has a tokenizer that reads the call."""
    policy = load_plain_policy(args, tokenizer, accelerator)
    policy.tokenizer = tokenizer
    call_end = tokenizer.convert_tokens_to_ids("]")
    policy.stop_tokens = [*policy.stop_tokens, call_end]  # `rollout` takes the last one for it
    return policy
