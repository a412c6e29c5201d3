"""common/pairs.py: every format of preference pairs, their end tokens, evaluation data, bad rows."""

from types import SimpleNamespace

import pytest

from common.load import load_data
from common.pairs import Pair, pair_batches, read_pairs, read_pairs_or_prompts, spread_pairs
from common.run import Exit
from rows import (
    GEMMA,
    TEMPLATE,
    USER,
    gemma_tokenizer,
    load,
    load_pairs,
    load_rows,
    make_tokenizer,
    pairs_from,
    say,
    text_of,
    write,
)

HUMAN = "\n\nHuman: 2+2?\n\nAssistant:"
PAIR_FORMATS = {
    "plain": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "4", "5"),
    "messages": ({"prompt": USER, "chosen": [say("4")], "rejected": [say("5")]}, "2+2?", "4", "5"),
    "implicit": ({"chosen": f"{HUMAN} It is 4", "rejected": f"{HUMAN} It is 5"}, HUMAN, " It is 4", " It is 5"),
    "one continues the other": ({"chosen": f"{HUMAN} 4", "rejected": f"{HUMAN} 4 or 5"}, HUMAN, " 4", " 4 or 5"),
    "implicit, messages": ({"chosen": [*USER, say("4")], "rejected": [*USER, say("5")]}, "2+2?", "4", "5"),
    "text beside whole dialogues": (
        {"prompt": "2+2?", "chosen": [*USER, say("4")], "rejected": [*USER, say("5")], "messages": USER}, "2+2?", "4", "5",
    ),  # as in UltraFeedback
    "text before messages": ({"prompt": "2+2?", "chosen": [say("4")], "rejected": [say("5")]}, "2+2?", "4", "5"),
    "prompt beside whole dialogues": (
        {"prompt": USER, "chosen": [*USER, say("4")], "rejected": [*USER, say("5")]}, "2+2?", "4", "5",
    ),
    "a prompt that both repeat": ({"prompt": "2?", "chosen": "2?4", "rejected": "2?5"}, "2?", "4", "5"),
    "one begins with its prompt": ({"prompt": "2", "chosen": "2+2", "rejected": "5"}, "2", "2+2", "5"),
    "question": ({"question": "2+2?", "chosen": "4", "rejected": "5"}, "2+2?", "4", "5"),
    "hh-rlhf beside a source": (
        {"source": "a", "chosen": f"{HUMAN} 4", "rejected": f"{HUMAN} 5"}, HUMAN, " 4", " 5",
    ),
}  # fmt: skip


SYSTEM = {"role": "system", "content": "Add."}


def numbered_pairs(n, prompts=None):
    return [{"prompt": f"question {i % (prompts or n)}", "chosen": f"yes {i}", "rejected": "no"} for i in range(n)]


@pytest.mark.parametrize("name", PAIR_FORMATS)
def test_pairs_of_a_chat_tokenizer(tmp_path, no_datasets, name):
    # Prompt and completion are tokenized apart, one BOS, and EOS ends the completion once.
    chat = make_tokenizer(TEMPLATE, bos=True, eos=True)
    row, *texts = PAIR_FORMATS[name]
    (pair,) = load_rows(tmp_path, [row], chat, load_pairs)
    expected = [f"<s>[user]{texts[0]}[end][assistant]", *(f"{text}[end]</s>" for text in texts[1:])]
    assert [text_of(ids, chat) for ids in pair[:3]] == expected and pair[3:] == (0, 0)


@pytest.mark.parametrize("template, end", [(GEMMA, "<end_of_turn>"), (None, "<eos>")])
def test_pairs_end_as_in_the_template(template, end, tmp_path):
    tokenizer = gemma_tokenizer(template)
    written = [("2+2?", "4", "5"), ("2+2?", "4<end_of_turn>", "5<eos>"), ("2+2?", "4<end_of_turn><eos>", "5")]
    for pair in pairs_from(tmp_path, tokenizer, *written[: 3 if template else 1]):
        assert [tokenizer.convert_ids_to_tokens(ids) for ids in pair[1:3]] == [["4", end], ["5", end]]


def test_unknown_character_is_not_an_end(tmp_path):
    tokenizer = gemma_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    (pair,) = pairs_from(tmp_path, tokenizer, ("2+2?", "é", "5"))
    assert tokenizer.convert_ids_to_tokens(pair.chosen) == ["<unk>", "<eos>"]


def test_dropped_pairs_are_reported(tmp_path, capsys):
    """Long pairs are dropped, not truncated: they would lose their BOS or system turn, or end in mid-sentence."""
    rows = [
        ("abcdef", "12345", "12"),
        ("b", "same", "same"),
        ("c", "", "some"),
        ("c", "some", ""),
        ("e", "1", "2"),
        ("abc", "12345", "1"),
    ]
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in rows]
    rows.append({key: [*USER, say("4")] for key in ("chosen", "rejected")})  # dialogues that are equal
    pairs = load_rows(tmp_path, rows, read=load_pairs, max_length=9)
    assert [text_of(pair.prompt) for pair in pairs] == ["e", "abc"]
    told = capsys.readouterr().out
    assert "4 with equal or empty completions dropped, 1 longer than --max_length dropped" in told
    with pytest.raises(Exit, match="0 pairs"):
        load_rows(tmp_path, rows[1:4], read=load_pairs)


def test_held_out_pairs_share_no_prompt(tmp_path):
    # All pairs of a prompt are on one side of the split.
    path = write(tmp_path / "rows.jsonl", numbered_pairs(300, prompts=100))
    train, evaluation = load(path, read=load_pairs)
    sides = [{tuple(pair.prompt) for pair in side} for side in (train, evaluation)]
    assert not sides[0] & sides[1] and (len(sides[0]), len(sides[1])) == (68, 32)
    assert (len(train), len(evaluation)) == (204, 96)


def test_eval_prompts_in_training_are_counted(tmp_path, capsys):
    write(tmp_path / "train.jsonl", numbered_pairs(4))
    write(tmp_path / "test.jsonl", [{"prompt": f"question {i}"} for i in (3, 4, 1)])
    load(tmp_path, read=lambda *inputs: load_data(read_pairs, *inputs, read_pairs_or_prompts))
    assert "evaluation: 3 prompts, 2 of them also in training" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "a", "chosen": "b"}, "no columns chosen and rejected in ['prompt', 'chosen']"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "column rejected: expected text or a list of messages"),
        ({"prompt": " ", "chosen": "b", "rejected": "c"}, "no prompt in"),
        ({"chosen": "b", "rejected": "c"}, "no prompt in ['chosen', 'rejected']: set --prompt_column"),
        (
            {"ask": "2?", "chosen": "It is 4", "rejected": "It is 5"},
            "no prompt in ['ask', 'chosen', 'rejected']",
        ),
        ({"prompt": USER, "chosen": USER, "rejected": [say("c")]}, "after the prompt, found ['user']"),
        # both answer twice, and differ in the first answer
        (
            {"chosen": [*USER, say("b"), *USER, say("d")], "rejected": [*USER, say("c"), *USER, say("d")]},
            "found ['user', 'assistant', 'user', 'assistant']",
        ),
        ({"chosen": USER, "rejected": [*USER, say("b")]}, "no prompt"),
        ({"chosen": [*USER, say("b")], "rejected": USER}, "after the prompt, found []"),
        ({"chosen": "天空是蓝色的", "rejected": "天空是绿色的"}, "no prompt"),
        # a system turn on one side only
        (
            {"prompt": USER, **{key: [SYSTEM, *USER, say(key)] for key in ("chosen", "rejected")}},
            "found ['system', 'user', 'assistant']",
        ),
        # one of two dialogues answers another prompt
        (
            {"prompt": USER, "chosen": [*USER, say("b")], "rejected": [{"role": "user", "content": "3+3?"}, say("c")]},
            "found ['user', 'assistant']",
        ),
    ],
)
def test_a_bad_pair_is_named(tmp_path, no_datasets, row, says):
    with pytest.raises(Exit) as caught:
        load_rows(tmp_path, [*numbered_pairs(2), row], read=load_pairs)
    assert str(caught.value).startswith("row 3: ") and says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_are_read_from_pairs(tmp_path):
    rows = [{"chosen": f"{HUMAN} {i}", "rejected": f"{HUMAN} no"} for i in range(3)]  # configs/ppo-paper.yaml: hh-rlhf
    assert {prompt.prompt for prompt in load_rows(tmp_path, rows)} == {HUMAN}


def test_missing_prompt_column_of_pairs(tmp_path):
    with pytest.raises(Exit, match="no column ask in .*: set --prompt_column"):
        load_rows(tmp_path, numbered_pairs(2), read=load_pairs, prompt_column="ask")


# --- batches ---


def pairs_of_lengths(*lengths):
    return [Pair([5] * length, [6, 1], [7, 1], -float(length), -1.0) for length in lengths]


def test_batches_keep_the_pair_order():
    args = SimpleNamespace(micro_batch_size=5)  # two pairs per forward
    one, two = pair_batches(pairs_of_lengths(3, 1, 2), args, "cpu")
    assert one["prompt_mask"].sum(dim=1).tolist() == [3, 1, 3, 1] and len(two["prompts"]) == 2
    assert one["ref_logprobs"].tolist() == [-3, -1, -1, -1]
    assert [row[0] for row in one["completions"].tolist()] == [6, 6, 7, 7]


@pytest.mark.parametrize("count, processes", [(5, 1), (5, 2), (1, 4)])
def test_processes_share_pairs_by_length(count, processes):
    """Each pair counts once, each process makes equally many forwards, and a batch has similar lengths."""
    pairs = pairs_of_lengths(*[4, 2, 5, 1, 3][:count])
    seen, forwards = [], set()
    for rank in range(processes):
        accelerator = SimpleNamespace(device="cpu", process_index=rank, num_processes=processes)
        batches = list(spread_pairs(accelerator, pairs, SimpleNamespace(micro_batch_size=4)))
        forwards.add(len(batches))
        for indices, is_real, batch in batches:
            lengths = batch["prompt_mask"].sum(dim=1)[: len(indices)]
            assert lengths.tolist() == [len(pairs[i].prompt) for i in indices]
            assert lengths[is_real].tolist() == sorted(lengths[is_real].tolist())
            seen += indices[is_real].tolist()
    assert sorted(seen) == list(range(count)) and len(forwards) == 1
