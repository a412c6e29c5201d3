"""common/harness/checkpoints.py: what a checkpoint may hold, what is damaged, and which ones are a run's own."""

import _pyio
import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save

from common.errors import InputError, Process
from common.checkpoints import put_in_place
from small_run import QUICK, advance, no_room, refusal, start
from testbed import ROOT, script

# --- a checkpoint is data ---


class Code:
    """What runs something when it is unpickled: it makes the folder `path`."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def replace(path, content):
    """Put `content` in the place of a checkpoint's file, with the checksum that fits, as who attacks would."""
    path.write_bytes(content)
    meta_path = path.parent / "meta.json"
    if path != meta_path:
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        meta["files"][path.name] = hashlib.sha256(content).hexdigest()
        meta_path.write_text(json.dumps(meta), encoding="utf-8")


PICKLES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "state.json", "meta.json"]


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
@pytest.mark.parametrize("name", [*PICKLES, "pytorch_model.bin", "custom_checkpoint_0.pkl"])
def test_no_file_of_a_checkpoint_runs_code(name, how, checkpoint):
    # Accelerate reads its custom_checkpoint_*.pkl with weights_only=False, and pytorch_model.bin where there is no
    # model.safetensors. All files of one process are here; of several there is a random_states_*.pkl for each.
    assert {path.name for path in checkpoint.iterdir()} == set(PICKLES)
    ran, poison = checkpoint.parent / "ran", checkpoint.parent / "poison"
    if how == "pickle":
        poison.write_bytes(pickle.dumps({"step": Code(ran)}, protocol=2))
    else:
        torch.save({"step": Code(ran)}, poison)
        torch.load(poison, weights_only=False)
        ran.rmdir()  # it works where it is let
    if name == "pytorch_model.bin":
        meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
        del meta["files"]["model.safetensors"]
        (checkpoint / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        (checkpoint / "model.safetensors").unlink()
    replace(checkpoint / name, poison.read_bytes())
    said = refusal(checkpoint.parents[1], resume=True)
    assert str(checkpoint) in said and not ran.exists()


def test_what_is_kept_returns_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(Process, "ECHO", 0.0)
    monkeypatch.setattr("common.errors.set_handlers", lambda action: None)
    values = [0.1 + 0.2, 1 / 3, 5e-324, -0.0, float("inf"), 2**60 + 1]
    run, optimizer, numbers = start(tmp_path)
    numbers.values = values
    run.first_eval = {"eval/pass@1": 1 / 3}
    advance(run, optimizer)
    weights, moments = run.accelerator._models[0].state_dict(), optimizer.state_dict()["state"]
    run, optimizer, numbers = start(tmp_path, resume=True)
    assert list(map(repr, numbers.values)) == list(map(repr, values)) and run.first_eval == {"eval/pass@1": 1 / 3}
    again, again_moments = run.accelerator._models[0].state_dict(), optimizer.state_dict()["state"]
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert all(torch.equal(moments[0][key], again_moments[0][key]) for key in moments[0])
    run.process(signal.SIGTERM, None)  # in the next step, whose end it waits for
    assert run.process.signal == signal.SIGTERM and run.step == 1


# --- Windows ---


def test_the_files_that_reach_the_disk_are_open_for_writing(tmp_path, monkeypatch):
    fcntl, modes = pytest.importorskip("fcntl"), []
    monkeypatch.setattr(os, "fsync", lambda handle: modes.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_text("text", encoding="utf-8")
    put_in_place(tmp_path / "a", tmp_path / "b")
    assert modes == [os.O_RDWR] and (tmp_path / "b" / "file").read_text(encoding="utf-8") == "text"


def test_rows_end_with_one_newline_where_lines_end_with_two_characters(tmp_path, monkeypatch):
    # On Windows each resume would put one more \\r at the end of each row.
    monkeypatch.setattr(os, "linesep", "\r\n")
    monkeypatch.setattr(io, "open", _pyio.open)
    monkeypatch.setattr("builtins.open", _pyio.open)
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    start(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1, "reward/mean": 0.5}\n'


# --- damaged files ---


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "state.json"])
@pytest.mark.parametrize("how", ["gone", "one bit"])
def test_a_damaged_piece_of_a_checkpoint_is_named(name, how, checkpoint):
    # accelerate's load_state ignores missing RNG files; a flipped bit of the weights was loaded and trained on.
    piece = checkpoint / name
    content = bytearray(piece.read_bytes())
    if how == "gone":
        piece.unlink()
    else:
        content[len(content) // 2] ^= 1
        piece.write_bytes(content)
    assert refusal(checkpoint.parents[1], resume=True) == f"{checkpoint}: missing or damaged: {name}"


def test_a_checkpoint_that_lacks_weights_is_not_loaded(checkpoint):
    # Only with LoRA, where the frozen weights come from elsewhere: else they would be those of a new model.
    weights = load_file(checkpoint / "model.safetensors")
    del weights["bias"]
    replace(checkpoint / "model.safetensors", save(weights))
    said = refusal(checkpoint.parents[1], resume=True)
    assert said.startswith(f"{checkpoint} cannot be loaded: ") and '"bias"' in said


@pytest.mark.parametrize(
    "content", [None, "", "[]", "[" * 200_000, '{"script": "grpo"}', '{"facts": [1], "files": {}}']
)
def test_a_damaged_meta_file_is_one_line(content, checkpoint):
    if content is None:
        (checkpoint / "meta.json").unlink()
    else:
        (checkpoint / "meta.json").write_text(content, encoding="utf-8")
    assert refusal(checkpoint.parents[1], resume=True) == (
        f"{checkpoint}: missing, damaged or of an earlier version: meta.json"
    )


def test_a_last_line_that_is_cut_is_not_damage(checkpoint):
    folder = checkpoint.parents[1]
    whole = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    (folder / "metrics.jsonl").write_text(whole + '{"step": 2, "rew', encoding="utf-8")  # killed while writing
    start(folder, resume=True)
    assert (folder / "metrics.jsonl").read_text(encoding="utf-8") == whole


def test_rows_that_a_crash_of_the_machine_lost_are_not_filled_with_zeros(checkpoint):
    folder = checkpoint.parents[1]
    (folder / "metrics.jsonl").write_bytes(b"")
    start(folder, resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == b""


def test_samples_of_later_steps_are_cut_as_the_rows_are(tmp_path):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    advance(run, optimizer, save=False)
    start(tmp_path, resume=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()] == [1]


def test_a_step_is_saved_once(tmp_path):
    # The model of a step cannot be written: the step may have its checkpoint already, also from before a resume.
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    run.save()
    start(tmp_path, resume=True)[0].save()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


# --- another run ---


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("device", "cuda", None),
        ("script", "ppo", "is of another run: script was ppo, is grpo"),
        ("processes", 2, "of another run: processes was 2, is 1"),
        ("strategy", "FSDP2", "of another run: strategy was FSDP2, is single"),
        ("mixed_precision", "bf16", "of another run: mixed_precision was bf16, is no"),
        ("threads", 64, None),
        ("card", "NVIDIA H100 80GB HBM3", None),
        ("torch", "2.11.0+cu130", None),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_another_machine_is_said(name, value, says, checkpoint, capsys):
    meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
    meta["facts"][name] = value
    (checkpoint / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    if says:
        assert says in refusal(checkpoint.parents[1], resume=True)
    else:
        start(checkpoint.parents[1], resume=True)
        now = {"threads": 1, "device": "cpu", "card": None, "torch": torch.__version__}[name]
        assert f"\n{name} was {value}, is {now}: it does not resume bit for bit" in f"\n{capsys.readouterr().out}"


def test_max_steps_may_change_unless_the_schedule_depends_on_it(tmp_path):
    for scheduler in ("linear", "constant"):
        run, optimizer, _ = start(tmp_path / scheduler, lr_scheduler=scheduler, max_steps=5)
        advance(run, optimizer)
        run.close()
    assert "--max_steps was 5, is 9" in refusal(tmp_path / "linear", resume=True, lr_scheduler="linear", max_steps=9)
    assert start(tmp_path / "constant", resume=True, lr_scheduler="constant", max_steps=9)[0].step == 1


@pytest.mark.parametrize("name", ["grpo", "ppo", "dpo", "reward_model"])
def test_every_option_is_compared_but_those_that_may_change(name, tmp_path):
    run, optimizer, _ = start(tmp_path, script(name))
    advance(run, optimizer)
    args, accepted = run.args, set()
    for field in dataclasses.fields(args):
        run.checkpoints.args = dataclasses.replace(args, **{"resume": True, field.name: "another"})
        try:
            run.checkpoints.check_resume(loaded=False)
            accepted.add(field.name)
        except InputError as error:
            assert f" --{field.name} was {getattr(args, field.name)}, is another" in str(error)
    evaluation = {field.name for field in dataclasses.fields(args) if field.name.startswith("eval_")}
    assert accepted == evaluation | set(
        "output_dir resume save_every keep_checkpoints save_model_every report_to lora_merge dry_run reward_changed "
        "max_steps".split()
    )


@pytest.mark.parametrize("name", ["grpo", "dpo", "reward_model"])
def test_resume_on_other_data_with_as_many_rows_is_refused(name, tmp_path):
    source = ROOT / "common" / "tiny" / ("" if name == "grpo" else "pairs")
    rows = (source / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(rows[8:12]), encoding="utf-8")
    options = QUICK if name == "grpo" else ["--pairs_per_step", "4"]
    options = [*options, "--dataset", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--save_every", "1"]
    script(name).main([*options, "--max_steps", "1"])
    (tmp_path / "train.jsonl").write_text("".join(rows[12:20]), encoding="utf-8")
    with pytest.raises(InputError, match="other data than this run's 8 rows"):
        script(name).main([*options, "--max_steps", "2", "--resume"])


class InOrder:
    """A sampler of one's own, which knows nothing of the rows but how many were drawn."""

    def __init__(self, rows, seed):
        self.drawn = 0

    def draw(self, k):
        self.drawn += k
        return list(range(k))

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def test_a_sampler_of_ones_own_keeps_the_check_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(script("grpo"), "PromptSampler", InOrder)
    rows = (ROOT / "common" / "tiny" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(rows[8:12]), encoding="utf-8")
    options = [*QUICK, "--dataset", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--save_every", "1"]
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]), encoding="utf-8")
    script("grpo").main([*options, "--max_steps", "1"])
    (tmp_path / "train.jsonl").write_text("".join(rows[12:16]), encoding="utf-8")
    with pytest.raises(InputError, match="other data than this run's 4 rows"):
        script("grpo").main([*options, "--max_steps", "2", "--resume"])


# --- which are kept ---


def test_a_checkpoint_that_a_crash_left_goes_at_the_next_start(tmp_path, monkeypatch):
    # Killed between the new checkpoint and the end of the one before.
    run, optimizer, _ = start(tmp_path, keep_checkpoints=1)
    monkeypatch.setattr(run.checkpoints, "prune", lambda: None)
    advance(run, optimizer)
    advance(run, optimizer)
    monkeypatch.undo()
    assert start(tmp_path, keep_checkpoints=1, resume=True)[0].step == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_only_its_own_checkpoints_are_chosen_and_deleted(tmp_path):
    run, optimizer, _ = start(tmp_path, keep_checkpoints=1)
    advance(run, optimizer)
    folder = tmp_path / "checkpoints"
    others = ["step-00000001-best", "step-00000009-copy", "step-9", "best", "step-00000000"]
    for name in others[:-1]:
        shutil.copytree(folder / "step-00000001", folder / name)
    (folder / others[-1]).mkdir()  # without meta.json
    (folder / "step-00000008").write_text("a file", encoding="utf-8")
    advance(run, optimizer)
    advance(run, optimizer)
    assert {path.name for path in folder.iterdir()} == {*others, "step-00000008", "step-00000003"}
    assert start(tmp_path, resume=True)[0].step == 3


def test_a_checkpoint_that_is_a_link_is_removed_as_a_link(tmp_path):
    run, optimizer, _ = start(tmp_path / "run", keep_checkpoints=1)
    advance(run, optimizer)
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    advance(run, optimizer)
    assert [path.name for path in path.parent.iterdir()] == ["step-00000002"]
    assert (tmp_path / "elsewhere" / "meta.json").exists()


def test_a_full_disk_while_a_checkpoint_is_written_leaves_the_last_one(tmp_path, monkeypatch):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    monkeypatch.setattr(torch, "save", no_room)
    with pytest.raises(InputError, match="step-00000002 cannot be written: .*No space left"):
        advance(run, optimizer)
    monkeypatch.undo()
    run, optimizer, _ = start(tmp_path, resume=True)
    assert run.step == 1
    (tmp_path / "checkpoints" / "tmp" / "half").write_text("of a file", encoding="utf-8")
    advance(run, optimizer)
    assert not (tmp_path / "checkpoints" / "step-00000002" / "half").exists()  # what was left is no part of the next


def test_a_full_disk_is_guessed_where_torch_does_not_name_it(tmp_path, monkeypatch):
    def fail(*given, **options):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    run, optimizer, _ = start(tmp_path)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(InputError, match="step-00000001 cannot be written: is the disk full[?] .*unexpected pos"):
        advance(run, optimizer)


def test_a_checkpoint_from_before_cards_were_noted_resumes_without_a_word(checkpoint, capsys):
    meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
    del meta["facts"]["card"], meta["facts"]["torch"]
    (checkpoint / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    start(checkpoint.parents[1], resume=True)
    assert "bit for bit" not in capsys.readouterr().out
