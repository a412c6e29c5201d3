"""VC-PPO and VAPO: the critic has a lambda of its own, and that of the policy may grow with the length.

The returns that the critic learns are made with --gae_lambda_critic, where VC-PPO (arXiv 2503.01491)
has 1. With --length_adaptive_alpha the policy's lambda is 1 - 1 / (alpha length), of VAPO (arXiv
2504.05118). For short completions that is negative, so it is clamped to [0, 1].
"""


class Args:
    gae_lambda_critic: float | None = option(
        None, "lambda of the returns [--gae_lambda]", ge=0, le=1
    )
    length_adaptive_alpha: float = option(0.0, "alpha of VAPO, there 0.05 (0: off)", ge=0)


def compute_advantages(token_rewards, values, completion_mask, args):
    """Advantages and returns (R, T) by GAE, before whitening; 0 where the mask is false."""
    actor_lambda = args.gae_lambda
    if args.length_adaptive_alpha:
        lengths = completion_mask.sum(dim=1).clamp(min=1).to(values.dtype)  # (R,)
        actor_lambda = (1 - 1 / (args.length_adaptive_alpha * lengths)).clamp(0, 1)
    critic_lambda = args.gae_lambda if args.gae_lambda_critic is None else args.gae_lambda_critic
    advantages = gae(token_rewards, values, completion_mask, args.gamma, actor_lambda)
    returns = gae(token_rewards, values, completion_mask, args.gamma, critic_lambda) + values
    return advantages, torch.where(completion_mask, returns, 0)
