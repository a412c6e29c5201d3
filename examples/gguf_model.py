"""A model folder for `from_pretrained` out of a GGUF file of a Llama or Qwen2 shape.

    pip install gguf==0.19.0
    python examples/gguf_model.py FILE FOLDER

writes the weights of FILE as float32 into FOLDER, with tokenizer, chat template and stop tokens,
and checks that the folder gives the tokens and logits of the file. A GGUF is mostly quantized: the
folder then holds a quantized copy of the model, whose scores do not compare with published ones.

A file that holds a tied embedding twice, for the input and for the output, gives both from the
output's copy, which is quantized more finely.
"""

import argparse
import hashlib
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

SHAPES = {"llama", "qwen2"}
INSTALL = "pip install gguf==0.19.0"
# Two quantized copies of one matrix differ by less than this share of its norm.
COPY = 0.15
QUESTIONS = ["What is 3 + 4?", "What is the capital of France?"]


def convert(file, folder):
    """Write the GGUF `file` as a model folder; return its model and tokenizer as they were read."""
    lm, tokenizer = read(file)
    tied = tie_copies(lm)
    config = lm.config.to_dict()
    config.pop("quantization_config")  # save_pretrained refuses a model that has it
    plain = type(lm)(type(lm.config).from_dict(config))
    plain.load_state_dict(lm.state_dict())
    plain.generation_config = GenerationConfig(**stop_tokens(lm.config))
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if tied:
        print("input and output embedding are copies of one matrix: both from the output's")
    return lm, tokenizer


def read(file):
    """Return the model of a GGUF file, in float32, and its tokenizer."""
    file = Path(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    lm = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    if lm.config.model_type not in SHAPES:
        shapes = " and ".join(sorted(SHAPES))
        raise SystemExit(f"{file}: a model of type {lm.config.model_type}; only {shapes} are read")
    return lm.eval(), tokenizer


@torch.no_grad()
def tie_copies(lm):
    """Tie the input embedding to the output's if they are copies of one matrix; return whether."""
    inputs, outputs = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    if inputs is outputs or (inputs - outputs).norm() > COPY * outputs.norm():
        return False
    lm.config.tie_word_embeddings = True
    lm.get_input_embeddings().weight = lm.get_output_embeddings().weight
    return True


def stop_tokens(config):
    """Return the special ids of a generation config. A padding token ends a completion, too."""
    eos, pad = config.eos_token_id, config.pad_token_id
    ends = eos if pad in (None, eos) else [eos, pad]
    return {"bos_token_id": config.bos_token_id, "eos_token_id": ends, "pad_token_id": pad}


@torch.no_grad()
def check(folder, lm, tokenizer, questions=QUESTIONS):
    """Check that the folder gives the tokens and logits of `lm`; return {question: answer}."""
    saved = AutoModelForCausalLM.from_pretrained(folder)
    saved_tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = {}
    for question in questions:
        inputs = encode(saved_tokenizer, question)
        ids = inputs["input_ids"]
        same_tokens = torch.equal(ids, encode(tokenizer, question)["input_ids"])
        if not same_tokens or not torch.equal(saved(**inputs).logits, lm(**inputs).logits):
            raise SystemExit(f"{folder} is not the model of the file: delete it, and start again")
        output = saved.generate(**inputs, do_sample=False, max_new_tokens=24)
        text = saved_tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"{question} {text!r}", flush=True)
        answers[question] = text
    return answers


def encode(tokenizer, question):
    """Return the inputs of a question, in the chat template if there is one."""
    if not tokenizer.chat_template:
        return tokenizer(question, return_tensors="pt")
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def digest(file):
    """Return the sha256 of a file."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if not importlib.util.find_spec("gguf"):
        raise SystemExit(f"the reader of GGUF files is a Python package: {INSTALL}")
    if not args.file.is_file():
        raise SystemExit(f"{args.file}: there is no such file")
    logging.disable_progress_bar()
    print(f"{args.file}: sha256 {digest(args.file)}", flush=True)
    check(args.folder, *convert(args.file, args.folder))
    weights = args.folder / "model.safetensors"
    print(f"{args.folder}: the model as float32, sha256 {digest(weights)[:12]} of its weights")


if __name__ == "__main__":
    main()
