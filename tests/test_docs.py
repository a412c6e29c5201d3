"""Tables of results in docs/*.md, and the figures of the chain: what tools/results.py makes of lab/results/pages."""

import json
import pathlib
import queue
import re
import statistics
import subprocess
import sys

import pytest

import registry
import results
from tree import Tree

ROOT = pathlib.Path(__file__).parent.parent


def test_the_readme_has_the_results_of_the_bare_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1].split("\n## ")[0]
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo"):
        runs = [results.evaluations(rows) for rows in results.load(name).values()]
        first, last = ([run[place]["eval/pass@1"] for run in runs] for place in (0, -1))
        effect = {"metric": "accuracy", "over": 20480}
        hard = [registry.outcome(f"best-{name}", seed, effect) for seed in range(70, 80)]
        ends = [f"{statistics.median(x):.3f} ({min(x):.3f}, {max(x):.3f})" for x in (last, hard)]
        row = f"| `{name}.py` | {statistics.median(first):.3f} | {' | '.join(ends)} |"
        assert len(runs) == 5 and row in text.splitlines(), row


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_shows_two_completions_of_a_run(page):
    file = ROOT / "lab/results/pages/grpo-seed0.samples"  # of `python grpo.py --seed 0`
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    text = (ROOT / page).read_text(encoding="utf-8")
    for step in (0, 50):
        (shown,) = re.findall(rf"8\+9\+3\+1\+3\?   \w+ \(step {step}\) +(\S.*?)  +reward (\d)", text)
        found = [
            (row["completion"].replace("\n", "\\n"), f"{row['reward']:.0f}") for row in rows if row["step"] == step
        ]
        assert shown in found
        assert sum(float(reward) for _, reward in found) == {0: 3, 50: 8}[step] and len(found) == 8


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_a_readme_stays_short(page):
    text, _, corrections = (ROOT / page).read_text(encoding="utf-8").partition("\n## 文章里的说法\n")
    assert len(text.splitlines()) <= 145 and len(corrections.splitlines()) < 40


def chain_section():
    return (ROOT / "docs/reward_model.md").read_text(encoding="utf-8").split("\n## The RLHF chain")[1].split("\n## ")[0]


def test_the_pages_stay_few_and_short():
    pages = [*ROOT.glob("docs/*.md")]
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in pages}
    assert len(pages) <= 22 and sum(lines.values()) <= 6_000, sorted(lines.items(), key=lambda item: -item[1])


def test_the_page_prints_the_commands_of_the_chain():
    section = chain_section()
    printed = [line.split("#")[0].strip() for line in section.split("```")[1].splitlines()[1:]]
    commands = {name: command for page in results.COMMANDS.values() for name, command in page.items()}
    with_model = commands["ppo-kl"].replace(f"{results.RUNS}/reward_model-seed{{seed}}", "runs/rm")
    chain = [commands["reward_model"], with_model, commands["dpo-nll"], commands["dpo"], commands["ppo"]]
    assert printed == [f"python {command}" for command in [f"{chain[0]} --output_dir runs/rm", *chain[1:]]]


def test_the_page_has_the_medians_of_the_chain():
    def median(name, metric="eval/pass@1", which=-1):
        runs = results.load(name).values()
        return f"{statistics.median(results.evaluations(rows, metric)[which][metric] for rows in runs):.2f}"

    text = " ".join(chain_section().split())
    assert f"the chosen answer in {median('reward_model', 'eval/accuracy')} of the held-out pairs" in text
    assert f"takes pass@1 from {median('ppo-kl', which=0)} to {median('ppo-kl')}, and to {median('ppo-no_kl')}" in text
    assert f"fixed pairs reaches {median('dpo-nll')}, and {median('dpo-pairs')} without `--nll_coef 1`" in text
    assert f"in rounds {median('dpo')}; PPO with the rule reward {median('ppo')}." in text


def test_a_table_from_made_up_runs(monkeypatch, tmp_path):
    """Worked by hand: which evaluation a column shows, means over the last steps, and no table without files."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert results.tables("gspo") == []

    def scores(step, value):
        return {"step": step, "eval/pass@1": value, "eval/pass@4": value / 2, "eval/length": 10 + step}

    rows = [scores(0, 0.25), {"step": 1, "reward/mean": 0.5}, scores(2, 0.5), scores(4, 0.75) | {"time/total_s": 3.14}]
    (tmp_path / "gspo-seed3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert results.tables("gspo") == [
        [
            "| seed | pass@1 before | after 2 steps | after 4 | pass@4 after | tokens before | after | seconds |",
            "|---|---|---|---|---|---|---|---|",
            "| 3 | 0.250 | 0.500 | 0.750 | 0.375 | 10.0 | 14.0 | 3.1 |",
        ]
    ]
    tree = Tree(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "gspo.md").write_text(
        "# A\n\n## Results\n\n| 1 |\n| 2 |\n\nText.\n\n## More\n\n| 3 |\n", encoding="utf-8"
    )
    (tmp_path / "docs" / "grpo.md").write_text("# A\n\n## Results\n\n| 1 |\n", encoding="utf-8")
    assert results.refresh(tree) == ["docs/grpo.md: its section of results has 1 tables, lab/results/pages gives 0"]
    table = "\n".join(results.tables("gspo")[0])
    assert tree.read("docs/gspo.md") == f"# A\n\n## Results\n\n{table}\n\nText.\n\n## More\n\n| 3 |\n"
    steps = [{"step": step, "logps/chosen": -float(step)} for step in range(1, 8)]
    assert results.last_steps(steps, "logps/chosen", 5) == -5
    assert results.last_steps(steps, "logps/chosen", 5, until=3) == -2


@pytest.mark.parametrize("pin", ["taskset -c 5 ", ""])
def test_a_run_is_kept_trimmed_and_is_not_made_again(pin, monkeypatch, tmp_path):
    """The documented command with seed and folder, on one core; its rows without what no table needs.

    Windows and macOS have no `taskset`, and no `os.sched_getaffinity`.
    """
    started = []

    def run(command, **options):
        started.append(command)
        folder = tmp_path / command[-1]
        (folder / "model").mkdir(parents=True)
        rows = [{"step": 0, "eval/pass@1": 0.5}, {"step": 1, "reward/mean": 1.0, "time/update_s": 2.0, "optim/lr": 0.1}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, f"1 steps, 12.5 s, in {folder}\n")

    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("shutil.which", {"taskset": pin}.get)
    cores = queue.Queue()
    cores.put(5)
    for _ in range(2):
        results.run_seed("gspo", 3, cores)
    command = f"{pin}{sys.executable} gspo.py --seed 3 --output_dir runs/results/gspo-seed3"
    assert started == [command.split()] and cores.get() == 5
    kept = [json.loads(line) for line in (tmp_path / "gspo-seed3.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kept == [{"step": 0, "eval/pass@1": 0.5}, {"step": 1, "reward/mean": 1.0, "time/total_s": 12.5}]
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("sys.argv", ["results.py", "gspo", "--seeds", "0"])
    monkeypatch.setattr(results, "tables", lambda page: [])
    results.main()


def test_no_text_is_read_in_the_encoding_of_the_machine():
    """On Windows that is not UTF-8. Of a path in a variable, ruff's rule (PLW1514) does not know that it is one."""
    for folder in ("benchmarks", "common", "docs", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert ".read_text" + "()" not in path.read_text(encoding="utf-8"), path


def cells_of_speed(ours, stock, trl):
    """The row of docs/scale.md that these turns make, without its title; the ratios are taken turn by turn."""

    def seconds(turns):
        return f"{statistics.median(turn['step_s'] for turn in turns):.2f}"

    def ratio(others, phase):
        pairs = list(zip(ours, others, strict=True))
        if phase == "step":
            values = [their["step_s"] / our["step_s"] for our, their in pairs]
        else:
            speeds = [[turn["tokens"] / turn[f"{phase}_s"] for turn in pair] for pair in pairs]
            values = [our / their for our, their in speeds]
        return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"

    ratios = [ratio(others, phase) for others in (stock, trl) for phase in ("rollout", "update", "step")]
    memory = [f"{max(t['peak_gb'] for t in others) / max(t['peak_gb'] for t in ours):.2f}" for others in (stock, trl)]
    return [" / ".join(map(seconds, (ours, stock, trl))), *ratios, " / ".join(memory)]


def test_the_page_has_the_measured_speed():
    found = {}
    for file in sorted((ROOT / "benchmarks/results").glob("*.json")):
        for workload, turns in json.loads(file.read_text(encoding="utf-8")).items():
            if "stock" in turns:
                found[workload, turns["threads"]] = cells_of_speed(turns["ours"], turns["stock"], turns["trl"])
            else:
                pretrained = turns["ours"], turns["trl"]
    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8").split("\n## Speed\n")[1]
    steps = [[turn["step_s"] for turn in turns] for turns in pretrained]
    ratios = sorted(trl / ours for ours, trl in zip(*steps, strict=True))
    said = (
        f"a step took {statistics.median(steps[0]):.1f} s against TRL's {statistics.median(steps[1]):.1f} on two cores"
    )
    said += ", in {:.1f} GB against {:.1f}.".format(*(statistics.median(x["peak_gb"] for x in y) for y in pretrained))
    words = " ".join(text.split())
    assert said in words and "{:.1f}, {:.1f} and {:.1f} in [three turns]".format(*ratios) in words
    table = text.split("| workload |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")[1:]] for line in table.splitlines()[2:]]
    assert len(found) == 6 and sorted(rows) == sorted(found.values())


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_page_has_the_numbers_of_the_gpu():
    """Of each kept line: the rollouts, a token by rows, the updates, what probes and captures took."""
    lines = (ROOT / "benchmarks/results/gpu-2026-11-23.jsonl").read_text(encoding="utf-8").splitlines()
    about, *rows = map(json.loads, lines)
    section = (ROOT / "docs/scale.md").read_text(encoding="utf-8").split("\n### On a GPU\n")[1].split("\n### ")[0]
    text, table = " ".join(section.split()), [cells(line) for line in section.splitlines() if line.startswith("|")]
    assert all(f"{about[key]}" in text for key in ("driver", "python", "torch", "transformers", "date", "commit"))
    rollouts = {name: [row for row in rows if row.get("rollout") == name] for name in ("no_graphs", "shared", "both")}
    for name, turns in rollouts.items():
        shown = [f"{x['s']:.2f}" for x in turns], [f"{x.get('tok_s', x['tokens'] / x['s']):,.0f}" for x in turns]
        peak = f"{max(x['memory'][2] for x in turns):.2f}" if name != "both" else ""
        assert [*map(", ".join, [*shown, [f"{x['ms_a_token']:.1f}" for x in turns]]), peak] in [x[1:] for x in table]
    for row in rows:
        if "by_rows" in row:
            assert [f"{ms:.2f}" for ms in row["ms"].values()] in [x[1:] for x in table], row
        if "update" in row:
            fused, shared = "fused" in row["update"], "shared" in row["update"]
            numbers = [row["update"].split()[0], f"{row['s']:.2f}", f"{row['tok_s']:,}", f"{row['memory'][2]:.1f}"]
            (found,) = (x[0] for x in table if x[1:] == numbers)
            assert fused == ("fused" in found) and shared == ("packed" not in found), row
    (records,) = (row["records"] for row in rows if row.get("rollout") == "timed")
    took = [1000 * seconds for *_, seconds in records]
    assert len(took) == 9 and "nine times in the rollout above" in text
    assert f"{min(took):.0f} to {max(took):.0f} ms each, {sum(took) / 1000:.1f} s together" in text
    held = [f"{rollouts[name][0]['memory'][1]:.1f}" for name in ("shared", "no_graphs")]
    assert "{} GB are reserved, without graphs {}".format(*held) in text
