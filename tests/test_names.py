"""tools/names.py: what is said of an unknown option. test_refresh.py says when its table in the docs is due."""

import ast
import fnmatch
import importlib.util
import inspect
import pathlib
import re
from dataclasses import fields

import pytest
from transformers import TrainingArguments

import names
from common.errors import InputError
from common.harness.command_line import parse_args
from testbed import ROOT, SCRIPTS, script


@pytest.mark.parametrize(
    "name, option, here",
    [
        ("grpo", "--num_generations 8", ": here it is --group_size ("),
        ("grpo", "--num-generations=8", ": here it is --group_size ("),
        ("grpo", "--beta 0.04", ": here it is --kl_coef; 0: no reference is loaded ("),
        ("reward_model", "--beta 0.04", ": here it is --kl_coef, which this script does not have; 0: "),
        ("dpo", "--loss_type ipo", ": here it is --loss; sigmoid, ipo or robust ("),
        ("grpo", "--loss_type ipo", ": the choice of the script, as dapo.py ("),
        ("grpo", "--bf16", ": accelerate launch --mixed_precision bf16; "),
        ("grpo", "actor_rollout_ref.actor.clip_ratio_low=0.2", ": here it is --clip_low; "),
        ("ppo", "+algorithm.kl_ctrl.kl_coef=0.1", ": here it is --kl_coef; of ppo.py with --kl_in reward ("),
        ("grpo", "--frobnicate", " (--help lists the options)"),
        ("grpo", "--clip_ratio_c 3", ": here it is --dual_clip; "),
        ("grpo", "--lam 0.95", ": here it is --gae_lambda, which this script does not have; ppo.py"),
        ("ppo", "--lam 0.95", ": here it is --gae_lambda; ppo.py; 1 by default ("),
        ("grpo", "--gae_lambda 1", ": here it is --gae_lambda, which this script does not have; ppo.py"),
        ("dapo", "algorithm.filter_groups.enable=True", ": dapo.py, which always filters ("),
        ("dapo", "algorithm.filter_groups.max_num_gen_batches=10", ": here it is --max_sampling_rounds; dapo.py: "),
        ("grpo", "algorithm.adv_estimator=reinforce_plus_plus_baseline", ": REINFORCE++ with a baseline, python "),
        ("grpo", "algorithm.adv_estimator=reinforce_plus_plus", ": not here without the mean of the group; "),
        ("grpo", "--reward_model_path x", ": here it is --reward_model_path, which this script does not have; ppo.py"),
        ("dapo", "--overlong_buffer.len 4", ": here it is --overlong_cache; dapo.py with --overlong soft ("),
        ("ppo", "critic.model.path=x", ": here it is --critic_path; ppo.py: a reward model ("),
        ("grpo", "algorithm.adv_estimator=gae", ": ppo.py, with its critic ("),
        ("grpo", "--adv_estimator rloo", ": RLOO, python examples/recipes.py rloo ("),
        ("grpo", "--loss_agg_mode seq-mean-token-sum", ": the average of RLOO, python examples/recipes.py rloo ("),
        ("grpo", "--kl_loss_type mse", ": here it is --kl_estimator; kl is k1, mse k2, low_var_kl k3 ("),
        ("grpo", "--n_samples_per_prompt 8", ": here it is --group_size ("),
        ("grpo", "--vllm_mode colocate", ": there is one engine, which samples and trains ("),
        ("grpo", "--lerning_rate 1e-5", ": did you mean --learning_rate? ("),
        ("grpo", "--no_normalise_std", ": did you mean --no_normalize_std? ("),
        ("grpo", "--num_generation 8", ": did you mean --num_generations? here it is --group_size ("),
    ],
)
def test_a_name_of_trl_or_verl_is_answered_with_the_one_here(name, option, here):
    with pytest.raises(InputError) as error:
        parse_args(script(name).Args, option.split())
    assert str(error.value).startswith(f"unknown option {option.split()[0]}{here}") and "\n" not in str(error.value)


def test_what_tools_does_wrong_shows_and_without_the_file_an_unknown_option_is_one_line(tmp_path, monkeypatch):
    """Only a missing file means that tools/ was not copied. The line then names the first one alone."""
    monkeypatch.setattr(script("grpo"), "__file__", str(tmp_path / "grpo.py"))
    with pytest.raises(InputError) as error:
        parse_args(script("grpo").Args, ["--num_generations", "8", "--beta", "0"])
    assert str(error.value) == "unknown option --num_generations (--help lists the options)"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "names.py").write_text("import no_such_module\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        parse_args(script("grpo").Args, ["--num_generations", "8"])


def options_of(*scripts):
    return {field.name for name in scripts for field in fields(script(name).Args)}


def test_all_unknown_options_are_answered_at_once_as_the_page_shows():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    command, answer = re.search(r"^\$ python grpo\.py (.*)\ngrpo\.py: error: (.*)$", page, re.MULTILINE).groups()
    with pytest.raises(InputError) as error:
        parse_args(script("grpo").Args, command.split())
    assert str(error.value) == answer and answer.lower().count("unknown option") == 4


def test_what_follows_an_unknown_option_is_its_value_unless_it_is_an_option():
    words = ["--a_a", "-1", "--b_b=2", "3", "actor.c_c=4", "--d_d", "e.f_f=5"]
    shown = ["--a_a", "--b_b=2", "3", "actor.c_c=4", "--d_d", "e.f_f=5"]
    assert names.answer(words, {}) == "unknown " + ". Unknown ".join(f"option {word}" for word in shown)


def test_the_table_of_names_has_options_here_and_says_what_to_do_where_there_is_none():
    assert {row.here for row in names.NAMES} <= options_of(*SCRIPTS, "dpo", "reward_model") | {""}
    assert all(row.note for row in names.NAMES if not row.here)
    assert len({row[:4] for row in names.NAMES}) == len(names.NAMES)


@pytest.mark.needs("trl")
@pytest.mark.parametrize(
    "config, scripts", [("grpo", SCRIPTS), ("dpo", ["dpo"]), ("reward", ["reward_model"]), ("model", ["grpo"])]
)
def test_every_field_of_a_configuration_of_trl_has_an_answer(config, scripts):
    """What it inherits from transformers too. Read as text: importing it takes seconds."""
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    files = [
        f"{folder}/trainer/{config}_config.py",
        f"{folder}/trainer/base_config.py",
        inspect.getfile(TrainingArguments),
    ]
    declared = set()
    for file in files:
        for node in ast.walk(ast.parse(pathlib.Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                declared |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
    assert len(declared) > 100
    assert [name for name in sorted(declared - options_of(*scripts)) if not names.rows_of(name)] == []


def test_a_known_option_is_never_looked_up():
    """So a name that is an option of every script that can have it stands in no row."""
    common = set.intersection(*map(options_of, [*SCRIPTS, "dpo", "reward_model"]))
    assert not common & {key for row in names.NAMES for key in names.names(row)}


@pytest.mark.needs("trl")
def test_the_names_of_trl_are_those_of_its_configurations():
    (folder,) = map(pathlib.Path, importlib.util.find_spec("trl").submodule_search_locations)
    files = [*folder.glob("trainer/*_config.py"), folder / "scripts/utils.py", folder / "scripts/grpo.py"]
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in [*files, pathlib.Path(inspect.getfile(TrainingArguments))]
    )
    known = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    given = {key.partition("=")[0] for row in names.NAMES for key in row.trl.split()}
    gone = {"max_prompt_length", "warmup_ratio", "rpo_alpha"}  # of versions before
    gone |= {"num_ppo_epochs", "num_mini_batches", "local_rollout_forward_batch_size", "total_episodes", "cliprange"}
    gone |= {"cliprange_value", "lam", "vf_coef", "init_kl_coef", "response_length", "sft_model_path"}  # of its PPO
    assert {key for key in given if not fnmatch.filter(known, key)} == gone
