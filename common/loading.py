"""Loading a run's models: tokenizer, policy, reference; LoRA; and writing model/."""

import copy
import importlib.util
import json
import os
import re

import torch
import transformers
from torch import nn

from common.data import EMBEDDED, end_token
from common.errors import InputError, one_line, say
from common.launch import is_sharded, set_threads
from common.model import Policy

transformers.logging.disable_progress_bar()


def model_path(name):
    """The folder or hub id of --model_name_or_path."""
    return os.path.expanduser(str(EMBEDDED.get(name, name)))


def adapter_base(path):
    """The folder or hub id that a PEFT adapter was trained on; None of another model."""
    config_file = os.path.join(path, "adapter_config.json")
    if not os.path.isfile(config_file):
        return None
    with open(config_file, encoding="utf-8") as file:
        return json.load(file)["base_model_name_or_path"]


def load_tokenizer(args, name=None):
    """The tokenizer of a model [--model_name_or_path]; without a pad token it pads with EOS."""
    name = name or args.model_name_or_path
    path = model_path(name)
    if adapter_base(path) and not os.path.isfile(os.path.join(path, "tokenizer_config.json")):
        path = adapter_base(path)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except Exception as error:  # loaders raise nearly every type there is
        raise InputError(f"model {name}: no tokenizer: {one_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise InputError(f"model {name}: its tokenizer has no EOS token: no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_lm(name, args, kind, new_weights=(), **settings):
    """The model `name` by a class `kind` of transformers, without dropout; an adapter is merged.

    `settings` change its configuration. `new_weights` may be missing in the checkpoint, and then
    start at zero.
    """
    path = model_path(name)
    transformers.logging.set_verbosity_error()  # else tables tell of what is checked here
    try:
        base = adapter_base(path)
        config = transformers.AutoConfig.from_pretrained(base or path)
        config.update(settings)
        without_dropout(config)
        options = dict(
            dtype=getattr(torch, args.dtype), attn_implementation=args.attn_implementation
        )
        if getattr(config.get_text_config(), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # others may leave the soft cap out
        lm, info = kind.from_pretrained(
            base or path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        if base:
            from peft import PeftModel

            lm = PeftModel.from_pretrained(lm, path).merge_and_unload().requires_grad_(True)
    except Exception as error:  # loaders raise nearly every type there is
        raise InputError(f"model {name}: cannot be loaded: {one_line(error)}") from None
    missing = set(info["missing_keys"])
    wrong = (missing - set(new_weights)) | {weight for weight, *_ in info["mismatched_keys"]}
    if wrong:  # transformers would train random weights in their place
        listed = ", ".join(sorted(wrong)[:3])
        raise InputError(f"model {name}: weights are missing or have other sizes: {listed}")
    for weight in missing:
        nn.init.zeros_(lm.get_parameter(weight))
    set_threads(lm.num_parameters())
    lm.own_generation_config = getattr(lm, "generation_config", None)  # a classifier has none
    lm.generation_config = transformers.GenerationConfig()  # else `generate` would inherit top_k
    return lm.eval()


def load_policy(args, tokenizer, accelerator):
    """The model of --model_name_or_path as a `Policy` in training mode."""
    lm = load_lm(args.model_name_or_path, args, transformers.AutoModelForCausalLM)
    stop_tokens = find_stop_tokens(tokenizer, lm.own_generation_config)
    say(f"stop tokens: {' '.join(tokenizer.convert_ids_to_tokens(stop_tokens))}")
    sharded = is_sharded(accelerator)
    if not sharded:  # else `prepare` moves the shards
        lm.to(accelerator.device)
    fast = None
    if args.fast and importlib.util.find_spec("fast"):
        from fast.shortcuts import find_shortcuts

        # Of a sharded model all processes have to take equally many passes.
        fast = find_shortcuts(lm, not (args.gradient_checkpointing or sharded), accelerator)
        if note := fast.notes():
            say(note)
    policy = Policy(lm, tokenizer.pad_token_id, stop_tokens, args.temperature, fast)
    if args.lora_rank:
        add_adapters(lm, args)
        accelerator.register_save_state_pre_hook(keep_trained)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train()


def without_dropout(config):
    """Switch off dropout and jitter, with which the first ratio would differ from 1."""
    text = config.get_text_config()
    noise = [
        name
        for name, value in text.to_dict().items()
        if re.search("drop|jitter", name) and isinstance(value, float)
    ]
    text.update(dict.fromkeys(noise, 0.0))


def find_stop_tokens(tokenizer, generation_config):
    """Token ids that end a completion: EOS of tokenizer and generation config, end of a turn."""
    eos = generation_config.eos_token_id
    configured = eos if isinstance(eos, list) else [eos]
    return sorted({tokenizer.eos_token_id, end_token(tokenizer), *configured} - {None})


def load_reference(policy, args, accelerator):
    """The policy as it is at the start, frozen, whole on every process; None if --kl_coef is 0."""
    if not args.kl_coef:
        return None
    if args.lora_rank:
        return BaseOf(policy)
    reference = copy.deepcopy(policy).requires_grad_(False).eval().to(accelerator.device)
    if is_sharded(accelerator) and accelerator.mixed_precision == "bf16":
        for weight in reference.parameters():  # as those that the policy gathers
            weight.data = weight.data.to(torch.bfloat16)
    return reference


# --- LoRA (arXiv 2106.09685) ---


def add_adapters(lm, args):
    """Freeze `lm`, and add adapters of rank --lora_rank, in float32, to --lora_targets.

    These are names of layers, as `q_proj`, or one text that is no name: all-linear, which are all
    linear layers but the head, or a regular expression of whole names.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise InputError("--lora_rank needs peft: pip install peft") from None
    if adapter_base(model_path(args.model_name_or_path)):
        advice = "merge it into its base first, since an adapter cannot name it as its base"
        raise InputError(f"--lora_rank: {args.model_name_or_path} is an adapter: {advice}")
    targets = args.lora_targets
    # For peft names are a list, while `all-linear` and a regular expression are a text.
    if len(targets) == 1 and not re.fullmatch(r"[\w.]+", targets[0]):
        targets = targets[0]
    config = LoraConfig(
        r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    base = lm.name_or_path
    try:
        lm.add_adapter(config)
        with torch.no_grad():  # some layers fail where they are used: Llama 4's router
            lm(input_ids=torch.zeros(1, 2, dtype=torch.long, device=lm.device), use_cache=False)
    except Exception as error:
        problem = f"these layers take no adapters: {one_line(error)}"
        raise InputError(f"--lora_targets {' '.join(args.lora_targets)}: {problem}") from None
    adapter = lm.peft_config["default"]
    adapter.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
    for name, weight in lm.named_parameters():
        weight.requires_grad_(".lora_" in name)
        if ".lora_" in name:
            weight.data = weight.data.float()


def keep_trained(models, states, folder):
    """Leave frozen weights out of a checkpoint, as a hook of Accelerate."""
    for model, state in zip(models, states, strict=True):
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        for name in set(state) - trained:
            del state[name]


class BaseOf:
    """The policy without its adapters, which are zero at the start: the reference of a LoRA run."""

    def __init__(self, policy):
        self.policy = policy

    def __call__(self, *inputs, **options):
        self.policy.lm.disable_adapters()
        try:
            return self.policy(*inputs, **options)
        finally:
            self.policy.lm.enable_adapters()


# --- writing ---


def save_model(accelerator, model, policy, tokenizer, folder):
    """Write what `from_pretrained` loads: the weights, or the adapter. All processes call it."""
    weights = accelerator.get_state_dict(model)  # whole, on the first process at least
    if not accelerator.is_main_process:
        return
    prefixes = "lm.", "policy.lm."  # alone, and beside a critic
    own = [name for name in weights if name.startswith(prefixes)]
    weights = {name.partition("lm.")[2]: weights[name] for name in own}
    lm = copy.copy(policy.lm)
    lm.generation_config = lm.own_generation_config
    lm.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
