"""vectors/: scripts against the cases, and files against the generator and the schema."""

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
RECIPES = ("rloo", "reinforce_pp", "ppo_penalty", "ppo_adaptive_kl", "entropy_bonus", "dual_clip", "token_mean")
# How many cases each script answers. Its functions and options decide which, not its name.
ANSWERED = {"grpo": 38, "dapo": 39, "dcpo": 23, "dr_grpo": 35, "gspo": 32, "ppo": 40, "dpo": 7, "reward_model": 3}
ANSWERED |= {"rloo": 19, "reinforce_pp": 33, "ppo_penalty": 16, "ppo_adaptive_kl": 5, "entropy_bonus": 40}
ANSWERED |= {"dual_clip": 38, "token_mean": 42}


@functools.cache
def answers(name, dtype):
    """Return {case: answer} of a script or a recipe, without what it does not offer."""
    module = script(name) if name in ALL else recipes.load(recipes.made(name), name)
    found = {}
    for case_id, case in CASES.items():
        answer = script_answers.answer(module, case, dtype)
        if "not_offered" not in answer:
            found[case_id] = answer
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", [*ALL, *RECIPES])
def test_scripts_answer_the_cases(name, dtype):
    """The count catches a script whose functions were renamed, so that it answers fewer cases."""
    if name not in ANSWERED and not answers(name, dtype):
        pytest.skip("none of the cases is about what this script computes")
    assert len(answers(name, dtype)) >= ANSWERED.get(name, 1)
    wrong = {}
    for case_id, answer in answers(name, dtype).items():
        verdict, text = check.compare(CASES[case_id], answer, str(dtype).removeprefix("torch."))
        if verdict not in (check.SAME, check.PART):  # a script counts only what it needs
            wrong[case_id] = f"{verdict} {text}"
    assert wrong == {}


def test_entropy_selection_is_not_offered():
    """Cases without entropies were multiplied by 0 for it, and the suite failed."""
    old = 'micro["old_logprobs"], _ = completion_logprobs(model, micro, args)'
    new = 'micro["old_logprobs"], micro["h"] = completion_logprobs(model, micro, args)'
    loss = "loss = (losses * token_weights(mask, totals, args)).sum()"
    text = (ROOT / "grpo.py").read_text(encoding="utf-8")
    assert old in text and loss in text
    text = text.replace(old, new).replace(loss, loss.replace("(losses", '(losses * (micro["h"] > 0.05)'))
    fork, original = recipes.load(text, "selects_by_entropy"), script("grpo")
    case = CASES["policy/grpo"]
    assert "not_offered" not in script_answers.answer(original, case, torch.float64)
    assert "entropies" in script_answers.answer(fork, case, torch.float64)["not_offered"]


# --- the files ---


def nearly_equal(left, right):
    """Return whether two files agree up to the last digits of a float64, which depend on the machine."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(nearly_equal(left[name], right[name]) for name in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(nearly_equal, left, right))
    if isinstance(left, float):
        return left == pytest.approx(right, rel=1e-12, abs=1e-13)
    return left == right


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_files_are_what_the_generator_writes(subject):
    file = json.loads((FOLDER / f"{subject.name}.json").read_text(encoding="utf-8"))
    assert nearly_equal(json.loads(json.dumps(document(subject))), file)


def test_every_file_has_a_subject():
    assert {path.stem for path in FOLDER.glob("*.json")} == {subject.name for subject in SUBJECTS}
    assert len(CASES) == sum(len(subject.cases) for subject in SUBJECTS)  # no id twice


SCHEMA = json.loads((ROOT / "vectors" / "schema.json").read_text(encoding="utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None)}


def fits(value, schema):
    """Return whether a value fits a schema, by the few words of JSON Schema that schema.json uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    types = schema.get("type", list(TYPES))
    types = [types] if isinstance(types, str) else types
    if not any(isinstance(value, TYPES[name]) for name in types):
        return False
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        return False
    if isinstance(value, str):
        return bool(re.search(schema.get("pattern", ""), value))
    if isinstance(value, list):
        items = schema.get("items", {})
        return len(value) >= schema.get("minItems", 0) and all(fits(item, items) for item in value)
    if isinstance(value, dict):
        own, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        if set(schema.get("required", [])) - value.keys() or (others is False and value.keys() - own.keys()):
            return False
        return all(fits(item, own.get(name, others)) for name, item in value.items())
    return True


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_files_fit_the_schema(subject):
    file = json.loads((FOLDER / f"{subject.name}.json").read_text(encoding="utf-8"))
    assert fits(file, SCHEMA)
    for word in ("cases", "version"):
        assert not fits({name: part for name, part in file.items() if name != word}, SCHEMA)
    broken = copy.deepcopy(file)
    broken["cases"][0]["expected"] = {"loss": "a number"}
    assert not fits(broken, SCHEMA)
