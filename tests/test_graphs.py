"""The fixed cache of common/shortcuts/graphs.py, without graphs on a CPU: tokens and log-probs are as without it."""

import pytest
import torch
from transformers import DynamicCache

import common.shortcuts.graphs
from common.batches import left_pad
from common.generation import decode, sampling_config, seeded
from common.harness import gpu_probes, probes
from common.harness.gpu_probes import graphs_are_exact, nearer
from common.masked import completion_mask
from common.shortcuts.graphs import FixedLayer, OneTokenByGraph, widen
from small_models import ARCHITECTURES, random_policy

MORE = {
    "qwen3": dict(num_key_value_heads=2, head_dim=8),
    "gemma2": dict(num_key_value_heads=2, head_dim=8, sliding_window=4),
    "gemma3_text": dict(num_key_value_heads=2, head_dim=8, sliding_window=4),
    "olmo2": dict(num_key_value_heads=2),
    "phi3": dict(num_key_value_heads=2),
    "gpt_neox": {},
    "granite": dict(num_key_value_heads=2),
    "bloom": dict(n_head=4, n_layer=2),
    "qwen3_moe": dict(
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}
PROMPTS = {
    "padded": [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]],
    "equal lengths": [[5, 6, 7], [8, 9, 10]],
    "one padded, whose rows end first": [[5, 6, 7, 8], [4]],
}


def sample(policy, prompts, graphs, temperature=1.0, length=40, n=4, seed=0):
    """Completions and log-probs by either loop, and the batch that the training forward takes."""
    ids, mask = left_pad(prompts, 0, torch.device("cpu"))
    config = sampling_config(policy, temperature, 1.0, length)
    inputs = dict(input_ids=ids, attention_mask=mask.long(), generation_config=config)
    with seeded(seed, torch.device("cpu")):
        own = dict(n=n, head_is_last=policy.head_is_last, graphs=graphs)
        completions, logprobs = policy.lm.generate(**inputs, custom_generate=decode, **own)
    batch = {"prompts": ids.repeat_interleave(n, dim=0), "prompt_mask": mask.repeat_interleave(n, dim=0)}
    batch |= {"completions": completions, "completion_mask": completion_mask(completions, policy.stop_tokens)[0]}
    return completions, logprobs, batch


@pytest.fixture
def narrow(monkeypatch):
    """The cache grows every few tokens."""
    monkeypatch.setattr(common.shortcuts.graphs, "ROOM", 6)


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *MORE])
@torch.no_grad()
def test_log_probs_and_tokens_are_those_without_it(name, prompts, narrow):
    policy = random_policy(name, **MORE.get(name, {}))
    policy.stop_tokens = list(range(2, 40, 5))  # one of five: rows end at different places, and are dropped
    greedy = [sample(policy, prompts, graphs, temperature=0)[0] for graphs in (False, True)]
    assert torch.equal(*greedy)
    completions, sampled, batch = sample(policy, prompts, True)
    assert completions.shape[1] > 4 and batch["completion_mask"].sum(dim=1).unique().numel() > 2
    logprobs, _ = policy(batch)
    assert float((logprobs - sampled).abs().max()) < 1e-5


def test_the_draws_do_not_depend_on_the_kind_of_cache(narrow):
    policy = random_policy("qwen2")
    policy.stop_tokens = list(range(2, 40, 5))
    plain, fixed = (sample(policy, PROMPTS["padded"], graphs)[:2] for graphs in (False, True))
    assert torch.equal(plain[0], fixed[0]) and torch.allclose(plain[1], fixed[1], atol=1e-5)


def test_no_token_copies_the_cache_or_changes_its_addresses():
    policy, seen = random_policy("qwen2"), []
    run = OneTokenByGraph.run

    def watched(self):
        cache = [x for layer in self.layers for x in (layer.keys, layer.values)]
        seen.append([x.data_ptr() for x in (self.tokens, self.mask, self.positions, self.at, *cache)])
        return run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneTokenByGraph, "run", watched)
        policy.stop_tokens = [1000]  # no row ends, which would move the others
        sample(policy, PROMPTS["padded"], True, length=24)
    assert len(seen) > 10 and all(addresses == seen[0] for addresses in seen)


def test_what_was_recorded_is_not_replayed_once_the_cache_has_another_shape():
    """Its kernels read where nothing is any more. `logits` stand for a graph, which a CPU does not have."""
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    start = torch.ones(2, 3).long(), torch.full((2, 1), 3)
    token = OneTokenByGraph(lambda inputs: "run", cache, *start, n=2, most=4 * common.shortcuts.graphs.ROOM)
    token.logits = "recorded"
    token.select(torch.tensor([0, 3]))
    assert token(torch.zeros(2, 1).long()) == "run" and (token.next, token.left) == (
        4,
        4 * common.shortcuts.graphs.ROOM - 1,
    )
    token.logits, token.next = "recorded", token.mask.shape[1]
    assert token(torch.zeros(2, 1).long()) == "run"


def test_the_cache_is_freed_at_the_end(monkeypatch):
    caches, close = [], OneTokenByGraph.close
    monkeypatch.setattr(OneTokenByGraph, "close", lambda self: caches.append(self.cache) or close(self))
    sample(random_policy("qwen2"), PROMPTS["padded"], True, length=4)
    assert caches and not caches[0].layers


def test_under_autocast_the_fixed_cache_is_what_attention_computes_with(monkeypatch):
    dtypes, close = set(), OneTokenByGraph.close
    monkeypatch.setattr(
        OneTokenByGraph, "close", lambda self: dtypes.update(layer.keys.dtype for layer in self.layers) or close(self)
    )
    with torch.autocast("cpu", torch.bfloat16):
        sample(random_policy("qwen2"), PROMPTS["padded"], True, length=4)
    assert dtypes == {torch.bfloat16}


def test_a_column_to_come_is_unlike_any_key():
    """Zeros that are seen by mistake would dilute attention a little; the probe at the start must not overlook it."""
    keys = torch.randn(2, 1, 3, 4)
    wide = widen(keys, 2, 1, 6)
    assert torch.equal(wide[:, :, 1:4], keys.repeat_interleave(2, dim=0))
    assert wide[:, :, [0, 4, 5]].min() > 10 * keys.abs().max()


@pytest.mark.parametrize(
    "width, most, expected",
    [(128, 512, [384, 640]), (5, 20, [32]), (512, 4096, [768, 1152, 1728, 2592, 3888, 4608])],
)
def test_columns_grow_by_half_up_to_the_last_token(width, most, expected):
    """In multiples of 16, as kernels like it, and by ROOM at least: a graph is recorded for each."""
    token, found = object.__new__(OneTokenByGraph), []
    token.next, token.end = width, width + most
    while token.next < token.end:
        token.next = token.columns_to_have()
        found.append(token.next)
    assert found == expected


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_accepts_a_right_cache_and_refuses_a_wrong_one(dtype, name, monkeypatch):
    lm = random_policy(name).lm.to(dtype)
    assert graphs_are_exact(lm)
    with monkeypatch.context() as patch:  # transformers leaves out a mask that is all true
        patch.setattr(FixedLayer, "is_compileable", False)
        patch.setattr(gpu_probes, "rows_of_two_prompts", unpadded)
        assert not graphs_are_exact(lm)
    if dtype == torch.float32:
        with monkeypatch.context() as patch:  # the mask hides the newest token
            patch.setattr(FixedLayer, "get_seq_length", lambda self: self.at[0] - 1)
            assert not graphs_are_exact(lm)


def test_the_probe_takes_no_wrong_cache_for_rounding(monkeypatch):
    """Log-probs of a nearly uniform model hardly depend on what it sees."""
    lm = random_policy("qwen2", scale=1.0).lm.to(torch.bfloat16)
    assert graphs_are_exact(lm)
    monkeypatch.setattr(FixedLayer, "is_compileable", False)
    monkeypatch.setattr(gpu_probes, "rows_of_two_prompts", unpadded)
    assert not graphs_are_exact(lm)


def test_the_probe_knows_that_nothing_could_be_recorded(monkeypatch):
    close = OneTokenByGraph.close
    monkeypatch.setattr(OneTokenByGraph, "problem", None)  # what it was before comes back
    monkeypatch.setattr(
        OneTokenByGraph, "close", lambda self: setattr(OneTokenByGraph, "problem", "it waits") or close(self)
    )
    assert not graphs_are_exact(random_policy("qwen2").lm)


def unpadded(lm, original=probes.rows_of_two_prompts):
    batch = original(lm)
    return batch | {"prompt_mask": torch.ones_like(batch["prompt_mask"])}


def test_nearer_is_a_tenth_of_the_effect_and_never_true_of_nan():
    plain, wrong = torch.zeros(3), torch.tensor([0.0, 1.0, 0.5])
    assert nearer(plain + 0.09, plain, wrong) and not nearer(plain + 0.11, plain, wrong)
    assert not nearer(plain + torch.nan, plain, wrong) and not nearer(plain, plain, wrong + torch.nan)
