"""Started by test_pretend_gpu.py: steps of all scripts, and tokens of `decode`, on the pretend GPU.

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

import attention
from common.batches import left_pad
from common.sampling import decode, sampling_config
from common.harness import loading
from common.launch import set_up_attention
from common.embedded import EMBEDDED_PAIRS
from common.run import Run
from common.shortcuts.graphs import OneTokenByGraph
from pretend_gpu import GPU, Counted, pretended
from small_models import random_policy
from testbed import ALL

SAMPLING = "--eval_prompts 1 --eval_samples 1 --eval_k 1 --reward __main__:varied --max_new_tokens"
GROUPS = f"--prompts_per_step 2 --group_size 4 --num_minibatches 1 {SAMPLING} 6"
OPTIONS = dict.fromkeys(ALL, GROUPS) | {
    "dapo": f"{GROUPS} --filter_by reward --overlong none",
    "ppo": f"--prompts_per_step 8 --num_minibatches 1 --num_epochs 1 --kl_coef 0.05 {SAMPLING} 6",
    "dpo": f"--pair_prompts 8 --pair_samples 4 --pairs_per_step 4 --num_epochs 2 {SAMPLING} 12",
    "reward_model": "--pairs_per_step 4",
}
# Each makes the host wait once, on a vector x on the GPU; CUDA's calls for them wait for all that comes before.
WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "float": lambda x: float(x.max()),
    "if": lambda x: 1 if x.isfinite().all() else 2,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "filled where": lambda x: x.index_put((x > 0,), x + 1),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x + 1),
    "unique": lambda x: x.unique(),
    "list as index": lambda x: x[[0, 2]],
    "from the host": lambda x: torch.tensor([1.0, 2.0], device=GPU),
}
NO_WAITS = {
    "arithmetic": lambda x: (x + torch.tensor(1.0)).softmax(dim=0)[1:],
    "made there": lambda x: torch.zeros(3, device=GPU),
    "one number where": lambda x: x.masked_fill(x > 0, 1),
    "index": lambda x: x[x.argsort()],
    "not blocking": lambda x: torch.tensor([1.0, 2.0]).to(GPU, non_blocking=True),
}
MIXES = {
    "sum": lambda x: x + torch.zeros(3),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(3)),
    "in place": lambda x: torch.zeros(3).add_(x),
    "index": lambda x: torch.zeros(3)[x.argsort()],
    "filled from the CPU": lambda x: x.index_put((x.argsort()[:2],), torch.zeros(2)),
    "list": lambda x: torch.cat([x, torch.zeros(3)]),
}


def varied(prompts, completions, **columns):
    return [float(i) for i in range(len(completions))]


def steps(name, folder, run="run"):
    """The waits of two steps of a script, by phase, kind and line: of one micro-batch of 8 rows, and of four."""
    counted = []  # of the evaluation at the start, and of the steps

    def log(self, *args, **kwargs):
        counted.append(dict(Counted.waits))
        Counted.clear()
        self.args.micro_batch_size = 2 if len(counted) == 2 else 8

    original, Run.log = Run.log, log
    options = f"{OPTIONS[name]} --max_steps 2 --micro_batch_size 8 --output_dir {folder}/{name}-{run}"
    options += f" --dataset {folder}" if name == "reward_model" else ""
    Counted.clear()
    try:
        importlib.import_module(name).main(options.split())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Run.log = original
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return [[[*key, number] for key, number in step.items()] for step in counted[1:]]


def token(policy, stock, first, last, graphs=False):
    """Waits and kernels of the tokens after `first` of `last`: 8 rows of 2 prompts, of which none ends. With `graphs`
    those outside of the forward of a token, which would be replayed."""
    ids, mask = left_pad([[5, 6, 7], [8, 9, 10, 11, 12]], 0, GPU)
    counted = []
    for tokens in (first, last):
        config = sampling_config(policy, 1.0, 1.0, tokens, 4 if stock else 1)
        inputs = dict(input_ids=ids, attention_mask=mask.long(), generation_config=config)
        own = {} if stock else dict(custom_generate=decode, n=4, head_is_last=policy.head_is_last, graphs=graphs)
        Counted.clear()
        policy.lm.generate(**inputs, **own)
        counted.append((sum(Counted.waits.values()), Counted.kernels.copy()))
    (waits, kernels), (more_waits, more_kernels) = counted
    operations = collections.Counter(more_kernels)
    operations.subtract(kernels)
    return {"waits": more_waits - waits, "kernels": sum(operations.values()) / (last - first)}


def not_counted(self, run=OneTokenByGraph.run):
    """In the place of `OneTokenByGraph.run`, as a replay, which is one launch; a wait would stop the recording."""
    waits, kernels = Counted.waits.copy(), Counted.kernels.copy()
    logits = run(self)
    assert Counted.waits == waits, Counted.waits
    Counted.kernels = kernels
    return logits


def packed(folder):
    """As `steps` of grpo.py, with packed passes: attention is a loop here, which is not counted."""
    from common.harness import ladder
    from common.shortcuts import packing

    found, calls = ladder.find_shortcuts, []

    def quietly(*inputs, scale, window_size, enable_gqa):
        waits = Counted.waits.copy()
        calls.append(1)
        result = attention.varlen_attn(*inputs, scale=scale, window_size=window_size)
        Counted.waits = waits
        return result

    packing.let_sdpa_take_layouts()
    packing.varlen_attn = quietly
    loading.find_shortcuts = lambda *inputs: found(*inputs) | {"packs": True}
    try:
        result = steps("grpo", folder, "packed")
        return result if calls else "no pass was packed"
    finally:
        loading.find_shortcuts = found


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
            **inputs, generation_config=config, custom_generate=decode, n=2, head_is_last=policy.head_is_last
        )
        results.append([x.cpu() for x in found])
    (completions, logprobs), (others, other_logprobs) = results
    same = torch.equal(completions, others) and torch.allclose(logprobs, other_logprobs, atol=1e-5)
    policy.stop_tokens = [1000]
    result = {"same": same, "ours": token(policy, False, first, last)}
    OneTokenByGraph.run, run = not_counted, OneTokenByGraph.run
    result["around a graph"] = token(policy, False, first, last, graphs=True)
    OneTokenByGraph.run = run
    AttentionMaskInterface.register("sdpa", sdpa_mask)  # as transformers has it
    result["stock"] = token(policy, True, first, last)
    set_up_attention()
    return result


def kinds():
    """The waits of each single operation above, and what is said of each mix of devices."""
    x, found = torch.tensor([3.0, 1.0, 2.0]).to(GPU), {}
    for kind, operations in (("waits", WAITS), ("no waits", NO_WAITS), ("mixes", MIXES)):
        found[kind] = {}
        for name, operation in operations.items():
            Counted.clear()
            try:
                operation(x)
                found[kind][name] = sum(Counted.waits.values())
            except RuntimeError as error:
                found[kind][name] = str(error)
    return found


def main(file, layers=4, last=10):
    torch.manual_seed(0)
    with pretended(), tempfile.TemporaryDirectory() as folder:
        result = {"kinds": kinds(), "steps": {}, "tokens": {}}
        for split, rows in (("train", 32), ("test", 4)):
            lines = (EMBEDDED_PAIRS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()[:rows]
            (pathlib.Path(folder) / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        for name in OPTIONS:
            result["steps"][name] = steps(name, folder)
        result["steps"]["packed"] = packed(folder)
        for name in ("qwen2", "mistral"):  # full attention, and sliding windows shorter than the rows
            try:
                result["tokens"][name] = tokens(name, 2, int(last), num_hidden_layers=int(layers))
            except RuntimeError as error:
                result["tokens"][name] = str(error)
    pathlib.Path(file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
