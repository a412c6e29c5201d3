"""tools/names.py: hints on options of other projects, of earlier versions, and on misspelt ones."""

import ast
import importlib.util
import inspect
import pathlib
import re
import sys
from dataclasses import fields

import pytest
from transformers import TrainingArguments

import names
from harness.args import parse_args
from harness.errors import InputError
from testbed import ROOT, SCRIPTS, script


def error_of(name, words):
    with pytest.raises(InputError) as error:
        parse_args(script(name).Args, words.split())
    return str(error.value)


@pytest.mark.parametrize(
    "name, words, here",
    [
        ("grpo", "--num_generations 8", "use --group_size"),
        ("grpo", "--num-generations=8", "use --group_size"),
        ("grpo", "--beta 0.04", "use --kl_coef; with 0 no"),
        ("reward_model", "--beta 0.04", "--kl_coef, which this script does not have"),
        ("dpo", "--loss_type ipo", "use --loss;"),
        ("grpo", "--loss_type ipo", "choose the script"),  # a name with two rows, of which one is an option here
        ("grpo", "--loss_type sapo", "recipes.py sapo"),  # an option with this value
        ("grpo", "--bf16", "--mixed_precision bf16"),
        ("grpo", "actor_rollout_ref.actor.clip_ratio_low=0.2", "use --clip_low"),
        ("ppo", "+algorithm.kl_ctrl.kl_coef=0.1", "use --kl_coef; for a KL in the reward"),
        ("ppo", "--clip_ratio_c 3", "use --dual_clip"),  # the end of a key
        (
            "grpo",
            "--clip_ratio_c 3",
            "here it is --dual_clip, an option of a recipe: python examples/recipes.py dual_clip",
        ),
        ("dapo", "--dual_clip 3", "python examples/recipes.py dual_clip"),
        ("grpo", "--micro_batch_tokens 4096", "use --micro_batch_size"),  # of earlier versions
        ("dpo", "--rounds 3", "python examples/recipes.py online_dpo"),
        ("grpo", "algorithm.adv_estimator=gae", "run ppo.py"),
        ("grpo", "--vllm_mode colocate", "one engine"),  # vllm_*
        ("grpo", "--lerning_rate 1e-5", "did you mean --learning_rate?"),
        ("grpo", "--no_normalise_std", "did you mean --no_normalize_std?"),
        ("grpo", "--num_generation 8", "did you mean --num_generations? use --group_size"),
        ("ppo", "--lr 1e-6", "use --learning_rate"),  # not the critic's, whose key in verl ends so
        ("reward_model", "--temperature 1", "this script does not have it"),  # not that of an evaluation
        ("grpo", "--gae_lambda 1", "this script does not have it; only ppo.py has it"),
        ("grpo", "--gradient_accumulation_steps 4", "use --prompts_per_step"),
        ("dpo", "--gradient_accumulation_steps 4", "use --pairs_per_step"),
    ],
)
def test_an_unknown_option_gets_a_hint(name, words, here):
    error = error_of(name, words)
    assert error.startswith(f"unknown option {words.split()[0]}; ") and here in error
    assert "\n" not in error and len(error) < 250


@pytest.mark.parametrize("name", ["--frobnicate", "--path"])
def test_an_unknown_or_ambiguous_name_gets_no_hint(name):
    assert error_of("grpo", name) == f"unknown option {name} (--help lists the options)"


def test_many_options_of_trl_lead_to_the_page(tmp_path):
    (tmp_path / "trl.yaml").write_text("num_generations: 8\nbeta: 0\nepsilon: 0.2\nuse_vllm: true\n", encoding="utf-8")
    lines = error_of("grpo", f"--config {tmp_path / 'trl.yaml'}").splitlines()
    assert len(lines) == 5 and lines[-1].startswith('docs/run.md, "Coming from TRL"')


def test_each_unknown_option_has_a_line_and_what_follows_it_is_its_value():
    first, *others = error_of(
        "grpo", "--num_generations 8 --max_steps 2 --frobnicate -1 adv_estimator=gae"
    ).splitlines()
    assert first == "unknown option --num_generations; use --group_size"
    assert [line.partition(";")[0] for line in others] == [
        "unknown option --frobnicate",
        "unknown option adv_estimator=gae",
    ]


def test_without_tools_an_unknown_option_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "tools.names", None)  # importing it fails
    assert error_of("grpo", "--beta 0 --lam 1") == "unknown option --beta (--help lists the options)"


def options_of(*scripts):
    return {field.name for name in scripts for field in fields(script(name).Args)}


def test_each_row_has_an_option_or_says_what_to_do():
    assert all(len(row) == 5 and names.foreign_names(row) for row in names.ROWS)
    assert all(option or note for option, *_, note in names.ROWS)
    known = options_of(*SCRIPTS, "dpo", "reward_model") | names.RECIPES.keys()
    assert {option for option, *_ in names.ROWS} - known == {""}


def test_every_option_that_a_note_names_exists():
    known = options_of(*SCRIPTS, "dpo", "reward_model") | {"penalty_target"}  # an option of ppo_penalty
    known |= {"cpu", "multi_gpu", "mixed_precision", "config_file"}  # of `accelerate launch`
    notes = " ".join([*names.BEFORE.values(), *(row[-1] for row in names.ROWS)])
    mentioned = set(re.findall(r"--(?:no_)?(\w+)", notes))
    assert len(mentioned) > 20 and mentioned <= known


def recipes_named(text):
    return set(re.findall(r"examples/recipes\.py (\w+)", text))


@pytest.mark.beside("examples")
def test_every_recipe_that_a_hint_names_exists_and_has_the_option():
    notes = " ".join([*names.BEFORE.values(), *(row[-1] for row in names.ROWS)])
    recipes = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("examples/recipes/*.py")}
    assert recipes_named(notes) | set(names.RECIPES.values()) <= recipes.keys()
    for option, recipe in names.RECIPES.items():
        assert f"    {option}: " in recipes[recipe], recipe


@pytest.mark.beside("docs", "examples")
def test_the_table_for_users_of_trl_names_what_exists():
    page = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
    section = page.partition("\n## Coming from TRL\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    known = options_of(*SCRIPTS, "dpo", "reward_model") | {"mixed_precision"}
    assert len(rows) > 20
    for theirs, ours in rows:
        for option in re.findall(r"`(\w+)", theirs):
            assert names.hint_for(option, "", []) or option in known, option
        assert set(re.findall(r"--(?:no_)?(\w+)", ours)) <= known, ours
        assert all((ROOT / script).is_file() for script in re.findall(r"`(\w+\.py)\b", ours)), ours
    recipes = {path.stem for path in ROOT.glob("examples/recipes/*.py")}
    assert recipes_named(section) <= recipes


@pytest.mark.needs("trl")
@pytest.mark.parametrize(
    "config, scripts", [("grpo", SCRIPTS), ("dpo", ["dpo"]), ("reward", ["reward_model"]), ("model", ["grpo"])]
)
def test_every_field_of_a_configuration_of_trl_has_an_answer(config, scripts):
    """What it inherits from transformers too. Read as text: importing it takes seconds."""
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    own = [f"{folder}/trainer/{config}_config.py", f"{folder}/trainer/base_config.py"]
    declared = set()
    for file in [*own, inspect.getfile(TrainingArguments)]:
        for node in ast.walk(ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                declared |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    assert len(declared) > 100
    assert [name for name in sorted(declared - options_of(*scripts)) if not names.find_rows(name)] == []
