"""Preference pairs: their options, read from TRL's preference formats, cut to length, put into batches, measured."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common.batches import left_pad, raw_lines
from common.errors import InputError, refuse
from common.harness.data import EMBEDDED, PROMPT_COLUMNS, find_column, load_rows, read_rows
from common.harness.metrics import peak_memory_gb
from common.harness.prompts import encode_completions, end_token, read_prompt, read_text, tokenize

EMBEDDED_PAIRS = EMBEDDED / "pairs"


class PairArgs:
    """A step over preference pairs. `Args` inherits from it first, then from the class that declares the options."""

    step_size, num_minibatches = "pairs_per_step", 1

    def check(self):
        super().check()
        if self.micro_batch_size < 2:
            refuse(self, "micro_batch_size", "a pair is two completions in one forward")

    def describe_step(self, processes):
        """The batch sizes of a step as one line."""
        pairs = self.pairs_per_step
        return f"{pairs} pairs, {pairs // processes} on each process; {self.num_epochs} passes over the pairs"


def last_step(args, pairs):
    """The number of steps of a run: what `pairs` fill in all epochs, at most max_steps; without pairs max_steps."""
    if pairs:
        steps = len(pairs) * args.num_epochs // args.pairs_per_step
        return steps if args.max_steps < 0 else min(steps, args.max_steps)
    if args.max_steps < 0 and args.lr_scheduler != "constant":
        refuse(args, "lr_scheduler", "needs to know the end of the run: give --max_steps")
    return args.max_steps


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


def holds_pairs(source):
    """Whether a source has preference pairs, by the columns of its first row."""
    return {"chosen", "rejected"} <= next(read_rows(source), ("", {}))[1].keys()


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
    `--max_length` tokens the prompt loses its first ones, the same for both completions; once it has only one, the
    completions lose their last ones, but not the end token."""
    rows, texts, end = [], [], end_token(tokenizer)
    spelled = tokenizer.convert_ids_to_tokens(end)  # some data end an answer so, or by EOS, or both
    for where, row in read_rows(source):
        if not rows:
            column = find_column("prompt", args.prompt_column, PROMPT_COLUMNS, row, source, needed=False)
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


def pair_batch(pairs, device):
    """B pairs as a batch of 2B rows for one forward, first the chosen completions, then the rejected ones: what
    `Policy.forward` reads, and `ref_logprobs` (2B,), the reference's log-probs of whole completions."""
    prompts, chosen, rejected, ref_chosen, ref_rejected = zip(*pairs, strict=True)
    prompt_ids, prompt_mask = left_pad(prompts * 2, 0, device)
    lengths = [(len(prompt), len(row)) for prompt, row in zip(prompts * 2, chosen + rejected, strict=True)]
    ids = pad_sequence([torch.tensor(row) for row in chosen + rejected], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, 1:]
    return {
        "prompts": prompt_ids,
        "prompt_mask": prompt_mask,
        "completions": ids.to(device, non_blocking=True),
        "completion_mask": mask.to(device, non_blocking=True),
        "prompt_index": torch.arange(len(pairs), device=device).repeat(2)[:, None],
        "ref_logprobs": torch.tensor(ref_chosen + ref_rejected).to(device, non_blocking=True),
        "lengths": lengths,
        "groups": [*range(len(pairs))] * 2,
    }


def pair_tokens(pair):
    """The number of tokens of the prompt and the longer completion."""
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def spread_pairs(accelerator, pairs, args):
    """This process's pairs by length, a forward at a time: (indices, real, batch); `real` (B,) is false for fillers."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    order = sorted(range(len(pairs)), key=lambda i: pair_tokens(pairs[i]))
    places = range(rank, -(-len(pairs) // processes) * processes, processes)
    size = args.micro_batch_size // 2
    for part in (places[start : start + size] for start in range(0, len(places), size)):
        indices = [order[place % len(pairs)] for place in part]
        real = torch.tensor([place < len(pairs) for place in part], device=accelerator.device)
        yield indices, real, pair_batch([pairs[i] for i in indices], accelerator.device)


def pair_metrics(metrics, pairs, start, device):
    """Lengths of this process's pairs of a step, seconds and tokens (of the prompt with each completion) per second of
    its update, and peak memory."""
    metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
    metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
    tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    metrics.add_speed("update", time.perf_counter() - start, tokens)
    metrics.add_max("memory/peak_gb", peak_memory_gb(device))
