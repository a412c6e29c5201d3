"""Tables of results on the pages: they are those of the rows."""

import json
import pathlib
import statistics

import pytest

import registry
import results

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
def test_a_readme_stays_short(page):
    text, _, corrections = (ROOT / page).read_text(encoding="utf-8").partition("\n## 文章里的说法\n")
    assert len(text.splitlines()) <= 145 and len(corrections.splitlines()) < 40


def test_the_pages_stay_few_and_short():
    pages = [*ROOT.glob("docs/*.md")]
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in pages}
    assert len(pages) <= 22 and sum(lines.values()) <= 6_000, sorted(lines.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("page", results.PAGES)
def test_the_tables_of_results_are_those_of_the_rows(page):
    text = (ROOT / results.PAGES[page]).read_text(encoding="utf-8")
    for lines in results.tables(page):
        assert len(lines) > 3 and "\n".join(["", *lines, ""]) in text, lines[0]


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
