"""Warm up the fork server of processes.py before processes fork from it: imports, and whatever the first model
of a process initializes. Nothing here may start a thread."""

import gc

import accelerate  # noqa: F401
import datasets  # noqa: F401
import torch
from transformers import AutoModelForCausalLM

from common.load import EMBEDDED, load_tokenizer

torch.set_num_threads(1)
load_tokenizer("embedded")
AutoModelForCausalLM.from_pretrained(EMBEDDED["embedded"])
gc.collect()
gc.freeze()  # otherwise garbage collection in a fork copies all of it
