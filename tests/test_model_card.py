"""The model card that a run writes beside its weights."""

import shlex

import pytest
import yaml

import grpo
from common.harness.command_line import parse_args


def card(argv, first=None, last=None):
    """Metadata and text of the card of a run of grpo.py after three steps."""
    from model_card import model_card

    _, header, text = model_card(parse_args(grpo.Args, argv), "grpo", 3, first, last).split("---\n", 2)
    return yaml.safe_load(header), text


def test_a_hub_id_is_the_base_model_and_its_licence_is_not_guessed():
    header, text = card(["--model_name_or_path", "Qwen/Qwen2.5-0.5B"])
    assert header["base_model"] == "Qwen/Qwen2.5-0.5B" and header["library_name"] == "transformers"
    assert "license" not in header and "evaluation" not in text


def test_the_embedded_model_has_no_base_on_a_hub():
    assert "base_model" not in card([])[0]


@pytest.mark.parametrize(("options", "library"), [([], "peft"), (["--lora_merge"], "transformers")])
def test_the_library_is_the_one_that_loads_the_folder(options, library):
    assert card(["--lora_rank", "4", *options])[0]["library_name"] == library


def test_base_model_licence_and_text_are_those_of_the_folder(tmp_path):
    known = (
        "---\nbase_model: some/model\nlicense: apache-2.0\nlicense_link: l\ndatasets: x\n---\n# Rounded\nto four bits\n"
    )
    (tmp_path / "README.md").write_text(known, encoding="utf-8")
    header, text = card(["--model_name_or_path", str(tmp_path)])
    assert (header["base_model"], header["license"], header["license_link"]) == ("some/model", "apache-2.0", "l")
    assert "datasets" not in header and text.endswith("## The base model\n\n### Rounded\nto four bits\n")


@pytest.mark.parametrize("text", ["", "no header", "---\na: [\n---\n", "---\n- a\n---\n", "---\nlicense: 3\n---\n"])
def test_no_readme_keeps_a_model_from_being_saved(text, tmp_path):
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert card(["--model_name_or_path", str(tmp_path)])[0]["tags"] == ["grpo"]


def test_the_command_gives_the_run_again():
    argv = ["--dataset", "a", "b c", "--no_normalize_std", "--learning_rate", "3e-6", "--reward_weights", "2"]
    _, text = card([*argv, "--output_dir", "x", "--resume"])
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("    accelerate")))
    assert words[:3] == ["accelerate", "launch", "grpo.py"] and "x" not in words
    assert parse_args(grpo.Args, words[3:]) == parse_args(grpo.Args, argv)


def test_pass_at_1_is_left_out_where_another_rule_is_trained_on(tmp_path):
    (tmp_path / "own.py").write_text("def own(**columns):\n    return []\n", encoding="utf-8")
    _, text = card(["--reward", f"{tmp_path}/own.py:own"], None, {"eval/pass@1": 0.0, "eval/reward": 0.5})
    assert "eval/pass@1" not in text and "| eval/reward |  | 0.5 |" in text


def test_evaluations_stand_beside_each_other():
    _, text = card([], {"eval/pass@1": 0.25}, {"eval/pass@1": 0.75, "eval/new": 1 / 3})
    assert "| eval/pass@1 | 0.25 | 0.75 |" in text and "| eval/new |  | 0.3333 |" in text
