"""The table of options says what the command line takes, and each option has an effect."""

import dataclasses
import functools
import re

import pytest
import torch

import family
import options
from common.errors import InputError
from common.harness.command_line import parse_args
from testbed import ALL, SCRIPTS, advantages_of, embedded, fill, gradients, hand_made_batch, metric_rows, script
from tree import Tree

TABLE = options.table(tuple(family.names(Tree())))


def cells(name):
    (line,) = re.findall(rf"^\| `--{name}`(.*)\|$", TABLE, re.MULTILINE)
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]


@pytest.mark.parametrize("name", ALL)
def test_every_option_of_a_script_is_there_once_with_its_default(name):
    for field in dataclasses.fields(script(name).Args):
        scripts, defaults, _, _ = cells(field.name)
        assert scripts != f"<br>not in {name}"
        own = re.search(rf"(?:^|<br>)[^:]*\b{name}\b[^:]*: (.*?)(?:<br>|$)", defaults)
        shown = own[1] if own else defaults.split("<br>")[0]
        value = getattr(script(name).Args(), field.name)
        if value is None or value == []:
            assert shown == "none"
        elif isinstance(value, bool):
            assert shown == ("on" if value else "off")
        else:
            word = shown.strip("`")
            assert ([word] if isinstance(value, list) else type(value)(word)) == value, field.name


@pytest.mark.parametrize(
    "name, cell",
    [
        ("seed", "whole number ≥ 0, < 4294967296"),
        ("adam_beta1", "number ≥ 0, < 1"),
        ("max_steps", "whole number ≥ 0<br>reward_model, dpo: whole number ≥ -1"),
        ("kl_estimator", "`k1`, `k2`, `k3`"),
        ("reward_weights", "number, or several"),
        ("gae_lambda_critic", "number ≥ 0, ≤ 1"),
        ("normalize_std", "switch"),
    ],
)
def test_values_and_bounds(name, cell):
    assert cells(name)[2] == cell


def test_a_bound_of_the_table_is_that_of_the_command_line():
    with pytest.raises(InputError, match="must be below 1"):
        parse_args(script("grpo").Args, ["--adam_beta1", "1"])
    assert parse_args(script("grpo").Args, ["--no_normalize_std"]).normalize_std is False


def test_notes_in_parentheses_are_not_repeated_with_the_text_before_them():
    def fields(**texts):
        return {name: dataclasses.field(metadata={"help": text}) for name, text in texts.items()}

    by_script = fields(grpo="rate (A: 1)", dapo="rate (B: 2)", gspo="rate", ppo="rate of the policy (C: 3)")
    found = "rate (A: 1)<br>dapo: (B: 2)<br>ppo: rate of the policy (C: 3)"
    assert options.said(by_script, options.help_text) == found


# --- what grpo.py's options do in its siblings ---

CHANGES = dict(clip_low=0.5, clip_high=0.5, dual_clip=1.001, kl_coef=0.5, kl_estimator="k1", entropy_coef=0.5)
STD = {"normalize_std": True}  # with its parent switched on
CHANGES |= dict(normalize_std=None, std_ddof=None, std_eps=0.1)  # clips are scaled, these are turned over


@functools.cache
def advantages(name, **options):
    """Those of random rewards, by the script's own function; of one that makes them in `update`, its gradients."""
    module = script(name)
    if family.entry(f"{name}.py").kind == "groups":
        rewards = torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return advantages_of(module, rewards, module.Args(**{"group_size": 4} | options))
    sizes = dict(group_size=4, prompts_per_step=2, num_minibatches=1, num_epochs=1)
    _, args, tokenizer, policy = embedded(name, **options | sizes)
    batch, rewards = hand_made_batch(policy, tokenizer, args, groups=2)
    (found,), _ = gradients(module, args, policy, fill(module, batch, rewards, args))
    return torch.cat([gradient.flatten() for gradient in found])


def losses(name, **options):
    """Those of rows that are off the old policy."""
    module = script(name)
    args = module.Args(**({"kl_in": "loss"} if hasattr(module.Args, "kl_in") else {}) | options)
    old, step, drift, entropy, signs = torch.rand(5, 16, 6, generator=torch.Generator().manual_seed(0)).double()
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [5]]).repeat(4, 1)
    ref, new = drift - old - 0.5 if args.kl_coef else None, 4 * step - 2 - old
    return module.policy_loss(new, -old, signs[:, :1] - 0.5, mask, args, ref, entropy)[0]


SIZES = dict(prompts_per_step=4, num_minibatches=2, num_epochs=2, group_size=4, max_new_tokens=16, eval_prompts=2)
SIZES |= dict(max_steps=2, eval_every=0, learning_rate=0.01, eval_samples=2, eval_k=1, filter_by="reward")
VARIED = "def varied(completions, **_):\n    return [len(text) % 5 + i % 4 for i, text in enumerate(completions)]\n"


def metrics_of_a_run(name, folder, options):
    """The rows of two steps with these options {name: value}, in which ratios leave the clip."""
    folder.mkdir()
    (folder / "varied.py").write_text(VARIED, encoding="utf-8")
    words, own = ["--reward", f"{folder}/varied.py:varied", "--output_dir", f"{folder}/run"], script(name).Args()
    for option, value in (SIZES | options).items():
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no_{option}")
        elif hasattr(own, option):
            words += [f"--{option}", str(value)]
    script(name).main(words)
    return metric_rows(folder / "run")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_option_changes_something_or_is_refused_or_is_listed(name, tmp_path):
    """GMPO, made of grpo.py after docs/your_own.md, took `--dual_clip 3` and did not say that it has none.

    What does nothing in the functions of the loss may act in `main` or `update`: then two runs tell.
    """
    module, found = script(name), []
    inert = family.entry(f"{name}.py").inert
    for option, value in CHANGES.items():
        default = getattr(module.Args(), option)
        base = {"kl_estimator": {"kl_coef": 0.5}, "std_ddof": STD, "std_eps": STD}.get(option, {})
        if value == default:  # in a fork
            value = "k2" if isinstance(value, str) else 1.5 * value
        turned = not default if isinstance(default, bool) else 1 - default if isinstance(default, int) else 0.0
        value = default * value if option.startswith("clip") else turned if value is None else value
        result = advantages if "std" in option else losses
        if not torch.equal(result(name, **base), result(name, **base, **{option: value})):
            found += [f"{name}.py: --{option} has an effect: take it out of `inert`"] if option in inert else []
        elif option not in inert:
            try:
                rows = metrics_of_a_run(name, tmp_path / option, base | {option: value})
            except InputError as error:
                assert option in str(error)
            else:
                if rows == metrics_of_a_run(name, tmp_path / f"{option}-not", base):
                    what = "changes nothing: refuse it, or list it under `inert` of its entry"
                    found.append(f"{name}.py: --{option} {what}")
    assert found == [], "in tools/family.py"
