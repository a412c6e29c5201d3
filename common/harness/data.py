"""Prompts from any common dataset format, and the sampler that draws them without end.

`load_prompts` finds the splits, reads the rows, merges those that repeat, puts `--prompt_template` and
`--system_prompt` around the text, and tokenizes. It goes by the columns:

    GSM8K           question, answer (gold after ####)
    MATH            problem, answer or solution (gold in the last \\boxed{})
    verl            prompt, reward_model (a dict with ground_truth), as in DAPO-Math-17k; or reward_model.ground_truth
    TRL             prompt; prompt, chosen, rejected; or chosen, rejected alone (as in hh-rlhf); plain text or messages;
                    messages alone (data for SFT), whose last assistant turn is the gold
    anything else   --prompt_column and --answer_column

The columns `tools` and `chat_template_kwargs` go to the chat template, as in TRL.
"""

import glob
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.answers import extract_answer
from common.errors import InputError
from common.harness.messages import check_prompt, join_parts, prompt_key, shared_prompt, split_answer
from common.harness.rows import CONVERSATION, EXTENSIONS, TEMPLATE_COLUMNS, Source, find_columns, load_splits, read_rows
from common.harness.tokens import Row, tokenize

EMBEDDED = Path(__file__).parents[1] / "tiny"
EMBEDDED_FOLDERS = {"embedded": EMBEDDED, "embedded-hard": EMBEDDED.with_name("tiny_hard")}
UNREAD = "not read, --max_steps 0 only evaluates"


@dataclass(frozen=True)
class Prompt:
    ids: list[int]  # the token ids the model is given
    prompt: str | list[dict]  # what reward functions see: the row's own text or messages, no template or system prompt
    answer: str | None  # gold: `extract_answer` of the answer column, or its whole text when it has no marker
    columns: dict  # the row's other columns, for the user's reward functions; the raw answer column is among them
    thinks: bool = False  # whether it ends with `<think>`, as some templates do: the completion begins in the thought


def load_prompts(args, tokenizer, needs_answers: bool) -> tuple[list[Prompt], list[Prompt], str]:
    """Training prompts, evaluation prompts, and one line on where they come from, what was merged and dropped.

    Evaluation data: `--eval_dataset` and `--eval_split`; else the dataset's test split, then its validation split (for
    a local `train.*` the file `test.*` or `validation.*` beside it); else 5 % of the training prompts, at most 512,
    held out by `seed`. Training does not depend on `--eval_prompts`, so a resumed run may change it. A run that only
    evaluates reads training data only to hold some of it out.
    With `needs_answers` a row without an answer is an error. Bad input is an InputError that names file and row.
    """
    if args.prompt_template and "{prompt}" not in args.prompt_template:
        raise InputError(f"--prompt_template {args.prompt_template!r} does not contain {{prompt}}")
    source, eval_source = find_sources(args)
    train, note = read_prompts(source, args, tokenizer, needs_answers) if source else ([], UNREAD)
    if eval_source:
        evaluation, eval_note = read_prompts(eval_source, args, tokenizer, needs_answers)
    else:
        train, evaluation = hold_out(train, args.seed)
        eval_note = "held out of these"
    evaluation, eval_note = limit(evaluation, args.eval_prompts, args.seed, eval_note)
    trained = {prompt_key(p.prompt) for p in train}
    if seen := sum(prompt_key(p.prompt) in trained for p in evaluation):
        eval_note += f", {seen} also in training"
    return train, evaluation, f"training: {len(train)} prompts ({note}); evaluation: {len(evaluation)} ({eval_note})"


def load_eval_prompts(args, tokenizer, needs_answers: bool) -> tuple[list[Prompt], str]:
    """The prompts of `--eval_dataset`, for a script that trains on something else, and a line about them."""
    evaluation, note = read_prompts(find_eval_source(args, {}), args, tokenizer, needs_answers)
    evaluation, note = limit(evaluation, args.eval_prompts, args.seed, note)
    return evaluation, f"evaluation: {len(evaluation)} prompts ({note})"


def limit(rows: list, most: int, seed: int, note: str) -> tuple[list, str]:
    """At most `most` of the rows (0: all), chosen by `seed` and kept in their order, and `note` with that added."""
    if not 0 < most < len(rows):
        return rows, note
    chosen = np.random.default_rng(seed).permutation(len(rows))[:most]
    return [rows[i] for i in sorted(chosen)], f"{note}, chosen from {len(rows)}"


def find_sources(args) -> tuple[Source | None, Source | None]:
    """(training data, evaluation data). The first is None if the run needs none: it only evaluates, and on data of its
    own. The second is None if it is to be held out of the first. Even at --max_steps 0, dpo.py makes pairs of the
    training data, and a resumed run compares it with its checkpoint's."""
    alone = args.max_steps == 0 and not args.resume and not hasattr(args, "pair_prompts")
    splits = {} if alone and args.eval_dataset else find_splits(args.dataset, args.dataset_config, siblings=True)
    eval_source = find_eval_source(args, splits)
    if alone and eval_source:
        return None, eval_source
    return get_split(splits, args.dataset_split, args.dataset, "--dataset_split"), eval_source


def find_splits(name: str | list[str], config: str | None, siblings: bool) -> dict[str, Source]:
    """The splits of an embedded task, a file, a folder, or a hub id. One file or several are a split `train`; with
    `siblings`, a file named `train.*` brings the files `test.*` and `validation.*` beside it as further splits."""
    if isinstance(name, list):
        return {"train": find_files(name)}
    path = EMBEDDED_FOLDERS.get(name) or Path(name).expanduser()
    if path.is_file():
        beside = split_files(path.parent) if siblings and path.name.removeprefix("train") in EXTENSIONS else {}
        return beside | {"train": Source(str(path), [path])}
    if path.is_dir():
        return split_files(path) or load_splits(str(path), config)
    if glob.has_magic(name):
        return {"train": find_files([name])}
    if path.name.endswith(EXTENSIONS) or name.startswith(("/", "./", "../", "~")):
        raise InputError(f"{path}: no such file or folder")
    return load_splits(name, config)


def find_files(names: list[str]) -> Source:
    """The files of these names and patterns, such as `data/*.jsonl`, as one source."""
    files = []
    for name in names:
        path = Path(name).expanduser()
        found = [path] if path.is_file() else map(Path, sorted(glob.glob(str(path), recursive=True)))
        found = [file for file in found if file.is_file()]
        if not found:
            raise InputError(f"{name}: no such file; several are given as files or as a pattern, not as hub ids")
        files += found
    return Source(f"{files[0].name} and {len(files) - 1} more" if files[1:] else files[0].name, files)


def split_files(folder: Path) -> dict[str, Source]:
    """The files train.*, test.* and validation.* of a folder, as splits."""
    splits = {}
    for split in ("train", "test", "validation"):
        paths = [folder / (split + suffix) for suffix in EXTENSIONS]
        if path := next(filter(Path.is_file, paths), None):
            splits[split] = Source(str(path), [path])
    return splits


def get_split(splits: dict[str, Source], split: str, name: str, option: str) -> Source:
    if split not in splits:
        raise InputError(f"{name} has no split {split!r} but {', '.join(splits)}: choose with {option}")
    return splits[split]


def find_eval_source(args, splits: dict[str, Source]) -> Source | None:
    """The evaluation data that `load_prompts` describes; None where it is to be held out of the training data."""
    name, others = args.dataset, {split: splits[split] for split in splits if split != args.dataset_split}
    if args.eval_dataset:
        name = args.eval_dataset
        splits = others = find_splits(name, args.dataset_config if name == args.dataset else None, siblings=False)
    if args.eval_split:
        return get_split(splits, args.eval_split, name, "--eval_split")
    for split in ("test", "validation"):
        if split in others:
            return others[split]
    if not args.eval_dataset:
        return None
    if len(splits) > 1:
        raise InputError(f"{name} has the splits {', '.join(splits)}: choose with --eval_split")
    return next(iter(splits.values()))


def read_prompts(source: Source, args, tokenizer, needs_answers: bool) -> tuple[list[Prompt], str]:
    """The prompts of a source that fit `--max_prompt_tokens`, and a note on what was merged and dropped."""
    rows, merged, other = merge_rows(source, args, needs_answers)
    encoded = tokenize(rows, args, tokenizer, args.max_prompt_tokens)
    prompts = [
        Prompt(ids, row.prompt, row.answer, row.columns, tokenizer.decode(ids[-8:]).rstrip().endswith("<think>"))
        for ids, row in zip(encoded, rows, strict=True)
        if len(ids) <= args.max_prompt_tokens
    ]
    if not prompts:
        raise InputError(
            f"{source.name}: all {len(rows)} prompts are longer than --max_prompt_tokens {args.max_prompt_tokens},"
            f" the shortest has at least {min(map(len, encoded))} tokens"
        )
    note = source.name
    if begun := sum(isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant" for row in rows):
        note += f", {begun} begin the assistant's answer"
    if merged:
        note += f", {merged} repeated rows merged"
    if other:
        note += f" ({other} of them with other values in other columns)"
    if len(prompts) < len(rows):
        note += f", {len(rows) - len(prompts)} longer than {args.max_prompt_tokens} tokens dropped"
    if unknown := sum(tokenizer.unk_token_id in prompt.ids for prompt in prompts):
        note += f", {unknown} with characters unknown to the tokenizer"
    return prompts, note


def merge_rows(source: Source, args, needs_answers: bool) -> tuple[list[Row], int, int]:
    """The first row of each prompt and answer, the number of rows that repeat one, and of those of them that have other
    values in other columns, which no reward function will see.

    This comes before tokenization, as one in a hundred of DAPO-Math-17k's 1.8 million rows is left. A last turn of the
    assistant is cut off from the column `messages`: it is the gold answer unless there is an answer column.
    """
    rows = read_rows(source, args.prompt_column, args.answer_column)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source.name}: no rows")
    prompt_column, answer_column = find_columns(source.name, list(first[1]), args, needs_answers)
    gold = cache(lambda text: extract_answer(text) or text)
    kept: dict[Any, Row] = {}
    repeated = other = 0
    for where, row in chain([first], rows):
        row |= {name: join_parts(row[name], where) for name in ("chosen", "rejected", prompt_column) if name in row}
        prompt = row.get(prompt_column) if prompt_column else shared_prompt(row.get("chosen"), row.get("rejected"))
        last = None
        if prompt_column == CONVERSATION:
            prompt, last = split_answer(prompt)
        prompt = check_prompt(prompt, where)
        text = answer_text(row.get(answer_column) if answer_column else last, where)
        if needs_answers and text is None:
            place = repr(answer_column) if answer_column else f"the last turn of {CONVERSATION!r}"
            raise InputError(f"{where}: no answer (text or number) in {place}, and the reward needs one")
        answer = None if text is None else gold(text)
        key = prompt_key(prompt), answer, repr([row.get(name) for name in TEMPLATE_COLUMNS])
        columns = {k: v for k, v in row.items() if k != prompt_column}
        if key in kept:
            repeated += 1
            other += columns != kept[key].columns
        else:
            kept[key] = Row(where, prompt, answer, columns)
    return list(kept.values()), repeated, other


def answer_text(value: Any, where: str) -> str | None:
    """The value of an answer column as text; None if it holds no answer."""
    if isinstance(value, dict):  # verl's reward_model
        value = value.get("ground_truth")
    if isinstance(value, list) and len(value) == 1:  # so in some of verl's data
        value = value[0]
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}: the answer {value} is not a finite number: write it as text, or null for no answer")
    return str(value).strip() or None if isinstance(value, str | int | float) else None


def hold_out(prompts: list, seed: int) -> tuple[list, list]:
    """(prompts to train on, prompts to evaluate on): 5 % of them, at most 512, are held out, chosen by `seed`."""
    if len(prompts) < 2:
        raise InputError("a single prompt cannot be trained on and held out: give --eval_dataset")
    size = min(512, max(1, len(prompts) // 20))
    held = set(np.random.default_rng(seed).permutation(len(prompts))[:size].tolist())
    return [p for i, p in enumerate(prompts) if i not in held], [prompts[i] for i in sorted(held)]


class PromptSampler:
    """Draws indices of `rows` (prompts or pairs) from permutations, a new one each epoch, that depend on `seed` alone.

    Every process draws the whole global batch and takes its own part of it, so the order and the state are the same for
    any number of processes. The state holds a digest of the rows, because an index means nothing among other rows.
    """

    def __init__(self, rows: Sequence, seed: int):
        self.rows, self.n, self.seed, self.drawn = rows, len(rows), seed, 0

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the rows. Of a value that JSON cannot hold, such as an image, only the type counts."""
        digest = hashlib.sha256()
        for row in self.rows:
            if isinstance(row, Prompt):
                row = {name: value for name, value in vars(row).items() if name != "thinks"}  # its ids say that
            digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode() + b"\n")
        return digest.hexdigest()

    def draw(self, k: int) -> list[int]:
        """The next k indices, across the end of an epoch if need be."""
        indices: list[int] = []
        while len(indices) < k:
            epoch, start = divmod(self.drawn + len(indices), self.n)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.n)
            indices += order[start : start + k - len(indices)].tolist()
        self.drawn += k
        return indices

    def state_dict(self) -> dict:
        return {"n": self.n, "seed": self.seed, "digest": self.digest, "drawn": self.drawn}

    def load_state_dict(self, state: dict) -> None:
        """Raises InputError if the state is of other data or another seed: the order would be another."""
        for name, value, what in (("n", self.n, "rows of data"), ("seed", self.seed, "as --seed")):
            if state[name] != value:
                raise InputError(f"the checkpoint is of a run with {state[name]} {what}, this one has {value}")
        if state["digest"] != self.digest:
            raise InputError(
                f"the checkpoint is of other data, with as many rows ({self.n}): an exact resume is impossible"
            )
        self.drawn = state["drawn"]
