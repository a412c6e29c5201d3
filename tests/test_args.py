"""common/harness/args.py, command_line.py: options of the command line and of YAML, their bounds, and the schedules."""

import math
from dataclasses import fields
from types import SimpleNamespace

import pytest

from common.errors import InputError
from common.args import RunArgs, RunArgs, learning_rate
from common.args import parse_args
from testbed import ALL, ROOT, SCRIPTS, metric_rows, script


def from_file(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return parse_args(script("grpo").Args, ["--config", str(tmp_path / "run.yaml")])


# --- what stands once for all scripts ---

OPTIMIZER = dict(lr_scheduler="constant", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999)
OPTIMIZER |= dict(max_grad_norm=1.0)
SAMPLING = dict(rollout="shared", generate_batch_size=0)


def declared(cls):
    return {field.name: (field.type, field.default, field.metadata) for field in fields(cls)}


@pytest.mark.parametrize("name", ALL)
def test_an_option_is_declared_again_only_where_it_differs(name):
    samples, cls = hasattr(script(name), "rollout"), script(name).Args
    own, inherited = declared(cls), declared(RunArgs if samples else RunArgs)
    found = {option: inherited[option][1] for option in OPTIMIZER | SAMPLING if option in inherited}
    assert found == OPTIMIZER | (SAMPLING if samples else {})
    again = {option for option in cls.__annotations__ if own[option] == inherited.get(option)}
    assert again <= {"learning_rate"}  # each script says its own
    assert ("micro_batch_tokens" in own) == (name in SCRIPTS)  # pairs are counted


# --- the command line ---


def test_the_first_letters_of_an_option_are_no_option():
    with pytest.raises(InputError, match=r"unknown option --see\b"):
        parse_args(script("grpo").Args, ["--see", "3"])


def test_a_file_that_nobody_named_is_not_read(tmp_path, monkeypatch):
    """A parser of transformers reads the file grpo.args beside grpo.py."""
    (tmp_path / "grpo.args").write_text("--seed 3", encoding="utf-8")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "grpo.py"), "--max_steps", "7"])
    args = parse_args(script("grpo").Args)
    assert (args.seed, args.max_steps) == (script("grpo").Args().seed, 7)


# --- YAML ---


@pytest.mark.parametrize(
    "text, option, value",
    [
        ("max_steps: 010", "max_steps", 10),  # YAML: 8
        ("answer_column: no", "answer_column", "no"),  # YAML: False
        ("dataset_config: 1_000", "dataset_config", "1_000"),
        ("dataset_config: 1:30", "dataset_config", "1:30"),  # YAML: 90
        ("learning_rate: 1e-6", "learning_rate", 1e-6),  # PyYAML: a string
        ("normalize_std: no", "normalize_std", False),
        ("system_prompt: ''", "system_prompt", ""),
        ("system_prompt: 'null'", "system_prompt", "null"),
        ("system_prompt: null", "system_prompt", None),
        ("eval_split:", "eval_split", None),
        ("reward: [accuracy, format]", "reward", ["accuracy", "format"]),
        ("reward_weights: [0.5, 1e-1]", "reward_weights", [0.5, 0.1]),
        ("reward_weights: [-0.5, -1, -.5]", "reward_weights", [-0.5, -1.0, -0.5]),
        ("chat_template_kwargs: '{\"thinking\": false}'", "chat_template_kwargs", '{"thinking": false}'),
        ("report_to: []", "report_to", []),
        ("seed: !!timestamp 3", "seed", 3),
    ],
)
def test_a_yaml_value_means_what_it_means_on_the_command_line(text, option, value, tmp_path):
    assert getattr(from_file(tmp_path, text), option) == value


@pytest.mark.parametrize(
    "text, message",
    [
        ("max_steps: 1\nmax_steps: 2", "max_steps is given twice"),
        ("max_steps: 1\nmax-steps: 2", "max_steps is given twice"),
        ("config: other.yaml", "config is given twice, or is no option of a file"),
        ("system_prompt: {a: b}", "system_prompt: expected a value"),
        ("reward: [[accuracy]]", "reward: expected a value"),
        ("max_steps: 0x10", "0x10"),
        ("max_steps: [1, 2]", "unknown option 2"),
        ("? [a]\n: b", "unknown option --[ScalarNode"),
        ("chat_template_kwargs: {thinking: no}", "chat_template_kwargs: expected a value"),
        ("[max_steps, 1]", "expected `option: value` lines"),
        ("seed: !!python/name:os.system", "invalid int value: ''"),
        ("seed: 1\n---\nseed: 2", "a single document"),
        ("reward: [accuracy, --seed, 3]", "reward: expected a value, or a list of values that are no options"),
        ("reward: [accuracy, -h]", "reward: expected a value, or a list of values that are no options"),
        ("num_generations: 8", "run.yaml: unknown option --num_generations=8"),
        ("seed: !!int a", "invalid int value: 'a'"),
    ],
)
def test_what_yaml_can_say_and_a_command_line_cannot_is_refused_in_one_line(text, message, tmp_path):
    with pytest.raises(InputError) as error:
        from_file(tmp_path, text)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_one_or_more_datasets(tmp_path):
    """One is not a list."""
    assert from_file(tmp_path, "dataset: [a.jsonl, b.jsonl]").dataset == ["a.jsonl", "b.jsonl"]
    assert from_file(tmp_path, "dataset: [a.jsonl]").dataset == "a.jsonl"
    args = parse_args(script("grpo").Args, ["--dataset", "a.jsonl", "--eval_dataset", "b", "c"])
    assert (args.dataset, args.eval_dataset) == ("a.jsonl", ["b", "c"])


# --- bounds ---


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("grpo", "--learning_rate 1e300", "--learning_rate 1e+300: must be below 1e+31"),
        ("ppo", "--critic_learning_rate 1e300", "--critic_learning_rate 1e+300: must be below 1e+31"),
        ("dpo", "--learning_rate 1e31", "--learning_rate 1e+31: must be below 1e+31"),
        ("grpo", "--reward_weights 1e300", "--reward_weights 1e+300: must be below 1e+31"),
        ("grpo", "--group_size 1" + "0" * 400, "must be below 2147483648"),
        ("grpo", "--learning_rate nan", "--learning_rate nan: must be above 0"),
        (
            "grpo",
            "--prompt_template \udcff{prompt}",
            r"--prompt_template '\udcff{prompt}': has bytes that are not UTF-8",
        ),
        ("grpo", "--reward accuracy \udcff.py:f", r"--reward '\udcff.py:f': has bytes that are not UTF-8"),
        ("grpo", "--config= --seed 3", "--config : [Errno 2] No such file"),
    ],
)
def test_a_value_that_would_fail_later_is_one_line(name, options, message):
    with pytest.raises(InputError) as error:
        script(name).main(options.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_largest_values_are_taken():
    script("grpo").Args(learning_rate=1e30, max_steps=2**31 - 1).check()  # docs/monitoring.md has such a rate


def test_a_seed_that_numpy_does_not_take_is_refused():
    with pytest.raises(InputError, match="--seed 4294967296: must be below 4294967296"):
        script("grpo").main(["--seed", "4294967296"])
    script("grpo").Args(seed=2**32 - 1).check()


@pytest.mark.parametrize("value, bound", [("nan", "above -1e"), ("inf", "below 1e"), ("-inf", "above -1e")])
def test_a_number_that_is_not_finite_is_refused(value, bound):
    with pytest.raises(InputError, match=f"--reward_weights {value}: must be {bound}"):
        parse_args(script("grpo").Args, [f"--reward_weights={value}"])


@pytest.mark.parametrize("name, option", [("grpo", "prompts_per_step"), ("dpo", "pairs_per_step")])
def test_sizes_divide_over_the_processes(name, option, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    script(name).Args(**{option: 33}).check()
    with pytest.raises(InputError, match=f"--{option} 32: not a multiple of 3 processes x 1 minibatch"):
        script(name).Args(**{option: 32}).check()


def test_a_schedule_over_given_pairs_ends_where_they_end(tmp_path):
    args = script("dpo").Args(pairs_per_step=8, num_epochs=2, lr_scheduler="linear", learning_rate=1.0)
    last_step = script("dpo").last_step
    pairs = [None] * 23  # six of 46 are left out: a step is full
    assert [last_step(args, pairs), args.max_steps] == [5, -1]
    assert [learning_rate(step, args, 5) for step in range(5)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    for max_steps, last in ((100, 5), (3, 3), (0, 0)):
        args.max_steps = max_steps
        assert last_step(args, pairs) == last
    assert last_step(args, []) == 0  # own pairs: max_steps
    args.max_steps = -1
    with pytest.raises(InputError, match="--lr_scheduler linear: needs to know the end of the run: give --max_steps"):
        last_step(args, [])


@pytest.mark.parametrize("name, max_steps", [("dpo", -1), ("reward_model", 50)])
def test_both_pair_scripts_take_their_rates_from_it(name, max_steps, tmp_path, monkeypatch):
    update_pairs, set_rates = script(name).update_pairs, []

    def spy(accelerator, model, optimizer, *rest):
        set_rates.append(optimizer.param_groups[0]["lr"])
        return update_pairs(accelerator, model, optimizer, *rest)

    monkeypatch.setattr(script(name), "update_pairs", spy)
    lines = (ROOT / "common" / "tiny" / "pairs" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:10]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = "--pairs_per_step 4 --num_epochs 1 --lr_scheduler linear --learning_rate 1e-4 --eval_every 0".split()
    options += ["--max_steps", str(max_steps), "--dataset", str(tmp_path / "train.jsonl")]
    script(name).main([*options, "--output_dir", str(tmp_path / "run")])
    rates = [row["optim/lr"] for row in metric_rows(tmp_path / "run") if "optim/lr" in row]
    assert rates == set_rates == pytest.approx([1e-4, 0.5e-4])


def test_the_schedules_in_closed_form():
    args = SimpleNamespace(learning_rate=2.0, warmup_steps=0, max_steps=4, lr_scheduler="cosine")
    cosine = [1 + math.cos(math.pi * step / 4) for step in range(4)]
    assert [learning_rate(step, args) for step in range(4)] == pytest.approx(cosine)
    args.lr_scheduler = "linear"
    assert [learning_rate(step, args) for step in range(4)] == pytest.approx([2, 1.5, 1, 0.5])
    args.lr_scheduler, args.warmup_steps = "constant", 4
    assert [learning_rate(step, args) for step in range(6)] == pytest.approx([0.5, 1, 1.5, 2, 2, 2])


# --- what a class of options knows of its step ---


@pytest.mark.parametrize(
    "name, options, said",
    [
        (
            "dapo",
            {},
            "32 prompts x 8 completions = 256 rows; 1 epoch x 4 minibatches of 64 rows, 32 on each process",
        ),
        (
            "dpo",
            dict(pairs_per_step=6),
            "6 pairs, 3 on each process; 1 pass over the pairs",
        ),
        (
            "reward_model",
            {},
            "32 pairs, 16 on each process; 3 passes over the pairs",
        ),
    ],
)
def test_a_step_is_said_as_an_equation(name, options, said):
    assert script(name).Args(**options).describe_step(2) == said


@pytest.mark.parametrize("name, option", [("ppo", "group_size"), ("dpo", "pair_samples")])
def test_samples_of_a_prompt_fit_in_one_call_whatever_option_counts_them(name, option):
    script(name).Args(generate_batch_size=9, **{option: 9}).check()
    for larger in ({option: 10}, {option: 9, "eval_samples": 10}):
        with pytest.raises(InputError, match=f"a prompt needs 10, by --{option} or --eval_samples"):
            script(name).Args(generate_batch_size=9, **larger).check()
