"""Preference pairs, read from TRL's preference formats and cut to length."""

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

from common.batches import raw_lines
from common.errors import InputError
from common.harness.data import EMBEDDED, PROMPT_COLUMNS, find_column, load_rows, read_rows
from common.harness.prompts import encode_completions, end_token, read_prompt, read_text, tokenize

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


def pair_tokens(pair):
    """The number of tokens of the prompt and the longer completion."""
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))
