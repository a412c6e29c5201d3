"""The formula of tools/dry_run.py against what small steps take on CPU.

python tools/memory.py --check    measure again (two minutes on one core), keep it in tools/memory.json, and fail
                                  where the formula is off by more than 15 %

What is measured is what torch's CPU allocator gives out and gets back, as the profiler reports it: each
allocation with its size, those inside operators too. Resident memory (RSS) would also hold the
interpreter, the libraries and what malloc keeps, which is more than the terms of a model this small. On
a GPU (tests/test_gpu.py) its allocator is asked.
"""

import gc
import json
import pathlib
import sys
import types

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import grpo  # noqa: E402
from harness.loading import add_adapters, load_reference  # noqa: E402
from harness.metrics import Metrics  # noqa: E402
from common.model import Policy  # noqa: E402
from dry_run import Job, Sizes, estimate  # noqa: E402
from fast.shortcuts import find_shortcuts  # noqa: E402
from piped import end_with_the_reader  # noqa: E402

RESULTS = ROOT / "tools" / "memory.json"
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)


def shape(hidden, layers, heads, key_heads, intermediate, vocabulary, tied):
    return dict(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


# From the config.json of Qwen/Qwen2.5-0.5B, 1.5B, 3B and 7B.
MODELS = {
    "0.5B": shape(896, 24, 14, 2, 4864, 151936, True),
    "1.5B": shape(1536, 28, 12, 2, 8960, 151936, True),
    "3B": shape(2048, 36, 16, 2, 11008, 151936, True),
    "7B": shape(3584, 28, 28, 4, 18944, 152064, False),
}
LENGTHS = dict(max_prompt_tokens=256, max_new_tokens=512, micro_batch_size=16, eval_prompts=32)

WIDE = shape(512, 4, 8, 2, 1408, 8192, True)
DEEP = shape(256, 16, 4, 2, 704, 4096, False)
VOCABULARY = shape(256, 2, 4, 1, 704, 65536, True)
SMALL = dict(
    prompts_per_step=4,
    group_size=4,
    micro_batch_size=8,
    max_prompt_tokens=64,
    max_new_tokens=48,
    generate_batch_size=0,
)
CASES = {  # name: (shape, options of grpo.py, mixed precision bf16, under DDP)
    "wide: 4 layers of width 512": (WIDE, {}, False, False),
    "all rows in one forward": (WIDE, dict(micro_batch_size=16), False, False),
    "no reference": (WIDE, dict(kl_coef=0), False, False),
    "gradient checkpointing": (WIDE, dict(gradient_checkpointing=True), False, False),
    "`--dtype bfloat16`": (WIDE, dict(dtype="bfloat16"), False, False),
    "mixed precision bf16": (WIDE, {}, True, False),
    "eager attention": (WIDE, dict(attn_implementation="eager"), False, False),
    "`--fast false`, temperature 0.7": (WIDE, dict(fast=False, temperature=0.7), False, False),
    "DDP (one process)": (WIDE, {}, False, True),
    "deep: 16 layers of width 256": (DEEP, {}, False, False),
    "deep, rows of 352 tokens": (
        DEEP,
        dict(max_prompt_tokens=304, prompts_per_step=2),
        False,
        False,
    ),
    "deep, checkpointing, mixed precision": (DEEP, dict(gradient_checkpointing=True), True, False),
    "LoRA, rank 16": (WIDE, dict(lora_rank=16), False, False),
    "LoRA, `--dtype bfloat16`": (WIDE, dict(lora_rank=16, dtype="bfloat16"), False, False),
    "LoRA, mixed precision bf16": (WIDE, dict(lora_rank=16), True, False),
    "LoRA, `--dtype bfloat16`, checkpointing": (
        DEEP,
        dict(lora_rank=16, dtype="bfloat16", gradient_checkpointing=True),
        False,
        False,
    ),
    "vocabulary 65,536": (VOCABULARY, dict(micro_batch_size=16), False, False),
}


def measured(action, live=0, device="cpu"):
    """(peak, what is left) in bytes that torch's allocator has given out; `live` are those before `action`."""
    if device != "cpu":
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        action()
        most = torch.accelerator.max_memory_allocated(device)
        after = torch.accelerator.memory_allocated(device)
        return live + most - before, live + after - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    # `profiled.events()` leaves out what happens inside operators.
    events = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    most = live
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events):
        live += change
        most = max(most, live)
    return most, live


def random_policy(args, sizes, accelerator):
    """A Qwen2 of these sizes as a `Policy`, as `load_policy` makes it: with the shortcuts that a run takes."""
    config = AutoConfig.for_model("qwen2", **sizes, **IDS)
    options = dict(dtype=getattr(torch, args.dtype), attn_implementation=args.attn_implementation)
    lm = AutoModelForCausalLM.from_config(config, **options)
    lm.generation_config = lm.own_generation_config = GenerationConfig()
    lm.eval().to(accelerator.device)
    fast = find_shortcuts(lm, not args.gradient_checkpointing, accelerator) if args.fast else None
    policy = Policy(lm, IDS["pad_token_id"], [sizes["vocab_size"] - 1], args.temperature, fast)
    if args.lora_rank:
        add_adapters(lm, args)
    if args.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return policy.train()


def measured_step(args, sizes, bf16=False, ddp=False, device="cpu"):
    """{phase: bytes}: the peaks of a rollout, an update and a step of AdamW by the functions of grpo.py.

    AdamW has its state from the beginning, as in every step but the first.
    """
    gc.collect()
    AcceleratorState._reset_state(True)  # another test or case may have had another precision
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if bf16 else "no")
    held = types.SimpleNamespace()
    peaks = {}
    ids = torch.arange(args.prompts_per_step * args.max_prompt_tokens) % 100
    rows = (ids + 3).view(args.prompts_per_step, -1).tolist()
    prompts = [
        types.SimpleNamespace(ids=row[i:]) for i, row in enumerate(rows)
    ]  # each forward has padding

    def build():
        held.policy = random_policy(args, sizes, accelerator).to(device)
        held.reference = load_reference(held.policy, args, accelerator)
        held.model = accelerator.prepare(held.policy)
        if ddp:
            held.model = torch.nn.parallel.DistributedDataParallel(
                held.model, gradient_as_bucket_view=True
            )
            accelerator.no_sync = lambda model: (
                model.no_sync()
            )  # which it leaves out, as it did not wrap the model
        trained = [parameter for parameter in held.policy.parameters() if parameter.requires_grad]
        held.optimizer = torch.optim.AdamW(
            trained, 1e-6, fused=accelerator.device.type == "cuda" or None
        )
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        step()

    def rollout():
        with accelerator.autocast():
            held.batch = grpo.rollout(
                held.policy, prompts, args.group_size, args.temperature, 1.0, (0,), args
            )
        held.batch["loss_mask"] = held.batch["completion_mask"].fill_(True)
        held.batch["advantages"] = torch.ones(len(held.batch["completions"]), 1, device=device)

    def update():
        waiting = types.SimpleNamespace(
            step=lambda: None, zero_grad=lambda: None
        )  # the step is measured by itself
        grpo.update(accelerator, held.model, held.reference, waiting, held.batch, args, Metrics())

    def step():
        held.optimizer.step()
        held.optimizer.zero_grad()

    _, live = measured(build, device=device)
    for phase, action in (("rollout", rollout), ("update", update), ("optimizer", step)):
        peaks[phase], live = measured(action, live, device)
    return peaks


def computed_step(args, sizes, bf16=False, ddp=False, device="cpu"):
    """What the formula gives for `measured_step`."""
    phases = estimate(
        args, Job(1, "DDP" if ddp else "single", bf16, device != "cpu"), meta_sizes(sizes)
    )
    totals = {phase: sum(terms.values()) for phase, terms in phases.items()}
    update = max(totals["forward"], totals["backward"])
    return {"rollout": totals["rollout"], "update": update, "optimizer": totals["optimizer"]}


def measure():
    """Measure all cases into tools/memory.json; returns those that are off by more than 15 %."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    kept = {}
    off = []
    for name, (sizes, options, *how) in CASES.items():
        args = grpo.Args(**SMALL | options)
        torch.manual_seed(0)
        kept[name] = measured_step(args, sizes, *how)
        computed = computed_step(args, sizes, *how)
        for phase, value in kept[name].items():
            ratio = computed[phase] / value
            both = f"{value / 2**20:8.1f} MiB, computed {computed[phase] / 2**20:8.1f}"
            print(f"{name:40} {phase:10} {both}: {ratio:.3f}")
            if abs(ratio - 1) > 0.15:
                off.append(
                    f"{name}: {phase}: the formula gives {ratio:.2f} times what was measured"
                )
    RESULTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8", newline="\n")
    return off


def meta_sizes(sizes):
    with torch.device("meta"):
        return Sizes(
            AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes, **IDS))
        )


def main(arguments):
    if arguments != ["--check"]:
        raise SystemExit(__doc__)
    off = measure()
    print("\n".join(off) or "all within 15 %")
    return 1 if off else 0


if __name__ == "__main__":
    end_with_the_reader()
    raise SystemExit(main(sys.argv[1:]))
