"""What a GPU adds to the probes: whether passes can be packed, tokens be CUDA graphs, norms be fused."""

import copy
import functools

import torch

from common.errors import in_short
from common.generation import decode, sampling_config, seeded
from common.harness.probes import ordinary_ids, policy_of, rounding, rows_of_two_prompts, tried
from common.shortcuts.graphs import FEWEST, OneTokenByGraph
from common.shortcuts.packing import let_sdpa_take_layouts

OTHER_NUMBERS = "its numbers are not those of the plain way"


def find_gpu_shortcuts(lm, refused, head_is_last, plain_cache, **others):
    """Fuse the norms of `lm`; which further shortcuts are exact: {name: bool}, and in `refused` {name: why} of those
    that are not. Call it in the autocast of the run."""
    tried("fused_norms", fuse_norms, lm, refused)
    if not (head_is_last and plain_cache):  # a hybrid's states would run on from row to row
        return {}
    graphs = tried("graphs", graphs_are_exact, lm, refused)
    if OneTokenByGraph.problem:
        refused["graphs"] = OneTokenByGraph.problem
    elif not graphs:
        refused.setdefault("graphs", OTHER_NUMBERS)
    return {"packs": may_pack(lm, refused), "graphs": graphs}


def may_pack(lm, refused):
    """Whether passes can be packed; else `refused` has the reason. Call it in the autocast of the run."""
    if rounding(lm) != 0.5:
        refused["packs"] = "they need bfloat16"
        return False
    exact = tried("packs", packing_is_exact, lm, refused)
    if not exact:
        refused.setdefault("packs", OTHER_NUMBERS)
    return exact


def may_pack_sharded(lm, refused, accelerator):
    """The same for a model that FSDP2 is to shard: it is tried whole on the GPU, if it fits, and goes back. A packed
    micro-batch is one pass, so all processes take equally many."""
    place = lm.device
    try:
        with accelerator.autocast():
            return may_pack(lm.to(accelerator.device), refused)
    except torch.OutOfMemoryError as error:
        refused["packs"] = in_short(error)
        return False
    finally:
        lm.to(place)


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
    OneTokenByGraph.failures = 0  # those of another model
    OneTokenByGraph.problem = None
    policy = policy_of(lm)
    batch = {name: column[::3] for name, column in rows_of_two_prompts(lm).items()}
    config = sampling_config(policy, 1.0, 1.0, max_new_tokens=2 * FEWEST)
    inputs = dict(input_ids=batch["prompts"], attention_mask=batch["prompt_mask"].long(), generation_config=config)
    with seeded(0, lm.device):
        completions, sampled = lm.generate(**inputs, custom_generate=decode, head_is_last=True, graphs=True)
    batch |= {"completions": completions, "completion_mask": torch.ones_like(completions).bool()}
    plain, _ = policy(batch, with_entropy=False)
    others, _ = policy(batch | {"prompts": batch["prompts"].flip(0)}, with_entropy=False)
    OneTokenByGraph.replayed = False  # of a rollout
    close = torch.allclose(sampled, plain, atol=rounding(lm)) and nearer(sampled, plain, others)
    return close and not OneTokenByGraph.problem


def nearer(found, plain, others):
    """Whether `found` is ten times as near to `plain` as are `others`, of deliberately wrong prompts."""
    return bool((found - plain).abs().max() <= (others - plain).abs().max() / 10)


def norms(lm):
    """The norms of `lm` that may be what `rms_norm` computes, by their names."""
    found = []
    for module in lm.modules():
        is_norm = type(module).__name__.endswith("RMSNorm")
        if is_norm and getattr(module, "weight", None) is not None and epsilon(module) is not None:
            found.append(module)
    return found


def epsilon(norm):
    """What a norm adds to the mean of squares."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


@torch.no_grad()
def fuse_norms(lm):
    """Let each RMSNorm that torch's computes no less exactly be that: two kernels, not eight. They are tried in the
    dtypes that they get in a forward, so call it in the autocast of the run."""
    dtypes = {norm: set() for norm in norms(lm)}  # None: it gets something else than one tensor

    def look(norm, inputs, named):
        dtypes[norm].add(inputs[0].dtype if len(inputs) == 1 and not named else None)

    hooks = [norm.register_forward_pre_hook(look, with_kwargs=True) for norm in dtypes]
    try:
        lm(input_ids=ordinary_ids(lm, 8)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for norm, found in dtypes.items():
        if found and None not in found and all(may_be_fused(norm, dtype) for dtype in found):
            norm.forward = functools.partial(rms_norm, norm, epsilon(norm))


def may_be_fused(norm, dtype):
    """Whether `rms_norm` is the function of this norm, as far as numbers of `dtype` tell, and no less exact. Both are
    compared with float64 on random numbers of very different sizes and of a mean that is not 0. Two orders of summation
    that are equally good differ by some percent in their error, hence the factor."""
    trial = copy.deepcopy(norm)
    generator = torch.Generator(norm.weight.device).manual_seed(0)
    trial.weight.normal_(1, 0.2, generator=generator)
    x = torch.randn(64, trial.weight.numel(), device=trial.weight.device, generator=generator) + 1
    x = (x * torch.logspace(-3, 2, 64, device=x.device)[:, None]).to(dtype)
    exact = x.double() * (x.double().square().mean(dim=-1, keepdim=True) + epsilon(trial)).rsqrt()
    exact *= trial.weight.double()
    plain = trial(x)
    fused = rms_norm(trial, epsilon(trial), x)
    error = float((plain.double() - exact).square().mean().sqrt())
    fused_error = float((fused.double() - exact).square().mean().sqrt())
    same_function = error <= 2 * torch.finfo(dtype).eps * float(exact.square().mean().sqrt())
    return fused.dtype == plain.dtype and same_function and fused_error <= 1.25 * error


def rms_norm(module, eps, x):
    return module.weight * torch.nn.functional.rms_norm(x, module.weight.shape, None, eps)
