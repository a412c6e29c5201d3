"""PPO whose first steps train only the critic, so that the policy starts with useful values.

During the warm-up the policy has learning rate 0 and no gradients: its Adam state starts after it.
For example --critic_warmup_steps 5. After five such steps the run warns of the policy's gradient
of 0.
"""


class Args:
    critic_warmup_steps: int = option(0, "first steps, which train only the critic", ge=0)


LINES = {
    'policy_group["lr"] = lr = run.learning_rate(step - 1, args)': """
        lr = run.learning_rate(step - 1, args)
        policy_group["frozen"] = step <= args.critic_warmup_steps
        policy_group["lr"] = 0.0 if policy_group["frozen"] else lr
    """,
    'norm = accelerator.clip_grad_norm_(group["params"], args.max_grad_norm or math.inf)': """
        if group.get("frozen"):  # gradients of zero would still advance Adam's step count
            for weight in group["params"]:
                weight.grad = None
        norm = accelerator.clip_grad_norm_(group["params"], args.max_grad_norm or math.inf)
    """,
}
