"""What people feed the scripts: special tokens, blanks of tokenizers, chat templates, JSON as text, real data."""

import csv
import decimal
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.batches import completion_texts, decode_tokens
from harness.chat import dialogue_text, read_text
from harness.data import Prompt, load_prompts
from harness.errors import InputError
from harness.pairs import load_pairs
from common.rewards import accuracy_reward, apply_rule
from rows import USER, make_args, make_tokenizer, pairs_from, say, write

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = (
    "<|im_start|> <|im_end|> <think> </think> [THINK] [/THINK] <answer> </answer> <tool_call> </tool_call> "
    "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>"
).split()


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
    """The texts as `completion_texts` reads them from a rollout: each with its stop token, and something behind it."""
    rows = [tokenizer(text + tokenizer.eos_token + "9").input_ids for text in texts]
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) - 1 for row in rows])
    batch = {
        "completions": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "completion_mask": torch.arange(width) < lengths[:, None],
        "truncated": torch.zeros(len(rows)).bool(),
    }
    return completion_texts(tokenizer, batch)


def test_a_models_own_special_tokens_stay_in_the_text_and_nothing_behind_the_stop_token_does():
    tokenizer = special_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "#"]})
    texts = ["#### 3", *(f"a{token}b" for token in SPECIAL), "<think>hm</think><answer>3</answer>"]
    assert sampled(tokenizer, *texts) == texts


def test_a_thought_between_special_tokens_is_none_of_the_answer():
    texts = sampled(special_tokenizer(), r"<think>\boxed{3}", r"<think>\boxed{4}</think>\boxed{3}")
    assert apply_rule(accuracy_reward, [Prompt([1], "q", "3")] * 2, texts) == [0.0, 1.0]


def test_a_token_beyond_the_vocabulary_stands_in_the_text():
    """Heads are padded: the row of such a token has no text, and `1?6` is not 16."""
    tokenizer = make_tokenizer()
    ids = tokenizer("#### 16").input_ids
    text = decode_tokens(tokenizer, [*ids[:-1], 100_000, ids[-1]])
    assert text == "#### 1\ufffd6"
    assert accuracy_reward(text, "16") == 0


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
    ("content", 3), ("content", {"text": "a"}), ("content", ["a"]), ("content", [{"type": "image"}]),
    ("reasoning_content", ["a"]), ("thinking", 1), ("role", None),
])  # fmt: skip
def test_what_is_no_text_is_refused_by_row_message_and_key(key, value, tmp_path):
    rows = [{"prompt": USER}, {"prompt": [*USER, {"role": "assistant", key: value}]}]
    with pytest.raises(InputError, match=rf"^row 2: message 2 of the prompt: .*'{key}'$"):
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
        for column, value in (("tools", "hammer"), ("tools", '{"name": "f"}'), ("chat_template_kwargs", "[1]")):
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


def test_countdowns_raw_columns_get_a_line_that_helps(tmp_path):
    with pytest.raises(InputError, match="row 1: .*build the prompt .*examples/countdown.py"):
        load_rows(tmp_path, [{"nums": [44, 19, 35], "target": 98}], make_tokenizer())
