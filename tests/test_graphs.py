"""fast/graphs.py: its static cache, run on a CPU without graphs, against the growing cache."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import fast.graphs
from common.masked import completion_mask
from fast import exact
from fast.exact import is_near
from fast.graphs import MIN_GROWTH, GraphDecodeStep, StaticCacheLayer, repeat_and_pad
from fast.shortcuts import graphs_are_exact
from small_models import ARCHITECTURES, SCALED, random_lm
from sped_up import left_pad, random_policy, seeded

PROMPTS = {
    "padded": [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]],
    "equal lengths": [[5, 6, 7], [8, 9, 10]],
    "one padded, whose rows end first": [[5, 6, 7, 8], [4]],
}
CASES = [("padded", name) for name in (*ARCHITECTURES, *SCALED)]
CASES += [(kind, name) for kind in [*PROMPTS][1:] for name in ("qwen2", "gpt2", "mistral", "gemma3_text")]


def sample(policy, prompts, graphs, temperature=1.0, length=40, n=4, seed=0):
    """Return completions and log-probs with either cache, and the batch for the training forward."""
    ids, mask = left_pad(prompts, 0)
    with seeded(seed):
        output = policy.sample(ids, mask, temperature, length, n, graphs=graphs)
    completions = output.sequences[:, ids.shape[1] :]
    batch = {"prompts": ids.repeat_interleave(n, dim=0), "prompt_mask": mask.repeat_interleave(n, dim=0)}
    batch |= {"completions": completions, "completion_mask": completion_mask(completions, policy.stop_tokens)[0]}
    return completions, output.logprobs, batch


@pytest.fixture
def narrow(monkeypatch):
    """Let the cache grow every few tokens."""
    monkeypatch.setattr(fast.graphs, "MIN_GROWTH", 6)


@pytest.mark.parametrize("kind, name", CASES)
@torch.no_grad()
def test_static_cache_matches_the_growing_one(kind, name, narrow):
    policy, prompts = random_policy(name), PROMPTS[kind]
    policy.stop_tokens = list(range(2, 40, 5))  # one token in five, so that rows end early and are dropped
    greedy = [sample(policy, prompts, graphs, temperature=0)[0] for graphs in (False, True)]
    assert torch.equal(*greedy)
    found = (sample(policy, prompts, True, seed=seed) for seed in range(9))
    _, sampled, batch = next(one for one in found if one[0].shape[1] > 4)
    assert batch["completion_mask"].sum(dim=1).unique().numel() > 2
    logprobs, _ = policy(batch)
    assert float((logprobs - sampled).abs().max()) < 1e-5


def test_samples_do_not_depend_on_cache(narrow):
    policy = random_policy("qwen2")
    policy.stop_tokens = list(range(2, 40, 5))
    plain, fixed = (sample(policy, PROMPTS["padded"], graphs)[:2] for graphs in (False, True))
    assert torch.equal(plain[0], fixed[0]) and torch.allclose(plain[1], fixed[1], atol=1e-5)


def test_decoding_keeps_the_cache_in_place():
    policy, seen = random_policy("qwen2"), []
    run = GraphDecodeStep.run

    def watched(self):
        cache = [x for layer in self.layers for x in (layer.keys, layer.values)]
        seen.append([x.data_ptr() for x in (self.tokens, self.mask, self.position_ids, self.column_index, *cache)])
        return run(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphDecodeStep, "run", watched)
        policy.stop_tokens = [1000]  # no row ends, so none is dropped
        sample(policy, PROMPTS["padded"], True, length=24)
    assert len(seen) > 10 and all(addresses == seen[0] for addresses in seen)


def test_new_cache_shape_is_recorded_again():
    """Its kernels would read freed memory. `logits` stand for a graph, which a CPU does not have."""
    cache = DynamicCache()
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    start = torch.ones(2, 3).long(), torch.full((2, 1), 3)
    token = GraphDecodeStep(lambda **inputs: "run", cache, *start, n=2, max_new_tokens=4 * MIN_GROWTH, dtype=None)
    token.logits = "recorded"
    token.select(torch.tensor([0, 3]))
    assert token(torch.zeros(2, 1).long()) == "run" and (token.column, token.tokens_left) == (4, 4 * MIN_GROWTH - 1)
    token.logits, token.column = "recorded", token.mask.shape[1]
    assert token(torch.zeros(2, 1).long()) == "run"


class Looks(TorchDispatchMode):
    """Raise if code reads a number from a tensor: on a GPU that synchronizes, and cannot be recorded."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        asks = torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select
        assert function.overloadpacket not in asks, function
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("prompts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "gemma3_text", "gpt_neox"])
def test_a_step_does_not_synchronize(name, prompts, monkeypatch):
    policy, run = random_policy(name), GraphDecodeStep.run

    def watched(self):
        with Looks():
            return run(self)

    monkeypatch.setattr(GraphDecodeStep, "run", watched)
    sample(policy, prompts, True, length=12)


def test_cache_is_freed_at_end(monkeypatch):
    caches, close = [], GraphDecodeStep.close
    monkeypatch.setattr(GraphDecodeStep, "close", lambda self: caches.append(self.cache) or close(self))
    sample(random_policy("qwen2"), PROMPTS["padded"], True, length=4)
    assert caches and not caches[0].layers


def test_autocast_attention_reads_static_cache(monkeypatch):
    dtypes, close = set(), GraphDecodeStep.close
    monkeypatch.setattr(
        GraphDecodeStep, "close", lambda self: dtypes.update(layer.keys.dtype for layer in self.layers) or close(self)
    )
    with torch.autocast("cpu", torch.bfloat16):
        sample(random_policy("qwen2"), PROMPTS["padded"], True, length=4)
    assert dtypes == {torch.bfloat16}


def test_future_columns_match_no_key():
    """Zeros seen by mistake would only dilute attention a little, which the check at the start could miss."""
    keys = torch.randn(2, 1, 3, 4)
    wide = repeat_and_pad(keys, 2, 1, 6)
    assert torch.equal(wide[:, :, 1:4], keys.repeat_interleave(2, dim=0))
    assert wide[:, :, [0, 4, 5]].min() > 10 * keys.abs().max()


@pytest.mark.parametrize(
    "width, max_new_tokens, expected",
    [(128, 512, [384, 640]), (5, 20, [32]), (512, 4096, [768, 1152, 1728, 2592, 3888, 4608])],
)
def test_columns_grow_by_half(width, max_new_tokens, expected):
    """In multiples of 16, and by MIN_GROWTH at least, since each capacity needs a new graph."""
    token, found = object.__new__(GraphDecodeStep), []
    token.column, token.end = width, width + max_new_tokens
    while token.column < token.end:
        token.column = token.next_capacity()
        found.append(token.column)
    assert found == expected


@pytest.mark.parametrize("name, scale", [("qwen2", 4.0), ("gpt2", 4.0), ("qwen2", 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_check_refuses_a_wrong_cache(dtype, name, scale, monkeypatch):
    """The log-probs of a nearly uniform model hardly depend on its input: in bfloat16 only by rounding."""
    lm = random_lm(name, scale=scale).to(dtype)
    assert graphs_are_exact(lm)
    with monkeypatch.context() as patch:  # transformers drops a mask that is all true
        patch.setattr(StaticCacheLayer, "is_compileable", False)
        patch.setattr(exact, "probe_batch", unpadded)
        assert not graphs_are_exact(lm)
    if dtype == torch.float32:
        with monkeypatch.context() as patch:  # the mask hides the newest token
            patch.setattr(StaticCacheLayer, "get_seq_length", lambda self: self.column_index[0] - 1)
            assert not graphs_are_exact(lm)


def test_start_check_needs_a_recording(monkeypatch):
    close = GraphDecodeStep.close
    monkeypatch.setattr(GraphDecodeStep, "failure", None)  # restored at the end
    monkeypatch.setattr(
        GraphDecodeStep, "close", lambda self: setattr(GraphDecodeStep, "failure", "no memory") or close(self)
    )
    assert not graphs_are_exact(random_lm("qwen2"))


def unpadded(lm, original=exact.probe_batch):
    batch = original(lm)
    return batch | {"prompt_mask": torch.ones_like(batch["prompt_mask"])}


@pytest.mark.parametrize("dtype, share", [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_near_allows_little_and_no_nan(dtype, share):
    lm = random_lm("qwen2").to(dtype)
    plain, wrong = torch.zeros(3), torch.tensor([0.0, 1.0, 0.5])
    assert is_near(lm, plain + 0.9 * share * wrong, plain, wrong)
    assert not is_near(lm, plain + 1.1 * share * wrong, plain, wrong)
    assert not is_near(lm, plain + torch.nan, plain, wrong)
    assert not is_near(lm, plain, plain, wrong + torch.nan)
