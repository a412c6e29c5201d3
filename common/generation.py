"""The decoding loop that the scripts hand to `model.generate(custom_generate=decode, n=n)`.

Stock `generate` repeats each prompt n times before the prefill and decodes finished rows until the last one ends. This
loop runs the prompt once, repeats its key-value cache, and drops rows as they finish. `generate` itself still prepares
the configuration, the sampling warpers and the empty cache.
"""

import contextlib

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from common.errors import InputError
from common.masked import completion_mask, positions


def sampling_config(policy, temperature, top_p, max_new_tokens, num_return_sequences=1):
    """A neutral GenerationConfig: samples from the policy itself, or greedily at temperature 0.

    Every default of transformers that bends the distribution is named here (top_k is 50 when unset); what the model's
    own generation_config.json sets is removed at load (`load_policy` in common/harness/loading.py).
    """
    sampling = dict(do_sample=False)
    if temperature > 0:
        sampling = dict(do_sample=True, temperature=temperature, top_k=0, top_p=top_p, typical_p=1.0)
    return GenerationConfig(
        **sampling,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        num_return_sequences=num_return_sequences,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=policy.stop_tokens,
        pad_token_id=policy.pad_token,
    )


@contextlib.contextmanager
def seeded(key, device):
    """Draw random numbers from the stream that `key` selects, and afterwards restore torch's global generators.

    `generate` draws from these. `key` is one or several numbers, such as (seed, rank, step, round); different keys give
    independent streams.
    """
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(int(seed))
        yield


class RoomyLayer(DynamicLayer):
    """A layer of the key-value cache with room to spare: a new token is written into it, not concatenated.

    `DynamicLayer` would copy all keys and values for each token.
    """

    ROOM = 64  # tokens to add when it is full

    def __init__(self, layer):
        self.__dict__.update(layer.__dict__)
        self.buffers = None

    def update(self, key_states, value_states, *args, **kwargs):
        length, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if self.buffers is None or end > self.buffers[0].shape[2]:
            self.buffers = [pad(x, (0, 0, 0, self.ROOM)) for x in (self.keys, self.values)]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, length:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices):
        end = self.keys.shape[2]
        self.buffers = [x[indices] for x in self.buffers or (self.keys, self.values)]
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)


def inverse_cdf_sample(probs):
    """A token (R, 1) for each row of `probs` (R, V), from one random number per row; never one of probability 0.

    Exact up to the 2**-24 of a float32 random number: on CPU `cumsum` of float32 adds up in float64.
    """
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:].contiguous()
    u = torch.rand(len(probs), 1, device=probs.device) * total
    u = torch.minimum(u, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up to the total
    return torch.searchsorted(cdf, u, right=True).clamp(max=cdf.shape[1] - 1)  # NaN would give the index after it


def last_logits(model, inputs, head_is_last):
    """Logits (R, V) after the last token of each row, from one forward with cache.

    If the head is the last operation of the model, it is applied here: on CPU `weight @ hidden.T` takes a quarter to a
    half of the time of `hidden @ weight.T` for 2 to 32 rows and a large vocabulary (docs/performance.md).
    """
    if not head_is_last:
        return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
    hidden = model.base_model(**inputs, use_cache=True).last_hidden_state[:, -1]
    head = model.get_output_embeddings()
    if hidden.device.type == "cpu" and head.bias is None:
        return (head.weight @ hidden.T).T
    return head(hidden)


@torch.no_grad()
def decode(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    n=1,
    head_is_last=False,
    drop_finished=True,
    **model_kwargs,
):
    """Sample n completions of each of the B prompts `input_ids` (B, P), which are padded on the left.

    Returns completions (B*n, T) with the pad id after their end, and the log-probs (B*n, T) of their tokens, 0 after
    the end. Rows of one prompt are adjacent. `head_is_last`: the model does nothing to the logits after the head.

    Without `drop_finished` the random draws are those of stock `generate` with `num_return_sequences=n`; with it they
    are other draws of the same distribution.
    """
    # In the signature these names would make `generate` pass them twice. Without padding the mask arrives as None.
    attention_mask, past_key_values = model_kwargs.get("attention_mask"), model_kwargs["past_key_values"]
    width, device, rows = input_ids.shape[1], input_ids.device, len(input_ids) * n
    position_ids = positions(torch.ones_like(input_ids) if attention_mask is None else attention_mask)  # (B, P)
    max_new_tokens = generation_config.max_length - width
    stop_tokens = torch.tensor(generation_config.eos_token_id, device=device)
    completions = torch.full((rows, max_new_tokens), generation_config.pad_token_id, device=device)
    drawn = torch.ones((rows, max_new_tokens), device=device)  # the probabilities of the sampled tokens

    inputs = {"past_key_values": past_key_values}
    inputs |= {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    logits = last_logits(model, inputs, head_is_last).repeat_interleave(n, dim=0)
    past_key_values.batch_repeat_interleave(n)
    past_key_values.layers = [  # one for images stays empty; the old ones must be freed, with the prompts' keys
        RoomyLayer(x) if type(x) is DynamicLayer and x.is_initialized else x for x in past_key_values.layers
    ]
    # Positions and mask of all tokens to come: those of one token are then a view.
    position_ids = position_ids[:, -1:].repeat_interleave(n, dim=0) + 1 + torch.arange(max_new_tokens, device=device)
    if attention_mask is not None:
        attention_mask = pad(attention_mask, (0, max_new_tokens), value=1).repeat_interleave(n, dim=0)
    running = torch.arange(rows, device=device)  # the row that each line of the cache belongs to
    finished = torch.zeros(rows, dtype=torch.bool, device=device)  # by line of the cache

    for t in range(max_new_tokens):
        scores = logits_processor(None, logits.float())  # neutral configuration: only warpers, which read no ids
        probs = scores.softmax(dim=-1)
        if not generation_config.do_sample:
            tokens = scores.argmax(dim=-1, keepdim=True)
        elif drop_finished and device.type == "cpu":  # multinomial draws a random number for each vocabulary entry
            tokens = inverse_cdf_sample(probs)
        else:
            tokens = torch.multinomial(probs.masked_fill(probs[:, :1].isnan(), 1), 1)  # NaN would end the process
        completions[running, t] = tokens[:, 0]
        drawn[running, t] = probs.gather(-1, tokens)[:, 0]
        finished |= torch.isin(tokens[:, 0], stop_tokens)
        if t + 1 == max_new_tokens:
            break
        if device.type == "cpu" or t % 8 == 7:  # to look is to wait for the GPU
            keep = (~finished).nonzero()[:, 0]
            if len(keep) == 0:
                break
            rarely = past_key_values.get_seq_length() >= 256  # it copies the cache: the longer, the slower
            if drop_finished and len(keep) <= (0.8 if rarely else 0.9) * len(finished):
                past_key_values.batch_select_indices(keep)
                running, finished, tokens, position_ids = (x[keep] for x in (running, finished, tokens, position_ids))
                attention_mask = None if attention_mask is None else attention_mask[keep]
        mask = None if attention_mask is None else attention_mask[:, : width + t + 1]
        inputs |= {"input_ids": tokens, "attention_mask": mask, "position_ids": position_ids[:, t : t + 1]}
        logits = last_logits(model, inputs, head_is_last)
    completions, drawn = completions[:, : t + 1], drawn[:, : t + 1]
    mask, _ = completion_mask(completions, stop_tokens)  # a finished row may have been continued for a while
    logprobs = torch.where(mask, drawn.log(), 0)
    if not logprobs.isfinite().all():  # once, after the last token: to look is to wait for the GPU
        raise InputError(
            "sampling: log-probs are not finite: the model's logits are not, or a tiny temperature made them infinite"
        )
    return completions.masked_fill(~mask, generation_config.pad_token_id), logprobs
