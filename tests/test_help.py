"""docs/monitoring.md and docs/your_own.md: their code runs, their commands do what they say, their names exist."""

import json
import re
import shlex

import pytest
import recipes
import torch
from accelerate import Accelerator

from common.errors import InputError
from common.harness.command_line import parse_args
from exercises import load
from testbed import ALL, ROOT, b1, script, totals_of

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("monitoring", "your_own")}
TEXT = "\n".join(PAGES.values())
SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 1 --eval_samples 4".split()


def blocks(page, kind):
    return recipes.blocks(PAGES[page], kind)


def commands():
    """The command lines of both pages that start a script of this project: (script, arguments)."""
    lines = "\n".join("\n".join(blocks(page, "bash")) for page in PAGES).replace("\\\n", " ").splitlines()
    start = rf"(python|accelerate launch) ({'|'.join(ALL)})\.py "  # what a diff of a page makes has tests of its own
    words = [shlex.split(line, comments=True) for line in lines if re.match(start, line)]
    return [(line[i].removesuffix(".py"), line[i + 1 :]) for line in words for i in [1 + (line[0] == "accelerate")]]


def run(command, folder, steps):
    """The rows of metrics.jsonl of a small run of a command of the pages, named by its start; only one that does not
    train is evaluated."""
    ((name, arguments),) = [(n, a) for n, a in commands() if command == f"{n}.py {' '.join(a)}"[: len(command)]]
    with pytest.MonkeyPatch.context() as patch:
        if steps:
            patch.setattr(script(name), "evaluate", lambda *arguments: ({}, None))
        script(name).main([*arguments, *SMALL, "--max_steps", str(steps), "--output_dir", str(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# --- what the pages name exists ---


def test_every_command_is_accepted():
    assert len(commands()) >= 10
    for name, arguments in commands():
        parse_args(script(name).Args, arguments)


def test_every_option_exists():
    names = {name for script_name in ALL for name in script(script_name).Args.__dataclass_fields__}
    of_accelerate = {"mixed_precision", "num_processes", "list"}  # and that of examples/recipes.py
    named = {x.removeprefix("no_") for x in re.findall(r"(?<![\w-])--(\w+)", TEXT)} - of_accelerate
    assert len(named) >= 40 and named - names == set()


def test_every_metric_exists():
    """In sentences, and in the rows that the commands gave."""
    documented = set(
        re.findall(r"^\| `(\S+)` \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    groups = "|".join({name.split("/")[0] for name in documented})
    named = set(re.findall(rf"`((?:{groups})/[\w@]+)`", TEXT))
    rows = [json.loads(line) for page in PAGES for block in blocks(page, "json") for line in block.splitlines()]
    named |= {key for row in rows for key in row} - {"step"}
    named = {"reward_part/<name>" if name.startswith("reward_part/") else name for name in named}
    assert len(rows) >= 5 and len(named) >= 30 and named - documented == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_section_is_linked_to_and_every_link_has_its_section(page):
    def anchors(text):
        titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
        return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]

    contents = re.findall(r"\]\(#(.*?)\)", PAGES[page].partition("\n## ")[0])
    assert contents == anchors(PAGES[page])[1:]
    linked = re.findall(r"\]\((?:(\w+)\.md)?#([\w-]+)\)", PAGES[page])
    texts = {other: (ROOT / "docs" / f"{other or page}.md").read_text(encoding="utf-8") for other, _ in linked}
    assert all(anchor in anchors(texts[other]) for other, anchor in linked)


# --- the commands provoke what they are there for ---


@pytest.mark.parametrize(
    "command, steps, symptom",
    [
        ("grpo.py --learning_rate 1e-7", 2, lambda row: row["optim/grad_norm"] > 0.3 and row["policy/kl_ref"] < 1e-6),
        ("grpo.py --reward format", 1, lambda row: row["advantage/zero_groups"] == 1 and row["optim/grad_norm"] == 0),
        ("grpo.py --kl_coef 0 --max_steps 10", 1, lambda row: abs(row["optim/loss"]) < 1e-6 < row["optim/grad_norm"]),
        ("grpo.py --learning_rate 1e-2", 2, lambda row: row["policy/kl_ref"] > 1 and row["reward/accuracy"] < 0.1),
        ("grpo.py --max_new_tokens 16", 1, lambda row: row["completion/truncated"] > 0.2 > row["reward/accuracy"]),
        ("dapo.py --max_new_tokens 12", 1, lambda row: row["sampling/keep_rate"] < 0.8 and row["sampling/rounds"] > 1),
    ],
)
def test_a_command_provokes_its_symptom(command, steps, symptom, tmp_path):
    last = run(command, tmp_path, steps)[-1]
    assert last["step"] == steps and symptom(last)


@pytest.mark.parametrize("command", ["grpo.py --learning_rate 1e30", "grpo.py --temperature 1e-40"])
def test_what_is_not_finite_ends_with_the_printed_line(command, tmp_path):
    with pytest.raises(InputError) as error:
        run(command, tmp_path, 2)
    line = re.sub(r"[\d.]+(?=,)", "NUMBER", str(error.value))
    assert line in re.sub(r"[\d.]+(?=,)", "NUMBER", PAGES["monitoring"])


def test_the_reward_that_pays_for_length_makes_completions_longer(tmp_path, monkeypatch):
    (reward,) = [block for block in blocks("monitoring", "python") if "def longer" in block]
    (tmp_path / "longer.py").write_text(reward, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = run("grpo.py --reward longer.py:longer", tmp_path / "run", 2)
    assert rows[2]["completion/length"] > rows[1]["completion/length"] + 3


# --- a reward of your own ---


def test_the_json_reward_is_that_of_the_file_and_takes_any_text():
    reward = blocks("your_own", "python")[0]
    assert reward.removeprefix("import json\n\n\n") in (ROOT / "examples" / "json_task.py").read_text(encoding="utf-8")
    names = {}
    exec(reward, names)
    wanted = {"a": 7, "b": 2}
    texts = ['{"a": 7, "b": 2}', '{"a": 7}', '{"a": 7, "b": 2, "c": 1, "d": 1}', "{}", '{"a": 7 "b": 2}', "[1]", "",
             "[" * 100_000, "1" * 5_000]  # fmt: skip
    rewards = names["json_object"](completions=texts, wanted=[wanted] * len(texts), truncated=[False] * len(texts))
    assert rewards == [1.0, 0.75, 0.75, 0.5, 0, 0, 0, 0, 0]


def test_the_json_task_runs_without_gold_answers(tmp_path):
    """Its data and a model that is hardly trained load with the page's command, and its tokenizer spells any answer."""
    task = load(ROOT / "examples" / "json_task.py")
    task.main(tmp_path / "json", steps=2)
    ((name, arguments),) = [(n, a) for n, a in commands() if "runs/json/model" in a]
    arguments = [argument.replace("runs/json", str(tmp_path / "json")) for argument in arguments]
    reward = f"{ROOT / 'examples' / 'json_task.py'}:json_object"
    arguments[arguments.index("--reward") + 1] = reward
    script(name).main([*arguments, *SMALL, "--max_steps", "0", "--output_dir", str(tmp_path / "run")])
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert row["eval/reward"] == 0 and "eval/pass@1" not in row  # without gold answers
    tokenizer, (line, *_) = (
        task.make_tokenizer(),
        (tmp_path / "json" / "train.jsonl").read_text(encoding="utf-8").splitlines(),
    )
    answer = json.dumps(json.loads(line)["wanted"])
    assert tokenizer.decode(tokenizer.encode(answer)) == answer


def test_a_column_with_another_name_is_found(tmp_path, monkeypatch):
    """The five lines on data of one's own."""
    code = next(block for block in blocks("your_own", "bash") if "my.jsonl" in block and "python -c" in block)
    program = code.split('python -c "')[1].split('" >')[0]
    monkeypatch.chdir(ROOT)
    lines = []
    exec(program, {"print": lines.append})
    (tmp_path / "my.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    rows = run("grpo.py --dataset my.jsonl", tmp_path / "run", 0)
    assert len(lines) == 1024 and rows[0]["eval/pass@1"] > 0


# --- an algorithm of your own ---


@pytest.fixture(params=[0, 1, 4], ids=["rloo", "cispo", "reinforce_pp"])
def own(request, tmp_path):
    """A script of the page: (module, source, its section's title)."""
    diff = blocks("your_own", "diff")[request.param]
    name, source, changes = recipes.changed(diff)
    title = PAGES["your_own"].split(diff)[0].rpartition("\n## ")[2].splitlines()[0]
    assert title.lower().endswith(f"{name.removesuffix('.py').replace('_pp', '++ with a baseline')} in {changes} lines")
    (tmp_path / name).write_text(source, encoding="utf-8")
    return load(tmp_path / name), source


def test_a_script_of_the_page_runs(own, tmp_path):
    module, _ = own
    module.main([*SMALL, "--max_steps", "2", "--output_dir", str(tmp_path / "run")])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["step"] == 2 and rows[-1]["optim/grad_norm"] > 0


@pytest.mark.parametrize("own", [0], indirect=True)
def test_rloo_is_reinforce_with_the_mean_of_the_others(own):
    """arXiv 2402.14740: the gradient of 1/R sum_i (R_i - mean of the other rewards) log pi(o_i)."""
    module, _ = own
    args, rewards = module.Args(group_size=4), torch.tensor([0.3, 1.0, 0.0, 0.25], dtype=torch.float64)
    advantages = module.compute_advantages(rewards, args)
    expected = [r - (sum(rewards.tolist()) - r) / 3 for r in rewards.tolist()]
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-12)
    assert (module.compute_advantages(torch.full((4,), 0.3), args) == 0).all()
    _, new, _, mask = b1()
    losses, _ = module.policy_loss(new, new.detach(), advantages, mask, args)
    (losses * module.token_weights(mask, totals_of(mask, 4), args)).sum().backward()
    gradient, new.grad = new.grad.clone(), None
    (-(torch.where(mask, new, 0).sum(dim=1) * advantages[:, 0]).sum() / 4).backward()
    assert torch.allclose(gradient, new.grad, atol=1e-12) and gradient.abs().max() > 0.01


@pytest.mark.parametrize("own", [1], indirect=True)
def test_cispo_keeps_the_gradient_of_a_clipped_token(own):
    """arXiv 2506.13585, Eq. 4: it is the clipped weight times the advantage, over the tokens."""
    module, _ = own
    ratios = [0.5, 1.0, 4.0, 50.0]
    new = torch.tensor([ratios, ratios], dtype=torch.float64).log().requires_grad_()
    mask, advantages = torch.ones(2, 4, dtype=torch.bool), torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    losses, _ = module.policy_loss(new, torch.zeros_like(new), advantages, mask, module.Args())
    (losses * module.token_weights(mask, totals_of(mask, 2), module.Args())).sum().backward()
    weights = torch.tensor([[0.5, 1.0, 4.0, 5.0]], dtype=torch.float64)
    assert torch.allclose(new.grad, -weights * advantages / 8, atol=1e-12)


@pytest.mark.parametrize("own", [4], indirect=True)
def test_reinforce_pp_whitens_over_the_tokens_of_all_processes(own, tmp_path, monkeypatch):
    module, _ = own
    rewards = (
        "def mine(completions, **_):\n    return [None if i % 7 == 2 else len(x) for i, x in enumerate(completions)]"
    )
    (tmp_path / "mine.py").write_text(rewards, encoding="utf-8")
    batches, sums = [], []
    monkeypatch.setattr(module, "update", lambda *arguments: batches.append(arguments[4]))
    monkeypatch.setattr(Accelerator, "reduce", lambda self, tensor, how=None: sums.append(how) or tensor)
    arguments = [
        *SMALL,
        "--reward",
        f"{tmp_path}/mine.py:mine",
        "--max_steps",
        "1",
        "--output_dir",
        str(tmp_path / "run"),
    ]
    module.main(arguments)
    (batch,) = batches
    counted = batch["loss_mask"] & ~batch["rewards"].isnan()[:, None]
    tokens = batch["advantages"].expand(counted.shape)[counted].double()
    assert abs(float(tokens.mean())) < 1e-6 and float(tokens.std()) == pytest.approx(1, abs=1e-5)
    assert sums.count(None) == 2 and not counted.any(dim=1).all()


# --- functions elsewhere ---


def test_the_snippet_takes_a_step_with_another_loop(monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    torch.manual_seed(0)
    exec(blocks("your_own", "python")[-1], names)
    mask = names["mask"]
    assert torch.allclose(names["logprobs"][mask], names["sampled"][mask], atol=1e-5)
    assert 0 < names["rewards"].mean() < 1 and names["rewards"].shape == (16,)
    assert names["lm"].lm_head.weight.grad.norm() > 0.01
