"""examples/recipes.py replaces functions of a script by name, and each recipe computes what it says."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import textwrap
import types
from unittest import mock

import pytest
import recipes
import torch
from accelerate import Accelerator

import grpo
import ppo
import script_answers
from common.load import Prompt, load_prompts
from common.masked import Means, log_ratio, trim_rows
from common.rewards import Completion, Reward, Samples, decode_completions
from common.run import Exit
from exercises import load
from small_models import copy_of_embedded
from testbed import (
    ROOT,
    args_of,
    b1,
    embedded,
    embedded_prompts,
    gradients,
    hand_made_batch,
    largest_difference,
    metric_rows,
    ragged,
    script,
    totals_of,
)
from threads import Processes
from vectors import check

NAMES = [name for name, path in recipes.files().items() if path.parent.name == "recipes"]
SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 2 --eval_samples 4 --learning_rate 1e-3".split()
SMALL += ["--max_new_tokens", "32"]


@pytest.fixture(scope="module")
def modules():
    """Return {name: module} of the scripts made by the recipes."""
    return {name: recipes.load(recipes.made(name), name) for name in NAMES}


def source(name):
    return (ROOT / f"{name}.py").read_text(encoding="utf-8")


def train(module, folder, *arguments):
    module.main([*SMALL, *arguments, "--output_dir", str(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def cut_short(folder, step):
    """Copy the run folder/a to folder/b, without what its last step saved."""
    shutil.copytree(folder / "a", folder / "b")
    shutil.rmtree(folder / "b" / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(folder / "b" / "model")


# --- what is put into a script ---

SCRIPT = '''"""Old."""

import time
from shapes import Circle, area

from numbers import double, half


class Args:
    size: int = option(1)
    unused: int = option(2)


@timed
def first(x):
    return double(x)  # a comment


def second(x):
    return half(first(x))


def main():
    run = start(args, first)
    time.sleep(second(Circle))
'''
NEW = '''"""New."""

import math
from numbers import thrice

own_half = half
own_second = second
LINES = {
    "time.sleep(second(Circle))": """
        for _ in range(2):
            time.sleep(fourth(Circle))
    """
}


class Args:
    size: int = option(3)
    added: int = option(4)
    del unused


def first(x):
    return thrice(x)


def half(x):
    return own_half(x) + args.added


def second(x):
    return own_second(x) + math.pi


def fourth(x):
    return second(second(x))
'''
MADE = '''"""New."""

import math
import time
from shapes import Circle

from numbers import half, thrice


class Args:
    size: int = option(3)
    added: int = option(4)


own_half = half


def first(x):
    return thrice(x)


def own_second(x):
    return half(first(x))


def half(x):
    return own_half(x) + args.added


def second(x):
    return own_second(x) + math.pi


def fourth(x):
    return second(second(x))


def main():
    run = start(args, first)
    for _ in range(2):
        time.sleep(fourth(Circle))
'''


def test_definitions_are_replaced_by_name():
    assert recipes.put(NEW, SCRIPT) == MADE


@pytest.mark.parametrize(
    "patch, message",
    [
        ("def third(x):\n    return 1\n", "no function `third`"),
        ("own = third\n\n\ndef first(x):\n    return own(x)\n", "no function `third`"),
        ("class Args:\n    width: int = option(1)\n", "no option `width`"),
        ("class Args:\n    del width\n", "no option `width`"),
        ("def first(x):\n    return treble(x)\n", "no function `treble`"),
        ("LINES = {'return 2': 'return 3'}\n", "has 0 lines `return 2`"),
        ("LINES = {'unused: int = option(2)': 'return treble(2)'}\n", "no function `treble`"),
        ("LINES = {'unused: int = option(2)': '\"key\": treble(2),  # of a dict'}\n", "no function `treble`"),
        ("LINES = {'': 'return 3'}\n", "has 10 lines ``"),
    ],
)
def test_unknown_name_is_an_error(patch, message):
    """If it was renamed, the recipe would have no effect, or end in a NameError."""
    with pytest.raises(ValueError, match=message):
        recipes.put(f'"""New."""\n\n{patch}', SCRIPT)


def test_missing_callee_is_an_error():
    with pytest.raises(SystemExit, match="vapo.py cannot be put into grpo.py: the script has no function `gae`"):
        recipes.main(["vapo", "grpo.py"])


def test_imports_are_put_in_order(modules):
    assert "PromptSampler" not in recipes.made("curriculum")
    assert "\nimport math\nimport re\nfrom dataclasses import dataclass, replace\n" in recipes.made("calculator")
    made = recipes.put('"""New."""\n\nimport peft\n', source("grpo"))
    assert "\nimport numpy as np\nimport peft\nimport torch\n" in made


def test_a_script_may_set_an_attribute():
    script = source("grpo").replace("@dataclass", "torch.backends.cuda.matmul.allow_tf32 = True\n\n\n@dataclass", 1)
    assert "allow_tf32 = True" in recipes.put((recipes.files()["rloo"]).read_text(encoding="utf-8"), script)


def test_recipe_replaces_in_place(capsys):
    listed = [name for names in recipes.KINDS.values() for name in names]
    assert sorted(listed) == sorted(NAMES)
    recipes.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings == [*recipes.KINDS, "solutions", "bugs"]
    assert lines[lines.index("weights") + 1].split()[0] == "tis"
    assert sorted(line.split()[0] for line in lines if line.startswith(" ")) == sorted(recipes.files())


def test_recipe_is_written_once(tmp_path, monkeypatch):
    text = recipes.made("cispo")
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    (tmp_path / "grpo.py").write_text((ROOT / "grpo.py").read_text(encoding="utf-8"), encoding="utf-8")
    recipes.main(["cispo"])
    assert (tmp_path / "cispo.py").read_text(encoding="utf-8") == text
    for words, says in (
        (["cispo"], "exists already"),
        (["nothing"], "no file nothing: "),
        (["cispo", "gspo"], "no script gspo: "),
        ([], "python examples"),
    ):
        with pytest.raises(SystemExit, match=says):
            recipes.main(words)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["gmpo"], dict(clip_low=0.4, num_minibatches=4)),  # an option of gmpo, and gspo.py's default
        (["rloo", "dapo.py"], dict(normalize_std=False, max_sampling_rounds=10)),  # an option of rloo, and dapo.py's
    ],
)
def test_running_a_recipe_writes_nothing(words, expected, tmp_path):
    recipes.main(["run", *words, *SMALL, "--max_steps", "0", "--output_dir", str(tmp_path / "run")])
    args = json.loads((tmp_path / "run" / "args.json").read_text(encoding="utf-8"))
    assert args | expected == args and not (ROOT / f"{words[0]}.py").exists()


@pytest.mark.recipes
@pytest.mark.parametrize("name", NAMES)
def test_a_written_recipe_passes_the_suite(name, tmp_path):
    """`pytest --script NAME.py` beside the project, in a copy."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "results"))
    (folder / f"{name}.py").write_text(recipes.made(name), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "--script", f"{name}.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 5


# --- docs/fork.md: an environment's own reward ---

EPISODES = """
    scores = kept.sum(dim=1).tolist()  # what an environment says of each episode
    scores[0] = float("nan")
"""


@pytest.mark.beside("docs")
def test_an_environment_gives_a_reward(tmp_path):
    text = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
    (in_rollout, _, *in_main) = re.search(r"```python\n(batch.*?)```", text, re.DOTALL)[1].splitlines()
    patch = f"""LINES = {{{in_main[0].partition("  #")[0]!r}: {chr(10).join(in_main)!r}}}

sample = rollout


def rollout(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
    batch = sample(lm, tokenizer, prompts, n, temperature, top_p, seed, args)
    kept = batch["completion_mask"]
{textwrap.indent(textwrap.dedent(EPISODES), "    ")}
    {in_rollout}
    return batch
"""
    module = recipes.load(recipes.put(f'"""New."""\n\n{patch}', source("grpo")), "mine")
    row = train(module, tmp_path, "--max_steps", "1")[1]
    samples = [line for line in rows_of(tmp_path / "samples.jsonl") if "evaluation" not in line]
    for number, line in enumerate(samples):
        state = line["reward_terms"]["state"]
        assert state is None if number == 0 else state > 5
        assert line["reward"] == line["reward_terms"]["accuracy"] + (state or 0)
    assert len(samples) == 4 and row["reward_terms/state"] > 5
    assert row["reward/mean"] == pytest.approx(row["reward/accuracy"] + row["reward_terms/state"] * 15 / 16)


# --- the test vectors ---

CASES = check.load_cases()
RECIPE_OF = {  # the cases that test_vectors.py does not ask of a recipe
    "advantages/batch-deviation": "lite_ppo",
    "policy/tis": "tis",
    "policy/tis-kl": "tis",
    "splits/kl-cov": "kl_cov",
    "splits/kl-cov-one": "kl_cov",
    "splits/top-entropy": "high_entropy",
    "splits/top-entropy-2": "high_entropy",
    "splits/dapo-entropy-2x2": "entropy_bonus",
    "splits/dapo-group-uneven": "token_mean",
    "splits/ppo-2x2": "dual_clip",
    "variants/cispo": "cispo",
    "variants/curriculum": "curriculum",
    "variants/dppo": "dppo",
    "variants/dppo-square": "dppo",
    "variants/gdpo": "gdpo",
    "variants/gdpo-missing": "gdpo",
    "variants/gmpo": "gmpo",
    "variants/gmpo-cut": "gmpo",
    "variants/icepop": "tis",
    "variants/length-by-pass-rate": "length_penalty",
    "variants/luspo": "luspo",
    "variants/luspo-first-step": "luspo",
    "variants/masked-sampling": "tis",
    "variants/maxrl": "maxrl",
    "variants/off-policy-mask": "off_policy_mask",
    "variants/off-policy-mask-token-advantages": "off_policy_mask",
    "variants/sapo": "sapo",
    "variants/sapo-first-step": "sapo",
    "variants/vapo": "vapo",
    "variants/vc-ppo": "vapo",
}
# Put into another script than its own, for the mean of the case: rows in GRPO, tokens in DAPO.
OTHER_SCRIPT = dict.fromkeys(("policy/tis", "variants/icepop", "variants/masked-sampling"), "grpo.py")
OTHER_SCRIPT |= {case: "dapo.py" for case in RECIPE_OF if case.startswith("splits/")}
OTHER_SCRIPT |= dict.fromkeys(("policy/tis-kl", "variants/dppo-square"), "dapo.py")


@pytest.fixture(scope="module")
def case_modules(modules):
    """Return {case: module} of the recipe for each case."""
    made = {case: modules[name] for case, name in RECIPE_OF.items()}
    for case, base in OTHER_SCRIPT.items():
        made[case] = recipes.load(recipes.made(RECIPE_OF[case], base), f"of_{base.removesuffix('.py')}")
    return made


def flat_rewards(groups, dtype):
    """Rewards (R,) of a case: null is NaN."""
    return torch.tensor([math.nan if reward is None else reward for group in groups for reward in group], dtype=dtype)


def policy_step(module, inputs, options, dtype):
    """The loss and the gradient of the recipe's whole `update`."""
    sizes = {"num_minibatches": 1, "num_epochs": 2, "max_grad_norm": 0.0}
    sizes["kl_coef"] = options.get("kl", {"coef": 0.0})["coef"]
    sizes["group_size"] = len(inputs["logprobs"]) // len(set(inputs["groups"]))
    if options["mean"] == "groups":
        sizes["token_mean"] = "group"
    if options.get("objective") == "divergence":
        sizes["square_coef"] = options.get("penalty_coef", 0.0)
    return script_answers.answer_of_step(module, inputs, options, args_of(module, **options, **sizes), dtype)


def group_advantages(module, inputs, options, dtype):
    rewards, size = flat_rewards(inputs["rewards"], dtype), len(inputs["rewards"][0])
    args = args_of(module, **options, group_size=size)
    centred = module.compute_advantages(rewards, args)
    (advantages,) = Processes(1).run(lambda accelerator: module.divide_by_std(accelerator, centred, rewards, args))
    return {"advantages": advantages.view(-1, size).tolist()}


def mean_normalized_advantages(module, inputs, options, dtype):
    """A row without a reward is left out of its group, and has the advantage 0."""
    found = []
    for group in inputs["rewards"]:
        rewards = torch.tensor([reward for reward in group if reward is not None], dtype=dtype)
        advantages = iter(module.compute_advantages(rewards, module.Args(group_size=len(rewards)))[:, 0].tolist())
        found.append([0.0 if reward is None else next(advantages) for reward in group])
    return {"advantages": found}


def decoupled_advantages(module, inputs, options, dtype):
    size = len(inputs["parts"][0][0])
    args = args_of(module, **options, group_size=size)
    functions = [Reward(f"part {i}", weight, None) for i, weight in enumerate(options["weights"])]
    parts = {f"part {i}": flat_rewards(groups, dtype) for i, groups in enumerate(inputs["parts"])}
    sums = module.compute_advantages(functions, parts, args)
    (advantages,) = Processes(1).run(lambda accelerator: module.over_rollout(accelerator, sums, parts, args))
    return {"advantages": advantages.view(-1, size).tolist()}


def gae_with_two_lambdas(module, inputs, options, dtype):
    lambdas = {"gae_lambda": options["lambda"], "gae_lambda_critic": options["lambda_critic"]}
    (rewards, mask), (values, _) = (ragged(inputs[name], dtype) for name in ("rewards", "values"))
    advantages, returns = module.compute_advantages(rewards, values, mask, args_of(module, **options, **lambdas))
    cut = script_answers.cut
    return {"advantages": cut(advantages, inputs["values"]), "returns": cut(returns, inputs["values"])}


def pass_rate_curriculum(module, inputs, options, dtype):
    sampler = module.Curriculum(range(inputs["prompts"]), args_of(module, **options), Accelerator(cpu=True))
    for prompt, share in inputs["visits"]:
        sampler.drawn = [prompt]
        correct = (torch.arange(8) < 8 * share).to(dtype)
        Processes(1).run(lambda accelerator, rows=correct: sampler.observe(accelerator, rows))
    return {"rates": sampler.rates.tolist(), "chances": sampler.probabilities().tolist()}


def covariance_step(module, inputs, options, dtype):
    """The forward before the update, without gradients, is one of the current policy."""

    def now(model, micro, args):
        return model.logprobs.detach()[micro["prompts"][:, 0], : micro["completions"].shape[1]]

    with mock.patch.object(module, "current_logprobs", now):
        return policy_step(module, inputs, options, dtype)


def length_penalized_advantages(module, inputs, options, dtype):
    size = len(inputs["rewards"][0])
    args = args_of(module, **options, group_size=size)
    rewards, lengths = flat_rewards(inputs["rewards"], dtype), torch.tensor(inputs["lengths"]).view(-1)
    advantages = module.compute_advantages(module.penalized_rewards(rewards, lengths, args), args)
    return {"advantages": advantages.view(-1, size).tolist()}


STEPS = ("geometric_mean_step", "off_policy_mask_step", "policy_step", "sampler_square_step", "top_entropy_step")
STEPS += ("weighted_logprob_step",)
OPERATIONS = dict.fromkeys(STEPS, policy_step)
OPERATIONS |= {
    function.__name__: function
    for function in (
        covariance_step,
        decoupled_advantages,
        gae_with_two_lambdas,
        group_advantages,
        length_penalized_advantages,
        mean_normalized_advantages,
        pass_rate_curriculum,
    )
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", RECIPE_OF)
def test_recipe_matches_its_case(case, dtype, case_modules):
    of_case = CASES[case]
    answer = OPERATIONS[of_case["operation"]](case_modules[case], of_case["inputs"], of_case["options"], dtype)
    precision = "float64" if dtype == torch.float64 else "float32"
    assert check.compare(of_case, answer, precision) == (check.SAME, "")


SELECTIONS = {  # by one threshold for the whole step; with one for each micro-batch, what the case says of the answer
    "splits/kl-cov": None,  # the case's processes select alone
    "splits/kl-cov-one": "within each micro-batch",
    "splits/top-entropy": "within each micro-batch, of all processes together",
    "splits/top-entropy-2": "within each micro-batch",
}
CUTS = {
    "four micro-batches": [[[0, 1], [2, 3], [4, 5], [6, 7]]],
    "two processes with unequal tokens": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
}


def is_whole(case):
    """Return whether a case is a step of eight rows, groups adjacent, that is not cut already."""
    inputs = CASES[case]["inputs"]
    if CASES[case]["operation"] not in STEPS:
        return False
    return "pieces" not in inputs and len(inputs["logprobs"]) == 8 and inputs["groups"] == sorted(inputs["groups"])


@pytest.mark.parametrize("pieces", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("case", [*filter(is_whole, RECIPE_OF), *SELECTIONS])
def test_split_step_has_the_same_gradient(case, pieces, case_modules):
    of_case = CASES[case]
    inputs, operation = of_case["inputs"] | {"pieces": pieces}, OPERATIONS[of_case["operation"]]
    answer = operation(case_modules[case], inputs, of_case["options"], torch.float64)
    assert check.compare(of_case, answer) == (check.SAME, "")


@pytest.mark.parametrize("case, says", [(case, says) for case, says in SELECTIONS.items() if says])
def test_micro_batch_threshold_is_wrong(case, says, case_modules):
    of_case = CASES[case]
    options = of_case["options"] | {"threshold": "micro_batch"}
    answer = OPERATIONS[of_case["operation"]](case_modules[case], of_case["inputs"], options, torch.float64)
    verdict, text = check.compare(of_case, answer)
    assert verdict == check.OTHER and says in text


def test_every_variant_has_a_recipe():
    variants = {case for case in CASES if case.startswith("variants/")}
    assert variants == {case for case in RECIPE_OF if case.startswith("variants/")}


# --- several turns ---


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The module of the calculator's task, and the folder of its data and a model that is hardly trained."""
    module, folder = load(ROOT / "examples" / "calculator_task.py"), tmp_path_factory.mktemp("task") / "calculator"
    module.main(folder, steps=2)
    return module, folder


@pytest.fixture
def sampled(modules, task):
    """Return (module, args, tokenizer, lm, batch): a rollout of a model that samples all tokens, also `]` and <eos>."""
    module = modules["calculator"]
    args = module.Args(model_name_or_path=str(task[1] / "model"), dataset=str(task[1]), group_size=4, max_new_tokens=40)
    tokenizer, lm = module.load_policy(args, Accelerator(cpu=True))
    prompts, _ = load_prompts(args, tokenizer)
    batch = module.rollout(lm, tokenizer, prompts[:12], 4, args.temperature, 1.0, (0, 0, 1), args)
    return module, args, tokenizer, lm, batch


def test_calculator_answers_the_last_call(modules):
    calculate = modules["calculator"].calculate
    answers = {"[47+85]": "=132\n", "a[3-9]": "=-6\n", "[1+2] ": "=?\n", "[1+2+3]": "=?\n", "]": "=?\n", "1+2]": "=?\n"}
    assert {text: calculate(text) for text in answers} == answers
    assert calculate(f"[{'9' * 5000}+1]") == "=?\n"  # numbers are not too long for `int`


def test_ratios_hold_across_the_seam(sampled):
    module, args, tokenizer, lm, batch = sampled
    mask, completions = batch["sampled_mask"], batch["completion_mask"]
    calls = batch["completions"] == tokenizer.convert_tokens_to_ids("]")
    assert calls[mask].sum() > 20 and not (mask & ~completions).any()
    assert torch.equal(completions, torch.arange(completions.shape[1]) < completions.sum(dim=1, keepdim=True))
    ended = (batch["completions"] == tokenizer.eos_token_id).any(dim=1)
    assert torch.equal(batch["truncated"], ~ended) and (completions.sum(dim=1)[~ended] == args.max_new_tokens).all()
    logprobs, _ = module.completion_logprobs(lm, batch, args)
    rows = (mask != completions).any(dim=1).nonzero()[:4, 0].tolist()  # with a call
    part = trim_rows(batch, rows)
    alone, _ = module.completion_logprobs(lm, part, args)
    ratio = log_ratio(alone, logprobs[rows, : alone.shape[1]], part["sampled_mask"]).exp()
    assert len(rows) == 4 and (ratio - 1).abs().max() < 1e-5


@pytest.mark.parametrize("most, last", [(40, "#### 103"), (30, "#### "), (26, "#")])
def test_two_calls_then_an_answer(most, last, modules, task, monkeypatch):
    """Return the prompts of a scripted model, turn by turn, and the resulting row of at most `most` tokens."""
    module, tokenizer, asked = modules["calculator"], task[0].make_tokenizer(), []
    turns = [["[47+85]", "#### 5<eos>"], ["[132-29]"], ["#### 103<eos>"]]

    def sample_turn(lm, tokenizer, prompts, n, temperature, top_p, seed, args):
        texts = turns[len(asked)]
        asked.append(([tokenizer.decode(prompt.ids) for prompt in prompts], n, args.max_new_tokens))
        rows = [[*tokenizer.encode(text.removesuffix("<eos>")), *[1] * text.endswith("<eos>")] for text in texts]
        ids, mask = ragged(rows, dtype=torch.long, fill=0)
        return {"completions": ids, "completion_mask": mask}

    monkeypatch.setattr(module, "sample_turn", sample_turn)
    call_end = tokenizer.convert_tokens_to_ids("]")
    config = types.SimpleNamespace(eos_token_id=[1, call_end])
    lm = types.SimpleNamespace(generation_config=config, device="cpu", call_end=call_end)
    prompt = Prompt(tokenizer.encode("47+85-29?"), "47+85-29?", "103", {})
    batch = module.rollout(lm, tokenizer, [prompt], 2, 1.0, 1.0, (0,), module.Args(max_new_tokens=most))
    second = "47+85-29?[47+85]=132\n"
    third = f"{second}[132-29]=103\n"
    assert asked == [(["47+85-29?"], 2, most), ([second], 1, most - 12), ([third], 1, most - 25)]
    texts = [completion.text for completion in decode_completions(tokenizer, batch)]
    assert texts == [f"[47+85]=132\n[132-29]=103\n{last}", "#### 5"]
    assert batch["truncated"].tolist() == [most < 34, False]
    own = batch["sampled_mask"][0].nonzero()[:, 0].tolist()
    assert own == [*range(7), *range(12, 20), *range(25, min(34, most))]


def test_bad_call_costs_its_turn(modules, task, tmp_path, monkeypatch):
    """The penalty is on the tokens of a turn that the calculator answers with =?, and on no other."""
    module, batches = modules["calculator"], []
    update = module.update
    monkeypatch.setattr(module, "update", lambda *inputs: batches.append(dict(inputs[4])) or update(*inputs))
    words = ["--model_name_or_path", str(task[1] / "model"), "--dataset", str(task[1]), "--max_steps", "1"]
    for name in ("0", "0.5"):
        train(module, tmp_path / name, *words, "--bad_call_penalty", name)
    plain, penalized = batches
    tokenizer, costs = task[0].make_tokenizer(), plain["advantages"] - penalized["advantages"]
    call_end, bad = tokenizer.convert_tokens_to_ids("]"), 0
    columns = plain["completions"].tolist(), plain["loss_mask"].tolist(), costs.tolist()
    for ids, sampled, cost in zip(*columns, strict=True):
        start = 0
        for end in [t + 1 for t, id in enumerate(ids) if sampled[t] and id == call_end]:
            turn = [id for id, own in zip(ids[start:end], sampled[start:end], strict=True) if own]
            is_bad = module.calculate(tokenizer.decode(turn)) == "=?\n"
            own = [cost[t] for t in range(start, end) if sampled[t]]
            assert own == pytest.approx([0.5 * is_bad] * len(own))
            start, bad = end, bad + is_bad
        rest = [cost[t] for t in range(start, len(ids))]
        assert rest == [0] * len(rest)
    assert bad > 3


def test_calculator_leaves_out_unscored_rows(modules, task, tmp_path, monkeypatch):
    module, seen = modules["calculator"], []
    (tmp_path / "judge.py").write_text(
        "def judge(truncated, **_):\n    return [None if t else 1.0 for t in truncated]\n"
    )
    monkeypatch.setattr(module, "update", lambda *inputs: seen.append(inputs[4]))
    words = ["--model_name_or_path", str(task[1] / "model"), "--dataset", str(task[1]), "--max_steps", "1"]
    train(module, tmp_path / "run", *words, "--reward", f"{tmp_path / 'judge.py'}:judge")
    (batch,) = seen
    assert torch.equal(batch["loss_mask"].any(dim=1), ~batch["truncated"]) and batch["truncated"].any()


def test_run_learns_to_call(modules, task, tmp_path):
    """Each `]` has a reward here."""
    reward = f"{ROOT / 'examples' / 'calculator_task.py'}:calls"
    model = ["--model_name_or_path", str(task[1] / "model"), "--dataset", str(task[1])]
    rows = train(modules["calculator"], tmp_path, *model, "--reward", reward, "--max_steps", "4", "--kl_coef", "0")
    assert rows[-1]["reward_terms/calls"] > 1.5 * rows[1]["reward_terms/calls"]


# --- distillation ---


def test_advantage_is_gradient_of_teacher_kl(modules):
    """For one token, the sum over the vocabulary of -pi A grad log pi is the gradient of the KL."""
    module, args = modules["distill"], modules["distill"].Args()
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, teacher = logits.log_softmax(-1)[:, None], teacher.log_softmax(-1)[:, None]  # (V, 1)
    assert not module.teacher_advantages(logprobs, teacher).requires_grad
    of_rewards = module.compute_advantages(torch.ones(5), args)
    losses, _ = module.policy_loss(logprobs, logprobs.detach(), of_rewards, torch.ones(5, 1).bool(), args, teacher)
    (losses * logprobs.detach().exp()).sum().backward()
    gradient, logits.grad = logits.grad.clone(), None
    student = logits.log_softmax(-1)
    (student.exp() * (student - teacher[:, 0])).sum().backward()
    assert torch.allclose(gradient, logits.grad, atol=1e-12) and gradient.abs().max() > 0.1


@pytest.mark.parametrize("name", ["distill", "distill_topk"])
def test_teacher_uses_the_students_temperature(name, modules, tmp_path):
    """A teacher that is the student gives losses of 0, at any temperature, and nothing is learnt."""
    rows = train(modules[name], tmp_path, "--teacher", "embedded", "--temperature", "0.7", "--max_steps", "1")
    found = [rows[1][metric] for metric in ("optim/loss", "optim/grad_norm", "policy/kl_ref")]
    assert found == ([0, 0, 0] if name == "distill" else [0, pytest.approx(0, abs=1e-5), 0])


@pytest.mark.parametrize("case", ["topk-tail", "topk-tail-reverse"])
def test_topk_kl_has_a_tail(case, modules):
    of_case, module = CASES[f"distill/{case}"], modules["distill_topk"]
    logits, teacher = (torch.tensor(of_case["inputs"][name]) for name in ("logits", "teacher_logits"))
    args = module.Args(top_k=of_case["options"]["top_k"], direction=of_case["options"]["direction"])
    losses = module.topk_kl(logits.requires_grad_(), *module.likeliest(teacher, args), args)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    answer = {"loss": losses.tolist(), "gradient": gradient.tolist()}
    assert check.compare(of_case, answer, "float32") == (check.SAME, "")
    whole = module.topk_kl(logits, *module.likeliest(teacher, module.Args(top_k=99)), module.Args())
    reverse = (logits.softmax(-1) * (logits.log_softmax(-1) - teacher.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(whole, reverse)  # all but one and a tail: the whole vocabulary


@pytest.mark.parametrize("name, options", [("distill", []), ("distill_topk", ["--top_k", "4"])])
def test_student_comes_closer_to_teacher(name, options, modules, tmp_path):
    def noise(weights):
        generator = torch.Generator().manual_seed(0)
        for weight in weights.values():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)

    copy_of_embedded(tmp_path / "teacher", noise)
    pairs = ["--prompts_per_step", "16", "--group_size", "2", "--num_minibatches", "2", "--max_steps", "6"]
    rows = train(modules[name], tmp_path / "run", *pairs, *options, "--teacher", str(tmp_path / "teacher"))
    assert rows[-1]["policy/kl_ref"] < 0.7 * rows[1]["policy/kl_ref"] and rows[-1]["policy/ratio_max"] > 1


# --- self-distillation ---


def test_row_sees_the_first_right_answer(modules):
    module = modules["sdpo"]
    args = module.Args(group_size=4)
    rewards = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0.9, 0], dtype=torch.float64)
    expected = [2, 0, 0, 0, 5, None, 5, 5, None, None, None, None]
    assert module.right_siblings(rewards, args) == expected
    last_group = module.right_siblings(rewards, dataclasses.replace(args, right_reward=0.9))[8:]
    assert last_group == [10, 10, None, 10]


@pytest.mark.parametrize("gold_column", [None, "answer"])
def test_the_teacher_reads_the_right_answer(gold_column, modules):
    """Its log-probs match plain forwards over its text, row by row."""
    module = modules["sdpo"]
    _, _, tokenizer, lm = embedded()
    args = module.Args(group_size=4, micro_batch_size=8, prompt_template="{prompt} ", gold_column=gold_column)
    batch, _ = hand_made_batch(tokenizer, args, groups=3)
    prompts, completions = embedded_prompts()[:3], decode_completions(tokenizer, batch)
    texts = [completion.text for completion in completions]
    rewards = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    own = torch.where(torch.arange(12) == 9, math.nan, rewards)  # the last group's filler is no right answer
    samples = Samples(batch, prompts, completions, rewards.index_fill(0, torch.tensor([9]), 1.0), {"own": own})
    expected = [2, 0, 0, 0, 5, None, 5, 5, None, None, None, None]
    expected = [None if i is None else texts[i] for i in expected]
    if gold_column:
        expected = [prompts[i // 4].columns["answer"] for i in range(12)]
    solutions = module.shown_solutions(samples, args)
    assert solutions == expected
    batch["teacher"] = module.teacher_prompts(tokenizer, samples, solutions, args)
    batch["is_taught"] = torch.tensor([[solution is not None] for solution in solutions])
    accelerator = Accelerator(cpu=True)
    micro_batches, _ = module.split(accelerator, batch | {"row": torch.arange(12)}, list(range(12)), args)
    with torch.no_grad():
        for micro in micro_batches:
            micro["old_logprobs"], _ = module.completion_logprobs(lm, micro, args)
            micro["advantages"] = module.teacher_advantages(lm, micro, args)
    seen = 0
    for micro in micro_batches:
        for i, row in enumerate(micro["row"].tolist()):
            found = micro["advantages"][i][micro["completion_mask"][i]]
            if solutions[row] is None:
                assert (found == 0).all()
                continue
            text = f"{prompts[row // 4].prompt} \nCorrect solution:\n\n{solutions[row]}\n\nCorrectly solve"
            before = tokenizer.encode(f"{text} the original question.")
            ids = micro["completions"][i][micro["completion_mask"][i]].tolist()
            with torch.no_grad():
                logits = lm(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
            teacher = logits.log_softmax(dim=-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            expected = teacher - micro["old_logprobs"][i][micro["completion_mask"][i]]
            assert torch.allclose(found, expected, atol=1e-4) and expected.abs().max() > 0.1
            seen += 1
    assert seen == (12 if gold_column else 7)


def test_missing_gold_column_is_named(modules, tmp_path):
    with pytest.raises(Exit, match="--gold_column proof: the data have no such column"):
        train(modules["sdpo"], tmp_path, "--gold_column", "proof", "--max_steps", "1")


@pytest.mark.parametrize("name", ["cispo", "dppo", "gmpo", "sapo"])
def test_zero_advantages_leave_the_kl(name, modules):
    old, new, ref, mask = b1()
    zeros, found = torch.zeros(4, 1, dtype=torch.float64), []
    for module in (modules[name], grpo):
        losses, stats = module.policy_loss(new, old, zeros, mask, module.Args(kl_coef=0.3), ref)
        found.append([losses, stats["kl_ref"], stats["approx_kl"]])
    torch.testing.assert_close(*found)
    assert found[0][0].abs().max() > 0.1


# --- the ladder ---


def test_advantages_and_weights_of_the_ladder(modules):
    """And the gradient is that of sequences: the mean over rows of the sum over tokens."""
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.float64)
    expected = {
        "reinforce": [1, 0, 0, 1, 1, 1, 1, 1],
        "mean_baseline": [1 / 4, -3 / 4, -3 / 4, *[1 / 4] * 5],
        "rloo": [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0, 0],
        "maxrl": [1, -1, -1, 1, 0, 0, 0, 0],
    }
    mask = b1()[3]
    for name, advantages in expected.items():
        args = modules[name].Args(group_size=4)
        found = modules[name].compute_advantages(rewards, args)
        assert found[:, 0].tolist() == pytest.approx(advantages, abs=1e-12)
        assert torch.equal(modules[name].token_weights(mask, totals_of(mask, 4), args), mask.double() / 4)


def test_a_row_without_a_reward_changes_no_other(modules, tmp_path, monkeypatch):
    module = modules["length_penalty"]
    args, rewards = module.Args(group_size=3), torch.tensor([1.0, 1, 1, 1, 0, 0.5])
    penalized = module.penalized_rewards(rewards, torch.tensor([10, 10, math.nan, 4, 8, math.nan]), args)
    advantages = module.compute_advantages(penalized, args)[:, 0].tolist()
    assert advantages == pytest.approx([0, 0, 0, 0.53125, -0.53125, 0])  # 1 - 0.125 / 2 and -0.125, halved
    reward = tmp_path / "mine.py"  # every other prompt has none
    reward.write_text("def mine(completions, **_):\n    return ([1.0] * 4 + [None] * 4) * (len(completions) // 8)")
    words = ["--reward", f"{reward}:mine", "--group_size", "4", "--max_steps", "1", "--eval_samples", "8"]
    assert train(modules["mean_baseline"], tmp_path / "a", *words)[1]["optim/grad_norm"] == 0
    spy = mock.Mock(side_effect=modules["lite_ppo"].divide_by_std)
    monkeypatch.setattr(modules["lite_ppo"], "divide_by_std", spy)
    train(modules["lite_ppo"], tmp_path / "b", *words)
    assert spy.call_args.args[2].tolist() == [1] * 8
    spy = mock.Mock(side_effect=module.penalized_rewards)
    monkeypatch.setattr(module, "penalized_rewards", spy)
    train(module, tmp_path / "c", *words)
    assert spy.call_args.args[1].isnan().tolist() == ([False] * 4 + [True] * 4) * 2


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("calculator", "distill", "distill_topk", "online_dpo")]
)
def test_recipe_has_no_idle_options(name, modules, tmp_path):
    rows = train(modules[name], tmp_path, "--max_steps", "1", "--seed", "1")
    assert len(rows) == 2 and rows[1]["optim/grad_norm"] > 0
    options = {field.name for field in dataclasses.fields(modules[name].Args)}
    for option in {"normalize_std", "std_eps", "clip_low", "clip_high", "dual_clip", "ratio_level"}:
        assert (option in options) == (f"args.{option}" in recipes.made(name)), option
    assert {"kl_coef", "seed"} <= options


# --- lambdas of critic and policy ---


def test_vapo_without_options_is_ppo(modules):
    rewards, values, _, mask = b1()
    module, of_rows = modules["vapo"], (rewards, values.detach(), mask)
    found = module.compute_advantages(*of_rows, module.Args(gae_lambda=0.9))
    assert all(map(torch.equal, found, ppo.compute_advantages(*of_rows, ppo.Args(gae_lambda=0.9))))
    _, returns = module.compute_advantages(*of_rows, module.Args(gae_lambda=0.9, gae_lambda_critic=0.0))
    assert torch.equal(returns, ppo.compute_advantages(*of_rows, ppo.Args(gae_lambda=0.0))[1])


def test_maxrl_refuses_other_rewards(modules, tmp_path, capsys):
    reward = tmp_path / "mine.py"
    reward.write_text("def half(completions, **_):\n    return [0.5 for _ in completions]", encoding="utf-8")
    module, words = modules["maxrl"], ["--reward", f"{reward}:half", "--max_steps", "1"]
    with pytest.raises(SystemExit), module.run.clean_exit():
        module.main([*SMALL, *words, "--output_dir", str(tmp_path / "run")])
    assert "MaxRL needs rewards of 0 and 1, and there is one of 0.5" in capsys.readouterr().err.splitlines()[-1]


# --- another sampler ---


def test_tis_acts_even_in_one_update(modules, tmp_path):
    one_update = ["--num_minibatches", "1", "--max_steps", "1"]
    own = train(modules["tis"], tmp_path / "own", *one_update)[1]
    other = train(modules["tis"], tmp_path / "other", *one_update, "--sampler_temperature", "0.5")[1]
    assert own["sampler/weight"] == own["sampler/ratio_max"] == 1 and own["sampler/beyond_cap"] == 0
    assert other["sampler/ratio_max"] > 1.5


# --- the tokens that sampling kept ---


def logprobs_of_table(module, logits, tokens, kept, temperature):
    """The log-probs (T,) of a completion by `completion_logprobs`, of a model that has these logits (T, V)."""
    ids = torch.tensor([tokens])
    mask = torch.ones_like(ids).bool()
    batch = {"prompts": ids[:, :1], "prompt_mask": mask[:, :1], "completions": ids, "completion_mask": mask}
    if kept is not None:  # as wide as another micro-batch is long
        batch["keep_mask"] = torch.nn.functional.pad(torch.tensor([kept]).bool(), (0, 0, 0, 3))
    output = types.SimpleNamespace(logits=torch.nn.functional.pad(logits[None], (0, 0, 0, 1)))
    logprobs, entropies = module.completion_logprobs(
        lambda **inputs: output, batch, module.Args(temperature=temperature)
    )
    assert entropies.isfinite().all()
    return logprobs[0]


@pytest.mark.parametrize("case", ["temperature", "kept-set", "ratio-kept-set"])
def test_logprobs_over_kept_set(case, modules):
    of_case, found = CASES[f"logprobs/{case}"], []
    inputs, temperature = of_case["inputs"], of_case["options"]["temperature"]
    for name in ("logits", "old_logits")[: 1 + ("old_logits" in inputs)]:
        logits = torch.tensor(inputs[name], requires_grad=True)
        row = logprobs_of_table(modules["keep_mask"], logits, inputs["tokens"], inputs.get("kept"), temperature)
        (gradient,) = torch.autograd.grad(row.sum(), logits)
        found.append((row, gradient))
    if len(found) == 2:
        ratios = (found[0][0] - found[1][0]).exp()
        answer = {"ratios": ratios.tolist(), "mean_ratio": ratios.mean().item()}
    else:
        answer = {"logprobs": found[0][0].tolist(), "gradient": found[0][1].tolist()}
    assert check.compare(of_case, answer, "float32") == (check.SAME, "")


def sampled_at(module, top_p, **options):
    """(args, lm, batch): a rollout of the embedded model."""
    _, _, tokenizer, lm = embedded()
    args = module.Args(group_size=4, **options)
    return args, lm, module.rollout(lm, tokenizer, embedded_prompts()[:8], 4, args.temperature, top_p, (0, 0, 1), args)


def test_keep_mask_is_what_sampling_kept(modules):
    """By a forward: fewer than top_k are likelier, then those have less than top_p, then min_p of the likeliest."""
    module = modules["keep_mask"]
    args, lm, batch = sampled_at(module, 0.8, temperature=1.7, top_k=5, min_p=0.1)
    mask = batch["completion_mask"]
    sampled, seen = batch["completions"][mask], []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, "kept_logits", lambda logits, batch, args: seen.append(logits) or logits)
        module.completion_logprobs(lm, batch, args)
    probs, order = (seen[0][mask] / 1.7).softmax(dim=-1).sort(dim=-1, descending=True)
    kept = torch.arange(probs.shape[1]) < 5
    probs = probs * kept / (probs * kept).sum(dim=-1, keepdim=True)
    kept = kept & (probs.cumsum(dim=-1) - probs < 0.8)
    kept &= probs >= 0.1 * probs[:, :1]
    expected = torch.zeros_like(kept).scatter(1, order, kept)
    assert torch.equal(batch["keep_mask"][mask], expected)
    assert {1, 2, 3} <= set(expected.sum(dim=1).tolist()) and expected.gather(1, sampled[:, None]).all()
    with torch.no_grad():
        over_kept, _ = module.completion_logprobs(lm, batch, args)
    torch.testing.assert_close(over_kept[mask], batch["sampler_logprobs"][mask], atol=1e-4, rtol=0)


def test_all_policies_use_the_kept_set(modules, tmp_path):
    still = "--top_p 0.6 --temperature 1.5 --kl_coef 0.1 --learning_rate 1e-30 --max_steps 1".split()
    kept = train(modules["keep_mask"], tmp_path / "kept", *still)[1]
    whole = train(modules["keep_mask"], tmp_path / "whole", *still, "--no_keep_mask")[1]
    assert kept["policy/ratio_max"] == 1 and kept["policy/kl_ref"] == 0
    assert kept["sampler/ratio"] == pytest.approx(1, abs=1e-5) and whole["sampler/ratio"] < 0.98


def test_keep_mask_follows_its_micro_batch(modules):
    module, found = modules["keep_mask"], []
    args, lm, batch = sampled_at(module, 0.7, num_minibatches=1, num_epochs=2, max_grad_norm=0.0)
    batch |= {"loss_mask": batch["completion_mask"], "advantages": torch.randn(32, 1)}
    for size in (3, 32):
        steps, _ = gradients(module, dataclasses.replace(args, micro_batch_size=size), lm, batch)
        found.append(steps[0])
    assert largest_difference(*found) < 1e-5 * max(float(part.abs().max()) for part in found[0])


def test_keep_mask_refuses_fast(modules, tmp_path):
    with pytest.raises(Exit, match="does not return the tokens that it kept"):
        modules["keep_mask"].main([*SMALL, "--fast", "--output_dir", str(tmp_path / "run")])


# --- entropy bonus and dual clip, put into each script ---


def put_into(name, base):
    return recipes.load(recipes.made(name, f"{base}.py"), f"{name}_of_{base}")


@pytest.mark.parametrize("base", ["grpo", "dr_grpo", "gspo", "dapo", "dcpo"])
def test_bonus_has_weights_of_tokens(base):
    module, (_, new, _, mask) = put_into("entropy_bonus", base), b1()
    args = module.Args(group_size=4, num_minibatches=1, num_epochs=2, max_grad_norm=0.0, kl_coef=0.0, entropy_coef=0.5)
    table = [row[own].tolist() for row, own in zip(new.detach(), mask, strict=True)]
    inputs = {"logprobs": table, "old_logprobs": table}
    _, gradients = script_answers.updated(module, inputs, table, args, torch.float64)
    assert torch.equal(gradients["entropies"], -0.5 * module.token_weights(mask, totals_of(mask, 4), args))


@pytest.mark.parametrize("base", ["grpo", "dr_grpo", "gspo", "dapo"])
@pytest.mark.parametrize("ratio", [0.5, 1.1, 2.9, 3.1, 50.0])
@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_dual_clip_matches_ppo(advantage, ratio, base):
    """ppo.py has it as an option. A row of one token, whose ratio is that of the row in gspo.py."""
    found = []
    for module, options in ((put_into("dual_clip", base), {}), (ppo, {"dual_clip": 3.0})):
        args = module.Args(clip_low=0.2, clip_high=0.3, kl_coef=0.0, **options)
        new = torch.tensor([[math.log(ratio)]]).double().requires_grad_()
        advantages = torch.tensor([[advantage]]).double()
        losses, stats = module.policy_loss(new, torch.zeros_like(new), advantages, torch.tensor([[True]]), args)
        losses.sum().backward()
        found.append((losses.item(), new.grad.item(), bool(stats["dual_clip"])))
    assert found[0] == pytest.approx(found[1])


def test_dcpo_has_its_own_max_ratio():
    with pytest.raises(ValueError, match=r"dual_clip.py cannot be put into dcpo.py: the script has 0 lines `losses ="):
        recipes.made("dual_clip", "dcpo.py")


# --- the recipes of ppo.py: test_whole_updates.py compares their runs with a plain loop ---


@pytest.mark.parametrize(
    "name, options, metric",
    [
        ("ppo_penalty", "--penalty_target 1e-5", "policy/penalty_coef"),
        ("ppo_adaptive_kl", "--kl_coef 0.1 --kl_target 0.5 --kl_horizon 100", "policy/kl_coef"),
        ("critic_warmup", "--critic_warmup_steps 3", "optim/lr"),
    ],
)
def test_adapted_value_survives_a_resume(name, options, metric, modules, tmp_path):
    """For critic_warmup it is the step from which AdamW counts the policy's updates."""
    sizes = "--prompts_per_step 8 --group_size 2 --eval_every 0 --save_every 2 --lr_scheduler linear --max_steps 4"
    words = [*sizes.split(), *options.split()]
    rows = train(modules[name], tmp_path / "a", *words)[1:]
    assert len({row[metric] for row in rows[:2]} | {row[metric] for row in rows[2:]}) > 1
    for row, after in itertools.pairwise(rows if name == "ppo_adaptive_kl" else ()):
        error = min(max(row["policy/kl_old_ref"] / 0.5 - 1, -0.2), 0.2)  # of two steps within these bounds
        assert after[metric] == pytest.approx(row[metric] * (1 + error * 16 / 100))
    cut_short(tmp_path, 4)
    train(modules[name], tmp_path / "b", *words, "--resume")
    assert metric_rows(tmp_path / "a") == metric_rows(tmp_path / "b")


def test_kl_coef_changes_by_two_at_most(modules):
    # verl has no bound: here -0.052 for a KL of 0, which pays for divergence.
    module = modules["ppo_adaptive_kl"]
    for kl, factor in ((0.0, 0.5), (9.0, 2)):
        beta = module.AdaptiveKL(module.Args(kl_coef=0.05, kl_target=0.1, kl_horizon=100.0))
        beta.move(kl, 1024)
        assert beta.coef == pytest.approx(0.05 * factor)


# --- pairs that the policy samples ---


def train_online(modules, folder, *arguments):
    quick = "--pair_prompts 64 --pair_samples 4 --pairs_per_step 8 --eval_prompts 8 --eval_samples 4 --eval_every 0"
    modules["online_dpo"].main([*quick.split(), "--output_dir", str(folder), *map(str, arguments)])
    return metric_rows(folder)


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_written_pairs_are_trained_on(modules, tmp_path):
    """Read again by dpo.py they give the same tokens, so the same run."""
    (row,) = train_online(modules, tmp_path / "first", "--max_steps", 1)[1:]
    pairs = tmp_path / "first" / "pairs-1.jsonl"
    made = len(rows_of(pairs))
    assert made == row["pairs/made"] == round(row["pairs/yield"] * 64)
    for split in ("train", "test"):
        shutil.copy(pairs, tmp_path / f"{split}.jsonl")
    own = train_online(modules, tmp_path / "own", "--max_steps", made // 8)
    words = ["--dataset", tmp_path, "--eval_dataset", "embedded", "--pairs_per_step", 8]
    words += ["--eval_prompts", 8, "--eval_samples", 4, "--output_dir", tmp_path / "given"]
    script("dpo").main(list(map(str, words)))
    given = metric_rows(tmp_path / "given")
    assert len(own) == len(given) == made // 8 + 1 > 2
    for a, b in zip(own[1:], given[1:], strict=True):
        assert all(a[key] == b[key] for key in a if key.startswith(("optim/", "rewards/", "logps/", "completion/")))
    assert given[-1]["eval/pass@1"] == own[-1]["eval/pass@1"]


def test_pair_is_best_and_worst_finished(modules):
    module, (prompt,), metrics = modules["online_dpo"], embedded_prompts()[:1], Means()
    names = ("cut", "a", "b", "c", "d", "unscored")
    completions = [Completion(name, [3 + i, 1], name == "cut") for i, name in enumerate(names)]
    batch, args, made = {"truncated": torch.tensor([True] + [False] * 5)}, module.Args(pair_samples=6), []
    for rewards in ([9.0, 0.2, 0.8, 0.8, -1.0, 5], [9.0, 0.3, 0.3, 0.1 + 0.2, 0.3, 5]):  # the others differ by rounding
        rewards = torch.tensor(rewards, dtype=torch.float64)
        terms = {"own": torch.where(torch.arange(6) == 5, math.nan, rewards)}
        samples = Samples(batch, [prompt], completions, rewards, terms)
        made.append(module.make_pairs(Accelerator(cpu=True), lambda *_, s=samples: s, [prompt], (0,), args, metrics))
    ((pair,), (row,)), nothing = made
    assert (pair.prompt, pair.chosen, pair.rejected) == (prompt.ids, [5, 1], [7, 1]) and nothing == ([], [])
    assert (row["chosen"], row["rejected"]) == ("b", "d")  # the first of equal ones
    result = metrics.reduce(Accelerator(cpu=True))
    assert result["pairs/yield"] == 0.5 and result["pairs/truncated"] == pytest.approx(1 / 6)


def test_new_round_updates_the_reference(modules, tmp_path):
    options = ["--pair_prompts", 32, "--max_steps", 6, "--save_every", 3]
    rows = train_online(modules, tmp_path / "a", *options)
    firsts = [row["step"] for row in rows[1:] if "pairs/made" in row]
    assert len(firsts) >= 2 and firsts[0] == 1
    for row in rows[1:]:
        assert (row["rewards/margin"] == pytest.approx(0, abs=1e-5)) == (row["step"] in firsts)
    cut_short(tmp_path, 6)
    assert train_online(modules, tmp_path / "b", *options, "--resume") == rows


def test_too_few_pairs_end_the_run(modules, tmp_path, capsys):
    rows = train_online(modules, tmp_path, "--pair_prompts", 2, "--max_new_tokens", 1)
    assert "step 1: 0 pairs do not fill a step: training ends" in capsys.readouterr().out
    assert [row["step"] for row in rows] == [0, 1] and "eval/pass@1" in rows[-1]


# --- the curriculum ---


def curriculum(modules, rates, rank=0, processes=1, **options):
    module = modules["curriculum"]
    of_rank = types.SimpleNamespace(process_index=rank, num_processes=processes)
    sampler = module.Curriculum(range(len(rates)), module.Args(**options), of_rank)
    sampler.rates[:] = rates
    return sampler


def test_prompts_are_drawn_by_variance(modules):
    sampler = curriculum(modules, [0.5, 0.9, 1.0, 0.0], uniform_share=0.2)
    drawn = [sampler.draw(1)[0] for _ in range(4000)]
    shares = [drawn.count(prompt) / 4000 for prompt in range(4)]
    # 0.25 and 0.09 of 0.34, four fifths of the draws; and a quarter of the fifth that is left for each.
    expected = [0.8 * 0.25 / 0.34 + 0.05, 0.8 * 0.09 / 0.34 + 0.05, 0.05, 0.05]
    assert shares == pytest.approx(expected, abs=0.02)
    assert all(sorted(sampler.draw(4)) == [0, 1, 2, 3] for _ in range(20))  # none twice
    assert len(sampler.draw(9)) == 9  # a data set that is smaller than a step
    assert sorted(curriculum(modules, [1.0, 0.0], uniform_share=0.0).draw(2)) == [0, 1]


def test_pass_rates_agree_across_processes(modules):
    """The draw [4, 0, 2, 4] for two processes; prompt 4 is drawn twice, and prompt 2 has no gold answer."""
    samplers = [curriculum(modules, [0.5] * 5, rank, 2) for rank in range(2)]
    correct = [torch.tensor([1.0, 1, torch.nan, torch.nan]), torch.tensor([0.0, 0, 1, 0])]
    one = curriculum(modules, [0.5] * 5)
    assert sum(zip(*(sampler.draw(4) for sampler in samplers), strict=True), ()) == tuple(one.draw(4))

    def observe(accelerator):
        rank = accelerator.process_index
        samplers[rank].drawn = [4, 0, 2, 4][rank::2]
        samplers[rank].observe(accelerator, correct[rank])

    Processes(2).run(observe)
    for sampler in samplers:
        assert sampler.rates.tolist() == [0.25, 0.5, 0.5, 0.5, (0.75 + 0.5) / 2]
    correct[0][:] = torch.nan  # the other process has gold answers
    Processes(2).run(observe)
    with pytest.raises(Exit, match="needs gold answers"):
        one.observe(Accelerator(cpu=True), torch.full((4,), torch.nan))


def test_resumed_curriculum_draws_the_same(modules, tmp_path):
    """A step draws 12 of 24 prompts, so the draws of steps 3 and 4 depend on the rates of steps 1 and 2."""
    rows = (ROOT / "common" / "tiny" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(rows[:24]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(rows[24:28]), encoding="utf-8")
    words = ["--dataset", str(tmp_path), "--prompts_per_step", "12", "--save_every", "2"]

    def run(name, *more):
        train(modules["curriculum"], tmp_path / name, *words, "--eval_every", "2", *more)
        return metric_rows(tmp_path / name)

    whole = run("whole", "--max_steps", "4")
    run("resumed", "--max_steps", "2")
    assert run("resumed", "--max_steps", "4", "--resume") == whole
    rates = [row["curriculum/pass_rate"] for row in whole[1:]]
    assert rates[0] == 0.5 and len(set(rates)) > 2


# --- over all processes ---

REWARD = "def mine(completions, **_):\n    return [None if i % 7 == 2 else len(x) for i, x in enumerate(completions)]"


def test_reinforce_pp_whitens_across_processes(modules, tmp_path, monkeypatch):
    module = modules["reinforce_pp"]
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    batches, update = [], module.update
    monkeypatch.setattr(module, "update", lambda *inputs: batches.append(inputs[4]) or update(*inputs))
    words = [*SMALL, "--reward", f"{tmp_path}/mine.py:mine", "--max_steps", "1"]
    module.main([*words, "--output_dir", str(tmp_path / "run")])
    (batch,) = batches
    mask = batch["loss_mask"]
    tokens = batch["advantages"].expand(mask.shape)[mask].double()
    assert abs(float(tokens.mean())) < 1e-6 and float(tokens.std()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["mean_baseline", "reinforce_pp", "lite_ppo", "gdpo"])
def test_statistics_match_across_processes(name, modules):
    """Four prompts, of which each process has two; to some rows a part of the reward does not apply."""
    module, size = modules[name], 4
    args = module.Args(group_size=size, reward=["a", "b"])
    rewards = torch.rand(16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if name == "gdpo":
        rewards[[1, 9, 10]] = torch.nan
        rewards[5, 0] = torch.nan
    mask = torch.arange(6) < 1 + torch.arange(16)[:, None] % 6

    def advantages(accelerator):
        rows = torch.arange(16).view(4, size)[accelerator.process_index :: accelerator.num_processes].flatten()
        if name == "gdpo":
            parts = {"a": rewards[rows, 0], "b": rewards[rows, 1]}
            functions = [types.SimpleNamespace(name=part, weight=1.0) for part in parts]
            sums = module.compute_advantages(functions, parts, args)
            return rows, module.over_rollout(accelerator, sums, parts, args)
        sums = rewards[rows].sum(dim=1)
        if name == "mean_baseline":
            mean, _ = module.moments(sums, 0, accelerator.reduce)
            return rows, module.compute_advantages(sums, args, mean).float()
        centred = module.compute_advantages(sums, args)
        if name == "lite_ppo":
            return rows, module.divide_by_std(accelerator, centred, sums, args).float()
        return rows, module.whiten(accelerator, {"loss_mask": mask[rows], "advantages": centred}, args)

    ((_, expected),) = Processes(1).run(advantages)
    for rows, part in Processes(2).run(advantages):
        assert torch.allclose(part, expected[rows], atol=1e-6) and part.abs().max() > 0.3


def test_the_relative_variance_of_known_gradients():
    """Mean (3, 0, 4), standard deviations 1, 2, 2: the variance 9 over the square 25."""
    noise = torch.randn(20000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.tensor([3.0, 0, 4]) + noise * torch.tensor([1.0, 2, 2])
    variance = load(ROOT / "examples" / "gradient_variance.py").relative_variance
    assert variance(gradients) == pytest.approx(9 / 25, rel=0.03)
    few = torch.tensor([variance(part) for part in gradients[:6000].split(5)])  # the estimate is right for five as well
    assert float(few.median()) == pytest.approx(9 / 25, rel=0.15)


def test_only_reinforce_depends_on_an_offset(modules):
    measure = load(ROOT / "examples" / "gradient_variance.py").measure
    chosen = [*map(modules.get, ("reinforce", "mean_baseline", "rloo")), script("dr_grpo"), script("grpo")]
    sizes = dict(prompts_per_step=4, group_size=4)
    plain, shifted = (measure(chosen, "embedded", shift, 0, 4, **sizes) for shift in (0, 2))
    assert shifted["reinforce"] > 3 * plain["reinforce"] > 0
    for name in ("mean_baseline", "rloo", "grpo"):
        assert shifted[name] == pytest.approx(plain[name], rel=1e-3)
    # Including the row's own reward in the mean changes only a factor.
    assert plain["dr_grpo"] == pytest.approx(plain["rloo"], rel=1e-3)
