"""PPO without its policy loss: rewards, advantages, values and controllers."""

import math

from . import steps
from .arithmetic import check_gradient, clip, each, flat, mean, variance, weighted_sum
from .cases import CONVENTION, Case, Other, Subject


def shaped_rewards(inputs, options):
    """Return token rewards: a KL penalty to the reference, and the score on the last token."""
    coefficient = options["kl_coef"]
    old_logprobs = inputs["old_logprobs"]
    ref_logprobs = inputs["ref_logprobs"]
    rewards = each(lambda old, ref: -coefficient * (old - ref), old_logprobs, ref_logprobs)
    for row, score in zip(rewards, inputs["scores"], strict=True):
        if options.get("score_on_every_token"):
            row[:] = [reward + score for reward in row]
        else:
            row[-1] += score
    return {"rewards": rewards}, {}


def gae(inputs, options):
    """Return advantages by the sum that defines them, and returns; masked tokens are skipped."""
    advantages = []
    returns = []
    rows = zip(inputs["rewards"], inputs["values"], inputs["mask"], strict=True)
    for rewards, values, mask in rows:
        if options.get("masked_tokens_are_steps"):
            row = advantages_of_masked_steps(rewards, values, mask, options)
        else:
            row = advantages_of_row(rewards, values, mask, options)
            recursive = recursive_advantages(rewards, values, mask, options)
            assert all(abs(a - b) < 1e-12 for a, b in zip(row, recursive, strict=True))
        advantages.append(row)
        returns.append([a + v if m else 0.0 for a, v, m in zip(row, values, mask, strict=True)])
    return {"advantages": advantages, "returns": returns}, {}


def advantages_of_row(rewards, values, mask, options):
    """Return sum_k (gamma lambda)^k delta_{t+k} over the unmasked tokens."""
    places = [t for t, counts in enumerate(mask) if counts]
    decay = options["gamma"] * options["lambda"]
    result = [0.0] * len(values)
    for start, place in enumerate(places):
        for k, later in enumerate(places[start:]):
            after = start + k + 1
            next_value = values[places[after]] if after < len(places) else 0.0
            delta = rewards[later] + options["gamma"] * next_value - values[later]
            result[place] += decay**k * delta
    return result


def recursive_advantages(rewards, values, mask, options):
    """Return the same by the usual recursion."""
    decay = options["gamma"] * options["lambda"]
    result = [0.0] * len(values)
    advantage = 0.0
    next_value = 0.0
    for t in reversed(range(len(values))):
        if mask[t]:
            delta = rewards[t] + options["gamma"] * next_value - values[t]
            advantage = delta + decay * advantage
            next_value = values[t]
            result[t] = advantage
    return result


def advantages_of_masked_steps(rewards, values, mask, options):
    """A mistake: a masked token is a step with reward and value 0."""
    masked_rewards = [reward * counts for reward, counts in zip(rewards, mask, strict=True)]
    masked_values = [value * counts for value, counts in zip(values, mask, strict=True)]
    row = recursive_advantages(masked_rewards, masked_values, [1] * len(mask), options)
    return [advantage * counts for advantage, counts in zip(row, mask, strict=True)]


def whiten(inputs, options):
    """Return (advantage - mean) / sqrt(variance + epsilon)."""
    numbers = []
    for row, mask in zip(inputs["advantages"], inputs["mask"], strict=True):
        numbers += [x for x, counts in zip(row, mask, strict=True) if counts]
    if options.get("padding_counts"):
        numbers = flat(inputs["advantages"])
    deviation = math.sqrt(variance(numbers, options["std_ddof"]) + options["eps_of_variance"])
    center = mean(numbers)

    def whitened(x, counts):
        return (x - center) / deviation if counts else 0.0

    return {"advantages": each(whitened, inputs["advantages"], inputs["mask"])}, {}


def squared_errors(value, old, target, options):
    """Return the squared errors of the value and of the clipped value."""
    reach = options["value_clip"]
    held = clip(value, old - reach, old + reach) if reach else value
    return (value - target) ** 2, (held - target) ** 2


def value_token_loss(value, old, target, options):
    pick = min if options.get("smaller_error") else max
    half = 1.0 if options.get("without_half") else 0.5
    return half * pick(squared_errors(value, old, target, options))


def value_token_slope(value, old, target, options):
    plain, held = squared_errors(value, old, target, options)
    inside = not options["value_clip"] or abs(value - old) <= options["value_clip"]
    takes_plain = plain <= held if options.get("smaller_error") else plain >= held
    scale = 2.0 if options.get("without_half") else 1.0
    return scale * (value - target) if inside or takes_plain else 0.0


def value_loss(inputs, options):
    """Return the critic's loss of one optimizer step, and its gradient by the values."""
    values = inputs["values"]
    old = inputs["old_values"]
    returns = inputs["returns"]
    weights = steps.step_weights(inputs, values, options)

    def losses(table):
        return each(lambda v, o, r: value_token_loss(v, o, r, options), table, old, returns)

    def loss_at(table):
        return weighted_sum(weights, losses(table))

    slopes = each(lambda v, o, r: value_token_slope(v, o, r, options), values, old, returns)
    gradient = each(lambda weight, slope: weight * slope, weights, slopes)
    check_gradient(loss_at, values, gradient)
    worked = {"token_losses": losses(values), "weights": weights}
    return {"loss": loss_at(values), "gradient": gradient}, worked


def adaptive_kl(inputs, options):
    """Return the KL coefficient after a rollout, for each measured KL from the same start."""
    result = []
    for measured in inputs["kl"]:
        error = measured / options["target"] - 1
        if not options.get("without_clip"):
            error = clip(error, -0.2, 0.2)
        samples = options.get("counted", options["samples"])
        result.append(inputs["kl_coef"] * (1 + error * samples / options["horizon"]))
    return {"kl_coef": result}, {}


def adaptive_penalty(inputs, options):
    """Return the coefficient of PPO's penalty after a rollout: halved, doubled or unchanged."""
    result = []
    for measured in inputs["kl"]:
        factor = 1.0
        if measured < options["target"] / 1.5:
            factor = 0.5
        elif measured > options["target"] * 1.5:
            factor = 2.0
        if options.get("inverted"):
            factor = 1 / factor
        result.append(inputs["penalty_coef"] * factor)
    return {"penalty_coef": result}, {}


VALUES = {
    "values": [[0.9, 0.15], [-0.3, 0.5, 0.35], [0.05]],
    "old_values": [[0.5, 0.1], [0.2, 0.5, 0.8], [0.4]],
    "returns": [[1.0, 0.0], [0.4, 0.8, 0.9], [0.3]],
}
ROLLOUT = {
    "rewards": [[0.02, -0.01, 0.05, -0.03, 1.0], [0.1, 0.7, -0.6, 0.0, -0.5]],
    "values": [[0.3, 0.1, 0.4, 0.6, 0.2], [0.2, 0.9, 0.8, 0.1, 0.5]],
}
GAE_PAPER = "GAE 1506.02438 Eq. 16; after the last token the value is 0"
DISCOUNTS = {"gamma": 0.99, "lambda": 0.95}
ROUNDED = {  # a trainer may keep its advantages in float32
    "float64": {"rtol": 1e-6, "atol": 1e-7},
    "float32": {"rtol": 2e-5, "atol": 2e-6},
}
RAW = {
    "advantages": [[0.7, -0.2, 1.1, 0.0], [-0.9, 0.3, 0.0, 0.0]],
    "mask": [[1, 1, 1, 0], [1, 1, 0, 0]],
}


def value_case(name, inputs=None, options=None, **fields):
    """Return a case of a critic's step; `options` and `inputs` override the defaults."""
    return Case(
        id=name,
        operation=value_loss,
        inputs=VALUES | (inputs or {}),
        options={"value_clip": 0.2, "mean": "tokens"} | (options or {}),
        rests_on=CONVENTION,
        source="OpenAI baselines, ppo2: half of the larger squared error, mean over tokens",
        **fields,
    )


def gae_case(name, mask, options=DISCOUNTS, **fields):
    """Return a case of the advantages of `ROLLOUT` under a mask."""
    inputs = ROLLOUT | {"mask": mask}
    return Case(id=name, operation=gae, inputs=inputs, options=options, source=GAE_PAPER, **fields)


def whiten_case(ddof, source):
    return Case(
        id=f"ppo/whiten-ddof-{ddof}",
        operation=whiten,
        inputs=RAW,
        options={"std_ddof": ddof, "eps_of_variance": 1e-8},
        rests_on=CONVENTION,
        source=f"{source}; over unmasked tokens",
        catches="Padding in mean and std, or another ddof.",
        threads=["NovaSky-AI/SkyRL/issues/1305", "ray-project/ray/pull/63900"],
        tolerance=ROUNDED,
        others=[
            Other("padding counts", options={"padding_counts": True}),
            Other(f"the std has ddof {1 - ddof}", options={"std_ddof": 1 - ddof}),
        ],
    )


CASES = [
    Case(
        id="ppo/kl-in-reward",
        operation=shaped_rewards,
        inputs={
            "old_logprobs": [[-1.1, -0.4, -2.2, -0.15], [-0.7, -1.9]],
            "ref_logprobs": [[-1.3, -0.5, -1.6, -0.2], [-0.9, -1.4]],
            "scores": [0.8, -0.3],
        },
        options={"kl_coef": 0.1},
        source="InstructGPT 2203.02155; DeepSeekMath 2402.03300 Eq. 2",
        catches="A score that is not on the last token, or a KL with the wrong sign.",
        threads=["huggingface/trl/issues/3750", "huggingface/trl/pull/5338"],
        others=[
            Other("the KL has the wrong sign", options={"kl_coef": -0.1}),
            Other("the score is on every token", options={"score_on_every_token": True}),
            Other("the KL is left out", options={"kl_coef": 0.0}),
        ],
    ),
    gae_case(
        "ppo/gae",
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        catches="A value after the end, or that of a padding token.",
        others=[
            Other("lambda is 1", options={"lambda": 1.0}),
            Other("gamma is 1", options={"gamma": 1.0}),
            Other("padding counts", inputs={"mask": [[1] * 5, [1] * 5]}),
        ],
    ),
    gae_case(
        "ppo/gae-lambda-1",
        [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        options={"gamma": 1.0, "lambda": 1.0},
        catches="A sum of rewards that does not telescope.",
    ),
    gae_case(
        "ppo/gae-observation-tokens",
        [[1, 1, 0, 0, 1], [1, 0, 1, 1, 1]],
        catches="Tokens of a tool, which the policy did not write, taken as steps of the episode.",
        threads=["verl-project/verl/pull/2337", "radixark/miles/pull/1827"],
        others=[
            Other(
                "a masked token is a step with reward 0 and value 0",
                options={"masked_tokens_are_steps": True},
            ),
            Other("masked tokens count", inputs={"mask": [[1] * 5, [1] * 5]}),
        ],
    ),
    whiten_case(1, "TRL and verl have ddof 1"),
    whiten_case(0, "OpenAI's lm-human-preferences has ddof 0"),
    value_case(
        "ppo/value-clip",
        catches="The smaller of the two errors, or a missing factor 1/2.",
        threads=["ray-project/ray/issues/2233", "implementation-matters/code-for-paper/issues/1"],
        others=[
            Other("the smaller of the two errors", options={"smaller_error": True}),
            Other("the factor 1/2 is missing", options={"without_half": True}),
            Other("there is no clip", options={"value_clip": 0.0}),
        ],
    ),
    value_case(
        "ppo/value-plain",
        options={"value_clip": 0.0},
        catches="A clip despite value_clip 0, or a missing factor 1/2.",
        threads=["ikostrikov/pytorch-a2c-ppo-acktr-gail/issues/135"],
        others=[Other("the factor 1/2 is missing", options={"without_half": True})],
    ),
    Case(
        id="ppo/adaptive-kl",
        operation=adaptive_kl,
        inputs={"kl_coef": 0.2, "kl": [9.0, 5.4, 1.0]},
        options={"target": 6.0, "horizon": 10000, "samples": 256},
        source="Fine-Tuning Language Models from Human Preferences 1909.08593, section 2.2",
        catches="An error that is not clipped at 0.2, or a count of steps instead of samples.",
        threads=["verl-project/verl/issues/1984"],
        others=[
            Other("the error is not clipped", options={"without_clip": True}),
            Other("an optimizer step counts as one sample", options={"counted": 1}),
        ],
    ),
    Case(
        id="ppo/adaptive-penalty",
        operation=adaptive_penalty,
        inputs={"penalty_coef": 1.0, "kl": [0.02, 0.011, 0.001]},
        options={"target": 0.01},
        source="PPO 1707.06347, section 4",
        catches="A coefficient that shrinks when the KL is too large.",
        others=[Other("the rule is inverted", options={"inverted": True})],
    ),
]

SUBJECT = Subject(
    name="ppo",
    about="PPO without its policy loss: token rewards, advantages, values and controllers.",
    cases=CASES,
)
