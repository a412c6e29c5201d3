"""On-policy distillation: a teacher scores each token that the student samples.

The advantage of a token is log pi_teacher - log pi_student, at the student's temperature, detached.
At each position its gradient is an unbiased estimate of that of -KL(student || teacher). Rewards
are only logged, but a row without one is left out. What a token leads to later is ignored, which
amounts to a discount of 0. arXiv 2306.13649 also trains on the student's own samples, but
backpropagates through the divergence over the whole vocabulary.
"""

from dataclasses import replace


class Args:
    teacher: str = option("runs/teacher/model", "hub id or folder, with the student's tokenizer")
    kl_coef: float = option(0.0, "beta of an additional KL to the teacher in the loss", ge=0)
    del normalize_std, std_eps  # groups play no role in the advantages


def load_reference(lm, args, accelerator):
    """Load the teacher, frozen, in place of the reference of grpo.py."""
    teacher_args = replace(args, model_name_or_path=args.teacher, lora_rank=0)
    _, teacher = load_policy(teacher_args, accelerator)
    if args.fast:
        from fast import speed_up

        speed_up(teacher, accelerator)
    return teacher.requires_grad_(False).eval().to(accelerator.device)


def compute_advantages(rewards, args):
    """Return zeros (R, 1): rewards teach nothing here, `policy_loss` computes the advantages."""
    return torch.zeros(len(rewards), 1, dtype=torch.float64)


def teacher_advantages(logprobs, teacher_logprobs):
    """Return advantages (R, T), log(teacher / student) of the student's tokens, detached."""
    return (teacher_logprobs - logprobs).detach()


clipped_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """Return the loss of grpo.py with the teacher's advantages; the reference is the teacher."""
    if ref_logprobs is not None:
        advantages = teacher_advantages(old_logprobs, ref_logprobs)
    return clipped_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs)
