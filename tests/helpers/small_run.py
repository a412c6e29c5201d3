"""A short run of grpo.py, hand-made samples, and a comparison of two runs."""

import importlib

import torch

from common.load import Prompt
from common.rewards import Completion, Samples
from testbed import same_metrics

QUICK = "--prompts_per_step 4 --group_size 4 --eval_prompts 4 --eval_samples 4 --max_new_tokens 16".split()


def completion(text, ids=(2, 0), truncated=False):
    """Return a completion as `decode_completions` does."""
    return Completion(text, list(ids), truncated)


def samples_of(rewards, texts=None, prompts=1, tokens=2, **terms):
    """Return `Samples` with these rewards [also the accuracy], completions of `tokens` tokens, and `prompts` prompts."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.ones(len(rewards), tokens, dtype=torch.long)
    batch = {"completions": ids, "completion_mask": ids.bool(), "truncated": torch.zeros(len(rewards)).bool()}
    completions = [completion(text, row) for text, row in zip(texts or ["2"] * len(rewards), ids.tolist(), strict=True)]
    terms = {name: torch.tensor(term, dtype=torch.float64) for name, term in terms.items()} or {"accuracy": rewards}
    return Samples(batch, [Prompt([1], "1+1", None)] * prompts, completions, rewards, terms)


def train(folder, *arguments):
    """Run grpo.py from the command line for two short steps."""
    words = [*QUICK, "--output_dir", folder, "--max_steps", 2, *arguments]
    importlib.import_module("grpo").main(list(map(str, words)))


def same_run(a, b):
    """Assert that two runs have the same metrics, samples and weights."""
    same_metrics(a, b)
    names = [name for name in ("samples.jsonl", "model/model.safetensors") if (a / name).exists()]
    assert names and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
