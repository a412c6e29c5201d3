"""Packed forwards of fast/packing.py against plain ones; on a CPU their attention is a loop."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attention
from attention import pack
from fast import exact, packing, shortcuts
from fast.logprobs import prompt_indices
from fast.shortcuts import packing_is_exact
from common.pairs import Pair, pair_batches
from small_models import ARCHITECTURES, backward, random_lm
from sped_up import random_policy
from testbed import script

WRONG = ("bloom", "stablelm")  # position biases; layers that drop keyword arguments


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(packing, "varlen_attn", attention.varlen_attn)
    ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa_attention_forward)  # other tests may have registered another one
    packing.register_packed_sdpa()


@pytest.fixture(params=[True, False], ids=["torch 2.12", "torch 2.11"])
def groups_of_heads(request, monkeypatch):
    """`varlen_attn` with and without grouped heads."""
    if not request.param:

        def without(*args, scale, window_size):
            assert args[0].shape[1] == args[1].shape[1]
            return attention.varlen_attn(*args, scale=scale, window_size=window_size)

        monkeypatch.setattr(packing, "varlen_attn", without)
        monkeypatch.setattr(packing, "TAKES_GROUPED_HEADS", False)


def batch(widths=(9, 1, 5), lengths=(7, 1, 3, 2, 7, 7, 1, 1, 4, 5, 6, 2)):
    """Return shuffled rows of three prompts: one prompt of one token, completions of one token and of full width."""
    generator = torch.Generator().manual_seed(0)
    P, T, n = max(widths), max(lengths), len(lengths) // len(widths)
    prompts = torch.randint(3, 40, (len(widths), P), generator=generator).repeat_interleave(n, dim=0)
    prompt_mask = (torch.arange(P) >= P - torch.tensor(widths)[:, None]).repeat_interleave(n, dim=0)
    completions = torch.randint(3, 40, (len(lengths), T), generator=generator)
    completion_mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    made = {"prompts": prompts, "prompt_mask": prompt_mask, "completions": completions}
    made |= {"completion_mask": completion_mask}
    order = torch.randperm(len(lengths), generator=generator)
    return {name: column[order] for name, column in made.items()}


def results(policy, rows):
    """Return log-probs, and the gradient of these and the entropy."""
    logprobs, entropy = policy(rows, entropy_grad=True)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(1))
    return logprobs.detach(), torch.cat([x.flatten() for x in backward(policy.lm, logprobs + 0.1 * entropy, weights)])


def assert_packed_is_plain(policy, rows, prepare=pack):
    expected, gradient = results(policy, rows)
    prepare(policy)
    logprobs, other = results(policy, rows)
    assert float((logprobs - expected).abs().max()) < 1e-5
    assert float((other - gradient).norm() / gradient.norm()) < 1e-5


def pack_and_checkpoint(policy):
    pack(policy)
    policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy.lm.train()


@pytest.mark.parametrize("prepare", [pack, pack_and_checkpoint])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WRONG])
def test_packed_gradient_matches_plain_forwards(name, prepare, groups_of_heads):
    assert_packed_is_plain(random_policy(name), batch(), prepare)


def test_autocast_casts_attention_inputs(monkeypatch):
    """The GPU kernel takes only 16-bit types, and rotary embeddings return float32."""
    policy, dtypes = random_policy("qwen2"), set()

    def watched(*inputs, **options):
        dtypes.update(x.dtype for x in inputs[:3])
        return attention.varlen_attn(*inputs, **options)

    monkeypatch.setattr(packing, "varlen_attn", watched)
    pack(policy)
    with torch.autocast("cpu", torch.bfloat16):
        policy(batch())
    assert dtypes == {torch.bfloat16}


def test_forward_has_each_prompt_once(monkeypatch):
    policy, rows, passes = random_policy("qwen2"), batch(), []
    forward = policy.lm.base_model.forward
    monkeypatch.setattr(policy.lm.base_model, "forward", lambda **x: passes.append(x) or forward(**x))
    pack(policy)
    policy(rows)
    (only,) = passes
    tokens = 9 + 1 + 5 + int(rows["completion_mask"].sum()) - 12  # the last token of a completion predicts nothing
    assert only["input_ids"].shape == (1, tokens)
    queries = only["packed"].query_ends.diff().tolist()
    assert queries[:3] == [rows["prompt_mask"][i].sum() for i in firsts(rows)]
    assert 0 not in queries and only["packed"].longest_query == max(queries)


def firsts(rows):
    index = prompt_indices(rows)
    return [index.index(i) for i in dict.fromkeys(index)]


def test_packed_pairs_match_plain_forwards():
    """In dpo.py: the chosen completions, then the rejected ones of the same prompts."""
    pairs = [Pair([5, 6, 7], [8, 9, 2], [10, 2]), Pair([11], [12, 2], [13, 14, 15, 2]), Pair([5, 6], [2], [3, 2])]
    args = script("dpo").Args(micro_batch_size=8)
    (rows,) = pair_batches(pairs, args, torch.device("cpu"))
    assert_packed_is_plain(random_policy("qwen2"), rows)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2"])
def test_start_check_accepts_exact_packing(name):
    lm = random_lm(name)
    assert exact.is_exact(lm, packing.packed_token_states)
    assert packing_is_exact(lm.bfloat16())


def test_float32_is_never_packed():
    """The GPU kernel takes only 16-bit types, which autocast gives it."""
    lm = random_lm("qwen2")
    assert not packing_is_exact(lm)
    with torch.autocast("cpu", torch.bfloat16):
        assert packing_is_exact(lm)


def test_a_hybrid_is_never_packed(monkeypatch):
    """Its state would leak from one completion into the next, in Falcon-H1 by less than the check detects."""
    lm = random_lm("falcon_h1").bfloat16()
    asked = []
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    monkeypatch.setattr(shortcuts, "has_last_head", lambda lm: True)
    monkeypatch.setattr(shortcuts, "try_check", lambda check, lm: bool(asked.append(check.__name__)))
    assert not shortcuts.find_shortcuts(lm, True).packs and asked == ["has_plain_cache"]


@pytest.mark.parametrize("name", [*WRONG, "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_check_refuses_inexact_packing(dtype, name):
    lm = random_lm(name).to(dtype)
    if name == "gemma2":  # its soft cap needs eager attention
        lm.set_attn_implementation("eager")

    def is_exact(lm):
        return exact.is_exact(lm, packing.packed_token_states)

    assert not shortcuts.try_check(is_exact, lm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_start_check_refuses_a_leak(dtype, monkeypatch):
    """Each key index is off by one."""
    lm, original = random_lm("qwen2").to(dtype), packing.PackedLayout
    monkeypatch.setattr(packing, "PackedLayout", lambda keys, **rest: original(keys.roll(1), **rest))
    assert not exact.is_exact(lm, packing.packed_token_states)


def test_no_layer_inspects_a_signature(monkeypatch):
    """Inspecting took 0.25 ms in each layer of each forward."""
    policy = random_policy("qwen2")
    pack(policy)
    monkeypatch.setattr("inspect.signature", lambda function: pytest.fail("asked for"))
    policy(batch())
