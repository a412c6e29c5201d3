"""The terms of the memory that a step takes on each process, computed from the sizes of a model and the options.

Each function is one term, in bytes, with its reason; `common/harness/dry_run.py` adds them up. docs/memory.md has
tables, and the measurements that the terms were checked against (`python tools/memory.py --check`).
"""

import math
from typing import NamedTuple

from common.generation import RoomyLayer
from common.policy import CHUNK_ELEMENTS


class Sizes(NamedTuple):
    """The numbers of a dense decoder. All that is counted here is counted in elements, not in bytes."""

    weights: int  # all; a tied embedding counts once
    linear: int  # of these: matrices of linear layers, with a tied or untied head
    embedding: int  # the largest matrix
    tied: bool
    adapters: int  # weights of LoRA adapters of rank 1 on all linear layers but the head
    hidden: int
    layers: int
    heads: int
    query: int  # heads x head size
    key: int  # heads of keys x head size
    intermediate: int
    vocabulary: int  # 0: a head of one output


class Job(NamedTuple):
    """How a launcher starts the processes."""

    processes: int = 1
    strategy: str = "single"  # single, DDP, FSDP2, ZeRO-2, ZeRO-3
    bf16: bool = False  # accelerate's mixed precision
    gpu: bool = True  # else CPU, where AdamW and sampling make other copies

    def share(self, of):
        """The part of weights, gradients or AdamW's state that lies on one process."""
        whole = {"weights": ("single", "DDP", "ZeRO-2"), "gradients": ("single", "DDP"), "AdamW": ("single", "DDP")}
        return 1 if self.strategy in whole[of] else 1 / self.processes


def sizes_of(lm, head=True):
    """The sizes of a causal language model, with its head or as a backbone with a head of one output."""
    config, output = lm.config.get_text_config(), lm.get_output_embeddings()
    tied = output.weight is lm.get_input_embeddings().weight
    matrices = [m.weight for m in lm.modules() if type(m).__name__ in ("Linear", "Conv1D") and m is not output]
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    removed = 0 if head or tied else output.weight.numel()
    return Sizes(
        weights=sum(parameter.numel() for parameter in lm.parameters()) - removed,
        linear=sum(weight.numel() for weight in matrices) + (output.weight.numel() if head else 0),
        embedding=output.weight.numel(),
        tied=tied and head,
        adapters=sum(sum(weight.shape) for weight in matrices),
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        query=heads * head_size,
        key=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=output.weight.shape[0] if head else 0,
    )


def precision(args, job):
    """float32; bfloat16 where the weights of a forward are; autocast where float32 weights are cast to it."""
    if args.dtype == "bfloat16" or (job.bf16 and job.strategy in ("FSDP2", "ZeRO-2", "ZeRO-3")):
        return "bfloat16"
    return "autocast" if job.bf16 else "float32"


# What lies there all the time


def weight_bytes(args, job):
    """Bytes of a weight that is held. DeepSpeed holds it in bfloat16, FSDP2 in float32 and gathers it in bfloat16."""
    return 2 if args.dtype == "bfloat16" or (job.bf16 and job.strategy.startswith("ZeRO")) else 4


def trained(sizes, args):
    """Number and bytes of the weights that are trained: all, or float32 adapters."""
    rank = args.lora_rank
    return (rank * sizes.adapters, 4) if rank else (sizes.weights, 2 if args.dtype == "bfloat16" else 4)


def weights(sizes, args, job):
    adapters = 4 * args.lora_rank * sizes.adapters
    return (weight_bytes(args, job) * sizes.weights + adapters) * job.share("weights")


def adamw(sizes, args, job):
    """Two moments in the dtype of the weight; with DeepSpeed a float32 copy of the weight too, all in float32."""
    number, size = trained(sizes, args)
    return number * (12 if job.strategy.startswith("ZeRO") else 2 * size) * job.share("AdamW")


def gradients(sizes, args, job):
    """One for each trained weight, in the dtype in which it is held. `zero_grad` frees them: a rollout has none."""
    number, size = trained(sizes, args)
    size = weight_bytes(args, job) if job.strategy.startswith("ZeRO") else size
    return number * size * job.share("gradients")


def buckets(sizes, args, job):
    """DDP sends gradients in buckets that stay: a second copy of them. DeepSpeed has one bucket, of 5e8 at most."""
    number, size = trained(sizes, args)
    if job.strategy == "DDP":
        return number * size
    return min(number, 5e8) * weight_bytes(args, job) if job.strategy.startswith("ZeRO") else 0


def reference(sizes, args, job):
    """A copy of the policy, whole on each process. With adapters none: it is the policy without them."""
    if not getattr(args, "kl_coef", 0) or args.lora_rank:
        return 0
    return sizes.weights * (2 if precision(args, job) == "bfloat16" else 4)


def copies(sizes, args, job, phase):
    """Copies of weights to compute with.

    Autocast makes a bfloat16 one of each matrix that is trained, once for a forward, and the backward pass keeps it; of
    a frozen one it makes one for each pass (over prompts, over completions). With gradient checkpointing the backward
    pass has those of one layer and of the head. Sharded weights are gathered: all for sampling, in an update the
    embedding, the head and two layers at a time (FSDP2), or at most 1e9 weights (ZeRO-3).
    """
    frozen, head = args.lora_rank, sizes.embedding if sizes.vocabulary else 0
    if precision(args, job) == "autocast":
        if (frozen and phase == "rollout") or (args.gradient_checkpointing and (frozen or phase == "backward")):
            return 2 * (sizes.linear - head) / sizes.layers + 2 * head
        passes = 2 if frozen and phase != "rollout" and not args.gradient_checkpointing and sizes.vocabulary else 1
        return 2 * passes * (sizes.linear - head) + 2 * head
    if job.share("weights") == 1:
        return 0
    size = 2 if precision(args, job) == "bfloat16" else 4
    ends = sizes.embedding * (1 if sizes.tied else 2)
    part = 1e9 if job.strategy == "ZeRO-3" else ends + 2 * (sizes.weights - ends) / sizes.layers
    return size * (sizes.weights if phase == "rollout" else min(part, sizes.weights))


# Rollout


def cache(sizes, args, job, rows, prompt, completion):
    """Keys and values of all rows in all layers, with the room that a layer of the cache grows by, and the layer that
    is being copied as it grows. Under autocast rotary keys are float32 and values bfloat16."""
    size = {"float32": 8, "bfloat16": 4, "autocast": 6}[precision(args, job)]
    tokens = prompt + math.ceil((completion - 1) / RoomyLayer.ROOM) * RoomyLayer.ROOM
    return rows * tokens * sizes.key * size * (sizes.layers + 1)


def sampling(sizes, args, job, rows):
    """(rows, V) at once: logits, float32 scores where they are other numbers, probabilities, and on a GPU the copy that
    `multinomial` gets and its random numbers, on CPU the cumulative sum."""
    scores = 0 if precision(args, job) == "float32" else 2
    scores += 4 if args.temperature != 1 else 0
    return rows * sizes.vocabulary * (scores + 4 + 4 + (8 if job.gpu else 4))


def prefill(sizes, args, job, prompts, prompt):
    """The widest point of a layer without gradients: three of the MLP's width, the residual stream and two copies of it
    in float32; and the mask, as booleans and in the dtype of the attention."""
    size = 4 if precision(args, job) == "float32" else 2
    return prompts * prompt * (3 * sizes.intermediate * size + 3 * sizes.hidden * 4 + prompt * (1 + size))


# Update


def activations(sizes, args, job, rows, queries, keys):
    """What one pass over (rows, queries) tokens that attend to `keys` tokens keeps for the backward pass."""
    stream = 4 if precision(args, job) != "bfloat16" else 2
    tokens, mask = rows * queries, rows * queries * keys
    last = tokens * (4 + stream) * sizes.hidden  # the final norm, as in a layer
    layer = layer_activations(sizes, args, job, rows, queries, keys)
    if args.gradient_checkpointing:  # the inputs of the layers
        layer = tokens * stream * sizes.hidden
    return sizes.layers * layer + last + mask


def layer_activations(sizes, args, job, rows, queries, keys):
    """The tensors that a decoder layer of transformers saves, in bytes: RMSNorm, attention, gated MLP.

    Two norms: the input in float32, its scale, and the normalized input in the dtype of the residual stream. Linear
    layers: their inputs; one for queries, keys and values, one for gate and up (under autocast each casts its own).
    Attention: queries, keys and values repeated to all heads (as with any padding mask), its output, a number for each
    head, and the mask, which sdpa turns into numbers in each layer; eager keeps the probabilities of each head
    instead. MLP: gate, its activation, up and the product, which is the input of the last linear layer.

    Linear layers that LoRA freezes keep no input, nor do frozen norms, but the adapters keep theirs: in float32, and
    for each linear layer its own where the model is in bfloat16.
    """
    mode, rank = precision(args, job), args.lora_rank
    H, size, stream = sizes.hidden, 4 if mode == "float32" else 2, 2 if mode == "bfloat16" else 4
    attention_input, mlp_input = (3, 2) if mode == "autocast" else (1, 1)
    norms = 2 * (4 * H + 4 + stream * H)
    linear = (attention_input + mlp_input) * size * H
    per_token = norms + linear + size * (2 * sizes.query + 4 * sizes.intermediate) + 4 * sizes.heads
    if rank:
        per_token -= 2 * stream * H
        per_token += 7 * rank * size
        if mode == "bfloat16":
            per_token += 4 * (5 * H + sizes.query + sizes.intermediate) - linear - size * sizes.intermediate
    repeated = sizes.key if sizes.key * sizes.heads == sizes.query else sizes.query  # one head is not copied
    per_mask = size
    if args.attn_implementation == "eager":
        per_mask = sizes.heads * (4 if size == 4 else 6)
    elif args.attn_implementation != "sdpa":
        per_mask = 0
    return rows * queries * per_token + rows * keys * 2 * repeated * size + rows * queries * keys * per_mask


def head_inputs(sizes, args, job, tokens):
    """The states of the completions' tokens, the input of the head."""
    return tokens * sizes.hidden * (4 if precision(args, job) == "float32" else 2)


def head_work(sizes, args, job, tokens, backward=True):
    """What is there at once of (tokens, V) in a chunk of the head. Forward: the logits, in bfloat16 too where they are
    that, and two products of the entropy. Backward: five in float32, the logits, the gradient through `gather`, and for
    `logsumexp` a difference, its exponential and the gradient; with several chunks also the sum of the gradients of the
    head's matrix."""
    elements = tokens * sizes.vocabulary
    if not backward:
        return (12 if precision(args, job) == "float32" else 14) * min(elements, CHUNK_ELEMENTS)
    several = gradient_of_embedding(sizes, args) if elements > CHUNK_ELEMENTS else 0
    return 20 * min(elements, CHUNK_ELEMENTS) + several


def layer_work(sizes, args, job, rows, queries, keys):
    """The backward pass of the last layer: in the MLP the gradients of product, gate and up, less the product, which is
    freed, or in the attention those of queries, output, keys and values; those of the residual stream; and that of the
    embedding or head. With gradient checkpointing the layer's activations are there again."""
    size = 4 if precision(args, job) == "float32" else 2
    again = layer_activations(sizes, args, job, rows, queries, keys) if args.gradient_checkpointing else 0
    mlp = rows * queries * 2 * sizes.intermediate * size
    attention = rows * (queries + keys) * 2 * sizes.query * size
    return again + max(mlp, attention) + rows * queries * 2 * 4 * sizes.hidden + gradient_of_embedding(sizes, args)


def gradient_of_embedding(sizes, args):
    """The gradient of the embedding and the head is complete at the end of a backward pass, and lies beside .grad."""
    return 0 if args.lora_rank else trained(sizes, args)[1] * sizes.embedding


def adamw_copy(sizes, args, job):
    """What AdamW computes with: on a GPU the root of all second moments at once, on CPU twice that of one matrix."""
    number, size = trained(sizes, args)
    return number * size * job.share("AdamW") if job.gpu else 2 * gradient_of_embedding(sizes, args)
