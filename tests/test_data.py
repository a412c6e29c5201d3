"""common/harness/data.py: every format, merging, evaluation data, tokens, bad input, and the order of the prompts.

Each test names the failure it pins; the numbers B11, B15 and B24 are themes of real bugs in other projects."""

import csv
import gzip
import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from common.errors import InputError
from common.harness.data import DataDigest, Prompt, PromptSampler, load_prompts
from common.harness.pairs import Pair, load_pairs
from common.harness.prompts import encode_completions, end_token, shared_prompt
from rows import PLAIN, TEMPLATE, USER, gemma_tokenizer, make_args, make_tokenizer, say, write

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
CHAT = make_tokenizer(TEMPLATE)


def load(dataset, tokenizer=PLAIN, needs_answers=False, train=None, **options):
    return load_prompts(make_args(dataset, **options), tokenizer, needs_answers, train)


def load_rows(folder, rows, tokenizer=PLAIN, needs_answers=False, **options):
    """All prompts of these rows; the evaluation data is a file of its own that does not matter."""
    path = write(folder / "train.jsonl", rows)
    other = write(folder / "other.jsonl", [rows[0]])
    return load(path, tokenizer, needs_answers, **{"eval_dataset": str(other)} | options)[0]


def error_of(*arguments, **options):
    with pytest.raises(InputError) as caught:
        load(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None  # the scripts print a traceback for a cause
    return str(caught.value)


def text_of(prompt, tokenizer=PLAIN):
    return "".join(tokenizer.convert_ids_to_tokens(prompt.ids))


def numbered(n):
    return [{"prompt": f"question {i}", "answer": str(i)} for i in range(n)]


# --- formats ----------------------------------------------------------------------------------------------------------


def text_part(text):
    return {"type": "text", "text": text}


FORMATS = {
    "gsm8k": ({"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, "2+2?", "4"),
    "math": ({"problem": "2+2?", "level": "1", "solution": r"It is $\boxed{\frac{8}{2}}$."}, "2+2?", r"\frac{8}{2}"),
    "math with answer": ({"problem": "2+2?", "solution": r"\boxed{5}", "answer": "4"}, "2+2?", "4"),
    "number as answer": ({"problem": "2+2?", "answer": 4}, "2+2?", "4"),
    "verl": ({"prompt": USER, "reward_model": {"ground_truth": "4", "style": "rule"}, "ability": "MATH"}, USER, "4"),
    "prompt only": ({"prompt": "2+2?"}, "2+2?", None),
    "prompt only, messages": ({"prompt": USER}, USER, None),
    "preference": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", None),
    "preference, messages": ({"prompt": USER, "chosen": [say("4")], "rejected": [say("5")]}, USER, None),
    "implicit": (
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: It is 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: It is 5"},
        "\n\nHuman: 2+2?\n\nAssistant:", None,
    ),
    "implicit, messages": ({"chosen": [*USER, say("4")], "rejected": [*USER, say("5")]}, USER, None),
    "verl, a list": ({"prompt": "2+2?", "reward_model": {"ground_truth": ["4"]}}, "2+2?", "4"),
    "verl, flat": ({"prompt": "2+2?", "reward_model.ground_truth": 4}, "2+2?", "4"),
    "sft": ({"messages": [*USER, say("2+2=4\n#### 4")]}, USER, "4"),
    "sft without a marker": ({"messages": [*USER, say(" four ")]}, USER, "four"),
    "sft and an answer": ({"messages": [*USER, say("I think 5")], "answer": "4"}, USER, "4"),
    "messages": ({"messages": USER, "answer": "4"}, USER, "4"),
    "parts": ({"prompt": [{"role": "user", "content": [text_part("2+"), text_part("2?")]}], "answer": "4"}, USER, "4"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_understood_by_their_columns(tmp_path, no_datasets, name):
    row, prompt, answer = FORMATS[name]
    loaded = load_rows(tmp_path, [row], needs_answers=answer is not None)[0]
    assert (loaded.prompt, loaded.answer) == (prompt, answer)
    assert text_of(loaded) == (prompt if isinstance(prompt, str) else "2+2?")


def test_other_columns_by_name(tmp_path):
    row = {"prompt": "wrong", "answer": "0", "text": "2+2?", "gold": 4}
    loaded = load_rows(tmp_path, [row], prompt_column="text", answer_column="gold")[0]
    assert (loaded.prompt, loaded.answer) == ("2+2?", "4")
    assert loaded.columns == {"prompt": "wrong", "answer": "0", "gold": 4}


def test_a_gold_is_the_text_of_its_file_and_other_columns_are_numbers(tmp_path, no_datasets):
    """As floats the first two are 0.12345678901234568 and 2.5, and Arrow makes a datetime of the last; user functions
    get numbers, as from TRL."""
    lines = ['"answer": 0.1234567890123456789, "level": 2', '"answer": 2.50, "level": 0.5']
    lines += ['"answer": 12345678901234567890123, "level": 0', '"answer": {"ground_truth": 1e5}, "level": 1']
    lines.append('"answer": "2024-01-02", "level": "x"')
    path = tmp_path / "rows.jsonl"
    rows = [f'{{"prompt": "p{i}", {line}}}' for i, line in enumerate(lines)]
    path.write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "array.json").write_text(f"[{', '.join(rows)}]", encoding="utf-8")
    loaded, of_array, _ = load(path, eval_dataset=str(tmp_path / "array.json"))
    assert [p.answer for p in of_array] == [p.answer for p in loaded]
    golds = ["0.1234567890123456789", "2.50", "12345678901234567890123", "1e5", "2024-01-02"]
    assert [p.answer for p in loaded] == golds
    answers = [p.columns["answer"] for p in loaded[:3]]
    assert answers == [0.1234567890123456789, 2.5, 12345678901234567890123] and isinstance(answers[0], float)
    assert [p.columns["level"] for p in loaded] == [2, 0.5, 0, 1, "x"]
    assert json.dumps(answers[:2]) == "[0.12345678901234568, 2.5]"  # a digest of the rows is as it was


def test_the_cells_of_a_csv_file_are_text_where_golds_and_prompts_are(tmp_path, datasets):
    """A guess of types makes floats of these golds, and nothing of `None`. Other columns are text too."""
    golds = ["12345678901234567", "0.5", "007", "None", "1e400", "3"]
    rows = "".join(f"{i},{gold},{i}\n" for i, gold in enumerate(golds))
    (tmp_path / "rows.csv").write_text(f"prompt,answer,level\n{rows}", encoding="utf-8")
    loaded = load(tmp_path / "rows.csv", needs_answers=True, eval_dataset=str(tmp_path / "rows.csv"))[0]
    assert [p.prompt for p in loaded] == list("012345") and [p.answer for p in loaded] == golds
    assert [p.columns["answer"] for p in loaded] == golds and [p.columns["level"] for p in loaded] == list("012345")
    (tmp_path / "rows.csv").write_text("prompt,answer\n1,2\n3,\n", encoding="utf-8")
    assert "row 2: no answer (text or number) in answer" in error_of(tmp_path / "rows.csv", needs_answers=True)


@pytest.mark.parametrize("rows", ["1+1?,2,", "7?,1,003\n4?,2"])
def test_a_csv_row_of_more_fields_than_the_header_is_refused(rows, tmp_path, datasets):
    """An index was made of the first column, so that the prompt was `2` and the gold `note`."""
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer\n{rows}\n", encoding="utf-8")
    assert error_of(path) == f"{path}, row 1: cannot be read: not an object, or in CSV more fields than the header"
    path.write_text('question,answer\n"1,003+1?",1004\n4?,\n', encoding="utf-8")
    assert [p.prompt for p in load(path, eval_dataset=str(path))[0]] == ["1,003+1?", "4?"]


def test_a_cell_of_several_lines_is_as_it_stands_and_a_quote_that_nothing_closes_is_refused(tmp_path):
    """Else all rows after it would be a part of its cell."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b'question,answer\r\n"1+1?\r\n2+2?",2\r\n4?,4\r\n')
    assert [p.prompt for p in load(path, eval_dataset=str(path))[0]] == ["1+1?\r\n2+2?", "4?"]
    path.write_bytes(b'question,answer\n1?,1\n"1+1?,2\n4?,4\n')
    assert error_of(path) == f"{path}, row 2: cannot be read: unexpected end of data"


@pytest.mark.parametrize("number", ["NaN", "1e400", "-Infinity"])
def test_a_gold_that_is_not_finite_is_refused(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    for gold in (number, f"[{number}]", f'{{"ground_truth": {number}}}'):
        path.write_text(f'{{"prompt": "a", "answer": 1}}\n{{"prompt": "b", "answer": {gold}}}\n', encoding="utf-8")
        assert error_of(path, needs_answers=True) == f"{path}, line 2: no answer (text or number) in answer"


def test_golds_of_parquet_keep_the_type_that_they_have(tmp_path, datasets):
    path, rows = tmp_path / "rows.parquet", [{"prompt": "a", "answer": 0.5}, {"prompt": "b", "answer": float("inf")}]
    datasets.Dataset.from_list(rows[:1]).to_parquet(path)
    assert load(path, eval_dataset=str(path))[0][0].answer == "0.5"
    datasets.Dataset.from_list(rows).to_parquet(path)
    assert error_of(path, needs_answers=True) == f"{path}, row 2: no answer (text or number) in answer"
    datasets.Dataset.from_list([{"prompt": "a", "answer": 2**53 + 1}]).to_parquet(path)
    assert load(path, eval_dataset=str(path))[0][0].answer == "9007199254740993"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_json_arrays_and_lines_with_either_suffix(encoding, tmp_path, no_datasets):
    """Windows editors write a byte order mark; it hides the bracket that tells an array from lines."""
    rows = numbered(4)
    texts = {"array.json": "\n " + json.dumps(rows, indent=1), "lines.json": "\n".join(map(json.dumps, rows))}
    for name, text in (texts | {"lines.jsonl": texts["lines.json"]}).items():
        (tmp_path / name).write_text(text, encoding=encoding)
        train, evaluation, _ = load(tmp_path / name)
        assert {p.prompt for p in train + evaluation} == {row["prompt"] for row in rows}, name


def test_parquet_csv_and_saved_datasets(tmp_path, datasets):
    rows = [{"question": f"{i}+2?", "answer": f"It is\n#### {i + 2}", "level": i} for i in range(30)]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    texts = [row | {"level": str(row["level"])} for row in rows]  # cells of CSV are text
    for name, written in (("rows.parquet", rows), ("saved", rows), ("rows.csv", texts)):
        expected = load(write(tmp_path / "rows.jsonl", written), needs_answers=True)[:2]
        assert load(tmp_path / name, needs_answers=True)[:2] == expected, name


def test_hub_dataset_with_config(datasets, monkeypatch):
    def fake(name, config=None):
        assert (name, config) in (("some/math", "main"), ("other/math", None))  # a config belongs to its own dataset
        return datasets.DatasetDict(
            train=datasets.Dataset.from_list(numbered(3)), test=datasets.Dataset.from_list(numbered(5)[3:])
        )

    monkeypatch.setattr(datasets, "load_dataset", fake)
    train, evaluation, description = load("some/math", dataset_config="main")
    assert [p.answer for p in train] == ["0", "1", "2"]
    assert [p.answer for p in evaluation] == ["3", "4"]
    assert description == "training: 3 prompts (some/math [train]); evaluation: 2 prompts (some/math [test])"
    for name in ("some/math", "other/math"):
        assert load("some/math", dataset_config="main", eval_dataset=name)[1] == evaluation


def test_messages_lose_what_arrow_adds(tmp_path, datasets):
    """Arrow gives every message the keys of all: `tool_calls: None` takes another branch in many templates."""
    rows = [{"prompt": USER}, {"prompt": [{"role": "user", "content": "hi", "name": "bob"}]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    train, evaluation, _ = load(tmp_path / "saved")
    assert sorted([train[0].prompt, evaluation[0].prompt], key=str) == sorted([r["prompt"] for r in rows], key=str)


def test_shared_prompt_ends_with_the_last_turn_that_both_share():
    """The cut must not fall into the answers where they begin alike, nor at an earlier turn."""
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    assert shared_prompt(start + " The same", start + " The other") == start
    assert shared_prompt("The sky is blue.", "The sky is brown.") == "The sky is"
    turns = [*USER, say("4"), {"role": "user", "content": "Sure?"}]
    assert shared_prompt([*turns, say("Yes")], [*turns, say("No")]) == turns
    assert shared_prompt([*turns, say("Yes")], [*turns, say("Yes")]) == turns


# --- merging and dropping ---------------------------------------------------------------------------------------------


def test_rows_with_the_same_prompt_and_answer_merge(tmp_path):
    """The hub's DAPO-Math-17k repeats each row a hundred times; other text around the same gold is the same problem."""
    rows = [
        {"prompt": USER, "answer": "so #### 4", "id": 0},
        {"prompt": USER, "answer": r"thus \boxed{4}", "id": 1},
        {"prompt": USER, "answer": "5", "id": 2},
        {"prompt": [{"role": "system", "content": "2+2?"}], "answer": "4", "id": 3},
    ]
    train, _, description = load(
        write(tmp_path / "a.jsonl", rows), eval_dataset=str(write(tmp_path / "b.jsonl", [{"prompt": "x"}]))
    )
    assert [p.columns["id"] for p in train] == [0, 2, 3]
    assert "1 repeated rows merged, 1 of them with other values in other columns" in description


def test_long_prompts_are_dropped_and_counted(tmp_path):
    path = write(tmp_path / "train.jsonl", [{"prompt": "x" * n} for n in (3, 7, 4, 8, 5)])
    write(tmp_path / "test.jsonl", [{"prompt": "y" * n} for n in (4, 9)])
    train, evaluation, description = load(path, max_prompt_tokens=4)
    assert [len(p.ids) for p in train] == [3, 4]
    assert [len(p.ids) for p in evaluation] == [4]
    assert "3 longer than 4 tokens dropped" in description
    assert "1 longer than 4 tokens dropped" in description


class Recorder:
    """A tokenizer that keeps the texts of each call."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    def __call__(self, texts, **options):
        self.calls.append(texts)
        return self.tokenizer(texts, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_many_texts_are_tokenized_in_parts_and_keep_their_order(tmp_path):
    tokenizer = Recorder(make_tokenizer())
    rows = [{"prompt": f"question {i}"} for i in range(2100)]
    prompts = load_rows(tmp_path, rows, tokenizer)
    assert [text_of(p) for p in prompts] == [row["prompt"] for row in rows]
    assert max(map(len, tokenizer.calls)) == 1000


def test_unknown_characters_are_said(tmp_path):
    """GSM8K with the embedded model's alphabet would train on <unk> alone, in silence."""
    path = write(tmp_path / "train.jsonl", [{"prompt": "caf\u00e9"}, {"prompt": "tea"}, {"prompt": "\u6c34"}])
    write(tmp_path / "test.jsonl", [{"prompt": "milk"}])
    assert load(path)[2].count("2 with characters unknown to the tokenizer") == 1


# --- evaluation data --------------------------------------------------------------------------------------------------


def test_five_percent_are_held_out_by_seed(tmp_path):
    path = write(tmp_path / "rows.jsonl", numbered(200))
    train, evaluation, description = load(path)
    assert (len(train), len(evaluation)) == (190, 10)
    assert {p.answer for p in train + evaluation} == {str(i) for i in range(200)}
    assert load(path)[:2] == (train, evaluation)
    assert load(path, seed=2)[1] != evaluation
    assert "held out of these by prompt, very few: give --eval_dataset" in description
    enough = load(write(tmp_path / "enough.jsonl", numbered(320)))[2]
    assert enough.endswith("16 prompts (held out of these by prompt)")
    assert len(load(write(tmp_path / "few.jsonl", numbered(5)))[1]) == 1
    assert len(load(write(tmp_path / "many.jsonl", numbered(12_000)))[1]) == 512


def test_a_prompt_stands_on_one_side_of_the_hold_out(tmp_path):
    """With two golds, and with rows that are there three times and merge before some are held out."""
    rows = [row | {"answer": gold} for row in numbered(40) for gold in ("1", "2")] * 3
    train, evaluation, _ = load(write(tmp_path / "rows.jsonl", rows))
    assert (len(train), len(evaluation)) == (76, 4)
    assert not {p.prompt for p in train} & {p.prompt for p in evaluation}


def test_eval_prompts_caps_evaluation_alone(tmp_path):
    """A resumed run may change it, so it must not move a prompt into or out of training."""
    path = write(tmp_path / "rows.jsonl", numbered(400))
    train, all_of_them, _ = load(path)
    capped_train, capped, _ = load(path, eval_prompts=7)
    assert capped_train == train
    assert len(capped) == 7
    assert capped == [p for p in all_of_them if p in capped] != all_of_them[:7]
    assert load(path, eval_prompts=7)[1] == capped
    assert load(path, eval_prompts=21)[1] == all_of_them


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
    assert first(dataset=tmp_path / "train.jsonl") == "test 0"
    assert first(eval_split="validation") == "validation 0"
    assert first(eval_dataset=str(other)) == "other"
    assert first(eval_dataset=str(tmp_path / "train.jsonl")) == "train 0"
    assert first(eval_dataset=str(tmp_path)) == "test 0"
    assert first(dataset_split="test", eval_split=None) == "validation 0"
    assert first(dataset=other, eval_dataset=str(tmp_path), eval_split="train") == "train 0"


def test_an_evaluation_alone_reads_training_data_only_to_hold_some_of_it_out(tmp_path, no_datasets):
    """Of a large data set nothing is used. A resumed run compares its data, and dpo.py makes pairs at step 0 too."""
    path = tmp_path / "train.jsonl"
    path.write_text("no JSON", encoding="utf-8")
    other = write(tmp_path / "other.jsonl", numbered(3))
    for options in (dict(dataset=path), dict(dataset="/no/such.jsonl", eval_dataset=str(other))):
        write(tmp_path / "test.jsonl", numbered(3))
        train, evaluation, description = load(max_steps=0, **options)
        assert (train, len(evaluation)) == ([], 3)
        assert description.startswith("evaluation: 3 prompts (")
    for options in (dict(max_steps=1), dict(max_steps=0, resume=True), dict(max_steps=0, train=True)):
        assert "line 1: cannot be read: Expecting value" in error_of(path, **options)
    train, evaluation, description = load(other, max_steps=0)
    assert (len(train), len(evaluation)) == (2, 1) and "held out" in description
    write(tmp_path / "test.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    pairs, evaluation, description = load_pairs(make_args(path, max_steps=0), PLAIN)
    assert (pairs, len(evaluation)) == ([], 1) and description.startswith("evaluation: 1 pair (")


def test_evaluation_prompts_in_training_are_counted(tmp_path):
    path = write(tmp_path / "train.jsonl", numbered(5))
    write(tmp_path / "test.jsonl", numbered(8)[3:])
    train, evaluation, description = load(path)
    assert (len(train), len(evaluation)) == (5, 5)
    assert "2 also in training" in description


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(
    ("template", "prompt"),
    [(None, "2+2?"), (None, "<s>2+2?"), (None, USER), (TEMPLATE, "2+2?"), (TEMPLATE, USER)],
)
def test_one_bos_and_no_eos(tmp_path, template, prompt, eos):
    """one BOS from the template or the text, one more from the tokenizer; an EOS that ends the prompt."""
    tokenizer = make_tokenizer(template, bos=True, eos=eos)
    ids = load_rows(tmp_path, [{"prompt": prompt}], tokenizer)[0].ids
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert type(ids) is list and type(ids[0]) is int


def test_sft_data_is_cut_before_the_gold_answer(tmp_path):
    """The model was given the whole answer and went on behind it."""
    turns = [*USER, say("4"), *USER]
    row = {"messages": [*turns, say("#### 4")], "level": 1}
    (loaded,) = load_rows(tmp_path, [row], CHAT, needs_answers=True)
    assert (loaded.prompt, loaded.answer, loaded.columns) == (turns, "4", {"level": 1})
    assert text_of(loaded) == "[user]2+2?[end][assistant]4[end][user]2+2?[end][assistant]"
    path = write(tmp_path / "train.jsonl", [{"prompt": [*USER, say("Let us")]}, {"prompt": USER}])
    (tmp_path / "other.jsonl").unlink()
    assert (
        "1 begin the assistant's answer" in load(path, CHAT, eval_dataset=str(path))[2]
    )  # nothing is continued unsaid
    assert "line 1: no answer (text or number) in the last turn" in error_of(
        write(tmp_path / "sft.jsonl", [{"messages": USER}]), CHAT, needs_answers=True
    )


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
        {"prompt": "a", "tools": '[{"name": "g"}]'},
    ]
    rows += [{"prompt": "a", "chat_template_kwargs": {"enable_thinking": True, "style": None}}]
    options = {"chat_template_kwargs": '{"enable_thinking": false, "style": "S"}'}
    expected = ["a(no)S", "<f>a(no)S", "<g>a(no)S", "aS"]
    prompts = load_rows(tmp_path, rows, tokenizer, **options)
    assert [text_of(prompt) for prompt in prompts] == expected
    pairs = [row | {"chosen": "b", "rejected": "c"} for row in rows]
    path = write(tmp_path / "pairs.jsonl", pairs)
    loaded, _, _ = load_pairs(make_args(path, eval_dataset=str(path), **options), tokenizer)
    assert ["".join(tokenizer.convert_ids_to_tokens(pair.prompt)) for pair in loaded] == expected


@pytest.mark.parametrize(("kwargs", "says"), [("{a", "Expecting property name"), ("[1]", "not a mapping")])
def test_wrong_kwargs_are_refused(tmp_path, kwargs, says):
    path = write(tmp_path / "a.jsonl", numbered(3))
    message = error_of(path, CHAT, chat_template_kwargs=kwargs)
    assert "--chat_template_kwargs: " in message and says in message
    assert "no chat template" in error_of(path, PLAIN, chat_template_kwargs='{"a": 1}')


def test_several_files_and_gz(tmp_path, datasets):
    """Data comes in shards, and compressed."""
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.json.gz", "d.csv.gz")]
    rows = numbered(8)
    write(paths[0], rows[:2])
    for path, text in (
        (paths[1], "".join(json.dumps(row) + "\n" for row in rows[2:4])),
        (paths[2], json.dumps(rows[4:6])),
        (paths[3], "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows[6:])),
    ):
        path.write_bytes(gzip.compress(text.encode()))
    other = write(tmp_path / "other", numbered(1)).rename(tmp_path / "other.jsonl")
    args = make_args("", eval_dataset=str(other))
    args.dataset = list(map(str, paths))
    train, _, note = load_prompts(args, PLAIN, True)
    assert [p.prompt for p in train] == [row["prompt"] for row in rows] and "a.jsonl and 3 more" in note
    write(tmp_path / "train.jsonl", rows)
    (tmp_path / "test.json.gz").write_bytes(paths[2].read_bytes())
    assert len(load(tmp_path / "train.jsonl")[1]) == 2  # what is beside it may be compressed
    assert "no such file" in error_of(str(tmp_path / "*.parquet"))
    args.dataset = [str(paths[0]), "openai/gsm8k"]
    with pytest.raises(InputError, match="openai/gsm8k: no such file"):
        load_prompts(args, PLAIN, True)
    paths[1].write_bytes(b"no gzip")
    assert "b.jsonl.gz, line 1: cannot be read" in error_of(paths[1])
    paths[2].write_bytes(paths[2].read_bytes()[:-9])  # an upload that broke off
    assert "c.json.gz, row 1: cannot be read" in error_of(paths[2])


def test_a_begun_answer_is_continued(tmp_path):
    """A second assistant turn after the begun one would make the model start anew."""
    begun = [*USER, say("Let us")]
    loaded = load_rows(tmp_path, [{"prompt": begun}], CHAT, prompt_template="<{prompt}>")[0]
    assert text_of(loaded) == "[user]<2+2?>[end][assistant]Let us"


def test_prompt_template_and_system_prompt(tmp_path):
    """Braces of mathematics are not fields; reward functions see the row's own text."""
    options = dict(prompt_template=r"Put it in \boxed{}: {prompt} {x}", system_prompt="Be {brief}.")
    loaded = load_rows(tmp_path, [{"prompt": r"\frac{1}{2}+{prompt}?"}], **options)[0]
    assert text_of(loaded) == "Be {brief}.\n\n" + r"Put it in \boxed{}: \frac{1}{2}+{prompt}? {x}"
    assert loaded.prompt == r"\frac{1}{2}+{prompt}?"
    loaded = load_rows(tmp_path, [{"prompt": "a"}], CHAT, prompt_template="<{prompt}>", system_prompt="S")[0]
    assert text_of(loaded) == "[system]S[end][user]<a>[end][assistant]"


def test_messages_that_become_plain_text_are_counted(tmp_path):
    said = "1 of messages, which become plain text: the tokenizer has no chat template"
    path = write(tmp_path / "train.jsonl", [{"prompt": USER, "answer": "4"}, {"prompt": "2+2?", "answer": "4"}])
    assert said in load(path, PLAIN, eval_dataset=str(path))[2]
    assert "plain text" not in load(path, CHAT, eval_dataset=str(path))[2]
    pair = {"prompt": USER, "chosen": [say("4")], "rejected": [say("5")]}
    path = write(tmp_path / "pairs.jsonl", [pair])
    assert said in load_pairs(make_args(path, eval_dataset=str(path)), PLAIN)[2]
    assert "plain text" not in load_pairs(make_args(path, eval_dataset=str(path)), CHAT)[2]


def test_options_on_a_conversation(tmp_path):
    """The last user message is wrapped, the data's own system message replaced: most templates take only one."""
    turns = [("system", "old"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    loaded = load_rows(tmp_path, [{"prompt": messages}], CHAT, prompt_template="<{prompt}>", system_prompt="new")[0]
    assert text_of(loaded) == "[system]new[end][user]a[end][assistant]b[end][user]<c>[end][assistant]"
    assert loaded.prompt == messages


def unigram_tokenizer():
    """A tokenizer that has its end token among its ordinary pieces, where `split_special_tokens` does not reach."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -2.0) for character in "</s>ab")]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def test_a_spelled_special_token_is_text():
    tokenizer, text = gemma_tokenizer(), "1<eos>2<end_of_turn><<pad>3"
    (ids, plain) = encode_completions([text, "12"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == list(text) and tokenizer.convert_ids_to_tokens(plain) == ["1", "2"]
    tokenizer = unigram_tokenizer()
    assert tokenizer.eos_token_id in tokenizer("a</s>b", split_special_tokens=True).input_ids
    (ids,) = encode_completions(["a</s>b"], tokenizer)
    assert "".join(tokenizer.convert_ids_to_tokens(ids)) == "a</s>b" and tokenizer.eos_token_id not in ids


def test_a_template_that_refuses_an_answer_is_one_line():
    tokenizer = gemma_tokenizer("{{ raise_exception('user turns only') if messages[1:] }}{{ messages[0].content }}")
    with pytest.raises(InputError, match="the chat template refuses a question with its answer: user turns only"):
        end_token(tokenizer)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "number", "says"),
    [
        ([b'{"prompt": "a", "answer": "1"}', b"", b'{"prompt": "b", '], 3, "enclosed in double quotes: column 17"),
        ([b'{"prompt": "a", "answer": "1"}', b'{"prompt": "\xff", "answer": "1"}'], 2, "the prompt is not valid UTF-8"),
        ([b'{"prompt": "a", "answer": "f\xfcnf"}'], 1, "the answer is not valid UTF-8"),
        ([b'{"prompt": "a", "answer": "1"}', b"[" * 100_000], 2, "cannot be read: maximum recursion"),
        ([b'{"prompt": "a", "answer": "1"}', b'["b"]'], 2, "cannot be read: not an object"),
        ([b'{"prompt": "a", "answer": "1"}', b'{"answer": "1"}'], 2, "the prompt is empty"),
        ([b'{"prompt": "a", "answer": "1"}', b'{"prompt": " \\n", "answer": "1"}'], 2, "the prompt is empty"),
        ([b'{"prompt": [], "answer": "1"}'], 1, "the prompt is empty"),
        ([b'{"prompt": "\\ud800", "answer": "1"}'], 1, "the prompt is not valid UTF-8"),
        ([b'{"prompt": 3, "answer": "1"}'], 1, "neither valid text nor a list of messages"),
        ([b'{"prompt": [{"from": "human", "value": "a"}], "answer": "1"}'], 1, "messages of role and content"),
        ([b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 1}'], 1, "neither valid text nor"),
        ([b'{"prompt": "a", "answer": "1"}', b"", b'{"prompt": "b", "answer": ""}'], 3, "no answer"),
        ([b'{"prompt": "a", "answer": "1"}', b'{"prompt": "b"}'], 2, "no answer"),
        ([b'{"prompt": "a", "answer": ["1", "2"]}'], 1, "no answer (text or number) in answer"),
        ([b'{"prompt": "a", "reward_model": {"style": "rule"}}'], 1, "no answer (text or number) in reward_model"),
        ([b'{"chosen": "a b", "rejected": ["c"], "answer": "1"}'], 1, "rejected is neither valid text nor"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(tmp_path, no_datasets, lines, number, says):
    """Blank lines count: the number is the one an editor shows."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    message = error_of(path, needs_answers=True)
    assert message.startswith(f"{path}, line {number}: ")
    assert says in message


def test_a_missing_answer_matters_only_where_a_reward_needs_it(tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    assert [p.answer for p in load_rows(tmp_path, rows)] == ["1", None]


def test_bad_rows_elsewhere(tmp_path, datasets):
    table = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": ""}]).to_parquet(table)
    assert error_of(table) == f"{table}, row 2: the prompt is empty"
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    assert f"{tmp_path / 'broken.parquet'}, row 1: cannot be read: " in error_of(tmp_path / "broken.parquet")
    (tmp_path / "array.json").write_text('[{"prompt": "a"}, 3]', encoding="utf-8")
    assert f"{tmp_path / 'array.json'}, row 2: cannot be read: not an object" in error_of(tmp_path / "array.json")


def test_missing_columns_are_named_with_those_there(tmp_path, no_datasets):
    path = write(tmp_path / "rows.jsonl", [{"text": "a", "label": 1}])
    for options, wanted in (
        (dict(), "no prompt column of ['prompt', 'question', 'problem', 'messages']"),
        (dict(prompt_column="text", needs_answers=True), "no answer column of ['answer', "),
    ):
        message = error_of(path, **options)
        assert wanted in message and "in ['text', 'label']: name it with --" in message
    for options, wanted in (
        (dict(prompt_column="txt"), "--prompt_column txt: the columns are ['text', 'label']"),
        (dict(prompt_column="text", answer_column="gold"), "--answer_column gold: the columns are ['text', 'label']"),
    ):
        assert error_of(path, **options) == f"{path}: {wanted}"
    turns = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
    path = write(tmp_path / "rows.jsonl", [{"conversations": turns}])
    assert "in ['conversations'] (convert ShareGPT's" in error_of(path)


def test_bad_files_and_options_answer_before_datasets_is_imported(tmp_path, no_datasets):
    good = write(tmp_path / "rows.jsonl", numbered(4))
    assert error_of(tmp_path / "absent.jsonl") == f"{tmp_path / 'absent.jsonl'}: no such file or folder"
    assert error_of(good, eval_dataset="absent.csv") == "absent.csv: no such file or folder"
    assert error_of(tmp_path / "absent") == f"{tmp_path / 'absent'}: no such file or folder"
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04K\x01.")
    assert "data.pkl, row 1: cannot be read: unknown file type, known are .jsonl" in error_of(tmp_path / "data.pkl")
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    assert error_of(tmp_path / "empty.jsonl") == f"{tmp_path / 'empty.jsonl'}: has no rows"
    (tmp_path / "empty.csv").write_bytes(b"prompt,answer\n")
    assert error_of(tmp_path / "empty.csv") == f"{tmp_path / 'empty.csv'}: has no rows"
    (tmp_path / "other.csv").write_bytes(b"prompt;answer\n1,5 + 2?;3,5\n")
    assert "its columns are separated by ';': separate them by commas" in error_of(tmp_path / "other.csv")
    (tmp_path / "latin.csv").write_bytes("prompt,answer\nWie viel ist f\u00fcnf?,5\n".encode("latin-1"))
    assert error_of(tmp_path / "latin.csv").endswith("row 1: the prompt is not valid UTF-8: save the file as UTF-8")
    assert "does not contain {prompt}" in error_of(good, prompt_template="Question: {question}")
    assert f"--dataset_split dev: {good} has the splits train" in error_of(good, dataset_split="dev")
    assert f"--eval_split dev: {good} has the splits train" in error_of(good, eval_split="dev")
    assert error_of(good, max_prompt_tokens=9) == f"{good}: none of its 4 prompts fits --max_prompt_tokens 9"
    one = write(tmp_path / "one.jsonl", numbered(1))
    assert "--eval_dataset" in error_of(one)


def test_an_unknown_hub_dataset_is_one_line(datasets, monkeypatch):
    def fail(name, config=None):
        raise ValueError("Config name is missing.\nPick one of:\n['main', 'socratic']")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    message = error_of("some/math")
    assert message == "some/math: cannot be read: Config name is missing. Pick one of: ['main', 'socratic']"


def test_several_splits_of_the_eval_dataset_are_a_choice(tmp_path, datasets):
    splits = {name: datasets.Dataset.from_list(numbered(2)) for name in ("easy", "hard")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "eval")
    good = write(tmp_path / "rows.jsonl", numbered(4))
    assert "--eval_split None: " + str(tmp_path / "eval") + " has the splits easy, hard" in error_of(
        good, eval_dataset=str(tmp_path / "eval")
    )
    assert len(load(good, eval_dataset=str(tmp_path / "eval"), eval_split="hard")[1]) == 2


def test_what_a_tokenizer_cannot_render_names_the_row(tmp_path):
    dialogue = [*USER, say("4"), {"role": "user", "content": "Sure?"}]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": dialogue}])
    message = error_of(path)
    assert message.startswith(f"{path}, line 2: ") and "no chat template" in message
    message = error_of(path, make_tokenizer(STRICT_TEMPLATE), system_prompt="S")
    assert message == f"{path}, line 1: the chat template or --chat_template_kwargs: no system role"
    mute = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # drops what it does not know
    assert (
        error_of(write(path, [{"prompt": "a"}]), mute) == f"{path}, line 1: the tokenizer makes no token of the prompt"
    )


# --- sampler ----------------------------------------------------------------------------------------------------------


def test_each_epoch_is_another_permutation():
    """every prompt once an epoch, also where a draw reaches over its end or over several."""
    sampler = PromptSampler(range(10), seed=3)
    drawn = sampler.draw(4) + sampler.draw(4) + sampler.draw(25) + sampler.draw(7)
    epochs = [drawn[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert PromptSampler(range(10), seed=4).draw(40) != drawn


def test_the_order_does_not_depend_on_the_sizes_drawn_nor_on_global_randomness():
    """data order is f(seed) alone, whatever the rounds of sampling and the random numbers used elsewhere."""
    whole = PromptSampler(range(7), seed=0).draw(60)
    torch.manual_seed(5)
    np.random.seed(5)
    sampler = PromptSampler(range(7), seed=0)
    assert [i for k in (1, 2, 3, 0, 14, 8, 32) for i in sampler.draw(k)] == whole
    state = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
    sampler.draw(9)
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.random.get_state()[1].tolist() == state[1]


@pytest.mark.parametrize("before", [0, 3, 7, 14, 20])
def test_resume_continues_where_it_stopped(before):
    """trainers that resume at the first prompt, or in the wrong permutation."""
    whole = PromptSampler(range(7), seed=1).draw(40)
    first = PromptSampler(range(7), seed=1)
    first.draw(before)
    second = PromptSampler(range(7), seed=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.draw(40 - before) == whole[before:]


def test_other_data_is_refused_on_resume():
    with pytest.raises(InputError, match="other data than this run's 8 rows"):
        DataDigest(range(8)).load_state_dict(DataDigest(range(7)).state_dict())


@pytest.mark.parametrize(
    "end, thinks", [("<think>", True), ("<think>\n", True), ("<think></think>", False), ("", False)]
)
def test_a_prompt_that_ends_in_a_thought_is_known(end, thinks, tmp_path):
    tokenizer = make_tokenizer("{{ messages[0].content }}")
    tokenizer.add_tokens(["<think>", "</think>"])
    (prompt,) = load_rows(tmp_path, [{"prompt": f"a{end}"}], tokenizer)
    assert prompt.thinks == thinks


def test_the_digest_sees_every_part_of_a_row():
    prompt = Prompt([1, 2], "1+1", "2", {"level": 3})
    others = [
        Prompt([1, 3], "1+1", "2", {"level": 3}),
        Prompt([1, 2], "1+2", "2", {"level": 3}),
        Prompt([1, 2], "1+1", "3", {"level": 3}),
        Prompt([1, 2], "1+1", "2", {"level": 4}),  # the user's reward functions see it
        Pair([1], [2], [3]),
        Pair([1], [2], [4]),
    ]
    digests = {DataDigest([row]).digest for row in [prompt, *others]}
    assert len(digests) == 7
    assert DataDigest([prompt, others[0]]).digest != DataDigest([others[0], prompt]).digest
    image = Prompt([1], "1", "1", {"image": object()})  # no address of an object: it is another one in each process
    assert DataDigest([image]).digest == DataDigest([Prompt([1], "1", "1", {"image": object()})]).digest
