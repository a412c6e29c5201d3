"""Checkpoints: written completely or not at all, checked when they are read, and without code in them."""

import dataclasses
import hashlib
import json
import logging
import pickle
import re
import shutil

import torch

from common.errors import InputError, one_line
from common.harness.digests import add_digests
from common.harness.distributed import strategy
from common.harness.files import put_in_place, writing
from common.harness.lora import keep_trained
from common.harness.model_checks import shorten
from common.harness.names import EARLIER


class Checkpoints:
    """The checkpoints of a run, in the folder checkpoints/ of its folder.

    `kept` are the parts of a checkpoint besides weights, optimizer and random states: {name: object}; `digests` are
    those of what a run reads besides options and data: models and reward files.
    """

    # On a resume these may differ from the checkpoint's; max_steps only if the schedule does not depend on it.
    MAY_CHANGE = ("output_dir", "resume", "save_every", "keep_checkpoints", "save_model_every", "lora_merge")
    MAY_CHANGE += ("report_to", "dry_run", "reward_changed")

    def __init__(self, accelerator, args, script, folder):
        self.accelerator, self.args, self.script, self.folder = accelerator, args, script, folder
        self.kept, self.digests, self.saved_step = {}, {}, None
        if args.lora_rank:
            accelerator.register_save_state_pre_hook(keep_trained)

    def look(self):
        """Before anything is loaded: digest what the run reads; on a resume, compare that and the options."""
        add_digests(self.digests, self.args)
        if self.args.resume and (done := find_checkpoints(self.folder)):
            self.compare(done[-1], read_meta(done[-1]), self.digests)

    def last(self):
        """With --resume: the path of the last checkpoint, checked to be complete and of this run; None without one."""
        add_digests(self.digests, self.args)  # of what has come from the hub since
        done = find_checkpoints(self.folder) if self.args.resume else []
        if done:
            self.check(done[-1])
            return done[-1]

    def check(self, path):
        meta = read_meta(path)
        if not meta["digests"]:
            print(f"{path} is of an earlier version: whether models and rewards are the same is not checked this time")
        self.compare(path, meta, self.digests | meta["digests"])
        if meta["threads"] != torch.get_num_threads():
            print(f"{meta['threads']} threads before, {torch.get_num_threads()} now: it does not resume bit for bit")
        damaged = [name for name, checksum in meta["files"].items() if file_checksum(path / name) != checksum]
        if damaged:
            raise InputError(f"{path}: missing or damaged: {', '.join(damaged)}")

    def compare(self, path, meta, names):
        """Refuse to resume with other processes, options, or files of these `names` than the checkpoint's."""
        then = f"{meta['script']}.py on {meta['processes']} processes ({meta['strategy']})"
        now = f"{self.script}.py on {self.accelerator.num_processes} processes ({strategy(self.accelerator)})"
        if then != now:
            raise InputError(f"{path} is of {then}, this is {now}: an exact resume is impossible")
        now = self.accelerator.mixed_precision
        if meta["mixed_precision"] != now:
            raise InputError(f"{path} was trained with mixed precision {meta['mixed_precision']}, this run has {now}")
        old, new = {EARLIER.get(name, name): x for name, x in meta["args"].items()}, dataclasses.asdict(self.args)
        may_change = self.MAY_CHANGE + (("max_steps",) if self.args.lr_scheduler == "constant" else ())
        differing = [name for name in new if old.get(name) != new[name]]
        differing = [name for name in differing if name not in may_change and not name.startswith("eval_")]
        if differing:
            values = ", ".join(f"--{name} was {old.get(name)}, is {new[name]}" for name in differing)
            raise InputError(f"{path} is of a run with other options: {values}")
        old = meta["digests"] or self.digests
        files = [name for name in sorted(names) if old.get(name) != self.digests.get(name)]
        rewards = [name for name in files if name.startswith("--reward ")]
        if files != rewards or (rewards and not self.args.reward_changed):
            hint = "; --reward_changed accepts another reward" if files == rewards else ""
            raise InputError(f"{path} is of a run with other files: {shorten(files)}{hint}")

    def load(self, path):
        """Load a checkpoint. With one process and with DDP, only tensors and plain data are unpickled."""
        from accelerate.utils import load

        try:
            options = {"strict": False} if self.args.lora_rank else {}  # the frozen weights are not in it
            self.accelerator.load_state(str(path), **options)
            # load_state() continues with other random numbers if it cannot read them.
            load(path / f"random_states_{self.accelerator.process_index}.pkl")
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            for name, part in self.kept.items():
                part.load_state_dict(state[name])
        except InputError:
            raise
        except pickle.UnpicklingError:
            raise InputError(f"{path}: a file holds more than tensors and plain data, it is not loaded") from None
        except Exception as error:  # each format has its own way to fail
            raise InputError(f"{path} cannot be loaded: {type(error).__name__}: {one_line(error)}") from None
        self.saved_step = int(path.name.removeprefix("step-"))

    def save(self, step):
        """Write checkpoints/step-N, unless it is there; into a temporary folder first, renamed when it is complete."""
        if self.saved_step == step:
            return
        accelerator, root = self.accelerator, self.folder / "checkpoints"
        temporary, final = root / "tmp", root / f"step-{step:08d}"
        with writing(final):
            if accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            accelerator.wait_for_everyone()
            logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied heads: they need no warning
            accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()  # save_state has no barrier at its end
            if accelerator.is_main_process:
                self.complete(temporary)
                put_in_place(temporary, final)
                done = [path for path in find_checkpoints(self.folder) if (path / "meta.json").exists()]
                for old in done[: -self.args.keep_checkpoints]:  # after the new one is there
                    old.unlink() if old.is_symlink() else shutil.rmtree(old)  # what a link points to is not the run's
        self.saved_step = step
        accelerator.wait_for_everyone()

    def complete(self, folder):
        """Add what Accelerate does not write: the kept parts, the run they are of, and the checksums of all files."""
        state = {name: part.state_dict() for name, part in self.kept.items()}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        files = [path for path in folder.rglob("*") if path.is_file()]
        meta = {
            "script": self.script,
            "processes": self.accelerator.num_processes,
            "strategy": strategy(self.accelerator),
            "args": dataclasses.asdict(self.args),
            "mixed_precision": self.accelerator.mixed_precision,
            "threads": torch.get_num_threads(),
            "digests": self.digests,
            "files": {str(path.relative_to(folder)): file_checksum(path) for path in files},
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def find_checkpoints(folder):
    """The folders checkpoints/step-N of a run, oldest first. Other names are not checkpoints of the run."""
    root = folder / "checkpoints"
    paths = sorted(root.iterdir()) if root.is_dir() else []
    return [path for path in paths if re.fullmatch("step-[0-9]{8}", path.name) and path.is_dir()]


def read_meta(path):
    """What meta.json says of a checkpoint."""
    names = ("script", "processes", "strategy", "args", "mixed_precision", "threads", "files", "digests")
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        meta = {"digests": {}} | meta  # an earlier version wrote none
        meta = {name: meta[name] for name in names}
        return meta | {name: dict(meta[name]) for name in ("args", "files", "digests")}
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(f"{path}: missing or damaged: meta.json") from None


def file_checksum(path):
    """SHA-256 of a file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
