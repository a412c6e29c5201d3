"""Each option of grpo.py has an effect in the other scripts too, or is refused."""

import functools
import inspect

import pytest
import torch

from common.run import Exit
from testbed import FAMILY, SCRIPTS, advantages_of, embedded, fill, gradients, hand_made_batch, metric_rows, script

CHANGES = dict(clip_low=0.5, clip_high=0.5, dual_clip=1.001, kl_coef=0.5, kl_estimator="k1", entropy_coef=0.5)
STD = {"normalize_std": True}  # with its parent switched on
CHANGES |= dict(normalize_std=None, std_eps=0.1)  # clips are scaled, these are turned over


@functools.cache
def advantages(name, **options):
    """Return the advantages of random rewards, or the gradients if the script computes advantages in `update`."""
    module = script(name)
    if name in FAMILY:
        rewards = torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return advantages_of(module, rewards, module.Args(**{"group_size": 4} | options))
    sizes = dict(group_size=4, prompts_per_step=2, num_minibatches=1, num_epochs=1)
    _, args, tokenizer, lm = embedded(name, **options | sizes)
    batch, rewards = hand_made_batch(tokenizer, args, groups=2)
    (found,), _ = gradients(module, args, lm, fill(module, batch, rewards, args))
    return torch.cat([gradient.flatten() for gradient in found])


def losses(name, **options):
    """Return the losses of rows whose ratios are not 1."""
    module = script(name)
    args = module.Args(**({"kl_in": "loss"} if hasattr(module.Args, "kl_in") else {}) | options)
    old, step, drift, entropy, signs = torch.rand(5, 16, 6, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [5]]).repeat(4, 1)
    ref, new = drift - old - 0.5 if getattr(args, "kl_coef", 0) else None, 4 * step - 2 - old
    entropies = {"entropy": entropy} if "entropy" in inspect.signature(module.policy_loss).parameters else {}
    return module.policy_loss(new, -old, signs[:, :1] - 0.5, mask, args, ref, **entropies)[0]


SIZES = dict(prompts_per_step=4, num_minibatches=2, num_epochs=2, group_size=4, max_new_tokens=20, eval_prompts=2)
SIZES |= dict(max_steps=2, eval_every=0, learning_rate=0.01, eval_samples=2, eval_k=1)
VARIED = "def varied(completions, **_):\n    return [len(text) % 5 + i % 4 for i, text in enumerate(completions)]\n"


def metrics_of_a_run(name, folder, options):
    """The rows of two steps with these options {name: value}, in which ratios leave the clip."""
    folder.mkdir()
    (folder / "varied.py").write_text(VARIED, encoding="utf-8")
    words, own = ["--reward", f"{folder}/varied.py:varied", "--output_dir", f"{folder}/run"], script(name).Args()
    for option, value in (SIZES | options).items():
        if hasattr(own, option):
            words += [f"--{option}", str(value)]
    script(name).main(words)
    return metric_rows(folder / "run")


@pytest.mark.parametrize("name", SCRIPTS)
def test_option_has_an_effect_or_is_refused(name, tmp_path):
    """GMPO, made of grpo.py after docs/fork.md, took `--dual_clip 3` and did not say that it has none.

    What does nothing in the functions of the loss may act in `main` or `update`: then two runs tell.
    """
    module, found = script(name), []
    there = {option: value for option, value in CHANGES.items() if hasattr(module.Args, option)}
    for option, value in there.items():
        default = getattr(module.Args(), option)
        base = {"kl_estimator": {"kl_coef": 0.5}, "std_eps": STD}.get(option, {})
        base = {parent: own for parent, own in base.items() if parent in there}
        if value == default:  # in a fork
            value = "k2" if isinstance(value, str) else 1.5 * value
        turned = not default if isinstance(default, bool) else 1 - default if isinstance(default, int) else 0.0
        value = default * value if option.startswith("clip") else turned if value is None else value
        result = advantages if "std" in option else losses
        if not torch.equal(result(name, **base), result(name, **base, **{option: value})):
            continue
        try:
            rows = metrics_of_a_run(name, tmp_path / option, base | {option: value})
        except Exit as error:
            assert option in str(error)
        else:
            if rows == metrics_of_a_run(name, tmp_path / f"{option}-not", base):
                found.append(f"{name}.py: --{option} changes nothing: remove it, or refuse it.")
    assert found == []
