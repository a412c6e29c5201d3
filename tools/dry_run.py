"""What a step of a script takes of memory on each process, from config.json and the options alone.

    python tools/dry_run.py grpo.py --model_name_or_path Qwen/Qwen2.5-7B ...
    accelerate launch --config_file configs/fsdp2.yaml tools/dry_run.py grpo.py ...

Nothing is loaded or written. Each term has its reason beside it. docs/run.md has tables, and the
measurements that the terms were checked against (`python tools/memory.py --check`).
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

from harness.args import RunArgs, parse_args
from harness.errors import InputError, clean_exit, one_line, world_size
from harness.loading import adapter_base, model_path
from common.model import CHUNK_ELEMENTS
from piped import end_with_the_reader

GIB = 2**30
ROOM = 64  # tokens by which a layer of the cache grows
TERMS = (
    "weights",
    "AdamW",
    "reference",
    "gradient buckets",
    "copies of weights",
    "gradients",
    "key-value cache",
    "activations",
    "work",
)


class Sizes:
    """The sizes of a dense decoder `lm` in elements.

    Without `head` they are those of its backbone with a head of one output.
    """

    def __init__(self, lm, head=True):
        config = lm.config.get_text_config()
        output = lm.get_output_embeddings()
        linear = [
            module for module in lm.modules() if type(module).__name__ in ("Linear", "Conv1D")
        ]
        matrices = [module.weight for module in linear if module is not output]
        tied = output.weight is lm.get_input_embeddings().weight
        removed = 0 if head or tied else output.weight.numel()
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        # A tied embedding counts once.
        self.weights = sum(parameter.numel() for parameter in lm.parameters()) - removed
        self.linear = sum(weight.numel() for weight in matrices)
        if head:
            self.linear += output.weight.numel()
        self.embedding = output.weight.numel()  # the largest matrix
        self.tied = tied and head
        # Of LoRA of rank 1, which the head has not.
        self.adapters = sum(sum(weight.shape) for weight in matrices)
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
        self.sizes = sizes
        self.args = args
        self.job = job
        self.zero = job.strategy.startswith("ZeRO")
        bf16 = args.dtype == "bfloat16"
        # Autocast: float32 weights are cast to bfloat16.
        self.precision = "autocast" if job.bf16 else "float32"
        if bf16 or (job.bf16 and (self.zero or job.strategy == "FSDP2")):
            self.precision = "bfloat16"  # the weights of a forward are
        # Bytes of a number in linear layers and attention, in the residual stream, and of a weight;
        # the number of trained weights, and the bytes of one.
        self.size = 4 if self.precision == "float32" else 2
        self.stream = 2 if self.precision == "bfloat16" else 4
        self.weight = 2 if bf16 or (job.bf16 and self.zero) else 4
        self.trained = (sizes.weights, 2 if bf16 else 4)
        if args.lora_rank:
            self.trained = (args.lora_rank * sizes.adapters, 4)

    def held(self):
        """{term: bytes} of what one forward leaves to the next."""
        sizes = self.sizes
        job = self.job
        number, size = self.trained
        adapters = 4 * self.args.lora_rank * sizes.adapters
        buckets = 0
        if job.strategy == "DDP":
            buckets = number * size
        elif self.zero:
            buckets = min(number, 5e8) * self.weight
        referred = getattr(self.args, "kl_coef", 0) and not self.args.lora_rank and sizes.vocabulary
        return {
            # DeepSpeed holds weights in bfloat16. FSDP2 holds them in float32, and gathers bfloat16.
            "weights": (self.weight * sizes.weights + adapters) * job.weight_share,
            # Two moments in the dtype of the weight; with DeepSpeed also a copy of it, all in float32.
            "AdamW": number * (12 if self.zero else 2 * size) * job.share,
            # A copy of the policy, whole on each process. With adapters none: it is the policy without them.
            "reference": sizes.weights * self.stream if referred else 0,
            # DDP sends gradients in buckets that stay, and in which they lie after the last backward
            # pass of a step; those of the passes before it lie beside them. DeepSpeed has one bucket,
            # of 5e8 at most.
            "gradient buckets": buckets,
            # One for each trained weight, in the dtype in which it is held. `zero_grad` frees them: a
            # rollout has none.
            "gradients": number * (self.weight if self.zero else size) * job.share,
        }

    def copies(self, phase):
        """Bytes of the copies of weights that a phase computes with.

        Autocast makes a bfloat16 one of each matrix that is trained, once for a forward, and the
        backward pass keeps it; of a frozen one it makes one for each pass (over prompts, over
        completions). With gradient checkpointing the backward pass has those of one layer and of the
        head. Sharded weights are gathered: all for sampling, in an update the embedding, the head and
        two layers at a time (FSDP2), or at most 1e9 weights (ZeRO-3).
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
        if self.job.weight_share == 1:
            return 0
        ends = sizes.embedding * (1 if sizes.tied else 2)
        part = (
            1e9
            if self.job.strategy == "ZeRO-3"
            else ends + 2 * (sizes.weights - ends) / sizes.layers
        )
        return self.stream * (sizes.weights if phase == "rollout" else min(part, sizes.weights))

    def rollout(self, rows, n):
        """{term: bytes} of sampling `rows` completions, n of a prompt.

        It is the larger of the pass over the prompts, and of the last token of all rows.

        Prompts: the widest point of a layer without gradients, three of the MLP's width, the residual
        stream and two copies of it in float32; and the mask, as booleans and in the dtype of the
        attention. Last token: (rows, V) of logits, of float32 scores where they are other numbers, of
        probabilities, and on a GPU of a random number for each of them, on CPU of the cumulative sum.
        """
        sizes = self.sizes
        args = self.args
        prompt = args.max_prompt_tokens
        prompts = math.ceil(rows / n) if args.fast else rows  # stock `generate` repeats them
        layer = 3 * sizes.intermediate * self.size + 3 * sizes.hidden * 4 + prompt * (1 + self.size)
        scores = (0 if self.size == 4 else 2) + (4 if args.temperature != 1 else 0)
        logits = sizes.vocabulary * (4 + scores + 4 + 4)
        cached = (
            self.size if args.fast else self.stream
        )  # fast/ casts to what attention computes in
        first = {"key-value cache": self.cache(prompts, prompt, 1, self.stream)}
        first["work"] = prompts * prompt * layer
        last = {"key-value cache": self.cache(rows, prompt, args.max_new_tokens, cached)}
        last["work"] = rows * logits
        return {"copies of weights": self.copies("rollout")} | max(first, last, key=total)

    def cache(self, rows, prompt, completion, size):
        """Bytes of keys and values of `size` of all rows in all layers, with the spare room of a layer.

        One more layer is there as it is copied to grow.
        """
        tokens = prompt + math.ceil((completion - 1) / ROOM) * ROOM
        return rows * tokens * self.sizes.key * 2 * size * (self.sizes.layers + 1)

    def activations(self, rows, queries, keys):
        """Bytes that a pass over (rows, queries) tokens keeps for the backward pass.

        The tokens attend to `keys` tokens.
        """
        hidden = self.sizes.hidden
        tokens = rows * queries
        layer = self.layer_activations(rows, queries, keys)
        if self.args.gradient_checkpointing:  # the inputs of the layers
            layer = tokens * self.stream * hidden
        last = tokens * (4 + self.stream) * hidden  # the final norm, as in a layer
        return self.sizes.layers * layer + last + tokens * keys  # and the mask

    def layer_activations(self, rows, queries, keys):
        """Bytes of the tensors that a decoder layer of transformers saves: RMSNorm, attention, gated MLP.

        Two norms: the input in float32, its scale, and the normalized input in the dtype of the
        residual stream. Linear layers: their inputs; one for queries, keys and values, one for gate
        and up (under autocast each casts its own). Attention: queries, keys and values repeated to
        all heads (as with any padding mask), its output, a number for each head, and the mask, which
        sdpa turns into numbers in each layer; eager keeps the probabilities of each head instead.
        MLP: gate, its activation, up and the product, which is the input of the last linear layer.

        Linear layers that LoRA freezes keep no input, nor do frozen norms, but the adapters keep
        theirs: in float32, and for each linear layer its own where the model is in bfloat16.
        """
        sizes = self.sizes
        size = self.size
        hidden = sizes.hidden
        rank = self.args.lora_rank
        norms = 2 * (4 * hidden + 4 + self.stream * hidden)
        linear = (3 + 2 if self.precision == "autocast" else 1 + 1) * size * hidden
        per_token = (
            norms + linear + size * (2 * sizes.query + 4 * sizes.intermediate) + 4 * sizes.heads
        )
        if rank:
            per_token -= 2 * self.stream * hidden
            per_token += 7 * rank * size
            if self.precision == "bfloat16":
                per_token += 4 * (5 * hidden + sizes.query + sizes.intermediate)
                per_token -= linear + size * sizes.intermediate
        # One head is not copied.
        repeated = sizes.key if sizes.key * sizes.heads == sizes.query else sizes.query
        per_key = 2 * repeated * size
        return rows * (queries * per_token + keys * per_key + queries * keys * self.mask_size())

    def mask_size(self):
        """Bytes of a layer for each pair of a query and a key."""
        attention = self.args.attn_implementation
        if attention == "eager":
            return self.sizes.heads * (4 if self.size == 4 else 6)
        return self.size if attention in (None, "sdpa") else 0

    def head_work(self, tokens, backward=True):
        """Bytes of the (tokens, V) tensors of the head that exist at once, in one chunk of it.

        Forward: the logits, in bfloat16 too where they are that, and two products of the entropy.
        Backward: five in float32, the logits, the gradient through `gather`, and for `logsumexp` a
        difference, its exponential and the gradient; with several chunks also the sum of the
        gradients of the head's matrix.
        """
        elements = tokens * self.sizes.vocabulary
        chunk = min(elements, CHUNK_ELEMENTS)
        if not backward:
            return (12 if self.size == 4 else 14) * chunk
        return 20 * chunk + (self.gradient_of_embedding() if elements > chunk else 0)

    def layer_work(self, rows, queries, keys):
        """Bytes of the gradients in the backward pass of the last layer.

        They are in the MLP those of product, gate and up, less the product, which is freed, or in the
        attention those of queries, output, keys and values; that of the residual stream; and that of
        the embedding or head. With gradient checkpointing the layer's activations are there again.
        """
        sizes = self.sizes
        tokens = rows * queries
        again = 0
        if self.args.gradient_checkpointing:
            again = self.layer_activations(rows, queries, keys)
        wider = (
            max(tokens * sizes.intermediate, rows * (queries + keys) * sizes.query) * 2 * self.size
        )
        return again + wider + tokens * 2 * 4 * sizes.hidden + self.gradient_of_embedding()

    def gradient_of_embedding(self):
        """Bytes of the gradient of embedding or head, beside `.grad` at the end of a backward pass."""
        return 0 if self.args.lora_rank else self.trained[1] * self.sizes.embedding

    def adamw_copy(self):
        """Bytes that AdamW computes with: on CPU twice the root of a matrix's second moments.

        Fused on a GPU it needs none.
        """
        return 0 if self.job.gpu else 2 * self.gradient_of_embedding()


def launched_job():
    """The `Job` of this process, from the environment variables that `accelerate launch` sets."""
    from accelerate.utils import parse_flag_from_env

    strategy = "single" if world_size() == 1 else "DDP"
    if parse_flag_from_env("ACCELERATE_USE_FSDP"):
        strategy = "FSDP2"
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        strategy = f"ZeRO-{os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"
    bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16"
    return Job(world_size(), strategy, bf16)


def read_sizes(name, head=True):
    """The `Sizes` of a model, a hub id or a folder.

    Only config.json is read: the weights are counted on the meta device, which holds none.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = model_path(name)
    try:
        config = AutoConfig.from_pretrained(adapter_base(path) or path)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # loaders raise nearly every type there is
        raise InputError(f"model {name}: no configuration: {one_line(error)}") from None
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
    lengths = [(args.max_prompt_tokens, args.max_new_tokens)] if isinstance(args, RunArgs) else []
    if hasattr(args, "pairs_per_step"):
        lengths.insert(0, (1, args.max_length - 1))  # of given pairs; dpo.py may sample its own
        group = 2
        most = args.micro_batch_size // 2 * 2
        step_rows = 2 * args.pairs_per_step
    else:
        group = args.group_size
        most = args.micro_batch_size
        step_rows = args.prompts_per_step * group // args.num_minibatches
    prompt, completion = max(lengths, key=sum)
    step_rows //= job.processes
    rows = min(most, step_rows)
    shares = args.fast and not args.gradient_checkpointing and job.strategy in ("single", "DDP")
    prompts = math.ceil(rows / group) if shares and group > 1 and sizes.vocabulary else 0
    return Shape(rows, prompts, prompt, completion, math.ceil(step_rows / rows))


def rollout_rows(args, job):
    """[(rows, completions of a prompt)] of the largest generate() call of a rollout and of an evaluation.

    They are those of one process, and None where an evaluation takes all prompts of a data set.
    """
    evaluation = args.eval_prompts or 0, args.eval_samples if args.eval_temperature > 0 else 1
    rollout = 1, evaluation[1]  # dpo.py samples in evaluations only
    if hasattr(args, "group_size"):
        rollout = args.prompts_per_step, args.group_size
    calls = []
    for number, samples in (rollout, evaluation):
        rows = math.ceil(number / job.processes) * samples
        if args.generate_batch_size:
            most = max(1, args.generate_batch_size // samples) * samples
            rows = min(rows, most) if number else most
        calls.append((rows or None, samples))
    return calls


def estimate(args, job, sizes, critic=None, scorers=()):
    """{phase: {term: bytes}} of one process; the peak of a step is its largest phase.

    `critic` are the sizes of a critic of ppo.py on a backbone of its own, `scorers` those of the
    reward models.
    """
    policy = Terms(sizes, args, job)
    shape = update_shape(args, job, sizes)
    phases = {}
    models = [policy, Terms(critic, args, job)] if critic else [policy]
    held = {term: sum(model.held()[term] for model in models) for term in policy.held()}
    held["weights"] += sum(scorer.weights for scorer in scorers) * (
        2 if args.dtype == "bfloat16" else 4
    )
    gradients = held.pop("gradients")
    if isinstance(args, RunArgs):
        for phase, (rows, n) in zip(
            ("rollout", "evaluation"), rollout_rows(args, job), strict=True
        ):
            if rows:
                phases[phase] = held | policy.rollout(rows, n)
    width = shape.prompt + shape.completion
    tokens = shape.rows * shape.completion
    passes = [(shape.rows, width, width)]
    if shape.prompts:
        of_prompts = shape.prompts, shape.prompt, shape.prompt
        passes = [of_prompts, (shape.rows, shape.completion - 1, width - 1)]
    activations = sum(model.activations(*each) for each in passes for model in models)
    activations += tokens * sizes.hidden * policy.size  # the states that are the head's input
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
    full = held | {
        "gradients": 0 if job.strategy == "DDP" else gradients
    }  # else they lie in the buckets
    at_the_end = full | {"work": 2 * policy.gradient_of_embedding()}
    phases["backward"] = max(phases["backward"], at_the_end, key=total)
    return phases | {"optimizer": full | {"work": sum(model.adamw_copy() for model in models)}}


def total(terms):
    return sum(terms.values())


def peak(phases):
    """The name of the largest phase, and its bytes."""
    phase = max(phases, key=lambda phase: total(phases[phase]))
    return phase, total(phases[phase])


def dry_run(args):
    """The lines of the estimate for these options."""
    job = launched_job()
    sizes = read_sizes(args.model_name_or_path, head=isinstance(args, RunArgs))
    critic = None
    if getattr(args, "critic", None) == "separate":
        critic = read_sizes(args.critic_path or args.model_name_or_path, head=False)
    rewards = [spec for spec in getattr(args, "reward", []) if spec.startswith("rm:")]
    scorers = [read_sizes(spec.removeprefix("rm:"), head=False) for spec in rewards]
    compute = functools.partial(estimate, sizes=sizes, critic=critic, scorers=scorers)
    return report(args, job, sizes, compute)


def report(args, job, sizes, compute):
    """The lines; `compute` is `estimate` for these models."""
    phases = compute(args, job)
    shape = update_shape(args, job, sizes)
    layers = f"{sizes.layers} layers of width {sizes.hidden}"
    yield f"{args.model_name_or_path}: {sizes.weights:,} weights, {layers}"
    where = f"each of {job.processes} GPUs ({job.strategy})" if job.processes > 1 else "one GPU"
    mixed = " with mixed precision bf16" if job.bf16 else ""
    yield f"computed for {where}, {args.dtype}{mixed}, not measured; GiB of one process:"
    yield ""
    yield f"{'':18}" + "".join(f"{phase:>11}" for phase in phases)
    for term in TERMS:
        values = [terms.get(term, 0) / GIB for terms in phases.values()]
        if any(values):
            yield f"{term:18}" + "".join(f"{value:11.2f}" for value in values)
    yield f"{'all':18}" + "".join(f"{total(terms) / GIB:11.2f}" for terms in phases.values())
    yield ""
    phase, most = peak(phases)
    yield f"peak: {most / GIB:.1f} GiB, in {phase}"
    for option, value in less_memory(args, job, compute, most):
        yield f"  {value / GIB:.1f} GiB with {option}"
    lengths = f"{shape.prompt} + {shape.completion} tokens"
    yield f"Rows are as long as allowed: {lengths}, {shape.rows} of them in a forward."
    if isinstance(args, RunArgs) and "evaluation" not in phases:
        extra = total(Terms(sizes, args, job).rollout(100 * args.eval_samples, args.eval_samples))
        each = f"{extra / GIB:.1f} GiB for each 100 of a process"
        yield f"Not counted: an evaluation samples all its prompts at once, {each};"
        yield "--generate_batch_size or --eval_prompts limits it."
    yield "Weights are counted. The rest is an estimate for dense decoders, and for nothing else."
    yield "A CUDA context and fragmentation come on top. docs/run.md says what was checked."


def less_memory(args, job, compute, most):
    """[(text, peak)] of the three options, or ways to launch, that lower the peak most, each alone."""
    options = {"gradient_checkpointing": True, "kl_coef": 0, "lora_rank": 16}
    if (
        args.lora_rank
    ):  # only the base is bfloat16 then; weights that train would lose small updates
        options["dtype"] = "bfloat16"
    name = "micro_batch_tokens" if getattr(args, "micro_batch_tokens", 0) else "micro_batch_size"
    options[name] = max(2, getattr(args, name) // 4)
    if isinstance(args, RunArgs):
        rows, n = rollout_rows(args, job)[0]
        options["generate_batch_size"] = max(n, args.eval_samples, rows // 4)
    found = {}
    for name, value in options.items():
        if name in vars(args):
            text = f"--{name}" if value is True else f"--{name} {value}"
            found[text] = peak(compute(dataclasses.replace(args, **{name: value}), job))[1]
    if args.dtype == "float32" and not job.bf16:
        found["accelerate launch --mixed_precision bf16"] = peak(
            compute(args, job._replace(bf16=True))
        )[1]
    if job.strategy == "DDP":
        found["configs/fsdp2.yaml"] = peak(compute(args, job._replace(strategy="FSDP2")))[1]
    lower = [each for each in found.items() if each[1] < 0.99 * most]
    return sorted(lower, key=lambda each: each[1])[:3]


def main(words=None):
    words = sys.argv[1:] if words is None else words
    if words[:1] in ([], ["--help"], ["-h"]):
        return print(__doc__)
    name = words[0].removesuffix(".py")
    if importlib.util.find_spec(name) is None or not hasattr(importlib.import_module(name), "Args"):
        raise InputError(
            f"{words[0]} is no script: name one such as grpo.py, and its options after it"
        )
    args = parse_args(importlib.import_module(name).Args, words[1:])
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(dry_run(args)))


if __name__ == "__main__":
    end_with_the_reader()
    with clean_exit():
        main()
