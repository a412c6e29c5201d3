"""FSDP2 on two CPU processes (gloo, pretend_gpus), the launch, and configs/."""

import os
import shutil
import types

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import AutoModelForCausalLM

import worker
from common.load import load_reference
from common.run import Exit, check_sharding, make_accelerator
from processes import run_processes
from small_models import policy_of
from testbed import ROOT, embedded, metric_rows, script

CONFIGS = ROOT / "configs"
PAPERS = sorted(CONFIGS.glob("*-paper.yaml"))
LAUNCHES = sorted(set(CONFIGS.glob("*.yaml")) - set(PAPERS) - set(CONFIGS.glob("smollm2*")))
FLAGS = "--num_processes 2 --mixed_precision no --dynamo_backend no"  # the files are for eight GPUs and bf16


def run_sharded(config, *command, **more):
    flags = f"--config_file {CONFIGS / config}.yaml {FLAGS} --num_machines 1 --main_process_port 0".split()
    # The launcher passes the file's settings to the processes as environment variables.
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "script"]))
    given = prepare_multi_gpu_env(arguments)
    environment = {name: value for name, value in given.items() if os.environ.get(name) != value} | more
    return run_processes(*command, processes=2, env=environment)


def check_update(folder, name="grpo"):
    """The update of two processes in `folder` against that of this one."""
    one, two = worker.compared(name, folder)
    assert one["before"] == two["before"] and one["after"] == two["after"] != two["before"]
    lengths = [max(map(len, two["before"][rank])) for rank in (0, 1)]
    assert lengths[0] != lengths[1]  # hangs if a rank waits for the other at each token
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(folder / "saved-2" / "model")
    prefix = "lm." if name == "ppo" else ""
    assert all(torch.equal(x, two["weights"][prefix + key]) for key, x in saved.state_dict().items())


@pytest.mark.beside("configs")
def test_sharded_step_equals_one_process(tmp_path):
    """test_two_machines has grpo.py.

    Clipped gradients, a reference, several minibatches, unequal micro-batches; whole weights for each rollout, those of
    the update for the second one; model/ from the parts.
    """
    result = run_sharded("fsdp2", "tests/helpers/worker.py", "ppo", tmp_path)
    assert result.returncode == 0, result.stderr
    check_update(tmp_path, "ppo")


@pytest.mark.beside("configs")
def test_two_machines(tmp_path):
    """Each has one process, and both are the first of their machine."""
    first_of_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    result = run_sharded("two_nodes", "tests/helpers/worker.py", "grpo", tmp_path, **first_of_each)
    assert result.returncode == 0, result.stderr
    check_update(tmp_path)


@pytest.mark.beside("configs")
def test_sharded_resume_is_bit_exact(tmp_path):
    """With ppo.py, which shards a critic beside the policy."""
    options = "--prompts_per_step 4 --group_size 4 --eval_prompts 4 --eval_samples 2 --eval_k 2 --eval_every 0"
    options += " --num_minibatches 2 --max_new_tokens 16 --save_every 1 --max_steps 2"
    command = ["tests/helpers/sharded.py", "ppo", *options.split(), "--output_dir"]
    a, b = tmp_path / "a", tmp_path / "b"
    result = run_sharded("fsdp2", *command, a)
    assert result.returncode == 0, result.stderr
    shutil.copytree(a, b)
    shutil.rmtree(b / "checkpoints" / "step-00000002")
    shutil.rmtree(b / "model")
    result = run_sharded("fsdp2", *command, b, "--resume")
    assert result.returncode == 0 and "resumed" in result.stdout, result.stderr
    assert metric_rows(a) == metric_rows(b)
    first, second = (AutoModelForCausalLM.from_pretrained(folder / "model").state_dict() for folder in (a, b))
    assert all(torch.equal(first[key], second[key]) for key in first)


def sharded(plugin, mixed_precision="no"):
    """Stand in for an Accelerator under FSDP."""
    state = types.SimpleNamespace(fsdp_plugin=plugin)
    is_fsdp2 = plugin.fsdp_version == 2
    return types.SimpleNamespace(state=state, is_fsdp2=is_fsdp2, mixed_precision=mixed_precision, device="cpu")


@pytest.fixture
def fsdp_plugin(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin sets it: put it back
    return lambda **options: FullyShardedDataParallelPlugin(
        **dict(fsdp_version=2, cpu_ram_efficient_loading=False) | options
    )


def test_fsdp2_returns_float32_logits(fsdp_plugin):
    # Accelerate's policy for bf16 has output_dtype bfloat16: log-probs with 8 bits, the ratio moves in steps of 0.4 %.
    plugin = fsdp_plugin()
    plugin.set_mixed_precision("bf16")
    check_sharding(sharded(plugin, "bf16"), script("grpo").Args())
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)


def test_bf16_reference_keeps_rotary_frequencies(fsdp_plugin):
    # module.to(bfloat16) rounds buffers too: at the same weights the KL to the policy was then 1e-5 and not 0.
    _, args, _, lm = embedded("grpo")
    reference = load_reference(lm, args, sharded(fsdp_plugin(), "bf16"))
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in reference.buffers()} == {torch.float32}


@pytest.mark.parametrize("options", [dict(fsdp_version=1), dict(cpu_ram_efficient_loading=True)])
def test_other_sharding_is_refused(options, fsdp_plugin):
    with pytest.raises(Exit, match="only FSDP2 is supported"):
        check_sharding(sharded(fsdp_plugin(**options)), script("grpo").Args())


def test_lora_is_not_sharded(fsdp_plugin):
    with pytest.raises(Exit, match="--lora_rank supports one process or DDP only"):
        check_sharding(sharded(fsdp_plugin()), script("grpo").Args(lora_rank=4))


# --- the launch ---


def test_unseen_launcher_is_refused(monkeypatch):
    # `accelerate launch --multi_gpu` on CPU: two processes, each thinks it is alone, both write the same files.
    monkeypatch.setattr("common.run.world_size", lambda: 2)
    with pytest.raises(Exit, match="Accelerate sees 1 of 2 processes"):
        make_accelerator(script("grpo").Args())


@pytest.mark.parametrize("processes, small, threads", [(1, 3e6, 1), (1, 1e5, 4), (2, 1e5, 2), (8, 1e5, 1)])
def test_threads_of_a_model(processes, small, threads, monkeypatch):
    # Two threads that wait for each other by spinning make a small model crawl beside a busy process.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr("common.load.SMALL_MODEL", small)
    before = torch.get_num_threads()
    policy_of()
    chosen = torch.get_num_threads()
    torch.set_num_threads(before)
    assert chosen == threads


# --- the files of configs/ ---


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accelerate_reads_the_configs(path):
    config = load_config_from_file(str(path))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "two_nodes": "FSDP"}
    assert str(config.distributed_type.value) == kinds[path.stem] and config.mixed_precision == "bf16"
    assert config.num_processes == 8 * config.num_machines == (16 if path.stem == "two_nodes" else 8)
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.fsdp_config == given.get("fsdp_config", {})


def test_ddp_gradients_are_bucket_views():
    """Otherwise a second copy stays in memory during the AdamW step."""
    handler = make_accelerator(script("grpo").Args()).ddp_handler
    assert handler.gradient_as_bucket_view and not handler.broadcast_buffers
