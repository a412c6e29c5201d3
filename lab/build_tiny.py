"""Builds the embedded default, a pocket edition of GSM8K: data, tokenizer and model, all in this folder.

    python common/tiny/build.py

The problems are sums of four to six one-digit terms that never go below zero, such as `7+5-2+9?`. There are two ways to
answer. In steps, as GSM8K's own solutions do it (`train.jsonl` and `test.jsonl` hold these, with its column names):

    7+5=12
    12-2=10
    10+9=19
    #### 19

or straight, with the last line alone. The model learns both by plain supervised training, and the straight way mostly.
Two layers of width 64 can copy and add one pair of digits at a time, but not the whole sum in their heads. So the model
prefers the way it is bad at; that is what reinforcement learning finds out and turns round.

Training draws fresh problems and never one of `test.jsonl`. The lists are finite and disjoint, so that a run meets its
prompts again and is evaluated on sums that no training has shown.

Takes about two minutes on one core; again on the same machine it writes the same bytes. Measured on `test.jsonl`, 32
samples a problem at temperature 1: a third of the answers in steps, 0.95 of them right; two thirds straight, 0.07 of
them right; pass@1 0.36, 17 tokens on average, 47 at most.

`pairs/` holds preference pairs sampled from this model, the default data of reward_model.py. With another model they
are to be made again, and copied from the pairs-round-1.jsonl, those of four seeds one after the other for the test:

    python dpo.py --max_steps 0 --pair_prompts 1024 --output_dir runs/pairs-train
    for seed in 0 1 2 3; do python dpo.py --max_steps 0 --pair_prompts 128 --dataset_split test --eval_split train \\
        --eval_prompts 8 --seed $seed --output_dir runs/pairs-test-$seed; done
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
SEED = 0
MIN_TERMS, MAX_TERMS = 4, 6
TRAIN_PROBLEMS, TEST_PROBLEMS = 1024, 128
STEPS, ROWS, LEARNING_RATE, WARM_UP = 1200, 64, 3e-3, 50
STEPS_ONLY = 0.8  # of the training shows answers in steps only, so that these are learnt well ...
STRAIGHT = 0.68  # ... and in the rest this share of the answers is straight


def make_problem(rng, least=MIN_TERMS, most=MAX_TERMS):
    """A question with a number of terms between `least` and `most`, and its solution in steps."""
    total = rng.randint(1, 9)
    question, steps = str(total), ""
    for _ in range(rng.randint(least, most) - 1):
        term = rng.randint(1, 9)
        sign = "-" if term <= total and rng.random() < 0.5 else "+"
        result = total - term if sign == "-" else total + term
        question += f"{sign}{term}"
        steps += f"{total}{sign}{term}={result}\n"
        total = result
    return f"{question}?", f"{steps}#### {total}"


def make_lists(rng):
    """Two lists of distinct problems: training and test."""
    problems = {}
    while len(problems) < TRAIN_PROBLEMS + TEST_PROBLEMS:
        question, answer = make_problem(rng)
        problems[question] = answer
    rows = [{"question": question, "answer": answer} for question, answer in problems.items()]
    return rows[:TRAIN_PROBLEMS], rows[TRAIN_PROBLEMS:]


def make_tokenizer():
    """One token a character; what is not in the vocabulary becomes `<unk>`, so any text has tokens."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789+-=?# \n"]
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # "." would skip newlines
    tokenizer.decoder = decoders.Fuse()  # joins the characters without spaces
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_model(tokenizer):
    # Llama and not Qwen2: for a Qwen2 config AutoTokenizer builds a Qwen2 tokenizer whatever tokenizer.json says.
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_batch(rng, tokenizer, straight, held_out):
    """Token ids and labels of fresh problems; the loss counts the answer and its end token, not the question."""
    rows = []
    while len(rows) < ROWS:
        question, answer = make_problem(rng)
        if question in held_out:
            continue
        if rng.random() < straight:
            answer = answer[answer.index("####") :]
        prompt, completion = tokenizer.encode(question), [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append((prompt + completion, [-100] * len(prompt) + completion))
    return pad(rows, tokenizer)


def pad(rows, tokenizer):
    """Token ids and labels as tensors; padding is on the right, where no real token sees it."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def train(model, next_batch):
    """Plain supervised training on the token ids and labels that `next_batch(step)` makes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # up in WARM_UP steps, then down to zero in a straight line
        optimizer, lambda step: min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
    )
    for step in range(STEPS):
        ids, labels = next_batch(step)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{STEPS}  loss {loss.item():.4f}", flush=True)


def main():
    torch.set_num_threads(1)  # with more, sums may be ordered otherwise from run to run
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    train_rows, test_rows = make_lists(rng)
    for name, rows in ("train", train_rows), ("test", test_rows):
        (FOLDER / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n"
        )
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} weights")
    held_out = {row["question"] for row in test_rows}
    train(model, lambda step: make_batch(rng, tokenizer, STRAIGHT if step >= STEPS_ONLY * STEPS else 0, held_out))
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
