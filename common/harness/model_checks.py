"""Whether a checkpoint can be what an option asks for: its folder, its files, its weights. What cannot is refused."""

import contextlib
import json
import os
import pathlib
import re

import torch

from common.errors import InputError, in_short, refuse, say
from common.harness import lora
from common.harness.data import EMBEDDED_FOLDERS

# Weights that a text model leaves unused: those for images, sound, and the prediction of several tokens at once, and
# the causal masks that old checkpoints of GPT-Neo and GPT-J hold.
BESIDE_TEXT = re.compile(
    r"(^|[._])(vision|visual|image|video|audio|speech|multi_modal|mm|mtp|nextn)([._]|$)"
    r"|\.(attn|attention)\.(masked_)?bias$"
)

SAVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def model_path(args, option="model_name_or_path"):
    """The folder or hub id of the model that an option names; `embedded` and `embedded-hard` are folders of common/."""
    name = os.path.expanduser(getattr(args, option))
    return str(EMBEDDED_FOLDERS.get(name, name)) if option == "model_name_or_path" else name


@contextlib.contextmanager
def load_errors(args, option, problem):
    """A context in which whatever a loader raises is an InputError: no such folder, or `problem` and its text."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # loaders raise nearly every type there is
        path = pathlib.Path(name := model_path(args, option))
        if not path.exists():
            if name.startswith((".", "/")) or "\\" in name or name.count("/") > 1:  # as no hub id is written
                refuse(args, option, "no such folder")
            if "/" in name and path.parent.is_dir():
                problem = f"no such folder, and {problem}"
        refuse(args, option, f"{problem}: {in_short(error)}")


def check_json(args, option):
    """Refuse what transformers accepts silently in config.json and generation_config.json: a dtype in which model/
    would lose precision, a damaged file (it is ignored, with its EOS ids), and EOS ids that are no token ids."""
    from transformers.utils import cached_file

    base, _ = lora.find_base(model_path(args, option))
    quiet = {f"_raise_exceptions_for_{x}": False for x in ("gated_repo", "missing_entries", "connection_errors")}
    for name in ("config.json", "generation_config.json"):
        path = cached_file(base, name, **quiet)
        try:
            values = dict(json.loads(pathlib.Path(path).read_bytes())) if path else {}
        except (ValueError, TypeError) as error:
            refuse(args, option, f"{name} is damaged: {in_short(error)}")
        parts = (values, values.get("text_config") or {})
        for dtype in (part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None):
            if not isinstance(dtype, str) or getattr(torch, dtype, None) not in SAVED_DTYPES:
                kinds = "float32, bfloat16, float16 or float64"
                refuse(args, option, f"{name} has dtype {json.dumps(dtype)}: model/ is saved in it, take {kinds}")
        ids = values.get("eos_token_id") if name == "generation_config.json" else None
        for i in ids if isinstance(ids, list) else [ids]:
            if i is not None and (type(i) is not int or i < 0):
                refuse(args, option, f"{name} has eos_token_id {json.dumps(ids)}: {json.dumps(i)} is no token id")


def check_not_quantised(args, option, config):
    """Refuse quantised weights (fp8, mxfp4, bitsandbytes, GPTQ, ...): they cannot be trained."""
    for part in (config, config.get_text_config()):
        if quantised := getattr(part, "quantization_config", None):
            method = quantised.get("quant_method", "bitsandbytes")  # whose old checkpoints do not say it
            refuse(args, option, f"its weights are quantised ({method}): a copy in bfloat16 or float32 is needed")


def check_weights(args, option, lm, info, new_head):
    """The names of the weights of a new head, by what transformers says of the load, `info`.

    An InputError names other weights that the checkpoint lacks, has in another shape, or has and the model has not;
    of the last kind those for images or sound are left out, and a line says so.
    """

    def of_backbone(name):
        part = name.partition(".")[0]  # a checkpoint of a bare backbone has no prefix
        return part == lm.base_model_prefix or hasattr(lm.base_model, part)

    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    new = [name for name in missing if new_head and not of_backbone(name)]
    beside_text = [name for name in unused if BESIDE_TEXT.search(name)]
    unused = [name for name in unused if name not in beside_text]
    if new_head:
        missing, unused = (list(filter(of_backbone, names)) for names in (missing, unused))
    reshaped = sorted(name for name, *_ in info["mismatched_keys"])
    kind = type(lm).__name__
    for names, problem in (
        (missing, f"the checkpoint lacks weights of a {kind}"),
        (reshaped, f"the checkpoint has weights of other shapes than its config.json gives a {kind}"),
        (unused, f"the checkpoint has weights that a {kind} does not use"),
    ):
        if names:
            refuse(args, option, f"{problem}: {shorten(names)}")
    if beside_text:
        say(args, option, f"a {kind} leaves weights unused, and model/ will lack them: {shorten(beside_text)}")
    return new


def check_vocabulary(args, option, lm, tokenizer):
    """Refuse a tokenizer with token ids beyond the rows of the model's embedding."""
    rows, vocabulary = lm.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    for kind in ("image", "audio", "video"):  # placeholders that a text never has; Gemma 3 1B has no embedding for one
        vocabulary.pop(getattr(tokenizer, f"{kind}_token", None), None)
    if max(vocabulary.values()) >= rows:
        token = max(vocabulary, key=vocabulary.get)
        refuse(args, option, f"its tokenizer has {token!r} as {vocabulary[token]}, its embedding has {rows} rows")


def shorten(names):
    """The first three of a list of names as text, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
