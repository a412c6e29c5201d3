"""Started by test_pretend_gpu.py: steps of all scripts, and tokens of `decode`, on the GPU that is not there.

pretend_worker.py FILE [LAYERS TOKENS]      writes what was counted as JSON
"""

import collections
import importlib
import json
import pathlib
import sys
import tempfile

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from common.batches import left_pad
from common.generation import decode, sampling_config
from common.harness.pairs import EMBEDDED_PAIRS
from common.harness.run import Run
from models import random_policy
from pretend_gpu import GPU, Counted, pretended
from tools import SCRIPTS

GROUPS = "--prompts_per_step 4 --group_size 4 --num_minibatches 1"
OPTIONS = {
    "grpo": GROUPS,
    "dr_grpo": GROUPS,
    "dapo": f"{GROUPS} --filter_by reward --overlong none",
    "gspo": GROUPS,
    "dcpo": GROUPS,
    "ppo": "--prompts_per_step 16 --num_minibatches 1 --num_epochs 1 --kl_coef 0.05",
    "dpo": "--pair_prompts 16 --pair_samples 4 --pairs_per_step 8 --num_epochs 2",
    "reward_model": "--pairs_per_step 8",
}
SAMPLING = "--reward __main__:varied --max_new_tokens 10 --eval_samples 1 --eval_k 1"


def varied(prompts, completions, **columns):
    return [float(i) for i in range(len(completions))]


def steps(name, folder):
    """The waits of two steps of a script, by phase, kind and line: of one micro-batch of 16 rows, and of four."""
    counted = []

    def log(self, *args, **kwargs):
        counted.append(dict(Counted.waits))
        Counted.clear()
        self.args.micro_batch_size = 4 if len(counted) == 2 else 16  # the first is the evaluation at the start

    original, Run.log = Run.log, log
    options = f"{OPTIONS[name]} --max_steps 2 --micro_batch_size 16 --output_dir {folder}/{name}"
    options += f" --dataset {folder}" if name == "reward_model" else f" --eval_prompts 2 {SAMPLING}"
    Counted.clear()
    try:
        importlib.import_module(name).main(options.split())
    finally:
        Run.log = original
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return [[[*key, number] for key, number in step.items()] for step in counted[1:]]


def token(policy, stock, first, last):
    """Waits and kernels of the tokens after `first` of `last`: 8 rows of 2 prompts, of which none ends."""
    ids, mask = left_pad([[5, 6, 7], [8, 9, 10, 11, 12]], 0, GPU)
    counted = []
    for tokens in (first, last):
        config = sampling_config(policy, 1.0, 1.0, tokens, 4 if stock else 1)
        inputs = dict(input_ids=ids, attention_mask=mask.long(), generation_config=config)
        own = {} if stock else dict(custom_generate=decode, n=4, head_is_last=policy.chunked)
        Counted.clear()
        policy.lm.generate(**inputs, **own)
        counted.append((sum(Counted.waits.values()), Counted.kernels))
    (waits, kernels), (more_waits, more_kernels) = counted
    operations = collections.Counter(more_kernels)
    operations.subtract(kernels)
    return {"waits": more_waits - waits, "kernels": sum(operations.values()) / (last - first), "operations": {str(key): x for key, x in operations.items()}}


def tokens(name, first, last, **options):
    """Both loops on a random model, and whether greedy decoding gives what it gives on CPU."""
    policy = random_policy(name, **options).eval()
    ids, mask = left_pad([[5, 6, 7], [8, 9, 10, 11, 12]], 0, "cpu")
    results = []
    for device in ("cpu", GPU):
        policy.to(device)
        inputs = dict(input_ids=ids.to(device), attention_mask=mask.long().to(device))
        config = sampling_config(policy, 0.0, 1.0, 12)
        found = policy.lm.generate(
            **inputs, generation_config=config, custom_generate=decode, n=2, head_is_last=policy.chunked
        )
        results.append([x.cpu() for x in found])
    (completions, logprobs), (others, other_logprobs) = results
    same = torch.equal(completions, others) and torch.allclose(logprobs, other_logprobs, atol=1e-5)
    policy.stop_tokens = [1000]
    result = {"same": same, "ours": token(policy, False, first, last)}
    ours = AttentionMaskInterface._global_mapping["sdpa"]
    AttentionMaskInterface.register("sdpa", sdpa_mask)  # as transformers has it
    result["stock"] = token(policy, True, first, last)
    AttentionMaskInterface.register("sdpa", ours)
    return result


def main(file, layers=8, last=10):
    result = {"steps": {}, "tokens": {}}
    with pretended(), tempfile.TemporaryDirectory() as folder:
        for split, rows in (("train", 32), ("test", 4)):
            lines = (EMBEDDED_PAIRS / f"{split}.jsonl").read_text().splitlines()[:rows]
            (pathlib.Path(folder) / f"{split}.jsonl").write_text("\n".join(lines))
        for name in [*SCRIPTS, "dpo", "reward_model"]:
            try:
                result["steps"][name] = steps(name, folder)
            except Exception as error:
                result["steps"][name] = f"{type(error).__name__}: {error}"
        for name in ("qwen2", "mistral"):
            try:
                result["tokens"][name] = tokens(name, 2, int(last), num_hidden_layers=int(layers))
            except RuntimeError as error:
                result["tokens"][name] = str(error)
    pathlib.Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
