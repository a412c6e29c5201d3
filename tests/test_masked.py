"""common/masked.py: masked values, clamps, pass@k, and log-probs from logits.

The vectors have the estimators of the KL and the masks of completions.
"""

import math

import pytest
import torch

from common.masked import all_equal, kl_estimate, log_ratio, logprobs_and_entropy, pass_at_k


@pytest.mark.parametrize("n, c, k", [(8, 0, 4), (8, 8, 4), (8, 3, 1), (8, 3, 4), (8, 5, 4), (8, 4, 8), (200, 1, 100)])
def test_pass_at_k(n, c, k):
    # Chen et al. 2021: the naive 1 - (1 - c/n)^k is biased.
    correct = torch.tensor([[1.0] * c + [0.0] * (n - c)])
    assert pass_at_k(correct, k).item() == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


def test_masked_gradient_is_zero_not_nan():
    # A `where` on the finished loss keeps the value finite and makes the gradient NaN.
    logprobs = torch.tensor([[-1.0, 500.0]], requires_grad=True)
    mask = torch.tensor([[True, False]])
    old = torch.tensor([[-1.0, math.nan]])
    for estimator in ("k1", "k2", "k3"):
        total = (log_ratio(logprobs, old, mask).exp() + kl_estimate(logprobs, old, mask, estimator)).sum()
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert torch.isfinite(total) and torch.isfinite(gradient).all() and gradient[0, 1] == 0


def test_beyond_the_clamp_no_gradient():
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
def test_equal_up_to_rounding(low, high, same):
    groups = torch.tensor([[high, low, low]], dtype=torch.float64)
    assert all_equal(groups).tolist() == [[same]]


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "k4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_and_entropy(temperature, dtype):
    # trl#3029: sampled from softmax(z / T), scored with softmax(z). In bfloat16 a quotient would be rounded again.
    torch.manual_seed(0)
    logits, tokens = (torch.randn(20, 11) * 3).to(dtype), torch.randint(11, (20,))
    logprobs, entropy = logprobs_and_entropy(logits, tokens, temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    assert torch.allclose(logprobs.double(), exact[torch.arange(20), tokens], atol=1e-5)
    assert torch.allclose(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5)


def test_bfloat16_logits_give_float32():
    logprobs, entropy = logprobs_and_entropy(torch.randn(3, 5, dtype=torch.bfloat16), torch.tensor([0, 1, 2]), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_entropy_gradient_on_request():
    logits = torch.randn(3, 5, requires_grad=True)
    assert not logprobs_and_entropy(logits, torch.tensor([0, 1, 2]), 1.0)[1].requires_grad
    entropy = logprobs_and_entropy(logits.double(), torch.tensor([0, 1, 2]), 1.0, entropy_grad=True)[1]
    assert torch.autograd.grad(entropy.sum(), logits)[0].abs().max() > 0.01
