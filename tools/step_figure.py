"""Draws one step of GRPO: python tools/step_figure.py [-o docs/figures/grpo_step.png]

The step is the first one of `python grpo.py`, taken here with the functions of the script. The picture
shows one of its 32 prompts: the answers, their rewards and advantages, and what the update of all 256
answers did to each token of these.
"""

import argparse
import dataclasses
import sys

import matplotlib
import torch
from accelerate import Accelerator

from tree import ROOT

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

sys.path.append(str(ROOT))  # where the scripts are

import grpo
from common.batches import completion_texts, split_rollout
from common.harness.data import PromptSampler, load_prompts
from common.harness.loading import load_policy, load_reference, load_tokenizer
from common.harness.metrics import Metrics
from common.rewards import load_rewards

PROMPT = 8  # A short one, with right and wrong answers.
UP, DOWN, GREY, LINE = "#1a9850", "#d73027", "#666666", "#c8c8c8"
CELL, ROW, LEFT, TOP = 0.2, 0.4, 1.75, 1.45  # inches
REWARD, ADVANTAGE, UPDATE, WIDTH = 8.05, 9.6, 10.75, 12.35


@dataclasses.dataclass
class Answer:
    """A row of a group, and what the step made of it."""

    tokens: list
    reward: float
    advantage: float
    before: list  # log-probs of the tokens before the update
    after: list


def group_logprobs(model, batch, start, args):
    """The log-probs (G, T) of the rows of one group, from the row `start` on."""
    rows = slice(start, start + args.group_size)
    columns = {name: column if name == "packed" else column[rows] for name, column in batch.items()}
    (((micro,), _),) = split_rollout(Accelerator(), columns, args)
    with torch.no_grad():
        return model(micro, with_entropy=False)[0]


def first_step(args, index):
    """The first step of grpo.py: the prompt number `index`, its answers, and the metrics of the update."""
    accelerator = Accelerator(cpu=True)
    tokenizer, reward_functions = load_tokenizer(args), load_rewards(args)
    train_prompts, *_ = load_prompts(args, tokenizer, args.needs_answers)
    policy = load_policy(args, tokenizer, accelerator)
    reference = load_reference(policy, args, accelerator)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(policy, optimizer)

    prompts = [train_prompts[i] for i in PromptSampler(train_prompts, args.seed).draw(args.prompts_per_step)]
    seed = (args.seed, 0, 1, 0)  # process 0, step 1, round 0
    batch = grpo.rollout(policy, prompts, args.group_size, args.temperature, 1.0, seed, args)
    texts = completion_texts(tokenizer, batch)
    rewards, _, _ = grpo.compute_rewards(reward_functions, prompts, texts, batch["truncated"])
    batch["rewards"] = rewards
    batch["advantages"] = grpo.compute_advantages(rewards, args).float()
    batch["loss_mask"] = batch["completion_mask"]

    start = index * args.group_size
    metrics = Metrics()
    before = group_logprobs(model, batch, start, args)
    grpo.update(accelerator, model, reference, optimizer, batch, 1, args, metrics)
    after = group_logprobs(model, batch, start, args)
    metrics.add_rewards(rewards, args.group_size)
    answers = []
    for i in range(args.group_size):
        length = int(batch["completion_mask"][start + i].sum())
        tokens = [tokenizer.decode([token]) for token in batch["completions"][start + i, :length].tolist()]
        numbers = float(rewards[start + i]), float(batch["advantages"][start + i, 0])
        answers.append(Answer(tokens, *numbers, before[i, :length].tolist(), after[i, :length].tolist()))
    return prompts[index], answers, metrics.reduce(accelerator)


def colour(change, most):
    """White for no change of a log-prob, green for one upwards, red for one downwards."""
    strength = min(1.0, abs(change) / most) ** 0.5  # A small change is seen too.
    goal = matplotlib.colors.to_rgb(UP if change > 0 else DOWN)
    return [1 - 0.75 * strength * (1 - part) for part in goal]


def box(axis, x, y, width, height, **look):
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.04", **look)
    axis.add_patch(shape)


def draw_answer(axis, answer, y, most):
    """One row: tokens, reward, advantage, and the probability of the token that changed most."""
    changes = [new - old for old, new in zip(answer.before, answer.after, strict=True)]
    for i, (token, change) in enumerate(zip(answer.tokens, changes, strict=True)):
        shown = {"\n": "↵", "<eos>": "■"}.get(token, token)
        place = LEFT + i * CELL
        box(axis, place, y - 0.15, CELL - 0.02, 0.3, facecolor=colour(change, most), edgecolor="#dddddd", linewidth=0.6)
        axis.text(place + CELL / 2 - 0.01, y, shown, family="monospace", fontsize=11.5, ha="center", va="center")
    good = UP if answer.advantage > 0 else DOWN
    axis.text(REWARD, y, f"{answer.reward:.0f}", fontsize=13, fontweight="bold", color=good, ha="center", va="center")
    bar = 0.36 * answer.advantage
    box(axis, ADVANTAGE + min(bar, 0), y - 0.11, abs(bar), 0.22, facecolor=good, edgecolor="none")
    side = -0.08 if bar > 0 else 0.08
    align = "right" if bar > 0 else "left"
    axis.text(ADVANTAGE + side, y, f"{answer.advantage:+.2f}", fontsize=11.5, color=good, ha=align, va="center")
    top = max(range(len(changes)), key=lambda i: abs(changes[i]))
    old, new = (torch.tensor(logprobs[top]).exp().item() for logprobs in (answer.before, answer.after))
    axis.text(UPDATE + 0.1, y, answer.tokens[top], family="monospace", fontsize=12, ha="center", va="center")
    axis.text(UPDATE + 0.35, y, f"{old:.2f} → {new:.2f}", fontsize=11.5, color=good, va="center")


def draw(prompt, answers):
    height = TOP + ROW * len(answers) + 0.65
    figure = plt.figure(figsize=(WIDTH, height))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axis.axis("off")
    rewards = torch.tensor([answer.reward for answer in answers])
    heads = [
        (0.2, "1  Ask", "a prompt"),
        (LEFT, f"2  Sample {len(answers)} answers", "↵ new line, ■ end; coloured by what 5 does to a token"),
        (REWARD - 0.3, "3  Reward", f"mean {rewards.mean():.3g}"),
        (ADVANTAGE - 0.55, "4  Compare", "(reward − mean) / std"),
        (UPDATE, "5  Update", "a token's probability"),
    ]
    axis.text(0.2, 0.3, "One step of GRPO", fontsize=18, fontweight="bold", va="center")
    for x, title, words in heads:
        axis.text(x, 0.78, title, fontsize=13.5, fontweight="bold", va="center")
        axis.text(x, 1.05, words, fontsize=10, color=GREY, va="center")
    middle = TOP + ROW * (len(answers) - 1) / 2
    box(axis, 0.2, middle - 0.25, 1.1, 0.5, facecolor="#eef3fb", edgecolor="#7da0d0")
    axis.text(0.75, middle, prompt.prompt, family="monospace", fontsize=13, ha="center", va="center")
    most = max(abs(new - old) for answer in answers for old, new in zip(answer.before, answer.after, strict=True))
    for i, answer in enumerate(answers):
        y = TOP + ROW * i
        axis.plot([1.31, LEFT - 0.06], [middle, y], color=LINE, linewidth=1)
        draw_answer(axis, answer, y, most)
    axis.plot([ADVANTAGE] * 2, [TOP - 0.2, TOP + ROW * len(answers) - 0.24], color=LINE, linewidth=1)
    lesson = "Answers above the mean of their group become more likely, answers below it less likely."
    axis.text(0.2, height - 0.55, lesson, fontsize=13, va="center")
    source = "Real numbers: the first step of grpo.py, one of its 32 prompts. All 256 answers make one update."
    axis.text(0.2, height - 0.22, source, fontsize=10, color=GREY, va="center")
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default=ROOT / "docs" / "figures" / "grpo_step.png", metavar="FILE")
    output = parser.parse_args().output
    prompt, answers, _ = first_step(grpo.Args(), PROMPT)
    draw(prompt, answers).savefig(output, dpi=150, metadata={"Software": None})
    print(f"{output}: {prompt.prompt}")


if __name__ == "__main__":
    main()
