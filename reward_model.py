"""A Bradley-Terry reward model (Christiano et al., arXiv 1706.03741; InstructGPT, arXiv 2203.02155, Eq. 1).

From pairs of a chosen completion y_w and a rejected one y_l of a prompt x it learns a score r(x, y), read by a scalar
head at the last token, which ends y, such that the chance that y_w is preferred is sigmoid(r(x, y_w) - r(x, y_l)):

    L = -log sigmoid(r_w - r_l) + c (r_w + r_l)^2                                          mean over the pairs of a step

The first term leaves a constant for each prompt free; the second (center_coef c; arXiv 2312.09244) holds the scores
around 0. The head starts at zero: all scores are equal and the loss is ln 2. What is saved is a sequence-classification
model with one label, which ppo.py and any other code load with AutoModelForSequenceClassification.

Deviations from the papers: pairs instead of rankings of several completions; no mixing of pretraining losses; dropout
is off. Sizes and rates are presets for the small model.
Left out: process rewards, generative judges, ensembles.

    accelerate launch reward_model.py                      the embedded model on shipped pairs; nothing is downloaded
    accelerate launch reward_model.py --dataset runs/X/pairs-round-1.jsonl        on the pairs that dpo.py made
    accelerate launch reward_model.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset trl-lib/ultrafeedback_binarized --learning_rate 1e-5 --num_epochs 1 --micro_batch_size 8

docs/reward_model.md has usage, results, and the details of the implementation one by one.
"""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence

from common.batches import left_pad
from common.errors import InputError, clean_exit, refuse
from common.harness.args import RunArgs, learning_rate, option
from common.harness.command_line import parse_args
from common.harness.data import PromptSampler
from common.harness.distributed import clip_grad_norm, first_device, gradient_sync, launch
from common.harness.loading import check_positions, choose_trained, enable_checkpointing, load_model, load_tokenizer
from common.harness.metrics import Metrics, peak_memory_gb
from common.harness.pairs import load_pairs, pair_tokens
from common.harness.probes import influence
from common.harness.prompts import end_token
from common.harness.run import Run
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
        return f"{pairs} pairs, {pairs // processes} on each process; {self.num_epochs} passes over the pairs"


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


def load_classifier(args, option, tokenizer, device, new_head=False):
    """The classifier that `option` names, of one output, read at the last token that is not padding; with `new_head` a
    language model gets a head of zeros. A tokenizer that pads with what ends a completion gets another pad token."""
    lm = load_model(args, option, tokenizer, device, "SequenceClassification", new_head)
    if tokenizer.pad_token_id in (tokenizer.eos_token_id, end_token(tokenizer)):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > lm.get_input_embeddings().weight.shape[0]:
            lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if lm.config.is_encoder_decoder or not reads_last_token(lm):
        refuse(args, option, f"a {type(lm).__name__} does not read its score at the last token: take a causal model")
    for name in lm.new_head:
        nn.init.zeros_(lm.get_parameter(name))
    choose_trained(args, option, lm)
    return lm


def reads_last_token(lm):
    """Whether a classifier's score depends on the last token of a row, and not on the padding after it."""
    last, after, end = influence(lm, [lm.config.get_text_config().pad_token_id] * 2)[3:]  # of two pads
    return last > 0 and after == end == 0


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
    size, step_loss = args.micro_batch_size // 2, 0.0
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


def pair_batch(pairs, device):
    """B pairs as 2B rows for `RewardModel.forward`, first the chosen completions, then the rejected ones."""
    prompts, prompt_mask = left_pad([pair.prompt for pair in pairs] * 2, 0, device)  # (2B, P)
    rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)  # (2B, T)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]  # (2B, T)
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "completions": ids.to(device, non_blocking=True),
        "completion_mask": mask.to(device, non_blocking=True),
    }


@torch.no_grad()
def evaluate_pairs(accelerator, model, pairs, args):
    """Loss, accuracy and margin on all evaluation pairs, spread over the processes."""
    metrics = Metrics()
    for _, real, batch in spread_pairs(accelerator, pairs, args):
        losses, stats = pair_losses(model, batch, args)
        metrics.add("eval/loss", losses, real)
        metrics.add("eval/accuracy", stats["rewards/accuracy"], real)
        metrics.add("eval/margin", stats["rewards/margin"], real)
    return metrics.reduce(accelerator)


def spread_pairs(accelerator, pairs, args):
    """This process's pairs by length, a forward at a time: (indices, real, batch); `real` (B,) is false for fillers."""
    rank, processes = accelerator.process_index, accelerator.num_processes
    order = sorted(range(len(pairs)), key=lambda i: pair_tokens(pairs[i]))
    places = range(rank, -(-len(pairs) // processes) * processes, processes)
    size = args.micro_batch_size // 2
    for part in (places[start : start + size] for start in range(0, len(places), size)):
        indices = [order[place % len(pairs)] for place in part]
        real = torch.tensor([place < len(pairs) for place in part], device=accelerator.device)
        yield indices, real, pair_batch([pairs[i] for i in indices], accelerator.device)


def pair_metrics(metrics, pairs, start, device):
    """Lengths of this process's pairs of a step, seconds and tokens (of the prompt with each completion) per second of
    its update, and peak memory."""
    metrics.add("completion/length_chosen", [len(pair.chosen) for pair in pairs])
    metrics.add("completion/length_rejected", [len(pair.rejected) for pair in pairs])
    tokens = sum(2 * len(pair.prompt) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
    metrics.add_speed("update", time.perf_counter() - start, tokens)
    metrics.add_max("memory/peak_gb", peak_memory_gb(device))


def main(argv=None):
    # Set up: what can be checked without the model is checked before it is loaded.
    args = parse_args(Args, argv)
    accelerator = launch(args)
    run = Run(accelerator, args, "reward_model")
    tokenizer = load_tokenizer(args)
    train_pairs, eval_pairs, data_summary = load_pairs(args, tokenizer)
    steps = len(train_pairs) * args.num_epochs // args.pairs_per_step
    if steps == 0 and args.max_steps != 0:
        sizes = f"{len(train_pairs)} pairs x {args.num_epochs} passes do not fill a step of {args.pairs_per_step}"
        raise InputError(f"{sizes} pairs: lower --pairs_per_step or raise --num_epochs")
    steps = steps if args.max_steps < 0 else min(steps, args.max_steps)
    reward_model = load_reward_model(args, tokenizer, accelerator)
    betas = (args.adam_beta1, args.adam_beta2)
    fused = accelerator.device.type == "cuda" or None  # there it makes no copy of the second moments
    optimizer = torch.optim.AdamW(
        reward_model.parameters(), args.learning_rate, betas, weight_decay=args.weight_decay, fused=fused
    )
    model, optimizer = accelerator.prepare(reward_model, optimizer)
    sampler = PromptSampler(train_pairs, args.seed)  # what does not fill a step is left for the next pass
    run.keep(sampler=sampler)  # a part of every checkpoint
    run.start(data_summary, f"steps: {steps}")
    run.save_step_model(model, reward_model, tokenizer)  # of the resumed step, where a crash came before it
    rank, processes = accelerator.process_index, accelerator.num_processes

    if run.first_eval is None:
        result = evaluate_pairs(accelerator, model, eval_pairs, args)
        run.log_evaluation(result)
        run.log(result)
    while run.step < steps and not run.interrupted:
        step, metrics, start = run.step + 1, Metrics(), time.perf_counter()
        pairs = [train_pairs[i] for i in sampler.draw(args.pairs_per_step)[rank::processes]]
        lr = learning_rate(run.step, args, steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        update_pairs(accelerator, model, optimizer, pairs, step, args, metrics)
        run.step = step
        pair_metrics(metrics, pairs, start, accelerator.device)
        result = metrics.reduce(accelerator) | {"optim/lr": lr}
        run.progress(result)
        last = run.step == steps
        if last or run.due(args.eval_every, at_end=False):
            evaluation = evaluate_pairs(accelerator, model, eval_pairs, args)
            run.log_evaluation(evaluation)
            result |= evaluation
        run.log(result)
        if run.stop_asked() or (args.save_every and (last or run.due(args.save_every, at_end=False))):
            run.save()
        run.save_step_model(model, reward_model, tokenizer)

    run.finish(model, reward_model, tokenizer)
    del reward_model, model, optimizer
    run.close()


if __name__ == "__main__":
    with clean_exit():
        main()
