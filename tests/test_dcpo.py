"""dcpo.py: its clip, its smoothed advantages where they degenerate, and the history on several processes."""

import math

import pytest
import torch

import dcpo
from common.load import EMBEDDED, Prompt
from common.rewards import Samples, load_rewards
from common.run import Exit
from small_run import completion
from testbed import metric_rows


def args_of(**options):
    return dcpo.Args(**{"group_size": 4, **options})


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


# --- dynamic-adaptive clipping ---


def bounds(logprobs, dtype=torch.float64, **options):
    q = tensor([logprobs], dtype)
    return [bound[0].tolist() for bound in dcpo.clip_bounds(q, torch.ones_like(q).bool(), args_of(**options))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_underflow_has_the_widest_bounds(dtype):
    # DCPO's code: q of exp(-104) is 0 in float32, and its guard then makes the lower bound 1.0, above the ratio itself.
    assert bounds([-104.0, -800.0, -math.inf], dtype) == [[0.5] * 3, [10.0] * 3]


CASES = [  # options, q, advantage, ratio, loss, gradient with respect to the log-prob, clip_low, clip_high, clipped
    ({}, 0.001, 1.0, 20.0, -10.0, 0.0, 0, 1, 1),  # the cap holds for both signs
    ({}, 0.001, -1.0, 20.0, 10.0, 0.0, 0, 0, 1),
    ({}, 0.001, -1.0, 9.0, 9.0, 9.0, 0, 0, 0),
    ({}, 0.1, 1.0, 1.9, -1.9, -1.9, 0, 0, 0),  # a fixed 1.2 would have stopped it
    ({}, 0.1, 1.0, 2.1, -2.0, 0.0, 0, 1, 1),
    ({}, 0.1, 1.0, 0.1, -0.1, -0.1, 0, 0, 0),  # good and less likely: never clipped
    ({}, 0.1, -1.0, 0.51, 0.51, 0.51, 0, 0, 0),
    ({}, 0.1, -1.0, 0.49, 0.5, 0.0, 1, 0, 1),
    ({}, 1.0, -1.0, 0.81, 0.81, 0.81, 0, 0, 0),
    ({}, 1.0, -1.0, 0.79, 0.8, 0.0, 1, 0, 1),
    ({}, 0.1, 0.0, 5.0, 0.0, 0.0, 0, 0, 0),
    ({"max_ratio": 3.0}, 0.001, 1.0, 5.0, -3.0, 0.0, 0, 1, 1),  # DCPO's code ignores a cap below 10 for A > 0
    ({"max_ratio": 3.0}, 0.001, -1.0, 5.0, 3.0, 0.0, 0, 0, 1),
]


@pytest.mark.parametrize("options, q, advantage, ratio, loss, gradient, low, high, clipped", CASES)
def test_clip_table(options, q, advantage, ratio, loss, gradient, low, high, clipped):
    new = tensor([[math.log(q * ratio)]]).requires_grad_()
    mask, old = torch.tensor([[True]]), tensor([[math.log(q)]])
    losses, stats = dcpo.policy_loss(new, old, tensor([[advantage]]), mask, args_of(**options))
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss, abs=1e-9)
    assert new.grad.item() == pytest.approx(gradient, abs=1e-9)
    names = "clip_fraction_low", "clip_fraction_high", "token_clip_ratio"
    assert [int(stats[name]) for name in names] == [low, high, clipped]
    assert [stats["bound_low"][0].tolist(), stats["bound_high"][0].tolist()] == bounds([math.log(q)], **options)


# --- smooth advantage standardization ---


def visits_of(groups, dtype=torch.float64):
    """Return the advantages of one prompt that is seen with these groups of rewards, one after the other."""
    past, results = torch.zeros(1, 3, dtype=torch.float64), []
    for rewards in groups:
        advantages, past = dcpo.compute_advantages(tensor(rewards, dtype), args_of(), past)
        results.append(advantages[:, 0].tolist())
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [[[0.1] * 4], [[1e6 + 0.1] * 4], [[0.3, 0.1 + 0.2, 0.3, 0.3], [0.3] * 4]])
def test_equal_rewards_give_zero(groups, dtype):
    # 24 rewards of 0.1 over six visits have a pooled deviation of 5e-18: without an epsilon, an advantage of 0.47.
    assert visits_of(groups * 4, dtype) == [[0.0] * 4] * (4 * len(groups))
    assert all(visits_of([*groups * 4, [0.3, 0.31, 0.3, 0.3]])[-1])


def test_a_tie_takes_the_total():
    # Rewards (1, -1): A_new of 1 is 1. Before: two visits, mean 12, variance 25. All: mean 8, variance 49, A_tot -1.
    past = tensor([[2, 12, 25]])
    new, total, after = dcpo.smoothed_advantages(tensor([1, -1]), args_of(group_size=2), past)
    assert after[0].tolist() == [3, 8, 49]
    assert new[0, 0] == 1 / 3 and total[0, 0] == -1 / 3
    advantages, _ = dcpo.compute_advantages(tensor([1, -1]), args_of(group_size=2), past)
    assert advantages[0, 0] == -1 / 3


def test_deviations_of_zero():
    past = tensor([[3, 0.5, 0], [3, 0.5, 0]])
    advantages, after = dcpo.compute_advantages(tensor([0.5] * 4 + [1.0] * 4), args_of(), past)
    assert advantages[:4].tolist() == [[0.0]] * 4 and torch.isfinite(advantages).all() and (advantages[4:] > 0).all()
    assert after[0].tolist() == [4, 0.5, 0]


# --- the history of all prompts ---


@pytest.mark.parametrize("processes", [1, 2])
def test_a_prompt_drawn_twice_counts_once(processes, monkeypatch):
    """Prompts 1, 1, 1, 2 of a draw fall to processes 0, 1, 0, 1; the third group is the last one of prompt 1."""
    prompts = [Prompt([1], "1", "3"), Prompt([1], "1", "3"), Prompt([1], "1", "3"), Prompt([2], "1", "3")]
    rows = torch.arange(12, dtype=torch.float64).view(4, 3)
    shares = [range(rank, 4, processes) for rank in range(processes)]
    everything = [(dcpo.History().key(prompts[i]), rows[i].tolist()) for share in shares for i in share]
    monkeypatch.setattr(dcpo, "gather_object", lambda own: everything)
    for share in shares:
        history = dcpo.History()
        history.write([prompts[i] for i in share], rows[list(share)])
        assert history.read(prompts).tolist() == rows[[2, 2, 2, 3]].tolist()
        other = dcpo.History()
        other.load_state_dict(history.state_dict())
        assert other.read([*prompts, Prompt([1], "1", "4")])[-2:].tolist() == [rows[3].tolist(), [0, 0, 0]]


def test_resume_continues_the_history(tmp_path, monkeypatch):
    """Eight problems that are drawn in every step, so that the advantages of steps 3 and 4 need the first two."""
    rows = (EMBEDDED["embedded"] / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(rows[8:12]), encoding="utf-8")
    original, seen = dcpo.smoothed_advantages, []
    monkeypatch.setattr(dcpo, "smoothed_advantages", lambda *arguments: seen.append(original(*arguments)) or seen[-1])

    def run(name, *arguments):
        options = f"--dataset {tmp_path} --prompts_per_step 8 --group_size 4 --output_dir {tmp_path}/{name}"
        dcpo.main([*options.split(), "--eval_every", "2", "--save_every", "2", "--eval_samples", "4", *arguments])
        return metric_rows(tmp_path / name)

    run("b", "--max_steps", "2")
    resumed, whole = run("b", "--max_steps", "4", "--resume"), run("a", "--max_steps", "4")
    assert resumed == whole
    assert [row["dcpo/visit"] for row in whole[1:]] == [1, 2, 3, 4]
    # From the third visit on SA_new and SA_tot differ; from the second on groups that agree train.
    taken = [int((new.abs() < total.abs()).sum()) for new, total, _ in seen[-4:]]
    assert taken[:2] == [0, 0] and taken[3] > 0
    utilization, nearly_equal = (
        [row[key] for row in whole[1:]] for key in ("dcpo/response_utilization", "advantage/zero_groups")
    )
    assert utilization[0] == 1 - nearly_equal[0] and utilization[3] > 1 - nearly_equal[3]


def test_unscored_group_is_not_a_visit(tmp_path, monkeypatch):
    """It was counted as a visit with rewards of 0."""
    seen = []
    monkeypatch.setattr(dcpo.History, "write", lambda self, prompts, rows: seen.extend(rows.tolist()))
    (tmp_path / "mine.py").write_text(
        "def mine(prompts, **_):\n    return [None if p == prompts[0] else float(i % 2) for i, p in enumerate(prompts)]\n",
        encoding="utf-8",
    )
    options = (
        "--max_steps 1 --prompts_per_step 2 --group_size 4 --num_minibatches 1 --eval_prompts 1 --max_new_tokens 8"
    )
    dcpo.main([*options.split(), "--reward", f"{tmp_path}/mine.py:mine", "--output_dir", str(tmp_path / "run")])
    assert seen == [[0, 0, 0], [1, 0.5, 0.25]]
    assert metric_rows(tmp_path / "run")[1]["dcpo/response_utilization"] == 1  # of the other group


# --- rewards, options ---


def test_a_missing_answer_counts_minus_1():
    texts = ["#### 3", "#### 4", "no answer", "#### 3", r"\boxed{", "#### 3"]
    texts = [completion(text, truncated=i == 3) for i, text in enumerate(texts)]  # an answer at its end is none
    prompts = [Prompt([], "q", "3", {})] * 5 + [Prompt([], "q", None, {})]
    args = args_of(reward=["accuracy", "format"], reward_weights=[2.0, 0.5])
    rewards, terms = dcpo.compute_rewards(load_rewards(args), prompts, texts, 6)
    assert terms["accuracy"][:5].tolist() == [1, 0, -1, -1, -1] and terms["accuracy"][5].isnan()
    assert terms["format"].tolist() == [1, 1, 0, 0, 0, 1]
    correct = Samples({}, prompts, texts, rewards, terms).correct
    assert correct[:5].tolist() == [1, 0, 0, 0, 0] and correct[5].isnan()  # not -1, as the reward is
    assert rewards.tolist() == [2.5, 0.5, -2, -2, -2, 0.5]
    rewards, terms = dcpo.compute_rewards(load_rewards(args_of(reward=["format"])), prompts[:5], texts[:5], 5)
    assert rewards.tolist() == [1, 1, 0, 0, 0]
    assert Samples({}, prompts[:5], texts[:5], rewards, terms).correct.tolist() == [1, 0, 0, 0, 0]


def test_no_answer_inside_a_thought():
    """The prompt ends with <think>, so that the completion starts inside a thought."""
    prompts = [Prompt([], "q", "3", starts_in_thought=thought) for thought in (True, False)]
    texts = [completion("the answer is 4")] * 2
    _, terms = dcpo.compute_rewards(load_rewards(args_of(reward=["accuracy"])), prompts, texts, 1)
    assert terms["accuracy"].tolist() == [-1, 0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--max_ratio 1", "max_ratio 1.0"),
        ("--max_ratio nan", "max_ratio nan"),
    ],
)
def test_bad_options(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exit, match=message):
        dcpo.main(arguments.split())
