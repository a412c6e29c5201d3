"""common/rewards.py: rules, functions of the user, and their sum. Each test names the failure it pins."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import grpo
from common.batches import Completion
from common.errors import InputError
from common.harness.metrics import take_logged
from common.rewards import (
    Reward,
    check_signatures,
    load_rewards,
    score,
    score_rewards,
    weighted_sum,
)
from testbed import SCRIPTS, embedded, embedded_prompts, metric_rows, script

# A variable of a comprehension is gone with it: from Python 3.12 on it has no frame of its own.
ROW_1 = "row 1" if sys.version_info < (3, 12) else "3 rows"


def chosen(*names, weights=None):
    return load_rewards(SimpleNamespace(reward=list(names), reward_weights=weights))


def row(prompt="q", answer="3", **columns):
    return SimpleNamespace(prompt=prompt, answer=answer, columns=columns, thinks=False)


def sampled(*texts):
    """Texts as a rollout hands them over."""
    texts = [Completion(text) for text in texts]
    for text in texts:
        text.ids, text.extra = [], {}
    return texts


# --- rules ---


def test_a_thought_that_the_prompt_opened_is_no_answer():
    prompt = SimpleNamespace(prompt="q", answer="3", columns={}, thinks=True)
    texts = [r"perhaps \boxed{3}, wait", r"hm</think> \boxed{3}"]
    seen = []
    mine = Reward("mine", 1.0, lambda completions, **columns: seen.extend(completions) or [0.0, 0.0])
    parts, correct = score_rewards([*chosen("accuracy", "format"), mine], [prompt], texts, [False, False])
    assert parts["accuracy"].tolist() == parts["format"].tolist() == correct.tolist() == [0, 1]
    assert seen == texts


# --- functions of the user, and the sum ---


@pytest.fixture
def user_file(tmp_path):
    def write(body: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(body, encoding="utf-8")
        return str(path)

    return write


def test_user_function_gets_trl_arguments(user_file):
    """A reward written for GRPOTrainer must run unchanged: keyword lists, columns, one call for all rows."""
    head = "calls = []\ndef mine(prompts, completions, level, **kwargs):\n"
    body = "    calls.append((prompts, completions, level, kwargs))\n    return [float(x) for x in level]\n"
    path = user_file(head + body)
    (reward,) = chosen(f"{path}:mine")
    rows = [row("p", "3", level=1, reward="a"), row("q", "4", level=2, reward="b")]  # `reward` is a name of ours, too
    assert score(reward, rows, ["s", "t"], [False, True]).tolist() == [1.0, 2.0]
    chat = [row([{"role": "user", "content": "p"}], None, level=1)]
    assert score(reward, chat, ["s"], [False]).tolist() == [1.0]
    plain, messages = sys.modules["reward_file_mine"].calls
    assert plain[:3] == (["p", "q"], ["s", "t"], [1, 2])
    state = plain[3].pop("trainer_state")
    assert (state.global_step, state.max_steps) == (0, 0) and callable(plain[3].pop("log_metric"))
    assert callable(plain[3].pop("log_extra"))
    golds = {"answer": ["3", "4"], "solution": ["3", "4"]}
    assert plain[3] == {"truncated": [False, True], "reward": ["a", "b"], "completion_ids": [[], []], **golds}
    assert messages[:2] == ([chat[0].prompt], [[{"role": "assistant", "content": "s"}]])
    assert not messages[3].keys() & {"answer", "solution"}


def test_answer_column_is_passed_as_it_stands(user_file):
    """A user's function parses the raw column, as under TRL; the extracted gold must not replace it."""
    (reward,) = chosen(user_file("def f(answer, **_):\n    return [len(a) for a in answer]\n") + ":f")
    assert score(reward, [row(answer="3", answer_length=1)], [""], [False]).tolist() == [1.0]
    rows = [SimpleNamespace(prompt="p", answer="3", columns={"answer": "long #### 3"}, thinks=False)]
    assert score(reward, rows, [""], [False]).tolist() == [11.0]


def test_columns_are_those_of_all_rows_and_none_of_them_is_a_completion(user_file):
    """Rows of JSON need not have the same columns; data made by a model has a column `completions`."""
    body = "calls = []\ndef mine(**keywords):\n    calls.append(keywords)\n    return [0.0, 0.0]\n"
    (reward,) = chosen(user_file(body) + ":mine")
    score(reward, [row(level=1), row(completions="old", tests="2")], ["s", "t"], [False] * 2)
    (given,) = sys.modules["reward_file_mine"].calls
    assert given["level"] == [1, None] and given["tests"] == [None, "2"] and given["completions"] == ["s", "t"]


@pytest.mark.parametrize(
    "code, problem, line",
    [
        (
            "def mine(completions, answer): pass",
            "it gets more than it takes",
            "def mine(completions, answer, **kwargs)",
        ),
        (  # verl's
            "def mine(level, solution_str, ground_truth, extra_info=None): pass",
            "reward 'mine': it needs solution_str, ground_truth, and gets answer,",
            "def mine(completions, level, **kwargs)",
        ),
        (
            "def mine(completions, tests, answer=None, **kwargs): pass",
            "it needs tests, and gets",
            "def mine(completions, answer=None, **kwargs)",
        ),
        ("async def mine(prompts): pass", "more than it takes", "async def mine(completions, prompts, **kwargs)"),
        (
            "class Mine:\n    def __call__(self, completions): pass\nmine = Mine()",
            "more than it takes",
            "def __call__(self, completions, **kwargs)",
        ),
        ("class mine:\n    def __init__(self): pass", "more", "def __init__(self, completions, **kwargs)"),
        (
            "import functools\n@functools.partial\ndef mine(completions, weight): pass",
            "it needs weight,",
            "def mine(completions, **kwargs)",
        ),
        (
            "import functools\ndef of(function):\n"
            "    @functools.wraps(function)\n"
            "    def wrapper(completions): return function(completions)\n"
            "    return wrapper\n"
            "@of\ndef mine(completions, **kwargs): pass",
            "more than it takes",
            "def mine(completions, **kwargs)",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_found_before_the_model_is_loaded(code, problem, line, user_file):
    rewards = chosen(f"{user_file(code)}:mine")
    with pytest.raises(InputError) as error:
        check_signatures(rewards, [row(level=1), row()])
    assert problem in str(error.value) and str(error.value).endswith(f"; write: {line}")


def test_a_function_that_can_be_called_is_not_refused(user_file):
    """A wrapper may pass on less than it gets, and what a class of C takes is not known."""
    code = (
        "import functools, operator\n"
        "def of(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(**keywords): return function(keywords['completions'])\n"
        "    return wrapper\n"
        "@of\n"
        "def wrapped(completions): return [1.0] * len(completions)\n"
        "def plain(completions, level, **kwargs): return [1.0] * len(completions)\n"
        "def whole(*, prompts, completions, truncated, completion_ids, trainer_state, log_metric, log_extra, "
        "answer, solution, level): pass\n"
        "builtin = functools.partial(max)\n"
    )
    path = user_file(code)
    names = [f"{path}:{name}" for name in ("wrapped", "plain", "whole", "builtin")]
    check_signatures(chosen("accuracy", *names), [row(level=1)], [])
    with pytest.raises(InputError, match="reward 'plain': it needs level"):  # the evaluation's rows have none
        check_signatures(chosen(*names[:2]), [row(level=1)], [row()])


def test_a_script_looks_at_its_rewards_before_it_loads_the_model(user_file, tmp_path, monkeypatch):
    path = user_file("def mine(completions, answer): return [1.0] * len(completions)\n")
    for name in (*SCRIPTS, "dpo"):
        monkeypatch.delattr(script(name), "load_policy")
        with pytest.raises(InputError, match="it gets more than it takes"):
            script(name).main(["--reward", f"{path}:mine", "--output_dir", str(tmp_path / name)])


def test_none_is_nan_and_counts_as_nothing(user_file):
    """None as 0 drags the mean down, None as NaN poisons the sum."""
    path = user_file("async def some(prompts, **_):\n    return [1.0, None, None]\n")
    functions = chosen(f"{path}:some", "accuracy", weights=[2.0, 0.5])
    rows = [row(), row(), row()]
    parts = {reward.name: score(reward, rows, ["#### 3", "#### 3", "#### 4"], [False] * 3) for reward in functions}
    assert parts["some"].isnan().tolist() == [False, True, True] and parts["some"].dtype == torch.float64
    assert weighted_sum(functions, parts).tolist() == [2.5, 0.5, 0.0]
    alone = weighted_sum(functions[:1], {"some": parts["some"]})
    assert alone[0] == 2.0 and alone[1:].isnan().all()  # a row that no function scores has no reward


def test_what_only_watches_gives_no_row_a_reward(user_file):
    """A function of weight 0 that counts something made 0 of the rows that the other one leaves out."""
    path = user_file("def some(prompts, **_):\n    return [1.0, None]\ndef count(prompts, **_):\n    return [3, 4]\n")
    functions = chosen(f"{path}:some", f"{path}:count", weights=[1.0, 0.0])
    parts = {reward.name: score(reward, [row(), row()], ["", ""], [False] * 2) for reward in functions}
    first, second = weighted_sum(functions, parts)
    assert first == 1.0 and second.isnan() and parts["count"].tolist() == [3.0, 4.0]
    assert weighted_sum(functions[1:], parts).tolist() == [0.0, 0.0]  # nothing else is there


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0, float('nan'), 0.0]", "mine.*nan.*row 1"),
        ("[1.0, 0.0, float('inf')]", "mine.*inf.*row 2"),
        ("['1.0', 0.0, 0.0]", "mine.*'1.0'.*row 0"),
        ("[0.0, [1.0], 0.0]", "mine.*row 1"),
        ("[0.0, 1.0]", r"mine.*returned \[0.0, 1.0\]: return a list of 3 values"),
        ("[0.0] * 4", "mine.*list of 3 values"),
        ("1.0", "mine.*returned 1.0: return a list"),
        ("None", "mine.*returned None: return a list"),
        ("[1 / (c != 's1') for c in completions]", f"mine.*{ROW_1}.*ZeroDivisionError"),
        ("list(map(lambda c: 1 / (c != 's1'), completions))", "mine.*row 1.*ZeroDivisionError"),
        ("missing", "mine.*3 rows.*NameError"),
    ],
)
def test_bad_values_name_function_and_row(user_file, returned, message):
    """a NaN, a missing value or an exception must stop the run and say where."""
    (reward,) = chosen(user_file(f"def mine(completions, **_):\n    return {returned}\n") + ":mine")
    with pytest.raises(InputError, match=message) as caught:
        score(reward, [row(f"q{i}") for i in range(3)], ["s0", "s1", "s2"], [False] * 3)
    assert "\n" not in str(caught.value)
    if "Error" in message:
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("end", ["1 / (completion != 'b')", "float('nan')", "print()"])
def test_a_function_that_fails_is_called_once(user_file, end):
    """To name the row it was called again row by row: a judge is paid for each call."""
    body = "calls = []\ndef mine(completions, **_):\n    calls.append(completions)\n"
    path = user_file(f"{body}    return [{end} for completion in completions]\n")
    (reward,) = chosen(path + ":mine")
    texts = ["a", "b", "c"]
    try:
        score(reward, [row()] * 3, texts, [False] * 3)
    except InputError as error:
        assert (ROW_1 if "/" in end else "row 0") in str(error)
    assert sys.modules["reward_file_mine"].calls == [texts]


VALUE = "class Value:\n    def {}(self, *_):\n        raise {}\ndef mine(prompts, **_):\n    return {}\n"
RAISED = [
    VALUE.format("__float__", "{}", "[Value()] * len(prompts)"),
    VALUE.format("tolist", "{}", "Value()"),
    "def mine(**_):\n    raise {}\n",
    "raise {}\n",
]


@pytest.mark.parametrize("body", RAISED, ids=["value", "list", "call", "import"])
@pytest.mark.parametrize("error", ["SystemExit(0)", "GeneratorExit(0)", "asyncio.CancelledError(0)"])
def test_no_other_exception_passes_through_a_reward(user_file, body, error):
    """exit(0) in a value ended the run without a word and with exit code 0; what Rust raises is a BaseException too."""
    with pytest.raises(InputError, match="returned a value of type Value for row 0|Error: 0|Exit: 0") as caught:
        (reward,) = chosen(user_file("import asyncio\n" + body.format(error)) + ":mine")
        score(reward, [row()] * 2, [""] * 2, [False] * 2)
    assert not isinstance(caught.value.__cause__, Exception)  # its traceback is printed


@pytest.mark.parametrize("body", RAISED, ids=["value", "list", "call", "import"])
def test_ctrl_c_passes_through_a_reward(user_file, body):
    with pytest.raises(KeyboardInterrupt):
        (reward,) = chosen(user_file(body.format("KeyboardInterrupt")) + ":mine")
        score(reward, [row()], [""], [False])


def test_a_reward_cannot_change_the_data(user_file):
    """The messages of a prompt come back in later steps, and each row of a group has the same ones."""
    body = """
seen = []
def mine(prompts, completions, tests, **columns):
    for prompt, completion, test in zip(prompts, completions, tests):
        seen.append((len(prompt), len(test["cases"])))
        prompt += completion
        prompt[0]["content"] += "!"
        test["cases"].append(0)
        columns.clear()
    return [0.0] * len(prompts)
"""
    (reward,) = chosen(user_file(body) + ":mine")
    problem = row([{"role": "user", "content": "q"}], None, tests={"cases": [1, [2]]}, level=3)
    for _ in range(2):
        score(reward, [problem] * 3, ["s"] * 3, [False] * 3)
    assert problem.prompt == [{"role": "user", "content": "q"}]
    assert problem.columns == {"tests": {"cases": [1, [2]]}, "level": 3}
    assert sys.modules["reward_file_mine"].seen == [(1, 2)] * 6


@pytest.mark.parametrize("end", ["return [0.0] * len(prompts)", "raise ValueError('here')"])
def test_a_reward_cannot_move_the_run(user_file, tmp_path, monkeypatch, end):
    """The run's folder and the other options are relative paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").mkdir()
    here = "import os\nhere = []\nos.chdir('beside')\n"
    function = f"def mine(prompts, **_):\n    here.append(os.getcwd())\n    os.chdir('beside')\n    {end}\n"
    (reward,) = chosen(user_file(here + function) + ":mine")
    assert Path.cwd() == tmp_path
    for _ in range(2):
        try:
            score(reward, [row()] * 2, [""] * 2, [False] * 2)
        except InputError as error:
            assert "on 2 rows: ValueError: here" in str(error)
        assert Path.cwd() == tmp_path
    assert set(sys.modules["reward_file_mine"].here) == {str(tmp_path)}


SETTINGS = {
    "torch.set_default_dtype(torch.float64)": torch.get_default_dtype,
    "torch.set_default_device('meta')": torch.get_default_device,
    "torch.set_grad_enabled(False)": torch.is_grad_enabled,
    "torch.set_num_threads(7)": torch.get_num_threads,
    "torch.use_deterministic_algorithms(True, warn_only=True)": torch.is_deterministic_algorithms_warn_only_enabled,
    "torch.set_float32_matmul_precision('high')": torch.get_float32_matmul_precision,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": torch.get_float32_matmul_precision,
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("place", ["import", "call"])
def test_a_reward_cannot_change_how_torch_computes(user_file, place, fails):
    """`set_grad_enabled(False)` ended as a traceback in the update; the other ones train another model, silently."""
    imported, called = (list(SETTINGS) if place == here else ["pass"] for here in ("import", "call"))
    end = "1 / 0" if fails else "return [float(torch.rand((), device='cpu'))]"
    lines = ["import torch", *imported, "def mine(prompts, **_):", *(f"    {line}" for line in (*called, end))]
    before = [read() for read in SETTINGS.values()]
    (reward,) = chosen(user_file("\n".join(lines)) + ":mine")
    assert [read() for read in SETTINGS.values()] == before
    if fails:
        with pytest.raises(InputError, match="row 0: ZeroDivisionError"):
            score(reward, [row()], [""], [False])
    else:  # random numbers go on
        assert score(reward, [row()], [""], [False]) != score(reward, [row()], [""], [False])
    assert [read() for read in SETTINGS.values()] == before
    assert not torch.overrides._get_current_function_mode_stack()  # not a default device, which each call would ask


MODES = ["torch.autocast('cpu', torch.bfloat16)", "torch.autocast('cpu', enabled=False)", "torch.inference_mode()"]


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_leaves_a_mode_of_torch_on_is_told_so(user_file, mode):
    """The update ran in bfloat16, or ended as a traceback at its first backward."""
    body = f"import torch\nmode = {mode}\ndef mine(prompts, **_):\n    mode.__enter__()\n    return [0.0]\n"
    (reward,) = chosen(user_file(body) + ":mine")
    with pytest.raises(InputError, match="'mine' failed on row 0: RuntimeError: it left torch.autocast or"):
        try:
            score(reward, [row()], [""], [False])
        finally:
            sys.modules["reward_file_mine"].mode.__exit__(None, None, None)


def test_the_error_of_a_reward_names_the_process(user_file, monkeypatch):
    (reward,) = chosen(user_file("def mine(**_):\n    return [float('nan')]\n") + ":mine")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(InputError, match="reward 'mine' on process 5 returned nan for row 0"):
        score(reward, [row()], [""], [False])


def test_a_reward_for_messages_says_why_it_got_text(user_file):
    """`completion[0]["content"]`, as in TRL's examples, said only: string indices must be integers."""
    (reward,) = chosen(user_file("def f(completions, **_):\n    return [len(completions[0][0]['content'])]\n") + ":f")
    assert score(reward, [row([{"role": "user", "content": "q"}])], ["abc"], [False]).tolist() == [3.0]
    with pytest.raises(InputError, match="row 0: TypeError.*completions are text here.*prompts are messages"):
        score(reward, [row()], ["abc"], [False])
    (reward,) = chosen(user_file("def g(completions, **_):\n    return completions[0][0]['content']['x']\n") + ":g")
    with pytest.raises(InputError, match="row 0: TypeError: string indices must be integers, not 'str'$"):
        score(reward, [row([{"role": "user", "content": "q"}])], ["abc"], [False])


@pytest.mark.parametrize(
    ("value", "weight", "fits"),
    [
        ("1e15", 1.0, True),
        ("-1e15", 0.5, True),
        ("1e200", 1.0, False),
        ("-1.1e15", 1.0, False),
        ("1e9", 1e7, False),
        ("1.1e15", 0.5, False),
    ],
)
def test_huge_rewards_name_function_and_row(user_file, value, weight, fits):
    """1e200 ended as a loss that is not finite, with no word on where it came from."""
    path = user_file(f"def mine(prompts, **_):\n    return [0.0, {value}]\n")
    (reward,) = chosen(f"{path}:mine", weights=[weight])
    if fits:
        assert score(reward, [row()] * 2, [""] * 2, [False] * 2).tolist() == [0.0, float(value)]
    else:
        with pytest.raises(InputError, match=r"'mine' returned -?1\S+ for row 1; .*beyond 1e\+15"):
            score(reward, [row()] * 2, [""] * 2, [False] * 2)


def test_a_message_of_several_lines_becomes_one(user_file):
    (reward,) = chosen(user_file("def mine(**_):\n    raise ValueError('a\\nb')\n") + ":mine")
    with pytest.raises(InputError, match="ValueError: a b"):
        score(reward, [row()], [""], [False])


def test_arrays_and_numpy_scalars_are_numbers(user_file):
    """Rewards computed with numpy or torch come back as arrays and scalars of theirs."""
    returned = ["numpy.array([1, 2])", "torch.tensor([1.0, 2.0])", "[numpy.float32(1), torch.tensor(2)]", "(True, 2)"]
    bodies = (f"def {name}(**_):\n    return {value}\n" for name, value in zip("abcd", returned, strict=True))
    path = user_file("import numpy, torch\n" + "".join(bodies))
    for reward in chosen(*(f"{path}:{name}" for name in "abcd")):
        assert np.array_equal(score(reward, [row(), row()], ["", ""], [False] * 2), [1.0, 2.0])


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["acuracy"], None, "acuracy.*accuracy, format"),
        (["nowhere.py:f"], None, "no file nowhere.py"),
        (["no_such_package.x:f"], None, "no_such_package"),
        (["math:nothing"], None, "math has no function nothing"),
        (["math:pi"], None, "math has no function pi"),
        (["math:"], None, "package.module:function"),
        (["accuracy"], [1.0, 2.0], "1.*2"),
        (["accuracy", "format"], [1.0], "2.*1"),
        (["accuracy"], [float("nan")], "finite"),
        (["accuracy", "accuracy"], None, "the same name"),
        (["mine.py:accuracy"], None, "mine.py:accuracy.*rename it"),  # it would be recoded, and count as correctness
        (["mine:math_verify", "accuracy"], None, "mine:math_verify.*rename it"),
        ([], None, "0"),
    ],
)
def test_wrong_reward_options_are_input_errors(names, weights, message):
    """A misspelt reward must not end as a traceback, nor train on nothing (NeMo-RL: a configured term was inert)."""
    with pytest.raises(InputError, match=message) as caught:
        chosen(*names, weights=weights)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body, error", [("def f(:\n", SyntaxError), ("'text'['key']\n", TypeError)])
def test_broken_file_is_an_input_error(user_file, body, error):
    with pytest.raises(InputError, match=f"the import failed: {error.__name__}") as caught:
        chosen(user_file(body, "broken") + ":f")
    assert isinstance(caught.value.__cause__, error)


def test_weighted_sum_of_format_and_accuracy():
    """0.5 x format + 0.5 x accuracy, and a weight that is not ignored."""
    functions = chosen("format", "accuracy", weights=[0.5, 0.25])
    texts, rows = ["#### 3", "#### 4", "3"], [row()] * 3
    parts = {reward.name: score(reward, rows, texts, [False] * 3) for reward in functions}
    assert weighted_sum(functions, parts).tolist() == [0.75, 0.5, 0.0]
    truncated = {reward.name: score(reward, rows, texts, [True] * 3) for reward in functions}
    assert weighted_sum(functions, truncated).tolist() == [0.0, 0.0, 0.0]


def test_correctness_whatever_the_rewards_are():
    """Dynamic sampling keeps groups by accuracy, not by the shaped reward; accuracy is not computed twice."""
    texts, rows, truncated = ["#### 3", "#### 4"], [row(), row()], torch.tensor([False, False])

    def of(**values):  # rewards with these names and values
        return [Reward(name, 1.0, lambda completions, value=value, **_: value) for name, value in values.items()]

    assert score_rewards(of(format=[5.0, 7.0]), rows, texts, truncated)[1].tolist() == [1.0, 0.0]
    _, partly = score_rewards(of(format=[5.0, 7.0]), [row(), row(answer=None)], texts, truncated)
    assert partly[0] == 1.0 and partly[1].isnan()  # one row without an answer does not hide the others
    assert score_rewards(of(format=[5.0, 7.0]), [row(answer=None)] * 2, texts, truncated)[1] is None
    parts, correct = score_rewards(of(accuracy=[0.0, 1.0]), rows, texts, truncated)
    assert correct is parts["accuracy"]
    parts, correct = score_rewards(of(accuracy=[0.0, 1.0], math_verify=[1.0, 1.0]), rows, texts, truncated)
    assert correct is parts["math_verify"] and correct.tolist() == [1.0, 1.0]
    parts, _ = score_rewards(of(format=[1.0, 2.0, 3.0, 4.0]), rows, texts * 2, torch.zeros(4))  # two of each prompt
    assert parts["format"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_accuracy_does_not_apply_without_an_answer_and_format_does():
    """A row without gold is no wrong answer."""
    accuracy, form = chosen("accuracy", "format")
    rows = [row(answer=None), row()]
    assert score(accuracy, rows, ["#### 3"] * 2, [False] * 2).isnan().tolist() == [True, False]
    assert score(form, rows, ["#### 3"] * 2, [False] * 2).tolist() == [1.0, 1.0]


# --- extras ---


def test_functions_of_trl_read_messages_and_latex(monkeypatch):
    """They index completions[0]["content"], and their parser takes 2\\sqrt{2} for 2; other functions get plain text."""
    seen = []

    def function(prompts, completions, solution, **_):
        seen.append((prompts, completions, solution))
        return [0.0]

    class Made:  # as TRL's factories make them
        __call__ = staticmethod(function)

    plain = (["q"], ["s"], [r"2\sqrt{2}"])
    messages = ([[{"role": "user", "content": "q"}]], [[{"role": "assistant", "content": "s"}]], [r"$2\sqrt{2}$"])
    for module, expected in ((__name__, plain), ("trl.rewards.accuracy_rewards", messages)):
        monkeypatch.setattr(function, "__module__", module)
        monkeypatch.setattr(Made, "__module__", module)
        for each in (function, Made()):
            score(Reward("f", 1.0, each), [row(answer=r"2\sqrt{2}")], ["s"], [False])
            assert seen.pop() == expected
        score(Reward("f", 1.0, function), [row(answer="2", solution="so 2")], ["s"], [False])
        assert seen.pop()[2] == ["so 2"]  # the data's own column, as it stands
        score(Reward("f", 1.0, function), [row(answer="$2$")], ["s"], [False])
        assert seen.pop()[2] == ["$2$"]


def test_what_trl_passes_in_a_run(user_file, tmp_path):
    """The names of GRPOTrainer: completion_ids are the sampled tokens, steps count up, what is logged is written."""
    body = """
calls = []
def mine(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
    calls.append((completions, completion_ids, trainer_state.global_step, trainer_state.max_steps))
    log_metric("tokens", sum(map(len, completion_ids)))
    log_metric("tokens", 1.0)
    log_extra("length", [len(text) for text in completions])
    return [float(len(ids)) for ids in completion_ids]
"""
    options = "--max_steps 2 --prompts_per_step 4 --group_size 2 --eval_prompts 4 --eval_samples 1 --eval_k 1"
    grpo.main([*options.split(), "--reward", user_file(body) + ":mine", "--output_dir", str(tmp_path / "run")])
    calls = sys.modules["reward_file_mine"].calls
    assert [call[2:] for call in calls] == [(0, 2), (0, 2), (1, 2), (2, 2)]  # the first and the last evaluate
    tokenizer = embedded()[2]
    for completions, ids, _, _ in calls:
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == completions
    first, one, two = metric_rows(tmp_path / "run")
    sums = [sum(map(len, ids)) for _, ids, _, _ in calls]
    assert first["eval/logged/tokens"] == (sums[0] + 1) / 2 and "logged/tokens" not in first
    assert one["logged/tokens"] == (sums[1] + 1) / 2 and "eval/logged/tokens" not in one
    assert (two["logged/tokens"], two["eval/logged/tokens"]) == ((sums[2] + 1) / 2, (sums[3] + 1) / 2)
    assert one["reward/mean"] == one["completion/length"]  # the stop token counts, as in TRL
    samples = list(map(json.loads, open(tmp_path / "run" / "samples.jsonl", encoding="utf-8")))
    assert [sample["extra"] for sample in samples] == [{"length": len(sample["completion"])} for sample in samples]


def test_logged_names_are_agreed_over_processes(monkeypatch):
    """A name that one process alone has would shift the sums of the others, or hang."""
    own = [Reward(name, 1.0, len, logged) for name, logged in (("f", {"b": [1.0, 2.0]}), ("g", {"b": [3.0]}))]
    other = [{"a": [5.0]}, {"b": [8.0]}]
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: [*mine, *other])
    assert take_logged(None, own, "logged") == {"logged/a": 5.0, "logged/b": 3.5}
    assert not own[0].logged and not own[1].logged


def test_runs_of_one_process_share_nothing_that_a_reward_is_told_or_logs(user_file):
    body = "def mine(trainer_state, log_metric, **_):\n    log_metric('a', 1.0)\n"
    path = user_file(body + "    return [float(10 * trainer_state.max_steps + trainer_state.global_step)]\n")
    (one,), (other,) = chosen(f"{path}:mine"), chosen(f"{path}:mine")
    one.run = SimpleNamespace(step=3, args=SimpleNamespace(max_steps=5))
    assert score(one, [row()], [""], [False]).item() == 53.0
    assert one.logged == {"a": [1.0]} and other.logged == {}
    assert score(other, [row()], [""], [False]).item() == 0.0  # of no run


def test_names_and_values_that_json_does_not_have(user_file, monkeypatch):
    """The number 1 as a name beside "a" was a traceback, and NaN in samples.jsonl is no JSON."""
    body = """
def mine(log_metric, log_extra, **_):
    log_metric(1, 2.0)
    log_metric("a", 3.0)
    log_extra(("x", 1), [float("nan"), float("-inf"), 0.5])
    return [0.0] * 3
"""
    monkeypatch.setattr("accelerate.utils.gather_object", lambda mine: mine)
    texts = sampled("", "", "")
    (reward,) = chosen(user_file(body) + ":mine")
    score(reward, [row()] * 3, texts, [False] * 3)
    assert take_logged(None, [reward], "logged") == {"logged/1": 2.0, "logged/a": 3.0}
    written = [json.dumps(text.extra, allow_nan=False) for text in texts]
    assert written == [f"""{{"('x', 1)": {value}}}""" for value in ("null", "null", "0.5")]


@pytest.mark.parametrize(
    ("call", "message"),
    [("log_metric('x', float('nan'))", "log_metric.*'x', nan.*finite"), ("log_extra('x', [1])", "zip")],
)
def test_what_cannot_be_logged_is_an_error(user_file, call, message):
    body = f"def mine(log_metric, log_extra, **_):\n    {call}\n    return [0.0, 0.0]\n"
    (reward,) = chosen(user_file(body) + ":mine")
    with pytest.raises(InputError, match=message):
        score(reward, [row()] * 2, sampled("", ""), [False] * 2)


FACTORIES = """
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
cosine = get_cosine_scaled_reward(max_len=64)
repetition, overlong = get_repetition_penalty_reward(ngram_size=1), get_soft_overlong_punishment(64, 16)
"""
TRL_NAMES = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"]


@pytest.mark.needs("trl", "math_verify")
@pytest.mark.parametrize("conversational", [False, True])
def test_all_of_trls_rewards_score_gsm8k(user_file, conversational):
    """As the README promises: on the file as it is and on messages, whose gold has another name than TRL's."""
    mine = user_file(FACTORIES)
    functions = chosen(
        *(f"trl.rewards:{name}" for name in TRL_NAMES), *(f"{mine}:{x}" for x in ("cosine", "repetition", "overlong"))
    )
    problem = embedded_prompts()[0]
    prompt = [{"role": "user", "content": problem.prompt}] if conversational else problem.prompt
    texts = []
    for text, ids in (
        (rf"<think>\na\n</think>\n\boxed{{{problem.answer}}}", [1, 1, 1, 1]),
        (r"<think>\na\n</think>\n\boxed{12345}", list(range(56))),
        ("none", [1, 2]),
    ):
        texts.append(Completion(text))
        texts[-1].ids, texts[-1].extra = ids, {}
    rows = [SimpleNamespace(prompt=prompt, answer=problem.answer, columns=problem.columns, thinks=False)]
    parts, correct = score_rewards(functions, rows, texts, torch.zeros(3))
    assert correct.tolist() == [1.0, 0.0, 0.0]
    assert parts["accuracy_reward"].tolist() == parts["reasoning_accuracy_reward"].tolist() == [1.0, 0.0, 0.0]
    assert parts["think_format_reward"].tolist() == [1.0, 1.0, 0.0]
    assert parts["overlong"].tolist() == [0.0, -0.5, 0.0] and parts["repetition"].tolist() == [-0.75, 0.0, 0.0]
    assert parts["cosine"][0] > 0.99 and -1 < parts["cosine"][1] < -0.5 and parts["cosine"][2] < -0.99
    assert texts[0].extra["solution"] == f"${problem.answer}$" and "gold_parsed" in texts[2].extra
