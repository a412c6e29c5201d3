"""Print what the scripts do with a model: which shortcuts apply, and how exact its log-probs are.

    python tools/models.py Qwen/Qwen2.5-0.5B runs/grpo/model    one row per model, a hub id or folder

It runs on the CPU in float32, with a few tokens. The columns:

attention   its implementation; eager materializes attention weights: more memory for long rows
sampling    fast: prompts are computed once, and finished rows dropped; stock: transformers' `generate`
head        chunks: logits are computed in chunks; whole: for a whole micro-batch at once
prompts     once: an update computes a prompt once for all completions; each row: again for each
update      largest log-prob difference of a token between an update (padding, shared prompts) and
            a forward over its row alone
sampled     the same for the sampler's log-probs; stock sampling returns none

Above 1e-3 the log-probs of a model are wrong: they may depend on padding, as in RWKV.
"""

import argparse
import contextlib
import io
import pathlib
import sys

import torch
from accelerate import Accelerator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from grpo import Args, rollout
from harness.data import Prompt
from harness.errors import clean_exit
from harness.loading import load_policy, load_tokenizer

COLUMNS = ["model", "class", "attention", "sampling", "head", "prompts", "update", "sampled"]


def cells_of(name):
    """Return the cells of a model, hub id or folder."""
    args = Args(model_name_or_path=str(name), max_new_tokens=12, generate_batch_size=0)
    with contextlib.redirect_stdout(io.StringIO()):
        policy = load_policy(args, load_tokenizer(args), Accelerator(cpu=True))
    batch = sample(policy, args)
    expected = plain_logprobs(policy, batch)
    with torch.no_grad():
        update, _ = policy(batch, with_entropy=False)
    mask = batch["completion_mask"]
    sampled = batch.get("rollout_logprobs")
    return [
        str(name),
        type(policy.lm).__name__,
        policy.lm.config._attn_implementation,
        "stock" if sampled is None else "fast",
        "chunks" if policy.head_is_last else "whole",
        "once" if "prompt_index" in batch else "each row",
        f"{(update - expected)[mask].abs().max():.0e}",
        "" if sampled is None else f"{(sampled - expected)[mask].abs().max():.0e}",
    ]


def sample(policy, args):
    """Return the batch of a rollout of grpo.py, with prompts of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = policy.lm.get_output_embeddings().weight.shape[0]
    prompts = []
    for length in (3, 9, 5, 12):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        prompts.append(Prompt(ids, "", None))
    return rollout(policy.eval(), prompts, 2, 1.0, 1.0, (0,), args)


@torch.no_grad()
def plain_logprobs(policy, batch):
    """Return log-probs (R, T) from all logits, one row at a time, without padding or cache."""
    expected = torch.zeros(batch["completions"].shape)
    for i in range(len(expected)):
        prompt = batch["prompts"][i][batch["prompt_mask"][i]]
        completion = batch["completions"][i][batch["completion_mask"][i]]
        logits = policy.lm(torch.cat([prompt, completion])[None], use_cache=False).logits
        logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected[i, : len(completion)] = logprobs.gather(-1, completion[:, None])[:, 0]
    return expected


def main(words=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a folder or a hub id")
    names = parser.parse_args(words).models
    print(f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", sep="\n")
    for name in names:
        print(f"| {' | '.join(cells_of(name))} |", flush=True)


if __name__ == "__main__":
    with clean_exit():
        main()
