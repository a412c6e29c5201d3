"""Estimate the peak memory of a step on each process, from config.json and the options alone.

    python tools/dry_run.py grpo.py --model_name_or_path Qwen/Qwen2.5-7B ...
    accelerate launch --config_file configs/fsdp2.yaml tools/dry_run.py grpo.py ...

Prints each term in each phase, the peak, the three options that lower it most, and the largest
--micro_batch_size for common cards: gradients do not depend on it. It needs no GPU and loads no
weights. Without a network, name a folder that contains the model's config.json.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import sys
from typing import NamedTuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from common.load import EMBEDDED
from common.run import Exit, RolloutArgs, clean_exit, one_line, parse_args, world_size

GIB = 2**30
CARDS = (24, 48, 80, 141)  # GiB
USABLE = 0.9  # of a card: the CUDA context and fragmentation take the rest
CACHE_BLOCK = 64  # tokens by which a layer of the key-value cache grows with --fast


class Sizes:
    """Sizes of the dense decoder `lm` in elements; without `head`, of its backbone with one output."""

    def __init__(self, lm, head=True):
        config = lm.config.get_text_config()
        output = lm.get_output_embeddings()
        linear = [layer for layer in lm.modules() if type(layer).__name__ in ("Linear", "Conv1D")]
        matrices = [layer.weight for layer in linear if layer is not output]
        tied = output.weight is lm.get_input_embeddings().weight
        removed = 0 if head or tied else output.weight.numel()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.weights = sum(weight.numel() for weight in lm.parameters()) - removed  # tied: once
        self.linear = sum(weight.numel() for weight in matrices)
        self.linear += output.weight.numel() if head else 0
        self.embedding = output.weight.numel()  # the largest matrix
        self.tied = tied and head
        self.adapters = sum(sum(weight.shape) for weight in matrices)  # LoRA of rank 1
        self.hidden = config.hidden_size
        self.layers = config.num_hidden_layers
        self.heads = heads
        self.query = heads * head_size
        self.key = (getattr(config, "num_key_value_heads", None) or heads) * head_size
        self.intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        self.vocabulary = output.weight.shape[0] if head else 0


class Job(NamedTuple):
    """The processes of a run, as its launcher starts them."""

    processes: int = 1
    strategy: str = "single"  # single, DDP, FSDP2
    bf16: bool = False  # accelerate's mixed precision

    @property
    def sharded(self):
        return self.strategy == "FSDP2"

    @property
    def share(self):
        """The fraction of weights, gradients and AdamW's moments that a process holds."""
        return 1 / self.processes if self.sharded else 1


class Terms:
    """The memory of one model under these options and this job, in bytes per process."""

    def __init__(self, sizes, args, job):
        self.sizes = sizes
        self.args = args
        self.job = job
        bf16 = args.dtype == "bfloat16"
        self.precision = "autocast" if job.bf16 else "float32"  # autocast casts float32 weights
        if bf16 or (job.bf16 and job.sharded):
            self.precision = "bfloat16"  # a forward computes with bfloat16 weights
        self.size = 4 if self.precision == "float32" else 2  # bytes in linear layers, attention
        self.stream = 2 if self.precision == "bfloat16" else 4  # bytes in the residual stream
        self.weight = 2 if bf16 else 4
        self.trained = (sizes.weights, self.weight)  # their number, and the bytes of each
        if args.lora_rank:
            self.trained = (args.lora_rank * sizes.adapters, 4)

    def held(self):
        """Return {term: bytes} of what stays in memory between forwards."""
        sizes = self.sizes
        number, size = self.trained
        adapters = 4 * self.args.lora_rank * sizes.adapters
        has_kl = getattr(self.args, "kl_coef", 0) and not self.args.lora_rank and sizes.vocabulary
        return {
            "weights": (self.weight * sizes.weights + adapters) * self.job.share,
            "AdamW": 2 * number * size * self.job.share,  # two moments in the weight's dtype
            # Not sharded. With LoRA, the reference is the policy without its adapters.
            "reference": sizes.weights * self.stream if has_kl else 0,
            "gradient buckets": number * size if self.job.strategy == "DDP" else 0,
            "gradients": number * size * self.job.share,  # a rollout has none
        }

    def copies(self, phase):
        """Return the bytes of the copies of weights that a phase computes with.

        Autocast copies trained matrices to bfloat16 once per forward, frozen matrices once per pass
        (prompts, completions). With gradient checkpointing, only the copies of one layer and the
        head exist at once. Sharded weights are gathered: all of them for sampling, embedding, head
        and two layers at a time in an update.
        """
        sizes = self.sizes
        frozen = self.args.lora_rank
        recomputed = self.args.gradient_checkpointing
        if self.precision == "autocast":
            head = sizes.embedding if sizes.vocabulary else 0
            if (frozen and phase == "rollout") or (recomputed and (frozen or phase == "backward")):
                return 2 * (sizes.linear - head) / sizes.layers + 2 * head
            passes = 2 if frozen and phase != "rollout" and sizes.vocabulary else 1
            return 2 * passes * (sizes.linear - head) + 2 * head
        if self.job.share == 1:
            return 0
        ends = sizes.embedding * (1 if sizes.tied else 2)
        part = ends + 2 * (sizes.weights - ends) / sizes.layers
        return self.stream * (sizes.weights if phase == "rollout" else min(part, sizes.weights))

    def rollout(self, rows, n):
        """Return {term: bytes} of sampling `rows` completions, n per prompt.

        Take the larger of two moments: the pass over the prompts (MLP, residual stream, mask), and
        the last token of all rows: (rows, V) logits, scores, probabilities, and random numbers.
        """
        sizes = self.sizes
        args = self.args
        prompt = args.max_prompt_tokens
        prompts = math.ceil(rows / n) if args.fast else rows  # stock `generate` repeats prompts
        layer = 3 * sizes.intermediate * self.size + 3 * sizes.hidden * 4 + prompt * (1 + self.size)
        temperature = getattr(args, "temperature", args.eval_temperature)  # dpo.py only evaluates
        scores = (0 if self.size == 4 else 2) + (4 if temperature != 1 else 0)
        cached = self.size if args.fast else self.stream  # fast/ casts to the attention's dtype
        first = {
            "key-value cache": self.cache(prompts, prompt, 1, self.stream),
            "work": prompts * prompt * layer,
        }
        last = {
            "key-value cache": self.cache(rows, prompt, args.max_new_tokens, cached),
            "work": rows * sizes.vocabulary * (4 + scores + 4 + 4),
        }
        return {"copies of weights": self.copies("rollout")} | max(first, last, key=total)

    def cache(self, rows, prompt, completion, size):
        """Return the bytes of all keys and values; a layer is copied while it grows."""
        block = CACHE_BLOCK if self.args.fast else 1
        tokens = prompt + math.ceil((completion - 1) / block) * block
        return rows * tokens * self.sizes.key * 2 * size * (self.sizes.layers + 1)

    def activations(self, rows, queries, keys):
        """Return the bytes that a pass over (rows, queries) tokens saves for the backward."""
        tokens = rows * queries
        layer = self.layer_activations(rows, queries, keys)
        if self.args.gradient_checkpointing:  # the inputs of the layers
            layer = tokens * self.stream * self.sizes.hidden
        last = tokens * (4 + self.stream) * self.sizes.hidden  # the final norm, as in a layer
        return self.sizes.layers * layer + last + tokens * keys  # and the mask

    def layer_activations(self, rows, queries, keys):
        """Return the bytes that a decoder layer saves: RMSNorm, attention, gated MLP.

        Norms: the input in float32, its scale, the output. Linear layers: their inputs (autocast
        casts each separately). Attention: queries, keys and values repeated to all heads, the
        output, one number per head, and the mask of sdpa. MLP: gate, its activation, up and their
        product. Frozen layers (LoRA) save no input; adapters save their input in float32.
        """
        sizes = self.sizes
        size = self.size
        hidden = sizes.hidden
        norms = 2 * (4 * hidden + 4 + self.stream * hidden)
        linear = (5 if self.precision == "autocast" else 2) * size * hidden
        per_token = norms + linear + 4 * sizes.heads
        per_token += size * (2 * sizes.query + 4 * sizes.intermediate)
        if self.args.lora_rank:
            per_token += 7 * self.args.lora_rank * size - 2 * self.stream * hidden
            if self.precision == "bfloat16":
                per_token += 4 * (5 * hidden + sizes.query + sizes.intermediate)
                per_token -= linear + size * sizes.intermediate
        mask = size
        if self.args.attn_implementation == "eager":  # the probabilities of each head
            mask = sizes.heads * (4 if size == 4 else 6)
        return rows * (queries * per_token + keys * 2 * sizes.query * size + queries * keys * mask)

    def logits_saved(self, tokens):
        """Return the bytes of the logits of all tokens, float32, that the backward needs."""
        return 0 if updates_fast(self.args) else 4 * tokens * self.sizes.vocabulary

    def head_work(self, tokens, backward=True):
        """Return the bytes of the other (tokens, V) tensors that exist at once.

        Forward: the model's own logits, and two products of the entropy. Backward: four float32
        tensors. With --fast the head is computed in chunks that save nothing, five tensors each;
        several chunks accumulate the gradient of the head.
        """
        elements = tokens * self.sizes.vocabulary
        if not updates_fast(self.args):
            own = 2 if self.args.dtype == "bfloat16" else 4  # autocast's are returned as float32
            return 16 * elements if backward else (own + 8) * elements
        from fast.logprobs import CHUNK_ELEMENTS

        chunk = min(elements, CHUNK_ELEMENTS)
        if not backward:
            return (12 if self.size == 4 else 14) * chunk
        return 20 * chunk + (self.gradient_of_embedding() if elements > chunk else 0)

    def layer_work(self, rows, queries, keys):
        """Return the bytes of the gradients in the backward of the last layer.

        They belong to the MLP or the attention, the residual stream, and the embedding or head.
        Gradient checkpointing recomputes the layer's activations.
        """
        sizes = self.sizes
        tokens = rows * queries
        wider = max(tokens * sizes.intermediate, rows * (queries + keys) * sizes.query)
        work = 2 * self.size * wider + 8 * tokens * sizes.hidden + self.gradient_of_embedding()
        if self.args.gradient_checkpointing:
            work += self.layer_activations(rows, queries, keys)
        return work

    def gradient_of_embedding(self):
        """Return the bytes of the gradient of embedding or head before it is added to `.grad`."""
        return 0 if self.args.lora_rank else self.trained[1] * self.sizes.embedding


def launched_job():
    """Return the `Job` of this process, from the variables that `accelerate launch` sets."""
    from accelerate.utils import parse_flag_from_env

    strategy = "single" if world_size() == 1 else "DDP"
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        strategy = "FSDP2"
    bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16"
    return Job(world_size(), strategy, bf16)


def read_sizes(name, head=True):
    """Return the `Sizes` of a model (hub id or folder), built on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(EMBEDDED.get(name, name))
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # loaders raise nearly every type there is
        hint = "without a network, name a folder that holds its config.json"
        raise Exit(f"model {name}: no configuration; {hint}: {one_line(error)}") from None
    return Sizes(lm, head)


class Shape(NamedTuple):
    """The largest forward in the update of one process; rows are as long as the options allow."""

    rows: int
    prompts: int  # distinct prompts, computed once each; 0: recomputed for each completion
    prompt: int  # tokens
    completion: int
    forwards: int  # per optimizer step


def updates_fast(args):
    """Return whether updates take the shortcuts of --fast. Those of ppo.py need values, too."""
    return args.fast and not hasattr(args, "critic")


def update_shape(args, job, sizes):
    """Return the `Shape` of an update."""
    if hasattr(args, "pairs_per_step"):
        prompt, completion = 1, args.max_length - 1
        group = 2
        most = 2 * max(1, args.micro_batch_size // 2)
        step_rows = 2 * args.pairs_per_step
    else:
        prompt, completion = args.max_prompt_tokens, args.max_new_tokens
        group = args.group_size
        most = args.micro_batch_size
        step_rows = args.prompts_per_step * group // args.num_minibatches
    step_rows //= job.processes
    rows = min(most, step_rows)
    shares = updates_fast(args) and not args.gradient_checkpointing and not job.sharded
    prompts = math.ceil(rows / group) if shares and group > 1 and sizes.vocabulary else 0
    return Shape(rows, prompts, prompt, completion, math.ceil(step_rows / rows))


def generate_calls(args, job):
    """Return {phase: (rows, completions per prompt)} of the largest generate() calls of a process.

    An evaluation of all prompts of a dataset is left out, since their number is unknown.
    """
    phases = {"evaluation": (args.eval_prompts, args.eval_samples if args.eval_temperature else 1)}
    if hasattr(args, "group_size"):  # dpo.py only samples in evaluations
        phases = {"rollout": (args.prompts_per_step, args.group_size)} | phases
    calls = {}
    for phase, (prompts, n) in phases.items():
        rows = math.ceil(prompts / job.processes) * n if prompts else math.inf
        if args.generate_batch_size:
            rows = min(rows, max(1, args.generate_batch_size // n) * n)
        if rows < math.inf:
            calls[phase] = rows, n
    return calls


def estimate(args, job, sizes, critic=None, reward_models=()):
    """Return {phase: {term: bytes}} of one process; a step's peak is its largest phase.

    `critic`: the `Sizes` of ppo.py's separate critic. `reward_models`: the `Sizes` of rm: rewards.
    """
    policy = Terms(sizes, args, job)
    models = [policy, Terms(critic, args, job)] if critic else [policy]
    held = {term: sum(model.held()[term] for model in models) for term in policy.held()}
    dtype_size = 2 if args.dtype == "bfloat16" else 4
    held["weights"] += sum(scorer.weights for scorer in reward_models) * dtype_size
    gradients = held.pop("gradients")
    phases = {}
    if isinstance(args, RolloutArgs):
        for phase, (rows, n) in generate_calls(args, job).items():
            phases[phase] = held | policy.rollout(rows, n)
    shape = update_shape(args, job, sizes)
    width = shape.prompt + shape.completion
    tokens = shape.rows * shape.completion
    passes = [(shape.rows, width, width)]
    if shape.prompts:
        of_prompts = shape.prompts, shape.prompt, shape.prompt
        passes = [of_prompts, (shape.rows, shape.completion - 1, width - 1)]
    activations = sum(model.activations(*each) for each in passes for model in models)
    activations += tokens * sizes.hidden * policy.size  # the input of the head
    activations += policy.logits_saved(tokens)
    update = held | {
        "gradients": gradients if shape.forwards > 1 else 0,
        "activations": activations,
    }
    work = {
        "forward": policy.head_work(tokens, backward=False),
        "backward": max(policy.head_work(tokens), policy.layer_work(*passes[-1])),
    }
    for phase in work:
        copies = sum(model.copies(phase) for model in models)
        phases[phase] = update | {"copies of weights": copies, "work": work[phase]}
    full = held | {"gradients": 0 if job.strategy == "DDP" else gradients}  # DDP: in the buckets
    at_the_end = full | {"work": 2 * policy.gradient_of_embedding()}
    phases["backward"] = max(phases["backward"], at_the_end, key=total)
    return phases | {"optimizer": full}  # fused AdamW needs no copies


def total(terms):
    return sum(terms.values())


def report(args):
    """Yield the lines of the estimate for these options."""
    job = launched_job()
    sizes = read_sizes(args.model_name_or_path, head=isinstance(args, RolloutArgs))
    critic = None
    if getattr(args, "critic", None) == "separate":
        critic = read_sizes(args.critic_path or args.model_name_or_path, head=False)
    rewards = [spec for spec in getattr(args, "reward", []) if spec.startswith("rm:")]
    scorers = [read_sizes(spec.removeprefix("rm:"), head=False) for spec in rewards]
    compute = functools.partial(estimate, sizes=sizes, critic=critic, reward_models=scorers)
    phases = compute(args, job)
    layers = f"{sizes.layers} layers of width {sizes.hidden}"
    yield f"{args.model_name_or_path}: {sizes.weights:,} weights, {layers}"
    mixed = " and mixed precision bf16" if job.bf16 else ""
    launch = f"{job.strategy} on {job.processes} GPUs" if job.processes > 1 else "one GPU"
    yield f"estimate for {launch}, {args.dtype}{mixed}, not measured; GiB per process:"
    yield ""
    yield f"{'':18}" + "".join(f"{phase:>11}" for phase in phases)
    for term in dict.fromkeys(term for terms in phases.values() for term in terms):
        values = [terms.get(term, 0) / GIB for terms in phases.values()]
        if any(values):
            yield f"{term:18}" + "".join(f"{value:11.2f}" for value in values)
    yield f"{'all':18}" + "".join(f"{total(terms) / GIB:11.2f}" for terms in phases.values())
    yield ""
    phase = max(phases, key=lambda phase: total(phases[phase]))
    peak = total(phases[phase])
    yield f"peak: {peak / GIB:.1f} GiB, in {phase}"
    for option, lower in less_memory(args, job, compute, peak):
        yield f"  {lower / GIB:.1f} GiB with {option}"
    fitting = largest_micro_batches(args, job, compute)
    yield "largest --micro_batch_size by card: " + ", ".join(
        f"{card} GB {size or 'none'}" for card, size in fitting.items()
    )
    shape = update_shape(args, job, sizes)
    lengths = f"{shape.prompt} + {shape.completion} tokens"
    yield f"Rows are as long as allowed: {lengths}, {shape.rows} of them in a forward."
    if isinstance(args, RolloutArgs) and "evaluation" not in phases:
        yield "Not counted: an evaluation of all prompts at once; --generate_batch_size limits it."
    yield "The CUDA context and fragmentation come on top. docs/run.md says what was checked."


def largest_micro_batches(args, job, compute):
    """Return {GiB of a card: the largest power of two that fits as --micro_batch_size, or None}."""
    smallest = 2 if hasattr(args, "pairs_per_step") else 1  # pairs are not split
    sizes = [smallest * 2**i for i in range(10)]
    peaks = {}
    for size in sizes:
        phases = compute(dataclasses.replace(args, micro_batch_size=size), job)
        peaks[size] = max(map(total, phases.values()))
    found = {}
    for card in CARDS:
        fitting = [size for size in sizes if peaks[size] <= USABLE * card * GIB]
        found[card] = max(fitting, default=None)
    return found


def less_memory(args, job, compute, peak):
    """Return [(text, peak)] of the three options or launches that lower the peak most, each alone."""
    options = {"gradient_checkpointing": True, "kl_coef": 0}
    options["micro_batch_size"] = max(2, args.micro_batch_size // 4)
    if isinstance(args, RolloutArgs) and not job.sharded:  # others do not support LoRA
        options["lora_rank"] = 16
    if args.lora_rank:  # only the frozen base: bfloat16 loses small updates of trained weights
        options["dtype"] = "bfloat16"
    if isinstance(args, RolloutArgs):
        rows = max((rows for rows, _ in generate_calls(args, job).values()), default=0)
        options["generate_batch_size"] = max(args.eval_samples, rows // 4)
    peaks = {}
    for name, value in options.items():
        if hasattr(args, name):
            text = f"--{name}" if value is True else f"--{name} {value}"
            phases = compute(dataclasses.replace(args, **{name: value}), job)
            peaks[text] = max(map(total, phases.values()))
    if args.dtype == "float32" and not job.bf16:
        phases = compute(args, job._replace(bf16=True))
        peaks["accelerate launch --mixed_precision bf16"] = max(map(total, phases.values()))
    if job.strategy == "DDP":
        phases = compute(args, job._replace(strategy="FSDP2"))
        peaks["configs/fsdp2.yaml"] = max(map(total, phases.values()))
    lower = [each for each in peaks.items() if each[1] < 0.99 * peak]
    return sorted(lower, key=lambda each: each[1])[:3]


def main(words=None):
    words = sys.argv[1:] if words is None else words
    if words[:1] in ([], ["--help"], ["-h"]):
        return print(__doc__)
    name = words[0].removesuffix(".py")
    if importlib.util.find_spec(name) is None or not hasattr(importlib.import_module(name), "Args"):
        raise Exit(f"{words[0]} is not a script: name one, such as grpo.py, then its options")
    args = parse_args(importlib.import_module(name).Args, words[1:])
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(report(args)))


if __name__ == "__main__":
    with clean_exit():
        main()
