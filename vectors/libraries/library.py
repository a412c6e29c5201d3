"""What the adapters share: operations that the libraries compute with calls of their own."""

import ast

from tensors import Rows, flat, grouped, ones_like, padded, rows_like, step_loss

NO_FUNCTION = "no such function"
LOGITS = ("logits", "old_logits", "ref_logits")


class NotOfferedError(Exception):
    """The library cannot compute this. The message says why."""


def refuse_if(condition, reason):
    if condition:
        raise NotOfferedError(reason)


class Library:
    """A library, with a method (inputs, options) -> answer for each operation that it has.

    A subclass has `name`, `means` {mean: its name} and `estimators` {(baseline, deviation): its
    name}, and computes single tensors in `kl` and `advantages`.
    """

    settings = None  # those of settings.toml; by default those that a case needs
    objectives = ("clip",)
    ratios = ("token", "sequence")
    kl_estimators = ("k1", "k2", "k3", "k3_weighted")
    expected_kl_estimators = ()  # more of them, whose gradient is right only in expectation
    group_size = None  # the option that sets one size for all groups
    needs_rewards = None  # why all rows must have a reward

    def answer(self, case):
        """Return the answer to a case, or {"not_offered": why}."""
        operation = getattr(self, case["operation"], None)
        if operation is None:
            return {"not_offered": NO_FUNCTION}
        try:
            return operation(case["inputs"], case["options"])
        except NotOfferedError as reason:
            return {"not_offered": str(reason)}

    # --- settings ---

    def parsed(self, settings):
        """Return {name: value} of settings such as beta=0.04."""
        values = {}
        for setting in settings:
            name, _, text = setting.partition("=")
            try:
                values[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                values[name] = text
        return values

    def chosen(self, needed):
        """Return the settings from settings.toml, or else those that a case needs."""
        return needed if self.settings is None else self.settings

    # --- operations ---

    def group_advantages(self, inputs, options):
        groups = inputs["rewards"]
        kind = baseline, deviation = options["baseline"], options["deviation"]
        is_known = kind in self.estimators
        refuse_if(not is_known, f"no estimator has baseline {baseline} and deviation {deviation}")
        has_sizes = self.group_size and len(set(map(len, groups))) > 1
        refuse_if(has_sizes, f"all groups have the same size, {self.group_size}")
        refuse_if(self.needs_rewards and None in flat(groups), self.needs_rewards)
        advantages = self.advantages(groups, self.estimators[kind], options)
        return {"advantages": grouped(advantages, groups)}

    def kl_tokens(self, inputs, options):
        self.refuse_kl(options["estimator"])
        table = inputs["logprobs"]
        logprobs = padded(table).requires_grad_()
        old = padded(inputs.get("old_logprobs", table))
        value = self.kl(logprobs, old, padded(inputs["ref_logprobs"]), options["estimator"])
        value.sum().backward()
        return {"value": rows_like(value, table), "gradient": rows_like(logprobs.grad, table)}

    def kl_expected_gradient(self, inputs, options):
        """Return the expected gradient by the logits, over tokens drawn from the old policy."""
        estimator = options["estimator"]
        if estimator not in self.expected_kl_estimators:
            self.refuse_kl(estimator)
        logits, old, ref = (padded([inputs[name]]) for name in LOGITS)
        logits.requires_grad_()
        logprobs, old, ref = (tensor.log_softmax(dim=1) for tensor in (logits, old, ref))
        (self.kl(logprobs, old, ref, estimator) * old.exp()).sum().backward()
        return {"gradient": logits.grad[0].tolist()}

    # --- refusals ---

    def refuse_step(self, inputs, options):
        """Refuse a step whose objective, ratio, mean or KL the library does not have."""
        objective, ratio, mean = (options[name] for name in ("objective", "ratio", "mean"))
        has_objective = objective in self.objectives
        refuse_if(not has_objective, f"no loss has the objective {objective}")
        refuse_if("max_ratio" in options, "no loss has DCPO's clip")
        refuse_if(ratio not in self.ratios, f"no loss has the ratio {ratio}")
        refuse_if(mean not in self.means, f"no loss has a mean over {mean}")
        if "kl" in options:
            self.refuse_kl(options["kl"]["estimator"])
        refuse_if("scored" in inputs, "all rows must have a reward")

    def refuse_kl(self, estimator):
        refuse_if(estimator not in self.kl_estimators, f"no KL estimator {estimator}")


class PPOLibrary(Library):
    """A library with PPO: `token_rewards`, `critic_advantages`, `whitened` and `value_losses`."""

    ddof = 1  # of whitening

    def shaped_rewards(self, inputs, options):
        table = inputs["old_logprobs"]
        old = padded(table)
        ref = padded(inputs["ref_logprobs"])
        mask = padded(ones_like(table))
        rewards = self.token_rewards(old, ref, inputs["scores"], mask, options["kl_coef"])
        return {"rewards": rows_like(rewards, table)}

    def gae(self, inputs, options):
        rewards, values, mask = (padded(inputs[name]) for name in ("rewards", "values", "mask"))
        advantages, returns = self.critic_advantages(
            rewards, values, mask, options["gamma"], options["lambda"]
        )
        return {"advantages": (advantages * mask).tolist(), "returns": (returns * mask).tolist()}

    def whiten(self, inputs, options):
        refuse_if(options["std_ddof"] != self.ddof, f"the std has ddof {self.ddof}")
        mask = padded(inputs["mask"])
        whitened = self.whitened(padded(inputs["advantages"]), mask, options["eps_of_variance"])
        return {"advantages": (whitened * mask).tolist()}

    def value_loss(self, inputs, options):
        values = padded(inputs["values"]).requires_grad_()
        table = Rows(
            values=values,
            old=padded(inputs["old_values"]),
            returns=padded(inputs["returns"]),
            mask=padded(ones_like(inputs["values"])).bool(),
        )

        def losses_of(parts, processes):
            return self.value_losses(parts, processes, options)

        loss = step_loss(inputs, table, losses_of)
        return {"loss": loss, "gradient": rows_like(values.grad, inputs["values"])}
