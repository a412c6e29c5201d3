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
from common.harness.loading import model_path, shorten

# The options that may differ on a resume, as may --eval_*; --max_steps too if the schedule does not depend on it.
MAY_CHANGE = "output_dir resume reward_changed save_every keep_checkpoints save_model_every eval_every lora_merge"
MAY_CHANGE += " report_to dry_run"
# Facts on which the rounding depends, and not what is computed: a run goes on with others, and says so.
ROUNDING = "device", "card", "torch", "threads"
# The files in the folder of a model that decide what is loaded.
SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".bin")
PIECE = 2**16  # bytes


def check_resume(run, loaded):
    """The folder of the checkpoint to resume from, or None, and whether its run evaluated with the same options. An
    InputError if it is of another run, and once models are `loaded`, also if it is damaged or a file is gone."""
    add_digests(run.digests, run.args)  # at the second time of what has come from the hub since
    done = find_checkpoints(run.folder) if run.args.resume else []
    if not done:
        return None, True
    path, new = done[-1], facts(run)
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        old, files = dict(meta["facts"]), dict(meta["files"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise InputError(f"{path}: missing, damaged or of an earlier version: meta.json") from None
    new = {name: value for name, value in new.items() if name in old or name not in ROUNDING}  # of an older checkpoint
    changed = [name for name in (old | new if loaded else new) if old.get(name) != new.get(name)]
    changed = {name: f"{name} was {old.get(name)}, is {new.get(name)}" for name in changed}
    notes = [changed.pop(name) for name in ROUNDING if name in changed]
    evaluations = [changed.pop(name) for name in list(changed) if name.startswith("--eval_")]
    rewards = [changed.pop(name) for name in list(changed) if name.startswith("--reward ")]
    if changed or (rewards and not run.args.reward_changed):
        hint = "; --reward_changed accepts another reward" if rewards else ""
        raise InputError(f"{path} is of another run: {shorten([*changed.values(), *rewards])}{hint}")
    if damaged := [name for name, checksum in files.items() if loaded and digest(path / name) != checksum]:
        raise InputError(f"{path}: missing or damaged: {', '.join(damaged)}")
    if notes and loaded:
        print(f"{', '.join(notes)}: it does not resume bit for bit")
    return path, not evaluations


def facts(run):
    """{name: value} of what an exact resume cannot change: the launch, the options, and the digests."""
    accelerator = run.accelerator
    may_change = MAY_CHANGE.split() + ["max_steps"] * (run.args.lr_scheduler == "constant")
    facts = {"script": run.script, "processes": accelerator.num_processes, "strategy": strategy(accelerator)}
    facts |= {"mixed_precision": accelerator.mixed_precision, "device": accelerator.device.type}
    facts |= {"card": card(accelerator.device), "torch": str(torch.__version__)}
    options = {f"--{name}": value for name, value in dataclasses.asdict(run.args).items() if name not in may_change}
    return facts | {"threads": torch.get_num_threads()} | options | run.digests


def card(device):
    """The name of the graphics card of a device, None of another one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def load_checkpoint(run, path):
    """Load the checkpoint `path`. On one process and under DDP only tensors and plain data are unpickled, no code."""
    from accelerate.utils import load

    options = {"strict": False} if run.args.lora_rank else {}  # the frozen weights are not in it
    try:
        run.accelerator.load_state(str(path), **options)  # it goes on where it cannot read the random numbers
        load(path / f"random_states_{run.accelerator.process_index}.pkl")
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for name, part in run.kept.items():
            part.load_state_dict(state[name])
    except InputError:
        raise
    except Exception as error:  # each format has its own way to fail
        raise InputError(f"{path} cannot be loaded: {in_short(error)}") from None


def save_checkpoint(run):
    """Write checkpoints/step-N, under another name until it is complete, and remove the oldest ones."""
    accelerator, root = run.accelerator, run.folder / "checkpoints"
    temporary, final = root / "tmp", root / f"step-{run.step:08d}"
    with writing(final):
        if accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied heads: they need no warning
        accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()  # save_state has no barrier at its end
        if accelerator.is_main_process:
            state = {name: part.state_dict() for name, part in run.kept.items()}
            (temporary / "state.json").write_text(json.dumps(state), encoding="utf-8")
            files = [path for path in temporary.rglob("*") if path.is_file()]
            files = {str(path.relative_to(temporary)): digest(path) for path in files}
            meta = json.dumps({"facts": facts(run), "files": files}, indent=2)
            (temporary / "meta.json").write_text(meta, encoding="utf-8")
            put_in_place(temporary, final)
            prune(run)  # after the new one is there
    accelerator.wait_for_everyone()


def prune(run):
    """Remove the oldest checkpoints beyond --keep_checkpoints."""
    done = [path for path in find_checkpoints(run.folder) if (path / "meta.json").exists()]
    for old in done[: -run.args.keep_checkpoints]:
        old.unlink() if old.is_symlink() else shutil.rmtree(old)  # what a link points to is not the run's


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
    files = {}
    for source in (spec.rpartition(":")[0] for spec in getattr(args, "reward", [])):
        path = source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
        if path:  # `load_rewards` has imported a module by now; one that is built in has no file
            files[f"--reward {source}"] = pathlib.Path(path)
    for option in [name for name, value in vars(args).items() if name.endswith("_path") and value]:
        with contextlib.suppress(Exception):  # of nearly every type: loading will say what is not there
            # Of a hub id this is the snapshot that will be loaded: the newest one, or offline that of the cache.
            for path in pathlib.Path(cached_file(model_path(args, option), "config.json")).parent.iterdir():
                if path.suffix in SUFFIXES:  # not by their paths: `embedded` is the same model wherever this lies
                    files[f"--{option} {getattr(args, option)}/{path.name}"] = path
    for name in files.keys() - digests.keys():
        digests[name] = str(digest(files[name], in_parts=True))[:16]


def digest(path, in_parts=False):
    """SHA-256 of a file, None if unreadable. `in_parts`, for speed: size, header, 3 PIECEs a tensor of .safetensors."""
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
