"""Checkpoints of common/run.py: no code in them, damage, other runs, deletion, and kills during a save."""

import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

import grpo
from common.run import FREE_OPTIONS, Checkpoints, Exit
from small_run import same_run, train
from testbed import metric_rows, script

# --- a linear model and its checkpoints ---


class Numbers:
    """A state with floats that rounding to decimals would change."""

    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def start(folder, **options):
    """Return a linear model that has something to save in `folder`, and a method that saves it."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    numbers, args = Numbers(), grpo.Args(output_dir=str(folder), **options)
    found = Checkpoints(accelerator, folder, args, numbers=numbers)
    return SimpleNamespace(model=model, optimizer=optimizer, numbers=numbers, save=found.save, load=found.load)


def advance(run, step):
    run.model(torch.ones(1, 2)).sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.save(step)


@pytest.fixture
def checkpoint(tmp_path):
    """The second of two checkpoints."""
    run = start(tmp_path)
    for step in (1, 2):
        advance(run, step)
    return tmp_path / "checkpoints" / "step-00000002"


def refusal(folder, **options):
    with pytest.raises(Exit) as error:
        start(folder, **options).load()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_saved_state_is_restored_bit_exact(tmp_path):
    values = [0.1 + 0.2, 1 / 3, 5e-324, -0.0, float("inf"), 2**60 + 1]
    run = start(tmp_path)
    run.numbers.values = values
    advance(run, 1)
    again = start(tmp_path)
    assert again.load()["step"] == 1
    assert list(map(repr, again.numbers.values)) == list(map(repr, values))
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    moments, found = (x.optimizer.state_dict()["state"] for x in (run, again))
    assert all(torch.equal(moments[0][key], found[0][key]) for key in moments[0])


class Code:
    """An object that creates the folder `path` when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.bin", "pytorch_model.bin"])
def test_loading_a_checkpoint_runs_no_code(name, checkpoint):
    # Accelerate reads pytorch_model.bin if there is no model.safetensors.
    ran, poison = checkpoint.parent / "ran", checkpoint / name
    torch.save({"step": Code(ran)}, poison)
    torch.load(poison.open("rb"), weights_only=False)
    ran.rmdir()  # unpickling it does run code
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    assert str(checkpoint) in refusal(checkpoint.parents[1])
    assert not ran.exists()


@pytest.mark.parametrize(
    "name, content",
    [("model.safetensors", "half"), ("optimizer.bin", "half"), ("optimizer.bin", None), ("state.json", "")],
)
def test_damage_names_the_previous_checkpoint(name, content, checkpoint):
    file = checkpoint / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content else b"")
    line = refusal(checkpoint.parents[1])
    before = checkpoint.with_name("step-00000001")
    assert line.startswith(f"{checkpoint} is damaged: ") and line.endswith(f"delete it to resume from {before}")
    shutil.rmtree(checkpoint)
    assert start(checkpoint.parents[1]).load()["step"] == 1


def test_missing_weights_are_damage(checkpoint):
    # Only with LoRA do the frozen weights come from the base model.
    weights = load_file(checkpoint / "model.safetensors")
    del weights["bias"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    assert '"bias"' in refusal(checkpoint.parents[1])


# --- another run ---


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("script", "ppo", "script (checkpoint: ppo, now: grpo)"),
        ("mixed_precision", "bf16", "mixed_precision (checkpoint: bf16, now: no)"),
        ("gone", 1, "gone (checkpoint: 1, now: None)"),
    ],
)
def test_other_runs_checkpoint_is_refused(name, value, says, checkpoint):
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    state["settings"][name] = value
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    assert refusal(checkpoint.parents[1]) == f"--resume cannot change {says}"


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "reward_model"])
def test_only_free_options_may_change(name):
    args, accelerator = script(name).Args(), Accelerator(cpu=True)
    before, free = Checkpoints(accelerator, None, args).settings(), set()
    for field in dataclasses.fields(args):
        changed = dataclasses.replace(args, **{field.name: "another"})
        settings = Checkpoints(accelerator, None, changed).settings()
        if field.name not in settings:
            free.add(field.name)
        elif field.name not in ("lr_scheduler", "dataset"):  # a default of dpo.py depends on the dataset
            assert settings == before | {field.name: "another"}
    assert free == FREE_OPTIONS | {"max_steps"}
    linear = dataclasses.replace(args, lr_scheduler="linear")
    assert "max_steps" in Checkpoints(accelerator, None, linear).settings()


def test_resume_reads_the_runs_options(tmp_path, capsys):
    train(tmp_path, *"--learning_rate 3e-5 --save_every 1 --reward accuracy format --no_normalize_std".split())
    args = json.loads((tmp_path / "args.json").read_text(encoding="utf-8"))
    resume = ["--resume", "--output_dir", str(tmp_path)]
    grpo.main([*resume, "--max_steps", "3", "--eval_every", "1"])
    again = json.loads((tmp_path / "args.json").read_text(encoding="utf-8"))
    assert again == args | {"resume": True, "max_steps": 3, "eval_every": 1}
    with pytest.raises(Exit) as error:
        grpo.main([*resume, "--learning_rate", "1e-3"])
    assert str(error.value) == "--resume cannot change learning_rate (checkpoint: 3e-05, now: 0.001)"
    capsys.readouterr()
    grpo.main(resume)  # it is finished
    assert ", in " in capsys.readouterr().out.splitlines()[-1]
    with pytest.raises(Exit, match="script"):
        script("gspo").main([*resume, "--ratio_level", "token"])


# --- which are kept ---


def test_logs_are_cut_to_the_checkpoint(tmp_path):
    train(tmp_path / "a", "--save_every", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "model")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000002")
    with open(tmp_path / "b" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')  # killed while writing
    train(tmp_path / "b", "--resume", "--save_every", 1)
    same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("limit", [1, 3])
def test_only_own_checkpoints_are_deleted(limit, tmp_path):
    run = start(tmp_path, save_total_limit=limit)
    advance(run, 1)
    folder = tmp_path / "checkpoints"
    others = {"step-00000001-best", "step-00000009-copy", "step-9", "best"}
    for name in others:
        shutil.copytree(folder / "step-00000001", folder / name)
    for step in range(2, 5):
        advance(run, step)
    assert {path.name for path in folder.iterdir()} == {*others, *(f"step-{i:08d}" for i in range(5 - limit, 5))}
    assert run.load()["step"] == 4


@pytest.mark.beside("tools")
@pytest.mark.parametrize(
    "name, options",
    [
        ("grpo", []),
        pytest.param("grpo", ["--lora_rank", "4"], marks=pytest.mark.needs("peft")),
        ("ppo", ["--num_minibatches", "1"]),
        ("reward_model", []),
    ],
)
def test_checkpoint_becomes_a_model(name, options, tmp_path):
    """The weights of a checkpoint have other names than those of a model, and no config."""
    import checkpoint_to_model

    sizes = dict(prompts_per_step=8, group_size=8, max_new_tokens=40, pairs_per_step=4, eval_prompts=2, eval_every=0)
    sizes |= dict(max_steps=2, save_every=1)
    sizes |= dict(reward="testbed:alternating")  # each step learns
    fields = script(name).Args.__dataclass_fields__
    words = [f"--{option}={value}" for option, value in sizes.items() if option in fields]
    script(name).main([*words, *options, "--output_dir", str(tmp_path / "run")])
    steps = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for step in steps:
        checkpoint_to_model.main([str(step), str(tmp_path / step.name)])
    with pytest.raises(Exit, match="is a run; its checkpoints: step-00000001, step-00000002$"):
        checkpoint_to_model.main([str(tmp_path / "run"), str(tmp_path / "of_run")])
    (file,) = (path.name for path in (tmp_path / "run" / "model").glob("*.safetensors"))
    model, *made = (tmp_path / "run" / "model", *(tmp_path / step.name for step in steps))
    assert (made[1] / file).read_bytes() == (model / file).read_bytes() != (made[0] / file).read_bytes()


# --- crashes ---


def test_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    def fail(*given, **options):
        raise OSError(28, "No space left on device")

    run = start(tmp_path)
    advance(run, 1)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(torch, "save", fail)
        advance(run, 2)
    (tmp_path / "checkpoints" / "tmp" / "half").write_text("of a file", encoding="utf-8")
    run = start(tmp_path)
    assert run.load()["step"] == 1
    advance(run, 2)
    assert not (tmp_path / "checkpoints" / "step-00000002" / "half").exists()  # no leftovers


def test_checkpoint_is_synced_before_the_rename(tmp_path, monkeypatch):
    synced, rename = [], os.replace
    run = start(tmp_path)
    temporary = tmp_path / "checkpoints" / "tmp"

    def replace(source, target):
        (files,) = synced
        assert files == {path.name for path in source.iterdir()} and len(files) == 4
        rename(source, target)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "sync", lambda: synced.append({path.name for path in temporary.iterdir()}))
    advance(run, 1)
    assert synced


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("moment", ["torch.save", "os.sync", "os.replace", "shutil.rmtree", "pathlib.Path.write_text"])
def test_kill_during_a_save(moment, tmp_path):
    for call in range(1, 4):
        folder = tmp_path / str(call)
        run = start(folder)
        for step in (1, 2):
            advance(run, step)
        expected = {name: weight.clone() for name, weight in run.model.state_dict().items()}
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), pytest.MonkeyPatch.context() as patch:
                kill_at(patch, moment, call)
                advance(run, 3)
            os._exit(0)
        os.waitpid(child, 0)
        run = start(folder)
        step = run.load()["step"]
        assert step in (2, 3)
        if step == 2:
            assert all(torch.equal(expected[key], x) for key, x in run.model.state_dict().items())
        advance(run, step + 1)


def kill_at(patch, name, call):
    """Kill this process at the `call`-th call of a function."""
    module, _, function = name.rpartition(".")
    owner = importlib.import_module("pathlib").Path if module == "pathlib.Path" else importlib.import_module(module)
    real, calls = getattr(owner, function), []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    patch.setattr(owner, function, killed)


def test_model_is_written_whole(tmp_path, monkeypatch):
    """A training whose model cannot be written resumes from its last checkpoint to the same bits."""
    from transformers import PreTrainedModel

    def half(self, folder, **options):
        os.makedirs(folder, exist_ok=True)
        (folder / "half").write_text("of a file", encoding="utf-8")
        raise OSError(28, "No space left on device")

    train(tmp_path / "a", "--save_every", 2)
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(PreTrainedModel, "save_pretrained", half)
        train(tmp_path / "b", "--save_every", 2)
    assert not (tmp_path / "b" / "model").exists()
    train(tmp_path / "b", "--save_every", 2, "--resume")
    assert metric_rows(tmp_path / "b")
    same_run(tmp_path / "a", tmp_path / "b")
    assert not list((tmp_path / "b").glob("model*/half"))
