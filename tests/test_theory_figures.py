"""tools/theory_figures.py: the figures of docs/theory.md show what the functions of the scripts give."""

import pytest
import torch

import dcpo
import grpo
import ppo
from testbed import ROOT, script

pytestmark = pytest.mark.needs("matplotlib")


@pytest.fixture(scope="module")
def program():
    import theory_figures

    yield theory_figures
    theory_figures.plt.close("all")


def drawn(figure):
    """{(panel, label or place): heights} of its lines."""
    lines = {(i, j): line for i, axis in enumerate(figure.axes) for j, line in enumerate(axis.lines)}
    return {place: torch.tensor(line.get_ydata()).double() for place, line in lines.items()}


def test_the_kept_figures_show_what_would_be_drawn_now(program, tmp_path, monkeypatch):
    from PIL import Image  # which matplotlib needs

    monkeypatch.setattr(program, "FOLDER", tmp_path)
    program.main()
    kept, now = (
        {path.stem: Image.open(path).text["Description"] for path in folder.glob("*.png")}
        for folder in (ROOT / "docs" / "figures" / "theory", tmp_path)
    )
    assert kept == now == program.shown(), "run python tools/theory_figures.py"
    page = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    assert all(f"](figures/theory/{name}.png)" in page for name in kept) and len(kept) == 3


@pytest.mark.parametrize("sign", [1, -1])
def test_the_clip_is_that_of_both_scripts_with_its_metrics(program, sign):
    curves, silent = program.clip_curves(sign)
    args = dict(dual_clip=program.DUAL_CLIP)
    new, A = program.RATIOS.log()[None], torch.full((1, 1), float(sign)).double()
    for module in (ppo, grpo):
        losses, stats = module.policy_loss(new, torch.zeros_like(new), A, new.isfinite(), module.Args(**args))
        assert torch.equal(list(curves.values())[1], -losses[0])
        assert all(torch.equal(silent[name], stats[name][0]) for name in program.SILENT)
    named = {name for name, where in silent.items() if where.any()}
    assert named == ({"clip_fraction_high"} if sign > 0 else {"clip_fraction_low", "dual_clip"})


def test_the_lines_are_the_values_of_the_functions(program, monkeypatch):
    """A changed function changes them."""
    before = drawn(program.draw_clip()), drawn(program.draw_bounds())
    digests, loss, bounds = program.shown(), ppo.policy_loss, dcpo.clip_bounds

    def other_loss(*inputs):
        losses, stats = loss(*inputs)
        return 2 * losses, stats

    monkeypatch.setattr(ppo, "policy_loss", other_loss)
    monkeypatch.setattr(dcpo, "clip_bounds", lambda *inputs: [3 * side for side in bounds(*inputs)])
    clip, bound = drawn(program.draw_clip()), drawn(program.draw_bounds())
    changed = {place for place in clip if torch.equal(clip[place], 2 * before[0][place])}
    assert changed == {(0, 1), (1, 1), (1, 2)}  # all but the line r A
    assert all(torch.equal(bound[0, j], 3 * before[1][0, j]) for j in range(6))
    now = program.shown()
    assert {name for name in digests if digests[name] != now[name]} == {"clip", "bounds"}


def test_the_boxes_of_the_flow_name_functions_of_their_scripts(program):
    for title, (boxes, arrows) in program.FLOW.items():
        module = script(title.partition(".py")[0])
        for name, (*_, text, kind) in boxes.items():
            assert name == "prompts" or hasattr(module, text.splitlines()[1]), text
            assert kind in program.KINDS
        assert {end for arrow in arrows.split() for end in arrow.split("-")} == boxes.keys()
