"""A model as the reward of any script: a reward model, as DeepSeekMath pays GRPO, or a judge that grades by a prompt.

REWARD_MODEL=runs/rm/model python grpo.py --reward examples/model_rewards.py:reward_model
JUDGE=Qwen/Qwen2.5-1.5B-Instruct python grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k \
    --dataset_config main --reward examples/model_rewards.py:judge

`reward_model` scores by the function of ppo.py, which has to lie beside the script that runs.
Each process loads the model once, at its first call, onto its own device, where the policy is too: count its memory.
Both train on what a model likes, which is not what is right: watch `eval/pass@1` where the data has gold answers.
"""

import functools
import os
from types import SimpleNamespace

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import InputError
from common.harness.args import RolloutArgs

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


# --- a reward model that reward_model.py wrote, as ppo.py --reward_model_path takes it ---

SCORER = []  # the function that scores, once the model is loaded


def reward_model(prompts, **columns):
    """One score for each completion; one that was cut is scored without an end token, as in ppo.py."""
    if not SCORER:
        from ppo import learned_reward  # the judge needs no ppo.py beside the script that runs

        sizes = dict(max_new_tokens=0, micro_batch_size=16, micro_batch_tokens=0)
        args = SimpleNamespace(**vars(RolloutArgs()) | sizes, reward_model_path=path_of("REWARD_MODEL"))
        rows = [SimpleNamespace(prompt=prompt, columns={}) for prompt in prompts]
        SCORER.append(learned_reward(args, rows, PartialState().device).function)
    return SCORER[0](prompts=prompts, **columns)


# --- a judge ---


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
def judge(prompts, completions, answer=None, **columns):
    """The probability, from 0 to 1, that the judge says yes and not no. It is told the gold where the data has one."""
    (tokenizer, model, (yes, no)), scores = load_judge(), []
    for prompt, completion, gold in zip(prompts, completions, answer or [None] * len(prompts), strict=True):
        gold = f"\nThe right answer is {gold}.\n" if gold else ""
        text = GRADE.format(question=text_of(prompt), answer=text_of(completion), gold=gold)
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt").to(model.device)
        likely = model(**inputs).logits[0, -1].float().softmax(dim=0)
        scores.append(float(likely[yes].sum() / likely[[*yes, *no]].sum()))
    return scores
