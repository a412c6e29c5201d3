"""docs/side_by_side.html as its readers see it: every state opened, at three widths, light and dark, by keyboard.

python tests/browser/test_side_by_side_in_browser.py FOLDER    screenshots of some states, to be looked at
"""

import json
import pathlib
import sys
import tempfile

import pytest

sys.path.append(str(pathlib.Path(__file__).parent))

import chromium

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not chromium.BROWSER, reason="no Chromium")
URL = (ROOT / "docs" / "side_by_side.html").as_uri()
HELPERS = (pathlib.Path(__file__).parent / "states.js").read_text(encoding="utf-8")
SIZES = [(390, 844), (820, 1180), (1440, 900)]
LOOK_AT = ["map", "grpo-dapo", "grpo-dapo/token_weights", "grpo-ppo/policy_loss", "dapo-dcpo/main", "all/token_weights"]
LOOK_AT += ["all/policy_loss", "batch", "common", "common/decode", "help"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with chromium.Page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def at(page):
    """A function that opens a state in a new load of the page; the program must not have failed at the end."""
    page.errors.clear()
    page.requests.clear()

    def opened(state, width=1440, height=900, dark=False):
        page.resize(width, height, dark)
        page.open(f"{URL}#{state}")
        return page

    yield opened
    assert page.errors == []
    assert {url.split("#")[0] for url in page.requests} <= {URL, "about:blank", "data:,"}, "it loads something"


def test_every_state_opens_and_every_link_leads_somewhere(at):
    import side_by_side
    from tree import Tree

    page = at("map")
    states = side_by_side.states(side_by_side.stored(Tree()))
    page.run(HELPERS + ";0")
    found = page.run(f"openEvery({json.dumps(states)})")
    assert found["wrong"] == []
    assert len(found["files"]) > 100
    for target in found["files"]:
        if not target.startswith("https://arxiv.org/"):
            path, _, anchor = target.partition("#L")
            file = ROOT / "docs" / path
            assert file.exists(), target
            if anchor:
                last = int(anchor.rpartition("L")[2])
                assert last <= len(file.read_text(encoding="utf-8").splitlines()), target


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width, height", SIZES)
def test_it_is_readable_at_every_width_and_in_both_colours(at, width, height, dark):
    page = at("map", width, height, dark)
    page.run(HELPERS + ";0")
    for state in LOOK_AT:
        page.run(f"show('{state}'); document.querySelectorAll('details').forEach(d => {{ d.open = true }})")
        assert page.run("look()") == {"contrast": [], "wide": []}, state


@pytest.mark.parametrize("state", ["map", "grpo-dapo", "grpo-dapo/dynamic_batch"])
def test_nothing_moves_after_the_page_was_drawn(at, state):
    page = at(state)
    shift = """new Promise(done => { let sum = 0;
      new PerformanceObserver(list => { for (const e of list.getEntries()) sum += e.value })
        .observe({ type: 'layout-shift', buffered: true });
      setTimeout(() => done(sum), 300) })"""
    assert page.run(shift) == 0


def test_a_note_stands_beside_its_line_and_below_the_code_where_there_is_no_margin(at):
    """Detail 7 of dapo.md names one line of `dynamic_batch`; where it stands is measured."""
    top = "[...document.querySelectorAll('#at-grpo-dapo\\\\/dynamic_batch %s')].find(e => e.innerText.includes('%s'))"
    top += ".getBoundingClientRect().top"
    note, line = top % (".note", "dapo 7"), top % (".line", "drawn = rejected +")
    page = at("grpo-dapo/dynamic_batch")
    assert abs(page.run(note) - page.run(line)) < 4
    page.run("document.querySelectorAll('#at-grpo-dapo\\\\/dynamic_batch .note').forEach(d => { d.open = true })")
    page.wait(f"Math.abs({note} - {line}) < 4")
    page = at("grpo-dapo/dynamic_batch", 390, 844)
    assert page.run(note) > page.run(top % (".line", "return kept")) > page.run(line)


def test_the_keyboard_goes_from_function_to_function_and_through_links(at):
    page = at("grpo-dapo/compute_rewards")
    for key, expected in (("j", "overlong_penalty"), ("j", "dynamic_batch"), ("k", "overlong_penalty")):
        page.key(key)
        page.wait(f"document.activeElement.textContent === '{expected}'")
        assert page.run("location.hash") == f"#grpo-dapo/{expected}"
    page.key("Tab")
    assert page.run("document.activeElement.getAttribute('href')") == "#grpo-dapo/overlong_penalty"
    page = at("grpo-dapo")
    page.key("Tab")
    assert page.run("document.activeElement.className") == "skip"


def test_a_fold_opens_two_scripts_are_chosen_and_swapped(at):
    page = at("grpo-dapo")
    section = "document.getElementById('at-grpo-dapo/rollout')"
    assert page.run(f"{section}.querySelector('.body').hidden")
    page.run(f"{section}.querySelector('button').click()")
    assert not page.run(f"{section}.querySelector('.body').hidden")
    assert page.run(f"{section}.querySelector('button').getAttribute('aria-expanded')") == "true"
    page.run(
        "s = document.querySelectorAll('.choose select')[1]; s.value = 'ppo'; s.dispatchEvent(new Event('change'))"
    )
    page.wait("document.querySelector('h1').textContent === 'grpo.py and ppo.py'")
    assert page.run("location.hash") == "#grpo-ppo"
    page.run("document.querySelector('.choose button').click()")
    page.wait("document.querySelector('h1').textContent === 'ppo.py and grpo.py'")
    assert page.run("location.hash") == "#ppo-grpo"


def test_what_dapo_changes_in_the_loss_and_why_is_one_choice_from_the_map(at):
    page = at("map")
    page.run("document.querySelector('a[href=\"#grpo-dapo/token_weights\"]').click()")
    page.wait("document.getElementById('at-grpo-dapo/token_weights')")
    text = page.run("document.getElementById('at-grpo-dapo/token_weights').innerText")
    assert "Every token of the optimizer step has one weight, because" in text and "Eq. 8" in text
    assert page.run("document.getElementById('at-grpo-dapo/token_weights').getBoundingClientRect().top < 300")


def test_the_choice_of_colours_wins_over_the_system_and_is_kept(at):
    background = "getComputedStyle(document.body).backgroundColor"
    page = at("map", dark=True)
    dark = page.run(background)
    page.run("document.getElementById('theme').click()")
    light = page.run(background)
    assert dark != light
    assert at("map", dark=True).run(background) == light
    page.run("localStorage.clear()")
    assert at("map", dark=True).run(background) == dark


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, chromium.Page(profile) as page:
        for state in LOOK_AT:
            for width, height in SIZES:
                for dark in (False, True):
                    page.resize(width, height, dark)
                    page.open(f"{URL}#{state}")
                    page.screenshot(folder / f"{state.replace('/', '_')}-{width}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    if not chromium.BROWSER or len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(pathlib.Path(sys.argv[1]))
