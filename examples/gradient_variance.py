"""How noisy the gradient of a step is: its variance over the square of its mean. For docs/fork.md.

    python examples/gradient_variance.py MODEL SHIFT SCRIPT ...      for example: embedded 0 reinforce rloo grpo

MODEL is a folder, or `embedded`; it is not trained. SHIFT is added to every reward, which is 1 or 0. All scripts or
recipes, names without `.py`, get the same rollouts, in the sizes of the first one, and turn them into gradients by
their own advantages, loss and weights, without a KL. A line for each of three seeds, which draw prompts and
completions. It ends with the squared gradients of log pi of right and of wrong completions, and the constant baseline of least variance
for rewards of 1 and 0.
"""

import argparse
import importlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the scripts are

import recipes

from common.batches import decode_completions, split_rollout
from harness.data import PromptSampler, load_prompts
from harness.loading import load_policy, load_tokenizer
from harness.reward_functions import load_rewards

SEEDS = 3
ROLLOUTS = 16


def step_gradients(modules, policy, micro_batches, args):
    """The gradient (N,) of one optimizer step by each module, float64.

    `advantages` are a column of each micro-batch by the module's name.
    """
    gradients = [0] * len(modules)
    for micro in micro_batches:
        logprobs, _ = policy(micro, with_entropy=False)
        for i, module in enumerate(modules):
            mask = micro["loss_mask"]
            advantages = micro[module.__name__]
            losses, _ = module.policy_loss(logprobs, logprobs.detach(), advantages, mask, args[i])
            loss = (losses * module.token_weights(mask, micro["totals"], args[i])).sum()
            parts = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
            gradients[i] = gradients[i] + torch.cat([part.flatten() for part in parts]).double()
    return gradients


def relative_variance(gradients):
    """E|g - E g|^2 / |E g|^2 from independent gradients (K, N), numerator and denominator without bias.

    The square of their mean holds a K-th of the variance; products of two different ones do not.
    """
    K = len(gradients)
    squares = gradients.square().sum()
    signal = (gradients.sum(dim=0).square().sum() - squares) / (K * (K - 1))
    return float((squares / K - signal) / signal)


def rollouts(module, args, number):
    """So many rollouts by a script, as (policy, batch); the batch has `rewards`, and `loss_mask`."""
    tokenizer = load_tokenizer(args)
    policy = load_policy(args, tokenizer, Accelerator(cpu=True))
    reward_functions = load_rewards(args)
    prompts, _ = load_prompts(args, tokenizer)
    sampler = PromptSampler(prompts, args.seed)
    for step in range(number):
        drawn = sampler.draw(args.prompts_per_step)
        seed = (args.seed, 0, step)
        batch = module.rollout(policy, drawn, args.group_size, args.temperature, 1.0, seed, args)
        completions = decode_completions(tokenizer, batch)
        rewards, _ = module.compute_rewards(reward_functions, drawn, completions, args.group_size)
        yield policy, batch | {"rewards": rewards, "loss_mask": batch["completion_mask"]}


def options_of(module, model, seed, **sizes):
    """The options of a script: all completions are sampled at once, and a step is one update."""
    one_update = dict(num_minibatches=1, generate_batch_size=0, eval_prompts=1)
    return module.Args(model_name_or_path=model, seed=seed, **one_update, **sizes)


def measure(modules, model, shift, seed, number, **sizes):
    """{script: its relative variance} over so many rollouts."""
    first = modules[0]
    for name in ("prompts_per_step", "group_size"):
        sizes.setdefault(name, getattr(first.Args, name))
    args = [options_of(module, model, seed, **sizes) for module in modules]
    accelerator = Accelerator(cpu=True)
    gradients = []
    for policy, batch in rollouts(first, args[0], number):
        for i, module in enumerate(modules):
            advantages = module.compute_advantages(batch["rewards"] + shift, args[i])
            batch[module.__name__] = advantages.float()
        (micro_batches,) = split_rollout(accelerator, batch, args[0])
        gradients.append(step_gradients(modules, policy, micro_batches, args))
    found = {}
    for i, module in enumerate(modules):
        found[module.__name__] = relative_variance(torch.stack([row[i] for row in gradients]))
    return found


def best_baseline(module, model, seed, **sizes):
    """Of one rollout: the mean of |grad log pi|^2 of right and of wrong completions, and baselines.

    They are the mean reward, and the number b that makes the mean of (R - b)^2 |grad log pi|^2
    smallest, which is the mean of the rewards by these weights.
    """
    ((policy, batch),) = rollouts(module, options_of(module, model, seed, **sizes), 1)
    rewards = batch.pop("rewards")
    squares = []
    for row in range(len(rewards)):
        alone = {name: column[row : row + 1] for name, column in batch.items()}
        logprobs, _ = policy(alone, with_entropy=False)
        parts = torch.autograd.grad(logprobs.sum(), list(policy.parameters()))
        squares.append(sum(float(part.square().sum()) for part in parts))
    squares = torch.tensor(squares, dtype=torch.float64)
    return {
        "right": float(squares[rewards == 1].mean()),
        "wrong": float(squares[rewards == 0].mean()),
        "mean reward": float(rewards.mean()),
        "best baseline": float((rewards * squares).sum() / squares.sum()),
    }


def module_of(name):
    """The module of a script, or of a recipe put into its script."""
    if name in recipes.files():
        return recipes.load(recipes.made(name), name)
    return importlib.import_module(name)


def main(model, shift, *scripts):
    torch.set_num_threads(1)
    modules = [module_of(script) for script in scripts]
    for seed in range(SEEDS):
        found = measure(modules, model, shift, seed, ROLLOUTS) | best_baseline(
            modules[0], model, seed
        )
        print(
            f"seed {seed}",
            *(f"{name} {value:.3g}" for name, value in found.items()),
            sep="  ",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("shift", type=float)
    parser.add_argument("scripts", nargs="+", metavar="script")
    words = parser.parse_args()
    main(words.model, words.shift, *words.scripts)
