"""configs/: each file of options is what its script takes."""

import pytest
import yaml

from common.run import parse_args
from testbed import ROOT, script

PAPERS = sorted(path.name for path in (ROOT / "configs").glob("*-paper.yaml"))


@pytest.mark.parametrize("name", PAPERS)
def test_paper_settings_are_options(name, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    path = ROOT / "configs" / name
    args = parse_args(script(name.removesuffix("-paper.yaml")).Args, ["--config", str(path)])
    for option, value in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        own = getattr(args, option)
        assert own == ([value] if isinstance(own, list) else type(own)(value)), option
