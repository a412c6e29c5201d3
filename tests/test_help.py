"""docs/monitoring.md and docs/your_own.md: their code runs, their commands do what they say, their names exist."""

import json
import re
import shlex

import pytest
import recipes
import torch

from common.errors import InputError
from common.args import parse_args
from exercises import load
from testbed import ALL, ROOT, script

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("monitoring", "your_own")}
TEXT = "\n".join(PAGES.values())
SMALL = "--prompts_per_step 4 --group_size 4 --eval_prompts 1 --eval_samples 4".split()


def blocks(page, kind):
    """The code blocks of one kind in a page, without the indentation of a list."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def commands():
    """The command lines of both pages that start a script of this project: (script, arguments)."""
    lines = "\n".join("\n".join(blocks(page, "bash")) for page in PAGES).replace("\\\n", " ").splitlines()
    start = rf"(python|accelerate launch) ({'|'.join(ALL)})\.py "  # recipes have tests of their own
    words = [shlex.split(line, comments=True) for line in lines if re.match(start, line)]
    return [(line[i].removesuffix(".py"), line[i + 1 :]) for line in words for i in [1 + (line[0] == "accelerate")]]


def run(command, folder, steps):
    """The rows of metrics.jsonl of a small run of a command of the pages, named by its start; only one that does not
    train is evaluated."""
    ((name, arguments),) = [(n, a) for n, a in commands() if command == f"{n}.py {' '.join(a)}"[: len(command)]]
    with pytest.MonkeyPatch.context() as patch:
        if steps:
            patch.setattr(script(name), "evaluate", lambda *arguments: {})
        script(name).main([*arguments, *SMALL, "--max_steps", str(steps), "--output_dir", str(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# --- what the pages name exists ---


def test_every_command_is_accepted():
    assert len(commands()) >= 10
    for name, arguments in commands():
        parse_args(script(name).Args, arguments)


def test_every_option_exists():
    names = {name for script_name in ALL for name in script(script_name).Args.__dataclass_fields__}
    for path in recipes.files().values():
        names |= recipes.Source(path.read_text(encoding="utf-8")).options.keys()
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
