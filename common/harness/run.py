"""A run: its folder with rows and samples, its start, what it says, its evaluations, its models, and its end."""

import collections
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys
import time

import filelock
import torch

from common.batches import raw_lines
from common.errors import InputError, Process, one_line, refuse
from common.harness import checkpoints
from common.harness.checkpoints import put_in_place, writing
from common.harness.command_line import load_tool
from common.harness.distributed import on_first, strategy
from common.harness.loading import save_pretrained
from common.harness.metrics import sample_rows

FILES = "args.json metrics.jsonl samples.jsonl pairs-round-*.jsonl checkpoints model model-step-*".split()
SKIPPED_STEPS = 10  # so many without any reward, one after the other, end a run
SHOWN = {"reward": "reward/mean", "length": "completion/length", "entropy": "policy/entropy"}
SHOWN |= {"margin": "rewards/margin", "accuracy": "rewards/accuracy"}
DEAD = {"completion/truncated": 1, "optim/grad_norm": 0}  # five such steps in a row say that a run does not learn


class Run:
    """A run and its folder, which it locks until it ends; docs/running.md has the files. `dead`: metrics with the
    values by which all advantages of a step are 0; `DEAD` has the others."""

    def __init__(self, accelerator, args, script, reward_functions=(), dead=(("advantage/zero_groups", 1),)):
        self.accelerator, self.args, self.script = accelerator, args, script
        self.step, self.first_eval, self.last_eval = 0, None, None  # the number of finished steps
        self.sizes = {"metrics.jsonl": 0, "samples.jsonl": 0}  # at the last checkpoint
        self.skipped = SKIPPED_STEPS - 1  # in a row, one short of the limit: a first step without a reward is an error
        self.exit_code, self.interrupted, self.said_unscored = 0, False, False
        self.dead, self.dead_steps = DEAD | dict(dead), collections.Counter()
        self.started = time.perf_counter()
        self.step_start = self.lock = self.made_folder = self.saved_step = None
        handler = signal.getsignal(signal.SIGTERM)  # that of `clean_exit`, unless this is a notebook
        self.process = handler if isinstance(handler, Process) else Process()
        self.process.run, self.process.signal = self, 0
        for reward in reward_functions:
            reward.run = self  # it is told the step
        self.folder = on_first(accelerator, self.claim_folder)
        self.kept, self.digests = {"run": self}, {}
        if args.lora_rank:
            from common.harness.lora import keep_trained

            accelerator.register_save_state_pre_hook(keep_trained)
        on_first(accelerator, lambda: checkpoints.check_resume(self, loaded=False))
        if args.report_to:
            on_first(accelerator, self.start_trackers)

    @writing("the folder of the run")
    def claim_folder(self):
        """The path of the run's folder, made if it is new, and locked. An InputError if another run uses it."""
        name = self.args.output_dir or f"runs/{self.script}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
        folder = pathlib.Path(name).expanduser()
        self.check_folder(folder)
        self.made_folder = None if folder.exists() else folder
        folder.mkdir(parents=True, exist_ok=True)
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
        found = [path.name for pattern in FILES for path in sorted(folder.glob(pattern))]
        if found and "args.json" not in found:
            refuse(self.args, "output_dir", f"is not the folder of a run and holds {', '.join(found)}")
        if found and not self.args.resume:
            refuse(self.args, "output_dir", "already holds a run: add --resume, or take another folder")
        if "model" in found and not checkpoints.find_checkpoints(folder):
            refuse(self.args, "output_dir", "holds a finished run without checkpoints: nothing to resume from")

    def start_trackers(self):
        """Start the trackers of --report_to: the project is named after the script, the run after its folder."""
        folder = self.folder.resolve()
        self.accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard's
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
        options = {"wandb": {"name": folder.name, "dir": str(folder)}, "trackio": {"name": folder.name}}
        values = {name: " ".join(map(str, x)) if isinstance(x, list) else x for name, x in vars(self.args).items()}
        try:
            self.accelerator.init_trackers(self.script, config=values, init_kwargs=options)
        except Exception as error:  # each tracker fails in its own way: no key, no network, no room
            raise InputError(f"--report_to {' '.join(self.args.report_to)}: {one_line(error)}") from None

    def keep(self, **parts):
        """Add to each checkpoint objects whose `state_dict()` is equal on all processes, and is what JSON can hold."""
        self.kept |= parts

    def state_dict(self):
        self.sizes = {name: (self.folder / name).stat().st_size for name in self.sizes}
        return {name: getattr(self, name) for name in ("step", "skipped", "first_eval", "last_eval", "sizes")}

    def load_state_dict(self, state):
        vars(self).update(state)

    def print(self, text):
        """Print a line on the first process."""
        if self.accelerator.is_main_process:
            print(text, flush=True)

    def start(self, *lines):
        """With --resume load the last checkpoint; print `lines` and sizes. Call it after `prepare` and `keep`."""
        accelerator = self.accelerator
        path, same_evaluations = on_first(accelerator, lambda: checkpoints.check_resume(self, loaded=True))
        if path:
            checkpoints.load_checkpoint(self, path)
            self.saved_step = self.step
            self.print(f"resumed {path}")
        elif self.args.resume:
            self.print(f"no checkpoint in {self.folder}: starting at step 0")
        if not same_evaluations:
            self.first_eval = {}
            self.print("other --eval options than before: the closing line leaves out the first evaluation")
        on_first(accelerator, self.clean_folder)
        self.step_start = time.perf_counter()
        processes, device = accelerator.num_processes, accelerator.device.type
        device += f" (threads of each: {torch.get_num_threads()})" if device == "cpu" else ""
        launched = f"processes: {processes} on {device}, {strategy(accelerator)}"
        if {"MASTER_PORT", "ACCELERATE_DYNAMO_MODE"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
            launched += "; accelerate launch was asked for several: on CPU with ACCELERATE_USE_CPU=true and --multi_gpu"
        self.print("\n".join([*lines, launched, f"a step: {self.args.describe_step(processes)}"]))

    @writing("the folder of the run")
    def clean_folder(self):
        """Write args.json, and remove what a crash has left after the last checkpoint."""
        checkpoints.prune(self)
        args = json.dumps(dataclasses.asdict(self.args), indent=2)
        (self.folder / "args.json").write_text(args + "\n", encoding="utf-8")
        for name, size in self.sizes.items():
            with open(self.folder / name, "ab") as file:
                file.truncate(min(size, file.tell()))

    def write_rows(self, name, rows, mode="a"):
        """Add rows to a JSONL file of the folder, "w": replace it. What JSON cannot hold, such as a date, is text."""
        path = self.folder / name
        if self.accelerator.is_main_process:
            with writing(path), open(path, mode, encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)

    def first_evaluation(self, evaluation, tokenizer=None, beside=None):
        """Evaluate before the first step, unless a checkpoint has that result. `evaluation()` returns metrics, and
        samples to show or None; the metrics `beside` are logged with its own."""
        if self.first_eval is None:
            result, shown = evaluation()
            self.log_evaluation(result, shown, tokenizer)
            self.log((beside or {}) | result)

    def end_step(self, metrics, evaluation, shown=None, last=False):
        """Show and log a finished step; evaluate and save what is due. `last`: after this step both are."""
        args = self.args
        self.progress(metrics)
        if last or self.is_one_of_every(args.eval_every):
            result, sampled = evaluation()
            self.log_evaluation(result, sampled)
            metrics = metrics | result
        self.log(metrics, shown)
        if self.stop_asked() or self.is_one_of_every(args.save_every) or (last and args.save_every):
            self.save()

    def log(self, metrics, shown=None):
        """Write the metrics of a step, and samples of the first prompt of `shown`: prompts, texts, rewards, parts."""
        samples = sample_rows(*shown, number=1) if shown else []
        self.write_rows("metrics.jsonl", [{"step": self.step, **metrics}])
        self.write_rows("samples.jsonl", [{"step": self.step, **sample} for sample in samples])
        self.accelerator.log(metrics, step=self.step)
        self.step_start = time.perf_counter()
        if not samples or self.step & (self.step - 1):  # but for steps 1, 2, 4, 8, ...
            return
        reward = "none" if samples[0]["reward"] is None else f"{samples[0]['reward']:g}"
        sample = "{prompt!r} -> {completion!r}".format_map(samples[0])
        self.print(f"step {self.step}, reward {reward}: {sample}")

    def log_evaluation(self, result, shown=None, tokenizer=None):
        """Print the metrics `result` of an evaluation; write samples of `shown`, with a `tokenizer` print the first."""
        rows = sample_rows(*shown, number=None) if shown else []
        self.write_rows("samples.jsonl", [{"step": self.step, "evaluation": True, **row} for row in rows])
        if shown and tokenizer:
            (prompt, *_), (text, *_), *_ = shown
            lines = "\n".join(raw_lines(tokenizer, prompt.ids, text.ids))
            self.print(f"{lines} (it is truncated and has none)" if text.truncated else lines)
        self.first_eval = result if self.first_eval is None else self.first_eval
        self.last_eval = result
        self.print(f"step {self.step}: " + ", ".join(f"{name} {x:.3f}" for name, x in self.scores(result).items()))

    def scores(self, result):
        """The metrics of an evaluation, or of none, without pass@k where --reward has no part that it counts."""
        counted = {"accuracy", "math_verify"} & set(getattr(self.args, "reward", []))
        return {name: value for name, value in (result or {}).items() if counted or "/pass@" not in name}

    def progress(self, metrics):
        """Print a line for a finished step, and warn, each time once, of what keeps the run from learning."""
        values = [f"{short} {metrics[name]:.3f}" for short, name in SHOWN.items() if name in metrics]
        values.append(f"{time.perf_counter() - self.step_start:.1f} s")
        self.print(f"step {self.step}{f'/{most}' if (most := self.args.max_steps) > 0 else ''}: {', '.join(values)}")
        for name, value in list(self.dead.items()):
            paused = name == "optim/grad_norm" and metrics.get("optim/lr") == 0
            self.dead_steps[name] += 1
            if metrics.get(name) != value or paused:
                self.dead_steps[name] = 0
            elif self.dead_steps[name] == 5:
                del self.dead[name]
                self.print(f"{name} has been {value} for 5 steps in a row (said once): see docs/monitoring.md")
        self.check_scored(metrics)

    def check_scored(self, metrics):
        """Warn of unscored completions. If all are, at step 1 or SKIPPED_STEPS times in a row, save and raise."""
        share = metrics.get("reward/unscored", metrics.get("pairs/unscored", 0.0))
        if share and not self.said_unscored:
            self.said_unscored = True
            self.print(f"{share:.1%} of the completions have no reward: they are left out (said once, see unscored)")
        if "reward/skipped" in metrics:
            self.skipped = self.skipped + 1 if metrics["reward/skipped"] else 0
        if self.skipped >= SKIPPED_STEPS:
            self.log(metrics)
            self.save()
            before = f", as {SKIPPED_STEPS - 1} times before" if self.step > 1 else ""
            raise InputError(f"every reward function returned None for every completion{before}: nothing to learn from")

    def is_one_of_every(self, steps):
        """Whether this step is one of every so many `steps` (0: of none)."""
        return steps > 0 and self.step % steps == 0

    def stop_asked(self):
        """Whether any process has had a signal to stop, after which all of them save and stop at the same step."""
        number = torch.tensor([self.process.signal], device=self.accelerator.device)
        number = int(self.accelerator.gather(number).max())
        self.interrupted, self.exit_code = number > 0, 128 + number if number else 0
        return self.interrupted

    def save(self):
        """Write a checkpoint of this step, unless this run has."""
        if self.saved_step != self.step:
            checkpoints.save_checkpoint(self)
            self.saved_step = self.step

    def save_step_model(self, model, policy, tokenizer):
        """Write model-step-N/ if it is due after this step N; at a resume from N again."""
        if self.step and self.is_one_of_every(self.args.save_model_every):
            self.save_model(model, policy, tokenizer, f"model-step-{self.step}")

    def model_card(self):
        """The README.md of the model: that of tools/, or without that folder a tag and the command."""
        if tool := load_tool(type(self.args), "model_card"):
            return tool.model_card(self.args, self.script, self.step, self.first_eval, self.last_eval)
        return f"---\ntags: [{self.script}]\n---\nAfter {self.step} steps of\n\n    {shlex.join(sys.argv)}\n"

    def save_model(self, model, policy, tokenizer, name):
        """Write the model as `from_pretrained` loads it into the folder `name` of the run, completely or not at all. If
        that fails, save a checkpoint and raise an InputError: a resume writes the model then."""
        temporary, final, main = self.folder / "model.tmp", self.folder / name, self.accelerator.is_main_process
        problem = None
        try:
            with writing(final):
                if main:
                    shutil.rmtree(temporary, ignore_errors=True)
                save_pretrained(self.accelerator, model, policy, tokenizer, temporary)
                if main:
                    (temporary / "README.md").write_text(self.model_card(), encoding="utf-8")
                    shutil.rmtree(final, ignore_errors=True)  # that of the run before this resume
                    put_in_place(temporary, final)
        except InputError as error:
            problem = str(error)
        if problem := on_first(self.accelerator, lambda: problem):
            shutil.rmtree(temporary, ignore_errors=True)  # room for a checkpoint
            self.save()
            raise InputError(f"{problem}; the training is kept in checkpoints/: make room and --resume")

    def finish(self, model, policy, tokenizer):
        """Write model/ if there were steps, and print the scores before and after, or how to resume a stopped run."""
        if self.interrupted:
            self.print(f"stopped at step {self.step}: --resume --output_dir {self.folder} continues")
            return
        if self.step > 0:
            self.save_model(model, policy, tokenizer, "model")
        first, last, said = self.scores(self.first_eval), self.scores(self.last_eval), {}
        for name in ("eval/pass@1", "eval/reward", "eval/accuracy"):
            if name in last:
                before = f"before {first[name]:.3f}, after " if name in first else "after "
                said[name] = f"{before if self.step else ''}{last[name]:.3f}; "
        if said.get("eval/reward") == said.get("eval/pass@1"):
            said.pop("eval/reward", None)
        scores = "".join(f"{name} {score}" for name, score in said.items())
        drawn = f" ({tool.command(self.folder)} draws it)" if (tool := load_tool(type(self.args), "plot")) else ""
        self.print(f"{scores}{self.step} steps, {time.perf_counter() - self.started:.1f} s, in {self.folder}{drawn}")

    def close(self):
        """Shut Accelerate down; exit with the code of a signal. Else gloo can hang: `del` the prepared model before."""
        self.accelerator.wait_for_everyone()
        self.accelerator.free_memory()
        self.accelerator.end_training()
        if self.lock:
            self.lock.release(force=True)
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def abandon(self):
        """End a failed run, and remove its folder if it is empty; returns " (after step N)", "" before the start."""
        if self.lock:
            self.lock.release(force=True)
        with contextlib.suppress(OSError):
            if self.made_folder and set(os.listdir(self.made_folder)) <= {"lock"}:
                (self.made_folder / "lock").unlink(missing_ok=True)
                self.made_folder.rmdir()
        return "" if self.step_start is None else f" (after step {self.step})"
