"""RMSNorm by torch's own function: on a GPU two kernels, not eight."""

import copy
import functools

import torch

from fast.exact import ordinary_ids


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
def fusable(lm):
    """For each of `norms(lm)` whether it may be fused, in the autocast of the run.

    Each is tried in the dtypes that it gets in a forward.
    """
    dtypes = {norm: set() for norm in norms(lm)}  # None: it gets something else than one tensor

    def look(norm, inputs, named):
        dtypes[norm].add(inputs[0].dtype if len(inputs) == 1 and not named else None)

    hooks = [norm.register_forward_pre_hook(look, with_kwargs=True) for norm in dtypes]
    try:
        lm(input_ids=ordinary_ids(lm, 8)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    answers = []
    for norm, found in dtypes.items():
        answers.append(
            bool(found) and None not in found and all(may_be_fused(norm, dtype) for dtype in found)
        )
    return answers


def may_be_fused(norm, dtype):
    """Whether `rms_norm` is the function of this norm, and no less exact, for numbers of `dtype`.

    Both are compared with float64 on random numbers of very different sizes and of a mean that is
    not 0. Two orders of summation that are equally good differ by some percent in their error,
    hence the factor.
    """
    trial = copy.deepcopy(norm)
    generator = torch.Generator(norm.weight.device).manual_seed(0)
    trial.weight.normal_(1, 0.2, generator=generator)
    x = torch.randn(64, trial.weight.numel(), device=trial.weight.device, generator=generator) + 1
    x = (x * torch.logspace(-3, 2, 64, device=x.device)[:, None]).to(dtype)
    exact = x.double() * (x.double().square().mean(dim=-1, keepdim=True) + epsilon(trial)).rsqrt()
    exact *= trial.weight.double()
    plain = trial(x)
    fused = rms_norm(trial, x)
    error = float((plain.double() - exact).square().mean().sqrt())
    fused_error = float((fused.double() - exact).square().mean().sqrt())
    same_function = error <= 2 * torch.finfo(dtype).eps * float(exact.square().mean().sqrt())
    return fused.dtype == plain.dtype and same_function and fused_error <= 1.25 * error


def fuse(norm):
    """Let a norm compute what `rms_norm` does; a copy of it takes its own weight."""
    norm.forward = functools.partial(rms_norm, norm)


def rms_norm(norm, x):
    return norm.weight * torch.nn.functional.rms_norm(x, norm.weight.shape, None, epsilon(norm))
