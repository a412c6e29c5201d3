"""A pretend GPU, the device `gpu:0`: its tensors say that they are on it, and compute on CPU.

On a machine without a GPU, or beside one, it shows, for whole steps of the scripts,
- every operation on tensors of both devices: an error, as CUDA has it;
- every place where the program waits for the device, and its line.
It says nothing about seconds, memory or the kernels themselves.

How: torch lets a Python program register a device. A subclass of Tensor wraps the CPU tensor, and a dispatch mode sees
every operation, also those that make a tensor. These switches are process-wide: this file is a program of its own.
What it cannot do: hand out data pointers, so nothing is saved; the branches for `cuda` (graphs, packed passes, fused
norms) are not taken. What ran on a real GPU is in docs/results.md.

    python tools/pretend_gpu.py grpo --max_steps 1 --group_size 4       prints the waits of a run, by their line
"""

import collections
import contextlib
import importlib
import pathlib
import sys
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = pathlib.Path(__file__).resolve().parents[1]
aten = torch.ops.aten
_setup_privateuseone_for_python_backend("gpu")
GPU = torch.device("gpu:0")
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
# The result is a number of the host, or a tensor whose size the host has to know.
WAITS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
}
WAITS |= {aten.masked_select.default, aten.repeat_interleave.Tensor, aten._unique2.default}


class Counted:
    """What has been counted since the last `clear`."""

    waits: ClassVar = collections.Counter()  # {(phase, what, line of the project): number}

    @classmethod
    def clear(cls):
        cls.waits.clear()


EVALUATIONS = ("evaluate", "evaluate_pairs")


def note(what):
    """Count a wait under the last line of the project that leads to it, and the function that `main` has called, which
    is an evaluation where one runs."""
    frame, line, phase, below = sys._getframe(1), "", "", ""
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            file.startswith(str(ROOT)) and "site-packages" not in file and file != __file__
        ):  # not the README's .venv
            if frame.f_code.co_name == "main":
                phase = phase or below
            if below not in EVALUATIONS:
                below = frame.f_code.co_name
            line = line or f"{file.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    Counted.waits[phase or below or "backward", what, line] += (
        1  # the backward pass runs in a thread of its own
    )


class Gpu(torch.Tensor):
    """A tensor on gpu:0, which holds one on CPU."""

    @staticmethod
    def __new__(cls, x, requires_grad=False):
        options = dict(strides=x.stride(), storage_offset=x.storage_offset(), dtype=x.dtype)
        return torch.Tensor._make_wrapper_subclass(
            cls, x.size(), device=GPU, requires_grad=requires_grad, **options
        )

    def __init__(self, x, requires_grad=False):
        self.x = x

    def tolist(self):
        note("tolist")
        return self.x.tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("a tensor on gpu:0 must be copied to the CPU first")
        note("numpy")
        return self.x.numpy(force=True)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function, args, kwargs):
    """Run one operation on the CPU tensors, after a check of devices."""
    there, here = [], []
    device, first = kwargs.get("device"), args[0] if args else None
    real_args, real_kwargs = (
        unwrap(args, there, here),
        {name: unwrap(x, there, here) for name, x in kwargs.items()},
    )
    on_gpu = bool(there) if device is None else torch.device(device).type == "gpu"
    if function in COPIES:
        crosses = bool(here and there) or (device is not None and bool(there) != on_gpu)
        blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        if (
            crosses and blocking and first.numel()
        ):  # in both directions CUDA's copy waits for all before it
            note(
                "to the GPU"
                if isinstance(first, Gpu) == (function is aten.copy_.default)
                else "to the CPU"
            )
    elif function in INDEXING:
        check_index(function, args)
    elif there and any(x.dim() > 0 for x in here):  # a CPU tensor of no dimensions is a number
        shapes = [tuple(x.shape) for x in there], [tuple(x.shape) for x in here]
        raise RuntimeError(f"{function}: tensors on gpu:0 {shapes[0]} and on cpu {shapes[1]}")
    if there and function in WAITS and "output_size" not in kwargs:
        note(function.overloadpacket.__name__.strip("_"))
    if device is not None:
        real_kwargs["device"] = torch.device("cpu")
    result = function(*real_args, **real_kwargs)
    return wrap(result, {id(x.x): x for x in there}, on_gpu)


def wrap(x, known, on_gpu):
    """What an operation returns; what it wrote in place is the very argument, one of `known`."""
    if isinstance(x, (list, tuple)):
        return type(x)(wrap(y, known, on_gpu) for y in x)
    if id(x) in known:
        return known[id(x)]
    return Gpu(x) if on_gpu and isinstance(x, torch.Tensor) else x


def unwrap(x, there, here):
    """The argument with CPU tensors in the place of those on gpu:0; the lists take up the tensors of each device."""
    if isinstance(x, Gpu):
        there.append(x)
        return x.x
    if isinstance(x, torch.Tensor):
        here.append(x)
    elif isinstance(x, (list, tuple)):
        return type(x)(unwrap(y, there, here) for y in x)
    return x


def check_index(function, args):
    """What CUDA allows: CPU indices are copied to the GPU; values only if they are a number. Masks wait for a count."""
    indexed, values = args[0], args[2] if len(args) > 2 else None
    indices = [x for x in args[1] if x is not None]
    if not isinstance(indexed, Gpu):
        if any(isinstance(x, Gpu) for x in [*indices, values]):
            raise RuntimeError(
                f"{function}: a tensor on cpu indexed by, or filled from, one on gpu:0"
            )
        return
    if values is not None and not isinstance(values, Gpu) and values.dim() > 0:
        raise RuntimeError(f"{function}: a tensor on gpu:0 filled from one on cpu")
    for index in indices:
        if not isinstance(index, Gpu):
            note("indices to the GPU")
    if any(x.dtype == torch.bool for x in indices) and (values is None or values.numel() > 1):
        note("boolean index")


@contextlib.contextmanager
def pretended():
    """The switches, and Accelerate takes that device, unless it is told to take the CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    from harness.run import Run

    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch.gpu.is_autocast_enabled = lambda: False
    torch.gpu.get_rng_state = torch.gpu.set_rng_state = lambda *args: (
        None
    )  # what is drawn there comes from the CPU's
    # AdamW as on CUDA: one operation for all parameters.
    sys.modules["torch.optim.optimizer"]._foreach_supported_types.append(Gpu)
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # `module.to(GPU)` puts other tensors in their place
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=GPU)` is seen by the mode
    original = Accelerator.__init__

    def on_gpu(self, *args, cpu=False, **kwargs):
        original(self, *args, cpu=cpu, **kwargs)
        for state in () if cpu else (PartialState, AcceleratorState):
            state._shared_state["device"] = GPU

    Accelerator.__init__, Run.save_model = on_gpu, lambda *args: None
    with Mode():
        yield


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    with pretended():
        importlib.import_module(sys.argv[1]).main(sys.argv[2:])
    for (phase, what, line), number in Counted.waits.most_common():
        print(f"{number:6} {phase:20} {what:20} {line}")
