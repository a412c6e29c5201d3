"""common/load.py: data formats, merging, evaluation data, tokens, bad input, and the order of prompts."""

import json
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.load import EMBEDDED, PromptSampler, end_token
from common.run import Exit
from rows import TEMPLATE, USER, gemma_tokenizer, load, load_rows, make_tokenizer, say, text_of, write
from testbed import ROOT

CHAT = make_tokenizer(TEMPLATE)


def error_of(*arguments, **options):
    with pytest.raises(Exit) as caught:
        load(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None  # the scripts print a traceback for a cause
    return str(caught.value)


def numbered(n):
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(n)]


# --- formats ---

PARTS = [{"type": "text", "text": text} for text in ("2+", "2?")]
SFT = [*USER, say("2+2=4\n#### 4")]
FORMATS = {
    "gsm8k": ({"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, "2+2?", "4"),
    "math": ({"problem": "2+2?", "level": "1", "solution": r"It is $\boxed{\frac{8}{2}}$."}, "2+2?", r"\frac{8}{2}"),
    "math with answer": ({"problem": "2+2?", "solution": r"\boxed{5}", "answer": "4"}, "2+2?", "4"),
    "number as answer": ({"problem": "2+2?", "answer": 4}, "2+2?", "4"),
    "verl": ({"prompt": USER, "reward_model": {"ground_truth": "4", "style": "rule"}}, USER, "4"),
    "verl, as text": ({"prompt": USER, "reward_model": '{"ground_truth": "4"}'}, USER, "4"),
    "prompt only": ({"prompt": "2+2?"}, "2+2?", None),
    "prompt only, messages": ({"prompt": USER}, USER, None),
    "preference": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", None),
    "sft": ({"messages": SFT}, USER, "4"),
    "messages": ({"messages": USER, "answer": "4"}, USER, "4"),
    "parts": ({"prompt": [{"role": "user", "content": PARTS}], "answer": "4"}, USER, "4"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_by_columns(tmp_path, no_datasets, name):
    row, prompt, gold = FORMATS[name]
    loaded = load_rows(tmp_path, [row], reward=["format" if gold is None else "accuracy"])[0]
    assert (loaded.prompt, loaded.gold) == (prompt, gold)
    assert text_of(loaded.ids) == (prompt if isinstance(prompt, str) else "2+2?")


def write_as(path, rows, datasets):
    """Write a file in the format of its ending, or a folder of `save_to_disk`."""
    if not path.suffix:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")  # with a byte order mark
    return path


@pytest.mark.parametrize("suffix", ["", ".json", ".parquet"])
def test_file_formats_agree(suffix, tmp_path, datasets):
    rows = [{"question": f"{i}+2?", "answer": f"It is\n#### {i + 2}", "day": f"2024-01-{i + 1:02}"} for i in range(30)]
    expected = load(write(tmp_path / "rows.jsonl", rows), reward=["accuracy"])
    assert load(write_as(tmp_path / f"rows{suffix}", rows, datasets), reward=["accuracy"]) == expected


def test_other_columns_by_name(tmp_path):
    row = {"prompt": "wrong", "answer": "0", "text": "2+2?", "gold": 4}
    loaded = load_rows(tmp_path, [row], prompt_column="text", answer_column="gold")[0]
    assert (loaded.prompt, loaded.gold) == ("2+2?", "4")
    assert loaded.columns == {"prompt": "wrong", "answer": "0", "gold": 4}


def test_joining_files_as_documented(tmp_path):
    """docs/run.md: the rows of both files, none of them twice, and a date stays text."""
    page = (ROOT / "docs/run.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`(cat a.jsonl .*?)`", page)
    for name in "ab":
        rows = [{"question": f"{name} {i}", "answer": f"2024-01-{i:02}"} for i in range(40)]
        write(tmp_path / f"{name}.jsonl", rows)
    subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, check=True)
    prompts = load(tmp_path / "both.jsonl", eval_dataset=str(tmp_path / "a.jsonl"), reward=["accuracy"])[0]
    golds = {prompt.prompt: prompt.gold for prompt in prompts}
    assert golds["a 7"] == "2024-01-07" and len(golds) == 80


def test_hub_dataset_with_config(datasets, monkeypatch):
    def fake(name, config=None):
        assert (name, config) in (("some/math", "main"), ("other/math", None))  # a config applies only to its dataset
        rows = {"train": numbered(3), "test": numbered(5)[3:]}
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows[split]) for split in rows})

    monkeypatch.setattr(datasets, "load_dataset", fake)
    train, evaluation = load("some/math", dataset_config="main")
    assert [p.gold for p in train] == ["0", "1", "2"]
    assert [p.gold for p in evaluation] == ["3", "4"]
    for name in ("some/math", "other/math"):
        assert load("some/math", dataset_config="main", eval_dataset=name)[1] == evaluation


def test_arrow_keys_leave_messages(tmp_path, datasets):
    """Arrow gives every message the keys of all: `tool_calls: None` takes another branch in many templates."""
    rows = [{"prompt": USER}, {"prompt": [{"role": "user", "content": "hi", "name": "bob"}]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    train, evaluation = load(tmp_path / "saved", CHAT)
    assert sorted([train[0].prompt, evaluation[0].prompt], key=str) == sorted([r["prompt"] for r in rows], key=str)


# --- merging and dropping ---


def test_equal_rows_merge(tmp_path, capsys):
    """The hub's DAPO-Math-17k repeats each row a hundred times; other text around the same gold is the same problem."""
    rows = [
        {"prompt": USER, "answer": "so #### 4", "id": 0},
        {"prompt": USER, "answer": r"thus \boxed{4}", "id": 1},
        {"prompt": USER, "answer": "5", "id": 2},
        {"prompt": [{"role": "system", "content": "2+2?"}], "answer": "4", "id": 3},
    ]
    assert [p.columns["id"] for p in load_rows(tmp_path, rows)] == [0, 2, 3]
    assert "1 repeated rows merged" in capsys.readouterr().out


def test_long_prompts_are_dropped(tmp_path, capsys):
    write(tmp_path / "train.jsonl", [{"prompt": "x" * n} for n in (3, 7, 4, 8, 5)])
    write(tmp_path / "test.jsonl", [{"prompt": "y" * n} for n in (4, 9)])
    train, evaluation = load(tmp_path, max_prompt_tokens=4)
    assert [len(p.ids) for p in train] == [3, 4]
    assert [len(p.ids) for p in evaluation] == [4]
    told = capsys.readouterr().out
    assert "training: 2 prompts (3 longer than --max_prompt_tokens dropped)" in told
    assert "evaluation: 1 prompts (1 longer than --max_prompt_tokens dropped)" in told


# --- evaluation data ---


@pytest.mark.parametrize("rows, count", [(2, 1), (5, 2), (30, 15), (200, 32), (700, 35), (12_000, 512)])
def test_seed_picks_the_held_out_prompts(rows, count, tmp_path, capsys):
    """5 %, but at least 32 or half of the prompts: pass@1 of one prompt says nothing. At most 512."""
    path = write(tmp_path / "rows.jsonl", numbered(rows))
    train, evaluation = load(path)
    assert (len(train), len(evaluation)) == (rows - count, count)
    assert f"{count} held out" in capsys.readouterr().out
    assert {p.gold for p in train + evaluation} == {str(i) for i in range(rows)}
    if rows == 200:
        assert load(path) == (train, evaluation)
        assert load(path, seed=2)[1] != evaluation


def test_held_out_prompts_are_disjoint(tmp_path):
    """With two golds, and with rows that are there three times and merge before some are held out."""
    rows = [row | {"answer": gold} for row in numbered(40) for gold in ("1", "2")] * 3
    train, evaluation = load(write(tmp_path / "rows.jsonl", rows))
    assert (len(train), len(evaluation)) == (40, 40)
    assert not {p.prompt for p in train} & {p.prompt for p in evaluation}


def test_eval_prompts_caps_evaluation_alone(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(400))
    train, all_of_them = load(path)
    capped_train, capped = load(path, eval_prompts=7)
    assert capped_train == train
    assert len(capped) == 7
    assert capped == [p for p in all_of_them if p in capped] != all_of_them[:7]
    assert load(path, eval_prompts=33)[1] == all_of_them


def test_order_of_evaluation_data(tmp_path):
    """A file or folder answers with test, then validation; what the user names comes first; training rows never do."""
    for split, count in (("train", 6), ("validation", 2)):
        write(tmp_path / f"{split}.jsonl", [{"prompt": f"{split} {i}"} for i in range(count)])
    other = write(tmp_path / "other.jsonl", [{"prompt": "other"}])

    def first(**options):
        return load(options.pop("dataset", tmp_path), **options)[1][0].prompt

    assert first() == "validation 0"
    write(tmp_path / "test.jsonl", [{"prompt": "test 0"}])
    assert first() == "test 0"
    assert first(eval_split="validation") == "validation 0"
    assert first(eval_dataset=str(other)) == "other"
    assert first(eval_dataset=str(tmp_path)) == "test 0"
    assert first(dataset_split="test") == "validation 0"
    assert first(dataset=other, eval_dataset=str(tmp_path), eval_split="train") == "train 0"


# --- tokens ---


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(
    ("template", "prompt"),
    [(None, "2+2?"), (None, "<s>2+2?"), (None, USER), (TEMPLATE, "2+2?"), (TEMPLATE, USER)],
)
def test_one_bos_and_no_eos(tmp_path, template, prompt, eos):
    """One BOS from the template or the text, one more from the tokenizer; an EOS that ends the prompt."""
    tokenizer = make_tokenizer(template, bos=True, eos=eos)
    ids = load_rows(tmp_path, [{"prompt": prompt}], tokenizer)[0].ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert type(ids) is list and type(ids[0]) is int


def test_sft_data_ends_before_the_answer(tmp_path):
    """The model was given the whole answer and continued after it."""
    turns = [*USER, say("4"), *USER]
    row = {"messages": [*turns, say("#### 4")], "level": 1}
    (loaded,) = load_rows(tmp_path, [row], CHAT, reward=["accuracy"])
    assert (loaded.prompt, loaded.gold, loaded.columns) == (turns, "4", {"level": 1})
    assert text_of(loaded.ids) == "[user]2+2?[end][assistant]4[end][user]2+2?[end][assistant]"


KWARGS_TEMPLATE = (
    "{% if tools %}<{{ tools[0].name }}>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(no){% endif %}{{ style }}"
)


def test_kwargs_and_tools_reach_the_template(tmp_path):
    """Qwen3 thinks unless the template gets enable_thinking; rows with other tools are other prompts."""
    tokenizer = make_tokenizer(KWARGS_TEMPLATE)
    rows = [
        {"prompt": "a"},
        {"prompt": "a", "tools": [{"name": "f", "x": None}]},
        {"prompt": "a", "tools": [{"name": "g"}]},
        {"prompt": "a", "chat_template_kwargs": {"enable_thinking": True, "style": None}},
    ]
    options = {"chat_template_kwargs": '{"enable_thinking": false, "style": "S"}'}
    prompts = load_rows(tmp_path, rows, tokenizer, **options)
    assert [text_of(prompt.ids) for prompt in prompts] == ["a(no)S", "<f>a(no)S", "<g>a(no)S", "aS"]


def test_prompt_template_and_system_prompt(tmp_path):
    """Braces in formulas are not fields; reward functions get the original text."""
    options = dict(prompt_template=r"Put it in \boxed{}: {prompt} {x}", system_prompt="Be {brief}.")
    loaded = load_rows(tmp_path, [{"prompt": r"\frac{1}{2}+{prompt}?"}], **options)[0]
    assert text_of(loaded.ids) == "Be {brief}.\n\n" + r"Put it in \boxed{}: \frac{1}{2}+{prompt}? {x}"
    assert loaded.prompt == r"\frac{1}{2}+{prompt}?"


def test_options_on_a_conversation(tmp_path):
    """The last user message is wrapped, the data's own system message replaced: most templates take only one."""
    turns = [("system", "old"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    loaded = load_rows(tmp_path, [{"prompt": messages}], CHAT, prompt_template="<{prompt}>", system_prompt="new")[0]
    assert text_of(loaded.ids) == "[system]new[end][user]a[end][assistant]b[end][user]<c>[end][assistant]"
    assert loaded.prompt == messages


@pytest.mark.parametrize(
    "end, thinks", [("<think>", True), ("<think>\n", True), ("<think></think>", False), ("", False)]
)
def test_prompt_may_end_in_a_thought(end, thinks, tmp_path):
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    tokenizer.add_tokens(["<think>", "</think>"])
    (prompt,) = load_rows(tmp_path, [{"prompt": f"a{end}"}], tokenizer)
    assert prompt.starts_in_thought == thinks


def test_template_that_refuses_answers():
    tokenizer = gemma_tokenizer("{{ raise_exception('user turns only') if messages[1:] }}{{ messages[0].content }}")
    with pytest.raises(Exit, match="chat template: user turns only"):
        end_token(tokenizer)


# --- bad input ---

FIRST = b'{"prompt": "a", "answer": "1"}'


@pytest.mark.parametrize(
    ("lines", "number", "says"),
    [
        ([FIRST, b"", b'{"prompt": "b", '], "line 3", "cannot be read"),
        ([FIRST, b'{"prompt": "\xff", "answer": "1"}'], "", "cannot be read"),
        ([FIRST, b"[" * 100_000], "", "cannot be read"),
        ([FIRST, b'["b"]'], "", "expected objects"),
        ([b'{"messages": "a", "answer": "1"}'], "row 1", "column messages: expected text or a list of messages"),
        ([b'{"prompt": [], "answer": "1"}'], "row 1", "column prompt: expected text or a list of messages"),
        ([b'{"prompt": [{"from": "human", "value": "a"}]}'], "row 1", "expected messages with 'role' and 'content'"),
        ([FIRST, b'{"answer": "1"}'], "row 2", "no prompt in ['answer']: set --prompt_column"),
        ([FIRST, b'{"prompt": " \\n", "answer": "1"}'], "row 2", "no prompt in"),
        # the text is under another key
        ([FIRST, b'{"prompt": [{"role": "user", "value": "2+2?"}], "answer": "1"}'], "row 2", "no prompt in"),
        ([FIRST, b'{"prompt": "b", "answer": ""}'], "row 2", "no answer"),
        ([FIRST, b'{"prompt": "b", "answer": NaN}'], "row 2", "no answer"),
    ],
)
def test_a_bad_row_is_named(tmp_path, no_datasets, lines, number, says):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    message = error_of(path, reward=["accuracy"])
    assert number in message and says in message


def test_answers_are_optional(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    assert [p.gold for p in load_rows(tmp_path, rows)] == ["1", None]


def test_missing_columns_are_named(tmp_path, no_datasets):
    path = write(tmp_path / "rows.jsonl", [{"text": "a", "label": 1}])
    assert "no prompt in ['text', 'label']: set --prompt_column" in error_of(path)
    assert "no column txt in ['text', 'label']: set --prompt_column" in error_of(path, prompt_column="txt")
    options = dict(prompt_column="text", answer_column="gold")
    assert "no column gold in ['text', 'label']: set --answer_column" in error_of(path, **options)


def test_bad_files_and_options(tmp_path, no_datasets):
    good = write(tmp_path / "rows.jsonl", numbered(4))
    for name in ("absent.jsonl", "train.jsonl"):
        assert "No such file" in error_of(tmp_path / name)
    (tmp_path / "a.tsv").write_text("prompt\n2+2?\n", encoding="utf-8")
    assert "cannot be read" in error_of(tmp_path / "a.tsv")
    assert "cannot be read: write it as .jsonl" in error_of(tmp_path / "a.csv")
    assert "--eval_dataset absent.jsonl" in error_of(good, eval_dataset="absent.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    assert "not enough data: training: 0 of 0 prompts" in error_of(tmp_path / "empty.jsonl")
    assert "--dataset_split dev: not one of train" in error_of(good, dataset_split="dev")
    assert "--eval_split dev: not one of train" in error_of(good, eval_split="dev")
    assert "0 prompts (4 longer than --max_prompt_tokens" in error_of(good, max_prompt_tokens=9)
    assert "evaluation: 0 held out" in error_of(write(tmp_path / "one.jsonl", numbered(1)))


def test_shared_prompts_are_counted(tmp_path, capsys):
    write(tmp_path / "train.jsonl", numbered(4))
    write(tmp_path / "test.jsonl", [{"prompt": f"question {i}"} for i in (3, 4, 1)])
    load(tmp_path)
    assert "evaluation: 3 prompts, 2 of them also in training" in capsys.readouterr().out


def test_words_that_the_tokenizer_cannot_write(tmp_path, capsys):
    """The embedded model takes none; for another one they are counted, unless all prompts have some."""
    rows = [{"prompt": "é" * i + f"{i}+2?"} for i in range(3)]
    path = write(tmp_path / "rows.jsonl", rows)
    other = str(EMBEDDED["embedded"])
    load(path, model_name_or_path=other, eval_dataset=str(path))
    assert "2 with characters that the tokenizer does not know" in capsys.readouterr().out
    assert "the tokenizer cannot write 2 prompts, such as '<unk>1+2?'" in error_of(path)
    path = write(tmp_path / "b.jsonl", rows[1:])
    assert "cannot write 2 prompts" in error_of(path, model_name_or_path=other, eval_dataset=str(path))


def test_unknown_hub_dataset(datasets, monkeypatch):
    def fail(name, config=None):
        raise ValueError("Config name is missing.\nPick one of:\n['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert "some/math: cannot be read: Config name is missing. Pick one of" in error_of("some/math")


def test_template_errors_name_the_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    tokenizer = make_tokenizer("{{ raise_exception('no system role') }}")
    assert error_of(path, tokenizer).startswith("row 1: chat template: no system role")


# --- sampler ---


def sampler(count, seed, rank=0, processes=1):
    return PromptSampler(range(count), seed, SimpleNamespace(process_index=rank, num_processes=processes))


def test_epochs_are_permutations():
    """Each epoch has every prompt once, even if a draw spans the end of an epoch or several epochs."""
    drawer = sampler(10, 3)
    drawn = drawer.draw(4) + drawer.draw(4) + drawer.draw(25) + drawer.draw(7)
    epochs = [drawn[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert sampler(10, 4).draw(40) != drawn


def test_processes_share_a_draw():
    whole = sampler(10, 3).draw(8)
    shares = [sampler(10, 3, rank, 2).draw(8) for rank in range(2)]
    assert [item for pair in zip(*shares, strict=True) for item in pair] == whole


def test_order_depends_on_the_seed_alone():
    """The data order depends only on the seed, not on sampling rounds or other random numbers."""
    whole = sampler(7, 0).draw(60)
    torch.manual_seed(5)
    np.random.seed(5)
    drawer = sampler(7, 0)
    assert [i for k in (1, 2, 3, 0, 14, 8, 32) for i in drawer.draw(k)] == whole


@pytest.mark.parametrize("before", [0, 3, 7, 20])
def test_sampler_resumes(before):
    """Other trainers resume at the first prompt, or in the wrong permutation."""
    whole = sampler(7, 1).draw(40)
    first = sampler(7, 1)
    first.draw(before)
    second = sampler(7, 1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.draw(40 - before) == whole[before:]
