"""Character-level tokenizers, and data loaded from files of a few rows."""

import json
from types import SimpleNamespace

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common.load import load_data, load_prompts

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


def character_tokenizer(special, **roles):
    """Return a tokenizer with one token per ASCII character, after these special tokens."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **roles)


def make_tokenizer(template=None, bos=False, eos=False):
    """`bos` and `eos` are added to plain text as the tokenizers of many models do."""
    roles = dict(bos_token="<s>" if bos else None, eos_token="</s>")
    tokenizer = character_tokenizer(["<s>", "</s>", "<unk>"], **roles)
    single = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
    special_tokens = [("<s>", 0), ("</s>", 1)]
    post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
    tokenizer.backend_tokenizer.post_processor = post_processor
    tokenizer.chat_template = template
    return tokenizer


def gemma_tokenizer(template=GEMMA):
    """The chat template closes a turn with <end_of_turn>, as Gemma's does."""
    roles = dict(pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")
    tokenizer = character_tokenizer(GEMMA_SPECIAL, **roles)
    tokenizer.add_special_tokens({"additional_special_tokens": GEMMA_SPECIAL[4:]})
    tokenizer.chat_template = template
    return tokenizer


PLAIN = make_tokenizer()


def load_pairs(args, tokenizer):
    from common.pairs import read_pairs

    return load_data(read_pairs, args, tokenizer)


def make_args(dataset, **options):
    defaults = dict(
        dataset=str(dataset), dataset_config=None, dataset_split="train", eval_dataset=None, eval_split=None,
        prompt_column=None, answer_column=None, system_prompt=None, prompt_template=None, max_prompt_tokens=512,
        max_length=512, eval_prompts=0, seed=1, max_steps=0,
        model_name_or_path="embedded", max_new_tokens=8, eval_samples=1, eval_temperature=1.0, reward=["format"], chat_template_kwargs=None,
    )  # fmt: skip
    return SimpleNamespace(**defaults | options)


def load(dataset, tokenizer=PLAIN, read=load_prompts, **options):
    """Return the examples of a file or folder: (training, evaluation)."""
    return read(make_args(dataset, **options), tokenizer)


def load_rows(folder, rows, tokenizer=PLAIN, read=load_prompts, **options):
    """Return all examples made from these rows, prompts or pairs."""
    path = write(folder / "rows.jsonl", rows)
    return load(path, tokenizer, read, eval_dataset=str(path), **options)[0]


def pairs_from(folder, tokenizer, *rows):
    """Return the pairs of rows (prompt, chosen, rejected)."""
    rows = [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    return load_rows(folder, rows, tokenizer, load_pairs)


def text_of(ids, tokenizer=PLAIN):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def say(content):
    return {"role": "assistant", "content": content}
