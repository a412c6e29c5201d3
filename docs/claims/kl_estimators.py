"""What the KL estimators k1, k2 and k3 are in a loss, exactly: python docs/claims/kl_estimators.py [--write]

A softmax over eight actions is small enough that nothing has to be sampled: an expectation is a sum over the actions,
each weighted by its probability under pi. That probability is a constant in the gradient, as for sampled tokens in a
loss: the gradient goes through the log-prob in the estimate and not through the choice of the action. `kl_estimate` is
the function that the scripts use. All is float64. With --write the table goes to docs/claims/kl_estimators.md.
"""

import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).parents[2]))

from common.masked import kl_estimate

TABLE = pathlib.Path(__file__).with_suffix(".md")
LOGITS = (1.2, 0.7, 0.3, 0.0, -0.4, -0.9, -1.5, -2.0)  # of the policy
DIRECTION = (-0.9, 0.4, 0.2, -0.6, 1.0, 0.1, -0.3, 0.8)  # from there to the reference, times the distance
DISTANCES = {"near": 0.2, "far": 1.5}
HEADER = (
    "pi and ref",
    "estimator",
    "mean",
    "bias",
    "standard deviation",
    "gradient",
    "distance to that of KL(pi, ref)",
    "to that of KL(ref, pi)",
    "its noise",
)


def policies(distance):
    """The logits of the policy (V,), of which gradients are taken, and the log-probs of policy and reference (V,)."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    reference = logits.detach() + distance * torch.tensor(DIRECTION, dtype=torch.float64)
    return logits, logits.log_softmax(dim=0), reference.log_softmax(dim=0)


def divergence(logprobs, others):
    """KL(p || q), a scalar, of two distributions given as log-probs (V,)."""
    return (logprobs.exp() * (logprobs - others)).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def measure(estimator, distance):
    """Mean, bias and standard deviation of an estimate; mean (V,) and noise of its gradient; both KLs' gradients (V,).

    The noise is the root of the expected squared distance of the gradient of one action from the mean.
    """
    logits, logprobs, ref_logprobs = policies(distance)
    probs, mask = logprobs.detach().exp(), torch.ones(len(LOGITS), 1, dtype=torch.bool)
    estimates = kl_estimate(logprobs[:, None], ref_logprobs[:, None], mask, estimator)[:, 0]  # (V,)
    pi_ref, ref_pi = divergence(logprobs, ref_logprobs), divergence(ref_logprobs, logprobs)
    mean = (probs * estimates).sum()
    each = torch.stack([gradient(estimate, logits) for estimate in estimates])  # (V, V): a row for each action
    expected = gradient(mean, logits)
    return {
        "mean": mean.item(),
        "bias": (mean - pi_ref).item(),
        "std": (probs * (estimates - mean).square()).sum().sqrt().item(),
        "gradient": expected,
        "noise": (probs * (each - expected).square().sum(dim=1)).sum().sqrt().item(),
        "of_pi_ref": gradient(pi_ref, logits),
        "of_ref_pi": gradient(ref_pi, logits),
    }


def number(value):
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def table():
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for name, distance in DISTANCES.items():
        _, logprobs, ref_logprobs = policies(distance)
        both = (number(divergence(*pair).item()) for pair in ((logprobs, ref_logprobs), (ref_logprobs, logprobs)))
        where = f"{name}: KL(pi, ref) {next(both)}, KL(ref, pi) {next(both)}"
        for estimator in ("k1", "k2", "k3"):
            found = measure(estimator, distance)
            expected = found["gradient"]
            targets = (found["of_pi_ref"], found["of_ref_pi"])
            gaps = [((expected - target).norm() / target.norm()).item() for target in targets]
            values = (found["mean"], found["bias"], found["std"], expected.norm().item(), *gaps, found["noise"])
            lines.append(f"| {where} | {estimator} | " + " | ".join(map(number, values)) + " |")
            where = ""
    return "\n".join(lines) + "\n"


def main():
    if "--write" in sys.argv[1:]:
        TABLE.write_text(table(), encoding="utf-8", newline="\n")
    print(table(), end="")


if __name__ == "__main__":
    main()
