"""Measure how noisy the gradient of a step is: its variance over its squared mean.

    python examples/gradient_variance.py MODEL SHIFT SCRIPT ...

    python examples/gradient_variance.py embedded 0 reinforce mean_baseline rloo grpo
    python examples/gradient_variance.py embedded 1 reinforce

MODEL is a folder, or `embedded`; it is not trained. SHIFT is added to every reward, which is 1 or
0. All get the same rollouts, in the sizes of the first one. A SCRIPT is a script or a recipe, named
without `.py`, whose `compute_advantages(rewards, args)`, `policy_loss` and `token_weights` make the
gradient, without a KL; so not dcpo, ppo or dpo. What a recipe changes in `main` (lite_ppo,
reinforce_pp, length_penalty) is not measured. Each of three seeds, which draw prompts and completions, gets a line. It ends with the squared gradients of
log pi of right and of wrong completions, and the constant baseline of least variance for rewards of
1 and 0.

REINFORCE without a baseline, with the mean, and with the mean of the others (RLOO) have the same
expected gradient up to a factor, but differ in noise. On the untrained embedded model, smallest and largest of the seeds:

    reinforce                     0.106 to 0.122
    the same, rewards 2 and 1     0.341 to 0.493
    mean_baseline                 0.094 to 0.105
    rloo                          0.101 to 0.117
    grpo                          0.157 to 0.189    divides by the standard deviation and the length

With rewards of 1 and 0 a baseline gains little, which is an accident of this coding.
"""

import argparse
import contextlib
import importlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the scripts are

import recipes

from common.load import PromptSampler, load_policy, load_prompts
from common.rewards import decode_completions, load_rewards

SEEDS = 3
ROLLOUTS = 16


def step_gradients(modules, lm, micro_batches, totals, args):
    """Return the gradient (N,) of one optimizer step by each module, float64.

    A module's advantages are the column of each micro-batch with its name.
    """
    gradients = [0] * len(modules)
    for micro in micro_batches:
        logprobs, _ = modules[0].completion_logprobs(lm, micro, args[0])
        for i, module in enumerate(modules):
            mask = micro["loss_mask"]
            advantages = micro[module.__name__]
            losses, _ = module.policy_loss(logprobs, logprobs.detach(), advantages, mask, args[i])
            loss = (losses * module.token_weights(mask, totals, args[i])).sum()
            parts = torch.autograd.grad(loss, list(lm.parameters()), retain_graph=True)
            gradients[i] = gradients[i] + torch.cat([part.flatten() for part in parts]).double()
    return gradients


def relative_variance(gradients):
    """Return E|g - E g|^2 / |E g|^2 of independent gradients (K, N), both parts unbiased.

    The square of their mean includes a K-th of the variance; products of different ones do not.
    """
    K = len(gradients)
    squares = gradients.square().sum()
    signal = (gradients.sum(dim=0).square().sum() - squares) / (K * (K - 1))
    return float((squares / K - signal) / signal)


def rollouts(module, args, number):
    """Yield (lm, batch) of `number` rollouts; the batch has `rewards` and `loss_mask`."""
    accelerator = Accelerator(cpu=True)
    with contextlib.redirect_stdout(None):  # they print what a run prints at its start
        tokenizer, lm = load_policy(args, accelerator)
        prompts, _ = load_prompts(args, tokenizer)
    functions, sampler = load_rewards(args), PromptSampler(prompts, args.seed, accelerator)
    n, temperature = args.group_size, args.temperature
    for step in range(number):
        drawn = sampler.draw(args.prompts_per_step)
        seed = (args.seed, 0, step)
        batch = module.rollout(lm, tokenizer, drawn, n, temperature, 1.0, seed, args)
        completions = decode_completions(tokenizer, batch)
        rewards, _ = module.compute_rewards(functions, drawn, completions, n)
        yield lm, batch | {"rewards": rewards, "loss_mask": batch["completion_mask"]}


def options_of(module, model, seed, **sizes):
    """Return the options of a script for one generate call and one update per step."""
    one_update = dict(num_minibatches=1, generate_batch_size=0, eval_prompts=1)
    return module.Args(model_name_or_path=model, seed=seed, **one_update, **sizes)


def measure(modules, model, shift, seed, number, **sizes):
    """Return {script: relative variance} over `number` rollouts."""
    first = modules[0]
    for name in ("prompts_per_step", "group_size"):
        sizes.setdefault(name, getattr(first.Args, name))
    args = [options_of(module, model, seed, **sizes) for module in modules]
    accelerator = Accelerator(cpu=True)
    gradients = []
    for lm, batch in rollouts(first, args[0], number):
        for i, module in enumerate(modules):
            advantages = module.compute_advantages(batch["rewards"] + shift, args[i])
            batch[module.__name__] = advantages.float()
        rows = range(len(batch["rewards"]))
        micro_batches, totals = first.split(accelerator, batch, rows, args[0])
        gradients.append(step_gradients(modules, lm, micro_batches, totals, args))
    found = {}
    for i, module in enumerate(modules):
        found[module.__name__] = relative_variance(torch.stack([row[i] for row in gradients]))
    return found


def best_baseline(module, model, seed, **sizes):
    """Return the mean |grad log pi|^2 of a rollout's right and wrong completions, and baselines.

    These are the mean reward, and the b that minimizes the mean of (R - b)^2 |grad log pi|^2, which
    is the mean of the rewards with weights |grad log pi|^2.
    """
    args = options_of(module, model, seed, **sizes)
    ((lm, batch),) = rollouts(module, args, 1)
    rewards = batch.pop("rewards")
    squares = []
    for row in range(len(rewards)):
        alone = {name: column[row : row + 1] for name, column in batch.items()}
        logprobs, _ = module.completion_logprobs(lm, alone, args)
        parts = torch.autograd.grad(logprobs.sum(), list(lm.parameters()))
        squares.append(sum(float(part.square().sum()) for part in parts))
    squares = torch.tensor(squares, dtype=torch.float64)
    return {
        "right": float(squares[rewards == 1].mean()),
        "wrong": float(squares[rewards == 0].mean()),
        "mean reward": float(rewards.mean()),
        "best baseline": float((rewards * squares).sum() / squares.sum()),
    }


def module_of(name):
    """Return the module of a script, or of a recipe put into its script."""
    if name in recipes.files():
        return recipes.load(recipes.made(name), name)
    return importlib.import_module(name)


def main(model, shift, *scripts):
    torch.set_num_threads(1)
    modules = [module_of(script) for script in scripts]
    for seed in range(SEEDS):
        found = measure(modules, model, shift, seed, ROLLOUTS)
        found |= best_baseline(modules[0], model, seed)
        numbers = [f"{name} {value:.3g}" for name, value in found.items()]
        print(f"seed {seed}", *numbers, sep="  ", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("shift", type=float)
    parser.add_argument("scripts", nargs="+", metavar="script")
    words = parser.parse_args()
    main(words.model, words.shift, *words.scripts)
