"""VC-PPO and VAPO: the critic has its own lambda, and that of the policy may grow with the length.

The critic's returns use --gae_lambda_critic, which is 1 in VC-PPO (arXiv 2503.01491). With
--length_adaptive_alpha the policy's lambda is 1 - 1 / (alpha length), from VAPO (arXiv 2504.05118).
For short completions that is negative, so it is clamped to [0, 1].
"""


class Args:
    gae_lambda_critic: float | None = option(
        None, "lambda of the returns [--gae_lambda]", ge=0, le=1
    )
    length_adaptive_alpha: float = option(0.0, "alpha of VAPO, there 0.05 (0: off)", ge=0)


def compute_advantages(token_rewards, values, completion_mask, args):
    """Return advantages and returns (R, T) by GAE, before whitening; 0 outside the mask."""
    actor_lambda = args.gae_lambda
    if args.length_adaptive_alpha:
        lengths = completion_mask.sum(dim=1).clamp(min=1).to(values.dtype)  # (R,)
        actor_lambda = (1 - 1 / (args.length_adaptive_alpha * lengths)).clamp(0, 1)
    critic_lambda = args.gae_lambda if args.gae_lambda_critic is None else args.gae_lambda_critic
    advantages = gae(token_rewards, values, completion_mask, args.gamma, actor_lambda)
    returns = gae(token_rewards, values, completion_mask, args.gamma, critic_lambda) + values
    return advantages, torch.where(completion_mask, returns, 0)
