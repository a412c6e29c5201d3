"""Load tokenizer, policy, reference and classifiers of a checkpoint; write model/."""

import contextlib
import copy

import torch
from torch import nn

from common.errors import InputError, refuse, say
from common.harness import lora
from common.harness.distributed import first_device, is_sharded, set_threads
from common.harness.model_checks import (
    check_json,
    check_not_quantised,
    check_vocabulary,
    check_weights,
    load_errors,
    model_path,
    shorten,
)
from common.harness.probes import find_shortcuts, is_causal, reads_last_token, sampling_problem, unused_weights
from common.harness.prompts import end_token
from common.policy import Policy


def read_tokenizer(args, option):
    """The tokenizer of the model that an option names."""
    from transformers import AutoTokenizer

    with load_errors(args, option, "no tokenizer could be loaded"):
        check_json(args, option)
        return AutoTokenizer.from_pretrained(lora.find_tokenizer(model_path(args, option)))


def load_tokenizer(args):
    """The tokenizer of the policy. One without a pad token pads with EOS: no mask looks at the pad id."""
    tokenizer = read_tokenizer(args, "model_name_or_path")
    if tokenizer.eos_token_id is None:
        refuse(args, "model_name_or_path", "its tokenizer has no EOS token, so no completion could end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def find_stop_tokens(tokenizer, generation_config):
    """Token ids that end a completion: EOS of tokenizer and generation config, and what ends a turn of a chat."""
    configured = generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, end_token(tokenizer), *configured} - {None})


def load_policy(args, tokenizer, accelerator=None, temperature=None):
    """The model of `--model_name_or_path` as a `Policy` in training mode, with log-probs at `temperature`
    [--temperature].

    It has no dropout, which would make the ratio of the first update differ from 1. The checkpoint's own generation
    settings (top_k, repetition penalty, ...) would be inherited by every `generate`: they return in the saved model.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    lm, _ = load_model(AutoModelForCausalLM, args, merge=not args.lora_rank)
    check_vocabulary(args, "model_name_or_path", lm, tokenizer)
    lm.eval().to(first_device(accelerator))
    stop_tokens = find_stop_tokens(tokenizer, lm.generation_config)
    # Checkpointing switches the cache off. Of a sharded model, each pass waits for the other processes; sharing takes
    # more passes for some batches.
    shortcuts = find_shortcuts(lm, may_share=not (args.gradient_checkpointing or is_sharded(accelerator)))
    temperature = args.temperature if temperature is None else temperature
    policy = Policy(lm, tokenizer.pad_token_id, stop_tokens, temperature, **shortcuts)
    lm.generation_config = GenerationConfig()
    if problem := sampling_problem(policy):
        refuse(args, "model_name_or_path", f"a {type(lm).__name__} {problem}")
    if not is_causal(lm):
        refuse(args, "model_name_or_path", f"a {type(lm).__name__} that sees later tokens is no causal language model")
    check_positions(args, "model_name_or_path", lm)
    if args.lora_rank:
        lora.add_adapters(lm, args, model_path(args))
    freeze_unused(args, "model_name_or_path", lm)
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    return policy.train()


def load_reference(policy, args, accelerator=None):
    """A frozen copy of the policy as it is now, whole on every process; None if --kl_coef is 0."""
    if not args.kl_coef:
        return None
    if args.lora_rank:
        return lora.Reference(policy)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    if is_sharded(accelerator):
        reference.to(accelerator.device)
        if accelerator.mixed_precision == "bf16":  # as the policy: bfloat16 weights, but rotary frequencies in float32
            for parameter in reference.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    return reference


def load_model(auto_class, args, option="model_name_or_path", new_head=False, merge=True):
    """A model of `auto_class` without dropout, and the names of the weights of its new head: with `new_head` a language
    model becomes a classifier of one output.

    Of a PEFT adapter folder this is the base model; with `merge` its weights have the adapter added. Its attributes
    `saved_dtype`, `saved_dropout` and `saved_generation_config` are the checkpoint's, for `save_pretrained`.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports on the weights in many lines
    logging.disable_progress_bar()
    with load_errors(args, option, "no model"), contextlib.ExitStack() as stack:
        stack.callback(logging.set_verbosity, verbosity)
        path = model_path(args, option)
        base, adapter = lora.find_base(path)
        config = AutoConfig.from_pretrained(base)
        check_not_quantised(args, option, config)
        text = config.get_text_config()  # of a model of several inputs; else all of it
        saved_dtype = config.dtype or text.dtype or torch.float32
        dropout = {name: x for name, x in text.to_dict().items() if "drop" in name and isinstance(x, float)}
        for name in dropout:
            setattr(text, name, 0.0)
        if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
            new_head = False
        elif new_head:
            config.num_labels = 1
        attention = None if args.attn_implementation == "sdpa" else args.attn_implementation  # None: sdpa, else eager
        options = dict(dtype=getattr(torch, args.dtype), attn_implementation=attention)
        options |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
        lm, info = class_for(config, auto_class).from_pretrained(base, config=config, **options)
    set_threads(lm.num_parameters())
    kinds = {type(module).__name__ for module in lm.modules()}
    lm._no_split_modules = set(lm._no_split_modules or ()) & kinds  # FSDP2 refuses names that the model does not have
    if attention is None and lm.config._attn_implementation != "sdpa":
        say(args, option, f"a {type(lm).__name__} has no sdpa attention, it runs with eager")
    if adapter and merge:
        lm = lora.merge_adapter(lm, args, option, path, adapter)
    lm.saved_dtype, lm.saved_dropout = saved_dtype, dropout
    lm.saved_generation_config = getattr(lm, "generation_config", None)  # a classifier has none
    return lm, check_weights(args, option, lm, info, new_head)


def class_for(config, auto_class):
    """The class to load: of a checkpoint for images too, that of the whole model, or model/ would be its text model."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    if auto_class is not AutoModelForCausalLM or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return auto_class
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__
    return AutoModelForImageTextToText if whole in (config.architectures or []) else auto_class


def freeze_unused(args, option, lm):
    """Freeze the weights that texts do not use, those for images or sound, and say so: DDP waits for the gradient of
    every weight that is not frozen."""
    names = unused_weights(lm)
    for name in names:
        lm.get_parameter(name).requires_grad_(False)
    if names:
        count = sum(lm.get_parameter(name).numel() for name in names)
        say(args, option, f"texts do not use {count:,} of {lm.num_parameters():,} weights, frozen: {shorten(names)}")


def check_positions(args, option, lm):
    """Refuse options that allow rows longer than the model's table of positions."""
    for names in (("max_length",), ("max_prompt_tokens", "max_new_tokens")):
        if hasattr(args, names[0]):
            sizes = " + ".join(f"--{name} {getattr(args, name)}" for name in names)
            check_length(args, option, lm, sum(getattr(args, name) for name in names), sizes)


def check_length(args, option, lm, tokens, what):
    """Refuse a row, `what`, of so many tokens if positions come from a table with fewer, or are rotary ones whose
    frequencies change with the longest row of a forward: its neighbours would change a row's log-probs."""
    config = lm.config.get_text_config()
    rope, limit = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if not rope:
        if limit and tokens > limit:
            refuse(args, option, f"the model has positions for {limit} tokens, less than {what}")
        return
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # or one for each kind of layer
        kind = each.get("rope_type", "default")
        most = each.get("original_max_position_embeddings") or limit
        if (kind == "longrope" or "dynamic" in kind) and tokens > most:
            changes = f"its rotary positions ({kind}) change where a row of the batch has more than {most} tokens"
            refuse(args, option, f"{changes}, and with them the log-probs of the other rows; {what} allows that")


def load_classifier(args, option, tokenizer, device, new_head=False):
    """The classifier of one output, read at the last token, that `option` names; a new head starts at zero.

    The last token is the last one that is not padding: a tokenizer without a pad token, or one that pads with what ends
    a completion, gets one of its own, or the score would be read before the end.
    """
    from transformers import AutoModelForSequenceClassification

    lm, new = load_model(AutoModelForSequenceClassification, args, option, new_head)
    kind, outputs = type(lm).__name__, lm.config.num_labels
    if outputs != 1:
        refuse(args, option, f"its head has {outputs} outputs, 1 is needed")
    check_vocabulary(args, option, lm, tokenizer)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id, end_token(tokenizer)):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > lm.get_input_embeddings().weight.shape[0]:
            lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if lm.config.is_encoder_decoder or not reads_last_token(lm.eval().to(device)):
        refuse(args, option, f"a {kind} does not read its score at the last token: a causal model is needed")
    for name in new:
        nn.init.zeros_(lm.get_parameter(name))
    if args.lora_rank and option != "reward_model_path":  # that one is not trained
        lora.add_to_classifier(lm, args, option)
    freeze_unused(args, option, lm)
    return lm


def load_scorer(args, option, device):
    """The reward model that `option` names, with a linear head `score`, as a start for a critic: its tokenizer must
    have the token ids of the policy's."""
    tokenizer = read_tokenizer(args, option)
    vocabulary = tokenizer.get_vocab()
    other = sorted(repr(token) for token, i in load_tokenizer(args).get_vocab().items() if vocabulary.get(token) != i)
    if other:
        refuse(args, option, f"its tokenizer has other ids than the policy's for {shorten(other)}")
    lm = load_classifier(args, option, tokenizer, device)
    check_positions(args, option, lm)
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        refuse(args, option, f"a {type(lm).__name__} has no linear head `score`")
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    return lm


def enable_checkpointing(lm):
    """Let a model recompute its activations in the backward pass; an InputError if its class cannot."""
    if not lm.supports_gradient_checkpointing:
        raise InputError(f"--gradient_checkpointing: a {type(lm).__name__} cannot recompute its activations")
    renamed = hasattr(lm, "activation_checkpointing_enable")  # not yet in transformers 5.17
    enable = lm.activation_checkpointing_enable if renamed else lm.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def save_pretrained(accelerator, model, policy, tokenizer, folder):
    """Write the model of `policy`, a part of the prepared `model`, and the tokenizer so that `from_pretrained` loads
    them, in the dtype of the checkpoint that they came from.

    All processes have to call it, the first one writes. What is trained stays as it is: a checkpoint may still follow.
    """
    modules = accelerator.unwrap_model(model).named_modules()
    prefix = next(f"{name}.lm." for name, module in modules if module is policy).removeprefix(".")
    weights = accelerator.get_state_dict(model)  # whole, on the first process at least
    if accelerator.is_main_process:
        lm = copy.copy(policy.lm)
        lm.config, lm.generation_config = copy.deepcopy(lm.config), lm.saved_generation_config
        for name, value in lm.saved_dropout.items():
            setattr(lm.config.get_text_config(), name, value)
        weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        tokenizer.save_pretrained(folder)
        if hasattr(lm, "saves_merged"):  # it has adapters
            if not lm.saves_merged:
                return lm.save_pretrained(folder, state_dict=weights)  # peft's form: nothing but the adapter
            weights = lora.merge_into(lm, weights)
        cast = {}  # tied weights are one tensor, and stay one: else each name would get a copy in the file
        for name, x in weights.items():
            dtype = lm.saved_dtype if x.is_floating_point() else x.dtype
            weights[name] = cast.setdefault((x.data_ptr(), x.shape), x.to(dtype))
        lm.save_pretrained(folder, state_dict=weights)
        parts = [lm.config, *(getattr(lm.config, name) for name in lm.config.sub_configs)]
        for part in filter(None, parts):  # save_pretrained() says the dtype of the weights in training
            part.dtype = lm.saved_dtype
        lm.config.save_pretrained(folder)
