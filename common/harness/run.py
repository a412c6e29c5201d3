"""A run: its folder with rows and samples, its start, its evaluations, and its end."""

import contextlib
import dataclasses
import datetime
import json
import pathlib
import shutil
import sys
import time

import filelock
import torch
from tqdm import tqdm

from common.batches import raw_lines
from common.errors import InputError, process_of
from common.harness.checkpoints import Checkpoints, find_checkpoints
from common.harness.display import Display, log_table, scores, start_trackers
from common.harness.distributed import describe_processes, on_first, raise_on_all
from common.harness.files import append_rows, new_folder, put_in_place, rows_up_to, write_text, writing
from common.harness.loading import save_pretrained
from common.harness.metrics import sample_rows

SKIPPED_STEPS = 10  # so many without any reward, one after the other, end a run


class Run:
    """The folder of a run: args.json, metrics.jsonl, samples.jsonl, checkpoints/, model-step-N/, at the end model/.

    The first process locks the folder for as long as the run lives: a second run would mix its rows with these. `step`
    counts the finished steps, which the user's reward functions are told. An algorithm gives to `keep` what a
    checkpoint needs besides weights and optimizer.
    """

    FILES = "args.json metrics.jsonl samples.jsonl pairs-round-*.jsonl checkpoints model model-step-*".split()

    def __init__(self, accelerator, args, script, reward_functions=()):
        self.accelerator, self.args, self.script = accelerator, args, script
        self.step, self.first_eval, self.last_eval, self.model_step = 0, None, None, None
        self.exit_code, self.interrupted = 0, False
        self.skipped = SKIPPED_STEPS - 1  # in a row, one short of the limit: a first step without a reward is an error
        self.started = time.perf_counter()
        self.display = self.lock = self.new_folder = None
        self.process = process_of(self)
        for reward in reward_functions:
            reward.run = self
        self.folder = on_first(accelerator, self.claim_folder)
        self.checkpoints = Checkpoints(accelerator, args, script, self.folder)
        self.keep(run=self)
        on_first(accelerator, self.checkpoints.look)
        if args.report_to:
            with raise_on_all(accelerator):
                start_trackers(accelerator, args, script, self.folder.resolve())

    @writing("the folder of the run")
    def claim_folder(self):
        """Make the folder and lock it. InputError if another run has it, or it holds what this run would overwrite."""
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
        return {name: getattr(self, name) for name in ("step", "skipped", "first_eval", "last_eval")}

    def load_state_dict(self, state):
        self.step, self.first_eval, self.last_eval = state["step"], state["first_eval"], state["last_eval"]
        self.skipped = state.get("skipped", 0)  # older checkpoints have none

    def print(self, text):
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
        """With --resume: load the last checkpoint, and cut the files back to its step."""
        path, has_model = on_first(self.accelerator, self.find_last)
        if path:
            self.checkpoints.load(path)
            self.model_step = self.step if has_model else None
            self.print(f"resumed {path}")
        elif self.args.resume:
            self.print(f"no checkpoint in {self.folder}: starting at step 0")
        on_first(self.accelerator, lambda: self.rewrite(self.step if path else -1))
        self.display = Display(self.print, self.step, self.args.max_steps, hidden=not self.accelerator.is_main_process)

    def find_last(self):
        """The path of the checkpoint to resume from, or None, and whether the model of its step is in the folder."""
        path = self.checkpoints.last()
        return path, bool(path) and (self.folder / f"model-step-{int(path.name.removeprefix('step-'))}").exists()

    def rewrite(self, step):
        """Write args.json, and the rows up to `step` alone. Where a row is damaged, nothing is written."""
        texts = {"args.json": json.dumps(dataclasses.asdict(self.args), indent=2) + "\n"}
        texts |= {name: rows_up_to(self.folder / name, step) for name in ("metrics.jsonl", "samples.jsonl")}
        for name, text in texts.items():
            write_text(self.folder / name, text)

    def log(self, metrics, shown=None):
        """Write the row of `self.step` to metrics.jsonl and the trackers, and sample completions to samples.jsonl.

        `shown`: (prompts, texts, rewards, parts) of this process, of which those of the first prompt are written.
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
        """Remember an evaluation, of which the first and the last make the closing line, and write its completions.

        `shown` is as in `log`; it holds a few prompts, and all goes to samples.jsonl. With a `tokenizer` the first
        prompt and its completion are printed as the model sees them.
        """
        if shown and self.accelerator.is_main_process:
            rows = sample_rows(*shown, number=None)
            append_rows(self.folder / "samples.jsonl", [{"step": self.step, "evaluation": True, **row} for row in rows])
        if shown and tokenizer:
            (prompt, *_), (text, *_), *_ = shown
            lines = "\n".join(raw_lines(tokenizer, prompt.ids, text.ids))
            self.print(f"{lines} (it is truncated and has none)" if text.truncated else lines)
        self.first_eval = self.first_eval or result
        self.last_eval = result
        self.print(f"step {self.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))

    def progress(self, metrics):
        """Show a step that was made, and look for what keeps a run from learning."""
        self.display.show(self.step, metrics)
        self.check_scored(metrics)

    def check_scored(self, metrics):
        """Warn of completions without a reward. InputError, after a checkpoint, where none has one in the first step or
        in SKIPPED_STEPS in a row."""
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
        """Shut Accelerate down and exit. `del` all names of the prepared model before: gloo can hang otherwise."""
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
        """End a run that failed: close its bar, unlock its folder, and remove that if it is new and holds nothing else.

        Returns " (after step N)", or "" where the run had not started: refused data should leave no trace.
        """
        self.unlock()
        with contextlib.suppress(OSError):
            if self.new_folder and {path.name for path in self.new_folder.iterdir()} <= {"lock"}:
                (self.new_folder / "lock").unlink(missing_ok=True)
                self.new_folder.rmdir()
        if self.display is None:
            return ""
        self.display.bar.close()
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
        temporary, final, main = self.folder / "model.tmp", self.folder / name, self.accelerator.is_main_process
        try:
            with raise_on_all(self.accelerator), writing(final):
                if main:
                    shutil.rmtree(temporary, ignore_errors=True)
                save_pretrained(self.accelerator, model, policy, tokenizer, temporary)
                if main:
                    shutil.rmtree(final, ignore_errors=True)  # that of the run before this resume
                    put_in_place(temporary, final)
        except InputError as error:
            shutil.rmtree(temporary, ignore_errors=True)  # room for a checkpoint
            try:
                self.save()
            except InputError as also:
                raise InputError(f"{error}; {also}; the steps since the last checkpoint are lost") from None
            kept = "the training is kept in checkpoints/: make room, --resume then writes model/"
            raise InputError(f"{error}; {kept}") from None
