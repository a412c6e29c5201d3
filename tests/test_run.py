"""The folder of a run: who may write there, what a checkpoint may hold, and what happens when something is damaged."""

import datetime
import errno
import hashlib
import json
import os
import pickle
import shutil
import types

import filelock
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import grpo
from common import runs
from common.errors import InputError
from common.harness.data import Prompt, PromptSampler
from common.harness.distributed import agreed
from common.harness.pairs import Pair
from common.harness.run import Run, close
from tools import ROOT, metric_rows, script

QUICK = "--prompts_per_step 4 --group_size 4 --eval_prompts 4 --eval_samples 4 --max_new_tokens 16".split()
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train(folder, *arguments):
    """A run of grpo.py as a user starts it, of two short steps."""
    grpo.main([*QUICK, "--output_dir", str(folder), "--max_steps", "2", *map(str, arguments)])


class Numbers:
    """A state with floats that decimal places would lose."""

    def __init__(self):
        self.values = []

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def start(folder, **options):
    """A run of a linear model of four weights, at its last checkpoint with `resume=True`: run, optimizer, numbers."""
    accelerator, model, numbers = Accelerator(cpu=True), torch.nn.Linear(2, 2), Numbers()
    run = Run(accelerator, grpo.Args(output_dir=folder and str(folder), **options), "grpo")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    run.keep(numbers=numbers)
    run.restore()
    return run, optimizer, numbers


def advance(run, optimizer, save=True):
    """One step of the linear model, its row in metrics.jsonl, and a checkpoint."""
    model = run.accelerator._models[0]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step += 1
    run.log({"reward/mean": 0.5}, [{"prompt": "1+1", "completion": "2", "reward": 0.5}])
    if save:
        run.save()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that has ended, with a checkpoint."""
    run, optimizer, numbers = start(tmp_path_factory.mktemp("ended"))
    numbers.values = [0.1 + 0.2]
    advance(run, optimizer)
    close(run.accelerator)
    return run.folder


@pytest.fixture
def checkpoint(ended, tmp_path):
    """A checkpoint in a copy of that folder."""
    return shutil.copytree(ended, tmp_path / "run") / "checkpoints" / "step-00000001"


def refusal(folder, **options):
    """What a start in `folder` says; nothing there changes, and no model/ appears."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(InputError) as error:
        start(folder, **options)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


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
        meta = json.loads(meta_path.read_text())
        meta["files"][path.name] = hashlib.sha256(content).hexdigest()
        meta_path.write_text(json.dumps(meta))


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
        meta = json.loads((checkpoint / "meta.json").read_text())
        del meta["files"]["model.safetensors"]
        (checkpoint / "meta.json").write_text(json.dumps(meta))
        (checkpoint / "model.safetensors").unlink()
    replace(checkpoint / name, poison.read_bytes())
    said = refusal(checkpoint.parents[1], resume=True)
    assert str(checkpoint) in said and not ran.exists()


def test_what_is_kept_returns_bit_by_bit(tmp_path):
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


# --- damaged files ---


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "state.json"])
@pytest.mark.parametrize("how", ["gone", "cut", "one bit", "zeros"])
def test_a_damaged_piece_of_a_checkpoint_is_named(name, how, checkpoint):
    # accelerate's load_state ignores missing RNG files; a flipped bit of the weights was loaded and trained on.
    piece = checkpoint / name
    content = bytearray(piece.read_bytes())
    if how == "gone":
        piece.unlink()
    elif how == "cut":
        piece.write_bytes(content[:-1])
    elif how == "zeros":
        piece.write_bytes(bytes(len(content)))
    else:
        content[len(content) // 2] ^= 1
        piece.write_bytes(content)
    assert refusal(checkpoint.parents[1], resume=True) == f"{checkpoint}: missing or damaged: {name}"


@pytest.mark.parametrize(
    "content", [None, "", '{"script": "grpo"', "[]", '{"script": "grpo"}', '"\\u0000"', "\0" * 400]
)
def test_a_damaged_meta_file_is_one_line(content, checkpoint):
    if content is None:
        (checkpoint / "meta.json").unlink()
    else:
        (checkpoint / "meta.json").write_text(content)
    assert refusal(checkpoint.parents[1], resume=True) == f"{checkpoint}: missing or damaged: meta.json"


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize(
    "bad", [b"\0\0\0\0\n", b"not JSON\n", b'{"reward": 1}\n', b"7\n", b'{"step": "1"}\n', b"\xff\xfe\n"]
)
def test_a_bad_row_is_named(name, bad, checkpoint):
    file = checkpoint.parents[1] / name
    file.write_bytes(bad + file.read_bytes())
    said = refusal(checkpoint.parents[1], resume=True)
    assert said == f"{file}, line 1: damaged, not a row that a run wrote"


def test_a_last_line_that_is_cut_is_not_damage(checkpoint):
    folder = checkpoint.parents[1]
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + '{"step": 2, "rew')  # killed while writing
    start(folder, resume=True)
    assert (folder / "metrics.jsonl").read_text() == whole


# --- other data ---


def test_the_digest_sees_every_part_of_a_row():
    prompt = Prompt([1, 2], "1+1", "2", {"level": 3})
    others = [
        Prompt([1, 3], "1+1", "2", {"level": 3}),
        Prompt([1, 2], "1+2", "2", {"level": 3}),
        Prompt([1, 2], "1+1", "3", {"level": 3}),
        Prompt([1, 2], "1+1", "2", {"level": 4}),  # the user's reward functions see it
        Pair([1], [2], [3]),
        Pair([1], [2], [4]),
    ]
    digests = {PromptSampler([row], 0).digest for row in [prompt, *others]}
    assert len(digests) == 7
    assert PromptSampler([prompt, others[0]], 0).digest != PromptSampler([others[0], prompt], 0).digest
    image = Prompt([1], "1", "1", {"image": object()})  # no address of an object: it is another one in each process
    assert PromptSampler([image], 0).digest == PromptSampler([Prompt([1], "1", "1", {"image": object()})], 0).digest


@pytest.mark.parametrize("name", ["grpo", "dpo", "reward_model"])
def test_resume_on_other_data_with_as_many_rows_is_refused(name, tmp_path):
    source = ROOT / "common" / "tiny" / ("" if name == "grpo" else "pairs")
    rows = (source / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:8]))
    (tmp_path / "test.jsonl").write_text("".join(rows[8:12]))
    options = QUICK if name == "grpo" else ["--pairs_per_step", "4"]
    options = [*options, "--dataset", str(tmp_path), "--output_dir", str(tmp_path / "run"), "--save_every", "1"]
    script(name).main([*options, "--max_steps", "1"])
    (tmp_path / "train.jsonl").write_text("".join(rows[12:20]))
    with pytest.raises(InputError, match=r"other data, with as many rows \(8\)"):
        script(name).main([*options, "--max_steps", "2", "--resume"])


# --- whose folder it is ---


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_run_holds_is_refused(resume, checkpoint, tmp_path):
    folder = checkpoint.parents[1] if resume else tmp_path / "new"
    folder.mkdir(exist_ok=True)
    with filelock.FileLock(folder / "lock"):  # what a run in another process does
        assert refusal(folder, resume=resume) == f"--output_dir {folder}: another run is at work in it"
    start(folder, resume=resume)


def test_the_process_that_trains_holds_the_lock_until_its_run_ends(tmp_path):
    # Not the launcher: it can be killed while its processes train on.
    def is_free():
        try:
            with filelock.FileLock(tmp_path / "lock", blocking=False):
                return True
        except filelock.Timeout:
            return False

    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    assert not is_free()
    close(run.accelerator)
    assert is_free()
    run, *_ = start(tmp_path, resume=True)
    assert not is_free()  # and ends with an exception, before close():
    start(tmp_path, resume=True)


def test_two_starts_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = types.SimpleNamespace(now=lambda: datetime.datetime(2030, 1, 2, 3, 4, 5))
    monkeypatch.setattr(runs, "datetime", types.SimpleNamespace(datetime=now))
    folders = [start(None)[0].folder for _ in range(3)]
    assert list(map(str, folders)) == [f"runs/grpo-20300102-030405{end}" for end in ("", "-2", "-3")]


def test_a_refusal_of_the_first_process_reaches_the_others(monkeypatch):
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda objects: ["the first one's message"])
    with (
        pytest.raises(InputError, match="the first one's message"),
        agreed(types.SimpleNamespace(is_main_process=False)),
    ):
        pass


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "pairs-round-2.jsonl", "model", "checkpoints"])
def test_what_no_run_wrote_is_not_overwritten(name, resume, tmp_path):
    if "." in name:
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    assert f"is not the folder of a run and holds {name}" in refusal(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == [name]  # not even a lock


def test_only_its_own_checkpoints_are_chosen_and_deleted(tmp_path):
    run, optimizer, _ = start(tmp_path, keep_checkpoints=1)
    advance(run, optimizer)
    folder = tmp_path / "checkpoints"
    others = ["step-00000001-best", "step-00000009-copy", "step-9", "best", "step-00000000"]
    for name in others[:-1]:
        shutil.copytree(folder / "step-00000001", folder / name)
    (folder / others[-1]).mkdir()  # without meta.json
    (folder / "step-00000008").write_text("a file")
    advance(run, optimizer)
    advance(run, optimizer)
    assert {path.name for path in folder.iterdir()} == {*others, "step-00000008", "step-00000003"}
    assert start(tmp_path, resume=True)[0].step == 3


# --- what cannot be written ---


def test_a_name_that_is_too_long_is_one_line(tmp_path):
    with pytest.raises(InputError, match="File name too long"):
        start(tmp_path / ("x" * 300))


@pytest.mark.parametrize("where", ["the folder", "the lock"])
def test_a_folder_without_permission_is_one_line(where, tmp_path, monkeypatch):
    def denied(*arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    monkeypatch.setattr(*(("pathlib.Path.mkdir", denied) if where == "the folder" else ("os.open", denied)))
    with pytest.raises(InputError, match="the folder of the run cannot be written: .*Permission denied") as error:
        start(tmp_path / "run")
    assert "\n" not in str(error.value)


def test_a_full_disk_while_a_row_is_written_is_one_line(tmp_path):
    run, optimizer, _ = start(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match="metrics.jsonl cannot be written: .*No space left on device"):
        advance(run, optimizer)


def test_a_full_disk_while_a_checkpoint_is_written_leaves_the_last_one(tmp_path, monkeypatch):
    run, optimizer, _ = start(tmp_path)
    advance(run, optimizer)
    monkeypatch.setattr(torch, "save", no_room)
    with pytest.raises(InputError, match="step-00000002 cannot be written: .*No space left"):
        advance(run, optimizer)
    monkeypatch.undo()
    assert start(tmp_path, resume=True)[0].step == 1


@pytest.fixture(scope="module")
def bfloat16_model(tmp_path_factory):
    """The embedded model in bfloat16: trained in float32, and converted for model/ alone."""
    folder = tmp_path_factory.mktemp("bfloat16")
    AutoModelForCausalLM.from_pretrained(ROOT / "common" / "tiny").to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "common" / "tiny").save_pretrained(folder)
    return ["--model_name_or_path", folder]


def ends_with(error):
    """In the place of transformers' save_pretrained: a part of the files, then `error`."""

    def save_pretrained(self, folder, **options):
        os.makedirs(folder)
        (folder / "config.json").write_text("{}")
        raise error

    return save_pretrained


def no_room(*arguments, **options):
    """In the place of torch.save."""
    raise FULL


def test_a_training_whose_model_cannot_be_written_is_kept(tmp_path, monkeypatch, bfloat16_model, capsys):
    # The default is no checkpoint: a full disk after hours of training lost all of it.
    train(tmp_path / "a", *bfloat16_model)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(FULL))
    with pytest.raises(InputError, match="model cannot be written: .*No space left on device; the training is kept"):
        train(tmp_path / "b", *bfloat16_model)
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "b").iterdir()} == {
        "args.json", "metrics.jsonl", "samples.jsonl", "lock", "checkpoints"
    }  # fmt: skip
    assert "pass@1 before" not in capsys.readouterr().out.splitlines()[-1]
    train(tmp_path / "b", *bfloat16_model, "--resume")
    assert "pass@1 before" in capsys.readouterr().out.splitlines()[-1]
    assert metric_rows(tmp_path / "a") == metric_rows(tmp_path / "b")
    a, b = (load_file(tmp_path / x / "model" / "model.safetensors") for x in "ab")
    assert a["model.norm.weight"].dtype == torch.bfloat16 and all(torch.equal(a[key], b[key]) for key in a)


def test_a_folder_without_model_and_checkpoint_never_counts_as_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(FULL))
    monkeypatch.setattr(torch, "save", no_room)
    with pytest.raises(InputError) as error:
        train(tmp_path)
    said = str(error.value)
    assert "model cannot be written" in said and "step-00000002 cannot be written" in said and "\n" not in said
    assert said.endswith("the steps since the last checkpoint are lost")
    monkeypatch.undo()
    train(tmp_path, "--resume", "--max_steps", 0)
    assert "starting at step 0" in capsys.readouterr().out


def test_a_crash_while_the_model_is_written_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", ends_with(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert not (tmp_path / "model").exists()
