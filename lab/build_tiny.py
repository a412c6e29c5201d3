"""Build `embedded`, the default task: data, tokenizer and model in common/tiny, a pocket GSM8K.

    python lab/build_tiny.py [FOLDER]

The problems are sums of four to six one-digit terms that never drop below zero, such as `7+5-2+9?`.
There are two ways to answer. One is in steps, like GSM8K's own solutions (train.jsonl and
test.jsonl hold these, under GSM8K's column names):

    7+5=12
    12-2=10
    10+9=19
    #### 19

The other is straight, with the last line alone. Supervised training teaches the model both, mostly
the straight one. With two layers of width 64 it can copy, and add one pair of digits at a time, but
it cannot do a whole sum in its head. So it prefers the way that it is bad at, and reinforcement
learning has to turn that around.

Supervised training draws fresh problems and never one of test.jsonl. The two lists are finite and
disjoint: a run sees its prompts repeatedly, and is evaluated on sums that no training has shown.

This takes about two minutes on one core. The same machine writes the same bytes each time; another
processor rounds differently and ends with other weights.

Measured on test.jsonl with 32 samples per problem at temperature 1: a third of the answers are in
steps (95 % of them right), two thirds straight (7 % right); pass@1 is 0.36; answers have 17 tokens
on average and at most 47.

pairs/, the default data of reward_model.py, holds preference pairs that dpo.py sampled from this
model at commit 2c387f5: for 1,024 prompts of the training list, and for 128 of the test list with
each of four seeds. Another model needs new pairs.
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
STEPS_ONLY = 0.8  # the first part of training shows only answers in steps, to teach them well
STRAIGHT = 0.68  # share of straight answers in the rest


# --- data ---


def make_problem(rng, least=MIN_TERMS, most=MAX_TERMS):
    """Return a question with `least` to `most` terms, and its solution in steps."""
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
    """Return two disjoint lists of problems: training and test."""
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
    """Return a tokenizer with one token per character; unknown characters become `<unk>`."""
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
    # Llama, since AutoTokenizer would ignore tokenizer.json for Qwen2 and build Qwen2's tokenizer.
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
    """Return token ids and labels of fresh problems, with a share `straight` of such answers."""
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
    """Return token ids and labels of a row. Only the answer and its stop token have a loss."""
    prompt = tokenizer.encode(question)
    completion = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    return prompt + completion, [-100] * len(prompt) + completion


def pad(rows, tokenizer):
    """Return token ids and labels as tensors, padded on the right, where no real token attends."""
    width = max(len(ids) for ids, _ in rows)
    pad_token = tokenizer.pad_token_id
    ids = torch.tensor([ids + [pad_token] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    return ids, labels


def rate_factor(step):
    """Return the factor of the learning rate: linear warm-up, then linear decay to zero."""
    return min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))


def train(model, next_batch):
    """Train on the token ids and labels that `next_batch(step)` returns."""
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
    torch.set_num_threads(1)  # several threads may add up in another order each time
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
