"""dapo.py: dynamic sampling on any number of processes, overlong completions, and runs that end early."""

import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import common.policy
import dapo
from common.batches import take_rows
from common.errors import InputError
from common.data import Prompt, load_prompts
from common.metrics import Metrics
from common.masked import completion_mask
from common.rewards import RULES, Reward, load_rewards
from processes import run_processes
from testbed import (
    embedded,
    fill,
    gradients,
    hand_made_batch,
    largest_difference,
    metric_rows,
)
from threads import Processes

G, RIGHT, WRONG, STOP, PAD = 4, 5, 6, 1, 2


def args_of(**options):
    return dapo.Args(**{"group_size": G, "prompts_per_step": 8, "num_minibatches": 1, "overlong": "none", **options})


# --- dynamic sampling: scripted completions, W processes as threads ---


class InOrder:
    """A sampler that draws 0, 1, 2, ..."""

    def __init__(self, rows):
        self.rows, self.next = rows, 0

    def draw(self, k):
        self.next += k
        return list(range(self.next - k, self.next))


class Policy:
    lm = SimpleNamespace(device=torch.device("cpu"))
    pad_token, stop_tokens, shares_prompts, packs = PAD, [STOP], True, False
    prompt_columns = common.policy.Policy.prompt_columns


def scripted_rollout(right, seen):
    """In the place of `rollout`: of prompt i the first right(i, visit) completions are right."""
    visits = {}

    def rollout(model, prompts, n, temperature, top_p, seed, args):
        assert (temperature, top_p) == (args.temperature, 1.0)  # top-p 0.7 is for the evaluation
        seen.append((seed, [prompt.columns["index"] for prompt in prompts]))
        completions, logprobs, ids = [], [], [prompt.ids for prompt in prompts]
        for prompt in prompts:
            i = prompt.columns["index"]
            visit = visits[i] = visits.get(i, 0) + 1
            for row in range(n):
                length = 2 + (i + row) % 5
                token = RIGHT if row < right(i, visit) else WRONG
                completions.append(torch.tensor([token] * (length - 1) + [STOP]))
                logprobs.append(torch.full((length,), -float(100 * i + row + 1)))
        prompt_ids, prompt_mask = dapo.left_pad(ids, PAD, "cpu")
        batch = {"prompts": prompt_ids.repeat_interleave(n, 0), "prompt_mask": prompt_mask.repeat_interleave(n, 0)}
        batch["completions"] = pad_sequence(completions, batch_first=True, padding_value=PAD)
        batch["completion_mask"], batch["truncated"] = completion_mask(batch["completions"], [STOP])
        batch["prompt_index"] = torch.arange(len(prompts)).repeat_interleave(n)[:, None]
        batch["rollout_logprobs"] = pad_sequence(logprobs, batch_first=True)
        return batch

    return rollout


def texts_of(tokenizer, batch):
    return ["#### 1" if int(row[0]) == RIGHT else "#### 0" for row in batch["completions"]]


def sample(monkeypatch, right, processes=1, steps=1, answer="1", functions=None, **options):
    """`dynamic_batch` on W processes: for each step the results of all ranks, their metrics, and what was sampled."""
    world, seen, args = Processes(processes), [], args_of(**options)
    prompts = [Prompt([9] * (1 + i % 3) + [10 + i], f"q{i}", answer, {"index": i}) for i in range(400)]
    monkeypatch.setattr(dapo, "rollout", scripted_rollout(right, seen))
    monkeypatch.setattr(dapo, "completion_texts", texts_of)
    monkeypatch.setattr(dapo, "gather_object", world.gather_object)
    functions = functions or load_rewards(args)

    def run(accelerator):
        sampler, rows = InOrder(prompts), []
        draw = partial(dapo.sample_round, accelerator, Policy(), None, functions)
        for step in range(1, steps + 1):
            metrics = Metrics()
            groups, tokens, _ = dapo.dynamic_batch(accelerator, draw, sampler, step, args, metrics)
            batch = dapo.unpack_groups(groups, Policy()) if groups else None
            if groups:
                metrics.add_rewards(batch["rewards"], G)
            rows.append((batch, tokens, metrics.reduce(accelerator)))
        return rows

    results = world.run(run)
    assert all(calls == world.calls[0] for calls in world.calls)  # the same collectives in the same order
    return results, seen


def groups_of(ranks, step=0):
    """The prompts of a step's batch over all ranks, in draw order."""
    owners = [[int(ids[-1]) - 10 for ids in result[step][0]["prompts"][::G]] for result in ranks]
    assert len({len(own) for own in owners}) == 1
    return [i for together in zip(*owners, strict=True) for i in together]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_exactly_the_groups_that_are_neither_all_right_nor_all_wrong_are_kept(processes, monkeypatch):
    # verl filters on the standard deviation of a metric; with a score an all-right group of unequal lengths passes.
    # The format reward is 1 everywhere: only accuracy can tell. The batch is exact and the order that of the draw.
    options = dict(reward=["format"], overlong="soft", max_new_tokens=7, overlong_cache=4)
    ranks, _ = sample(monkeypatch, lambda i, visit: i % 5, processes, **options)
    assert groups_of(ranks) == [i for i in range(100) if 0 < i % 5 < 4][:8]
    metrics = ranks[0][0][2]
    assert metrics["sampling/rounds"] == 2 and metrics["sampling/surplus"] == 1  # 4 of 0-7, 5 of 8-15
    assert metrics["sampling/keep_rate"] == pytest.approx(9 / 16)
    assert metrics["sampling/dropped_wrong"] == pytest.approx(4 / 16)  # 0 5 10 15
    assert metrics["sampling/dropped_right"] == pytest.approx(3 / 16)  # 4 9 14
    assert (metrics["sampling/short"], metrics["sampling/skipped"]) == (0, 0)
    assert metrics["reward/accuracy"] == pytest.approx(sum(i % 5 for i in range(16)) / 64)  # of all that was drawn
    lengths = [2 + (i + row) % 5 for i in range(16) for row in range(G)]
    assert metrics["completion/length"] == pytest.approx(sum(lengths) / 64)
    assert sum(result[0][1] for result in ranks) == sum(lengths)
    penalties = [-max(0, length - 3) / 4 for length in lengths]
    assert metrics["overlong/penalty"] == pytest.approx(sum(penalties) / 64)
    assert metrics["overlong/fraction"] == pytest.approx(sum(p < 0 for p in penalties) / 64)


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_stay_whole_with_all_their_columns(processes, monkeypatch):
    ranks, _ = sample(monkeypatch, lambda i, visit: i % 5, processes)
    for result in ranks:
        batch = result[0][0]
        assert {len(column) for column in batch.values() if isinstance(column, torch.Tensor)} == {8 * G // processes}
        for r in range(len(batch["rewards"])):
            i, row = int(batch["prompts"][r, -1]) - 10, r % G
            length = 2 + (i + row) % 5
            token = RIGHT if row < i % 5 else WRONG
            assert batch["completions"][r][batch["completion_mask"][r]].tolist() == [token] * (length - 1) + [STOP]
            assert int(batch["completion_mask"][r].sum()) == length
            assert batch["rollout_logprobs"][r, :length].tolist() == [-float(100 * i + row + 1)] * length
            assert batch["prompts"][r][batch["prompt_mask"][r]].tolist() == [9] * (1 + i % 3) + [10 + i]
            assert all((batch[f"{x}s"][r][~batch[f"{x}_mask"][r]] == PAD).all() for x in ("prompt", "completion"))
            assert float(batch["rewards"][r]) == (1 if row < i % 5 else -1)
            assert int(batch["prompt_index"][r]) == r // G


def wrong_but_for_rounding(completions, **columns):
    """1 for a right completion; for wrong ones 0.3, or 0.1 + 0.2."""
    return [1.0 if "1" in text else (0.3, 0.1 + 0.2)[row % 2] for row, text in enumerate(completions)]


def test_by_reward_the_groups_are_kept_whose_rewards_before_the_punishment_differ(monkeypatch):
    # Without answers. The lengths of a group differ, and so do its punished rewards: these must not keep it.
    functions = [Reward("own", 1.0, wrong_but_for_rounding)]
    options = dict(filter_by="reward", overlong="soft", max_new_tokens=7, overlong_cache=4)
    ranks, _ = sample(monkeypatch, lambda i, visit: i % 5, 2, answer=None, functions=functions, **options)
    assert groups_of(ranks) == [i for i in range(100) if 0 < i % 5 < 4][:8]
    metrics = ranks[0][0][2]
    assert metrics["sampling/keep_rate"] == pytest.approx(9 / 16) and "reward/accuracy" not in metrics
    assert not {"sampling/dropped_right", "sampling/dropped_wrong"} & metrics.keys()


def test_by_reward_only_what_is_dropped_counts_as_dropped(monkeypatch):
    # All completions have the format: nothing is kept. All right or wrong ones may differ in another reward, and stay.
    ranks, _ = sample(monkeypatch, lambda i, visit: i % 5, reward=["format"], filter_by="reward", max_sampling_rounds=2)
    metrics = ranks[0][0][2]
    assert ranks[0][0][0] is None and metrics["sampling/surplus"] == metrics["sampling/keep_rate"] == 0
    assert (metrics["sampling/dropped_right"], metrics["sampling/dropped_wrong"]) == (3 / 16, 4 / 16)
    lengths = [Reward("length", 1.0, lambda completions, **columns: list(range(len(completions))))]
    ranks, _ = sample(monkeypatch, lambda i, visit: i % 5, functions=lengths, filter_by="reward")
    metrics = ranks[0][0][2]
    assert groups_of(ranks) == list(range(8)) and metrics["sampling/keep_rate"] == 1
    assert metrics["sampling/dropped_right"] == metrics["sampling/dropped_wrong"] == 0


def test_by_reward_a_group_without_any_reward_is_dropped(monkeypatch):
    def every_other_prompt(completions, index, **columns):
        return [None if i % 2 else float(row) for row, i in enumerate(index)]

    functions = [Reward("own", 1.0, every_other_prompt)]
    ranks, _ = sample(monkeypatch, lambda i, visit: i % 5, functions=functions, answer=None, filter_by="reward")
    assert groups_of(ranks) == list(range(0, 16, 2)) and ranks[0][0][2]["sampling/keep_rate"] == 0.5


@pytest.mark.parametrize("rollout", ["shared", "hf"])
def test_what_is_sent_has_no_padding_and_gives_the_same_batch(rollout):
    # All columns of a batch of real completions, some of them truncated, came padded, with ids of eight bytes.
    _, args, tokenizer, policy = embedded("dapo", rollout=rollout, max_new_tokens=24)
    prompts = load_prompts(args, tokenizer)[0][:6]
    batch = dapo.rollout(policy, prompts, G, 1.0, 1.0, 0, args)
    batch["rewards"] = torch.rand(len(batch["completions"]), dtype=torch.float64)
    assert 0 < batch["truncated"].sum() < len(batch["truncated"])
    sent = [(prompts[i], dapo.pack_group(batch, slice(i * G, (i + 1) * G))) for i in (4, 0, 5)]
    for i, (_, group) in zip((4, 0, 5), sent, strict=True):
        tokens = int(batch["completion_mask"][i * G : (i + 1) * G].sum())
        size = (8 if rollout == "shared" else 4) * tokens + 12 * G
        assert sum(column.nbytes for column in group.values()) == size and len(pickle.dumps(group)) < size + 500
    masks = batch["prompt_mask"], batch["completion_mask"]
    batch["lengths"] = torch.stack([mask.sum(dim=1) for mask in masks], dim=1).tolist()
    expected = take_rows(batch, [*range(4 * G, 5 * G), *range(G), *range(5 * G, 6 * G)])
    del expected["lengths"]
    expected["prompt_index"] = torch.arange(3).repeat_interleave(G)[:, None]
    united = dapo.unpack_groups(sent, policy)
    assert united.keys() == expected.keys()
    for name, column in united.items():
        if isinstance(column, torch.Tensor):
            assert column.dtype == expected[name].dtype and torch.equal(column, expected[name]), name
        else:
            assert column == expected[name], name


def test_a_process_that_keeps_nothing_gets_its_share_from_the_others(monkeypatch):
    # per-rank filtering deadlocks or trains on unequal batches: here every prompt of rank 1 is all wrong.
    ranks, seen = sample(monkeypatch, lambda i, visit: 2 if i % 2 == 0 else 0, 2)
    assert groups_of(ranks) == list(range(0, 16, 2))
    assert sorted(indices[0] % 2 for _, indices in seen) == [0, 0, 1, 1]  # prompt i of the draw went to rank i mod 2
    assert [len(result[0][0]["rewards"]) for result in ranks] == [16, 16]


@pytest.mark.parametrize("processes, used", [(1, 6), (2, 4), (4, 0)])
def test_an_exhausted_budget_trains_on_the_largest_batch_that_divides(processes, used, monkeypatch):
    # DAPO#22: ValueError at the limit; AReaL#450: batches that are not the size they say. 7 of 24 prompts inform.
    options = dict(prompts_per_step=8, num_minibatches=2, max_sampling_rounds=3)
    ranks, _ = sample(monkeypatch, lambda i, visit: int(i < 7), processes, **options)
    metrics = ranks[0][0][2]
    assert (metrics["sampling/rounds"], metrics["sampling/surplus"]) == (3, 7 - used)
    assert (metrics["sampling/short"], metrics["sampling/skipped"]) == (used > 0, used == 0)
    assert (groups_of(ranks) if used else ranks[0][0][0]) == (list(range(used)) or None)


def test_less_than_one_update_skips_the_step_and_the_next_one_starts_afresh(monkeypatch):
    options = dict(num_minibatches=4, max_sampling_rounds=2, steps=2)
    # 3 groups in the first 16 prompts; then all inform. Nothing is carried over.
    ranks, _ = sample(monkeypatch, lambda i, visit: int(i in (1, 2, 8) or i >= 16), 2, **options)
    for result in ranks:
        assert result[0][0] is None and result[0][2]["sampling/surplus"] == 3
        assert result[0][2]["sampling/skipped"] == 1 and result[0][2]["sampling/short"] == 0
        assert "reward/mean" not in result[0][2]
    assert groups_of(ranks, 1) == list(range(16, 24))


@pytest.mark.parametrize("right, share", [(0, "wrong"), (G, "right")])
def test_nothing_informative_ends_on_all_processes_after_the_budget(right, share, monkeypatch):
    ranks, seen = sample(monkeypatch, lambda i, visit: right, 2, max_sampling_rounds=3)
    assert [(result[0][0], result[0][2]["sampling/surplus"]) for result in ranks] == [(None, 0)] * 2
    assert len(seen) == 6 and ranks[0][0][2][f"sampling/dropped_{share}"] == 1


def test_surplus_is_discarded_and_never_comes_back(monkeypatch):
    ranks, _ = sample(monkeypatch, lambda i, visit: int(i % 8 < 6), steps=2)
    assert groups_of(ranks, 0) == [0, 1, 2, 3, 4, 5, 8, 9]  # 10 to 13 were kept too
    assert groups_of(ranks, 1) == [16, 17, 18, 19, 20, 21, 24, 25]
    assert ranks[0][0][2]["sampling/surplus"] == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_resample_puts_the_rejected_first(processes, monkeypatch):
    # Odd prompts are all wrong on their first two visits, then mixed; 7 never.
    def right(i, visit):
        return 0 if i == 7 or (i % 2 and visit < 3) else 2

    options = dict(on_reject="resample", max_sampling_rounds=3)
    ranks, seen = sample(monkeypatch, right, processes, **options)
    rounds = [[0] * 8 for _ in range(3)]
    for rank in range(processes):
        seeds = [(0, rank, 1, n) for n in range(3)]
        for seed, indices in seen:
            if seed in seeds:
                rounds[seeds.index(seed)][rank::processes] = indices
    assert rounds[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rounds[1] == [1, 3, 5, 7, 8, 9, 10, 11]  # the rejected in draw order, then new ones
    assert rounds[2] == [1, 3, 5, 7, 9, 11, 12, 13]
    assert groups_of(ranks) == [0, 2, 4, 6, 8, 10, 1, 3]
    assert ranks[0][0][2]["sampling/rounds"] == 3
    dropped, seen = sample(monkeypatch, right, 1, on_reject="drop", max_sampling_rounds=3)
    assert seen[1][1] == list(range(8, 16)) and groups_of(dropped) == list(range(0, 16, 2))


def test_seeds_are_those_of_rank_step_and_round(monkeypatch):
    _, seen = sample(monkeypatch, lambda i, visit: int(i % 2), 2, steps=2, seed=3, temperature=0.7)
    expected = {(3, rank, step, n) for rank in (0, 1) for step in (1, 2) for n in (0, 1)}
    assert {seed for seed, _ in seen} == expected and len(seen) == 8


# --- rewards ---


@pytest.mark.parametrize(
    "names, correct, rewards",
    [
        (["accuracy", "format"], [1, 0, 0], [2.5, -1.5, -2.0]),  # the accuracy is +1 or -1, times 2; the format 1, 1, 0
        (["format", "accuracy"], [1, 0, 0], [2.5, 1.5, -0.5]),
        (["format"], [1, 0, 0], [2, 2, 0]),
        (["accuracy", "math_verify"], [1, 0, 0], [2.5, -0.5, -0.5]),  # math_verify decides; accuracy stays 1, 0, 0
    ],
)
def test_what_decides_is_plus_or_minus_one_and_nothing_else_is_recoded(names, correct, rewards):
    rules = RULES | {"math_verify": RULES["accuracy"]}
    functions = [Reward(name, weight, rules[name]) for name, weight in zip(names, (2.0, 0.5), strict=False)]
    prompts, texts = [Prompt([1], "q", "1", {})] * 3, ["#### 1", "#### 0", "none"]
    found, decided, parts = dapo.compute_rewards(functions, prompts, texts, torch.zeros(3, dtype=torch.bool))
    assert (found.tolist(), decided.tolist()) == (rewards, correct)
    assert "format" not in names or parts["format"].tolist() == [1, 1, 0]


# --- overlong ---


def test_the_punishment_of_long_completions():
    args = args_of(overlong="soft", max_new_tokens=20480, overlong_cache=4096)
    penalties = dapo.overlong_penalty(torch.tensor([16384, 16385, 18432, 20480, 30000]), args)
    assert penalties.dtype == torch.float64 and penalties.tolist() == [0, -1 / 4096, -0.5, -1, -1]
    for overlong in ("none", "filter"):
        args = args_of(overlong=overlong, max_new_tokens=10, overlong_cache=4)
        assert dapo.overlong_penalty(torch.tensor([5, 10]), args).tolist() == [0, 0]


def test_filter_takes_truncated_rows_out_of_the_loss_and_leaves_them_in_their_group(monkeypatch, tmp_path):
    # Most answers by steps do not end within 12 tokens.
    batches = []
    monkeypatch.setattr(dapo, "update", lambda *arguments: batches.append(arguments[4]))
    options = "--overlong filter --max_sampling_rounds 20 --num_minibatches 1 --max_new_tokens 12 --max_steps 1"
    dapo.main([*QUICK, *options.split(), "--output_dir", str(tmp_path / "run")])
    (batch,) = batches
    truncated = batch["truncated"]
    assert 0 < truncated.sum() < len(truncated)
    assert (batch["loss_mask"][truncated] == 0).all() and batch["completion_mask"][truncated].any(dim=1).all()
    assert torch.equal(batch["loss_mask"][~truncated], batch["completion_mask"][~truncated])
    groups = batch["rewards"].view(-1, 4)
    expected = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)
    assert torch.allclose(batch["advantages"].view(-1, 4), expected.float(), atol=1e-6)
    assert set(batch["rewards"].tolist()) == {1.0, -1.0}
    row = metric_rows(tmp_path / "run")[-1]
    assert row["overlong/fraction"] == row["completion/truncated"] > 0 and row["overlong/penalty"] == 0
    assert row["reward/mean"] == pytest.approx(float(batch["rewards"].mean()))


def test_the_mean_over_groups_in_an_update():
    # Each group has its own tokens as denominator, also where it spans micro-batches.
    module, args, tokenizer, policy = embedded(
        "dapo", group_size=G, prompts_per_step=8, num_minibatches=1, token_mean="group", max_grad_norm=0.0,
        micro_batch_size=6,
    )  # fmt: skip
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    batch = fill(module, batch, rewards, args)
    (whole,), _ = gradients(module, args, policy, batch)
    alone = []
    for start in range(0, len(rewards), G):
        part = {name: column[start : start + G] for name, column in batch.items()}
        alone += gradients(module, args, policy, part)[0]
    mean = [torch.stack(parts).mean(dim=0) for parts in zip(*alone, strict=True)]
    assert largest_difference(whole, mean) < 1e-5 * max(float(g.abs().max()) for g in mean)


# --- a run ---

QUICK = "--prompts_per_step 8 --group_size 4 --eval_prompts 4 --eval_samples 4 --eval_every 0".split()


def test_a_run_without_anything_to_learn_ends_with_one_line_and_exit_code_1(tmp_path):
    # a loop that never ends, or a traceback. At this temperature the completions of a group are equal.
    arguments = [*QUICK, "--max_steps", 5, "--save_every", 5, "--temperature", 1e-4, "--max_sampling_rounds", 2]
    result = run_processes("dapo.py", *arguments, "--output_dir", tmp_path, processes=2)
    assert result.returncode == 1, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "the run ends" in line]
    assert "step 1: " in line and "in 2 rounds" in line
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1] and rows[1]["sampling/skipped"] == 1
    assert "eval/pass@1" in rows[1] and (tmp_path / "model").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def informative_groups(monkeypatch, number):
    """Let the first number(step, round) groups of a round be the informative ones, where that is not None."""
    original = dapo.sample_round

    def sample_round(accelerator, model, tokenizer, functions, prompts, seed, args, metrics):
        batch, informative, shown = original(accelerator, model, tokenizer, functions, prompts, seed, args, metrics)
        most = number(*seed[2:])
        return batch, informative if most is None else torch.arange(len(informative)) < most, shown

    monkeypatch.setattr(dapo, "sample_round", sample_round)


def test_a_run_that_has_learned_all_it_can_ends_well(monkeypatch, tmp_path, capsys):
    informative_groups(monkeypatch, lambda step, sampling_round: None if step == 1 else 0)
    dapo.main([*QUICK, "--max_steps", "5", "--output_dir", str(tmp_path)])
    assert "step 2: " in capsys.readouterr().out
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2] and "eval/pass@1" in rows[-1] and (tmp_path / "model").exists()


def test_skipped_steps_change_nothing_and_the_run_goes_on(monkeypatch, tmp_path):
    updates = []
    informative_groups(monkeypatch, lambda step, sampling_round: None if step > 1 else 3 * (sampling_round == 0))
    monkeypatch.setattr(dapo, "evaluate", lambda *arguments: ({}, None))
    monkeypatch.setattr(dapo, "update", lambda a, m, r, o, b, step, args, metrics: updates.append(step))
    dapo.main([*QUICK, "--max_steps", "3", "--output_dir", str(tmp_path)])
    assert updates == [2, 3] and len(metric_rows(tmp_path)) == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--overlong_cache 65", "--overlong_cache 65, --max_new_tokens 64"),
        ("--overlong_cache 0", "--overlong_cache 0"),
        ("--max_sampling_rounds 0", "--max_sampling_rounds 0"),
        ("--overlong both", "both"),
        ("--on_reject keep", "keep"),
        ("--token_mean row", "row"),
        ("--filter_by format", "format"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        dapo.main(arguments.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_answers_are_needed_whatever_the_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{i}+1?"}}\n' for i in range(30)), encoding="utf-8")
    with pytest.raises(InputError, match=r"--filter_by accuracy: train\.jsonl has prompts without an answer"):
        dapo.main("--reward format --dataset train.jsonl".split())


def test_by_reward_no_answers_are_needed(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text(
        "".join(f'{{"prompt": "{i}+1+{i}?"}}\n' for i in range(1, 41)), encoding="utf-8"
    )
    options = f"--dataset {tmp_path}/train.jsonl --filter_by reward --reward format --max_new_tokens 24".split()
    dapo.main([*QUICK, *options, "--max_steps", "1", "--output_dir", str(tmp_path / "run")])
    row = metric_rows(tmp_path / "run")[1]
    assert row["sampling/keep_rate"] > 0 and row["policy/ratio_max"] > 1 and "sampling/dropped_right" not in row
    with pytest.raises(SystemExit) as end:  # at this temperature the completions of a group are equal
        arguments = "--max_steps 3 --temperature 1e-4 --max_sampling_rounds 1".split()
        dapo.main([*QUICK, *options, *arguments, "--output_dir", str(tmp_path / "none")])
    assert end.value.code == 1
    assert "step 1: the rewards of every group agree in 1 rounds, nothing to train on" in capsys.readouterr().out
