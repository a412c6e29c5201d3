"""A small random model with shortcuts, for tests of fast/."""

import contextlib
import dataclasses

import torch
from transformers import GenerationConfig

from fast.logprobs import token_states, logprobs_of_states
from fast.shortcuts import find_shortcuts
from small_models import IDS, random_lm


def left_pad(rows, pad_token, device="cpu"):
    """Pad lists of token ids on the left; return ids (R, P) and mask (R, P)."""
    width = max(len(row) for row in rows)
    ids = [[pad_token] * (width - len(row)) + row for row in rows]
    mask = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class SpedUp:
    """A model, its shortcuts, and the sampling settings of a run."""

    def __init__(self, lm, temperature=1.0):
        self.lm = lm
        self.shortcuts = find_shortcuts(lm, True)
        self.temperature = temperature
        self.stop_tokens = [IDS["eos_token_id"]]

    @property
    def shares_prompts(self):
        return self.shortcuts.shares_prompts

    def __call__(self, batch, entropy_grad=False):
        """Return log-probs and entropies; only rows with a `prompt_index` share prompts."""
        rows = {name: column for name, column in batch.items() if name != "prompt_index"}
        if "prompt_index" in batch or self.shortcuts.packs:
            return self.shortcuts.logprobs(self.lm, rows, self.temperature, entropy_grad)
        states = token_states(self.lm, rows, self.shortcuts.head_is_last)
        return logprobs_of_states(self.lm, rows, states, self.shortcuts.head_is_last, self.temperature, entropy_grad)

    def pack(self):
        self.shortcuts = dataclasses.replace(self.shortcuts, shares_prompts=True, packs=True)

    def sample(self, ids, mask, temperature=1.0, length=16, n=1, stock=False, **options):
        """Return the sequences of `generate`, and with fast/'s loop their log-probs."""
        config = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=0,
            max_new_tokens=length,
            eos_token_id=self.stop_tokens,
            pad_token_id=0,
            num_return_sequences=n if stock else 1,
            return_dict_in_generate=True,
        )
        if not stock:
            from fast.decoding import decode

            own = dict(head_is_last=self.shortcuts.head_is_last, graphs=False) | options
            options = dict(custom_generate=decode, n=n) | own
        inputs = dict(input_ids=ids, attention_mask=mask.long(), generation_config=config)
        return self.lm.generate(**inputs, **options)


def random_policy(name, seed=0, temperature=1.0, scale=4.0, **options):
    """A small random model of an architecture with the shortcuts that it can take."""
    return SpedUp(random_lm(name, seed, scale, **options), temperature)


@contextlib.contextmanager
def seeded(seed):
    """Draw from a generator of its own."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield
