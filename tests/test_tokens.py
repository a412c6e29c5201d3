"""tokens.jsonl: its numbers are those of the models before and after an update, and a run does not notice it."""

import copy
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness import tokens
from harness.errors import InputError
from harness.loading import load_tokenizer
from processes import run_processes
from small_run import same_run
from testbed import SCRIPTS, script

SIZES = "--prompts_per_step 4 --group_size 4 --eval_prompts 2 --eval_samples 2 --eval_k 1 --max_new_tokens 32".split()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text(encoding="utf-8").splitlines()]


def train(name, folder, *options):
    script(name).main([*SIZES, "--record_tokens", "true", "--output_dir", str(folder), *map(str, options)])


# --- the numbers ---


class Spy:
    """In the place of a script's `update`: it keeps the batch, and the policies before and after."""

    def __init__(self, module):
        self.update = module.update

    def __call__(self, accelerator, model, reference, optimizer, batch, args, *rest):
        policy = getattr(model, "policy", model)
        self.before = copy.deepcopy(policy)
        self.update(accelerator, model, reference, optimizer, batch, args, *rest)
        self.after = copy.deepcopy(policy)
        self.batch = batch
        self.args = args


def plain_logprobs(policy, batch, row):
    """Log-probs and entropies (T,) of one row without its padding, by the whole model."""
    prompt = batch["prompts"][row][batch["prompt_mask"][row]]
    completion = batch["completions"][row][batch["completion_mask"][row]]
    with torch.no_grad():
        logits = policy.lm(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / policy.temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, completion[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.beside("fast")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_numbers_are_those_of_the_models_before_and_after_the_update(name, tmp_path, monkeypatch):
    module = script(name)
    spy = Spy(module)
    monkeypatch.setattr(module, "update", spy)
    train(name, tmp_path, *"--seed 2 --max_steps 1 --temperature 0.9 --learning_rate 1e-3 --micro_batch_size 3".split())
    batch = spy.batch
    rows = rows_of(tmp_path)
    chosen = tokens.choose_rows(batch, spy.args.group_size)
    assert len(rows) == len(chosen) and all(row["step"] == 1 for row in rows)
    tokenizer = load_tokenizer(spy.args)
    moved = 0
    for number, row in zip(chosen, rows, strict=True):
        before, _ = plain_logprobs(spy.before, batch, number)
        after, entropy = plain_logprobs(spy.after, batch, number)
        assert row["logprob"] == pytest.approx(before.tolist(), rel=1e-3, abs=2e-5)
        assert row["change"] == pytest.approx((after - before).tolist(), rel=1e-3, abs=2e-5)
        assert row["entropy"] == pytest.approx(entropy.tolist(), rel=1e-3, abs=2e-5)
        moved += sum(abs(change) > 1e-3 for change in row["change"])
        ids = batch["completions"][number][batch["completion_mask"][number]]
        assert row["tokens"] == [tokenizer.decode([id]) for id in ids]
        assert row["truncated"] == bool(batch["truncated"][number])
        if "rewards" in batch:  # else only `main` has them
            assert row["reward"] == float(batch["rewards"][number])
        prompt = batch["prompts"][number][batch["prompt_mask"][number]]
        assert row["prompt"] == tokenizer.decode(prompt)
        if hasattr(module, "load_critic"):  # its advantages are of single tokens
            assert "advantage" not in row
        else:
            assert row["advantage"] == float(batch["advantages"][number])
    assert moved > 5


# --- the rows ---


@pytest.mark.parametrize(
    "advantages, group_size, chosen",
    [
        ([1.0, -1, 0, 0], 2, [0, 1]),
        ([0.0, 0, 1, -1], 2, [2, 3]),  # the first group teaches nothing
        ([0.0, 0, 0, 0], 2, [0, 1]),  # nor does any other
        ([0.0] * 12 + [1.0] * 12, 12, list(range(12, 20))),  # at most eight
        (None, 1, [0, 1, 2, 3]),  # ppo.py
    ],
)
def test_the_rows_are_those_of_the_first_group_that_teaches(advantages, group_size, chosen):
    batch = {"completions": torch.zeros(len(advantages or range(4)), 3)}
    if advantages:
        batch["advantages"] = torch.tensor(advantages)[:, None]
    assert tokens.choose_rows(batch, group_size) == chosen


def test_without_the_log_probs_of_the_sampler_a_line_says_so(tmp_path):
    with pytest.raises(InputError, match="--record_tokens"):
        train("grpo", tmp_path, "--max_steps", 1, "--fast", "false")


# --- the text of a token ---


def byte_tokenizer():
    """Each byte is a token, as where a vocabulary has no whole character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def word_tokenizer():
    """Each word is a token with its blank before it, which a decoder leaves out at the start of a text."""
    vocab = {word: id for id, word in enumerate(["▁one", "▁two", "three", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    "text, texts",
    [("aé€", ["a", "", "é", "", "", "€"]), ("🙂!", ["", "", "", "🙂", "!"]), (" \n", [" ", "\n"])],
)
def test_a_part_of_a_character_has_no_text_and_its_last_part_has_it(text, texts):
    tokenizer = byte_tokenizer()
    assert tokens.token_texts(tokenizer, tokenizer(text).input_ids) == texts


def test_texts_together_are_the_text_of_the_completion_whatever_its_bytes():
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ids = torch.randint(256, (12,), generator=generator).tolist()
        found = tokens.token_texts(tokenizer, ids)
        assert len(found) == 12 and "".join(found) == tokenizer.decode(ids)
    tokenizer = word_tokenizer()
    assert tokens.token_texts(tokenizer, [0, 1, 2, 0]) == ["one", " two", "three", " one"]


# --- the run ---


@pytest.mark.beside("fast")
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_run_computes_the_same_without_it_and_records_each_power_of_two(name, tmp_path):
    train(name, tmp_path / "with", "--max_steps", 4)
    train(name, tmp_path / "without", "--max_steps", 4, "--record_tokens", "false")
    same_run(tmp_path / "with", tmp_path / "without")
    assert not (tmp_path / "without" / "tokens.jsonl").exists()
    assert sorted({row["step"] for row in rows_of(tmp_path / "with")}) == [1, 2, 4]


def test_rows_after_the_last_checkpoint_are_cut_at_a_resume(tmp_path):
    train("grpo", tmp_path, "--max_steps", 4, "--save_every", 3)
    (tmp_path / "checkpoints" / "step-00000004").rename(tmp_path / "away")
    train("grpo", tmp_path, "--max_steps", 4, "--save_every", 3, "--resume")
    assert [row["step"] for row in rows_of(tmp_path)][::4] == [1, 2, 4]


def test_two_processes_write_each_step_once(tmp_path):
    words = [*SIZES, "--record_tokens", "--max_steps", 2, "--output_dir", tmp_path]
    result = run_processes("grpo.py", *words, processes=2)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert len({row["prompt"] for row in rows}) == 2  # one of each step
