"""Draws the figures of docs/theory.md into docs/figures/theory: python tools/theory_figures.py (needs matplotlib)

The curves are values of the scripts' own functions. A figure keeps the digest of what it shows, so that a test can say
when it is due.
"""

import hashlib
import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

import dapo  # noqa: E402
import dcpo  # noqa: E402
import grpo  # noqa: E402
import ppo  # noqa: E402

FOLDER = ROOT / "docs" / "figures" / "theory"
DUAL_CLIP = 3.0
RATIOS = torch.linspace(0.01, 4, 400, dtype=torch.float64)
OLD = torch.logspace(-3, 0, 301, dtype=torch.float64)  # probabilities
BOUNDS = {  # {label: (a script whose clip it is, colour)}
    "0.2 / 0.2 (PPO, GRPO)": (grpo, "#1f77b4"),
    "0.2 / 0.28 (DAPO)": (dapo, "#d62728"),
    "by old probability (DCPO)": (dcpo, "#ff7f0e"),
}
SILENT = {  # the shares that are logged of tokens without a gradient: {name: (text, where it stands, colour)}
    "clip_fraction_low": ("policy/clip_fraction_low", -1, "#1f77b4"),
    "clip_fraction_high": ("policy/clip_fraction_high", 1.05, "#d62728"),
    "dual_clip": ("policy/dual_clip\nverl: pg_clipfrac_lower", 0, "#9467bd"),
}


def size(args):
    return f"{args.prompts_per_step} prompts x\n{args.group_size} completion{'s' * (args.group_size > 1)}"


# {title: (boxes {name: (column, row, text, kind)}, arrows)}. The second line of a box is a function of the script.
FLOW = {
    "ppo.py: a critic is the baseline, one of each token": (
        {
            "prompts": (0, 1, size(ppo.Args()), "data"),
            "actor": (1, 1, "actor\nrollout", "trained"),
            "reward": (2, 2, "rule, or reward model\ncompute_rewards", "frozen"),
            "reference": (2, 1, "KL to the reference, if any\nshape_rewards", "frozen"),
            "critic": (2, 0, "a value for each token\nCritic", "trained"),
            "advantages": (3, 1, "GAE: A and return\ncompute_advantages", "data"),
            "policy_loss": (4, 1.6, "actor's update\npolicy_loss", "trained"),
            "value_loss": (4, 0.4, "critic's update\nvalue_loss", "trained"),
        },
        "prompts-actor actor-reward actor-reference actor-critic reward-advantages reference-advantages "
        "critic-advantages advantages-policy_loss advantages-value_loss",
    ),
    "grpo.py: the group is the baseline, one of all its tokens": (
        {
            "prompts": (0, 0.5, size(grpo.Args()), "data"),
            "actor": (1, 0.5, "actor\nrollout", "trained"),
            "reward": (2, 1, "rule, or reward model\ncompute_rewards", "frozen"),
            "reference": (2, 0, "log-probs of the reference\nload_reference", "frozen"),
            "advantages": (3, 1, "(R - mean) / std\ncompute_advantages", "data"),
            "policy_loss": (4, 0.5, "actor's update\npolicy_loss", "trained"),
        },
        "prompts-actor actor-reward actor-reference reward-advantages advantages-policy_loss reference-policy_loss",
    ),
}
KINDS = {"data": "#f0f0f0", "trained": "#d7ead7", "frozen": "#dbe6f5"}
DPI = 90


def clip_curves(sign):
    """Over RATIOS: the objective without and with dual clip, and where stats of `ppo.policy_loss` have it silent."""
    advantage, mask = torch.full((1, len(RATIOS)), float(sign)).double(), torch.ones(1, len(RATIOS), dtype=torch.bool)
    found = {}
    for name, c in (("min(r A, clip(r) A)", 0.0), (f"with dual clip, c = {DUAL_CLIP:g}", DUAL_CLIP)):
        new = RATIOS.log()[None].requires_grad_()
        losses, stats = ppo.policy_loss(new, torch.zeros_like(new), advantage, mask, ppo.Args(dual_clip=c))
        losses.sum().backward()
        found[name] = -losses[0].detach()
    silent = {name: stats[name][0] for name in SILENT}
    assert torch.equal(torch.stack(list(silent.values())).any(dim=0), new.grad[0] == 0)
    return found, silent


def bounds():
    """{label: lowest and highest ratio over OLD} by `dcpo.clip_bounds`."""
    found = {}
    for label, (module, _) in BOUNDS.items():
        args = module.Args()
        args = dcpo.Args(dynamic_clip=module is dcpo, clip_low=args.clip_low, clip_high=args.clip_high)
        found[label] = dcpo.clip_bounds(OLD.log()[None], torch.ones(1, len(OLD), dtype=torch.bool), args)
    return {label: [side[0] for side in pair] for label, pair in found.items()}


def draw_clip():
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, sign in zip(axes, (1, -1), strict=True):
        curves, silent = clip_curves(sign)
        plain, dual = curves
        axis.plot(RATIOS, sign * RATIOS, color="#bbbbbb", linewidth=1, label="r A")
        if sign < 0:
            axis.plot(RATIOS, curves[plain], color="#333333", linewidth=1.5, linestyle="--", label=plain)
        axis.plot(RATIOS, curves[dual], color="#333333", linewidth=2, label=dual if sign < 0 else plain)
        for name, where in silent.items():
            text, y, colour = SILENT[name]
            if where.any():
                left, right = RATIOS[where][0].item(), RATIOS[where][-1].item()
                axis.axvspan(left, right, color=colour, alpha=0.2, linewidth=0)
                middle, turned = (left + right) / 2, 90 if sign < 0 else 0
                axis.text(middle, y, text, rotation=turned, ha="center", va="top", fontsize=8, color=colour)
        title = "A = 1: the upper bound alone acts" if sign > 0 else "A = -1: the lower bound, and dual clip"
        axis.set(title=title, xlabel="ratio r", ylabel="objective", xlim=(0, 4), ylim=(0, 4) if sign > 0 else (-4, 0.2))
        axis.set_yticks([sign * y for y in range(5)])
        axis.legend(fontsize=8, loc="upper left" if sign > 0 else "lower left", frameon=False)
    return figure


def draw_bounds():
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for label, (low, high) in bounds().items():
        colour = BOUNDS[label][1]
        left.plot(OLD, high, color=colour, linewidth=2, label=label)
        left.plot(OLD, low, color=colour, linewidth=2, linestyle="--")
        right.plot(OLD, (OLD * high).clamp(max=1) - OLD, color=colour, linewidth=2, label=label)
    left.plot(OLD, 1 / OLD, color="#bbbbbb", linewidth=1)
    left.set(title="highest (solid) and lowest (dashed) ratio", xlabel="old probability", xscale="log", yscale="log",
             ylim=(0.4, 20))  # fmt: skip
    left.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    left.minorticks_off()
    right.set(title="probability that a token may gain", xlabel="old probability", xscale="log", yscale="log",
              ylim=(1e-4, 1))  # fmt: skip
    right.legend(fontsize=8, frameon=False, loc="lower center")
    left.text(0.085, 14, "beyond probability 1", color="#888888", fontsize=8)
    return figure


def draw_flow():
    heights = [3, 2]
    figure, axes = plt.subplots(2, 1, figsize=(10, 4.6), dpi=DPI, height_ratios=heights, layout="constrained")
    for axis, title, height in zip(axes, FLOW, heights, strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(xlim=(-0.5, 4.5), ylim=(-0.6, height - 0.4))
        axis.axis("off")
    said = "green: has weights that are trained; blue: frozen; grey: data. The next step begins with new prompts."
    figure.supxlabel(said, fontsize=8)
    for axis, (boxes, arrows) in zip(axes, FLOW.values(), strict=True):
        drawn = {}
        for name, (column, row, text, kind) in boxes.items():
            box = {"boxstyle": "round,pad=0.5", "facecolor": KINDS[kind], "edgecolor": "#888888"}
            drawn[name] = axis.text(column, row, text, ha="center", va="center", fontsize=8.5, bbox=box)
        figure.draw_without_rendering()  # the boxes have their places, by which the arrows are cut
        for start, end in (map(drawn.get, arrow.split("-")) for arrow in arrows.split()):
            ends = {"patchA": start.get_bbox_patch(), "patchB": end.get_bbox_patch()}
            style = {"arrowstyle": "->", "color": "#555555", "shrinkA": 1, "shrinkB": 1} | ends
            axis.annotate("", end.get_position(), start.get_position(), arrowprops=style)
    return figure


def shown():
    """{figure: digest of what it shows}."""
    what = {
        "clip": [
            [name, curve.tolist()] for sign in (1, -1) for part in clip_curves(sign) for name, curve in part.items()
        ],
        "bounds": [[label, [side.tolist() for side in pair]] for label, pair in bounds().items()],
        "flow": FLOW,
    }
    rounded = {
        name: json.loads(json.dumps(data), parse_float=lambda x: f"{float(x):.6g}") for name, data in what.items()
    }
    return {name: hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16] for name, data in rounded.items()}


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, digest in shown().items():
        figure = globals()[f"draw_{name}"]()
        figure.savefig(FOLDER / f"{name}.png", dpi=DPI, metadata={"Software": None, "Description": digest})
        plt.close(figure)


if __name__ == "__main__":
    main()
