"""Checkpoints: data alone, damage, another run's, which are kept, and kills while one is written."""

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.run import RUNTIME_OPTIONS
from small_run import FULL, advance, failure, no_room, refusal, start, train
from testbed import script

# --- a checkpoint is data ---


class Code:
    """What runs something when it is unpickled: it makes the folder `path`."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.bin", "pytorch_model.bin"])
def test_no_file_of_a_checkpoint_runs_code(name, checkpoint):
    # Accelerate reads pytorch_model.bin if there is no model.safetensors.
    ran, poison = checkpoint.parent / "ran", checkpoint / name
    torch.save({"step": Code(ran)}, poison)
    torch.load(poison.open("rb"), weights_only=False)
    ran.rmdir()  # the poison works
    if name == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
    assert str(checkpoint) in refusal(checkpoint.parents[1], resume=True)
    assert not ran.exists()


def test_what_is_saved_returns_bit_by_bit(tmp_path):
    values = [0.1 + 0.2, 1 / 3, 5e-324, -0.0, float("inf"), 2**60 + 1]
    run, optimizer, numbers = start(tmp_path)
    numbers.values = values
    run.log.first_scores = {"step": 0, "eval/pass@1": 1 / 3}
    advance(run, optimizer)
    weights, moments = run.model.state_dict(), optimizer.state_dict()["state"]
    run.lock.release()
    run, optimizer, numbers = start(tmp_path, resume=True)
    assert list(map(repr, numbers.values)) == list(map(repr, values))
    assert run.log.first_scores == {"step": 0, "eval/pass@1": 1 / 3}
    again, again_moments = run.model.state_dict(), optimizer.state_dict()["state"]
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert all(torch.equal(moments[0][key], again_moments[0][key]) for key in moments[0])


# --- damaged files ---


@pytest.mark.parametrize(
    "name, content",
    [("model.safetensors", "half"), ("optimizer.bin", "half"), ("optimizer.bin", None), ("state.json", "")],
)
def test_a_damaged_checkpoint_names_the_one_before(name, content, checkpoint):
    file = checkpoint / name
    before = shutil.copytree(checkpoint, checkpoint.with_name("step-00000000"))
    if content is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content else b"")
    line = refusal(checkpoint.parents[1], resume=True)
    assert line.startswith(f"{checkpoint} is damaged: ") and line.endswith(f"delete it to resume from {before}")
    shutil.rmtree(checkpoint)
    gc.collect()  # the refused run holds the lock
    start(checkpoint.parents[1], resume=True)


def test_a_checkpoint_that_lacks_weights_is_not_loaded(checkpoint):
    # Only with LoRA, whose frozen weights are those of the base model.
    weights = load_file(checkpoint / "model.safetensors")
    del weights["bias"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    line = refusal(checkpoint.parents[1], resume=True)
    assert line.startswith(f"{checkpoint} is damaged: ") and '"bias"' in line


def test_a_resume_cuts_the_logs_to_their_sizes_at_the_checkpoint(tmp_path):
    """Rows that a crash of the machine lost are not filled with zeros."""
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    logs = [tmp_path / name for name in ("metrics.jsonl", "samples.jsonl")]
    at_checkpoint = [log.read_bytes() for log in logs]
    advance(run, optimizer, save=False)
    with open(logs[0], "a", encoding="utf-8") as file:
        file.write('{"step": 3, "rew')  # killed while writing
    run.lock.release()
    start(tmp_path, resume=True)[0].lock.release()
    assert [log.read_bytes() for log in logs] == at_checkpoint
    logs[0].write_bytes(b"")
    start(tmp_path, resume=True)
    assert logs[0].read_bytes() == b""


def test_a_step_is_saved_once(tmp_path, monkeypatch):
    # The model of a step cannot be written: the step may have its checkpoint already, also from before a resume.
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    monkeypatch.setattr(torch, "save", no_room)
    run.save()
    run.lock.release()
    start(tmp_path, resume=True)[0].save()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


# --- another run ---


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("script", "ppo", "script (checkpoint: ppo, now: grpo)"),
        ("processes", 2, "processes (checkpoint: 2, now: 1)"),
        ("mixed_precision", "bf16", "mixed_precision (checkpoint: bf16, now: no)"),
        ("gone", 1, "gone (checkpoint: 1, now: None)"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(name, value, says, checkpoint):
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    state["config"][name] = value
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    assert refusal(checkpoint.parents[1], resume=True) == f"--resume cannot change {says}"


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "reward_model"])
def test_every_option_is_compared_but_those_that_may_change(name, tmp_path):
    run, _optimizer, _ = start(tmp_path, script(name))
    before, args, accepted = run.resume_config(), run.args, set()
    for field in dataclasses.fields(args):
        run.args = dataclasses.replace(args, **{field.name: "another"})
        if field.name not in run.resume_config():
            accepted.add(field.name)
        elif field.name not in ("lr_scheduler", "dataset"):  # a default of dpo.py depends on the dataset
            assert run.resume_config() == before | {field.name: "another"}
    accepted_always = {option for option in RUNTIME_OPTIONS if hasattr(args, option)}
    assert accepted == accepted_always | {"max_steps"}
    run.args = dataclasses.replace(args, lr_scheduler="linear")  # depends on the last step
    assert "max_steps" in run.resume_config()
    assert not accepted & {"seed", "learning_rate", "dataset", "model_name_or_path", "eval_temperature"}


def test_a_resume_takes_the_options_of_its_run(tmp_path, capsys):
    """One that changes the training is named; others may change."""
    words = "--learning_rate 3e-5 --save_every 1 --reward accuracy format --no_normalize_std"
    train(tmp_path, *words.split())
    args = json.loads((tmp_path / "args.json").read_text(encoding="utf-8"))
    script("grpo").main(["--resume", "--output_dir", str(tmp_path), "--max_steps", "3", "--eval_every", "1"])
    again = json.loads((tmp_path / "args.json").read_text(encoding="utf-8"))
    assert again == args | {"resume": True, "max_steps": 3, "eval_every": 1}
    said = failure(script("grpo").main, ["--resume", "--output_dir", str(tmp_path), "--learning_rate", "1e-3"])
    assert said == "--resume cannot change --learning_rate (checkpoint: 3e-05, now: 0.001)"
    capsys.readouterr()
    script("grpo").main(["--resume", "--output_dir", str(tmp_path)])  # it is finished
    assert ", in " in capsys.readouterr().out.splitlines()[-1]
    said = failure(script("ppo").main, ["--resume", "--output_dir", str(tmp_path)])
    assert said.startswith(f"--resume: {tmp_path / 'args.json'} was written by grpo.py: unknown option --")
    said = failure(script("gspo").main, ["--resume", "--output_dir", str(tmp_path), "--ratio_level", "token"])
    assert "cannot change script (checkpoint: grpo, now: gspo)" in said


# --- which are kept ---


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
def test_a_checkpoint_becomes_a_model(name, options, tmp_path):
    """The weights of a checkpoint have other names than those of a model, and no config."""
    import checkpoint_to_model

    sizes = dict(prompts_per_step=4, group_size=4, max_new_tokens=16, pairs_per_step=4, eval_prompts=2, eval_every=0)
    sizes |= dict(max_steps=2, save_every=1)
    words = [f"--{option}={value}" for option, value in sizes.items() if hasattr(script(name).Args, option)]
    script(name).main([*words, *options, "--output_dir", str(tmp_path / "run")])
    steps = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for step in steps:
        checkpoint_to_model.main([str(step), str(tmp_path / step.name)])
    (file,) = (path.name for path in (tmp_path / "run" / "model").glob("*.safetensors"))
    model, *made = (tmp_path / "run" / "model", *(tmp_path / step.name for step in steps))
    assert {path.name for path in model.iterdir()} == {path.name for path in made[0].iterdir()}
    assert (made[1] / file).read_bytes() == (model / file).read_bytes() != (made[0] / file).read_bytes()
    assert "is not a checkpoint" in failure(checkpoint_to_model.main, [str(tmp_path), str(tmp_path / "x")])


def test_a_checkpoint_that_a_crash_left_goes_with_the_next_one(tmp_path, monkeypatch):
    # Killed between the new checkpoint and the end of the one before.
    run, optimizer, _ = start(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *given, **options: None)
        for _ in range(3):
            advance(run, optimizer)
    run.lock.release()
    run, optimizer, _ = start(tmp_path, resume=True)
    assert run.step == 3
    advance(run, optimizer)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("limit", [1, 3])
def test_only_its_own_checkpoints_are_chosen_and_deleted(limit, tmp_path):
    run, optimizer, _ = start(tmp_path, save_total_limit=limit)
    advance(run, optimizer)
    folder = tmp_path / "checkpoints"
    others = {"step-00000001-best", "step-00000009-copy", "step-9", "best"}
    for name in others:
        shutil.copytree(folder / "step-00000001", folder / name)
    for _ in range(3):
        advance(run, optimizer)
    assert {path.name for path in folder.iterdir()} == {*others, *(f"step-{i:08d}" for i in range(5 - limit, 5))}
    run.lock.release()
    assert start(tmp_path, resume=True)[0].step == 4


@pytest.mark.parametrize("error", [FULL, RuntimeError("[enforce fail at inline_container.cc:664]")])
def test_a_full_disk_while_a_checkpoint_is_written_leaves_the_last_one(error, tmp_path, monkeypatch):
    def fail(*given, **options):
        raise error

    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        said = failure(advance, run, optimizer)
    assert said.startswith("checkpoint of step 2: ") and str(error) in said
    run.lock.release()
    run, optimizer, _ = start(tmp_path, resume=True)
    assert run.step == 1
    (tmp_path / "checkpoints" / "tmp" / "half").write_text("of a file", encoding="utf-8")
    advance(run, optimizer)
    assert not (tmp_path / "checkpoints" / "step-00000002" / "half").exists()  # what was left is no part of the next


def test_a_checkpoint_has_reached_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, rename = [], os.replace
    run, optimizer, _ = start(tmp_path)

    def replace(source, target):
        if "checkpoints" in str(target):
            (files,) = synced
            assert files == {path.name for path in source.iterdir()} and len(files) == 4
        rename(source, target)

    temporary = tmp_path / "checkpoints" / "tmp"
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "sync", lambda: synced.append({path.name for path in temporary.iterdir()}))
    advance(run, optimizer)
    assert synced


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
@pytest.mark.parametrize("moment", ["torch.save", "os.sync", "os.replace", "shutil.rmtree", "builtins.open"])
def test_killed_at_any_moment_of_a_save_it_goes_on_from_a_whole_checkpoint(moment, tmp_path, monkeypatch):
    for call in range(1, 4):
        folder = tmp_path / str(call)
        run, optimizer, _ = start(folder)
        for _ in range(2):
            advance(run, optimizer)
        expected = run.model.state_dict()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), pytest.MonkeyPatch.context() as patch:
                kill_at(patch, moment, call)
                advance(run, optimizer)
            os._exit(0)
        os.waitpid(child, 0)
        run.lock.release()
        run, optimizer, _ = start(folder, resume=True)
        assert run.step in (2, 3) and (folder / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == run.step
        if run.step == 2:
            assert all(torch.equal(expected[key], x) for key, x in run.model.state_dict().items())
        advance(run, optimizer)
        run.lock.release()


def kill_at(patch, name, call):
    """End this process at the `call`-th call of a function."""
    module, _, function = name.rpartition(".")
    real, calls = getattr(importlib.import_module(module), function), []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    patch.setattr(name, killed)
