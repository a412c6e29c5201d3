"""A task without gold answers: write JSON. Data, small model and reward of docs/fork.md.

    python examples/json_task.py FOLDER      writes train.jsonl, test.jsonl and model/

A prompt such as `a7 b2 c5` asks for `{"a": 7, "b": 2, "c": 5}`. Each row has that object in the
column `wanted`, for the reward, and no answer column. The model first learns to copy the entries,
and then from sloppy data, where three of four completions lack a quote, a colon, a comma, the last
brace or the first entry. The build takes about a minute on one core.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

KEYS = "abcd"
TRAIN_ROWS, TEST_ROWS = 1024, 128
STEPS, ROWS, LEARNING_RATE, WARM_UP = 800, 64, 3e-3, 50
CLEAN_ONLY = 0.8  # share of the training in which every completion is right, to learn copying
CLEAN = 0.25  # share of the completions that are right in the rest


def json_object(completions, wanted, **columns):
    """Return 0 without a JSON object, else 0.5 plus 0.5 times the share of right entries."""
    return [score(text, entries) for text, entries in zip(completions, wanted, strict=True)]


def score(text, wanted):
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    right = sum(found.get(key) == value for key, value in wanted.items())
    return 0.5 + 0.5 * right / max(len(wanted), len(found))


def make_row(rng):
    wanted = {key: rng.randint(0, 9) for key in KEYS[: rng.randint(3, 4)]}
    return {
        "prompt": " ".join(f"{key}{value}" for key, value in wanted.items()) + " ",
        "wanted": wanted,
    }


def spoil(text, rng):
    """Return the text without a quote, colon, comma or last brace, or without its first entry."""
    if rng.random() < 0.25:
        return "{" + text.partition(", ")[2]
    places = [i for i, letter in enumerate(text) if letter in '":,}']
    place = rng.choice(places)
    return text[:place] + text[place + 1 :]


def make_tokenizer():
    """Return a tokenizer with one token per character, as in lab/build_tiny.py."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *KEYS, *'0123456789{}":, ']
    tokenizer = Tokenizer(
        models.WordLevel({token: id for id, token in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_batch(rng, tokenizer, clean):
    """Return ids and labels (ROWS, T) of random rows, of which this share is right."""
    rows = []
    for _ in range(ROWS):
        row = make_row(rng)
        text = json.dumps(row["wanted"])
        text = text if rng.random() < clean else spoil(text, rng)
        rows.append(
            (tokenizer.encode(row["prompt"]), [*tokenizer.encode(text), tokenizer.eos_token_id])
        )
    width = max(len(prompt + completion) for prompt, completion in rows)
    ids = [p + c + [tokenizer.pad_token_id] * (width - len(p + c)) for p, c in rows]
    labels = [[-100] * len(p) + c + [-100] * (width - len(p + c)) for p, c in rows]
    return torch.tensor(ids), torch.tensor(labels)


def make_model(tokenizer, rng, steps):
    """Train a small Llama from scratch."""
    size = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
    special = dict(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **size, **special)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / steps)
    )
    for step in range(steps):
        ids, labels = make_batch(rng, tokenizer, CLEAN if step >= CLEAN_ONLY * steps else 1)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    return model


def main(folder, steps=STEPS):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng, folder = random.Random(0), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = {}
    while len(lines) < TRAIN_ROWS + TEST_ROWS:
        lines[json.dumps(make_row(rng)) + "\n"] = None  # each row once
    for split, part in ("train", slice(TRAIN_ROWS)), ("test", slice(TRAIN_ROWS, None)):
        (folder / f"{split}.jsonl").write_text(
            "".join(list(lines)[part]), encoding="utf-8", newline="\n"
        )
    tokenizer = make_tokenizer()
    make_model(tokenizer, rng, steps).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    main(parser.parse_args().folder)
