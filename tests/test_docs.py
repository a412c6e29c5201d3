"""Pages: tables match the recorded runs; links, options and tests that they name exist."""

import json
import pathlib
import re
import statistics
import subprocess

import pytest
import recipes
from packaging.requirements import Requirement

import registry
import unpack
from common.run import SUSPICIOUS
from testbed import ALL, script

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("vectors/*.md"), *ROOT.glob("lab/**/*.md")])
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which tells of options that are gone


def test_readme_results_are_measured():
    runs = unpack.runs(unpack.RESULTS / "pages.jsonl")
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1]
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo"):
        variant = {"dpo": "-nll", "dapo": "-top_p1"}.get(name, "")  # dpo without it made its own pairs
        pattern = rf"{name}{variant}-seed\d+\.jsonl"
        of_seeds = [rows for file, rows in runs.items() if re.fullmatch(pattern, file)]
        scores = [[row["eval/pass@1"] for row in rows if "eval/pass@1" in row] for rows in of_seeds]
        first, last = zip(*[(of_run[0], of_run[-1]) for of_run in scores], strict=True)
        command = f"python {name}.py{' --eval_top_p 1' * (name == 'dapo')}"
        row = f"| `{command}` | {statistics.median(last):.3f} ({min(last):.3f}, {max(last):.3f}) |"
        before = "from 0.367 before training"
        assert len(scores) == 5 and row in text.splitlines()
        assert f"{statistics.median(first):.3f}" in before and before in text


def test_best_of_six_is_measured():
    registered = registry.Registration(registry.CLAIMS)
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8").split("\n## Each algorithm, best of six\n")[1]
    effect = {"metric": "accuracy", "over": 20480}
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo"):
        ends = [registered.outcome(f"best-{name}", seed, effect) for seed in range(70, 80)]
        assert f"| {statistics.mean(ends):.3f} ± {statistics.stdev(ends):.3f} |" in text, name


def test_readme_diff_is_real():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"`diff grpo.py dr_grpo.py`.*?```diff\n(.*?)```", text, re.DOTALL)[1]
    command = ["diff", "grpo.py", "dr_grpo.py"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    docstring = (ROOT / "grpo.py").read_text(encoding="utf-8").split('"""')[1].count("\n") + 1
    hunks = re.split(r"^(?=\d)", printed, flags=re.MULTILINE)[1:]
    assert "".join(hunk for hunk in hunks if int(re.match(r"\d+", hunk)[0]) > docstring) == shown


def anchors(page):
    """The anchors of a page's headings, as the common renderers of Markdown make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
        while anchor in found:
            anchor = f"{anchor}-1"
        found.add(anchor)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            wrong.append(target)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_things_exist(page):
    text = page.read_text(encoding="utf-8")
    for name, target in re.findall(r"\[`([\w.]+)`\]\(([\w./]+\.py)\)", text):
        file = page.parent / target
        assert name == file.stem or re.search(rf"\b{name.split('.')[-1]}\b", file.read_text(encoding="utf-8")), target
    tests = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("tests/test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == []
    for file, word in re.findall(r"\bpytest (?:-n 0 )?(tests/test_\w+\.py)(?: -k (\w+))?", text):
        assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), word


def test_warnings_are_listed():
    page = (ROOT / "docs/watch.md").read_text(encoding="utf-8")
    warnings = page.split("A run warns after five steps")[1].split("\n\n")[0]
    assert [name for name in SUSPICIOUS if f"`{name}`" not in warnings] == []


def read_requirements(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {own.name: own.specifier for own in map(Requirement, (line for line in lines if not line.startswith("#")))}


def test_installed_versions_are_kept():
    """requirements.txt allows the lock and each torch that docs/run.md names, of any build; else pip replaces it."""
    ranges, locked = read_requirements("requirements.txt"), read_requirements("requirements-lock.txt")
    assert ranges.keys() == locked.keys()
    assert [name for name, one in locked.items() if not ranges[name].contains(next(iter(one)).version)] == []
    page = (ROOT / "docs/run.md").read_text(encoding="utf-8")
    first, last = re.search(r"Your own torch\*\* \(2\.(\d+) to 2\.(\d+)\)", page).groups()
    torches = [f"2.{minor}.0{build}" for minor in range(int(first), int(last) + 1) for build in ("", "+cpu", "+cu132")]
    assert [version for version in torches if not ranges["torch"].contains(version)] == []
    newest = re.search(r"torch (\S+) with transformers (\S+), passes", page)
    assert str(ranges["torch"]).startswith(f"<={newest[1]},") and f"<={newest[2]}" in str(ranges["transformers"])


def options():
    """Return the options of all scripts and recipes, as pages write them."""
    own = {field for name in ALL for field in script(name).Args.__dataclass_fields__}
    for file in recipes.files().values():
        own |= recipes.Source(file.read_text(encoding="utf-8")).options.keys()
    return own | {"config", "help"} | {f"no_{field}" for field in own}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_known_options(page):
    """In commands `accelerate launch SCRIPT.py ...` and `python SCRIPT.py ...`."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    wrong = []
    for name, words in re.findall(rf"\b({'|'.join(ALL)})\.py((?: +[^\s`|#]+)*)", text):
        fields = script(name).Args.__dataclass_fields__
        for option in re.findall(r"(?<=\s)--(\w+)", words):
            if option not in fields and option.removeprefix("no_") not in fields and option not in ("config", "help"):
                wrong.append(f"{name}.py --{option}")
    assert not wrong


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_mentioned_options_exist(page):
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`--([a-z]\w*_\w*)(?=[ `=])", text))
    assert named - options() - FOREIGN == set()


# Options of Accelerate's launcher.
FOREIGN = {"mixed_precision", "num_processes", "config_file", "multi_gpu"}


def cells_of_speed(ours, stock, trl):
    """The row of docs/results.md that these turns make, without its title; the ratios are taken turn by turn."""

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


def test_the_speed_table_is_measured():
    found = {"plain": [], "stock": []}
    for file in sorted((ROOT / "lab/results/throughput").glob("*.json")):
        for turns in json.loads(file.read_text(encoding="utf-8")).values():
            for other in found.keys() & turns.keys():
                found[other].append(cells_of_speed(turns["ours"], turns[other], turns["trl"]))
    places = (("plain", "docs/results.md", "| workload, one thread |", 2), ("stock", "lab/speed.md", "| workload |", 6))
    for other, page, title, count in places:
        text = (ROOT / page).read_text(encoding="utf-8")
        rows = [cells(line)[1:] for line in text.split(title)[1].split("\n\n")[0].splitlines()[2:]]
        assert len(rows) == count and sorted(rows) == sorted(found[other])


def test_the_gpu_tables_are_measured():
    """Check rollouts (seconds, tokens a second, time of a token) and updates of each line, except those with the fused
    norms that fast/ had then."""
    lines = (ROOT / "lab/results/throughput/gpu-2026-11-23.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    page = (ROOT / "lab/speed.md").read_text(encoding="utf-8")
    table = [cells(line) for line in page.splitlines() if line.startswith("|")]
    rollouts = {name: [row for row in rows if row.get("rollout") == name] for name in ("no_graphs", "shared")}
    for turns in rollouts.values():
        seconds = ", ".join(f"{turn['s']:.2f}" for turn in turns)
        speeds = ", ".join(f"{turn.get('tok_s', turn['tokens'] / turn['s']):,.0f}" for turn in turns)
        times = ", ".join(f"{turn['ms_a_token']:.1f}" for turn in turns)
        peak = f"{max(turn['memory'][2] for turn in turns):.2f}"
        assert [seconds, speeds, times, peak] in [line[1:] for line in table]
    for row in rows:
        if "update" in row and "fused" not in row["update"]:
            numbers = [row["update"].split()[0], f"{row['s']:.2f}", f"{row['tok_s']:,}", f"{row['memory'][2]:.1f}"]
            (found,) = (line[0] for line in table if line[1:] == numbers)
            assert ("shared" in row["update"]) == ("packed" not in found)
