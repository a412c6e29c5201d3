"""vectors/check.py: its verdicts, the files it reads, the demo, and the adapter to copy."""

import copy
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from vectors import check

VECTORS = pathlib.Path(__file__).resolve().parent.parent / "vectors"
CASES = check.load_cases()
RIGHT = {name: case["expected"] for name, case in CASES.items()}
GRPO = RIGHT["policy/grpo"]


def others_of(case):
    return {other["says"]: other["expected"] for other in CASES[case].get("others", [])}


# --- one answer ---


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_followed_convention_is_named(precision):
    for case in CASES.values():
        assert check.compare(case, case["expected"], precision) == (check.SAME, "")
        for other in case.get("others", []):
            verdict = check.judge(case, other["expected"], precision)
            assert verdict.kind == check.OTHER, case["id"]
            assert verdict.text == f"it follows: {other['says']}", case["id"]
            assert verdict.follows == [other["says"]]


def test_missing_and_wrong_numbers_are_found():
    case = CASES["policy/grpo"]
    assert check.compare(case, None) == (check.MISSING, "")
    assert check.compare(case, {"loss": GRPO["loss"], "grad": GRPO["gradient"]})[0] == check.OTHER
    assert check.compare(case, {"not_offered": "no"}) == (check.NOT_OFFERED, "no")
    assert check.compare(case, {"loss": GRPO["loss"]}) == (check.PART, "without gradient")
    for wrong in (None, float("nan"), "0.1", [0.1]):
        assert check.compare(case, GRPO | {"loss": wrong})[0] == check.OTHER
    moved = copy.deepcopy(GRPO)
    moved["gradient"][6][3] += 0.01
    moved["gradient"][0][0] += 0.001
    _, text = check.compare(case, moved)
    assert text.startswith("loss is right; gradient differs at 2 of 24, by up to 0.01 at gradient[6][3]: ")


def test_factor_and_single_mistake_are_named():
    case = CASES["policy/grpo"]
    half = check.scaled(GRPO["gradient"], 0.5)
    _, text = check.compare(case, GRPO | {"gradient": half})
    assert text == "loss is right; every number of gradient x 0.5"
    of_tokens = others_of("policy/grpo")["one mean over all tokens"]
    verdict = check.judge(case, {"loss": of_tokens["loss"], "gradient": half})
    in_loss = "it follows: in loss alone, one mean over all tokens"
    assert verdict.text == f"{in_loss}; every number of gradient x 0.5"


# --- the program ---


def run(path, *options, folder=VECTORS):
    """Return exit code and lines of the program, which needs nothing but the standard library."""
    command = [sys.executable, "-S", "-I", str(folder / "check.py"), str(path), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
    return result.returncode, (result.stdout + result.stderr).splitlines()


@pytest.fixture
def ask(tmp_path):
    """Return a function that writes answers and runs the program on them."""

    def ask(answers, *options):
        path = tmp_path / "answers.json"
        path.write_text(json.dumps(answers), encoding="utf-8")
        return run(path, *options)

    return ask


def test_right_answers(ask):
    code, lines = ask(RIGHT)
    assert code == 0 and lines[-1] == f"{len(CASES)} same"
    code, lines = ask(RIGHT, "--only", "kl/")
    assert code == 0 and lines[-1] == f"{sum(name.startswith('kl/') for name in CASES)} same"
    code, lines = ask({}, "--show", "policy/grpo-k1")
    shown = json.loads("".join(lines))
    assert code == 0 and shown["inputs"]["old_logprobs"] and shown["worked"] and shown["expected"]


def test_wrong_answers(ask):
    case = CASES["splits/dapo-4"]
    wrong = {"splits/dapo-4": case["others"][0]["expected"], "policy/grpo": {"loss": 7.0}}
    code, lines = ask(RIGHT | wrong)
    assert code == 1 and lines[-2] == f"{len(CASES) - 2} same, 2 OTHER"
    follows = "it follows: the mean over each micro-batch, then averaged"
    assert lines[-1] == f"Cases that differ: 2. Start with splits/dapo-4: {follows}"
    code, lines = ask(RIGHT | {"policy/gpro": {}})
    assert code == 1 and lines[0].split(maxsplit=1) == ["policy/gpro", "no case has this id"]
    rounded = RIGHT | {"splits/dapo-4": {"loss": case["expected"]["loss"] + 1e-7}}
    code, lines = ask(rounded)
    assert code == 1 and lines[-1].endswith("right only in the tolerance of --float32")
    assert ask(rounded, "--float32")[0] == 0


def test_most_common_convention_comes_first(ask):
    """It starts neither with the first wrong case nor with the first that follows something."""
    says = "one mean over all tokens"
    wrong = {"advantages/grpo": {"advantages": [[7.0]]}}
    first = CASES["policy/ppo"]["others"][0]
    wrong["policy/ppo"] = first["expected"]
    for name in ("policy/grpo-kl", "policy/gspo", "splits/grpo-4"):
        wrong[name] = others_of(name)[says]
    _, lines = ask(RIGHT | wrong)
    assert lines[-1] == f"Cases that differ: 5. 3 of them follow: {says}. Start with policy/grpo-kl"


def test_demo_matches_the_readme():
    """The demo fails only the cases that can tell, and all of these follow one mistake."""
    code, lines = run("--demo")
    page = (VECTORS / "README.md").read_text(encoding="utf-8")
    example = page.partition("<!-- the demo -->\n\n```\n")[2].partition("\n```")[0].splitlines()
    assert code == 0 and len(example) == 8
    assert set(example) - {"..."} <= set(lines)
    assert len(lines) < 15


# --- what it reads ---


def test_unreadable_input_prints_one_line(tmp_path, ask):
    path = tmp_path / "cut.json"
    path.write_bytes(b'{"policy/grpo": {"loss": 0.1')
    for file, *options, word in (
        (tmp_path / "none.json", "No such file"),
        (path, "not a complete JSON"),
        (path, "--show", "policy/gpro", "policy/gpro"),
    ):
        code, lines = run(file, *options)
        assert code == 2 and len(lines) == 1 and word in lines[0]
    code, lines = ask(RIGHT, "--only", "polcy/")
    assert code == 2 and len(lines) == 1 and "polcy/" in lines[0]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_windows_files_are_read(tmp_path, encoding):
    path = tmp_path / "answers.json"
    path.write_bytes(json.dumps(RIGHT).encode(encoding))
    assert run(path)[0] == 0


# --- the folder on its own ---


def test_renamed_copy_works(tmp_path):
    """The checker works there, and the generator writes the same cases."""
    copied = tmp_path / "reference_numbers"
    shutil.copytree(VECTORS, copied, ignore=shutil.ignore_patterns("libraries", "__pycache__"))
    shutil.rmtree(copied / "cases")
    command = [sys.executable, "-S", "-m", "generate"]
    subprocess.run(command, cwd=copied, check=True, capture_output=True, timeout=120)
    for path in (VECTORS / "cases").iterdir():
        ours = json.loads(path.read_text(encoding="utf-8"))
        theirs = json.loads((copied / "cases" / path.name).read_text(encoding="utf-8"))
        assert [case["id"] for case in ours["cases"]] == [case["id"] for case in theirs["cases"]]
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(RIGHT), encoding="utf-8")
    code, lines = run(path, folder=copied)
    assert code == 0 and lines[-1] == f"{len(CASES)} same"


def test_adapter_answers_what_it_offers(tmp_path):
    pytest.importorskip("torch")
    copied = tmp_path / "vectors"
    shutil.copytree(VECTORS, copied, ignore=shutil.ignore_patterns("libraries", "generate", "__pycache__"))
    with open(tmp_path / "answers.json", "w", encoding="utf-8") as file:
        subprocess.run([sys.executable, "adapter.py"], cwd=copied, check=True, stdout=file, timeout=120)
    code, lines = run(tmp_path / "answers.json", "--differing", folder=copied)
    assert code == 0 and lines == [f"{len(CASES) - 3} not offered, 3 same"]


def test_version_is_the_same_everywhere():
    code, lines = run("unused", "--version")
    (version,) = lines
    assert code == 0 and re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert {file["version"] for file in check.load_files()} == {version}
    assert f"version {version}." in (VECTORS / "README.md").read_text(encoding="utf-8")
