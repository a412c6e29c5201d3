"""On-policy distillation: a teacher says how likely it is to write each token of the student.

The advantage of a token is log pi_teacher - log pi_student, at the student's temperature, detached.
Its gradient is, at each position, that of -KL(student || teacher), without bias. Rewards are only
logged. What a token leads to later is left out, which is a discount of 0. arXiv 2306.13649 trains
on the student's own samples, too, but backpropagates through the divergence over the whole
vocabulary.
"""

from dataclasses import replace

from harness.loading import load_tokenizer


class Args:
    teacher: str = option(
        "runs/teacher/model", "hub id or folder; it needs the student's tokenizer"
    )
    kl_coef: float = option(
        0.0, "beta of a KL to the teacher in the loss, beside the advantages", ge=0
    )
    del normalize_std, std_eps  # advantages are not made of groups


def load_reference(policy, args, accelerator):
    """The teacher, frozen. It stands where grpo.py has the model of the start of the run."""
    teacher = replace(args, model_name_or_path=args.teacher, lora_rank=0)
    return load_policy(teacher, load_tokenizer(args), accelerator).requires_grad_(False).eval()


def compute_advantages(rewards, args):
    """Zeros (R, 1): rewards teach nothing here; `policy_loss` has the advantages of the tokens."""
    return torch.zeros(len(rewards), 1)


def teacher_advantages(logprobs, teacher_logprobs):
    """Advantages (R, T): log(teacher / student) of the student's tokens, their parts of -KL."""
    return (teacher_logprobs - logprobs).detach()


clipped_loss = policy_loss


def policy_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs=None):
    """The loss of grpo.py with the teacher's advantages; its reference is the teacher."""
    advantages = teacher_advantages(old_logprobs, ref_logprobs)
    return clipped_loss(logprobs, old_logprobs, advantages, loss_mask, args, ref_logprobs)
