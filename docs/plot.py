"""Plot accuracy, length and entropy of one or more runs: python docs/plot.py runs/*/metrics.jsonl [-o docs/grpo.png]"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "accuracy": {"reward/accuracy": "training rollouts", "eval/pass@1": "held-out pass@1"},
    "completion length (tokens)": {"completion/length": "training rollouts", "eval/length": "held-out"},
    "entropy (nats per token)": {"policy/entropy": "policy"},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("-o", "--output", default="metrics.png")
    args = parser.parse_args()
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3), constrained_layout=True)
    for axis, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name, style in zip(names, ("-", "o"), strict=False):
            for i, file in enumerate(args.files):
                rows = [json.loads(line) for line in file.read_text().splitlines()]
                points = [(row["step"], row[name]) for row in rows if name in row]
                label = names[name] if i == 0 else None
                axis.plot(*zip(*points, strict=True), style, color=f"C{i}", label=label, alpha=0.8, markersize=4)
        axis.set(title=title, xlabel="step")
        axis.legend(frameon=False)
    figure.savefig(args.output, dpi=110)


if __name__ == "__main__":
    main()
