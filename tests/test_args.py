"""common/run.py: options of the command line and of YAML, their bounds, --help, and the schedules."""

from dataclasses import MISSING, fields

import pytest
import torch
from transformers import get_scheduler

from common.run import Exit, RolloutArgs, RunArgs, learning_rate, parse_args
from testbed import ALL, ROOT, SCRIPTS, fresh_interpreter, metric_rows, script


def failure(function, *arguments):
    """Return the one error line of a call."""
    with pytest.raises(Exit) as error:
        function(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def parsed(*words, name="grpo"):
    return parse_args(script(name).Args, list(words))


def from_file(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    return parsed("--config", str(tmp_path / "run.yaml"))


# --- what stands once for all scripts ---


def declared(cls):
    return {field.name: (field.type, field.default, field.metadata) for field in fields(cls)}


@pytest.mark.parametrize("name", ALL)
def test_options_are_declared_once(name):
    cls = script(name).Args
    own, inherited = declared(cls), declared(RolloutArgs if issubclass(cls, RolloutArgs) else RunArgs)
    assert not {option for option in cls.__annotations__ if own[option] == inherited.get(option)}


def test_help_texts_agree():
    """A diff of two scripts must show only what the paper changes."""
    names = ("prompts_per_step", "num_epochs", "num_minibatches", "kl_coef", "max_new_tokens")
    for option in names:
        declared_in = [script(name).Args.__dataclass_fields__ for name in SCRIPTS]
        texts = {found[option].metadata["help"] for found in declared_in if option in found}
        assert len(texts) == 1, texts


# --- the command line ---


def test_spellings_of_a_negated_option():
    assert parsed().normalize_std and not parsed().resume
    off = (["--no_normalize_std"], ["--no-normalize-std"], ["--normalize_std", "false"], ["--normalize_std=no"])
    assert not any(parsed(*words).normalize_std for words in off)


def test_args_file_is_not_read(tmp_path, monkeypatch):
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
        ("--resume maybe", "--resume"),
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
        ("--model x", "did you mean --model_name_or_path?"),
        ("--epochs 2", "did you mean --num_epochs?"),
        ("--learning_rat 1", "unknown option --learning_rat: did you mean --learning_rate?"),
    ],
)
def test_bad_values_print_one_line(words, said):
    assert said in failure(parsed, *words.split())


def test_overlong_cache_is_below_the_length(tmp_path):
    """With 64 new tokens, a cache of 100 lowered the mean reward by 0.53."""
    main, folder = script("dapo").main, ["--output_dir", str(tmp_path)]
    assert "--overlong_cache" in failure(main, ["--overlong_cache", "64", *folder])
    sizes = "--max_steps 0 --eval_prompts 1 --eval_samples 1 --eval_k 1 --overlong_cache 100 --overlong none"
    main([*sizes.split(), *folder])


def test_largest_values():
    args = parsed("--learning_rate", "1e30", "--seed", str(2**32 - 1), "--reward_weights", "-0.5", "-1", "-1e-05")
    assert (args.learning_rate, args.seed, args.reward_weights) == (1e30, 2**32 - 1, [-0.5, -1, -1e-5])


@pytest.mark.parametrize("name, option", [("grpo", "prompts_per_step"), ("dpo", "pairs_per_step")])
def test_sizes_divide_over_processes(name, option, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    parsed(f"--{option}", "33", name=name)
    with pytest.raises(Exit, match=f"--{option} 32: not a multiple of 3 processes x 1 minibatches"):
        parsed(f"--{option}", "32", name=name)


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
        ("reward_weights: [1, -0.00001]", "reward_weights", [1.0, -1e-5]),  # so args.json writes it, too
        ("chat_template_kwargs: '{\"thinking\": false}'", "chat_template_kwargs", '{"thinking": false}'),
        ("chat_template_kwargs: {thinking: false}", "chat_template_kwargs", '{"thinking": false}'),
        ("report_to: []", "report_to", []),
    ],
)
def test_yaml_values(text, option, value, tmp_path):
    assert getattr(from_file(tmp_path, text), option) == value


def test_command_line_wins(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 3\nmax_steps: 7", encoding="utf-8")
    args = parsed("--seed", "4", "--config", str(tmp_path / "run.yaml"))
    assert (args.seed, args.max_steps) == (4, 7)


@pytest.mark.parametrize(
    "text, said",
    [
        ("config: other.yaml", "run.yaml: expected a mapping of option names to values, without `config`"),
        ("[max_steps, 1]", "run.yaml: expected a mapping"),
        ("a: b: c", "run.yaml: "),
        ("seed: 1\n---\nseed: 2", "run.yaml: "),
        ("seed: [1, 2]", "unknown option 2"),
    ],
)
def test_bad_files_print_one_line(text, said, tmp_path):
    assert said in failure(from_file, tmp_path, text)


def test_binary_file_prints_one_line(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"system_prompt: \xff")
    assert "run.yaml: 'utf-8'" in failure(parsed, "--config", str(tmp_path / "run.yaml"))


# --- --help ---


@pytest.mark.parametrize("name", ALL)
def test_help_lists_options_with_defaults(name):
    """`fresh_interpreter` asserts that it loads neither `datasets` nor a model class."""
    shown = "".join(fresh_interpreter()["help"][name].split())
    for field in fields(script(name).Args):
        help = field.metadata["help"].replace("%%", "%")
        default = field.default_factory() if field.default is MISSING else field.default
        text = "".join(f"{help} (default: {default})".split())  # lines break in words with a hyphen
        assert f"--{field.name}" in shown and text in shown, field.name


# --- schedules ---

LAST = 50


@pytest.mark.parametrize("name, max_steps", [("dpo", -1), ("reward_model", 50)])
def test_schedule_ends_with_the_pairs(name, max_steps, tmp_path):
    """Nine pairs are two steps of four; the last pair is left out."""
    lines = (ROOT / "common" / "tiny" / "pairs" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:9]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = "--pairs_per_step 4 --num_epochs 1 --lr_scheduler linear --learning_rate 1e-4 --eval_every 0".split()
    options += ["--max_steps", str(max_steps), "--dataset", str(tmp_path)]
    script(name).main([*options, "--output_dir", str(tmp_path / "run")])
    rates = [row["optim/lr"] for row in metric_rows(tmp_path / "run") if "optim/lr" in row]
    assert rates == pytest.approx([1e-4, 0.5e-4])


def rates(scheduler, warmup):
    args = script("grpo").Args(learning_rate=2.0, lr_scheduler=scheduler, warmup_steps=warmup, max_steps=LAST)
    return [learning_rate(step, args) for step in range(LAST)]


def rates_of_transformers(scheduler, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    name = "constant_with_warmup" if scheduler == "constant" else scheduler
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=LAST)
    found = []
    for _ in range(LAST):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7, LAST - 1])
@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine"])
def test_rates_of_transformers(scheduler, warmup):
    found, expected = rates(scheduler, warmup), rates_of_transformers(scheduler, warmup)
    assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)
    # Transformers start at 0, which would waste the first rollout: here the warm-up is one step ahead.
    assert found[:warmup] == pytest.approx(expected[1 : warmup + 1], abs=1e-12)
