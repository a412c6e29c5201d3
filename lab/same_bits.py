"""Compare short runs of another commit and of this checkout, bit by bit.

    python lab/same_bits.py 44715d4                    all of them, a few minutes on one core
    python lab/same_bits.py 44715d4 --only grpo lora   some of them
    python lab/same_bits.py 44715d4 --steps 50         as long as the default runs [6]

It runs every script with its defaults, plus RUNS and RECIPES. The other commit runs straight
through; this checkout is stopped halfway and resumed. It compares the metrics that both have
(except times and memory), the samples, and the weights in model/, and prints what differs and by
how much. Runs of the other commit are cached in --work. Bits depend on the processor and the
version of torch.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo", "dr_grpo", "gspo", "dcpo", "dapo", "ppo", "dpo", "reward_model")
TWO_PROCESSES = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port 0"
)
RUNS = {name: f"{name}.py" for name in SCRIPTS}
RUNS |= {
    "dpo": "dpo.py --dataset embedded-pairs --eval_dataset embedded --nll_coef 1",  # its defaults
    "lora": "grpo.py --lora_rank 4",
    "updates": "grpo.py --num_minibatches 4 --num_epochs 2",
    "shared": "ppo.py --critic shared --kl_coef 0.05 --kl_in loss",
    "kl": "ppo.py --kl_coef 0.05",
    "dual": "ppo.py --dual_clip 3 --entropy_coef 0.001",
    "two": f"{TWO_PROCESSES} grpo.py",
}
# {run: (recipe, its script and options, the options of the script in commits without the recipe)}
RECIPES = {
    "penalty": ("ppo_penalty", "ppo.py", "--objective penalty"),
    "adaptive": ("ppo_adaptive_kl", "ppo.py", "--kl_coef 0.05 --kl_target 0.01"),
    "rounds": ("online_dpo", "dpo.py --pair_prompts 64", "--rounds 99"),
    "entropy": ("entropy_bonus", "grpo.py --entropy_coef 0.001", ""),
    "grpo_dual": ("dual_clip", "grpo.py --dual_clip 3 --num_minibatches 4", ""),
}
NAMES = [*RUNS, *RECIPES]
VARIES = ("time/", "memory/")  # metrics that depend on the machine
FILES = ("metrics.jsonl", "samples.jsonl")


def execute(checkout, *words):
    """Run python in a checkout, on one thread."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(checkout),
    }
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"in {checkout}: {' '.join(command)}\n{result.stdout}{result.stderr}")


def command_of(name, checkout, folder, steps):
    """Return the command of a run. It evaluates halfway, since a run that stops there does so."""
    if name in RUNS:
        command = RUNS[name]
    else:
        recipe, command, options = RECIPES[name]
        exists = (checkout / "examples" / "recipes" / f"{recipe}.py").exists()
        command = (
            f"examples/recipes.py run {recipe} {command}" if exists else f"{command} {options}"
        )
    return [*command.split(), "--output_dir", folder, "--eval_every", steps // 2]


def run_before(commit, name, steps, work):
    """Return the folder of a run of another commit, from the cache if it is there."""
    folder = work / f"{commit}-{name}-{steps}"
    checkout = work / commit
    if not checkout.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
        subprocess.run(["git", "checkout", "--quiet", commit], cwd=checkout, check=True)
    if not (folder / "model").exists():
        shutil.rmtree(folder, ignore_errors=True)
        execute(checkout, *command_of(name, checkout, folder, steps), "--max_steps", steps)
    return folder


def run_here(name, steps, folder):
    """Return the folder of a run of this checkout, stopped halfway and resumed."""
    words = [*command_of(name, ROOT, folder, steps), "--save_every", steps // 2]
    execute(ROOT, *words, "--max_steps", steps // 2)
    execute(ROOT, *words, "--max_steps", steps, "--resume")
    return folder


def rows_of(file):
    """Return the rows of a JSONL file without metrics that vary, [] if there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return [{name: x for name, x in row.items() if not name.startswith(VARIES)} for row in rows]


def compare(before, after):
    """Return what differs between the folders of two runs, one line each."""
    found = []
    for file in FILES:
        old, new = rows_of(before / file), rows_of(after / file)
        if len(old) != len(new):
            found.append(f"{file} has {len(new)} rows, it had {len(old)}")
        names = [set().union(*rows) for rows in (old, new)]
        for title, some in (("gone", names[0] - names[1]), ("new", names[1] - names[0])):
            if some:
                found.append(f"{title} in {file}: {', '.join(sorted(some))}")
        for name in sorted(names[0] & names[1]):
            pairs = [
                (a[name], b[name])
                for a, b in zip(old, new, strict=False)
                if name in a and name in b
            ]
            if any(a != b for a, b in pairs):
                found.append(f"{name} differs{by_how_much(pairs)}")
    return found + compare_weights(before / "model", after / "model")


def by_how_much(pairs):
    """Return the largest difference of numbers as text, "" for other values."""
    if not all(isinstance(x, (int, float)) for pair in pairs for x in pair):
        return ""
    return f" by up to {max(abs(a - b) for a, b in pairs):.2g}"


def compare_weights(before, after):
    """Return what differs between the weights of two models, one line each."""
    from safetensors.torch import load_file

    found = []
    old = {path.name: load_file(path) for path in before.glob("*.safetensors")}
    new = {path.name: load_file(path) for path in after.glob("*.safetensors")}
    if old.keys() != new.keys():
        return [f"model/ has {', '.join(new)}, it had {', '.join(old)}"]
    for file in old:
        if old[file].keys() != new[file].keys():
            return [f"model/{file} has other weights"]
        gaps = [
            float((new[file][name].float() - x.float()).abs().max())
            for name, x in old[file].items()
        ]
        if any(gap != 0 for gap in gaps):  # NaN, too
            found.append(f"model/{file} differs by up to {max(gaps):.2g}")
    return found


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("commit")
    add("--only", nargs="+", choices=NAMES, default=NAMES, metavar="RUN", help=", ".join(NAMES))
    add("--steps", type=int, default=6, help="steps of each run, an even number")
    add("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "same_bits"))
    args = parser.parse_args()
    command = ["git", "rev-parse", args.commit]
    commit = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    args.work.mkdir(parents=True, exist_ok=True)
    same = 0
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            before = run_before(commit, name, args.steps, args.work)
            found = compare(before, run_here(name, args.steps, pathlib.Path(folder, "run")))
        values = [text for text in found if not text.startswith(("gone ", "new "))]
        same += not values
        print(f"{name}: {'the same' if not values else 'not the same'}", flush=True)
        for text in found:
            print(f"    {text}", flush=True)
    print(f"{same} of {len(args.only)} runs have the same values")
    return 0 if same == len(args.only) else 1


if __name__ == "__main__":
    raise SystemExit(main())
