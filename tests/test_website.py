"""The site of tools/website.py: its links lead to what is there, no page loads anything, and each fits its window."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import pytest

from pages import in_browser, needs_browser
from testbed import ROOT

pytestmark = [
    pytest.mark.needs("markdown_it", "latex2mathml"),
    pytest.mark.beside("tools", "docs", "README.md"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, with a run of one step."""
    out = tmp_path_factory.mktemp("site")
    options = ["--max_steps", "1", "--prompts_per_step", "4", "--eval_prompts", "4"]
    command = [sys.executable, "tools/website.py", str(out), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return out


class Addresses(html.parser.HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        if tag == "a":
            self.links.append(attributes["href"])
        elif "src" in attributes or "href" in attributes:
            self.loads.append(attributes.get("src") or attributes["href"])


@pytest.fixture(scope="module")
def pages(site):
    return {file: Addresses(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}


def is_own(address):
    return not re.match(r"[a-z]+:", address)


def test_every_link_leads_to_a_file_of_the_site(site, pages):
    """And its anchor to a heading. Tabs and pairs are no anchors."""
    wrong = []
    for file, page in pages.items():
        for address in filter(is_own, page.links):
            target, _, anchor = unquote(address).partition("#")
            there = (file.parent / target).resolve() if target else file
            if not there.is_relative_to(site) or not there.is_file():
                wrong.append(f"{file.relative_to(site)}: {address}")
            elif anchor and there in pages and there.name not in ("side_by_side.html", "run.html"):
                if anchor not in pages[there].anchors:
                    wrong.append(f"{file.relative_to(site)}: no anchor {address}")
    assert sorted(set(wrong)) == []


def test_no_page_loads_anything_from_elsewhere(pages):
    loaded = {address for page in pages.values() for address in page.loads}
    assert [address for address in loaded if not is_own(address) and address != "data:,"] == []
    assert any(address.endswith("answers.png") for address in loaded)


def test_the_site_has_what_a_reader_comes_for(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for target in (
        "side_by_side.html#grpo-dapo",
        "side_by_side.html#group",
        "run.html",
        "docs/conventions.html",
    ):
        assert f'href="{target}"' in index, target
    assert 'class="gi"' in index and "<table>" in index  # a diff in colours
    assert '"tokens":' in (site / "run.html").read_text(encoding="utf-8")
    assert "def policy_loss" in re.sub("<.*?>", "", (site / "grpo.py.html").read_text(encoding="utf-8"))


# Each page in frames of two widths; a page says how wide it is and its window.
REPORT = "parent.postMessage([location.pathname, innerWidth, document.documentElement.scrollWidth], '*')"
FRAMES = """<title></title><body><script>
const found = [];
addEventListener("message", ({ data }) => {
  found.push(data);
  document.title = JSON.stringify(found);
});
for (const place of PLACES) {
  for (const width of [390, 1280]) {
    document.write(`<iframe src="${place}" style="width:${width}px;height:900px;border:0"></iframe>`);
  }
}
</script></body>"""


@needs_browser
def test_no_page_is_wider_than_its_window(site, tmp_path):
    """Each page, and of the sources, which have one frame, a script."""
    shown = shutil.copytree(site, tmp_path / "site")
    places = [str(file.relative_to(shown)) for file in shown.rglob("*.html") if "." not in file.stem]
    places.append("grpo.py.html")
    for place in places:
        text = (shown / place).read_text(encoding="utf-8")
        (shown / place).write_text(text.replace("</body>", f"<script>{REPORT}</script></body>"), encoding="utf-8")
    found = in_browser(shown, "frames.html", FRAMES.replace("PLACES", json.dumps(places)))
    assert len(found) == 2 * len(places) > 40
    assert [report for report in found if report[2] > report[1]] == []
