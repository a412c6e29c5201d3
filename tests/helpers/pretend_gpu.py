"""A pretend GPU, the device gpu:0, whose tensors compute on the CPU.

Without a GPU it shows, for whole steps of the scripts,
- each operation that mixes tensors of both devices: an error, as on CUDA;
- each wait of the program for the device, with its line.
It says nothing about time, memory or kernels. It cannot hand out data pointers, so that nothing is saved, and the
branches for `cuda` (graphs, packed forwards) are not taken.

torch lets a Python program register a device. A subclass of Tensor wraps the CPU tensor, and a dispatch mode sees every
operation, also those that make a tensor. These switches are process-wide: use it in a process of its own.
"""

import collections
import contextlib
import pathlib
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

ROOT = pathlib.Path(__file__).resolve().parents[2]
aten = torch.ops.aten
_setup_privateuseone_for_python_backend("gpu")
GPU = torch.device("gpu:0")
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# Their result is a number of the host, or a tensor whose size the host has to know.
WAITS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default}
WAITS |= {aten.masked_select.default, aten.repeat_interleave.Tensor, aten._unique2.default}
waits = collections.Counter()  # {(what, line of the project): number}; a caller may clear it


def count(what):
    """Count a wait under the innermost line of the project; the backward pass has a thread without one."""
    frame = sys._getframe(1)
    while frame is not None:
        file = pathlib.Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and "site-packages" not in file.parts and file != pathlib.Path(__file__):
            break
        frame = frame.f_back
    waits[what, f"{file.relative_to(ROOT)}:{frame.f_lineno}" if frame else "backward"] += 1


class Gpu(torch.Tensor):
    """A tensor on gpu:0 that wraps a CPU tensor."""

    @staticmethod
    def __new__(cls, x, requires_grad=False):
        layout = dict(strides=x.stride(), storage_offset=x.storage_offset(), dtype=x.dtype, device=GPU)
        return torch.Tensor._make_wrapper_subclass(cls, x.size(), requires_grad=requires_grad, **layout)

    def __init__(self, x, requires_grad=False):
        self.x = x

    def tolist(self):
        count("tolist")
        return self.x.tolist()

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("a tensor on gpu:0 must be copied to the CPU first")
        count("numpy")
        return self.x.numpy(force=True)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function, args, kwargs):
    """Run an operation on the CPU tensors, after a check of devices."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, Gpu)]
    here = [x for x in tensors if not isinstance(x, Gpu)]
    device = kwargs.get("device")
    on_gpu = bool(there) if device is None else torch.device(device).type == "gpu"
    if function in COPIES:
        crosses = bool(here and there) or (device is not None and bool(there) != on_gpu)
        blocking = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        if crosses and blocking and args[0].numel():  # CUDA waits for such copies in both directions
            count("copy between devices")
    elif function in INDEXING:
        check_index(function, args)
    elif there and any(x.dim() > 0 for x in here):  # a CPU tensor without dimensions is a number
        shapes = [tuple(x.shape) for x in there], [tuple(x.shape) for x in here]
        raise RuntimeError(f"{function}: tensors on gpu:0 {shapes[0]} and on cpu {shapes[1]}")
    if there and function in WAITS and "output_size" not in kwargs:
        count(function.overloadpacket.__name__.strip("_"))
    args, kwargs = tree_map(lambda x: x.x if isinstance(x, Gpu) else x, (args, kwargs))
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    known = {id(x.x): x for x in there}

    def wrap(x):  # an in-place operation returns its argument
        new = on_gpu and isinstance(x, torch.Tensor) and id(x) not in known
        return Gpu(x) if new else known.get(id(x), x)

    return tree_map(wrap, function(*args, **kwargs))


def check_index(function, args):
    """Allow what CUDA does: copy CPU indices to the GPU, take values that are numbers, wait for a mask's count."""
    indexed, values = args[0], args[2] if len(args) > 2 else None
    indices = [x for x in args[1] if x is not None]
    if not isinstance(indexed, Gpu):
        if any(isinstance(x, Gpu) for x in [*indices, values]):
            raise RuntimeError(f"{function}: a tensor on cpu indexed by, or filled from, one on gpu:0")
        return
    if values is not None and not isinstance(values, Gpu) and values.dim() > 0:
        raise RuntimeError(f"{function}: a tensor on gpu:0 filled from one on cpu")
    for _ in (x for x in indices if not isinstance(x, Gpu)):
        count("indices to the GPU")
    if any(x.dtype == torch.bool for x in indices) and (values is None or values.numel() > 1):
        count("boolean index")


@contextlib.contextmanager
def pretended():
    """Flip the switches, and let Accelerate take that device unless it is told to take the CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch.gpu.is_autocast_enabled = lambda: False
    torch.gpu.get_rng_state = torch.gpu.set_rng_state = lambda *args: None  # it uses the CPU's generator
    # AdamW as on CUDA: one operation for all parameters.
    sys.modules["torch.optim.optimizer"]._foreach_supported_types.append(Gpu)
    torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to(GPU)` replaces its tensors
    torch._C._set_only_lift_cpu_tensors(True)  # the mode sees `torch.tensor(..., device=GPU)`
    original = Accelerator.__init__

    def on_gpu(self, *args, cpu=False, **kwargs):
        original(self, *args, cpu=cpu, **kwargs)
        for state in () if cpu else (PartialState, AcceleratorState):
            state._shared_state["device"] = GPU

    Accelerator.__init__ = on_gpu
    with Mode():
        yield
