"""Preference pairs: read from TRL's preference formats and cut to length, made batches, and evaluated."""

import dataclasses
import time
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common.batches import left_pad, raw_lines
from common.errors import InputError
from common.harness.data import EMBEDDED, find_column, find_sources, load_prompts, load_rows, read_rows
from common.harness.distributed import own_places
from common.harness.metrics import Metrics, peak_memory_gb
from common.harness.prompts import TEMPLATE_COLUMNS, encode_completions, end_token, read_prompt, read_text, tokenize

EMBEDDED_PAIRS = EMBEDDED / "pairs"


class Pair(NamedTuple):
    prompt: list[int]  # token ids
    chosen: list[int]  # token ids of the better completion, its end token included
    rejected: list[int]
    ref_chosen: float = 0.0  # log-prob of the whole completion under the reference; dpo.py fills it in
    ref_rejected: float = 0.0


def load_pairs(args, tokenizer, most_eval=0, train=None):
    """Training pairs, evaluation pairs, and lines that say where they come from (`load_rows`) and show the first one.
    Rows have `chosen` and `rejected`, texts or messages, which share the prompt or stand beside a `prompt`."""
    own = {name: str(EMBEDDED_PAIRS) for name in ("dataset", "eval_dataset") if getattr(args, name) == "embedded"}
    own = SimpleNamespace(**vars(args) | own)
    train, evaluation, summary = load_rows("pairs", read_pairs, own, tokenizer, train, most_eval)
    return train, evaluation, "\n".join([summary, *raw_lines(tokenizer, *(train or evaluation)[0][:2])])


def load_prompts_or_pairs(args, tokenizer):
    """(prompts, pairs, eval_prompts, eval_pairs, summary): training on prompts, or on pairs where --dataset has them.

    Given pairs are evaluated on held-out pairs, and by sampling too where --eval_dataset has prompts.
    """
    source, eval_source = find_sources(args)
    if not holds_pairs(source):
        prompts, eval_prompts, summary = load_prompts(args, tokenizer, args.needs_answers, train=True)
        return prompts, [], eval_prompts, [], summary
    if args.rounds > 1:
        raise InputError(f"--rounds {args.rounds}: {args.dataset} holds pairs, and rounds make their own from prompts")
    if not args.eval_dataset or holds_pairs(eval_source):
        pairs, eval_pairs, summary = load_pairs(args, tokenizer, args.eval_prompts, train=True)
        return [], pairs, [], eval_pairs, summary
    without_eval_dataset = dataclasses.replace(args, eval_dataset=None, eval_split=None)
    pairs, eval_pairs, summary = load_pairs(without_eval_dataset, tokenizer, args.eval_prompts, train=True)
    _, eval_prompts, note = load_prompts(args, tokenizer, args.needs_answers, train=False)
    return [], pairs, eval_prompts, eval_pairs, f"{summary}\n{note}"


def holds_pairs(source):
    """Whether a source has preference pairs, by the columns of its first row."""
    _, first_row = next(read_rows(source), ("", {}))
    return {"chosen", "rejected"} <= first_row.keys()


def split_pair(row, column, where):
    """(prompt, chosen text, rejected text) of a row in any of the formats."""
    answers = [read_text(row.get(name), name, where) for name in ("chosen", "rejected")]
    dialogues = isinstance(answers[0], list)
    if row.get(column) is None or (dialogues and len(answers[0]) > 1 and isinstance(row[column], str)):
        column = None  # the completions hold the prompt
    prompt, _ = read_prompt(row, column, where)
    if column is None or (dialogues and all(answer[: len(prompt)] == prompt for answer in answers)):
        answers = [answer[len(prompt) :] for answer in answers]
    roles = [[turn["role"] for turn in answer] if isinstance(answer, list) else None for answer in answers]
    if roles == [["assistant"], ["assistant"]]:
        answers = [answer[0]["content"] for answer in answers]
    elif roles != [None, None]:
        raise InputError(f"{where}: chosen and rejected must both be text, or one assistant message each")
    return prompt, *answers


def read_pairs(source, args, tokenizer):
    """[(key of the prompt, pair)] of each row whose completions differ, and {what was cut or dropped: how many}. Beyond
    `--max_length` tokens a prompt loses its first ones, down to one; then completions lose those before their end."""
    rows, texts, end = [], [], end_token(tokenizer)
    spelled = tokenizer.convert_ids_to_tokens(end)  # some data end an answer so, or by EOS, or both
    for where, row in read_rows(source):
        if not rows:
            column = find_column("prompt", args, row, source, needed=False)
        prompt, *answers = split_pair(row, column, where)
        rows.append((where, prompt, row))
        texts += [answer.removesuffix(tokenizer.eos_token).removesuffix(spelled) for answer in answers]
    encoded, pairs, counts = [[*ids, end] for ids in encode_completions(texts, tokenizer)], [], Counter()
    for row, ids, *answers in zip(rows, tokenize(rows, args, tokenizer), encoded[::2], encoded[1::2], strict=True):
        whole = Pair(ids, *answers)
        prompt = ids[-max(1, args.max_length + len(ids) - pair_tokens(whole)) :]
        most = args.max_length - len(prompt)
        pair = Pair(prompt, *(ids if len(ids) <= most else [*ids[: most - 1], ids[-1]] for ids in answers))
        good = pair.chosen != pair.rejected and [end] not in answers
        counts["with equal or empty completions dropped"] += not good
        if good:
            counts[f"cut to {args.max_length} tokens"] += pair != whole
            counts["with characters unknown to the tokenizer"] += any(tokenizer.unk_token_id in ids for ids in pair[:3])
            pairs.append((repr(row[1]), pair))
    if not pairs:
        raise InputError(f"{source[0]}: each of the {len(rows)} pairs has two equal completions or an empty one")
    return pairs, counts


def pair_tokens(pair):
    """The number of tokens of the prompt and the longer completion."""
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def preference_row(prompt, chosen, rejected):
    """A row of a preference dataset in TRL's format: plain text, or messages where the prompt is; with the columns that
    a chat template reads."""
    row = {"prompt": prompt.prompt, "chosen": chosen, "rejected": rejected}
    if isinstance(prompt.prompt, list):
        row["chosen"] = [{"role": "assistant", "content": chosen}]
        row["rejected"] = [{"role": "assistant", "content": rejected}]
    return row | {name: prompt.columns[name] for name in TEMPLATE_COLUMNS if name in prompt.columns}


def pair_batch(pairs, device):
    """B pairs as a batch of 2B rows for one forward, first the chosen completions, then the rejected ones.

    Returns what `Policy.forward` reads, and `ref_logprobs` (2B,), the reference's log-probs of whole completions.
    """
    prompts = [pair.prompt for pair in pairs] * 2
    completions = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    ref_logprobs = [pair.ref_chosen for pair in pairs] + [pair.ref_rejected for pair in pairs]
    prompt_ids, prompt_mask = left_pad(prompts, 0, device)  # (2B, P)
    lengths = [(len(prompt), len(completion)) for prompt, completion in zip(prompts, completions, strict=True)]
    ids = pad_sequence([torch.tensor(completion) for completion in completions], batch_first=True)  # (2B, T)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, 1:]  # (2B, T)
    return {
        "prompts": prompt_ids,
        "prompt_mask": prompt_mask,
        "completions": ids.to(device, non_blocking=True),
        "completion_mask": mask.to(device, non_blocking=True),
        "prompt_index": torch.arange(len(pairs), device=device).repeat(2)[:, None],
        "ref_logprobs": torch.tensor(ref_logprobs).to(device, non_blocking=True),
        "lengths": lengths,
        "groups": [*range(len(pairs))] * 2,
    }


def spread_pairs(accelerator, pairs, args):
    """This process's pairs by length, a forward at a time: (indices, counted, batch); fillers are not counted (B,)."""
    order = sorted(range(len(pairs)), key=lambda i: pair_tokens(pairs[i]))
    places = own_places(len(pairs), accelerator)
    size = args.micro_batch_size // 2
    for start in range(0, len(places), size):
        part = places[start : start + size]
        indices = [order[place % len(pairs)] for place in part]
        counted = torch.tensor([place < len(pairs) for place in part], device=accelerator.device)
        yield indices, counted, pair_batch([pairs[i] for i in indices], accelerator.device)


@torch.no_grad()
def evaluate_pairs(accelerator, model, pairs, args, pair_losses):
    """Loss, accuracy and margin on all evaluation pairs, spread over the processes; `pair_losses` is the script's.

    Returns the metrics {name: value}, and None, since there are no completions to show.
    """
    metrics = Metrics()
    for _, counted, batch in spread_pairs(accelerator, pairs, args):
        losses, stats = pair_losses(model, batch, args)
        metrics.add("eval/loss", losses, counted)
        metrics.add("eval/accuracy", stats["rewards/accuracy"], counted)
        metrics.add("eval/margin", stats["rewards/margin"], counted)
    return metrics.reduce(accelerator), None


def add_pair_metrics(metrics, pairs, start, device):
    """Count the lengths of this process's pairs of a step, seconds and tokens (of the prompt with each completion) per
    second of its update, and peak memory."""
    metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
    metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
    tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    metrics.add_speed("update", time.perf_counter() - start, tokens)
    metrics.add_max("memory/peak_gb", peak_memory_gb(device))
