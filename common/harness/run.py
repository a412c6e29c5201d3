"""A run: its folder with rows and samples, its start, its evaluations, and its end."""

import contextlib
import dataclasses
import datetime
import json
import pathlib
import shlex
import shutil
import sys
import time

import filelock
import torch
from tqdm import tqdm

from common.batches import raw_lines
from common.errors import InputError, process_of, refuse
from common.harness.checkpoints import Checkpoints, find_checkpoints
from common.harness.command_line import load_tool
from common.harness.display import Display, log_table, scores, start_trackers
from common.harness.distributed import describe_processes, on_first, raise_on_all
from common.harness.files import append_rows, new_folder, put_in_place, rows_up_to, write_text, writing
from common.harness.loading import save_pretrained
from common.harness.metrics import sample_rows

SKIPPED_STEPS = 10  # so many without any reward, one after the other, end a run


class Run:
    """A run and its folder:

        args.json               the options
        metrics.jsonl           a row of metrics for each step, evaluations too
        samples.jsonl           the completions of a prompt for each step, and those of evaluations
        pairs-round-N.jsonl     of dpo.py: the pairs it has made in round N
        checkpoints/step-N/     what a resume needs, see `Checkpoints`
        model/                  the trained model, at the end
        model-step-N/           the same after step N, with --save_model_every
        lock                    held by the first process until the run ends: a second run would mix its rows with these

    `step` counts the finished steps. Reward functions are told it.
    """

    FILES = "args.json metrics.jsonl samples.jsonl pairs-round-*.jsonl checkpoints model model-step-*".split()

    def __init__(self, accelerator, args, script, reward_functions=()):
        self.accelerator, self.args, self.script = accelerator, args, script
        self.step, self.first_eval, self.last_eval, self.resumed_model = 0, None, None, None
        self.exit_code, self.interrupted = 0, False
        self.skipped = SKIPPED_STEPS - 1  # in a row, one short of the limit: a first step without a reward is an error
        self.started = time.perf_counter()
        self.display = self.lock = self.made_folder = None
        self.process = process_of(self)
        for reward in reward_functions:
            reward.run = self
        self.folder = on_first(accelerator, self.claim_folder)
        self.checkpoints = Checkpoints(accelerator, args, script, self.folder)
        self.keep(run=self)
        on_first(accelerator, self.checkpoints.check_before_loading)
        if args.report_to:
            with raise_on_all(accelerator):
                start_trackers(accelerator, args, script, self.folder.resolve())

    @writing("the folder of the run")
    def claim_folder(self):
        """The path of the run's folder, made if it is new, and locked; an InputError if another run uses it, or if it
        holds what this run would overwrite."""
        if self.args.output_dir:
            folder = pathlib.Path(self.args.output_dir).expanduser()
            self.check_folder(folder)
            self.made_folder = None if folder.exists() else folder
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder = self.made_folder = new_folder(f"runs/{self.script}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        # One object a file: a run of this process that ended with an exception does not keep the next one out.
        self.lock = filelock.FileLock(folder / "lock", blocking=False, is_singleton=True)
        try:
            self.lock.acquire()
        except filelock.Timeout:
            refuse(self.args, "output_dir", "another run is using it")
        self.check_folder(folder)  # again: that run may have ended between the first look and the lock
        return folder

    def check_folder(self, folder):
        """Refuse a folder with other files of a run's names, with a run but no --resume, or with a finished run."""
        if folder.exists() and not folder.is_dir():
            refuse(self.args, "output_dir", "is not a folder")
        found = [path.name for pattern in self.FILES for path in sorted(folder.glob(pattern))]
        if found and "args.json" not in found:
            problem = f"is not the folder of a run and holds {', '.join(found)}"
            refuse(self.args, "output_dir", f"{problem}, which a run would overwrite: take another folder")
        if found and not self.args.resume:
            refuse(self.args, "output_dir", "already holds a run: add --resume, or take another folder for a new one")
        if "model" in found and not find_checkpoints(folder):
            problem = "holds a finished run without checkpoints (--save_every)"
            refuse(self.args, "output_dir", f"{problem}: there is nothing to resume from")

    def keep(self, **parts):
        """Add objects to each checkpoint: {name: object}, whose states are equal on all processes.

        `state_dict()` returns what JSON can hold, so that loading a checkpoint runs no code; `load_state_dict` takes it
        back. Floats return bit for bit, tuples return as lists.
        """
        self.checkpoints.kept |= parts

    def state_dict(self):
        return {name: getattr(self, name) for name in ("step", "skipped", "first_eval", "last_eval")}

    def load_state_dict(self, state):
        self.step, self.first_eval, self.last_eval = state["step"], state["first_eval"], state["last_eval"]
        self.skipped = state.get("skipped", 0)  # older checkpoints have none

    def print(self, text):
        """Print a line on the first process, above its progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def start(self, *lines):
        """Resume if asked to; print `lines`, the processes and the batch sizes. Call it after `prepare` and `keep`."""
        self.restore()
        sizes = self.args.describe_step(self.accelerator.num_processes)
        for line in (*lines, describe_processes(self.accelerator), f"a step: {sizes}"):
            self.print(line)

    def restore(self):
        """With --resume load the last checkpoint; write args.json, and cut the rows of later steps."""
        path = on_first(self.accelerator, self.checkpoints.last_checked)
        if path:
            self.checkpoints.load(path)
            if on_first(self.accelerator, lambda: self.checkpoints.evaluates_otherwise(path)):
                self.first_eval = {}  # it does not compare
                self.print("other --eval options than before: the closing line leaves out the first evaluation")
            if on_first(self.accelerator, (self.folder / f"model-step-{self.step}").exists):
                self.resumed_model = self.step
            self.print(f"resumed {path}")
        elif self.args.resume:
            self.print(f"no checkpoint in {self.folder}: starting at step 0")
        on_first(self.accelerator, lambda: self.rewrite(self.step if path else -1))
        self.display = Display(self.print, self.step, self.args.max_steps, hidden=not self.accelerator.is_main_process)

    def rewrite(self, step):
        """Write args.json, and metrics.jsonl and samples.jsonl up to `step`; nothing if a row is damaged."""
        texts = {"args.json": json.dumps(dataclasses.asdict(self.args), indent=2) + "\n"}
        texts |= {name: rows_up_to(self.folder / name, step) for name in ("metrics.jsonl", "samples.jsonl")}
        for name, text in texts.items():
            write_text(self.folder / name, text)

    def log(self, metrics, shown=None):
        """Write the row of the current step to metrics.jsonl and the trackers, and completions to samples.jsonl.

        `shown`: prompts, texts, rewards and their parts on this process; those of the first prompt are written.
        """
        samples = sample_rows(*shown, number=1) if shown else []
        if self.accelerator.is_main_process:
            append_rows(self.folder / "metrics.jsonl", [{"step": self.step, **metrics}])
            append_rows(self.folder / "samples.jsonl", [{"step": self.step, **sample} for sample in samples])
        self.accelerator.log(metrics, step=self.step)
        self.display.step_start = time.perf_counter()
        if samples and self.step & (self.step - 1) == 0:  # steps 1, 2, 4, 8, ...
            sample = samples[0]
            reward = f"step {self.step}, reward {'none' if sample['reward'] is None else format(sample['reward'], 'g')}"
            self.print(f"{reward}: {sample['prompt']!r} -> {sample['completion']!r}")
            log_table(self.accelerator, samples, self.step)

    def log_evaluation(self, result, shown=None, tokenizer=None):
        """Print the metrics of an evaluation, `result`, and write the completions `shown` to samples.jsonl.

        The first and the last evaluation are kept for the closing line. `shown` is as in `log`, but all of its prompts
        are written. With a `tokenizer` the first prompt and completion are printed with their special tokens.
        """
        if shown and self.accelerator.is_main_process:
            rows = sample_rows(*shown, number=None)
            append_rows(self.folder / "samples.jsonl", [{"step": self.step, "evaluation": True, **row} for row in rows])
        if shown and tokenizer:
            (prompt, *_), (text, *_), *_ = shown
            lines = "\n".join(raw_lines(tokenizer, prompt.ids, text.ids))
            self.print(f"{lines} (it is truncated and has none)" if text.truncated else lines)
        self.first_eval = result if self.first_eval is None else self.first_eval
        self.last_eval = result
        self.print(f"step {self.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))

    def progress(self, metrics):
        """Show the metrics of a finished step, and warn of what keeps the run from learning."""
        self.display.show(self.step, metrics)
        self.check_scored(metrics)

    def check_scored(self, metrics):
        """Warn of completions without a reward. If none had one in the first step, or in SKIPPED_STEPS in a row, save a
        checkpoint and raise an InputError."""
        self.display.warn_of_unscored(metrics.get("reward/unscored", metrics.get("pairs/unscored", 0.0)))
        if "reward/skipped" in metrics:
            self.skipped = self.skipped + 1 if metrics["reward/skipped"] else 0
        if self.skipped >= SKIPPED_STEPS:
            self.log(metrics)
            self.save()
            before = f", as {SKIPPED_STEPS - 1} times before" if self.step > 1 else ""
            raise InputError(
                f"every reward function returned None for every completion{before}: there is nothing to learn from"
            )

    def due(self, every, at_end):
        """Whether this step is one of every `every` steps (0: of none), or with `at_end` the last one."""
        return (at_end and self.step >= self.args.max_steps) or (every > 0 and self.step % every == 0)

    def stop_asked(self):
        """Whether any process has had a signal to stop, after which all of them save and stop at the same step."""
        number = torch.tensor([self.process.signal], device=self.accelerator.device)
        number = int(self.accelerator.gather(number).max())
        self.interrupted, self.exit_code = number > 0, 128 + number if number else 0
        return self.interrupted

    def save(self):
        """Write a checkpoint of this step, unless this run has."""
        self.checkpoints.save(self.step)

    def finish(self, model, policy, tokenizer):
        """Write model/ if there were steps, and print the scores before and after, or how to resume a stopped run."""
        self.display.bar.close()
        if self.interrupted:
            self.print(f"stopped at step {self.step}: --resume --output_dir {self.folder} continues")
            return
        if self.step > 0:
            self.save_model(model, policy, tokenizer, "model")
        before_and_after = scores(self.first_eval or {}, self.last_eval or {}, getattr(self.args, "reward", []))
        seconds = time.perf_counter() - self.started
        self.print(f"{before_and_after}{self.step} steps, {seconds:.1f} s, in {self.folder}")

    def close(self):
        """Shut Accelerate down, unlock the folder, and exit with the code of a signal if there was one.

        `del` all names of the prepared model before, or gloo can hang.
        """
        self.accelerator.wait_for_everyone()
        self.accelerator.free_memory()
        self.accelerator.end_training()
        self.unlock()
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def unlock(self):
        if self.lock:
            self.lock.release(force=True)

    def abandon(self):
        """End a failed run: unlock its folder, remove it if this run made it and wrote nothing, and close the bar.

        Returns " (after step N)" for the error message, "" if the run had not started.
        """
        self.unlock()
        with contextlib.suppress(OSError):
            if self.made_folder and {path.name for path in self.made_folder.iterdir()} <= {"lock"}:
                (self.made_folder / "lock").unlink(missing_ok=True)
                self.made_folder.rmdir()
        if self.display is None:
            return ""
        self.display.bar.close()
        if not self.accelerator.is_main_process:  # its bar is hidden, but the first one's may be in the line
            print(file=sys.stderr)
        return f" (after step {self.step})"

    def save_step_model(self, model, policy, tokenizer):
        """Write model-step-N/ if it is due after this step N; not at a resume from N that finds it there."""
        if self.step not in (0, self.resumed_model) and self.due(self.args.save_model_every, at_end=False):
            self.save_model(model, policy, tokenizer, f"model-step-{self.step}")

    def model_card(self):
        """The README.md of the model: that of tools/, or without that folder the metadata and the command."""
        if tool := load_tool(type(self.args), "model_card"):
            return tool.model_card(self.args, self.script, self.step, self.first_eval, self.last_eval)
        command = f"After {self.step} steps of\n\n    {shlex.join(sys.argv)}\n"
        return f"---\ntags: [{self.script}]\n---\n# {self.script}\n\n{command}"

    def save_model(self, model, policy, tokenizer, name):
        """Write the model as `from_pretrained` loads it into the folder `name` of the run, completely or not at all.

        If that fails, save a checkpoint and raise an InputError: a resume writes the model then.
        """
        temporary, final, main = self.folder / "model.tmp", self.folder / name, self.accelerator.is_main_process
        try:
            with raise_on_all(self.accelerator), writing(final):
                if main:
                    shutil.rmtree(temporary, ignore_errors=True)
                save_pretrained(self.accelerator, model, policy, tokenizer, temporary)
                if main:
                    write_text(temporary / "README.md", self.model_card())
                    shutil.rmtree(final, ignore_errors=True)  # that of the run before this resume
                    put_in_place(temporary, final)
        except InputError as error:
            shutil.rmtree(temporary, ignore_errors=True)  # room for a checkpoint
            try:
                self.save()
            except InputError as also:
                raise InputError(f"{error}; {also}; the steps since the last checkpoint are lost") from None
            raise InputError(f"{error}; the training is kept in checkpoints/: make room and --resume") from None
