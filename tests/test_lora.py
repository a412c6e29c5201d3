"""LoRA: adapters are all that is trained, saved and kept, and the reference is the policy without."""

import json
import re
import types

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import grpo
import ppo
from harness.data import EMBEDDED
from harness.errors import InputError
from harness.loading import load_policy, load_reference, load_tokenizer, save_model
from harness.reward_models import load_reward_model
from processes import run_processes
from small_models import copy_of_embedded, logits, policy_of, random_batch, small_model
from small_run import train
from testbed import fill, gradients, hand_made_batch, largest_difference, metric_rows, script

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.needs("peft")

RANK = ["--lora_rank", "4", "--learning_rate", "1e-2", "--group_size", "8"]


def load(name="grpo", seed=0, **options):
    """(args, tokenizer, policy) with adapters of rank 4, which are no longer zero."""
    args = script(name).Args(**{"lora_rank": 4, "group_size": 4, "prompts_per_step": 8, **options})
    tokenizer = load_tokenizer(args)
    torch.manual_seed(seed)
    policy = load_policy(args, tokenizer, Accelerator(cpu=True))
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


def test_the_reference_is_the_policy_at_its_start_and_leaves_no_trace():
    start, policy = policy_of(), policy_of(lora_rank=4)
    reference = load_reference(policy, grpo.Args(lora_rank=4), Accelerator(cpu=True))
    move(policy)
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
        reference = load_reference(policy, args, Accelerator(cpu=True))
        found.append(gradients(script(name), args, policy, batch, reference)[0][0])
    scale = max(float(gradient.abs().max()) for gradient in found[0])
    assert all(largest_difference(found[1], other) < 1e-5 * scale for other in (found[0], found[2]))


def test_two_processes_train_the_adapters_of_one(tmp_path):
    import worker

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


def saved(folder, **options):
    _, tokenizer, policy = load(**options)
    save_model(Accelerator(cpu=True), policy, policy, tokenizer, folder)
    return policy


def test_model_is_an_adapter_folder_that_peft_and_transformers_load(tmp_path):
    policy = saved(tmp_path)
    assert (tmp_path / "tokenizer.json").exists() and not (tmp_path / "config.json").exists()
    assert base_of(tmp_path) == str(EMBEDDED["embedded"])
    for auto_class in (peft.AutoPeftModelForCausalLM, AutoModelForCausalLM):
        assert torch.equal(logits(auto_class.from_pretrained(tmp_path)), logits(policy.lm))


def base_of(folder):
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]


def test_an_adapter_of_a_relative_path_names_its_base_from_anywhere(tmp_path, monkeypatch):
    small_model(tmp_path / "base", AutoModelForCausalLM, "llama")
    monkeypatch.chdir(tmp_path)
    saved("adapter", model_name_or_path="base")
    assert base_of(tmp_path / "adapter") == str(tmp_path / "base")
    monkeypatch.chdir(EMBEDDED["embedded"])
    peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def adapted(names):
    """What names of adapters or of layers have behind the layers: `0.self_attn.q_proj`, ..."""
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
    _, _, policy = load(lora_targets=targets)
    linear = adapted(name for name, module in policy.named_modules() if isinstance(module, torch.nn.Linear))
    wanted = {name for name in linear if re.fullmatch(pattern, name)}
    assert adapted(trained(policy)) == wanted and wanted


def test_a_resume_keeps_the_targets(tmp_path):
    words = [*RANK, "--lora_targets", FIRST_LAYER, "--save_every", 1, "--max_steps", 1]
    train(tmp_path / "run", *words)
    train(tmp_path / "run", *RANK, "--resume", "--max_steps", 2)
    weights = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert adapted(weights) == {"0.self_attn.q_proj", "0.self_attn.v_proj"}
    assert peft.LoraConfig.from_pretrained(tmp_path / "run" / "model").target_modules == FIRST_LAYER


def test_the_folder_of_a_lora_run_is_the_model_of_the_next(run, tmp_path):
    train(tmp_path / "next", "--model_name_or_path", run / "model", "--max_steps", 1, "--learning_rate", "1e-9")
    expected, found = (AutoModelForCausalLM.from_pretrained(path / "model") for path in (run, tmp_path / "next"))
    torch.testing.assert_close(logits(found), logits(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"], ["embed_tokens", "lm_head"]])
def test_a_layer_that_shares_its_weight_is_refused(targets):
    """Merged, or loaded by the next script, it was another model: logits off by 2.0 and 13.6."""
    with pytest.raises(InputError, match="model.embed_tokens and lm_head share a weight") as error:
        load(lora_targets=targets)
    assert "\n" not in str(error.value)


def test_an_adapter_on_a_head_of_its_own_is_saved_and_merged(tmp_path):
    folder = small_model(tmp_path / "untied", AutoModelForCausalLM, "llama", tie_word_embeddings=False)
    policy = saved(tmp_path / "adapter", model_name_or_path=str(folder), lora_targets=["lm_head", "q_proj"])
    merged = policy_of(tmp_path / "adapter")
    torch.testing.assert_close(logits(merged.lm), logits(policy.lm), atol=1e-5, rtol=1e-5)


def test_adapters_do_not_ask_transformers_for_the_version_of_peft(monkeypatch, tmp_path):
    """transformers 5.24 refuses every peft that there is, and no run with LoRA started."""

    def refuse(min_version):
        raise ValueError("The version of PEFT you are using is not compatible")

    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", refuse)
    train(tmp_path / "run", *RANK, "--max_steps", 1)
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").exists()


def test_what_is_refused(monkeypatch):
    with pytest.raises(InputError, match="--lora_targets nothing"):
        load(lora_targets=["nothing"])
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(InputError, match="pip install peft"):
        load()


# --- adapter folders as models: merged into their base, and from then on a model like any other ---


def make_adapter(folder, base, lm, task_type="CAUSAL_LM"):
    """Write an adapter with weights that are not zero; returns the model that it makes of its base."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type=task_type)
    model = peft.get_peft_model(lm, config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture
def adapter(tmp_path):
    """A base, an adapter folder on it without a tokenizer, and what they give together."""
    base = copy_of_embedded(tmp_path / "base")
    with_adapter = make_adapter(tmp_path / "adapter", base, policy_of(base).lm)
    return types.SimpleNamespace(folder=tmp_path / "adapter", lm=with_adapter)


def test_an_adapter_is_merged_into_its_base_and_all_weights_are_trained(adapter):
    policy = policy_of(adapter.folder)
    torch.testing.assert_close(logits(policy.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name, _ in policy.named_parameters())
    assert all(weight.requires_grad for weight in policy.parameters())
    reference = load_reference(policy, grpo.Args(kl_coef=0.1), Accelerator(cpu=True))
    torch.testing.assert_close(logits(reference.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)


def test_new_adapters_on_an_adapter_are_refused(adapter):
    """The folder of the new one could not name such a base."""
    with pytest.raises(InputError, match="merge the adapter"):
        policy_of(adapter.folder, lora_rank=2)


def test_an_adapter_of_a_reward_model_is_a_scorer(tmp_path):
    base = copy_of_embedded(tmp_path / "base")
    torch.manual_seed(0)
    lm = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    lm.save_pretrained(base)
    with_adapter = make_adapter(tmp_path / "adapter", base, lm, task_type="SEQ_CLS")
    scorer = load_reward_model(str(tmp_path / "adapter"), grpo.Args())
    torch.testing.assert_close(logits(scorer.lm), logits(with_adapter), atol=1e-5, rtol=1e-5)
