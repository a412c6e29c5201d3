"""Checkpoints, written whole or not at all, without code in them; digests of what else a run reads, to compare."""

import contextlib
import dataclasses
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
from transformers.utils import cached_file

from common.errors import InputError, in_short, one_line
from common.harness.distributed import strategy
from common.harness.loading import find_base, shorten

# The options that may differ on a resume, as may --eval_*; --max_steps too if the schedule does not depend on it.
MAY_CHANGE = "output_dir resume reward_changed save_every keep_checkpoints save_model_every eval_every lora_merge"
MAY_CHANGE += " report_to dry_run"
# Facts on which the rounding depends, and not what is computed: a run goes on with others, and says so.
ROUNDING = ("device", "card", "torch", "threads")
# The files in the folder of a model that decide what is loaded.
MODEL_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin")
PIECE = 2**16  # bytes


class Checkpoints:
    """The checkpoints/step-N in the folder of a run. `digests` {name: SHA-256} are of the files that the run reads."""

    def __init__(self, accelerator, args, script, folder):
        self.accelerator = accelerator
        self.args = args
        self.script = script
        self.folder = folder
        self.digests = {}

    def check_resume(self, loaded):
        """The checkpoint to resume from, or None; and whether its run evaluated with the same options.

        An InputError if it is of another run and, once models are `loaded`, also if it is damaged or a file is gone.
        """
        add_digests(self.digests, self.args)  # at the second call also of what has come from the hub since the first
        done = find_checkpoints(self.folder) if self.args.resume else []
        if not done:
            return None, True
        path = done[-1]
        old, checksums = read_meta(path)
        new = self.facts()
        for name in ROUNDING:
            if name not in old:  # a checkpoint of an earlier version
                new.pop(name, None)
        names = old | new if loaded else new  # before models are loaded, not all facts of today are known
        changed = [name for name in names if old.get(name) != new.get(name)]
        rounding, evaluations, rewards, others = [], [], [], []
        for name in changed:
            text = f"{name} was {old.get(name)}, is {new.get(name)}"
            if name in ROUNDING:
                rounding.append(text)
            elif name.startswith("--eval_"):
                evaluations.append(text)
            elif name.startswith("--reward "):
                rewards.append(text)
            else:
                others.append(text)
        if others or (rewards and not self.args.reward_changed):
            hint = "; --reward_changed accepts another reward" if rewards else ""
            raise InputError(f"{path} is of another run: {shorten([*others, *rewards])}{hint}")
        if loaded:
            check_files(path, checksums)
            if rounding:
                print(f"{', '.join(rounding)}: it does not resume bit for bit")
        return path, not evaluations

    def facts(self):
        """{name: value} of what an exact resume cannot change: the launch, the options, and the digests."""
        may_change = MAY_CHANGE.split()
        if self.args.lr_scheduler == "constant":
            may_change.append("max_steps")
        facts = {
            "script": self.script,
            "processes": self.accelerator.num_processes,
            "strategy": strategy(self.accelerator),
            "mixed_precision": self.accelerator.mixed_precision,
            "device": self.accelerator.device.type,
            "card": card(self.accelerator.device),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        }
        for name, value in dataclasses.asdict(self.args).items():
            if name not in may_change:
                facts[f"--{name}"] = value
        return facts | self.digests

    def load(self, path, parts):
        """Load the checkpoint `path` into the prepared objects and `parts` {name: object with `load_state_dict`}.

        On one process and under DDP only tensors and plain data are unpickled, no code.
        """
        from accelerate.utils import load

        options = {"strict": False} if self.args.lora_rank else {}  # the frozen weights are not in it
        try:
            self.accelerator.load_state(str(path), **options)
            load(path / f"random_states_{self.accelerator.process_index}.pkl")  # `load_state` passes over a damaged one
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            for name, part in parts.items():
                part.load_state_dict(state[name])
        except InputError:
            raise
        except Exception as error:  # each format has its own way to fail
            raise InputError(f"{path} cannot be loaded: {in_short(error)}") from None

    def save(self, step, parts):
        """Write checkpoints/step-N of the prepared objects and of `parts` {name: object with `state_dict`}.

        It has another name until it is complete; then the oldest ones are removed. All processes call it.
        """
        accelerator = self.accelerator
        temporary = self.folder / "checkpoints" / "tmp"
        final = self.folder / "checkpoints" / f"step-{step:08d}"
        with writing(final):
            if accelerator.is_main_process:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            accelerator.wait_for_everyone()
            logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # it warns of tied heads
            accelerator.save_state(str(temporary))
            accelerator.wait_for_everyone()  # `save_state` does not wait at its end
            if accelerator.is_main_process:
                state = {name: part.state_dict() for name, part in parts.items()}
                (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
                paths = [path for path in temporary.rglob("*") if path.is_file()]
                checksums = {str(path.relative_to(temporary)): digest(path) for path in paths}
                meta = json.dumps({"facts": self.facts(), "files": checksums}, indent=2)
                (temporary / "meta.json").write_text(meta, encoding="utf-8")
                put_in_place(temporary, final)
                self.prune()  # after the new one is there
        accelerator.wait_for_everyone()

    def prune(self):
        """Remove the oldest checkpoints beyond --keep_checkpoints."""
        done = [path for path in find_checkpoints(self.folder) if (path / "meta.json").exists()]
        for old in done[: -self.args.keep_checkpoints]:
            if old.is_symlink():  # what it points to is not the run's
                old.unlink()
            else:
                shutil.rmtree(old)


def card(device):
    """The name of the graphics card of a device, None of another one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def find_checkpoints(folder):
    """The folders checkpoints/step-N in the folder of a run, oldest first; folders of other names are the user's."""
    paths = sorted((folder / "checkpoints").glob("step-*"))
    return [path for path in paths if re.fullmatch("step-[0-9]{8}", path.name) and path.is_dir()]


def read_meta(path):
    """The facts {name: value} and the checksums {file: SHA-256} that a checkpoint was written with."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        return dict(meta["facts"]), dict(meta["files"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise InputError(f"{path}: missing, damaged or of an earlier version: meta.json") from None


def check_files(path, checksums):
    """Refuse a checkpoint with files that are gone or have changed."""
    damaged = [name for name, checksum in checksums.items() if digest(path / name) != checksum]
    if damaged:
        raise InputError(f"{path}: missing or damaged: {', '.join(damaged)}")


@contextlib.contextmanager
def writing(what):
    """A context in which a failed write of `what` (disk full, no permission, a name too long) is an InputError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        hint = "" if isinstance(error, OSError) else "is the disk full? "  # torch.save does not say so
        raise InputError(f"{what} cannot be written: {hint}{one_line(error)}") from None


def put_in_place(temporary, final):
    """Rename the folder `temporary` to `final` once its files are on the disk: a crash leaves it whole or absent."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:  # Windows flushes only what may be written
                os.fsync(file.fileno())
    os.replace(temporary, final)


def add_digests(digests, args):
    """Add to `digests` {name: SHA-256} the files of rewards and models that a run of `args` reads, if they are here.

    A digest that is there stays: it is that of what was loaded.
    """
    files = reward_files(args)
    for option, value in vars(args).items():
        if option.endswith("_path") and value:
            files |= model_files(args, option)
    for name, path in files.items():
        if name not in digests:
            digests[name] = str(digest(path, in_parts=True))[:16]


def reward_files(args):
    """{name: path} of the Python files of --reward."""
    files = {}
    for spec in getattr(args, "reward", []):
        source, _, _ = spec.rpartition(":")
        if source.endswith(".py"):
            files[f"--reward {source}"] = pathlib.Path(source)
        elif path := getattr(sys.modules.get(source), "__file__", None):  # `load_rewards` has imported the module
            files[f"--reward {source}"] = pathlib.Path(path)
    return files


def model_files(args, option):
    """{name: path} of the files of the model that an option names, of a PEFT adapter also those of its base.

    Of a hub id these are the files of the snapshot that is loaded. A name has no path in it where the option has none:
    `embedded` is the same model wherever this project lies.
    """
    files = {}
    with contextlib.suppress(Exception):  # of nearly every type: loading will say what is not there
        base, adapter = find_base(args, option)
        for place, config_name in ((base, "config.json"), (adapter, "adapter_config.json")):
            if place is None:
                continue
            shown = place if place == base and adapter else getattr(args, option)
            for path in pathlib.Path(cached_file(place, config_name)).parent.iterdir():
                if path.suffix in MODEL_FILES:
                    files[f"--{option} {shown}/{path.name}"] = path
    return files


def digest(path, in_parts=False):
    """SHA-256 of a file, None if it cannot be read. `in_parts`: of a .safetensors file only parts, for speed."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError), open(path, "rb") as file:
        if in_parts and path.suffix == ".safetensors":
            return digest_of_parts(file)
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_parts(file):
    """SHA-256 of the size and the header of a .safetensors file, and of three pieces of each tensor."""
    size = os.fstat(file.fileno()).st_size
    start = 8 + int.from_bytes(file.read(8), "little")  # of the tensors
    header = file.read(min(start - 8, size))
    sha256 = hashlib.sha256(b"%d" % size + header)
    for name, tensor in json.loads(header).items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        last = max(begin, end - PIECE)
        middle = max(begin, (begin + end - PIECE) // 2)
        for place in sorted({begin, middle, last}):
            file.seek(start + place)
            sha256.update(file.read(min(PIECE, end - place)))
    return sha256.hexdigest()
