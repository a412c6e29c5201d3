"""A run: its start, what it logs and warns of, its evaluations, its models, and its end."""

import collections
import os
import shlex
import shutil
import signal
import sys
import time

import torch

from common.batches import raw_lines
from common.errors import InputError, Process, count, one_line
from common.harness.checkpoints import Checkpoints, writing
from common.harness.display import Display
from common.harness.distributed import on_first, strategy
from common.harness.folder import RunFolder
from common.harness.loading import save_pretrained
from common.harness.metrics import sample_rows
from common.tools import load_tool, tool_command

SKIPPED_STEPS = 10  # a run ends after so many steps in a row without any reward
DEAD_STEPS = 5  # a run warns after so many steps in a row with a metric of DEAD
DEAD = {"completion/truncated": 1, "optim/grad_norm": 0}  # {metric: value} of a step from which nothing is learned


class Run:
    """A run in its folder. `dead`, pairs (metric, value), adds to DEAD what tells that all advantages are 0."""

    def __init__(self, accelerator, args, script, reward_functions=(), dead=(("advantage/zero_groups", 1),)):
        self.accelerator = accelerator
        self.args = args
        self.script = script
        self.step = 0  # the number of finished steps
        self.first_eval = None
        self.last_eval = None
        self.sizes = {"metrics.jsonl": 0, "samples.jsonl": 0, "tokens.jsonl": 0}  # at the last checkpoint
        self.skipped = SKIPPED_STEPS - 1  # in a row; it starts there, since a first step without a reward is an error
        self.said_unscored = False
        self.said_no_clipped = False
        self.dead = DEAD | dict(dead)
        self.dead_steps = collections.Counter()
        self.exit_code = 0
        self.interrupted = False
        self.started = time.perf_counter()
        self.step_start = None
        self.saved_step = None
        self.files = None
        self.display = Display(accelerator)
        self.listen_for_signals()
        for reward in reward_functions:
            reward.run = self  # it is told the step
        self.files = RunFolder(accelerator, args, script)
        self.folder = self.files.path
        self.checkpoints = Checkpoints(accelerator, args, script, self.folder)
        self.kept = {"run": self}
        if args.lora_rank:
            from common.harness.lora import keep_trained

            accelerator.register_save_state_pre_hook(keep_trained)
        on_first(accelerator, lambda: self.checkpoints.check_resume(loaded=False))
        if args.report_to:
            on_first(accelerator, self.start_trackers)

    def listen_for_signals(self):
        """Let the handler of `clean_exit` know this run; in a notebook there is none."""
        handler = signal.getsignal(signal.SIGTERM)
        self.process = handler if isinstance(handler, Process) else Process()
        self.process.run = self
        self.process.signal = 0

    def start_trackers(self):
        """Start the trackers of --report_to: the project is named after the script, the run after its folder."""
        folder = self.folder.resolve()
        self.accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard's
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when trackio is imported
        options = {"wandb": {"name": folder.name, "dir": str(folder)}, "trackio": {"name": folder.name}}
        values = {}
        for name, value in vars(self.args).items():
            values[name] = " ".join(map(str, value)) if isinstance(value, list) else value
        try:
            self.accelerator.init_trackers(self.script, config=values, init_kwargs=options)
        except Exception as error:  # each tracker fails in its own way: no key, no network, no room
            raise InputError(f"--report_to {' '.join(self.args.report_to)}: {one_line(error)}") from None

    def keep(self, **parts):
        """Add to each checkpoint objects whose `state_dict()` is equal on all processes, and is what JSON can hold."""
        self.kept |= parts

    def state_dict(self):
        self.sizes = self.files.sizes(self.sizes)
        return {name: getattr(self, name) for name in ("step", "skipped", "first_eval", "last_eval", "sizes")}

    def load_state_dict(self, state):
        sizes = self.sizes | state["sizes"]  # a checkpoint of an earlier version has none of tokens.jsonl
        vars(self).update(state | {"sizes": sizes})

    def print(self, text):
        """Print a line on the first process."""
        self.display.print(text)

    def start(self, *lines):
        """With --resume load the last checkpoint; print `lines` and sizes. Call it after `prepare` and `keep`."""
        path, same_evaluations = on_first(self.accelerator, lambda: self.checkpoints.check_resume(loaded=True))
        if path:
            self.checkpoints.load(path, self.kept)
            self.saved_step = self.step
            self.print(f"resumed {path}")
        elif self.args.resume:
            self.print(f"no checkpoint in {self.folder}: starting at step 0")
        if not same_evaluations:
            self.first_eval = {}
            self.print("other --eval options than before: the closing line leaves out the first evaluation")
        on_first(self.accelerator, self.clean_folder)
        self.step_start = time.perf_counter()
        sizes = f"a step: {self.args.describe_step(self.accelerator.num_processes)}"
        self.print("\n".join([*lines, self.describe_launch(), sizes]))
        self.display.start_bar(self.step, self.args.max_steps)

    def describe_launch(self):
        """The processes of this run as one line."""
        device = self.accelerator.device.type
        if device == "cpu":
            device += f" (threads of each: {torch.get_num_threads()})"
        line = f"processes: {self.accelerator.num_processes} on {device}, {strategy(self.accelerator)}"
        if {"MASTER_PORT", "ACCELERATE_DYNAMO_MODE"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
            line += "; accelerate launch was asked for several: on CPU with ACCELERATE_USE_CPU=true and --multi_gpu"
        return line

    def clean_folder(self):
        """Write args.json, and remove what a crash has left after the last checkpoint."""
        with writing("the folder of the run"):
            self.checkpoints.prune()
        self.files.write_args()
        self.files.cut_back(self.sizes)

    def write_rows(self, name, rows, mode="a"):
        """Add rows to a JSONL file of the folder, "w": replace it."""
        self.files.write_rows(name, rows, mode)

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
        is_power_of_two = self.step & (self.step - 1) == 0
        if samples and is_power_of_two:
            first = samples[0]
            reward = "none" if first["reward"] is None else f"{first['reward']:g}"
            self.print(f"step {self.step}, reward {reward}: {first['prompt']!r} -> {first['completion']!r}")

    def log_evaluation(self, result, shown=None, tokenizer=None):
        """Print the metrics `result` of an evaluation; write samples of `shown`, with a `tokenizer` print the first."""
        rows = sample_rows(*shown, number=None) if shown else []
        self.write_rows("samples.jsonl", [{"step": self.step, "evaluation": True, **row} for row in rows])
        if shown and tokenizer:
            prompts, texts, *_ = shown
            lines = "\n".join(raw_lines(tokenizer, prompts[0].ids, texts[0].ids))
            self.print(f"{lines} (it is truncated and has none)" if texts[0].truncated else lines)
        if self.first_eval is None:
            self.first_eval = result
        self.last_eval = result
        self.print(f"step {self.step}: " + ", ".join(f"{name} {x:.3f}" for name, x in self.scores(result).items()))

    def scores(self, result):
        """The metrics of an evaluation, or of none, without pass@k where --reward has no part that it counts."""
        counted = {"accuracy", "math_verify"} & set(getattr(self.args, "reward", []))
        return {name: value for name, value in (result or {}).items() if counted or "/pass@" not in name}

    def progress(self, metrics):
        """Show a finished step, and warn, each time once, of what keeps the run from learning."""
        self.display.step(self.step, self.args.max_steps, metrics, time.perf_counter() - self.step_start)
        self.check_dead(metrics)
        self.check_scored(metrics)

    def check_dead(self, metrics):
        """Warn, once each, of a metric that has said in DEAD_STEPS steps in a row that nothing is learned."""
        for name, value in list(self.dead.items()):
            paused = name == "optim/grad_norm" and metrics.get("optim/lr") == 0
            if metrics.get(name) != value or paused:
                self.dead_steps[name] = 0
                continue
            self.dead_steps[name] += 1
            if self.dead_steps[name] == DEAD_STEPS:
                del self.dead[name]
                self.print(
                    f"{name} has been {value} for {DEAD_STEPS} steps in a row (said once): see docs/monitoring.md"
                )

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
            self.checkpoints.save(self.step, self.kept)
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
        temporary = self.folder / "model.tmp"
        problem = None
        try:
            with writing(self.folder / name):
                self.write_model(model, policy, tokenizer, temporary, name)
        except InputError as error:
            problem = str(error)
        problem = on_first(self.accelerator, lambda: problem)
        if problem:
            shutil.rmtree(temporary, ignore_errors=True)  # room for a checkpoint
            self.save()
            raise InputError(f"{problem}; the training is kept in checkpoints/: make room and --resume")

    def write_model(self, model, policy, tokenizer, temporary, name):
        """Write the model and its card into the folder `temporary`, and put that in the place of `name`."""
        first = self.accelerator.is_main_process
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        save_pretrained(self.accelerator, model, policy, tokenizer, temporary)
        if first:
            (temporary / "README.md").write_text(self.model_card(), encoding="utf-8")
            self.files.put_model(temporary, name)

    def finish(self, model, policy, tokenizer):
        """Write model/ if there were steps, and print the scores before and after, or how to resume a stopped run."""
        self.display.close()
        if self.interrupted:
            self.print(f"stopped at step {self.step}: --resume --output_dir {self.folder} continues")
            return
        if self.step > 0:
            self.save_model(model, policy, tokenizer, "model")
        look = tool_command(type(self.args), "look", self.folder)
        plot = tool_command(type(self.args), "plot", self.folder)
        if look and plot:
            self.print(f"see the run: {look}, or its curves: {plot}")
        seconds = time.perf_counter() - self.started
        steps = count(self.step, "step")
        self.print(f"{self.closing_scores()}{steps}, {seconds:.1f} s, in {self.folder}")

    def closing_scores(self):
        """The scores of the last evaluation beside those of the first one, as text."""
        first, last = self.scores(self.first_eval), self.scores(self.last_eval)
        texts = {}
        for name in ("eval/pass@1", "eval/reward", "eval/accuracy"):
            if name not in last:
                continue
            text = f"{last[name]:.3f}; "
            if self.step and name in first:
                text = f"before {first[name]:.3f}, after {text}"
            elif self.step:
                text = f"after {text}"
            texts[name] = text
        if texts.get("eval/reward") == texts.get("eval/pass@1"):
            texts.pop("eval/reward", None)
        return "".join(f"{name} {text}" for name, text in texts.items())

    def close(self):
        """Shut Accelerate down; exit with the code of a signal. `del` the prepared model before: else gloo can hang."""
        self.display.close()
        self.accelerator.wait_for_everyone()
        self.accelerator.free_memory()
        self.accelerator.end_training()
        self.files.release()
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def abandon(self):
        """End a failed run, and remove its folder if it is empty; returns " (after step N)", "" before the start."""
        self.display.close()
        if self.files:
            self.files.abandon()
        return "" if self.step_start is None else f" (after step {self.step})"
