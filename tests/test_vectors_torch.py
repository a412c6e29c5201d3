"""The cases of sampling, selection and distillation, recomputed with torch and transformers."""

import pytest
import torch
from transformers import generation

from vectors import check

CASES = check.load_cases()
WARPERS = {
    "temperature": generation.TemperatureLogitsWarper,
    "top_k": generation.TopKLogitsWarper,
    "top_p": generation.TopPLogitsWarper,
    "min_p": generation.MinPLogitsWarper,
}


def answers_to(operation):
    """The cases of an operation, as parameters of a test."""
    names = [name for name, case in CASES.items() if case["operation"] == operation]
    return pytest.mark.parametrize("name", names)


def double(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def leaf(numbers):
    return double(numbers).requires_grad_()


def same(name, answer):
    assert check.compare(CASES[name], answer) == (check.SAME, "")


# --- sampled distributions ---


def warped(logits, options, names=tuple(WARPERS)):
    """Return the logits that transformers samples from, with -inf for dropped tokens."""
    for name in names:
        if name in options:
            logits = WARPERS[name](options[name])(None, logits)
    return logits


def kept_set(inputs, logits, options):
    if "kept" in inputs:
        return torch.tensor(inputs["kept"]).bool()
    return warped(logits.detach(), options).isfinite()


def chosen_logprobs(logits, tokens, kept, options):
    scores = warped(logits, options, ["temperature"]).masked_fill(~kept, -torch.inf)
    return scores.log_softmax(dim=1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@answers_to("sampled_logprobs")
def test_logprobs_match_transformers(name):
    case = CASES[name]
    logits = leaf(case["inputs"]["logits"])
    kept = kept_set(case["inputs"], logits, case["options"])
    logprobs = chosen_logprobs(logits, case["inputs"]["tokens"], kept, case["options"])
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    answer = {"logprobs": logprobs.tolist(), "gradient": gradient.tolist()}
    if name == "logprobs/ties-top-p":  # for ties, a sort decides which transformers keeps
        verdict = check.judge(CASES[name], answer)
        assert verdict.kind == check.OTHER
        assert kept.sum().item() < double(case["worked"]["kept"]).sum().item()
        return
    same(name, answer)


@answers_to("kept_ratios")
def test_ratios_match_transformers(name):
    case = CASES[name]
    tokens = case["inputs"]["tokens"]
    old = double(case["inputs"]["old_logits"])
    kept = kept_set(case["inputs"], old, case["options"])
    before = chosen_logprobs(old, tokens, kept, case["options"])
    new = chosen_logprobs(double(case["inputs"]["logits"]), tokens, kept, case["options"])
    ratios = (new - before).exp()
    same(name, {"ratios": ratios.tolist(), "mean_ratio": ratios.mean().item()})


# --- one optimizer step ---


class Step:
    """A step's tensors as flat lists of tokens; `row` says whose each token is."""

    def __init__(self, case):
        inputs, self.options = case["inputs"], case["options"]
        self.table = inputs["logprobs"]
        lengths = torch.tensor([len(row) for row in self.table])
        self.rows = len(lengths)
        self.row = torch.arange(self.rows).repeat_interleave(lengths)
        self.length = lengths[self.row]
        self.logprobs = leaf(check.flat(self.table))
        self.log_ratio = self.logprobs - double(check.flat(inputs["old_logprobs"]))
        advantages = inputs["advantages"]
        if not isinstance(advantages[0], list):
            advantages = [advantages[row] for row in self.row]
        self.advantages = double(check.flat(advantages))
        self.entropies = double(check.flat(inputs["entropies"])) if "entropies" in inputs else None

    def mean_of_row(self, numbers):
        """The mean over its row, at each token."""
        sums = torch.zeros(self.rows, dtype=torch.float64).index_add(0, self.row, numbers)
        return sums[self.row] / self.length

    def clipped(self, log_ratio):
        ratio = log_ratio.exp()
        bounds = 1 - self.options["clip_low"], 1 + self.options["clip_high"]
        return -torch.minimum(ratio * self.advantages, ratio.clamp(*bounds) * self.advantages)

    def answer(self, losses):
        mean = self.options["mean"]
        weights = {"tokens": len(losses), "rows": self.rows * self.length, "sums": self.rows}[mean]
        loss = (losses / weights).sum()
        (gradient,) = torch.autograd.grad(loss, self.logprobs)
        parts = gradient.split([len(row) for row in self.table])
        return {"loss": loss.item(), "gradient": [part.tolist() for part in parts]}


@answers_to("top_entropy_step")
def test_the_highest_entropies_of_the_step(name):
    step = Step(CASES[name])
    threshold = torch.quantile(step.entropies, 1 - step.options["share"])
    same(name, step.answer(step.clipped(step.log_ratio) * (step.entropies >= threshold)))


@answers_to("covariance_step")
def test_the_highest_covariances_of_the_step(name):
    step = Step(CASES[name])
    deviations = [numbers - numbers.mean() for numbers in (step.logprobs.detach(), step.advantages)]
    covariances = deviations[0] * deviations[1]
    count = max(1, int(step.options["share"] * len(covariances)))
    penalty = torch.zeros_like(covariances)
    penalty[covariances.topk(count).indices] = step.options["penalty_coef"]
    losses = -step.log_ratio.exp() * step.advantages + penalty * step.log_ratio.abs()
    same(name, step.answer(losses))


@answers_to("off_policy_mask_step")
def test_rows_that_the_policy_left(name):
    step = Step(CASES[name])
    divergence = step.mean_of_row(-step.log_ratio.detach())
    masked = (step.mean_of_row(step.advantages) < 0) & (divergence > step.options["max_divergence"])
    same(name, step.answer(step.clipped(step.log_ratio) * ~masked))


@answers_to("sampler_square_step")
def test_the_square_has_no_mask(name):
    step = Step(CASES[name])
    ratio = step.log_ratio.exp()
    moved = (step.logprobs.exp() * (1 - 1 / ratio)).detach()
    beyond = (moved.abs() > step.options["max_divergence"]) & (moved * step.advantages > 0)
    square = step.options["penalty_coef"] * step.log_ratio.square()
    same(name, step.answer(-ratio * step.advantages * ~beyond + square))


@pytest.mark.parametrize("name", ["variants/luspo", "variants/luspo-first-step"])
def test_a_row_times_its_length(name):
    step = Step(CASES[name])
    same(name, step.answer(step.clipped(step.mean_of_row(step.log_ratio))))


@answers_to("length_penalized_advantages")
def test_penalty_grows_with_pass_rate(name):
    case = CASES[name]
    rewards, lengths = (double(case["inputs"][key]) for key in ("rewards", "lengths"))
    rate = case["options"]["length_coef"] * rewards.mean(dim=1, keepdim=True)
    shaped = rewards - rate * lengths / lengths.amax(dim=1, keepdim=True)
    same(name, {"advantages": (shaped - shaped.mean(dim=1, keepdim=True)).tolist()})


# --- distillation ---


def outcomes(logprobs, chosen, tail):
    """Return the log-probs of the chosen tokens and, with a tail, of all others together."""
    kept = logprobs.gather(1, chosen)
    if tail == "renormalized":
        return kept.log_softmax(dim=1)
    return torch.cat([kept, (1 - kept.exp().sum(dim=1, keepdim=True)).log()], dim=1)


def topk_kl(policy, teacher, options):
    owner = teacher if options["top_k_of"] == "teacher" else policy
    chosen = owner.topk(options["top_k"], dim=1).indices
    both = [outcomes(logprobs, chosen, options["tail"]) for logprobs in (teacher, policy)]
    target, own = both if options["direction"] == "forward" else both[::-1]
    return torch.nn.functional.kl_div(own, target, reduction="none", log_target=True).sum(dim=1)


@answers_to("topk_kl")
def test_a_topk_kl_with_a_tail(name):
    inputs = CASES[name]["inputs"]
    logits = leaf(inputs["logits"])
    teacher = double(inputs["teacher_logits"]).log_softmax(dim=1)
    values = topk_kl(logits.log_softmax(dim=1), teacher, CASES[name]["options"])
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    same(name, {"loss": values.tolist(), "gradient": gradient.tolist()})
    whole = topk_kl(logits.log_softmax(dim=1), teacher, CASES[name]["options"] | {"top_k": 7})
    assert (0 <= values).all() and (values <= whole + 1e-12).all()


@answers_to("distill_expected_gradient")
def test_advantage_is_gradient_of_the_kl(name):
    inputs, options = CASES[name]["inputs"], CASES[name]["options"]
    logits = leaf([inputs["logits"]])
    policy, teacher = (
        logits.log_softmax(dim=1),
        double([inputs["teacher_logits"]]).log_softmax(dim=1),
    )
    advantages = teacher - policy
    if options["advantage"] == "topk_kl":
        advantages = -topk_kl(policy, teacher, options)
    expectation = (policy.exp().detach() * -advantages.detach() * policy).sum()
    (gradient,) = torch.autograd.grad(expectation, logits)
    same(name, {"gradient": gradient[0].tolist()})
