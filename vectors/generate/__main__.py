"""Write cases/*.json and portable/policy_losses.json.

    python -m generate        in the folder above this one

Every expected number comes from a formula, computed by loops over lists in float64 with nothing but
the standard library. Gradients are in closed form, and are checked against central differences
before they are written.
"""

import pathlib

from . import (
    advantages,
    critic,
    distill,
    kl,
    logprobs,
    masks,
    overlong,
    pairs,
    policy,
    portable,
    splits,
    variants,
)
from .cases import document, text_of

MODULES = (advantages, masks, logprobs, policy, splits, kl, critic, pairs)
MODULES += (overlong, distill, variants)
SUBJECTS = [module.SUBJECT for module in MODULES]
FOLDER = pathlib.Path(__file__).parents[1] / "cases"
PORTABLE = FOLDER.parent / "portable" / "policy_losses.json"


def main():
    FOLDER.mkdir(exist_ok=True)
    for subject in SUBJECTS:
        text = text_of(document(subject))
        path = FOLDER / f"{subject.name}.json"
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{path.name}: {len(subject.cases)} cases, {len(text)} bytes")
    PORTABLE.parent.mkdir(exist_ok=True)
    content = portable.document()
    PORTABLE.write_text(text_of(content), encoding="utf-8", newline="\n")
    print(f"{PORTABLE.name}: {len(content['cases'])} of these cases")


if __name__ == "__main__":
    main()
