"""Builds the embedded default, a pocket edition of GSM8K: data, tokenizer and model in common/tiny.

    python lab/build_tiny.py [FOLDER]

The problems are sums of four to six one-digit terms that never go below zero, such as `7+5-2+9?`.
There are two ways to answer. In steps, as GSM8K's own solutions do it (`train.jsonl` and
`test.jsonl` hold these, with its column names):

    7+5=12
    12-2=10
    10+9=19
    #### 19

or straight, with the last line alone. The model learns both by plain supervised training, and the
straight way mostly. Two layers of width 64 can copy and add one pair of digits at a time, but not
the whole sum in their heads. So the model prefers the way it is bad at; that is what reinforcement
learning finds out and turns round.

Training draws fresh problems and never one of `test.jsonl`. The lists are finite and disjoint, so
that a run meets its prompts again and is evaluated on sums that no training has shown.

Takes about two minutes on one core. Again on the same machine it writes the same bytes; another
kind of processor rounds otherwise, and gives other weights.

Measured on `test.jsonl`, 32 samples a problem at temperature 1: a third of the answers in steps, 0.95
of them right; two thirds straight, 0.07 of them right; pass@1 0.36, 17 tokens on average, 47 at most.

`pairs/`, the default data of reward_model.py, holds preference pairs that dpo.py sampled from this
model at commit 2c387f5: of 1,024 prompts of the training list, and of 128 of the test list with
each of four seeds. With another model they are to be made again.
"""

import json
import pathlib
import random
import sys

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "common" / "tiny"
SEED = 0
MIN_TERMS = 4
MAX_TERMS = 6
TRAIN_PROBLEMS = 1024
TEST_PROBLEMS = 128

STEPS = 1200
ROWS = 64
LEARNING_RATE = 3e-3
WARM_UP = 50
STEPS_ONLY = 0.8  # of the training shows answers in steps only, so that these are learnt well ...
STRAIGHT = 0.68  # ... and in the rest this share of the answers is straight


# --- data ---


def make_problem(rng, least=MIN_TERMS, most=MAX_TERMS):
    """A question with a number of terms between `least` and `most`, and its solution in steps."""
    total = rng.randint(1, 9)
    question = str(total)
    steps = ""
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


def write_list(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


# --- tokenizer and model ---


def make_tokenizer():
    """One token a character; what is not in the vocabulary becomes `<unk>`, so any text has tokens."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *"0123456789+-=?# \n"]
    ids = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    character = Regex(r"[\s\S]")  # "." would skip newlines
    tokenizer.pre_tokenizer = pre_tokenizers.Split(character, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # joins the characters without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def make_model(tokenizer):
    # Llama and not Qwen2: for a Qwen2 config AutoTokenizer builds a Qwen2 tokenizer whatever
    # tokenizer.json says.
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


# --- supervised training ---


def make_batch(rng, tokenizer, straight, held_out):
    """Token ids and labels of fresh problems, of which a share is answered straight."""
    rows = []
    while len(rows) < ROWS:
        question, answer = make_problem(rng)
        if question in held_out:
            continue
        if rng.random() < straight:
            answer = answer[answer.index("####") :]
        rows.append(encode(question, answer, tokenizer))
    return pad(rows, tokenizer)


def encode(question, answer, tokenizer):
    """Token ids and labels of a row: the loss counts the answer and its end, not the question."""
    prompt = tokenizer.encode(question)
    completion = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    return prompt + completion, [-100] * len(prompt) + completion


def pad(rows, tokenizer):
    """Token ids and labels as tensors; padding is on the right, where no real token sees it."""
    width = max(len(ids) for ids, _ in rows)
    pad_token = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad_token] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def rate_factor(step):
    """The learning rate goes up in WARM_UP steps, then down to zero in a straight line."""
    return min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))


def train(model, next_batch):
    """Plain supervised training on the token ids and labels that `next_batch(step)` makes."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
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


def main(folder=FOLDER):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # with more, sums may be ordered otherwise from run to run
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    train_rows, test_rows = make_lists(rng)
    write_list(folder / "train.jsonl", train_rows)
    write_list(folder / "test.jsonl", test_rows)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} weights")
    held_out = {row["question"] for row in test_rows}

    def next_batch(step):
        straight = STRAIGHT if step >= STEPS_ONLY * STEPS else 0
        return make_batch(rng, tokenizer, straight, held_out)

    train(model, next_batch)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
