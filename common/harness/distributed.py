"""Processes: their launch and its checks, threads, FSDP2 and DeepSpeed, gradients, and whole weights for rollouts."""

import contextlib
import datetime
import math
import os
import shutil

import torch

from common.errors import InputError, world_size

TRACKERS = ("tensorboard", "wandb", "trackio")
SMALL_MODEL = 3e6  # weights; below, a second thread makes a step at most 1.2 times as fast


def choose_device():
    """torch's accelerator; the CPU without one, with ACCELERATE_USE_CPU, and in place of MPS, which has no float64."""
    from accelerate.utils import parse_flag_from_env

    device = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = device is None or device.type == "mps" or parse_flag_from_env("ACCELERATE_USE_CPU")
    return torch.device("cpu") if on_cpu else device


def unused_card():
    """One line where there is an NVIDIA card which torch, built for CUDA, cannot use; else None. A card that the user
    hides is not missed."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    here = shutil.which("nvidia-smi") or os.path.exists("/dev/nvidia0")
    if hidden or not here or not torch.version.cuda or torch.cuda.is_available():
        return None
    cuda = f"torch {torch.__version__} needs a driver for CUDA {torch.version.cuda}"
    return f"there is an NVIDIA card, and torch cannot use it: {cuda} (docs/running.md, Install); this runs on the CPU"


def launch(args):
    """The Accelerator of this process. An InputError refuses what would train wrongly or fail later."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import parse_flag_from_env, set_seed

    check_trackers(args, set(map(str, get_available_trackers())))
    patience = InitProcessGroupKwargs(timeout=datetime.timedelta(hours=2))  # of a process that waits for slower rewards
    # Gradients lie in the buckets that DDP sends, which saves their copy. Buffers are equal from the start.
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
    # Some trackers are refused without a folder; `Run` puts its own in the place of this one.
    options = dict(project_dir=".", log_with=args.report_to or None, kwargs_handlers=[patience, ddp])
    accelerator = Accelerator(cpu=choose_device().type == "cpu", **options)
    kind, processes = accelerator.distributed_type, accelerator.num_processes
    asked = [name for name in ("FSDP", "DEEPSPEED") if parse_flag_from_env(f"ACCELERATE_USE_{name}") and kind != name]
    refuse_any({
        f"the launcher started {world_size()} processes but Accelerate sees {processes}: on CPU set "
        "ACCELERATE_USE_CPU=true": world_size() != processes,  # each would train alone and write the same files
        f"the launcher asks for {' '.join(asked)}, which needs GPUs (FSDP: several)": asked,
        "set gradient_accumulation_steps to 1, and use --micro_batch_size": accelerator.gradient_accumulation_steps > 1,
        "mixed precision fp16 is not supported: use bf16 or no": accelerator.mixed_precision == "fp16",  # loss scaling
        "parallelism_config is not supported: each process has its own prompts": accelerator.parallelism_config,
        "--lora_rank runs on one process or with DDP only": args.lora_rank and is_sharded(accelerator),
    })  # fmt: skip
    if kind == "FSDP":
        set_up_fsdp(accelerator.state.fsdp_plugin, accelerator.mixed_precision)
    elif kind == "DEEPSPEED":
        set_up_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, args)
    if accelerator.device.type != "cpu":
        set_up_attention()
    elif accelerator.is_main_process and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        line = unused_card()
        if line:
            print(line)
    set_seed(args.seed)
    return accelerator


def check_trackers(args, installed):
    """Refuse a name of --report_to that is no tracker, or whose package is not `installed`."""
    for name in args.report_to:
        if name in installed:
            continue
        if name in TRACKERS:
            raise InputError(f"--report_to {name}: it is not installed: pip install {name}")
        others = "others of Accelerate work once they are installed"
        raise InputError(f"--report_to {name}: known are {', '.join(TRACKERS)}; {others}")


def refuse_any(problems):
    """Raise the first of {message: whether it applies} that applies as an InputError."""
    for message, applies in problems.items():
        if applies:
            raise InputError(message)


def set_up_attention():
    """What sdpa needs on a GPU. Each padding mask is built without looking whether it is all true: to look is to wait
    for the GPU at each decoded token. cuDNN's attention, which torch 2.11 to 2.13 prefer on an H100, is off: with a
    mask its gradient can be NaN (pytorch issue 196678), and it makes a plan for each new length, so for each token."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def without_look(*args, attention_mask=None, allow_is_causal_skip=True, **options):
        skip = allow_is_causal_skip and attention_mask is None
        return sdpa_mask(*args, attention_mask=attention_mask, allow_is_causal_skip=skip, **options)

    AttentionMaskInterface.register("sdpa", without_look)
    torch.backends.cuda.enable_cudnn_sdp(False)


def set_threads(weights):
    """Set the CPU threads: this process's share of the cores, or 1 for few `weights`: threads spin (docs/scale.md)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(1 if weights < SMALL_MODEL else share)  # `accelerate launch` sets OMP_NUM_THREADS=1


def set_up_fsdp(plugin, mixed_precision):
    """Refuse the options of FSDP that are not supported; keep what `forward` returns in float32."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    refuse_any({
        "FSDP 1 is not supported: set fsdp_version: 2": plugin.fsdp_version != 2,
        # Only the first process would have weights, and the reference stays unsharded.
        "set fsdp_cpu_ram_efficient_loading to false": plugin.cpu_ram_efficient_loading,
        "set fsdp_offload_params to false": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    })  # fmt: skip
    if mixed_precision == "bf16":
        # Accelerate's policy rounds what leaves `forward`, float32 log-probs, to bfloat16, and sums gradients in that.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def set_up_deepspeed(config, args):
    """Complete the configuration of DeepSpeed: its batches and its clipping are those of the options."""
    from transformers.integrations import unset_hf_deepspeed_config

    zero = config["zero_optimization"]
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        raise InputError("offload_param of DeepSpeed is not supported: set it to none")
    zero["stage3_gather_16bit_weights_on_model_save"] = zero["stage"] == 3  # else it cannot write model/
    config |= {"gradient_clipping": args.max_grad_norm, "gradient_accumulation_steps": 1}
    config["train_micro_batch_size_per_gpu"] = 1  # asked for where no DataLoader is prepared; micro-batches are ours
    unset_hf_deepspeed_config()  # else ZeRO-3 partitions every model that is loaded, the frozen reference too


def strategy(accelerator):
    """The name of how weights are distributed over the processes: single, DDP, FSDP2, ZeRO-2 or ZeRO-3."""
    if accelerator.distributed_type == "DEEPSPEED":
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return {"NO": "single", "FSDP": "FSDP2"}.get(accelerator.distributed_type.value, "DDP")


def is_sharded(accelerator):
    """Whether `prepare` spreads weights, gradients or optimizer over the processes."""
    return accelerator is not None and accelerator.distributed_type in ("FSDP", "DEEPSPEED")


def first_device(accelerator):
    """The device to load a model on: under FSDP2 and DeepSpeed the CPU, from where `prepare` moves the shards."""
    return "cpu" if accelerator is None or is_sharded(accelerator) else accelerator.device


@contextlib.contextmanager
def gradient_sync(accelerator, model, last):
    """A context for forward and backward of a micro-batch: gradients add up, and the last one averages them over the
    processes. FSDP2 averages at each one: otherwise every process would hold the gradients of the whole model."""
    accelerator.sync_gradients = last  # the prepared optimizer's step() reads it; DeepSpeed steps where it is true
    with contextlib.nullcontext() if last or accelerator.is_fsdp2 else accelerator.no_sync(model):
        yield


def clip_grad_norm(accelerator, parameters, max_norm):
    """The norm (0-d) of the gradients over all processes before they are scaled down to `max_norm` (0: off). DeepSpeed
    has scaled them at the last backward, over all parameters together, and stepped: its norm is returned."""
    norm = accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)


@contextlib.contextmanager
def unsharded(accelerator, model):
    """A context in which the prepared `model` has all its weights on every process, so that each samples as many tokens
    as it needs, without a gather for each of them. All processes have to enter."""
    if strategy(accelerator) == "ZeRO-3":
        import deepspeed

        with deepspeed.zero.unwrap_model_for_generation(model):
            yield
        return
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    parts = dict.fromkeys([model, *getattr(model, "policy", model).modules()])  # without a critic's layers
    shards = [part for part in parts if isinstance(part, FSDPModule)]
    if shards:  # FSDP2 takes the first module that runs for the outermost one: it must not be a layer that samples
        model.first_run = lambda: None
        register_fsdp_forward_method(model, "first_run")
        model.first_run()
        del model.first_run
    for part in shards:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in shards:
        part.reshard()
        inner = part is not model  # the outermost stays gathered from forward to backward
        part.set_reshard_after_forward(inner and accelerator.state.fsdp_plugin.reshard_after_forward, recurse=False)


def own_places(count, accelerator):
    """The places in a list of `count` items that this process takes: its rank, its rank + processes, and so on.

    All processes get equally many, so that they make equally many forwards. A place of `count` or more is a filler:
    the item at `place % count` is computed once more, and does not count. Of 3 items, processes 0 and 1 of two take
    the places 0, 2 and 1, 3.
    """
    processes = accelerator.num_processes
    each = math.ceil(count / processes)
    return range(accelerator.process_index, each * processes, processes)


def on_first(accelerator, function):
    """What `function()` returns on the first process, which alone calls it; an InputError is raised on all of them."""
    from accelerate.utils import broadcast_object_list

    found = problem = None
    if accelerator.is_main_process:
        try:
            found = function()
        except InputError as error:
            problem = str(error)
    found, problem = broadcast_object_list([found, problem])
    if problem:
        raise InputError(problem)
    return found
