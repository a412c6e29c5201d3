"""Checks that a shortcut gives the same numbers as the plain computation."""

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from fast.logprobs import token_states

# The keyword that passes a cache to the forward: transformers 5.24 renamed `past_key_values`.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


def is_plain_linear(module):
    """Return whether calling `module` computes x @ weight.T and nothing else.

    Only then may a shortcut use its weight directly. LoRA, quantized and parametrized layers have
    another class or another type of weight; pruning and weight norm use hooks.
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

    `is_near` compares them on six short rows. The gradient is with respect to the embedding.
    """
    batch = probe_batch(lm)
    plain = logprobs_and_gradient(lm, batch, token_states)
    wrong = logprobs_and_gradient(lm, with_wrong_prompts(batch), token_states)
    found = logprobs_and_gradient(lm, batch, shortcut)
    return all(is_near(lm, *tensors) for tensors in zip(found, plain, wrong, strict=True))


def is_near(lm, found, plain, wrong):
    """Return whether `found` is much closer to `plain` than `wrong`, the result for wrong prompts.

    The bound is 1e-3 of the change that wrong prompts make: an absolute bound would mistake
    rounding for an error. In bfloat16 it is 0.1 of that change in the Euclidean norm, since
    rounding alone can move single entries of a gradient further. NaN is never near.
    """
    if computes_in_float32(lm):
        return bool((found - plain).abs().max() <= 1e-3 * (wrong - plain).abs().max())
    return bool((found - plain).float().norm() <= 0.1 * (wrong - plain).float().norm())


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
    """Return a batch of six rows of unequal lengths, with two prompts, one of them padded."""
    ids = ordinary_ids(lm, 72)
    row = torch.arange(6, device=lm.device)
    return {
        "prompts": ids[:24].view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": torch.arange(12, device=lm.device) >= row[:, None] // 3 * 5,
        "completions": ids[24:].view(6, 8),
        "completion_mask": torch.arange(8, device=lm.device) <= row[:, None],
    }


def with_wrong_prompts(batch):
    """Return the batch with each row's prompt replaced by another one."""
    return batch | {"prompts": batch["prompts"].flip(0)}


def ordinary_ids(lm, count):
    """Return `count` token ids whose embeddings are not zero.

    The padding token may have a zero embedding, which RMSNorm can turn into a NaN gradient.
    """
    embeddings = lm.get_input_embeddings().weight[: len(lm.get_output_embeddings().weight)]
    ids = embeddings.any(dim=1).nonzero()[:, 0]
    return ids[7 * torch.arange(count, device=ids.device) % len(ids)]
