"""What people feed the scripts: special tokens, blanks of tokenizers, chat templates, JSON as text, real data."""

import csv
import decimal
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import grpo
from common.batches import decode_completions
from common.rewards import accuracy_reward
from harness.chat import dialogue_text, read_text
from harness.data import load_data, load_prompts
from harness.errors import InputError
from harness.pairs import read_pairs
from rows import USER, make_args, make_tokenizer, pairs_from, say, write

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = (
    "<|im_start|> <|im_end|> <think> </think> [THINK] [/THINK] <answer> </answer> <tool_call> </tool_call> "
    "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>"
).split()
load_pairs = partial(load_data, read_pairs)


def special_tokenizer(template=None):
    """One token a character, and special tokens of the model's own."""
    text = template and (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def load_rows(folder, rows, tokenizer, load=load_prompts, **options):
    """What is made of the rows of a file."""
    path = write(folder / "rows.jsonl", rows)
    return load(make_args(path, eval_dataset=str(path), **options), tokenizer)[0]


def tokens_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


# --- special tokens ---


def sampled(tokenizer, *texts):
    """The completions of a rollout with these texts: each has its stop token, and something behind it."""
    rows = [tokenizer(text + tokenizer.eos_token + "9").input_ids for text in texts]
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) - 1 for row in rows])
    batch = {
        "completions": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "completion_mask": torch.arange(width) < lengths[:, None],
        "truncated": torch.zeros(len(rows)).bool(),
    }
    return decode_completions(tokenizer, batch)


def test_a_models_own_special_tokens_stay_in_the_text_and_nothing_behind_the_stop_token_does():
    tokenizer = special_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "#"]})
    texts = ["#### 3", *(f"a{token}b" for token in SPECIAL), "<think>hm</think><answer>3</answer>"]
    assert [completion.text for completion in sampled(tokenizer, *texts)] == texts


def test_a_thought_between_special_tokens_is_none_of_the_answer():
    completions = sampled(special_tokenizer(), r"<think>\boxed{3}", r"<think>\boxed{4}</think>\boxed{3}")
    assert [accuracy_reward(completion.text, "3") for completion in completions] == [0.0, 1.0]


# --- tokenizers that put a blank before every text ---

BLANK = "\u2581"


def prepending(kind):
    """One token a character or two line breaks; as Llama 2's and Mistral v0.1's it puts a blank before every text."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", BLANK, "\n", *"123456789+=", "\n\n"])}
    core = Tokenizer(models.BPE(vocabulary, [("\n", "\n")], unk_token="<unk>"))
    if kind == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["normalizer", "always", "first"])
def test_a_completion_has_no_blank_that_nobody_wrote(kind, tmp_path):
    tokenizer = prepending(kind)
    texts = [("2", "3"), (" 2", "\n2"), ("\n\n2", "\n\n\n2")]
    pairs = pairs_from(tmp_path, tokenizer, *(("1+1=", *pair) for pair in texts))
    for pair, (chosen, rejected) in zip(pairs, texts, strict=True):
        expected = [f"{BLANK}1+1=", f"{chosen}</s>".replace(" ", BLANK), f"{rejected}</s>"]
        assert [tokens_of(tokenizer, ids) for ids in pair[:3]] == expected


# --- chat templates ---

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
THOUGHT = {"role": "assistant", "content": "2", "reasoning_content": "hm", "thinking": "hm"}
ASKED = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
IN_CHANNELS = "<|start|>user<|message|>1+1?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
COMPLETIONS = {  # {template and words for it: (the prompt, {answer: its completion})}
    ("plain", None): (ASKED, {
        "2": "2<|im_end|>",
        "call": '<tool_call>{"name": "f"}</tool_call><|im_end|>',
    }),
    ("thinking", None): (ASKED + "<think>\n", {
        "2": "\n</think>\n\n2<|im_end|>",
        "<think>hm</think>2": "hm\n</think>\n\n2<|im_end|>",
        "thought": "hm\n</think>\n\n2<|im_end|>",
    }),
    ("thinking", '{"enable_thinking": false}'): (ASKED + "<think>\n\n</think>\n\n", {"2": "2<|im_end|>"}),
    ("closed", None): ("<User>1+1?<Assistant></think>", {"2": "2<|im_end|>"}),
    ("channels", None): (IN_CHANNELS, {
        "2": f"{FINAL}2<|return|>",
        "thought": f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}2<|return|>",
        "call": '<|channel|>commentary<|message|>{"name": "f"}<|call|>',
    }),
}  # fmt: skip


@pytest.mark.parametrize(
    "template, words, prompt, answer, completion",
    [(*key, prompt, *item) for key, (prompt, answers) in COMPLETIONS.items() for item in answers.items()],
)
def test_the_answer_of_a_pair_stands_where_the_template_puts_it(template, words, prompt, answer, completion, tmp_path):
    tokenizer = special_tokenizer(template)
    chosen = {"call": CALL, "thought": THOUGHT}.get(answer, say(answer))
    row = {"prompt": "1+1?", "chosen": [chosen], "rejected": [say("3")]}
    (pair,) = load_rows(tmp_path, [row], tokenizer, load_pairs, chat_template_kwargs=words)
    assert [tokens_of(tokenizer, ids) for ids in pair[:2]] == [prompt, completion]
    (alone,) = load_rows(tmp_path, [{"prompt": "1+1?"}], tokenizer, chat_template_kwargs=words)
    assert alone.ids == pair.prompt and alone.starts_in_thought == prompt.endswith("<think>\n")


def test_a_prompt_with_a_date_is_the_same_in_a_pair(tmp_path):
    tokenizer = special_tokenizer("date")
    (pair,) = load_rows(tmp_path, [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}], tokenizer, load_pairs)
    text = tokens_of(tokenizer, pair.prompt)
    assert text.startswith("<|im_start|>system\nToday is ") and text.endswith(ASKED)
    assert tokens_of(tokenizer, pair.chosen) == "2<|im_end|>"


def test_a_template_that_takes_the_prompts_thought_back_is_refused_with_the_row(tmp_path):
    rows = [{"prompt": text, "chosen": "2", "rejected": "3"} for text in ("1+1?", "x" * 500)]
    with pytest.raises(InputError) as caught:
        load_rows(tmp_path, rows, special_tokenizer("closed"), load_pairs, chat_template_kwargs='{"thinking": true}')
    line = str(caught.value)
    assert line.startswith("row 1: ") and "'<User>1+1?<Assistant><think>'" in line
    assert "<Assistant></think>2<|im_end|>'" in line and "\n" not in line and len(line) < 300


def test_calls_and_thoughts_of_a_prompt_reach_the_template(tmp_path):
    messages = [*USER, CALL, {"role": "tool", "content": "4"}]
    row = {"messages": [*messages, say("#### 4")], "tools": [{"name": "f"}]}
    tokenizer = special_tokenizer("plain")
    (prompt,) = load_rows(tmp_path, [row], tokenizer, reward=["accuracy"])
    text = tokens_of(tokenizer, prompt.ids)
    assert '[{"name": "f"}]' in text and '<tool_call>{"name": "f"}</tool_call>' in text and prompt.gold == "4"
    (prompt,) = load_rows(tmp_path, [{"prompt": [*USER, THOUGHT]}], special_tokenizer("channels"))
    assert "<|channel|>analysis<|message|>hm" in tokens_of(tokenizer, prompt.ids)
    with pytest.raises(InputError, match="^row 1: .*chat template"):
        load_rows(tmp_path, [row], make_tokenizer())


@pytest.mark.parametrize("key, values", [
    ("reasoning_content", ("a", "b")), ("thinking", ("a", "b")), ("tool_calls", ([{"function": 1}], [{"function": 2}])),
])  # fmt: skip
def test_pairs_that_differ_in_thought_or_call_alone_are_pairs(key, values, tmp_path):
    template = "plain" if key == "tool_calls" else "thinking" if key == "reasoning_content" else "channels"
    chosen, rejected = ([{"role": "assistant", key: value}] for value in values)
    row = {"prompt": "1+1?", "chosen": chosen, "rejected": rejected}
    (pair,) = load_rows(tmp_path, [row], special_tokenizer(template), load_pairs)
    assert pair.chosen != pair.rejected


def test_a_begun_answer_is_continued_by_the_given_one(tmp_path):
    tokenizer = special_tokenizer("plain")
    begun = [{"role": "user", "content": "1+1?"}, say("It is")]
    (pair,) = load_rows(tmp_path, [{"prompt": begun, "chosen": " 2", "rejected": " 3"}], tokenizer, load_pairs)
    assert [tokens_of(tokenizer, ids) for ids in pair[:2]] == [f"{ASKED}It is", " 2<|im_end|>"]


def test_no_content_is_an_empty_text():
    tokenizer = special_tokenizer("plain")
    for silent in ({"role": "tool", "content": None}, {"role": "tool"}):
        text = dialogue_text(read_text([*USER, silent], "the prompt"), {}, make_args(""), tokenizer)
        assert "<|im_start|>tool\n<|im_end|>" in text and "None" not in text


@pytest.mark.parametrize("key, value", [
    ("content", 3), ("content", {"text": "a"}), ("content", ["a"]), ("content", [{"type": "image"}]), ("role", None),
])  # fmt: skip
def test_what_is_no_text_is_refused_by_row_and_key(key, value, tmp_path):
    rows = [{"prompt": USER}, {"prompt": [*USER, {"role": "assistant", key: value}]}]
    with pytest.raises(InputError, match=rf"^row 2: column prompt: .*{key}"):
        load_rows(tmp_path, rows, special_tokenizer("plain"))


# --- columns that hold JSON as text ---


def test_a_csv_file_has_messages_tools_and_golds_as_text(tmp_path, datasets):
    rows = [
        {"prompt": json.dumps(USER), "reward_model": '{"ground_truth": "4"}', "tools": '[{"name": "f"}]'},
        {"prompt": '{"a": 1}', "reward_model": '{"ground_truth": ["2", "3"]}', "tools": ""},
        {"prompt": '[{"a": 1}]', "reward_model": '{"ground_truth": "5"}', "tools": ""},
    ]  # fmt: skip
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    path = str(tmp_path / "rows.csv")
    args = make_args(path, eval_dataset=path, reward=["accuracy"])
    tokenizer = special_tokenizer("plain")
    prompts = load_prompts(args, tokenizer)[0]
    assert [prompt.prompt for prompt in prompts] == [USER, '{"a": 1}', '[{"a": 1}]']  # these are texts
    assert [prompt.gold for prompt in prompts] == ["4", ["2", "3"], "5"]
    assert ['"name": "f"' in tokens_of(tokenizer, prompt.ids) for prompt in prompts] == [True, False, False]


def test_tools_as_text_may_be_none_and_are_else_a_list(tmp_path):
    for tokenizer in (special_tokenizer("plain"), make_tokenizer()):
        rows = [{"prompt": "a"}, *({"prompt": "a", "tools": text} for text in ("[]", "null", ""))]
        first, *others = load_rows(tmp_path, rows, tokenizer)
        assert all(prompt.ids == first.ids for prompt in others)
        for column, value in (("tools", "hammer"), ("chat_template_kwargs", "[1]")):
            with pytest.raises(InputError, match=f"^row 1: .*{column}"):
                load_rows(tmp_path, [{"prompt": "a", column: value}], tokenizer)


@pytest.mark.parametrize("columns", [("messages",), ("chosen", "rejected")])
def test_dialogues_may_be_json_in_a_text(columns, tmp_path):
    row = {name: json.dumps([*USER, say(f"#### {number}")]) for number, name in enumerate(columns, 4)}
    tokenizer = special_tokenizer("plain")
    if "messages" in columns:
        (prompt,) = load_rows(tmp_path, [row], tokenizer, reward=["accuracy"])
        assert (prompt.prompt, prompt.gold) == (USER, "4")
    else:
        (pair,) = load_rows(tmp_path, [row], tokenizer, load_pairs)
        assert [tokens_of(tokenizer, ids) for ids in pair[1:3]] == ["#### 4<|im_end|>", "#### 5<|im_end|>"]


def test_golds_may_be_decimals_and_lists_of_which_any_is_right(tmp_path, datasets):
    rows = {"prompt": ["a", "b"], "answer": [decimal.Decimal("2.50"), decimal.Decimal("3.00")]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    golds = [prompt.gold for prompt in load_prompts(make_args(path, eval_dataset=path), make_tokenizer())[0]]
    assert [accuracy_reward(f"#### {x}", gold) for x, gold in zip(("2.5", "3"), golds, strict=True)] == [1, 1]
    (prompt,) = load_rows(tmp_path, [{"prompt": "a", "answer": ["2", "two"]}], make_tokenizer())
    assert [accuracy_reward(f"#### {x}", prompt.gold) for x in ("2", "two", "3")] == [1, 1, 0]


# --- the shapes of real data sets ---

PARTS = [{"role": "system", "content": "Add."}, *USER]
SHAPES = {  # {name: (rows, the prompts as the model reads them, the golds)}
    "GSM8K": (
        [{"question": "2+2?", "answer": "It is 2+2=<<2+2=4>>4.\n#### 4"}, {"question": "a?", "answer": "#### 1,000"}],
        ["2+2?", "a?"], ["4", "1,000"],
    ),
    "MATH": (
        [{"problem": "a?", "level": "Level 5", "type": "Algebra", "solution": r"So $x=\boxed{\frac{1}{2}}$."}],
        ["a?"], [r"\frac{1}{2}"],
    ),
    "OpenAI messages with calls": (
        [{"messages": [*PARTS, CALL, {"role": "tool", "content": "4"}, say("The answer is 4.")], "tools": [{"name": "f"}]}],
        ["2+2?", '"name": "f"'], ["4"],
    ),
    "Countdown": (
        [{"prompt": "Make 98 of 44, 19, 35.", "nums": [44, 19, 35], "target": 98}],
        ["Make 98 of 44, 19, 35."], [None],
    ),
    "DAPO-Math-17k": (
        [{"data_source": "math_dapo", "prompt": [{"role": "user", "content": "a?"}], "ability": "MATH",
          "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a"}}] * 3,
        ["a?"], ["34"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SHAPES, "UltraFeedback"])
def test_the_shapes_of_real_data_sets(name, tmp_path):
    tokenizer = special_tokenizer("plain")
    if name == "UltraFeedback":
        sides = {side: [*USER, say(answer)] for side, answer in (("chosen", "4"), ("rejected", "5"))}
        row = {"prompt": "2+2?", "prompt_id": "f0", **sides, "messages": sides["chosen"], "score_chosen": 8.5}
        (pair,) = load_rows(tmp_path, [row], tokenizer, load_pairs)
        expected = [ASKED.replace("1+1", "2+2"), "4<|im_end|>", "5<|im_end|>"]
        assert [tokens_of(tokenizer, ids) for ids in pair[:3]] == expected
        return
    rows, said, golds = SHAPES[name]
    prompts = load_rows(tmp_path, rows, tokenizer, reward=["format"] if None in golds else ["accuracy"])
    assert [prompt.gold for prompt in prompts] == golds
    texts = "".join(tokens_of(tokenizer, prompt.ids) for prompt in prompts)
    assert all(text in texts for text in said) and texts.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("rows, said", [
    ({"prompt": "2+2?", "system": "Add."}, "Add.\n\n2+2?"),
    ({"prompt": USER, "system": "Add."}, "Add.\n\n2+2?"),
    ({"prompt": PARTS, "system": "Multiply."}, "Multiply.\n\n2+2?"),
    ({"prompt": PARTS, "system": ""}, "Add.\n\n2+2?"),
    ({"prompt": "2+2?", "system": None}, "2+2?"),
])  # fmt: skip
def test_a_system_column_is_the_system_turn_of_prompts_and_pairs(rows, said, tmp_path):
    """As in orca_dpo_pairs. --system_prompt replaces it."""
    tokenizer = make_tokenizer()
    rows |= {"chosen": "4", "rejected": "5"}
    (prompt,) = load_rows(tmp_path, [rows], tokenizer)
    (pair,) = load_rows(tmp_path, [rows], tokenizer, load_pairs)
    assert tokens_of(tokenizer, prompt.ids) == tokens_of(tokenizer, pair.prompt) == said
    (prompt,) = load_rows(tmp_path, [rows], tokenizer, system_prompt="New.")
    assert tokens_of(tokenizer, prompt.ids) == "New.\n\n2+2?"


def test_a_system_column_tells_prompts_apart(tmp_path):
    rows = [{"prompt": "2+2?", "system": system} for system in ("Add.", "Multiply.", "Add.")]
    assert len(load_rows(tmp_path, rows, make_tokenizer())) == 2
    with pytest.raises(InputError, match="^row 1: column system: expected text"):
        load_rows(tmp_path, [{"prompt": "2+2?", "system": 3}], make_tokenizer())


# --- numbers and dates as they were written ---


def test_golds_of_parquet_are_the_numbers_that_were_written(tmp_path, datasets):
    """1.1 in float32 is 1.100000023841858 as a Python float; a sum in float64 stays what it is."""
    import pyarrow
    import pyarrow.parquet

    columns = {
        "answer": pyarrow.array([1.1, None], pyarrow.float32()),
        "half": pyarrow.array([1.1, 2.5], pyarrow.float16()),
        "computed": pyarrow.array([0.1 + 0.2, 1 / 3]),
        "several": pyarrow.array([[1.1, 0.3], [0.7]], pyarrow.list_(pyarrow.float32())),
        "reward_model": [{"ground_truth": 1.1}, {"ground_truth": 0.3}],
        "verl": [{"ground_truth": [1.1, 0.3]}, {"ground_truth": None}],
    }
    number = pyarrow.struct([("ground_truth", pyarrow.float32())])
    numbers = pyarrow.struct([("ground_truth", pyarrow.list_(pyarrow.float16()))])
    columns["reward_model"] = pyarrow.array(columns["reward_model"], number)
    columns["verl"] = pyarrow.array(columns["verl"], numbers)
    table = pyarrow.table({"prompt": ["a", "b"]} | columns)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    golds = {
        "answer": ["1.1", None], "half": ["1.1", "2.5"], "computed": ["0.30000000000000004", "0.3333333333333333"],
        "several": [["1.1", "0.3"], "0.7"], "reward_model": ["1.1", "0.3"], "verl": [["1.1", "0.3"], None],
    }  # fmt: skip
    for name in ("rows.parquet", "saved"):
        path = str(tmp_path / name)
        for column, expected in golds.items():
            args = make_args(path, eval_dataset=path, answer_column=column, eval_split="train")
            prompts = load_prompts(args, make_tokenizer())[0]
            assert [prompt.gold for prompt in prompts] == expected, (name, column)
        assert prompts[0].columns["answer"] == 1.1  # what a reward function gets


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl", "folder"])
def test_dates_stay_text(name, tmp_path):
    rows = [{"prompt": f"day {day}?", "answer": f"2024-01-0{day}"} for day in (1, 2)]
    if name == "folder":
        (tmp_path / "folder").mkdir()
        for split in ("train", "test"):
            (tmp_path / "folder" / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
        (tmp_path / "folder" / "config.json").write_text("{}", encoding="utf-8")
    elif name == "rows.json":
        (tmp_path / name).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    else:
        write(tmp_path / name, rows)
    train, evaluation = load_prompts(make_args(tmp_path / name, reward=["accuracy"]), make_tokenizer())
    assert {prompt.gold for prompt in train + evaluation} == {"2024-01-01", "2024-01-02"}
    assert {prompt.columns["answer"] for prompt in train + evaluation} == {"2024-01-01", "2024-01-02"}


@pytest.mark.parametrize("in_folder", [False, True])
def test_digits_of_a_csv_file_stay_beside_an_empty_cell(in_folder, tmp_path):
    """As floats, 2^53 + 1 becomes 2^53."""
    lines = "prompt,answer,level\na,9007199254740993,1\nNA,,2\nc,0.1,3\n"
    path = tmp_path / "train.csv"
    path.write_text(lines, encoding="utf-8")
    write(tmp_path / "other.jsonl", [{"prompt": "other"}])
    dataset = tmp_path if in_folder else path
    args = make_args(dataset, eval_dataset=str(tmp_path / "other.jsonl"))
    prompts = load_prompts(args, make_tokenizer())[0]
    assert [prompt.gold for prompt in prompts] == ["9007199254740993", None, "0.1"]
    assert [prompt.prompt for prompt in prompts] == ["a", "NA", "c"]
    assert [prompt.columns["level"] for prompt in prompts] == [1, 2, 3]


# --- names ---


@pytest.mark.parametrize("folder", ["\udce4\udcb8\udcad", "a\0b"])
def test_a_folder_that_no_file_can_be_written_to_ends_the_run_at_its_start(folder, tmp_path):
    """In a locale without UTF-8, Python reads a Chinese name so; safetensors would refuse it after the last step."""
    with pytest.raises(InputError, match="--output_dir"):
        grpo.main(["--output_dir", f"{tmp_path}/{folder}", "--max_steps", "1"])
