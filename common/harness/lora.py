"""LoRA (arXiv 2106.09685): adapters of low rank on all linear layers but the head, the only weights that are trained.

A layer's weight is W + alpha / rank B A, where W is frozen, A is random and B starts at zero. The package is peft; the
model stays the one of transformers (`lm.add_adapter`), so that `Policy` finds its parts where they were.
"""

import copy
import os
import warnings

import torch

from common.errors import InputError, in_short, refuse
from common.generation import seeded

TRAINED, START = "default", "start"  # peft's names of the adapter that is trained, and of a frozen copy of its start


def find_base(path):
    """The folder or hub id of the base and the `PeftConfig` of a PEFT adapter; of a whole model `path` and None."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if not find_adapter_config_file(path):
        return path, None
    adapter = peft(f"the PEFT adapter {path}").PeftConfig.from_pretrained(path)
    if adapter.revision not in (None, "main"):
        raise InputError(f"the PEFT adapter {path} needs revision {adapter.revision} of its base model: not supported")
    return adapter.base_model_name_or_path, adapter


def find_tokenizer(path):
    """The folder or hub id of the tokenizer: that of a model or adapter, or of its base if an adapter has none."""
    from transformers.utils import cached_file

    base, adapter = find_base(path)
    own = adapter is None or cached_file(path, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    return path if own else base


def peft(what):
    """The package peft; an InputError if it is not installed, as `what` needs it."""
    try:
        import peft
    except ImportError:
        raise InputError(f"{what} needs the package peft: pip install peft (requirements-extras.txt)") from None
    return peft


def merge_adapter(lm, args, option, path, adapter):
    """The model `lm` with the adapter of the folder `path`, of this `PeftConfig`, added to its weights, which are all
    trainable."""
    from peft import PeftModel

    try:
        with_adapter = PeftModel(lm, adapter, TRAINED)
        load_weights(with_adapter, path, TRAINED)
        merged = with_adapter.merge_and_unload()
    except Exception as error:  # each kind of adapter has its own way to fail
        refuse(args, option, f"its adapter cannot be merged: {in_short(error)}")
    return merged.requires_grad_(True)


def add_adapters(lm, args, path=None, task="CAUSAL_LM"):
    """Freeze the model `lm` and add trainable adapters to its linear layers, in float32 whatever its dtype is.

    They are those of the adapter folder `path`, or new ones, which change nothing at first and are the same on all
    processes. Loaded ones are added a second time, frozen: `Reference` computes with these.
    """
    config = peft(f"--lora_rank {args.lora_rank}").LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules="all-linear", task_type=task
    )
    base, adapter = find_base(path) if path else (lm.name_or_path, None)
    if adapter:
        check_continued(args, adapter, config)
        adapter.lora_dropout = 0.0  # dropout would make the ratio of the first update differ from 1
    try:
        for name in (TRAINED, START) if adapter else (TRAINED,):
            add_adapter(lm, adapter or config, name, args.seed)
            if adapter:
                load_weights(lm, path, name)
    except Exception as error:  # peft and torch have their own ways to fail
        refuse(args, "model_name_or_path", f"no adapters can be added: {in_short(error)}")
    lm.set_adapter(TRAINED)
    for name, weight in lm.named_parameters():
        weight.requires_grad_(f".{TRAINED}." in name)
    lm.peft_config[TRAINED].base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    lm.saves_merged = args.lora_merge


def add_adapter(lm, config, name, seed):
    """Add an adapter of this name and `PeftConfig` to `lm`, in float32, with the random start of `seed`."""
    with seeded((seed, 0), lm.device), warnings.catch_warnings():
        # Of GPT-2's layers, where peft does the right thing, and of a second adapter.
        warnings.filterwarnings("ignore", ".*(fan_in_fan_out|Already found)")
        lm.add_adapter(copy.copy(config), name)
    for key, weight in lm.named_parameters():
        if f".{name}." in key:
            weight.data = weight.data.float()


def add_to_classifier(lm, args, option):
    """Add adapters to the backbone of a classifier, whose head is trained in full."""
    if option == "model_name_or_path" and not args.lora_merge:  # neither does a new pad token
        refuse(args, "lora_rank", "the head of a reward model does not fit into an adapter folder: add --lora_merge")
    add_adapters(lm, args, task="SEQ_CLS")
    for part in lm.children():
        if part is not lm.base_model:
            part.requires_grad_(True)


def check_continued(args, adapter, config):
    """Refuse to train a loaded adapter that is no plain LoRA, or of another rank or alpha than the options say."""
    for option, name in (("lora_rank", "r"), ("lora_alpha", "lora_alpha")):
        if getattr(adapter, name, None) != getattr(config, name):
            refuse(args, option, f"the adapter of --model_name_or_path has {getattr(adapter, name, None)}")
    free = {"r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path", "revision"}
    free |= {"inference_mode", "task_type", "peft_version", "init_lora_weights", "fan_in_fan_out", "auto_mapping"}
    fresh = config.to_dict()
    changed = {name: x for name, x in adapter.to_dict().items() if (x or None) != (fresh.get(name) or None)}
    other = [f"{name}={x}" for name, x in changed.items() if name not in free]
    if other:
        problem = f"only a plain LoRA adapter can be trained on, this one has {other[0]}"
        refuse(args, "model_name_or_path", f"{problem}; without --lora_rank it is merged")


def load_weights(model, path, name):
    """Load the weights of the adapter folder `path` into the adapter `name` of `model`, which may be a `PeftModel`; a
    ValueError if either has weights that the other lacks, where peft would go on."""
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(path, device=str(model.device))
    if not isinstance(model, PeftModel):
        weights = {key.removeprefix("base_model.model."): weight for key, weight in weights.items()}
    result = set_peft_model_state_dict(model, weights, name)
    lacking = [key for key in result.missing_keys if f".{name}." in key]
    if lacking or result.unexpected_keys:
        raise ValueError(f"it lacks {lacking[0]}" if lacking else f"the model has no {result.unexpected_keys[0]}")


class Reference:
    """The reference without a second copy of the weights: the policy with its adapters off, or as they were loaded.

    It is called as a `Policy`. peft freezes and unfreezes what it switches, which each call undoes.
    """

    def __init__(self, policy):
        self.policy = policy

    @torch.no_grad()
    def __call__(self, *inputs, **options):
        lm, training = self.policy.lm, self.policy.training
        flags = [(weight, weight.requires_grad) for weight in lm.parameters()]
        if START in lm.peft_config:
            lm.set_adapter(START)
        else:
            lm.disable_adapters()
        try:
            return self.policy.eval()(*inputs, **options)
        finally:
            self.policy.train(training)
            lm.enable_adapters()
            lm.set_adapter(TRAINED)
            for weight, flag in flags:
                weight.requires_grad_(flag)


def merge_into(lm, weights):
    """The `weights` {name: tensor} of `lm` with the trained adapter added, under the names of a whole model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm._hf_peft_config_loaded = False  # `save_pretrained` then writes a whole model
    layers = {name: module for name, module in lm.named_modules() if isinstance(module, BaseTunerLayer)}
    merged = {}
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".base_layer.")
        if part == "weight":
            weight = weight + layers[layer].get_delta_weight(TRAINED)  # float32
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = weight
    return merged


def keep_trained(models, states, folder):
    """Leave the frozen weights out of a checkpoint, as a hook of `Accelerator.register_save_state_pre_hook`: a resume
    loads them from the base."""
    for model, state in zip(models, states, strict=True):
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        for name in set(state) - trained:
            del state[name]
