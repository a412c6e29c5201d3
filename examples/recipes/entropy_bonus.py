"""Entropy bonus: the loss of a token is its loss minus c times the policy's entropy (PPO, Eq. 9).

It keeps the policy from becoming certain too early (A3C, arXiv 1602.01783; PPO, arXiv 1707.06347,
with c 0.01 on Atari). The entropy has the weight of its token. Its gradient keeps the logits of all
tokens in memory.
"""


class Args:
    entropy_coef: float = option(0.01, "c, weight of the entropy bonus", ge=0)


LINES = {
    "return model(batch=batch, temperature=args.temperature)": """
        entropy_grad = args.entropy_coef > 0
        return model(batch=batch, temperature=args.temperature, entropy_grad=entropy_grad)
    """,
    'values = logprobs_and_entropy(logits[kept], batch["completions"][kept], args.temperature)': """
        values = logprobs_and_entropy(
            logits[kept],
            batch["completions"][kept],
            args.temperature,
            entropy_grad=args.entropy_coef > 0,
        )
    """,
    "loss = (losses * token_weights(mask, totals, args)).sum()": """
        losses = losses - args.entropy_coef * entropy
        loss = (losses * token_weights(mask, totals, args)).sum()
    """,
}
