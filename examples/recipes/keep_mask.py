"""Keep Sampling Mask: train on the distribution that top-p, top-k or min-p left (2512.02556, 3.1).

Sampling keeps some tokens of the vocabulary and renormalizes:

    log pi(o_t) = z(o_t) - log sum over the kept v of exp z(v),    z = logits / temperature

The sampler returns the set that it kept at each token, and the old, the new and the reference
policy are all scored over that set. A set that the trainer computes itself is another one where
logits differ in the last bits, and a token that is outside of its own set has no log-prob.

`--no_keep_mask` scores over the whole vocabulary, as most code does. The log-ratio of the first
update is then not 0, but the log of the mass that was kept. `sampler/ratio` is the mean of
pi_old / pi_sampler, 1 if they are one distribution; like the old log-probs it is there with several
updates per rollout. Training and evaluation sample at top-p 0.7, the value that DAPO's paper
evaluates at; the mask's own paper names none. A mask has as many booleans as the vocabulary for
each token. --fast is refused, since its sampler returns no sets.
"""

LINES = {
    "reward_functions = load_rewards(args)": """
        if args.fast:
            raise Exit("--fast: its sampler does not return the tokens that it kept")
        reward_functions = load_rewards(args)
    """,
    "samples = sample_and_score(prompts, args.group_size, args.temperature, 1.0, round_seed)": """
        samples = sample_and_score(
            prompts, args.group_size, args.temperature, args.top_p, round_seed
        )
    """,
    "top_p=top_p,": """
        top_p=top_p,
        min_p=args.min_p,
    """,
    "top_k=0,  # the default of 50 would change the distribution": """
        top_k=args.top_k,
        return_dict_in_generate=True,
        output_scores=True,  # log-probs after the temperature, -inf for what is not kept
    """,
    "completions = []": "completions, scores = [], []",
    "completions += output[:, x.shape[1] :]": """
        completions += output.sequences[:, x.shape[1] :]
        scores += torch.stack(output.scores, dim=1)  # (T, V) of each row
    """,
    "completions = pad_sequence(completions, batch_first=True, padding_value=pad_token)": """
        completions = pad_sequence(completions, batch_first=True, padding_value=pad_token)
        scores = pad_sequence(scores, batch_first=True)  # (R, T, V)
        logprobs = scores.log_softmax(dim=-1).gather(-1, completions[..., None])[..., 0]
    """,
    '"completions": completions,  # (R, T), padded on the right': """
        "completions": completions,  # (R, T), padded on the right
        "sampler_logprobs": logprobs,  # (R, T)
        "keep_mask": scores > -math.inf,  # (R, T, V)
    """,
    'values = logprobs_and_entropy(logits[kept], batch["completions"][kept], args.temperature)': """
        logits = kept_logits(logits, batch, args)
        values = logprobs_and_entropy(logits[kept], batch["completions"][kept], args.temperature)
    """,
    'micro["old_logprobs"], _ = completion_logprobs(model, micro, args)': """
        micro["old_logprobs"], _ = completion_logprobs(model, micro, args)
        add_sampler_ratio(metrics, micro)
    """,
}


class Args:
    top_p: float = option(0.7, "top-p in training", gt=0, le=1)
    top_k: int = option(0, "top-k in training and evaluation (0: off)", ge=0)
    min_p: float = option(0.0, "min-p in training and evaluation (0: off)", ge=0, le=1)
    keep_mask: bool = option(True, "score over the kept tokens, not over the whole vocabulary")


def kept_logits(logits, batch, args):
    """Return logits (R, T, V), very low for the tokens that sampling did not keep.

    They are not -inf: the entropy multiplies them by a probability of 0.
    """
    if not args.keep_mask or "keep_mask" not in batch:
        return logits
    keep = batch["keep_mask"][:, : logits.shape[1]]  # `trim_rows` cuts only columns (R, T)
    return logits.float().masked_fill(~keep, -1e9)


def add_sampler_ratio(metrics, micro):
    """Log the mean of pi_old / pi_sampler over the tokens."""
    if "sampler_logprobs" in micro:
        mask = micro["loss_mask"]
        ratios = log_ratio(micro["old_logprobs"], micro["sampler_logprobs"], mask).exp()
        metrics.add("sampler/ratio", ratios, mask)
