"""Writes cases/*.json.

    python -m generate        from the folder that holds this one

Each expected number is computed here from a formula, by loops over lists in float64, with the
standard library alone. Each gradient stands in closed form, and is checked against central
differences before it is written.
"""

import pathlib

from . import advantages, critic, kl, masks, overlong, pairs, policy, splits, variants
from .cases import document, text_of

MODULES = (advantages, masks, policy, splits, kl, critic, pairs, overlong, variants)
SUBJECTS = [module.SUBJECT for module in MODULES]
FOLDER = pathlib.Path(__file__).parents[1] / "cases"


def main():
    FOLDER.mkdir(exist_ok=True)
    for subject in SUBJECTS:
        text = text_of(document(subject))
        path = FOLDER / f"{subject.name}.json"
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"{path.name}: {len(subject.cases)} cases, {len(text)} bytes")


if __name__ == "__main__":
    main()
