"""fast/shortcuts.py: --fast against the plain computation, the start checks, and several processes."""

import contextlib
import copy
import re
import types

import pytest
import torch
from accelerate import Accelerator

import grpo
from common import masked
from common.load import load_reference
from fast import shortcuts
from fast.exact import CACHE, computes_in_float32, is_plain_linear
from fast.logprobs import logprobs_of_states
from fast.shortcuts import Shortcuts, find_shortcuts, packing_is_exact_on, speed_up
from processes import run_processes
from small_models import random_batch, random_lm
from sped_up import left_pad, random_policy
from testbed import ROOT, SCRIPTS, SHIPPED, embedded, embedded_prompts, metric_rows, script

QUICK = "--max_steps 2 --prompts_per_step 4 --group_size 4 --eval_prompts 2 --eval_samples 4 --eval_every 0".split()


# --- with and without ---


@pytest.mark.parametrize("name", [name for name in [*SCRIPTS, "dpo"] if name in SHIPPED])
def test_scripts_mention_fast_in_six_lines(name):
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert 0 < len(re.findall(r"args\.fast|import speed_up|speed_up\(", source)) <= 5
    assert not re.search(r"^(?:from|import) fast", source, re.MULTILINE)


def test_common_does_not_import_fast():
    files = ROOT.glob("common/*.py")
    assert not [file for file in files if re.search(r"(?:from|import) fast\b", file.read_text(encoding="utf-8"))]


@torch.no_grad()
def test_greedy_samples_match_generate():
    module, args, tokenizer, lm = embedded(fast=True)
    prompts = embedded_prompts()[:8]
    plain = module.rollout(lm, tokenizer, prompts, 1, 0, 1.0, (0,), args)
    speed_up(lm, Accelerator(cpu=True))
    fast = module.rollout(lm, tokenizer, prompts, 1, 0, 1.0, (0,), args)
    assert all(torch.equal(plain[name], fast[name]) for name in plain)


def test_a_copy_has_its_own_weights():
    _, args, _, lm = embedded(fast=True)
    speed_up(lm, Accelerator(cpu=True))
    batch = random_batch(vocabulary=16)
    before, _ = grpo.completion_logprobs(lm, batch, args)
    reference = copy.deepcopy(lm)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(1.1)
    after, _ = grpo.completion_logprobs(lm, batch, args)
    again, _ = grpo.completion_logprobs(reference, batch, args)
    assert torch.equal(before, again) and not torch.allclose(before, after, atol=1e-3)
    plain, _ = grpo.completion_logprobs(reference, batch, grpo.Args())
    assert torch.allclose(plain, again, atol=1e-5)


def test_sampler_mismatch_warns_once(monkeypatch, capsys):
    module, args, tokenizer, lm = embedded(fast=True)
    speed_up(lm, Accelerator(cpu=True))
    prompts = embedded_prompts()[:4]
    module.rollout(lm, tokenizer, prompts, 2, 1.0, 1.0, (0,), args)
    assert "log-probs differ" not in capsys.readouterr().out
    monkeypatch.setattr(
        shortcuts, "logprobs_of_states", lambda *inputs: [x + 0.01 for x in logprobs_of_states(*inputs)]
    )
    for seed in range(2):
        module.rollout(lm, tokenizer, prompts, 2, 1.0, 1.0, (seed,), args)
    assert capsys.readouterr().out.count("--fast: the log-probs differ by 0.0") == 1


def test_certain_tokens_do_not_warn(capsys):
    """Their log-prob is 0, like that of padding."""
    module, args, tokenizer, lm = embedded(fast=True, max_new_tokens=40)
    with torch.no_grad():
        lm.get_output_embeddings().weight.mul_(2)
    speed_up(lm, Accelerator(cpu=True))
    for prompt in embedded_prompts()[:6]:
        module.rollout(lm, tokenizer, [prompt], 4, 1.0, 1.0, (0,), args)
    assert "log-probs differ" not in capsys.readouterr().out


def test_speed_up_does_not_warn(recwarn, caplog):
    _, _, _, lm = embedded(fast=True)
    speed_up(lm, Accelerator(cpu=True))
    assert not recwarn.list and not caplog.text


@pytest.mark.needs("peft")
def test_adapters_keep_shared_prompts(capsys, caplog):
    """LoRA freezes the embedding, whose gradient the checks compare."""
    module, args, tokenizer, lm = embedded(fast=True, lora_rank=4)
    frozen = {name for name, weight in lm.named_parameters() if not weight.requires_grad}
    speed_up(lm, Accelerator(cpu=True))
    assert {name for name, weight in lm.named_parameters() if not weight.requires_grad} == frozen
    assert "again for each completion" not in capsys.readouterr().out and not caplog.text
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    batch = module.rollout(lm, tokenizer, embedded_prompts()[:4], 4, 1.0, 1.0, (0,), args)
    assert "log-probs differ" not in capsys.readouterr().out  # it samples with the adapters
    reference = load_reference(lm, args, Accelerator(cpu=True))
    found = []
    for model in (lm, reference):
        fast, _ = grpo.completion_logprobs(model, batch, args)
        plain, _ = grpo.completion_logprobs(model, batch, grpo.Args())
        assert torch.allclose(fast, plain, atol=1e-5)
        found.append(fast)
    assert not torch.allclose(*found, atol=1e-2)


def test_run_without_shortcuts_is_the_same(few_pairs, tmp_path):
    """Trains on given pairs, so that no step samples; the evaluation decodes greedily."""
    sizes = (
        "--max_steps 3 --pairs_per_step 8 --eval_prompts 8 --eval_samples 1 --eval_temperature 0 --eval_every 0".split()
    )
    rows = []
    for is_fast in ("true", "false"):
        options = [*few_pairs, "--eval_dataset", "embedded", "--fast", is_fast]
        script("dpo").main([*options, *sizes, "--output_dir", str(tmp_path / is_fast)])
        rows.append(metric_rows(tmp_path / is_fast))
    assert len(rows[0]) > 3
    del rows[0][1]["rewards/accuracy"], rows[1][1]["rewards/accuracy"]  # the margins are 0, so rounding decides
    for fast, plain in zip(*rows, strict=True):
        assert fast == pytest.approx(plain, rel=1e-4, abs=1e-5)


# --- the checks at the start ---


def test_prompts_are_shared_only_if_allowed():
    lm = random_lm("qwen2")
    found = find_shortcuts(lm, False)
    assert found.plain_cache and not found.shares_prompts
    assert found.summary() == "updates compute the prompt again for each completion"
    assert find_shortcuts(lm, True).summary() == ""


def test_hybrid_uses_stock_generate():
    found = find_shortcuts(random_lm("mamba2"), True)
    assert found.summary() == "stock `generate` samples: the cache holds more than keys and values"


def test_gpu_summary_names_the_shortcuts():
    found = Shortcuts(True, True, True, packs=False, graphs=True, on_gpu=True)
    line = "CUDA graphs for sampled tokens: True; forwards without padding (bfloat16 only): False"
    assert found.summary() == line


def test_raising_check_turns_the_shortcut_off(monkeypatch, caplog):
    lm = random_lm("qwen2")
    plain = lm.model.forward

    def forward(*args, **kwargs):
        if kwargs.get(CACHE) is not None:
            raise RuntimeError("Sizes of tensors must match")
        return plain(*args, **kwargs)

    monkeypatch.setattr(lm.model, "forward", forward)
    found = find_shortcuts(lm, True)
    assert found.head_is_last and not found.plain_cache and not found.shares_prompts
    assert "has_plain_cache: Sizes of tensors must match" in caplog.text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_device_errors_end_the_run(error, monkeypatch):
    def fails(lm):
        raise error("CUDA error")

    monkeypatch.setattr(shortcuts, "has_plain_cache", fails)
    with pytest.raises(error):
        find_shortcuts(random_lm("qwen2"), True)


def test_zero_embedding_keeps_prompts_shared():
    """A fresh Qwen2 has one for padding, whose gradient through an RMSNorm may be NaN."""
    lm = random_lm("qwen2")
    assert not lm.get_input_embeddings().weight[0].any()
    assert find_shortcuts(lm, True).shares_prompts


def test_bfloat16_rounding_keeps_prompts_shared():
    # Numbers of bfloat16 between 16 and 32 are 0.125 apart; a bound of 0.1 refused SmolLM2.
    *_, lm = embedded()
    lm.get_output_embeddings().weight.data.mul_(3)
    assert find_shortcuts(lm.bfloat16().eval(), True).shares_prompts


def test_gpu_checks_use_the_runs_precision(monkeypatch):
    """A check in float32 says nothing about bfloat16."""
    lm, seen = random_lm("qwen2"), {}

    def look(check, lm):
        seen[check.__name__] = torch.is_autocast_enabled("cpu")
        return True

    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    monkeypatch.setattr(shortcuts, "has_last_head", lambda lm: True)
    monkeypatch.setattr(shortcuts, "try_check", look)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    found = find_shortcuts(lm, True, accelerator)
    inside = [name for name, autocast in seen.items() if autocast]
    assert inside == ["packing_is_exact", "graphs_are_exact"]
    assert found.packs and found.graphs


def test_autocast_allows_bfloat16_rounding():
    lm = random_lm("qwen2")
    assert computes_in_float32(lm)
    with torch.autocast("cpu", torch.bfloat16):
        assert not computes_in_float32(lm)
    assert not computes_in_float32(lm.bfloat16())


# --- modules that are not plain ---


def hook(module):
    module.register_forward_hook(lambda module, inputs, output: 1.5 * output)


def pre_hook(module):
    """Like pruning and weight norm."""
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def replaced_forward(module):
    """Like Accelerate's hooks."""
    forward = module.forward
    module.forward = lambda x: 1.5 * forward(x)


def subclass(module):
    """Like quantized and parametrized layers."""
    plain = type(module)
    module.__class__ = type("Scaled", (plain,), {"forward": lambda self, x: 1.5 * plain.forward(self, x)})


class Quantized(torch.Tensor):
    """A weight that only `linear` knows how to read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.linear:
            return super().__torch_function__(function, types, args, kwargs)
        return 1.5 * function(args[0], args[1].as_subclass(torch.Tensor), *args[2:])


def quantization(module):
    module.weight = torch.nn.Parameter(module.weight.detach().as_subclass(Quantized), requires_grad=False)


def lora(module):
    """Return the module with an adapter that is not zero."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, lora_alpha=64)
    return peft.inject_adapter_in_model(config, torch.nn.Sequential(module))[0]


HEAD, EMBEDDING, NORM, KEYS = "lm_head", "model.embed_tokens", "model.norm", "model.layers.0.self_attn.k_proj"
CASES = [(change, place) for change in (hook, replaced_forward, subclass) for place in (HEAD, EMBEDDING, NORM, KEYS)]
CASES += [(pre_hook, place) for place in (HEAD, NORM, KEYS)] + [(quantization, place) for place in (HEAD, KEYS)]
CASES += [(lora, place) for place in (HEAD, EMBEDDING, KEYS)]


@pytest.mark.parametrize("change, place", CASES, ids=lambda x: getattr(x, "__name__", x))
@torch.no_grad()
def test_wrapped_modules_are_not_bypassed(change, place):
    """With LoRA on the head, `head.weight` was the base's, and samples never saw the adapter."""
    policy = random_policy("llama", tie_word_embeddings=False)
    ids, mask = left_pad([[5, 6, 7, 8, 9], [11, 12]], 0)
    before = policy.lm(ids).logits
    policy.lm.set_submodule(place, change(policy.lm.get_submodule(place)) or policy.lm.get_submodule(place))
    assert policy.shortcuts.plain_cache and policy.shares_prompts and policy.shortcuts.head_is_last
    output = policy.sample(ids, mask, length=12, n=3)
    completions = output.sequences[:, 5:]
    prompt_mask = mask.repeat_interleave(3, dim=0)
    completion_mask, _ = masked.completion_mask(completions, policy.stop_tokens)
    assert (policy.lm(ids).logits - before).abs().max() > 0.01
    rows = torch.cat([prompt_mask, completion_mask], dim=1)
    logits = policy.lm(output.sequences, attention_mask=rows.long(), position_ids=masked.positions(rows)).logits
    logprobs = logits[:, 4:-1].log_softmax(-1).gather(-1, completions[:, :, None])[:, :, 0]
    logprobs = logprobs.where(completion_mask, 0)
    assert float((output.logprobs - logprobs).abs().max()) < 1e-5
    batch = {"prompts": ids.repeat_interleave(3, dim=0), "prompt_mask": prompt_mask, "completions": completions}
    batch |= {"completion_mask": completion_mask, "prompt_index": None}
    assert float((policy(batch)[0] - logprobs).abs().max()) < 1e-5


def test_a_plain_head_is_recognized():
    lm = random_lm("llama")
    assert is_plain_linear(lm.lm_head) and not is_plain_linear(lm.model.norm)
    assert not is_plain_linear(torch.nn.Linear(3, 3))  # its bias


# --- several processes ---


def test_one_refusal_turns_all_processes_off(tmp_path):
    """Otherwise their metrics have sums of different lengths: gloo aborts, NCCL hangs."""
    result = run_processes("tests/helpers/refusing_worker.py", *QUICK, "--fast", "--output_dir", tmp_path, processes=2)
    assert result.returncode == 0, result.stderr
    assert "something is wrong here alone" in result.stderr
    assert "stock `generate` samples" in result.stdout


class OtherProcess:
    """An accelerator of two processes, of which the other one refuses the shortcuts with the given indices."""

    device, is_fsdp2 = torch.device("cpu"), False

    def __init__(self, *refused):
        self.refused = refused

    def autocast(self):
        return contextlib.nullcontext()

    def gather(self, numbers):
        other = torch.ones_like(numbers)
        other[0, list(self.refused)] = 0
        return torch.cat([numbers, other])


def test_prompt_sharing_agrees_across_processes():
    lm = random_lm("qwen2")
    assert find_shortcuts(lm, True, OtherProcess()).shares_prompts
    shared = [find_shortcuts(lm, True, OtherProcess(place)).shares_prompts for place in range(4)]
    assert shared.count(False) == 1


# --- a model that is sharded later ---


@pytest.mark.parametrize("fault", [None, torch.OutOfMemoryError("CUDA out of memory")])
def test_fsdp2_model_is_checked_unsharded(fault, monkeypatch):
    """If it does not fit there, forwards are padded."""
    lm, moved = random_lm("qwen2"), []

    def packing_is_exact(lm):
        moved.append("tried")
        if fault:
            raise fault
        return True

    monkeypatch.setattr(lm, "to", lambda device: moved.append(device) or lm)
    monkeypatch.setattr(shortcuts, "packing_is_exact", packing_is_exact)
    assert packing_is_exact_on("the GPU", lm) == (fault is None)
    assert moved == ["the GPU", "tried", torch.device("cpu")]


def test_fsdp2_checks_packing_only_on_gpus(monkeypatch):
    lm, tried = random_lm("qwen2"), []
    monkeypatch.setattr(shortcuts, "packing_is_exact_on", lambda *inputs: tried.append(1) or True)
    monkeypatch.setattr(shortcuts, "true_on_all", lambda answers, accelerator: list(answers))
    for kind, fsdp2, packs in (("cuda", True, True), ("cuda", False, False), ("cpu", True, False)):
        accelerator = OtherProcess()
        accelerator.device, accelerator.is_fsdp2 = types.SimpleNamespace(type=kind), fsdp2
        found = find_shortcuts(lm, False, accelerator)
        assert (found.packs, found.shares_prompts) == (packs, packs)
    assert len(tried) == 1
