"""Completion masks from token ids."""

from .cases import CONVENTION, Case, Other, Subject


def completion_mask(inputs, options):
    """Return masks of 1 through the first stop token; a row without one is truncated."""
    masks = []
    truncated = []
    for tokens in inputs["tokens"]:
        length = counted_tokens(tokens, options)
        masks.append([int(t < length) for t in range(len(tokens))])
        seen = tokens[-1:] if options.get("truncated_by_last") else tokens
        truncated.append(not any(token in options["stop_tokens"] for token in seen))
    if options.get("by_pad"):
        masks = [by_pad(tokens, options["pad_token"]) for tokens in inputs["tokens"]]
    return {"mask": masks, "truncated": truncated}, {}


def counted_tokens(tokens, options):
    for place, token in enumerate(tokens):
        if token in options["stop_tokens"]:
            return place if options.get("without_stop") else place + 1
    return len(tokens)


def by_pad(tokens, pad_token):
    return [int(token != pad_token) for token in tokens]


WITHOUT_STOP = Other("the stop token is masked", options={"without_stop": True})
BY_LAST = Other(
    "a row is truncated unless its last token is a stop token",
    options={"truncated_by_last": True},
)
BY_PAD = Other("the mask is token != pad_token", options={"by_pad": True})
SOURCE = "|o_i| of DeepSeekMath 2402.03300 Eq. 3 counts the sampled tokens, stop token included"


def mask_case(name, tokens, **fields):
    """Return a case of the masks of completions with these token ids."""
    return Case(id=name, operation=completion_mask, inputs={"tokens": tokens}, **fields)


CASES = [
    mask_case(
        "masks/pad-is-stop",
        [[7, 5, 2, 2, 2], [2, 2, 2, 2, 2], [5, 7, 5, 7, 2]],
        options={"stop_tokens": [2], "pad_token": 2},
        source=SOURCE,
        threads=[
            "huggingface/trl/pull/6357",
            "huggingface/trl/pull/4970",
            "mll-lab-nu/RAGEN/issues/59",
        ],
        catches="A mask of `token != pad` without the stop token: the model never learns to stop.",
        others=[
            Other(
                "the stop token is masked, as by token != pad_token",
                options={"without_stop": True},
            ),
        ],
    ),
    mask_case(
        "masks/two-stop-tokens",
        [[7, 3, 0, 0], [7, 5, 2, 0], [3, 2, 0, 0]],
        options={"stop_tokens": [2, 3], "pad_token": 0},
        source=SOURCE,
        threads=["huggingface/trl/pull/7039"],
        catches="One stop token where the model has two, so that finished rows count as truncated.",
        others=[
            Other("only the first stop token ends a row", options={"stop_tokens": [2]}),
            Other("only the second stop token ends a row", options={"stop_tokens": [3]}),
            WITHOUT_STOP,
            BY_PAD,
            BY_LAST,
        ],
    ),
    mask_case(
        "masks/truncated",
        [[7, 5, 7, 5], [7, 5, 7, 2], [7, 5, 2, 0]],
        options={"stop_tokens": [2], "pad_token": 0},
        source=SOURCE,
        catches="A row that stops exactly at the limit, taken for truncated.",
        others=[WITHOUT_STOP, BY_LAST],
    ),
    mask_case(
        "masks/pad-sampled-inside",
        [[7, 0, 5, 2], [0, 0, 7, 5], [7, 5, 7, 0]],
        options={"stop_tokens": [2], "pad_token": 0},
        rests_on=CONVENTION,
        source="a sampled pad id is a token like any other",
        threads=["huggingface/trl/pull/4970"],
        catches="A sampled pad id that ends the completion or leaves a hole in its mask.",
        others=[
            BY_PAD,
            Other("the pad id ends a row", options={"stop_tokens": [2, 0]}),
            WITHOUT_STOP,
        ],
    ),
]

SUBJECT = Subject(
    name="masks",
    about="Which tokens of a completion count, and which completions are truncated.",
    cases=CASES,
)
