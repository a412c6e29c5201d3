"""Load tokenizer, policy and reference of a checkpoint, or refuse it; write model/."""

import contextlib
import copy
import dataclasses
import json
import os
import re

import torch
import transformers
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from common.errors import InputError, in_short, refuse, say
from common.harness.distributed import first_device, is_sharded, set_threads
from common.harness.embedded import EMBEDDED_FOLDERS
from common.harness.ladder import find_shortcuts
from common.harness.probes import causal_problem, sampling_problem, unused_weights
from common.harness.prompts import end_token
from common.policy import Policy

# Weights that no text uses: for images, sound, several tokens at once; and masks that old checkpoints of GPT-Neo hold.
BESIDE_TEXT = r"vision|visual|image|video|audio|speech|multi_modal|(^|\.)(mm|mtp|nextn)[._]|attention\.(masked_)?bias$"


def model_path(args, option="model_name_or_path"):
    """The folder or hub id of the model that an option names; `embedded` and `embedded-hard` are folders of common/."""
    name = getattr(args, option)
    return os.path.expanduser(str(EMBEDDED_FOLDERS.get(name, name)))


@contextlib.contextmanager
def load_errors(args, option, problem):
    """A context in which whatever a loader raises is an InputError in one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # loaders raise nearly every type there is
        folder = "" if os.path.exists(model_path(args, option)) else "no such folder, and "
        refuse(args, option, f"{folder}{problem}: {in_short(error)}")


def find_base(args, option):
    """(folder or hub id of the weights, that of a PEFT adapter on them or None) of the model that an option names."""
    path = model_path(args, option)
    refuse_run(args, option, path)
    config_file = find_adapter_config_file(path)
    if config_file is None:
        return path, None
    with open(config_file, encoding="utf-8") as file:
        base = json.load(file)["base_model_name_or_path"]
    return base, path


def refuse_run(args, option, path):
    """Refuse the folder of a run or of a checkpoint, and name the model of that run."""
    if os.path.isfile(os.path.join(path, "config.json")):
        return
    if os.path.isfile(os.path.join(path, "args.json")):
        kind, run = "the folder of a run", path
    elif os.path.isfile(os.path.join(path, "state.json")) and os.path.isfile(os.path.join(path, "meta.json")):
        kind, run = "a checkpoint, which only --resume reads", os.path.join(path, "..", "..")
    else:
        return
    model = os.path.normpath(os.path.join(run, "model"))
    when = "" if os.path.isdir(model) else ", which is not there before the run has ended"
    refuse(args, option, f"this is {kind}: name the model of the run, {model}{when}")


def load_tokenizer(args, option="model_name_or_path"):
    """The tokenizer of the model that an option names; without a pad token it pads with EOS."""
    with load_errors(args, option, "no tokenizer could be loaded"):
        base, adapter = find_base(args, option)
        has_own = adapter and cached_file(adapter, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(adapter if has_own else base)
    if tokenizer.eos_token_id is None:
        refuse(args, option, "its tokenizer has no EOS token, so no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def find_stop_tokens(tokenizer, generation_config):
    """Token ids that end a completion: EOS of tokenizer and generation config, and what ends a turn of a chat."""
    eos = generation_config.eos_token_id
    configured = eos if isinstance(eos, list) else [eos]
    return sorted({tokenizer.eos_token_id, end_token(tokenizer), *configured} - {None})


def load_policy(args, tokenizer, accelerator=None, temperature=None):
    """The model of `--model_name_or_path` as a `Policy` in training mode, at `temperature` [--temperature]."""
    option = "model_name_or_path"
    lm = load_model(args, option, tokenizer, first_device(accelerator))
    with load_errors(args, option, "its generation_config.json"):
        stop_tokens = find_stop_tokens(tokenizer, lm.origin.generation_config)
    # Checkpointing switches the cache off. Of a sharded model all processes must take equally many passes.
    may_share = not (args.gradient_checkpointing or is_sharded(accelerator))
    policy = Policy(lm, tokenizer.pad_token_id, stop_tokens, 1.0, **find_shortcuts(lm, may_share, accelerator))
    if problem := sampling_problem(policy) or causal_problem(lm):
        refuse(args, option, f"a {type(lm).__name__} {problem}")
    policy.temperature = args.temperature if temperature is None else temperature
    check_positions(args, option, lm)
    choose_trained(args, option, lm)
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    if accelerator and bfloat16_is_faster(accelerator, lm):
        say(args, option, "faster on this CPU: `accelerate launch --cpu --mixed_precision bf16` (docs/scale.md)")
    return policy.train()


def bfloat16_is_faster(accelerator, lm):
    """Whether a run in float32 on this CPU would be faster in bfloat16, for which the CPU has units."""
    if accelerator.device.type != "cpu" or accelerator.mixed_precision != "no":
        return False
    units = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.13
    return lm.num_parameters() > 1e7 and (units.get("avx512_bf16") or units.get("amx_bf16"))


def load_reference(policy, args, accelerator=None):
    """A frozen copy of the policy, whole on every process; None if --kl_coef is 0."""
    if not args.kl_coef:
        return None
    if args.lora_rank:
        from common.harness.lora import Reference

        return Reference(policy)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    if is_sharded(accelerator):
        reference.to(accelerator.device)
        if accelerator.mixed_precision == "bf16":  # as the policy: bfloat16 weights, but rotary frequencies in float32
            for parameter in reference.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    return reference


def load_model(args, option, tokenizer, device, kind="CausalLM", new_head=False):
    """The model that `option` names, without dropout, on `device`; a PEFT adapter is merged into its base.

    `lm.origin` tells what its checkpoint was like. With `new_head` a language model gets the head that `kind` needs.
    """
    with load_errors(args, option, "no model"):
        path, adapter = find_base(args, option)
        config = transformers.AutoConfig.from_pretrained(path)
        text = config.get_text_config()  # of a model of several inputs; else all of it
        if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
            refuse(args, option, "its weights are quantised: a copy in bfloat16 or float32 is needed")
        origin = Origin(dtype=find_dtype(args, option, config), noise=switch_off_noise(text), adapter=adapter)
        architecture = (config.architectures or [""])[0]
        if kind == "SequenceClassification":
            config.num_labels = 1
            new_head = new_head and not architecture.endswith(kind)
        if os.path.isfile(os.path.join(path, "generation_config.json")):  # from_pretrained leaves a damaged one out
            transformers.GenerationConfig.from_pretrained(path)
        transformers.logging.set_verbosity_error()  # it reports on the weights in many lines
        transformers.logging.disable_progress_bar()
        lm, info = choose_class(kind, architecture).from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, args.dtype),
            attn_implementation=choose_attention(args, text),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        origin.new_weights = check_weights(args, option, lm, info, new_head)
        if adapter:
            from common.harness.lora import merge_adapter

            lm = merge_adapter(lm, adapter)
    check_vocabulary(args, option, lm, tokenizer)
    origin.generation_config = getattr(lm, "generation_config", None)  # a classifier has none
    lm.origin = origin
    lm.generation_config = transformers.GenerationConfig()  # else `generate` would inherit top_k, ...
    set_threads(lm.num_parameters())
    kinds = {type(module).__name__ for module in lm.modules()}
    lm._no_split_modules = set(lm._no_split_modules or ()) & kinds  # FSDP2 refuses names that the model does not have
    return lm.eval().to(device)


@dataclasses.dataclass
class Origin:
    """What a model was in the checkpoint that it was loaded from; model/ is written like it."""

    dtype: torch.dtype  # of the weights; they may train in another one
    noise: dict  # {setting: value} of dropout and jitter, which are off in training
    adapter: str | None = None  # the PEFT adapter that was merged into the weights
    new_weights: set = dataclasses.field(default_factory=set)  # the names of those of a new head
    generation_config: transformers.GenerationConfig | None = None
    merge_adapters: bool = False  # --lora_merge: the adapters of this run are merged when model/ is written


def find_dtype(args, option, config):
    """The dtype of a checkpoint's weights, in which model/ is written."""
    dtypes = (config.dtype, config.get_text_config().dtype, torch.float32)
    dtype = next(dtype for dtype in dtypes if dtype is not None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        refuse(args, option, f"model/ would lose precision in its dtype {dtype}")
    return dtype


def switch_off_noise(config):
    """Switch off dropout and jitter, with which the first ratio would differ from 1; returns {setting: old value}."""
    settings = config.to_dict().items()
    noise = {name: value for name, value in settings if re.search("drop|jitter", name) and type(value) is float}
    config.update(dict.fromkeys(noise, 0.0))
    return noise


def choose_class(kind, architecture):
    """The class of transformers that loads a checkpoint of this architecture as a model of this kind."""
    if kind == "CausalLM" and architecture.endswith("ForConditionalGeneration"):
        return transformers.AutoModelForImageTextToText  # AutoModelForCausalLM may be its text model alone
    return getattr(transformers, f"AutoModelFor{kind}")


def choose_attention(args, text_config):
    """`attn_implementation` for transformers; None is sdpa, or eager where a model does not have that."""
    if args.attn_implementation != "sdpa":
        return args.attn_implementation
    # The sdpa of transformers 5.17 leaves out a soft cap.
    return "eager" if getattr(text_config, "attn_logit_softcapping", None) else None


def check_vocabulary(args, option, lm, tokenizer):
    """Refuse a tokenizer with ids for which the embedding has no row; Gemma 3 1B has none for an image."""
    rows = lm.get_input_embeddings().weight.shape[0]
    beyond = sorted(repr(token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    if any(not re.search("image|audio|video", token) for token in beyond):
        refuse(args, option, f"its embedding has {rows} rows, none for {shorten(beyond)}")


def check_weights(args, option, lm, info, new_head):
    """The names of the weights of a new head; a checkpoint that lacks others, by transformers' `info`, is refused."""

    def in_new_head(name):
        part = name.partition(".")[0]  # a checkpoint of a bare backbone has no prefix
        return new_head and part != lm.base_model_prefix and not hasattr(lm.base_model, part)

    kind = type(lm).__name__
    missing = set(info["missing_keys"])
    unexpected = set(info["unexpected_keys"])
    other_shapes = {name for name, *_ in info["mismatched_keys"]}
    beside_text = {name for name in unexpected if re.search(BESIDE_TEXT, name)}
    suspect = missing | other_shapes | (unexpected - beside_text)
    wrong = sorted(name for name in suspect if not in_new_head(name))
    if wrong:
        refuse(args, option, f"its weights are not those of a {kind}: {shorten(wrong)}")
    if beside_text:
        say(args, option, f"a {kind} leaves weights unused, and model/ will lack them: {shorten(sorted(beside_text))}")
    return missing


def check_positions(args, option, lm, tokens=None):
    """Refuse rows that are too long: beyond the model's positions, or so long that they change other rows' log-probs.

    `tokens` is the length of a row, by default the longest that the options allow.
    """
    if tokens is None:
        of_rollout = getattr(args, "max_prompt_tokens", 0) + getattr(args, "max_new_tokens", 0)
        tokens = max(getattr(args, "max_length", 0), of_rollout)
    config = lm.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not rope and limit and tokens > limit:
        refuse(args, option, f"the model has positions for {limit} tokens, rows may have {tokens}")
    for part in (rope, *(rope or {}).values()):  # one for all layers, or one for each kind of layer
        if not isinstance(part, dict):
            continue
        kind = part.get("rope_type", "")
        most = part.get("original_max_position_embeddings") or limit
        if (kind == "longrope" or "dynamic" in kind) and tokens > most:
            refuse(args, option, f"a row of more than {most} tokens changes the log-probs of others ({kind})")


def choose_trained(args, option, lm):
    """Add the adapters of --lora_rank. Freeze the weights that no text uses: DDP would wait for their gradients."""
    if args.lora_rank and option != "reward_model_path":  # that one is not trained
        if option == "model_name_or_path" and not args.lora_merge:
            if not lm.can_generate():
                refuse(
                    args, "lora_rank", "the head of a reward model does not fit in an adapter folder: add --lora_merge"
                )
            if lm.origin.adapter:
                refuse(
                    args, "lora_rank", f"an adapter folder names its base, not {lm.origin.adapter}: add --lora_merge"
                )
        with load_errors(args, option, "no adapters can be added"):
            from common.harness.lora import add_adapters

            add_adapters(lm, args)
    if unused := unused_weights(lm):
        count = sum(lm.get_parameter(name).requires_grad_(False).numel() for name in unused)
        say(args, option, f"texts do not use {count:,} of {lm.num_parameters():,} weights, frozen: {shorten(unused)}")


def enable_checkpointing(lm):
    """Let a model recompute its activations in the backward pass; an InputError if its class cannot."""
    if not lm.supports_gradient_checkpointing:
        raise InputError(f"--gradient_checkpointing: a {type(lm).__name__} cannot recompute its activations")
    enable = getattr(lm, "activation_checkpointing_enable", None)  # not yet in transformers 5.17
    if enable is None:
        enable = lm.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def shorten(names):
    """The first three of a list of names as text, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def save_pretrained(accelerator, model, policy, tokenizer, folder):
    """Write the model of `policy`, a part of the prepared `model`, in its checkpoint's dtype. All processes call it."""
    weights = accelerator.get_state_dict(model)  # whole, on the first process at least
    if not accelerator.is_main_process:
        return
    modules = accelerator.unwrap_model(model).named_modules()
    place = next(name for name, module in modules if module is policy)
    prefix = f"{place}.lm." if place else "lm."
    weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    tokenizer.save_pretrained(folder)
    lm = copy.copy(policy.lm)  # what is trained stays as it is: a checkpoint may still follow
    origin = lm.origin
    lm.config = copy.deepcopy(lm.config)
    lm.config.get_text_config().update(origin.noise)
    lm.generation_config = origin.generation_config
    if getattr(lm, "_hf_peft_config_loaded", False):
        if not origin.merge_adapters:
            lm.save_pretrained(folder, state_dict=weights)  # in peft's form: nothing but the adapter
            return
        from common.harness.lora import merge_into

        weights = merge_into(lm, weights)
    lm.save_pretrained(folder, state_dict=in_dtype(weights, origin.dtype))
    configs = [lm.config, *(getattr(lm.config, name) for name in lm.config.sub_configs)]
    for config in configs:
        if config is not None:
            config.dtype = origin.dtype  # save_pretrained() said the dtype of the weights in training
    lm.config.save_pretrained(folder)


def in_dtype(weights, dtype):
    """Weights {name: tensor} with floating-point numbers in `dtype`. Tied weights are one tensor, and stay one: else
    each of their names would get a copy in the file."""
    copies = {}
    cast = {}
    for name, x in weights.items():
        key = (x.data_ptr(), x.shape)
        if key not in copies:
            copies[key] = x.to(dtype) if x.is_floating_point() else x
        cast[name] = copies[key]
    return cast
