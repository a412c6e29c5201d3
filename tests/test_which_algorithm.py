"""docs/algorithms.md, "Which one, when": its numbers are those of the kept runs."""

import re

import numpy as np
import pytest

import lead
import registry
import report
from testbed import ROOT

pytestmark = pytest.mark.needs("scipy")
TEXT = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").split("## Which one, when")[1].split("\n## ")[0]
LINK = re.compile(r"\[([^\]]+)\]\(claims\.md#([^)]+)\)")


def test_an_effect_is_that_of_the_claim_that_it_links_to():
    import decide

    claims = {report.anchor(claim["title"]): claim for claim in registry.claims(registry.load()).values()}
    found = {anchor: text for text, anchor in LINK.findall(TEXT) if anchor in claims}
    assert len(found) == 11
    for anchor, text in found.items():
        claim = claims[anchor]
        assert text == report.interval(decide.measured(claim), claim["primary"]["metric"]), anchor


def test_the_other_numbers_are_those_of_the_page_of_claims():
    claims = registry.claims(registry.load())
    both = {"metric": "accuracy", "run": "dr_grpo", "against": "grpo", "over": "end"}
    effect = report.difference(claims["length"], both)[-1]
    seeds = claims["best-dapo"]["seeds"]
    dpo, grpo = (f"{np.mean(report.results_of(f'best-{name}', seeds)):.3f}" for name in ("dpo", "grpo"))
    seconds, after = report.at_equal_seconds(seeds)
    clock = [f"{after[name]:.3f}" for name in ("grpo", "ppo")]
    assert "after {:.3g} seconds, in training, GRPO has {} and PPO {} ".format(seconds, *clock) in TEXT
    assert f"both at 1e-4: {effect}," in TEXT and f"{dpo} in ten rounds of own pairs, GRPO {grpo} " in TEXT
    same_shape, more_prompts = of_the_lead()
    assert (
        f"[{more_prompts}](claims.md#an-experiment-of-its-own), and PPO with 32 x 8 less Dr. GRPO {same_shape} |"
        in TEXT
    )
    rest = LINK.sub("", TEXT).replace(effect, "").replace(same_shape, "")
    assert set(re.findall(r"\d+\.\d+", rest)) == {dpo, grpo, *clock, "0.1", "0.03", "0.05", f"{seconds:.3g}"}


def of_the_lead():
    """The two registered effects of what PPO's lead is made of, with their intervals."""
    with registry.using(lead.LEAD):
        registered = registry.load()
        found = lead.decisions(registered, lead.deciding(registered, lead.counting(registered)))
    return [lead.interval(it.measured) for it in found.values()]
