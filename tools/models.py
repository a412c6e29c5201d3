"""What the scripts do with a model: which of the shortcuts serve it, and how exact its log-probs are.

    python tools/models.py Qwen/Qwen2.5-0.5B runs/grpo/model    prints a row for each, a folder or a hub id
    python tools/models.py --small [llama mamba2 ...]           small random models of architectures, all in a minute

It runs on CPU in float32, and holds the weights and two gradients of them. The columns are explained in docs/scale.md.
"""

import argparse
import contextlib
import io
import math
import pathlib
import sys
import tempfile
import textwrap

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.batches import left_pad  # noqa: E402
from common.errors import InputError  # noqa: E402
from common.generation import sampling_config, seeded  # noqa: E402
from common.harness.data import Prompt  # noqa: E402
from common.harness.embedded import EMBEDDED  # noqa: E402
from common.harness.loading import enable_checkpointing, load_policy, load_tokenizer  # noqa: E402
from grpo import Args, rollout  # noqa: E402

COLUMNS = ["model", "class", "attention", "rollout", "head", "prompts", "gradient checkpointing", "update", "sampling"]
SEED = (0,)

# Small configurations. What a configuration of an architecture does not know is ignored by transformers.
IDS = dict(vocab_size=20, bos_token_id=2, eos_token_id=1, pad_token_id=0)
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
BASE = SIZES | IDS
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
LINEAR = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
LINEAR |= dict(layer_types=["linear_attention", "full_attention"])
MAMBA = dict(mamba_n_heads=2, mamba_d_state=4, mamba_chunk_size=8)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
PER_LAYER = dict(hidden_size_per_layer_input=4, vocab_size_per_layer_input=20)
SHARED_KEYS = WINDOWS | dict(layer_types=WINDOWS["layer_types"] * 2, num_hidden_layers=4, num_kv_shared_layers=2)
LATENT = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
HEAD = dict(head_dim=8)
EYE = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
QWEN_EYE = dict(depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=32)


def rotary(**options):
    return dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, **options))


def with_eyes(eye, text, **options):
    return dict(text_config=BASE | HEAD | text, vision_config=eye, **options)


MODELS = {
    "qwen2": {},
    "qwen3": HEAD,
    "llama": {},
    "mistral": dict(sliding_window=8),
    "gemma": HEAD,
    "gemma2": HEAD | dict(sliding_window=8),
    "gemma3_text": HEAD | WINDOWS,
    "gemma3n_text": HEAD | SHARED_KEYS | PER_LAYER
    | dict(intermediate_size=[64] * 4, activation_sparsity_pattern=[0.0] * 4, laurel_rank=4),
    "gemma4_text": HEAD | SHARED_KEYS | PER_LAYER | dict(global_head_dim=8),
    "phi": {},
    "phi3": {},
    "openai-gpt": {},
    "gpt2": {},
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "gpt_neox": {},
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32),
    "bloom": dict(n_layer=2, n_head=4),
    "falcon": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "smollm3": {},
    "starcoder2": {},
    "stablelm": {},
    "glm4": HEAD,
    "granite": dict(logits_scaling=3.0),
    "cohere2": HEAD | WINDOWS,
    "gpt_oss": HEAD | EXPERTS | WINDOWS,
    "mixtral": EXPERTS,
    "qwen3_moe": HEAD | EXPERTS,
    "deepseek_v3": LATENT | dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1)
    | dict(topk_group=1, num_key_value_heads=4, first_k_dense_replace=1),
    "qwen3_next": HEAD | LINEAR | EXPERTS | dict(shared_expert_intermediate_size=16),
    "qwen3_5_text": HEAD | LINEAR,
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "zamba2": dict(mamba_d_state=4, n_mamba_heads=2, mamba_ngroups=1, num_mem_blocks=1, chunk_size=8)
    | dict(layers_block_type=["mamba", "hybrid"]),
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"], num_local_experts=0, logits_scaling=3.0),
    "falcon_h1": HEAD | MAMBA | dict(mamba_d_ssm=16, mamba_d_head=8),
    "jamba": EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, mamba_d_state=4)
    | dict(use_mamba_kernels=False),
    "nemotron_h": HEAD | dict(mamba_num_heads=2, mamba_head_dim=16, ssm_state_size=4, n_groups=1, chunk_size=8),
    "bamba": MAMBA | dict(mamba_d_head=32, attn_layer_indices=[1]),
    "minimax": HEAD | EXPERTS | dict(layer_types=["linear_attention", "full_attention"], block_size=8),
    "mamba": dict(state_size=4),
    "mamba2": dict(num_heads=2, head_dim=32, state_size=4, n_groups=1, chunk_size=8),
    "llama4_text": HEAD | dict(num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=8),
    "gemma3": with_eyes(EYE, WINDOWS, mm_tokens_per_image=4),
    "gemma4": with_eyes(EYE, WINDOWS | PER_LAYER | dict(global_head_dim=8), audio_config=None),
    "mistral3": with_eyes(dict(model_type="pixtral", **EYE), dict(model_type="mistral")),
    "qwen2_5_vl": with_eyes(QWEN_EYE | dict(fullatt_block_indexes=[0]), rotary(mrope_section=[2, 1, 1])),
    "qwen3_vl": with_eyes(
        QWEN_EYE | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]), rotary(mrope_section=[2, 1, 1])
    ),
    "qwen3_5": with_eyes(
        QWEN_EYE | dict(num_position_embeddings=16), LINEAR | rotary(mrope_section=[1, 1, 0], partial_rotary_factor=0.5)
    ),
    "llama4": with_eyes(
        EYE | dict(projector_input_dim=16, projector_output_dim=16, vision_output_dim=16),
        dict(num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=8),
    ),
    "mllama": with_eyes(
        EYE | dict(num_global_layers=1, attention_heads=2, vision_output_dim=32, intermediate_layers_indices=[0]),
        dict(num_hidden_layers=3, cross_attention_layers=[1]) | rotary(),
    ),
    "rwkv": dict(attention_hidden_size=32, context_length=1024),
    "recurrent_gemma": HEAD | dict(lru_width=32, attention_window_size=8, num_hidden_layers=3),
    "xlstm": dict(num_heads=4, chunk_size=8, num_blocks=1),
    "bert": {},
}  # fmt: skip


def build(kind, folder, dtype=torch.float32):
    """Save a small random model of an architecture, with the embedded tokenizer."""
    torch.manual_seed(0)
    options = MODELS[kind]
    auto_class = AutoModelForImageTextToText if "vision_config" in options else AutoModelForCausalLM
    config = AutoConfig.for_model(kind, **options if "vision_config" in options else BASE | options)
    lm = auto_class.from_config(config)
    with torch.no_grad():
        for weight in lm.parameters():  # new models are nearly uniform: nothing would depend on anything
            weight.mul_(4) if weight.dim() > 1 else None
        lm.get_input_embeddings().weight[0] = 0.1  # else 0, where a square root in Gemma 3n has no derivative
    lm.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)


def row(folder, tokenizer=None):
    """The cells of a model after its name; of one that is refused, the reason."""
    args = Args(model_name_or_path=str(folder), max_prompt_tokens=16, max_new_tokens=12)
    try:
        policy = load_policy(args, tokenizer or load_tokenizer(args))
    except InputError as error:
        reason = textwrap.shorten(str(error).split(f"{folder}: ")[-1], 100, placeholder=" ...")
        return [f"refused: {reason}"] + [""] * (len(COLUMNS) - 2)
    batch = sample(policy, args)
    expected, mask = plain_logprobs(policy, batch), batch["completion_mask"]
    with torch.no_grad():
        update, _ = policy(batch, with_entropy=False)
    return [
        type(policy.lm).__name__,
        policy.lm.config._attn_implementation,
        "shared" if policy.plain_cache else "hf",
        "chunks" if policy.head_is_last else "all logits",
        "once" if "prompt_index" in batch else "each row",
        checkpointing(policy, batch),
        power_of_ten((update - expected)[mask].abs().max()),
        power_of_ten((batch["rollout_logprobs"] - expected)[mask].abs().max()),
    ]


def power_of_ten(difference):
    """A number in the table, rounded up: what rounding gives varies with the machine."""
    return f"{10 ** math.ceil(math.log10(difference)):.0e}" if difference > 0 else "0"


@torch.no_grad()
def sample(policy, args, n=2):
    """A batch of the script's own rollout, with prompts of unequal lengths, and the log-probs it was sampled with."""
    generator, vocabulary = torch.Generator().manual_seed(0), policy.lm.get_output_embeddings().weight.shape[0]
    ids = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in (3, 9, 5, 12)]
    batch = rollout(policy.eval(), [Prompt(row, "", None, {}) for row in ids], n, 1.0, 1.0, SEED, args)
    if "rollout_logprobs" not in batch:  # stock `generate` again, from the same random numbers
        prompts, mask = left_pad(ids, policy.pad_token, policy.lm.device)
        config = sampling_config(policy, 1.0, 1.0, args.max_new_tokens, n)
        config.update(output_logits=True, return_dict_in_generate=True)
        with seeded(SEED, policy.lm.device):
            output = policy.lm.generate(input_ids=prompts, attention_mask=mask.long(), generation_config=config)
        assert torch.equal(output.sequences[:, prompts.shape[1] :], batch["completions"])
        logprobs = torch.stack(output.logits, dim=1).float().log_softmax(-1)
        batch["rollout_logprobs"] = logprobs.gather(-1, batch["completions"][..., None])[..., 0]
    return batch


@torch.no_grad()
def plain_logprobs(policy, batch):
    """Log-probs (R, T) by the model as it is: all logits, one row at a time, without padding, cache or sharing."""
    expected = torch.zeros(batch["completions"].shape)
    for i, (prompt_mask, mask) in enumerate(zip(batch["prompt_mask"], batch["completion_mask"], strict=True)):
        prompt, completion = batch["prompts"][i][prompt_mask], batch["completions"][i][mask]
        logits = policy.lm(torch.cat([prompt, completion])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected[i, : len(completion)] = logits.float().log_softmax(-1).gather(-1, completion[:, None])[:, 0]
    return expected


def checkpointing(policy, batch):
    """Whether --gradient_checkpointing gives the same gradient, and keeps fewer numbers for it."""
    policy.train()
    batch = {name: x for name, x in batch.items() if name != "prompt_index"}  # it goes without sharing
    expected, numbers = gradient(policy, batch)
    try:
        enable_checkpointing(policy.lm)
    except InputError:
        return "refused"
    ours, fewer = gradient(policy, batch)
    if not torch.allclose(ours, expected, rtol=0, atol=1e-4 * float(expected.abs().max())):
        return "wrong"
    return "works" if fewer < numbers else "without effect"


def gradient(policy, batch):
    """The gradient of the sum of the log-probs, flat, and how many numbers the forward kept for it."""
    kept = []
    policy.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        logprobs, _ = policy(batch, with_entropy=False)
    logprobs.sum().backward()
    return torch.cat([x.grad.flatten() for x in policy.parameters() if x.grad is not None]), sum(kept)


def as_line(cells):
    return f"| {' | '.join(cells)} |"


def small_models(names):
    """The row of a small random model of each architecture."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)  # some architectures load one of their own in its place
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            build(name, folder)
            cells = row(folder, tokenizer)
        yield [name, *cells]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="folders or hub ids; with --small architectures [all]")
    parser.add_argument("--small", action="store_true", help="make a small random model of each architecture")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = small_models(args.models or MODELS) if args.small else ([name, *row(name)] for name in args.models)
    print(as_line(COLUMNS), "|" + "---|" * len(COLUMNS), sep="\n")
    for cells in rows:
        print(as_line(cells), flush=True)


if __name__ == "__main__":
    main()
