"""Started by test_pretend_gpu.py: steps of all scripts on the pretend GPU.

pretend_worker.py FILE      writes what was counted as JSON
"""

import importlib
import json
import pathlib
import sys
import tempfile

import torch
from accelerate.state import AcceleratorState, GradientState

from harness.data import EMBEDDED
from harness.log import Log
from pretend_gpu import GPU, Counted, pretended
from testbed import ALL

SAMPLING = "--eval_prompts 1 --eval_samples 1 --eval_k 1 --reward __main__:varied --max_new_tokens"
GROUPS = f"--prompts_per_step 2 --group_size 4 --num_minibatches 1 {SAMPLING} 6"
CRITIC = f"--prompts_per_step 8 --num_minibatches 1 --num_epochs 1 --kl_coef 0.05 {SAMPLING} 6"
ROUNDS = f"--pair_prompts 8 --pair_samples 4 --pairs_per_step 4 --num_epochs 2 {SAMPLING} 12"
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


def options_of(module, folder):
    """The options of a short run with rewards that are not all equal."""
    if hasattr(module, "load_critic"):
        return CRITIC
    if hasattr(module, "policy_loss"):
        return f"{GROUPS} --overlong none" if hasattr(module.Args, "overlong") else GROUPS
    return ROUNDS if hasattr(module, "rollout") else f"--pairs_per_step 4 --dataset {folder}"


def steps(name, folder):
    """The waits of two steps of a script, by phase, kind and line: of one micro-batch of 8 rows, and of four."""
    counted = []  # of the evaluation at the start, and of the steps

    def write_row(self, row):
        counted.append(dict(Counted.waits))
        Counted.clear()
        self.args.micro_batch_size = 2 if len(counted) == 2 else 8

    original, Log.write_row = Log.write_row, write_row
    module = importlib.import_module(name)
    options = f"{options_of(module, folder)} --max_steps 2 --micro_batch_size 8 --output_dir {folder}/{name}"
    Counted.clear()
    try:
        module.main(options.split())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Log.write_row = original
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return [[[*key, number] for key, number in step.items()] for step in counted[1:]]


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


def main(file):
    torch.manual_seed(0)
    with pretended(), tempfile.TemporaryDirectory() as folder:
        result = {"kinds": kinds(), "steps": {}}
        for split, rows in (("train", 32), ("test", 4)):
            text = (EMBEDDED["embedded-pairs"] / f"{split}.jsonl").read_text(encoding="utf-8")
            few = "\n".join(text.splitlines()[:rows])
            (pathlib.Path(folder) / f"{split}.jsonl").write_text(few, encoding="utf-8")
        for name in ALL:
            result["steps"][name] = steps(name, folder)
    pathlib.Path(file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
