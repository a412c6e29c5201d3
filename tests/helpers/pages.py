"""Open pages in a headless browser; they report through their title."""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --dump-dom".split()


def in_browser(folder, name, page):
    """Open a page in Chromium and return its title, parsed as JSON."""
    (folder / name).write_text(page, encoding="utf-8")
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder}/profile", (folder / name).as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", result.stdout, re.DOTALL)[1]))
