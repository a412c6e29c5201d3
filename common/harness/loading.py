"""Load tokenizer, policy and reference of a checkpoint, or refuse it; write model/."""

import contextlib
import copy
import os
import re

import torch
import transformers
from transformers.utils.peft_utils import find_adapter_config_file

from common.errors import InputError, in_short, refuse, say
from common.harness.data import EMBEDDED_FOLDERS
from common.harness.distributed import first_device, is_sharded, set_threads
from common.harness.probes import causal_problem, find_shortcuts, sampling_problem, unused_weights
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


def whole_model(args, option):
    """The folder or hub id that an option names; an InputError if that is a PEFT adapter."""
    path = model_path(args, option)
    if find_adapter_config_file(path):  # transformers would load it together with its base
        refuse(args, option, 'holds a PEFT adapter: merge it into its base first (docs/running.md, "Merge an adapter")')
    return path


def load_tokenizer(args, option="model_name_or_path"):
    """The tokenizer of the model that an option names; without a pad token it pads with EOS."""
    with load_errors(args, option, "no tokenizer could be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(whole_model(args, option))
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
        stop_tokens = find_stop_tokens(tokenizer, lm.saved_generation_config)
    # Checkpointing switches the cache off; of a sharded model all processes must take the same number of passes.
    may_share = not (args.gradient_checkpointing or is_sharded(accelerator))
    policy = Policy(lm, tokenizer.pad_token_id, stop_tokens, 1.0, **find_shortcuts(lm, may_share, accelerator))
    if problem := sampling_problem(policy) or causal_problem(lm):
        refuse(args, option, f"a {type(lm).__name__} {problem}")
    policy.temperature = args.temperature if temperature is None else temperature
    check_positions(args, option, lm)
    choose_trained(args, option, lm)
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    units = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.13
    has_units = lm.num_parameters() > 1e7 and (units.get("avx512_bf16") or units.get("amx_bf16"))
    if has_units and accelerator and (accelerator.device.type, accelerator.mixed_precision) == ("cpu", "no"):
        say(args, option, "faster on this CPU: `accelerate launch --cpu --mixed_precision bf16` (docs/scale.md)")
    return policy.train()


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
    """The model that `option` names, without dropout. `saved_...`: its checkpoint's settings, for `save_pretrained`."""
    with load_errors(args, option, "no model"):
        path = whole_model(args, option)
        config = transformers.AutoConfig.from_pretrained(path)
        text = config.get_text_config()  # of a model of several inputs; else all of it
        if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
            refuse(args, option, "its weights are quantised: a copy in bfloat16 or float32 is needed")
        saved_dtype = next(dtype for dtype in (config.dtype, text.dtype, torch.float32) if dtype is not None)
        if saved_dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            refuse(args, option, f"model/ would lose precision in its dtype {saved_dtype}")
        noise = {name: x for name, x in text.to_dict().items() if re.search("drop|jitter", name) and type(x) is float}
        text.update(dict.fromkeys(noise, 0.0))  # with it the first ratio would differ from 1
        auto_class, architecture = getattr(transformers, f"AutoModelFor{kind}"), (config.architectures or [""])[0]
        if kind == "SequenceClassification":
            config.num_labels, new_head = 1, new_head and not architecture.endswith(kind)
        elif architecture.endswith("ForConditionalGeneration"):  # AutoModelForCausalLM may be its text model alone
            auto_class = transformers.AutoModelForImageTextToText
        if os.path.isfile(os.path.join(path, "generation_config.json")):  # from_pretrained leaves a damaged one out
            transformers.GenerationConfig.from_pretrained(path)
        transformers.logging.set_verbosity_error()  # it reports on the weights in many lines
        transformers.logging.disable_progress_bar()
        attention = args.attn_implementation
        if attention == "sdpa":  # None: sdpa, else eager. The sdpa of transformers 5.17 leaves out a soft cap
            attention = "eager" if getattr(text, "attn_logit_softcapping", None) else None
        options = dict(config=config, dtype=getattr(torch, args.dtype), attn_implementation=attention)
        lm, info = auto_class.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
        check_weights(args, option, lm, info, new_head)
    rows = lm.get_input_embeddings().weight.shape[0]
    beyond = sorted(repr(token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    if any(not re.search("image|audio|video", token) for token in beyond):  # Gemma 3 1B has no row for an image
        refuse(args, option, f"its embedding has {rows} rows, none for {shorten(beyond)}")
    lm.saved_dtype, lm.saved_noise = saved_dtype, noise
    lm.saved_generation_config = getattr(lm, "generation_config", None)  # a classifier has none
    lm.generation_config = transformers.GenerationConfig()  # else `generate` would inherit top_k, ...
    set_threads(lm.num_parameters())
    kinds = {type(module).__name__ for module in lm.modules()}
    lm._no_split_modules = set(lm._no_split_modules or ()) & kinds  # FSDP2 refuses names that the model does not have
    return lm.eval().to(device)


def check_weights(args, option, lm, info, new_head):
    """Refuse a checkpoint whose weights are not those of `lm`, by transformers' loading `info`; find its new head."""

    def in_head(name):
        part = name.partition(".")[0]  # a checkpoint of a bare backbone has no prefix
        return new_head and part != lm.base_model_prefix and not hasattr(lm.base_model, part)

    kind, missing, unexpected = type(lm).__name__, set(info["missing_keys"]), set(info["unexpected_keys"])
    beside_text = {name for name in unexpected if re.search(BESIDE_TEXT, name)}
    other_shapes = {name for name, *_ in info["mismatched_keys"]}
    if wrong := sorted(name for name in missing | other_shapes | (unexpected - beside_text) if not in_head(name)):
        refuse(args, option, f"its weights are not those of a {kind}: {shorten(wrong)}")
    if beside_text:
        say(args, option, f"a {kind} leaves weights unused, and model/ will lack them: {shorten(sorted(beside_text))}")
    lm.new_head = missing


def check_positions(args, option, lm, tokens=None):
    """Refuse rows of so many `tokens` [as options allow] beyond the positions, or that change other rows' log-probs."""
    sizes = [getattr(args, name, 0) for name in ("max_length", "max_prompt_tokens", "max_new_tokens")]
    tokens = tokens or max(sizes[0], sum(sizes[1:]))
    config = lm.config.get_text_config()
    rope, limit = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if not rope and limit and tokens > limit:
        refuse(args, option, f"the model has positions for {limit} tokens, rows may have {tokens}")
    for part in filter(lambda part: isinstance(part, dict), (rope, *(rope or {}).values())):  # also by kind of layer
        kind, most = part.get("rope_type", ""), part.get("original_max_position_embeddings") or limit
        if (kind == "longrope" or "dynamic" in kind) and tokens > most:
            refuse(args, option, f"a row of more than {most} tokens changes the log-probs of others ({kind})")


def choose_trained(args, option, lm):
    """Add the adapters of --lora_rank. Freeze the weights that no text uses: DDP would wait for their gradients."""
    if args.lora_rank and option != "reward_model_path":  # that one is not trained
        if option == "model_name_or_path" and not (lm.can_generate() or args.lora_merge):
            refuse(args, "lora_rank", "the head of a reward model does not fit in an adapter folder: add --lora_merge")
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
    name = "activation_checkpointing_enable"  # not yet in transformers 5.17
    getattr(lm, name if hasattr(lm, name) else "gradient_checkpointing_enable")({"use_reentrant": False})


def shorten(names):
    """The first three of a list of names as text, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def save_pretrained(accelerator, model, policy, tokenizer, folder):
    """Write the model of `policy`, a part of the prepared `model`, in its checkpoint's dtype. All processes call it."""
    modules = accelerator.unwrap_model(model).named_modules()
    prefix = next(f"{name}.lm." for name, module in modules if module is policy).removeprefix(".")
    weights = accelerator.get_state_dict(model)  # whole, on the first process at least
    if not accelerator.is_main_process:
        return
    tokenizer.save_pretrained(folder)
    weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
    lm = copy.copy(policy.lm)  # what is trained stays as it is: a checkpoint may still follow
    lm.config, lm.generation_config = copy.deepcopy(lm.config), lm.saved_generation_config
    lm.config.get_text_config().update(lm.saved_noise)
    if hasattr(lm, "saves_merged"):  # it has adapters
        if not lm.saves_merged:
            return lm.save_pretrained(folder, state_dict=weights)  # peft's form: nothing but the adapter
        from common.harness.lora import merge_into

        weights = merge_into(lm, weights)
    cast = {}  # tied weights are one tensor, and stay one: else each name would get a copy in the file
    for name, x in weights.items():
        dtype = lm.saved_dtype if x.is_floating_point() else x.dtype
        weights[name] = cast.setdefault((x.data_ptr(), x.shape), x.to(dtype))
    lm.save_pretrained(folder, state_dict=weights)
    for part in filter(None, (lm.config, *(getattr(lm.config, name) for name in lm.config.sub_configs))):
        part.dtype = lm.saved_dtype  # save_pretrained() said the dtype of the weights in training
    lm.config.save_pretrained(folder)
