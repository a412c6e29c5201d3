"""Started by `accelerate launch`: three steps on given pairs, whatever the number of processes, one of them resumed.

pair_worker.py <script> <folder>          writes steps-N-R.pt: weights, metrics, and for dpo.py pairs
"""

import pathlib
import sys

import torch
from accelerate import Accelerator

from common import run
from common.load import PromptSampler, load_data, load_policy, load_tokenizer
from common.masked import Means
from common.pairs import read_pairs
from testbed import script


def step(module, accelerator, model, optimizer, pairs, state, args):
    mine = state.draw(args.pairs_per_step)
    metrics = Means()
    module.update(accelerator, model, optimizer, mine, args, metrics)
    return metrics.reduce(accelerator)


def main(name, folder):
    accelerator = Accelerator(cpu=True)
    rank, processes = accelerator.process_index, accelerator.num_processes
    module, result = script(name), {}
    args = module.Args(pairs_per_step=8, micro_batch_size=6)  # three, three and two pairs; or three and one
    tokenizer = load_tokenizer(args.model_name_or_path)
    if hasattr(module, "rollout"):
        inner = load_policy(args, accelerator)[1]
    else:
        inner = module.load_reward_model(args.model_name_or_path, args, new_head=True).train()
        # At a head of zeros the backbone has no gradient.
        torch.nn.init.normal_(inner.lm.score.weight, generator=torch.Generator().manual_seed(0))
    result["start"] = {key: value.clone() for key, value in inner.state_dict().items()}
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = accelerator.prepare(inner, optimizer)
    given = module.Args(dataset="embedded-pairs", eval_dataset="embedded-pairs")
    pairs = load_data(read_pairs, given, tokenizer)[0][:21]
    assert len({len(pair.chosen) for pair in pairs}) > 5
    if hasattr(module, "rollout"):
        pairs = module.add_ref_logprobs(accelerator, model, pairs, args)
        result["reference"] = torch.tensor([pair[3:] for pair in pairs])
        # Move away from the reference: at a margin of 0, rounding decides whether a pair is right.
        pairs = [pair._replace(ref_chosen=pair.ref_chosen + (3, -3)[i % 3 > 0]) for i, pair in enumerate(pairs)]
    state = PromptSampler(pairs, 0, accelerator)
    accelerator.register_for_checkpointing(state)

    parts = module, accelerator, model, optimizer, pairs, state, args
    result["metrics"] = [step(*parts), step(*parts)]
    accelerator.save_state(str(pathlib.Path(folder) / f"state-{processes}"))
    accelerator.wait_for_everyone()
    result["metrics"].append(step(*parts))
    result["weights"] = {key: value.clone() for key, value in inner.state_dict().items()}
    accelerator.load_state(str(pathlib.Path(folder) / f"state-{processes}"))
    again = step(*parts)
    result["resumed"] = again == result["metrics"][-1] and all(
        torch.equal(value, result["weights"][key]) for key, value in inner.state_dict().items()
    )
    result["eval"] = module.evaluate_pairs(accelerator, model, pairs[:11], args)
    torch.save(result, pathlib.Path(folder) / f"steps-{processes}-{rank}.pt")
    del model, optimizer, inner, parts
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    with run.clean_exit():
        main(*sys.argv[1:])
