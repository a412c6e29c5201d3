"""Pages in a browser: what a page writes into its title, at several widths."""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --dump-dom".split()
# Shows the page in frames of several widths. Each frame posts a report.
FRAMES = """<body><script>
const found = [];
addEventListener("message", ({ data }) => {
  found.push(data);
  document.title = JSON.stringify(found);
});
for (const width of WIDTHS) {
  document.write(`<iframe src="page.html" style="width:${width}px;height:900px;border:0"></iframe>`);
}
</script></body>"""


def in_browser(folder, name, page):
    """Open a page in Chromium; what it writes into its title, read as JSON."""
    (folder / name).write_text(page, encoding="utf-8")
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder}/profile", (folder / name).as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)[1]))


def in_frames(folder, page, check, widths):
    """The reports that the script `check`, at the end of the page, posts from frames of these widths."""
    (folder / "page.html").write_text(page.replace("</body>", f"{check}</body>"), encoding="utf-8")
    found = in_browser(folder, "frames.html", FRAMES.replace("WIDTHS", str(widths)))
    assert sorted(frame["width"] for frame in found) == widths
    return found
