"""Measure how much the gradient of a step depends on --micro_batch_size, which it should not.

    python examples/split_gradient.py SCRIPT [--option value ...]

    python examples/split_gradient.py high_entropy --threshold micro_batch

SCRIPT is a script or a recipe, named without `.py`, with a `compute_advantages(rewards, args)`; so
not dcpo, ppo or dpo. The completions of one rollout go through its `update` as a single optimizer
step, without a KL. Before that, the weights move away from those that sampled, so that ratios differ from 1. Each line is the change of
the gradient, relative to that of all rows in one micro-batch.
"""

import argparse
from dataclasses import replace

import torch
from accelerate import Accelerator
from gradient_variance import module_of, rollouts

SIZES = 64, 16, 4
NOISE = 0.003  # of each weight


class SecondStep:
    """An optimizer whose first step is fixed noise, and whose second one keeps the gradient (N,)."""

    def __init__(self, lm):
        self.weights = list(lm.parameters())
        self.param_groups = [{"params": self.weights, "lr": 1.0}]
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        if self.steps == 1:
            generator = torch.Generator().manual_seed(0)
            for weight in self.weights:
                weight += NOISE * torch.randn(weight.shape, generator=generator)
        else:
            self.gradient = torch.cat([weight.grad.flatten() for weight in self.weights])

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None


def gradient_of(module, lm, batch, args):
    """Return the gradient (N,) of the second of two passes over a batch; `lm` keeps its weights."""
    before = [weight.detach().clone() for weight in lm.parameters()]
    accelerator, optimizer, metrics = Accelerator(cpu=True), SecondStep(lm), module.Means()
    module.update(accelerator, lm, None, optimizer, dict(batch), args, metrics)
    with torch.no_grad():
        for weight, old in zip(lm.parameters(), before, strict=True):
            weight.copy_(old)
    return optimizer.gradient.double()


def main(name, *options):
    torch.set_num_threads(1)
    module = module_of(name)
    args = module.run.parse_args(module.Args, list(options))
    one_step = dict(num_minibatches=1, num_epochs=2, max_grad_norm=0.0, kl_coef=0.0)
    args = replace(args, **one_step)
    ((lm, batch),) = rollouts(module, args, 1)
    batch["advantages"] = module.compute_advantages(batch["rewards"], args).float()
    rows = len(batch["completions"])
    whole = gradient_of(module, lm, batch, replace(args, micro_batch_size=rows))
    for size in SIZES:
        found = gradient_of(module, lm, batch, replace(args, micro_batch_size=size))
        print(f"micro-batches of {size:2}: {float((found - whole).norm() / whole.norm()):.2g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    words = parser.parse_args()
    main(words.script, *words.options)
