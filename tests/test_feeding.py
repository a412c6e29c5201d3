"""What people feed the scripts: special tokens, tokenizers that put a blank first, templates that open a thought."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.batches import decode_tokens
from common.pairs import encode_completions, load_pairs
from rows import make_args, make_tokenizer, pairs_from, write

BLANK = "\u2581"


def prepending(kind):
    """One token a character; as Llama 2's and Mistral v0.1's it puts a blank before every text."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", BLANK, "\n", *"123456789+="])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    if kind == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("kind", ["normalizer", "always", "first"])
def test_a_completion_has_no_blank_that_nobody_wrote(kind):
    tokenizer = prepending(kind)
    assert tokenizer.convert_ids_to_tokens(tokenizer("2").input_ids) == [BLANK, "2"]
    (ids,) = encode_completions(["2"], tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == ["2", "</s>"]


def test_a_token_beyond_the_vocabulary_stands_in_the_text():
    tokenizer = make_tokenizer()
    ids = tokenizer("16").input_ids
    assert decode_tokens(tokenizer, [ids[0], 100_000, ids[1]]) == "1\ufffd6"


THOUGHT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{{ m.tool_calls }}|{% endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


def test_the_answer_of_a_pair_stands_behind_the_thought_that_the_prompt_opens(tmp_path):
    tokenizer = make_tokenizer(THOUGHT)
    (pair,) = pairs_from(tmp_path, tokenizer, ("1+1?", "2", "3"))
    texts = ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in pair[:2]]
    assert texts == ["[user]1+1?|[assistant]<think>", "</think>2|</s>"]


def test_pairs_that_differ_in_thought_or_call_alone_are_pairs(tmp_path):
    for key, values in (("reasoning_content", ("a", "b")), ("tool_calls", ([{"n": 1}], [{"n": 2}]))):
        chosen, rejected = ([{"role": "assistant", "content": None, key: value}] for value in values)
        path = write(tmp_path / f"{key}.jsonl", [{"prompt": "1+1?", "chosen": chosen, "rejected": rejected}])
        (pair,) = load_pairs(make_args(path, eval_dataset=str(path)), make_tokenizer(THOUGHT))[0]
        assert pair.chosen != pair.rejected
