"""docs/running.md, "After training": what it says to do with `model/` works, on the embedded model."""

import re

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
from common.errors import InputError
from common.harness.embedded import EMBEDDED
from testbed import ROOT

PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8").split("\n## After training\n")[1].split("\n## ")[0]
CHAT, PLAIN, MERGE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SMALL = "--max_steps 1 --prompts_per_step 4 --group_size 4 --eval_prompts 1 --eval_every 0 --learning_rate 1e-2".split()


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A function that makes runs/NAME by a step of grpo.py, in an empty folder that the snippets then run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "evaluate", lambda *arguments: ({}, None))
    return lambda name, *options: grpo.main([*SMALL, *options, "--output_dir", f"runs/{name}"])


def greedy(folder, prompt):
    """The answer by a plain loop over the logits."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    start = tokens.shape[1]
    with torch.no_grad():
        while tokens[0, -1] != tokenizer.eos_token_id and tokens.shape[1] < start + 24:
            tokens = torch.cat([tokens, lm(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokenizer.decode(tokens[0, start:], skip_special_tokens=True)


def test_a_model_answers_plain_text_and_messages(trained, capsys):
    trained("first")
    exec(PLAIN, {})
    assert capsys.readouterr().out.strip().endswith(greedy("runs/first/model", "8+9+3+1+3?").strip())
    tokenizer = AutoTokenizer.from_pretrained("runs/first/model")
    tokenizer.chat_template = TEMPLATE
    AutoModelForCausalLM.from_pretrained("runs/first/model").save_pretrained("runs/sums/model")
    tokenizer.save_pretrained("runs/sums/model")
    code = CHAT.replace("What is 27 + 46?", "27+46?")  # the embedded model knows no other characters
    assert code != CHAT
    exec(code, {})
    assert capsys.readouterr().out.strip().endswith(greedy("runs/sums/model", "27+46?").strip())


@pytest.mark.needs("peft")
def test_an_adapter_is_merged_into_the_model_that_was_trained(trained):
    trained("lora", "--lora_rank", "4")
    with pytest.raises(InputError, match="--model_name_or_path runs/lora/model: holds a PEFT adapter"):
        trained("more", "--model_name_or_path", "runs/lora/model")
    exec(MERGE, {})
    trained("more", "--model_name_or_path", "runs/lora/merged", "--lora_rank", "2")
    prompt = AutoTokenizer.from_pretrained("runs/lora/merged")("8+9+3+1+3?", return_tensors="pt")
    with torch.no_grad():
        merged, base = (
            AutoModelForCausalLM.from_pretrained(x)(**prompt).logits for x in ("runs/lora/merged", EMBEDDED)
        )
        adapted = transformers.pipeline("text-generation", "runs/lora/model").model(**prompt).logits
    assert torch.allclose(merged, adapted, atol=1e-5) and not torch.allclose(merged, base, atol=1e-4)
