"""The decoding loop of fast/ against stock `generate`, and the generation config.

Greedy decoding and log-probs of sampled tokens over two dozen architectures are in test_architectures.py.
"""

import pytest
import torch
from accelerate import Accelerator
from transformers import GenerationConfig

import fast.decoding
import grpo
from common.batches import left_pad
from common.sampling import sampling_config, seeded_sampling
from fast.decoding import race, sample, worth_dropping
from harness.errors import InputError
from small_models import IDS, random_policy
from testbed import embedded, embedded_prompts

CPU = torch.device("cpu")


def generate(policy, n, stock=False, temperature=1.0, top_p=1.0, seed=0, prompts=None, length=24):
    """Return completions (R, T) of the loop of fast/, or of stock `generate`."""
    ids, mask = left_pad(prompts or [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]], 0, CPU)
    config = sampling_config(policy, temperature, top_p, length)
    options = {"num_return_sequences": n} if stock else policy.generate_kwargs(n)
    with seeded_sampling(policy, seed):
        output = policy.lm.generate(input_ids=ids, attention_mask=mask.long(), generation_config=config, **options)
    return output.sequences[:, ids.shape[1] :]


@pytest.fixture
def as_stock(monkeypatch):
    """Draw random numbers as stock `generate` does: one per token of the vocabulary, for all rows."""
    monkeypatch.setattr(fast.decoding, "sample", race)
    monkeypatch.setattr(fast.decoding, "worth_dropping", lambda *inputs: False)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mistral", "granite"])
@pytest.mark.parametrize("prompts", [None, [[5, 6, 7], [8, 9, 10]]], ids=["padded", "equal lengths"])
def test_with_the_same_draws_sampling_equals_stock_generate(name, prompts, as_stock):
    policy = random_policy(name)
    policy.stop_tokens = list(range(2, 40, 5))  # one of five: all rows end before the limit, at different places
    stock = generate(policy, 6, stock=True, prompts=prompts)
    assert len({tuple(row) for row in stock.tolist()}) > 6  # they differ, so equality means something
    assert stock.shape[1] < 24
    assert torch.equal(generate(policy, 6, prompts=prompts), stock)


def test_top_p_reaches_the_loop(as_stock):
    policy = random_policy("qwen2", scale=1.0)
    tokens = generate(policy, 4, top_p=0.3)
    assert torch.equal(tokens, generate(policy, 4, stock=True, top_p=0.3))
    assert not torch.equal(tokens, generate(policy, 4))


def test_sampled_tokens_follow_the_softmax():
    # trl#5783: near-greedy rollouts under somebody's top_k and top_p. Chi-square of 10,000 draws of one token.
    policy = random_policy("llama", scale=1.5)
    tokens = generate(policy, 10_000, prompts=[[5, 6, 7]], length=1)
    probs = policy.lm(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).detach()
    counts = torch.bincount(tokens[:, 0], minlength=40)
    chi_square = float(((counts - 10_000 * probs) ** 2 / (10_000 * probs)).sum())
    assert chi_square < 80  # 39 degrees of freedom: mean 39, 0.9999 quantile 79.2


def test_more_than_fifty_tokens_can_be_sampled(monkeypatch):
    # An unset top_k is 50 in transformers, more than the vocabulary of the other tests.
    monkeypatch.setitem(IDS, "vocab_size", 100)
    policy = random_policy("llama", scale=0.1)  # nearly uniform
    assert generate(policy, 5_000, prompts=[[5, 6, 7]], length=1).unique().numel() == 100


def test_sampling_on_a_cpu_follows_the_probabilities_and_never_takes_an_impossible_token():
    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0]).expand(20_000, 6)
    counts = torch.bincount(sample(probs)[:, 0], minlength=6).double()
    assert counts[[0, 2, 5]].sum() == 0
    expected = 20_000 * probs[0, [1, 3, 4]]
    assert float(((counts[[1, 3, 4]] - expected) ** 2 / expected).sum()) < 18.4  # 2 degrees of freedom, 0.9999


@pytest.mark.parametrize("drawn, token", [(0.0, 1), (1 - 2**-24, 3), (1.0, 3)])
def test_sampling_on_a_cpu_takes_a_possible_token_at_the_ends_of_the_random_numbers(drawn, token, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda rows, *size, **options: torch.full((rows, 1), drawn))
    assert sample(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])).tolist() == [[token]]


def test_sampling_on_a_cpu_is_exact_over_a_large_vocabulary():
    # Summed in float32, 200,000 probabilities would be off by 1e-3: the CDF must accumulate in float64.
    probs = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0))
    probs = probs / probs.sum(dim=1, keepdim=True)
    assert (probs.cumsum(dim=1) - probs.double().cumsum(dim=1)).abs().max() < 1e-7
    torch.manual_seed(0)
    tokens = torch.cat([sample(probs) for _ in range(500)])[:, 0]
    assert float(tokens.double().mean()) == pytest.approx(100_000, abs=4 * 57_735 / 1000**0.5)


def test_rows_of_nan_do_not_move_the_draws_of_the_others():
    probs = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    broken = probs.clone()
    broken[2] = float("nan")
    draws = []
    for table in (probs, broken):
        torch.manual_seed(1)
        draws.append(sample(table)[:, 0])
    assert draws[1].max() < 7 and draws[0][[0, 1, 3]].equal(draws[1][[0, 1, 3]])


def test_a_model_that_computes_no_numbers_is_one_line():
    """On a GPU NaN makes `torch.multinomial` abort the process."""
    policy = random_policy("qwen2")
    policy.lm.get_input_embeddings().weight.data[7] = float("nan")  # a token of the first prompt
    with pytest.raises(InputError, match="sampling: log-probs are not finite"):
        generate(policy, 2)


def test_dropping_leaves_the_distribution_alone(monkeypatch):
    policy = random_policy("llama", scale=1.5)
    dropped = generate(policy, 4000, prompts=[[5, 6, 7]], length=4, seed=2)
    monkeypatch.setattr(fast.decoding, "worth_dropping", lambda *inputs: False)
    kept = generate(policy, 4000, prompts=[[5, 6, 7]], length=4, seed=1)
    for t in range(4):
        a, b = (torch.bincount(x[:, t], minlength=40).double() for x in (kept, dropped))
        chi_square = float(((a - b) ** 2 / (a + b).clamp(min=1)).sum())
        assert chi_square < 80


def test_a_hostile_generation_config_is_neutralised(tmp_path):
    # transformers 5 inherits each unset field from the checkpoint's generation_config (trl#5783, #6337, #6789).
    _, args, tokenizer, policy = embedded()
    hostile = GenerationConfig(
        do_sample=True, top_k=2, top_p=0.1, temperature=0.1, repetition_penalty=1.5, no_repeat_ngram_size=2,
        suppress_tokens=[5, 6], min_new_tokens=9, forced_eos_token_id=3, eos_token_id=[policy.stop_tokens[0], 7],
        bad_words_ids=[[8]], exponential_decay_length_penalty=(2, 3.0), stop_strings=None, renormalize_logits=True,
    )  # fmt: skip
    policy.lm.generation_config = hostile
    policy.lm.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    args.model_name_or_path = str(tmp_path)
    loaded = grpo.load_policy(args, tokenizer, Accelerator(cpu=True))
    assert set(loaded.stop_tokens) == {policy.stop_tokens[0], 7}  # trl#7039: all stop tokens of the file count
    loaded.stop_tokens = policy.stop_tokens
    _, _, _, clean = embedded()
    for stock in (False, True):
        expected = generate(clean, 32, stock=stock, prompts=[[5, 6, 7, 8]])
        assert torch.equal(generate(loaded, 32, stock=stock, prompts=[[5, 6, 7, 8]]), expected)


def rows_of(*lists):
    return [type("Row", (), {"ids": list(ids)}) for ids in lists]


def test_rollout_with_gradient_checkpointing_is_not_garbage():
    # In training mode the layers drop the cache, but generate feeds single tokens (trl#3683): wrong tokens.
    _, args, _, policy = embedded(max_new_tokens=20)
    _, _, _, checkpointed = embedded(gradient_checkpointing=True)
    assert checkpointed.training and checkpointed.lm.model.layers[0].gradient_checkpointing
    prompts = rows_of([5, 6, 7, 8], [9, 10])
    expected = grpo.rollout(policy, prompts, 4, 1.0, 1.0, 0, args)
    batch = grpo.rollout(checkpointed, prompts, 4, 1.0, 1.0, 0, args)
    assert torch.equal(batch["completions"], expected["completions"])
    assert checkpointed.training


def test_under_autocast_the_cache_is_what_attention_computes_with(monkeypatch):
    """bfloat16 instead of float32 halves the memory and keeps the bits, since attention casts its inputs."""
    _, args, _, policy = embedded(max_new_tokens=20)
    layers, plain = [], fast.decoding.GrowingCacheLayer

    def kept(layer, dtype):
        layers.append(plain(layer, dtype))
        return layers[-1]

    def sampled():
        with torch.autocast("cpu", torch.bfloat16):
            batch = grpo.rollout(policy, rows_of([5, 6, 7, 8], [9, 10]), 4, 1.0, 1.0, 0, args)
        return batch["completions"], batch["rollout_logprobs"]

    monkeypatch.setattr(fast.decoding, "GrowingCacheLayer", kept)
    narrow, dtypes = sampled(), {x.dtype for layer in layers for x in (layer.keys, layer.values)}
    assert dtypes == {torch.bfloat16}
    monkeypatch.setattr(fast.decoding, "GrowingCacheLayer", lambda layer, dtype: kept(layer, layer.keys.dtype))
    wide = sampled()
    assert layers[-1].keys.dtype == torch.float32
    assert all(map(torch.equal, narrow, wide))


def test_rollout_depends_on_its_seed_alone_and_leaves_the_training_streams_untouched():
    # tt-metal#48829: the same noise on every replica makes duplicate completions.
    _, args, _, policy = embedded(max_new_tokens=20)
    prompts = rows_of([5, 6, 7, 8], [9, 10])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (grpo.rollout(policy, prompts, 8, 1.0, 1.0, seed, args) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert first["completions"].tolist() == again["completions"].tolist() != other["completions"].tolist()


@pytest.mark.parametrize("is_fast", [True, False])
def test_generate_batch_size_caps_the_rows_of_a_call(is_fast, monkeypatch):
    # nanochat#758: a remainder that does not divide was silently lost.
    _, args, _, policy = embedded(max_new_tokens=20, generate_batch_size=10, fast=is_fast)
    calls = []
    generate_ = policy.lm.generate
    monkeypatch.setattr(policy.lm, "generate", lambda **kw: calls.append(len(kw["input_ids"])) or generate_(**kw))
    batch = grpo.rollout(policy, rows_of(*[[5, 6 + i] for i in range(5)]), 4, 1.0, 1.0, 0, args)
    assert calls == [2, 2, 1]
    assert len(batch["completions"]) == 20
    assert batch["prompts"][:, 1].tolist() == [6 + i for i in range(5) for _ in range(4)]  # rows of a prompt adjacent
    logprobs, _ = policy(batch)
    assert ("rollout_logprobs" in batch) == is_fast
    if is_fast:
        assert (logprobs - batch["rollout_logprobs"]).abs().max() < 1e-5


def test_the_loop_stops_when_all_rows_are_finished_and_shrinks_the_batch(monkeypatch):
    # Count the forwards: the loop stops early, and finished rows cost nothing.
    _, args, _, policy = embedded(max_new_tokens=64)
    rows = []
    base = policy.lm.base_model
    forward = base.forward
    monkeypatch.setattr(base, "forward", lambda *a, **kw: rows.append(len(kw["input_ids"])) or forward(*a, **kw))
    prompts = embedded_prompts()[:2]
    batch = grpo.rollout(policy, prompts, 16, 1.0, 1.0, 0, args)
    lengths = batch["completion_mask"].sum(dim=1)
    assert rows[0] == 2, "the prefill runs each prompt once"
    assert len(rows) == int(lengths.max()) < 64
    for t in range(1, int(lengths.max())):
        alive = int((lengths > t).sum())
        assert alive <= rows[t] < alive / 0.9 + 1  # at most a tenth of the rows are finished ones


@pytest.mark.parametrize(
    "device, rows, columns, most",
    [("cpu", 100, 255, 90), ("cpu", 100, 256, 80), ("cuda", 100, 9, 60), ("cuda", 65, 9, 39), ("cuda", 64, 9, 0)],
)
def test_rows_are_dropped_once_enough_have_finished(device, rows, columns, most):
    """On a GPU a few rows take as long as one."""
    dropped = [running for running in range(1, rows) if worth_dropping(running, rows, columns, torch.device(device))]
    assert dropped == list(range(1, most + 1))


@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (16, 1000), (2, 151936), (512, 40)])
@pytest.mark.parametrize("seed", range(4))
def test_the_first_to_arrive_is_the_token_that_multinomial_draws(seed, shape):
    """On a GPU `race` replaces `torch.multinomial`: same tokens, same state of the generator afterwards."""
    probs = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).softmax(dim=-1)
    probs[:, 0] = 0
    drawn = []
    for draw in (race, lambda probs: torch.multinomial(probs, 1)):
        torch.manual_seed(seed)
        drawn.append((draw(probs.clone()), torch.rand(4)))
    (tokens, after), (expected, expected_after) = drawn
    assert torch.equal(tokens, expected) and torch.equal(after, expected_after)
    assert (tokens > 0).all()
