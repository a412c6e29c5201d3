"""Log-probs under the distribution that was sampled: temperature, truncation, and a kept set."""

import math

from .arithmetic import check_gradient, each, mean, softmax
from .cases import CONVENTION, Case, Other, Subject

# --- the kept set ---


def tempered(logits, options):
    """Return a position's logits, divided by the temperature."""
    if options.get("temperature_by") == "product":  # a mistake
        return [logit * options["temperature"] for logit in logits]
    return [logit / options.get("temperature", 1.0) for logit in logits]


def kept_of(logits, options):
    """Return 1 for each token of a position that sampling keeps: top-k, then top-p, then min-p."""
    before = options.get("truncated_before_temperature")  # a mistake
    scores = logits if before else tempered(logits, options)
    everything = [1] * len(scores)
    kept = everything
    if "top_k" in options:
        kept = top_k_of(scores, options)
    if "top_p" in options:
        of = everything if options.get("top_p_of") == "whole" else kept
        kept = meet(kept, top_p_of(scores, of, options))
    if "min_p" in options:
        kept = meet(kept, min_p_of(scores, options))
    return kept


def meet(left, right):
    return [x * y for x, y in zip(left, right, strict=True)]


def top_k_of(scores, options):
    """Keep a token if fewer than k tokens are likelier: all of equals at the boundary."""
    return [int(rank_of(scores, token, options) < options["top_k"]) for token in range(len(scores))]


def rank_of(scores, token, options):
    """Return how many tokens are likelier. With `ties` equals are ordered by their ids."""
    rank = sum(score > scores[token] for score in scores)
    equals = [other for other, score in enumerate(scores) if score == scores[token]]
    if options.get("ties") == "lower_id":
        rank += equals.index(token)
    if options.get("ties") == "higher_id":
        rank += len(equals) - 1 - equals.index(token)
    return rank


def top_p_of(scores, kept, options):
    """Keep a token if the likelier ones have together less than p."""
    chances = masked_softmax(scores, kept)
    result = []
    for token, chance in enumerate(chances):
        rank = rank_of(scores, token, options)
        mass = 0.0  # of the likelier tokens
        for other, share in enumerate(chances):
            if rank_of(scores, other, options) < rank:
                mass += share
        if options.get("top_p_boundary") == "excluded":  # a mistake
            result.append(int(rank == 0 or mass + chance <= options["top_p"]))
        else:
            result.append(int(mass < options["top_p"]))
    return result


def min_p_of(scores, options):
    chances = softmax(scores)
    most = 1.0 if options.get("min_p_of") == "one" else max(chances)
    return [int(chance >= options["min_p"] * most) for chance in chances]


def masked_softmax(scores, kept):
    """Return the softmax over the kept tokens, and 0 for all others."""
    exponentials = [math.exp(score) * cell for score, cell in zip(scores, kept, strict=True)]
    return [exponential / sum(exponentials) for exponential in exponentials]


def sets_of(inputs, options):
    """Return the kept set of each position: the one given, or that of sampling."""
    table = inputs["logits"]
    if options.get("set") == "whole":  # a mistake
        return each(lambda _: 1, table)
    if "kept" in inputs and options.get("set") != "own":
        return inputs["kept"]
    return [kept_of(logits, options) for logits in table]


# --- the operations ---


def logprobs_at(table, tokens, sets, options):
    """Return the log-prob of the token at each position."""
    result = []
    for logits, token, kept in zip(table, tokens, sets, strict=True):
        chance = masked_softmax(tempered(logits, options), kept)[token]
        result.append(math.log(chance))
    return result


def sampled_logprobs(inputs, options):
    """Return the log-probs of tokens under the sampled distribution.

    `gradient` is that of their sum by the logits; a token outside the set has none.
    """
    table = inputs["logits"]
    tokens = inputs["tokens"]
    sets = sets_of(inputs, options)
    gradient = []
    for logits, token, kept in zip(table, tokens, sets, strict=True):
        chances = masked_softmax(tempered(logits, options), kept)
        slope = 1 / options.get("temperature", 1.0)
        if options.get("temperature_by") == "product":
            slope = options["temperature"]
        gradient.append([slope * ((other == token) - p) for other, p in enumerate(chances)])

    def total(logits):
        return sum(logprobs_at(logits, tokens, sets, options))

    check_gradient(total, table, gradient)
    logprobs = logprobs_at(table, tokens, sets, options)
    if options.get("divided_after"):  # a mistake: log p / temperature, which is no distribution
        whole = logprobs_at(table, tokens, sets, {})
        logprobs = [logprob / options["temperature"] for logprob in whole]
        gradient = by_division(table, tokens, options)
    whole = [softmax(tempered(logits, options)) for logits in table]
    mass = [sum(meet(chances, kept)) for chances, kept in zip(whole, sets, strict=True)]
    return {"logprobs": logprobs, "gradient": gradient}, {"kept": sets, "mass": mass}


def by_division(table, tokens, options):
    """Return the gradient of the sum of log p / temperature."""
    rows = []
    for logits, token in zip(table, tokens, strict=True):
        chances = softmax(logits)
        rows.append([((i == token) - p) / options["temperature"] for i, p in enumerate(chances)])
    return rows


def kept_ratios(inputs, options):
    """Return pi / pi_old of each token, both over the set that sampling kept, and their mean."""
    old_table = inputs["old_logits"]
    sets = sets_of({"logits": old_table} | subset(inputs, "kept"), options)
    new_sets = sets
    if options.get("new_set") == "own":  # a mistake
        new_sets = [kept_of(logits, options) for logits in inputs["logits"]]
    if options.get("new_set") == "whole":  # a mistake
        new_sets = each(lambda _: 1, sets)
    ratios = []
    rows = zip(inputs["logits"], old_table, inputs["tokens"], new_sets, sets, strict=True)
    for new, old, token, new_kept, old_kept in rows:
        numerator = masked_softmax(tempered(new, options), new_kept)[token]
        ratios.append(numerator / masked_softmax(tempered(old, options), old_kept)[token])
    return {"ratios": ratios, "mean_ratio": mean(ratios)}, {"kept": sets}


def subset(inputs, name):
    return {name: inputs[name]} if name in inputs else {}


# --- the cases ---

LOGITS = [
    [2.1, 0.3, -1.2, 1.4, -0.5, 0.9, -2.3, 0.1],
    [0.2, 1.9, 1.1, -0.7, 2.4, -1.6, 0.5, -0.1],
    [-0.4, 0.8, 3.6, -1.1, 0.1, 1.3, -0.9, -2.0],
    [1.0, 0.6, 0.7, 0.2, -0.3, 1.2, 0.4, -0.6],
]
TOKENS = [0, 2, 2, 1]
BATCH = {"logits": LOGITS, "tokens": TOKENS}
EQUAL = {  # the third and fourth likeliest tokens of each position are equally likely
    "logits": [
        [2.0, 0.5, 1.5, 0.5, -1.0, 0.0, -0.5, -2.0],
        [0.5, -1.0, 0.5, 2.0, 0.0, 1.5, -2.0, -0.5],
    ],
    "tokens": [2, 3],
}
GIVEN = {  # the set of top-p, one with a token more, a set of one, and no truncation
    "kept": [
        [1, 0, 0, 1, 0, 1, 0, 1],
        [0, 1, 1, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1],
    ],
}
MOVED = [  # the sampled token of the second position falls below the boundary of top-p
    [2.4, 0.2, -1.2, 1.1, -0.5, 1.0, -2.3, 0.1],
    [0.2, 2.5, 0.1, -0.7, 2.6, -1.6, 0.5, -0.1],
    [-0.4, 0.8, 3.4, -1.1, 0.1, 1.5, -0.9, -2.0],
    [1.1, 0.8, 0.7, 0.2, -0.3, 1.1, 0.4, -0.6],
]
V32 = "DeepSeek-V3.2 2512.02556, section 3.1 (Keep Sampling Mask)"
SOFTMAX = "the softmax of logits / temperature over the tokens that sampling keeps"
WHOLE = Other("the whole softmax, as if nothing had been truncated", options={"set": "whole"})
TOP_P_THREADS = [
    "huggingface/trl/issues/6789",
    "huggingface/trl/pull/7269",
    "NovaSky-AI/SkyRL/issues/877",
]


def logprob_case(name, options, inputs=None, **fields):
    """Return a case of log-probs; `source` and `others` are those of `Case`."""
    fields = {"source": SOFTMAX} | fields
    return Case(
        id=f"logprobs/{name}",
        operation=sampled_logprobs,
        inputs_from="four positions",
        inputs=inputs or {},
        options=options,
        **fields,
    )


CASES = [
    logprob_case(
        "temperature",
        {"temperature": 0.6},
        catches="Log-probs of another temperature than that of sampling.",
        others=[
            Other("the temperature is 1", options={"temperature": 1.0}),
            Other("logits times the temperature", options={"temperature_by": "product"}),
            Other(
                "log p divided by the temperature, without a new normalization",
                options={"divided_after": True},
            ),
        ],
    ),
    logprob_case(
        "top-k",
        {"top_k": 3},
        inputs={"tokens": [0, 2, 2, 2]},
        catches="The whole softmax for tokens that were drawn from three.",
        others=[WHOLE],
    ),
    logprob_case(
        "top-p",
        {"temperature": 0.6, "top_p": 0.8},
        inputs={"tokens": [0, 4, 2, 5]},
        source=SOFTMAX + ": a token is kept if the likelier ones have together less than top_p",
        catches="The whole softmax, or a set without the token that crosses the boundary.",
        threads=TOP_P_THREADS,
        others=[
            WHOLE,
            Other(
                "the token that crosses top_p is left out", options={"top_p_boundary": "excluded"}
            ),
            Other(
                "the set is that of temperature 1", options={"truncated_before_temperature": True}
            ),
        ],
    ),
    logprob_case(
        "top-k-top-p",
        {"top_k": 5, "top_p": 0.8},
        inputs={"tokens": [0, 1, 2, 2]},
        rests_on=CONVENTION,
        source=SOFTMAX + ": top-k first, and top-p of what it leaves, renormalized; as in vLLM "
        "and transformers",
        catches="A top-p of the whole softmax, which keeps more tokens.",
        others=[
            WHOLE,
            Other("top-p is of the whole softmax", options={"top_p_of": "whole"}),
        ],
    ),
    logprob_case(
        "min-p",
        {"min_p": 0.2},
        inputs={"tokens": [0, 4, 2, 5]},
        source="min-p 2407.01082: a token is kept if p >= min_p times the largest p",
        catches="A threshold on the probability itself.",
        others=[WHOLE, Other("the threshold is min_p itself", options={"min_p_of": "one"})],
    ),
    logprob_case(
        "ties-top-k",
        {"top_k": 3},
        inputs=EQUAL,
        rests_on=CONVENTION,
        source="a token is kept if fewer than top_k are likelier, so all of equals are, as in "
        "vLLM and transformers; a set given by the engine leaves nothing to decide",
        catches="Exactly k tokens where the k-th and the next are equally likely.",
        others=[Other("of equals the lower ids, k in all", options={"ties": "lower_id"}), WHOLE],
    ),
    logprob_case(
        "ties-top-p",
        {"top_p": 0.75},
        inputs=EQUAL,
        rests_on=CONVENTION,
        source="a token is kept if the likelier ones have together less than top_p, so all of "
        "equals are; where a sort decides, only the engine's set is sure",
        catches="A set that depends on the order in which a sort leaves equals.",
        others=[
            Other("of equals only as many as needed", options={"ties": "lower_id"}),
            WHOLE,
        ],
    ),
    logprob_case(
        "kept-set",
        {"temperature": 0.9, "top_p": 0.8},
        inputs=GIVEN,
        source=V32 + ": the softmax over the set that the engine kept",
        catches="A set computed anew by the trainer, whose logits differ from the engine's.",
        threads=["huggingface/trl/issues/6789", "huggingface/trl/issues/6945"],
        others=[
            Other("the trainer's own top-p set", options={"set": "own"}),
            WHOLE,
            Other("the set without the temperature", options={"temperature": 1.0}),
        ],
    ),
    Case(
        id="logprobs/first-ratio",
        operation=kept_ratios,
        inputs_from="four positions",
        inputs={"old_logits": LOGITS},
        options={"top_p": 0.8},
        source=V32 + ": at pi = pi_old every ratio is 1",
        catches="Ratios of 0.82 on average before the first update: the mass of the kept set.",
        threads=TOP_P_THREADS,
        others=[Other("the new policy's log-prob is the whole softmax's", {"new_set": "whole"})],
    ),
    Case(
        id="logprobs/ratio-leaves-set",
        operation=kept_ratios,
        inputs_from="four positions",
        inputs={"logits": MOVED, "old_logits": LOGITS},
        options={"top_p": 0.8},
        source=V32 + ": the old policy's set for both, also where the new policy would drop "
        "the sampled token",
        catches="A ratio of 0 (log-prob -inf) where the sampled token leaves the new policy's set.",
        others=[
            Other("the new policy's own set: ratio 0 where the token left", {"new_set": "own"}),
            Other("the new policy's log-prob is the whole softmax's", {"new_set": "whole"}),
            Other("the whole softmax for both", {"set": "whole"}),
        ],
    ),
    Case(
        id="logprobs/ratio-kept-set",
        operation=kept_ratios,
        inputs_from="four positions",
        inputs={"logits": MOVED, "old_logits": LOGITS} | GIVEN,
        options={"temperature": 0.9, "top_p": 0.8},
        source=V32 + ": the set that the engine kept, for both",
        catches="A set computed anew, or a set of one token whose ratio is not 1.",
        others=[
            Other("the old policy's own top-p set for both", {"set": "own"}),
            Other("the new policy's own set: ratio 0 where the token left", {"new_set": "own"}),
            Other("the new policy's log-prob is the whole softmax's", {"new_set": "whole"}),
            Other("the whole softmax for both", {"set": "whole"}),
        ],
    ),
]

SUBJECT = Subject(
    name="logprobs",
    about="Log-probs and ratios under the distribution that was sampled, with eight tokens.",
    shared_inputs={"four positions": BATCH},
    cases=CASES,
)
