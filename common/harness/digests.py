"""Digests of what a run reads besides its options and data: models and reward files. A resume compares them."""

import contextlib
import hashlib
import json
import os
import pathlib
import sys

from common.harness import lora
from common.harness.loading import model_path

MODELS = ("model_name_or_path", "critic_path", "reward_model_path")
# The files of a model folder that are read whole; of the weights, the first that is there is loaded.
WHOLE = "*config.json *.jinja additional_chat_templates/* tokenizer* vocab* merges.txt *_tokens*.json *.model"
WEIGHTS = "model.safetensors model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json".split()
ADAPTER = "adapter_model.safetensors adapter_model.bin".split()
PIECE = 2**16  # bytes


def add_digests(digests, args):
    """Add to `digests` those of the model and reward files that a run of `args` reads, {name: SHA-256}, as far as they
    are on this machine. A digest that is there stays: it is of what was loaded."""
    files = {}
    for spec in getattr(args, "reward", []):
        source = spec.rpartition(":")[0]
        path = source if source.endswith(".py") else getattr(sys.modules.get(source), "__file__", None)
        if path:  # `load_rewards` has imported a module by now; one that is built in has no file
            files[f"--reward {source}"] = pathlib.Path(path)
    for option in MODELS:
        if name := getattr(args, option, None):
            files |= model_files(f"--{option} {name}", model_path(args, option))
    digests |= {name: digest(path) for name, path in files.items() if name not in digests}


def model_files(label, name):
    """{name: path} of the files of the model `name`, a folder or hub id, and of the base of an adapter. What is not on
    this machine is left out: loading will say so."""
    from transformers.utils import cached_file

    found = {}
    with contextlib.suppress(Exception):  # transformers raises nearly every type there is
        base, adapter = lora.find_base(name)
        places = [(f"{label} on {base}" if adapter else label, base, "config.json", WEIGHTS)]
        places += [(label, name, "adapter_config.json", ADAPTER)] if adapter else []
        for label, place, config, weights in places:
            # Of a hub id this is the snapshot that will be loaded: the newest one, or offline that of the cache.
            folder = pathlib.Path(cached_file(place, config)).parent
            paths = [path for pattern in WHOLE.split() for path in sorted(folder.glob(pattern))]
            paths += weight_files(folder, weights)
            found |= {f"{label}/{path.relative_to(folder).as_posix()}": path for path in paths if path.is_file()}
    return found


def weight_files(folder, names):
    """The paths of the weights in a folder: the first of `names` that it has, with the shards that this lists."""
    first = next((folder / name for name in names if (folder / name).is_file()), None)
    if first and first.suffix == ".json":
        return [first, *(folder / name for name in set(json.loads(first.read_bytes())["weight_map"].values()))]
    return [first] if first else []


def digest(path):
    """SHA-256 of a file, for weights of parts of it: the size, the header, and 64 KiB at the start, middle and end of
    each tensor (of a .bin: of the file), as a whole model takes long to read. None where it cannot be read."""
    if path.suffix not in (".safetensors", ".bin"):
        return file_checksum(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found, spans = hashlib.sha256(b"%d" % size), [(0, size)]
            if path.suffix == ".safetensors":
                start = 8 + int.from_bytes(file.read(8), "little")
                header = file.read(min(start - 8, size))
                found.update(header)
                tensors = [x["data_offsets"] for name, x in json.loads(header).items() if name != "__metadata__"]
                spans = sorted((start + begin, start + end) for begin, end in tensors)
            for begin, end in spans:
                for place in sorted({begin, max(begin, (begin + end - PIECE) // 2), max(begin, end - PIECE)}):
                    file.seek(place)
                    found.update(file.read(min(PIECE, end - place)))
            return found.hexdigest()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def file_checksum(path):
    """SHA-256 of a whole file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
