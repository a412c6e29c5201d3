"""What a test cannot know of the eight scripts: which functions differ on purpose, and which options do nothing.

A script is a file beside grpo.py that has a `class Args`. One of your own needs no entry here: the
suites run over it, and its functions are nobody's copies.
"""

import pathlib
import re
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclass
class Entry:
    kind: str = "groups"  # what its advantages come from: `groups`, a `critic`, or none, because it trains on `pairs`
    differs: dict = field(default_factory=dict)  # {function with a text of its own under a shared name: why}
    inert: dict = field(default_factory=dict)  # {option of grpo.py that changes nothing here: why it is not refused}


FAMILY = {
    "grpo.py": Entry(),
    "dr_grpo.py": Entry(
        differs={
            "compute_rewards": "truncated rows score 0",
            "token_weights": "a constant in place of the length",
            "main": "its name, and the loss mask without truncated rows",
        },
    ),
    "dapo.py": Entry(
        differs={
            "compute_rewards": "+1/-1",
            "token_weights": "one weight for every token",
            "main": "its name, checks of its options, and dynamic sampling",
        },
    ),
    "gspo.py": Entry(
        differs={"policy_loss": "the ratio is that of the row", "main": "its name"},
    ),
    "dcpo.py": Entry(
        differs={
            "compute_rewards": "-1 without an answer",
            "compute_advantages": "smoothed by the prompt's history",
            "policy_loss": "bounds of each token, one cap",
            "token_weights": "the sum over a group",
            "main": "its name, checks of its options, and the history",
        },
        inert={"dual_clip": "acts with --no_dynamic_clip; else --max_ratio is the cap, for both signs"},
    ),
    "ppo.py": Entry(
        kind="critic",
        differs={
            "compute_advantages": "GAE in place of the group",
            "policy_loss": "Eq. 8 too, and coefficients that controllers move",
            "token_weights": "one weight for every token",
            "update": "advantages here, the critic, target_kl",
            "main": "its name, checks, the critic and the controllers",
        },
    ),
    "reward_model.py": Entry(
        kind="pairs",
        differs={"main": "steps over given pairs, no completions; another model is saved"},
    ),
    "dpo.py": Entry(
        kind="pairs",
        differs={
            "main": "rounds of pairs in place of rollouts",
            "pair_losses": "log-probs against the reference in place of scores",
        },
    ),
}


def found(folder=ROOT):
    """{script: source} of the scripts that are there: those of FAMILY in its order, then others by name."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    scripts = [name for name, source in sources.items() if re.search(r"^class Args\b", source, re.MULTILINE)]
    known = [name for name in FAMILY if name in scripts]
    return {name: sources[name] for name in [*known, *(name for name in scripts if name not in FAMILY)]}


def entry(script):
    """Its entry; of a script of your own, one with nothing in it."""
    return FAMILY.get(script, Entry())
