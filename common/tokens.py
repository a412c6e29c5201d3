"""tokens.jsonl: what an update does to each token of a group. `tools/look.py` shows it."""

import torch

from common.batches import decode_tokens, take_rows
from common.errors import InputError

ROWS = 8  # of a step, at most
LONGEST_WAIT = 64  # tokens, for the end of a character; a text without sense may have none


@torch.no_grad()
def record_tokens(run, model, batch, rewards):
    """Write rows of tokens.jsonl after an update on `batch`, at the steps 1, 2, 4, 8, ...

    They are the first group whose advantages are not all 0. The log-probs before the update are
    those that the rows were sampled with, and one forward gives those after it. `rewards` (R,) are
    those of the batch.
    """
    step = run.step + 1
    if step & (step - 1):
        return
    if "rollout_logprobs" not in batch:
        raise InputError("--record_tokens: only fast/ gives the log-probs before an update")
    rows = choose_rows(batch, run.args.group_size)
    part = take_rows(batch, rows)
    after, entropy, *_ = model(part)  # the model of ppo.py gives values too
    columns = {
        "reward": rewards[rows],
        "truncated": part["truncated"],
        "logprob": part["rollout_logprobs"],
        "change": after - part["rollout_logprobs"],
        "entropy": entropy,
    }
    if "advantages" in part:
        columns["advantage"] = part["advantages"][:, 0]
    run.log.write("tokens.jsonl", token_rows(step, run.tokenizer, part, columns))


def choose_rows(batch, group_size):
    """At most ROWS row numbers of the first group that has an advantage; else the first rows."""
    if group_size > 1 and "advantages" in batch:
        has_any = (batch["advantages"] != 0).view(-1, group_size).any(dim=1).tolist()
        first = has_any.index(True) * group_size if True in has_any else 0
        return list(range(first, first + min(group_size, ROWS)))
    return list(range(min(len(batch["completions"]), ROWS)))


def token_rows(step, tokenizer, part, columns):
    """The rows of tokens.jsonl, one for each completion, with lists of a value for each token."""
    columns = {name: column.tolist() for name, column in columns.items()}
    lengths = part["completion_mask"].sum(dim=1).tolist()
    rows = []
    for i, length in enumerate(lengths):
        ids = part["completions"][i, :length].tolist()
        prompt = part["prompts"][i][part["prompt_mask"][i]].tolist()
        texts = token_texts(tokenizer, ids)
        row = {"step": step, "prompt": tokenizer.decode(prompt), "tokens": texts}
        for name, column in columns.items():
            value = column[i]
            is_list = isinstance(value, list)
            row[name] = [float(f"{x:.4g}") for x in value[:length]] if is_list else value
        rows.append(row)
    return rows


def token_texts(tokenizer, ids):
    """The text that each token adds to a completion; together they are the completion's text.

    A token may be a part of a character: the last part has the character, the others have "".
    """
    texts = []
    start = 0  # tokens from here on are decoded together: some decoders change the first one
    told = 0  # tokens before this one have their texts
    for end in range(1, len(ids) + 1):
        text = decode_tokens(tokenizer, ids[start:end])
        is_part = text.endswith("\ufffd") and end < len(ids) and end - told < LONGEST_WAIT
        if is_part:
            texts.append("")
            continue
        texts.append(text[len(decode_tokens(tokenizer, ids[start:told])) :])
        start, told = told, end
    return texts
