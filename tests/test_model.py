"""The module that gives log-probs and entropy, its batches, stop tokens, loading and saving."""

import types

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import common.policy
import grpo
from common.batches import micro_batches, take_rows
from common.errors import InputError
from common.harness.loading import find_stop_tokens, load_policy, load_tokenizer, save_pretrained
from common.policy import Policy
from common.shared_prompts import runs_of_similar_length
from test_generation import Tokens, random_policy
from tools import embedded, hand_made_batch, largest_difference


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


def random_batch(rows=6, seed=0, vocabulary=40):
    generator = torch.Generator().manual_seed(seed)
    prompt_mask = torch.arange(7)[None] >= torch.randint(0, 5, (rows, 1), generator=generator)
    completion_mask = torch.arange(9)[None] < torch.randint(1, 10, (rows, 1), generator=generator)
    ids = torch.randint(3, vocabulary, (rows, 16), generator=generator)
    batch = {"prompts": ids[:, :7], "prompt_mask": prompt_mask, "completions": ids[:, 7:], "loss_mask": completion_mask}
    return batch | {"completion_mask": completion_mask}


def backward(policy, logprobs, weights):
    policy.zero_grad()
    (logprobs * weights).sum().backward()
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "gemma2", "granite", "cohere"])
@pytest.mark.parametrize("chunk", [2**25, 40 * 5], ids=["one chunk", "chunks of 5"])
def test_forward_equals_full_logits_without_padding(name, chunk, monkeypatch):
    # Padding leaks, missing position ids, a soft cap or logit scale outside the head: values and gradients.
    monkeypatch.setattr(common.policy, "CHUNK_ELEMENTS", chunk)
    options = dict(num_key_value_heads=2, head_dim=8) if name in ("gemma2", "granite", "cohere") else {}
    options |= dict(logits_scaling=3.0) if name == "granite" else {}
    policy = random_policy(name, temperature=0.7, scale=3.0, **options).eval()
    assert policy.chunked == (name not in ("gemma2", "granite", "cohere"))
    batch, weights = random_batch(), torch.rand(6, 9)
    expected, expected_entropy = plain_forward(policy, batch)
    logprobs, entropy = policy(batch)
    assert torch.allclose(logprobs, expected, atol=2e-5)
    assert torch.allclose(entropy, expected_entropy, atol=2e-5)
    ours = backward(policy, logprobs, weights)
    plain = backward(policy, plain_forward(policy, batch)[0], weights)
    scale = max(float(g.abs().max()) for g in plain)
    assert largest_difference(ours, plain) < 2e-6 * scale


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "mistral", "qwen3", "gemma3_text", "phi3"])
@pytest.mark.parametrize("padded", [True, False])
def test_shared_prompts_give_the_plain_log_probs_and_gradients(name, padded):
    # Sliding windows shorter than a prompt (mistral, gemma3): a mask that replaces the window is silently wrong.
    options = {} if name in ("qwen2", "llama", "gpt2", "mistral") else dict(num_key_value_heads=2, head_dim=8)
    options |= dict(sliding_window=8) if name == "gemma3_text" else {}
    policy = random_policy(name, scale=2.0, **options).double().eval()
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(rows=12)
    index = torch.randint(0, 4, (12,), generator=generator)
    for column in ("prompts", "prompt_mask"):
        batch[column] = torch.cat([batch[column]] * 3, dim=1)[index]  # 21 tokens, one prompt for each index
    batch["prompt_mask"] = torch.arange(21)[None] >= (index * 5 if padded else index * 0)[:, None]
    weights, results = torch.rand(12, 9, generator=generator), []
    for extra in ({}, {"prompt_index": index[:, None]}):
        logprobs, entropy = policy(batch | extra)
        results.append((logprobs.detach(), entropy.detach(), backward(policy, logprobs, weights)))
    (plain, plain_entropy, plain_gradient), (shared, entropy, gradient) = results
    assert torch.allclose(plain, shared, atol=1e-6) and torch.allclose(plain_entropy, entropy, atol=1e-6)
    assert largest_difference(gradient, plain_gradient) < 1e-6 * max(float(g.abs().max()) for g in plain_gradient)
    assert name == "gemma3_text" or policy.shares_prompts


@pytest.mark.parametrize("most_padding", [0, 10, 300, 1e9])
def test_runs_of_similar_length_hold_every_row_and_waste_little(most_padding):
    generator = torch.Generator().manual_seed(0)
    lengths = (1 + torch.empty(128).exponential_(1 / 35, generator=generator)).int().tolist()
    runs = runs_of_similar_length(lengths, most_padding)
    assert sorted(row for run in runs for row in run) == list(range(128))
    padding = [sum(max(lengths[row] for row in run) - lengths[row] for row in run) for run in runs]
    assert max(padding) <= most_padding
    longest = [max(lengths[row] for row in run) for run in runs]
    assert longest == sorted(longest) and (most_padding < 1e9) == (len(runs) > 1)


def test_no_tensor_holds_all_logits(monkeypatch):
    # (R, T, V) copies run out of memory (trl#2598): the head sees a chunk of completion tokens at a time, no prompts.
    monkeypatch.setattr(common.policy, "CHUNK_ELEMENTS", 40 * 5)
    policy, batch, seen = random_policy("qwen2"), random_batch(), []
    policy.lm.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    policy(batch)
    assert all(shape[-2] <= 5 for shape in seen)
    assert sum(shape[-2] for shape in seen) == int(batch["completion_mask"].sum())


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


def test_first_token_is_predicted_at_the_last_prompt_position():
    policy, batch = random_policy("qwen2"), random_batch(rows=1)
    prompt = batch["prompts"][0][batch["prompt_mask"][0]]
    expected = policy.lm(prompt[None]).logits[0, -1].log_softmax(-1)[batch["completions"][0, 0]]
    assert float(policy(batch)[0][0, 0].detach()) == pytest.approx(float(expected.detach()), abs=1e-5)


def test_entropy_gradient_only_with_its_coefficient():
    _, _, _, plain = embedded()
    _, args, tokenizer, bonus = embedded(entropy_coef=0.01)
    batch, _ = hand_made_batch(plain, tokenizer, args)
    assert not plain(batch)[1].requires_grad and bonus(batch)[1].requires_grad


def test_gradient_checkpointing_gives_the_same_gradient():
    _, args, tokenizer, policy = embedded()
    _, _, _, checkpointed = embedded(gradient_checkpointing=True)
    batch, _ = hand_made_batch(policy, tokenizer, args)
    weights = batch["loss_mask"].float()
    a, b = (backward(p, p(batch)[0], weights) for p in (policy, checkpointed))
    assert largest_difference(a, b) < 1e-4 * max(float(g.abs().max()) for g in a)


# --- loading ---


def test_dropout_is_off():
    # Dropout between two forwards makes the first ratio differ from 1 (trl#454, #3234).
    _, args, tokenizer, policy = embedded()
    batch, _ = hand_made_batch(policy, tokenizer, args)
    assert policy.training
    assert torch.equal(policy(batch)[0], policy(batch)[0])


@pytest.mark.parametrize("name, dropout", [("gpt2", "resid_pdrop"), ("qwen2", "attention_dropout")])
def test_dropout_of_a_checkpoint_is_switched_off(name, dropout, tmp_path):
    _, args, tokenizer, _ = embedded()
    policy = random_policy(name)
    setattr(policy.lm.config, dropout, 0.5)
    policy.lm.save_pretrained(tmp_path)
    args.model_name_or_path = str(tmp_path)
    loaded, batch = load_policy(args, tokenizer), random_batch()
    assert loaded.training
    assert torch.equal(loaded(batch)[0], loaded(batch)[0])


def test_model_is_saved_in_its_dtype_with_its_own_generation_config(tmp_path):
    _, args, tokenizer, policy = embedded()
    policy.lm.generation_config = GenerationConfig(do_sample=True, top_k=7, eos_token_id=1)
    policy.lm.to(torch.bfloat16).save_pretrained(tmp_path / "a")
    tokenizer.save_pretrained(tmp_path / "a")
    args.model_name_or_path = str(tmp_path / "a")
    policy = load_policy(args, load_tokenizer(args))
    assert policy.lm.dtype == torch.float32  # trained in float32
    accelerator = Accelerator(cpu=True)
    save_pretrained(accelerator, accelerator.prepare(policy), policy, tokenizer, tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert again.dtype == torch.bfloat16 and again.generation_config.top_k == 7
    assert {x.dtype for x in load_file(tmp_path / "b" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoTokenizer.from_pretrained(tmp_path / "b")("1+1").input_ids == tokenizer("1+1").input_ids


@pytest.mark.parametrize("path", ["no/such/folder", "."])
def test_a_model_that_is_not_there_is_one_line(path):
    with pytest.raises(InputError, match="model_name_or_path"):
        load_tokenizer(grpo.Args(model_name_or_path=path))


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "eos": "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
}


@pytest.mark.parametrize(
    "template, configured, expected",
    [
        (None, None, {"</s>"}),
        (None, ["</s>", "<|im_end|>"], {"</s>", "<|im_end|>"}),
        ("chatml", None, {"</s>", "<|im_end|>"}),  # Qwen base models: EOS is <|endoftext|>, a turn ends with <|im_end|>
        ("plain", None, {"</s>"}),  # a newline is no stop token
        ("eos", "</s>", {"</s>"}),
    ],
)
def test_stop_tokens(template, configured, expected):
    # trl#7039: only one of several EOS ids known, clipped_ratio 0.97.
    special = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*special, "user", "question"])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]})
    tokenizer.chat_template = template and TEMPLATES[template]
    ids = tokenizer.convert_tokens_to_ids(configured) if configured else None
    stop_tokens = find_stop_tokens(tokenizer, types.SimpleNamespace(eos_token_id=ids))
    assert set(tokenizer.convert_ids_to_tokens(stop_tokens)) == expected


# --- batches ---


def test_take_rows_cuts_shared_padding_and_keeps_every_token():
    batch = random_batch(rows=8)
    part = take_rows(batch | {"advantages": torch.arange(8.0)[:, None]}, [5, 2])
    assert part["advantages"][:, 0].tolist() == [5.0, 2.0]
    for i, row in enumerate([5, 2]):
        for ids, mask in (("prompts", "prompt_mask"), ("completions", "completion_mask")):
            assert part[ids][i][part[mask][i]].tolist() == batch[ids][row][batch[mask][row]].tolist()
    assert part["prompt_mask"][:, 0].any() and part["completion_mask"][:, -1].any()
    assert part["loss_mask"].shape == part["completion_mask"].shape


@pytest.mark.parametrize("size, tokens", [(3, 0), (100, 0), (1, 0), (64, 20), (64, 1), (64, 10_000)])
def test_micro_batches_hold_every_row_once_within_their_budget(size, tokens):
    generator = torch.Generator().manual_seed(size + tokens)
    lengths = torch.randint(1, 12, (23, 2), generator=generator).tolist()
    parts = micro_batches(lengths, types.SimpleNamespace(micro_batch_size=size, micro_batch_tokens=tokens))
    assert sorted(row for part in parts for row in part) == list(range(23))
    for part in parts:
        padded = len(part) * (max(lengths[r][0] for r in part) + max(lengths[r][1] for r in part))
        assert len(part) == 1 or (padded <= tokens if tokens else len(part) <= size)


def test_policy_forward_is_what_accelerate_prepares():
    # A forward through the unwrapped model leaves gradients unreduced: the module is the whole model.
    policy = Policy(AutoModelForCausalLM.from_config(small_config()), Tokens(), 1.0, False)
    assert sum(p.numel() for p in policy.parameters()) == sum(p.numel() for p in policy.lm.parameters())
    assert policy._no_split_modules == policy.lm._no_split_modules


def small_config():
    return AutoConfig.for_model(
        "qwen2", hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=40, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
