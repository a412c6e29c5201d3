"""A reward model as a reward function, for ppo.py."""

import torch

from common.batches import micro_batches
from common.errors import refuse
from common.harness.loading import check_positions, load_classifier, load_tokenizer
from common.harness.prompts import TEMPLATE_COLUMNS, encode_completions, end_token, tokenize
from common.rewards import Reward


def learned_reward(args, prompts, device):
    """The model of `--reward_model_path` as a `Reward`: one scalar for a completion (arXiv 1909.08593, 2203.02155).
    Its own tokenizer and chat template encode the texts as `reward_model.py` does, with the end token unless the
    completion was cut. A checkpoint or a tokenizer that cannot do this is an InputError."""
    option = "reward_model_path"
    tokenizer = load_tokenizer(args, option)
    end = end_token(tokenizer)
    if tokenizer.pad_token_id == end:  # the score would be read before the end token
        refuse(args, option, f"its tokenizer needs a pad token other than {tokenizer.convert_ids_to_tokens(end)}")
    ids = tokenize([("a prompt", prompt.prompt, prompt.columns) for prompt in prompts], args, tokenizer)
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if any(unknown & set(row) for row in ids):
        refuse(args, option, "its tokenizer does not know characters of the prompts")
    model = load_classifier(args, option, tokenizer, device).requires_grad_(False)
    tokenizer.padding_side = "right"
    check_positions(args, option, model, max(map(len, ids)) + args.max_new_tokens)

    @torch.no_grad()
    def reward_model(prompts, completions, truncated, **columns):
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        own = [{name: columns[name][i] for name in TEMPLATE_COLUMNS if name in columns} for i in range(len(prompts))]
        rows = tokenize([("a prompt", *row) for row in zip(prompts, own, strict=True)], args, tokenizer)
        for ids, completion, cut in zip(rows, encode_completions(texts, tokenizer), truncated, strict=True):
            ids += completion + ([] if cut else [end])
        check_positions(args, option, model, max(map(len, rows)))
        scores = {}
        for part in micro_batches(range(len(rows)), [(len(ids), 0) for ids in rows], args):
            inputs = tokenizer.pad({"input_ids": [rows[i] for i in part]}, return_tensors="pt").to(device)
            scores.update(zip(part, model(**inputs).logits[:, 0].float().tolist(), strict=True))
        return [scores[i] for i in range(len(rows))]

    return Reward("reward_model", 1.0, reward_model)
