"""docs/side_by_side.html shows the scripts as they are: lines, changes, sentences, equations, details and keys."""

import ast
import re

import pytest
import torch

import batch_keys
import diffs
import lines
import same_text
import side_by_side
from tools import ROOT, script

SOURCES = same_text.load()
SCRIPTS = [name.removesuffix(".py") for name in SOURCES]


@pytest.fixture(scope="module")
def data():
    return side_by_side.stored()


def texts(data, block):
    """The lines of a block as the page shows them."""
    return ["".join(data["lines"][i][1::2]) for i in data["blocks"][block]["lines"]]


def note_of(data, label):
    return next(i for i, note in enumerate(data["notes"]) if note["label"] == label)


@pytest.mark.needs("pygments")
def test_the_page_is_fresh():
    fresh = side_by_side.build(side_by_side.collect())
    assert side_by_side.PAGE.read_text(encoding="utf-8") == fresh, "run python tools/side_by_side.py"


def test_it_is_one_small_file_that_loads_nothing():
    text = side_by_side.PAGE.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    for part in (side_by_side.PARTS / name for name in ("page.html", "style.css", "page.js")):
        source = part.read_text(encoding="utf-8")
        assert not re.search(
            r"""\bsrc=|@import|url\(|fetch\(|XMLHttp|\bimport\(|WebSocket|(?:href|=) *["']?https?:""", source
        )
    assert text.count("<script") == 2 and text.count("<link") == 1 and '<link rel="icon" href="data:,">' in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_line_of_a_script_is_there_with_its_number(data, name):
    """Without pygments too: what is shown is what tools/diffs.py compares, at the lines of the file."""
    source, places = SOURCES[f"{name}.py"], data["scripts"][name]["places"]
    expected = {place: text for place, text in diffs.places(source).items() if place != "If"}
    assert {place: texts(data, block) for place, (block, _) in places.items()} == expected
    file = source.splitlines()
    for place, (block, numbers) in places.items():
        for text, number in zip(texts(data, block), numbers, strict=True):
            field = re.match(r"    (\w+: )", text)
            assert file[number - 1] == text or (place == "Args" and file[number - 1].startswith(field[0]))
    assert data["scripts"][name]["docstring"] == ast.get_docstring(ast.parse(source))


@pytest.mark.parametrize("one", SCRIPTS)
def test_the_changes_make_one_script_out_of_the_other(data, one):
    for two in SCRIPTS[SCRIPTS.index(one) + 1 :]:
        old, new = (data["scripts"][name]["places"] for name in (one, two))
        changed = {place for place in old if place in new and old[place][0] != new[place][0]}
        assert data["pairs"][f"{one} {two}"].keys() == changed
        for place in changed:
            a, b = texts(data, old[place][0]), texts(data, new[place][0])
            made, done = [], 0
            for i, i_end, j, j_end, _, marked, marks in data["pairs"][f"{one} {two}"][place]:
                made += a[done:i] + b[j:j_end]
                done = i_end
                for part, found in ((a[i:i_end], marked), (b[j:j_end], marks)):
                    assert all(part[line][start:end].strip() for line, start, end in found)
            assert made + a[done:] == b


def test_every_sentence_of_the_diffs_stands_at_its_hunk(data):
    for script_name, sentences in diffs.SENTENCES.items():
        name = script_name.removesuffix(".py")
        for place in data["scripts"][name]["places"]:
            hunks = [key for where, key, _ in diffs.hunks(SOURCES["grpo.py"], SOURCES[script_name]) if where == place]
            expected = [side_by_side.inline(sentences[key]) for key in hunks]
            assert data["why"][name].get(place, []) == expected
            changes = data["pairs"][f"grpo {name}"].get(place)
            if changes:
                assert [change[4] for change in changes if change[4] >= 0] == list(range(len(expected)))
    assert data["why"].keys() == data["scripts"].keys() and all(data["why"][n] for n in data["why"] if n != "grpo")


def test_every_detail_of_the_docs_stands_at_its_lines(data):
    details = side_by_side.details()
    assert [note["label"] for note in data["notes"]] == [note["label"] for note, _ in details]
    assert len(details) == sum(
        len(lines.DETAIL.findall(page.read_text(encoding="utf-8")))
        for page in lines.pages()
        if page.parent.name == "docs"
    )
    at = {}  # {detail: [(file, line)]}
    places = [(f"{name}.py", place) for name in SCRIPTS for place in data["scripts"][name]["places"].values()]
    places += [(entry["file"], entry["place"]) for entry in data["common"].values()]
    for file, (block, numbers) in places:
        for first, last, note in data["blocks"][block]["notes"]:
            at.setdefault(note, []).append((file, numbers[first], numbers[last]))
    for number, (note, links) in enumerate(details):
        assert data["notes"][number] == note | {"shown": True}
        for file, first, last in links:
            assert any(own == file and first <= a and b <= last for own, a, b in at[number]), note["label"]


def test_a_detail_is_at_the_lines_it_names(data):
    """Worked by hand: detail 13 of dapo.md is about `token_weights`, detail 3 of grpo.md about two lines as well."""
    block, _ = data["scripts"]["dapo"]["places"]["token_weights"]
    assert [0, len(texts(data, block)) - 1, note_of(data, "dapo 13")] in data["blocks"][block]["notes"]
    block, _ = data["scripts"]["grpo"]["places"]["update"]
    marked = [
        texts(data, block)[first]
        for first, _, note in data["blocks"][block]["notes"]
        if note == note_of(data, "grpo 3")
    ]
    assert len(marked) == 2 and 'micro["old_logprobs"], _ =' in marked[0] and "logprobs.detach()" in marked[1]


def test_every_equation_of_a_docstring_stands_at_a_function_of_its_script(data):
    for name in SCRIPTS:
        shown = data["scripts"][name]["equations"]
        docstring = data["scripts"][name]["docstring"]
        numbered = [line for line in docstring.splitlines() if re.search(r" {3,}.*\bEq\. [\d-]+$", line)]
        for line in numbered:
            assert (
                sum(
                    line.startswith(f"    {text}") and line.endswith(number)
                    for _, (text, *label) in shown
                    for number in label
                )
                == 1
            )
        for functions, _ in shown:
            assert any(function in data["scripts"][name]["places"] for function in functions)
    numbers = {"grpo": "Eq. 3", "dr_grpo": "C = max_new_tokens", "dapo": "Eq. 8", "gspo": "Eq. 5", "dcpo": "Eq. 8"}
    for name, number in numbers.items():
        shown = [line for functions, line in data["scripts"][name]["equations"] if "token_weights" in functions]
        assert len(shown) == 1 and shown[0][0].startswith("J = E[") and shown[0][1] == number


def test_names_lead_to_their_definitions(data):
    linked = {tokens[i + 1] for tokens in data["lines"] for i in range(0, len(tokens), 2) if tokens[i] == "C"}
    imported = {a for source in SOURCES.values() for a, where in same_text.imports(source).items() if "common" in where}
    assert linked == linked & data["common"].keys()
    assert imported <= linked | {"clean_exit"} and imported <= data["common"].keys()  # that one is below `main`
    for name, entry in data["common"].items():
        file = (ROOT / entry["file"]).read_text(encoding="utf-8").splitlines()
        block, numbers = entry["place"]
        assert texts(data, block) == file[numbers[0] - 1 : numbers[-1]]
        assert re.search(rf"^(def |class )?{name}\b", "\n".join(texts(data, block)), re.MULTILINE)


@pytest.mark.needs("pygments")
def test_a_name_is_linked_where_it_means_the_definition():
    code = """def rollout(model, mask=LIMIT):
    mask = mask.sum()
    rate: float = learning_rate(mask, rollout=model)
    return args.rollout, [rollout(x) for x in model]


class Args:
    learning_rate: float = learning_rate
"""
    names = dict.fromkeys(["rollout", "model", "mask", "learning_rate", "LIMIT"], "C")
    rows = side_by_side.coloured(code, names)
    assert [[row[i + 1] for i in range(0, len(row), 2) if row[i] == "C"] for row in rows if row] == [
        ["LIMIT"], [], ["learning_rate"], ["rollout"], [], ["learning_rate"]
    ]  # fmt: skip
    assert ["".join(row[1::2]) for row in rows] == code.split("\n")


def test_states(data):
    states = side_by_side.states(data)
    assert len(states) == len(set(states))
    for state in (
        "map",
        "grpo-dapo",
        "dapo-grpo",
        "grpo-dapo/policy_loss",
        "all/token_weights",
        "common/log_ratio",
        "batch",
    ):
        assert state in states
    assert "dapo-dapo" not in states and "grpo-gspo/dynamic_batch" not in states


@pytest.mark.parametrize(
    "old, new, marks",
    [
        (["a = total / rows"], ["a = total / tokens"], ([[0, 12, 16]], [[0, 12, 18]])),
        (["x = 1", "y = f(x)"], ["x = 1", "y = g(x)"], ([[1, 4, 5]], [[1, 4, 5]])),
        (["return a"], ["return a + b"], ([], [[0, 9, 12]])),
        (["a == b"], ["a = b"], ([[0, 2, 4]], [[0, 2, 3]])),
        (["one two"], ["def f(): return 7"], ([], [])),  # little is common: the lines as a whole differ
    ],
)
def test_what_differs_is_marked_by_word(old, new, marks):
    assert side_by_side.words(tuple(old), tuple(new)) == marks


def test_markdown_of_details_and_sentences():
    assert side_by_side.inline("**Seeds** ([`f(x)`](../a.py#L1), x < 2)") == (
        '<b>Seeds</b> (<a href="../a.py#L1"><code>f(x)</code></a>, x &lt; 2)'
    )
    assert side_by_side.paragraphs("one\n   two\n\n   | a | b |\n") == "<p>one two</p><pre>   | a | b |\n</pre>"


def test_who_writes_and_reads_a_key_is_found_in_the_code():
    code = """
def f(batch):
    batch["a"], batch["b"] = 1, batch["c"]
    for name, fill in (("d", 0), ("e", 1)):
        batch[name] = fill
    micro = batch | {"g": batch.get("h")}
    return {"completions": 1} if "i" in micro else other["z"]


def g():
    return {"completions": {"inner": 1}, "j": 2}
"""
    found = {}
    batch_keys.Uses(found, "x.py").visit(ast.parse(code))
    uses = {
        how: {key: list(found[key][how]) for key in sorted(found) if found[key][how]} for how in ("writes", "reads")
    }
    assert uses["writes"] == {**{key: ["f"] for key in "abdeg"}, "completions": ["g"], "j": ["g"]}
    assert uses["reads"] == {key: ["f"] for key in "chi"}


def test_the_table_has_every_key_that_the_code_uses(data):
    uses = batch_keys.uses(side_by_side.files())
    assert uses.keys() == batch_keys.KEYS.keys()
    assert all(found["writes"] and found["reads"] for found in uses.values())
    assert [row["key"] for row in data["batch"]] == list(uses)
    assert {row["key"]: {how: row[how] for how in ("writes", "reads")} for row in data["batch"]} == uses


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_shapes_are_those_of_a_real_batch(name, monkeypatch, tmp_path):
    """The micro-batches of an update as they are after it, with everything that was written into them."""
    module, seen = script(name), []
    split = module.split_rollout

    def kept(accelerator, batch, args):
        seen.extend(parts := split(accelerator, batch, args))
        return parts

    monkeypatch.setattr(module, "split_rollout", kept)
    small = "--max_steps 1 --prompts_per_step 4 --num_minibatches 2 --max_new_tokens 8 --eval_prompts 1 --eval_every 0"
    group = ["--group_size", "2"] if name == "grpo" else []
    module.main([*small.split(), *group, "--kl_coef", "0.1", "--output_dir", str(tmp_path / "run")])
    micro = seen[0][0]
    R, P = micro["prompts"].shape
    sizes = {"R": R, "P": P, "T": micro["completions"].shape[1], "1": 1}
    expected = (
        set(batch_keys.KEYS)
        - {"group_tokens"}
        - ({"old_values", "returns"} if name == "grpo" else {"prompt_index", "groups"})
    )
    assert micro.keys() == expected
    for key, value in micro.items():
        shape = batch_keys.KEYS[key][0]
        if key == "totals":
            assert value["group_tokens"].shape == (R, 1) and value.keys() == {
                "tokens",
                "rows",
                "prompts",
                "group_tokens",
            }
        elif shape == "list of R":
            assert isinstance(value, list) and len(value) == R
        else:
            named = "(R, T)" if (name, key) == ("ppo", "advantages") else shape
            assert isinstance(value, torch.Tensor)
            assert tuple(value.shape) == tuple(sizes[size] for size in re.findall(r"\w+", named)), key
