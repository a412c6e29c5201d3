"""Print how exact the log-probs of a model are, and which shortcuts of --fast apply to it.

    python tools/models.py Qwen/Qwen2.5-0.5B runs/grpo/model    one row per model, a hub id or folder

It runs on the CPU in float32, with a few tokens. The columns:

attention   its implementation; eager materializes attention weights: more memory for long rows
update      largest log-prob difference of a token between an update, whose rows are padded, and a
            forward over its row alone
fast        with --fast: sampling by its own loop, the head in chunks, prompts computed once; what
            does not apply runs as without --fast
fast update the same difference with --fast

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

from common.load import Prompt, load_policy
from common.run import clean_exit
from fast.shortcuts import find_shortcuts
from grpo import Args, completion_logprobs, rollout

COLUMNS = ["model", "class", "attention", "update", "fast", "fast update"]


def cells_of(name):
    """Return the cells of a model, hub id or folder."""
    args = Args(model_name_or_path=str(name), max_new_tokens=12)
    with contextlib.redirect_stdout(io.StringIO()):
        tokenizer, lm = load_policy(args, Accelerator(cpu=True))
    batch = sample(lm, tokenizer, args)
    mask = batch["completion_mask"]
    with torch.no_grad():
        expected = plain_logprobs(lm, batch)
        update, _ = completion_logprobs(lm, batch, args)
        shortcuts = find_shortcuts(lm.eval(), shareable=True)
        fast_update, _ = shortcuts.logprobs(lm, batch, args.temperature)
    names = {
        "sampling": shortcuts.plain_cache,
        "head": shortcuts.head_is_last,
        "prompts": shortcuts.shares_prompts,
    }
    return [
        str(name),
        type(lm).__name__,
        lm.config._attn_implementation,
        f"{(update - expected)[mask].abs().max():.0e}",
        ", ".join(name for name, applies in names.items() if applies) or "none",
        f"{(fast_update - expected)[mask].abs().max():.0e}",
    ]


def sample(lm, tokenizer, args):
    """Return the batch of a rollout of grpo.py, with prompts of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = lm.get_output_embeddings().weight.shape[0]
    prompts = []
    for length in (3, 9, 5, 12):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        prompts.append(Prompt(ids, "", None))
    return rollout(lm, tokenizer, prompts, 2, 1.0, 1.0, (0,), args)


def plain_logprobs(lm, batch):
    """Return log-probs (R, T) from all logits, one row at a time, without padding or cache."""
    expected = torch.zeros(batch["completions"].shape)
    for i in range(len(expected)):
        prompt = batch["prompts"][i][batch["prompt_mask"][i]]
        completion = batch["completions"][i][batch["completion_mask"][i]]
        logits = lm(torch.cat([prompt, completion])[None], use_cache=False).logits
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
