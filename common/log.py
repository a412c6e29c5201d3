"""What a run tells: lines on a terminal, metrics.jsonl, samples.jsonl, trackers, warnings."""

import collections
import json
import os
import sys
import time

from accelerate.utils import gather_object
from tqdm import tqdm

from common.errors import InputError, one_line, say
from common.metrics import take_logged
from common.rewards import RULES

FILES = ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")
# {metric: value} of a step from which nothing is learned; after so many in a row the run says so.
NOTHING_LEARNED = {
    "completion/truncated": 1,
    "advantage/zero_groups": 1,
    "dcpo/response_utilization": 0,
    "optim/grad_norm": 0,
}
IDLE_STEPS = 5
SHOWN = {
    "reward": "reward/mean",
    "length": "completion/length",
    "entropy": "policy/entropy",
    "margin": "rewards/margin",
    "accuracy": "rewards/accuracy",
}


class Log:
    """The log of a run in its `folder`. The first process alone prints and writes."""

    def __init__(self, folder, args, accelerator, tokenizer, rewards):
        self.folder = folder
        self.args = args
        self.accelerator = accelerator
        self.tokenizer = tokenizer
        self.rewards = [reward for reward in rewards if reward.function not in RULES.values()]
        self.step = 0  # that of the rows that are written
        self.first_eval = None
        self.last_eval = None
        self.problem = None  # what could not be written; the run stops for it
        self.bar = None
        self.logged = {}  # what reward functions gave to `log_metric` in this step
        self.said_raw = False
        self.idle = collections.Counter()  # steps in a row from which nothing was learned
        self.values = {}  # {name: at most two values} of each reward since the last look at them
        self.watched = 0  # steps of this process

    def start_bar(self, total):
        """Show a bar in place of a line for each step, on a terminal."""
        if self.accelerator.is_main_process and sys.stdout.isatty():
            total = total if total > 0 else None
            self.bar = tqdm(initial=self.step, total=total, unit="step", dynamic_ncols=True)

    def close_bar(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def begin_step(self, step):
        self.step = step
        self.step_start = time.perf_counter()

    def end_step(self, metrics, prompts, texts, rewards, parts, last_step):
        """Log a step: its metrics, its first group as samples, and what is wrong with it."""
        self.collect_logged()
        metrics = metrics | self.logged
        self.logged = {}
        self.show_step(metrics, last_step)
        self.show_samples(prompts, texts, rewards, parts)
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluated:
            self.last_eval = evaluated
            self.show_evaluation(evaluated)
        self.write_row(metrics)
        self.warn(metrics)
        self.warn_of_raised(texts, parts)
        self.warn_of_constants(parts)

    def first(self, result, beside=None):
        """Log the first evaluation, with the metrics `beside` it."""
        self.first_eval = self.last_eval = result
        self.show_evaluation(result)
        self.write_row((beside or {}) | result | self.logged)
        self.logged = {}

    def collect_logged(self, prefix=""):
        """Take what reward functions have logged so far, `prefix` before its names."""
        if self.rewards:
            values = take_logged(self.rewards)
            self.logged |= {prefix + name: value for name, value in values.items()}

    # --- lines ---

    def print(self, text):
        """Print a line on the first process, above the bar if there is one."""
        if self.bar is None:
            say(text)
        else:
            self.bar.write(text)

    def show_step(self, metrics, last_step):
        """Move the bar of a terminal, or print a line."""
        values = [f"{short} {metrics[name]:.3f}" for short, name in SHOWN.items() if name in metrics]
        if "reward/mean" in metrics:
            values[0] += parts_in_words(metrics)
        if self.bar is None:
            of_all = f"/{last_step}" if last_step > 0 else ""
            seconds = f"{time.perf_counter() - self.step_start:.1f} s"
            self.print(f"step {self.step}{of_all}: {', '.join([*values, seconds])}")
        else:
            self.bar.set_postfix_str(", ".join(values), refresh=False)
            self.bar.update()

    def show_evaluation(self, result):
        scores = ", ".join(f"{name} {value:.3f}" for name, value in self.scores(result).items())
        self.print(f"step {self.step}: {scores}")

    def scores(self, result):
        """The scores of an evaluation; pass@k means nothing without the accuracy."""
        rewards = getattr(self.args, "reward", [])
        return {name: x for name, x in result.items() if "accuracy" in rewards or "/pass@" not in name}

    def before_and_after(self):
        """The scores of the first and the last evaluation as text."""
        first = self.scores(self.first_eval or {})
        last = self.scores(self.last_eval or {})
        for name in ("eval/pass@1", "eval/accuracy", "eval/reward"):
            if name in last and self.step:
                before = f"before {first[name]:.3f}, " if name in first else ""
                return f"{name} {before}after {last[name]:.3f}; "
        return ""

    def show_raw(self, prompt, completion):
        """Print once what the model reads and writes (token ids), special tokens included."""
        if self.said_raw:
            return
        self.said_raw = True
        options = dict(skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for name, ids in (("first prompt", prompt), ("first completion", completion)):
            self.print(f"{name}: {self.tokenizer.decode(ids[-500:], **options)!r}")

    # --- files and trackers ---

    def write(self, name, rows, mode="a"):
        """Add rows to a JSONL file of the folder, "w": replace it. If that fails, the run stops."""
        if not self.accelerator.is_main_process:
            return
        lines = [json.dumps(row, default=str) + "\n" for row in rows]
        path = self.folder / (name if mode == "a" else f"{name}.tmp")
        try:
            with open(path, mode, encoding="utf-8") as file:
                file.writelines(lines)
            if mode == "w":
                os.replace(path, self.folder / name)
        except OSError as error:
            self.problem = self.problem or f"{self.folder / name} cannot be written: {one_line(error)}"

    def cut(self, sizes):
        """Cut the JSONL files back to their `sizes` {name: bytes}: what came after a checkpoint is gone."""
        for name in FILES:
            file = self.folder / name
            if file.exists():
                os.truncate(file, min(sizes.get(name, 0), file.stat().st_size))

    def write_row(self, metrics):
        """Add a row to metrics.jsonl, and give it to the trackers; the run goes on without one that fails."""
        row = {"step": self.step} | metrics
        self.write("metrics.jsonl", [row])
        try:
            self.accelerator.log(row, step=self.step)
        except Exception as error:  # each tracker fails in its own way
            self.accelerator.trackers = []
            self.print(f"--report_to: {one_line(error)}; from here on only metrics.jsonl has the metrics")

    def start_trackers(self, script):
        """Start the trackers of --report_to: the project is the script, the run its folder."""
        if not self.args.report_to:
            return
        folder = self.folder.resolve()
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        self.accelerator.project_configuration.logging_dir = str(folder)
        config = {name: str(value) for name, value in vars(self.args).items()}
        options = {
            "wandb": {"name": folder.name, "dir": str(folder)},
            "trackio": {"name": folder.name},
        }
        try:
            self.accelerator.init_trackers(script, config=config, init_kwargs=options)
        except Exception as error:  # each tracker fails in its own way
            names = " ".join(self.args.report_to)
            raise InputError(f"--report_to {names}: {one_line(error)}") from None

    def show_samples(self, prompts, texts, rewards, parts):
        """Write the first group to samples.jsonl; at the steps 1, 2, 4, 8, ... print its first row."""
        n = len(texts) // max(len(prompts), 1)
        self.write_samples(prompts[:1], texts[:n], rewards, parts)
        if n and self.step & (self.step - 1) == 0:
            shown = f"{prompts[0].prompt!r} -> {str(texts[0])!r}"
            self.print(f"step {self.step}, reward {rewards[0]:g}: {shown}")

    def write_samples(self, prompts, texts, rewards, parts, **about):
        """Write completions to samples.jsonl; the rows of a prompt are adjacent."""
        rows = []
        for i, text in enumerate(texts):
            prompt = prompts[i // (len(texts) // len(prompts))]
            row_parts = {name: float(part[i]) for name, part in (parts or {}).items()}
            row = {
                "step": self.step,
                **about,
                "prompt": prompt.prompt,
                "completion": text,
                "answer": prompt.gold,
                "reward": float(rewards[i]),
                "parts": {name: x if x == x else None for name, x in row_parts.items()},
                "tokens": len(text.ids),
                "truncated": text.truncated,
            }
            rows.append(row | ({"extra": text.extra} if text.extra else {}))
        self.write("samples.jsonl", rows)

    # --- warnings ---

    def warn(self, metrics):
        """Say that nothing is learned, after IDLE_STEPS steps that show it."""
        has_critic = "optim/critic_lr" in metrics  # then equal rewards of a group may teach
        for name, value in NOTHING_LEARNED.items():
            if name == "advantage/zero_groups" and has_critic:
                continue
            self.idle[name] = self.idle[name] + 1 if metrics.get(name) == value else 0
            if self.idle[name] == IDLE_STEPS:
                where = f"see docs/watch.md; {IDLE_STEPS} steps in a row"
                self.print(f"nothing is learned: {name} is {value} ({where})")
        share = metrics.get("reward/unscored")
        if share and not self.idle["unscored"]:
            self.idle["unscored"] = 1
            self.print(f"{share:.1%} of the completions have no reward: they teach nothing")

    def warn_of_raised(self, texts, parts):
        """Say once that truncated completions have reward 0 where they would have less."""
        added = (parts or {}).get("truncated", [0] * len(texts))
        raised = [text.truncated and part > 0 for text, part in zip(texts, added, strict=True)]
        if any(raised) and not self.idle["raised"]:
            self.idle["raised"] = 1
            told = f"{sum(raised) / len(raised):.1%} of the completions are truncated and have reward 0"
            self.print(f"{told} where they would have less: to be cut off is better than to be wrong")

    def warn_of_constants(self, parts):
        """Say once of a reward that has had one value for all completions of IDLE_STEPS steps."""
        for name, part in (parts or {}).items():
            if name == "truncated":  # of dr_grpo.py: no reward, and 0 where nothing is truncated
                continue
            values = self.values.get(name, set()) | set(part[~part.isnan()].tolist())
            self.values[name] = set(sorted(values)[:2])  # two tell that it varies
        self.watched += 1
        if self.watched % IDLE_STEPS:
            return
        for found in zip(*gather_object([list(self.values.items())]), strict=True):
            name = found[0][0]
            values = set().union(*[values for _, values in found])
            if len(values) == 1 and not self.idle[f"reward {name}"]:
                self.idle[f"reward {name}"] = 1
                always = f"is {values.pop():g} for every completion of {IDLE_STEPS} steps"
                self.print(f"reward {name} {always}: it teaches nothing so far")
        self.values = {}


def parts_in_words(metrics):
    """The parts of a reward where it has several, and the penalty of dapo.py.

    {"reward_part/right": 0.4, "reward_part/format": 1} -> " (right 0.400, format 1.000)"
    """
    start = "reward_part/"
    parts = {name.removeprefix(start): x for name, x in metrics.items() if name.startswith(start)}
    if not parts.get("truncated"):
        parts.pop("truncated", None)
    if len(parts) == 1:
        parts = {}
    if metrics.get("overlong/penalty"):
        parts["penalty"] = metrics["overlong/penalty"]
    texts = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
    return f" ({texts})" if texts else ""
