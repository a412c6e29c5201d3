"""docs/side_by_side.html as its readers see it: every state opened, at three widths, light and dark, by keyboard.

python tests/browser/test_side_by_side_in_browser.py FOLDER    screenshots of some states, to be looked at
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import yaml

sys.path.append(str(pathlib.Path(__file__).parent))

import chromium

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not chromium.BROWSER, reason="no Chromium")
URL = (ROOT / "docs" / "side_by_side.html").as_uri()
HELPERS = (pathlib.Path(__file__).parent / "states.js").read_text(encoding="utf-8")
SIZES = [(390, 844), (1000, 800), (1600, 1000)]
LOOK_AT = ["map", "grpo-dapo", "grpo-dapo/token_weights", "grpo-ppo/policy_loss", "dapo-dcpo/main", "all/token_weights"]
LOOK_AT += ["all/policy_loss", "all/Args/clip_high", "batch", "common", "common/decode", "find/clip", "help"]


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
            path, _, anchor = target.partition("#")
            file = ROOT / "docs" / path
            assert file.exists(), target
            if re.match(r"L\d", anchor):  # else a section, which test_help.py looks for
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


@pytest.mark.parametrize(
    "address, state",
    [
        ("", "map"),
        ("grpo/dapo", "grpo-dapo"),
        ("GRPO-DAPO", "grpo-dapo"),
        ("grpo.py vs dapo.py", "grpo-dapo"),
        ("dr-grpo/gspo", "dr_grpo-gspo"),
        ("DrGRPO", "grpo-dr_grpo"),
        ("grpo/dapo/policy_loss", "grpo-dapo/policy_loss"),
        ("grpo-dapo/Policy_Loss", "grpo-dapo/policy_loss"),
        ("grpo-dapo/nothing", "grpo-dapo"),
        ("dapo", "grpo-dapo"),
        ("grpo-grpo", "grpo-dr_grpo"),
        ("dapo/dynamic_batch", "grpo-dapo/dynamic_batch"),
        ("grpo/policy_loss", "all/policy_loss"),
        ("policy_loss", "all/policy_loss"),
        ("decode", "common/decode"),
        ("--clip_low", "all/Args/clip_low"),
        ("common/nothing", "common"),
        ("Batch", "batch"),
        ("token_weigths", "find/token_weigths"),
    ],
)
def test_a_near_miss_leads_where_it_means(at, address, state):
    page = at(address.replace(" ", "%20"))
    assert page.run("location.hash.slice(1) || 'map'") == state
    assert page.run("main.dataset.view") == (state.split("/")[0] if state.startswith(("grpo-", "dr_grpo-")) else state)


WRAPPED = """[...document.querySelectorAll('.line code')].filter(code => code.checkVisibility()
  && code.offsetHeight > 1.7 * parseFloat(getComputedStyle(code).fontSize)).map(code => code.textContent)"""
OPEN = (
    "document.querySelectorAll('details, section').forEach(d => d.open instanceof Function ? d.open() : d.open = true)"
)
LONG = "[...document.querySelectorAll('.line code')].filter(code => code.textContent.length >= 119).length"


@pytest.mark.parametrize("width", [390, 1000, 1200, 1600, 1920])
@pytest.mark.parametrize("state", ["grpo-dapo", "ppo-dapo", "all/update", "common/Policy"])
def test_code_has_12_pixels_at_least_and_wraps_only_where_two_columns_need_it(at, state, width):
    page = at(state, width, 900)
    page.run(OPEN)
    sizes = "[...document.querySelectorAll('.line code')].map(code => parseFloat(getComputedStyle(code).fontSize))"
    assert page.run(LONG) > 0 and min(page.run(sizes)) >= 12
    fits = {1200: 70, 1600: 100}.get(width, 120) if state != "common/Policy" else 120
    assert [line for line in page.run(WRAPPED) if len(line) <= fits] == []
    hidden = page.run("[...document.querySelectorAll('.body')].filter(b => b.scrollWidth > b.clientWidth + 1).length")
    assert (hidden > 0) == (width == 390), "code is scrolled on a phone, and nowhere else"


def test_the_map_says_that_it_goes_on(at):
    says = "document.querySelector('.goes-on').checkVisibility()"
    fades = "document.querySelector('.wide').classList.contains('more')"
    page = at("map", 390, 844)
    assert page.run(says) and page.run(fades)
    page.run("document.querySelector('.wide').scrollLeft = 1e4")
    page.wait(f"!{fades}")
    page = at("map", 1600, 900)
    assert not page.run(says) and not page.run(fades)


def test_the_search_finds_functions_and_options_and_the_way_back_is_kept(at):
    page = at("grpo-dapo")
    page.key("/")
    page.wait("document.activeElement.id === 'search'")
    for key in "clip-lo":
        page.key(key)
    page.wait("document.querySelector('.found a')?.textContent === '--clip_low'")
    page.key("j")  # a letter here, no way to the next function
    page.wait("location.hash === '#find/clip-loj' && document.querySelectorAll('.found a').length === 0")
    page.key("Backspace")
    page.wait("location.hash === '#find/clip-lo'")
    page.key("Enter")
    page.wait("location.hash === '#all/Args/clip_low'")
    lit = page.run("[...document.querySelectorAll('.line.lit code')].map(code => code.textContent)")
    assert len(lit) > 3 and all(line.startswith("    clip_low: float") for line in lit)
    page.run("history.back()")
    page.wait("location.hash === '#find/clip-lo'")
    page.run("history.back()")
    page.wait("document.querySelector('h1').textContent === 'grpo.py and dapo.py'")
    found = "search('%s').map(([name]) => name)"
    assert page.run(found % "policy_loss")[0] == "policy_loss"
    assert page.run(found % "decode")[0] == "decode"
    assert page.run(found % "rollout_logprobs")[0] == "rollout_logprobs"
    assert "token_weights" in page.run(found % "sum 1 optimizer") and page.run(found % " ") == []


def test_a_function_is_copied_as_it_stands_in_its_file(at):
    page = at("grpo-dapo/token_weights")
    page.run("navigator.clipboard.writeText = text => { window.copied = text; return Promise.resolve() }")
    buttons = "[...document.querySelectorAll('#at-grpo-dapo\\\\/token_weights .copy')]"
    assert page.run(f"{buttons}.map(b => b.ariaLabel)") == [f"Copy token_weights of {n}.py" for n in ("grpo", "dapo")]
    page.run(f"{buttons}[1].click()")
    page.wait(f"{buttons}[1].textContent === 'Copied'")
    copied = page.run("copied")
    assert copied.startswith("def token_weights(") and copied in (ROOT / "dapo.py").read_text(encoding="utf-8")
    assert page.run("document.querySelectorAll('#at-grpo-dapo\\\\/Args .copy').length") == 0


def test_the_equations_are_set(at):
    page = at("all/policy_loss")
    heights = page.run("[...document.querySelectorAll('.formula math')].map(m => m.getBoundingClientRect().height)")
    assert len(heights) > 5 and min(heights) > 12 and max(heights) > 40
    assert page.run("[...document.querySelectorAll('.formula .math')].every(e => e.querySelector('math') && e.title)")


def test_two_scripts_show_the_changes_of_the_readme_and_not_docstrings_and_help_texts(at):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^diff grpo.py dr_grpo.py.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    expected = [line[1:] for line in block.splitlines() if line[0] in "+-"]
    visible = "[...document.querySelectorAll('.gone code, .come code')].filter(code => code.checkVisibility())"
    assert sorted(at("grpo-dr_grpo").run(f"{visible}.map(code => code.textContent)")) == sorted(expected)


def test_a_pair_begins_with_the_algorithm_and_ends_with_imports_and_options(at):
    sections = at("grpo-dapo").run("[...document.querySelectorAll('section[id] h2')].map(title => title.textContent)")
    assert sections[:2] == ["rollout", "compute_rewards"] and sections[-2:] == ["imports", "Args"]
    chips = at("grpo-dapo").run("[...document.querySelectorAll('.chips a')].map(chip => chip.textContent.slice(2))")
    assert chips == sections


def test_a_note_of_a_third_script_says_why_it_stands_in_a_pair(at):
    notes = "[...document.querySelectorAll('.note summary')].map(note => note.innerText.trim())"
    found = at("grpo-dapo").run(f"document.querySelectorAll('section').forEach(s => s.open?.()); {notes}")
    of_others = [note for note in found if re.match(r"(dr_grpo|gspo|dcpo|ppo|dpo|reward_model) ", note)]
    assert "gspo 4 Weights (gspo.py has the text of grpo.py)" in of_others
    assert all(re.search(r" \(\w+\.py has (this text too|the text of \w+\.py)\)$", note) for note in of_others)
    assert not [note for note in found if re.match(r"(grpo|dapo) ", note) and "has the text" in note]


def test_the_site_links_to_the_repository(page, tmp_path):
    """What the workflow does to the page before it is published."""
    steps = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text(encoding="utf-8"))["jobs"]["publish"][
        "steps"
    ]
    (command,) = [step["run"] for step in steps if "run" in step]
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "side_by_side.html", tmp_path / "docs")
    names = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "me/fork", "GITHUB_SHA": "c0ffee"}
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=os.environ | names, check=True)
    page.open(f"{(tmp_path / 'docs' / 'index.html').as_uri()}#grpo-dapo/policy_loss")
    links = page.run("[...main.querySelectorAll('a')].map(a => a.getAttribute('href')).filter(a => !a.startsWith('#'))")
    assert any(link.startswith("https://example.org/me/fork/blob/c0ffee/grpo.py#L") for link in links)
    for link in links:
        path = link.partition("#")[0].removeprefix("https://example.org/me/fork/blob/c0ffee/")
        assert link.startswith("https://arxiv.org/") or (ROOT / path).exists(), link


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


def test_the_keys_work_at_once_and_from_where_the_reader_is(at):
    title = "document.activeElement.textContent"
    page = at("grpo-dapo")
    page.key("j")
    page.wait(f"{title} === 'rollout'")
    page = at("grpo-dapo")
    page.run("document.getElementById('at-grpo-dapo/policy_loss').scrollIntoView()")
    page.key("j")
    page.wait(f"{title} === 'token_weights'")
    page = at("all/policy_loss")
    page.key("k")
    page.wait("location.hash === '#all/compute_advantages'")
    page = at("common/log_ratio")
    page.key("j")
    page.wait("location.hash === '#common/moments'")
    page.key("?")
    page.wait("document.title.startsWith('Help')")


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
