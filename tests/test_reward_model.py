"""reward_model.py: its scores, which any code gets from the saved folder."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import reward_model
from harness.data import load_data
from harness.loading import load_tokenizer
from harness.pairs import Pair, pair_batches, read_pairs
from harness.reward_models import load_reward_model
from testbed import ROOT, metric_rows


def prepared(**options):
    args = reward_model.Args(**options)
    tokenizer = load_tokenizer(args)
    return args, tokenizer, load_reward_model(args.model_name_or_path, args, new_head=True)


def pair_batch(pairs, args):
    """The pairs as one batch."""
    args.micro_batch_size = 2 * len(pairs)
    (batch,) = pair_batches(pairs, args, "cpu")
    return batch


def with_random_head(model):
    torch.nn.init.normal_(model.lm.score.weight, generator=torch.Generator().manual_seed(0))
    return model


def test_a_score_depends_on_neither_padding_nor_its_neighbours():
    args, tokenizer, model = prepared()
    with_random_head(model)
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
    """The scores of any code that knows Transformers only."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=padding_side)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.num_labels == 1
    inputs = tokenizer([text + tokenizer.eos_token for text in texts], return_tensors="pt", padding=True)
    with torch.no_grad():
        return model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]


@pytest.mark.parametrize("pad", ["own", "eos", "none"])
def test_any_code_gets_the_same_scores_from_the_saved_folder(pad, few_pairs, tmp_path):
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
    options = ["--max_steps", "2", "--eval_every", "0", "--model_name_or_path", source, "--output_dir", folder]
    reward_model.main([*few_pairs, *map(str, options)])
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


def test_a_reward_model_is_loaded_with_its_head_and_trained_on(few_pairs, tmp_path):
    reward_model.main([*few_pairs, "--max_steps", "3", "--output_dir", str(tmp_path / "a")])
    folder = str(tmp_path / "a" / "model")
    reward_model.main(
        [*few_pairs, "--max_steps", "0", "--model_name_or_path", folder, "--output_dir", str(tmp_path / "b")]
    )
    a, b = metric_rows(tmp_path / "a")[-1], metric_rows(tmp_path / "b")[0]
    assert b["eval/loss"] == pytest.approx(a["eval/loss"], abs=1e-6) and b["eval/accuracy"] == a["eval/accuracy"]


def test_it_learns(tmp_path):
    """A few steps on the embedded pairs: held-out accuracy from a half to nine tenths."""
    reward_model.main(
        ["--max_steps", "40", "--pairs_per_step", "16", "--eval_every", "0", "--output_dir", str(tmp_path)]
    )
    rows = metric_rows(tmp_path)
    assert rows[0]["eval/accuracy"] == 0.5 and rows[0]["eval/loss"] == pytest.approx(math.log(2))
    assert rows[-1]["eval/accuracy"] >= 0.88 and rows[-1]["eval/margin"] > 1
    assert rows[1]["optim/loss"] == pytest.approx(math.log(2))
