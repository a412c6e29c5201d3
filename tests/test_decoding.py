"""The decoding loop of fast/ against stock `generate`.

Greedy decoding and log-probs of sampled tokens over two dozen architectures are in test_architectures.py.
"""

import pytest
import torch
from accelerate import Accelerator

import fast.decoding
import grpo
from common.run import Exit
from fast import speed_up
from fast.decoding import race, sample, worth_dropping
from sped_up import left_pad, random_policy, seeded
from testbed import embedded, embedded_prompts

pytestmark = pytest.mark.beside("fast")


def generate(policy, n, stock=False, temperature=1.0, top_p=1.0, seed=1, prompts=None, length=24):
    """Completions (R, T) of the loop of fast/, or of stock `generate`."""
    ids, mask = left_pad(prompts or [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]], 0)
    with seeded(seed):
        output = policy.sample(ids, mask, temperature, length, n, stock, top_p=top_p)
    return output.sequences[:, ids.shape[1] :]


@pytest.fixture
def as_stock(monkeypatch):
    """Draw random numbers as stock `generate` does: one per token of the vocabulary, for all rows."""
    monkeypatch.setattr(fast.decoding, "sample", race)
    monkeypatch.setattr(fast.decoding, "worth_dropping", lambda *inputs: False)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mistral", "granite"])
@pytest.mark.parametrize("prompts", [None, [[5, 6, 7], [8, 9, 10]]], ids=["padded", "equal lengths"])
def test_equal_draws_equal_stock_generate(name, prompts, as_stock):
    policy = random_policy(name)
    policy.stop_tokens = list(range(2, 40, 5))  # one token in five: all rows end early, at different steps
    stock = generate(policy, 6, stock=True, prompts=prompts)
    assert len({tuple(row) for row in stock.tolist()}) > 6  # rows differ, so equality is a real check
    assert stock.shape[1] < 24
    assert torch.equal(generate(policy, 6, prompts=prompts), stock)


def test_top_p_reaches_the_loop(as_stock):
    policy = random_policy("qwen2", scale=1.0)
    tokens = generate(policy, 4, top_p=0.3)
    assert torch.equal(tokens, generate(policy, 4, stock=True, top_p=0.3))
    assert not torch.equal(tokens, generate(policy, 4))


def test_sampled_tokens_follow_the_softmax():
    # trl#5783: near-greedy rollouts under somebody's top_k and top_p. Chi-square of 10,000 draws of one token.
    policy = random_policy("llama", scale=1.5)
    tokens = generate(policy, 10_000, prompts=[[5, 6, 7]], length=1)
    probs = policy.lm(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).detach()
    counts = torch.bincount(tokens[:, 0], minlength=40)
    chi_square = float(((counts - 10_000 * probs) ** 2 / (10_000 * probs)).sum())
    assert chi_square < 80  # 39 degrees of freedom: mean 39, 0.9999 quantile 79.2


def test_cpu_draws_follow_the_probabilities():
    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0]).expand(20_000, 6)
    counts = torch.bincount(sample(probs)[:, 0], minlength=6).double()
    assert counts[[0, 2, 5]].sum() == 0
    expected = 20_000 * probs[0, [1, 3, 4]]
    assert float(((counts[[1, 3, 4]] - expected) ** 2 / expected).sum()) < 18.4  # 2 degrees of freedom, 0.9999


@pytest.mark.parametrize("drawn, token", [(0.0, 1), (1 - 2**-24, 3), (1.0, 3)])
def test_cpu_draws_at_the_ends(drawn, token, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda rows, *size, **options: torch.full((rows, 1), drawn))
    assert sample(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])).tolist() == [[token]]


def test_cpu_draws_over_large_vocabularies():
    # Summed in float32, 200,000 probabilities would be off by 1e-3: the CDF must accumulate in float64.
    probs = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0))
    probs = probs / probs.sum(dim=1, keepdim=True)
    assert (probs.cumsum(dim=1) - probs.double().cumsum(dim=1)).abs().max() < 1e-7
    torch.manual_seed(0)
    tokens = torch.cat([sample(probs) for _ in range(500)])[:, 0]
    assert float(tokens.double().mean()) == pytest.approx(100_000, abs=4 * 57_735 / 1000**0.5)


def test_nan_rows_leave_others_unchanged():
    probs = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    broken = probs.clone()
    broken[2] = float("nan")
    draws = []
    for table in (probs, broken):
        torch.manual_seed(1)
        draws.append(sample(table)[:, 0])
    assert draws[1].max() < 7 and draws[0][[0, 1, 3]].equal(draws[1][[0, 1, 3]])


def test_nan_logits_print_one_line():
    """On a GPU NaN makes `torch.multinomial` abort the process."""
    policy = random_policy("qwen2")
    policy.lm.get_input_embeddings().weight.data[7] = float("nan")  # a token of the first prompt
    with pytest.raises(Exit, match="sampling: log-probs are not finite"):
        generate(policy, 2)


def test_dropping_keeps_the_distribution(monkeypatch):
    policy = random_policy("llama", scale=1.5)
    dropped = generate(policy, 4000, prompts=[[5, 6, 7]], length=4, seed=2)
    monkeypatch.setattr(fast.decoding, "worth_dropping", lambda *inputs: False)
    kept = generate(policy, 4000, prompts=[[5, 6, 7]], length=4, seed=3)
    for t in range(4):
        a, b = (torch.bincount(x[:, t], minlength=40).double() for x in (kept, dropped))
        chi_square = float(((a - b) ** 2 / (a + b).clamp(min=1)).sum())
        assert chi_square < 80


def sped_up(**options):
    """(args, tokenizer, lm) with the embedded model."""
    _, args, tokenizer, lm = embedded(**options)
    speed_up(lm, Accelerator(cpu=True))
    return args, tokenizer, lm


def test_autocast_halves_the_cache(monkeypatch):
    """bfloat16 instead of float32 keeps the bits, since attention casts its inputs."""
    args, tokenizer, lm = sped_up(max_new_tokens=20)
    layers, plain = [], fast.decoding.GrowingCacheLayer

    def kept(layer, dtype):
        layers.append(plain(layer, dtype))
        return layers[-1]

    def sampled():
        with torch.autocast("cpu", torch.bfloat16):
            batch = grpo.rollout(lm, tokenizer, embedded_prompts()[:2], 4, 1.0, 1.0, (0,), args)
        return batch["completions"]

    monkeypatch.setattr(fast.decoding, "GrowingCacheLayer", kept)
    narrow, dtypes = sampled(), {x.dtype for layer in layers for x in (layer.keys, layer.values)}
    assert dtypes == {torch.bfloat16}
    monkeypatch.setattr(fast.decoding, "GrowingCacheLayer", lambda layer, dtype: kept(layer, layer.keys.dtype))
    wide = sampled()
    assert layers[-1].keys.dtype == torch.float32
    assert torch.equal(narrow, wide)


def test_finished_rows_are_not_computed(monkeypatch):
    args, tokenizer, lm = sped_up(max_new_tokens=64)
    rows = []
    base = lm.base_model
    forward = base.forward
    monkeypatch.setattr(base, "forward", lambda *a, **kw: rows.append(len(kw["input_ids"])) or forward(*a, **kw))
    batch = grpo.rollout(lm, tokenizer, embedded_prompts()[:2], 16, 1.0, 1.0, (0,), args)
    lengths = batch["completion_mask"].sum(dim=1)
    assert rows[0] == 2, "the prefill runs each prompt once"
    assert len(rows) - 2 == int(lengths.max()) < 64  # and two forwards compare log-probs
    for t in range(1, int(lengths.max())):
        alive = int((lengths > t).sum())
        assert alive <= rows[t] < alive / 0.9 + 1  # at most a tenth of the rows are finished ones


@pytest.mark.parametrize(
    "device, rows, columns, most",
    [("cpu", 100, 255, 90), ("cpu", 100, 256, 80), ("cuda", 100, 9, 60), ("cuda", 65, 9, 39), ("cuda", 64, 9, 0)],
)
def test_rows_are_dropped_in_groups(device, rows, columns, most):
    """On a GPU a step with a few rows takes as long as with one."""
    dropped = [running for running in range(1, rows) if worth_dropping(running, rows, columns, torch.device(device))]
    assert dropped == list(range(1, most + 1))


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (16, 1000), (2, 151936), (512, 40)])
@pytest.mark.parametrize("seed", range(4))
def test_race_draws_as_multinomial(seed, shape):
    """On a GPU `race` replaces `torch.multinomial`: same tokens, same state of the generator afterwards."""
    probs = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(dim=-1)
    probs[:, 0] = 0
    drawn = []
    for draw in (race, lambda probs: torch.multinomial(probs, 1)):
        torch.manual_seed(seed)
        drawn.append((draw(probs.clone()), torch.rand(4)))
    (tokens, after), (expected, expected_after) = drawn
    assert torch.equal(tokens, expected) and torch.equal(after, expected_after)
    assert (tokens > 0).all()
