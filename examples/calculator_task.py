"""A task with a tool: sums for a model with a calculator. Data and small model of docs/fork.md.

    python examples/calculator_task.py FOLDER      writes train.jsonl, test.jsonl and model/

A prompt such as `47+85-29?` is answered directly, `#### 103`, or with calls, two numbers each. A
call ends with `]`. The calculator then writes `=`, the result and a newline, and the model goes on:

    [47+85]=132
    [132-29]=103
    #### 103

The model first learns to call, and then to do so in one of four completions. The others answer
directly and are mostly wrong, since two layers of width 64 cannot add such numbers. What the
calculator writes is not a training target. The reward `calls` counts the calls, for
--reward_weights 1 0. The build takes about a minute on one core.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TRAIN_ROWS, TEST_ROWS = 1024, 128
STEPS, ROWS, LEARNING_RATE, WARM_UP = 1000, 64, 3e-3, 50
CALLS_ONLY = 0.8  # share of the training in which every completion calls, to learn that well
CALLS = 0.25  # share of the completions that call in the rest


def calls(completions, **columns):
    """Return the number of calls in each completion."""
    return [float(completion.count("]")) for completion in completions]


def make_problem(rng):
    """Return a question of three or four terms, its total, and its calls with their results."""
    total = rng.randint(10, 99)
    question, turns = str(total), []
    for _ in range(rng.randint(2, 3)):
        term = rng.randint(10, 99)
        sign = "-" if term <= total and rng.random() < 0.5 else "+"
        result = total - term if sign == "-" else total + term
        question += f"{sign}{term}"
        turns.append((f"[{total}{sign}{term}]", f"={result}\n"))
        total = result
    return f"{question}?", total, turns


def make_tokenizer():
    """Return a tokenizer with one token per character, as in lab/build_tiny.py."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789+-=?#[] \n"]
    tokenizer = Tokenizer(
        models.WordLevel({token: id for id, token in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_batch(rng, tokenizer, share):
    """Return ids and labels (ROWS, T) of random problems, of which this share calls."""
    rows = []
    for _ in range(ROWS):
        question, total, turns = make_problem(rng)
        parts = [part for turn in turns for part in turn] if rng.random() < share else []
        ids, labels = tokenizer.encode(question), [-100] * len(question)
        for part in (*parts, f"#### {total}"):
            tokens = tokenizer.encode(part)
            ids = ids + tokens
            labels = labels + ([-100] * len(tokens) if part[0] == "=" else tokens)
        rows.append(([*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]))
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
    labels = [labels + [-100] * (width - len(labels)) for _, labels in rows]
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
        ids, labels = make_batch(rng, tokenizer, CALLS if step >= CALLS_ONLY * steps else 1)
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
    rows = {}
    while len(rows) < TRAIN_ROWS + TEST_ROWS:
        question, total, _ = make_problem(rng)
        rows[question] = json.dumps({"question": question, "answer": str(total)}) + "\n"
    for split, part in ("train", slice(TRAIN_ROWS)), ("test", slice(TRAIN_ROWS, None)):
        (folder / f"{split}.jsonl").write_text(
            "".join(list(rows.values())[part]), encoding="utf-8", newline="\n"
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
