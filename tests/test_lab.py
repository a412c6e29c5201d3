"""lab/: registrations are unchanged, only registered runs count, and pages have the verdicts."""

import hashlib
import json
import shutil

import numpy as np
import pytest

import gsm8k
import last_number
import registry
import unpack

ROOT = registry.HERE.parent
DIGESTS = {
    registry.CLAIMS: "6a1570e7193b0fb074b10c204b193f031701a90fcb58a7573f4822473caa1b95",
    registry.LEAD: "3416e0181176bd1c0429f1409495d732d0daeaa962ca5871696ee31019c48185",
    registry.KL: "2a79075eba5c996a0a8129945597bab256c3f8611de44a22a49699ad7ff07f74",
    registry.GSM8K: "079c5519f5ebe7526b8d44baca9867d01563a865192776fee55258a792821efb",
    registry.GSM8K_LONGER: "855a7ec133c0bfa6d3bd346ff48fba7ee8e6b0fef9676e205e50f93db0ca2025",
}
HAS_HISTORY = (ROOT / ".git").exists() and shutil.which("git")
statistics = pytest.mark.needs("scipy")
both = pytest.mark.parametrize("path", DIGESTS, ids=lambda path: path.stem)


# --- what is registered, and its rows ---


@both
def test_the_registration_is_not_edited(path):
    assert registry.Registration(path).digest == DIGESTS[path]


@both
def test_runs_match_their_registration(path):
    registration = registry.Registration(path)
    assert all(registration.counts(*job) for job in registration.jobs())
    assert len(registration.jobs()) == len(registration.runs)


@both
@pytest.mark.skipif(not HAS_HISTORY, reason="needs git and the history")
def test_registration_precedes_the_runs(path):
    registration = registry.Registration(path)
    commits = {registration.header(*job)["commit"] for job in registration.jobs() if registration.made(*job)}
    assert all(map(registration.was_before, commits))


def test_unpack_over_steps_or_completions(tmp_path):
    unpack.unpack(tmp_path, "step")
    for pack in unpack.RESULTS.glob("*.jsonl"):
        assert {path.name for path in (tmp_path / pack.stem).iterdir()} == unpack.runs(pack).keys()
    path = tmp_path / "registered" / "dapo-dynamic_sampling-seed40.jsonl"
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    assert json.loads(first) == {"step": 0, "completions": 0, "accuracy": 0.32892625}
    assert json.loads(second)["step"] == 5 and "accuracy" not in json.loads(second)
    unpack.unpack(tmp_path, "completions")
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[1])["step"] == 2560


# --- the page ---


@statistics
def test_pages_have_the_computed_verdicts():
    """Each verdict of check.py, with its effect, interval and p, is a row of a table of results.md or verdicts.md."""
    import check

    pages = [ROOT / "docs" / "results.md", ROOT / "lab" / "verdicts.md"]
    page = "\n".join(path.read_text(encoding="utf-8").replace("*", "") for path in pages)
    tables = []
    for line in page.splitlines():
        if line.startswith("|"):
            tables.append([cell.strip() for cell in line.split("|")])
    for name, *cells in check.of_claims() + check.of_lead() + check.of_claims(registry.KL):
        rows = [row for row in tables if all(cell in row for cell in cells if cell)]
        assert len(rows) == 1, (name, cells)


def test_page_has_the_numbers_of_gsm8k():
    short, longer = registry.Registration(registry.GSM8K), registry.Registration(registry.GSM8K_LONGER)
    lines, gains = gsm8k.table(longer), [*gsm8k.gains(short, 5), *gsm8k.gains(longer, 8)]
    section = (
        (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("\n## GSM8K on a CPU\n")[1].split("\n## ")[0]
    )
    assert [line for line in lines if line in section.splitlines()] == lines and len(lines) == 6
    assert all(gain in section for gain in gains)
    base, *trained = (f"{score:.2f}" for score in gsm8k.greedy("gsm8k_640.jsonl"))
    assert f"the base model solves {base} and the trained ones {trained[0]}, {trained[1]} and {trained[2]}" in section
    assert all(gsm8k.with_interval(score) in section for score in gsm8k.greedy("gsm8k_rest.jsonl"))


@pytest.mark.parametrize(
    "text, truncated, right",
    [
        ("#### 1,200", False, True),
        ("It is 1200 dollars.", False, True),
        ("1200 is more than 7", False, False),
        ("It is 1200", True, False),  # it may have become 12000
        ("no number", False, False),
    ],
)
def test_lenient_grade(text, truncated, right):
    completion = [{"role": "assistant", "content": text}]
    assert last_number.last_number([completion], ["1200"], [truncated]) == [float(right)]


def test_gsm8k_data_is_the_registered_one(tmp_path, monkeypatch):
    """Short problems behind the examples; the test problems are drawn once."""
    for split, count in (("train", 5), ("test", 300)):
        rows = [{"question": str(i), "answer": "<<" * (i % 4) + f"#### {i}"} for i in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr(gsm8k, "FOLDER", tmp_path / "written")
    gsm8k.write_data(tmp_path)
    train, test, rest = (
        [
            json.loads(line)
            for line in (tmp_path / "written" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for split in ("train", "test", "rest")
    )
    assert [row["prompt"][-1]["content"] for row in train] == ["0", "1", "2", "4"]
    assert [message["role"] for message in train[0]["prompt"]] == ["user", "assistant"] * 3 + ["user"]
    drawn, others = ([int(row["prompt"][-1]["content"]) for row in rows] for rows in (test, rest))
    assert sorted(drawn + others) == [i for i in range(300) if i % 4 < 3]
    assert len(set(drawn)) == 100 and drawn == sorted(drawn) and drawn[:4] != [0, 1, 2, 4]


# --- which runs count ---

LOW = (0.0, 0.1, 0.0, 0.1, 0.05)
HIGH = (1.0, 1.1, 1.0, 1.1, 1.05)
COMMANDS = {"a": "a.py", "b": "b.py", "c": "c.py"}
STATISTICS = {"level": 0.05, "failed_is_0": ["m"]}
REGISTERED = {"closing": "2026-12-31", "statistics": STATISTICS, "runs": COMMANDS, "options": {}}


class Lab:
    """Two claims about the runs a, b and c."""

    def __init__(self, folder):
        self.path = folder / "registered.json"
        self.pack = {}
        self.register()

    def register(self, **primary):
        rules = {"metric": "m", "run": "a", "against": "b", "over": "end"}
        rules |= {"direction": 1, "margin": 0.0, "same": 0.1} | primary
        seeds = [10, 11, 12, 13, 14]
        one = {"name": "one", "primary": rules, "seeds": seeds}
        two = {"name": "two", "primary": rules | {"run": "c"}, "seeds": seeds}
        content = REGISTERED | {"claims": [one, two]}
        self.path.write_text(json.dumps(content), encoding="utf-8")

    def write(self, name, ends, **other):
        """Write runs with seeds 10, 11, ... that end with these values."""
        digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        for seed, end in enumerate(ends, 10):
            header = {"registered": digest, "clean": True, "code": "one version"}
            header["command"] = f"python {COMMANDS[name]} --seed {seed}"
            header["started"] = "2026-12-31T23:00:00+00:00"
            first = {"step": 0, "completions": 0, "m": 0.0}
            last = {"step": 5, "completions": 50, "m": end}
            self.pack[f"{name}-seed{seed}.jsonl"] = [header | other, first, last]

    def verdicts(self):
        import decide

        registration = registry.Registration(self.path, self.path.parent)
        registration.runs = self.pack
        return [decision.verdict for decision in decide.decisions(registration).values()]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


@statistics
def test_incomplete_claims_stay_open(lab):
    lab.write("a", HIGH)
    lab.write("b", LOW[:4])
    assert lab.verdicts() == [registry.OPEN] * 2
    lab.write("b", LOW)
    assert lab.verdicts() == [registry.HOLDS, registry.OPEN]  # claim two still lacks the run c
    lab.register(margin=-1.0)  # after the runs
    assert lab.verdicts() == [registry.OPEN] * 2


@statistics
@pytest.mark.parametrize(
    "other",
    [
        {"command": "python a.py --easier --seed 10"},
        {"clean": False},
        {"started": "2027-01-01T00:00:00+00:00"},
        {"code": "another version"},
    ],
)
def test_unregistered_run_decides_nothing(lab, other):
    lab.write("a", HIGH)
    lab.write("b", LOW)
    lab.write("a", HIGH[:1], **other)
    assert lab.verdicts() == [registry.OPEN] * 2


@statistics
@pytest.mark.parametrize("primary, verdict", [({"margin": 2.0}, registry.FAILS), ({"same": 5.0}, registry.HOLDS)])
def test_difference_comes_before_equivalence(lab, primary, verdict):
    lab.register(**primary)
    lab.write("a", HIGH)
    lab.write("b", LOW)
    assert lab.verdicts()[0] == verdict


# --- statistics by hand ---


@statistics
def test_welch_sign_flips_and_holm_by_hand():
    import decide

    found = decide.measure([1.0, 2.0, 3.0], [0.0, 0.0, 3.0], 0.0, 1.0)
    assert found.effect == 1.0
    # Variances 1 and 3: t = 1 / sqrt(4 / 3), with (4 / 3)^2 / ((1 / 9 + 9 / 9) / 2) degrees of freedom.
    t, freedom = 1 / (4 / 3) ** 0.5, (16 / 9) / ((1 / 9 + 1) / 2)
    assert found.p == pytest.approx(2 * decide.stats.t.sf(t, freedom))
    assert found.p_same == pytest.approx(0.5)  # the effect is the margin of equivalence itself
    width = decide.stats.t.isf(0.025, freedom) * (4 / 3) ** 0.5
    assert (found.low, found.high) == pytest.approx((1 - width, 1 + width))
    assert decide.sign_flips(np.array([1.0, 2.0, 0.0])) == 0.5  # 4 of 8 sign choices have a sum of 3 or -3
    ps = decide.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 1.0})
    assert ps == pytest.approx({"b": 0.04, "c": 0.09, "a": 0.09, "d": 1})
    for mine in ([1.0, 1.0], [1.0, np.nan]):  # no deviation, and a run without a value
        nothing = decide.measure(mine, [0.0, 0.0], 0.0, 0.1)
        assert nothing.p == nothing.p_same == 1 and np.isnan(nothing.low)


@statistics
def test_a_paired_t_by_hand():
    import lead

    found = lead.paired([1.0, 2.0, 6.0], 0.0, 4.0)
    error = 7**0.5 / 3**0.5  # the variance is 7
    assert found.effect == 3 and found.p == pytest.approx(2 * lead.stats.t.sf(3 / error, 2))
    assert found.p_same == pytest.approx(lead.stats.t.sf(1 / error, 2))  # the effect is 1 below the margin
    width = lead.stats.t.isf(0.025, 2) * error
    assert (found.low, found.high) == pytest.approx((3 - width, 3 + width)) and found.p_signs == 0.25


def test_values_are_interpolated():
    rows = [{"step": 10 * i, "completions": 100 * i, "m": float(i * i)} for i in range(4)]
    assert registry.value(rows, "m", "all") == 3.5 and registry.value(rows[1:], "m", "start") == 1
    rows[2].pop("m")
    assert registry.value(rows, "m", "end") == registry.value(rows, "m", "late") == 9
    assert registry.value(rows, "m", 200) == 5 and registry.value(rows, "m", 1000) == 9
