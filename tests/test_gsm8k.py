"""GSM8K with a local model: a small random Qwen2 and a byte-level BPE trained on the text."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import grpo
from testbed import GSM8K, metric_rows

pytestmark = pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not there")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen2")
    texts = [
        row[column]
        for row in map(json.loads, open(GSM8K / "train.jsonl", encoding="utf-8"))
        for column in ("question", "answer")
    ]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts[:2000], trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    text = texts[0] + "\n 1 + 1"
    assert AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder)(text).input_ids) == text
    return folder


def test_training_and_evaluation_on_gsm8k(model_folder, tmp_path, capsys):
    options = "--max_steps 2 --prompts_per_step 4 --group_size 4 --max_new_tokens 24 --eval_prompts 8 --eval_samples 2"
    options += f" --model_name_or_path {model_folder} --dataset {GSM8K} --eval_k 2"
    grpo.main([*options.split(), "--reward", "accuracy", "format", "--output_dir", str(tmp_path / "run")])
    printed = capsys.readouterr().out
    assert "training: 7473 prompts" in printed and "1319" in printed
    assert "<|endoftext|>" in printed and "<|im_end|>" in printed  # the EOS and the end of a turn both stop
    rows = metric_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    (sample, *_) = map(json.loads, open(tmp_path / "run" / "samples.jsonl", encoding="utf-8"))
    assert sample["prompt"] and sample["answer"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == TEMPLATE
