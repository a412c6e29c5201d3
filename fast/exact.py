"""Checks that a shortcut gives the numbers of the plain computation."""

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from common.model import token_states

# The keyword of a forward for its cache: transformers 5.24 renamed `past_key_values`.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


def is_plain_linear(module):
    """Return whether calling `module` computes x @ weight.T and nothing else.

    Only then may a shortcut read its weight. LoRA, quantized and parametrized layers are of another
    class or have another type of weight; pruning and weight norm work by hooks.
    """
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and module.bias is None
        and "forward" not in vars(module)
        and not (module._forward_pre_hooks or module._forward_hooks)
    )


def is_exact(lm, shortcut):
    """Return whether `shortcut(lm, batch)` gives the log-probs and gradient of `token_states`.

    They are compared by `is_near` on six short rows, and the gradient is that of the embedding.
    """
    batch = probe_batch(lm)
    plain = logprobs_and_gradient(lm, batch, token_states)
    wrong = logprobs_and_gradient(lm, with_wrong_prompts(batch), token_states)
    found = logprobs_and_gradient(lm, batch, shortcut)
    return all(is_near(lm, *tensors) for tensors in zip(found, plain, wrong, strict=True))


def is_near(lm, found, plain, wrong):
    """Return whether `found` is far nearer to `plain` than `wrong`, the result for wrong prompts.

    The bound is 1e-3 of what wrong prompts change, in bfloat16 0.1: an absolute bound would take
    rounding for a fault. NaN is near to nothing.
    """
    share = 1e-3 if computes_in_float32(lm) else 0.1
    return bool((found - plain).abs().max() <= share * (wrong - plain).abs().max())


def computes_in_float32(lm):
    """Return whether the model computes in float32 in the current autocast context."""
    return lm.dtype == torch.float32 and not torch.is_autocast_enabled(lm.device.type)


@torch.enable_grad()
def logprobs_and_gradient(lm, batch, states_function):
    """Return log-probs (R, T) and the gradient of their sum with respect to the embedding.

    `states_function(lm, batch)` returns the `TokenStates` that they are computed from.
    """
    rows, columns, hidden_states = states_function(lm, batch)
    logprobs = lm.get_output_embeddings()(hidden_states).float().log_softmax(dim=-1)
    logprobs = logprobs.gather(-1, batch["completions"][rows, columns][:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logprobs.sum(), lm.get_input_embeddings().weight)
    zeros = torch.zeros(batch["completions"].shape, device=lm.device)
    return zeros.index_put((rows, columns), logprobs.detach()), gradient


def probe_batch(lm):
    """Return a batch of six rows of unequal lengths with two prompts, of which one is padded."""
    ids = ordinary_ids(lm, 72)
    row = torch.arange(6, device=lm.device)
    return {
        "prompts": ids[:24].view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": torch.arange(12, device=lm.device) >= row[:, None] // 3 * 5,
        "prompt_index": (row // 3)[:, None],
        "completions": ids[24:].view(6, 8),
        "completion_mask": torch.arange(8, device=lm.device) <= row[:, None],
    }


def with_wrong_prompts(batch):
    """Return the batch with each row's prompt replaced by another one."""
    return batch | {"prompts": batch["prompts"].flip(0)}


def ordinary_ids(lm, count):
    """Return `count` token ids whose embeddings are not zero.

    That of the padding token may be zero, which RMSNorm can turn into a NaN gradient.
    """
    embeddings = lm.get_input_embeddings().weight[: len(lm.get_output_embeddings().weight)]
    ids = embeddings.any(dim=1).nonzero()[:, 0]
    return ids[7 * torch.arange(count, device=ids.device) % len(ids)]
