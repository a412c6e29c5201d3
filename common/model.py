"""Model and tokenizer, stop tokens, and the module whose forward gives log-probs and entropy."""

import contextlib
import copy
import os
import pathlib
import re
import textwrap

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from common.data import Row, encode_text, end_of_turn, end_token, tokenize
from common.masked import completion_mask, logprobs_and_entropy
from common.rewards import Reward
from common.runs import InputError, set_threads, strategy

EMBEDDED = pathlib.Path(__file__).parent / "tiny"
CHUNK_ELEMENTS = 2**25  # logits of one chunk of the head: 128 MiB in float32
# Weights that a text model leaves unused: those for images, sound, and the prediction of several tokens at once, and
# the causal masks that old checkpoints of GPT-Neo and GPT-J hold.
BESIDE_TEXT = re.compile(
    r"(^|[._])(vision|visual|image|video|audio|speech|multi_modal|mm|mtp|nextn)([._]|$)"
    r"|\.(attn|attention)\.(masked_)?bias$"
)


def model_path(args, option="model_name_or_path"):
    """The folder or hub id that an option names; `embedded` is the model that comes with the project."""
    name = getattr(args, option)
    return str(EMBEDDED) if option == "model_name_or_path" and name == "embedded" else name


def refuse(args, option, problem):
    """An InputError about the model that an option names."""
    raise InputError(f"--{option} {getattr(args, option)}: {problem}") from None


def in_short(error):
    """An exception of a library in one line that is not too long; the message alone may be a mere name."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' ...')}"


def read_tokenizer(args, option):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path(args, option))
    except Exception as error:  # it raises nearly every type there is
        refuse(args, option, f"no tokenizer could be loaded: {in_short(error)}")


def load_tokenizer(args):
    """The tokenizer of the policy; one without a pad token pads with its EOS (masks never look at the pad id)."""
    tokenizer = read_tokenizer(args, "model_name_or_path")
    if tokenizer.eos_token_id is None:
        refuse(args, "model_name_or_path", "its tokenizer has no EOS token, nothing ends")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def find_stop_tokens(tokenizer, generation_config):
    """Ids that end a completion: EOS of tokenizer and generation config, and the end of a turn in the chat template."""
    configured = generation_config.eos_token_id
    configured = configured if isinstance(configured, list) else [configured]
    return sorted({tokenizer.eos_token_id, end_of_turn(tokenizer), *configured} - {None})


class Backbone(nn.Module):
    """The hidden states that predict the completions' tokens, from the model `lm`: what policy and critic share."""

    chunked = True  # whether the states come from the base model; else they are its logits

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.size = sum(parameter.numel() for parameter in lm.parameters())
        self.shares_prompts = True

    def states(self, batch):
        """Of each completion token its place in R x T (N,), and the hidden state that predicts it (N, H)."""
        share = self.shares_prompts and "prompt_index" in batch
        states = self.shared_states(batch) if share else self.plain_states(batch)
        return [torch.cat(parts) for parts in zip(*states, strict=True)]

    def plain_states(self, batch):
        """[(places, hidden)]: of each completion token its place in R x T, and the hidden state that predicts it."""
        mask = batch["completion_mask"]
        attention_mask = torch.cat([batch["prompt_mask"], mask], dim=1)  # (R, P + T)
        inputs = dict(
            input_ids=torch.cat([batch["prompts"], batch["completions"]], dim=1),
            attention_mask=attention_mask.long(),
            position_ids=positions(attention_mask),
            use_cache=False,
        )
        before = mask.shape[1] + 1  # the state at a position predicts the next token: shift by one
        if self.chunked:
            hidden = self.lm.base_model(**inputs).last_hidden_state[:, -before:-1]
        else:
            hidden = self.lm(**inputs, logits_to_keep=before).logits[:, :-1]
        return [(mask.flatten().nonzero()[:, 0], hidden[mask])]

    def shared_states(self, batch):
        """What `plain_states` returns, from one pass over each distinct prompt and a pass over the completions that
        attends to its keys and values (through which the gradient reaches the prompt).

        The completions go in runs of similar length, so that they need little padding.
        """
        from transformers import DynamicCache

        mask, P, T = batch["completion_mask"], batch["prompts"].shape[1], batch["completions"].shape[1]
        index = batch["prompt_index"][:, 0].tolist()
        distinct = list(dict.fromkeys(index))
        first, owner = [index.index(i) for i in distinct], torch.tensor([distinct.index(i) for i in index])
        prompt_mask, cache = batch["prompt_mask"][first], DynamicCache(config=self.lm.config)
        inputs = dict(input_ids=batch["prompts"][first], attention_mask=prompt_mask.long())
        outputs = self.lm.base_model(
            **inputs, position_ids=positions(prompt_mask), past_key_values=cache, use_cache=True
        )
        last = outputs.last_hidden_state[:, -1:]  # (prompts, 1, H) predicts the first token
        states = []
        # A further pass costs about as much time as this many operations on padding (measured on CPU only).
        operations = 2e8 if mask.device.type == "cpu" else 1e12
        most_padding = operations / (6 * self.size)
        for rows in runs_of_similar_length(mask.sum(dim=1).tolist(), most_padding):
            row_mask = mask[rows]
            width = int(row_mask.sum(dim=1).max())
            owners, row_mask = owner[rows].to(mask.device), row_mask[:, :width]
            hidden = last[owners]
            if width > 1:  # the last token predicts nothing: it stays outside
                attention_mask = torch.cat([batch["prompt_mask"][rows], row_mask[:, :-1]], dim=1)
                outputs = self.lm.base_model(
                    input_ids=batch["completions"][rows, : width - 1],
                    attention_mask=attention_mask.long(),
                    position_ids=positions(attention_mask)[:, P:],
                    past_key_values=select_cache(cache, owners),
                    use_cache=True,
                )
                hidden = torch.cat([hidden, outputs.last_hidden_state], dim=1)
            places = torch.tensor(rows, device=mask.device)[:, None] * T + torch.arange(width, device=mask.device)
            states.append((places[row_mask], hidden[row_mask]))
        return states


class Policy(Backbone):
    """A causal language model whose forward returns log-probs and entropies of given completions.

    This module is what Accelerate prepares, so that the gradient goes through its wrapper (DDP, FSDP2). The backbone
    runs on the whole rows; the vocabulary head only on completion tokens, in chunks that are recomputed in the backward
    pass, so that no (R, T, V) tensor exists.
    """

    def __init__(self, lm, tokenizer, temperature, entropy_grad):
        super().__init__(lm)
        self.temperature = temperature
        self.entropy_grad = entropy_grad
        self.pad_token = tokenizer.pad_token_id
        self.stop_tokens = find_stop_tokens(tokenizer, lm.generation_config)
        self._no_split_modules = lm._no_split_modules  # FSDP2 wraps by these
        self.chunked = head_is_last(lm)
        self.shares_prompts = self.chunked and sharing_is_exact(self)

    @property
    def device(self):
        return self.lm.device

    def notes(self):
        """What a user should know about this model, a line each."""
        if not self.chunked:
            yield "this model changes its logits after the head: log-probs take more memory"
        if not self.shares_prompts:
            yield "each completion of an update computes its prompt anew (checkpointing, sharding, or the model)"

    def forward(self, batch, with_entropy=True):
        """Float32 log-probs and entropies (R, T) of the completions at the sampling temperature, 0 beside the mask.

        `batch` holds prompts (R, P) left-padded, prompt_mask (R, P), completions (R, T), completion_mask (R, T). With
        prompt_index (R, 1) rows of one index have one prompt, which is computed once.
        """
        return self.logprobs(batch, *self.states(batch), with_entropy)

    def logprobs(self, batch, places, hidden, with_entropy):
        results = self.head(hidden, batch["completions"].flatten()[places], with_entropy)
        return [None if x is None else place(x, places, batch["completion_mask"]) for x in results]

    def head(self, hidden, tokens, with_entropy):
        """Log-probs and entropies (N,) of `tokens` (N,) from hidden states (N, H), or from logits (N, V)."""
        size = max(1, CHUNK_ELEMENTS // self.lm.get_output_embeddings().weight.shape[0])
        if len(tokens) <= size:
            return self.head_chunk(hidden, tokens, with_entropy)
        chunks = zip(hidden.split(size), tokens.split(size), strict=True)
        results = [checkpoint(self.head_chunk, h, t, with_entropy, use_reentrant=False) for h, t in chunks]
        logprobs, entropies = zip(*results, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None

    def head_chunk(self, hidden, tokens, with_entropy):
        logits = self.lm.get_output_embeddings()(hidden) if self.chunked else hidden
        return logprobs_and_entropy(logits, tokens, self.temperature, with_entropy, self.entropy_grad)


class ValueHead(nn.Linear):
    """A linear map to one value that starts at zero and computes in float32, in whatever dtype its weights are held
    (sharding may gather them in bfloat16)."""

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


class Critic(nn.Module):
    """A scalar head on the states of a backbone of its own, or (`backbone` None) of the policy's."""

    def __init__(self, hidden_size, backbone=None):
        super().__init__()
        self.backbone = backbone
        self.head = ValueHead(hidden_size)

    def forward(self, batch, places, hidden):
        return place(self.head(hidden)[:, 0], places, batch["completion_mask"])


class ActorCritic(nn.Module):
    """Policy and critic as one module, which Accelerate prepares once."""

    def __init__(self, policy, critic):
        super().__init__()
        self.policy, self.critic = policy, critic
        self._no_split_modules = set(policy._no_split_modules or ())  # FSDP2 wraps by these
        if critic.backbone is not None:
            self._no_split_modules |= set(critic.backbone.lm._no_split_modules or ())

    def forward(self, batch, with_entropy=True):
        """What `Policy` returns, and float32 values (R, T), 0 beside the mask.

        The value of a token is read where its log-prob is, one position before it: the state has not seen it yet.
        """
        states = self.policy.states(batch)
        logprobs, entropy = self.policy.logprobs(batch, *states, with_entropy)
        if self.critic.backbone is not None:
            states = self.critic.backbone.states(batch)
        return logprobs, entropy, self.critic(batch, *states)


def place(values, places, mask):
    """Values (N,) at their places in a float32 tensor of the shape (R, T) of `mask`, which is 0 elsewhere."""
    where = (places // mask.shape[1], places % mask.shape[1])
    return torch.zeros(mask.shape, device=mask.device).index_put(where, values)


def positions(attention_mask):
    """Position ids (R, S) that count the tokens of a left-padded row from 0."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def select_cache(cache, rows):
    """A key-value cache that holds the given rows of `cache`; the original stays as it is."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(rows)
    return selected


def runs_of_similar_length(lengths, most_padding):
    """Row numbers in runs, sorted by length; padded to its longest row, a run has at most `most_padding` pad tokens."""
    runs, tokens = [], 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[row]
        if not runs or lengths[row] * (len(runs[-1]) + 1) - tokens > most_padding:
            runs.append([])
            tokens = lengths[row]
        runs[-1].append(row)
    return runs


@torch.no_grad()
def head_is_last(lm):
    """Whether `logits = head(base_model(ids))`, which lets the head run in chunks.

    Some architectures do more to the logits: a soft cap (Gemma 2), a scale (Granite, Cohere). One forward tells, with
    the head's output amplified, so that a soft cap shows itself on a model of small logits too.
    """
    head, seen = lm.get_output_embeddings(), {}

    def amplify(module, inputs, output):
        seen.update(hidden=inputs[0], logits=output * 100)
        return seen["logits"]

    ids = torch.arange(8, device=lm.device)[None] % head.weight.shape[0]
    hook = head.register_forward_hook(amplify)
    try:
        logits = lm(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.equal(logits, seen["logits"]):
        return False
    return hidden.shape == seen["hidden"].shape and torch.allclose(hidden, seen["hidden"], rtol=1e-3, atol=1e-5)


@torch.no_grad()
def sharing_is_exact(policy):
    """Whether `shared_states` gives the log-probs of `plain_states`, on rows of unequal lengths.

    Only for caches of keys and values, whose rows can be selected with their gradient.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if not all(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=policy.lm.config).layers):
        return False
    device, vocabulary = policy.device, policy.lm.get_output_embeddings().weight.shape[0]
    counts = torch.arange(6, device=device)
    batch = {
        "prompts": (torch.arange(24, device=device) * 7 % vocabulary).view(2, 12).repeat_interleave(3, dim=0),
        "prompt_mask": (torch.arange(12, device=device) >= torch.tensor([[0], [5]], device=device)).repeat_interleave(
            3, 0
        ),
        "completions": (torch.arange(48, device=device) * 5 % vocabulary).view(6, 8),
        "completion_mask": torch.arange(8, device=device) <= counts[:, None],
    }
    shared = batch | {"prompt_index": (counts // 3)[:, None]}
    (plain, _), (other, _) = policy(batch, with_entropy=False), policy(shared, with_entropy=False)
    return torch.allclose(plain, other, atol=1e-4 if policy.lm.dtype == torch.float32 else 0.1)


def load_policy(args, tokenizer, accelerator=None):
    """The model of `--model_name_or_path` as a `Policy`, in training mode, without dropout.

    Dropout would make the ratio of the first update differ from 1. The checkpoint's own generation settings (top_k,
    repetition penalty, ...) would be inherited by every `generate`: they are set aside and saved with the model again.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    lm, saved_dtype, dropout, _ = load_model(AutoModelForCausalLM, args)
    check_vocabulary(args, "model_name_or_path", lm, tokenizer)
    if not is_causal(lm.eval().to(first_device(accelerator))):
        refuse(args, "model_name_or_path", f"a {type(lm).__name__} that sees later tokens is no causal language model")
    check_positions(args, "model_name_or_path", lm)
    entropy_grad = getattr(args, "entropy_coef", 0) != 0
    policy = Policy(lm, tokenizer, args.temperature, entropy_grad)
    policy.saved_dtype, policy.saved_dropout = saved_dtype, dropout
    policy.saved_generation_config, lm.generation_config = lm.generation_config, GenerationConfig()
    if is_sharded(accelerator):  # each pass waits for the other processes; sharing takes more passes for some batches
        policy.shares_prompts = False
    if args.gradient_checkpointing:  # it switches the cache off
        policy.shares_prompts = False
        enable_checkpointing(lm)
    return policy.train()


def load_model(auto_class, args, option="model_name_or_path", new_head=False):
    """A model of `auto_class` without dropout, the dtype and the dropout values of its checkpoint, and the names of the
    weights of a new head: with `new_head` a language model becomes a classifier of one output.

    Other weights that the checkpoint lacks would be random, and those that the model lacks lost: `check_weights`.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports on the weights in many lines
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(model_path(args, option))
        saved_dtype = config.dtype or torch.float32
        dropout = {name: x for name, x in config.to_dict().items() if "drop" in name and isinstance(x, float)}
        for name in dropout:
            setattr(config, name, 0.0)
        if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
            new_head = False
        elif new_head:
            config.num_labels = 1
        options = dict(dtype=getattr(torch, args.dtype), attn_implementation=args.attn_implementation)
        options |= dict(output_loading_info=True, ignore_mismatched_sizes=True)
        lm, info = auto_class.from_pretrained(model_path(args, option), config=config, **options)
    except Exception as error:  # it raises nearly every type there is
        refuse(args, option, f"no model: {in_short(error)}")
    finally:
        logging.set_verbosity(verbosity)
    set_threads(lm.num_parameters())
    return lm, saved_dtype, dropout, check_weights(args, option, lm, info, new_head)


def check_weights(args, option, lm, info, new_head):
    """Refuse a checkpoint whose weights are not those of the model; returns the names of a new head's weights.

    Transformers has left out what is tied or known to be unused. What serves other ends than text is named in one line.
    """

    def of_backbone(name):
        part = name.partition(".")[0]  # a checkpoint of a bare backbone has no prefix
        return part == lm.base_model_prefix or hasattr(lm.base_model, part)

    missing, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    new = [name for name in missing if new_head and not of_backbone(name)]
    beside_text = [name for name in unused if BESIDE_TEXT.search(name)]
    unused = [name for name in unused if name not in beside_text]
    if new_head:
        missing, unused = (list(filter(of_backbone, names)) for names in (missing, unused))
    reshaped = sorted(name for name, *_ in info["mismatched_keys"])
    kind = type(lm).__name__
    for names, problem in (
        (missing, f"the checkpoint lacks weights of a {kind}"),
        (reshaped, f"the checkpoint has weights of other shapes than its config.json gives a {kind}"),
        (unused, f"the checkpoint has weights that a {kind} does not use"),
    ):
        if names:
            refuse(args, option, f"{problem}: {some(names)}")
    if beside_text and os.environ.get("RANK", "0") == "0":
        print(f"--{option} {getattr(args, option)}: a {kind} leaves weights unused: {some(beside_text)}")
    return new


def some(names):
    """The first of some names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_vocabulary(args, option, lm, tokenizer):
    """Refuse a tokenizer with ids that the model has no embedding for."""
    rows, vocabulary = lm.get_input_embeddings().weight.shape[0], tokenizer.get_vocab()
    for kind in ("image", "audio", "video"):  # placeholders that a text never has; Gemma 3 1B has no embedding for one
        vocabulary.pop(getattr(tokenizer, f"{kind}_token", None), None)
    if max(vocabulary.values()) >= rows:
        token = max(vocabulary, key=vocabulary.get)
        refuse(args, option, f"its tokenizer has {token!r} as {vocabulary[token]}, its embedding has {rows} rows")


def check_positions(args, option, lm):
    """Refuse rows that may be longer than the model's table of positions."""
    limit = most_positions(lm)
    for names in (("max_length",), ("max_prompt_tokens", "max_new_tokens")):
        if limit and hasattr(args, names[0]) and sum(getattr(args, name) for name in names) > limit:
            sizes = " + ".join(f"--{name} {getattr(args, name)}" for name in names)
            refuse(args, option, f"the model has positions for {limit} tokens, less than {sizes}")


def most_positions(lm):
    """Tokens that a row may have where positions come from a table; None where they are computed (rotary)."""
    config = lm.config.get_text_config()
    return None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)


def is_causal(lm):
    """Whether what predicts a token has not seen it: an encoder (BERT) loads as a causal language model too."""
    ids = torch.arange(4)[None]
    return float(influence(lm, ids, lambda logits: logits[:, :-1])[-1]) == 0


def reads_last_token(lm):
    """Whether a classifier's score depends on the last token of a row, and not on padding behind it, masked or not."""
    pad = lm.config.get_text_config().pad_token_id
    ids = torch.tensor([[*[i for i in range(4) if i != pad][:3], pad, pad]])
    *_, last, after, end = influence(lm, ids, lambda scores: scores).tolist()
    return last > 0 and after == end == 0


@torch.enable_grad()
def influence(lm, ids, part):
    """The size of the gradient of `part` of the logits by the embedding of each token of `ids` (1, S): (S,).

    Exactly 0, in any dtype, for a token that is not looked at.
    """
    seen = []
    hook = lm.get_input_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        logits = lm(input_ids=ids.to(lm.device), attention_mask=torch.ones_like(ids).to(lm.device)).logits
    finally:
        hook.remove()
    (gradient,) = torch.autograd.grad(part(logits).float().sum(), seen[0])
    return gradient[0].abs().sum(dim=-1)


def load_classifier(args, option, tokenizer, device, new_head=False):
    """A classifier of one output that reads it at the last token, and the dtype and dropout values of its checkpoint.

    A new head is one of zeros. The last token is the last one that is not padding: a tokenizer that pads with what ends
    a completion gets a pad token of its own, else the score would be read before the end.
    """
    from transformers import AutoModelForSequenceClassification

    lm, saved_dtype, dropout, new = load_model(AutoModelForSequenceClassification, args, option, new_head)
    kind, outputs = type(lm).__name__, lm.config.num_labels
    if outputs != 1:
        refuse(args, option, f"its head has {outputs} outputs, 1 is needed")
    check_vocabulary(args, option, lm, tokenizer)
    if tokenizer.pad_token_id in (tokenizer.eos_token_id, end_token(tokenizer)):
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        if len(tokenizer) > lm.get_input_embeddings().weight.shape[0]:
            lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if lm.config.is_encoder_decoder or not reads_last_token(lm.eval().to(device)):
        refuse(args, option, f"a {kind} does not read its score at the last token: a causal model is needed")
    for name in new:
        nn.init.zeros_(lm.get_parameter(name))
    return lm, saved_dtype, dropout


def enable_checkpointing(lm):
    # The second name is that of transformers before 5.23.
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def load_critic(args, policy):
    """The critic of `--critic`: shared, or separate on a backbone of its own: that of `--critic_path` with its head, or
    the policy's with a head of zeros."""
    if args.critic_path:
        return load_reward_critic(args, policy)
    hidden_size = policy.lm.get_output_embeddings().weight.shape[1]
    if args.critic == "shared":
        if not policy.chunked:
            raise InputError("--critic shared: this model changes its logits after the head, take --critic separate")
        return Critic(hidden_size).to(policy.device, policy.lm.dtype).train()
    backbone = Backbone(copy.deepcopy(policy.lm.base_model))
    backbone.shares_prompts = policy.shares_prompts
    return Critic(hidden_size, backbone).to(policy.device, policy.lm.dtype).train()


def load_reward_critic(args, policy):
    """The reward model of `--critic_path` as a critic (arXiv 2203.02155, appendix C.4): a value is at first the score
    of the text so far. It reads the policy's token ids, so its tokenizer must have them all."""
    tokenizer = read_tokenizer(args, "critic_path")
    vocabulary = tokenizer.get_vocab()
    other = sorted(repr(token) for token, i in load_tokenizer(args).get_vocab().items() if vocabulary.get(token) != i)
    if other:
        refuse(args, "critic_path", f"its tokenizer has other ids than the policy's for {some(other)}")
    lm, _, _ = load_classifier(args, "critic_path", tokenizer, policy.device)
    check_positions(args, "critic_path", lm)
    if not isinstance(getattr(lm, "score", None), nn.Linear):
        refuse(args, "critic_path", f"a {type(lm).__name__} has no linear head `score`")
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    backbone = Backbone(lm.base_model)
    backbone.shares_prompts = False  # exact for any architecture
    critic = Critic(lm.score.in_features, backbone)
    critic.head.load_state_dict({"bias": torch.zeros(1)} | lm.score.state_dict())
    return critic.to(policy.device, policy.lm.dtype).train()


def load_reference(args, tokenizer, accelerator=None):
    """A frozen copy of the policy at its start, whole on every process; only loaded when a coefficient asks for it."""
    reference = load_policy(args, tokenizer, accelerator).requires_grad_(False).eval()
    if is_sharded(accelerator):
        reference.to(accelerator.device)
        if accelerator.mixed_precision == "bf16":  # as there: bfloat16 weights, but rotary frequencies in float32
            for parameter in reference.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
    return reference


def learned_reward(args, prompts, device):
    """The model of `--reward_model_path` as a reward, one scalar for a completion (arXiv 1909.08593, 2203.02155).

    It reads text: prompt and completion go through its own tokenizer and chat template, whatever the policy's are, put
    together as `reward_model.py` does (with the run's --prompt_template and --system_prompt, and the end token unless
    the completion was cut; special tokens that the policy spells are text). Refused are checkpoints without a trained
    scalar head that reads the last token, and tokenizers that have no EOS, pad with the end token (the model would read
    the score before it), or do not know the characters of the prompts.
    """
    option = "reward_model_path"
    tokenizer = read_tokenizer(args, option)
    eos, unknown = tokenizer.eos_token_id, {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if eos is None:
        refuse(args, option, "its tokenizer has no EOS token, the score is read at the end")
    end = end_token(tokenizer)
    if tokenizer.pad_token_id in (None, end):
        token = tokenizer.convert_ids_to_tokens(end)
        refuse(args, option, f"its tokenizer needs a pad token other than {token}, where the score is read")
    ids = tokenize([Row("a prompt", prompt.prompt, None, {}) for prompt in prompts], args, tokenizer)
    if any(unknown & set(row) for row in ids):
        refuse(args, option, "its tokenizer does not know characters of the prompts")
    model, _, _ = load_classifier(args, option, tokenizer, device)
    tokenizer.padding_side = "right"
    model.requires_grad_(False)
    limit, longest = most_positions(model), max(map(len, ids))
    if limit and longest + args.max_new_tokens > limit:
        sizes = f"a prompt of {longest} + --max_new_tokens {args.max_new_tokens}"
        refuse(args, option, f"the model has positions for {limit} tokens, less than {sizes}")

    def reward_model(prompts, completions, truncated, **columns):
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        rows = tokenize([Row("a prompt", prompt, None, {}) for prompt in prompts], args, tokenizer)
        for ids, completion, cut in zip(rows, encode_text(texts, tokenizer), truncated, strict=True):
            ids += completion + ([] if cut else [end])
        longest = max(map(len, rows))
        if limit and longest > limit:
            refuse(
                args, option, f"the model has positions for {limit} tokens, a prompt with its completion has {longest}"
            )
        scores = [0.0] * len(rows)
        for part in micro_batches([(len(ids), 0) for ids in rows], args):
            inputs = tokenizer.pad({"input_ids": [rows[i] for i in part]}, return_tensors="pt")
            with torch.no_grad():
                values = model(**inputs.to(device)).logits[:, 0].float().tolist()
            for i, value in zip(part, values, strict=True):
                scores[i] = value
        return scores

    return Reward("reward_model", 1.0, reward_model)


def first_device(accelerator):
    """Where a model is loaded: under FSDP2 and DeepSpeed on CPU until `prepare` moves each process's part."""
    return "cpu" if accelerator is None or is_sharded(accelerator) else accelerator.device


def is_sharded(accelerator):
    """Whether `prepare` spreads weights, gradients or optimizer over the processes."""
    return accelerator is not None and accelerator.distributed_type in ("FSDP", "DEEPSPEED")


@contextlib.contextmanager
def gathered(accelerator, model):
    """The prepared `model` with all its weights on every process, so that each can sample on its own.

    Else FSDP2 and ZeRO-3 gather each layer anew for each token, and all processes must sample equally many. One copy of
    the weights must fit beside the shards (FSDP2: of the policy's; ZeRO-3: of a critic's too). All processes have to
    enter; the other strategies have nothing to gather.
    """
    if strategy(accelerator) == "ZeRO-3":
        import deepspeed

        with deepspeed.zero.unwrap_model_for_generation(model):
            yield
        return
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    parts = dict.fromkeys([model, *getattr(model, "policy", model).modules()])  # without a critic's layers
    shards = [module for module in parts if isinstance(module, FSDPModule)]
    if shards:  # FSDP2 takes the first module that runs for the outermost one: it must not be a layer that samples
        model.first_run = lambda: None
        register_fsdp_forward_method(model, "first_run")
        model.first_run()
        del model.first_run
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in shards:
        module.reshard()
        inner = module is not model  # the outermost stays gathered from forward to backward
        module.set_reshard_after_forward(inner and accelerator.state.fsdp_plugin.reshard_after_forward, recurse=False)


def save_pretrained(accelerator, model, policy, tokenizer, folder):
    """Write the `Policy` in the prepared `model`, and the tokenizer, so that `from_pretrained` loads them, in the dtype
    of the checkpoint they came from.

    All processes have to call it, the first one writes. What is trained stays as it is: a checkpoint may still follow.
    """
    modules = accelerator.unwrap_model(model).named_modules()
    prefix = next(f"{name}.lm." for name, module in modules if module is policy).removeprefix(".")
    weights = accelerator.get_state_dict(model)  # whole, on the first process at least
    if accelerator.is_main_process:
        lm = copy.copy(policy.lm)
        lm.config, lm.generation_config = copy.deepcopy(lm.config), policy.saved_generation_config
        for name, value in policy.saved_dropout.items():
            setattr(lm.config, name, value)
        weights = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        weights = {name: x.to(policy.saved_dtype) if x.is_floating_point() else x for name, x in weights.items()}
        lm.save_pretrained(folder, state_dict=weights)
        lm.config.dtype = policy.saved_dtype  # save_pretrained() says that of the weights in training
        lm.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def left_pad(rows, pad_token, device):
    """Token id lists as one tensor (R, P) padded on the left, and its mask (R, P)."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_token] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return ids, mask


def take_rows(batch, rows):
    """Some rows of a batch, cut of the padding they all share: prompts on the left, completions on the right."""
    T = batch["completion_mask"].shape[1]
    part = {name: tensor[rows] for name, tensor in batch.items()}
    left = int(part["prompt_mask"].sum(dim=1).max())
    right = int(part["completion_mask"].sum(dim=1).max())
    for name, tensor in part.items():
        if name in ("prompts", "prompt_mask"):
            part[name] = tensor[:, -left:]
        elif tensor.dim() == 2 and tensor.shape[1] == T:
            part[name] = tensor[:, :right]
    return part


def trim_group(batch, rows):
    """What to send of the n rows (a slice) of one prompt, as arrays: `unite_groups` derives the rest from the prompt.

    Completions stand one after the other, without padding and in int32, and so do their log-probs.
    """
    mask = batch["completion_mask"][rows]
    group = {"rewards": batch["rewards"][rows], "lengths": mask.sum(dim=1).int()}  # (n,) each
    group["completions"] = batch["completions"][rows][mask].int()
    if "rollout_logprobs" in batch:
        group["rollout_logprobs"] = batch["rollout_logprobs"][rows][mask]
    return {name: column.numpy(force=True) for name, column in group.items()}


def unite_groups(groups, model):
    """The batch, with the columns of `rollout` and `rewards` (R,), of a list of (prompt, what was sent of its rows)."""
    prompts, sent = zip(*groups, strict=True)
    columns = {name: torch.cat([torch.from_numpy(group[name]) for group in sent]) for name in sent[0]}
    n, device = len(sent[0]["rewards"]), model.device

    def padded(name, fill):  # (R, T)
        rows = columns[name].split(columns["lengths"].tolist())
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(device)

    ids, mask = left_pad([prompt.ids for prompt in prompts], model.pad_token, device)  # (R / n, P)
    batch = {"prompts": ids.repeat_interleave(n, dim=0), "prompt_mask": mask.repeat_interleave(n, dim=0)}
    batch["completions"] = padded("completions", model.pad_token).long()
    batch["completion_mask"], batch["truncated"] = completion_mask(batch["completions"], model.stop_tokens)
    if model.shares_prompts and n > 1:
        batch["prompt_index"] = torch.arange(len(prompts), device=device).repeat_interleave(n)[:, None]
    if "rollout_logprobs" in columns:
        batch["rollout_logprobs"] = padded("rollout_logprobs", 0)
    return batch | {"rewards": columns["rewards"].to(device)}


def micro_batches(lengths, args, keep_order=False):
    """Cut rows of the given lengths [(prompt tokens, completion tokens)] into the index lists of single forwards.

    Sorted by length unless `keep_order`, so that the rows of one forward need little padding; what a row contributes
    does not depend on it. `micro_batch_tokens` counts the padded tokens of a forward; a longer row goes alone.
    """
    order = list(range(len(lengths)))
    if not keep_order:
        order.sort(key=lambda row: sum(lengths[row]))
    if not args.micro_batch_tokens:
        return [order[i : i + args.micro_batch_size] for i in range(0, len(order), args.micro_batch_size)]
    parts, width = [[]], (0, 0)
    for row in order:
        wider = max(width[0], lengths[row][0]), max(width[1], lengths[row][1])
        if parts[-1] and sum(wider) * (len(parts[-1]) + 1) > args.micro_batch_tokens:
            parts.append([])
            wider = lengths[row]
        parts[-1].append(row)
        width = wider
    return parts


def split_rollout(accelerator, batch, args):
    """Cut this process's rows into optimizer steps, and each of these into the micro-batches of single forwards.

    Minibatches are equal runs of whole groups in draw order. Returns a list of (micro_batches, totals), where the
    totals count the whole optimizer step: all micro-batches of all processes. All processes get equally many
    micro-batches, since each forward and backward of FSDP2 is a collective; a filler is a real row whose loss mask is
    empty.
    """
    rows, device = len(batch["completions"]) // args.num_minibatches, batch["completions"].device
    group_tokens = batch["loss_mask"].view(-1, args.group_size * batch["loss_mask"].shape[1]).sum(dim=1)
    batch = batch | {"group_tokens": group_tokens.repeat_interleave(args.group_size)[:, None]}
    lengths = torch.stack([batch["prompt_mask"].sum(dim=1), batch["completion_mask"].sum(dim=1)], dim=1).tolist()
    starts = range(0, rows * args.num_minibatches, rows)
    keep_order = "prompt_index" in batch  # the completions of a prompt belong into one forward
    cuts = [micro_batches(lengths[start : start + rows], args, keep_order) for start in starts]
    cuts = [[[start + i for i in part] for part in cut] for start, cut in zip(starts, cuts, strict=True)]
    most = accelerator.gather(torch.tensor([[len(cut) for cut in cuts]], device=device)).amax(dim=0).tolist()
    tokens = torch.stack([batch["loss_mask"][start : start + rows].sum() for start in starts])
    tokens = accelerator.reduce(tokens, "sum").tolist()
    minibatches = []
    for start, cut, number, step_tokens in zip(starts, cuts, most, tokens, strict=True):
        parts = [take_rows(batch, part) for part in cut]
        for _ in range(number - len(parts)):
            filler = take_rows(batch, [start])
            parts.append(filler | {"loss_mask": torch.zeros_like(filler["loss_mask"])})
        step_rows = rows * accelerator.num_processes
        totals = {"tokens": step_tokens, "rows": step_rows, "prompts": step_rows // args.group_size}
        minibatches.append((parts, totals))
    return minibatches


def completion_texts(tokenizer, batch):
    """The completions as rewards see them: up to the stop token, special tokens skipped."""
    rows = zip(batch["completions"].tolist(), batch["completion_mask"].sum(dim=1).tolist(), strict=True)
    ids = [ids[:length] for ids, length in rows]
    return tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# --- preference pairs ---


def pair_batch(pairs, device):
    """Pairs as a batch of 2B rows for one forward: all chosen completions, then all rejected ones; the columns of
    `Policy.forward`, and the reference's log-probs (2B,) of whole completions."""
    prompts, prompt_mask = left_pad([pair.prompt for pair in pairs] * 2, 0, device)
    rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    width = max(map(len, rows))
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    ref_logprobs = [pair.ref_chosen for pair in pairs] + [pair.ref_rejected for pair in pairs]
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "completions": torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device),
        "completion_mask": torch.arange(width, device=device)[None] < lengths,
        "prompt_index": torch.arange(len(pairs), device=device).repeat(2)[:, None],
        "ref_logprobs": torch.tensor(ref_logprobs, device=device),
    }


def pair_tokens(pair):
    """Tokens of the longer of its two rows."""
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def spread_pairs(accelerator, pairs, args):
    """All pairs in single forwards of this process: (indices, real, batch), equally many on all processes.

    `real` (B,) is false for the fillers that make them so. Sorted by length, so that a forward needs little padding.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    order = sorted(range(len(pairs)), key=lambda i: pair_tokens(pairs[i]))
    places = range(rank, -(-len(pairs) // processes) * processes, processes)
    size = args.micro_batch_size // 2
    for start in range(0, len(places), size):
        part = places[start : start + size]
        indices = [order[place % len(pairs)] for place in part]
        real = torch.tensor([place < len(pairs) for place in part], device=accelerator.device)
        yield indices, real, pair_batch([pairs[i] for i in indices], accelerator.device)


class RewardModel(nn.Module):
    """A sequence classifier of one label whose forward gives the scores of completions; what Accelerate prepares."""

    def __init__(self, lm, tokenizer):
        super().__init__()
        self.lm = lm
        self.pad_token = tokenizer.pad_token_id
        self._no_split_modules = lm._no_split_modules  # FSDP2 wraps by these

    def forward(self, batch):
        """Float32 scores (R,) of prompt and completion, read at the completion's last token.

        `batch` holds prompts (R, P) left-padded, prompt_mask (R, P), completions (R, T), completion_mask (R, T).
        """
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)  # (R, P + T)
        ids = torch.cat([batch["prompts"], batch["completions"]], dim=1)
        ids = torch.where(mask, ids, self.pad_token)  # the model reads the score at the last token that is not this one
        scores = self.lm(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False
        ).logits
        return scores[:, 0].float()


def load_reward_model(args, tokenizer, accelerator=None):
    """The model of `--model_name_or_path` as a `RewardModel`, in training mode, without dropout.

    A causal language model gets a scalar head of zeros, so that all scores start equal. A tokenizer that pads with what
    ends a completion gets a pad token of its own (`load_classifier`).
    """
    device = first_device(accelerator)
    lm, saved_dtype, dropout = load_classifier(args, "model_name_or_path", tokenizer, device, new_head=True)
    check_positions(args, "model_name_or_path", lm)
    if args.gradient_checkpointing:
        enable_checkpointing(lm)
    model = RewardModel(lm, tokenizer)
    model.saved_dtype, model.saved_dropout, model.saved_generation_config = saved_dtype, dropout, None
    return model.train()
