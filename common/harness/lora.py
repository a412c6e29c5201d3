"""LoRA (arXiv 2106.09685): adapters of low rank on all linear layers but the head, the only weights that are trained.

A weight is W + alpha / rank B A: W is frozen, A random, B zero at first. `lm.add_adapter` puts them into `lm`."""

import os

import torch

from common.generation import seeded


def merge_adapter(lm, path):
    """The model `lm` with the PEFT adapter of the folder or hub id `path` merged into its weights."""
    from peft import PeftModel

    return PeftModel.from_pretrained(lm, path).merge_and_unload().requires_grad_(True)


def add_adapters(lm, args):
    """Freeze `lm` but a classifier's head; add adapters in float32 to its linear layers, equal on all processes."""
    from peft import LoraConfig

    classifier = not lm.can_generate()
    base = lm.name_or_path
    config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules="all-linear")
    config.task_type = "SEQ_CLS" if classifier else "CAUSAL_LM"
    with seeded((args.seed, 0), lm.device):
        lm.add_adapter(config)
    for name, weight in lm.named_parameters():
        in_head = classifier and not name.startswith(f"{lm.base_model_prefix}.")
        weight.requires_grad_(".lora_" in name or in_head)
        if ".lora_" in name:
            weight.data = weight.data.float()
    lm.peft_config["default"].base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    lm.origin.merge_adapters = args.lora_merge


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
