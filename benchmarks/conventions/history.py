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

import ask_openrlhf
import ask_trl
import ask_verl
from report import NONE, OTHER, check, verdict_of, write
from sources import Source, version_in
from tensors import NotOfferedError, policy_answer, refuse_if

ONE_SIZE = "micro-batches have one size"


class TRL:
    def __init__(self, packages):
        self.name = f"TRL {version_in(packages / 'trl', 'trl')}"
        source = Source(packages / "trl" / "trl" / "trainer" / "grpo_trainer.py")
        self.compute_loss = source.method("compute_loss")

    def share(self, part, sizes, options):
        """What a micro-batch adds to the loss of a process, whose micro-batches have `sizes`."""
        by_token = options["mean"] == "tokens" and options["ratio"] == "token"
        is_its_loss = by_token and "dual_clip" not in options
        refuse_if(not is_its_loss, "its only loss is a token mean")
        refuse_if(len(set(sizes)) > 1, ONE_SIZE)
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
        batch = ask_trl.batch_of(part) | {"advantages": part.advantages[:, 0]}
        return self.compute_loss(trainer, None, batch) / len(sizes)


class Verl:
    def __init__(self, packages):
        self.name = f"verl {version_in(packages / 'verl', 'verl')}"
        folder = packages / "verl" / "verl"
        helpers = Source(folder / "utils" / "torch_functional.py")
        self.core = ask_verl.load_core(folder, helpers.definitions("masked_sum", "masked_mean"))
        actor = Source(folder / "workers" / "actor" / "dp_actor.py")
        method, last = "update_policy", "if self.config.use_dynamic_bsz"
        self.scale = actor.statements(method, "entropy_coeff =", last)
        self.loss = actor.statements(method, "calculate_entropy = False", last)

    def share(self, part, sizes, options):
        is_asked = options["mean"] in ("tokens", "rows") and "max_ratio" not in options
        refuse_if(not is_asked, "not asked")
        config = ask_verl.actor_config(options)
        config.use_dynamic_bsz = len(set(sizes)) > 1
        config.ppo_mini_batch_size = sum(sizes)
        actor = SimpleNamespace(
            config=config,
            gradient_accumulation=len(sizes),
            _forward_micro_batch=lambda *given, **options: (None, part.logprobs),
        )
        names = self.scale(
            self=actor,
            temperature=1.0,
            on_policy=False,
            model_inputs={"old_log_probs": part.old, "ref_log_prob": part.ref},
            response_mask=part.mask,
            advantages=part.advantages,
            micro_batch_metrics={},
            agg_loss=self.core.agg_loss,
            get_policy_loss_fn=self.core.get_policy_loss_fn,
            kl_penalty=self.core.kl_penalty,
        )
        return self.loss(**vars(names)).loss


class OpenRLHF:
    def __init__(self, packages):
        self.name = f"OpenRLHF {version_in(packages / 'openrlhf', 'openrlhf')}"
        folder = packages / "openrlhf" / "openrlhf"
        helpers = Source(folder / "models" / "utils.py")
        self.helpers = helpers.definitions("compute_approx_kl", "masked_mean")
        losses = Source(folder / "models" / "loss.py")
        self.losses = losses.whole(["openrlhf"], masked_mean=self.helpers.masked_mean)
        actor = Source(folder / "trainer" / "ray" / "ppo_actor.py")
        self.loss_statement = actor.statements("__init__", "self.actor_loss_fn =")
        self.training_step = actor.statements("training_step", "actor_loss, ", "loss = actor_loss")

    def share(self, part, sizes, options):
        by_token = options["mean"] == "tokens" and options["ratio"] == "token"
        by_row = options["mean"] == "rows" and options["ratio"] == "sequence"
        is_offered = by_token or by_row
        refuse_if(not is_offered, "PPO has a token mean, and GSPO a mean over rows")
        refuse_if(len(set(sizes)) > 1, ONE_SIZE)
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
        self.loss_statement(self=trainer, PolicyLoss=self.losses.PolicyLoss)
        names = self.training_step(
            self=trainer,
            kl_ctl=args.init_kl_coef,
            **vars(self.helpers),
            **ask_openrlhf.tensors_of(part),
        )
        return names.loss / len(sizes)


def answer(version, case):
    inputs, options = case["inputs"], case["options"]
    if "entropies" in inputs or "scored" in inputs or case["operation"] != "policy_step":
        return {"not_offered": "not asked"}

    def losses_of(parts, processes):
        sizes = [len(part.mask) for part in parts]
        return [version.share(part, sizes, options) for part in parts]

    try:
        return policy_answer(inputs, losses_of)
    except NotOfferedError as reason:
        return {"not_offered": str(reason)}


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
