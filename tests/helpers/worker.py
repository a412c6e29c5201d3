"""Started by `accelerate launch`: one update on a given batch, whatever the number of processes and the strategy.

worker.py <script> <folder> [max_grad_norm [model [lora_rank]]]
                                   writes update-<processes>.pt: what was sampled before and after the update, the
                                   weights after it, and its metrics; and the model as `from_pretrained` loads it
"""

import pathlib
import sys

import torch
from accelerate.utils import gather_object

from common.load import gathered_weights, load_policy, load_reference, save_model
from common.masked import Means
from common.run import clean_exit, make_accelerator
from testbed import args_of, embedded_prompts, fill, hand_made_batch, pretend_gpus, script, trainable

OPTIONS = dict(group_size=4, prompts_per_step=8, micro_batch_size=5, num_epochs=2, num_minibatches=2, kl_coef=0.04)
OPTIONS |= dict(max_new_tokens=64)


def sampled(accelerator, model, lm, tokenizer, module, args):
    """Sample on two processes, with the longest completion of one longer than any of the other's."""
    prompts, found = embedded_prompts()[:6], {}
    with gathered_weights(model):
        for rank in range(accelerator.process_index, 2, accelerator.num_processes):
            seed = (3, rank)
            found[rank] = module.rollout(lm, tokenizer, prompts[rank::2], 6, 1.0, 1.0, seed, args)[
                "completions"
            ].tolist()
    return dict(pair for pairs in gather_object([found]) for pair in pairs.items())


def main(name, folder, max_grad_norm="1", model="embedded", lora_rank="0"):
    module = script(name)
    sizes = dict(max_grad_norm=float(max_grad_norm), lora_rank=int(lora_rank))
    args = args_of(module, **OPTIONS, **sizes, model_name_or_path=model)
    accelerator = make_accelerator(args)
    rank, processes = accelerator.process_index, accelerator.num_processes
    tokenizer, lm = load_policy(args, accelerator)
    reference = load_reference(lm, args, accelerator)
    trained, parameters = trainable(module, args, lm)
    model, optimizer = accelerator.prepare(trained, torch.optim.SGD(parameters, lr=0.01))
    batch, rewards = hand_made_batch(tokenizer, args)
    # Prompt i of the draw goes to rank i mod W; lengths grow with i, so the processes have unequal token counts.
    rows = [4 * group + i for group in range(rank, 8, processes) for i in range(4)]
    batch = fill(module, {column: values[rows] for column, values in batch.items()}, rewards[rows], args)
    for column, values in batch.items():
        if isinstance(values, torch.Tensor):
            batch[column] = values.to(accelerator.device)
    metrics, start = Means(), {key: x.clone() for key, x in (accelerator.get_state_dict(model) or {}).items()}
    before = sampled(accelerator, model, lm, tokenizer, module, args)
    module.update(accelerator, model, reference, optimizer, batch, args, metrics)
    after = sampled(accelerator, model, lm, tokenizer, module, args)
    result = {"start": start, "weights": accelerator.get_state_dict(model), "metrics": metrics.reduce(accelerator)}
    if accelerator.is_main_process:
        torch.save(result | {"before": before, "after": after}, pathlib.Path(folder) / f"update-{processes}.pt")
    target = pathlib.Path(folder) / f"saved-{processes}"
    target.mkdir(exist_ok=True)
    save_model(accelerator, model, tokenizer, target, prefix="lm." if hasattr(module, "load_critic") else "")
    del model, optimizer, lm, reference, trained, parameters
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()


def compared(name, folder, *rest, near=1e-5):
    """The update of this one process, made now, and that of the two that have run with these arguments: their weights
    agree. `near` is a part of the largest change; four roundings of float32 weights near 1 come on top."""
    main(name, folder, *rest)
    one, two = (torch.load(folder / f"update-{processes}.pt", map_location="cpu") for processes in (1, 2))
    start, weights = one["start"], one["weights"]
    moved = max(float((weights[key] - start[key]).abs().max()) for key in start)
    apart = max(float((weights[key] - two["weights"][key]).abs().max()) for key in start)
    assert moved > 5e-5 and apart < near * moved + 5e-7
    return one, two


if __name__ == "__main__":
    pretend_gpus()
    with clean_exit():
        main(*sys.argv[1:])
