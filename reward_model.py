"""A Bradley-Terry reward model (Christiano et al., arXiv 1706.03741; InstructGPT, arXiv 2203.02155, Eq. 1).

From pairs of a chosen completion y_w and a rejected one y_l of a prompt x it learns a score r(x, y), read by a scalar
head at the last token, which ends y, such that the chance that y_w is preferred is sigmoid(r(x, y_w) - r(x, y_l)):

    L = -log sigmoid(r_w - r_l) + c (r_w + r_l)^2                                          mean over the pairs of a step

The first term leaves a constant for each prompt free; the second (center_coef c; arXiv 2312.09244) holds the scores
around 0. The head starts at zero: all scores are equal and the loss is ln 2. What is saved is a sequence-classification
model with one label, which ppo.py and any other code load with AutoModelForSequenceClassification.

Deviations from the papers: pairs instead of rankings of several completions; no mixing of pretraining losses; dropout
is off. Sizes and rates are presets for the small model.

Left out: process rewards, which need labels for single steps; generative judges, which are prompted and not trained
here; ensembles, which are several runs with other seeds.

    accelerate launch reward_model.py                      the embedded model on shipped pairs; nothing is downloaded
    accelerate launch reward_model.py --dataset runs/X/pairs-round-1.jsonl        on the pairs that dpo.py made
    accelerate launch reward_model.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset trl-lib/ultrafeedback_binarized --learning_rate 1e-5 --num_epochs 1 --micro_batch_size 8

docs/reward_model.md has usage, results, and the details of the implementation one by one.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from common.errors import InputError, clean_exit, count, refuse
from common.harness.args import RunArgs, learning_rate, option
from common.harness.command_line import parse_args
from common.harness.data import DataDigest, PromptSampler
from common.harness.distributed import clip_grad_norm, first_device, gradient_sync, launch
from common.harness.loading import check_positions, enable_checkpointing, load_tokenizer
from common.harness.metrics import Metrics
from common.harness.pairs import add_pair_metrics, evaluate_pairs, load_pairs, pair_batch, pair_tokens
from common.harness.run import Run
from common.harness.scorers import load_classifier
from common.masked import positions


@dataclass
class Args(RunArgs):  # the options that no algorithm changes are declared there, once for all scripts
    step_size, num_minibatches = "pairs_per_step", 1  # a step is one update on that many pairs

    model_name_or_path: str = option(
        "embedded", "hub id or folder of a causal LM or a sequence classifier; `embedded` is common/tiny", "model"
    )
    dataset: str = option(
        "embedded",
        "hub id, folder, or .jsonl .json .csv .parquet files of pairs; `embedded` is common/tiny/pairs",
        "data",
        several=True,
    )
    dataset_config: str | None = option(None, "configuration of a hub dataset", "data")
    seed: int = option(0, "seed of the data order and of the held-out pairs", "run", ge=0, lt=2**32)
    max_steps: int = option(-1, "maximum optimizer steps (-1: no limit); 0 only evaluates", "run", ge=-1)

    max_length: int = option(
        1024, "maximum tokens of prompt plus completion; the prompt's start is cut first", "data", ge=3
    )

    pairs_per_step: int = option(32, "pairs per optimizer step", "batch", gt=0)
    num_epochs: int = option(3, "passes over the pairs", "batch", gt=0)
    micro_batch_size: int = option(
        64, "completions in one forward pass of a process; does not change the gradient", "batch", gt=0
    )

    learning_rate: float = option(1e-3, "peak learning rate (InstructGPT 6B: 9e-6)", "optimizer", gt=0)
    lr_scheduler: Literal["constant", "linear", "cosine"] = option(
        "constant", "schedule of the learning rate over the run, multiplied by the warm-up", "optimizer"
    )

    center_coef: float = option(
        0.0, "weight of (r_w + r_l)^2, which holds the scores around 0 (TRL suggests 0.01)", ge=0
    )

    eval_every: int = option(
        25, "steps between evaluations, besides one before and one after training (0: only these)", "evaluation", ge=0
    )

    def check(self):
        super().check()
        if self.micro_batch_size < 2:
            refuse(self, "micro_batch_size", "a pair is two completions in one forward")

    def describe_step(self, processes):
        """The batch sizes of a step as one line."""
        pairs = self.pairs_per_step
        passes = count(self.num_epochs, "pass")
        return f"{count(pairs, 'pair')}, {pairs // processes} on each process; {passes} over the pairs"


class RewardModel(nn.Module):
    """A sequence classifier of one label whose forward gives the scores of completions; what Accelerate prepares."""

    def __init__(self, lm, tokenizer):
        super().__init__()
        self.lm = lm
        self.pad_token = tokenizer.pad_token_id
        self._no_split_modules = lm._no_split_modules  # FSDP2 wraps by these

    def forward(self, batch):
        """Float32 scores (R,) of prompt and completion, read at the completion's last token.

        `batch` holds prompts (R, P) left-padded, prompt_mask (R, P), completions (R, T), completion_mask (R, T).
        """
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (R, P + T)
        ids = torch.cat([batch["prompts"], batch["completions"]], dim=1)
        ids = torch.where(mask, ids, self.pad_token)  # the model reads the score at the last token that is not this one
        scores = self.lm(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False
        ).logits
        return scores[:, 0].float()


def load_reward_model(args, tokenizer, accelerator=None):
    """The model of `--model_name_or_path` as a `RewardModel`, in training mode, without dropout.

    A causal language model gets a scalar head of zeros, so that all scores start equal. A tokenizer that pads with what
    ends a completion gets a pad token of its own (`load_classifier`).
    """
    device = first_device(accelerator)
    lm = load_classifier(args, "model_name_or_path", tokenizer, device, new_head=True)
    check_positions(args, "model_name_or_path", lm)
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    return RewardModel(lm, tokenizer).train()


def reward_loss(chosen_scores, rejected_scores, args):
    """The loss of each pair (B,) from the scores (B,) of its completions."""
    losses = -logsigmoid(chosen_scores - rejected_scores)  # Bradley-Terry
    return losses + args.center_coef * (chosen_scores + rejected_scores).square()


def pair_losses(model, batch, args):
    """Losses (B,) and diagnostics {name: (B,)} of the B pairs of a forward."""
    chosen, rejected = model(batch).chunk(2)
    losses = reward_loss(chosen, rejected, args)
    margins = (chosen - rejected).detach()
    stats = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": margins,
        "rewards/accuracy": (margins.sign() + 1) / 2,  # a tie counts half
    }
    return losses, stats


def update_pairs(accelerator, model, optimizer, pairs, step, args, metrics):
    """One optimizer step on the mean loss of pairs_per_step pairs, of which `pairs` are this process's."""
    pairs = sorted(pairs, key=pair_tokens)  # the rows of one forward then need little padding
    size = args.micro_batch_size // 2
    step_loss = 0.0
    for start in range(0, len(pairs), size):
        batch = pair_batch(pairs[start : start + size], accelerator.device)
        with gradient_sync(accelerator, model, last=start + size >= len(pairs)):
            losses, stats = pair_losses(model, batch, args)
            loss = losses.sum() / args.pairs_per_step
            # Accelerate averages gradients over processes, but the weights count all processes: make it a sum.
            accelerator.backward(loss * accelerator.num_processes)
        step_loss = step_loss + loss.detach()
        for name, values in stats.items():
            metrics.add(name, values)
    norm = clip_grad_norm(accelerator, model.parameters(), args.max_grad_norm)
    if not torch.isfinite(norm + step_loss):
        raise InputError(f"step {step}: loss {float(step_loss)}, gradient norm {float(norm)}: not finite")
    optimizer.step()
    optimizer.zero_grad()
    metrics.add("optim/loss", step_loss * accelerator.num_processes)
    metrics.add("optim/grad_norm", norm)


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    accelerator = launch(args)
    run = Run(accelerator, args, "reward_model")
    tokenizer = load_tokenizer(args)
    train_pairs, eval_pairs, data_summary = load_pairs(args, tokenizer)
    steps = len(train_pairs) * args.num_epochs // args.pairs_per_step
    if steps == 0 and args.max_steps != 0:
        visits = f"{count(len(train_pairs), 'pair')} x {count(args.num_epochs, 'pass')}"
        sizes = f"{visits} do not fill a step of {args.pairs_per_step}"
        raise InputError(f"{sizes} pairs: lower --pairs_per_step or raise --num_epochs")
    steps = steps if args.max_steps < 0 else min(steps, args.max_steps)
    reward_model = load_reward_model(args, tokenizer, accelerator)
    betas = (args.adam_beta1, args.adam_beta2)
    fused = True if accelerator.device.type == "cuda" else None  # the fused kernel copies no second moments
    optimizer = torch.optim.AdamW(
        reward_model.parameters(), args.learning_rate, betas, weight_decay=args.weight_decay, fused=fused
    )
    model, optimizer = accelerator.prepare(reward_model, optimizer)
    sampler = PromptSampler(train_pairs, args.seed)  # what does not fill a step is left for the next pass
    run.keep(data=DataDigest(train_pairs), sampler=sampler)  # parts of every checkpoint
    run.start(data_summary, f"steps: {steps}")
    run.save_step_model(model, reward_model, tokenizer)  # if a crash has prevented that of the step that is resumed
    rank, processes = accelerator.process_index, accelerator.num_processes

    evaluation = partial(evaluate_pairs, accelerator, model, eval_pairs, args, pair_losses)
    run.first_evaluation(evaluation)
    while run.step < steps and not run.interrupted:
        step = run.step + 1
        metrics = Metrics()
        start = time.perf_counter()
        pairs = [train_pairs[i] for i in sampler.draw(args.pairs_per_step)[rank::processes]]
        lr = learning_rate(run.step, args, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        update_pairs(accelerator, model, optimizer, pairs, step, args, metrics)
        run.step = step
        add_pair_metrics(metrics, pairs, start, accelerator.device)
        run.end_step(metrics.reduce(accelerator) | {"optim/lr": lr}, evaluation, last=step == steps)
        run.save_step_model(model, reward_model, tokenizer)

    run.finish(model, reward_model, tokenizer)
    # gloo can hang if the prepared model outlives Accelerate's end.
    del reward_model, model, optimizer, evaluation
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
