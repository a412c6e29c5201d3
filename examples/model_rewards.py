"""A judge that grades by a prompt, as the reward of any script. (A reward model is --reward rm:PATH.)

JUDGE=Qwen/Qwen2.5-1.5B-Instruct python grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k \\
    --dataset_config main --reward examples/model_rewards.py:judge

Each process loads the model once, at its first call, onto its own device, where the policy is too: count its memory.
It trains on what a model likes, which is not what is right: watch `eval/pass@1` where the data has gold answers.
"""

import functools
import os

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import InputError

GRADE = """You grade an answer. Question:

{question}

Answer:

{answer}
{gold}
Is the answer right? Reply with yes or no."""


def path_of(variable):
    if not os.environ.get(variable):
        raise InputError(f"the environment variable {variable} must name the folder or the hub id of the model")
    return os.environ[variable]


@functools.cache
def load_judge():
    """Tokenizer and model of the judge, and the tokens with which it says yes, and no."""
    path, device = path_of("JUDGE"), PartialState().device
    tokenizer = AutoTokenizer.from_pretrained(path)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
    spellings = [(word, word.title(), f" {word}", f" {word.title()}") for word in ("yes", "no")]
    yes, no = ({tokenizer(x, add_special_tokens=False)["input_ids"][0] for x in words} for words in spellings)
    if not (yes - no and no - yes):
        raise InputError(f"the judge {path}: its tokenizer begins yes and no with the same token")
    return tokenizer, model, (sorted(yes - no), sorted(no - yes))


def text_of(turns):
    return turns if isinstance(turns, str) else "\n\n".join(turn["content"] for turn in turns)


@torch.no_grad()
def judge(prompts, completions, gold=None, **columns):
    """The probability, from 0 to 1, that the judge says yes and not no. It is told the gold where the data has one."""
    (tokenizer, model, (yes, no)), scores = load_judge(), []
    for prompt, completion, right in zip(prompts, completions, gold or [None] * len(prompts), strict=True):
        told = f"\nThe right answer is {right}.\n" if right else ""
        text = GRADE.format(question=text_of(prompt), answer=text_of(completion), gold=told)
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt").to(model.device)
        likely = model(**inputs).logits[0, -1].float().softmax(dim=0)
        scores.append(float(likely[yes].sum() / likely[[*yes, *no]].sum()))
    return scores
