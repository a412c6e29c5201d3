"""vectors/: each script on each case that concerns it, the files against generator and schema, and the checker."""

import copy
import functools
import json
import re
import subprocess
import sys

import pytest
import recipes
import torch

import script_answers
from testbed import ALL, ROOT, script
from vectors import check
from vectors.generate.__main__ import FOLDER, SUBJECTS
from vectors.generate.cases import document

CASES = check.load_cases()
RECIPES = ("rloo", "reinforce_pp")
OTHER_RECIPES = {"advantages/batch-deviation", "policy/tis"}  # test_recipes.py asks lite_ppo and tis
NO_SCRIPT = {  # in all scripts a row whose tokens are masked is still a row
    "splits/truncated-rows-left-out",
    "splits/truncated-rows-left-out-1-2",
}


@functools.cache
def answers(name, dtype):
    """{case: the answer of a script or a recipe}, of the cases that concern it."""
    module = script(name) if name in ALL else recipes.load(recipes.made(name), name)
    found = {}
    for case_id, case in CASES.items():
        answer = script_answers.answer(module, case, dtype)
        if "not_offered" not in answer:
            found[case_id] = answer
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", [*ALL, *RECIPES])
def test_a_script_computes_what_the_cases_say(name, dtype):
    wrong = {}
    for case_id, answer in answers(name, dtype).items():
        verdict, text = check.compare(CASES[case_id], answer, str(dtype).removeprefix("torch."))
        if verdict != check.SAME:
            wrong[case_id] = f"{verdict} {text}"
    assert wrong == {}


def test_every_case_concerns_a_script():
    """A case that no script answers holds nothing here. Variants have tests of their own."""
    answered = set()
    for name in (*ALL, *RECIPES):
        answered |= answers(name, torch.float64).keys()
    left = {case_id for case_id in CASES if not case_id.startswith("variants/")} - answered
    assert left == OTHER_RECIPES | NO_SCRIPT


# --- the files ---


def nearly_equal(left, right):
    """Machines may differ in the last digits of a float64."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(nearly_equal(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(nearly_equal, left, right))
    if isinstance(left, float):
        return left == pytest.approx(right, rel=1e-12, abs=1e-13)
    return left == right


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_file_is_what_the_generator_writes(subject):
    file = json.loads((FOLDER / f"{subject.name}.json").read_text(encoding="utf-8"))
    assert nearly_equal(json.loads(json.dumps(document(subject))), file)


def test_every_file_has_a_subject():
    assert {path.stem for path in FOLDER.glob("*.json")} == {subject.name for subject in SUBJECTS}
    assert len(CASES) == sum(len(subject.cases) for subject in SUBJECTS)  # no id twice


SCHEMA = json.loads((ROOT / "vectors" / "schema.json").read_text(encoding="utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None)}


def problems(value, schema, place="file"):
    """What a value violates, by the few words of JSON Schema that schema.json uses."""
    if "$ref" in schema:
        return problems(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], place)
    known = {"type", "required", "properties", "additionalProperties", "items", "minItems", "const", "enum", "pattern"}
    assert schema.keys() <= {*known, "description", "$schema", "$defs", "title"}, place
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(isinstance(value, TYPES[name]) for name in types):
        return [f"{place}: not {types}"]
    found = []
    if "const" in schema and value != schema["const"]:
        found.append(f"{place}: {value}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place}: {value}")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{place}: {value}")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{place}: too short")
        for i, item in enumerate(value):
            found += problems(item, schema.get("items", {}), f"{place}[{i}]")
    if isinstance(value, dict):
        found += [f"{place}: no {name}" for name in schema.get("required", []) if name not in value]
        others = schema.get("additionalProperties", {})
        for name, item in value.items():
            part = schema.get("properties", {}).get(name, others)
            found += [f"{place}: {name}"] if part is False else problems(item, part, f"{place}.{name}")
    return found


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_file_has_the_form_of_the_schema(subject):
    file = json.loads((FOLDER / f"{subject.name}.json").read_text(encoding="utf-8"))
    assert problems(file, SCHEMA) == []
    for word in ("cases", "version"):
        assert problems({name: part for name, part in file.items() if name != word}, SCHEMA)
    broken = copy.deepcopy(file)
    broken["cases"][0]["expected"] = {"loss": "a number"}
    assert problems(broken, SCHEMA) == ["file.cases[0].expected.loss: not ['number', 'boolean', 'null', 'array']"]


# --- the checker ---


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_the_checker_names_the_convention_that_an_answer_follows(precision):
    for case in CASES.values():
        assert check.compare(case, case["expected"], precision) == (check.SAME, "")
        for other in case.get("others", []):
            expected = (check.OTHER, f"it follows: {other['says']}")
            assert check.compare(case, other["expected"], precision) == expected, case["id"]


def test_the_checker_sees_what_is_missing_and_where_a_number_is_off():
    case = CASES["policy/grpo"]
    expected = case["expected"]
    assert check.compare(case, None)[0] == check.MISSING
    assert check.compare(case, {}) == (check.MISSING, "without loss, gradient")
    misspelt = {"loss": expected["loss"], "grad": expected["gradient"]}
    assert check.compare(case, misspelt) == (check.OTHER, "no name grad: the names are loss, gradient")
    assert check.compare(case, [0.1])[0] == check.OTHER
    assert check.compare(case, {"not_offered": "no"}) == (check.NOT_OFFERED, "no")
    assert check.compare(case, {"loss": expected["loss"]}) == (check.PART, "without gradient")
    for wrong in (None, float("nan"), "0.1", [0.1]):
        assert check.compare(case, expected | {"loss": wrong})[0] == check.OTHER
    short = {"loss": expected["loss"] + 1, "gradient": expected["gradient"][:-1]}
    verdict, text = check.compare(case, short)
    assert text.startswith("loss differs by 1: ")  # one wrong shape hides no other name
    assert text.endswith("gradient is a list of 7 for one of 8")
    moved = copy.deepcopy(expected)
    moved["gradient"][6][3] += 0.01
    moved["gradient"][0][0] += 0.001
    verdict, text = check.compare(case, moved)
    assert verdict == check.OTHER
    assert text.startswith("loss is right; gradient differs at 2 of 24, by up to 0.01 at gradient[6][3]: ")


def test_the_checker_names_a_common_factor_and_a_mistake_in_one_name():
    case = CASES["policy/grpo"]
    expected = case["expected"]
    half = [[number / 2 for number in row] for row in expected["gradient"]]
    assert check.compare(case, expected | {"gradient": half})[1] == "loss is right; every number of gradient x 0.5"
    both = {"loss": expected["loss"] / 2, "gradient": half}
    assert check.compare(case, both)[1] == "every number of loss and gradient x 0.5"
    of_tokens = case["others"][0]["expected"]
    verdict, text = check.compare(case, {"loss": of_tokens["loss"], "gradient": half})
    assert verdict == check.OTHER
    assert text == "it follows: in loss alone, one mean over all tokens; every number of gradient x 0.5"


def test_the_checker_as_a_program(tmp_path):
    """It runs on the bare standard library, and its exit code says whether all cases agree."""

    def run(answers, *options):
        (tmp_path / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
        command = [sys.executable, "-S", "-I", ROOT / "vectors" / "check.py", tmp_path / "answers.json", *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return result.returncode, (result.stdout + result.stderr).splitlines()

    answers = {case_id: case["expected"] for case_id, case in CASES.items()}
    code, lines = run(answers)
    assert code == 0 and lines[-1] == f"{len(CASES)} same"
    case = CASES["splits/dapo-4"]
    grpo = CASES["policy/grpo"]
    wrong = {case["id"]: case["others"][0]["expected"], "policy/grpo": {"loss": 7.0}}
    code, lines = run(answers | wrong)
    assert code == 1 and lines[-2] == f"{len(CASES) - 2} same, 2 OTHER"
    follows = "it follows: this is the mean over the micro-batch, averaged"
    assert lines[-1] == f"Cases that differ: 2. Begin with splits/dapo-4: {follows}"
    place = next(i for i, line in enumerate(lines) if line.startswith("policy/grpo "))
    assert lines[place + 1].strip() == f"this case was made for: {grpo['catches']}"
    assert sum("was made for" in line for line in lines) == 1  # not where something follows
    code, lines = run(answers | {"policy/gpro": {}})
    assert code == 1 and lines[0].split(maxsplit=1) == ["policy/gpro", "no case has this id"]
    code, lines = run(answers | wrong, "--only", "kl/")
    assert code == 0 and lines[-1] == f"{sum(name.startswith('kl/') for name in CASES)} same"
    code, lines = run([1], "--only", "kl/")
    assert code == 1 and len(lines) == 1 and "is no object {case id: {name: numbers}}" in lines[0]
    code, lines = run({}, "--show", "policy/grpo-k1")
    shown = json.loads("".join(lines))
    assert code == 0 and shown["inputs"]["old_logprobs"] and shown["worked"] and shown["expected"]
    rounded = answers | {case["id"]: {"loss": case["expected"]["loss"] + 1e-7}}
    code, lines = run(rounded)
    assert code == 1 and lines[-1].endswith(f"{case['id']}: right in the tolerance of --float32 alone")
    assert run(rounded, "--float32")[0] == 0
