"""tools/side_by_side.py: its page has the scripts' lines, and its tabs compute the numbers of vectors/."""

import importlib
import itertools
import json
import math
import re
import sys
import tomllib
import xml.etree.ElementTree

import pytest

import side_by_side
from pages import in_browser, needs_browser
from vectors import check
from vectors.generate import advantages, policy

FILES = side_by_side.script_sources().items()  # also of scripts of one's own
SOURCES = {name: source for name, source in FILES if name.removesuffix(".py") in side_by_side.ORDER}
CASES = check.load_cases()
MINE = '''"""Mine.

It maximizes

    J = E[ < x ]                 Eq. 1
    A_i = (R_i - mean(R)) / std(R)
    new = a & b
"""

import time


class Args:
    clip: float = 0.2
    size: int = option(
        8, "the size"
    )


def policy_loss():
    return "</script>"
'''


@pytest.fixture(scope="module")
def data():
    return json.loads(json.dumps(side_by_side.collect(SOURCES)))


def lines_of(data, place):
    return ["".join(line[1::2]) for line in data["texts"][place["text"]]]


@pytest.mark.parametrize("name", SOURCES)
def test_page_has_every_numbered_line(data, name):
    file, places = SOURCES[name].splitlines(), data["scripts"][name.removesuffix(".py")]["places"]
    shown = set(range(1, places["imports"]["numbers"][0]))  # the docstring
    for place, own in places.items():
        for number, line in zip(own["numbers"], lines_of(data, own), strict=True):
            if place == "Args" and " = option(" in line:  # without its help text
                assert file[number - 1].startswith(line.partition(":")[0])
            else:
                assert file[number - 1] == line
        shown |= set(range(own["numbers"][0], own["numbers"][-1] + 1))
    first, last = side_by_side.line_spans(SOURCES[name])["Args"]
    shown |= set(range(first, last + 1))
    left_out = [file[number - 1] for number in range(1, len(file) + 1) if number not in shown]
    assert [line for line in left_out if line.strip()] == file[-3:]  # if __name__ == "__main__"


def test_changes_turn_one_into_the_other(data):
    for one, two in itertools.combinations(data["scripts"].values(), 2):
        for name in one["places"].keys() & two["places"].keys():
            a, b = lines_of(data, one["places"][name]), lines_of(data, two["places"][name])
            made, done = [], 0
            key = f"{one['places'][name]['text']} {two['places'][name]['text']}"
            for i, i_end, j, j_end, old, new in data["changes"].get(key, []):
                made += a[done:i] + b[j:j_end]
                done = i_end
                assert all(a[i + line][start:end].strip() for line, start, end in old)
                assert all(b[j + line][start:end].strip() for line, start, end in new)
            assert made + a[done:] == b


def test_own_script_is_shown_offline():
    """An unknown equation is shown as text; no text closes the script tag."""
    own = side_by_side.collect(SOURCES | {"mine.py": MINE})["scripts"]["mine"]
    assert own["equations"]["policy_loss"] == [["J = E[ &lt; x ]", "Eq. 1"]]
    assert own["places"]["Args"]["numbers"] == [13, 14, 15] and own["ranges"] == {}
    page = side_by_side.page("grpo", "mine", SOURCES | {"mine.py": MINE})
    assert page.count("<script") == page.count("</script>") == 2 and "/*" not in page.partition("<style>")[0]
    for part in ("page.html", "style.css", "objectives.js", "groups.js", "play.js", "group.js", "page.js"):
        source = (side_by_side.PARTS / part).read_text(encoding="utf-8")
        assert not re.search(r"""\bsrc=|@import|url\(|fetch\(|XMLHttp|\bimport\(|(?:href|=) *["']?https?:""", source)


def test_docstring_equations_stand_at_functions(data):
    """A row of the table without an equation in a script is outdated."""
    known = tomllib.loads((side_by_side.PARTS / "equations.toml").read_text(encoding="utf-8"))
    shown = [row for own in data["scripts"].values() for rows in own["equations"].values() for row in rows]
    assert {text for text, *_ in shown} == set(known["mathml"].values())
    assert not any("" in own["equations"] for own in data["scripts"].values())
    for pieces in (known["mathml"] | known["play"]).values():
        root = xml.etree.ElementTree.fromstring(f"<all>{pieces}</all>")
        assert {piece.tag for piece in root} == {"math"}


def test_command_writes_or_opens_the_page(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(side_by_side.webbrowser, "open", opened.append)
    side_by_side.main(["grpo.py", "dapo", "--output", str(tmp_path / "page.html")])
    assert opened == [] and '"start":"grpo-dapo"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    monkeypatch.setattr(side_by_side.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    side_by_side.main(["--play"])
    assert opened == [(tmp_path / "side_by_side.html").as_uri()]
    assert '"pair":"grpo-dapo","start":"play"' in (tmp_path / "side_by_side.html").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        side_by_side.main(["grpo", "gppo"])
    assert "gppo.py" in capsys.readouterr().err


def test_the_comparison_as_text(monkeypatch, capsys):
    """Needs only requirements.txt."""
    monkeypatch.setitem(sys.modules, "pygments", None)
    side_by_side.main(["grpo", "dr_grpo", "--text"])
    lines = capsys.readouterr().out.splitlines()
    assert "== compute_advantages: same code, another default: normalize_std True -> False" in lines
    side_by_side.main(["ppo", "dapo", "--text"])
    lines = capsys.readouterr().out.splitlines()
    assert "== gae: only in ppo.py" in lines and "== overlong_penalty: only in dapo.py" in lines


# Opens each view, and says what is wrong with it.
CHECK = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
const codeStates = scripts.filter((name) => name !== "grpo").map((name) => `grpo-${name}`);
codeStates.push("dpo-ppo", ...functions.filter((name) => equations(scripts, name).length).map((name) => `all/${name}`));
const states = [...codeStates, "play", ...SCENES.map(([, settings]) => `play/${settings}`)];
states.push("group", ...GROUP_SCENES.map(([, settings]) => `group/${settings}`));
for (const state of states) {
  history.replaceState(null, "", `#${state}`);
  show();
  const say = (text) => errors.push(`#${state}: ${text}`);
  const isCode = codeStates.includes(state);
  if (isCode && !document.querySelector(".side .line")) say("no code");
  if (state === "grpo-dr_grpo") {
    if (!main.textContent.includes("same code, other default: normalize_std True → False")) say("no default");
  }
  if (!isCode && /NaN|undefined|Infinity/.test(main.innerHTML)) say("a number is missing");
}
document.title = JSON.stringify({ states: states.length, errors });
</script>"""


@needs_browser
def test_views_have_code_and_numbers(tmp_path):
    page = side_by_side.page("grpo", "dapo", SOURCES).replace("</body>", f"{CHECK}</body>")
    found = in_browser(tmp_path, "page.html", page)
    assert found["errors"] == [] and found["states"] > 20


# The cases of vectors/ whose objective a function of objectives.js computes, token by token.
OBJECTIVES = {
    "policy/ppo": "grpo",
    "policy/grpo": "grpo",
    "policy/dapo": "grpo",
    "policy/dual-clip": "dualClip",
    "policy/gspo": "gspo",
    "policy/dcpo": "dcpo",
    "variants/sapo": "sapo",
}
ROW_INPUTS = ("logprobs", "old_logprobs", "advantages")
COMPUTE = """<title></title><script>
{program}
document.title = JSON.stringify({points}.map(([name, ...inputs]) => globalThis[name](...inputs)));
</script>"""


def tokens(inputs):
    """Each row of a case as a list of tokens, as objectives.js takes them."""
    rows = []
    for logprobs, old_logprobs, advantage in zip(*(inputs[name] for name in ROW_INPUTS), strict=True):
        log_ratios = [new - old for new, old in zip(logprobs, old_logprobs, strict=True)]
        row_ratio = math.exp(sum(log_ratios) / len(log_ratios))
        rows.append([])
        for column, log_ratio in enumerate(log_ratios):
            token = {"old": math.exp(old_logprobs[column]), "ratio": math.exp(log_ratio), "rowRatio": row_ratio}
            token["advantage"] = advantage[column] if isinstance(advantage, list) else advantage
            rows[-1].append(token)
    return rows


@needs_browser
@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_match_the_vectors(name, tmp_path):
    """The gradient of each token by its log-prob, and the loss of the whole case."""
    case = CASES[name]
    rows = tokens(case["inputs"])
    points = [(OBJECTIVES[name], token, case["options"]) for row in rows for token in row]
    program = (side_by_side.PARTS / "objectives.js").read_text(encoding="utf-8")
    page = COMPUTE.format(program=program, points=json.dumps(points))
    answers = iter(in_browser(tmp_path, "objectives.html", page))
    answer = {"loss": 0.0, "gradient": []}
    for weights in case["worked"]["weights"]:
        gradients = []
        for weight in weights:
            found = next(answers)
            answer["loss"] -= weight * found["objective"]
            gradients.append(-weight * found["gradient"])
        answer["gradient"].append(gradients)
    assert check.compare(case, answer)[0] == check.SAME


def test_sliders_start_at_the_defaults(data):
    for script in ("grpo", "dapo", "gspo", "dcpo"):
        args = importlib.import_module(script).Args()
        options = ("clip_low", "clip_high", "max_ratio") if script == "dcpo" else ("clip_low", "clip_high")
        assert data["scripts"][script]["ranges"] == {option: getattr(args, option) for option in options}


# Moves each slider of the tab, and says what is then wrong.
MOVE = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
function check(place) {
  for (const algorithm of ALGORITHMS) {
    const sentences = document.querySelector(`.card.${algorithm.id}`).textContent;
    const { gradient } = at(algorithm);
    const says = /learns (nothing|anything) in/.test(sentences);
    if (says !== (gradient === 0)) errors.push(`${place}: ${algorithm.id} has the gradient ${gradient}`);
  }
}
for (const input of document.querySelectorAll("input")) {
  const name = input.parentElement.textContent;
  for (const part of [0, 1, 0.6, 0.3]) {
    const before = main.innerHTML + JSON.stringify(state);
    input.value = Number(input.min) + part * (input.max - input.min);
    input.dispatchEvent(new Event("input"));
    if (main.innerHTML + JSON.stringify(state) === before) errors.push(`${name} moves nothing`);
    const { advantage } = state;
    for (state.advantage of [-1, 0, 1, advantage]) {
      redraw();
      check(`${name}, A = ${state.advantage}`);
    }
  }
}
document.title = JSON.stringify(errors);
</script>"""


@needs_browser
def test_sliders_move_pictures_and_sentences(tmp_path):
    page = side_by_side.page("grpo", "dapo", SOURCES, play=True)
    assert in_browser(tmp_path, "play.html", page.replace("</body>", f"{MOVE}</body>")) == []


# Shows each scene of the tab, and keeps its numbers.
SHOWN = """<script>
const found = [];
addEventListener("error", (event) => found.push(event.message));
for (const [, settings] of [["", ""], ...GROUP_SCENES]) {
  readAddress(settings);
  redraw();
  const rows = GROUP_ALGORITHMS.map((algorithm) => [algorithm.id, groupRows(algorithm)]);
  found.push({ ...state, algorithms: Object.fromEntries(rows) });
}
document.title = JSON.stringify(found);
</script>"""
STEPS = {  # how vectors/ calls what the cards show
    "grpo": ("group", {"mean": "rows"}),
    "dr_grpo": ("none", {"mean": "constant"}),
    "dapo": ("group", {"mean": "tokens"}),
    "gspo": ("group", {"mean": "rows", "ratio": "sequence"}),
    "dcpo": (None, {"mean": "prompts"}),
}


def expected_rows(state, name):
    """Return [(advantage, push)] of the rows of one algorithm, from the generator of the vectors."""
    rewards = [state[f"reward{row}"] for row in range(1, 9)]
    deviation, step = STEPS[name]
    options = {"baseline": "group_mean", "deviation": deviation, "std_ddof": 1, "std_eps": 1e-6}
    inputs, operation = {"rewards": [rewards]}, advantages.group_advantages
    if name == "dcpo":
        right = round(8 * state["earlier"])  # the eight rows of each earlier visit
        earlier = [[1.0] * right + [0.0] * (8 - right)] * round(state["visits"])
        inputs, operation = {"visits": [*earlier, rewards]}, advantages.smoothed_advantages
        options = {"std_ddof": 0, "smooth": True}
    answer, _ = operation(inputs, options)
    logprobs = [[-1.0] * round(state[f"length{row}"]) for row in range(1, 9)]
    batch = {"logprobs": logprobs, "old_logprobs": logprobs, "advantages": answer["advantages"][-1]}
    clip = {"objective": "clip", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2, "constant": state["constant"]}
    expected, _ = policy.policy_step(batch, clip | step)
    pushes = [-sum(row) for row in expected["gradient"]]
    return list(zip(answer["advantages"][-1], pushes, strict=True))


@needs_browser
def test_group_gradients_match_the_vectors(tmp_path):
    page = side_by_side.page("grpo", "dapo", SOURCES).replace('"start":"grpo-dapo"', '"start":"group"')
    found = in_browser(tmp_path, "group.html", page.replace("</body>", f"{SHOWN}</body>"))
    assert len(found) == 7
    for state in found:
        for name, shown in state["algorithms"].items():
            rows = [(row["advantage"], row["push"]) for row in shown]
            assert rows == [pytest.approx(row, rel=1e-9, abs=1e-12) for row in expected_rows(state, name)], name
