"""Checkpoints: written completely or not at all, checked when they are read, and without code in them."""

import dataclasses
import json
import logging
import pickle
import re
import shutil

import torch

from common.errors import InputError, one_line
from common.harness.digests import add_digests, file_checksum
from common.harness.distributed import strategy
from common.harness.files import put_in_place, writing
from common.harness.loading import shorten
from common.harness.lora import keep_trained


class Checkpoints:
    """The checkpoints of a run, each a folder checkpoints/step-N in its folder.

    `kept` {name: object}: what a checkpoint holds the states of besides weights, optimizer and random numbers.
    `digests` {name: SHA-256}: those of the models and reward files that the run reads.
    """

    # On a resume these may differ from the checkpoint's; max_steps only if the schedule does not depend on it.
    MAY_CHANGE = ("output_dir", "resume", "save_every", "keep_checkpoints", "save_model_every", "lora_merge")
    MAY_CHANGE += ("report_to", "dry_run", "reward_changed")

    def __init__(self, accelerator, args, script, folder):
        self.accelerator, self.args, self.script, self.folder = accelerator, args, script, folder
        self.kept, self.digests, self.saved_step = {}, {}, None
        if args.lora_rank:
            accelerator.register_save_state_pre_hook(keep_trained)

    def last(self):
        """The folder of the last checkpoint; None without --resume, or where there is none."""
        done = find_checkpoints(self.folder) if self.args.resume else []
        return done[-1] if done else None

    def check_before_loading(self):
        """Digest what the run reads; on a resume refuse other options and files than those of the last checkpoint."""
        add_digests(self.digests, self.args)
        if path := self.last():
            self.refuse_other_run(path, read_meta(path), self.digests)

    def last_checked(self):
        """As `last`; an InputError if the checkpoint is damaged or of another run."""
        add_digests(self.digests, self.args)  # of what has come from the hub since
        path = self.last()
        if path is None:
            return None
        meta = read_meta(path)
        if not meta["digests"]:
            print(f"{path} is of an earlier version: whether models and rewards are the same is not checked this time")
        self.refuse_other_run(path, meta, self.digests | meta["digests"])
        if meta["threads"] != torch.get_num_threads():
            print(f"{meta['threads']} threads before, {torch.get_num_threads()} now: it does not resume bit for bit")
        damaged = [name for name, checksum in meta["files"].items() if file_checksum(path / name) != checksum]
        if damaged:
            raise InputError(f"{path}: missing or damaged: {', '.join(damaged)}")
        return path

    def refuse_other_run(self, path, meta, names):
        """Raise an InputError if the checkpoint is of another script, of other processes or options than this run, or
        if the digests of the files `names` differ."""
        old, new = settings(meta), settings(self.facts())
        may_change = self.MAY_CHANGE + (("max_steps",) if self.args.lr_scheduler == "constant" else ())
        differing = [name for name in new if old.get(name) != new[name] and name.removeprefix("--") not in may_change]
        values = [f"{name} was {old.get(name)}, is {new[name]}" for name in differing if not name.startswith("--eval_")]
        if values:
            raise InputError(f"{path} is of a run with other options: {shorten(values)}")
        old = meta["digests"] or self.digests
        files = [name for name in sorted(names) if old.get(name) != self.digests.get(name)]
        rewards = [name for name in files if name.startswith("--reward ")]
        if files != rewards or (rewards and not self.args.reward_changed):
            hint = "; --reward_changed accepts another reward" if files == rewards else ""
            raise InputError(f"{path} is of a run with other files: {shorten(files)}{hint}")

    def evaluates_otherwise(self, path):
        """Whether the evaluations of the checkpoint `path` had other options than those of this run."""
        old, new = settings(read_meta(path)), settings(self.facts())
        return any(old.get(name) != new[name] for name in new if name.startswith("--eval_") and name != "--eval_every")

    def facts(self):
        """What meta.json says of this run, with which a resume is compared: {name: value}."""
        return {
            "script": self.script,
            "processes": self.accelerator.num_processes,
            "strategy": strategy(self.accelerator),
            "mixed_precision": self.accelerator.mixed_precision,
            "args": dataclasses.asdict(self.args),
            "threads": torch.get_num_threads(),
            "digests": self.digests,
        }

    def load(self, path):
        """Load the checkpoint `path` into model, optimizer, random numbers and the kept objects.

        With one process and with DDP only tensors and plain data are unpickled, so that no file of it can run code.
        """
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
        """Write checkpoints/step-N unless this run has, and remove the oldest beyond --keep_checkpoints.

        It is written under another name and renamed when it is complete: a crash leaves no half checkpoint.
        """
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
        """Add what Accelerate does not write: the states of the kept objects, and meta.json with the facts of the run
        and the SHA-256 of all files."""
        state = {name: part.state_dict() for name, part in self.kept.items()}
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        files = [path for path in folder.rglob("*") if path.is_file()]
        meta = self.facts() | {"files": {str(path.relative_to(folder)): file_checksum(path) for path in files}}
        (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def find_checkpoints(folder):
    """The folders checkpoints/step-N in the folder of a run, oldest first; folders of other names are the user's."""
    paths = sorted((folder / "checkpoints").glob("step-*"))
    return [path for path in paths if re.fullmatch("step-[0-9]{8}", path.name) and path.is_dir()]


def read_meta(path):
    """The facts in the meta.json of the checkpoint `path`, and the checksums of its files."""
    names = ("script", "processes", "strategy", "mixed_precision", "args", "threads", "digests", "files")
    try:
        meta = {"digests": {}} | json.loads((path / "meta.json").read_text(encoding="utf-8"))  # earlier ones have none
        return {name: meta[name] for name in names}
    except (OSError, ValueError, LookupError, TypeError):
        raise InputError(f"{path}: missing or damaged: meta.json") from None


def settings(facts):
    """{name: value} of what an exact resume cannot change: the launch, and the options."""
    launch = {name: facts[name] for name in ("script", "processes", "strategy", "mixed_precision")}
    return launch | {f"--{name}": value for name, value in facts["args"].items()}
