"""What a forward over a few tokens shows of a model: whether and how it can be trained, and which weights texts use."""

import math
import re

import torch

from common.errors import in_short
from common.generation import sampling_config, seeded
from common.masked import logprobs_and_entropy
from common.policy import Policy


def ordinary_ids(lm, count):
    """Ids (count,) of tokens that are not special. Those of a zero embedding are left out: its gradient may be NaN."""
    config = lm.config.get_text_config()
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {config.pad_token_id, config.bos_token_id, *eos}
    rows = lm.get_input_embeddings().weight
    head = lm.get_output_embeddings()
    if head is not None:
        rows = rows[: len(head.weight)]
    ids = [i for i in rows.any(dim=1).nonzero()[:, 0].tolist() if i not in special]
    return torch.tensor([ids[7 * i % len(ids)] for i in range(count)], device=lm.device)


def causal_problem(lm):
    """What is wrong if logits depend on later tokens; an encoder (BERT), too, loads as a causal language model."""
    later = influence(lm)[3]
    if math.isnan(later):
        return "has a gradient that is not a number"
    if later != 0:
        return "sees later tokens: it is no causal language model"
    return None


@torch.enable_grad()
def influence(lm, padding=()):
    """L1 norms of the gradient of three tokens' logits, or of a score, at the embeddings of four tokens and padding."""
    ids = torch.tensor([[*ordinary_ids(lm, 4).tolist(), *padding]], device=lm.device)
    seen = []
    with lm.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output)):
        logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    (gradient,) = torch.autograd.grad(logits[:, :3].float().sum(), seen[0])
    return gradient[0].abs().sum(dim=-1).tolist()


@torch.enable_grad()
def unused_weights(lm):
    """Names of trainable weights that no text reaches, such as those for images or sound.

    Experts are left out, since a few tokens do not reach all of them.
    """
    nodes = [lm(input_ids=torch.arange(4, device=lm.device)[None]).logits.grad_fn]
    visited = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            nodes += [before for before, _ in node.next_functions]
    used = {getattr(node, "variable", None) for node in visited}  # those of the leaves
    trainable = [name for name, weight in lm.named_parameters() if weight.requires_grad and weight not in used]
    return [name for name in trainable if not re.search(r"(^|[._])experts?[._]", name)]


@torch.no_grad()
def sampling_problem(policy):
    """What is wrong if log-probs of a policy at temperature 1 depend on padding or differ from those of sampling. Four
    tokens after a prompt that is padded on the left show it; the effect of unmasking the padding gives the scale."""
    lm = policy.lm
    prompt = ordinary_ids(lm, 12)[None]
    mask = torch.arange(12, device=lm.device)[None] >= 5
    config = sampling_config(policy, 1.0, 1.0, max_new_tokens=4)
    config.update(eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    config.remove_invalid_values = True  # NaN would end the process; it is found below

    def logprobs(mask, start=0):
        batch = {"prompts": prompt[:, start:], "prompt_mask": mask[:, start:], "completions": completion}
        batch["completion_mask"] = torch.ones_like(completion).bool()
        return policy(batch, with_entropy=False)[0]

    try:
        with seeded(0, lm.device):
            output = lm.generate(input_ids=prompt, attention_mask=mask.long(), generation_config=config)
        completion = output.sequences[:, 12:]
        sampled, _ = logprobs_and_entropy(torch.cat(output.logits), completion[0], 1.0, False)
        alone = logprobs(mask, start=5)
        padded = logprobs(mask)
        unmasked = logprobs(torch.ones_like(mask))
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
    exact = lm.dtype == torch.float32 and not torch.is_autocast_enabled(lm.device.type)
    return 1e-4 if exact else 0.5


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


def policy_of(lm, shares_prompts=False, packs=False):
    """A `Policy` that samples no stop token."""
    shortcuts = dict(head_is_last=True, plain_cache=True, shares_prompts=shares_prompts, packs=packs)
    return Policy(lm, 0, [len(lm.get_output_embeddings().weight)], temperature=1.0, **shortcuts)


def rows_of_two_prompts(lm):
    """A batch of six rows of unequal lengths; the second prompt is padded."""
    ids = ordinary_ids(lm, 72)
    counts = torch.arange(6, device=lm.device)
    return {
        "prompts": ids[:24].view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": torch.arange(12, device=lm.device) >= counts[:, None] // 3 * 5,
        "prompt_index": (counts // 3)[:, None],
        "completions": ids[24:].view(6, 8),
        "completion_mask": torch.arange(8, device=lm.device) <= counts[:, None],
    }
