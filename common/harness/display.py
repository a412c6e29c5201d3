"""What a run shows: a bar or lines, what keeps it from learning, its closing line, and the trackers of --report_to."""

import dataclasses
import importlib
import os
import sys
import time

from tqdm import tqdm

from common.errors import InputError, one_line

SHOWN = {"reward": "reward/mean", "length": "completion/length", "entropy": "policy/entropy"}
SHOWN |= {"margin": "rewards/margin", "accuracy": "rewards/accuracy"}
# What no healthy run has in five steps in a row: {metric: (value, the section of docs/troubleshooting.md)}
DEAD = {
    "completion/truncated": (1, "Everything is truncated"),
    "advantage/zero_groups": (1, "All groups agree: zero advantages"),
    "optim/grad_norm": (0, "The loss is 0"),
}


class Display:
    """On a terminal a bar, elsewhere a line for each step; and warnings, each of them once. `say` prints a line.

    The first process has it; on the others the bar is `hidden`, and `say` says nothing.
    """

    def __init__(self, say, step, max_steps, hidden):
        self.say, self.said_unscored = say, False
        self.dead_steps = dict.fromkeys(DEAD, 0)  # in a row; a resume counts anew
        total = max_steps if max_steps > 0 else None
        # Without a terminal there is no bar (None).
        self.bar = tqdm(total=total, initial=step, unit="step", disable=hidden or max_steps == 0 or None)
        self.lines = not (sys.stdout.isatty() and sys.stderr.isatty())
        self.step_start = time.perf_counter()

    def show(self, step, metrics):
        """Advance the bar, or print the line of this step, and warn of what keeps the run from learning."""
        values = {short: f"{metrics[name]:.3f}" for short, name in SHOWN.items() if name in metrics}
        self.bar.set_postfix(values)
        self.bar.update()
        if self.lines:
            total = f"/{self.bar.total}" if self.bar.total else ""
            seconds = f"{time.perf_counter() - self.step_start:.1f} s"
            self.say(f"step {step}{total}: " + ", ".join([*map(" ".join, values.items()), seconds]))
        self.warn_of_dead(metrics)

    def warn_of_dead(self, metrics):
        """Say, once for each sign in DEAD, that five steps in a row had it.

        Groups that agree are no sign where dcpo.py's history or ppo.py's critic still gives advantages; nor is a
        gradient of 0 while ppo.py trains its critic alone, at a learning rate of 0.
        """
        excused = {
            "advantage/zero_groups": metrics.get("dcpo/response_utilization") or "optim/critic_lr" in metrics,
            "optim/grad_norm": metrics.get("optim/lr") == 0,
        }
        for name, (value, section) in DEAD.items():
            if self.dead_steps[name] < 5:
                dead = metrics.get(name) == value and not excused.get(name)
                self.dead_steps[name] = self.dead_steps[name] + 1 if dead else 0
                if self.dead_steps[name] == 5:
                    where = f'docs/troubleshooting.md, "{section}"'
                    self.say(f"{name} has been {value} for 5 steps in a row (this is said once): see {where}")

    def warn_of_unscored(self, share):
        """Say it the first time that a `share` of the completions has no reward."""
        if share and not self.said_unscored:
            self.say(
                f"{share:.1%} of the completions have no reward, since every function returned None for them: they "
                "are left out (reward/unscored or pairs/unscored in metrics.jsonl counts them; this is said once)"
            )
            self.said_unscored = True


def scores(first, last, rewards):
    """The first and the last evaluation, for the closing line: eval/reward; eval/pass@1 if accuracy is among the
    `rewards` (then eval/reward only if it differs); eval/accuracy on pairs."""
    names = [name for name in ("eval/pass@1", "eval/reward", "eval/accuracy") if name in first and name in last]
    found = {name: f"before {first[name]:.3f}, after {last[name]:.3f}; " for name in names}
    if not {"accuracy", "math_verify"} & set(rewards):
        found.pop("eval/pass@1", None)
    elif found.get("eval/reward") == found.get("eval/pass@1"):
        found.pop("eval/reward", None)
    return "".join(f"{name} {score}" for name, score in found.items())


def start_trackers(accelerator, args, script, folder):
    """Start the trackers of --report_to: the project is the script, the run has the name of its folder."""
    accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard's
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
    options = {"wandb": {"name": folder.name, "dir": str(folder)}, "trackio": {"name": folder.name}}
    values = dataclasses.asdict(args)
    values |= {name: " ".join(map(str, value)) for name, value in values.items() if isinstance(value, list)}
    try:
        accelerator.init_trackers(script, config=values, init_kwargs=options)
    except Exception as error:  # each tracker has its own way to fail: no key, no network, no room
        raise InputError(f"--report_to {' '.join(args.report_to)}: {one_line(error)}") from None


def log_table(accelerator, samples, step):
    """Give these rows of samples.jsonl to the trackers that have tables."""
    columns = ["prompt", "completion", "answer", "reward"]
    extra = list(samples[0].get("extra", {}))
    rows = [[sample[x] for x in columns] + [sample["extra"].get(x) for x in extra] for sample in samples]
    for tracker in accelerator.trackers:
        if tracker.name in ("wandb", "trackio"):
            table = importlib.import_module(tracker.name).Table(columns=columns + extra, data=rows)
            tracker.log({"samples": table}, step=step)
