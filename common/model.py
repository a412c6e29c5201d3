"""Model and tokenizer, stop tokens, and the module whose forward gives log-probs and entropy."""

import pathlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.masked import logprobs_and_entropy
from common.runs import InputError, one_line

EMBEDDED = pathlib.Path(__file__).parent / "tiny"
CHUNK_ELEMENTS = 2**25  # logits of one chunk of the head: 128 MiB in float32


def model_path(args):
    """The folder or hub id of `--model_name_or_path`; `embedded` is the model that comes with the project."""
    return str(EMBEDDED) if args.model_name_or_path == "embedded" else args.model_name_or_path


def load_tokenizer(args):
    """The tokenizer of the policy; one without a pad token pads with its EOS (masks never look at the pad id)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(args))
    except (OSError, ValueError) as error:
        raise InputError(
            f"--model_name_or_path {args.model_name_or_path}: no tokenizer could be loaded: {error}"
        ) from None
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"--model_name_or_path {args.model_name_or_path}: its tokenizer has no EOS token, nothing ends"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def find_stop_tokens(tokenizer, generation_config):
    """Ids that end a completion: EOS of tokenizer and generation config, and the end of a turn in the chat template."""
    configured = generation_config.eos_token_id
    stop_tokens = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        after_answer = tokenizer.apply_chat_template(turn, tokenize=False).rpartition("answer")[2]
        ids = tokenizer(after_answer, add_special_tokens=False).input_ids
        stop_tokens |= set(ids[:1]) & set(tokenizer.added_tokens_decoder)
    return sorted(stop_tokens)


class Policy(nn.Module):
    """A causal language model whose forward returns log-probs and entropies of given completions.

    This module is what Accelerate prepares, so that the gradient goes through its wrapper (DDP, FSDP2). The backbone
    runs on the whole rows; the vocabulary head only on completion tokens, in chunks that are recomputed in the backward
    pass, so that no (R, T, V) tensor exists.
    """

    def __init__(self, lm, tokenizer, temperature, entropy_grad):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.entropy_grad = entropy_grad
        self.pad_token = tokenizer.pad_token_id
        self.stop_tokens = find_stop_tokens(tokenizer, lm.generation_config)
        self._no_split_modules = lm._no_split_modules  # FSDP2 wraps by these
        self.chunked = head_is_last(lm)

    @property
    def device(self):
        return self.lm.device

    def forward(self, batch):
        """Float32 log-probs and entropies (R, T) of the completions at the sampling temperature, 0 under the mask.

        `batch` holds prompts (R, P) left-padded, prompt_mask (R, P), completions (R, T), completion_mask (R, T).
        """
        mask = batch["completion_mask"]
        input_ids = torch.cat([batch["prompts"], batch["completions"]], dim=1)  # (R, P + T)
        attention_mask = torch.cat([batch["prompt_mask"], mask], dim=1)
        inputs = dict(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
        )
        before = mask.shape[1] + 1  # the logits at a position are for the next token: shift by one
        if self.chunked:
            hidden = self.lm.base_model(**inputs).last_hidden_state[:, -before:-1][mask]  # (N, H)
        else:
            hidden = self.lm(**inputs, logits_to_keep=before).logits[:, :-1][mask]  # (N, V)
        logprobs, entropy = self.head(hidden, batch["completions"][mask])
        zeros = torch.zeros(mask.shape, device=mask.device)
        return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropy)

    def head(self, hidden, tokens):
        """Log-probs and entropies (N,) of `tokens` (N,) from hidden states (N, H), or from logits (N, V)."""
        size = max(1, CHUNK_ELEMENTS // self.lm.get_output_embeddings().weight.shape[0])
        if len(tokens) <= size:
            return self.head_chunk(hidden, tokens)
        chunks = zip(hidden.split(size), tokens.split(size), strict=True)
        results = [checkpoint(self.head_chunk, h, t, use_reentrant=False) for h, t in chunks]
        return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

    def head_chunk(self, hidden, tokens):
        logits = self.lm.get_output_embeddings()(hidden) if self.chunked else hidden
        return logprobs_and_entropy(logits, tokens, self.temperature, self.entropy_grad)


@torch.no_grad()
def head_is_last(lm):
    """Whether `logits = head(base_model(ids))`, which lets the head run in chunks.

    Some architectures do more to the logits: a soft cap (Gemma 2), a scale (Granite, Cohere). One forward tells, with
    the head's output amplified, so that a soft cap shows itself on a model of small logits too.
    """
    head, seen = lm.get_output_embeddings(), {}

    def amplify(module, inputs, output):
        seen.update(hidden=inputs[0], logits=output * 100)
        return seen["logits"]

    ids = torch.arange(8, device=lm.device)[None] % head.weight.shape[0]
    hook = head.register_forward_hook(amplify)
    try:
        logits = lm(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.equal(logits, seen["logits"]):
        return False
    return hidden.shape == seen["hidden"].shape and torch.allclose(hidden, seen["hidden"], rtol=1e-3, atol=1e-5)


def load_policy(args, tokenizer):
    """The model of `--model_name_or_path` as a `Policy`, in training mode, without dropout.

    Dropout would make the ratio of the first update differ from 1. The checkpoint's own generation settings (top_k,
    repetition penalty, ...) would be inherited by every `generate`: they are set aside and saved with the model again.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = model_path(args)
    try:
        config = AutoConfig.from_pretrained(path)
        saved_dtype = config.dtype or torch.float32
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        lm = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=getattr(torch, args.dtype), attn_implementation=args.attn_implementation
        )
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"--model_name_or_path {args.model_name_or_path}: no model: {one_line(error)}") from None
    policy = Policy(lm.eval(), tokenizer, args.temperature, entropy_grad=args.entropy_coef != 0)
    policy.saved_dtype = saved_dtype
    policy.saved_generation_config, lm.generation_config = lm.generation_config, GenerationConfig()
    if args.gradient_checkpointing:
        enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return policy.train()


def load_reference(args, tokenizer, device):
    """A frozen copy of the policy at its start; only loaded when a coefficient asks for it."""
    return load_policy(args, tokenizer).requires_grad_(False).eval().to(device)


def save_pretrained(policy, tokenizer, folder):
    """Write model and tokenizer so that `from_pretrained` loads them, in the dtype of the checkpoint they came from.

    The last act of a run: the policy itself is converted.
    """
    policy.lm.generation_config = policy.saved_generation_config
    policy.lm.to(policy.saved_dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def left_pad(rows, pad_token, device):
    """Token id lists as one tensor (R, P) padded on the left, and its mask (R, P)."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_token] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return ids, mask


def take_rows(batch, rows):
    """Some rows of a batch, cut of the padding they all share: prompts on the left, completions on the right."""
    T = batch["completion_mask"].shape[1]
    part = {name: tensor[rows] for name, tensor in batch.items()}
    left = int(part["prompt_mask"].sum(dim=1).max())
    right = int(part["completion_mask"].sum(dim=1).max())
    for name, tensor in part.items():
        if name in ("prompts", "prompt_mask"):
            part[name] = tensor[:, -left:]
        elif tensor.dim() == 2 and tensor.shape[1] == T:
            part[name] = tensor[:, :right]
    return part


def micro_batches(lengths, args):
    """Cut rows of the given lengths [(prompt tokens, completion tokens)] into the index lists of single forwards.

    Sorted by length, so that the rows of one forward need little padding; what a row contributes does not depend on it.
    `micro_batch_tokens` counts the padded tokens of a forward; a longer row goes alone.
    """
    order = sorted(range(len(lengths)), key=lambda row: sum(lengths[row]))
    if not args.micro_batch_tokens:
        return [order[i : i + args.micro_batch_size] for i in range(0, len(order), args.micro_batch_size)]
    parts, width = [[]], (0, 0)
    for row in order:
        wider = max(width[0], lengths[row][0]), max(width[1], lengths[row][1])
        if parts[-1] and sum(wider) * (len(parts[-1]) + 1) > args.micro_batch_tokens:
            parts.append([])
            wider = lengths[row]
        parts[-1].append(row)
        width = wider
    return parts


def split_rollout(accelerator, batch, args):
    """Cut this process's rows into optimizer steps, and each of these into the micro-batches of single forwards.

    Minibatches are equal runs of whole groups in draw order. Returns a list of (micro_batches, totals), where the
    totals count the whole optimizer step: all micro-batches of all processes. All processes get equally many
    micro-batches, since each forward and backward of FSDP2 is a collective; a filler is a real row whose loss mask is
    empty.
    """
    rows, device = len(batch["completions"]) // args.num_minibatches, batch["completions"].device
    group_tokens = batch["loss_mask"].view(-1, args.group_size * batch["loss_mask"].shape[1]).sum(dim=1)
    batch = batch | {"group_tokens": group_tokens.repeat_interleave(args.group_size)[:, None]}
    lengths = torch.stack([batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1)], dim=1).tolist()
    starts = range(0, rows * args.num_minibatches, rows)
    cuts = [
        [[start + i for i in part] for part in micro_batches(lengths[start : start + rows], args)] for start in starts
    ]
    most = accelerator.gather(torch.tensor([[len(cut) for cut in cuts]], device=device)).amax(dim=0).tolist()
    tokens = torch.stack([batch["loss_mask"][start : start + rows].sum() for start in starts])
    tokens = accelerator.reduce(tokens, "sum").tolist()
    minibatches = []
    for start, cut, number, step_tokens in zip(starts, cuts, most, tokens, strict=True):
        parts = [take_rows(batch, part) for part in cut]
        for _ in range(number - len(parts)):
            filler = take_rows(batch, [start])
            parts.append(filler | {"loss_mask": torch.zeros_like(filler["loss_mask"])})
        step_rows = rows * accelerator.num_processes
        totals = {"tokens": step_tokens, "rows": step_rows, "prompts": step_rows // args.group_size}
        minibatches.append((parts, totals))
    return minibatches


def completion_texts(tokenizer, batch):
    """The completions as rewards see them: up to the stop token, special tokens skipped."""
    rows = zip(batch["completions"].tolist(), batch["completion_mask"].sum(dim=1).tolist(), strict=True)
    return tokenizer.batch_decode([ids[:length] for ids, length in rows], skip_special_tokens=True)
