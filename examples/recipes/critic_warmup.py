"""PPO whose first steps train the critic alone, so that the policy starts with useful values.

The learning rate of the policy is 0 in these steps; its Adam moments already follow its gradients.
"""


class Args:
    critic_warmup_steps: int = option(5, "first steps, which train the critic alone", ge=0)


LINES = {
    'policy_group["lr"] = lr = learning_rate(run.step, args)': """
        lr = learning_rate(run.step, args)
        policy_group["lr"] = 0.0 if run.step < args.critic_warmup_steps else lr
    """
}
