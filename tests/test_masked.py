"""common/masked.py: its functions by their definitions, and what stands beside the mask."""

import math
import random

import pytest
import torch

from common.masked import all_equal, completion_mask, kl_estimate, log_ratio, logprobs_and_entropy, pass_at_k


def test_estimators_equal_a_loop_over_random_tables():
    # Values beside the mask must not matter, NaN included (trl#6800, SkyRL#1305).
    rng = random.Random(0)
    for _ in range(50):
        rows, columns = rng.randint(1, 5), rng.randint(1, 6)
        new, old = (torch.randn(rows, columns, dtype=torch.float64) * 3 for _ in range(2))
        mask = torch.rand(rows, columns) < 0.6
        dirty = torch.where(mask, old, math.nan)
        for i in range(rows):
            for j in range(columns):
                d = float(old[i, j] - new[i, j]) if mask[i, j] else 0.0
                expected = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}
                assert log_ratio(new, dirty, mask)[i, j].item() == pytest.approx(-d, abs=1e-12)
                for estimator, value in expected.items():
                    assert kl_estimate(new, dirty, mask, estimator)[i, j].item() == pytest.approx(
                        value, rel=1e-9, abs=1e-12
                    )


def test_completion_mask_equals_a_loop_over_random_tables():
    # trl#6357, RAGEN#59, tiny-grpo: masks from `!= pad` lose the EOS, or tokens in the middle.
    rng = random.Random(1)
    for _ in range(100):
        row = [rng.randint(0, 6) for _ in range(rng.randint(1, 9))]
        stop_tokens = rng.sample(range(7), rng.randint(1, 3))
        ends = [t for t, token in enumerate(row) if token in stop_tokens]
        length = ends[0] + 1 if ends else len(row)
        mask, truncated = completion_mask(torch.tensor([row]), stop_tokens)
        assert mask[0].tolist() == [t < length for t in range(len(row))] and truncated.item() == (not ends)


@pytest.mark.parametrize("n, c, k", [(8, 0, 4), (8, 8, 4), (8, 3, 1), (8, 3, 4), (8, 5, 4), (8, 4, 8), (200, 1, 100)])
def test_pass_at_k_equals_its_definition(n, c, k):
    # Chen et al. 2021: the naive 1 - (1 - c/n)^k is biased.
    correct = torch.tensor([[1.0] * c + [0.0] * (n - c)])
    assert pass_at_k(correct, k).item() == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


def test_gradient_under_the_mask_is_zero_not_nan():
    # A `where` on the finished loss keeps the value finite and makes the gradient NaN.
    logprobs = torch.tensor([[-1.0, 500.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    old = torch.tensor([[-1.0, math.nan]])
    for estimator in ("k1", "k2", "k3"):
        total = (log_ratio(logprobs, old, mask).exp() + kl_estimate(logprobs, old, mask, estimator)).sum()
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert torch.isfinite(total) and torch.isfinite(gradient).all() and gradient[0, 1] == 0


def test_k3_pulls_back_a_policy_far_from_the_reference():
    # verl clamps k3 to 10: no gradient beyond log(ref / pi) = 2.61, where the penalty is needed most.
    logprobs = torch.tensor([[-12.0]], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([[-2.0]]), torch.tensor([[True]]), "k3").sum().backward()
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(10), rel=1e-5)


def test_tokens_beyond_the_clamp_are_those_without_a_gradient():
    # The loss of such a token is up to exp(20) = 4.9e8, and nothing pulls it back.
    new = torch.tensor([[0.0, 19.9, 20.1, -19.9, -20.1, math.inf, math.nan]], requires_grad=True)
    mask = torch.tensor([[True] * 6 + [False]])
    zeros = torch.zeros_like(new)
    (gradient,) = torch.autograd.grad(log_ratio(new, zeros, mask).sum(), new)
    clamped = log_ratio(new, zeros, mask).abs() >= 20  # as the scripts count them
    assert clamped[0].tolist() == [False, False, True, False, True, True, False]
    assert torch.equal(clamped, mask & (gradient == 0))


@pytest.mark.parametrize(
    "low, high, same",
    [
        (0.3, 0.1 + 0.2, True),
        (-0.1 - 0.2, -0.3, True),
        (0.0, 0.9e-9, True),
        (0.0, 1.1e-9, False),
        (-1.1e-9, 0.0, False),
        (1e6, 1e6 + 0.9e-3, True),  # a sum of large parts rounds by more
        (1e6, 1e6 + 1.1e-3, False),
        (-1e6 - 0.9e-3, -1e6, True),
        (0.3, 0.3001, False),
        (1.0, 1.0, True),
    ],
)
def test_rewards_agree_where_they_differ_by_rounding_alone(low, high, same):
    groups = torch.tensor([[high, low, low]], dtype=torch.float64)
    assert all_equal(groups).tolist() == [[same]]


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "k4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_and_entropy_equal_their_definitions(temperature, dtype):
    # trl#3029: sampled from softmax(z / T), scored with softmax(z). In bfloat16 a quotient would be rounded again.
    torch.manual_seed(0)
    logits, tokens = (torch.randn(20, 11) * 3).to(dtype), torch.randint(11, (20,))
    logprobs, entropy = logprobs_and_entropy(logits, tokens, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    assert torch.allclose(logprobs.double(), exact[torch.arange(20), tokens], atol=1e-5)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5)


def test_logprobs_are_float32_from_bfloat16_logits():
    logprobs, entropy = logprobs_and_entropy(torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor([0, 1, 2]), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_entropy_has_a_gradient_only_when_asked():
    logits = torch.randn(3, 5, requires_grad=True)
    assert not logprobs_and_entropy(logits, torch.tensor([0, 1, 2]), 1.0)[1].requires_grad
    entropy = logprobs_and_entropy(logits.double(), torch.tensor([0, 1, 2]), 1.0, entropy_grad=True)[1]
    assert torch.autograd.grad(entropy.sum(), logits)[0].abs().max() > 0.01
