"""Tokenizers of one token a character, and files of a few rows."""

import json
from types import SimpleNamespace

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import reward_model
from harness.data import load_data
from harness.pairs import read_pairs

TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = [{"role": "user", "content": "2+2?"}]
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
GEMMA_STOP = ["<eos>", "<end_of_turn>"]
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]


def make_tokenizer(template=None, bos=False, eos=False):
    """One token a character; `bos` and `eos` are added to plain text as the tokenizers of many models do."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    single = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


PLAIN = make_tokenizer()


def make_args(dataset, **options):
    defaults = dict(
        dataset=str(dataset), dataset_config=None, dataset_split="train", eval_dataset=None, eval_split=None,
        prompt_column=None, answer_column=None, system_prompt=None, prompt_template=None, max_prompt_tokens=512,
        max_length=512, eval_prompts=0, seed=1, reward=["format"], chat_template_kwargs=None,
    )  # fmt: skip
    return SimpleNamespace(**defaults | options)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def say(content):
    return {"role": "assistant", "content": content}


def gemma_tokenizer(template=GEMMA):
    """One token a character; the chat template closes a turn with <end_of_turn>, as Gemma's does."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*GEMMA_SPECIAL, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    roles = dict(pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    tokenizer.add_special_tokens({"additional_special_tokens": GEMMA_SPECIAL[4:]})
    tokenizer.chat_template = template
    return tokenizer


def pairs_from(folder, tokenizer, *rows):
    """The pairs that `read_pairs` makes of rows (prompt, chosen, rejected)."""
    path = folder / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), row, strict=True))) + "\n" for row in rows),
        encoding="utf-8",
    )
    args = reward_model.Args(dataset=str(path), eval_dataset=str(path))
    return load_data(read_pairs, args, tokenizer)[0]
