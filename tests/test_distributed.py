"""harness/launch.py: FSDP2 and ZeRO on two CPU processes (gloo, pretend_gpus), the launch, and configs/."""

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
from harness.errors import InputError
from harness.launch import SMALL_MODEL, make_accelerator, set_threads, set_up_deepspeed, set_up_fsdp
from harness.loading import load_reference
from processes import run_processes
from small_models import policy_of
from testbed import ROOT, embedded, metric_rows, run_script, script

CONFIGS = ROOT / "configs"
PAPERS = sorted(CONFIGS.glob("*-paper.yaml"))
LAUNCHES = sorted(set(CONFIGS.glob("*.yaml")) - set(PAPERS) - set(CONFIGS.glob("smollm2*")))
needs_deepspeed = pytest.mark.needs("deepspeed")
STRATEGIES = ["fsdp2", *(pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3"))]
FLAGS = "--num_processes 2 --mixed_precision no --dynamo_backend no"  # the files are for eight GPUs and bf16


def run_sharded(config, *command, **more):
    flags = f"--config_file {CONFIGS / config}.yaml {FLAGS} --num_machines 1 --main_process_port 0".split()
    if config.startswith("zero"):
        return run_script("-m", "accelerate.commands.launch", *flags, ROOT / command[0], *command[1:])
    # What the launcher reads from the file reaches the processes by their environment.
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*flags, "script"]))
    given = prepare_multi_gpu_env(arguments)
    environment = {name: value for name, value in given.items() if os.environ.get(name) != value} | more
    return run_processes(*command, processes=2, env=environment)


def check_update(folder, name="grpo", max_grad_norm="1"):
    """The update of two processes in `folder` against that of this one."""
    one, two = worker.compared(name, folder, max_grad_norm)
    assert one["before"] == two["before"] and one["after"] == two["after"] != two["before"]
    lengths = [max(map(len, two["before"][rank])) for rank in (0, 1)]
    assert lengths[0] != lengths[1]  # a rank that needed the other for each token would have waited for it
    if max_grad_norm == "0":  # one norm of policy and critic together
        for metrics in (one["metrics"], two["metrics"]):
            del metrics["optim/grad_norm"], metrics["optim/critic_grad_norm"]
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(folder / "model-2")
    prefix = "policy.lm." if name == "ppo" else "lm."
    assert all(torch.equal(x, two["weights"][prefix + key]) for key, x in saved.state_dict().items())


@pytest.mark.beside("configs")
@pytest.mark.parametrize(
    "strategy, name",
    [
        ("fsdp2", "ppo"),  # test_two_machines has grpo.py
        *(pytest.param(f"zero{stage}", name, marks=needs_deepspeed) for stage in (2, 3) for name in ("grpo", "ppo")),
    ],
)
def test_one_step_with_its_rollouts_equals_that_of_one_process(strategy, name, tmp_path):
    # Clipped gradients, a reference, several minibatches, unequal micro-batches; whole weights for each rollout, those
    # of the update for the second one; model/ from the parts.
    max_grad_norm = "0" if name == "ppo" and strategy != "fsdp2" else "1"  # ZeRO clips policy and critic together
    result = run_sharded(strategy, "tests/helpers/worker.py", name, tmp_path, max_grad_norm)
    assert result.returncode == 0, result.stderr
    check_update(tmp_path, name, max_grad_norm)


@pytest.mark.beside("configs")
def test_two_machines(tmp_path):
    """Each has one process, and both are the first of their machine."""
    first_of_each = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    result = run_sharded("two_nodes", "tests/helpers/worker.py", "grpo", tmp_path, **first_of_each)
    assert result.returncode == 0, result.stderr
    check_update(tmp_path)


@pytest.mark.beside("configs")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_goes_on_bit_by_bit(strategy, tmp_path):
    """Of ppo.py, which has a critic beside the policy in what is sharded."""
    options = "--prompts_per_step 4 --group_size 4 --eval_prompts 4 --eval_samples 2 --eval_k 2 --eval_every 0"
    options += " --num_minibatches 2 --max_new_tokens 16 --save_every 1 --max_steps 2"
    command = ["tests/helpers/sharded.py", "ppo", *options.split(), "--output_dir"]
    a, b = tmp_path / "a", tmp_path / "b"
    result = run_sharded(strategy, *command, a)
    assert result.returncode == 0, result.stderr
    shutil.copytree(a, b)
    shutil.rmtree(b / "checkpoints" / "step-00000002")
    shutil.rmtree(b / "model")
    result = run_sharded(strategy, *command, b, "--resume")
    assert result.returncode == 0 and "resumed" in result.stdout, result.stderr
    assert metric_rows(a) == metric_rows(b)
    first, second = (AutoModelForCausalLM.from_pretrained(folder / "model").state_dict() for folder in (a, b))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture
def fsdp_plugin(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # the plugin sets it: put it back
    return lambda **options: FullyShardedDataParallelPlugin(
        **dict(fsdp_version=2, cpu_ram_efficient_loading=False) | options
    )


def test_fsdp2_returns_float32_logprobs(fsdp_plugin):
    # Accelerate's policy for bf16 has output_dtype bfloat16: log-probs with 8 bits, the ratio moves in steps of 0.4 %.
    plugin = fsdp_plugin()
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16
    set_up_fsdp(plugin, "bf16")
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)


def test_the_reference_under_bf16_keeps_its_rotary_frequencies():
    # module.to(bfloat16) rounds buffers too: at the same weights the KL to the policy was then 1e-5 and not 0.
    accelerator = types.SimpleNamespace(distributed_type="FSDP", mixed_precision="bf16", device="cpu")
    _, args, _, policy = embedded("grpo")
    reference = load_reference(policy, args, accelerator)
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in reference.buffers()} == {torch.float32}


@pytest.mark.parametrize("options", [dict(fsdp_version=1), dict(cpu_ram_efficient_loading=True)])
def test_what_fsdp_cannot_do_here_is_refused(options, fsdp_plugin):
    with pytest.raises(InputError, match="fsdp_version: 2 and fsdp_cpu_ram_efficient_loading: false"):
        set_up_fsdp(fsdp_plugin(**options), "no")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("value", ["auto", 4])
def test_batches_and_clipping_of_deepspeed_are_those_of_the_options(value, stage):
    given = {"gradient_clipping": value, "gradient_accumulation_steps": value}
    config = given | {"zero_optimization": {"stage": stage}}
    set_up_deepspeed(config, script("grpo").Args(max_grad_norm=0.0))
    assert (config["gradient_clipping"], config["gradient_accumulation_steps"]) == (0.0, 1)
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)  # for model/


# --- the launch ---


def test_a_launcher_that_accelerate_does_not_see_is_refused(monkeypatch):
    # `accelerate launch --multi_gpu` on CPU: two processes, each thinks it is alone, both write the same files.
    monkeypatch.setattr("harness.launch.world_size", lambda: 2)
    with pytest.raises(InputError, match="Accelerate sees 1 of 2 processes"):
        make_accelerator(script("grpo").Args())


@pytest.mark.parametrize("processes, weights, threads", [(1, 1e5, 1), (1, SMALL_MODEL, 4), (2, 1e9, 2), (8, 1e9, 1)])
def test_a_larger_model_takes_its_share_of_the_cores(processes, weights, threads, monkeypatch):
    # Two threads that wait for each other by spinning make a small model crawl beside a busy process.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    before = torch.get_num_threads()
    set_threads(weights)
    chosen = torch.get_num_threads()
    torch.set_num_threads(before)
    assert chosen == threads


def test_the_embedded_model_is_loaded_on_one_thread(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    torch.set_num_threads(2)
    policy_of()
    assert torch.get_num_threads() == 1


# --- the files of configs/ ---


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accelerate_reads_the_file(path):
    config = load_config_from_file(str(path))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "two_nodes": "FSDP"}
    assert str(config.distributed_type.value) == kinds[path.stem] and config.mixed_precision == "bf16"
    assert config.num_processes == 8 * config.num_machines == (16 if path.stem == "two_nodes" else 8)
    sharded = config.fsdp_config if kinds[path.stem] == "FSDP" else config.deepspeed_config
    assert sharded == yaml.safe_load(path.read_text(encoding="utf-8")).get(f"{kinds[path.stem].lower()}_config", {})


def test_under_ddp_gradients_lie_in_the_buckets_that_are_sent():
    """Else a second copy of them stays beside the buckets while AdamW steps."""
    handler = make_accelerator(script("grpo").Args()).ddp_handler
    assert handler.gradient_as_bucket_view and not handler.broadcast_buffers


@pytest.mark.beside("configs")
def test_a_sharded_update_with_packed_passes_is_that_of_one_process_with_padded_ones(tmp_path):
    """A packed micro-batch is one pass, so that no process waits for one that another does not make."""
    result = run_sharded("fsdp2", "tests/helpers/packed_worker.py", "ppo", tmp_path)
    assert result.returncode == 0, result.stderr
    check_update(tmp_path, "ppo")
