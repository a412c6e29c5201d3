"""What a run shows while it goes: lines, and on a terminal a progress bar in the place of the lines of steps."""

import sys

from tqdm import tqdm

SHOWN = {
    "reward": "reward/mean",
    "length": "completion/length",
    "entropy": "policy/entropy",
    "margin": "rewards/margin",
    "accuracy": "rewards/accuracy",
}


def what_reward_has(metrics):
    """The parts of a reward where it has several, and the penalty of dapo.py.

    An evaluation does not count that penalty.

    {"reward_part/right": 0.4, "reward_part/format": 1, "overlong/penalty": -0.2} ->
    " (right 0.400, format 1.000, penalty -0.200)"
    """
    parts = {name.removeprefix("reward_part/"): x for name, x in metrics.items() if name.startswith("reward_part/")}
    if len(parts) == 1:
        parts = {}
    if metrics.get("overlong/penalty"):
        parts["penalty"] = metrics["overlong/penalty"]
    if not parts:
        return ""
    texts = [f"{name} {value:.3f}" for name, value in parts.items()]
    return f" ({', '.join(texts)})"


class Display:
    """Prints on the first process alone. Where stdout is a terminal, a bar shows the steps."""

    def __init__(self, accelerator):
        self.shows = accelerator.is_main_process
        self.bar = None

    def start_bar(self, step, last_step):
        """Show a bar that stands at `step`, if stdout is a terminal; `last_step` is below 0 where it is not known."""
        if self.shows and sys.stdout.isatty():
            total = last_step if last_step > 0 else None
            self.bar = tqdm(initial=step, total=total, unit="step", file=sys.stdout, dynamic_ncols=True)

    def print(self, text):
        """Print a line, above the bar if there is one."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
        elif self.shows:
            print(text, flush=True)

    def step(self, step, last_step, metrics, seconds):
        """Show a finished step: move the bar, or print a line."""
        values = [f"{short} {metrics[name]:.3f}" for short, name in SHOWN.items() if name in metrics]
        if "reward/mean" in metrics:
            values[0] += what_reward_has(metrics)
        if self.bar is not None:
            self.bar.set_postfix_str(", ".join(values), refresh=False)
            self.bar.update()
        else:
            of_all = f"/{last_step}" if last_step > 0 else ""
            self.print(f"step {step}{of_all}: {', '.join([*values, f'{seconds:.1f} s'])}")

    def close(self):
        """Leave the bar as it stands; what follows is printed below it."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
