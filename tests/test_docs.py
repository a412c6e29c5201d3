"""Tables of results on the pages: they are those of the rows."""

import json
import pathlib
import statistics

import pytest

import registry
import results

ROOT = pathlib.Path(__file__).parent.parent


def test_the_readme_has_the_results_of_the_bare_commands():
    registered = registry.Registration(registry.CLAIMS)
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1].split("\n## ")[0]
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo"):
        runs = [results.evaluations(rows) for rows in results.load(name).values()]
        first, last = ([run[place]["eval/pass@1"] for run in runs] for place in (0, -1))
        effect = {"metric": "accuracy", "over": 20480}
        hard = [registered.outcome(f"best-{name}", seed, effect) for seed in range(70, 80)]
        ends = [f"{statistics.median(x):.3f} ({min(x):.3f}, {max(x):.3f})" for x in (last, hard)]
        row = f"| `{name}.py` | {statistics.median(first):.3f} | {' | '.join(ends)} |"
        assert len(runs) == 5 and row in text.splitlines(), row


@pytest.mark.parametrize("page", results.PAGES)
def test_the_tables_of_results_are_those_of_the_rows(page):
    text = (ROOT / results.PAGES[page]).read_text(encoding="utf-8")
    for lines in results.tables(page):
        assert len(lines) > 3 and "\n".join(["", *lines, ""]) in text, lines[0]


def test_no_text_is_read_in_the_encoding_of_the_machine():
    """On Windows that is not UTF-8. Of a path in a variable, ruff's rule (PLW1514) does not know that it is one."""
    for folder in ("common", "docs", "lab", "tests", "tools", "vectors"):
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


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_table_of_speed_is_that_of_the_turns():
    found = []
    for file in sorted((ROOT / "lab/results/throughput").glob("*.json")):
        for turns in json.loads(file.read_text(encoding="utf-8")).values():
            if "stock" in turns:
                found.append(cells_of_speed(turns["ours"], turns["stock"], turns["trl"]))
    table = (ROOT / "docs/scale.md").read_text(encoding="utf-8").split("| workload |")[1].split("\n\n")[0]
    rows = [cells(line)[1:] for line in table.splitlines()[2:]]
    assert len(found) == 6 and sorted(rows) == sorted(found)


def test_the_tables_of_the_gpu_are_those_of_its_output():
    """Of each kept line: the rollouts (seconds, tokens a second, time of a token) and the updates."""
    lines = (ROOT / "lab/results/throughput/gpu-2026-11-23.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    section = (ROOT / "docs/scale.md").read_text(encoding="utf-8").split("\n### On a GPU\n")[1].split("\n### ")[0]
    table = [cells(line) for line in section.splitlines() if line.startswith("|")]
    rollouts = {name: [row for row in rows if row.get("rollout") == name] for name in ("no_graphs", "shared", "both")}
    for name, turns in rollouts.items():
        seconds = ", ".join(f"{turn['s']:.2f}" for turn in turns)
        speeds = ", ".join(f"{turn.get('tok_s', turn['tokens'] / turn['s']):,.0f}" for turn in turns)
        times = ", ".join(f"{turn['ms_a_token']:.1f}" for turn in turns)
        peak = f"{max(turn['memory'][2] for turn in turns):.2f}" if name != "both" else ""
        assert [seconds, speeds, times, peak] in [line[1:] for line in table]
    for row in rows:
        if "update" in row:
            numbers = [row["update"].split()[0], f"{row['s']:.2f}", f"{row['tok_s']:,}", f"{row['memory'][2]:.1f}"]
            (found,) = (line[0] for line in table if line[1:] == numbers)
            assert ("fused" in row["update"]) == ("fused" in found)
            assert ("shared" in row["update"]) == ("packed" not in found)
