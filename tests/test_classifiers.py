"""harness/reward_models.py: a reward model scores what the policy wrote, at the end of the turn."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import grpo
from common.batches import given_batch
from harness.data import EMBEDDED
from harness.errors import InputError
from harness.reward_functions import load_rewards
from harness.reward_models import RewardModelReward, add_pad_token
from rows import gemma_tokenizer, pairs_from
from small_models import reward_model_of, save_reward_model, small_model
from testbed import embedded


def gemma_reward_model(folder, tokenizer):
    config = dict(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, hidden_size=32)
    return small_model(folder, AutoModelForSequenceClassification, "llama", tokenizer, **config)


def test_a_reward_model_is_trained_and_asked_at_the_end_of_the_turn(tmp_path):
    # Prompt, answer, <end_of_turn>, as the chat template renders them, and nothing behind.
    tokenizer = gemma_tokenizer()
    folder = gemma_reward_model(tmp_path / "rm", tokenizer)
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")
    assert text.endswith("4<end_of_turn>")
    with torch.no_grad():
        expected = float(stock(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits)
        (pair,) = pairs_from(tmp_path, tokenizer, ("2+2?", "4", "5"))
        trained = float(reward_model_of(folder)(given_batch([pair.prompt], [pair.chosen], "cpu")))
        loaded = RewardModelReward(str(folder), grpo.Args())
    (score,) = loaded(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert trained == pytest.approx(expected, abs=1e-6)
    assert score == pytest.approx(expected, abs=1e-6)


def test_a_tokenizer_that_pads_with_the_end_of_the_turn_gets_a_pad_token(tmp_path):
    """Others read the score at the last token that is not padding: that would be the one before the end of the turn."""
    tokenizer = gemma_tokenizer()
    tokenizer.pad_token = "<end_of_turn>"
    lm = reward_model_of(gemma_reward_model(tmp_path / "rm", tokenizer)).lm
    add_pad_token(lm, tokenizer)
    assert tokenizer.pad_token == "<|pad|>" and lm.config.pad_token_id == tokenizer.pad_token_id
    assert lm.get_input_embeddings().weight.shape[0] >= len(tokenizer)


def test_a_reward_model_reads_the_columns_that_its_chat_template_does(tmp_path):
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = "{{ 'tool' if tools else '' }}" + tokenizer.chat_template
    asked = RewardModelReward(str(gemma_reward_model(tmp_path / "rm", tokenizer)), grpo.Args())
    tools = [[{"type": "function", "function": {"name": "add"}}], None]
    with_tool, without = asked(prompts=["2+2?"] * 2, completions=["4"] * 2, truncated=[0, 0], tools=tools)
    (plain,) = asked(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert without == pytest.approx(plain, abs=1e-6) and abs(with_tool - plain) > 1e-4


def test_a_completion_that_was_cut_does_not_score_like_a_finished_one(tmp_path):
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", num_labels=1, pad_token_id=0)
    asked = RewardModelReward(str(folder), grpo.Args())
    scores = asked(prompts=["1+2?"] * 2, completions=["3", "3"], truncated=[False, True])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = tokenizer("1+2?").input_ids + tokenizer("3").input_ids
    with torch.no_grad():
        for end, score in zip(([tokenizer.eos_token_id], []), scores, strict=True):
            assert score == pytest.approx(float(model(torch.tensor([ids + end])).logits), abs=1e-6)
    assert abs(scores[0] - scores[1]) > 1e-3


def test_several_reward_models_have_weights(tmp_path):
    _, _, tokenizer, _ = embedded()
    paths = [tmp_path / name / "model" for name in ("a", "b")]
    for path in paths:
        save_reward_model(path, tokenizer)
    args = grpo.Args(reward=[f"rm:{path}" for path in paths] + ["accuracy"], reward_weights=[1.0, 0.5, 2.0])
    rewards = load_rewards(args)
    assert [(reward.name, reward.weight) for reward in rewards] == [("model", 1.0), ("model_2", 0.5), ("accuracy", 2.0)]


def test_what_is_no_reward_model_is_refused(tmp_path):
    _, _, tokenizer, _ = embedded()
    save_reward_model(tmp_path / "two", tokenizer, id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    options = dict(num_labels=2, ignore_mismatched_sizes=True)
    two = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two", **options)
    two.save_pretrained(tmp_path / "two")
    for path, message in ((EMBEDDED["embedded"], "score.weight"), (tmp_path / "no", "no"), (tmp_path / "two", "score")):
        with pytest.raises(InputError, match=message) as error:
            RewardModelReward(str(path), grpo.Args())
        assert "\n" not in str(error.value)
