"""Would the test vectors have found the denominators of former versions? It prints their answers.

    pip install --no-deps --target runs/former/trl trl==0.16.0
    pip install --no-deps --target runs/former/verl verl==0.6.1
    pip install --no-deps --target runs/former/openrlhf openrlhf==0.9.10
    python benchmarks/conventions/history.py runs/former --write docs/conventions.md

Each version's own statements compute the loss of a micro-batch. What is then divided by the number
of micro-batches, by the Trainer of the time and by DeepSpeed, stands here.
"""

import argparse
import pathlib
from collections import defaultdict
from types import SimpleNamespace

import torch

import ask_verl
from report import NONE, OTHER, check, verdict_of, write
from sources import Source, version_in
from tensors import NotOfferedError, Step, step_answer


class TRL:
    def __init__(self, packages):
        self.name = f"TRL {version_in(packages / 'trl', 'trl')}"
        source = Source(packages / "trl" / "trl" / "trainer" / "grpo_trainer.py")
        self.compute_loss = source.method("compute_loss", {"torch": torch})

    def share(self, part, options, process):
        """What one micro-batch of `process` adds to the loss of the step."""
        if options["mean"] != "tokens" or options["ratio"] != "token" or "dual_clip" in options:
            raise NotOfferedError("its only loss is a token mean")
        refuse_uneven(process)
        trainer = SimpleNamespace(
            beta=options.get("kl", {}).get("coef", 0.0),
            epsilon_low=options["clip_low"],
            epsilon_high=options["clip_high"],
            num_iterations=2,
            control=SimpleNamespace(should_evaluate=False),
            accelerator=SimpleNamespace(gather_for_metrics=lambda tensor: tensor),
            _get_per_token_logps=lambda *given: part.logprobs,
            _metrics={"train": defaultdict(list)},
        )
        prompt = torch.ones(len(part.logprobs), 1)
        batch = {
            "prompt_ids": prompt,
            "prompt_mask": prompt,
            "completion_ids": torch.zeros_like(part.logprobs),
            "completion_mask": part.mask.long(),
            "advantages": part.advantages[:, 0],
            "old_per_token_logps": part.old,
            "ref_per_token_logps": part.ref,
        }
        return self.compute_loss(trainer, None, batch) / len(process)


class Verl:
    def __init__(self, packages):
        self.name = f"verl {version_in(packages / 'verl', 'verl')}"
        folder = packages / "verl" / "verl"
        helpers = Source(folder / "utils" / "torch_functional.py")
        means = helpers.definitions({"torch": torch}, "masked_sum", "masked_mean")
        self.core = ask_verl.load_core(folder, SimpleNamespace(**means))
        actor = Source(folder / "workers" / "actor" / "dp_actor.py")
        method, last = "update_policy", "if self.config.use_dynamic_bsz"
        self.scale = actor.statements(method, "entropy_coeff =", last)
        self.loss = actor.statements(method, "calculate_entropy = False", last)

    def share(self, part, options, process):
        if options["mean"] not in ("tokens", "rows") or "max_ratio" in options:
            raise NotOfferedError("not asked")
        config = ask_verl.actor_config(options)
        config.use_dynamic_bsz = len(set(map(len, process))) > 1
        config.ppo_mini_batch_size = sum(map(len, process))
        actor = SimpleNamespace(
            config=config,
            gradient_accumulation=len(process),
            _forward_micro_batch=lambda *given, **options: (None, part.logprobs),
        )
        names = {name: getattr(self.core, name) for name in ("agg_loss", "get_policy_loss_fn", "kl_penalty")}
        names |= {
            "self": actor,
            "temperature": 1.0,
            "on_policy": False,
            "model_inputs": {"old_log_probs": part.old, "ref_log_prob": part.ref},
            "response_mask": part.mask,
            "advantages": part.advantages,
            "micro_batch_metrics": {},
        }
        exec(self.scale, names)
        exec(self.loss, names)
        return names["loss"]


class OpenRLHF:
    def __init__(self, packages):
        self.name = f"OpenRLHF {version_in(packages / 'openrlhf', 'openrlhf')}"
        folder = packages / "openrlhf" / "openrlhf"
        helpers = Source(folder / "models" / "utils.py")
        self.helpers = helpers.definitions({"torch": torch}, "compute_approx_kl", "masked_mean")
        losses = Source(folder / "models" / "loss.py")
        self.losses = losses.whole({"masked_mean": self.helpers["masked_mean"]}, ["openrlhf"])
        actor = Source(folder / "trainer" / "ray" / "ppo_actor.py")
        self.loss_statement = actor.statements("__init__", "self.actor_loss_fn =")
        self.training_step = actor.statements("training_step", "actor_loss, ", "loss = actor_loss")

    def share(self, part, options, process):
        by_token = options["mean"] == "tokens" and options["ratio"] == "token"
        by_row = options["mean"] == "rows" and options["ratio"] == "sequence"
        if not (by_token or by_row):
            raise NotOfferedError("PPO has a token mean, and GSPO a mean over rows")
        refuse_uneven(process)
        kl = options.get("kl") or {}
        args = SimpleNamespace(
            eps_clip_low_high=(options["clip_low"], options["clip_high"]),
            dual_clip=options.get("dual_clip"),
            policy_loss_type="gspo" if by_row else "ppo",
            enable_vllm_is_correction=False,
            vllm_is_correction_type="tis",
            use_kl_loss=bool(kl),
            init_kl_coef=kl.get("coef", 0.0),
            kl_estimator=kl.get("estimator"),
        )
        trainer = SimpleNamespace(args=args)
        exec(self.loss_statement, {"self": trainer, "PolicyLoss": self.losses["PolicyLoss"]})
        mask = part.mask.double()
        names = {
            "self": trainer,
            "torch": torch,
            "action_log_probs": part.logprobs,
            "old_action_log_probs": part.old,
            "advantages": part.advantages,
            "base_action_log_probs": part.ref,
            "experience": SimpleNamespace(action_mask=mask, rollout_log_probs=None, info={}),
            "kl_ctl": args.init_kl_coef,
            **self.helpers,
        }
        exec(self.training_step, names)
        return names["loss"] / len(process)


def refuse_uneven(process):
    if len(set(map(len, process))) > 1:
        raise NotOfferedError("micro-batches have one size")


def answer(version, case):
    inputs, options = case["inputs"], case["options"]
    if "entropies" in inputs or "scored" in inputs or case["operation"] != "policy_step":
        return {"not_offered": "not asked"}
    step = Step.of(inputs)
    losses = []
    try:
        for process in step.processes:
            shares = [version.share(step.piece(rows), options, process) for rows in process]
            losses.append(sum(shares))
    except NotOfferedError as reason:
        return {"not_offered": str(reason)}
    return step_answer(inputs, step.logprobs, losses)


def table(versions, cases):
    lines = ["| case | " + " | ".join(version.name for version in versions) + " |"]
    lines.append("|---" * (len(versions) + 1) + "|")
    for name, case in cases.items():
        verdicts = [verdict_of(case, answer(version, case)) for version in versions]
        if all(verdict == NONE for verdict, _ in verdicts):
            continue
        cells = []
        for verdict, text in verdicts:
            if verdict == OTHER:
                verdict = f"**other**: {text.removeprefix('it follows: this is ')}"
            cells.append(verdict)
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", type=pathlib.Path, help="the folder with trl, verl, openrlhf")
    parser.add_argument("--write", type=pathlib.Path, metavar="PAGE", help="put the table there")
    options = parser.parse_args()
    versions = [library(options.packages) for library in (TRL, Verl, OpenRLHF)]
    cases = check.load_cases()
    cut = {name: case for name, case in cases.items() if name.startswith("splits/")}
    write(options.write, "history.py", table(versions, cut))


if __name__ == "__main__":
    main()
