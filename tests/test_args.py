"""harness/args.py: options of the command line and of YAML, their bounds, --help, and the schedules."""

import re
from dataclasses import MISSING, fields

import pytest
import torch
from transformers import get_scheduler

from harness.args import RunArgs, TrainArgs, learning_rate, parse_args
from harness.errors import InputError
from small_run import failure
from testbed import ALL, ROOT, SCRIPTS, fresh_interpreter, metric_rows, script


def parsed(*words, name="grpo"):
    return parse_args(script(name).Args, list(words))


def from_file(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return parsed("--config", str(tmp_path / "run.yaml"))


# --- what stands once for all scripts ---


def declared(cls):
    return {field.name: (field.type, field.default, field.metadata) for field in fields(cls)}


@pytest.mark.parametrize("name", ALL)
def test_an_option_is_declared_again_only_where_it_differs(name):
    cls = script(name).Args
    own, inherited = declared(cls), declared(RunArgs if issubclass(cls, RunArgs) else TrainArgs)
    assert not {option for option in cls.__annotations__ if own[option] == inherited.get(option)}


def test_a_help_text_is_the_same_in_all_scripts():
    """So that the difference of two scripts is what the paper changes."""
    names = ("prompts_per_step", "num_epochs", "num_minibatches", "kl_coef", "max_new_tokens")
    for option in names:
        declared_in = [script(name).Args.__dataclass_fields__ for name in SCRIPTS]
        texts = {found[option].metadata["help"] for found in declared_in if option in found}
        assert len(texts) == 1, texts


# --- the command line ---


def test_a_switch_can_be_turned_off_in_every_way():
    assert parsed().fast and parsed().normalize_std and not parsed().resume
    for words in (["--no_fast"], ["--no-fast"], ["--fast", "false"], ["--fast=no"]):
        assert not parsed(*words).fast
    assert not parsed("--normalize_std", "false").normalize_std


def test_a_file_that_nobody_named_is_not_read(tmp_path, monkeypatch):
    """A parser of transformers reads the file grpo.args beside grpo.py."""
    (tmp_path / "grpo.args").write_text("--seed 3", encoding="utf-8")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "grpo.py"), "--max_steps", "7"])
    args = parse_args(script("grpo").Args)
    assert (args.seed, args.max_steps) == (script("grpo").Args().seed, 7)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--see 3", "unknown option --see"),  # the first letters of an option are no option
        ("--seed x", "invalid int value: 'x'"),
        ("--fast maybe", "--fast"),
        ("--dtype float16", "'float32', 'bfloat16'"),
        ("--reward", "expected at least one argument"),
        ("--seed 5000000000", "--seed 5000000000: must be below 4294967296"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--group_size 1", "--group_size 1: must be above 1"),
        ("--eval_top_p 1.5", "--eval_top_p 1.5: must be at most 1"),
        ("--learning_rate nan", "--learning_rate nan"),
        ("--eval_k 9", "--eval_k 9 is more than --eval_samples 8"),
        ("--prompt_template x", "{prompt}"),
        ("--resume", "--resume needs --output_dir"),
        ("max_steps=5", "write --max_steps 5"),
    ],
)
def test_what_cannot_be_is_one_line(words, said):
    assert said in failure(parsed, *words.split())


def test_an_overlong_cache_that_punishes_each_completion_is_refused(tmp_path):
    """With 64 new tokens a cache of 100 took 0.53 from the mean reward."""
    main, folder = script("dapo").main, ["--output_dir", str(tmp_path)]
    assert "--overlong_cache" in failure(main, ["--overlong_cache", "64", *folder])
    sizes = "--max_steps 0 --eval_prompts 1 --eval_samples 1 --eval_k 1 --overlong_cache 100 --overlong none"
    main([*sizes.split(), *folder])


@pytest.mark.beside("tools")
def test_an_option_of_another_project_gets_a_hint():
    assert "--group_size" in failure(parsed, "--num_generations", "8")


def test_the_largest_values_are_taken():
    args = parsed("--learning_rate", "1e30", "--seed", str(2**32 - 1), "--reward_weights", "-0.5", "-1")
    assert (args.learning_rate, args.seed, args.reward_weights) == (1e30, 2**32 - 1, [-0.5, -1])


@pytest.mark.parametrize("name, option", [("grpo", "prompts_per_step"), ("dpo", "pairs_per_step")])
def test_sizes_divide_over_the_processes(name, option, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    parsed(f"--{option}", "33", name=name)
    with pytest.raises(InputError, match=f"--{option} 32: not a multiple of 3 processes x 1 minibatches"):
        parsed(f"--{option}", "32", name=name)


@pytest.mark.parametrize("dataset, size", [("embedded", 0), ("embedded-hard", 0), ("openai/gsm8k", 256)])
def test_what_is_not_given_fits_a_real_model(dataset, size):
    """All of GSM8K's test split in one `generate` does not fit a GPU."""
    args = parsed("--dataset", dataset)
    assert args.eval_prompts == args.generate_batch_size == size
    assert parsed("--dataset", dataset, "--eval_prompts", "7").eval_prompts == 7


# --- YAML ---


@pytest.mark.parametrize(
    "text, option, value",
    [
        ("learning_rate: 1e-6", "learning_rate", 1e-6),  # PyYAML: a string
        ("max-steps: 3", "max_steps", 3),
        ("normalize_std: no", "normalize_std", False),
        ("system_prompt: ''", "system_prompt", ""),
        ("system_prompt: --seed", "system_prompt", "--seed"),
        ("system_prompt: 'null'", "system_prompt", "null"),
        ("eval_split:", "eval_split", None),
        ("reward: [accuracy, format]", "reward", ["accuracy", "format"]),
        ("reward_weights: [-0.5, -1, 1e-1]", "reward_weights", [-0.5, -1.0, 0.1]),
        ("chat_template_kwargs: '{\"thinking\": false}'", "chat_template_kwargs", '{"thinking": false}'),
        ("chat_template_kwargs: {thinking: false}", "chat_template_kwargs", '{"thinking": false}'),
        ("report_to: []", "report_to", []),
    ],
)
def test_a_yaml_value_means_what_it_means_on_the_command_line(text, option, value, tmp_path):
    assert getattr(from_file(tmp_path, text), option) == value


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 3\nmax_steps: 7", encoding="utf-8")
    args = parsed("--seed", "4", "--config", str(tmp_path / "run.yaml"))
    assert (args.seed, args.max_steps) == (4, 7)


@pytest.mark.parametrize(
    "text, said",
    [
        ("config: other.yaml", "run.yaml: expected a mapping of option names to values; `config` is not allowed"),
        ("[max_steps, 1]", "run.yaml: expected a mapping"),
        ("a: b: c", "run.yaml: "),
        ("seed: 1\n---\nseed: 2", "run.yaml: "),
        ("seed: [1, 2]", "unknown option 2"),
    ],
)
def test_what_a_file_cannot_say_is_one_line(text, said, tmp_path):
    assert said in failure(from_file, tmp_path, text)


def test_a_file_that_is_not_text_is_one_line(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"system_prompt: \xff")
    assert "run.yaml: 'utf-8'" in failure(parsed, "--config", str(tmp_path / "run.yaml"))


# --- --help ---


@pytest.mark.parametrize("name", ALL)
def test_help_has_each_option_on_a_line_with_its_kind_and_its_default(name):
    """`fresh_interpreter` asserts that it loads neither `datasets` nor a model class."""
    shown = fresh_interpreter()["help"][name]
    found = re.finditer(r"^  --(?:\[no_\])?(\w+).*(?:\n {10}.*)*", shown, re.MULTILINE)
    lines = {match[1]: match[0] for match in found}
    args = script(name).Args()
    assert lines.keys() == {field.name for field in fields(args)} | {"config"}
    for field in fields(args):
        value = getattr(args, field.name) if field.default is MISSING else field.default
        line = " ".join(lines[field.name].split())
        assert field.metadata["help"].replace("%%", "%") in line
        kinds = {bool: f"--{'[no_]' if value else ''}{field.name} "}
        kinds |= {int: f"--{field.name} N ", float: f"--{field.name} X "}
        assert line.startswith(kinds.get(type(value), f"--{field.name} "))
        default = " ".join(value) if isinstance(value, list) else value
        assert default in (None, "") or line.endswith(f" [{default}]")
    assert len(shown.splitlines()) <= 130 and max(map(len, shown.splitlines())) <= 120
    titles = re.findall(r"^(\S.*):$", shown[shown.index("\noptions:\n") :], re.MULTILINE)
    assert titles[:4] == ["options", "model", "data", "run"] and titles[-1] == "algorithm"
    assert len(set(titles)) == len(titles)


# --- schedules ---

LAST = 50


@pytest.mark.parametrize("name, max_steps", [("dpo", -1), ("reward_model", 50)])
def test_a_schedule_over_given_pairs_ends_where_they_end(name, max_steps, tmp_path):
    """Nine pairs are two steps of four; the last pair is left out."""
    lines = (ROOT / "common" / "tiny" / "pairs" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:9]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = "--pairs_per_step 4 --num_epochs 1 --lr_scheduler linear --learning_rate 1e-4 --eval_every 0".split()
    options += ["--max_steps", str(max_steps), "--dataset", str(tmp_path / "train.jsonl")]
    script(name).main([*options, "--output_dir", str(tmp_path / "run")])
    rates = [row["optim/lr"] for row in metric_rows(tmp_path / "run") if "optim/lr" in row]
    assert rates == pytest.approx([1e-4, 0.5e-4])


def rates(scheduler, warmup, last=LAST, **more):
    args = script("grpo").Args(learning_rate=2.0, lr_scheduler=scheduler, warmup_steps=warmup, max_steps=LAST)
    return [learning_rate(step, args, **more) for step in range(last)]


def rates_of_transformers(scheduler, warmup, last=LAST):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    name = "constant_with_warmup" if scheduler == "constant" else scheduler
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=last)
    found = []
    for _ in range(last):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, LAST - 1])
@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_after_the_warm_up_the_rates_are_those_of_transformers(scheduler, warmup):
    found, expected = rates(scheduler, warmup), rates_of_transformers(scheduler, warmup)
    assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    # Transformers start at 0, which would waste the first rollout: here the warm-up is one step ahead.
    assert found[:warmup] == pytest.approx(expected[1 : warmup + 1], abs=1e-12)


@pytest.mark.parametrize("scheduler", ["linear", "cosine"])
def test_a_decay_ends_at_the_last_step_of_the_run(scheduler):
    """dpo.py and reward_model.py end with their pairs, whatever --max_steps says."""
    found = rates(scheduler, 2, last=20, last_step=20)
    assert found[:2] == [1.0, 2.0] and 0 < found[-1] < 0.3
    assert found[2:] == pytest.approx(rates_of_transformers(scheduler, 2, 20)[2:], abs=1e-12)
