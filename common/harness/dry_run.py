"""`--dry_run`: what a step takes of memory on each process, from config.json and the options alone."""

import dataclasses
import functools
import math
import os
from typing import NamedTuple

import torch

from common.errors import refuse, world_size
from common.harness.args import PairArgs, RolloutArgs
from common.harness.distributed import choose_device
from common.harness.loading import load_errors, model_path
from common.harness.lora import find_base
from common.harness.memory import Job, Sizes, Terms

GIB = 2**30
TERMS = "weights, AdamW, reference, gradient buckets, copies of weights, gradients, key-value cache, activations, work"


def launched_job():
    """The `Job` of this process, from the environment variables that `accelerate launch` sets."""
    from accelerate.utils import parse_flag_from_env

    strategy = "FSDP2" if parse_flag_from_env("ACCELERATE_USE_FSDP") else "single" if world_size() == 1 else "DDP"
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        strategy = f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    return Job(world_size(), strategy, os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16")


def read_sizes(args, option="model_name_or_path", head=True):
    """The `Sizes` of the model that `option` names, of an adapter those of its base model. Only config.json is read:
    the weights are counted on the meta device, which holds none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with load_errors(args, option, "no model"):
        path, _ = find_base(model_path(args, option))
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
    if getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None):
        refuse(args, option, "its weights are quantised: a copy in bfloat16 or float32 is needed")
    return Sizes(lm, head)


class Shape(NamedTuple):
    """The sizes of a forward in the update of one process, its rows as long as the options allow."""

    rows: int
    prompts: int  # distinct ones that are computed once; 0: a prompt is computed with each of its completions
    prompt: int  # tokens
    completion: int
    forwards: int  # in one optimizer step


def update_shape(args, job, sizes):
    """The `Shape` of the largest forward of an update."""
    lengths = [(args.max_prompt_tokens, args.max_new_tokens)] if isinstance(args, RolloutArgs) else []
    if isinstance(args, PairArgs):
        lengths.insert(0, (1, args.max_length - 1))  # what was cut to --max_length; dpo.py may sample its own
        group, most = 2, args.micro_batch_size // 2 * 2
    else:
        group, most = args.group_size, args.micro_batch_size
        if args.micro_batch_tokens:
            most = max(1, args.micro_batch_tokens // (args.max_prompt_tokens + args.max_new_tokens))
    prompt, completion = max(lengths, key=sum)
    step_rows = args.update_rows() // job.processes
    rows = min(most, step_rows)
    shared = group > 1 and sizes.vocabulary and not args.gradient_checkpointing and job.strategy in ("single", "DDP")
    return Shape(rows, math.ceil(rows / group) if shared else 0, prompt, completion, math.ceil(step_rows / rows))


def rollout_rows(args, job):
    """[(rows, completions of a prompt)] of the largest generate() call of one process, in a rollout and an evaluation.
    Rows are None where an evaluation takes all prompts of a data set."""
    prompts, n = (getattr(args, option) for option in args.sampled_by)
    calls = []
    for number, samples in ((prompts, n), (args.eval_prompts, args.eval_samples if args.eval_temperature > 0 else 1)):
        rows = math.ceil(number / job.processes) * samples
        if args.generate_batch_size:
            most = max(1, args.generate_batch_size // samples) * samples
            rows = min(rows, most) if number else most
        calls.append((rows or None, samples))
    return calls


def estimate(args, job, sizes, critic=None, scorer=None):
    """{phase: {term: bytes}} of one process; the peak of a step is its largest phase. Of ppo.py, `critic` are the sizes
    of a critic on a backbone of its own, `scorer` those of its reward model."""
    policy, shape, phases = Terms(sizes, args, job), update_shape(args, job, sizes), {}
    models = [policy, Terms(critic, args, job)] if critic else [policy]
    held = {term: sum(model.held()[term] for model in models) for term in policy.held()}
    held["weights"] += scorer.weights * (2 if args.dtype == "bfloat16" else 4) if scorer else 0
    gradients = held.pop("gradients")
    if isinstance(args, RolloutArgs):
        for phase, (rows, n) in zip(("rollout", "evaluation"), rollout_rows(args, job), strict=True):
            if rows:
                phases[phase] = held | policy.rollout(rows, n)
    width, tokens = shape.prompt + shape.completion, shape.rows * shape.completion
    passes = [(shape.rows, width, width)]
    if shape.prompts:
        passes = [(shape.prompts, shape.prompt, shape.prompt), (shape.rows, shape.completion - 1, width - 1)]
    activations = sum(model.activations(*each) for each in passes for model in models)
    activations += tokens * sizes.hidden * policy.size  # the states of completions, which are the head's input
    update = held | {"gradients": gradients if shape.forwards > 1 else 0, "activations": activations}
    work = {
        "forward": policy.head_work(tokens, backward=False),
        "backward": max(policy.head_work(tokens), policy.layer_work(*passes[-1])),
    }
    for phase in work:
        copies = sum(model.copies(phase) for model in models)
        phases[phase] = update | {"copies of weights": copies, "work": work[phase]}
    full = held | {"gradients": gradients}
    phases["backward"] = max(phases["backward"], full | {"work": 2 * policy.gradient_of_embedding()}, key=total)
    return phases | {"optimizer": full | {"work": sum(model.adamw_copy() for model in models)}}


def total(terms):
    return sum(terms.values())


def peak(phases):
    """The name of the largest phase, and its bytes."""
    phase = max(phases, key=lambda phase: total(phases[phase]))
    return phase, total(phases[phase])


def dry_run(args):
    """Print what a step takes with these options, on the first process."""
    job, sizes, critic, scorer = launched_job(), read_sizes(args, head=isinstance(args, RolloutArgs)), None, None
    if getattr(args, "critic", None) == "separate":
        critic = read_sizes(args, "critic_path" if args.critic_path else "model_name_or_path", head=False)
    if getattr(args, "reward_model_path", None):
        scorer = read_sizes(args, "reward_model_path", head=False)
    if os.environ.get("RANK", "0") == "0":
        compute = functools.partial(estimate, sizes=sizes, critic=critic, scorer=scorer)
        print("\n".join(report(args, job, sizes, compute)))


def report(args, job, sizes, compute):
    """The lines of --dry_run; `compute` is `estimate` for these models."""
    phases, shape = compute(args, job), update_shape(args, job, sizes)
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
    yield f"{'all':18}" + "".join(f"{total(terms) / GIB:11.2f}" for terms in phases.values())
    yield ""
    phase, most = peak(phases)
    yield f"peak: {most / GIB:.1f} GiB, in {phase}"
    for option, value in less_memory(args, job, compute, most):
        yield f"  {value / GIB:.1f} GiB with {option}"
    if choose_device().type == "cpu":
        phase, most = peak(compute(args, job._replace(gpu=False)))
        yield f"This machine has no GPU: on its CPU the peak is {most / GIB:.1f} GiB, in {phase}."
    yield f"Rows are as long as allowed: {shape.prompt} + {shape.completion} tokens, {shape.rows} of them in a forward."
    if isinstance(args, RolloutArgs) and "evaluation" not in phases:
        extra = total(Terms(sizes, args, job).rollout(100 * args.eval_samples, args.eval_samples))
        each = f"{extra / GIB:.1f} GiB for each 100 of a process"
        yield f"Not counted: an evaluation samples all its prompts at once, {each};"
        yield "--generate_batch_size or --eval_prompts limits it."
    yield "Weights are counted. The rest is an estimate for dense decoders, not for mixtures of experts or hybrids."
    yield "A CUDA context and fragmentation come on top. docs/memory.md says what was checked."


def less_memory(args, job, compute, most):
    """The three options, or ways to launch, that lower the peak most, each alone: (text, the peak with it)."""
    options = {"gradient_checkpointing": True, "kl_coef": 0, "lora_rank": 16}
    if args.lora_rank:  # only the base is bfloat16 then; weights that train would lose small updates
        options["dtype"] = "bfloat16"
    name = "micro_batch_tokens" if getattr(args, "micro_batch_tokens", 0) else "micro_batch_size"
    options[name] = max(2, getattr(args, name) // 4)
    if isinstance(args, RolloutArgs):
        rows, n = rollout_rows(args, job)[0]
        options["generate_batch_size"] = max(n, args.eval_samples, rows // 4)
    found = {}
    for name, value in options.items():
        if name in vars(args):
            text = f"--{name}" if value is True else f"--{name} {value}"
            found[text] = peak(compute(dataclasses.replace(args, **{name: value}), job))[1]
    if args.dtype == "float32" and not job.bf16:
        found["accelerate launch --mixed_precision bf16"] = peak(compute(args, job._replace(bf16=True)))[1]
    if job.strategy == "DDP":
        found["configs/fsdp2.yaml"] = peak(compute(args, job._replace(strategy="FSDP2")))[1]
    return sorted([each for each in found.items() if each[1] < 0.99 * most], key=lambda each: each[1])[:3]
