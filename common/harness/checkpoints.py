"""Checkpoints, written whole or not at all, without code in them; digests of what else a run reads, to compare."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import sys

import torch
from safetensors import SafetensorError

from common.errors import InputError, in_short, one_line
from common.harness.distributed import strategy
from common.harness.loading import model_path, shorten
from common.harness.lora import find_base, keep_trained

# The options that may differ on a resume; --max_steps too if the schedule does not depend on it.
MAY_CHANGE = "--output_dir --resume --reward_changed --save_every --keep_checkpoints --save_model_every --eval_every"
MAY_CHANGE += " --lora_merge --report_to --dry_run"
# The files in the folder of a model that decide what is loaded.
SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin")
PIECE = 2**16  # bytes


class Checkpoints:
    """The checkpoints of a run, each a folder checkpoints/step-N in its folder.

    `kept` {name: object}: what a checkpoint holds the states of besides weights, optimizer and random numbers.
    """

    def __init__(self, accelerator, args, script, folder):
        self.accelerator, self.args, self.script, self.folder = accelerator, args, script, folder
        self.kept, self.digests, self.saved_step = {}, {}, None
        if args.lora_rank:
            accelerator.register_save_state_pre_hook(keep_trained)

    def check(self, loaded):
        """The folder of the checkpoint to resume from, or None, and whether its run evaluated with the same options.

        An InputError if it is of another run, and once models are `loaded`, also if it is damaged or a file is gone.
        """
        add_digests(self.digests, self.args)  # at the second time of what has come from the hub since
        done = find_checkpoints(self.folder) if self.args.resume else []
        if not done:
            return None, True
        path, new, may_change = done[-1], self.facts(), MAY_CHANGE.split()
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
            old, files = meta["facts"], meta["files"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            raise InputError(f"{path}: missing, damaged or of an earlier version: meta.json") from None
        may_change += ["--max_steps"] * (self.args.lr_scheduler == "constant")
        changed = [name for name in (old | new if loaded else new) if old.get(name) != new.get(name)]
        changed = {x: f"{x} was {old.get(x)}, is {new.get(x)}" for x in changed if x not in may_change}
        notes = [changed.pop(name) for name in ("device", "threads") if name in changed]
        evaluations = [changed.pop(name) for name in list(changed) if name.startswith("--eval_")]
        rewards = {name for name in changed if name.startswith("--reward ")}
        if changed.keys() - (rewards if self.args.reward_changed else set()):
            hint = "; --reward_changed accepts another reward" if rewards == changed.keys() else ""
            raise InputError(f"{path} is of another run: {shorten([*changed.values()])}{hint}")
        damaged = [name for name, checksum in files.items() if loaded and digest(path / name) != checksum]
        if damaged:
            raise InputError(f"{path}: missing or damaged: {', '.join(damaged)}")
        if notes and loaded:
            print(f"{', '.join(notes)}: it does not resume bit for bit")
        return path, not evaluations

    def facts(self):
        """{name: value} of what an exact resume cannot change: the launch, the options, and the digests."""
        facts = {"script": self.script, "processes": self.accelerator.num_processes}
        facts |= {"strategy": strategy(self.accelerator), "mixed_precision": self.accelerator.mixed_precision}
        facts |= {"device": self.accelerator.device.type, "threads": torch.get_num_threads()}
        return facts | {f"--{name}": value for name, value in dataclasses.asdict(self.args).items()} | self.digests

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
        except Exception as error:  # each format has its own way to fail
            raise InputError(f"{path} cannot be loaded: {in_short(error)}") from None
        self.saved_step = int(path.name.removeprefix("step-"))

    def save(self, step):
        """Write checkpoints/step-N, under another name until it is complete, and remove the oldest beyond
        --keep_checkpoints; nothing if this run has saved the step."""
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
                state = {name: part.state_dict() for name, part in self.kept.items()}
                (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
                files = [path for path in temporary.rglob("*") if path.is_file()]
                files = {str(path.relative_to(temporary)): digest(path) for path in files}
                meta = json.dumps({"facts": self.facts(), "files": files}, indent=2)
                (temporary / "meta.json").write_text(meta, encoding="utf-8")
                put_in_place(temporary, final)
                self.prune()  # after the new one is there
        self.saved_step = step
        accelerator.wait_for_everyone()

    def prune(self):
        """Remove the oldest checkpoints beyond --keep_checkpoints."""
        done = [path for path in find_checkpoints(self.folder) if (path / "meta.json").exists()]
        for old in done[: -self.args.keep_checkpoints]:
            old.unlink() if old.is_symlink() else shutil.rmtree(old)  # what a link points to is not the run's


@contextlib.contextmanager
def writing(what):
    """A context in which a failed write of `what` (disk full, no permission, a name too long) is an InputError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:  # the last one is torch.save's, which gives no reason
        full = not isinstance(error, OSError) and shutil.disk_usage(pathlib.Path(what).parent).free < 2**20
        reason = os.strerror(errno.ENOSPC) if full else one_line(error)
        raise InputError(f"{what} cannot be written: {reason}") from None


def put_in_place(temporary, final):
    """Rename the folder `temporary` to `final` once its files are on the disk: a crash leaves it whole or absent."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:  # Windows flushes what may be written only
                os.fsync(file.fileno())
    os.replace(temporary, final)


def find_checkpoints(folder):
    """The folders checkpoints/step-N in the folder of a run, oldest first; folders of other names are the user's."""
    paths = sorted((folder / "checkpoints").glob("step-*"))
    return [path for path in paths if re.fullmatch("step-[0-9]{8}", path.name) and path.is_dir()]


def add_digests(digests, args):
    """Add to `digests` {name: SHA-256} the files of rewards and models that a run of `args` reads, if they are here. An
    option whose name ends in _path names a model. A digest that is there stays: it is of what was loaded."""
    from transformers.utils import cached_file

    files = {}
    for source in (spec.rpartition(":")[0] for spec in getattr(args, "reward", [])):
        path = source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
        if path:  # `load_rewards` has imported a module by now; one that is built in has no file
            files[f"--reward {source}"] = pathlib.Path(path)
    for option in [name for name, value in vars(args).items() if name.endswith("_path") and value]:
        with contextlib.suppress(Exception):  # of nearly every type: loading will say what is not there
            base, adapter = find_base(name := model_path(args, option))
            for place, config in ({base: "config.json"} | ({name: "adapter_config.json"} if adapter else {})).items():
                # Of a hub id this is the snapshot that will be loaded: the newest one, or offline that of the cache.
                paths = pathlib.Path(cached_file(place, config)).parent.iterdir()
                files |= {f"--{option} {place}/{path.name}": path for path in paths if path.suffix in SUFFIXES}
    for name in files.keys() - digests.keys():
        digests[name] = str(digest(files[name], in_parts=True))[:16]


def digest(path, in_parts=False):
    """SHA-256 of a file; None where it cannot be read. `in_parts`: of .safetensors only of the size, the header, and
    64 KiB at the start, middle and end of each tensor, as a whole model takes long to read."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError), open(path, "rb") as file:
        if not in_parts or path.suffix != ".safetensors":
            return hashlib.file_digest(file, "sha256").hexdigest()
        size, start = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
        header = file.read(min(start - 8, size))
        found, tensors = hashlib.sha256(b"%d" % size + header), json.loads(header)
        for begin, end in (tensors[name]["data_offsets"] for name in tensors if name != "__metadata__"):
            for place in sorted({begin, max(begin, (begin + end - PIECE) // 2), max(begin, end - PIECE)}):
                file.seek(start + place)
                found.update(file.read(min(PIECE, end - place)))
        return found.hexdigest()
