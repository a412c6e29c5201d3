"""Started by test_pretend_gpu.py: write what a pretend GPU counts as JSON.

pretend_worker.py FILE
"""

import importlib
import json
import pathlib
import sys
import tempfile

import torch
from accelerate.state import AcceleratorState, GradientState

from common.load import EMBEDDED
from pretend_gpu import GPU, pretended, waits
from testbed import ALL

COMMON = "--max_steps 2 --eval_every 0"
SAMPLING = (
    "--num_minibatches 1 --eval_prompts 1 --eval_samples 1 --eval_k 1 --reward __main__:varied --max_new_tokens 6"
)
GROUPS = f"--prompts_per_step 2 --group_size 4 {SAMPLING}"
CRITIC = f"--prompts_per_step 8 --num_epochs 1 --kl_coef 0.05 {SAMPLING}"
# Each makes the host wait once for a vector x on the GPU.
WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(force=True),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x + 1),
    "list as index": lambda x: x[[0, 2]],
    "from the host": lambda x: torch.tensor([1.0, 2.0], device=GPU),
}
NO_WAITS = {
    "arithmetic": lambda x: (x + torch.tensor(1.0)).softmax(dim=0)[1:],
    "one number where": lambda x: x.masked_fill(x > 0, 1),
    "index": lambda x: x[x.argsort()],
    "not blocking": lambda x: torch.tensor([1.0, 2.0]).to(GPU, non_blocking=True),
}
MIXES = {
    "sum": lambda x: x + torch.zeros(3),
    "in place": lambda x: torch.zeros(3).add_(x),
    "index": lambda x: torch.zeros(3)[x.argsort()],
    "filled from the CPU": lambda x: x.index_put((x.argsort()[:2],), torch.zeros(2)),
    "list": lambda x: torch.cat([x, torch.zeros(3)]),
}


def varied(prompts, completions, **columns):
    return [float(i) for i in range(len(completions))]


def options_of(module, folder):
    """Options of a short run, with rewards that are not all equal."""
    if not hasattr(module, "rollout") or not hasattr(module, "policy_loss"):
        return f"--pairs_per_step 4 --dataset {folder}"
    if hasattr(module, "load_critic"):
        return CRITIC
    return f"{GROUPS} --overlong none" if hasattr(module.Args, "overlong") else GROUPS


def update_waits(name, folder):
    """Return [[what, line, number], ...] for updates with one micro-batch of 8 rows, and with four of 2."""
    module, counted = importlib.import_module(name), []
    update = module.update

    def counting(*inputs):
        args = inputs[-2]
        args.micro_batch_size = 2 if counted else 8
        waits.clear()
        update(*inputs)
        counted.append([[*key, number] for key, number in waits.items()])

    module.update, module.save_model = counting, lambda *inputs, **named: None  # it has no data pointers
    try:
        module.main(f"{COMMON} {options_of(module, folder)} --output_dir {folder}/{name}".split())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    return counted


def kinds():
    """The number of waits of each single operation above, and the error of each mix of devices."""
    x, found = torch.tensor([3.0, 1.0, 2.0]).to(GPU), {}
    for kind, operations in (("waits", WAITS), ("no waits", NO_WAITS), ("mixes", MIXES)):
        found[kind] = {}
        for name, operation in operations.items():
            waits.clear()
            try:
                operation(x)
                found[kind][name] = waits.total()
            except RuntimeError as error:
                found[kind][name] = str(error)
    return found


def main(file):
    torch.manual_seed(0)
    with pretended(), tempfile.TemporaryDirectory() as folder:
        for split, rows in (("train", 32), ("test", 4)):
            text = (EMBEDDED["embedded-pairs"] / f"{split}.jsonl").read_text(encoding="utf-8")
            few = "\n".join(text.splitlines()[:rows])
            (pathlib.Path(folder) / f"{split}.jsonl").write_text(few, encoding="utf-8")
        result = {"kinds": kinds(), "updates": {name: update_waits(name, folder) for name in ALL}}
    pathlib.Path(file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
