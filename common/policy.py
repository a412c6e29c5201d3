"""The module that is trained: its forward gives log-probs and entropies of given completions.

To read it, follow `Policy.forward` with `plain_states`; `common/shared_prompts.py` is an exact shortcut for rows that
share a prompt, and can be skipped at a first reading.
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.masked import logprobs_and_entropy, positions
from common.shared_prompts import shared_states, token_places

CHUNK_ELEMENTS = 2**25  # logits of one chunk of the head: 128 MiB in float32


class Backbone(nn.Module):
    """The hidden states that predict the completions' tokens, from the model `lm`: what policy and critic share.

    With `shares_prompts` the rows of a prompt may compute it once. `head_is_last`: nothing happens to the logits after
    the head, so it may run on chunks of the states. Else (a soft cap, a scale) the states are the logits themselves.
    """

    def __init__(self, lm, shares_prompts, head_is_last=True):
        super().__init__()
        self.lm = lm
        self.shares_prompts, self.head_is_last = shares_prompts, head_is_last
        self.num_parameters = sum(parameter.numel() for parameter in lm.parameters())

    def states(self, batch):
        """Row (N,) and column (N,) of each completion token in (R, T), and the hidden state (N, H) that predicts it."""
        share = self.shares_prompts and "prompt_index" in batch
        states = shared_states(self.lm, batch, self.num_parameters) if share else self.plain_states(batch)
        return [torch.cat(parts) for parts in zip(*states, strict=True)]

    def plain_states(self, batch):
        """[(rows, columns, hidden)], from one pass over the whole rows."""
        mask = batch["completion_mask"]
        attention_mask = torch.cat([batch["prompt_mask"], mask], dim=1)  # (R, P + T)
        inputs = dict(
            input_ids=torch.cat([batch["prompts"], batch["completions"]], dim=1),
            attention_mask=attention_mask.long(),
            position_ids=positions(attention_mask),
            use_cache=False,
        )
        before = mask.shape[1] + 1  # the state at a position predicts the next token: shift by one
        if self.head_is_last:
            hidden = self.lm.base_model(**inputs).last_hidden_state[:, -before:-1]
        else:
            hidden = self.lm(**inputs, logits_to_keep=before).logits[:, :-1]
        if "lengths" in batch:  # looking at the mask means waiting for the GPU
            places = token_places([tokens for _, tokens in batch["lengths"]], mask.device)
        else:
            places = mask.nonzero(as_tuple=True)
        return [(*places, hidden[places])]


class Policy(Backbone):
    """A causal language model whose forward returns log-probs and entropies of given completions.

    This module is what Accelerate prepares, so that the gradient goes through its wrapper (DDP, FSDP2). The backbone
    runs on the whole rows; the vocabulary head only on completion tokens, in chunks that are recomputed in the backward
    pass, so that no (R, T, V) tensor exists. Whether a model allows this, and `plain_cache`, without which stock
    `generate` samples, is found before (`find_shortcuts` in common/harness/probes.py).
    """

    def __init__(self, lm, pad_token, stop_tokens, temperature, head_is_last, plain_cache, shares_prompts):
        super().__init__(lm, shares_prompts, head_is_last)
        self.pad_token, self.stop_tokens = pad_token, stop_tokens
        self.temperature, self.plain_cache = temperature, plain_cache
        self._no_split_modules = lm._no_split_modules  # FSDP2 wraps by these

    def notes(self, tokenizer):
        """What a user should know about this model, a line each."""
        yield f"stop tokens: {tokenizer.convert_ids_to_tokens(self.stop_tokens)}"
        if not self.head_is_last:
            yield "the head of this model cannot run in chunks: log-probs take more memory"
        if not self.plain_cache:
            yield "the cache of this model holds more than keys and values: samples as with --rollout hf"
        elif not self.shares_prompts:
            yield "updates compute a prompt again for each completion (due to checkpointing, sharding, or the model)"

    def forward(self, batch, with_entropy=True, entropy_grad=False, states=None):
        """Float32 log-probs and entropies (R, T) of the completions at the sampling temperature, 0 outside the mask.

        It equals, without the (R, T, V) logits (tests/test_policy.py::test_forward_equals_full_logits_without_padding):

            logits = lm(prompts and completions).logits[:, P - 1 : -1] / temperature
            logprobs = logits.log_softmax(-1).gather(-1, completions)
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

        `batch` holds prompts (R, P) left-padded, prompt_mask (R, P), completions (R, T), completion_mask (R, T). With
        prompt_index (R, 1) rows of one index share a prompt, computed once. `entropy_grad` keeps every chunk of logits
        for the entropy's gradient. `states`: those of `self.states`, if they are known.
        """
        rows, columns, hidden = self.states(batch) if states is None else states
        tokens = batch["completions"][rows, columns]
        size = max(1, CHUNK_ELEMENTS // self.lm.get_output_embeddings().weight.shape[0])
        if len(tokens) <= size:
            results = self.head(hidden, tokens, with_entropy, entropy_grad)
        else:
            chunks = zip(hidden.split(size), tokens.split(size), strict=True)
            how = with_entropy, entropy_grad
            parts = [checkpoint(self.head, h, t, *how, use_reentrant=False) for h, t in chunks]
            results = [torch.cat(part) if part[0] is not None else None for part in zip(*parts, strict=True)]
        empty = torch.zeros(batch["completions"].shape, device=hidden.device)
        return [None if x is None else empty.index_put((rows, columns), x) for x in results]

    def head(self, hidden, tokens, with_entropy, entropy_grad):
        """Log-probs and entropies (N,) of `tokens` (N,) from hidden states (N, H), or from logits (N, V)."""
        logits = self.lm.get_output_embeddings()(hidden) if self.head_is_last else hidden
        return logprobs_and_entropy(logits, tokens, self.temperature, with_entropy, entropy_grad)
