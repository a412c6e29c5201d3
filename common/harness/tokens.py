"""tokens.jsonl: what an update does to each token of a few rows. `python tools/look.py RUN` shows it."""

import contextlib
import copy
import math
import time

import torch

from common.batches import micro_batches, take_rows, to_device
from common.errors import in_short
from common.generation import seeded
from common.harness.distributed import on_first

FILE = "tokens.jsonl"
ROWS = 8  # of a step, at most
MOST_BYTES = 100 * 2**20  # a longer file grows at the steps 1, 2, 4, 8, ... alone
LONGEST_WAIT = 64  # tokens, for the end of a character; a text without sense may have none


@contextlib.contextmanager
def record_tokens(run, metrics, model, batch, prompts, tokenizer, policy_loss):
    """A context for an update on `batch`, which writes the rows of tokens.jsonl where they are due.

    `prompts` has a `Prompt` for each group of the batch. The log-probs of at most ROWS rows are taken
    before and after the update, by the same forward of these rows alone. All processes do this with
    rows of their own, in equally many passes, and the first one writes. No random number is drawn,
    and `metrics` leaves the time out of the update's.
    """
    if not is_due(run):
        yield
        return
    start = time.perf_counter()
    group_size = run.args.group_size
    chosen = choose_rows(batch["rewards"].tolist(), group_size)
    index = to_device(torch.tensor(chosen), batch["rewards"].device)
    passes = split_rows(run.accelerator, batch, chosen, run.args)
    before, entropy = forward_rows(model, passes, with_entropy=True)
    if before.is_cuda:  # A GPU computes on after the call, and this is no time of the update.
        torch.cuda.synchronize(before.device)
    metrics.paused += time.perf_counter() - start
    yield
    start = time.perf_counter()
    after, _ = forward_rows(model, passes, with_entropy=False)
    if run.accelerator.is_main_process:
        part = update_columns(batch, index, width=after.shape[1])
        clipped = clipped_or_none(run, policy_loss, after, before, entropy, part)
        columns = part | {"logprob": before, "change": after - before, "entropy": entropy, "clipped": clipped}
        row_prompts = [prompts[row // group_size] for row in chosen]
        run.write_rows(FILE, token_rows(run.step + 1, tokenizer, row_prompts, columns))
    metrics.paused += time.perf_counter() - start


def is_due(run):
    """Whether the next step is recorded: 1, 2, 4, 8, ..., and while the file is short each with an evaluation."""
    step = run.step + 1
    every = run.args.eval_every
    is_power_of_two = step & (step - 1) == 0
    evaluates = step >= run.args.max_steps or (every > 0 and step % every == 0)
    if is_power_of_two or not evaluates:
        return is_power_of_two
    return on_first(run.accelerator, lambda: run.files.sizes([FILE])[FILE]) < MOST_BYTES


def choose_rows(rewards, group_size):
    """The numbers of at most ROWS rows of the first group whose rewards (a list) differ, else of the first group.

    Rows with different rewards come first; NaN is no reward. Groups of one row count as one group.

        choose_rows([0, 0, 1, 1, 1, 0], group_size=3) -> [0, 1, 2]
    """
    size = group_size if group_size > 1 else len(rewards)
    groups = [range(start, start + size) for start in range(0, len(rewards), size)]
    chosen = groups[0]
    for group in groups:
        if len({rewards[row] for row in group if not math.isnan(rewards[row])}) > 1:
            chosen = group
            break
    firsts = {rewards[row]: row for row in reversed(chosen) if not math.isnan(rewards[row])}
    others = [row for row in chosen if row not in firsts.values()]
    return sorted([*sorted(firsts.values()), *others][:ROWS])


def split_rows(accelerator, batch, chosen, args):
    """The forwards of the rows `chosen`: a list of (their places among these rows, micro-batch).

    A micro-batch has the columns that the batch has before the update, those of a script of your
    own too. All processes have equally many, as FSDP2 needs: what is missing is the first row again.
    """
    lengths = torch.stack([batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1)], dim=1)
    batch = batch | {"lengths": lengths.tolist()}
    if "prompt_index" in batch:
        batch["groups"] = batch["prompt_index"][:, 0].tolist()
    cuts = micro_batches(chosen, batch["lengths"], args, batch.get("groups"), batch.get("packed", False))
    number = to_device(torch.tensor([len(cuts)]), batch["prompts"].device)
    most = int(accelerator.gather(number).max())
    cuts += [chosen[:1]] * (most - len(cuts))
    passes = []
    for rows in cuts:
        places = [chosen.index(row) for row in rows]
        passes.append((places, take_rows(batch, rows)))
    return passes


@torch.no_grad()
def forward_rows(model, passes, with_entropy):
    """Log-probs and entropies (R, T) of the rows of `split_rows`; without `with_entropy` the second is None."""
    rows = 1 + max(max(places) for places, _ in passes)
    width = max(micro["completions"].shape[1] for _, micro in passes)
    device = passes[0][1]["completions"].device
    logprobs = torch.zeros(rows, width, device=device)
    entropy = torch.zeros(rows, width, device=device) if with_entropy else None
    for places, micro in passes:
        micro_logprobs, micro_entropy, *_ = model(micro, with_entropy=with_entropy)  # ppo.py's model has values too
        columns = slice(micro_logprobs.shape[1])
        index = to_device(torch.tensor(places), device)
        logprobs[index, columns] = micro_logprobs
        if with_entropy:
            entropy[index, columns] = micro_entropy
    return logprobs, entropy


def update_columns(batch, index, width):
    """What the update has used of the rows `index` (k,), each completion cut to `width` tokens.

    It is read after the update, in which a script may make its advantages and its loss mask.
    """
    rewards = batch["rewards"][index]
    advantages = batch.get("advantages")
    if advantages is None:  # ppo.py makes none where no completion has a reward
        advantages = torch.zeros_like(batch["rewards"])[:, None]
    return {
        "completions": batch["completions"][index, :width],
        "completion_mask": batch["completion_mask"][index, :width],
        "truncated": batch["truncated"][index],
        "rewards": rewards,
        "advantages": advantages[index, :width],
        "loss_mask": batch["loss_mask"][index, :width] & ~rewards.isnan()[:, None],
    }


def clipped_or_none(run, policy_loss, after, before, entropy, part):
    """`would_clip`, or None if a loss of one's own cannot be called like that: the run goes on, and says so once."""
    try:
        return would_clip(policy_loss, after, before, entropy, part, run.args)
    except Exception as error:
        if not run.said_no_clipped:
            run.said_no_clipped = True
            run.print(
                f"{FILE} does not tell which tokens are clipped: policy_loss, called once more: {in_short(error)}"
            )
        return None


def would_clip(policy_loss, after, before, entropy, part, args):
    """Which tokens (R, T) the script's loss would clip in a further update: their log-prob has no gradient there."""
    args = copy.copy(args)
    args.kl_coef = 0.0  # The KL to the reference pulls at a clipped token too.
    advantages = part["advantages"]
    loss_mask = part["loss_mask"]
    with torch.enable_grad(), seeded(0, after.device):  # A loss of one's own may draw random numbers.
        logprobs = after.detach().requires_grad_()
        losses, _ = policy_loss(logprobs, before, advantages, loss_mask, args, before, entropy)
        (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return loss_mask & (advantages != 0) & (gradient == 0)


def token_rows(step, tokenizer, prompts, columns):
    """The rows of tokens.jsonl, one for each completion; docs/running.md describes them."""
    columns = {name: column.tolist() for name, column in columns.items() if column is not None}
    rows = []
    for i, prompt in enumerate(prompts):
        row = {name: column[i] for name, column in columns.items()}
        about = {"step": step, "prompt": prompt.prompt, "answer": prompt.answer}
        rows.append(about | token_columns(tokenizer, row))
    return rows


def token_columns(tokenizer, row):
    """Reward and advantage of a row, and lists with a value, or a number, of its tokens; without padding."""
    length = sum(row["completion_mask"])
    ids = row["completions"][:length]
    advantages = rounded(row["advantages"][:length])
    in_loss = row["loss_mask"][:length]
    special_ids = set(tokenizer.all_special_ids)
    special = [id in special_ids for id in ids]
    if not row["truncated"]:
        special[-1] = True  # A stop token need not be one of the tokenizer's special tokens.
    return {
        "reward": finite(row["rewards"]),
        "advantage": advantages[0] if len(row["advantages"]) == 1 else advantages,
        "tokens": token_texts(tokenizer, ids),
        "logprob": rounded(row["logprob"][:length]),
        "change": rounded(row["change"][:length]),
        "entropy": rounded(row["entropy"][:length]),
        "clipped": numbers_of(row["clipped"][:length]) if "clipped" in row else None,
        "masked": numbers_of([not counted for counted in in_loss]),
        "special": numbers_of(special),
    }


def finite(value):
    """The value as JSON has it, which has neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def rounded(values):
    """The values with four significant digits."""
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def numbers_of(flags):
    """The numbers, from 0, of the tokens whose flag is true."""
    return [number for number, flag in enumerate(flags) if flag]


def token_texts(tokenizer, ids):
    """The text that each token adds to a completion; together they are the completion's text.

    A token may be a part of a character: the last part has the character, the others have "". Bytes
    that are no text may be other signs together than alone: some decoders give up a whole run of them.
    """

    def decode(part):
        return tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    alone = {id: decode([id]) for id in set(ids)}
    texts = [alone[id] for id in ids]
    if "".join(texts) == decode(ids):
        return texts
    texts = []
    start = 0  # tokens from here on are decoded together: some decoders change the first one
    told = 0  # tokens before this one have their texts
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        is_part = text.endswith("\ufffd") and end < len(ids) and end - told < LONGEST_WAIT
        if is_part:
            texts.append("")
            continue
        texts.append(text[len(decode(ids[start:told])) :])
        start, told = told, end
    return texts
