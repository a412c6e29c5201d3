"""What a forward over a few tokens shows of a model: whether and how it can be trained, and which weights texts use."""

import contextlib
import re

import torch
from transformers import DynamicCache

from common.errors import in_short
from common.generation import sampling_config, seeded
from common.masked import logprobs_and_entropy
from common.policy import Policy

EXACT = "head_is_last", "plain_cache", "shares_prompts", "packs", "graphs"  # arguments of `Policy`


def ordinary_ids(lm, count):
    """Ids (count,) of tokens that are not special and whose embedding is not zero: 24 norms later it is NaN."""
    config, weight, head = lm.config.get_text_config(), lm.get_input_embeddings().weight, lm.get_output_embeddings()
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {config.pad_token_id, config.bos_token_id, *eos}
    rows = weight if head is None else weight[: len(head.weight)]
    ids = [i for i in rows.any(dim=1).nonzero()[:, 0].tolist() if i not in special]
    return torch.tensor([ids[7 * i % len(ids)] for i in range(count)], device=lm.device)


def causal_problem(lm):
    """What is wrong if logits depend on later tokens; an encoder (BERT), too, loads as a causal language model."""
    later = influence(lm)[3]
    problem = "sees later tokens: it is no causal language model"
    return None if later == 0 else problem if later == later else "has a gradient that is not a number"


@torch.enable_grad()
def influence(lm, padding=()):
    """L1 norms of the gradient of three tokens' logits, or of a score, at the embeddings of four tokens and padding."""
    seen, ids = [], torch.tensor([[*ordinary_ids(lm, 4).tolist(), *padding]], device=lm.device)
    with lm.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output)):
        logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    (gradient,) = torch.autograd.grad(logits[:, :3].float().sum(), seen[0])
    return gradient[0].abs().sum(dim=-1).tolist()


@torch.enable_grad()
def unused_weights(lm):
    """Names of trainable weights that no text reaches, those for images or sound; a few tokens miss some experts."""
    nodes, visited = [lm(input_ids=torch.arange(4, device=lm.device)[None]).logits.grad_fn], set()
    for node in nodes:  # it grows
        if node not in visited:
            visited.add(node)
            nodes += [node for node, _ in node.next_functions if node]
    used = {getattr(node, "variable", None) for node in visited}  # those of the leaves
    trainable = [name for name, weight in lm.named_parameters() if weight.requires_grad and weight not in used]
    return [name for name in trainable if not re.search(r"(^|[._])experts?[._]", name)]


@torch.no_grad()
def sampling_problem(policy):
    """What is wrong if log-probs of a policy at temperature 1 depend on padding or differ from those of sampling. Four
    tokens after a prompt that is padded on the left show it; the effect of unmasking the padding gives the scale."""
    lm, prompt = policy.lm, ordinary_ids(policy.lm, 12)[None]
    mask = torch.arange(12, device=lm.device)[None] >= 5
    config = sampling_config(policy, 1.0, 1.0, max_new_tokens=4)
    config.update(eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    config.remove_invalid_values = True  # NaN would end the process; it is found below

    def logprobs(mask, start=0):
        batch = {"prompts": prompt[:, start:], "prompt_mask": mask[:, start:], "completions": completion}
        return policy(batch | {"completion_mask": torch.ones_like(completion).bool()}, with_entropy=False)[0]

    try:
        with seeded(0, lm.device):
            output = lm.generate(input_ids=prompt, attention_mask=mask.long(), generation_config=config)
        completion = output.sequences[:, 12:]
        sampled, _ = logprobs_and_entropy(torch.cat(output.logits), completion[0], 1.0, False)
        alone, padded, unmasked = logprobs(mask, 5), logprobs(mask), logprobs(torch.ones_like(mask))
    except Exception as error:  # models raise nearly every type there is
        return f"cannot sample or compute a short row: {in_short(error)}"
    if not alone.isfinite().all():
        return "gives log-probs that are not finite: its weights hold NaN or infinite numbers"
    error = torch.maximum((sampled - alone).abs().max(), (padded - alone).abs().max())
    # Without a fault the error is rounding, and the effect far larger. NaN is neither.
    if not (error <= rounding(lm) or error <= (unmasked - alone).abs().max() / 10):
        return f"gives other log-probs when a row is padded on the left (one differs by {error:.2g})"


def rounding(lm):
    """How far log-probs of this model may differ by rounding; near 32, numbers of bfloat16 are 0.25 apart."""
    return 1e-4 if lm.dtype == torch.float32 and not torch.is_autocast_enabled(lm.device.type) else 0.5


@torch.no_grad()
def find_shortcuts(lm, may_share=True, accelerator=None):
    """Which shortcuts are exact for this model on all processes, as arguments of `Policy`: {name: bool}, and `refused`,
    {name: why} of those for which more is to be said. Prompts are shared only with `may_share`. On a GPU norms are
    fused, and graphs tried; packed passes need bfloat16, as `accelerator` has it."""
    refused, norms = {}, []
    found = {
        "head_is_last": tried("head_is_last", head_is_last, lm, refused),
        "plain_cache": tried("plain_cache", has_plain_cache, lm, refused),
    }
    may_share = may_share and all(found.values())
    found["shares_prompts"] = may_share and tried("shares_prompts", sharing_is_exact, lm, refused)
    on_gpu = lm.device.type == "cuda"
    to_be_sharded = accelerator is not None and accelerator.is_fsdp2 and accelerator.device.type == "cuda"
    if on_gpu or to_be_sharded:
        from common.harness import gpu_probes

        if on_gpu:
            norms = gpu_probes.norms(lm)
            with accelerator.autocast() if accelerator else contextlib.nullcontext():
                found |= gpu_probes.find_gpu_shortcuts(lm, refused, **found)
        elif found["head_is_last"] and found["plain_cache"]:
            found["packs"] = gpu_probes.may_pack_sharded(lm, refused, accelerator)
    return agree(found, norms, refused, accelerator)


def tried(name, check, lm, refused):
    """What `check(lm)` returns, or False if it raises; then `refused` gets the reason by the `name` of the shortcut.
    Short memory and a broken device are no property of the model: they end the run, here as anywhere."""
    try:
        return check(lm)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # models raise nearly every type there is; a real fault raises again in the run
        refused[name] = in_short(error)
        return False


def agree(found, norms, refused, accelerator):
    """`found` and the fused ones of `norms` as they hold on every process. Each has tried its own copy of the model on
    its own device; where one took another way than the others, it would count other metrics, or round otherwise."""
    flags = [found.get(name, False) for name in EXACT] + ["forward" in vars(norm) for norm in norms]
    if accelerator is not None:
        counts = accelerator.reduce(torch.tensor(flags, dtype=torch.int, device=accelerator.device), "sum")
        flags = (counts == accelerator.num_processes).tolist()
    shortcuts, fused = flags[: len(EXACT)], flags[len(EXACT) :]
    for name, on_all in zip(EXACT, shortcuts, strict=True):
        if found.get(name) and not on_all:
            found[name], refused[name] = False, "another process refused it"
    for norm, on_all in zip(norms, fused, strict=True):
        if not on_all:
            vars(norm).pop("forward", None)
    return found | {"fused_norms": sum(fused), "refused": refused}


def head_is_last(lm):
    """Whether logits are those of the head on the states of `base_model`: no scale (Granite, Cohere) and no soft cap
    (Gemma 2), which shows as the head's output is amplified. An error if that gives no states (Llama 4)."""
    head = lm.get_output_embeddings()
    ids = torch.arange(8, device=lm.device)[None] % head.weight.shape[0]
    with head.register_forward_hook(lambda module, inputs, output: output * 1e4):
        logits = lm(input_ids=ids, use_cache=False).logits
        expected = head(lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    return bool((logits - expected).abs().max() <= expected.abs().max() / 1000)


def has_plain_cache(lm):
    """Whether the cache holds keys and values alone; that of hybrids has other states, some in subclasses of layers."""
    if not layer_types(lm) <= {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}:
        return False
    cache, ids = DynamicCache(config=lm.config), torch.zeros(1, 1, dtype=torch.long, device=lm.device)
    return lm(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values is cache


def layer_types(lm):
    """The class names of the layers in the cache that `generate` makes for `lm`."""
    return {type(layer).__name__ for layer in DynamicCache(config=lm.config).layers}


def sharing_is_exact(lm):
    """Whether computing each prompt once gives the same log-probs as whole rows."""
    shared = getattr(lm.config.get_text_config(), "num_kv_shared_layers", 0)  # transformers 5.17 has no layer for them
    if shared or "DummyLayer" in layer_types(lm):  # nobody has looked at the gradient through another layer's keys
        return False
    (plain, _), (other, _) = (policy_of(lm, shares_prompts=share)(rows_of_two_prompts(lm), False) for share in (0, 1))
    return torch.allclose(plain, other, atol=rounding(lm))


def policy_of(lm, shares_prompts=False, packs=False):
    """A `Policy` that samples no stop token."""
    shortcuts = dict(head_is_last=True, plain_cache=True, shares_prompts=shares_prompts, packs=packs)
    return Policy(lm, 0, [len(lm.get_output_embeddings().weight)], temperature=1.0, **shortcuts)


def rows_of_two_prompts(lm):
    """A batch of six rows of unequal lengths; the second prompt is padded."""
    ids, counts = ordinary_ids(lm, 72), torch.arange(6, device=lm.device)
    return {
        "prompts": ids[:24].view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": torch.arange(12, device=lm.device) >= counts[:, None] // 3 * 5,
        "prompt_index": (counts // 3)[:, None],
        "completions": ids[24:].view(6, 8),
        "completion_mask": torch.arange(8, device=lm.device) <= counts[:, None],
    }
