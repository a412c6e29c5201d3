"""PEFT adapter folders as models: loaded onto their base and merged, and from then on a model like any other."""

import types

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForSequenceClassification

import grpo
from harness.errors import InputError
from harness.loading import load_policy, load_reference, load_tokenizer
from harness.reward_models import load_reward_model
from small_models import copy_of_embedded, policy_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.needs("peft")


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


def logits(lm):
    with torch.no_grad():
        return lm.eval()(torch.arange(9)[None]).logits


def test_an_adapter_is_merged_into_its_base_and_all_weights_are_trained(adapter):
    policy = policy_of(adapter.folder)
    torch.testing.assert_close(logits(policy.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name, _ in policy.named_parameters())
    assert all(weight.requires_grad for weight in policy.parameters())
    reference = load_reference(policy, grpo.Args(kl_coef=0.1), Accelerator(cpu=True))
    torch.testing.assert_close(logits(reference.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)


def test_new_adapters_on_an_adapter_are_refused(adapter):
    """The folder of the new one could not name such a base."""
    args = grpo.Args(model_name_or_path=str(adapter.folder), lora_rank=2)
    with pytest.raises(InputError, match="merge the adapter"):
        load_policy(args, load_tokenizer(args), Accelerator(cpu=True))


def test_an_adapter_of_a_reward_model_is_a_scorer(tmp_path):
    base = copy_of_embedded(tmp_path / "base")
    torch.manual_seed(0)
    lm = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    lm.save_pretrained(base)
    with_adapter = make_adapter(tmp_path / "adapter", base, lm, task_type="SEQ_CLS")
    scorer = load_reward_model(str(tmp_path / "adapter"), grpo.Args())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(scorer.lm(ids).logits, with_adapter(ids).logits, atol=1e-5, rtol=1e-5)
