"""Measure the memory of a grpo.py step by torch's allocator, to compare with tools/dry_run.py."""

import gc
import types

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import grpo
from common.load import add_adapters, load_reference
from common.masked import Means
from dry_run import Job, Sizes, estimate

IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def shape(hidden, layers, heads, key_heads, intermediate, vocabulary, tied):
    """Return the sizes in the config.json of a Qwen2."""
    return dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def meta_sizes(sizes):
    with torch.device("meta"):
        return Sizes(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, **IDS)))


def random_policy(args, sizes, accelerator):
    """Return a random Qwen2 of these sizes, as `load_policy` makes it."""
    config = AutoConfig.for_model("qwen2", **sizes, **IDS)
    options = dict(dtype=getattr(torch, args.dtype), attn_implementation=args.attn_implementation)
    lm = AutoModelForCausalLM.from_config(config, **options)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    if args.lora_rank:
        lm = add_adapters(lm, args)
    lm.generation_config = GenerationConfig(eos_token_id=[sizes["vocab_size"] - 1])
    lm.to(accelerator.device)
    if args.fast:
        from fast import speed_up

        speed_up(lm, accelerator)
    return lm.train()


def measured(action, live, device):
    """Return (peak, bytes left) of torch's allocator during `action`, with `live` bytes allocated before.

    Resident memory would also hold the interpreter and the libraries, more than a model this small.
    """
    if device != "cpu":
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        action()
        most = torch.accelerator.max_memory_allocated(device)
        return live + most - before, live + torch.accelerator.memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    events = profiled.profiler.kineto_results.events()  # `profiled.events()` leaves out those inside operators
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most = live
    for _, change in changes:
        live += change
        most = max(most, live)
    return most, live


def measured_step(args, sizes, bf16=False, device="cpu"):
    """Return {phase: peak bytes} of rollout and update, with AdamW's state allocated as after a first step."""
    gc.collect()
    AcceleratorState._reset_state(True)  # other tests may change the precision
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if bf16 else "no")
    held = types.SimpleNamespace()
    ids = torch.arange(args.prompts_per_step * args.max_prompt_tokens) % 100 + 3
    rows = ids.view(args.prompts_per_step, -1).tolist()
    prompts = [types.SimpleNamespace(ids=row[i:]) for i, row in enumerate(rows)]  # every forward has padding
    tokenizer = types.SimpleNamespace(pad_token_id=IDS["pad_token_id"])

    def build():
        held.lm = random_policy(args, sizes, accelerator)
        held.reference = load_reference(held.lm, args, accelerator)
        held.model = accelerator.prepare(held.lm)
        trained = [weight for weight in held.lm.parameters() if weight.requires_grad]
        held.optimizer = torch.optim.AdamW(trained, 1e-6, fused=accelerator.device.type == "cuda" or None)
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        held.optimizer.step()
        held.optimizer.zero_grad()

    def rollout():
        with accelerator.autocast():
            n, temperature = args.group_size, args.temperature
            held.batch = grpo.rollout(held.lm, tokenizer, prompts, n, temperature, 1.0, (0,), args)
        held.batch["loss_mask"] = held.batch["completion_mask"].fill_(True)
        held.batch["advantages"] = torch.ones(len(held.batch["completions"]), 1, device=device)

    def update():
        groups = held.optimizer.param_groups
        idle = types.SimpleNamespace(step=lambda: None, zero_grad=lambda: None, param_groups=groups)
        grpo.update(accelerator, held.model, held.reference, idle, held.batch, args, Means())

    _, live = measured(build, 0, device)
    peaks = {}
    for phase, action in (("rollout", rollout), ("update", update)):
        peaks[phase], live = measured(action, live, device)
    return peaks


def estimated_step(args, sizes, bf16=False):
    """Return the estimate of tools/dry_run.py for `measured_step`."""
    totals = {phase: sum(terms.values()) for phase, terms in estimate(args, Job(bf16=bf16), meta_sizes(sizes)).items()}
    return {"rollout": totals["rollout"], "update": max(totals["forward"], totals["backward"])}
