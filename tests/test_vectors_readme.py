"""vectors/README.md and vectors/portable/: two files for other projects, and what they print."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from vectors import check
from vectors.generate import portable

VECTORS = pathlib.Path(__file__).resolve().parent.parent / "vectors"
PAGE = (VECTORS / "README.md").read_text(encoding="utf-8")
TEST = VECTORS / "portable" / "test_policy_losses.py"
CASES = check.load_cases()
YOURS = """
import torch

def policy_loss(new, old, advantages, mask, config):
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - config["clip_low"], 1 + config["clip_high"])
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if "dual_clip" in config:
        capped = torch.minimum(losses, -config["dual_clip"] * advantages)
        losses = torch.where(advantages < 0, capped, losses)
    return (losses * mask).sum()
"""


def block(mark):
    """The block of the page behind a comment."""
    return PAGE.partition(f"<!-- {mark} -->")[2].split("```")[1].partition("\n")[2]


@pytest.fixture
def ask(tmp_path):
    """Run the two files in an empty folder beside an adapter, and return what pytest prints."""

    def ask(adapter):
        for name in (TEST.name, "policy_losses.json"):
            shutil.copy(TEST.parent / name, tmp_path)
        (tmp_path / "yours.py").write_text(YOURS, encoding="utf-8")
        if adapter:
            (tmp_path / "adapter.py").write_text(adapter, encoding="utf-8")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "80"}
        environment.pop("CI", None)  # there pytest prints each failure's message twice
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
        keep = {"capture_output": True, "text": True, "timeout": 240}
        result = subprocess.run(command, cwd=tmp_path, env=environment, **keep)
        return re.sub(r" in [\d.]+s$", "", result.stdout, flags=re.MULTILINE).splitlines()

    return ask


# --- the two files ---


def test_the_portable_file_is_generated():
    file = json.loads((TEST.parent / "policy_losses.json").read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(portable.document()))
    assert [case["id"] for case in file["cases"]] == [case["id"] for case in wanted["cases"]]
    for case, other in zip(file["cases"], wanted["cases"], strict=True):
        assert case["loss"] == pytest.approx(other["loss"], rel=1e-12, abs=1e-13)
        assert case["wrong"].keys() == other["wrong"].keys()
        pairs = zip(check.flat(case["gradient"]), check.flat(other["gradient"]), strict=True)
        assert all(x == pytest.approx(y, rel=1e-12, abs=1e-13) for x, y in pairs)
    assert f"with {len(file['cases'])} cases of the policy's loss" in PAGE
    assert f"a checker with all {len(CASES)}." in PAGE


def test_the_portable_test_is_short():
    text = TEST.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported <= sys.stdlib_module_names | {"pytest"}


def test_missing_adapter_skips_everything(ask):
    assert ask("")[-1] == "20 skipped"


@pytest.mark.beside("vectors")
def test_the_adapter_of_the_page(ask):
    """The example passes, and is named if it divides by the micro-batch's tokens."""
    pytest.importorskip("torch")
    adapter = block("adapter")
    code = adapter.partition("def ")[2].partition("\n")[2].rstrip()
    assert len(code.splitlines()) == 10
    offered = 6
    assert ask(adapter)[-1] == f"{offered} passed, {20 - offered} skipped"
    local = adapter.replace("mask.sum()", "mask[rows].sum() / len(micro_batches)")
    lines = ask(local)
    assert lines[-1] == f"3 failed, {offered - 3} passed, {20 - offered} skipped"
    follows = "it follows: the mean over each micro-batch, then averaged"
    assert sum(line.endswith(follows) for line in lines) == 3


@pytest.mark.beside("vectors")
@pytest.mark.needs("trl")
def test_page_output_matches_trl(ask):
    adapter = (TEST.parent / "trl_adapter.py").read_text(encoding="utf-8")
    printed = ask(adapter)
    assert block("TRL").splitlines() == [line for line in printed if line]
    printed = ask(adapter.replace('"dapo"', '"bnpo"'))
    shown = [line for line in printed if line.startswith(("____", "loss "))]
    assert block("TRL with bnpo").splitlines() == [*shown, printed[-1]]


# --- another page ---


@pytest.mark.beside("docs")
def test_the_cases_of_corrections_exist():
    text = (VECTORS.parent / "docs" / "corrections.md").read_text(encoding="utf-8")
    subjects = {name.partition("/")[0] for name in CASES}
    named = set(re.findall(r"`([a-z]+/[a-z0-9-]+)`", text))
    named = {name for name in named if name.partition("/")[0] in subjects}
    assert named and named <= CASES.keys()
