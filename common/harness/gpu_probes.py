"""What a GPU adds to the probes: whether passes can be packed, tokens be CUDA graphs, norms be fused."""

import copy
import functools

import torch

from common.generation import decode, sampling_config, seeded
from common.graphs import FEWEST, OneTokenByGraph
from common.harness.probes import policy_of, rounding, rows_of_two_prompts, safely
from common.packing import let_sdpa_take_layouts


def find_gpu_shortcuts(lm, head_is_last, plain_cache, **others):
    """Fuse the norms of `lm`; which further shortcuts are exact: {name: bool}. Call it in the autocast of the run."""
    safely(fuse_norms, lm)
    if not (head_is_last and plain_cache):  # a hybrid's states would run on from row to row
        return {}
    packs = rounding(lm) == 0.5 and safely(packing_is_exact, lm)  # in bfloat16
    return dict(packs=packs, graphs=safely(graphs_are_exact, lm))


@torch.enable_grad()
def packing_is_exact(lm):
    """Whether a packed pass gives the log-probs and the gradient of whole rows."""
    let_sdpa_take_layouts()

    def results(batch, packs=False):
        logprobs, _ = policy_of(lm, packs=packs)(batch, with_entropy=False)
        (gradient,) = torch.autograd.grad(logprobs.sum(), lm.get_input_embeddings().weight)
        return logprobs.detach(), gradient

    batch = rows_of_two_prompts(lm)
    others = results(batch | {"prompts": batch["prompts"].flip(0)})
    return all(map(nearer, results(batch, packs=True), results(batch), others))


@torch.no_grad()
def graphs_are_exact(lm):
    """Whether tokens sampled by CUDA graphs have the log-probs of the training forward."""
    policy, batch = policy_of(lm), {name: column[::3] for name, column in rows_of_two_prompts(lm).items()}
    config = sampling_config(policy, 1.0, 1.0, max_new_tokens=2 * FEWEST)
    inputs = dict(input_ids=batch["prompts"], attention_mask=batch["prompt_mask"].long(), generation_config=config)
    with seeded(0, lm.device):
        completions, sampled = lm.generate(**inputs, custom_generate=decode, head_is_last=True, graphs=True)
    batch |= {"completions": completions, "completion_mask": torch.ones_like(completions).bool()}
    plain, _ = policy(batch, with_entropy=False)
    others, _ = policy(batch | {"prompts": batch["prompts"].flip(0)}, with_entropy=False)
    close = torch.allclose(sampled, plain, atol=rounding(lm)) and nearer(sampled, plain, others)
    return close and OneTokenByGraph.may_record


def nearer(found, plain, others):
    """Whether `found` is ten times as near to `plain` as are `others`, of deliberately wrong prompts."""
    return bool((found - plain).abs().max() <= (others - plain).abs().max() / 10)


@torch.no_grad()
def fuse_norms(lm):
    """Let each RMSNorm with the bits of torch's be that: two kernels, not eight. Call it in the autocast of the run."""
    for module in lm.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or eps is None or getattr(module, "weight", None) is None:
            continue
        trial = copy.deepcopy(module)
        trial.weight.normal_(1, 0.2, generator=torch.Generator(lm.device).manual_seed(0))
        x = torch.linspace(-3, 3, 8 * trial.weight.numel(), device=lm.device).view(8, -1)
        inputs = [x.to(dtype) for dtype in {lm.dtype, torch.bfloat16}]
        if all(torch.equal(trial(x), rms_norm(trial, eps, x)) for x in inputs):
            module.forward = functools.partial(rms_norm, module, eps)


def rms_norm(module, eps, x):
    return module.weight * torch.nn.functional.rms_norm(x, module.weight.shape, None, eps)
