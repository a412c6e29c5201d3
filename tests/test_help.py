"""docs/watch.md and docs/fork.md: their commands and code do what the pages say."""

import json
import re
import shlex

import pytest
import torch

from common.run import Exit
from testbed import ALL, ROOT, script

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("watch", "fork")}
SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 1 --eval_samples 4".split()


def blocks(page, kind):
    """The code blocks of one kind in a page, without the indentation of a list."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def arguments_of(page, command):
    """The script and the arguments of the one command of a page, in a block or a sentence, that starts like this."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:python )?\w+\.py --[^`]+)`", PAGES[page])
    lines = [line.removeprefix("python ") for line in lines]
    (line,) = [line for line in lines if line == command or line.startswith(f"{command} ")]
    name, *arguments = shlex.split(line, comments=True)
    assert name.removesuffix(".py") in ALL
    return name.removesuffix(".py"), arguments


def run(page, command, folder, steps, *more):
    """The rows of metrics.jsonl of a small run of a command of a page; it is evaluated only if it does not train."""
    name, arguments = arguments_of(page, command)
    with pytest.MonkeyPatch.context() as patch:
        if steps:
            patch.setattr(script(name), "evaluate", lambda *arguments: ({}, []))
        script(name).main([*arguments, *more, *SMALL, "--max_steps", str(steps), "--output_dir", str(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# --- docs/watch.md: the commands provoke what they are there for ---


@pytest.mark.parametrize(
    "command, steps, symptom",
    [
        ("grpo.py --learning_rate 1e-7", 2, lambda row: row["optim/grad_norm"] > 0.3 and row["policy/kl_ref"] < 1e-6),
        ("grpo.py --reward format", 1, lambda row: row["advantage/zero_groups"] == 1 and row["optim/grad_norm"] == 0),
        ("grpo.py --kl_coef 0", 1, lambda row: abs(row["optim/loss"]) < 1e-6 < row["optim/grad_norm"]),
        ("grpo.py --num_minibatches 4", 1, lambda row: row["policy/ratio_max"] > 1 and row["policy/approx_kl"] > 0),
        ("grpo.py --learning_rate 1e-2", 2, lambda row: row["policy/kl_ref"] > 1 and row["reward/accuracy"] < 0.1),
        ("grpo.py --max_new_tokens 16", 1, lambda row: row["completion/truncated"] > 0.2 > row["reward/accuracy"]),
    ],
)
def test_a_command_provokes_its_symptom(command, steps, symptom, tmp_path):
    last = run("watch", command, tmp_path, steps)[-1]
    assert last["step"] == steps and symptom(last)


def test_divergence_prints_its_line(tmp_path):
    with pytest.raises(Exit) as error:
        run("watch", "grpo.py --learning_rate 1e30", tmp_path, 2)
    assert f"grpo.py: error: {error.value}\n" in PAGES["watch"]


# --- docs/fork.md: its code ---


def test_a_reward_gets_its_gold(tmp_path):
    (tmp_path / "near.py").write_text(blocks("fork", "python")[1], encoding="utf-8")
    words = f"--reward accuracy {tmp_path}/near.py:near --reward_weights 1 0.2 --max_steps 1".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script("grpo"), "evaluate", lambda *arguments: ({}, []))
        script("grpo").main([*words, *SMALL, "--output_dir", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(row["reward_terms"]["near"] for row in rows)
    assert all(row["reward_terms"]["near"] == 1 for row in rows if row["reward_terms"]["accuracy"])


def test_a_step_elsewhere_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    found = {}
    exec(blocks("fork", "python")[2], found)
    batch, lm = found["batch"], found["lm"]
    for row in (0, 8):
        ids = torch.cat([batch["prompts"][row][batch["prompt_mask"][row]], batch["completions"][row]])[None]
        kept = batch["completion_mask"][row]
        logits = lm(ids).logits[0, -len(kept) - 1 : -1].log_softmax(-1)
        alone = logits.gather(-1, batch["completions"][row][:, None])[:, 0]
        assert torch.allclose(found["logprobs"][row][kept], alone[kept], atol=1e-5)
    assert len(found["rewards"].unique()) == 2
    assert any(weight.grad is not None and weight.grad.any() for weight in lm.parameters())
