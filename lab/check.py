"""Recompute every registered verdict from the rows of the runs, and print it.

    python lab/check.py        needs scipy

Each line has the effect with its 95 % interval, and p after Holm's correction. For the verdict
"equivalent", p is that of the equivalence tests. Lines without a verdict were reported alongside
and decide nothing.
"""

import decide
import lead
import registry

DIGITS = {"policy/entropy": 4, "completion/length_incorrect": 2}  # decimals of an effect, else 3


def cells(name, decision, effect):
    """Return [name, verdict, effect with its interval, p] of a decision."""
    if decision.measured is None:
        return [name, decision.verdict, "", ""]
    verdict = decision.verdict
    p = f"{decision.p:.2g}"
    if verdict == registry.SAME:
        verdict = f"{verdict}: smaller than {effect['same']:g}"
        p = f"{decision.p_same:.2g} (of equivalence)"
    return [name, verdict, interval(decision.measured, effect), p]


def interval(measured, effect):
    digits = DIGITS.get(effect.get("metric"), 3)
    low = f"{measured.low:+.{digits}f}"
    high = f"{measured.high:+.{digits}f}"
    return f"{measured.effect:+.{digits}f} ({low} to {high})"


def of_claims(path=registry.CLAIMS):
    """Return the cells of each claim of a registration."""
    registration = registry.Registration(path)
    decided = decide.decisions(registration)
    lines = []
    for claim in registration.content["claims"]:
        lines.append(cells(claim["name"], decided[claim["name"]], claim["primary"]))
    return lines


def of_lead():
    """Return the cells of each effect of registered_lead.json, and of each reported difference."""
    registration = registry.Registration(registry.LEAD)
    decided = lead.decisions(registration)
    lines = []
    for effect in registration.content["effects"]:
        lines.append(cells(effect["name"], decided[effect["name"]], effect))
    for effect, measured in lead.reported(registration):
        name = f"{effect['arm']} less {effect['against']}"
        lines.append([name, "", interval(measured, effect), ""])
    return lines


def main():
    claims, lead_effects, kl = of_claims(), of_lead(), of_claims(registry.KL)
    for path, lines in (
        (registry.CLAIMS, claims),
        (registry.LEAD, lead_effects),
        (registry.KL, kl),
    ):
        print(path.name)
        for name, verdict, effect, p in lines:
            print(f"  {name:44} {verdict:31} {effect:30} {p}")


if __name__ == "__main__":
    main()
