"""Started by `accelerate launch`: one update on a given batch, whatever the number of processes.

worker.py <script> <folder>        writes update.pt: the weights after the update, and its metrics
"""

import pathlib
import sys

import torch
from accelerate import Accelerator

from common.runs import Metrics, clean_exit, close
from tools import embedded, fill, hand_made_batch, trainable

OPTIONS = dict(group_size=4, prompts_per_step=8, micro_batch_tokens=150, num_epochs=2, num_minibatches=2, kl_coef=0.04)


def main(name, folder):
    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    module, args, tokenizer, policy = embedded(name, **OPTIONS, max_grad_norm=1.0)
    batch, rewards = hand_made_batch(policy, tokenizer, args)
    batch = fill(module, batch, rewards, args)
    # Prompt i of the draw goes to process i mod W; lengths grow with i, so the processes have unequal token counts.
    rows = [4 * group + i for group in range(rank, 8, processes) for i in range(4)]
    batch = {column: values[rows] for column, values in batch.items()}
    reference = module.load_reference(args, tokenizer, accelerator.device)
    trained, parameters, extra = trainable(module, args, policy)
    model, optimizer = accelerator.prepare(trained, torch.optim.SGD(parameters, lr=0.01))
    metrics = Metrics(1)
    module.update(accelerator, model, reference, optimizer, batch, args, metrics, *extra)
    result = {"weights": trained.state_dict(), "metrics": metrics.reduce(accelerator)}
    if accelerator.is_main_process:
        torch.save(result, pathlib.Path(folder) / f"update-{processes}.pt")
    del model, optimizer, policy, reference, trained, parameters
    close(accelerator)


if __name__ == "__main__":
    with clean_exit():
        main(*sys.argv[1:])
