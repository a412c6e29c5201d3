"""examples/model_rewards.py: a judge as the reward of any script."""

import math

import model_rewards
import pytest
from transformers import AutoModelForCausalLM

from common.errors import InputError
from rows import TEMPLATE, make_tokenizer
from small_models import small_model


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_judge_says_how_likely_yes_is(template, tmp_path, monkeypatch):
    tokenizer = make_tokenizer(template)
    small_model(tmp_path, AutoModelForCausalLM, "llama", tokenizer, vocab_size=len(tokenizer), hidden_size=32)
    monkeypatch.setenv("JUDGE", str(tmp_path))
    seen = []

    def see(module, inputs, options, output):
        seen.append((options["input_ids"], output.logits[0, -1]))

    monkeypatch.setattr(model_rewards, "GRADE", "{question}|{answer}|{gold}")
    model_rewards.load_judge.cache_clear()
    model_rewards.load_judge()[1].register_forward_hook(see, with_kwargs=True)
    told, blind = model_rewards.judge(["2+2?"], ["4"], gold=["4"]) + model_rewards.judge(["2+2?"], ["4"])
    texts = ["2+2?|4|\nThe right answer is 4.\n", "2+2?|4|"]
    for value, text, (ids, logits) in zip((told, blind), texts, seen, strict=True):
        text = f"[user]{text}[end][assistant]" if template else text
        assert "".join(tokenizer.convert_ids_to_tokens(ids[0])) == text
        yes, no = (sum(math.exp(logits[tokenizer.convert_tokens_to_ids(x)]) for x in pair) for pair in ("yY", "nN"))
        assert value == pytest.approx(yes / (yes + no), rel=1e-4)


def test_a_judge_that_is_not_named_is_asked_for(monkeypatch):
    monkeypatch.delenv("JUDGE", raising=False)
    model_rewards.load_judge.cache_clear()
    with pytest.raises(InputError, match="JUDGE must name"):
        model_rewards.judge(prompts=["a"], completions=["b"])
