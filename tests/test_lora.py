"""common/harness/lora.py: adapters are all that is trained, saved and kept, and the reference is the policy without."""

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import grpo
import ppo
import reward_model
import worker
from common.errors import InputError
from common.args import parse_args
from common.launch import launch
from common.embedded import EMBEDDED
from common.model import load_policy, load_reference, load_tokenizer, save_pretrained
from processes import run_processes
from small_models import random_batch, save_reward_model, small_model
from small_run import train
from testbed import fill, gradients, hand_made_batch, largest_difference, metric_rows, script

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.needs("peft")

RANK = ["--lora_rank", "4", "--learning_rate", "1e-2", "--group_size", "8"]


def load(name="grpo", seed=0, **options):
    """(args, tokenizer, policy) with adapters of rank 4, which are no longer zero."""
    args = script(name).Args(**{"lora_rank": 4, "group_size": 4, "prompts_per_step": 8, **options})
    tokenizer = load_tokenizer(args)
    policy = load_policy(args, tokenizer)
    move(policy, seed)
    return args, tokenizer, policy


def move(module, seed=0):
    """Give the matrices that start at zero other values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if ".lora_B.default." in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)


def trained(module):
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def logprobs(policy, **batch):
    with torch.no_grad():
        return policy.eval()(random_batch(vocabulary=16) | batch, with_entropy=False)[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of grpo.py with LoRA, with a checkpoint of each of its two steps."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(folder, *RANK, "--save_every", 1)
    return folder


def test_all_linear_layers_but_the_head_have_adapters(capsys):
    _, _, policy = load()
    assert "do not use" not in capsys.readouterr().out  # the frozen weights are not those that texts do not use
    linear = {
        name
        for name, module in AutoModelForCausalLM.from_pretrained(EMBEDDED).named_modules()
        if isinstance(module, torch.nn.Linear)
    } - {"lm_head"}
    with_adapters = {name.removeprefix("lm.").partition(".lora_")[0] for name in trained(policy)}
    assert with_adapters == linear and all(".lora_" in name for name in trained(policy))


def test_new_adapters_are_of_the_seed_and_change_nothing():
    plain = load_policy(grpo.Args(), load_tokenizer(grpo.Args()))
    args = grpo.Args(lora_rank=4)
    torch.manual_seed(1)
    one = load_policy(args, load_tokenizer(args))
    torch.manual_seed(2)
    two, other = (
        load_policy(args, load_tokenizer(args)),
        load_policy(grpo.Args(lora_rank=4, seed=1), load_tokenizer(args)),
    )
    a, b, c = ([policy.get_parameter(name) for name in sorted(trained(policy))] for policy in (one, two, other))
    assert largest_difference(a, b) == 0 < largest_difference(a, c)
    assert torch.equal(logprobs(one), logprobs(plain)) and one.head_is_last and one.shares_prompts


def test_the_reference_is_the_policy_at_its_start_and_leaves_no_trace():
    args = grpo.Args(lora_rank=4)
    start, policy = load_policy(grpo.Args(), load_tokenizer(args)), load_policy(args, load_tokenizer(args))
    reference = load_reference(policy, args)
    assert reference.start.keys() == trained(policy)  # no second copy of the frozen weights
    move(policy)
    policy.get_parameter(sorted(trained(policy))[0]).requires_grad_(False)  # as that of a weight that texts do not use
    before, weights = trained(policy), {name: x.clone() for name, x in policy.named_parameters()}
    policy.train()
    found, entropy = reference(random_batch(vocabulary=16), with_entropy=False)
    assert policy.training and all(module.training for module in policy.modules())
    assert trained(policy) == before and entropy is None and not found.requires_grad
    assert torch.equal(found, logprobs(start)) and not torch.allclose(found, logprobs(policy), atol=0.1)
    assert all(torch.equal(x, weights[name]) for name, x in policy.named_parameters())
    shared = random_batch(vocabulary=16) | {"prompt_index": torch.arange(6)[:, None]}
    torch.testing.assert_close(reference(shared, with_entropy=False)[0], found, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_gradients_do_not_depend_on_the_split_nor_on_the_reference(name):
    found = []
    for size, kl_coef in ((32, 0.0), (4, 0.0), (4, 1e-30)):
        args, tokenizer, policy = load(name, micro_batch_size=size, kl_coef=kl_coef, num_minibatches=1)
        batch, rewards = hand_made_batch(policy, tokenizer, args)
        batch = fill(script(name), batch, rewards, args)
        found.append(gradients(script(name), args, policy, batch, load_reference(policy, args))[0][0])
    scale = max(float(gradient.abs().max()) for gradient in found[0])
    assert (
        largest_difference(found[0], found[1]) < 1e-5 * scale and largest_difference(found[1], found[2]) < 1e-5 * scale
    )


def test_two_processes_train_the_adapters_of_one(tmp_path):
    arguments = "grpo", tmp_path, "1", "embedded", "4"
    result = run_processes("tests/helpers/worker.py", *arguments, processes=2)
    assert result.returncode == 0, result.stderr
    one, two = worker.compared(*arguments)
    assert all(torch.equal(two["weights"][key], x) for key, x in one["start"].items() if ".lora_" not in key)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_reach_all_adapters_and_nothing_else(checkpointing):
    _, _, policy = load(gradient_checkpointing=checkpointing)
    policy.train()(random_batch(vocabulary=16))[0].sum().backward()
    assert {name for name, weight in policy.named_parameters() if weight.grad is not None} == trained(policy)
    assert all(weight.grad.abs().max() > 0 for weight in policy.parameters() if weight.requires_grad)


def test_a_base_in_bfloat16_has_adapters_in_float32():
    _, _, policy = load(dtype="bfloat16")
    dtypes = {weight.requires_grad: weight.dtype for weight in policy.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    critic = ppo.load_critic(ppo.Args(lora_rank=4, dtype="bfloat16"), policy)
    assert {weight.dtype for name, weight in critic.named_parameters() if "lora_" in name} == {torch.float32}
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6)
    before = {name: policy.get_parameter(name).clone() for name in trained(policy)}
    policy.train()(random_batch(vocabulary=16))[0].sum().backward()
    optimizer.step()
    assert all((policy.get_parameter(name) != weight).any() for name, weight in before.items())


def test_the_optimizer_and_the_checkpoints_hold_adapters_alone(run):
    folder = run / "checkpoints" / "step-00000002"
    weights, optimizer = load_file(folder / "model.safetensors"), torch.load(folder / "optimizer.bin")
    assert all(".lora_" in name for name in weights) and len(weights) == 28
    shapes = sorted(list(state["exp_avg"].shape) for state in optimizer["state"].values())
    assert shapes == sorted(list(weight.shape) for weight in weights.values())


def test_the_first_step_is_at_the_reference(run):
    first, second = metric_rows(run)[1:]
    assert first["policy/kl_ref"] == 0 and second["policy/kl_ref"] > 0


def test_resume_is_exact(run, tmp_path):
    train(tmp_path / "run", *RANK, "--save_every", 1, "--max_steps", 1)
    train(tmp_path / "run", *RANK, "--save_every", 1, "--resume")
    assert metric_rows(tmp_path / "run")[-1] == metric_rows(run)[-1]
    name = "model/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (run / name).read_bytes()


def test_the_frozen_weights_are_those_of_the_base_to_the_bit():
    args, tokenizer, policy = load(weight_decay=0.1)
    frozen = {name: weight.clone() for name, weight in policy.named_parameters() if not weight.requires_grad}
    optimizer = torch.optim.AdamW(policy.parameters(), 0.1, weight_decay=0.1)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    accelerator = Accelerator(cpu=True)
    reference = load_reference(policy, args)
    grpo.update(accelerator, policy, reference, optimizer, fill(grpo, batch, rewards, args), 1, args, grpo.Metrics())
    assert frozen and all(torch.equal(policy.get_parameter(name), weight) for name, weight in frozen.items())


def saved(folder, **options):
    _, tokenizer, policy = load(**options)
    save_pretrained(Accelerator(cpu=True), policy, policy, tokenizer, folder)
    return policy


def test_model_is_an_adapter_folder_that_peft_and_transformers_load(tmp_path):
    policy = saved(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
    } <= names and "config.json" not in names
    assert json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"] == str(
        EMBEDDED
    )
    ids = torch.arange(9)[None]
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    transformers = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = policy.eval().lm(ids).logits
        assert torch.equal(loaded.eval()(ids).logits, logits) and torch.equal(transformers.eval()(ids).logits, logits)


def test_an_adapter_of_a_relative_path_names_its_base_from_anywhere(tmp_path, monkeypatch):
    small_model(tmp_path / "base", AutoModelForCausalLM, "llama")
    monkeypatch.chdir(tmp_path)
    saved("adapter", model_name_or_path="base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    monkeypatch.chdir(EMBEDDED)
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_model_is_the_policy(kind, tied, tmp_path):
    # Biases and other layers than nn.Linear (GPT-2) too; a float32 sum rounds.
    sizes = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=20) if kind == "gpt2" else dict(num_key_value_heads=2)
    small_model(tmp_path / "base", AutoModelForCausalLM, kind, tie_word_embeddings=tied, **sizes)
    policy = saved(tmp_path / "merged", model_name_or_path=str(tmp_path / "base"), lora_merge=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()) and not (tmp_path / "merged" / "adapter_config.json").exists()
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, policy.eval().lm(ids).logits, atol=1e-5, rtol=1e-5)
    assert policy.lm._hf_peft_config_loaded  # what is trained stays as it is


def test_a_merged_model_of_a_base_in_bfloat16_has_the_adapter_in_float32(tmp_path):
    """A bfloat16 sum would lose the small changes that LoRA makes."""
    policy = saved(tmp_path, dtype="bfloat16", lora_merge=True)
    found = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    layer = policy.lm.get_submodule(name)
    delta = layer.lora_B.default.weight @ layer.lora_A.default.weight * layer.scaling["default"]
    expected = layer.base_layer.weight.float() + delta
    torch.testing.assert_close(found[f"{name}.weight"], expected.detach(), rtol=1e-6, atol=1e-7)  # bfloat16: 4e-3


def test_a_critic_has_adapters_of_its_own(tmp_path):
    args, tokenizer, policy = load("ppo")
    critic = ppo.load_critic(args, policy)
    assert {name for name in trained(critic) if "lora_" not in name} == {"head.weight", "head.bias"}
    assert len(trained(critic)) == 2 + 28 and critic.training
    own, others = list(critic.parameters()), {id(weight) for weight in policy.parameters()}
    assert not any(id(weight) in others for weight in own)
    shared = ppo.load_critic(ppo.Args(lora_rank=4, critic="shared"), policy)
    assert trained(shared) == {"head.weight", "head.bias"}
    save_reward_model(tmp_path / "rm", tokenizer)
    started = ppo.load_critic(ppo.Args(lora_rank=4, critic_path=str(tmp_path / "rm")), policy)
    assert len(trained(started)) == 2 + 28
    scorer = ppo.load_scorer(ppo.Args(lora_rank=4, reward_model_path=str(tmp_path / "rm")), "reward_model_path", "cpu")
    assert not hasattr(scorer, "peft_config")


def test_a_reward_model_is_written_merged(tmp_path):
    with pytest.raises(InputError, match="--lora_rank 4: the head of a reward model does not fit .* add --lora_merge"):
        reward_model.load_reward_model(args := reward_model.Args(lora_rank=4), load_tokenizer(args))
    args = reward_model.Args(lora_rank=4, lora_merge=True)
    tokenizer = load_tokenizer(args)
    model = reward_model.load_reward_model(args, tokenizer)
    assert {name for name in trained(model) if "lora_" not in name} == {"lm.score.weight"}
    move(model)
    with torch.no_grad():
        model.lm.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    save_pretrained(Accelerator(cpu=True), model, model, tokenizer, tmp_path)
    args = reward_model.Args(model_name_or_path=str(tmp_path))
    again = reward_model.load_reward_model(args, load_tokenizer(args))
    batch = random_batch(vocabulary=16)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(batch), model.eval()(batch), atol=1e-3, rtol=1e-3)


def test_what_is_refused(monkeypatch):
    with pytest.raises(InputError, match="--lora_merge needs --lora_rank"):
        parse_args(grpo.Args, ["--lora_merge"])
    monkeypatch.setattr("common.distributed.is_sharded", lambda accelerator: True)
    with pytest.raises(InputError, match="--lora_rank runs on one process or with DDP"):
        launch(grpo.Args(lora_rank=4))
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(InputError, match="--model_name_or_path embedded: no adapters can be added: .*peft"):
        load()
