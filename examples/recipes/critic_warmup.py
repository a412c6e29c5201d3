"""PPO whose first steps train only the critic, so that the policy starts with useful values.

During the warm-up the policy has learning rate 0 and no gradients: its Adam state starts after it.
"""


class Args:
    critic_warmup_steps: int = option(5, "first steps, which train only the critic", ge=0)


LINES = {
    'policy_group["lr"] = lr = learning_rate(step - 1, args)': """
        lr = learning_rate(step - 1, args)
        policy_group["lr"] = lr if step > args.critic_warmup_steps else 0.0
    """,
    "optimizer_step(accelerator, optimizer, step_loss, args, metrics, "
    'prefixes=("", "critic_"))': """
        policy_group = optimizer.param_groups[0]
        if policy_group["lr"] == 0:  # gradients of zero would still advance Adam's step count
            for weight in policy_group["params"]:
                weight.grad = None
        optimizer_step(accelerator, optimizer, step_loss, args, metrics, prefixes=("", "critic_"))
    """,
}
