"""common/policy.py: the log-probs and entropies of the forward, and their gradients."""

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

import common.policy
from common.harness import gpu_probes, ladder, probes
from common.harness.embedded import EMBEDDED
from common.harness.gpu_probes import fuse_norms
from common.harness.ladder import find_shortcuts
from common.policy import Policy
from small_models import HYBRIDS, LLAMA4, backward, random_batch, random_policy
from testbed import embedded, hand_made_batch, largest_difference


def plain_forward(policy, batch):
    """Log-probs and entropies from the full logits of the model, one row at a time, without any padding."""
    logprobs, entropies = (torch.zeros(batch["completion_mask"].shape) for _ in range(2))
    for i, (prompt_mask, mask) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
        prompt, completion = batch["prompts"][i][prompt_mask], batch["completions"][i][mask]
        logits = policy.lm(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / policy.temperature
        distribution = logits.log_softmax(-1)
        logprobs[i, : len(completion)] = distribution.gather(-1, completion[:, None])[:, 0]
        entropies[i, : len(completion)] = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropies


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma2", "granite", "cohere"])
@pytest.mark.parametrize("chunk", [2**25, 40 * 5], ids=["one chunk", "chunks of 5"])
def test_forward_equals_full_logits_without_padding(name, chunk, monkeypatch):
    # Padding leaks, missing position ids, a soft cap or logit scale outside the head: values and gradients.
    monkeypatch.setattr(common.policy, "CHUNK_ELEMENTS", chunk)
    options = dict(num_key_value_heads=2, head_dim=8) if name in ("gemma2", "granite", "cohere") else {}
    options |= dict(logits_scaling=3.0) if name == "granite" else {}
    policy = random_policy(name, temperature=0.7, scale=3.0, **options).eval()
    assert policy.head_is_last == (name not in ("gemma2", "granite", "cohere"))
    batch, weights = random_batch(), torch.rand(6, 9)
    expected, expected_entropy = plain_forward(policy, batch)
    logprobs, entropy = policy(batch)
    assert torch.allclose(logprobs, expected, atol=2e-5)
    assert torch.allclose(entropy, expected_entropy, atol=2e-5)
    ours = backward(policy, logprobs, weights)
    plain = backward(policy, plain_forward(policy, batch)[0], weights)
    scale = max(float(g.abs().max()) for g in plain)
    assert largest_difference(ours, plain) < 2e-6 * scale


def test_a_cap_that_the_logits_of_the_probe_do_not_reach_is_found(monkeypatch):
    """A soft cap changes the last bits of small logits too; one that cuts changes none."""
    lm = random_policy("qwen2").lm
    forward = lm.forward

    def capped(*inputs, **options):
        output = forward(*inputs, **options)
        output.logits = output.logits.clamp(-30, 30)
        return output

    assert find_shortcuts(lm)["head_is_last"] and lm(torch.arange(8)[None]).logits.detach().abs().max() < 10
    monkeypatch.setattr(lm, "forward", capped)
    assert not find_shortcuts(lm)["head_is_last"]


@pytest.mark.parametrize("name", [*HYBRIDS, "llama4_text"])
def test_what_a_shortcut_cannot_serve_goes_without_it_and_says_so(name):
    # Convolutions and linear attention keep other states; Llama 4's base model has the head in it.
    policy = random_policy(name, **LLAMA4 if name == "llama4_text" else {}).eval()
    assert not policy.shares_prompts
    assert policy.head_is_last == (name not in ("granitemoehybrid", "llama4_text"))  # Granite scales its logits
    assert policy.plain_cache == (name == "llama4_text")
    _, *notes = policy.notes(AutoTokenizer.from_pretrained(EMBEDDED))
    assert ["cannot run in chunks" in note for note in notes].count(True) == (not policy.head_is_last)
    assert ["--rollout hf" in note for note in notes].count(True) == (not policy.plain_cache)
    batch = random_batch()
    for ours, expected in zip(policy(batch), plain_forward(policy, batch), strict=True):
        assert torch.allclose(ours, expected, atol=2e-5)


def test_a_check_that_the_model_cannot_be_run_on_says_no(monkeypatch):
    policy = random_policy("qwen2")
    assert policy.head_is_last and policy.plain_cache and policy.shares_prompts
    plain = policy.lm.model.forward

    def forward(*args, past_key_values=None, **kwargs):
        if past_key_values is not None:
            raise RuntimeError("Sizes of tensors must match")
        return plain(*args, **kwargs)

    monkeypatch.setattr(policy.lm.model, "forward", forward)
    found = find_shortcuts(policy.lm)
    assert [found[name] for name in ("head_is_last", "plain_cache", "shares_prompts")] == [True, False, False]
    assert found["refused"] == {"plain_cache": "RuntimeError: Sizes of tensors must match"}


def test_rounding_in_bfloat16_is_no_reason_not_to_share_prompts():
    # Numbers of bfloat16 between 16 and 32 are 0.125 apart; a bound of 0.1 refused SmolLM2.
    _, _, _, policy = embedded()
    policy.lm.get_output_embeddings().weight.data.mul_(3)
    assert find_shortcuts(policy.lm.bfloat16().eval())["shares_prompts"]


def test_under_autocast_rounding_is_that_of_bfloat16():
    lm = random_policy("qwen2").lm
    with torch.autocast("cpu", torch.bfloat16):
        assert probes.rounding(lm) == probes.rounding(lm.to(torch.bfloat16)) == 0.5
    assert probes.rounding(lm.float()) == 1e-4


def test_the_shortcuts_of_a_gpu_are_tried_in_the_precision_of_the_run(monkeypatch):
    """Norms were compared in float32, and their bits were others in bfloat16."""
    lm, seen = random_policy("qwen2").lm, {}
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    look = lambda name, *inputs: seen.update({name: torch.is_autocast_enabled("cpu")}) or True  # noqa: E731
    monkeypatch.setattr(ladder, "tried", look)
    monkeypatch.setattr(gpu_probes, "tried", look)
    find_shortcuts(lm, accelerator=Accelerator(cpu=True, mixed_precision="bf16"))
    assert seen["fused_norms"] and seen["graphs"] and not seen["head_is_last"]


def test_a_prompt_is_said_to_be_computed_again_only_where_it_is():
    policy, said = random_policy("qwen2"), "compute a prompt again"
    for shares, packs in ((True, False), (False, True), (False, False)):
        policy.shares_prompts, policy.packs = shares, packs
        notes = " ".join(policy.notes(AutoTokenizer.from_pretrained(EMBEDDED)))
        assert (said in notes) == (not shares and not packs)


def test_a_policy_takes_its_shortcuts_as_they_are_given():
    lm, ran = random_policy("qwen2").lm, []
    lm.model.register_forward_hook(lambda *inputs: ran.append(inputs))
    for facts in (
        dict(head_is_last=True, plain_cache=False, shares_prompts=False),
        find_shortcuts(lm, may_share=False),
    ):
        ran.clear()
        policy = Policy(lm, 0, [2], 0.7, **facts)
        assert not ran and {name: getattr(policy, name) for name in facts} == facts
    assert facts == dict(head_is_last=True, plain_cache=True, shares_prompts=False, fused_norms=0, refused={})


def test_no_tensor_holds_all_logits(monkeypatch):
    # (R, T, V) copies run out of memory (trl#2598): the head sees a chunk of completion tokens at a time, no prompts.
    monkeypatch.setattr(common.policy, "CHUNK_ELEMENTS", 40 * 5)
    policy, batch, seen = random_policy("qwen2"), random_batch(), []
    policy.lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    policy(batch)
    assert all(shape[-2] <= 5 for shape in seen)
    assert sum(shape[-2] for shape in seen) == int(batch["completion_mask"].sum())


def test_no_chunk_of_logits_is_kept_for_the_backward_pass(monkeypatch):
    # Kept, all chunks together are the (R, T, V) copy.
    policy, batch, kept = random_policy("qwen2"), random_batch(), []
    rows = int(batch["completion_mask"].sum())

    def pack(tensor):
        kept.append(tensor.shape)
        return tensor

    for size, any_kept in ((rows, True), (5, False)):  # all of them in one chunk are kept: it is small enough
        monkeypatch.setattr(common.policy, "CHUNK_ELEMENTS", 40 * size)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy(batch, with_entropy=False)
        assert any(shape[-1:] == (40,) and shape[0] <= size for shape in kept) == any_kept


def test_extra_padding_and_garbage_change_nothing():
    policy, batch = random_policy("gpt2"), random_batch()
    wide = dict(batch)
    for name, fill in (("prompts", 17), ("prompt_mask", False)):
        wide[name] = torch.nn.functional.pad(batch[name], (3, 0), value=fill)
    for name, fill in (("completions", 23), ("completion_mask", False)):
        wide[name] = torch.nn.functional.pad(batch[name], (0, 4), value=fill)
    wide["prompts"] = torch.where(wide["prompt_mask"], wide["prompts"], 31)
    wide["completions"] = torch.where(wide["completion_mask"], wide["completions"], 29)
    logprobs, entropy = policy.eval()(batch)
    wide_logprobs, wide_entropy = policy(wide)
    assert torch.allclose(wide_logprobs[:, :9], logprobs, atol=1e-5) and (wide_logprobs[:, 9:] == 0).all()
    assert torch.allclose(wide_entropy[:, :9], entropy, atol=1e-5)


def test_entropy_has_a_gradient_only_where_it_is_asked_for():
    _, args, tokenizer, policy = embedded()
    batch, _ = hand_made_batch(policy, tokenizer, args)
    assert not policy(batch)[1].requires_grad and policy(batch, entropy_grad=True)[1].requires_grad


def test_gradient_checkpointing_gives_the_same_gradient():
    _, args, tokenizer, policy = embedded()
    _, _, _, checkpointed = embedded(gradient_checkpointing=True)
    batch, _ = hand_made_batch(policy, tokenizer, args)
    weights = batch["loss_mask"].float()
    a, b = (backward(p, p(batch)[0], weights) for p in (policy, checkpointed))
    assert largest_difference(a, b) < 1e-4 * max(float(g.abs().max()) for g in a)


@pytest.mark.parametrize("name", ["qwen2", "llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_have_the_same_bits_and_follow_a_copy(dtype, name):
    """What a GPU's probe does, on a CPU. Fresh weights are all one, with which the order of products shows nothing."""
    policy = random_policy(name)
    policy.lm.to(dtype)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape)) if parameter.dim() == 1 else None
    batch = random_batch()
    expected, _ = policy(batch)
    fuse_norms(policy.lm)
    norms = [module for module in policy.lm.modules() if type(module).__name__.endswith("RMSNorm")]
    assert len(norms) == 5 and all("forward" in vars(norm) for norm in norms)
    assert torch.equal(policy(batch)[0], expected)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.lm.model.norm.weight.zero_()
    assert torch.equal(policy(batch)[0], expected) and not torch.equal(other(batch)[0], expected)


class CentredRMSNorm(torch.nn.Module):
    """Of another function, which the numbers around 0 do not tell: it takes the mean away."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_another_function_stays_as_it_is(dtype):
    policy = random_policy("qwen2")
    policy.lm.model.norm = CentredRMSNorm(policy.lm.model.norm)
    policy.lm.to(dtype)
    fuse_norms(policy.lm)
    fused = [type(module).__name__ for module in policy.lm.modules() if "forward" in vars(module)]
    assert fused == ["Qwen2RMSNorm"] * 4


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2"])
def test_other_norms_stay_as_they_are(name):
    """Gemma multiplies by 1 + weight; GPT-2 has no RMSNorm."""
    policy = random_policy(name, **(dict(num_key_value_heads=2, head_dim=8) if name != "gpt2" else {}))
    fuse_norms(policy.lm)
    assert not any("forward" in vars(module) for module in policy.lm.modules())
