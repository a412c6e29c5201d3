"""How many of the held-out problems the base model's own training had drawn, and whether that helps: python lab/seen.py

The training of `embedded-hard` is replayed without the model: the same random numbers draw the same problems. Then the
base model, and GRPO at 1e-4 with three of the seeds of the registered runs, answer the held-out sums of four terms,
eight times each: those that were drawn and those that were not, which are as hard. Easy sums were all drawn and hard
ones hardly ever, so they cannot be compared. Some eight minutes of one core; it writes lab/results/seen.json.

It was made after all claims were decided, and decides nothing. No reinforcement learning sees any of these problems.
"""

import json
import random
import re

import registry
import tasks
from common.tiny.build import STEPS, make_tokenizer
from common.tiny_hard import build
from run import execute, read_rows

RESULTS, FOLDER = registry.HERE / "results" / "seen.json", "runs/lab/seen"
SEEDS = (40, 41, 42)


def drawn():
    """All problems that the training of the base model draws, a set of questions."""
    rng, seen, original = random.Random(build.SEED), set(), build.make_problem
    train, test = build.make_lists(rng)
    if {row["question"] for row in train + test} != tasks.questions(build.FOLDER):
        raise SystemExit("the lists of the replay are not those of the task: common/tiny_hard was built otherwise")

    def make_problem(*arguments):
        question, answer = original(*arguments)
        seen.add(question)
        return question, answer

    held_out, tokenizer = {row["question"] for row in test}, make_tokenizer()
    build.make_problem = make_problem
    for _ in range(STEPS):
        build.make_batch(rng, tokenizer, held_out)
    build.make_problem = original
    return seen - held_out


def terms(question):
    return len(re.findall(r"\d", question))


def counts(rows, seen):
    """{class: [drawn in training, all]} of held-out problems."""
    classes = {name: [row for row in rows if row["difficulty"] == name] for name in build.CLASSES}
    return {name: [sum(row["question"] in seen for row in part), len(part)] for name, part in classes.items()}


def accuracy(model, name):
    """Accuracy on one list of problems, eight answers each."""
    options = f"--model_name_or_path {model} --eval_dataset {FOLDER}/{name}.jsonl --dataset embedded-hard"
    command = f"grpo.py {options} --max_steps 0 --max_new_tokens 128 --eval_samples 8 --eval_k 8 --eval_top_p 1"
    execute_well(f"{command} --generate_batch_size 1024", f"{FOLDER}/evaluation")
    return read_rows(registry.ROOT / FOLDER / "evaluation" / "metrics.jsonl")[0]["eval/pass@1"]


def execute_well(command, folder):
    status, output, _ = execute(command, folder)
    if status:
        raise SystemExit(f"python {command}\n{output[-2000:]}")


def main():
    seen, rows = drawn(), tasks.held_out_rows(tasks.questions(build.FOLDER))
    found = {"counts": counts(rows, seen), "four_terms": {}}
    four = [row for row in rows if terms(row["question"]) == 4]
    parts = {"drawn": [row for row in four if row["question"] in seen]}
    parts["not_drawn"] = [row for row in four if row["question"] not in seen]
    (registry.ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (registry.ROOT / FOLDER / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")
        found["four_terms"][name] = {"problems": len(part), "before": accuracy("embedded-hard", name), "after": []}
    tasks.write_held_out("embedded-hard", build.FOLDER)
    for seed in SEEDS:
        run = f"{FOLDER}/grpo-seed{seed}"
        execute_well(f"{registry.command(registry.load(), 'grpo')} --seed {seed}", run)
        for name in parts:
            found["four_terms"][name]["after"].append(accuracy(f"{run}/model", name))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8", newline="\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
