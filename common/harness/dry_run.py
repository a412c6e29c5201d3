"""`--dry_run`: what a step takes of memory on each process, from config.json and the options alone."""

import dataclasses
import math
import os
from typing import NamedTuple

import torch

from common.errors import InputError, world_size
from common.harness import memory
from common.harness.args import PairArgs, RolloutArgs
from common.harness.distributed import choose_device
from common.harness.loading import check_not_quantised, model_path, refuse_model
from common.harness.lora import find_base
from common.harness.memory import Job, sizes_of

GIB = 2**30
TERMS = "weights, AdamW, reference, gradient buckets, copies of weights, gradients, key-value cache, activations, work"


def launched_job():
    """The job of the environment that `accelerate launch` gives to this process."""
    processes, strategy = world_size(), "single" if world_size() == 1 else "DDP"
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        strategy = "FSDP2"
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        strategy = f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    return Job(processes, strategy, os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16")


def read_sizes(args, option="model_name_or_path", head=True):
    """The sizes of the model that `option` names, from its config.json alone (of an adapter: that of its base model).
    The weights are counted on the meta device, which holds none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        path, _ = find_base(model_path(args, option))
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
    except InputError:
        raise
    except Exception as error:  # it raises nearly every type there is
        refuse_model(args, option, "no model", error)
    check_not_quantised(args, option, config)
    return sizes_of(lm, head)


class Shape(NamedTuple):
    """The rows of a forward in the update of one process, as long as the options allow."""

    rows: int
    prompts: int  # distinct ones that are computed once; 0: a prompt is computed with each of its completions
    prompt: int  # tokens
    completion: int
    forwards: int  # in one optimizer step


def update_shape(args, job, sizes):
    step_rows = args.update_rows() // job.processes
    if isinstance(args, PairArgs):
        group = 2
        lengths = [(1, args.max_length - 1)]  # what was cut to --max_length; dpo.py may sample its own
        if isinstance(args, RolloutArgs):
            lengths.append((args.max_prompt_tokens, args.max_new_tokens))
        prompt, completion = max(lengths, key=sum)
        most = args.micro_batch_size // 2 * 2
    else:
        group = args.group_size
        prompt, completion = args.max_prompt_tokens, args.max_new_tokens
        most = args.micro_batch_size
        if args.micro_batch_tokens:
            most = max(1, args.micro_batch_tokens // (prompt + completion))
    rows = min(most, step_rows)
    shared = group > 1 and sizes.vocabulary and not args.gradient_checkpointing and job.strategy in ("single", "DDP")
    prompts = math.ceil(rows / group) if shared else 0
    return Shape(rows, prompts, prompt, completion, math.ceil(step_rows / rows))


def rollout_rows(args, job):
    """(rows, completions of a prompt) of the largest generate() call of one process, in training and in evaluation;
    rows are None where an evaluation takes all prompts of a data set."""
    number, n = (getattr(args, option) for option in args.sampled_by)
    calls = []
    for prompts, samples in ((number, n), (args.eval_prompts, args.eval_samples if args.eval_temperature > 0 else 1)):
        rows = math.ceil(prompts / job.processes) * samples
        if args.rollout_batch_size:
            most = max(1, args.rollout_batch_size // samples) * samples
            rows = min(rows, most) if prompts else most
        calls.append((rows or None, samples))
    return calls


def estimate(args, job, sizes, critic=None, scorer=None):
    """{phase: {term: bytes}} of one process; the peak of a step is that of its largest phase. `critic` is that of
    ppo.py on a backbone of its own, `scorer` its reward model."""
    models = [sizes, critic] if critic else [sizes]

    def total(term, *more):
        return sum(term(model, args, job, *more) for model in models)

    held = {
        "weights": total(memory.weights) + (scorer.weights * (2 if args.dtype == "bfloat16" else 4) if scorer else 0),
        "AdamW": total(memory.adamw),
        "reference": memory.reference(sizes, args, job),
        "gradient buckets": total(memory.buckets),
    }
    phases = {}
    if isinstance(args, RolloutArgs):
        for phase, (rows, n) in zip(("rollout", "evaluation"), rollout_rows(args, job), strict=True):
            if rows:
                phases[phase] = held | rollout_terms(sizes, args, job, rows, n)
    shape = update_shape(args, job, sizes)
    width = shape.prompt + shape.completion
    if shape.prompts:
        passes = [(shape.prompts, shape.prompt, shape.prompt), (shape.rows, shape.completion - 1, width - 1)]
    else:
        passes = [(shape.rows, width, width)]
    tokens = shape.rows * shape.completion
    saved = sum(total(memory.activations, *each) for each in passes) + memory.head_inputs(sizes, args, job, tokens)
    kept = {"gradients": total(memory.gradients) if shape.forwards > 1 else 0, "activations": saved}
    work = memory.head_work(sizes, args, job, tokens, backward=False)
    forward = {"copies of weights": total(memory.copies, "forward"), "work": work}
    work = max(memory.head_work(sizes, args, job, tokens), memory.layer_work(sizes, args, job, *passes[-1]))
    backward = {"copies of weights": total(memory.copies, "backward"), "work": work}
    phases["forward"] = held | kept | forward
    end = {"gradients": total(memory.gradients), "work": 2 * memory.gradient_of_embedding(sizes, args)}
    phases["backward"] = held | max(kept | backward, end, key=lambda terms: sum(terms.values()))
    phases["optimizer"] = held | {"gradients": total(memory.gradients), "work": total(memory.adamw_copy)}
    return phases


def rollout_terms(sizes, args, job, rows, n):
    """The larger of the pass over the prompts, and of the last token of all rows."""
    prompt, completion = args.max_prompt_tokens, args.max_new_tokens
    prompts = rows if args.rollout == "stock" else math.ceil(rows / n)
    copy = {"copies of weights": memory.copies(sizes, args, job, "rollout")}
    first = {
        "key-value cache": memory.cache(sizes, args, job, prompts, prompt, 1),
        "work": memory.prefill(sizes, args, job, prompts, prompt),
    }
    last = {
        "key-value cache": memory.cache(sizes, args, job, rows, prompt, completion),
        "work": memory.sampling(sizes, args, job, rows),
    }
    return copy | max(first, last, key=lambda terms: sum(terms.values()))


def peak(phases):
    """The largest phase and its bytes."""
    totals = {phase: sum(terms.values()) for phase, terms in phases.items()}
    phase = max(totals, key=totals.get)
    return phase, totals[phase]


def dry_run(args):
    """Print the estimate for these options."""
    job, sizes, critic, scorer = launched_job(), read_sizes(args, head=isinstance(args, RolloutArgs)), None, None
    if getattr(args, "critic", None) == "separate":
        critic = read_sizes(args, "critic_path" if args.critic_path else "model_name_or_path", head=False)
    if getattr(args, "reward_model_path", None):
        scorer = read_sizes(args, "reward_model_path", head=False)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(report(args, job, sizes, critic, scorer)))


def report(args, job, sizes, critic=None, scorer=None):
    """The lines of --dry_run."""
    phases, shape = estimate(args, job, sizes, critic, scorer), update_shape(args, job, sizes)
    yield f"{args.model_name_or_path}: {sizes.weights:,} weights, {sizes.layers} layers of width {sizes.hidden}"
    where = f"each of {job.processes} GPUs ({job.strategy})" if job.processes > 1 else "one GPU"
    mixed = " with mixed precision bf16" if job.bf16 else ""
    yield f"computed for {where}, {args.dtype}{mixed}, not measured; GiB of one process:"
    yield ""
    yield f"{'':18}" + "".join(f"{phase:>11}" for phase in phases)
    for term in TERMS.split(", "):
        values = [terms.get(term, 0) / GIB for terms in phases.values()]
        if any(values):
            yield f"{term:18}" + "".join(f"{value:11.2f}" for value in values)
    yield f"{'all':18}" + "".join(f"{sum(terms.values()) / GIB:11.2f}" for terms in phases.values())
    yield ""
    phase, most = peak(phases)
    yield f"peak: {most / GIB:.1f} GiB, in {phase}"
    for option, value in less_memory(args, job, sizes, critic, scorer, most):
        yield f"  {value / GIB:.1f} GiB with {option}"
    if choose_device().type == "cpu":
        phase, most = peak(estimate(args, job._replace(gpu=False), sizes, critic, scorer))
        yield f"This machine has no GPU: on its CPU the peak is {most / GIB:.1f} GiB, in {phase}."
    yield f"Rows are as long as allowed: {shape.prompt} + {shape.completion} tokens, {shape.rows} of them in a forward."
    if isinstance(args, RolloutArgs) and "evaluation" not in phases:
        extra = rollout_terms(sizes, args, job, 100 * args.eval_samples, args.eval_samples)
        all_at_once = f"{sum(extra.values()) / GIB:.1f} GiB for each 100 of a process"
        yield f"Not counted: an evaluation samples all its prompts at once, {all_at_once};"
        yield "--rollout_batch_size or --eval_prompts limits it."
    yield "Weights are counted. The rest is an estimate for dense decoders, not for mixtures of experts or hybrids."
    yield "A CUDA context and fragmentation come on top. docs/memory.md says what was checked."


def less_memory(args, job, sizes, critic, scorer, most):
    """The three options that lower the peak most, each alone: (text, the peak with it)."""
    changes = {
        "--gradient_checkpointing": dict(gradient_checkpointing=True),
        "--dtype bfloat16": dict(dtype="bfloat16"),
        "--kl_coef 0": dict(kl_coef=0.0),
        "--lora_rank 16": dict(lora_rank=16),
    }
    name = "micro_batch_tokens" if getattr(args, "micro_batch_tokens", 0) else "micro_batch_size"
    value = max(2, getattr(args, name) // 4)
    changes[f"--{name} {value}"] = {name: value}
    if isinstance(args, RolloutArgs):
        rows, n = rollout_rows(args, job)[0]
        most_rows = max(n, args.eval_samples, rows // 4)
        changes[f"--rollout_batch_size {most_rows}"] = dict(rollout_batch_size=most_rows)
    found = {}
    for text, change in changes.items():
        if all(hasattr(args, name) for name in change):
            other = dataclasses.replace(args, **change)
            found[text] = peak(estimate(other, job, sizes, critic, scorer))[1]
    if job.strategy == "DDP":
        sharded = job._replace(strategy="FSDP2")
        found["configs/fsdp2.yaml"] = peak(estimate(args, sharded, sizes, critic, scorer))[1]
    return sorted([each for each in found.items() if each[1] < 0.99 * most], key=lambda each: each[1])[:3]
