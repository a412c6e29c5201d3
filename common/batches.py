"""Rows of a rollout as batches: padding, micro-batches, minibatches with their totals; the texts that rewards read."""

import torch
from torch.nn.utils.rnn import pad_sequence

from common.masked import completion_mask


def left_pad(rows, pad_token, device):
    """Token id lists as one tensor (R, P) padded on the left, and its mask (R, P)."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_token] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)


def take_rows(batch, rows):
    """Some rows of a batch, without the padding they all share: prompts on the left, completions on the right."""
    T = batch["completion_mask"].shape[1]
    index = torch.tensor(rows).to(batch["completion_mask"].device, non_blocking=True)
    part = {name: [x[i] for i in rows] if isinstance(x, list) else x[index] for name, x in batch.items()}
    left, right = map(max, zip(*part["lengths"], strict=True))
    for name, tensor in part.items():
        if name in ("prompts", "prompt_mask"):
            part[name] = tensor[:, -left:]
        elif isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.shape[1] == T:
            part[name] = tensor[:, :right]
    return part


def pack_group(batch, rows):
    """What to send of one prompt's n rows (a slice): unpadded, ids in int32; `unpack_groups` derives the rest."""
    mask = batch["completion_mask"][rows]
    group = {"rewards": batch["rewards"][rows], "lengths": mask.sum(dim=1).int()}  # (n,) each
    group["completions"] = batch["completions"][rows][mask].int()
    if "rollout_logprobs" in batch:
        group["rollout_logprobs"] = batch["rollout_logprobs"][rows][mask]
    return {name: column.numpy(force=True) for name, column in group.items()}


def unpack_groups(groups, model):
    """The batch of a list of (prompt, what `pack_group` sent of its rows): columns of `rollout`, and `rewards` (R,)."""
    prompts, sent = zip(*groups, strict=True)
    n, device, batch = len(sent[0]["rewards"]), model.lm.device, {}
    ids, mask = left_pad([prompt.ids for prompt in prompts], model.pad_token, device)  # (R / n, P)
    batch["prompts"], batch["prompt_mask"] = ids.repeat_interleave(n, dim=0), mask.repeat_interleave(n, dim=0)
    for name, fill in (("completions", model.pad_token), ("rollout_logprobs", 0)):
        if name in sent[0]:
            rows = [row for group in sent for row in torch.from_numpy(group[name]).split(group["lengths"].tolist())]
            batch[name] = pad_sequence(rows, batch_first=True, padding_value=fill).to(device)
    batch["completions"] = batch["completions"].long()
    batch["completion_mask"], batch["truncated"] = completion_mask(batch["completions"], model.stop_tokens)
    if model.shares_prompts and n > 1:
        batch["prompt_index"] = torch.arange(len(prompts), device=device).repeat_interleave(n)[:, None]
    return batch | {"rewards": torch.cat([torch.from_numpy(group["rewards"]) for group in sent]).to(device)}


def micro_batches(lengths, args, keep_order=False):
    """Cut rows of the given lengths [(prompt tokens, completion tokens)] into the index lists of single forwards.

    Rows are sorted by length unless `keep_order`, so that those of one forward need little padding. No gradient depends
    on it. `micro_batch_tokens` counts the padded tokens of a forward; a row longer than that goes alone.
    """
    order = list(range(len(lengths)))
    if not keep_order:
        order.sort(key=lambda row: sum(lengths[row]))
    if not args.micro_batch_tokens:
        return [order[i : i + args.micro_batch_size] for i in range(0, len(order), args.micro_batch_size)]
    parts, width = [[]], (0, 0)
    for row in order:
        wider = max(width[0], lengths[row][0]), max(width[1], lengths[row][1])
        if parts[-1] and sum(wider) * (len(parts[-1]) + 1) > args.micro_batch_tokens:
            parts.append([])
            wider = lengths[row]
        parts[-1].append(row)
        width = wider
    return parts


def split_rollout(accelerator, batch, args):
    """Cut this process's rows into optimizer steps, and each of these into the micro-batches of single forwards.

    Minibatches are equal slices of whole groups in draw order. Returns a list of lists of micro-batches. Each has the
    columns of some rows; `totals`, which token weights are made of: tokens, rows and prompts of the whole optimizer
    step, over all micro-batches of all processes, and group_tokens (R, 1) of its own rows; and as lists, so that no
    forward waits for a GPU, `lengths` (tokens of prompt and completion) and `groups` (prompt_index). A row without a
    reward (NaN) has an empty loss mask, and no total counts it; if no process has another row, the list is empty. All
    get equally many, since each pass of FSDP2 is a collective; a filler is a real row without a loss mask.
    """
    rows, device = len(batch["completions"]) // args.num_minibatches, batch["completions"].device
    scored = ~batch["rewards"].isnan()  # (R,)
    batch = batch | {"rewards": batch["rewards"].masked_fill(~scored, 0)}
    batch["loss_mask"] = batch["loss_mask"] & scored[:, None]
    group_tokens = batch["loss_mask"].view(-1, args.group_size * batch["loss_mask"].shape[1]).sum(dim=1)
    batch["group_tokens"] = group_tokens.repeat_interleave(args.group_size)[:, None]
    lengths = torch.stack([batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1)], dim=1).tolist()
    batch["lengths"] = lengths
    starts = range(0, rows * args.num_minibatches, rows)
    keep_order = "prompt_index" in batch  # the completions of a prompt should share a forward
    if keep_order:
        batch["groups"] = batch["prompt_index"][:, 0].tolist()
    cuts = [micro_batches(lengths[start : start + rows], args, keep_order) for start in starts]
    cuts = [[[start + i for i in part] for part in cut] for start, cut in zip(starts, cuts, strict=True)]
    most = accelerator.gather(torch.tensor([[len(cut) for cut in cuts]], device=device)).amax(dim=0).tolist()
    prompts = scored.view(-1, args.group_size).any(dim=1)  # with a row in the loss
    counts = [mask.view(args.num_minibatches, -1).sum(dim=1) for mask in (batch["loss_mask"], scored, prompts)]
    counts = accelerator.reduce(torch.stack(counts, dim=1), "sum").tolist()  # (minibatches, 3)
    if not any(step_rows for _, step_rows, _ in counts):
        return []
    minibatches = []
    for start, cut, number, (tokens, step_rows, step_prompts) in zip(starts, cuts, most, counts, strict=True):
        parts = [take_rows(batch, part) for part in cut]
        for _ in range(number - len(parts)):
            filler = take_rows(batch, [start])
            parts.append(filler | {"loss_mask": torch.zeros_like(filler["loss_mask"])})
        totals = {"tokens": tokens, "rows": max(step_rows, 1), "prompts": max(step_prompts, 1)}
        minibatches.append([part | {"totals": totals | {"group_tokens": part.pop("group_tokens")}} for part in parts])
    return minibatches


class Completion(str):
    """The text of a completion, with its token ids up to the stop token, and what reward functions log of it."""

    ids: list[int]
    truncated: bool
    extra: dict


def completion_texts(tokenizer, batch):
    """The completions as rewards see them: up to the stop token, special tokens skipped."""
    rows = zip(batch["completions"].tolist(), batch["completion_mask"].sum(dim=1).tolist(), strict=True)
    ids = [ids[:length] for ids, length in rows]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    texts = list(map(Completion, texts))
    for text, row, truncated in zip(texts, ids, batch["truncated"].tolist(), strict=True):
        text.ids, text.truncated, text.extra = row, truncated, {}
    return texts


def raw_lines(tokenizer, prompt, completion):
    """Two lines that show the ids of a prompt and its completion as text, with all special tokens, at most 2,000
    characters each: of a longer one the middle is left out."""
    lines = []
    for name, ids in (("a prompt as the model gets it", prompt), ("its completion with its stop token", completion)):
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        lines.append(f"{name}: {text if len(text) <= 2000 else f'{text[:1000]} [...] {text[-1000:]}'!r}")
    return lines
