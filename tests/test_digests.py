"""Digests in common/harness/checkpoints.py: a resume with another model or reward is refused, and what is read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import grpo
from common.errors import InputError
from common.harness.checkpoints import add_digests, digest
from common.rewards import load_rewards
from small_models import copy_of_embedded, hub_snapshot
from small_run import advance, refusal, start
from testbed import script


def edit_json(name, **values):
    def edit(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")

    return edit


def edit_weights(folder):
    """Change one weight in the middle of a tensor, as another training would."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][96, 32] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def leave(folder):
    pass


ROPE = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
REWARD = "def short(completions, **columns):\n    return [{} for _ in completions]\n"


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """A run of a linear model with these options of a script, what may have changed since, and a resume of the script,
    which stops where it would load the first thing."""

    class LoadsTheTokenizer(Exception):
        pass

    def stop(args):
        raise LoadsTheTokenizer

    def resume(name, options, change=lambda: None, *more):
        run, optimizer, _ = start(tmp_path / "run", script(name), **options)
        advance(run, optimizer)
        run.close()
        change()
        values = [x for key, value in options.items() for x in (f"--{key}", *(value if key == "reward" else [value]))]
        monkeypatch.setattr(script(name), "load_tokenizer", stop)
        try:
            script(name).main(["--output_dir", str(tmp_path / "run"), "--resume", *map(str, [*values, *more])])
        except LoadsTheTokenizer:
            return None
        except InputError as error:
            return str(error)

    return resume


@pytest.mark.parametrize(
    "option, edit, changed",
    [
        ("model_name_or_path", leave, None),
        ("model_name_or_path", edit_weights, "model.safetensors"),  # the reference's, and the base of adapters
        ("model_name_or_path", edit_json("config.json", **ROPE), "config.json"),
        ("model_name_or_path", edit_json("generation_config.json", eos_token_id=[1, 2]), "generation_config.json"),
        ("model_name_or_path", edit_json("tokenizer.json", version="2"), "tokenizer.json"),
        (
            "model_name_or_path",
            lambda folder: (folder / "chat_template.jinja").write_text("x", encoding="utf-8"),
            "chat_template.jinja",
        ),
        ("reward_model_path", edit_weights, "model.safetensors"),
        ("critic_path", edit_weights, "model.safetensors"),
    ],
)
def test_a_resume_with_another_model_is_refused_before_it_is_loaded(option, edit, changed, resumed, tmp_path):
    # Only options and data were compared: the run went on from weights of one model with what another one says.
    folder = copy_of_embedded(tmp_path / "model")
    said = resumed("ppo", {"lora_rank": 4, option: str(folder)}, lambda: edit(folder), "--reward_changed")
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert said == changed or f"{step} is of another run: --{option} {folder}/{changed} was " in said


@pytest.mark.parametrize("how", ["edited", "elsewhere", "gone", "module", "accepted"])
def test_a_resume_with_another_reward_file_is_refused_unless_that_is_said(how, resumed, tmp_path, monkeypatch):
    name = f"reward_{how}"
    for folder in ("here", "there", "nowhere"):
        (tmp_path / folder).mkdir()
    for folder, value in (("here", 1.0), ("there", 2.0)):
        (tmp_path / folder / f"{name}.py").write_text(REWARD.format(value), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "here")
    source = name if how == "module" else f"{name}.py"
    load_rewards(grpo.Args(reward=[f"{source}:short"]))  # as a script does before it makes its run

    def change():
        if how in ("elsewhere", "gone"):  # a relative path names another file, or none
            monkeypatch.chdir(tmp_path / ("there" if how == "elsewhere" else "nowhere"))
        else:
            (tmp_path / "here" / f"{name}.py").write_text(REWARD.format(3.0), encoding="utf-8")

    options = {"reward": ["format", f"{source}:short"]}
    said = resumed("grpo", options, change, *(["--reward_changed"] if how == "accepted" else []))
    if how == "gone":
        assert said == f"--reward '{source}:short': there is no file {source}"
    elif how == "accepted":
        assert said is None
    else:
        assert f"is of another run: --reward {source} was " in said
        assert said.endswith("; --reward_changed accepts another reward")


def test_a_file_of_a_model_that_is_gone_is_noticed(tmp_path):
    model = copy_of_embedded(tmp_path / "model")
    folder = tmp_path / "run"
    advance(*start(folder, model_name_or_path=str(model))[:2])
    meta = folder / "checkpoints" / "step-00000001" / "meta.json"
    values = json.loads(meta.read_text(encoding="utf-8"))
    names = {name.partition(f"--model_name_or_path {model}/")[2] for name in values["facts"]} - {""}
    configs = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert names == configs | {"model.safetensors", "tokenizer.json"}
    (model / "generation_config.json").unlink()
    said = refusal(folder, model_name_or_path=str(model), resume=True)
    assert f"step-00000001 is of another run: --model_name_or_path {model}/generation_config.json was " in said
    assert said.endswith(", is None")


def test_of_a_hub_id_the_snapshot_is_digested_once_it_is_there(tmp_path, monkeypatch):
    # Offline, and after a look that had loaded no more than the configuration, as --dry_run does.
    snapshot = copy_of_embedded(hub_snapshot(tmp_path, monkeypatch))
    (snapshot / "model.safetensors").rename(tmp_path / "later")
    args, found = grpo.Args(model_name_or_path="some/model"), {}
    add_digests(found, args)
    first = dict(found)
    assert "--model_name_or_path some/model/config.json" in first
    (tmp_path / "later").rename(snapshot / "model.safetensors")
    edit_json("config.json", **ROPE)(snapshot)  # by now the first one has been loaded
    add_digests(found, args)
    assert found.keys() - first.keys() == {"--model_name_or_path some/model/model.safetensors"}
    assert first.items() <= found.items()


def test_a_digest_reads_the_pieces_of_each_tensor_and_no_more(tmp_path):
    kib, path = 1024, tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(1024 * kib, dtype=torch.uint8), "b": torch.zeros(3, dtype=torch.uint8)}
    save_file(tensors, path)
    content = path.read_bytes()
    length = len(content)
    start = length - 1024 * kib - 3

    def after(place):
        path.write_bytes(content[:place] + b"\1" + content[place + 1 :])
        return digest(path, in_parts=True)

    whole = after(length)
    path.write_bytes(content)
    same = digest(path, in_parts=True)
    assert whole != same  # one byte longer
    seen = [0, 64 * kib - 1, 481 * kib, 512 * kib, 543 * kib, 961 * kib, 1024 * kib - 1]
    assert all(after(start + place) != same for place in [*seen, length - start - 1])
    assert {after(start + place) for place in (65 * kib, 256 * kib, 479 * kib, 545 * kib, 958 * kib)} == {same}
    assert after(20) != same  # the header
    path.write_bytes(b"\xff" * 100)
    assert digest(path, in_parts=True) is None and digest(tmp_path / "none.bin", in_parts=True) is None
    path.rename(tmp_path / "model.bin")
    assert digest(tmp_path / "model.bin", in_parts=True)
