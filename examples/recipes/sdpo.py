"""SDPO: the policy that sees a right answer of its group teaches itself (arXiv 2601.20802).

The teacher of a completion is the policy of the rollout with one addition to its prompt: the first
right completion among the others of the group. The advantage of a token is

    A_t = log pi(o_t | question, right answer, o_<t) - log pi(o_t | question, o_<t)

at the student's temperature, detached. At each position its gradient is an unbiased estimate of
that of -KL(student || teacher). Rewards only decide what is shown. A row without another right
completion in its group teaches nothing. With --gold_column answer the teacher sees that column of
the data instead, as in OPSD (arXiv 2601.18734): then every row with a reward is taught. The loss is
GRPO's with these advantages, and there is no KL.

The paper's objective is the full KL of each position instead of its sample. The authors' code takes
by default a Jensen-Shannon divergence over the 100 most likely tokens, and an average of past
weights as the teacher. Feedback of an environment, such as an error message, is left out.
"""

from dataclasses import replace

from common.load import dialogue_text, encode_prompt

SHOWN = """{question}
Correct solution:

{solution}

Correctly solve the original question."""


class Args:
    right_reward: float = option(
        1.0, "a completion with at least this reward, penalties included, is right"
    )
    gold_column: str | None = option(None, "column to show [a right completion of the group]")
    kl_coef: float = option(0.0, "beta of the KL to the reference (0: it is not loaded)", ge=0)
    del normalize_std, std_eps  # rewards make no advantages


LINES = {
    'batch["advantages"] = advantages.float().to(accelerator.device)': """
        batch["advantages"] = advantages.float().to(accelerator.device)
        solutions = shown_solutions(samples, args)
        is_taught = torch.tensor([[solution is not None] for solution in solutions])
        batch["is_taught"] = is_taught.to(accelerator.device)
        teacher = teacher_prompts(tokenizer, samples, solutions, args)
        batch["teacher"] = teacher.to(accelerator.device)
        metrics.add("sdpo/taught", is_taught)
    """,
    "several_updates = args.num_epochs * args.num_minibatches > 1": """
        several_updates = True  # the advantages need the old log-probs, even of a single update
    """,
    'micro["old_logprobs"], _ = completion_logprobs(model, micro, args)': """
        micro["old_logprobs"], _ = completion_logprobs(model, micro, args)
        if "teacher" in micro:
            micro["advantages"] = teacher_advantages(model, micro, args)
    """,
}


def compute_advantages(rewards, args):
    """Return zeros (R, 1): `teacher_advantages` replaces them before the first update."""
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


def shown_solutions(samples, args):
    """Return for each of R rows the text that its teacher sees, or None."""
    if not args.gold_column:
        rewards = samples.rewards.masked_fill(~samples.is_scored, -math.inf)
        siblings = right_siblings(rewards, args)
        return [None if i is None else samples.completions[i].text for i in siblings]
    solutions = []
    for prompt in samples.prompts:
        if args.gold_column not in prompt.columns:
            raise Exit(f"--gold_column {args.gold_column}: the data have no such column")
        solutions += [str(prompt.columns[args.gold_column])] * args.group_size
    return solutions


def teacher_prompts(tokenizer, samples, solutions, args):
    """Return the teacher's prompt of each row: ids and mask (R, P, 2), padded on the left."""
    rows = []
    for row, solution in enumerate(solutions):
        prompt = samples.prompts[row // args.group_size]
        template = args.prompt_template or "{prompt}"
        if solution is not None:
            template = SHOWN.format(question=template, solution=solution)
        with_answer = replace(args, prompt_template=template)
        text = dialogue_text(prompt.prompt, prompt.columns, with_answer, tokenizer)
        ids = torch.tensor(encode_prompt(text, tokenizer))
        rows.append(torch.stack([ids, torch.ones_like(ids)], dim=1))
    return pad_sequence(rows, True, padding_side="left")


def teacher_advantages(model, micro, args):
    """Return advantages (R, T): log(teacher / student), 0 where the teacher sees no answer."""
    ids, mask = micro["teacher"].unbind(dim=2)
    teacher = micro | {"prompts": ids, "prompt_mask": mask.bool()}
    logprobs, _ = completion_logprobs(model, teacher, args)
    return torch.where(micro["is_taught"], logprobs - micro["old_logprobs"], 0)
