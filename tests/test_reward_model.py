"""reward_model.py: scores at the end of the turn, the same when transformers loads the folder."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import grpo
import reward_model
from common.load import EMBEDDED, load_data, load_tokenizer
from common.pairs import Pair, given_batch, pair_batches, read_pairs
from common.rewards import load_rewards
from common.run import Exit
from reward_model import add_pad_token, load_reward, load_reward_model
from rows import gemma_tokenizer, pairs_from
from small_models import reward_model_of, save_reward_model, small_model
from testbed import ROOT, embedded, metric_rows

# --- the script ---


def prepared(**options):
    args = reward_model.Args(**options)
    tokenizer = load_tokenizer(args.model_name_or_path)
    return args, tokenizer, load_reward_model(args.model_name_or_path, args, new_head=True)


def run(folder, *words):
    reward_model.main([*map(str, words), "--output_dir", str(folder)])
    return metric_rows(folder)


def pair_batch(pairs, args):
    """The pairs as one batch."""
    args.micro_batch_size = 2 * len(pairs)
    (batch,) = pair_batches(pairs, args, "cpu")
    return batch


def test_score_ignores_padding_and_neighbours():
    args, tokenizer, model = prepared()
    torch.nn.init.normal_(model.lm.score.weight, generator=torch.Generator().manual_seed(0))
    pairs = sorted(load_data(read_pairs, args, tokenizer)[1][:16], key=Pair.length)
    with torch.no_grad():
        together = model(pair_batch(pairs, args))
        alone = torch.cat([model(pair_batch([pair], args)) for pair in pairs]).view(16, 2).T.flatten()
        batch = pair_batch(pairs, args)
        for name in ("prompts", "completions"):  # garbage beside the mask
            mask = batch["prompt_mask" if name == "prompts" else "completion_mask"]
            batch[name] = torch.where(mask, batch[name], 7)
        garbage = model(batch)
    assert torch.allclose(together, alone, atol=1e-5) and torch.equal(together, garbage)
    assert float(together.std()) > 0.1


def stock_scores(folder, texts, padding_side):
    """Return scores computed with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=padding_side)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    inputs = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True)
    with torch.no_grad():
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_saved_model_gives_the_same_scores(pad, few_pairs, tmp_path):
    # Transformers finds the last token as the last that is not padding. Where pad is EOS that is the one before EOS,
    # which has another score, and nothing says so.
    source = ROOT / "common" / "tiny"
    if pad != "own":
        tokenizer, lm = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source)
        tokenizer.pad_token = tokenizer.eos_token if pad == "eos" else None
        lm.config.pad_token_id = tokenizer.pad_token_id
        source = tmp_path / "source"
        lm.save_pretrained(source)
        tokenizer.save_pretrained(source)
    folder = tmp_path / "run"
    run(folder, *few_pairs, "--max_steps", 2, "--eval_every", 0, "--model_name_or_path", source)
    assert load_file(folder / "model" / "model.safetensors")["score.weight"].abs().max() > 0
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id

    args, tokenizer, model = prepared(model_name_or_path=str(folder / "model"))
    pairs = sorted(load_data(read_pairs, args, tokenizer)[1][:12], key=Pair.length)
    with torch.no_grad():
        own = model(pair_batch(pairs, args))
    rows = [(pair.prompt, pair.chosen) for pair in pairs] + [(pair.prompt, pair.rejected) for pair in pairs]
    texts = [tokenizer.decode(prompt) + tokenizer.decode(ids[:-1]) for prompt, ids in rows]
    for side in ("left", "right"):
        assert torch.allclose(own, stock_scores(folder / "model", texts, side), atol=1e-5)
    assert float(own.std()) > 1e-3


def test_loaded_head_is_trained_further(few_pairs, tmp_path):
    *_, a = run(tmp_path / "a", *few_pairs, "--max_steps", 3)
    model = tmp_path / "a" / "model"
    (b,) = run(tmp_path / "b", *few_pairs, "--max_steps", 0, "--model_name_or_path", model)
    assert b["eval/loss"] == pytest.approx(a["eval/loss"], abs=1e-6) and b["eval/accuracy"] == a["eval/accuracy"]


def test_it_learns(tmp_path):
    """A few steps on the embedded pairs: held-out accuracy from a half to nine tenths."""
    rows = run(tmp_path, *"--max_steps 40 --pairs_per_step 16 --eval_every 0".split())
    assert rows[0]["eval/accuracy"] == 0.5 and rows[0]["eval/loss"] == pytest.approx(math.log(2))
    assert rows[-1]["eval/accuracy"] >= 0.88 and rows[-1]["eval/margin"] > 1
    assert rows[1]["optim/loss"] == pytest.approx(math.log(2))


# --- a reward model as a reward ---


def gemma_reward_model(folder, tokenizer):
    config = dict(vocab_size=len(tokenizer), num_labels=1, pad_token_id=0, hidden_size=32)
    return small_model(folder, AutoModelForSequenceClassification, "llama", tokenizer, **config)


def test_score_is_at_the_turns_end(tmp_path):
    # Prompt, answer, <end_of_turn>, as the chat template renders them, and nothing behind.
    tokenizer = gemma_tokenizer()
    folder = gemma_reward_model(tmp_path / "rm", tokenizer)
    stock = AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n")
    assert text.endswith("4<end_of_turn>")
    with torch.no_grad():
        expected = float(stock(torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])).logits)
        (pair,) = pairs_from(tmp_path, tokenizer, ("2+2?", "4", "5"))
        trained = float(reward_model_of(folder)(given_batch([pair.prompt], [pair.chosen], "cpu")))
        loaded = load_reward(str(folder), grpo.Args())
    (score,) = loaded(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert trained == pytest.approx(expected, abs=1e-6)
    assert score == pytest.approx(expected, abs=1e-6)


def test_pad_token_differs_from_turn_end(tmp_path):
    """Others read the score at the last token that is not padding: that would be the one before the end of the turn."""
    tokenizer = gemma_tokenizer()
    tokenizer.pad_token = "<end_of_turn>"
    lm = reward_model_of(gemma_reward_model(tmp_path / "rm", tokenizer)).lm
    add_pad_token(lm, tokenizer)
    assert tokenizer.pad_token == "<|pad|>" and lm.config.pad_token_id == tokenizer.pad_token_id
    assert lm.get_input_embeddings().weight.shape[0] >= len(tokenizer)


def test_template_columns_are_read(tmp_path):
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = "{{ 'tool' if tools else '' }}" + tokenizer.chat_template
    asked = load_reward(str(gemma_reward_model(tmp_path / "rm", tokenizer)), grpo.Args())
    tools = [[{"type": "function", "function": {"name": "add"}}], None]
    with_tool, without = asked(prompts=["2+2?"] * 2, completions=["4"] * 2, truncated=[0, 0], tools=tools)
    (plain,) = asked(prompts=["2+2?"], completions=["4"], truncated=[False])
    assert without == pytest.approx(plain, abs=1e-6) and abs(with_tool - plain) > 1e-4


# An answer's thought goes into its block; without thinking the prompt ends with an empty block.
THINKING = (
    "{% for m in messages %}<start_of_turn>{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    "{% set parts = m.content.split('</t>') %}<t>{{ parts[0].split('<t>')[-1] if parts[1:] else '' }}</t>{{ parts[-1] }}"
    "{% endif %}<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>"
    "{% if enable_thinking is false %}<t></t>{% endif %}{% endif %}"
)


@pytest.mark.parametrize("text", ["4", "<t>so 4", "4</t>4", "", "<end_of_turn>"])
def test_sampled_text_is_scored_unchanged(text, tmp_path):
    tokenizer = gemma_tokenizer(THINKING)
    folder = gemma_reward_model(tmp_path / "rm", tokenizer)
    (score,) = load_reward(str(folder), grpo.Args(chat_template_kwargs='{"enable_thinking": false}'))(
        prompts=["2?"], completions=[text], truncated=[False]
    )
    whole = f"<start_of_turn>2?<end_of_turn><start_of_turn><t></t>{text.removesuffix('<end_of_turn>')}<end_of_turn>"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        ids = torch.tensor([tokenizer(whole, add_special_tokens=False).input_ids])
        assert score == pytest.approx(float(model(ids).logits), abs=1e-6)


def test_truncated_completion_scores_differently(tmp_path):
    folder = small_model(tmp_path / "rm", AutoModelForSequenceClassification, "llama", num_labels=1, pad_token_id=0)
    asked = load_reward(str(folder), grpo.Args())
    scores = asked(prompts=["1+2?"] * 2, completions=["3", "3"], truncated=[False, True])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = tokenizer("1+2?").input_ids + tokenizer("3").input_ids
    with torch.no_grad():
        for end, score in zip(([tokenizer.eos_token_id], []), scores, strict=True):
            assert score == pytest.approx(float(model(torch.tensor([ids + end])).logits), abs=1e-6)
    assert abs(scores[0] - scores[1]) > 1e-3


def test_several_reward_models_have_weights(tmp_path):
    _, _, tokenizer, _ = embedded()
    paths = [tmp_path / name / "model" for name in ("a", "b")]
    for path in paths:
        save_reward_model(path, tokenizer)
    args = grpo.Args(reward=[f"rm:{path}" for path in paths] + ["accuracy"], reward_weights=[1.0, 0.5, 2.0])
    rewards = load_rewards(args)
    assert [(reward.name, reward.weight) for reward in rewards] == [("model", 1.0), ("model_2", 0.5), ("accuracy", 2.0)]


def test_other_models_are_refused(tmp_path):
    _, _, tokenizer, _ = embedded()
    save_reward_model(tmp_path / "two", tokenizer, id2label={0: "a", 1: "b"}, label2id={"a": 0, "b": 1})
    options = dict(num_labels=2, ignore_mismatched_sizes=True)
    two = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two", **options)
    two.save_pretrained(tmp_path / "two")
    for path, message in ((EMBEDDED["embedded"], "score.weight"), (tmp_path / "no", "no"), (tmp_path / "two", "score")):
        with pytest.raises(Exit, match=message) as error:
            load_reward(str(path), grpo.Args())
        assert "\n" not in str(error.value)


THINKS = (  # an answer's thought goes into its block; without thinking the prompt ends with an empty block
    r"{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    r"{% set parts = m.content.split('</think>') %}{{ '<think>' + (parts[0].split('<think>')[-1] if parts[1:] else '') }}"
    r"{{ '</think>' + parts[-1] }}{% endif %}{{ '<eos>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    r"{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("text", ["4", "<think>so 4", "4</think>4", ""])
def test_any_sample_has_a_score(text, tmp_path):
    """Rendered by the template, a sampled </think> was another prompt, and ended the run."""
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = THINKS
    args = grpo.Args(chat_template_kwargs='{"enable_thinking": false}')
    asked = load_reward(str(gemma_reward_model(tmp_path / "rm", tokenizer)), args)
    (score,) = asked(prompts=["2+2?"], completions=[text], truncated=[False])
    assert math.isfinite(score)
