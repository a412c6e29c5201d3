"""tools/look.py: its page shows all answers of a run, whatever characters they contain."""

import json
import re

import pytest

import look
from pages import in_browser, needs_browser

# Texts that break pages: a closing script tag, a comment, right-to-left text, half a character.
TRAPS = ["</script>", "<!--", "<b>bold</b>", "\u202egnp", "", "é", "\ud83d", "\n", "/*DATA*/", "&lt;"]


def write(folder, name, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(text, encoding="utf-8")


def evaluation_row(step, completion, reward, prompt="1+1?"):
    return {"step": step, "evaluation": True, "prompt": prompt, "completion": completion, "answer": "2",
            "reward": reward, "truncated": False}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run of four steps with every odd text."""
    folder = tmp_path / "run"
    folder.mkdir()
    args = {"dataset": "embedded", "model_name_or_path": "</title><b>", "max_steps": 4}
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
    return folder


def data_of(page):
    """Return the data that page.js reads."""
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_has_the_answers(run):
    data = data_of(look.page(look.collect(run)))
    one, other = data["evaluations"]
    assert [(each["step"], each["reward"]) for each in one["evaluations"]] == [(0, 0.0), (4, 1 / 21)]
    assert sum(answer["count"] for answer in one["evaluations"][1]["answers"]) == 21
    assert one["evaluations"][1]["answers"][0] == {"text": "2", "reward": 1.0, "truncated": False, "count": 1}
    assert {answer["text"] for answer in one["evaluations"][0]["answers"]} == set(TRAPS)
    assert other["evaluations"][0]["reward"] == 0.5 and "user: " in other["prompt"]
    reward, *_ = data["curves"]
    assert [line["points"] for line in reward["lines"]] == [[[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]], [[0, 0.25]]]


def test_answers_without_a_reward_come_last():
    rows = [evaluation_row(0, text, reward) for text, reward in (("a", None), ("b", 0.5), ("c", 1.0), ("c", 1.0))]
    shown = look.evaluation(0, rows)
    assert shown["reward"] == 2.5 / 3 and [answer["text"] for answer in shown["answers"]] == ["c", "b", "a"]
    assert look.evaluation(0, rows[:1])["reward"] is None


def test_no_completion_closes_the_script_tag(run):
    page = look.page(look.collect(run))
    assert page.count("<script") == page.count("</script>") == 2 and page.count("<!--") == 0
    for part in ("page.html", "style.css", "page.js"):
        source = (look.PARTS / part).read_text(encoding="utf-8")
        assert not re.search(r"""\bsrc=|@import|url\(|fetch\(|XMLHttp|\bimport\(|innerHTML|=["']?https?:""", source)


def test_an_unfinished_run_is_shown(run):
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(run / name, "a", encoding="utf-8") as file:
            file.write('{"step": 5, "prom')
    assert look.collect(run)["step"] == 4


def test_page_limit_keeps_both_ends():
    (one,) = look.evaluations([evaluation_row(step, "a" * 10_000, 0.0) for step in range(1, 1001)])
    kept = [each["step"] for each in one["evaluations"]]
    assert kept[0] == 1 and kept[-1] == 1000 and len(kept) * 10_000 <= look.MAX_CHARACTERS < 21_000 * len(kept)
    (panel,) = look.curves([{"step": step, "reward/mean": 0.0} for step in range(100_000)])
    points = panel["lines"][0]["points"]
    assert points[0] == [0, 0.0] and points[-1] == [99_999, 0.0] and len(points) <= look.MAX_POINTS < 2.1 * len(points)


def test_the_command_names_what_is_missing(run, tmp_path, monkeypatch, capsys):
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
    (run / "samples.jsonl").write_text('{"step": 1, "evaluation": true}\n', encoding="utf-8")
    assert look.main([str(run)]) == 2 and "samples.jsonl" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("", encoding="utf-8")
    assert look.main([str(run)]) == 2 and "has no row yet" in capsys.readouterr().err


# Goes through the page, and says what is wrong with it.
CHECK = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
const report = { errors, answers: 0 };
report.numbers = panels[0].numbers.textContent;
report.texts = [...answers.querySelectorAll(".column")][0].textContent;
for (let i = 0; i < data.evaluations.length; i++) {
  showAnswers(i);
  report.answers += answers.querySelectorAll(".answer").length;
}
report.bold = main.querySelectorAll("b b, .answer b").length;
document.title = JSON.stringify(report);
</script>"""


@needs_browser
def test_the_page_shows_every_answer(run, tmp_path):
    page = look.page(look.collect(run)).replace("</body>", f"{CHECK}</body>")
    found = in_browser(tmp_path, "page.html", page)
    shown = ["</script>", "<!--", "<b>bold</b>", r"\u202egnp", "é", r"\ud83d", "/*DATA*/", "&lt;"]
    assert found["errors"] == [] and found["bold"] == 0
    assert all(f"0 × 2{text}" in found["texts"] for text in shown)
    assert found["numbers"] == "1 · 0.25 held-out (step 0)"
    assert found["answers"] == 2 * len(TRAPS) + 2
