"""examples/model_rewards.py: a reward model and a judge as rewards of any script."""

import math

import model_rewards
import pytest
import torch
from transformers import AutoModelForCausalLM

import grpo
import ppo
from common.errors import InputError
from common.data import load_prompts
from common.rewards import load_rewards, score
from rows import TEMPLATE, make_tokenizer
from small_models import save_reward_model, small_model
from testbed import ROOT, embedded

FILE = ROOT / "examples" / "model_rewards.py"


def reward_of(name):
    """The function as --reward loads it: from the file, anew."""
    (reward,) = load_rewards(grpo.Args(reward=[f"{FILE}:{name}"]))
    return reward


def test_a_reward_model_scores_as_in_ppo(tmp_path, monkeypatch):
    _, args, tokenizer, _ = embedded("ppo")
    save_reward_model(tmp_path, tokenizer)
    prompts, _, _ = load_prompts(args, tokenizer)
    texts, truncated = ["#### 12", "7+5=12\n#### 12", "1", "12+"], [False, False, False, True]
    args.reward_model_path = str(tmp_path)
    expected = score(ppo.learned_reward(args, prompts, torch.device("cpu")), prompts[:4], texts, truncated)
    monkeypatch.setenv("REWARD_MODEL", str(tmp_path))
    reward = reward_of("reward_model")
    for _ in range(2):  # loaded, and kept
        assert score(reward, prompts[:4], texts, truncated).tolist() == pytest.approx(expected.tolist(), abs=1e-6)


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
    told, blind = model_rewards.judge(["2+2?"], ["4"], answer=["4"]) + model_rewards.judge(["2+2?"], ["4"])
    texts = ["2+2?|4|\nThe right answer is 4.\n", "2+2?|4|"]
    for value, text, (ids, logits) in zip((told, blind), texts, seen, strict=True):
        text = f"[user]{text}[end][assistant]" if template else text
        assert "".join(tokenizer.convert_ids_to_tokens(ids[0])) == text
        yes, no = (sum(math.exp(logits[tokenizer.convert_tokens_to_ids(x)]) for x in pair) for pair in ("yY", "nN"))
        assert value == pytest.approx(yes / (yes + no), rel=1e-4)


@pytest.mark.parametrize("name, variable", [("reward_model", "REWARD_MODEL"), ("judge", "JUDGE")])
def test_a_model_that_is_not_named_is_asked_for(name, variable, monkeypatch):
    monkeypatch.delenv(variable, raising=False)
    model_rewards.load_judge.cache_clear()
    with pytest.raises(InputError, match=f"the environment variable {variable} must name"):
        getattr(model_rewards, name)(prompts=["a"], completions=["b"], truncated=[False])
