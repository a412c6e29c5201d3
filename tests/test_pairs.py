"""common/harness/pairs.py: every format of preference pairs, their end tokens, cutting, evaluation data, bad rows."""

import pytest

from common.errors import InputError
from common.harness.pairs import load_pairs
from rows import GEMMA, PLAIN, TEMPLATE, USER, gemma_tokenizer, make_args, make_tokenizer, pairs_from, say, write

HUMAN = "\n\nHuman: 2+2?\n\nAssistant:"
PAIR_FORMATS = {
    "plain": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "4", "5"),
    "messages": ({"prompt": USER, "chosen": [say("4")], "rejected": [say("5")]}, "2+2?", "4", "5"),
    "implicit": ({"chosen": f"{HUMAN} It is 4", "rejected": f"{HUMAN} It is 5"}, HUMAN, " It is 4", " It is 5"),
    "one continues the other": ({"chosen": f"{HUMAN} 4", "rejected": f"{HUMAN} 4 or 5"}, HUMAN, " 4", " 4 or 5"),
    "implicit, messages": ({"chosen": [*USER, say("4")], "rejected": [*USER, say("5")]}, "2+2?", "4", "5"),
    "text beside whole dialogues": (
        {"prompt": "2+2?", "chosen": [*USER, say("4")], "rejected": [*USER, say("5")], "score": 1}, "2+2?", "4", "5",
    ),
    "text before messages": ({"prompt": "2+2?", "chosen": [say("4")], "rejected": [say("5")]}, "2+2?", "4", "5"),
    "prompt beside whole dialogues": (
        {"prompt": USER, "chosen": [*USER, say("4")], "rejected": [*USER, say("5")]}, "2+2?", "4", "5",
    ),
    "question": ({"question": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "4", "5"),
}  # fmt: skip


def pairs_of(folder, rows, tokenizer=PLAIN, **options):
    """All pairs of these rows, and the summary."""
    path = write(folder / "train.jsonl", rows)
    other = write(folder / "other.jsonl", [{"prompt": "other", "chosen": "a", "rejected": "b"}])
    train, _, summary = load_pairs(make_args(path, **{"eval_dataset": str(other)} | options), tokenizer)
    return train, summary


def texts_of(pair, tokenizer=PLAIN):
    return tuple("".join(tokenizer.convert_ids_to_tokens(ids)) for ids in pair[:3])


def numbered_pairs(n, prompts=None):
    return [{"prompt": f"question {i % (prompts or n)}", "chosen": f"yes {i}", "rejected": "no"} for i in range(n)]


@pytest.mark.parametrize("name", PAIR_FORMATS)
def test_pairs_of_a_chat_tokenizer(tmp_path, no_datasets, name):
    # B24, unsloth-zoo#1110: prompt and completion are tokenized apart, one BOS, and EOS ends the completion once.
    chat = make_tokenizer(TEMPLATE, bos=True, eos=True)
    row, *texts = PAIR_FORMATS[name]
    (pair,), _ = pairs_of(tmp_path, [row], chat)
    chosen, rejected = (f"{text}</s>" for text in texts[1:])
    assert texts_of(pair, chat) == (f"<s>[user]{texts[0]}[end][assistant]", chosen, rejected) and pair[3:] == (0, 0)


def test_template_and_system_prompt_are_around_the_prompt_of_a_pair(tmp_path):
    options = dict(prompt_template="Q: {prompt}", system_prompt="Add.")
    (pair,), _ = pairs_of(tmp_path, [PAIR_FORMATS["plain"][0]], **options)
    assert texts_of(pair) == ("Add.\n\nQ: 2+2?", "4</s>", "5</s>")
    with pytest.raises(InputError, match="--prompt_template Q:: does not contain {prompt}"):
        pairs_of(tmp_path, [PAIR_FORMATS["plain"][0]], prompt_template="Q:")


@pytest.mark.parametrize("template, end", [(GEMMA, "<end_of_turn>"), (None, "<eos>")])
def test_given_pairs_end_with_what_the_template_puts_there(template, end, tmp_path):
    tokenizer = gemma_tokenizer(template)
    written = [("2+2?", "4", "5"), ("2+2?", "4<end_of_turn>", "5<eos>"), ("2+2?", "4<end_of_turn><eos>", "5")]
    for pair in pairs_from(tmp_path, tokenizer, *written[: 3 if template else 1]):
        assert [tokenizer.convert_ids_to_tokens(ids) for ids in pair[1:3]] == [["4", end], ["5", end]]


def test_a_spelled_end_token_of_a_pair_is_text(tmp_path):
    (pair,) = pairs_from(tmp_path, gemma_tokenizer(), ("2+2?", "4<end_of_turn>5", "5"))
    assert len(pair.chosen) == len("4<end_of_turn>5") + 1


@pytest.mark.parametrize(
    "max_length, expected",
    [
        (12, ("abcdef", "12345|", "12|")),
        (11, ("bcdef", "12345|", "12|")),
        (7, ("f", "12345|", "12|")),
        (6, ("f", "1234|", "12|")),
        (5, ("f", "123|", "12|")),
    ],
)
def test_what_is_too_long_loses_its_prompt_first_and_never_eos(max_length, expected, tmp_path):
    row = {"prompt": "abcdef", "chosen": "12345", "rejected": "12"}
    (pair,), _ = pairs_of(tmp_path, [row], max_length=max_length)
    assert tuple(text.replace("</s>", "|") for text in texts_of(pair)) == expected


def test_what_was_cut_and_dropped_is_said(tmp_path):
    rows = [
        {"prompt": "abcdef", "chosen": "12345", "rejected": "12"},
        {"prompt": "b", "chosen": "same", "rejected": "same"},
        {"prompt": "c", "chosen": "", "rejected": "some"},
        {"prompt": "d", "chosen": "12345", "rejected": "123"},  # the same after the cut
        {"prompt": "e", "chosen": "1\u00e9", "rejected": "2"},
    ]
    pairs, summary = pairs_of(tmp_path, rows, max_length=5)
    assert [texts_of(pair)[0] for pair in pairs] == ["f", "e"]
    assert "3 with equal or empty completions dropped, 1 cut to 5 tokens, 1 with characters unknown" in summary
    with pytest.raises(InputError, match="each of the 2 pairs has two equal completions or an empty one"):
        pairs_of(tmp_path, rows[1:3])


def test_pairs_are_held_out_by_prompt(tmp_path):
    # A prompt with several pairs stands on one side only.
    path = write(tmp_path / "rows.jsonl", numbered_pairs(300, prompts=100))
    train, evaluation, summary = load_pairs(make_args(path), PLAIN)
    sides = [{tuple(pair.prompt) for pair in side} for side in (train, evaluation)]
    assert not sides[0] & sides[1] and (len(sides[0]), len(sides[1])) == (95, 5)
    assert (len(train), len(evaluation)) == (285, 15) and "held out of these by prompt" in summary
    assert load_pairs(make_args(path), PLAIN)[1] == evaluation
    assert load_pairs(make_args(path, seed=2), PLAIN)[1] != evaluation
    few = load_pairs(make_args(path), PLAIN, 4)
    assert few[0] == train and len(few[1]) == 4 and all(pair in evaluation for pair in few[1])


def test_a_sibling_file_of_pairs_is_evaluated(tmp_path):
    write(tmp_path / "test.jsonl", numbered_pairs(3))
    path = write(tmp_path / "train.jsonl", numbered_pairs(10))
    train, evaluation, summary = load_pairs(make_args(path), PLAIN)
    assert (len(train), len(evaluation)) == (10, 3) and "3 also in training" in summary


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "a", "chosen": "b"}, "rejected is neither valid text nor a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is neither valid text nor"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "rejected is neither valid text nor"),
        ({"prompt": "a", "chosen": "b", "rejected": [say("c")]}, "must both be text"),
        ({"prompt": "a", "chosen": [], "rejected": []}, "one assistant message each"),
        ({"prompt": "a", "chosen": [{"from": "x"}], "rejected": [{"from": "x"}]}, "chosen is neither valid text nor"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
        ({"chosen": "b", "rejected": "c"}, "the prompt is empty"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "neither valid text nor a list of messages"),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "c"}, "chosen is not valid UTF-8"),
        ({"prompt": USER, "chosen": [say("b"), *USER, say("c")], "rejected": [say("c")]}, "one assistant message each"),
        ({"prompt": USER, "chosen": USER, "rejected": [say("c")]}, "one assistant message each"),
        # of two dialogues one answers another prompt
        (
            {"prompt": USER, "chosen": [*USER, say("b")], "rejected": [{"role": "user", "content": "3+3?"}, say("c")]},
            "one assistant message each",
        ),
    ],
)
def test_a_bad_pair_is_named_by_file_and_line(tmp_path, no_datasets, row, says):
    with pytest.raises(InputError) as caught:
        pairs_of(tmp_path, [*numbered_pairs(2), row])
    assert str(caught.value).startswith(f"{tmp_path / 'train.jsonl'}, line 3: ") and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_column_of_pairs_that_is_not_there(tmp_path):
    columns = r"\['prompt', 'chosen', 'rejected'\]"
    with pytest.raises(InputError, match=f"--prompt_column ask: the columns are {columns}"):
        pairs_of(tmp_path, numbered_pairs(2), prompt_column="ask")
