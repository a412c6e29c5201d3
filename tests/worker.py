"""Started by `accelerate launch`: one update on a given batch, whatever the number of processes and the strategy.

worker.py <script> <folder>        writes update-<processes>.pt: the weights after the update, and its metrics
"""

import pathlib
import sys

import torch

from common.runs import Metrics, clean_exit, close, launch
from tools import advantages_of, hand_made_batch, pretend_gpus, script

OPTIONS = dict(group_size=4, prompts_per_step=8, micro_batch_tokens=150, num_epochs=2, num_minibatches=2, kl_coef=0.04)


def main(name, folder):
    module = script(name)
    args = module.Args(**OPTIONS)
    accelerator = launch(args)
    rank, processes = accelerator.process_index, accelerator.num_processes
    tokenizer = module.load_tokenizer(args)
    policy = module.load_policy(args, tokenizer, accelerator)
    reference = module.load_reference(args, tokenizer, accelerator)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(policy, optimizer)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    batch["advantages"] = advantages_of(module, rewards, args)
    # Prompt i of the draw goes to rank i mod W; lengths grow with i, so the processes have unequal token counts.
    rows = [4 * group + i for group in range(rank, 8, processes) for i in range(4)]
    batch = {column: values[rows] for column, values in batch.items()}
    metrics = Metrics(1)
    module.update(accelerator, model, reference, optimizer, batch, args, metrics)
    result = {"weights": accelerator.get_state_dict(model), "metrics": metrics.reduce(accelerator)}
    if accelerator.is_main_process:
        torch.save(result, pathlib.Path(folder) / f"update-{processes}.pt")
    del model, optimizer, policy, reference
    close(accelerator)


if __name__ == "__main__":
    pretend_gpus()
    with clean_exit():
        main(*sys.argv[1:])
