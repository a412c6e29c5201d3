"""`rollout` of the scripts: the sampled distribution, its seed, calls of `generate`, stop tokens."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import GenerationConfig, PreTrainedModel

from common.load import load_policy
from small_models import IDS, random_lm
from testbed import SCRIPTS, embedded, script

TOKENIZER = SimpleNamespace(pad_token_id=0)


def rollout(lm, prompts, n, seed=0, name="grpo", temperature=1.0, top_p=1.0, **options):
    """Return a batch of prompts given as lists of token ids."""
    args = script(name).Args(**{"max_new_tokens": 20, "generate_batch_size": 0} | options)
    prompts = [SimpleNamespace(ids=list(ids)) for ids in prompts]
    return script(name).rollout(lm, TOKENIZER, prompts, n, temperature, top_p, (seed,), args)


@pytest.mark.parametrize("name", SCRIPTS)
def test_tokens_follow_the_softmax(name, monkeypatch):
    """trl#5783: near-greedy rollouts by somebody's top_k. Chi-square of 10,000 draws of one token.

    An unset top_k is 50 in transformers, so the vocabulary is larger.
    """
    monkeypatch.setitem(IDS, "vocab_size", 80)
    lm = random_lm("llama", scale=6.0)
    tokens = rollout(lm, [[5, 6, 7]], 10_000, name=name, temperature=1.3, max_new_tokens=1)["completions"]
    probs = (lm(torch.tensor([[5, 6, 7]])).logits[0, -1].detach() / 1.3).softmax(-1)
    counts = torch.bincount(tokens[:, 0], minlength=80)
    chi_square = float(((counts - 10_000 * probs) ** 2 / (10_000 * probs)).sum())
    assert chi_square < 132  # 79 degrees of freedom: mean 79, 0.9999 quantile 132.3


def test_top_p_and_greedy():
    lm = random_lm("llama", scale=1.5)
    probs, order = lm(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).sort(descending=True)
    nucleus = order[: int((probs.cumsum(0) < 0.3).sum()) + 1]
    sampled = rollout(lm, [[5, 6, 7]], 2000, top_p=0.3, max_new_tokens=1)["completions"]
    assert 1 < len(nucleus) < 20 and set(sampled.unique().tolist()) == set(nucleus.tolist())
    greedy = rollout(lm, [[5, 6, 7]], 1, temperature=0, max_new_tokens=1)["completions"]
    assert greedy.tolist() == [[int(order[0])]]


def test_batch_of_a_rollout():
    """Prompts are padded on the left, completions on the right; a stop token is part of its completion."""
    lm, stops = random_lm("qwen2", scale=1.0), [2, 7, 11, 13, 17]
    lm.generation_config.eos_token_id = stops
    batch = rollout(lm, [[5, 6, 8], [9]], 8)
    assert batch["prompts"].tolist() == [[5, 6, 8]] * 8 + [[0, 0, 9]] * 8
    assert batch["prompt_mask"].tolist() == [[True] * 3] * 8 + [[False, False, True]] * 8
    truncated = batch["truncated"].tolist()
    assert any(truncated) and not all(truncated)
    for row, mask, cut in zip(batch["completions"], batch["completion_mask"], truncated, strict=True):
        ids = row[mask].tolist()
        assert mask.tolist() == [True] * len(ids) + [False] * (len(mask) - len(ids))
        assert not set(ids[:-1]) & set(stops) and (ids[-1] in stops) != cut and (len(ids) == 20 or not cut)


def test_hostile_generation_config_is_ignored(tmp_path, capsys):
    # transformers 5 inherits each unset field from the checkpoint's generation_config (trl#5783, #6337, #6789).
    _, args, tokenizer, lm = embedded()
    assert "--fast" not in capsys.readouterr().out
    (stop,) = lm.generation_config.eos_token_id
    lm.generation_config = GenerationConfig(
        do_sample=True, top_k=2, top_p=0.1, temperature=0.1, repetition_penalty=1.5, no_repeat_ngram_size=2,
        suppress_tokens=[5, 6], min_new_tokens=9, forced_eos_token_id=3, eos_token_id=[stop, 7],
        bad_words_ids=[[8]], exponential_decay_length_penalty=(2, 3.0), stop_strings=None, renormalize_logits=True,
    )  # fmt: skip
    lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    args.model_name_or_path = str(tmp_path)
    _, loaded = load_policy(args, Accelerator(cpu=True))
    assert "without --fast" in capsys.readouterr().out  # only a model of one's own is slow without it
    assert set(loaded.generation_config.eos_token_id) == {stop, 7}  # trl#7039: all stop tokens of the file count
    loaded.generation_config.eos_token_id = [stop]
    _, _, _, clean = embedded()
    expected, found = (rollout(x, [[5, 6, 7, 8]], 32)["completions"] for x in (clean, loaded))
    assert torch.equal(found, expected)


def test_gradient_checkpointing_has_two_names(monkeypatch):
    """transformers 6 has only the first; older releases the second."""
    called = []
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        monkeypatch.setattr(PreTrainedModel, name, lambda self, kwargs, name=name: called.append((name, kwargs)))
    load_policy(script("grpo").Args(gradient_checkpointing=True), Accelerator(cpu=True))
    monkeypatch.setattr(PreTrainedModel, "activation_checkpointing_enable", None)
    load_policy(script("grpo").Args(gradient_checkpointing=True), Accelerator(cpu=True))
    kwargs = {"use_reentrant": False}
    assert called == [("activation_checkpointing_enable", kwargs), ("gradient_checkpointing_enable", kwargs)]


def test_rollout_with_gradient_checkpointing():
    # In training mode the layers drop the cache, but generate feeds single tokens (trl#3683): wrong tokens.
    _, _, _, lm = embedded()
    _, _, _, checkpointed = embedded(gradient_checkpointing=True)
    assert checkpointed.training and checkpointed.model.layers[0].gradient_checkpointing
    expected, found = (rollout(x, [[5, 6, 7, 8], [9, 10]], 4)["completions"] for x in (lm, checkpointed))
    assert torch.equal(found, expected)
    assert checkpointed.training


def test_rollout_depends_on_its_seed():
    # tt-metal#48829: the same noise on every replica makes duplicate completions.
    _, _, _, lm = embedded()
    first, again, other = (rollout(lm, [[5, 6, 7, 8], [9, 10]], 8, seed)["completions"].tolist() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", SCRIPTS)
def test_generate_batch_size_caps_calls(name, monkeypatch):
    # nanochat#758: a remainder that does not divide was silently lost.
    _, _, _, lm = embedded()
    calls, generate = [], lm.generate
    monkeypatch.setattr(lm, "generate", lambda **kw: calls.append(len(kw["input_ids"])) or generate(**kw))
    batch = rollout(lm, [[5, 6 + i] for i in range(5)], 4, name=name, generate_batch_size=10)
    assert calls == [2, 2, 1]
    assert len(batch["completions"]) == 20
    assert batch["prompts"][:, 1].tolist() == [6 + i for i in range(5) for _ in range(4)]  # rows of a prompt adjacent
