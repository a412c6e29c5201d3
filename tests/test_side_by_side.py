"""The page of tools/side_by_side.py: its lines are those of the scripts, its changes are right, and it can be read."""

import itertools
import json
import re
import shutil
import subprocess
import tomllib
import xml.etree.ElementTree

import pytest

import family
import same_text
import side_by_side

SOURCES = {script: source for script, source in family.found().items() if script in family.FAMILY}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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
def test_every_line_of_a_script_is_there_with_its_number(data, name):
    file, places = SOURCES[name].splitlines(), data["scripts"][name.removesuffix(".py")]["places"]
    shown = set(range(1, places["imports"]["numbers"][0]))  # the docstring
    for place, own in places.items():
        for number, line in zip(own["numbers"], lines_of(data, own), strict=True):
            if place == "Args" and " = option(" in line:  # without its help text
                assert file[number - 1].startswith(line.partition(":")[0])
            else:
                assert file[number - 1] == line
        shown |= set(range(own["numbers"][0], own["numbers"][-1] + 1))
    first, last = same_text.places(SOURCES[name])["Args"]
    shown |= set(range(first, last + 1))
    left_out = [file[number - 1] for number in range(1, len(file) + 1) if number not in shown]
    assert [line for line in left_out if line.strip()] == file[-3:]  # if __name__ == "__main__"


def test_the_changes_make_one_script_out_of_the_other(data):
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


@pytest.mark.parametrize(
    "old, new, marks",
    [
        (["a = total / rows"], ["a = total / tokens"], [[[0, 12, 16]], [[0, 12, 18]]]),
        (["x = 1", "y = f(x, 2)"], ["x = 1", "y = g(x, 2)"], [[[1, 4, 5]], [[1, 4, 5]]]),
        (["return a * (c - d)"], ["return a * (c - d) + b * c"], [[], [[0, 19, 26]]]),
        (["a  = b"], ["a = b"], [[], []]),  # only spaces differ
        (["one two"], ["def f(): return 7"], [[], []]),  # the lines as a whole differ
        (["x = f(a, b)"], ["if new:", "    x = f(a, c)"], [[[0, 9, 10]], [[1, 13, 14]]]),
    ],
)
def test_the_words_that_differ_are_marked_in_lines_that_are_nearly_the_same(old, new, marks):
    assert side_by_side.marks(old, new) == marks


def test_an_equation_that_is_not_known_is_shown_as_it_stands():
    """Also in a script that no table knows, whose options are written otherwise."""
    own = side_by_side.collect(SOURCES | {"mine.py": MINE})["scripts"]["mine"]
    assert own["equations"]["policy_loss"] == [["J = E[ &lt; x ]", "Eq. 1"]]
    ((known,),) = own["equations"][""]  # it has no compute_advantages
    assert known.strip().startswith("<math") and list(own["equations"]) == ["policy_loss", ""]
    assert own["places"]["Args"]["numbers"] == [13, 14, 15]


def test_an_equation_is_mathml_in_pieces():
    known = tomllib.loads((side_by_side.PARTS / "equations.toml").read_text(encoding="utf-8"))
    for text, pieces in known["mathml"].items():
        root = xml.etree.ElementTree.fromstring(f"<all>{pieces}</all>")
        assert {piece.tag for piece in root} == {"math"}, text


def test_the_page_is_one_file_that_loads_nothing(tmp_path):
    page = side_by_side.page("grpo", "mine", SOURCES | {"mine.py": MINE})
    assert page.count("<script") == page.count("</script>") == 2 and "/*" not in page.partition("<style>")[0]
    for part in ("page.html", "style.css", "page.js"):
        source = (side_by_side.PARTS / part).read_text(encoding="utf-8")
        assert not re.search(r"""\bsrc=|@import|url\(|fetch\(|XMLHttp|\bimport\(|(?:href|=) *["']?https?:""", source)


def test_the_command_writes_a_file_or_opens_the_browser(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(side_by_side.webbrowser, "open", opened.append)
    side_by_side.main(["grpo.py", "dapo", "--output", str(tmp_path / "page.html")])
    assert opened == [] and '"start":"grpo-dapo"' in (tmp_path / "page.html").read_text(encoding="utf-8")
    monkeypatch.setattr(side_by_side.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    side_by_side.main(["ppo", "gspo"])
    assert opened == [(tmp_path / "side_by_side.html").as_uri()]
    capsys.readouterr()
    for words, sentence in (
        (["grpo", "gppo"], "there is no script gppo.py"),
        (["grpo", "grpo"], "two different scripts"),
    ):
        with pytest.raises(SystemExit):
            side_by_side.main(words)
        assert sentence in capsys.readouterr().err


def light(colour):
    """The relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(part * weight for part, weight in zip(parts, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_colour_can_be_read_on_what_may_lie_behind_it(theme):
    style = (side_by_side.PARTS / "style.css").read_text(encoding="utf-8")
    pairs = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    colours = {name: pair[theme] for name, *pair in pairs}
    behind = ("paper", "gone", "come", "gone-word", "come-word", "why")
    places = {name: behind for name in ("text", "keyword", "string", "number", "function", "comment")}
    places |= {"dim": ("paper", "panel", "gone", "come"), "link": ("paper", "panel")}
    for name, backgrounds in places.items():
        for background in backgrounds:
            one, two = light(colours[name]), light(colours[background])
            assert (max(one, two) + 0.05) / (min(one, two) + 0.05) >= 4.5, f"{name} on {background}"


# Opens views in frames of three widths, and says what is wrong with them.
FRAMES = """<body><script>
const found = [];
addEventListener("message", ({ data }) => {
  found.push(data);
  document.title = JSON.stringify(found);
});
for (const width of [390, 1280, 1920]) {
  document.write(`<iframe src="page.html" style="width:${width}px;height:900px;border:0"></iframe>`);
}
</script></body>"""
CHECK = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
const states = scripts.filter((name) => name !== "grpo").map((name) => `grpo-${name}`);
states.push("dpo-ppo", ...functions.filter((name) => equations(scripts, name).length).map((name) => `all/${name}`));
const page = document.documentElement;
for (const state of states) {
  history.replaceState(null, "", `#${state}`);
  show();
  const say = (text) => errors.push(`#${state} at ${innerWidth}: ${text}`);
  if (page.scrollWidth > innerWidth) say("the page is wider than the window");
  for (const line of document.querySelectorAll(".equations p")) {
    const end = line.getBoundingClientRect().right + 1;
    const pieces = [...line.querySelectorAll("math, .dim")];
    if (pieces.some((piece) => piece.getBoundingClientRect().right > end)) say(`it cuts ${line.textContent}`);
  }
  if (!document.querySelector(".side .line")) say("no code");
}
parent.postMessage({ width: innerWidth, states: states.length, errors }, "*");
</script>"""


@pytest.mark.skipif(not BROWSER, reason="no Chromium")
def test_the_views_fit_at_every_width(tmp_path):
    page = side_by_side.page("grpo", "dapo", SOURCES)
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{CHECK}</body>"), encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --dump-dom".split()
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path}/profile", (tmp_path / "frames.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(re.search(r"<title>(.*?)</title>", result.stdout)[1])
    assert sorted(frame["width"] for frame in found) == [390, 1280, 1920]
    for frame in found:
        assert frame["errors"] == [] and frame["states"] > 15
