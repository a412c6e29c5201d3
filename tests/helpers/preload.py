"""What the fork server of processes.py does once, before a process forks from it: the imports, and what the first model
of a process costs. Nothing here starts a thread."""

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
gc.freeze()  # the search for garbage at the end of a run would copy all of this
