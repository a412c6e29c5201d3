"""Which ways to a model's log-probs are exact: from the fastest one down to whole rows with padding.

A way is tried on a few rows, and taken if it gives the log-probs of whole rows and, where the backward pass differs,
their gradient. What is found holds on all processes: where one refuses a shortcut, none takes it.
"""

import contextlib

import torch
from transformers import DynamicCache

from common.harness.probes import policy_of, rounding, rows_of_two_prompts, tried

EXACT = ("head_is_last", "plain_cache", "shares_prompts", "packs", "graphs")  # arguments of `Policy`
PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


@torch.no_grad()
def find_shortcuts(lm, may_share=True, accelerator=None):
    """Which shortcuts are exact for this model on all processes, as arguments of `Policy`: {name: bool}, and `refused`,
    {name: why} of those for which more is to be said. Prompts are shared only with `may_share`. On a GPU norms are
    fused, and graphs tried; packed passes need bfloat16, as `accelerator` has it."""
    refused = {}
    found = {
        "head_is_last": tried("head_is_last", head_is_last, lm, refused),
        "plain_cache": tried("plain_cache", has_plain_cache, lm, refused),
    }
    may_share = may_share and all(found.values())
    found["shares_prompts"] = may_share and tried("shares_prompts", sharing_is_exact, lm, refused)
    norms = []
    if lm.device.type == "cuda":
        from common.harness import gpu_probes

        norms = gpu_probes.norms(lm)
        precision = accelerator.autocast() if accelerator else contextlib.nullcontext()
        with precision:
            found |= gpu_probes.find_gpu_shortcuts(lm, refused, **found)
    elif is_to_be_sharded_on_gpus(accelerator) and found["head_is_last"] and found["plain_cache"]:
        from common.harness import gpu_probes

        found["packs"] = gpu_probes.may_pack_sharded(lm, refused, accelerator)
    return agree(found, norms, refused, accelerator)


def is_to_be_sharded_on_gpus(accelerator):
    """Whether a model that lies on the CPU will be sharded over GPUs by FSDP2."""
    return accelerator is not None and accelerator.is_fsdp2 and accelerator.device.type == "cuda"


def agree(found, norms, refused, accelerator):
    """`found` and the fused ones of `norms` as they hold on every process.

    Each has tried its own copy of the model on its own device. All must take the same shortcuts, or their metrics and
    their rounding would differ.
    """
    flags = [found.get(name, False) for name in EXACT]
    flags += ["forward" in vars(norm) for norm in norms]
    if accelerator is not None:
        flags = torch.tensor(flags, dtype=torch.int, device=accelerator.device)
        flags = (accelerator.reduce(flags, "sum") == accelerator.num_processes).tolist()
    fused = flags[len(EXACT) :]
    for name, on_all in zip(EXACT, flags, strict=False):
        if found.get(name) and not on_all:
            found[name] = False
            refused[name] = "another process refused it"
    for norm, on_all in zip(norms, fused, strict=True):
        if not on_all:
            vars(norm).pop("forward", None)
    return found | {"fused_norms": sum(fused), "refused": refused}


def head_is_last(lm):
    """Whether logits are those of the head on the states of `base_model`: no scale (Granite, Cohere) and no soft cap
    (Gemma 2), which shows as the head's output is amplified. It raises if that gives no states (Llama 4)."""
    head = lm.get_output_embeddings()
    ids = torch.arange(8, device=lm.device)[None] % head.weight.shape[0]
    with head.register_forward_hook(lambda module, inputs, output: output * 1e4):
        logits = lm(input_ids=ids, use_cache=False).logits
        expected = head(lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return bool((logits - expected).abs().max() <= expected.abs().max() / 1000)


def has_plain_cache(lm):
    """Whether the cache holds keys and values alone; that of hybrids has other states, some in subclasses of layers."""
    if not layer_types(lm) <= PLAIN_LAYERS:
        return False
    cache = DynamicCache(config=lm.config)
    ids = torch.zeros(1, 1, dtype=torch.long, device=lm.device)
    return lm(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values is cache


def layer_types(lm):
    """The class names of the layers in the cache that `generate` makes for `lm`."""
    return {type(layer).__name__ for layer in DynamicCache(config=lm.config).layers}


@torch.enable_grad()
def sharing_is_exact(lm):
    """Whether computing each prompt once gives the log-probs of whole rows, and their gradient.

    Layers that use the keys of another one could cut the gradient off.
    """
    batch = rows_of_two_prompts(lm)
    logprobs, gradient = logprobs_and_gradient(lm, batch)
    shared, shared_gradient = logprobs_and_gradient(lm, batch, shares_prompts=True)
    if not torch.allclose(logprobs, shared, atol=rounding(lm)):
        return False
    share = 0.1 if lm.dtype == torch.bfloat16 else 1e-3  # of the largest number, by which rounding may change one
    return bool((gradient - shared_gradient).abs().max() <= share * gradient.abs().max())


def logprobs_and_gradient(lm, batch, **shortcuts):
    """Log-probs (R, T) of a batch by a way to the states, and the gradient of their sum at the embedding."""
    logprobs, _ = policy_of(lm, **shortcuts)(batch, with_entropy=False)
    (gradient,) = torch.autograd.grad(logprobs.sum(), lm.get_input_embeddings().weight)
    return logprobs.detach(), gradient
