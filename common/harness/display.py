"""What a run shows: a progress bar or lines, warnings, its closing line, and the trackers of --report_to."""

import dataclasses
import importlib
import os
import sys
import time

from tqdm import tqdm

from common.errors import InputError, one_line

SHOWN = {"reward": "reward/mean", "length": "completion/length", "entropy": "policy/entropy"}
SHOWN |= {"margin": "rewards/margin", "accuracy": "rewards/accuracy"}
# Five steps in a row with one of these values say that a run does not learn. The text is a section of
# docs/troubleshooting.md.
DEAD = {
    "completion/truncated": (1, "Everything is truncated"),
    "advantage/zero_groups": (1, "All groups agree: zero advantages"),
    "optim/grad_norm": (0, "The loss is 0"),
}


class Display:
    """A progress bar on a terminal, elsewhere a line for each step; and warnings, each of them once.

    `say` prints a line. On all processes but the first the bar is `hidden`, and `say` prints nothing.
    """

    def __init__(self, say, step, max_steps, hidden):
        self.say, self.said_unscored = say, False
        self.dead_steps = dict.fromkeys(DEAD, 0)  # in a row; a resumed run starts again at 0
        total = max_steps if max_steps > 0 else None
        # Without a terminal there is no bar (None).
        self.bar = tqdm(total=total, initial=step, unit="step", disable=hidden or max_steps == 0 or None)
        self.lines = not (sys.stdout.isatty() and sys.stderr.isatty())
        self.step_start = time.perf_counter()

    def show(self, step, metrics):
        """Advance the bar or print the line of this step, and warn if the run does not learn."""
        values = {short: f"{metrics[name]:.3f}" for short, name in SHOWN.items() if name in metrics}
        self.bar.set_postfix(values)
        self.bar.update()
        if self.lines:
            total = f"/{self.bar.total}" if self.bar.total else ""
            seconds = f"{time.perf_counter() - self.step_start:.1f} s"
            self.say(f"step {step}{total}: " + ", ".join([*map(" ".join, values.items()), seconds]))
        self.warn_of_dead(metrics)

    def warn_of_dead(self, metrics):
        """Warn when a metric has had its value in DEAD for five steps in a row, once for each metric.

        Groups of equal rewards are no cause if the history of dcpo.py or the critic of ppo.py still gives advantages;
        nor is a gradient of 0 while ppo.py trains only its critic and the policy's learning rate is 0.
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
        """Warn the first time that some completions, a `share` of them, have no reward."""
        if share and not self.said_unscored:
            self.say(
                f"{share:.1%} of the completions have no reward, since every function returned None for them: they "
                "are left out (reward/unscored or pairs/unscored in metrics.jsonl counts them; this is said once)"
            )
            self.said_unscored = True


def scores(first, last, rewards):
    """The scores of the first and the last evaluation as the closing line has them: eval/reward; eval/pass@1 if the
    `rewards` name an accuracy (and then eval/reward only if it differs); eval/accuracy on pairs."""
    names = [name for name in ("eval/pass@1", "eval/reward", "eval/accuracy") if name in last]
    before = {name: f"before {first[name]:.3f}, " if name in first else "" for name in names}
    found = {name: f"{before[name]}after {last[name]:.3f}; " for name in names}
    if not {"accuracy", "math_verify"} & set(rewards):
        found.pop("eval/pass@1", None)
    elif found.get("eval/reward") == found.get("eval/pass@1"):
        found.pop("eval/reward", None)
    return "".join(f"{name} {score}" for name, score in found.items())


def start_trackers(accelerator, args, script, folder):
    """Start the trackers of --report_to: the project is named after the script, the run after its folder."""
    accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard's
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
    options = {"wandb": {"name": folder.name, "dir": str(folder)}, "trackio": {"name": folder.name}}
    values = dataclasses.asdict(args)
    values |= {name: " ".join(map(str, value)) for name, value in values.items() if isinstance(value, list)}
    try:
        accelerator.init_trackers(script, config=values, init_kwargs=options)
    except Exception as error:  # each tracker fails in its own way: no key, no network, no room
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
