"""A family of three scripts and their pages, small enough to be read: what the tests of tools/ work on.

So a change of the project's scripts turns none of those tests red; tests/test_refresh.py says what is due then.
"""

import functools

import family
from tree import Tree

GRPO = '''"""GRPO: a small one.

    A_i = R_i - mean(R)                                        Eq. 1
    J = E[ 1/G sum_i min(r_i A_i, clip(r_i) A_i) ]             Eq. 2

The rest is as one thinks.
"""

import time
from dataclasses import dataclass

from common.errors import clean_exit
from common.masked import mean
from common.options import option


@dataclass
class Args:
    group_size: int = option(8, "completions of a prompt, G")
    clip: float = option(
        0.2, "the ratio is clipped at 1 - this"
    )
    std_eps: float = option(1e-6, "added to it")


@functools.cache
def compute_advantages(rewards, args):
    """Rewards less their mean. They have no unit."""
    return rewards - mean(rewards)


# Above a function.
def policy_loss(logprobs, old, advantages, args):
    """The loss of each token."""
    ratio = (logprobs - old).exp()
    # the pessimistic one
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    objective = min(ratio * advantages, clipped * advantages)
    return -objective


def token_weights(mask, args):
    return mask / mask.sum()


def main(argv=None):
    args = parse_args(Args, argv)
    run = Run(accelerator, args, "grpo")
    batch = {"prompts": [], "completion_mask": mean(argv)}
    loss = policy_loss(batch["completion_mask"], 0, compute_advantages(batch["prompts"], args), args)
    run.log({"optim/loss": loss * token_weights(1, args)})


if __name__ == "__main__":
    with clean_exit():
        main()
'''
COPY = GRPO.replace('"grpo")', '"copy")').replace("GRPO: a small one", "COPY: another")
COPY = COPY.replace("mask / mask.sum()", "mask / args.group_size  # a constant")
OWN = GRPO.replace('"grpo")', '"own")').replace("GRPO: a small one", "OWN: its ratio is capped")
OWN = OWN.replace("    objective = min(", "    clipped = clipped.clamp(max=args.cap)\n    objective = min(")
OWN = OWN.replace('"added to it")\n', '"added to it")\n    cap: float = option(10.0, "the cap")\n')
MASKED = '''import torch

LIMIT = 20


def mean(x):
    """The mean (). Of all rows."""
    return min(x.sum() / len(x), LIMIT)
'''
PAGE = """# {0}

## Details

1. **The clip** is [`clipped =`](../{0}.py), and [`mean`](../common/masked.py) is shared. See `tests/test_{0}.py`.
2. Another, `test_{0}`, is in [`policy_loss`](../{0}.py).

   | a | b |
"""


def column(advantage, clip, weights):
    return ("bias", "policy", "G", "any", "none", advantage, "none", "token", clip, weights, "8")


ENTRIES = {
    "grpo.py": family.Entry(column=column("R - mean", "0.2", "1 / tokens"), budget=(0, 0, 0)),
    "copy.py": family.Entry(
        paper="COPY ([a link](https://example.org)) weighs otherwise.",
        column=column("as GRPO", "0.2", "1 / G"),
        differs={"token_weights": ("a constant", 2), "main": ("its name", 2)},
    ),
    "own.py": family.Entry(
        paper="OWN has a cap.",
        column=column("as GRPO", "0.2 / 10", "1 / tokens"),
        differs={"policy_loss": ("the cap", 1), "main": ("its name", 2)},
    ),
}
ALGORITHMS = "# Table\n\n| | a | b | c | d | e | f | g | h |\n|---|\n| [`grpo.py`](../grpo.py) · old |\n\nEnd.\n"
ROWS = "| script | a | r | w |\n|---|---|---|---|\n| [grpo.py](grpo.py) | A | r | w |\n"
README = f"# Title\n\n{ROWS}\n[`mean`](common/masked.py)\n"


@functools.cache
def files():
    found = {
        "grpo.py": GRPO,
        "copy.py": COPY,
        "own.py": OWN,
        "common/masked.py": MASKED,
        "docs/algorithms.md": ALGORITHMS,
    }
    found |= {"common/errors.py": "def clean_exit():\n    pass\n", "common/options.py": "def option():\n    pass\n"}
    found |= {"README.md": README, "README.zh.md": README, "common/harness/args.py": "", "reward.py": "def mine(): 0\n"}
    contents = "[algorithms](algorithms.md) [metrics](metrics.md)\n\n- [grpo.py](grpo.md)\n"
    found |= {"docs/metrics.md": "| `optim/loss` | the loss | |\n", "docs/README.md": contents}
    for script in ENTRIES:
        name = script.removesuffix(".py")
        found[f"docs/{name}.md"] = PAGE.format(name)
        found[f"tests/test_{name}.py"] = f"def test_{name}():\n    pass\n"
        found[f"configs/{name}-paper.yaml"] = "clip: 0.1\n"
    return found


def small_family(folder, monkeypatch, **changed):
    """Its files in a folder, with these in the place of others: grpo_py=text; the tree of the folder."""
    own = {
        name.replace("_", ".") if name in ("grpo_py", "copy_py", "own_py") else name: t for name, t in changed.items()
    }
    for path, text in (files() | own).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    monkeypatch.setattr(family, "FAMILY", dict(ENTRIES))
    return Tree(folder)
