"""`pytest --script mine.py` runs over that file what runs over every script, and nothing else.

The option stands here: pytest takes `mine.py` for a path, and reads the conftest.py beside it.
"""

import os
import pathlib

import pytest

HERE = pathlib.Path(__file__).resolve().parent


def pytest_addoption(parser):
    told = "run over this script what runs over all of them; several times for several scripts"
    parser.addoption("--script", action="append", metavar="FILE", help=told)


def pytest_configure(config):
    scripts = [pathlib.Path(script) for script in config.getoption("script") or []]
    for script in scripts:
        if script.resolve().parent != HERE or not script.is_file():
            raise pytest.UsageError(f"--script {script}: no such file beside common/")
    if scripts:
        # tests/helpers/testbed.py reads it.
        os.environ["ONLY_SCRIPTS"] = " ".join(script.stem for script in scripts)
