"""What TRL makes of a configuration: asks its trainers, and writes tests/trl_numbers.json.

    python tests/helpers/trl_numbers.py                  with TRL 1.16 installed; takes some minutes

Each case trains the embedded model with TRL's own trainer on a CPU, and counts. tests/test_from_trl.py
reads the counts, and needs no TRL.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
TABLE = ROOT / "tests" / "trl_numbers.json"

import from_trl

# (the class, processes, rows of the data, what the configuration says)
CASES = [
    ("GRPOConfig", 1, 5, {}),
    ("GRPOConfig", 1, 16, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 4}),
    ("GRPOConfig", 2, 16, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    (
        "GRPOConfig",
        1,
        8,
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "num_generations": 4,
            "num_iterations": 2,
        },
    ),
    (
        "GRPOConfig",
        1,
        16,
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "generation_batch_size": 32,
            "num_train_epochs": 1,
        },
    ),
    (
        "GRPOConfig",
        2,
        16,
        {
            "per_device_train_batch_size": 4,
            "generation_batch_size": 32,
            "num_iterations": 3,
            "num_generations": 4,
            "num_train_epochs": 1,
        },
    ),
    (
        "GRPOConfig",
        1,
        8,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
    ),
    (
        "GRPOConfig",
        1,
        8,
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "steps_per_generation": 2,
            "num_iterations": 4,
            "num_generations": 4,
        },
    ),
    ("GRPOConfig", 1, 64, {"steps_per_generation": 4, "max_steps": 5}),
    (
        "GRPOConfig",
        1,
        13,
        {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "num_train_epochs": 1.5,
        },
    ),
    ("DPOConfig", 1, 16, {}),
    ("DPOConfig", 2, 16, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2}),
    ("DPOConfig", 1, 16, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5}),
    ("RewardConfig", 1, 16, {"per_device_train_batch_size": 4, "num_train_epochs": 2}),
]


def rewards(completions, **columns):
    return [float(len(completion)) for completion in completions]


def count(name, rows, config, model):
    """Train as the configuration says; the counts, of this process."""
    import datasets
    import trl

    trainer_class = getattr(trl, name.replace("Config", "Trainer"))
    generated = []  # rows of each rollout
    trained = [0]  # rows of each optimizer step

    class Counted(trainer_class):
        def _generate_and_score_completions(self, inputs):
            generated.append(len(inputs))
            return super()._generate_and_score_completions(inputs)

        def compute_loss(self, model, inputs, *others, **words):
            rows = inputs["completion_ids"] if name == "GRPOConfig" else inputs["input_ids"][::2]
            trained[-1] += len(rows)  # of a pair one row counts
            if self.accelerator.sync_gradients:
                trained.append(0)
            return super().compute_loss(model, inputs, *others, **words)

    quiet = dict(use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True)
    if name == "GRPOConfig":
        quiet |= dict(max_completion_length=2)
        data = {"prompt": [f"{i}+1=" for i in range(rows)]}
        others = dict(reward_funcs=rewards)
    else:
        data = {"chosen": [f"{i}+1={i + 1}" for i in range(rows)], "rejected": [f"{i}+1=0" for i in range(rows)]}
        if name == "DPOConfig":
            data["prompt"] = [f"{i}+1=" for i in range(rows)]
        others = {}
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(trl, name)(output_dir=folder, **quiet, **config)
        trainer = Counted(model=model, args=args, train_dataset=datasets.Dataset.from_dict(data), **others)
        trainer.train()
    processes = trainer.accelerator.num_processes
    counts = {
        "optimizer_steps": trainer.state.global_step,
        "rows_of_an_optimizer_step": trained[0] * processes,
    }
    if generated:
        counts |= {"rollouts": len(generated), "rows_of_a_rollout": generated[0] * processes}
        counts["prompts_of_a_rollout"] = generated[0] * processes // args.num_generations
    return counts


def save_model(folder):
    """The embedded model and its tokenizer, in a folder that TRL loads; float32."""
    from accelerate import Accelerator

    import grpo
    from harness.loading import load_policy, load_tokenizer

    args = grpo.Args()
    tokenizer = load_tokenizer(args)
    load_policy(args, tokenizer, Accelerator(cpu=True)).lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main():
    import torch
    import transformers
    import trl

    found = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for number, (name, processes, rows, config) in enumerate(CASES):
            command = [sys.executable, __file__, str(number), folder]
            if processes > 1:
                launcher = ["-m", "torch.distributed.run", "--master_port=29631", f"--nproc_per_node={processes}"]
                command[1:1] = launcher
            output = subprocess.run(command, env=environment, capture_output=True, text=True)
            lines = [line for line in output.stdout.splitlines() if line.startswith("COUNTS ")]
            if not lines:
                raise SystemExit(output.stderr[-3000:])
            counts = json.loads(lines[0].removeprefix("COUNTS "))
            found.append({"class": name, "processes": processes, "rows": rows, "config": config, "counts": counts})
            print(name, processes, rows, config, counts, flush=True)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    table = {
        "versions": versions,
        "defaults": {name: defaults(getattr(trl, name)) for name in from_trl.DEFAULTS},
        "cases": found,
    }
    write(table)


def write(table):
    """Write the table, with a line for each case."""
    cases = ",\n".join(json.dumps(case) for case in table["cases"])
    text = json.dumps(table | {"cases": []}, indent=1)
    text = text.replace('"cases": []', f'"cases": [\n{cases}\n ]')
    TABLE.write_text(text + "\n", encoding="utf-8", newline="\n")


def defaults(config):
    """{option: default} of the options that tools/from_trl.py has a default of."""
    found = {}
    for field in dataclasses.fields(config):
        if field.name in from_trl.DEFAULTS[config.__name__]:
            is_made = field.default is dataclasses.MISSING
            found[field.name] = field.default_factory() if is_made else field.default
    return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        name, _, rows, config = CASES[int(sys.argv[1])]
        counts = count(name, rows, config, sys.argv[2])
        if os.environ.get("RANK", "0") == "0":
            print("COUNTS", json.dumps(counts), flush=True)
