"""Classifiers of ppo.py and reward_model.py: a reward model scores what the policy wrote, at the end of the turn."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from common.errors import InputError
from common.data import load_prompts
from common.embedded import EMBEDDED
from common.model import load_tokenizer
from rows import gemma_tokenizer, pairs_from
from small_models import learned, refused, reward_model_of, save_reward_model, small_model
from testbed import embedded, script


def test_a_reward_model_is_trained_and_asked_at_the_end_of_the_turn(tmp_path):
    # Through dialogues too: prompt, answer, <end_of_turn>, as the chat template renders them, and nothing behind.
    tokenizer = gemma_tokenizer()
    config = dict(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, hidden_size=32)
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", tokenizer, **config)
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")
    assert text.endswith("4<end_of_turn>")
    with torch.no_grad():
        expected = float(stock(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits)
        (pair,) = pairs_from(tmp_path, tokenizer, ("2+2?", "4", "5"))
        trained = reward_model_of(folder)(script("reward_model").pair_batch([pair], "cpu"))
    asked = learned(folder)
    (score,) = asked.function(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert float(trained[0]) == pytest.approx(expected, abs=1e-6) and score == pytest.approx(expected, abs=1e-6)


def test_a_tokenizer_that_pads_with_the_end_of_the_turn_gets_a_pad_token(tmp_path):
    """The score is read at the last token that is not padding: that would be the one before the end of the turn."""
    tokenizer = gemma_tokenizer()
    tokenizer.pad_token = "<end_of_turn>"
    config = dict(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, hidden_size=32)
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", tokenizer, **config)
    args = script("reward_model").Args(model_name_or_path=str(folder))
    tokenizer = load_tokenizer(args)
    assert tokenizer.pad_token == "<end_of_turn>" != tokenizer.eos_token
    model = script("reward_model").load_reward_model(args, tokenizer)
    assert tokenizer.pad_token == "<|pad|>" and model.lm.config.pad_token_id == tokenizer.pad_token_id


def test_a_reward_model_reads_the_columns_that_its_chat_template_does(tmp_path):
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = "{{ 'tool' if tools else '' }}" + tokenizer.chat_template
    config = dict(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, hidden_size=32)
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", tokenizer, **config)
    asked = learned(folder)
    tools = [[{"type": "function", "function": {"name": "add"}}], None]
    with_tool, without = asked.function(prompts=["2+2?"] * 2, completions=["4"] * 2, truncated=[0, 0], tools=tools)
    (plain,) = asked.function(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert without == pytest.approx(plain, abs=1e-6) and abs(with_tool - plain) > 1e-4


def test_a_completion_that_was_cut_does_not_score_like_a_finished_one(tmp_path):
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", num_labels=1, pad_token_id=0)
    scores = learned(folder).function(
        prompts=["1+2?"] * 3, completions=["3", "3<eos>", "3<pad>"], truncated=[False, True, True]
    )
    with torch.no_grad():
        tokenizer, model = (
            AutoTokenizer.from_pretrained(folder),
            AutoModelForSequenceClassification.from_pretrained(folder),
        )
        prompt, three, unknown = tokenizer("1+2?").input_ids, tokenizer("3").input_ids, [tokenizer.unk_token_id]
        for completion, score in zip(([tokenizer.eos_token_id], unknown * 5, unknown * 5), scores, strict=True):
            expected = float(model(torch.tensor([prompt + three + completion])).logits)
            assert score == pytest.approx(expected, abs=1e-6)
    assert abs(scores[0] - scores[1]) > 1e-3


def test_a_table_of_positions_has_room_for_the_longest_completion(tmp_path):
    """Of one position too few it would be known in the middle of a run, when a completion is that long."""
    longest = 4 + 64  # the prompt of `learned`, and ppo's --max_new_tokens
    sizes = dict(n_embd=16, num_labels=1, pad_token_id=0)
    for name, positions in (("short", longest - 1), ("enough", longest)):
        small_model(tmp_path / name, AutoModelForSequenceClassification, "gpt2", n_positions=positions, **sizes)
    assert "positions for 67 tokens, rows may have 68" in refused(learned, tmp_path / "short")
    score = learned(tmp_path / "enough").function
    assert len(score(prompts=["1+2?"], completions=["1" * 63], truncated=[False])) == 1  # and the end token
    with pytest.raises(InputError, match="positions for 68 tokens, rows may have 69"):
        score(prompts=["1+2?"], completions=["1" * 64], truncated=[False])


@pytest.mark.parametrize("change, message", [("eos", "no EOS"), ("pad", "pad token other than <eos>"), ("unk", "know")])
def test_a_reward_model_whose_tokenizer_does_not_fit_is_refused(change, message, tmp_path):
    _, args, tokenizer, _ = embedded("ppo")
    prompts, _, _ = load_prompts(args, tokenizer)
    if change == "unk":
        prompts[-1] = type(prompts[-1])(prompts[-1].ids, "déjà vu?", "1", {})
    elif change == "pad":
        tokenizer.pad_token = tokenizer.eos_token
    else:
        tokenizer.eos_token = None
    save_reward_model(tmp_path, tokenizer)
    args.reward_model_path = str(tmp_path)
    with pytest.raises(InputError, match=message):
        script("ppo").learned_reward(args, prompts, torch.device("cpu"))


def test_what_is_no_reward_model_is_refused(tmp_path):
    _, args, tokenizer, _ = embedded("ppo")
    prompts, _, _ = load_prompts(args, tokenizer)
    save_reward_model(tmp_path / "two", tokenizer, id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    for path, message in [
        (EMBEDDED, "score.weight"),
        (tmp_path / "no", "no such folder"),
        (tmp_path / "two", "not those of .*: score.weight"),
    ]:
        args.reward_model_path = str(path)
        with pytest.raises(InputError, match=message) as error:
            script("ppo").learned_reward(args, prompts, torch.device("cpu"))
        assert "\n" not in str(error.value)
