"""vectors/: each script on each case that concerns it, and the files against generator and schema."""

import copy
import functools
import json
import re

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
NO_SCRIPT = {
    # In all scripts a row whose tokens are masked is still a row,
    "splits/truncated-rows-left-out",
    "splits/truncated-rows-left-out-1-2",
    # and a row without a reward gets the mean of its group before a script sees it.
    "advantages/missing-reward",
    "advantages/rloo-missing-reward",
    "policy/grpo-kl-missing-rewards",
    "splits/missing-rewards",
    "splits/totals-masked",
    # These are conventions of other libraries, for which no script has an option.
    "advantages/ddof-0",
    "advantages/dcpo-visits-ddof-1",
    "ppo/whiten-ddof-0",
    "preference/ipo-per-token",
    "preference/reference-free",
}

# Cases of which each script is asked. What it offers is found by its functions and options, not by its name.
ASKED = dict(grpo=42, dapo=46, dcpo=37, dr_grpo=35, gspo=32, ppo=43, dpo=7, reward_model=3, rloo=19, reinforce_pp=37)


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
    """A script whose functions are no longer what they were would be asked less."""
    assert len(answers(name, dtype)) >= ASKED.get(name, 1)
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
