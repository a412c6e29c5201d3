"""PEFT adapter folders as models: loaded onto their base and merged, and from then on a model like any other."""

import json
import shutil
import types

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import grpo
import ppo
from common.errors import InputError
from common.checkpoints import add_digests
from common.model import load_policy, load_reference, load_tokenizer
from common.scorer import load_scorer
from small_models import copy_of_embedded, hub_snapshot

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
    args = grpo.Args(model_name_or_path=str(base))
    lm = load_policy(args, load_tokenizer(args)).lm
    with_adapter = make_adapter(tmp_path / "adapter", base, lm)
    return types.SimpleNamespace(base=base, folder=tmp_path / "adapter", lm=with_adapter)


def logits(lm):
    with torch.no_grad():
        return lm.eval()(torch.arange(9)[None]).logits


def test_an_adapter_is_merged_into_its_base_and_all_weights_are_trained(adapter):
    args = grpo.Args(model_name_or_path=str(adapter.folder))
    policy = load_policy(args, load_tokenizer(args))
    torch.testing.assert_close(logits(policy.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)
    assert not any("lora" in name for name, _ in policy.named_parameters())
    assert all(weight.requires_grad for weight in policy.parameters())


def test_the_reference_is_base_and_adapter_together(adapter):
    args = grpo.Args(model_name_or_path=str(adapter.folder), kl_coef=0.1)
    policy = load_policy(args, load_tokenizer(args))
    reference = load_reference(policy, args)
    torch.testing.assert_close(logits(reference.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)


def test_new_adapters_go_on_top_and_model_is_written_merged(adapter, tmp_path):
    refused = grpo.Args(model_name_or_path=str(adapter.folder), lora_rank=2)
    with pytest.raises(InputError, match="add --lora_merge"):  # an adapter folder could not name such a base
        load_policy(refused, load_tokenizer(refused))
    options = "--prompts_per_step 4 --group_size 4 --max_steps 1 --eval_prompts 4 --eval_samples 4 --lora_merge"
    run = tmp_path / "run"
    grpo.main(
        [*options.split(), "--lora_rank", "2", "--model_name_or_path", str(adapter.folder), "--output_dir", str(run)]
    )
    args = grpo.Args(model_name_or_path=str(run / "model"))
    trained = load_policy(args, load_tokenizer(args)).lm
    moved = (logits(trained) - logits(adapter.lm)).abs().max()
    assert 0 < moved < 0.5  # one step away from base and adapter, and not from the base alone
    assert (logits(adapter.lm) - logits(adapter.lm.get_base_model())).abs().max() == 0  # the adapter is on
    with adapter.lm.disable_adapter():
        assert (logits(trained) - logits(adapter.lm)).abs().max() > 2 * moved


def test_an_adapter_of_a_reward_model_starts_a_critic(tmp_path):
    base = copy_of_embedded(tmp_path / "base")
    torch.manual_seed(0)
    lm = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    lm.save_pretrained(base)
    with_adapter = make_adapter(tmp_path / "adapter", base, lm, task_type="SEQ_CLS")
    scorer = load_scorer(ppo.Args(critic_path=str(tmp_path / "adapter")), "critic_path", "cpu")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = with_adapter(ids).logits
        torch.testing.assert_close(scorer.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("which", ["base", "adapter"])
def test_a_resume_notices_another_adapter_and_another_base(which, adapter, tmp_path):
    before, after = {}, {}
    args = grpo.Args(model_name_or_path=str(adapter.folder))
    add_digests(before, args)
    folder = {"base": adapter.base, "adapter": adapter.folder}[which]
    path = folder / ("config.json" if which == "base" else "adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"note": 1}), encoding="utf-8")
    add_digests(after, args)
    assert [name for name in before if before[name] != after[name]] == [f"--model_name_or_path {folder}/{path.name}"]


def test_an_adapter_of_the_hub_is_loaded_like_a_folder(adapter, tmp_path, monkeypatch):
    snapshot = hub_snapshot(tmp_path / "cache", monkeypatch)
    shutil.copytree(adapter.folder, snapshot)
    args = grpo.Args(model_name_or_path="some/model")
    policy = load_policy(args, load_tokenizer(args))
    torch.testing.assert_close(logits(policy.lm), logits(adapter.lm), atol=1e-5, rtol=1e-5)


@pytest.mark.beside("tools")
def test_the_dry_run_counts_the_base_of_an_adapter(adapter, capsys):
    estimates = []
    for folder in (adapter.base, adapter.folder):
        with pytest.raises(SystemExit) as end:
            grpo.main(["--dry_run", "--model_name_or_path", str(folder)])
        assert not end.value.code
        estimates.append(capsys.readouterr().out.replace(str(folder), "the model"))
    assert estimates[0] == estimates[1] != ""
