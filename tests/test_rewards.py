"""common/rewards.py: rules, functions of the user, and their sum."""

import sys
from types import SimpleNamespace

import pytest
import torch

import grpo
from common.load import Prompt
from common.rewards import Completion, Reward, Samples, load_rewards, score, total_reward
from common.run import Exit
from testbed import embedded, metric_rows


def chosen(*names, weights=None):
    return load_rewards(SimpleNamespace(reward=list(names), reward_weights=weights))


def row(prompt="q", gold="3", starts_in_thought=False, **columns):
    return Prompt([1], prompt, gold, columns, starts_in_thought)


def sampled(*texts, truncated=False):
    """Completions of these texts."""
    return [Completion(text, [i], truncated) for i, text in enumerate(texts)]


@pytest.fixture
def user_file(tmp_path):
    def write(body):
        path = tmp_path / "mine.py"
        path.write_text(body, encoding="utf-8")
        return str(path)

    return write


# --- rules ---


def test_thought_that_the_prompt_opened():
    prompts = [row(starts_in_thought=True)] * 2
    texts = sampled(r"perhaps \boxed{3}, wait", r"hm</think> \boxed{3}")
    seen = []
    mine = Reward("mine", 1.0, lambda completions, **columns: seen.extend(completions) or [0.0, 0.0])
    terms = score([*chosen("accuracy", "format"), mine], prompts, texts)
    assert terms["accuracy"].tolist() == terms["format"].tolist() == [0, 1]
    assert Samples({}, prompts, texts, None, {"mine": terms["mine"]}).correct.tolist() == [0, 1]
    assert seen == [completion.text for completion in texts]  # as they were sampled


def test_accuracy_without_a_gold_answer():
    """A row without a gold answer is not a wrong answer."""
    terms = score(chosen("accuracy", "format"), [row(gold=None), row()], sampled("#### 3", "#### 3"))
    assert terms["accuracy"].isnan().tolist() == [True, False]
    assert terms["format"].tolist() == [1.0, 1.0]


def test_truncated_completions_have_no_answer():
    functions = chosen("format", "accuracy", weights=[0.5, 0.25])
    for truncated, expected in ((False, [0.75, 0.5, 0.0]), (True, [0.0] * 3)):
        terms = score(functions, [row()], sampled("#### 3", "#### 4", "3", truncated=truncated))
        assert total_reward(functions, terms, 3).tolist() == expected


# --- functions of the user ---


def test_user_function_gets_trl_arguments(user_file):
    """A reward written for GRPOTrainer must run unchanged: keyword lists, columns, one call for all rows.

    Rows of JSON need not have the same columns; the extracted gold does not replace the answer's column.
    """
    body = "calls = []\ndef mine(**keywords):\n    calls.append(keywords)\n    return [0.5, 1.0]\n"
    (reward,) = chosen(user_file(body) + ":mine")
    rows = [row("p", "3", level=1), row("q", "4", answer="long #### 4", completions="old")]
    assert score([reward], rows, sampled("s", "t"))["mine"].tolist() == [0.5, 1.0]
    messages = [{"role": "user", "content": "p"}]
    score([reward], [row(messages, None)] * 2, sampled("s", "t"))
    plain, chat = sys.modules["reward_mine"].calls
    expected = {"prompts": ["p", "q"], "completions": ["s", "t"], "completion_ids": [[0], [1]]}
    expected |= {"truncated": [False, False], "gold": ["3", "4"], "starts_in_thought": [False, False]}
    expected |= {"level": [1, None], "answer": [None, "long #### 4"]}
    assert plain == expected
    assert chat["prompts"] == [messages] * 2 and chat["completions"][0] == [{"role": "assistant", "content": "s"}]


def test_none_counts_as_unscored(user_file):
    """None as 0 drags the mean down, None as NaN poisons the sum."""
    path = user_file("async def some(prompts, **_):\n    return [1.0, None, None]\n")
    functions = chosen(f"{path}:some", "accuracy", weights=[2.0, 0.5])
    terms = score(functions, [row()], sampled("#### 3", "#### 3", "#### 4"))
    assert terms["some"].isnan().tolist() == [False, True, True] and terms["some"].dtype == torch.float64
    assert total_reward(functions, terms, 3).tolist() == [2.5, 0.5, 0.0]


def test_unscored_rows_get_the_group_mean():
    """Its advantage is then 0; in a group without rewards all rows get 0."""
    nan = float("nan")
    functions = [Reward("some", 2.0, len), Reward("count", 0.0, len)]  # weight 0: logged, but no reward
    terms = {"some": torch.tensor([1.0, nan, 2.0, nan, nan, nan, 4.0, 4.0, 4.0]), "count": torch.ones(9)}
    expected = [2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 8.0, 8.0, 8.0]
    assert total_reward(functions, terms, 3).tolist() == expected
    assert total_reward(functions[:1], {"some": torch.tensor([nan, nan])}, 2).tolist() == [0.0, 0.0]


def test_weight_0_does_not_score(user_file):
    """A judge that was down was hidden by an accuracy that is only logged."""
    path = user_file("def judge(completions, **_):\n    return [1.0, None, 0.0]\n")
    prompts, texts = [row()], sampled(*["#### 3"] * 3)
    terms = score(chosen(f"{path}:judge", "accuracy", weights=[1.0, 0.0]), prompts, texts)
    samples = Samples({}, prompts, texts, None, terms)
    assert samples.is_scored.tolist() == [True, False, True]
    assert terms["accuracy"].isnan().tolist() == [False, True, False]
    assert samples.correct.tolist() == [1, 1, 1]  # or pass@1 would leave the prompt out


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0, 0.0, float('inf')]", "returned inf: expected finite numbers"),
        ("['one', 0.0, 0.0]", "failed: ValueError: .*'one'"),
        ("[0.0, 1.0]", "returned 2 values for 3 completions"),
        ("1.0", "failed: TypeError"),
        ("[1 / (c != 's1') for c in completions]", "failed: ZeroDivisionError: division by zero"),
    ],
)
def test_bad_values_name_the_function(user_file, returned, message):
    """A NaN, a missing value or an exception must stop the run; the script prints the traceback of an exception."""
    (reward,) = chosen(user_file(f"def mine(completions, **_):\n    return {returned}\n") + ":mine")
    with pytest.raises(Exit, match=f"--reward mine {message}") as caught:
        score([reward], [row()] * 3, sampled("s0", "s1", "s2"))
    assert "\n" not in str(caught.value)
    assert (caught.value.__cause__ is not None) == ("failed" in message)


def test_ctrl_c_passes_through_a_reward(user_file):
    (reward,) = chosen(user_file("def mine(**_):\n    raise KeyboardInterrupt\n") + ":mine")
    with pytest.raises(KeyboardInterrupt):
        score([reward], [row()], sampled(""))


def test_function_named_like_a_rule(user_file):
    """Its values were pass@1, and dapo.py scaled them to -1 and 1."""
    path = user_file("def accuracy(completions, **_):\n    return [0.5] * len(completions)\n")
    rewards = chosen(f"{path}:accuracy", "format")
    terms = score(rewards, [row()], sampled("#### 3", "#### 4"))
    assert [*terms] == ["accuracy_2", "format"] and terms["accuracy_2"].tolist() == [0.5, 0.5]
    assert Samples({}, [row()], sampled("#### 3", "#### 4"), None, terms).correct.tolist() == [1, 0]
    assert [reward.name for reward in chosen("accuracy", f"{path}:accuracy")] == ["accuracy", "accuracy_2"]


def test_arrays_and_numpy_scalars_are_numbers(user_file):
    """Rewards computed with numpy or torch come back as arrays and scalars of theirs."""
    returned = ["numpy.array([1, 2])", "torch.tensor([1.0, 2.0])", "[numpy.float32(1), torch.tensor(2)]", "(True, 2)"]
    bodies = (f"def {name}(**_):\n    return {value}\n" for name, value in zip("abcd", returned, strict=True))
    path = user_file("import numpy, torch\n" + "".join(bodies))
    for reward in chosen(*(f"{path}:{name}" for name in "abcd")):
        terms = score([reward], [row(), row()], sampled("", ""))
        assert terms[reward.name].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["acuracy"], None, "choose from accuracy, format, rm:PATH"),
        (["nowhere.py:f"], None, "nowhere.py"),
        (["no_such_package.x:f"], None, "no_such_package"),
        (["math:nothing"], None, "math:nothing"),
        (["math:pi"], None, "not callable"),
        (["accuracy"], [1.0, 2.0], "expected 1, not all 0"),
        (["accuracy"], [0.0], "not all 0"),
    ],
)
def test_wrong_reward_options(names, weights, message):
    """A misspelt reward must not end as a traceback, nor train on nothing."""
    with pytest.raises(Exit, match=message) as caught:
        chosen(*names, weights=weights)
    assert "\n" not in str(caught.value)


def test_broken_file_shows_its_cause(user_file):
    with pytest.raises(Exit) as caught:
        chosen(user_file("def f(:\n") + ":f")
    assert isinstance(caught.value.__cause__, SyntaxError)


def correct(prompts, completions, **terms):
    return Samples({}, prompts, completions, None, {name: torch.tensor(x) for name, x in terms.items()}).correct


def test_correctness_whatever_the_rewards_are():
    texts = sampled("#### 3", "#### 4")
    assert correct([row()], texts, format=[5.0, 7.0]).tolist() == [1.0, 0.0]
    first, second = correct([row(), row(gold=None)], texts, format=[5.0, 7.0])
    assert first == 1.0 and second.isnan()


def test_groups_are_scored_with_their_prompt():
    terms = score(chosen("accuracy"), [row(gold="1"), row(gold="2")], sampled(*["#### 1"] * 4))
    assert terms["accuracy"].tolist() == [1.0, 1.0, 0.0, 0.0]


# --- in a run ---


ASYNC = """
import asyncio
gate = asyncio.Semaphore(2)
calls = []
async def one(ids):
    async with gate:
        await asyncio.sleep(0.001)
        return float(len(ids))
async def mine(completions, completion_ids, **columns):
    calls.append((completions, completion_ids))
    return await asyncio.gather(*map(one, completion_ids))
"""


def test_async_reward_in_a_run(user_file, tmp_path):
    """One event loop for the run: a semaphore or a client may live between calls."""
    options = "--max_steps 2 --prompts_per_step 4 --group_size 2 --eval_prompts 4 --eval_samples 1 --eval_k 1"
    grpo.main([*options.split(), "--reward", user_file(ASYNC) + ":mine", "--output_dir", str(tmp_path / "run")])
    calls = sys.modules["reward_mine"].calls
    assert len(calls) == 4  # the first and the last evaluate
    tokenizer = embedded()[2]
    for completions, ids in calls:
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == completions
    _, one, _ = metric_rows(tmp_path / "run")
    assert one["reward/mean"] == one["completion/length"]  # the stop token counts, as in TRL
