"""docs/options.md says what the command line takes; docs/README.md leads to every page."""

import dataclasses
import pathlib
import re

import pytest

import options
from common.errors import InputError
from tools import script

ROOT = pathlib.Path(__file__).parent.parent

PAGE = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


def cells(name):
    (line,) = re.findall(rf"^\| `--{name}`(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]


def test_the_page_is_what_the_classes_say():
    assert options.written() == PAGE, "run python tools/options.py --write"


@pytest.mark.parametrize("name", options.SCRIPTS)
def test_every_option_of_a_script_is_there_once_with_its_default(name):
    for field in dataclasses.fields(script(name).Args):
        scripts, defaults, _, _ = cells(field.name)
        assert scripts != f"<br>not in {name}"
        own = re.search(rf"(?:^|<br>)[^:]*\b{name}\b[^:]*: (.*?)(?:<br>|$)", defaults)
        shown = own[1] if own else defaults.split("<br>")[0]
        value = getattr(script(name).Args(), field.name)
        if value is None or value == []:
            assert shown == "none"
        elif isinstance(value, bool):
            assert shown == ("on" if value else "off")
        else:
            word = shown.strip("`")
            assert ([word] if isinstance(value, list) else type(value)(word)) == value, field.name


@pytest.mark.parametrize(
    "name, cell",
    [
        ("seed", "whole number ≥ 0, < 4294967296"),
        ("adam_beta1", "number ≥ 0, < 1"),
        ("max_steps", "whole number ≥ 0<br>dpo, reward_model: whole number ≥ -1"),
        ("kl_estimator", "`k1`, `k2`, `k3`"),
        ("reward_weights", "number, or several"),
        ("gae_lambda_critic", "number ≥ 0, ≤ 1"),
        ("normalize_std", "switch"),
    ],
)
def test_values_and_bounds(name, cell):
    assert cells(name)[2] == cell


def test_a_bound_of_the_page_is_that_of_the_command_line():
    with pytest.raises(InputError, match=r"must lie in \[0, 1\)"):
        script("grpo").Args.parse(["--adam_beta1", "1"])
    assert script("grpo").Args.parse(["--no_normalize_std"]).normalize_std is False


def test_notes_in_parentheses_are_not_repeated_with_the_text_before_them():
    def fields(**texts):
        return {name: dataclasses.field(metadata={"parsed": {"help": text}}) for name, text in texts.items()}

    by_script = fields(grpo="rate (A: 1)", dapo="rate (B: 2)", gspo="rate", ppo="rate of the policy (C: 3)")
    found = "rate (A: 1)<br>dapo: (B: 2)<br>ppo: rate of the policy (C: 3)"
    assert options.said(by_script, options.help_text) == found


def test_the_contents_lead_to_every_page():
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)#]+)\)", text)
    pages = {path.name for kind in ("md", "html") for path in ROOT.glob(f"docs/*.{kind}")} - {"README.md"}
    assert pages - set(linked) == set() and len(linked) == len(set(linked))
    assert [name for name in linked if not (ROOT / "docs" / name).exists()] == []
