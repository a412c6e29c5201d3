"""SmolLM2 under each algorithm: the runs behind docs/real_model.md, kept in lab/results/real_model.

python lab/real_model.py            run what has no results, in the order of JOBS, one after the other
python lab/real_model.py --list     what is left of it, as commands
python lab/real_model.py --figures  draw the figures; tools/refresh.py puts the tables into the page

A run that was cut off is begun again. `taskset -c 0 nice python lab/real_model.py` gives it one core; two of them on
two cores share the work (Linux or macOS). Models (538 MB each) are deleted once their metrics are read, but the one
that the others start from.

What is compared, and how, was written here before the first of these runs (`sums` apart, which was there):

- The task is `sums`, from the bare model, and 1,536 completions: configs/smollm2.yaml under each script. grpo.py is
  `sums` itself.
- dpo.py makes pairs of answers that end, and hardly one of the bare model's does within its tokens (`dpo-bare` counts
  them). So it starts from the model of `sums`, seed 0, after 8 steps, and samples the other 1,024, 256 in a round;
  so does ppo.py with a reward model, which learns from pairs of that model. Both are compared with `sums` as a whole.
- dapo.py samples more for a step, and is read at 1,536 on a straight line between its evaluations.
- Two learning rates for each of the five that have three seeds, on seed 1000 and half the completions, which is not
  used again; the better one by the share of right answers in its last evaluation, at a tie the first. The rate of
  `sums` was there before: if the other one is better by this rule, three runs with it are added. gspo.py, dcpo.py and
  LoRA run once, the first two at the rate of grpo.py, and ppo.py once more with a reward model: no comparison.
- The number of a run is the share of right answers on 96 held-out problems, two samples each, at top-p 1. A difference
  is called one where Welch's 95 % interval over three seeds excludes 0; there are four, so one may do so by chance.
- `sums` has five more seeds, 3 to 7, added when the comparisons were read: three gave 0.04 to 0.85 for another seed,
  which no run can miss. They count for that range, as it is at the end of all eight, and in no comparison.
- Three findings of the laboratory's pilot are looked for in the same runs, by their sign alone: wrong answers are
  longer under GRPO than under Dr. GRPO (`wrong_tokens`, the mean of the last four steps, over the seeds); the band of
  GSPO's paper clips more rows than a wide one; dynamic sampling keeps less than all groups, so a step takes more
  completions.

A mix of sums, differences and three terms came first, 1,024 completions from that model after 8 steps; its runs moved
no further than the noise. They are kept as mix-*, with their commands (mix-replaced-* are tuning runs that were not
comparable, and were made again), and decide nothing.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import statistics
import sys

import filelock

from run import execute, read_rows, write

HERE = pathlib.Path(__file__).resolve().parent
ROOT, RESULTS = HERE.parent, HERE / "results" / "real_model"
FOLDER = "runs/real_model"
START, LEARNED = f"{FOLDER}/sums-seed0/model-step-8", f"{FOLDER}/learned"
STEPS, COMPLETIONS, TUNING_SEED, SEEDS, MORE_SEEDS = 24, 1536, 1000, (0, 1, 2), (3, 4, 5, 6, 7)
RATES = ("5e-6", "1e-5")
PROBLEMS = {"sum": 34, "difference": 26, "three": 36}  # of each kind in mix/test.jsonl; sums/ has one kind
SUMS, PAIRS = "--config configs/smollm2.yaml", "--config configs/smollm2-dpo.yaml"
LATER = f"--model_name_or_path {START}"

# the most likely answers to the sums
GREEDY = f"grpo.py {SUMS} --eval_temperature 0 --eval_samples 1 --eval_k 1"

# {name: command}; of 64 completions are {steps}, {fewer} are enough where a step samples more, {left} from START
COMPARED = {
    "sums": f"grpo.py {SUMS} --max_steps {{steps}}",
    "dr_grpo": f"dr_grpo.py {SUMS} --max_steps {{steps}}",
    "dapo": f"dapo.py {SUMS} --filter_by reward --overlong_cache 8 --eval_top_p 1 --eval_every 2 --max_steps {{fewer}}",
    "ppo": f"ppo.py {SUMS} --critic shared --max_steps {{steps}}",
    "dpo": f"dpo.py {PAIRS} {LATER} --rounds {{rounds}}",
}
ONCE = {
    "gspo": f"gspo.py {SUMS} --max_steps {{steps}}",
    "gspo-band_0.03": f"gspo.py {SUMS} --max_steps {{steps}} --clip_low 0.03 --clip_high 0.04",
    "dcpo": f"dcpo.py {SUMS} --max_steps {{steps}}",
    "lora": f"grpo.py {SUMS} --max_steps {{steps}} --lora_rank 16 --lora_merge",
    "ppo-reward_model": f"ppo.py {SUMS} {LATER} --critic shared --max_steps {{left}} --kl_coef 0.05 --reward accuracy "
    f"--reward_model_path {LEARNED}/reward_model/model",
}
RATE_OF = {"gspo": "sums", "gspo-band_0.03": "sums", "dcpo": "sums", "ppo-reward_model": "ppo"}
# ppo-reward_model needs a reward model, of pairs that the start's own answers make by the rule; {folder: command}
BEFORE = {
    f"{LEARNED}/pairs": f"dpo.py {PAIRS} {LATER} --rounds 1 --pair_prompts 512 --max_steps 0 "
    "--generate_batch_size 256",  # all 4,096 at once take more than 21 GB
    f"{LEARNED}/reward_model": f"reward_model.py --model_name_or_path {START} --num_epochs 2 --learning_rate 2e-5 "
    f"--pairs_per_step 8 --dataset {LEARNED}/pairs/pairs-round-1.jsonl",
}


def with_rate(command, rate, steps):
    sizes = dict(steps=steps, fewer=steps * 5 // 12, left=steps * 2 // 3, rounds=steps // 6)
    return f"{command.format(**sizes)} --learning_rate {rate}"


def tuned(name):
    """The better of the two rates; None until both have results."""
    if name not in COMPARED:
        return "3e-4" if name == "lora" else tuned(RATE_OF[name])
    scores = [final(f"tune-{name}-{rate}", TUNING_SEED) for rate in RATES]
    return None if None in scores else RATES[scores.index(max(scores))]


def command(name):
    """The command of a run, without its seed; None where its learning rate is not tuned yet."""
    if name == "sums":
        return f"grpo.py {SUMS} --save_model_every 8"
    if name == "dpo-bare":
        return f"dpo.py {PAIRS} --rounds 1"
    if name.startswith("greedy-"):
        return f"{GREEDY} --max_steps 0 --max_new_tokens {name.removeprefix('greedy-')}"
    if name.startswith("tune-"):
        _, algorithm, rate = name.split("-", 2)
        return with_rate(COMPARED[algorithm], rate, STEPS // 2)
    rate = tuned(name)
    return rate and with_rate((COMPARED | ONCE)[name], rate, STEPS)


JOBS = [("sums", 0), ("greedy-24", 0), ("greedy-64", 0), ("dpo-bare", 0)]
JOBS += [(f"tune-{name}-{rate}", TUNING_SEED) for name in COMPARED for rate in RATES]
JOBS += [("sums", seed) for seed in SEEDS[1:]]
JOBS += [(name, seed) for seed in SEEDS for name in ("dapo", "ppo", "dpo")]
JOBS += [("dr_grpo", seed) for seed in SEEDS]
JOBS += [(name, 0) for name in ONCE]
JOBS += [("sums", seed) for seed in MORE_SEEDS]


def result(name, seed):
    return RESULTS / f"{name}-seed{seed}.jsonl"


def rows_of(name, seed):
    """The rows of a run without its header; none where there are no results."""
    return read_rows(result(name, seed))[1:] if result(name, seed).exists() else []


def sampled(row):
    """Completions sampled in a step."""
    if row.get("pairs/made"):
        return 8 * round(row["pairs/made"] / row["pairs/yield"])
    return 64 * row.get("sampling/rounds", 1) if "completion/length" in row else 0


def curve(name, seed, metric):
    """[(completions sampled so far, value)] of a metric."""
    points, completions = [], 0
    for row in rows_of(name, seed):
        completions += sampled(row)
        if metric in row:
            points.append((completions, row[metric]))
    return points


def final(name, seed, kinds=tuple(PROBLEMS), completions=COMPLETIONS):
    """The share of right answers of these kinds in the last evaluation, None where there is none; of dapo.py, which
    samples as much as it needs, between its evaluations at the completions that the others have."""
    curves = [curve(name, seed, f"eval/logged/{kind}") for kind in kinds]
    found = [(PROBLEMS[kind], points) for kind, points in zip(kinds, curves, strict=True) if points]
    most = completions // 2 if "tune-" in name else completions
    shares = [(problems, value_at(points, most) if "dapo" in name else points[-1][1]) for problems, points in found]
    return sum(n * share for n, share in shares) / sum(n for n, _ in shares) if shares else None


def value_at(points, completions):
    """The value at so many completions, on the straight line between two evaluations; the last one if it is earlier."""
    for (before, low), (after, high) in itertools.pairwise(points):
        if before <= completions < after:
            return low + (high - low) * (completions - before) / (after - before)
    return points[-1][1]


def start(name, seed):
    """The share of right answers before training."""
    found = [
        (PROBLEMS[kind], points[0][1]) for kind in PROBLEMS if (points := curve(name, seed, f"eval/logged/{kind}"))
    ]
    return sum(n * share for n, share in found) / sum(n for n, _ in found)


def execute_well(command, folder):
    """(the last line that a command says, its seconds of one core); a RuntimeError where it fails."""
    status, output, seconds = execute(command, folder)
    if status:
        raise RuntimeError(f"exit status {os.waitstatus_to_exitcode(status)}: python {command}\n{output[-2000:]}")
    return output.strip().splitlines()[-1], seconds


def make_start(name):
    """The digest of the model that a run starts from, which is made on a new machine; None for `sums`."""
    if START not in command(name):
        return None
    if not (ROOT / START).exists():
        execute_well(f"{command('sums')} --seed 0 --max_steps 8", str(pathlib.PurePosixPath(START).parent))
    digest = hashlib.sha256((ROOT / START / "model.safetensors").read_bytes()).hexdigest()
    headers = (read_rows(path)[0] for path in RESULTS.glob("*.jsonl"))
    if others := {header["start"] for header in headers if "start" in header} - {digest}:
        raise SystemExit(
            f"{START} is {digest[:12]} here, and {', '.join(other[:12] for other in others)} in {RESULTS}: "
            "runs from different models do not compare. Another processor makes other weights; move the results away"
        )
    return digest


def evaluate(command, folder):
    """The metrics that the rule logs in an evaluation: the share of right answers, of each kind, and their lengths."""
    execute_well(f"{command} --max_steps 0", folder)
    return {name: value for name, value in read_rows(ROOT / folder / "metrics.jsonl")[0].items() if "logged" in name}


def run(name, seed):
    """Run one command, and write its file of results; returns its seconds of one core."""
    with filelock.FileLock(ROOT / FOLDER / "start.lock"):
        start_digest = make_start(name)
    folder, learned = f"{FOLDER}/{name}-seed{seed}", LEARNED in command(name)
    header = {"command": f"python {command(name)} --seed {seed}"} | ({"start": start_digest} if start_digest else {})
    if learned:
        header |= {"before": [f"python {made}" for made in BEFORE.values()]}
        header |= {"before_said": [execute_well(made, part)[0] for part, made in BEFORE.items()]}
    header["said"], seconds = execute_well(f"{command(name)} --seed {seed}", folder)
    header["cpu_seconds"] = seconds
    samples = [json.loads(line) for line in (ROOT / folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    write(result(name, seed).with_suffix(".samples"), [row for row in samples if row.get("evaluation")])
    rows = read_rows(ROOT / folder / "metrics.jsonl")
    if name == "sums":
        greedy = evaluate(f"{GREEDY} --model_name_or_path {folder}/model", f"{FOLDER}/greedy")
        header["greedy"] = greedy["eval/logged/sum"]
    if learned:
        rows[0] |= evaluate(f"grpo.py {SUMS} {LATER}", f"{LEARNED}/before")
        rows[-1] |= evaluate(f"grpo.py {SUMS} --model_name_or_path {folder}/model", f"{LEARNED}/after")
    write(result(name, seed), [header, *rows])
    for model in (ROOT / folder).glob("model*"):
        if f"{folder}/{model.name}" != START:
            shutil.rmtree(model)
    return seconds


@contextlib.contextmanager
def claim(name, seed):
    """Whether this process may begin a run: no other one is at it. Nor at the model that all but one start from."""
    (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(ROOT / FOLDER / f"{name}-seed{seed}.lock", blocking=False)
    try:
        with lock:
            yield not result(name, seed).exists()
    except filelock.Timeout:
        yield False


def draw():
    sys.path.append(str(ROOT / "tools"))
    import plot  # matplotlib is an extra

    folder = ROOT / "docs" / "figures" / "real_model"
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {
        "reward_part/last_number": "share of right answers in training",
        "completion/length": "tokens of a completion",
    }
    metrics |= {"policy/entropy": "entropy (nats per token)"}
    for picture, names, seeds in (
        ("sums", {"grpo": "sums"}, SEEDS + MORE_SEEDS),
        ("all", {title(name): name for name in COMPARED if name != "dpo"}, SEEDS),
    ):
        runs = {title: [with_completions(name, n) for n in seeds_of(name, seeds)] for title, name in names.items()}
        if not any(runs.values()):
            continue
        axes = ("step",) if picture == "sums" else ("completions",)
        figure = plot.panels({name: seeds for name, seeds in runs.items() if seeds}, metrics, axes)
        figure.savefig(folder / f"{picture}.png", dpi=110)


def with_completions(name, seed):
    """The rows of a run, with what was sampled up to each."""
    rows, completions = rows_of(name, seed), 0
    for row in rows:
        completions += sampled(row)
        row["completions"] = completions
    return rows


T = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # Student's t for 95 %, by the number of seeds


def share(value):
    return "" if value is None else f"{value:.3f}"


def mean_of_last(name, seed, metric, count=4):
    values = [value for _, value in curve(name, seed, metric)][-count:]
    return sum(values) / len(values) if values else None


def minutes(name, seed):
    """Minutes of one core; of the first run, by the clock."""
    header = read_rows(result(name, seed))[0]
    return f"{header.get('cpu_seconds', header.get('seconds')) / 60:.0f}"


def seeds_of(name, seeds=SEEDS):
    return [seed for seed in seeds if rows_of(name, seed)]


def sums_table():
    """`sums`, a row for each seed, and the range in which another seed is expected."""
    table, ends = [], []
    for seed in seeds_of("sums", SEEDS + MORE_SEEDS):
        lengths = curve("sums", seed, "eval/length")
        ends.append(final("sums", seed))
        training = share(mean_of_last("sums", seed, "reward_part/last_number"))
        cells = [seed, share(start("sums", seed)), share(ends[-1]), training]
        cells += [share(read_rows(result("sums", seed))[0].get("greedy"))]
        cells += [f"{lengths[0][1]:.1f}", f"{lengths[-1][1]:.1f}", minutes("sums", seed)]
        table.append(cells)
    if len(ends) in T:
        half = T[len(ends)] * statistics.stdev(ends) * (1 + 1 / len(ends)) ** 0.5
        mean = statistics.mean(ends)
        table.append(["another seed, 95 %", "", f"{max(0, mean - half):.2f} to {min(1, mean + half):.2f}", *[""] * 5])
    header = ["seed", "right before", "right after", "in training, last 4 steps", "greedily, after"]
    header += ["tokens before", "tokens after"]
    return [[*header, "minutes of one core"], *table]


def title(name):
    return COMPARED[name].split(".py")[0]


def compared_table():
    """The scripts on the sums: the rate that was taken, the share of right answers at the end for each seed, and the
    difference to grpo.py with Welch's interval, where both have all seeds."""
    table, grpo = [], [final("sums", seed) for seed in seeds_of("sums")]
    for name in COMPARED:
        if seeds := seeds_of(name):
            ends = [final(name, seed) for seed in seeds]
            cells = [f"`{title(name)}.py`", tuned(name), share(statistics.mean(start(name, seed) for seed in seeds))]
            cells += [", ".join(map(share, ends)), share(statistics.mean(ends))]
            differs = name != "sums" and len(seeds) == len(grpo) == len(SEEDS)
            table.append(
                [*cells, difference(ends, grpo) if differs else "", ", ".join(minutes(name, s) for s in seeds)]
            )
    header = ["script", "learning rate", "right before", "after, by seed", "mean", "less `grpo.py` (95 %)"]
    return [[*header, "minutes of one core"], *table]


def difference(ends, others):
    from decide import measure  # scipy is an extra

    found = measure(ends, others, 0, 0)
    return f"{found.effect:+.2f} ({found.low:+.2f} to {found.high:+.2f})"


def once_table():
    """What ran once, beside seed 0 of grpo.py; the share of rows or tokens that the clip held back, of all steps."""
    table = []
    for name in ("sums", *ONCE):
        if rows_of(name, 0):
            cells = [title(name) if name in COMPARED else name, tuned(name), share(start(name, 0))]
            table.append([*cells, share(final(name, 0)), f"{clipped(name, 0):.4f}", minutes(name, 0)])
    return [["run", "learning rate", "right before", "right after", "clipped", "minutes of one core"], *table]


def by_seed(name, value):
    """The mean over the seeds of a run, and the values; None where there is no run."""
    values = [found for seed in seeds_of(name) if (found := value(name, seed)) is not None]
    shown = ", ".join(f"{value:.4g}" for value in values)
    return f"{statistics.mean(values):.4g} ({shown})" if values else None


def mean_of_steps(name, seed, *metrics):
    """The mean over the steps of the sum of these metrics."""
    return statistics.mean(sum(row[metric] for metric in metrics) for row in rows_of(name, seed)[1:])


def late_wrong_tokens(name, seed):
    return mean_of_last(name, seed, "logged/wrong_tokens")


def clipped(name, seed):
    return mean_of_steps(name, seed, "policy/clip_fraction_low", "policy/clip_fraction_high")


def kept(name, seed):
    return mean_of_steps(name, seed, "sampling/keep_rate")


def completions_a_step(name, seed):
    return statistics.mean(sampled(row) for row in rows_of(name, seed)[1:])


def carried_table():
    """What the laboratory's pilot found on a toy, in these runs: a row for each, where there are runs."""
    found = [
        ("tokens of a wrong answer, last 4 steps", ("sums", "dr_grpo"), late_wrong_tokens),
        ("rows (GSPO) or tokens that were clipped", ("gspo", "gspo-band_0.03", "sums"), clipped),
        ("groups kept", ("dapo",), kept),
        ("completions a step", ("dapo", "sums"), completions_a_step),
    ]
    rows = [
        (what, title(name) if name in COMPARED else name, by_seed(name, value))
        for what, names, value in found
        for name in names
    ]
    return [["what", "run", "mean (by seed)"], *(list(row) for row in rows if row[2])]


COSTS = {  # a file of benchmarks/throughput.py: what it measured
    "throughput": "one thread, the other core busy; 64 rows a pass",
    "throughput-two_threads": "two threads, nothing else running; 64 rows a pass",
    "throughput-256_tokens": "the same, prompts of 256 tokens; 8 rows a pass",
}
STOCK = {"throughput-stock": "two threads, nothing else running; 64 rows a pass"}


def cost_table(costs=COSTS, other="trl", name="TRL"):
    """A step against TRL, or another contestant: seconds, and gigabytes above the model."""
    table = []
    for file, title in costs.items():
        (found,) = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8")).values()
        ours, theirs = found["ours"], found[other]
        factors = [b["step_s"] / a["step_s"] for a, b in zip(ours, theirs, strict=True)]
        seconds = [statistics.median(turn["step_s"] for turn in turns) for turns in (ours, theirs)]
        memory = [max(turn["peak_gb"] for turn in turns) for turns in (ours, theirs)]
        cells = [title, *(f"{value:.1f}" for value in seconds), f"{statistics.median(factors):.1f}"]
        table.append([*cells, ", ".join(f"{factor:.1f}" for factor in factors), *(f"{value:.1f}" for value in memory)])
    header = ["", "`grpo.py`, s a step", f"{name}, s a step", "times as fast", "turn by turn"]
    return [[*header, "`grpo.py`, GB", f"{name}, GB"], *table]


def stock_table():
    return cost_table(STOCK, "stock", "stock `generate`")


WAITS = {  # what else ran: {how the threads wait: files of benchmarks/throughput.py}
    "nothing": {"spinning": ("active", "active_again"), "passive": ("passive", "passive_again")},
    "a busy loop on one of the two cores": {"spinning": ("active-busy",), "passive": ("passive-busy",)},
}


def waits_table():
    """Seconds of a step on two threads by how they wait for each other, turn by turn."""
    table = []
    for beside, kinds in WAITS.items():
        for kind, files in kinds.items():
            paths = [RESULTS / f"throughput-{file}.json" for file in files]
            found = [json.loads(path.read_text(encoding="utf-8"))["smollm2"]["ours"] for path in paths]
            seconds = [turn["step_s"] for turns in found for turn in turns]
            table.append([beside, kind, f"{statistics.median(seconds):.1f}", ", ".join(f"{s:.1f}" for s in seconds)])
    return [["what else ran", "the threads wait", "s a step", "turn by turn"], *table]


PAGE = "docs/real_model.md"
TABLES = dict(sums=sums_table, compared=compared_table, once=once_table)
TABLES |= dict(carried=carried_table, cost=cost_table, stock=stock_table, waits=waits_table)


def refresh(tree):
    """Put the tables into the page, each below a line that names it."""
    text = tree.read(PAGE)
    for name, made in TABLES.items():
        if name == "compared" and not importlib.util.find_spec("scipy"):
            continue  # its intervals are scipy's: the table stays as it is
        header, *rows = made()
        lines = [header, ["---"] * len(header), *rows] if rows else []
        table = "".join(f"| {' | '.join(map(str, row))} |\n" for row in lines)
        text = re.sub(rf"(?<=<!-- table: {name} -->\n)(\|.*\n)*", lambda _, table=table: table, text)
    tree.write(PAGE, text)
    closing = read_rows(result("sums", 0))[0]["said"].partition(", in ")[0]
    for page in ("README.md", "README.zh.md"):
        tree.write(page, re.sub(r"eval/reward before .*? s(?=`)", closing, tree.read(page)))
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--figures", action="store_true")
    options = parser.parse_args()
    if options.figures:
        return draw()
    for name, seed in JOBS:
        if result(name, seed).exists():
            continue
        if options.list:
            said = command(name) and f"python {command(name)} --seed {seed}"
            print(f"{name} seed {seed}: {said or 'waits for the learning rates'}")
        elif command(name) is None:
            print(f"{name} seed {seed}: waits for the learning rates, which another process tunes", flush=True)
        else:
            with claim(name, seed) as mine:
                if mine:
                    try:
                        print(f"{name} seed {seed}: {run(name, seed):.0f} s", flush=True)
                    except RuntimeError as error:
                        print(f"{name} seed {seed}: FAILED: {error}", flush=True)


if __name__ == "__main__":
    main()
