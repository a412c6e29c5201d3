"""dapo.py: dynamic sampling on any number of processes, overlong completions, and runs that end early."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import dapo
from common.load import Prompt
from common.masked import Means, completion_mask
from common.rewards import RULES, Completion, Reward, Samples
from common.run import Exit
from small_run import completion
from testbed import left_padded, metric_rows
from threads import Processes

G, RIGHT, WRONG, STOP, PAD = 4, 5, 6, 1, 2


def args_of(**options):
    defaults = {"group_size": G, "prompts_per_step": 8, "num_minibatches": 1, "overlong": "none"}
    return dapo.Args(**defaults | options)


# --- dynamic sampling: scripted completions, W processes as threads ---


class InOrder:
    """A sampler that draws the prompts 0, 1, 2, ..., of which rank r of W gets each W-th."""

    def __init__(self, accelerator):
        self.next = 0
        self.share = slice(accelerator.process_index, None, accelerator.num_processes)

    def draw(self, number):
        self.next += number
        drawn = range(self.next - number, self.next)[self.share]
        return [Prompt([9] * (1 + i % 3) + [10 + i], f"q{i}", "1", {"index": i}) for i in drawn]


def length(i, row):
    """Completion tokens of a row of prompt i, the stop token included."""
    return 2 + (i + row) % 5


def scripted(right, seen):
    """A `sample_and_score` in which the first right(i) completions of prompt i are right."""

    def sample_and_score(prompts, n, temperature, top_p, seed):
        rows = [(prompt.columns["index"], row) for prompt in prompts for row in range(n)]
        seen.append((seed, temperature, top_p, [i for i, row in rows if row == 0]))
        tokens = [[RIGHT if row < right(i) else WRONG] * (length(i, row) - 1) + [STOP] for i, row in rows]
        prompt_ids, prompt_mask = left_padded([prompt.ids for prompt in prompts], PAD)
        completions = pad_sequence([torch.tensor(ids) for ids in tokens], True, PAD)
        mask, truncated = completion_mask(completions, [STOP])
        batch = {
            "prompts": prompt_ids.repeat_interleave(n, 0),
            "prompt_mask": prompt_mask.repeat_interleave(n, 0),
            "completions": completions,
            "completion_mask": mask,
            "truncated": truncated,
        }
        rewards = 2 * torch.tensor([float(row < right(i)) for i, row in rows], dtype=torch.float64) - 1
        texts = [f"{i} {row} #### {int(row < right(i))}" for i, row in rows]
        completions = [completion(text, ids) for text, ids in zip(texts, tokens, strict=True)]
        return Samples(batch, prompts, completions, rewards, {"accuracy": rewards})

    return sample_and_score


def sample(right, processes=1, steps=1, scripted=scripted, **options):
    """Run `dynamic_sampling` on W processes; return a list of (samples, metrics) of each step for each rank, and the
    calls of `sample_and_score`."""
    world, seen, args = Processes(processes), [], args_of(**options)

    def run(accelerator):
        sampler, results = InOrder(accelerator), []
        for step in range(1, steps + 1):
            metrics, seed = Means(), (args.seed, accelerator.process_index, step)
            samples = dapo.dynamic_sampling(accelerator, scripted(right, seen), sampler, seed, args, metrics)
            results.append((samples, metrics.reduce(accelerator)))
        return results

    ranks = world.run(run)
    assert all(calls == world.calls[0] for calls in world.calls)  # the same collectives in the same order
    return ranks, seen


def groups_of(ranks, step=0):
    """Return the prompts that each rank has kept, in the order of its batch; None where it has no batch."""
    kept = [results[step][0] for results in ranks]
    return [samples and (samples.batch["prompts"][::G, -1] - 10).tolist() for samples in kept]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_process_fills_its_share(processes):
    """With groups neither all right nor all wrong. Unequal shares would deadlock in the update."""
    ranks, seen = sample(lambda i: i % 5, processes, overlong="soft", max_new_tokens=7, overlong_cache=4)
    drawn = len(seen) // processes * 8
    informative = [[i for i in range(rank, drawn, processes) if 0 < i % 5 < 4] for rank in range(processes)]
    share = 8 // processes
    assert groups_of(ranks) == [own[:share] for own in informative]
    metrics = ranks[0][0][1]
    assert all(results[0][1] == metrics for results in ranks)
    assert metrics["sampling/rounds"] == drawn / 8 == {1: 2, 2: 2, 4: 2}[processes]
    assert metrics["sampling/surplus"] == sum(len(own) - share for own in informative) / processes
    assert metrics["sampling/keep_rate"] == sum(map(len, informative)) / drawn
    assert metrics["sampling/short"] == 0
    # Metrics of completions count all that were sampled.
    lengths = [length(i, row) for i in range(drawn) for row in range(G)]
    assert metrics["reward/accuracy"] == pytest.approx(sum(i % 5 for i in range(drawn)) / drawn / G)
    assert metrics["completion/length"] == pytest.approx(sum(lengths) / len(lengths))
    penalties = [-max(0, n - 3) / 4 for n in lengths]
    assert metrics["overlong/penalty"] == pytest.approx(sum(penalties) / len(penalties))


def test_kept_rows_stay_whole():
    """Rounds are padded to different widths."""
    ranks, _ = sample(lambda i: i % 5, processes=2, overlong="soft", max_new_tokens=7, overlong_cache=4)
    for (samples, _), *_ in ranks:
        kept = (samples.batch["prompts"][:, -1] - 10).tolist()
        assert [prompt.columns["index"] for prompt in samples.prompts] == kept[::G] and len(kept) == 4 * G
        for r, i in enumerate(kept):
            row, n = r % G, length(i, r % G)
            right = 1 if row < i % 5 else -1
            assert samples.completions[r].text.startswith(f"{i} {row} ")
            assert samples.batch["completion_mask"][r].sum() == n
            assert float(samples.rewards[r]) == right - max(0, n - 3) / 4
            assert float(samples.terms["accuracy"][r]) == right  # before the penalty


def test_groups_equal_up_to_rounding_are_dropped():
    """0.1 + 0.2 and 0.3, as in weighted sums: the gradient of such a group is only noise."""

    def nearly_equal(right, seen):
        inner = scripted(right, seen)

        def sample_and_score(*inputs, **options):
            samples = inner(*inputs, **options)
            rounded = torch.tensor([0.3, 0.1 + 0.2]).double().repeat(len(samples.rewards) // 2)
            samples.rewards = torch.where(samples.rewards < 0, rounded, samples.rewards)
            return samples

        return sample_and_score

    options = dict(scripted=nearly_equal, overlong="soft", max_new_tokens=7, overlong_cache=4)
    ranks, _ = sample(lambda i: i % 5, **options)
    assert groups_of(ranks) == [[i for i in range(16) if 0 < i % 5 < 4][:8]]


@pytest.mark.parametrize("processes, used", [(1, 6), (2, 2), (4, 0)])
def test_the_poorest_process_decides(processes, used):
    """After the last round, DAPO#22 raises an error and AReaL#450 returns batches of another size."""
    options = dict(num_minibatches=2, max_sampling_rounds=3)
    ranks, seen = sample(lambda i: int(i < 7), processes, **options)  # 7 of 24 prompts have mixed rewards
    assert len(seen) == 3 * processes
    own = [list(range(rank, 7, processes))[:used] for rank in range(processes)]
    assert groups_of(ranks) == [kept or None for kept in own]
    metrics = ranks[0][0][1]
    assert metrics["sampling/rounds"] == 3 and metrics["sampling/short"] == 1
    assert metrics["sampling/surplus"] == 7 / processes - used


@pytest.mark.parametrize("right", [lambda i: 0, lambda i: G, lambda i: 2 * (i % 2)])
def test_all_processes_have_groups_or_none(right):
    """All wrong, all right, or two processes of which one has no group: the other must not train alone."""
    ranks, seen = sample(right, processes=2, max_sampling_rounds=3)
    assert groups_of(ranks) == [None, None] and len(seen) == 6


def test_surplus_is_dropped():
    ranks, _ = sample(lambda i: int(i % 8 < 6), steps=2)
    assert groups_of(ranks, 0) == [[0, 1, 2, 3, 4, 5, 8, 9]]  # 10 to 13 were informative, too
    assert groups_of(ranks, 1) == [[16, 17, 18, 19, 20, 21, 24, 25]]
    assert ranks[0][0][1]["sampling/surplus"] == 4


def test_each_round_has_its_seed():
    _, seen = sample(lambda i: int(i % 4 > 1), processes=2, steps=2, seed=3, temperature=0.7)
    calls = {
        (rank, step, sampling_round): list(range(16 * step - 16 + 8 * sampling_round, 16 * step))[:8][rank::2]
        for rank in (0, 1)
        for step in (1, 2)
        for sampling_round in (0, 1)
    }
    # The top-p of 0.7 is for the evaluation.
    expected = [((3, *call), 0.7, 1.0, prompts) for call, prompts in calls.items()]
    assert sorted(seen) == sorted(expected)


# --- groups ---


def three_groups():
    """`Samples` of three prompts of 1, 2 and 3 tokens, with two completions of 1 to 6 tokens each."""
    lengths = torch.tensor([[1], [2], [3], [4], [5], [6]])
    prompt_lengths = torch.tensor([[1], [1], [2], [2], [3], [3]])
    batch = {
        "prompts": torch.arange(18).view(6, 3),
        "prompt_mask": torch.arange(3) >= 3 - prompt_lengths,
        "completions": 100 + torch.arange(36).view(6, 6),
        "completion_mask": torch.arange(6) < lengths,
        "truncated": torch.tensor([True, False, False, True, False, True]),
    }
    return Samples(
        batch,
        [Prompt([i], f"prompt {i}", "1") for i in range(3)],
        [Completion(f"text {i}", [i], False) for i in range(6)],
        torch.arange(6.0),
        {"accuracy": torch.arange(6.0), "own": -torch.arange(6.0)},
    )


def valid(samples, name, mask):
    """Return the values of each row where the mask is true."""
    return [row[keep].tolist() for row, keep in zip(samples.batch[name], samples.batch[mask], strict=True)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_joined_groups_keep_their_rows(order):
    """Groups of several rounds have other widths."""
    samples = three_groups()
    joined = dapo.join_groups([dapo.take_group(samples, i) for i in order])
    rows = [row for i in order for row in (2 * i, 2 * i + 1)]
    assert joined.batch.keys() == samples.batch.keys()
    for name in ("prompts", "completions"):
        mask = "prompt_mask" if name == "prompts" else "completion_mask"
        before = valid(samples, name, mask)
        assert valid(joined, name, mask) == [before[row] for row in rows]
    assert joined.batch["prompts"].shape == (len(rows), max(order) + 1)
    assert joined.batch["completions"].shape == (len(rows), max(rows) + 1)
    assert joined.batch["completion_mask"].sum(dim=1).tolist() == [row + 1 for row in rows]
    assert joined.batch["prompt_mask"][:, -1].all() and joined.batch["completion_mask"][:, 0].all()  # the sides
    assert joined.batch["truncated"].tolist() == samples.batch["truncated"][rows].tolist()
    assert joined.rewards.tolist() == joined.terms["accuracy"].tolist() == rows
    assert joined.terms["own"].tolist() == [-row for row in rows]
    assert [prompt.prompt for prompt in joined.prompts] == [f"prompt {i}" for i in order]
    assert [completion.text for completion in joined.completions] == [f"text {row}" for row in rows]


# --- rewards ---


@pytest.mark.parametrize(
    "names, rewards",
    [
        (["accuracy", "format"], [2.5, -1.5, -2.0]),  # 2 x 1, -1, -1 plus 0.5 x 1, 1, 0
        (["format", "accuracy"], [2.5, 1.5, -0.5]),
        (["format"], [2, 2, 0]),
        (["accuracy", "own"], [2.5, -2, -2]),  # a reward of one's own stays as it is
    ],
)
def test_accuracy_is_1_or_minus_1(names, rewards):
    rules = RULES | {"own": RULES["accuracy"]}
    functions = [Reward(name, weight, rules[name]) for name, weight in zip(names, (2.0, 0.5), strict=False)]
    texts = [completion(text) for text in ("#### 1", "#### 0", "none")]
    found, terms = dapo.compute_rewards(functions, [Prompt([1], "q", "1", {})], texts, 3)
    assert found.tolist() == rewards
    if "format" in names:
        assert terms["format"].tolist() == [1, 1, 0]


# --- overlong ---


def test_overlong_penalty():
    """Eq. 13, of the paper's sizes: 0 up to the cache, then linear, and -1 at the limit."""
    args = args_of(overlong="soft", max_new_tokens=20480, overlong_cache=4096)
    penalty = dapo.overlong_penalty(torch.tensor([1, 16384, 16385, 18432, 20479, 20480, 30000]), args)
    assert penalty.tolist() == [0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1] and penalty.dtype == torch.float64
    for overlong in ("none", "filter"):
        assert not dapo.overlong_penalty(torch.tensor([5, 10]), args_of(overlong=overlong, max_new_tokens=10)).any()


QUICK = "--prompts_per_step 8 --group_size 4 --eval_prompts 4 --eval_samples 4 --eval_every 0 --num_minibatches 1"


def run(folder, options):
    dapo.main([*QUICK.split(), *options.split(), "--output_dir", str(folder)])
    return metric_rows(folder)


def test_filter_masks_truncated_rows(monkeypatch, tmp_path):
    """They still count in the mean of their group."""
    batches, logged, add_rewards = [], [], dapo.run.add_rewards

    def spy(metrics, samples, *rest):
        logged.append(samples)
        add_rewards(metrics, samples, *rest)

    monkeypatch.setattr(dapo.run, "add_rewards", spy)
    monkeypatch.setattr(dapo, "update", lambda *arguments: batches.append(arguments[4]))
    options = "--prompts_per_step 4 --max_sampling_rounds 20 --max_new_tokens 16 --max_steps 1"
    rows = run(tmp_path, f"--overlong filter {options}")
    (batch,) = batches
    truncated = batch["truncated"]  # many solutions do not end within 16 tokens
    assert 0 < truncated.sum() < len(truncated)
    assert not batch["loss_mask"][truncated].any() and batch["completion_mask"][truncated].any(dim=1).all()
    assert torch.equal(batch["loss_mask"][~truncated], batch["completion_mask"][~truncated])
    (samples,) = logged
    groups = samples.rewards.view(-1, 4)
    expected = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)
    torch.testing.assert_close(batch["advantages"].view(-1, 4), expected.float())
    assert set(samples.rewards.tolist()) == {1.0, -1.0}
    assert rows[-1]["completion/truncated"] > 0 and rows[-1]["overlong/penalty"] == 0
    assert rows[-1]["reward/mean"] == pytest.approx(float(samples.rewards.mean()))


# --- a run ---


def test_a_run_that_learns_nothing_ends(tmp_path, capsys):
    """It prints a line, evaluates and saves. At this temperature all completions of a group are equal."""
    rows = run(tmp_path, "--max_steps 5 --temperature 1e-4 --max_sampling_rounds 2 --max_new_tokens 24")
    assert "\nstep 1: nearly all groups have equal rewards, or none: training ends\n" in capsys.readouterr().out
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["sampling/short"] == 1 and rows[1]["sampling/rounds"] == 2
    assert "eval/pass@1" in rows[1] and "reward/mean" not in rows[1] and "optim/lr" not in rows[1]
    assert (tmp_path / "model").exists()


def test_a_run_without_rewards_stops(tmp_path):
    """It called the groups equal, and ended as if it had finished."""
    (tmp_path / "own.py").write_text("def none(completions, **columns):\n    return [None] * len(completions)\n")
    with pytest.raises(Exit, match="stopped at step 5"):
        run(tmp_path / "run", f"--reward {tmp_path / 'own.py'}:none --max_sampling_rounds 1 --max_steps 8")


def test_format_needs_no_answers(tmp_path):
    """Groups are kept by their rewards, whatever those are."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f'{{"prompt": "{i}+1+{i}?"}}\n' for i in range(1, 41)), encoding="utf-8")
    options = f"--dataset {file} --reward format --max_new_tokens 24 --max_steps 1"
    row = run(tmp_path / "run", options)[1]
    assert 0 < row["sampling/keep_rate"] < 1 and row["optim/grad_norm"] > 0 and "reward/accuracy" not in row


@pytest.mark.parametrize(
    "arguments, word",
    [
        ("--overlong_cache 0", "--overlong_cache 0"),
        ("--overlong_cache 100 --max_new_tokens 64", "--overlong_cache"),  # each completion had a penalty
        ("--max_sampling_rounds 0", "--max_sampling_rounds 0"),
        ("--overlong both", "both"),
    ],
)
def test_bad_input(arguments, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exit) as error:
        dapo.main(arguments.split())
    assert word in str(error.value) and "\n" not in str(error.value)
