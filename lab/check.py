"""Prints every registered verdict with what it rests on, from the rows: python lab/check.py (needs scipy)

The effect has its interval of 95 %, and p is after Holm's correction. Where the verdict is "equivalent", p is that of
the tests of equivalence. Lines without a verdict were reported beside the others and decide nothing.
"""

import numpy as np

import decide
import lead
import registry

DIGITS = {"policy/entropy": 4, "completion/length_incorrect": 2}  # of effects in these metrics; of others three


def cells(name, decision, effect):
    """[name, verdict, effect with its interval, p] of a decision."""
    it = decision.measured
    if it is None:
        return [name, decision.verdict, "", ""]
    if decision.verdict == registry.SAME:
        return [name, f"{decision.verdict}: smaller than {effect['same']:g}", interval(it, effect),
                f"{decision.p_same:.2g} (of equivalence)"]  # fmt: skip
    return [name, decision.verdict, interval(it, effect), f"{decision.p:.2g}"]


def interval(measured, effect):
    digits = DIGITS.get(effect.get("metric"), 3)
    low, high = f"{measured.low:+.{digits}f}", f"{measured.high:+.{digits}f}"
    return f"{measured.effect:+.{digits}f} ({low} to {high})"


def of_claims():
    """A line for each claim of registered.json."""
    registered = registry.load()
    decided = decide.decisions(registered)
    return [cells(claim["name"], decided[claim["name"]], claim["primary"]) for claim in registered["claims"]]


def of_lead():
    """A line for each effect of registered_lead.json, and for each difference that it reports beside them."""
    with registry.using(lead.LEAD):
        registered = registry.load()
        decided = lead.decisions(registered)
        lines = [cells(effect["name"], decided[effect["name"]], effect) for effect in registered["effects"]]
        for effect in registered["reported"] if lead.deciding(registered) else ():
            found = lead.paired(lead.difference(registered, effect, lead.deciding(registered)), 0, np.inf)
            lines.append([f"{effect['arm']} less {effect['against']}", "", interval(found, effect), ""])
    return lines


def main():
    for title, lines in (("registered.json", of_claims()), ("registered_lead.json", of_lead())):
        print(title)
        for name, verdict, effect, p in lines:
            print(f"  {name:44} {verdict:31} {effect:30} {p}")


if __name__ == "__main__":
    main()
