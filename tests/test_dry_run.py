"""tools/dry_run.py: its estimate is close to measurements, and needs no weights, network or GPU."""

import functools

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig

import dpo
import dry_run
import grpo
import ppo
import reward_model
from dry_run import Job, Terms
from common.run import Exit
from measured import IDS, estimated_step, measured_step, meta_sizes, random_policy, shape
from testbed import script

TINY = shape(128, 3, 4, 2, 352, 512, True)
SMALL = dict(prompts_per_step=2, group_size=4, micro_batch_size=8, max_prompt_tokens=64, max_new_tokens=48)
# From the config.json of Qwen/Qwen2.5-0.5B, 1.5B and 7B.
MODELS = {
    "0.5B": shape(896, 24, 14, 2, 4864, 151936, True),
    "1.5B": shape(1536, 28, 12, 2, 8960, 151936, True),
    "7B": shape(3584, 28, 28, 4, 18944, 152064, False),
}


def checkpoint(folder, **sizes):
    """A folder with the config.json of a Qwen2, and no weights."""
    AutoConfig.for_model("qwen2", **sizes, **IDS).save_pretrained(folder)
    return str(folder)


def printed(capsys, name, *options):
    """Return the lines that the program prints, and its table as {phase: {term: GiB}}."""
    dry_run.main([f"{name}.py", *map(str, options)])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("") + 1
    phases = lines[start].split()
    rows = {line[:18].strip(): line[18:].split() for line in lines[start + 1 : lines.index("", start)]}
    return lines, {phase: {term: float(row[i]) for term, row in rows.items()} for i, phase in enumerate(phases)}


@pytest.mark.parametrize(
    "options, bf16",
    [
        (dict(max_prompt_tokens=320, max_new_tokens=16, prompts_per_step=4, kl_coef=0.0), False),
        (dict(max_prompt_tokens=320, max_new_tokens=16, group_size=8, kl_coef=0.0, fast=True), False),
        (dict(max_new_tokens=24, gradient_checkpointing=True, dtype="bfloat16"), False),
        (dict(lora_rank=16, prompts_per_step=4), True),
    ],
    ids=["long prompts", "fast", "bfloat16, checkpointing", "LoRA, mixed precision"],
)
def test_the_estimate_is_near_measurements(options, bf16):
    if options.get("lora_rank"):
        pytest.importorskip("peft")
    args = grpo.Args(**SMALL | options)
    measured = measured_step(args, TINY, bf16)
    assert estimated_step(args, TINY, bf16) == {phase: pytest.approx(x, rel=0.15) for phase, x in measured.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_a_layer_saves_what_is_computed(dtype):
    """To the byte: what autograd saves in the second of three layers, weights left out."""
    args = grpo.Args(dtype="bfloat16" if dtype == "bfloat16" else "float32")
    lm = random_policy(args, TINY, Accelerator(cpu=True))
    layer, inside, found = lm.base_model.layers[1], [], {}
    layer.register_forward_pre_hook(lambda *_: inside.append(True))
    layer.register_forward_hook(lambda *_: inside.clear())

    def pack(tensor):
        if inside:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids, mask = torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
    mask[0, 0] = 0
    casts = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casts:
        lm.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
    weights = {tensor.untyped_storage().data_ptr() for tensor in lm.parameters()}
    shapes = {tuple(tensor.shape[::-1]) for tensor in layer.parameters()}  # bfloat16 copies are saved transposed
    shared = {(1, 1, 12, 32)}  # cosines and sines of the positions
    kept = [tensor for where, tensor in found.items() if where not in weights]
    kept = [tensor for tensor in kept if tuple(tensor.shape) not in shapes | shared]
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept)
    job = Job(bf16=dtype == "autocast")
    assert total == Terms(meta_sizes(TINY), args, job).layer_activations(2, 12, 12)


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "dpo", "reward_model"])
def test_config_json_alone_is_enough(name, capsys, tmp_path):
    folder = checkpoint(tmp_path / "7B", **MODELS["7B"])
    lines, table = printed(capsys, name, "--model_name_or_path", folder)
    weights = 7_615_616_512 - (152064 * 3584 if name == "reward_model" else 0)
    assert f"{weights:,} weights, 28 layers of width 3584" in lines[0]
    assert ("rollout" in table) == (name not in ("dpo", "reward_model"))
    assert ("reference" in table["backward"]) == bool(getattr(script(name).Args(), "kl_coef", 0))  # grpo.py
    backbone = weights - 152064 * 3584  # ppo: the critic's
    both = weights + (backbone if name == "ppo" else 0)
    assert table["backward"]["weights"] == pytest.approx(both * 4 / 2**30, abs=0.01)
    assert table["optimizer"]["AdamW"] == pytest.approx(both * 8 / 2**30, abs=0.01)


def test_options_change_the_estimate():
    sizes = meta_sizes(MODELS["0.5B"])
    base = dict(max_prompt_tokens=256, max_new_tokens=512, micro_batch_size=16, eval_prompts=32)

    def terms(job=None, phase="backward", **options):
        return dry_run.estimate(grpo.Args(**base | options), job or Job(), sizes)[phase]

    plain = terms()
    assert terms(kl_coef=0.0)["reference"] == 0 and plain["reference"] == plain["weights"]
    assert terms(gradient_checkpointing=True)["activations"] < plain["activations"] / 5
    assert terms(micro_batch_size=8)["activations"] == pytest.approx(plain["activations"] / 2, rel=0.01)
    assert plain["activations"] - terms(fast=True)["activations"] > 4 * 16 * 512 * 151936  # logits; prompts once
    assert terms(micro_batch_size=256)["gradients"] == 0 < plain["gradients"]  # one forward: no gradients yet
    assert terms(dtype="bfloat16")["weights"] == plain["weights"] / 2
    sdpa, eager = (Terms(sizes, grpo.Args(attn_implementation=x), Job()) for x in ("sdpa", "eager"))
    more = eager.layer_activations(2, 3, 5) - sdpa.layer_activations(2, 3, 5)
    assert more == 2 * 3 * 5 * (14 - 1) * 4  # the probabilities of 14 heads, less the mask
    rollout = terms(phase="rollout")
    assert terms(phase="rollout", generate_batch_size=64)["key-value cache"] == rollout["key-value cache"] / 4
    assert terms(Job(8, "DDP"), "rollout")["key-value cache"] == rollout["key-value cache"] / 8
    assert terms(Job(8, "DDP"))["gradient buckets"] == plain["weights"]
    at_the_end = terms(Job(8, "DDP"), "optimizer")  # then gradients are views of the buckets
    assert at_the_end["gradient buckets"] == plain["weights"] and not at_the_end["gradients"]
    sharded = terms(Job(8, "FSDP2", bf16=True))
    assert sharded["AdamW"] == plain["AdamW"] / 8 and sharded["reference"] == plain["weights"] / 2
    assert terms(Job(8, "FSDP2", bf16=True), "rollout")["copies of weights"] == plain["weights"] / 2
    adapters = terms(lora_rank=8)
    assert adapters["reference"] == 0 and adapters["AdamW"] == 2 * adapters["gradients"]
    number, size = Terms(sizes, grpo.Args(lora_rank=8), Job()).trained
    assert adapters["AdamW"] == number * 2 * size == 8 * 24 * (5 * 896 + 2 * 128 + 896 + 3 * (896 + 4864)) * 8


def test_updates_of_ppo_are_plain():
    """docs/run.md: in ppo.py --fast only samples faster."""
    sizes = meta_sizes(TINY)
    fast, plain = (dry_run.estimate(ppo.Args(fast=x), Job(), sizes, sizes) for x in (True, False))
    assert fast["evaluation"] != plain["evaluation"]  # eight completions of a prompt
    assert (fast["forward"], fast["backward"]) == (plain["forward"], plain["backward"])


def test_pairs_and_evaluations():
    args = reward_model.Args(max_length=100, micro_batch_size=7, pairs_per_step=16, fast=True)
    sizes = meta_sizes(TINY)
    assert dry_run.update_shape(args, Job(), sizes) == (6, 3, 1, 99, 6)  # pairs are not split
    assert dry_run.update_shape(args, Job(8, "DDP"), sizes) == (4, 2, 1, 99, 1)
    assert dry_run.update_shape(args, Job(8, "FSDP2"), sizes).prompts == 0
    assert dry_run.update_shape(dpo.Args(max_length=99), Job(), sizes)[2:4] == (1, 98)
    assert dry_run.update_shape(dpo.Args(micro_batch_size=1), Job(), sizes).rows == 2  # a pair
    compute = functools.partial(dry_run.estimate, sizes=sizes)
    tips = dict(dry_run.less_memory(args, Job(), compute, 1e12))
    assert tips and "--lora_rank 16" not in tips  # which reward_model.py refuses
    assert dry_run.update_shape(grpo.Args(), Job(), sizes).prompts == 0
    all_at_once = dict(generate_batch_size=0)
    assert dry_run.generate_calls(grpo.Args(eval_prompts=0, **all_at_once), Job()) == {"rollout": (256, 8)}
    calls = dry_run.generate_calls(grpo.Args(eval_prompts=100, **all_at_once), Job(8, "DDP"))
    assert calls == {"rollout": (32, 8), "evaluation": (104, 8)}
    calls = dry_run.generate_calls(grpo.Args(eval_prompts=0, generate_batch_size=20), Job())
    assert calls == {"rollout": (16, 8), "evaluation": (16, 8)}
    assert dry_run.generate_calls(dpo.Args(eval_prompts=4), Job()) == {"evaluation": (32, 8)}


def test_three_options_lower_the_peak(capsys, tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, **MODELS["1.5B"])
    lines, table = printed(capsys, "grpo", "--model_name_or_path", folder, "--eval_prompts", 32)
    first = next(i for i, line in enumerate(lines) if line.startswith("peak:"))
    assert lines[first].endswith(", in backward")
    tips = [line.split(" GiB with ") for line in lines[first + 1 : first + 4]]
    values = [float(value) for value, _ in tips]
    assert values == sorted(values) and values[-1] < max(terms["all"] for terms in table.values())
    for value, option in tips:  # each is what a dry run with that option prints
        if option.startswith("accelerate launch"):
            monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
            option = ""
        _, other = printed(capsys, "grpo", "--model_name_or_path", folder, "--eval_prompts", 32, *option.split())
        assert max(terms["all"] for terms in other.values()) == pytest.approx(float(value), abs=0.06)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)


def test_the_micro_batch_that_fits(capsys, tmp_path):
    folder, words = checkpoint(tmp_path, **MODELS["1.5B"]), ["--max_new_tokens", 256, "--kl_coef", 0]
    lines, _ = printed(capsys, "grpo", "--model_name_or_path", folder, *words)
    (line,) = [line for line in lines if line.startswith("largest --micro_batch_size")]
    found = dict(part.rsplit(" ", 1) for part in line.partition(": ")[2].split(", "))
    assert found["24 GB"] == "none" and int(found["80 GB"]) < int(found["141 GB"]) < 512
    for factor in (1, 2):
        size = factor * int(found["80 GB"])
        _, table = printed(capsys, "grpo", "--model_name_or_path", folder, *words, "--micro_batch_size", size)
        assert (max(terms["all"] for terms in table.values()) < 0.9 * 80) == (factor == 1)


def test_tips_are_supported_and_help():
    def tips(size, job, **options):
        compute = functools.partial(dry_run.estimate, sizes=meta_sizes(MODELS[size]))
        args = grpo.Args(**options)
        peak = max(sum(terms.values()) for terms in compute(args, job).values())
        return dict(dry_run.less_memory(args, job, compute, peak))

    low = dict(max_new_tokens=64, eval_prompts=32, gradient_checkpointing=True, micro_batch_size=8)
    for strategy in ("DDP", "FSDP2"):
        found = tips("7B", Job(2, strategy, bf16=True), **low)
        assert ("--lora_rank 16" in found) == ("configs/fsdp2.yaml" in found) == (strategy == "DDP")
    assert "--dtype bfloat16" in tips("7B", Job(bf16=True), lora_rank=16, **low)
    small = dict(max_new_tokens=512, eval_prompts=1, generate_batch_size=8, micro_batch_size=2, kl_coef=0)
    mixed = "accelerate launch --mixed_precision bf16"
    assert mixed in tips("0.5B", Job(), **small) and mixed not in tips("0.5B", Job(bf16=True), **small)


def test_reward_model_and_critic_are_counted(capsys, tmp_path):
    small, tiny = checkpoint(tmp_path / "small", **MODELS["0.5B"]), checkpoint(tmp_path / "tiny", **TINY)
    backbone = 494_032_768 * 4 / 2**30  # the embedding is tied
    reward = ["--reward", f"rm:{small}"]
    for options, backbones in (([], 2), (reward, 3), ([*reward, "--critic_path", tiny], 2)):
        _, table = printed(capsys, "ppo", "--model_name_or_path", small, *options)
        assert table["optimizer"]["weights"] == pytest.approx(backbones * backbone, abs=0.02)


@pytest.mark.parametrize(
    "environment, job",
    [
        ({}, Job()),
        ({"WORLD_SIZE": "8", "ACCELERATE_MIXED_PRECISION": "bf16"}, Job(8, "DDP", True)),
        ({"WORLD_SIZE": "4", "ACCELERATE_USE_FSDP": "true"}, Job(4, "FSDP2")),
    ],
)
def test_launcher_options_count(environment, job, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert dry_run.launched_job() == job
    monkeypatch.setenv("RANK", "1")
    dry_run.main(["grpo.py"])
    assert capsys.readouterr().out == ""  # only the first process prints


@pytest.mark.parametrize(
    "words, word",
    [
        (["grpo.py", "--model_name_or_path", "nobody/nothing"], "folder that holds its config.json"),
        (["json"], "json is not a script"),
    ],
)
def test_errors_print_one_line(words, word):
    with pytest.raises(Exit) as error:
        dry_run.main(words)
    assert "\n" not in str(error.value) and word in str(error.value)
