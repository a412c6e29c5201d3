"""Odd user data: special tokens, tokenizers that add blanks, chat templates, numbers and dates."""

import decimal
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.load import dialogue_text, end_token, read_text
from common.pairs import encode_completions
from common.rewards import accuracy_reward, decode_completions
from common.run import Exit
from rows import USER, load, load_pairs, load_rows, make_args, make_tokenizer, pairs_from, say, text_of

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = (
    "<|im_start|> <|im_end|> <think> </think> [THINK] [/THINK] <answer> </answer> <tool_call> </tool_call> "
    "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>"
).split()


def special_tokenizer(template=None):
    """A character-level tokenizer with special tokens of its own."""
    text = template and (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


# --- special tokens ---


def sampled(tokenizer, *texts):
    """Return completions of a rollout with these texts, each followed by its stop token and more."""
    rows = [tokenizer(text + tokenizer.eos_token + "9").input_ids for text in texts]
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) - 1 for row in rows])
    batch = {
        "completions": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "completion_mask": torch.arange(width) < lengths[:, None],
        "truncated": torch.zeros(len(rows)).bool(),
    }
    return decode_completions(tokenizer, batch)


def test_special_tokens_stay_in_the_text():
    tokenizer = special_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "#"]})
    texts = ["#### 3", *(f"a{token}b" for token in SPECIAL), "<think>hm</think><answer>3</answer>"]
    assert [completion.text for completion in sampled(tokenizer, *texts)] == texts


def test_thoughts_between_special_tokens():
    completions = sampled(special_tokenizer(), r"<think>\boxed{3}", r"<think>\boxed{4}</think>\boxed{3}")
    assert [accuracy_reward(completion.text, "3") for completion in completions] == [0.0, 1.0]


# --- tokenizers that put a blank before every text ---

BLANK = "\u2581"


def prepending(kind):
    """A character-level tokenizer that puts a blank before every text, as those of Llama 2 and Mistral v0.1 do."""
    tokens = ["<unk>", "</s>", BLANK, "\n", *"123456789+=", "\n\n", f"\n{BLANK}"]
    merges = [("\n", BLANK)] if kind == "none" else [("\n", "\n")]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    if kind == "none":  # but a line break and a blank are one token
        core.normalizer = normalizers.Replace(" ", BLANK)
    elif kind == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["normalizer", "always", "first", "none"])
def test_no_blank_is_inserted(kind, tmp_path):
    tokenizer = prepending(kind)
    texts = [("2", "3"), (" 2", "\n2"), ("\n\n2", "\n\n\n2")]
    pairs = pairs_from(tmp_path, tokenizer, *(("1+1=", *pair) for pair in texts))
    for pair, (chosen, rejected) in zip(pairs, texts, strict=True):
        prompt = "1+1=" if kind == "none" else f"{BLANK}1+1="
        expected = [prompt, f"{chosen}</s>".replace(" ", BLANK), f"{rejected}</s>"]
        assert [text_of(ids, tokenizer) for ids in pair[:3]] == expected


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
def test_answers_follow_the_template(template, words, prompt, answer, completion, tmp_path):
    tokenizer = special_tokenizer(template)
    chosen = {"call": CALL, "thought": THOUGHT}.get(answer, say(answer))
    row = {"prompt": "1+1?", "chosen": [chosen], "rejected": [say("3")]}
    (pair,) = load_rows(tmp_path, [row], tokenizer, load_pairs, chat_template_kwargs=words)
    assert [text_of(ids, tokenizer) for ids in pair[:2]] == [prompt, completion]
    (alone,) = load_rows(tmp_path, [{"prompt": "1+1?"}], tokenizer, chat_template_kwargs=words)
    assert alone.ids == pair.prompt and alone.starts_in_thought == prompt.endswith("<think>\n")


def test_other_end_tokens_are_kept():
    tokenizer = special_tokenizer("channels")
    open_end, call = encode_completions(["<|channel|>2", "<|channel|>2<|call|>"], tokenizer)
    assert open_end == [*call[:-1], end_token(tokenizer)] != call


def test_templates_that_rewrite_the_prompt(tmp_path):
    rows = [{"prompt": text, "chosen": "2", "rejected": "3"} for text in ("1+1?", "x" * 500)]
    with pytest.raises(Exit) as caught:
        load_rows(tmp_path, rows, special_tokenizer("closed"), load_pairs, chat_template_kwargs='{"thinking": true}')
    line = str(caught.value)
    assert line.startswith("row 1: ") and "'<User>1+1?<Assistant><think>'" in line
    assert "<Assistant></think>2<|im_end|>'" in line and "\n" not in line and len(line) < 300


def test_calls_and_thoughts_reach_the_template(tmp_path):
    messages = [*USER, CALL, {"role": "tool", "content": "4"}]
    row = {"messages": [*messages, say("#### 4")], "tools": [{"name": "f"}]}
    tokenizer = special_tokenizer("plain")
    (prompt,) = load_rows(tmp_path, [row], tokenizer, reward=["accuracy"])
    text = text_of(prompt.ids, tokenizer)
    assert '[{"name": "f"}]' in text and '<tool_call>{"name": "f"}</tool_call>' in text and prompt.gold == "4"
    (prompt,) = load_rows(tmp_path, [{"prompt": [*USER, THOUGHT]}], special_tokenizer("channels"))
    assert "<|channel|>analysis<|message|>hm" in text_of(prompt.ids, tokenizer)
    with pytest.raises(Exit, match="^row 1: .*chat template"):
        load_rows(tmp_path, [row], make_tokenizer())


@pytest.mark.parametrize(
    "template, key, values",
    [
        ("thinking", "reasoning_content", "ab"),
        ("channels", "thinking", "ab"),
        ("plain", "tool_calls", ([{"function": 1}], [{"function": 2}])),
    ],
)
def test_pairs_may_differ_only_in_thought(template, key, values, tmp_path):
    row = ("1+1?", *([{"role": "assistant", key: value}] for value in values))
    (pair,) = pairs_from(tmp_path, special_tokenizer(template), row)
    assert pair.chosen != pair.rejected


def test_a_begun_answer_is_continued(tmp_path):
    tokenizer = special_tokenizer("plain")
    begun = [{"role": "user", "content": "1+1?"}, say("It is")]
    (pair,) = pairs_from(tmp_path, tokenizer, (begun, " 2", " 3"))
    assert [text_of(ids, tokenizer) for ids in pair[:2]] == [f"{ASKED}It is", " 2<|im_end|>"]


def test_no_content_is_an_empty_text():
    tokenizer = special_tokenizer("plain")
    for silent in ({"role": "tool", "content": None}, {"role": "tool"}):
        text = dialogue_text(read_text([*USER, silent], "the prompt"), {}, make_args(""), tokenizer)
        assert "<|im_start|>tool\n<|im_end|>" in text and "None" not in text


@pytest.mark.parametrize("key, value", [("content", 3), ("content", [{"type": "image"}]), ("role", None)])
def test_content_without_text_is_refused(key, value, tmp_path):
    rows = [{"prompt": USER}, {"prompt": [*USER, {"role": "assistant", key: value}]}]
    with pytest.raises(Exit, match=rf"^row 2: column prompt: .*{key}"):
        load_rows(tmp_path, rows, special_tokenizer("plain"))


# --- tools and golds ---


def test_tools_are_a_list(tmp_path):
    tokenizer = special_tokenizer("plain")
    rows = [{"prompt": "a"}, {"prompt": "a", "tools": []}, {"prompt": "a", "tools": None}]
    first, *others = load_rows(tmp_path, rows, tokenizer)
    assert all(prompt.ids == first.ids for prompt in others)
    for column, value in (("Tools", "hammer"), ("chat_template_kwargs", "[1]")):
        with pytest.raises(Exit, match=f"^row 1: .*{column}"):
            load_rows(tmp_path, [{"prompt": "a", column.lower(): value}], tokenizer)


def test_golds_may_be_decimals_and_lists(tmp_path, datasets):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": [decimal.Decimal("2.50")]}).to_parquet(path)
    ((prompt,), _) = load(path, eval_dataset=str(path))
    assert accuracy_reward("#### 2.5", prompt.gold) == 1
    (prompt,) = load_rows(tmp_path, [{"prompt": "a", "answer": ["2", "two"]}])
    assert [accuracy_reward(f"#### {x}", prompt.gold) for x in ("2", "two", "3")] == [1, 1, 0]


# --- a system column ---

PARTS = [{"role": "system", "content": "Add."}, *USER]


@pytest.mark.parametrize(
    "row, text",
    [
        ({"prompt": "2+2?", "system": "Add."}, "Add.\n\n2+2?"),
        ({"prompt": PARTS, "system": "Multiply."}, "Multiply.\n\n2+2?"),
        ({"prompt": PARTS, "system": ""}, "Add.\n\n2+2?"),
        ({"prompt": "2+2?", "system": None}, "2+2?"),
    ],
)
def test_system_column_is_system_turn(row, text, tmp_path):
    """As in orca_dpo_pairs. --system_prompt replaces it."""
    row |= {"chosen": "4", "rejected": "5"}
    (prompt,) = load_rows(tmp_path, [row])
    (pair,) = load_rows(tmp_path, [row], read=load_pairs)
    assert text_of(prompt.ids) == text_of(pair.prompt) == text
    (prompt,) = load_rows(tmp_path, [row], system_prompt="New.")
    assert text_of(prompt.ids) == "New.\n\n2+2?"


def test_system_columns_tell_prompts_apart(tmp_path):
    rows = [{"prompt": "2+2?", "system": system} for system in ("Add.", "Multiply.", "Add.")]
    assert len(load_rows(tmp_path, rows)) == 2
    with pytest.raises(Exit, match="^row 1: column system: expected text"):
        load_rows(tmp_path, [{"prompt": "2+2?", "system": 3}])


# --- dates and digits as they were written ---


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_dates_and_digits_stay(name, tmp_path):
    """`datasets` turns dates into timestamps, and 2^53 + 1 beside a decimal into 2^53."""
    rows = [{"prompt": "day?", "answer": "2024-01-01"}, {"prompt": "a", "answer": 9007199254740993}]
    rows.append({"prompt": "b", "answer": 0.1})
    text = json.dumps(rows) if name == "rows.json" else "\n".join(map(json.dumps, rows))
    (tmp_path / name).write_text(text, encoding="utf-8")
    prompts, _ = load(tmp_path / name, reward=["accuracy"], eval_dataset=str(tmp_path / name))
    assert [prompt.gold for prompt in prompts] == ["2024-01-01", "9007199254740993", "0.1"]
