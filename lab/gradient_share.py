"""Which questions the gradient of GRPO comes from, before any training, with and without the standard deviation.

python lab/gradient_share.py --seed 0 --output_dir runs/share
python lab/gradient_share.py --seed 0 --output_dir runs/share-no_std --no_normalize_std

The model of `embedded-hard` answers each training question G times, and grpo.py's own functions give the gradient of
each group at ratio 1. Options are those of grpo.py; one seed gives the same answers with and without the deviation.

The *weight* of a group is the sum of |loss of a token| x |weight of the token|, which is the mean of |A_i| over its
rows. Its *reward deviation* is the same without the standard deviation: the mean of |R_i - mean(R)|. The claim is
about weight per unit of reward deviation: dividing by the deviation multiplies it by 1/std, and std is smallest where
one answer of G differs. The rule, written before the first run: the claim holds if the easy and the hard questions each
get more weight per unit of reward deviation than the medium ones (whose value is called 1). Without the standard
deviation all classes have exactly 1; with it the number depends on how the questions of a class scatter. For a question
of known probability the sign is certain (exact_P below); only medium questions that scatter more widely than the others
could refute it. So the size is what there is to learn, and whether it shows in the accuracy of the classes.

metrics.jsonl gets one row, all names below `share/`; shares sum to 1 over the classes, and over the numbers of right
answers 1 to G - 1:

    weight_CLASS, weight_K_right      of the sum of the weights
    norm2_CLASS, norm2_K_right        of the sum of the squared norms of the gradients of the groups
    questions_CLASS, questions_K_right    of the questions
    per_reward_CLASS                  weight per unit of reward deviation, that of the medium questions being 1
    exact_P                           the same for a question that is solved with probability P, that of 0.5 being 1: an
                                      exact sum over the binomial distribution of the number of right answers
"""

import dataclasses
import json
import math
import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import grpo
from common.batches import completion_texts
from common.harness.command_line import parse_args
from common.harness.data import load_prompts
from common.harness.loading import load_policy, load_tokenizer
from common.rewards import load_rewards

TASK = "--model_name_or_path embedded-hard --dataset embedded-hard --max_new_tokens 128".split()
CLASSES = ("easy", "medium", "hard")


def mean_size(rewards, args):
    """The mean of |A_i| (P,) over the rows of each group of `rewards` (R,): the weight of the group."""
    return grpo.compute_advantages(rewards, args).abs().view(-1, args.group_size).mean(dim=1)


def without_std(args):
    return dataclasses.replace(args, normalize_std=False)


def expected_size(p, args):
    """The expectation of `mean_size` of a question that is solved with probability `p`."""
    G = args.group_size
    rewards = torch.arange(G + 1)[:, None] > torch.arange(G)  # (G + 1, G): group k has k right answers
    sizes = mean_size(rewards.double().flatten(), args)
    return sum(math.comb(G, k) * p**k * (1 - p) ** (G - k) * size for k, size in enumerate(sizes.tolist()))


def per_reward(p, args):
    """Weight per unit of reward deviation of a question of success probability `p`, that of 0.5 being 1."""
    ratio, ratio_of_half = (expected_size(x, args) / expected_size(x, without_std(args)) for x in (p, 0.5))
    return ratio / ratio_of_half


def group_gradients(policy, batch, args):
    """The weight and the squared norm of the gradient of each group, (P,) each, in float64."""
    G, found = args.group_size, []
    for start in range(0, len(batch["completions"]), G):
        part = {name: x[start : start + G] for name, x in batch.items()}
        mask = part["completion_mask"]
        logprobs, _ = policy(part, with_entropy=False)
        losses, _ = grpo.policy_loss(logprobs, logprobs.detach(), part["advantages"], mask, args)
        weighted = losses * grpo.token_weights(mask, {"rows": G}, args)
        gradients = torch.autograd.grad(weighted.sum(), list(policy.parameters()))
        norm2 = sum(gradient.double().square().sum() for gradient in gradients)
        found.append(torch.stack([weighted.detach().abs().sum(), norm2]))
    return torch.stack(found, dim=1)


def sample(policy, tokenizer, prompts, args):
    """The rewards (R,) of G answers to each prompt, and the weight and the squared gradient norm of each group."""
    functions, rewards, found = load_rewards(args), [], []
    for start in range(0, len(prompts), args.prompts_per_step):
        part = prompts[start : start + args.prompts_per_step]
        batch = grpo.rollout(policy, part, args.group_size, args.temperature, 1.0, (args.seed, 0, start, 0), args)
        texts = completion_texts(tokenizer, batch)
        scores, _, _ = grpo.compute_rewards(functions, part, texts, batch["truncated"])
        batch["advantages"] = grpo.compute_advantages(scores, args).float()
        rewards.append(scores)
        found.append(group_gradients(policy, batch, args))
    return torch.cat(rewards), *torch.cat(found, dim=1)


def shares(rewards, weight, norm2, classes, args):
    """The row of metrics.jsonl from rewards (R,), weights (P,), squared norms (P,), and the class of each question."""
    right = rewards.view(-1, args.group_size).sum(dim=1)
    deviation = mean_size(rewards, without_std(args))
    parts = {name: torch.tensor([x == name for x in classes]) for name in CLASSES}
    counts = {f"{k}_right": right == k for k in range(args.group_size + 1)}
    row = {}
    for name, part in (parts | counts).items():
        row[f"weight_{name}"] = weight[part].sum() / weight.sum()
        row[f"norm2_{name}"] = norm2[part].sum() / norm2.sum()
        row[f"questions_{name}"] = part.double().mean()
    ratios = {name: weight[part].sum() / deviation[part].sum() for name, part in parts.items()}
    row |= {f"per_reward_{name}": ratio / ratios["medium"] for name, ratio in ratios.items()}
    row |= {f"exact_{p}": per_reward(p, args) for p in (0.05, 0.1, 0.25, 0.75, 0.9, 0.95)}
    return {f"share/{name}": float(value) for name, value in row.items()}


def main(argv=None):
    args = parse_args(grpo.Args, [*TASK, *(sys.argv[1:] if argv is None else argv)])
    tokenizer = load_tokenizer(args)
    prompts, _, _ = load_prompts(args, tokenizer, args.needs_answers)
    policy = load_policy(args, tokenizer)
    classes = [prompt.columns["difficulty"] for prompt in prompts]
    row = shares(*sample(policy, tokenizer, prompts, args), classes, args)
    folder = pathlib.Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": 0}, {"step": 1} | row]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n"
    )
    for name, value in row.items():
        print(f"{name:30} {value:.4f}")


if __name__ == "__main__":
    main()
