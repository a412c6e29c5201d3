"""A few rows computed both ways: whether a shortcut gives the numbers of the plain way."""

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from common.model import token_states

# The name of the cache in a forward: transformers 5.24 has renamed `past_key_values`.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


def is_exact(lm, states):
    """Whether a way to the states gives the log-probs of `token_states`, and their gradient."""
    batch = rows_of_two_prompts(lm)
    plain = logprobs_and_gradient(lm, batch, token_states)
    other = logprobs_and_gradient(lm, with_other_prompts(batch), token_states)
    found = logprobs_and_gradient(lm, batch, states)
    return all(is_near(lm, *three) for three in zip(found, plain, other, strict=True))


def is_near(lm, found, plain, other):
    """Whether `found` is far nearer to `plain` than is `other`, of wrong prompts; NaN is not."""
    share = 1e-3 if is_in_float32(lm) else 0.1
    return bool((found - plain).abs().max() <= share * (other - plain).abs().max())


def is_in_float32(lm):
    """Whether this model computes in float32, here and now."""
    return lm.dtype == torch.float32 and not torch.is_autocast_enabled(lm.device.type)


@torch.enable_grad()
def logprobs_and_gradient(lm, batch, states):
    """Log-probs (R, T) by a way to the states, and the gradient of their sum at the embedding."""
    rows, columns, hidden = states(lm, batch)
    logprobs = lm.get_output_embeddings()(hidden).float().log_softmax(dim=-1)
    logprobs = logprobs.gather(-1, batch["completions"][rows, columns][:, None])[:, 0]
    (gradient,) = torch.autograd.grad(logprobs.sum(), lm.get_input_embeddings().weight)
    empty = torch.zeros(batch["completions"].shape, device=lm.device)
    return empty.index_put((rows, columns), logprobs.detach()), gradient


def rows_of_two_prompts(lm):
    """A batch of six rows of unequal lengths; the second prompt is padded."""
    ids = ordinary_ids(lm, 72)
    counts = torch.arange(6, device=lm.device)
    return {
        "prompts": ids[:24].view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": torch.arange(12, device=lm.device) >= counts[:, None] // 3 * 5,
        "prompt_index": (counts // 3)[:, None],
        "completions": ids[24:].view(6, 8),
        "completion_mask": torch.arange(8, device=lm.device) <= counts[:, None],
    }


def with_other_prompts(batch):
    """The batch with the prompts of other rows."""
    return batch | {"prompts": batch["prompts"].flip(0)}


def ordinary_ids(lm, count):
    """Ids (count,) of tokens whose embedding is not zero: that of padding may be, and give NaN."""
    rows = lm.get_input_embeddings().weight[: len(lm.get_output_embeddings().weight)]
    ids = rows.any(dim=1).nonzero()[:, 0]
    return ids[7 * torch.arange(count, device=ids.device) % len(ids)]
