"""The folder of a run: its rows, samples, progress and evaluation lines, its start and its end."""

import contextlib
import dataclasses
import datetime
import importlib
import itertools
import json
import os
import pathlib
import shutil
import sys
import time

import filelock
import torch
from tqdm import tqdm

from common.batches import raw_lines
from common.errors import InputError, one_line, process_of
from common.harness.args import batch_equation
from common.harness.checkpoints import Checkpoints, find_checkpoints, put_in_place, rows_up_to, write_text, writing
from common.harness.distributed import agreed
from common.harness.loading import save_pretrained
from common.harness.metrics import sample_rows

SKIPPED_STEPS = 10  # so many without any reward, one after the other, end a run
# What no healthy run has in five steps in a row: {metric: (value, the section of docs/troubleshooting.md)}
DEAD = {
    "completion/truncated": (1, "Everything is truncated"),
    "advantage/zero_groups": (1, "All groups agree: zero advantages"),
    "optim/grad_norm": (0, "The loss is 0"),
}


class Run:
    """The folder of a run: args.json, metrics.jsonl, samples.jsonl, checkpoints/, model-step-N/, at the end model/.

    The first process locks the folder for as long as the run lives: a second run would mix its rows with these. `step`
    counts the finished steps, which the user's reward functions are told. An algorithm gives to `keep` what a
    checkpoint needs besides weights and optimizer.
    """

    FILES = "args.json metrics.jsonl samples.jsonl pairs-round-*.jsonl checkpoints model model-step-*".split()

    def __init__(self, accelerator, args, script, reward_functions=()):
        from accelerate.utils import broadcast_object_list

        self.accelerator, self.args, self.script = accelerator, args, script
        self.step, self.first_eval, self.last_eval, self.model_step = 0, None, None, None
        self.exit_code, self.interrupted, self.unscored = 0, False, 0.0
        self.skipped = SKIPPED_STEPS - 1  # in a row; nothing has been trained: the first one is an error
        self.dead_steps = dict.fromkeys(DEAD, 0)  # in a row; a resume counts anew
        self.started = self.last_row = time.perf_counter()
        self.bar = self.lock = self.new_folder = None
        self.process = process_of(self)
        for reward in reward_functions:
            reward.run = self
        folder = [None]
        with agreed(accelerator):
            if accelerator.is_main_process:
                with writing("the folder of the run"):
                    folder = [str(self.claim_folder())]
        self.folder = pathlib.Path(broadcast_object_list(folder)[0])
        self.checkpoints = Checkpoints(accelerator, args, script, self.folder)
        self.keep(run=self)
        with agreed(accelerator):
            if accelerator.is_main_process:
                self.checkpoints.look()
        if args.report_to:
            with agreed(accelerator):
                self.start_trackers()

    def start_trackers(self):
        """Start the trackers of --report_to: the project is the script, the run has the name of its folder."""
        folder = self.folder.resolve()
        self.accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard's
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
        options = {"wandb": {"name": folder.name, "dir": str(folder)}, "trackio": {"name": folder.name}}
        values = dataclasses.asdict(self.args)
        values |= {name: " ".join(map(str, value)) for name, value in values.items() if isinstance(value, list)}
        try:
            self.accelerator.init_trackers(self.script, config=values, init_kwargs=options)
        except Exception as error:  # each tracker has its own way to fail: no key, no network, no room
            raise InputError(f"--report_to {' '.join(self.args.report_to)}: {one_line(error)}") from None

    def claim_folder(self):
        """Make the folder of the run and lock it. InputError where another run holds it, or it holds other things."""
        if self.args.output_dir:
            folder = pathlib.Path(self.args.output_dir)
            self.check_folder(folder)
            self.new_folder = None if folder.exists() else folder
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = self.new_folder = new_folder(f"runs/{self.script}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        # One object a file: a run of this process that ended with an exception does not keep the next one out.
        self.lock = filelock.FileLock(folder / "lock", blocking=False, is_singleton=True)
        try:
            self.lock.acquire()
        except filelock.Timeout:
            raise InputError(f"--output_dir {folder}: another run is using it") from None
        self.check_folder(folder)  # again: that run may have ended between the first look and the lock
        return folder

    def check_folder(self, folder):
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output_dir {folder}: is not a folder")
        for path in (*folder.glob("*"), *folder.glob("checkpoints/*/*")):
            if path.is_fifo():  # to open it would wait for ever
                raise InputError(f"--output_dir {folder}: {path} is a pipe (FIFO), not a file of a run: remove it")
        found = [path.name for pattern in self.FILES for path in sorted(folder.glob(pattern))]
        if found and "args.json" not in found:
            raise InputError(
                f"--output_dir {folder} is not the folder of a run and holds {', '.join(found)}: a run would overwrite "
                "that, take another folder"
            )
        if found and not self.args.resume:
            raise InputError(
                f"--output_dir {folder} already holds a run: --resume continues it, another folder starts a new one"
            )
        if "model" in found and not find_checkpoints(folder):
            raise InputError(
                f"--output_dir {folder} holds a finished run without checkpoints (--save_every): nothing to resume from"
            )

    def keep(self, **parts):
        """Make `parts` part of each checkpoint: {name: object}, equal on all processes.

        `state_dict()` of an object gives what JSON can hold, so that loading a checkpoint runs no code;
        `load_state_dict` takes it back. Floats return bit for bit, tuples return as lists.
        """
        self.checkpoints.kept |= parts

    def state_dict(self):
        evaluations = {"first_eval": self.first_eval, "last_eval": self.last_eval}
        return {"step": self.step, "skipped": self.skipped, **evaluations}

    def load_state_dict(self, state):
        self.step, self.first_eval, self.last_eval = state["step"], state["first_eval"], state["last_eval"]
        self.skipped = state.get("skipped", 0)  # older checkpoints have none

    def print(self, text):
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def start(self, *lines):
        """Resume if asked to, then print what the run is. Call it after `prepare` and `keep`."""
        self.restore()
        for line in (*lines, batch_equation(self.args, self.accelerator)):
            self.print(line)

    def restore(self):
        """With --resume: load the last checkpoint, and cut the files back to its step."""
        from accelerate.utils import broadcast_object_list

        main, found = self.accelerator.is_main_process, [None, False]
        with agreed(self.accelerator):
            if main and (path := self.checkpoints.last()):
                found = [path, (self.folder / f"model-step-{int(path.name.removeprefix('step-'))}").exists()]
        path, has_model = broadcast_object_list(found)
        if path:
            self.checkpoints.load(path)
            self.model_step = self.step if has_model else None
            self.print(f"resumed {path}")
        elif self.args.resume:
            self.print(f"no checkpoint in {self.folder}: starting at step 0")
        with agreed(self.accelerator):
            if main:
                names = ("metrics.jsonl", "samples.jsonl")
                texts = [rows_up_to(self.folder / name, self.step if path else -1) for name in names]
                write_text(self.folder / "args.json", json.dumps(dataclasses.asdict(self.args), indent=2) + "\n")
                for name, text in zip(names, texts, strict=True):
                    write_text(self.folder / name, text)
        hidden = not main or self.args.max_steps == 0
        total = self.args.max_steps if self.args.max_steps > 0 else None
        # Without a terminal there is no bar (None), but a plain line for each step.
        self.bar = tqdm(total=total, initial=self.step, unit="step", disable=hidden or None)
        self.plain, self.last_row = not (sys.stdout.isatty() and sys.stderr.isatty()), time.perf_counter()

    def log(self, metrics, shown=None):
        """Write the row of `self.step` to metrics.jsonl and the trackers, and sample completions to samples.jsonl.

        `shown`: (prompts, texts, rewards, parts) of this process, of which those of the first prompt are written.
        """
        samples = sample_rows(*shown, number=1) if shown else []
        if self.accelerator.is_main_process:
            append(self.folder / "metrics.jsonl", [{"step": self.step, **metrics}])
            append(self.folder / "samples.jsonl", [{"step": self.step, **sample} for sample in samples])
        self.accelerator.log(metrics, step=self.step)
        self.last_row = time.perf_counter()
        if samples and self.step & (self.step - 1) == 0:  # steps 1, 2, 4, 8, ...
            sample = samples[0]
            reward = f"step {self.step}, reward {'none' if sample['reward'] is None else format(sample['reward'], 'g')}"
            self.print(f"{reward}: {sample['prompt']!r} -> {sample['completion']!r}")
            self.log_table(samples)

    def log_table(self, samples):
        """Give these rows of samples.jsonl to the trackers that have tables."""
        columns = ["prompt", "completion", "answer", "reward"]
        extra = list(samples[0].get("extra", {}))
        rows = [[sample[x] for x in columns] + [sample["extra"].get(x) for x in extra] for sample in samples]
        for tracker in self.accelerator.trackers:
            if tracker.name in ("wandb", "trackio"):
                table = importlib.import_module(tracker.name).Table(columns=columns + extra, data=rows)
                tracker.log({"samples": table}, step=self.step)

    def log_evaluation(self, result, shown=None, tokenizer=None):
        """Remember an evaluation, of which the first and the last make the closing line, and write its completions.

        `shown` is as in `log`; it holds a few prompts, and all goes to samples.jsonl. With a `tokenizer` the first
        prompt and its completion are printed as the model sees them.
        """
        if shown and self.accelerator.is_main_process:
            rows = sample_rows(*shown, number=None)
            append(self.folder / "samples.jsonl", [{"step": self.step, "evaluation": True, **row} for row in rows])
        if shown and tokenizer:
            (prompt, *_), (text, *_), *_ = shown
            lines = "\n".join(raw_lines(tokenizer, prompt.ids, text.ids))
            self.print(f"{lines} (it is truncated and has none)" if text.truncated else lines)
        self.first_eval = self.first_eval or result
        self.last_eval = result
        self.print(f"step {self.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))

    def progress(self, metrics):
        """Advance the progress bar or print the step's line, and look for what keeps a run from learning."""
        shown = {"reward": "reward/mean", "length": "completion/length", "entropy": "policy/entropy"}
        shown |= {"margin": "rewards/margin", "accuracy": "rewards/accuracy"}
        shown = {short: f"{metrics[name]:.3f}" for short, name in shown.items() if name in metrics}
        self.bar.set_postfix(shown)
        self.bar.update()
        if self.plain:
            total = f"/{self.bar.total}" if self.bar.total else ""
            values = [f"{short} {value}" for short, value in shown.items()]
            seconds = time.perf_counter() - self.last_row
            self.print(f"step {self.step}{total}: " + ", ".join([*values, f"{seconds:.1f} s"]))
        self.check_alive(metrics)
        self.check_scored(metrics)

    def check_scored(self, metrics):
        """Say it the first time that completions have no reward. InputError, after a checkpoint, where none has one in
        the first step or in SKIPPED_STEPS in a row."""
        unscored = metrics.get("reward/unscored", metrics.get("pairs/unscored", 0.0))
        if unscored and not self.unscored:
            self.print(
                f"{unscored:.1%} of the completions have no reward, since every function returned None for them: they "
                "are left out (reward/unscored or pairs/unscored in metrics.jsonl counts them; this is said once)"
            )
        self.unscored = self.unscored or unscored
        if "reward/skipped" in metrics:
            self.skipped = self.skipped + 1 if metrics["reward/skipped"] else 0
        if self.skipped >= SKIPPED_STEPS:
            self.log(metrics)
            self.save()
            before = f", as {SKIPPED_STEPS - 1} times before" if self.step > 1 else ""
            raise InputError(
                f"every reward function returned None for every completion{before}: there is nothing to learn from"
            )

    def check_alive(self, metrics):
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
                    self.print(f"{name} has been {value} for 5 steps in a row (this is said once): see {where}")

    def due(self, every, at_end):
        """Whether what is done every so many steps (0: never) is due; `at_end`: also after the last step."""
        return (at_end and self.step >= self.args.max_steps) or (every > 0 and self.step % every == 0)

    def stop_asked(self):
        """At the end of a step: whether any process was sent a signal, so that all of them save and stop now."""
        number = torch.tensor([self.process.signal], device=self.accelerator.device)
        number = int(self.accelerator.gather(number).max())
        self.interrupted, self.exit_code = number > 0, 128 + number if number else 0
        return self.interrupted

    def save(self):
        """Write a checkpoint of this step, unless there is one."""
        self.checkpoints.save(self.step)

    def finish(self, model, policy, tokenizer):
        """Write model/ where steps were made; print the closing line: the score before and after, or how to resume."""
        self.bar.close()
        if self.interrupted:
            self.print(f"stopped at step {self.step}: --resume --output_dir {self.folder} continues")
            return
        if self.step > 0:
            self.save_model(model, policy, tokenizer, "model")
        seconds = time.perf_counter() - self.started
        self.print(f"{self.scores()}{self.step} steps, {seconds:.1f} s, in {self.folder}")

    def scores(self):
        """The first and the last evaluation for the closing line: the reward; pass@1 where the reward counts accuracy,
        and then no reward that is the same number; the accuracy on pairs."""
        first, last = self.first_eval or {}, self.last_eval or {}
        names = [name for name in ("eval/pass@1", "eval/reward", "eval/accuracy") if name in first and name in last]
        scores = {name: f"before {first[name]:.3f}, after {last[name]:.3f}; " for name in names}
        if not {"accuracy", "math_verify"} & set(getattr(self.args, "reward", [])):
            scores.pop("eval/pass@1", None)
        elif scores.get("eval/reward") == scores.get("eval/pass@1"):
            scores.pop("eval/reward", None)
        return "".join(f"{name} {score}" for name, score in scores.items())

    def close(self):
        """End this process. Delete each name that holds the prepared model first: gloo can hang otherwise."""
        close(self.accelerator)
        self.unlock()
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def unlock(self):
        if self.lock:
            self.lock.release(force=True)

    def abandon(self):
        """End a run that failed: close its bar, unlock its folder, and remove that if it is new and holds nothing else.

        Returns " (after step N)", or "" where the run had not started: refused data should leave no trace.
        """
        self.unlock()
        with contextlib.suppress(OSError):
            if self.new_folder and {path.name for path in self.new_folder.iterdir()} <= {"lock"}:
                (self.new_folder / "lock").unlink(missing_ok=True)
                self.new_folder.rmdir()
        if self.bar is None:
            return ""
        self.bar.close()
        if not self.accelerator.is_main_process:  # its bar is hidden, but the first one's may be in the line
            print(file=sys.stderr)
        return f" (after step {self.step})"

    def save_step_model(self, model, policy, tokenizer):
        """Write model-step-N/ where it is due: after step N, and after a resume from there unless it was there."""
        if self.step not in (0, self.model_step) and self.due(self.args.save_model_every, at_end=False):
            self.save_model(model, policy, tokenizer, f"model-step-{self.step}")

    def save_model(self, model, policy, tokenizer, name):
        """Write the model into the folder `name` of the run, so that `from_pretrained` loads it.

        Where it cannot be written, a checkpoint is written and an InputError raised: a resume does the rest.
        """
        try:
            self.write_model(model, policy, tokenizer, name)
        except InputError as error:
            try:
                self.save()
            except InputError as also:
                raise InputError(f"{error}; {also}; the steps since the last checkpoint are lost") from None
            raise InputError(
                f"{error}; the training is kept in checkpoints/: make room, --resume then writes model/"
            ) from None

    def write_model(self, model, policy, tokenizer, name):
        temporary, final = self.folder / "model.tmp", self.folder / name
        with agreed(self.accelerator):
            try:
                with writing(final):
                    if self.accelerator.is_main_process:
                        shutil.rmtree(temporary, ignore_errors=True)
                    save_pretrained(self.accelerator, model, policy, tokenizer, temporary)
                    if self.accelerator.is_main_process:
                        shutil.rmtree(final, ignore_errors=True)  # that of the run before this resume
                        put_in_place(temporary, final)
            except InputError:
                shutil.rmtree(temporary, ignore_errors=True)  # room for a checkpoint
                raise


def close(accelerator):
    """End the work of all processes together."""
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()


def new_folder(name):
    """Make a new folder: `name` or, if another run has that one, `name`-2, `name`-3, ..."""
    for number in itertools.count(1):
        folder = pathlib.Path(name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def append(path, rows):
    with writing(path), open(path, "a", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_rows(path, rows):
    """A JSONL file of these rows alone."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
