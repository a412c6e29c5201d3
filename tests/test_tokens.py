"""tokens.jsonl: its numbers are those of the two models, its rows are the right ones, and a run does not notice it."""

import contextlib
import copy
import json
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.batches import take_rows
from common.harness import tokens
from common.args import parse_args
from common.metrics import Metrics
from processes import run_processes
from small_run import advance, start
from testbed import SCRIPTS, embedded, hand_made_batch, metric_rows, script

SIZES = "--prompts_per_step 4 --group_size 4 --eval_prompts 2 --eval_samples 2 --eval_k 1 --max_new_tokens 40".split()
NAN = float("nan")


def rows_of(folder):
    return [json.loads(line) for line in (folder / "tokens.jsonl").read_text(encoding="utf-8").splitlines()]


def train(name, folder, *options):
    script(name).main([*SIZES, "--output_dir", str(folder), *map(str, options)])


# --- the numbers ---


class Spy:
    """In the place of a script's `update`: it keeps the batch, and the models before and after."""

    def __init__(self, module):
        self.update = module.update

    def __call__(self, accelerator, model, reference, optimizer, batch, step, args, metrics, *extra):
        policy = getattr(model, "policy", model)
        self.before = copy.deepcopy(policy)
        self.update(accelerator, model, reference, optimizer, batch, step, args, metrics, *extra)
        self.after, self.batch, self.args = copy.deepcopy(policy), batch, args


def plain_logprobs(policy, batch, row):
    """Log-probs and entropies (T,) of one row without its padding, by the whole model."""
    prompt = batch["prompts"][row][batch["prompt_mask"][row]]
    completion = batch["completions"][row][batch["completion_mask"][row]]
    with torch.no_grad():
        logits = policy.lm(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1] / policy.temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, completion[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.fixture(scope="module", params=SCRIPTS)
def recorded(request, tmp_path_factory):
    """A step of a script with narrow bounds, and tokens.jsonl of it in passes of three rows."""
    module = script(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    clip = 0.2 if request.param == "gspo" else 0.02  # gspo.py clips whole rows, but not all
    options = "--max_steps 1 --temperature 0.9 --learning_rate 1e-3 --micro_batch_size 3".split()
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(module)
        patch.setattr(module, "update", spy)
        train(request.param, folder, *options, "--clip_low", clip, "--clip_high", clip)
    rows = rows_of(folder)
    chosen = tokens.choose_rows(spy.batch["rewards"].tolist(), spy.args.group_size)
    assert len(chosen) == len(rows) == 4 and all(row["step"] == 1 for row in rows)
    return SimpleNamespace(module=module, spy=spy, rows=rows, chosen=chosen)


def test_a_change_is_that_between_the_two_models(recorded):
    batch = recorded.spy.batch
    tokenizer = recorded.module.load_tokenizer(recorded.spy.args)
    moved = 0
    for number, row in zip(recorded.chosen, recorded.rows, strict=True):
        before, entropy = plain_logprobs(recorded.spy.before, batch, number)
        after, _ = plain_logprobs(recorded.spy.after, batch, number)
        assert row["logprob"] == pytest.approx(before.tolist(), rel=1e-3, abs=2e-5)
        assert row["entropy"] == pytest.approx(entropy.tolist(), rel=1e-3, abs=2e-5)
        assert row["change"] == pytest.approx((after - before).tolist(), rel=1e-3, abs=2e-5)
        moved += sum(abs(change) > 1e-3 for change in row["change"])
        ids = batch["completions"][number][batch["completion_mask"][number]]
        assert row["tokens"] == [tokenizer.decode([id]) for id in ids]
        assert row["special"] == [place for place, id in enumerate(ids) if id == tokenizer.eos_token_id]
        assert row["reward"] == float(batch["rewards"][number]) and row["masked"] == []
        prompt = tokenizer.decode(batch["prompts"][number][batch["prompt_mask"][number]])
        assert row["prompt"] == prompt and eval(prompt.removesuffix("?")) == int(row["answer"])
    assert moved > 10


def test_a_clipped_token_is_one_that_policy_loss_clips(recorded):
    module, batch = recorded.module, recorded.spy.batch
    flags = set()
    for number, row in zip(recorded.chosen, recorded.rows, strict=True):
        before, entropy = plain_logprobs(recorded.spy.before, batch, number)
        after, _ = plain_logprobs(recorded.spy.after, batch, number)
        advantages = batch["advantages"][number : number + 1, : len(before)]
        mask = torch.ones(1, len(before), dtype=torch.bool)
        _, stats = module.policy_loss(
            after[None], before[None], advantages, mask, recorded.spy.args, before[None], entropy[None]
        )
        names = ["token_clip_ratio"] if "token_clip_ratio" in stats else ["clip_fraction_low", "clip_fraction_high"]
        clipped = sum(stats[name].expand_as(mask) for name in names) > 0
        assert row["clipped"] == clipped[0].nonzero()[:, 0].tolist()
        flags |= set(clipped[0].tolist())
    assert flags == {False, True}


def test_advantages_are_those_of_the_update(recorded):
    for number, row in zip(recorded.chosen, recorded.rows, strict=True):
        advantages = recorded.spy.batch["advantages"][number].tolist()
        if len(advantages) == 1:
            assert row["advantage"] == pytest.approx(advantages[0], rel=1e-3)
        else:
            assert row["advantage"] == pytest.approx(advantages[: len(row["tokens"])], rel=1e-3, abs=1e-8)
    assert any(row["advantage"] not in (0, [0] * len(row["tokens"])) for row in recorded.rows)


def test_the_advantages_of_ppo_are_those_of_its_micro_batches_and_not_of_a_filler():
    module = script("ppo")
    batch = {"completions": torch.zeros(3, 4), "completion_mask": torch.ones(3, 4, dtype=torch.bool)}
    batch |= {"row": torch.arange(3), "lengths": [(1, 4), (1, 2), (1, 3)]}
    micro_batches = []
    for rows, value in (([1, 2], 1.0), ([0], 2.0), ([1], 0.0)):  # the last one is a filler
        micro = take_rows(batch, rows)
        micro["advantages"] = torch.full(micro["completions"].shape, value)
        micro_batches.append(micro)
    advantages = module.whole_advantages(batch, micro_batches)
    assert advantages.tolist() == [[2, 2, 2, 2], [1, 1, 1, 0], [1, 1, 1, 0]]


# --- the rows ---


@pytest.mark.parametrize(
    "rewards, group_size, chosen",
    [
        ([0, 0, 1, 1, 1, 0], 3, [0, 1, 2]),
        ([1, 1, 1, 0, 0, 1], 3, [3, 4, 5]),  # the first group teaches nothing
        ([1, 1, 0, 0], 2, [0, 1]),  # nor does any other
        ([1, NAN, NAN, 1, 0, 1], 3, [3, 4, 5]),  # one reward does not differ from itself
        ([NAN, 1, 0, 0, 1, 1], 3, [0, 1, 2]),
        ([NAN, NAN], 2, [0, 1]),
        ([0] * 11 + [1], 12, [0, 1, 2, 3, 4, 5, 6, 11]),  # the first eight agree
        ([NAN] * 9 + [0, 1, 1], 12, [0, 1, 2, 3, 4, 5, 9, 10]),
        ([float(i) for i in range(12)], 12, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0] * 9 + [1], 1, [0, 1, 2, 3, 4, 5, 6, 9]),  # groups of one row
    ],
)
def test_the_rows_are_those_of_the_first_group_whose_rewards_differ(rewards, group_size, chosen):
    assert tokens.choose_rows(rewards, group_size) == chosen


def test_the_steps_are_powers_of_two_and_evaluations_while_the_file_is_short(tmp_path, monkeypatch):
    args = SimpleNamespace(max_steps=22, eval_every=10)
    sizes = {"tokens.jsonl": 50}
    run = SimpleNamespace(step=0, args=args, accelerator=Accelerator(cpu=True))
    run.files = SimpleNamespace(sizes=lambda names: {name: sizes[name] for name in names})

    def due():
        steps = []
        for run.step in range(22):
            if tokens.is_due(run):
                steps.append(run.step + 1)
        return steps

    assert due() == [1, 2, 4, 8, 10, 16, 20, 22]
    monkeypatch.setattr(tokens, "MOST_BYTES", 50)
    assert due() == [1, 2, 4, 8, 16]
    args.eval_every = 0
    monkeypatch.setattr(tokens, "MOST_BYTES", 51)
    assert due() == [1, 2, 4, 8, 16, 22]


@pytest.fixture
def rows(monkeypatch):
    """The rows that an update of one's own leaves: `rows(update, metrics)`, by a hand-made batch of 8 groups."""
    module, args, tokenizer, policy = embedded("grpo", micro_batch_size=3, group_size=4)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    batch["rewards"] = rewards
    batch["advantages"] = module.compute_advantages(rewards, args).float()
    written = []
    printed = []
    run = SimpleNamespace(step=0, args=args, accelerator=Accelerator(cpu=True), said_no_clipped=False)
    run.write_rows = lambda name, rows: written.extend(rows)
    run.print = printed.append
    prompts = [SimpleNamespace(prompt="1+1?", answer="2")] * 8

    def record(update, metrics=None, model=policy, policy_loss=module.policy_loss):
        with tokens.record_tokens(run, metrics or Metrics(), model, batch, prompts, tokenizer, policy_loss):
            update(batch)
        return written

    record.policy = policy
    record.batch = batch
    record.printed = printed
    return record


def test_the_loss_mask_and_the_advantages_may_be_made_in_the_update(rows):
    """So do ppo.py and recipes of several turns, in which a tool writes tokens that are not in the loss."""

    def update(batch):
        batch["loss_mask"] = batch["loss_mask"].clone()
        batch["loss_mask"][0, 2:4] = False
        batch["rewards"][1] = NAN
        batch["advantages"] = torch.full(batch["completions"].shape, 0.25)

    first, second, third, _ = rows(update)
    assert first["masked"] == [2, 3] and first["advantage"] == [0.25] * len(first["tokens"])
    assert second["reward"] is None and second["masked"] == list(range(len(second["tokens"])))
    assert third["masked"] == [] and third["change"] == [0.0] * len(third["tokens"])


def test_a_token_without_an_advantage_is_not_clipped_however_far_it_moves(rows):
    def update(batch):
        batch["advantages"] = torch.zeros_like(batch["advantages"])
        with torch.no_grad():
            for parameter in rows.policy.parameters():
                parameter.mul_(1.5)

    written = rows(update)
    assert max(map(abs, written[0]["change"])) > 1
    assert all(row["clipped"] == [] for row in written)


def test_a_loss_that_needs_more_ends_no_run(rows):
    """All else is recorded, and one line says what is missing."""

    def needs_totals(*arguments, totals):
        raise AssertionError

    for _ in range(2):
        written = rows(lambda batch: None, policy_loss=needs_totals)
    assert len(written) == 8 and all(row["clipped"] is None and row["logprob"] for row in written)
    (line,) = rows.printed
    assert "tokens.jsonl" in line and "totals" in line


def test_a_forward_may_read_columns_of_a_script_of_ones_own(rows):
    rows.batch["row_number"] = torch.arange(32)
    rows.batch["names"] = [f"row {number}" for number in range(32)]
    seen = set()

    def model(micro, **options):
        seen.update(zip(micro["row_number"].tolist(), micro["names"], strict=True))
        return rows.policy(micro, **options)

    chosen = tokens.choose_rows(rows.batch["rewards"].tolist(), 4)
    assert len(rows(lambda batch: None, model=model)) == 4
    assert seen == {(number, f"row {number}") for number in chosen}


def test_the_time_is_none_of_the_update(rows):
    def slow(batch, **options):
        time.sleep(0.05)
        return rows.policy(batch, **options)

    metrics = Metrics()
    start = time.perf_counter()
    rows(lambda batch: time.sleep(0.2), metrics, slow)
    passed = time.perf_counter() - start
    assert 0.2 <= passed - metrics.paused < 0.3 and metrics.paused >= 0.2  # two passes before, two after
    batch = {"completion_mask": torch.ones(1, 1), "completions": torch.ones(1, 1)}
    metrics.add_times(batch, start, start, SimpleNamespace(num_epochs=1))
    assert metrics.reduce(Accelerator(cpu=True))["time/update_s"] == pytest.approx(passed - metrics.paused, abs=0.05)


def test_a_stop_token_is_special_also_where_the_tokenizer_does_not_say_so(rows, monkeypatch):
    monkeypatch.setattr(PreTrainedTokenizerFast, "all_special_ids", [])
    _, cut, *ended = rows(lambda batch: batch["truncated"].copy_(torch.arange(32) == 1))
    assert cut["special"] == []
    for row in ended:
        assert row["special"] == [len(row["tokens"]) - 1]


def test_nothing_is_written_of_an_update_that_failed(rows):
    def update(batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rows(update)
    assert rows(lambda batch: None)[0]["step"] == 1


def test_all_processes_make_as_many_passes_as_the_one_with_the_most():
    _, args, tokenizer, policy = embedded("grpo", micro_batch_size=3, group_size=4)
    batch, _ = hand_made_batch(policy, tokenizer, args)
    chosen = list(range(4, 8))
    alone = tokens.split_rows(Accelerator(cpu=True), batch, chosen, args)
    beside = SimpleNamespace(gather=lambda number: torch.tensor([5, int(number)]))
    several = tokens.split_rows(beside, batch, chosen, args)
    assert len(alone) == 2 and len(several) == 5
    assert all(len(micro["completions"]) <= 3 for _, micro in several)
    expected, _ = policy(batch)
    width = int(batch["completion_mask"][chosen].sum(dim=1).max())
    for passes in (alone, several):
        logprobs, _ = tokens.forward_rows(policy, passes, with_entropy=True)
        assert torch.allclose(logprobs, expected[chosen, :width], atol=1e-5)


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
    [
        ("abc", ["a", "b", "c"]),
        ("aé€", ["a", "", "é", "", "", "€"]),
        ("🙂!", ["", "", "", "🙂", "!"]),
        (" \n", [" ", "\n"]),
    ],
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


def everything(folder):
    """What a run has computed, without times and tokens.jsonl."""
    weights = load_file(folder / "model" / "model.safetensors")
    samples = (folder / "samples.jsonl").read_text(encoding="utf-8")
    return metric_rows(folder), samples, {name: tensor.tolist() for name, tensor in weights.items()}


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_run_computes_the_same_without_it(name, tmp_path, monkeypatch):
    """Also with a loss that draws random numbers, of which none may be lost."""
    module = script(name)
    loss = module.policy_loss

    def noisy(logprobs, old_logprobs, *rest, **options):
        return loss(logprobs, old_logprobs + 0.05 * torch.randn(old_logprobs.shape), *rest, **options)

    monkeypatch.setattr(module, "policy_loss", noisy)
    train(name, tmp_path / "with", "--max_steps", 3)
    monkeypatch.setattr(module, "record_tokens", lambda *arguments: contextlib.nullcontext())
    train(name, tmp_path / "without", "--max_steps", 3)
    assert everything(tmp_path / "with") == everything(tmp_path / "without")
    assert not (tmp_path / "without" / "tokens.jsonl").exists()
    assert [row["step"] for row in rows_of(tmp_path / "with")][::4] == [1, 2, 3]


def test_rows_after_the_last_checkpoint_are_cut_and_a_run_without_them_gets_no_file(tmp_path):
    run, optimizer, _ = start(tmp_path)
    run.write_rows("tokens.jsonl", [{"step": 1}])
    advance(run, optimizer)
    run.write_rows("tokens.jsonl", [{"step": 2}])
    run.abandon()
    start(tmp_path, resume=True)[0].abandon()
    assert rows_of(tmp_path) == [{"step": 1}]
    run, optimizer, _ = start(tmp_path / "other")
    advance(run, optimizer)
    assert run.state_dict()["sizes"]["tokens.jsonl"] == 0
    run.abandon()
    start(tmp_path / "other", resume=True)[0].abandon()
    assert not (tmp_path / "other" / "tokens.jsonl").exists()


def test_a_checkpoint_of_an_earlier_version_knows_no_size_of_it(tmp_path):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    state = run.state_dict()
    state["sizes"] = {name: size for name, size in state["sizes"].items() if name != "tokens.jsonl"}
    run.write_rows("tokens.jsonl", [{"step": 1}])
    run.load_state_dict(state)
    run.clean_folder()
    assert run.sizes == state["sizes"] | {"tokens.jsonl": 0}
    assert (tmp_path / "tokens.jsonl").stat().st_size == 0
    run.abandon()


def test_two_processes_write_each_step_once(tmp_path):
    result = run_processes("grpo.py", *SIZES, "--max_steps", 2, "--output_dir", tmp_path, processes=2)
    assert result.returncode == 0, result.stderr
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    for step in (1, 2):
        assert len({row["prompt"] for row in rows if row["step"] == step}) == 1


def test_args_json_names_the_script_and_is_still_a_file_of_options(tmp_path):
    run, _, _ = start(tmp_path, learning_rate=0.5)
    run.abandon()
    assert json.loads((tmp_path / "args.json").read_text(encoding="utf-8"))["script"] == "grpo"
    assert parse_args(script("grpo").Args, ["--config", str(tmp_path / "args.json")]).learning_rate == 0.5
