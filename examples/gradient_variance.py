"""How noisy the gradient of a step is: its variance over the square of its mean. For docs/your_own.md.

    python examples/gradient_variance.py MODEL SHIFT SCRIPT ...      for example: embedded 0 reinforce rloo grpo

MODEL is a folder, or `embedded`; it is not trained. SHIFT is added to every reward, which is 1 or 0. All scripts, names
without `.py`, get the same rollouts, in the sizes of the first one, and turn them into gradients by their own
advantages, loss and weights, without a KL. A line for each of three seeds, which draw prompts and completions. It ends
with the squared gradients of log pi of right and of wrong completions, and the constant baseline of least variance
for rewards of 1 and 0.
"""

import importlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the scripts are

from common.batches import completion_texts, split_rollout
from common.harness.data import PromptSampler, load_prompts
from common.harness.loading import load_policy, load_tokenizer
from common.rewards import load_rewards

SEEDS, ROLLOUTS = 3, 16


def step_gradients(modules, policy, micro_batches, totals, args):
    """The gradient (N,) of one optimizer step by each module, float64; `advantages` are a column of each micro-batch
    by the module's name."""
    gradients = [0] * len(modules)
    for micro in micro_batches:
        logprobs, _ = policy(micro, with_entropy=False)
        for i, module in enumerate(modules):
            advantages, mask = micro[module.__name__], micro["loss_mask"]
            losses, _ = module.policy_loss(logprobs, logprobs.detach(), advantages, mask, args[i])
            weights = module.token_weights(mask, totals | {"group_tokens": micro["group_tokens"]}, args[i])
            loss = (losses * weights).sum()
            parts = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
            gradients[i] = gradients[i] + torch.cat([part.flatten() for part in parts]).double()
    return gradients


def relative_variance(gradients):
    """E|g - E g|^2 / |E g|^2 from independent gradients (K, N), numerator and denominator without bias.

    The square of their mean holds a K-th of the variance; products of two different ones do not.
    """
    K, squares = len(gradients), gradients.square().sum()
    signal = (gradients.sum(dim=0).square().sum() - squares) / (K * (K - 1))
    return float((squares / K - signal) / signal)


def rollouts(module, args, number):
    """So many rollouts by a script, as (policy, batch); the batch has `rewards`, and `loss_mask`."""
    tokenizer = load_tokenizer(args)
    policy, reward_functions = load_policy(args, tokenizer), load_rewards(args)
    prompts, *_ = load_prompts(args, tokenizer, True)
    sampler = PromptSampler(prompts, args.seed)
    for step in range(number):
        drawn = [prompts[i] for i in sampler.draw(args.prompts_per_step)]
        batch = module.rollout(policy, drawn, args.group_size, args.temperature, 1.0, (args.seed, 0, step, 0), args)
        texts = completion_texts(tokenizer, batch)
        rewards, *_ = module.compute_rewards(reward_functions, drawn, texts, batch["truncated"])
        yield policy, batch | {"rewards": rewards, "loss_mask": batch["completion_mask"]}


def measure(modules, model, shift, seed, number, **sizes):
    """{script: its relative variance} over so many rollouts."""
    first, names = modules[0], ("prompts_per_step", "group_size")
    sizes = {name: getattr(first.Args, name) for name in names} | sizes
    args = [module.Args(model_name_or_path=model, seed=seed, **sizes) for module in modules]
    accelerator, gradients = Accelerator(cpu=True), []
    for policy, batch in rollouts(first, args[0], number):
        for i, module in enumerate(modules):
            batch[module.__name__] = module.compute_advantages(batch["rewards"] + shift, args[i]).float()
        ((micro_batches, totals),) = split_rollout(accelerator, batch, args[0])
        gradients.append(step_gradients(modules, policy, micro_batches, totals, args))
    rows = zip(modules, zip(*gradients, strict=True), strict=True)
    return {module.__name__: relative_variance(torch.stack(row)) for module, row in rows}


def best_baseline(module, model, seed, **sizes):
    """Of one rollout: the mean of |grad log pi|^2 of right and of wrong completions, the mean reward, and the number
    b that makes the mean of (R - b)^2 |grad log pi|^2 smallest, which is the mean of the rewards by these weights."""
    ((policy, batch),) = rollouts(module, module.Args(model_name_or_path=model, seed=seed, **sizes), 1)
    rewards, squares = batch.pop("rewards"), []
    batch.pop("packed", None)  # a row is computed alone
    for row in range(len(rewards)):
        logprobs, _ = policy({name: column[row : row + 1] for name, column in batch.items()}, with_entropy=False)
        parts = torch.autograd.grad(logprobs.sum(), list(policy.parameters()))
        squares.append(sum(float(part.square().sum()) for part in parts))
    squares = torch.tensor(squares, dtype=torch.float64)
    return {
        "right": float(squares[rewards == 1].mean()),
        "wrong": float(squares[rewards == 0].mean()),
        "mean reward": float(rewards.mean()),
        "best baseline": float((rewards * squares).sum() / squares.sum()),
    }


def main(model, shift, *scripts):
    torch.set_num_threads(1)
    modules = [importlib.import_module(script) for script in scripts]
    for seed in range(SEEDS):
        found = measure(modules, model, float(shift), seed, ROLLOUTS) | best_baseline(modules[0], model, seed)
        print(f"seed {seed}", *(f"{name} {value:.3g}" for name, value in found.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
