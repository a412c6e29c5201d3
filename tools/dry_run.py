"""`--dry_run`: what a step takes of memory on each process, from config.json and the options alone.

The scripts load this file by its path when they are asked. Each term has its reason beside it. docs/scale.md has
tables, and the measurements that the terms were checked against (`python tools/memory.py --check`).
"""

import dataclasses
import functools
import math
import os
from typing import NamedTuple

import torch

from common.errors import refuse, world_size
from common.generation import RoomyLayer
from common.harness.args import RolloutArgs
from common.harness.distributed import choose_device
from common.harness.loading import load_errors, whole_model
from common.policy import CHUNK_ELEMENTS, CHUNK_ELEMENTS_GPU

GIB = 2**30
TERMS = "weights, AdamW, reference, gradient buckets, copies of weights, gradients, key-value cache, activations, work"


class Sizes:
    """The sizes of a dense decoder `lm` in elements: of the whole model, or without `head` of its backbone with
    a head of one output."""

    def __init__(self, lm, head=True):
        config, output = lm.config.get_text_config(), lm.get_output_embeddings()
        matrices = [m.weight for m in lm.modules() if type(m).__name__ in ("Linear", "Conv1D") and m is not output]
        tied = output.weight is lm.get_input_embeddings().weight
        removed = 0 if head or tied else output.weight.numel()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.weights = sum(parameter.numel() for parameter in lm.parameters()) - removed  # a tied embedding counts once
        self.linear = sum(weight.numel() for weight in matrices) + (output.weight.numel() if head else 0)
        self.embedding = output.weight.numel()  # the largest matrix
        self.tied = tied and head
        self.adapters = sum(sum(weight.shape) for weight in matrices)  # of LoRA of rank 1, which the head has not
        self.hidden, self.layers, self.heads = config.hidden_size, config.num_hidden_layers, heads
        self.query = heads * head_size
        self.key = (getattr(config, "num_key_value_heads", None) or heads) * head_size
        self.intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        self.vocabulary = output.weight.shape[0] if head else 0


class Job(NamedTuple):
    """The processes of a run, as its launcher starts them."""

    processes: int = 1
    strategy: str = "single"  # single, DDP, FSDP2, ZeRO-2, ZeRO-3
    bf16: bool = False  # accelerate's mixed precision
    gpu: bool = True  # else CPU, where AdamW and sampling make other copies

    @property
    def share(self):
        """The part of the gradients and of AdamW's moments that each process holds."""
        return 1 if self.strategy in ("single", "DDP") else 1 / self.processes

    @property
    def weight_share(self):
        """The part of the weights that each process holds."""
        return 1 if self.strategy == "ZeRO-2" else self.share


class Terms:
    """The memory of one model under these options and this job, in bytes of one process, term by term."""

    def __init__(self, sizes, args, job):
        self.sizes, self.args, self.job = sizes, args, job
        self.zero, bf16 = job.strategy.startswith("ZeRO"), args.dtype == "bfloat16"
        self.precision = "autocast" if job.bf16 else "float32"  # autocast: float32 weights are cast to bfloat16
        if bf16 or (job.bf16 and (self.zero or job.strategy == "FSDP2")):
            self.precision = "bfloat16"  # the weights of a forward are
        # Bytes of a number in linear layers and attention, in the residual stream, of a weight, of a trained one.
        self.size = 4 if self.precision == "float32" else 2
        self.stream = 2 if self.precision == "bfloat16" else 4
        self.weight = 2 if bf16 or (job.bf16 and self.zero) else 4
        self.trained = (args.lora_rank * sizes.adapters, 4) if args.lora_rank else (sizes.weights, 2 if bf16 else 4)

    def held(self):
        """{term: bytes} of what one forward leaves to the next."""
        sizes, job, (number, size) = self.sizes, self.job, self.trained
        adapters = 4 * self.args.lora_rank * sizes.adapters
        buckets = number * size if job.strategy == "DDP" else min(number, 5e8) * self.weight if self.zero else 0
        referred = getattr(self.args, "kl_coef", 0) and not self.args.lora_rank and sizes.vocabulary
        return {
            # DeepSpeed holds weights in bfloat16. FSDP2 holds them in float32, and gathers them in bfloat16.
            "weights": (self.weight * sizes.weights + adapters) * job.weight_share,
            # Two moments in the dtype of the weight; with DeepSpeed a float32 copy of the weight too, all in float32.
            "AdamW": number * (12 if self.zero else 2 * size) * job.share,
            # A copy of the policy, whole on each process. With adapters none: it is the policy without them.
            "reference": sizes.weights * self.stream if referred else 0,
            # DDP sends gradients in buckets that stay, and in which they lie after the last backward pass of a step;
            # those of the passes before it lie beside them. DeepSpeed has one bucket, of 5e8 at most.
            "gradient buckets": buckets,
            # One for each trained weight, in the dtype in which it is held. `zero_grad` frees them: a rollout has none.
            "gradients": number * (self.weight if self.zero else size) * job.share,
        }

    def copies(self, phase):
        """Bytes of the copies of weights that a phase computes with.

        Autocast makes a bfloat16 one of each matrix that is trained, once for a forward, and the backward pass keeps
        it; of a frozen one it makes one for each pass (over prompts, over completions). With gradient checkpointing the
        backward pass has those of one layer and of the head. Sharded weights are gathered: all for sampling, in an
        update the embedding, the head and two layers at a time (FSDP2), or at most 1e9 weights (ZeRO-3).
        """
        sizes, frozen, recomputed = self.sizes, self.args.lora_rank, self.args.gradient_checkpointing
        if self.precision == "autocast":
            head = sizes.embedding if sizes.vocabulary else 0
            if (frozen and phase == "rollout") or (recomputed and (frozen or phase == "backward")):
                return 2 * (sizes.linear - head) / sizes.layers + 2 * head
            passes = 2 if frozen and phase != "rollout" and sizes.vocabulary else 1
            return 2 * passes * (sizes.linear - head) + 2 * head
        if self.job.weight_share == 1:
            return 0
        ends = sizes.embedding * (1 if sizes.tied else 2)
        part = 1e9 if self.job.strategy == "ZeRO-3" else ends + 2 * (sizes.weights - ends) / sizes.layers
        return self.stream * (sizes.weights if phase == "rollout" else min(part, sizes.weights))

    def rollout(self, rows, n):
        """{term: bytes} of sampling `rows` completions, n of a prompt: the larger of the pass over the prompts, and of
        the last token of all rows.

        Prompts: the widest point of a layer without gradients, three of the MLP's width, the residual stream and two
        copies of it in float32; and the mask, as booleans and in the dtype of the attention. Last token: (rows, V) of
        logits, of float32 scores where they are other numbers, of probabilities, and on a GPU of a random number for
        each of them, on CPU of the cumulative sum.
        """
        sizes, args, size, prompt = self.sizes, self.args, self.size, self.args.max_prompt_tokens
        prompts = rows if args.rollout == "hf" else math.ceil(rows / n)
        layer = 3 * sizes.intermediate * size + 3 * sizes.hidden * 4 + prompt * (1 + size)
        scores = (0 if size == 4 else 2) + (4 if args.temperature != 1 else 0)
        logits = sizes.vocabulary * (4 + scores + 4 + 4)
        cached = self.stream if args.rollout == "hf" else size  # `decode` casts to what attention computes in
        first = {"key-value cache": self.cache(prompts, prompt, 1, self.stream), "work": prompts * prompt * layer}
        last = {"key-value cache": self.cache(rows, prompt, args.max_new_tokens, cached), "work": rows * logits}
        return {"copies of weights": self.copies("rollout")} | max(first, last, key=lambda terms: sum(terms.values()))

    def cache(self, rows, prompt, completion, size):
        """Bytes of keys and values of `size` of all rows in all layers, with the spare room of a layer, and of the
        layer that is copied as it grows."""
        tokens = prompt + math.ceil((completion - 1) / RoomyLayer.ROOM) * RoomyLayer.ROOM
        return rows * tokens * self.sizes.key * 2 * size * (self.sizes.layers + 1)

    def activations(self, rows, queries, keys):
        """Bytes that one pass over (rows, queries) tokens which attend to `keys` tokens keeps for the backward pass."""
        hidden, tokens = self.sizes.hidden, rows * queries
        layer = self.layer_activations(rows, queries, keys)
        if self.args.gradient_checkpointing:  # the inputs of the layers
            layer = tokens * self.stream * hidden
        last = tokens * (4 + self.stream) * hidden  # the final norm, as in a layer
        return self.sizes.layers * layer + last + tokens * keys  # and the mask

    def layer_activations(self, rows, queries, keys):
        """Bytes of the tensors that a decoder layer of transformers saves: RMSNorm, attention, gated MLP.

        Two norms: the input in float32, its scale, and the normalized input in the dtype of the residual stream. Linear
        layers: their inputs; one for queries, keys and values, one for gate and up (under autocast each casts its own).
        Attention: queries, keys and values repeated to all heads (as with any padding mask), its output, a number for
        each head, and the mask, which sdpa turns into numbers in each layer; eager keeps the probabilities of each head
        instead. MLP: gate, its activation, up and the product, which is the input of the last linear layer.

        Linear layers that LoRA freezes keep no input, nor do frozen norms, but the adapters keep theirs: in float32,
        and for each linear layer its own where the model is in bfloat16.
        """
        sizes, size, stream, rank = self.sizes, self.size, self.stream, self.args.lora_rank
        H, attention = sizes.hidden, self.args.attn_implementation
        norms = 2 * (4 * H + 4 + stream * H)
        linear = (3 + 2 if self.precision == "autocast" else 1 + 1) * size * H
        per_token = norms + linear + size * (2 * sizes.query + 4 * sizes.intermediate) + 4 * sizes.heads
        if rank:
            per_token -= 2 * stream * H
            per_token += 7 * rank * size
            if self.precision == "bfloat16":
                per_token += 4 * (5 * H + sizes.query + sizes.intermediate) - linear - size * sizes.intermediate
        repeated = sizes.key if sizes.key * sizes.heads == sizes.query else sizes.query  # one head is not copied
        per_mask = size
        if attention == "eager":
            per_mask = sizes.heads * (4 if size == 4 else 6)
        elif attention != "sdpa":
            per_mask = 0
        return rows * queries * per_token + rows * keys * 2 * repeated * size + rows * queries * keys * per_mask

    def head_work(self, tokens, backward=True):
        """Bytes of the (tokens, V) tensors of the head that exist at once, in one chunk of it.

        Forward: the logits, in bfloat16 too where they are that, and two products of the entropy. Backward: five in
        float32, the logits, the gradient through `gather`, and for `logsumexp` a difference, its exponential and the
        gradient; with several chunks also the sum of the gradients of the head's matrix.
        """
        elements = tokens * self.sizes.vocabulary
        chunk = min(elements, CHUNK_ELEMENTS_GPU if self.job.gpu else CHUNK_ELEMENTS)
        if not backward:
            return (12 if self.size == 4 else 14) * chunk
        return 20 * chunk + (self.gradient_of_embedding() if elements > chunk else 0)

    def layer_work(self, rows, queries, keys):
        """Bytes of the gradients in the backward pass of the last layer: in the MLP of product, gate and up, less the
        product, which is freed, or in the attention of queries, output, keys and values; of the residual stream; and of
        the embedding or head. With gradient checkpointing the layer's activations are there again."""
        sizes, tokens = self.sizes, rows * queries
        again = self.layer_activations(rows, queries, keys) if self.args.gradient_checkpointing else 0
        wider = max(tokens * sizes.intermediate, rows * (queries + keys) * sizes.query) * 2 * self.size
        return again + wider + tokens * 2 * 4 * sizes.hidden + self.gradient_of_embedding()

    def gradient_of_embedding(self):
        """Bytes of the gradient of embedding or head that lies beside `.grad` at the end of a backward pass."""
        return 0 if self.args.lora_rank else self.trained[1] * self.sizes.embedding

    def adamw_copy(self):
        """Bytes that AdamW computes with: on CPU twice the root of a matrix's second moments, fused on a GPU none."""
        return 0 if self.job.gpu else 2 * self.gradient_of_embedding()


def launched_job():
    """The `Job` of this process, from the environment variables that `accelerate launch` sets."""
    from accelerate.utils import parse_flag_from_env

    strategy = "FSDP2" if parse_flag_from_env("ACCELERATE_USE_FSDP") else "single" if world_size() == 1 else "DDP"
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        strategy = f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    return Job(world_size(), strategy, os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16")


def read_sizes(args, option="model_name_or_path", head=True):
    """The `Sizes` of the model that `option` names. Only config.json is read: the weights are counted on the meta
    device, which holds none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with load_errors(args, option, "no model"):
        config = AutoConfig.from_pretrained(whole_model(args, option))
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
    if args.step_size == "pairs_per_step":
        lengths.insert(0, (1, args.max_length - 1))  # what was cut to --max_length; dpo.py may sample its own
        group, most, step_rows = 2, args.micro_batch_size // 2 * 2, 2 * args.pairs_per_step
    else:
        group, most = args.group_size, args.micro_batch_size
        step_rows = args.prompts_per_step * group // args.num_minibatches
        if args.micro_batch_tokens:
            most = max(1, args.micro_batch_tokens // (args.max_prompt_tokens + args.max_new_tokens))
    prompt, completion = max(lengths, key=sum)
    step_rows //= job.processes
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
    full = held | {"gradients": 0 if job.strategy == "DDP" else gradients}  # else they lie in the buckets
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
    yield "A CUDA context and fragmentation come on top. docs/scale.md says what was checked."


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
