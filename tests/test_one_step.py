"""examples/one_step.py: its step by hand equals a step of grpo.py."""

import json
import re

import one_step
import pytest

import grpo


def test_step_by_hand_matches_a_run(tmp_path, capsys, monkeypatch):
    one_step.main()
    printed = capsys.readouterr().out
    assert not re.search(r"-0\.0*(?![\d.])", printed)
    loss, norm = map(float, re.search(r"means of both updates: (\S+), (\S+)", printed).groups())
    options = "--prompts_per_step 2 --group_size 4 --max_new_tokens 27 --num_epochs 2 --max_steps 1 --seed 51 --fast"
    monkeypatch.setattr(grpo, "evaluate", lambda *arguments: ({}, []))
    grpo.main([*options.split(), "--output_dir", str(tmp_path / "run")])
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert loss == pytest.approx(row["optim/loss"], abs=1e-4) and loss != 0
    assert norm == pytest.approx(row["optim/grad_norm"], abs=1e-3) and row["policy/clip_fraction_high"] > 0
