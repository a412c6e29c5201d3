"""The loss of TRL's GRPOTrainer for test_policy_losses.py: copy it beside that file as adapter.py.

It is longer than most, since the loss is a method that reads a trainer.
"""

from collections import defaultdict
from types import SimpleNamespace

import torch
from trl import GRPOConfig, GRPOTrainer

LOSS_TYPES = {"tokens": "dapo", "rows": "grpo", "constant": "dr_grpo", "sums": "luspo"}


def loss_and_gradient(logprobs, old_logprobs, advantages, mask, micro_batches, config):
    if config["objective"] != "clip" or len(set(map(len, micro_batches))) > 1:
        return None  # KL-Cov, and micro-batches of different sizes
    table = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (old_logprobs, advantages))
    mask = torch.tensor(mask)
    trainer = trainer_with(config, len(micro_batches))
    total = 0.0
    for rows in micro_batches:
        new = table[rows]
        outputs = new, torch.zeros_like(new), None
        trainer._get_per_token_logps_and_entropies = lambda *_, outputs=outputs, **__: outputs
        prompt = torch.ones(len(rows), 1)
        batch = {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": mask[rows],
            "completion_mask": mask[rows],
            "advantages": advantages[rows],
            "old_per_token_logps": old[rows],
            "num_items_in_batch": mask.sum(),
        }
        total = total + GRPOTrainer._compute_loss(trainer, None, batch)
    total.backward()
    return total.item(), table.grad.tolist()


def trainer_with(config, micro_batches):
    """Return as much of a trainer as its loss reads."""
    args = GRPOConfig(
        "unused",
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_accumulation_steps=micro_batches,
        num_iterations=2,  # otherwise the old log-probs are the new ones
        loss_type=LOSS_TYPES[config["mean"]],
        importance_sampling_level=config["ratio"],
        epsilon=config["clip_low"],
        epsilon_high=config["clip_high"],
        delta=config.get("dual_clip"),
        max_completion_length=config.get("constant", 256),
        off_policy_mask_threshold=config.get("max_divergence"),
    )

    def same(tensor, **_):
        return tensor

    own = {
        "args": args,
        "epsilon_low": args.epsilon,
        "current_gradient_accumulation_steps": micro_batches,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(num_processes=1, gather=same, reduce=same),
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
    }
    return SimpleNamespace(**vars(args) | own)
