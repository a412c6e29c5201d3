"""SDPO: the policy that sees a right answer of its group teaches itself (arXiv 2601.20802).

The teacher of a completion is the policy of the rollout with one addition to its prompt: the first
right completion among the others of the group. The advantage of a token is

    A_t = log pi(o_t | question, right answer, o_<t) - log pi(o_t | question, o_<t)

at the student's temperature, detached. At each position its gradient is an unbiased estimate of
that of -KL(student || teacher). Rewards only decide what is shown. A row without another right
completion in its group teaches nothing. The loss is GRPO's with these advantages, and there is no
KL.

The paper's objective is the full KL of each position instead of its sample. The authors' code takes
by default a Jensen-Shannon divergence over the 100 most likely tokens, and an average of past
weights as the teacher. Feedback of an environment, such as an error message, is left out.
"""

from dataclasses import replace

from common.batches import left_pad
from harness.chat import dialogue_text, encode_prompts

SHOWN = """{question}
Correct solution:

{solution}

Correctly solve the original question."""


class Args:
    right_reward: float = option(1.0, "a completion with at least this reward is shown as right")
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # rewards make no advantages


LINES = {
    'samples.batch["loss_mask"] = samples.loss_mask': """
        samples.batch["loss_mask"] = samples.loss_mask
        siblings = right_siblings(samples.rewards, args)
        teacher = teacher_prompts(run.tokenizer, samples, siblings, policy, args)
        samples.batch["teacher"] = teacher
        is_taught = torch.tensor([[row is not None] for row in siblings])
        samples.batch["is_taught"] = is_taught.to(accelerator.device)
        metrics.add("sdpo/taught", is_taught)
    """
}


def compute_advantages(rewards, args):
    """Return zeros (R, 1): `add_old_and_ref_logprobs` adds the advantages of the tokens."""
    return torch.zeros(len(rewards), 1, dtype=torch.float64)


def right_siblings(rewards, args):
    """Return for each of R rows the index of the first other right row of its group, or None."""
    rewards = rewards.tolist()
    found = []
    for row in range(len(rewards)):
        first = row - row % args.group_size
        others = [other for other in range(first, first + args.group_size) if other != row]
        right = [other for other in others if rewards[other] >= args.right_reward]
        found.append(right[0] if right else None)
    return found


def teacher_prompts(tokenizer, samples, siblings, policy, args):
    """Return the teacher's prompt of each row: ids and mask (R, P, 2), padded on the left."""
    shown = []
    for row, sibling in enumerate(siblings):
        prompt = samples.prompts[row // args.group_size]
        template = args.prompt_template or "{prompt}"
        if sibling is not None:
            template = SHOWN.format(question=template, solution=samples.completions[sibling].text)
        with_answer = replace(args, prompt_template=template)
        shown.append(dialogue_text(prompt.prompt, prompt.columns, with_answer, tokenizer))
    encoded = encode_prompts(shown, tokenizer)
    ids, mask = left_pad(encoded, policy.pad_token, policy.lm.device)
    return torch.stack([ids, mask.long()], dim=2)


def teacher_batch(micro):
    """Return the micro-batch with the teacher's prompts, equal ones under the same index."""
    teacher = micro | {"prompts": micro["teacher"][:, :, 0]}
    teacher["prompt_mask"] = micro["teacher"][:, :, 1].bool()
    if "prompt_index" in micro:
        _, index = torch.unique(micro["teacher"], dim=0, return_inverse=True)
        teacher["prompt_index"] = index[:, None]
    return teacher


def teacher_advantages(logprobs, teacher_logprobs, is_taught):
    """Return advantages (R, T): log(teacher / student), 0 where the teacher sees no answer."""
    return torch.where(is_taught, teacher_logprobs - logprobs, 0)


add_logprobs = add_old_and_ref_logprobs


@torch.no_grad()
def add_old_and_ref_logprobs(accelerator, model, reference, micro_batches, several_updates):
    """Also add the advantages of the tokens, before the first update of the rollout."""
    if "teacher" not in micro_batches[0]:
        add_logprobs(accelerator, model, reference, micro_batches, several_updates)
        return
    teachers = [teacher_batch(micro) for micro in micro_batches]
    for batches, its_reference in ((micro_batches, reference), (teachers, None)):
        add_logprobs(accelerator, model, its_reference, batches, several_updates=True)
    for micro, teacher in zip(micro_batches, teachers, strict=True):
        micro["advantages"] = teacher_advantages(
            micro["old_logprobs"], teacher["old_logprobs"], micro["is_taught"]
        )
