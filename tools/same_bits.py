"""Does a change alter what runs compute? Short runs of another commit and of this checkout, compared.

    python tools/same_bits.py 44715d4                    all of them: some minutes of one core
    python tools/same_bits.py 44715d4 --only grpo lora   some of them
    python tools/same_bits.py 44715d4 --steps 50         as long as the default runs [6]

The runs are the default run of each script and those of RUNS below. Of the other commit a run goes
through; here it is stopped halfway and resumed. Each metric that both have is compared, without times
and memory, and so are the samples and the weights in model/. What differs is named, by how much, and
which metrics are gone or new. The runs of the other commit are kept in --work for the next comparison.
Numbers depend on the processor and on the version of torch.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from piped import end_with_the_reader

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo", "dr_grpo", "gspo", "dcpo", "dapo", "ppo", "dpo", "reward_model")
TWO_PROCESSES = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port 0"
)
RUNS = {name: f"{name}.py" for name in SCRIPTS}
RUNS |= {
    "lora": "grpo.py --lora_rank 4",
    "updates": "grpo.py --num_minibatches 4 --num_epochs 2 --dual_clip 3 --entropy_coef 0.001",
    "penalty": "ppo.py --objective penalty",
    "shared": "ppo.py --critic shared --kl_coef 0.05 --kl_in loss",
    "kl": "ppo.py --kl_coef 0.05",
    "rounds": "dpo.py --rounds 2 --pair_prompts 32",
    "two": f"{TWO_PROCESSES} grpo.py",
}
VARIES = ("time/", "memory/")  # metrics that the machine decides
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


def command_of(name, folder, steps):
    """A run evaluates halfway, since one that ends there does."""
    return [*RUNS[name].split(), "--output_dir", folder, "--eval_every", steps // 2]


def run_before(commit, name, steps, work):
    """The folder of a run of another commit, which is made once."""
    folder = work / f"{commit}-{name}-{steps}"
    checkout = work / commit
    if not checkout.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
        subprocess.run(["git", "checkout", "--quiet", commit], cwd=checkout, check=True)
    if not (folder / "model").exists():
        shutil.rmtree(folder, ignore_errors=True)
        execute(checkout, *command_of(name, folder, steps), "--max_steps", steps)
    return folder


def run_here(name, steps, folder):
    """The folder of a run of this checkout, which is stopped halfway and resumed."""
    words = [*command_of(name, folder, steps), "--save_every", steps // 2]
    execute(ROOT, *words, "--max_steps", steps // 2)
    execute(ROOT, *words, "--max_steps", steps, "--resume")
    return folder


def rows_of(file):
    """The rows of a JSONL file, without what varies; none where there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows = []
    for line in lines:
        rows.append(
            {name: x for name, x in json.loads(line).items() if not name.startswith(VARIES)}
        )
    return rows


def compare(before, after):
    """What differs between the folders of two runs, a sentence each."""
    found = []
    for file in FILES:
        old, new = rows_of(before / file), rows_of(after / file)
        if len(old) != len(new):
            found.append(f"{file} has {len(new)} rows, and had {len(old)}")
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
    """The largest difference of numbers, as text; "" where something else differs."""
    if not all(isinstance(x, (int, float)) for pair in pairs for x in pair):
        return ""
    return f" by up to {max(abs(a - b) for a, b in pairs):.2g}"


def compare_weights(before, after):
    """The same of the weights of two models."""
    from safetensors.torch import load_file

    found = []
    old = {path.name: load_file(path) for path in before.glob("*.safetensors")}
    new = {path.name: load_file(path) for path in after.glob("*.safetensors")}
    if old.keys() != new.keys():
        return [f"model/ has {', '.join(new)}, and had {', '.join(old)}"]
    for file in old:
        if old[file].keys() != new[file].keys():
            return [f"model/{file} has other weights"]
        gaps = [
            float((new[file][name].float() - x.float()).abs().max())
            for name, x in old[file].items()
        ]
        if max(gaps) > 0:
            found.append(f"model/{file} differs by up to {max(gaps):.2g}")
    return found


def main():
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    add = parser.add_argument
    add("commit")
    add("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    add("--steps", type=int, default=6, help="of each run; an even number")
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
    end_with_the_reader()
    raise SystemExit(main())
