"""Does a refactoring change a bit? Twelve short runs of another commit and of this checkout, compared.

    python tools/same_bits.py 44715d4                    all twelve, six steps each: some minutes of one core
    python tools/same_bits.py 44715d4 --only grpo lora   some of them
    python tools/same_bits.py 44715d4 --steps 50         as long as the default runs

The runs are the default run of each script, LoRA adapters, two rounds of DPO, PPO with a KL in its reward, and two
processes. Each is stopped halfway and resumed. Compared are metrics.jsonl without times and memory, samples.jsonl and
the weights in model/. What the other commit computed is kept in --work, so the next comparison only runs this checkout.
Numbers depend on the processor and on the version of torch, so nothing of this is a file of the repository.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo", "dr_grpo", "gspo", "dcpo", "dapo", "ppo", "dpo", "reward_model")
TWO_PROCESSES = (
    "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0"
)
RUNS = {name: f"{name}.py" for name in SCRIPTS}
RUNS |= {
    "lora": "grpo.py --lora_rank 4",
    "rounds": "dpo.py --rounds 2 --pair_prompts 32",
    "kl": "ppo.py --kl_coef 0.05",
    "two": f"{TWO_PROCESSES} grpo.py",
}
VARIES = ("time/", "memory/")  # metrics that the machine decides


def execute(checkout, command):
    """Run `python COMMAND` in a checkout, on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(checkout)}
    result = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    if result.returncode:
        raise SystemExit(f"in {checkout}: python {' '.join(command)}\n{result.stdout}{result.stderr}")


def run(checkout, command, steps):
    """What a run that is stopped halfway and resumed leaves: {file: digest}."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*command.split(), "--output_dir", f"{folder}/run", "--save_every", str(steps // 2)]
        execute(checkout, [*options, "--max_steps", str(steps // 2)])
        execute(checkout, [*options, "--max_steps", str(steps), "--resume"])
        return digests(pathlib.Path(folder, "run"))


def digests(folder):
    """{file: SHA-256} of what a run has computed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{name: value for name, value in row.items() if not name.startswith(VARIES)} for row in rows]
    contents = {"metrics.jsonl": json.dumps(rows).encode()}
    for path in [*folder.glob("samples.jsonl"), *folder.glob("model/*.safetensors")]:
        contents[path.relative_to(folder).as_posix()] = path.read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def digests_of_commit(commit, name, steps, work):
    """The digests of a run of another commit, computed once."""
    kept = work / f"{commit}-{name}-{steps}.json"
    if not kept.exists():
        checkout = work / commit
        if not checkout.exists():
            subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
            subprocess.run(["git", "checkout", "--quiet", commit], cwd=checkout, check=True)
        kept.write_text(json.dumps(run(checkout, RUNS[name], steps)), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=6, help="of each run; an even number")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "same_bits"))
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", args.commit], cwd=ROOT, capture_output=True, text=True, check=True)
    args.work.mkdir(parents=True, exist_ok=True)
    different = 0
    for name in args.only:
        before = digests_of_commit(commit.stdout.strip(), name, args.steps, args.work)
        after = run(ROOT, RUNS[name], args.steps)
        changed = [file for file in sorted(before.keys() | after.keys()) if before.get(file) != after.get(file)]
        different += bool(changed)
        print(f"{name}: {'other bits in ' + ', '.join(changed) if changed else 'the same'}", flush=True)
    print(f"{len(args.only) - different} of {len(args.only)} runs have the same bits")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
