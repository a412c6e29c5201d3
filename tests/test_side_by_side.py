"""tools/side_by_side.py shows scripts as they are: lines, changes, sentences, equations, options, keys of the batch."""

import ast
import collections
import json
import re

import pytest
import torch

import batch_keys
import diffs
import family
import lines
import options
import side_by_side
from small_family import COPY, GRPO, OWN, small_family
from testbed import script
from tree import Tree

EQUATIONS = r"""
"A_i = R_i - mean(R)" = 'A_i = R_i - \text{mean}(R)'
"J = E[ 1/G sum_i min(r_i A_i, clip(r_i) A_i) ]" = '''
J = E[ \frac{1}{G} \sum_i \text{min}(r_i A_i, \text{clip}(r_i) A_i) ]'''
"""
OPTIONS = """| `--clip` | `0.2` | number | the ratio is clipped where A &lt; 0<br>own: it too |
| `--cap`<br>only in own | `10` | number | the `cap` |
"""
SCRIPTS = {"grpo": GRPO, "copy": COPY, "own": OWN}
WHY = {name: {key: f"*{key}*" for _, key, _ in diffs.hunks(GRPO, SCRIPTS[name[:-3]])} for name in ("copy.py", "own.py")}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr(family, "SENTENCES", WHY)
    tree = small_family(tmp_path, monkeypatch)
    lines.refresh(tree)
    for part in ("page.html", "style.css", "page.js"):
        tree.write(f"{side_by_side.PARTS}/{part}", Tree().read(f"{side_by_side.PARTS}/{part}"))
    tree.write(side_by_side.EQUATIONS, EQUATIONS)
    monkeypatch.setattr(options, "table", lambda scripts: OPTIONS)
    return tree


@pytest.fixture
def data(tree):
    return json.loads(json.dumps(side_by_side.collect(tree)))


def texts(data, block):
    """The lines of a block as the page shows them."""
    return ["".join(data["lines"][i][1::2]) for i in data["blocks"][block]["lines"]]


def noted(data, script, place):
    """[(first line, last line, label)] of the details at a place."""
    notes = data["blocks"][data["scripts"][script]["places"][place][0]]["notes"]
    return [(first, last, data["notes"][note]["label"]) for first, last, note in notes]


def test_the_page_is_one_file_that_loads_nothing_and_holds_what_was_collected(tree, data):
    page = side_by_side.build(tree, data)
    tree.write(side_by_side.PAGE, page)
    assert side_by_side.stored(tree) == data
    for part in ("page.html", "style.css", "page.js"):
        source = tree.read(f"{side_by_side.PARTS}/{part}")
        assert not re.search(
            r"""\bsrc=|@import|url\(|fetch\(|XMLHttp|\bimport\(|WebSocket|(?:href|=) *["']?https?:""", source
        )
    assert page.count("<script") == 2 and page.count("<link") == 1 and '<link rel="icon" href="data:,">' in page
    assert (Tree().root / side_by_side.PAGE).stat().st_size < 1_500_000


def test_without_the_packages_the_texts_are_compared_all_the_same(tree, data, monkeypatch):
    monkeypatch.setattr(batch_keys, "unknown", lambda tree: [])
    tree.write(side_by_side.PAGE, side_by_side.build(tree, data))
    monkeypatch.setattr(side_by_side, "LEXER", None)
    side_by_side.tokens.cache_clear()
    assert side_by_side.refresh(tree) == []
    tree.write("own.py", OWN.replace("# the pessimistic one", "# the other one"))
    (line,) = side_by_side.refresh(tree)
    assert line.startswith(side_by_side.PAGE) and line.endswith("pip install pygments latex2mathml")
    tree.write("own.py", OWN)
    tree.write(side_by_side.EQUATIONS, EQUATIONS.replace("mean", "average"))
    assert line in side_by_side.refresh(tree)  # the equations are compared too
    side_by_side.tokens.cache_clear()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_line_of_a_script_is_there_with_its_number(data, name):
    source, places = SCRIPTS[name], data["scripts"][name]["places"]
    expected = {place: text for place, text in diffs.places(source).items() if place != "If"}
    assert {place: texts(data, block) for place, (block, _) in places.items()} == expected
    file = source.splitlines()
    for place, (block, numbers) in places.items():
        for text, number in zip(texts(data, block), numbers, strict=True):
            field = re.match(r"    (\w+: )", text)
            assert file[number - 1] == text or (place == "Args" and file[number - 1].startswith(field[0]))
    assert data["scripts"][name]["docstring"] == ast.get_docstring(ast.parse(source))


def applied(changes, a, b):
    """Text `a` with the changes taken from `b`; what differs in a line is marked inside of it."""
    made, done = [], 0
    for i, i_end, j, j_end, _, marked, marks, _ in changes:
        made += a[done:i] + b[j:j_end]
        done = i_end
        for part, found in ((a[i:i_end], marked), (b[j:j_end], marks)):
            assert all(part[line][start:end].strip() for line, start, end in found)
    return made + a[done:]


@pytest.mark.parametrize("one, two", [("grpo", "copy"), ("grpo", "own"), ("copy", "own")])
def test_the_changes_make_one_script_out_of_the_other(data, one, two):
    old, new = (data["scripts"][name]["places"] for name in (one, two))
    changed = {place for place in old if place in new and old[place][0] != new[place][0]}
    assert data["pairs"][f"{one} {two}"].keys() == changed
    for place in changed:
        a, b = texts(data, old[place][0]), texts(data, new[place][0])
        assert applied(data["pairs"][f"{one} {two}"][place], a, b) == b


@pytest.mark.parametrize("old", [GRPO, GRPO.replace("    # the pessimistic one\n", "")], ids=["", "no comment"])
@pytest.mark.parametrize(
    "comments, new",
    [
        (1, GRPO.replace("    return -objective", "    # no mean\n    return -objective")),
        (1, OWN.replace("# the pessimistic", "# of both the least").replace("    return", "    # at last\n    return")),
        (1, GRPO.replace("    objective = min", "    # a\n    # b\n    objective = 2 * min")),
    ],
)
def test_comments_are_changes_without_a_sentence(old, new, comments):
    a, b = (diffs.places(text)["policy_loss"] for text in (old, new))
    changes = side_by_side.changes(a, b, "policy_loss", True)
    assert applied(changes, a, b) == b
    hunks = [key for place, key, _ in diffs.hunks(old, new) if place == "policy_loss"]
    assert [change[4] for change in changes if change[4] >= 0] == list(range(len(hunks)))


@pytest.mark.parametrize(
    "old, new, code",
    [
        ("def f(x):\n    'a'\n    return x", "def f(x):\n    'b'\n    return x", []),
        ("def f(x):\n    'a'\n    return x", "def f(x):\n    return x", []),
        ("def f(x):\n    'a'\n    return x", "def f(x):\n    'b'\n    return 1", [2]),
        ("def f(x):\n    'a'\n    return x", "def f(y):\n    'b\\nc'\n    return 1", [0, 2]),
        ("def f(x):\n    return x", "def f(y):\n    'b'\n    return y", [0, 2]),
        ("class F:\n    'a'\n    b = 'c'", "class F:\n    'd'\n    b = 'e'", [2]),
        ("b = 'c'", "b = 'e'", [0]),
        ("def f():\n    '''a\n    b\n    c'''\n    return", "def f():\n    '''d\n    b\n    e'''\n    return", []),
    ],
)
def test_a_docstring_that_differs_is_told_from_code(old, new, code):
    """`code`: the lines of the new text that are changed code; the sentence is at the first of them."""
    a, b = old.split("\n"), new.split("\n")
    changes = side_by_side.changes(a, b, "f", True)
    assert applied(changes, a, b) == b
    assert [line for change in changes if change[7] for line in range(change[2], change[3])] == code
    assert [change[4] for change in sorted(changes, key=lambda change: not change[7])][:1] == [0]
    assert len([change for change in changes if not change[7]]) <= 1


def test_an_option_that_is_declared_again_for_its_help_is_no_change_of_code():
    old = ["@dataclass", "class Args(RunArgs):", "    own: int = option(1)"]
    new = [*old[:2], "    adam_beta2: float = option(0.999)", old[2]]
    for default, is_code in (("0.999", False), ("0.95", True)):
        new[2] = f"    adam_beta2: float = option({default})"
        (change,) = side_by_side.changes(old, new, "Args", True)
        assert change[4] == 0 and change[7] == is_code


def test_every_sentence_of_the_diffs_stands_at_its_hunk(data):
    for name in ("copy", "own"):
        for place in data["scripts"][name]["places"]:
            hunks = [key for where, key, _ in diffs.hunks(GRPO, SCRIPTS[name]) if where == place]
            assert data["why"][name].get(place, []) == [f"*{key}*" for key in hunks]
            if changes := data["pairs"][f"grpo {name}"].get(place):
                assert [change[4] for change in changes if change[4] >= 0] == list(range(len(hunks)))
    assert data["why"].keys() == SCRIPTS.keys() and data["why"]["grpo"] == {}


def test_a_detail_is_at_the_lines_it_names(data):
    assert [note["label"] for note in data["notes"]] == [
        f"{name} {i}" for name in ("copy", "grpo", "own") for i in (1, 2)
    ]
    assert all(note["shown"] for note in data["notes"]) and data["notes"][0]["title"] == "The clip"
    block, _ = data["scripts"]["own"]["places"]["policy_loss"]
    end = len(texts(data, block)) - 1
    line = texts(data, block).index("    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)")
    assert (1, end, "own 2") in noted(data, "own", "policy_loss")  # below the comment above it
    # `clipped =` stands on two lines of own.py: it names none; grpo.py's and copy.py's are one text
    assert {(line, line, "grpo 1"), (line, line, "copy 1")} <= {*noted(data, "grpo", "policy_loss")}
    mean, _ = data["common"]["mean"]["place"]
    assert len(data["blocks"][mean]["notes"]) == 3 and data["common"]["mean"]["summary"] == "The mean ()."


def test_every_equation_of_a_docstring_stands_at_a_function_of_its_script(data):
    for name in SCRIPTS:
        advantage, objective = data["scripts"][name]["equations"]
        assert advantage == [["compute_advantages"], ["A_i = R_i - mean(R)", "Eq. 1"]]
        assert objective[0] == ["policy_loss", "token_weights"] and objective[1][1] == "Eq. 2"
        assert {advantage[1][0], objective[1][0]} == data["math"].keys()


def test_an_equation_without_latex_and_latex_without_an_equation_are_named(tree, data):
    assert side_by_side.unset(tree, data["scripts"]) == []
    tree.write(side_by_side.EQUATIONS, EQUATIONS.replace("A_i = R_i - mean(R)", "A_i = R_i", 1))
    assert side_by_side.unset(tree, data["scripts"]) == [
        "tools/side_by_side/equations.toml: no LaTeX for an equation of own.py: A_i = R_i - mean(R)",
        "tools/side_by_side/equations.toml: no docstring has this equation: A_i = R_i",
    ]


def symbols(text):
    """How often each name and number stands in an equation, in the docstring's writing or in LaTeX."""
    text = re.sub(r"\\(?:frac|text|left|right|lvert|rvert|quad|[,#{}])", " ", text).replace("epsilon", "eps")
    return collections.Counter(re.findall(r"[A-Za-z]+|\d+", text.replace("\\", " ").replace("_", " ")))


def test_the_latex_of_an_equation_has_the_symbols_of_the_docstring():
    latex = side_by_side.in_latex(Tree())
    assert len(latex) > 20
    for text, own in latex.items():
        assert symbols(own) == symbols(text), text
        assert own.count("{") == own.count("}") and own.count(r"\left") == own.count(r"\right")


@pytest.mark.needs("latex2mathml", "pygments")
def test_every_equation_is_set():
    for latex in side_by_side.in_latex(Tree()).values():
        mathml = side_by_side.mathml(latex)
        assert mathml.startswith("<math ") and "\\" not in mathml and "merror" not in mathml


def test_an_option_leads_to_its_line(data):
    assert data["options"] == [
        ["clip", "all/Args/clip", "<code>0.2</code>", "the ratio is clipped where A &lt; 0"],
        ["cap", "all/Args/cap", "<code>10</code>", "the <code>cap</code>"],
    ]
    common = {"learning_rate": "", "RunArgs": "class RunArgs:\n    clip: float = 1", "OtherArgs": "class OtherArgs:"}
    ((_, state, *_),) = side_by_side.option_states(OPTIONS.splitlines()[0] + "\n", {"own.py": "class Args:"}, common)
    assert state == "common/RunArgs/clip"


def test_the_first_sentence_of_a_docstring_is_what_the_search_shows(data):
    assert data["summaries"]["compute_advantages"] == "Rewards less their mean."
    assert data["summaries"]["token_weights"] == ""
    assert side_by_side.summary("def f():\n    'As Eq. 3 has it. More.'") == "As Eq. 3 has it."


@pytest.mark.needs("latex2mathml", "pygments")
def test_names_lead_to_their_definitions(data):
    linked = {tokens[i + 1] for tokens in data["lines"] for i in range(0, len(tokens), 2) if tokens[i] == "C"}
    assert linked == {"mean", "option"}  # `clean_exit` is below `main`
    assert data["common"].keys() == {"mean", "option", "clean_exit"}
    assert data["common"]["mean"]["used"] == ["grpo.py", "copy.py", "own.py"]


@pytest.mark.needs("latex2mathml", "pygments")
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
    assert len(states) == len(set(states)) and "own-own" not in states
    named = "map grpo-own own-grpo grpo-own/policy_loss all/token_weights all/Args/cap common/mean batch batch/prompts"
    assert set(named.split()) <= set(states)


@pytest.mark.parametrize(
    "old, new, marks",
    [
        (["a = total / rows"], ["a = total / tokens"], ([[0, 12, 16]], [[0, 12, 18]])),
        (["x = 1", "y = f(x)"], ["x = 1", "y = g(x)"], ([[1, 4, 5]], [[1, 4, 5]])),
        (["return a"], ["return a + b"], ([], [[0, 9, 12]])),
        (["a == b"], ["a = b"], ([[0, 2, 4]], [[0, 2, 3]])),
        (["a  = b"], ["a = b"], ([], [])),  # only spaces differ
        (["one two"], ["def f(): return 7"], ([], [])),  # little is common: the lines as a whole differ
        (["x = f(a, b)"], ["if new:", "    x = f(a, c)", "    done()"], ([[0, 9, 10]], [[1, 13, 14]])),
        (["n = sum(m)", "return m / n"], ["return m / max(t, 1)"], ([], [])),
        (["a = 1", "return m / n"], ["if group:", "return m / t / n"], ([], [[1, 11, 14]])),
        (
            ["def f(one, two, three):"],
            ["def f(", "    one,", "    two,", "    three,", "    four,", "):"],
            ([], [[3, 9, 10], [4, 4, 9]]),
        ),
    ],
)
def test_the_words_that_differ_are_marked_in_lines_that_are_nearly_the_same(old, new, marks):
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


def test_the_table_has_the_keys_that_the_code_uses(tree, data):
    uses = {row["key"]: {how: row[how] for how in ("writes", "reads")} for row in data["batch"]}
    everywhere = {"main": ["grpo.py", "copy.py", "own.py"]}
    assert uses == {key: {"writes": everywhere, "reads": everywhere} for key in ("prompts", "completion_mask")}
    tree.write("own.py", OWN.replace('"prompts"', '"queries"'))
    found = batch_keys.unknown(tree)
    assert found[0] == "tools/batch_keys.py: KEYS has no row for the key `queries` of the batch"
    assert "tools/batch_keys.py: nothing uses the key `rewards` of KEYS" in found[1:]


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
        - {"group_tokens", "packed"}  # the second is there on a GPU alone
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
