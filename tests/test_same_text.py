"""lab/same_text.py: scripts share their functions; differences are listed or fixed."""

import pytest

import same_text

SOURCES = same_text.members(same_text.script_sources())


def test_the_scripts_share_one_text():
    found = same_text.problems(same_text.script_sources())
    assert not found, "\n".join(found)


def changed(script, old, new):
    assert SOURCES[script].count(old) == 1
    return SOURCES | {script: SOURCES[script].replace(old, new)}


@pytest.mark.parametrize(
    "script, old, new, sentence",
    [
        ("gspo.py", "\ndef rollout(", "\n# Above it.\ndef rollout(", "rollout differs between gspo.py and grpo.py: "),
        ("gspo.py", "\ndef split(", "\n# Above it.\ndef split(", "split differs between gspo.py and grpo.py: "),
        ("gspo.py", "\ndef policy_loss(", "\ndef loss(", "gspo.py has no policy_loss: take it out of DIFFERS"),
        ("gspo.py", "group_size: int", "group_size: float", "gspo.py: options shared with grpo.py must have"),
        (
            "reward_model.py",
            "\ndef update(",
            "\n# Own.\ndef update(",
            "update differs between reward_model.py and dpo.py",
        ),
    ],
)
def test_drift_is_named(script, old, new, sentence):
    (found,) = same_text.problems(changed(script, old, new))
    assert found.startswith(sentence)


def test_obsolete_difference_is_named(monkeypatch):
    monkeypatch.setitem(same_text.DIFFERS, "gspo.py", same_text.DIFFERS["gspo.py"] | {"rollout": "no reason"})
    (found,) = same_text.problems(SOURCES)
    assert found.startswith("rollout of gspo.py equals that of grpo.py: take it out of DIFFERS")


def test_fix_copies_what_is_shared(tmp_path, monkeypatch, capsys):
    sources = changed("grpo.py", "\ndef policy_loss(", "\n# Of a loss.\ndef policy_loss(")
    sources["grpo.py"] = sources["grpo.py"].replace("\ndef main(", "\n# Of a run.\ndef main(")
    sources["mine.py"] = SOURCES["grpo.py"]
    monkeypatch.setattr(same_text, "ROOT", tmp_path)
    monkeypatch.setattr(same_text, "script_sources", lambda: dict(sources))
    for script, source in sources.items():
        (tmp_path / script).write_text(source, encoding="utf-8")
    assert same_text.main([]) == 1
    assert same_text.main(["--fix", "grpo.py"]) == 0
    texts = {script: (tmp_path / script).read_text(encoding="utf-8") for script in sources}
    assert {script for script in texts if "# Of a loss." in texts[script]} == {"grpo.py", "dr_grpo.py", "dapo.py"}
    assert {script for script in texts if "# Of a run." in texts[script]} == {"grpo.py", "dr_grpo.py", "gspo.py"}
    assert same_text.fixed("dapo.py", SOURCES) == {}  # functions only in dapo.py are not copied
    assert texts["mine.py"] == SOURCES["grpo.py"]
