"""Classifiers of one output: reward models, critics that start from one, and a reward model as a reward function."""

import torch
from torch import nn

from common.batches import micro_batches
from common.errors import refuse
from common.harness.loading import (
    check_positions,
    choose_trained,
    enable_checkpointing,
    load_model,
    load_tokenizer,
    shorten,
)
from common.harness.probes import influence
from common.harness.prompts import TEMPLATE_COLUMNS, encode_completions, end_token, tokenize


def load_classifier(args, option, tokenizer, device, new_head=False):
    """The classifier of one output, read at the last token that is not padding, that `option` names; with `new_head` a
    language model gets zeros. A tokenizer that pads with what ends a completion gets another pad token."""
    lm = load_model(args, option, tokenizer, device, "SequenceClassification", new_head)
    if tokenizer.pad_token_id in (tokenizer.eos_token_id, end_token(tokenizer)):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > lm.get_input_embeddings().weight.shape[0]:
            lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if lm.config.is_encoder_decoder or not reads_last_token(lm):
        refuse(args, option, f"a {type(lm).__name__} does not read its score at the last token: take a causal model")
    for name in lm.new_head:
        nn.init.zeros_(lm.get_parameter(name))
    choose_trained(args, option, lm)
    return lm


def load_scorer(args, option, device):
    """The reward model that `option` names as a start for a critic: it must know the token ids of the policy."""
    tokenizer = load_tokenizer(args, option)
    if other := dict(load_tokenizer(args).get_vocab().items() - tokenizer.get_vocab().items()):
        refuse(args, option, f"its tokenizer has other ids than the policy's for {shorten(sorted(map(repr, other)))}")
    lm = load_classifier(args, option, tokenizer, device)
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        refuse(args, option, f"a {type(lm).__name__} has no linear head `score`")
    check_positions(args, option, lm)
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    return lm


def reads_last_token(lm):
    """Whether a classifier's score depends on the last token of a row, and not on the padding after it."""
    last, after, end = influence(lm, [lm.config.get_text_config().pad_token_id] * 2)[3:]
    return last > 0 and after == end == 0


def learned_reward(args, prompts, device):
    """The model of `--reward_model_path` as a `Reward`: one scalar for a completion (arXiv 1909.08593, 2203.02155).
    Its own tokenizer and chat template encode the texts as `reward_model.py` does, with the end token unless the
    completion was cut. A checkpoint or a tokenizer that cannot do this is an InputError."""
    from common.rewards import Reward

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
