"""Preference pairs: read in any of TRL's formats and cut to length, made batches, and evaluated."""

import dataclasses
import time
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common.batches import left_pad, raw_lines
from common.errors import InputError
from common.harness.data import find_column, find_sources, load_prompts, load_rows, read_rows
from common.harness.distributed import own_places
from common.harness.embedded import EMBEDDED_PAIRS
from common.harness.metrics import Metrics, peak_memory_gb
from common.harness.prompts import (
    PLAIN,
    TEMPLATE_COLUMNS,
    count_plain,
    encode_completions,
    end_token,
    read_prompt,
    read_text,
    tokenize,
)


class Pair(NamedTuple):
    prompt: list[int]  # token ids
    chosen: list[int]  # token ids of the better completion, its end token included
    rejected: list[int]
    # Log-probs of the whole completions under the reference, which dpo.py fills in.
    ref_chosen: float = 0.0
    ref_rejected: float = 0.0


# --- pairs from data ---


def load_pairs(args, tokenizer, most_eval=0, train=None):
    """Training pairs, evaluation pairs, and lines that say where they come from and show the first.

    `load_rows` says what the arguments mean. A row has `chosen` and `rejected`, which are texts or
    messages; they begin with the prompt, or it has a column of its own.
    """
    embedded = {}
    for option in ("dataset", "eval_dataset"):
        if getattr(args, option) == "embedded":
            embedded[option] = str(EMBEDDED_PAIRS)
    args = SimpleNamespace(**vars(args) | embedded)
    train, evaluation, summary = load_rows("pair", read_pairs, args, tokenizer, train, most_eval)
    first = (train or evaluation)[0]
    shown = raw_lines(tokenizer, first.prompt, first.chosen)
    return train, evaluation, "\n".join([summary, *shown])


def load_prompts_or_pairs(args, tokenizer):
    """(prompts, pairs, eval_prompts, eval_pairs, summary); --dataset has prompts or pairs.

    Given pairs are evaluated on held-out pairs, and by sampling too if --eval_dataset has prompts.
    """
    source, eval_source = find_sources(args)
    needs_answers = args.needs_answers
    if not holds_pairs(source):
        prompts, eval_prompts, summary = load_prompts(args, tokenizer, needs_answers, train=True)
        return prompts, [], eval_prompts, [], summary
    if args.rounds > 1:
        problem = f"{args.dataset} holds pairs, and rounds make their own from prompts"
        raise InputError(f"--rounds {args.rounds}: {problem}")
    most_eval = args.eval_prompts
    if not args.eval_dataset or holds_pairs(eval_source):
        pairs, eval_pairs, summary = load_pairs(args, tokenizer, most_eval, train=True)
        return [], pairs, [], eval_pairs, summary
    without_eval_dataset = dataclasses.replace(args, eval_dataset=None, eval_split=None)
    pairs, eval_pairs, summary = load_pairs(without_eval_dataset, tokenizer, most_eval, train=True)
    _, eval_prompts, note = load_prompts(args, tokenizer, needs_answers, train=False)
    return [], pairs, eval_prompts, eval_pairs, f"{summary}\n{note}"


def holds_pairs(source):
    """Whether a source has preference pairs, by the columns of its first row."""
    _, first_row = next(read_rows(source), ("", {}))
    return {"chosen", "rejected"} <= first_row.keys()


def split_pair(row, column, where):
    """(prompt, chosen text, rejected text) of a row; `column` may have its prompt.

    {"chosen": "Is 1 < 2? Yes", "rejected": "Is 1 < 2? No"} -> ("Is 1 < 2?", " Yes", " No")
    """
    chosen = read_text(row.get("chosen"), "chosen", where)
    rejected = read_text(row.get("rejected"), "rejected", where)
    are_messages = isinstance(chosen, list)
    has_prompt = row.get(column) is not None
    if has_prompt and isinstance(row[column], str) and are_messages and len(chosen) > 1:
        has_prompt = False  # it stands beside whole dialogues, which have it as messages
    prompt, _ = read_prompt(row, column if has_prompt else None, where)
    start = len(prompt)
    repeated = are_messages and chosen[:start] == prompt and rejected[:start] == prompt
    if repeated or not has_prompt:
        chosen = chosen[start:]
        rejected = rejected[start:]
    if isinstance(chosen, str) and isinstance(rejected, str):
        return prompt, chosen, rejected
    if is_answer(chosen) and is_answer(rejected):
        return prompt, chosen[0]["content"], rejected[0]["content"]
    needed = "chosen and rejected must both be text, or one assistant message each"
    raise InputError(f"{where}: {needed}")


def is_answer(messages):
    """Whether this is one turn of the assistant."""
    return isinstance(messages, list) and [turn["role"] for turn in messages] == ["assistant"]


def read_pairs(source, args, tokenizer):
    """[(key, Pair)] of the rows whose completions differ, and {what to tell: how many}."""
    rows = []  # (where, prompt, columns)
    chosen_texts = []
    rejected_texts = []
    for where, row in read_rows(source):
        if not rows:
            column = find_column("prompt", args, row, source, needed=False)
        prompt, chosen, rejected = split_pair(row, column, where)
        rows.append((where, prompt, row))
        chosen_texts.append(chosen)
        rejected_texts.append(rejected)
    ids_of_pairs = zip(
        tokenize(rows, args, tokenizer),
        encode_answers(chosen_texts, tokenizer),
        encode_answers(rejected_texts, tokenizer),
        strict=True,
    )
    pairs = []
    cut = 0
    for (_, prompt, _), ids in zip(rows, ids_of_pairs, strict=True):
        whole = Pair(*ids)
        pair = cut_pair(whole, args.max_length)
        has_empty = min(len(whole.chosen), len(whole.rejected)) == 1  # nothing but the end token
        if has_empty or pair.chosen == pair.rejected:
            continue
        if pair != whole:
            cut += 1
        pairs.append((repr(prompt), pair))
    if not pairs:
        problem = "has two equal completions or an empty one"
        raise InputError(f"{source[0]}: each of the {len(rows)} pairs {problem}")
    unknown = tokenizer.unk_token_id
    with_unknown = sum(unknown in chain(*pair[:3]) for _, pair in pairs)
    return pairs, {
        "with equal or empty completions dropped": len(rows) - len(pairs),
        f"cut to {args.max_length} tokens": cut,
        PLAIN: count_plain([prompt for _, prompt, _ in rows], tokenizer),
        "with characters unknown to the tokenizer": with_unknown,
    }


def encode_answers(texts, tokenizer):
    """Token ids of completions, each with one end token, whether or not its text has it already."""
    end = end_token(tokenizer)
    spelled = tokenizer.convert_ids_to_tokens(end)
    # Some data end an answer with the end token, some with EOS, some with both.
    texts = [text.removesuffix(tokenizer.eos_token).removesuffix(spelled) for text in texts]
    return [[*ids, end] for ids in encode_completions(texts, tokenizer)]


def cut_pair(pair, most):
    """The pair cut to `most` tokens of the prompt and its longer completion.

    The prompt loses its first tokens, down to one; then a completion loses the ones before its end
    token, here |. To five tokens: ("abcdef", "12345|", "12|") -> ("f", "123|", "12|")
    """
    too_many = pair_tokens(pair) - most
    kept = max(1, len(pair.prompt) - too_many)
    prompt = pair.prompt[-kept:]
    room = most - len(prompt)
    return Pair(prompt, cut_completion(pair.chosen, room), cut_completion(pair.rejected, room))


def cut_completion(ids, most):
    if len(ids) <= most:
        return ids
    return [*ids[: most - 1], ids[-1]]


def pair_tokens(pair):
    """The number of tokens of the prompt and the longer completion."""
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def preference_row(prompt, chosen, rejected):
    """A row of a preference dataset in TRL's format, with the columns that a chat template reads.

    The completions are messages if the prompt is, and plain text otherwise.
    """
    row = {"prompt": prompt.prompt, "chosen": chosen, "rejected": rejected}
    if isinstance(prompt.prompt, list):
        row["chosen"] = [{"role": "assistant", "content": chosen}]
        row["rejected"] = [{"role": "assistant", "content": rejected}]
    for name in TEMPLATE_COLUMNS:
        if name in prompt.columns:
            row[name] = prompt.columns[name]
    return row


# --- batches ---


def pair_batch(pairs, device):
    """B pairs as a batch of 2B rows for one forward, the chosen completions before the rejected.

    It has what `Policy.forward` reads, and `ref_logprobs` (2B,), the reference's log-probs of whole
    completions. Of prompts a, b the rows are a, b, a, b: `prompt_index` is [[0], [1], [0], [1]].
    """
    prompts = [pair.prompt for pair in pairs] * 2
    completions = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    ref_logprobs = [pair.ref_chosen for pair in pairs] + [pair.ref_rejected for pair in pairs]
    prompt_ids, prompt_mask = left_pad(prompts, 0, device)  # (2B, P)
    ids = pad_sequence([torch.tensor(row) for row in completions], batch_first=True)  # (2B, T)
    completion_lengths = torch.tensor([len(row) for row in completions])
    mask = torch.arange(ids.shape[1]) < completion_lengths[:, None]  # (2B, T)
    return {
        "prompts": prompt_ids,
        "prompt_mask": prompt_mask,
        "completions": ids.to(device, non_blocking=True),
        "completion_mask": mask.to(device, non_blocking=True),
        "prompt_index": torch.arange(len(pairs), device=device).repeat(2)[:, None],
        "ref_logprobs": torch.tensor(ref_logprobs).to(device, non_blocking=True),
        "lengths": list(zip(map(len, prompts), map(len, completions), strict=True)),
        "groups": [*range(len(pairs))] * 2,
    }


def spread_pairs(accelerator, pairs, args):
    """This process's pairs by length, as (indices, counted, batch) of one forward after another.

    A filler, which only keeps the processes in step, is not counted: `counted` (B,) is false.
    """
    by_length = sorted(range(len(pairs)), key=lambda i: pair_tokens(pairs[i]))
    places = own_places(len(pairs), accelerator)
    size = args.micro_batch_size // 2
    for start in range(0, len(places), size):
        part = places[start : start + size]
        indices = [by_length[place % len(pairs)] for place in part]
        counted = torch.tensor([place < len(pairs) for place in part], device=accelerator.device)
        yield indices, counted, pair_batch([pairs[i] for i in indices], accelerator.device)


# --- evaluation and metrics ---


@torch.no_grad()
def evaluate_pairs(accelerator, model, pairs, args, pair_losses):
    """Loss, accuracy and margin on all evaluation pairs, which are spread over the processes.

    `pair_losses` is the function of the script. Returns the metrics {name: value}, and None, since
    there are no completions to show.
    """
    metrics = Metrics()
    for _, counted, batch in spread_pairs(accelerator, pairs, args):
        losses, stats = pair_losses(model, batch, args)
        metrics.add("eval/loss", losses, counted)
        metrics.add("eval/accuracy", stats["rewards/accuracy"], counted)
        metrics.add("eval/margin", stats["rewards/margin"], counted)
    return metrics.reduce(accelerator), None


def add_pair_metrics(metrics, pairs, start, device):
    """Count the lengths of this process's pairs of a step, the update's speed, and peak memory.

    The tokens per second count a prompt with each of its two completions.
    """
    metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
    metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
    tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    seconds = time.perf_counter() - start
    metrics.add_speed("update", seconds, tokens)
    metrics.add_max("memory/peak_gb", peak_memory_gb(device))
