"""LoRA: only adapters are trained and saved, and the reference is the policy without them."""

import json
import re

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import grpo
from common.load import EMBEDDED, load_policy, load_reference, save_model
from common.run import Exit
from processes import run_processes
from small_models import logits, policy_of, random_batch
from small_run import train
from testbed import fill, gradients, hand_made_batch, largest_difference, metric_rows, script

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.needs("peft")

RANK = ["--lora_rank", "4", "--learning_rate", "1e-2", "--group_size", "8"]


def load(name="grpo", seed=0, **options):
    """Return (args, tokenizer, lm) with nonzero adapters of rank 4."""
    args = script(name).Args(**{"lora_rank": 4, "group_size": 4, "prompts_per_step": 8, **options})
    torch.manual_seed(seed)
    tokenizer, lm = load_policy(args, Accelerator(cpu=True))
    move(lm, seed)
    return args, tokenizer, lm


def move(module, seed=0):
    """Give the matrices that start at zero other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if ".lora_B.default." in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)


def trained(module):
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def logprobs(model):
    with torch.no_grad():
        return grpo.completion_logprobs(model, random_batch(vocabulary=16), grpo.Args())[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of grpo.py with LoRA, with a checkpoint of each of its two steps."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(folder, *RANK, "--save_every", 1)
    return folder


def test_reference_is_the_start():
    start, lm = policy_of(), policy_of(lora_rank=4)
    reference = load_reference(lm, grpo.Args(lora_rank=4), Accelerator(cpu=True))
    move(lm)
    before, weights = trained(lm), {name: x.clone() for name, x in lm.named_parameters()}
    found = logprobs(reference)
    assert trained(lm) == before and not found.requires_grad and lm.training
    assert torch.equal(found, logprobs(start)) and not torch.allclose(found, logprobs(lm), atol=0.1)
    assert all(torch.equal(x, weights[name]) for name, x in lm.named_parameters())


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_gradient_is_invariant_to_the_split(name):
    found = []
    for size, kl_coef in ((32, 0.0), (4, 0.0), (4, 1e-30)):
        args, tokenizer, lm = load(name, micro_batch_size=size, kl_coef=kl_coef, num_minibatches=1)
        batch, rewards = hand_made_batch(tokenizer, args)
        batch = fill(script(name), batch, rewards, args)
        reference = load_reference(lm, args, Accelerator(cpu=True))
        found.append(gradients(script(name), args, lm, batch, reference)[0][0])
    scale = max(float(gradient.abs().max()) for gradient in found[0])
    assert all(largest_difference(found[1], other) < 1e-5 * scale for other in (found[0], found[2]))


def test_two_processes_train_the_same_adapters(tmp_path):
    import worker

    arguments = "grpo", tmp_path, "1", "embedded", "4"
    result = run_processes("tests/helpers/worker.py", *arguments, processes=2)
    assert result.returncode == 0, result.stderr
    one, two = worker.compared(*arguments)
    assert all(torch.equal(two["weights"][key], x) for key, x in one["start"].items() if ".lora_" not in key)


def loss_of(lm):
    return grpo.completion_logprobs(lm, random_batch(vocabulary=16), grpo.Args())[0].sum()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_all_adapters(checkpointing):
    _, _, lm = load(gradient_checkpointing=checkpointing)
    loss_of(lm.train()).backward()
    assert {name for name, weight in lm.named_parameters() if weight.grad is not None} == trained(lm)
    assert all(weight.grad.abs().max() > 0 for weight in lm.parameters() if weight.requires_grad)


def test_bfloat16_base_has_float32_adapters():
    _, _, lm = load(dtype="bfloat16")
    dtypes = {weight.requires_grad: weight.dtype for weight in lm.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    optimizer = torch.optim.AdamW(lm.parameters(), 1e-6)
    before = {name: lm.get_parameter(name).clone() for name in trained(lm)}
    loss_of(lm).backward()
    optimizer.step()
    assert all((lm.get_parameter(name) != weight).any() for name, weight in before.items())


def test_checkpoints_hold_adapters_alone(run):
    folder = run / "checkpoints" / "step-00000002"
    weights, optimizer = load_file(folder / "model.safetensors"), torch.load(folder / "optimizer.bin")
    assert all(".lora_" in name for name in weights) and len(weights) == 28
    shapes = sorted(list(state["exp_avg"].shape) for state in optimizer["state"].values())
    assert shapes == sorted(list(weight.shape) for weight in weights.values())


def test_first_step_is_at_the_reference(run):
    first, second = metric_rows(run)[1:]
    assert first["policy/kl_ref"] == 0 and second["policy/kl_ref"] > 0


def test_resume_is_exact(run, tmp_path):
    train(tmp_path / "run", *RANK, "--save_every", 1, "--max_steps", 1)
    train(tmp_path / "run", *RANK, "--save_every", 1, "--resume")
    assert metric_rows(tmp_path / "run")[-1] == metric_rows(run)[-1]
    name = "model/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (run / name).read_bytes()


def saved(folder, **options):
    _, tokenizer, lm = load(**options)
    save_model(Accelerator(cpu=True), lm, tokenizer, folder)
    return lm


def test_model_is_an_adapter_folder(tmp_path):
    lm, folder = saved(tmp_path), tmp_path / "model"
    assert (folder / "tokenizer.json").exists() and not (folder / "config.json").exists()
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(EMBEDDED["embedded"])
    for auto_class in (peft.AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert torch.equal(logits(auto_class.from_pretrained(folder)), logits(lm))


def adapted(names):
    """Return the part of adapter or module names after `layers.`: `0.self_attn.q_proj`, ..."""
    return {name.partition(".lora_")[0].partition("layers.")[2] for name in names}


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FIRST_LAYER = r".*layers\.0\..*(q|v)_proj"


@pytest.mark.parametrize(
    "targets, pattern",
    [
        (ATTENTION, r".*\.[qkvo]_proj"),
        (["up_proj"], r".*\.up_proj"),
        ([FIRST_LAYER], r"0\.self_attn\.[qv]_proj"),
        (["layers.1.mlp.down_proj"], r"1\.mlp\.down_proj"),
        (["all-linear"], r".*_proj"),
    ],
)
def test_adapters_are_at_the_targets_alone(targets, pattern):
    _, _, lm = load(lora_targets=targets)
    linear = adapted(name for name, module in lm.named_modules() if isinstance(module, torch.nn.Linear))
    wanted = {name for name in linear if re.fullmatch(pattern, name)}
    assert adapted(trained(lm)) == wanted and wanted


def test_a_resume_keeps_the_targets(tmp_path):
    words = [*RANK, "--lora_targets", FIRST_LAYER, "--save_every", 1, "--max_steps", 1]
    train(tmp_path / "run", *words)
    train(tmp_path / "run", *RANK, "--resume", "--max_steps", 2)
    weights = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert adapted(weights) == {"0.self_attn.q_proj", "0.self_attn.v_proj"}
    assert peft.LoraConfig.from_pretrained(tmp_path / "run" / "model").target_modules == FIRST_LAYER


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"]])
def test_embedding_and_head_are_refused(targets):
    """Merging into a tied weight changed the model: logits were off by 2.0 and 13.6."""
    with pytest.raises(Exit, match="the embedding and the head cannot have adapters"):
        load(lora_targets=targets)


def test_what_is_refused(monkeypatch):
    with pytest.raises(Exit, match="--lora_targets nothing"):
        load(lora_targets=["nothing"])
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(Exit, match="pip install peft"):
        load()
