"""Shared test helpers: the embedded model, ragged tables as tensors, a hand-made batch."""

import copy
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import torch
from accelerate import Accelerator

from common.load import load_policy, load_prompts, load_reference, load_tokenizer
from common.masked import Means, completion_mask

ROOT = pathlib.Path(__file__).resolve().parents[2]
ONLY = os.environ.get("ONLY_SCRIPTS", "").split()  # from `pytest --script`; empty for all scripts
SHIPPED = ("grpo", "dr_grpo", "dapo", "gspo", "dcpo", "ppo", "dpo", "reward_model")  # those with documentation
UPDATE = ("accelerator", "model", "reference", "optimizer", "batch", "args", "metrics")


def found():
    """Return {script: arguments of its `compute_advantages`, or ""} of all files with a `class Args`."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.py"))}
    scripts = {name: source for name, source in sources.items() if re.search(r"^class Args\b", source, re.MULTILINE)}
    scripts = {name: source for name, source in scripts.items() if name in (ONLY or SHIPPED)}  # no mine.py
    pattern = re.compile(r"^def compute_advantages\(([^)]*)\)", re.MULTILINE)
    return {name: "".join(pattern.findall(source)) for name, source in scripts.items()}


ALL = sorted(found(), key=lambda name: (name != "grpo", name))
FAMILY = [name for name in ALL if found()[name].startswith("rewards")]  # advantages by groups
SCRIPTS = [name for name in ALL if found()[name]]
READS_PAIRS = [
    name for name in ALL if re.search(r"\b(load|read)_pairs", (ROOT / f"{name}.py").read_text(encoding="utf-8"))
]
PAIRS = [name for name in READS_PAIRS if not found()[name]]  # a script may also make its pairs
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


def script(name):
    return importlib.import_module(name)


def can_be_called(function, *names):
    """Return whether these are its first arguments, and all others have defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    first, rest = parameters[: len(names)], parameters[len(names) :]
    has_default = all(parameter.default is not parameter.empty for parameter in rest)
    return has_default and [parameter.name for parameter in first] == list(names)


def knows_advantages(module):
    """Return whether `compute_advantages` can be called outside `main`: with rewards, and perhaps the prompts' past."""
    own = getattr(module, "compute_advantages", None)
    return own is not None and any(can_be_called(own, "rewards", "args", *more) for more in ((), ("past",)))


def refuse(function, told):
    """Skip a test that cannot call a function of a script."""
    names = ", ".join(inspect.signature(function).parameters)
    pytest.skip(f"{function.__name__}({names}): {told}")


def section_of_metrics(title):
    """Return the section of docs/watch.md on the metrics of one script, or `Every script`."""
    text = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    return text.partition(f"\n### {title}\n")[2].partition("\n### ")[0]


def named_metrics(section):
    """Return the metrics in the first column of a section's tables; a row may have several."""
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\S+?)`", cell)}


def ragged(rows, dtype=torch.float64, fill=0.0):
    """Return a ragged table as a padded tensor (R, T), and its mask."""
    width = max(map(len, rows))
    values = torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return values, mask


def b1(dtype=torch.float64):
    """A group of four completions: old, new (requires grad) and reference log-probs, and the mask."""
    old = [[-0.5, -1.2, -0.3], [-2.0, -0.1, -0.7, -1.5, -0.4], [-0.9, -3.0], [-0.05, -0.6, -1.1, -0.2]]
    new = [[-0.2, -1.3, -0.35], [-2.5, -0.12, -0.4, -1.5, -0.9], [-0.3, -1.5], [-0.04, -0.9, -1.0, -0.21]]
    ref = [[-0.6, -1.1, -0.3], [-1.8, -0.2, -0.7, -1.4, -0.5], [-1.0, -2.5], [-0.1, -0.6, -1.2, -0.2]]
    old, mask = ragged(old, dtype)
    return old, ragged(new, dtype)[0].requires_grad_(), ragged(ref, dtype)[0], mask


def totals_of(mask, group_size):
    """Return the totals of an optimizer step that consists of the rows of `mask` (R, T)."""
    return {"tokens": int(mask.sum()), "rows": len(mask), "prompts": len(mask) // group_size}


def args_of(module, **options):
    """Return a script's Args, with those of these values for which it has an option."""
    own = module.Args.__dataclass_fields__
    return module.Args(**{option: value for option, value in options.items() if option in own})


def embedded_pairs(module):
    """Return the options of a script that train and evaluate on the embedded pairs."""
    return args_of(module, dataset="embedded-pairs", eval_dataset="embedded-pairs")


@functools.cache
def loaded(name, options):
    args = args_of(script(name), **dict(options))
    return args, *load_policy(args, Accelerator(cpu=True))


def embedded(name="grpo", **options):
    """(script, args, tokenizer, lm) with the embedded model; a test may change all of it."""
    return script(name), *copy.deepcopy(loaded(name, tuple(options.items())))


@functools.cache
def embedded_prompts():
    args = script(SCRIPTS[0]).Args()
    return load_prompts(args, load_tokenizer(args.model_name_or_path))[0]


def advantages_of(module, rewards, args):
    """Return the script's advantages for a first rollout; some scripts also take and return the prompts' past."""
    own = module.compute_advantages
    if not knows_advantages(module):
        refuse(own, "(rewards, args) and (rewards, args, past) can be asked without the script's `main`")
    if can_be_called(own, "rewards", "args"):
        return own(rewards, args)
    past = torch.zeros(len(rewards) // args.group_size, 3, dtype=torch.float64)
    return own(rewards, args, past)[0]


def keeps_to_groups(module):
    """Return whether the advantages of a group do not depend on the rewards of other groups."""
    if not knows_advantages(module):
        return True
    rewards, args = torch.tensor([0.0, 1, 1, 1]).double(), args_of(module, group_size=2)
    alone = torch.cat([advantages_of(module, half, args) for half in rewards.split(2)])
    return torch.equal(advantages_of(module, rewards, args), alone)


def learns_from_rewards(module, args):
    """Return whether the script's advantages are made of rewards, and not of the log-probs of a teacher."""
    if not knows_advantages(module):
        return True
    rewards = torch.tensor([0.0, 1.0]).repeat(args.group_size)  # in groups that differ within
    return bool(advantages_of(module, rewards, args).any())


def needed(module):
    """Return options without which a run of a script would not start, or would not train its policy at once."""
    values = {"teacher": "embedded", "critic_warmup_steps": "0"}
    names = [name for name in values if name in module.Args.__dataclass_fields__]
    return [word for name in names for word in (f"--{name}", values[name])]


def left_padded(rows, pad_token):
    """Return lists of token ids as a tensor (R, P), padded on the left, and its mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_token] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])


def hand_made_batch(tokenizer, args, groups=8, group_size=4):
    """A batch of real problems with completions of unequal lengths, right and wrong, some of them truncated."""
    prompts = embedded_prompts()[:groups]
    texts = []
    for i, prompt in enumerate(prompts):
        solution = prompt.columns["answer"]
        texts += [
            solution,
            f"#### {i}",
            solution[: 5 + 2 * i] + "?" * (i % 3),
            f"{i}+{i}={2 * i}\n#### {prompt.gold}",
        ]
    stop = tokenizer.eos_token_id
    rows = [tokenizer(text).input_ids + ([] if i % 5 == 4 else [stop]) for i, text in enumerate(texts)]
    width = max(map(len, rows))
    completions = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    mask = torch.arange(width)[None] < lengths
    ids, prompt_mask = left_padded([prompt.ids for prompt in prompts], tokenizer.pad_token_id)
    rewards = torch.rand(groups, group_size, generator=torch.Generator().manual_seed(1)).round(decimals=1).view(-1)
    batch = {
        "prompts": ids.repeat_interleave(group_size, dim=0),
        "prompt_mask": prompt_mask.repeat_interleave(group_size, dim=0),
        "completions": completions,
        "completion_mask": mask,
        "truncated": completion_mask(completions, [stop])[1],
        "loss_mask": mask,
    }
    return batch, rewards


def fill(module, batch, rewards, args):
    """Return the batch that the script's `update` expects: rewards, and advantages, which ppo computes itself.

    If `compute_advantages` has unknown arguments, the script's own `main` computes them, from its own rewards.
    """
    batch = batch | {"rewards": rewards}
    if hasattr(module, "load_critic"):
        return batch
    if knows_advantages(module):
        advantages = advantages_of(module, rewards, args)
        if not advantages.any():  # the script takes them from a column that this batch lacks
            groups = rewards.view(-1, args.group_size)
            advantages = (groups - groups.mean(dim=1, keepdim=True)).view(-1, 1)
        return batch | {"advantages": advantages}
    return batch_of_main(module, batch, args)


@functools.cache
def made_problem(name, groups, options):
    module, args, tokenizer, lm = embedded(name, **dict(options))
    batch, rewards = hand_made_batch(tokenizer, args, groups)
    reference = load_reference(lm, args, Accelerator(cpu=True))
    if reference is not None:
        with torch.no_grad():  # different from the policy, or the KL and its gradient would be 0
            for parameter in reference.parameters():
                parameter.mul_(1.05)
    return args, lm, reference, fill(module, batch, rewards, args)


def problem(name, groups=8, **options):
    """Return (module, args, lm, reference, batch) for an update on a hand-made batch; a test may change all of it."""
    sizes = dict(group_size=4, prompts_per_step=groups, num_minibatches=1)
    return script(name), *copy.deepcopy(made_problem(name, groups, tuple((sizes | options).items())))


class Reached(Exception):
    """Raised when `main` reaches the update."""


def batch_of_main(module, batch, args):
    """Return the batch that `main` passes to `update`, without sampling."""
    groups = len(batch["completions"]) // args.group_size
    sizes = dict(group_size=args.group_size, prompts_per_step=groups, num_minibatches=1, max_steps=1, eval_every=0)
    sizes |= dict(eval_prompts=1, eval_samples=1, eval_k=1, reward="testbed:varied", overlong="none")
    rollout, caught = module.rollout, {}

    def of_this_batch(lm, tokenizer, prompts, n, *rest):
        columns = {name: values for name, values in batch.items() if name not in ("rewards", "loss_mask")}
        return columns if n == args.group_size else rollout(lm, tokenizer, prompts, n, *rest)

    def reached(*inputs, **named):
        caught.update(inspect.signature(update).bind(*inputs, **named).arguments)
        raise Reached

    update, module.update, module.rollout = module.update, reached, of_this_batch
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = needed(module)
            words += [f"--{name}={value}" for name, value in sizes.items() if name in module.Args.__dataclass_fields__]
            module.main([*words, f"--output_dir={folder}"])
    except Reached:
        return caught["batch"]
    finally:
        module.update, module.rollout = update, rollout
    refuse(module.main, "it has to call `rollout` and then `update`, each by its name in the script")


def alternating(completions, **columns):
    """Return rewards of 0 and 1, both in every group."""
    return [float(i % 2) for i in range(len(completions))]


def varied(completions, **columns):
    """Return rewards that differ within every group."""
    return [len(text) % 5 + i % 4 for i, text in enumerate(completions)]


def trainable(module, args, lm):
    """Return the model that `main` prepares, and the optimizer's parameters; a critic gets a random head."""
    if not can_be_called(module.update, *UPDATE):
        refuse(module.update, f"the suite calls it with {', '.join(UPDATE)} alone: give the others a default")
    if not hasattr(module, "load_critic"):
        return lm, lm.parameters()
    model = module.ActorCritic(lm, *module.load_critic(args, lm, load_tokenizer(args.model_name_or_path)))
    with torch.no_grad():
        model.head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    policy, critic = [], []
    for name, weight in model.named_parameters():
        (policy if name.startswith("lm.") else critic).append(weight)
    return model, [{"params": policy}, {"params": critic}]


class GradientRecorder:
    """A mock optimizer that records the gradients of each step and changes no weight."""

    def __init__(self, model, groups):
        groups = list(groups)
        groups = groups if isinstance(groups[0], dict) else [{"params": groups}]
        self.model, self.param_groups, self.steps = model, [group | {"lr": 1.0} for group in groups], []

    def step(self):
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.steps.append([parameter.grad.clone() for parameter in trained])

    def zero_grad(self):
        self.model.zero_grad()


def gradients(module, args, lm, batch, reference=None, accelerator=None):
    """Run the script's `update` on one rollout; return the gradients of each optimizer step, and the metrics.

    The model moves to the device of `accelerator` [the CPU]; everything else has to be there already.
    """
    model, groups = trainable(module, args, lm)
    accelerator = accelerator or Accelerator(cpu=True)
    model.to(accelerator.device)
    recorder, metrics = GradientRecorder(model, groups), Means()
    module.update(accelerator, model, reference, recorder, batch, args, metrics)
    return recorder.steps, metrics.reduce(accelerator)


def largest_difference(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def run_script(*arguments, processes=1, cwd=None, env=None, timeout=300):
    """Run a script as a user would: `python` for one process, `accelerate launch` for more."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)} | (env or {})
    command = [sys.executable, *launcher(processes), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd or ROOT, env=environment, capture_output=True, text=True, timeout=timeout)


@functools.cache
def fresh_interpreter():
    """Import the scripts in a subprocess; return {"imported": what importing them printed and wrote,
    "help": {script: what `--help` prints}}; `--help` must load neither `datasets` nor a model class."""
    scripts = ALL
    code = f"""import contextlib, importlib, io, json, os, runpy, sys
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
    for name in {scripts}: importlib.import_module(name)
result = {{"imported": [out.getvalue(), os.listdir(".")], "help": {{}}}}
for name in {scripts}:
    sys.argv, out = [f"{{name}}.py", "--help"], io.StringIO()
    with contextlib.redirect_stdout(out):
        try: runpy.run_path(f"{ROOT}/{{name}}.py", run_name="__main__")
        except SystemExit as end: assert not end.code, end.code
    loaded = [m for m in sys.modules if m == "datasets" or m.startswith("transformers.models.") and "modeling_" in m]
    assert not loaded, (name, loaded)
    result["help"][name] = out.getvalue()
print(json.dumps(result))"""
    with tempfile.TemporaryDirectory() as folder:
        command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return json.loads(result.stdout)


def launcher(processes):
    if processes == 1:
        return []
    flags = f"--multi_gpu --num_processes {processes} --num_machines 1 --mixed_precision no --dynamo_backend no"
    return ["-m", "accelerate.commands.launch", *flags.split(), "--main_process_port", "0"]


def metric_rows(folder):
    """Return metrics.jsonl without times and memory."""
    rows = [
        json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def same_metrics(a, b):
    """Assert that two runs have the same metrics, and name those that differ."""
    for row, other in zip(metric_rows(a), metric_rows(b), strict=True):
        differ = [name for name in row | other if row.get(name) != other.get(name)]
        cause = "does something depend on --max_steps, or is it missing in a checkpoint?"
        assert not differ, f"step {row['step']}: other {', '.join(differ)}: {cause}"


def pretend_gpus():
    """Accelerate uses FSDP and DeepSpeed with GPUs only. Under a launcher that asks for one of them, say that this
    process of several on CPU (gloo) is one of several on GPUs; all that follows is the real thing. Not on GPUs."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    if torch.accelerator.is_available():
        return
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        state, kind = PartialState(cpu=True), DistributedType.MULTI_GPU
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        state, kind = PartialState(cpu=True), DistributedType.DEEPSPEED
    else:
        return
    state._shared_state["distributed_type"] = kind
    original = AcceleratorState.__init__
    AcceleratorState.__init__ = lambda self, **options: original(self, **options | {"cpu": False})
