"""The page of tools/look.py: it has what the files of a run have, whatever stands in them."""

import json
import re

import pytest

import look
from pages import in_browser, needs_browser

# What a completion may hold: the end of a script, a comment, text that turns around, half a character.
TRAPS = ["</script>", "<!--", "<b>bold</b>", "\u202egnp", "", "é", "\ud83d", "\n", "/*DATA*/", "&lt;"]


def write(folder, name, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(text, encoding="utf-8")


def token_row(step, tokens, reward=1.0, **columns):
    """A row of tokens.jsonl with numbers that are easy to compute."""
    numbers = range(len(tokens))
    row = {"step": step, "prompt": "1+1?", "reward": reward, "truncated": False, "advantage": 0.5, "tokens": tokens}
    row |= {"logprob": [-0.5 - i for i in numbers], "change": [0.25 * (-1) ** i for i in numbers]}
    row |= {"entropy": [0.5 for _ in numbers]}
    return row | columns


def evaluation_row(step, completion, reward, prompt="1+1?"):
    return {"step": step, "evaluation": True, "prompt": prompt, "completion": completion, "answer": "2",
            "reward": reward, "truncated": False}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run of four steps with every trap."""
    folder = tmp_path / "run"
    folder.mkdir()
    args = {"script": "grpo", "dataset": "embedded", "model_name_or_path": "</title><b>", "max_steps": 4}
    (folder / "args.json").write_text(json.dumps(args | {"learning_rate": 1e-4}), encoding="utf-8")
    metrics = [{"step": 0, "eval/reward": 0.25}]
    for step in (1, 2, 3, 4):
        metrics.append({"step": step, "reward/mean": step / 4, "completion/length": 3.0, "policy/entropy": 0.1})
    metrics[-1]["policy/entropy"] = float("nan")  # which JSON does not have
    write(folder, "metrics.jsonl", metrics)
    messages = [{"role": "system", "content": "sum"}, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
    samples = [evaluation_row(step, text, 0.0) for step in (0, 4) for text in (*TRAPS, *TRAPS)]
    samples += [evaluation_row(4, "2", 1.0), evaluation_row(4, "word " * 3000, 0.5, messages)]
    write(folder, "samples.jsonl", [{"step": 1, "prompt": "1+1?", "completion": "training"}, *samples])
    rows = [
        token_row(1, TRAPS),
        token_row(1, ["2", "<eos>"], reward=0.0, advantage=-0.5, truncated=True),
        token_row(2, ["long", " "] * 2000, reward=0.0, advantage=-0.5),
        token_row(2, ["long", " "] * 2000, reward=0.0, advantage=-0.5),
        token_row(4, ["x" * 300, "<eos>"], prompt="<|im_start|>user\n1+1?"),
        token_row(4, ["0"], change=[0.0], prompt="2+2?"),
    ]
    write(folder, "tokens.jsonl", rows)
    return folder


def data_of(page):
    """What page.js would read."""
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_has_the_tokens_and_the_answers_of_the_run(run):
    data = data_of(look.page(look.collect(run)))
    written = [json.loads(line) for line in (run / "tokens.jsonl").read_text(encoding="utf-8").splitlines()]
    shown = [row for step in data["steps"] for row in step["rows"]]
    assert [step["step"] for step in data["steps"]] == [1, 2, 4] and data["left_out"] == 0
    for name in ("tokens", "logprob", "change", "entropy", "advantage", "truncated", "reward"):
        assert [row[name] for row in shown] == [row[name] for row in written]
    one, other = data["evaluations"]
    assert [(each["step"], each["reward"]) for each in one["evaluations"]] == [(0, 0.0), (4, 1 / 21)]
    assert sum(answer["count"] for answer in one["evaluations"][1]["answers"]) == 21
    assert one["evaluations"][1]["answers"][0] == {"text": "2", "reward": 1.0, "truncated": False, "count": 1}
    assert {answer["text"] for answer in one["evaluations"][0]["answers"]} == set(TRAPS)
    assert other["evaluations"][0]["reward"] == 0.5 and "user: " in other["prompt"]
    reward, *_ = data["curves"]
    assert [line["points"] for line in reward["lines"]] == [[[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]], [[0, 0.25]]]


def test_a_completion_ends_neither_the_script_nor_the_page(run):
    page = look.page(look.collect(run))
    assert page.count("<script") == page.count("</script>") == 2 and page.count("<!--") == 0
    for part in ("page.html", "style.css", "page.js"):
        source = (look.PARTS / part).read_text(encoding="utf-8")
        assert not re.search(r"""\bsrc=|@import|url\(|fetch\(|XMLHttp|\bimport\(|innerHTML|=["']?https?:""", source)


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(run):
    for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        with open(run / name, "a", encoding="utf-8") as file:
            file.write('{"step": 5, "prom')
    assert look.collect(run)["step"] == 4


def test_a_page_has_a_limit_and_keeps_both_ends():
    steps = look.token_steps([token_row(step, ["a"] * 1000) for step in range(1, 1001)])
    kept = [step["step"] for step in steps[0]]
    assert kept[0] == 1 and kept[-1] == 1000 and len(kept) * 1000 <= look.MAX_TOKENS < 2100 * len(kept)
    assert len(kept) + steps[1] == 1000
    (panel,) = look.curves([{"step": step, "reward/mean": 0.0} for step in range(100_000)])
    points = panel["lines"][0]["points"]
    assert points[0] == [0, 0.0] and points[-1] == [99_999, 0.0] and len(points) <= look.MAX_POINTS < 2.1 * len(points)


def test_the_command_writes_a_page_and_opens_it_or_names_what_is_missing(run, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(look.webbrowser, "open", opened.append)
    assert look.main([str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert opened == [] and '"run":"run"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert look.main([str(run)]) == 0
    assert opened == [(run / "look.html").as_uri()]
    capsys.readouterr()
    assert look.main([str(tmp_path / "nothing")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no args.json" in line
    (run / "tokens.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    assert look.main([str(run)]) == 2 and "tokens.jsonl" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("", encoding="utf-8")
    assert look.main([str(run)]) == 2 and "has no row yet" in capsys.readouterr().err


# Goes through the page, and says what is wrong with it.
CHECK = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
const report = { errors, tips: [], answers: 0 };
for (state.colour of Object.keys(COLOURS)) steps.forEach((step, i) => go(i));
state.colour = "change";
go(0);
report.numbers = panels[0].numbers.textContent;
const tokens = [...view.querySelectorAll('.token[data-row="0"]')];
report.texts = tokens.map((token) => token.textContent);
report.second = [...view.querySelectorAll(".about")].at(-1).textContent;
for (const token of [tokens[0], tokens[4], tokens.at(-1)]) {
  token.click();
  report.tips.push(tip.textContent);
}
go(1);
report.folded = view.querySelectorAll(".token").length;
report.rows = view.querySelectorAll(".row").length;
view.querySelector(".more").click();
report.unfolded = view.querySelectorAll(".token").length;
for (let i = 0; i < data.evaluations.length; i++) {
  state.prompt = i;
  showAnswers();
  report.answers += answers.querySelectorAll(".answer").length;
}
report.bold = main.querySelectorAll("b b, .text b, .answer b").length;
document.title = JSON.stringify(report);
</script>"""


# The text of the page, with the numbers of its second token.
SHOWN = """
document.querySelectorAll(".token")[1].click();
for (const script of document.querySelectorAll("script")) script.remove();
document.title = JSON.stringify(document.body.textContent);
"""


@needs_browser
@pytest.mark.parametrize(
    "columns, expected, absent",
    [
        # Log-probs that are not finite are null in tokens.jsonl.
        ({"change": [None, None], "entropy": [0.5, None]}, ["not finite", "22.3 → none %"], "→ 100"),
        ({"advantage": None}, ["22.3 → 17.4 %"], "dvantage"),  # ppo.py has one per token and records none
    ],
)
def test_the_page_names_no_number_that_a_run_does_not_have(columns, expected, absent, run, tmp_path):
    row = token_row(1, ["2", "<eos>"], **columns)
    write(run, "tokens.jsonl", [{name: value for name, value in row.items() if value is not None}])
    page = look.page(look.collect(run)).replace("</body>", f"<script>{SHOWN}</script></body>")
    shown = in_browser(tmp_path, "page.html", page)
    assert all(text in shown for text in expected) and absent not in shown


@needs_browser
def test_the_page_shows_every_token_and_answer(run, tmp_path):
    page = look.page(look.collect(run)).replace("</body>", f"{CHECK}</body>")
    found = in_browser(tmp_path, "page.html", page)
    shown = ["</script>", "<!--", "<b>bold</b>", r"\u202egnp", "·", "é", r"\ud83d", "↵\n", "/*DATA*/", "&lt;"]
    assert found["errors"] == [] and found["texts"] == shown and found["bold"] == 0
    assert found["second"] == "reward 0advantage −0.5whole answer ×1.00cut off"
    assert found["numbers"] == "0.25 · 0.25 held-out (step 0)"  # at step 1, before the next evaluation
    first, part, _ = found["tips"]
    assert "60.7 → 77.9 %" in first and "+0.25, ratio 1.284" in first
    assert "a part of a character" in part
    assert found["rows"] == 1 and found["folded"] == 600 and found["unfolded"] == 4000  # two equal rows are one
    assert found["answers"] == 2 * len(TRAPS) + 2
