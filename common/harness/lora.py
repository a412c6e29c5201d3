"""LoRA (arXiv 2106.09685): adapters of low rank on all linear layers but the head, the only weights that are trained.

A weight is W + alpha / rank B A, where W is frozen, A random and B zero at first. The package is peft, the model that
of transformers (`lm.add_adapter`)."""

import os

import torch

from common.generation import seeded
from common.harness.loading import find_base


def merge_adapter(lm, path, adapter):
    """The model `lm` with the adapter of the folder `path`, of this `PeftConfig`, added to its weights."""
    from peft import PeftModel

    with_adapter = PeftModel(lm, adapter)
    load_weights(lm, path)
    return with_adapter.merge_and_unload().requires_grad_(True)


def add_adapters(lm, args, path=None):
    """Freeze `lm`, but not a classifier's head, and add trainable adapters in float32 to its linear layers: those of an
    adapter folder `path`, or new ones, the same on all processes."""
    from peft import LoraConfig

    classifier = not lm.can_generate()  # whose adapter was merged
    base, adapter = find_base(path) if path and not classifier else (lm.name_or_path, None)
    config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules="all-linear")
    config.task_type = "SEQ_CLS" if classifier else "CAUSAL_LM"
    plain = "r lora_alpha use_rslora use_dora alpha_pattern rank_pattern bias modules_to_save alora_invocation_tokens"
    for name in plain.split() if adapter else ():
        if getattr(adapter, name, None) != getattr(config, name, None):
            raise ValueError(f"its {name}={getattr(adapter, name, None)} is not that of these options")
    if adapter:
        config.target_modules = adapter.target_modules
    with seeded((args.seed, 0), lm.device):
        lm.add_adapter(config)
    for name, weight in lm.named_parameters():
        in_head = classifier and not name.startswith(f"{lm.base_model_prefix}.")
        weight.requires_grad_(".lora_" in name or in_head)
        if ".lora_" in name:
            weight.data = weight.data.float()
    if adapter:
        load_weights(lm, path)
    lm.peft_config["default"].base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    lm.saves_merged = args.lora_merge


def load_weights(lm, path):
    """Load an adapter folder into the adapter of `lm`; a ValueError if either has weights that the other lacks."""
    from peft import load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(path, device=str(lm.device))
    result = set_peft_model_state_dict(lm, {key.removeprefix("base_model.model."): x for key, x in weights.items()})
    if wrong := [key for key in result.missing_keys if ".default." in key] + result.unexpected_keys:
        raise ValueError(f"only one of adapter and model has {wrong[0]}")


class Reference:
    """The policy with its adapters as they are now, called as a `Policy`."""

    def __init__(self, policy):
        self.policy = policy
        self.start = {name: x.detach().clone() for name, x in policy.named_parameters() if x.requires_grad}

    @torch.no_grad()
    def __call__(self, *inputs, **options):
        training = self.policy.training
        try:
            return torch.func.functional_call(self.policy.eval(), self.start, inputs, options)
        finally:
            self.policy.train(training)


def merge_into(lm, weights):
    """The `weights` {name: tensor} of `lm` with the trained adapter added, under the names of a whole model."""
    lm._hf_peft_config_loaded = False  # `save_pretrained` then writes a whole model
    merged = {name.replace(".base_layer.", "."): x for name, x in weights.items() if ".lora_" not in name}
    for name, module in lm.named_modules(remove_duplicate=False):
        if hasattr(module, "get_delta_weight"):
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + module.get_delta_weight("default")  # float32
    return merged


def keep_trained(models, states, folder):
    """Leave frozen weights out of a checkpoint, as a hook of `Accelerator.register_save_state_pre_hook`."""
    for model, state in zip(models, states, strict=True):
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        for name in set(state) - trained:
            del state[name]
