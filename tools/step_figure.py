"""Draws one step of GRPO: python tools/step_figure.py [-o docs/figures/grpo_step.png]

The step is the first one of `python grpo.py`, taken here with the functions of the script. The picture
shows one of its 32 prompts: the answers, their rewards and advantages, and what the update of all 256
answers did to each token of these.
"""

import argparse
import dataclasses
import math
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
UP = "#1f6fc4"  # blue and red as on the page of tools/look.py
DOWN = "#d73027"
GREY = "#666666"
LINE = "#c8c8c8"
WIDTH = 12.35  # in inches, as all sizes and places
TOP = 1.45  # of the answers
ROW = 0.4  # height of an answer
CELL = 0.2  # width of a token
LEFT = 1.75  # of the answers
REWARD = 8.05
ADVANTAGE = 9.6
UPDATE = 10.75


@dataclasses.dataclass
class Answer:
    """A row of a group, and what the step made of it."""

    tokens: list
    reward: float
    advantage: float
    before: list  # log-probs of the tokens before the update
    after: list

    def changes(self):
        return [new - old for old, new in zip(self.before, self.after, strict=True)]


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
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, betas, weight_decay=args.weight_decay)
    model, optimizer = accelerator.prepare(policy, optimizer)

    drawn = PromptSampler(train_prompts, args.seed).draw(args.prompts_per_step)
    prompts = [train_prompts[i] for i in drawn]
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
        ids = batch["completions"][start + i, :length].tolist()
        answer = Answer(
            tokens=[tokenizer.decode([token]) for token in ids],
            reward=float(rewards[start + i]),
            advantage=float(batch["advantages"][start + i, 0]),
            before=before[i, :length].tolist(),
            after=after[i, :length].tolist(),
        )
        answers.append(answer)
    return prompts[index], answers, metrics.reduce(accelerator)


def colour(change, most):
    """White for no change of a log-prob, blue for one upwards, red for one downwards."""
    strength = min(1.0, abs(change) / most) ** 0.5  # A small change is seen too.
    goal = matplotlib.colors.to_rgb(UP if change > 0 else DOWN)
    return [1 - 0.75 * strength * (1 - part) for part in goal]


def box(axis, x, y, width, height, **look):
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.04", **look)
    axis.add_patch(shape)


def write(axis, x, y, text, size, align="left", **look):
    axis.text(x, y, text, fontsize=size, ha=align, va="center", **look)


def draw_tokens(axis, answer, y, most):
    """The tokens of an answer, coloured by the change of their log-probs; `most` has the full colour."""
    for i, (token, change) in enumerate(zip(answer.tokens, answer.changes(), strict=True)):
        x = LEFT + i * CELL
        shown = {"\n": "↵", "<eos>": "■"}.get(token, token)
        fill = colour(change, most)
        box(axis, x, y - 0.15, CELL - 0.02, 0.3, facecolor=fill, edgecolor="#dddddd", linewidth=0.6)
        write(axis, x + CELL / 2 - 0.01, y, shown, 11.5, "center", family="monospace")


def draw_numbers(axis, answer, y):
    """Reward, advantage as a bar, and the probability of the token that changes most, before and after."""
    ink = UP if answer.advantage > 0 else DOWN
    write(axis, REWARD, y, f"{answer.reward:.0f}", 13, "center", fontweight="bold", color=ink)
    bar = 0.36 * answer.advantage
    box(axis, ADVANTAGE + min(bar, 0), y - 0.11, abs(bar), 0.22, facecolor=ink, edgecolor="none")
    side, align = (-0.08, "right") if bar > 0 else (0.08, "left")
    write(axis, ADVANTAGE + side, y, f"{answer.advantage:+.2f}", 11.5, align, color=ink)
    sizes = [abs(change) for change in answer.changes()]
    place = sizes.index(max(sizes))
    old, new = math.exp(answer.before[place]), math.exp(answer.after[place])
    write(axis, UPDATE + 0.1, y, answer.tokens[place], 12, "center", family="monospace")
    write(axis, UPDATE + 0.35, y, f"{old:.2f} → {new:.2f}", 11.5, color=ink)


def draw_heads(axis, answers):
    mean = sum(answer.reward for answer in answers) / len(answers)
    key = "↵ new line, ■ end; coloured by what 5 does to a token"
    heads = [
        (0.2, "1  Ask", "a prompt"),
        (LEFT, f"2  Sample {len(answers)} answers", key),
        (REWARD - 0.3, "3  Reward", f"mean {mean:.3g}"),
        (ADVANTAGE - 0.55, "4  Compare", "(reward − mean) / std"),
        (UPDATE, "5  Update", "a token's probability"),
    ]
    write(axis, 0.2, 0.3, "One step of GRPO", 18, fontweight="bold")
    for x, title, words in heads:
        write(axis, x, 0.78, title, 13.5, fontweight="bold")
        write(axis, x, 1.05, words, 10, color=GREY)


def draw(prompt, answers):
    """The figure. Its unit is an inch, from the upper left corner."""
    bottom = TOP + ROW * len(answers)
    height = bottom + 0.65
    figure = plt.figure(figsize=(WIDTH, height))
    axis = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axis.axis("off")
    draw_heads(axis, answers)
    middle = (TOP + bottom - ROW) / 2
    box(axis, 0.2, middle - 0.25, 1.1, 0.5, facecolor="#eef3fb", edgecolor="#7da0d0")
    write(axis, 0.75, middle, prompt.prompt, 13, "center", family="monospace")
    most = max(abs(change) for answer in answers for change in answer.changes())
    for i, answer in enumerate(answers):
        y = TOP + ROW * i
        axis.plot([1.31, LEFT - 0.06], [middle, y], color=LINE, linewidth=1)
        draw_tokens(axis, answer, y, most)
        draw_numbers(axis, answer, y)
    axis.plot([ADVANTAGE, ADVANTAGE], [TOP - 0.2, bottom - 0.24], color=LINE, linewidth=1)
    lesson = "Answers above the mean of their group become more likely, answers below it less likely."
    source = (
        "Real numbers: the first step of grpo.py, one of its 32 prompts. All 256 answers make one update, "
        "so some tokens of wrong answers rise too."
    )
    write(axis, 0.2, height - 0.55, lesson, 13)
    write(axis, 0.2, height - 0.22, source, 10, color=GREY)
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
