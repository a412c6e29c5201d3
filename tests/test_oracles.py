"""The functions of the scripts on the worked examples of oracles.json, and that file against the papers' formulas."""

import json
import math

import pytest
import torch

import dapo
import dcpo
import dpo
import oracles
import ppo
import reward_model
from common.masked import kl_estimate, moments
from testbed import ORACLES, advantages_of, ragged, script, totals_of

B1, GRPO, DCPO, GSPO, PPO = (ORACLES[name] for name in ("B1", "grpo", "dcpo_loss", "gspo", "ppo_policy"))
DPO, GAE, VALUE = (ORACLES[name] for name in ("dpo", "gae", "value_loss"))
DTYPES = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-9)])


def row(values):
    return torch.tensor([values], dtype=torch.float64)


# --- the file ---


def same(mine, others):
    """Whether two nested examples are equal; versions of torch may round the last of twelve digits differently."""
    if isinstance(mine, dict):
        return mine.keys() == others.keys() and all(same(mine[key], others[key]) for key in mine)
    if isinstance(mine, list):
        return len(mine) == len(others) and all(map(same, mine, others))
    return mine == pytest.approx(others, rel=1e-10, abs=1e-11) if isinstance(mine, float) else mine == others


def test_the_file_is_what_the_formulas_give():
    assert same(json.loads(oracles.FILE.read_text(encoding="utf-8")), json.loads(json.dumps(oracles.examples())))


# --- losses of the policy ---


def losses_of(name, example, dtype, rewards=None, advantages=None, without_row=None, **options):
    """The loss of an example as one optimizer step of one group, the losses of its tokens, and its log-probs."""
    module = script(name)
    args = module.Args(group_size=4, **options)
    old, mask = ragged(example["old"], dtype)
    new = ragged(example["new"], dtype)[0] if "new" in example else old + ragged(example["diff"], dtype)[0]
    ref = ragged(example["ref"], dtype)[0] if args.kl_coef else None
    new.requires_grad_()
    if rewards is not None:
        advantages = advantages_of(module, torch.tensor(rewards, dtype=dtype), args).to(dtype)
    else:
        advantages = ragged(advantages, dtype)[0]
    if without_row is not None:
        mask[without_row] = False
    losses, _ = module.policy_loss(new, old, advantages, mask, args, ref)
    return (losses * module.token_weights(mask, totals_of(mask, 4), args)).sum(), losses, new


R01, RPM, TOKENS = B1["R01"], B1["Rpm"], GSPO["token"]["adv"]
CASES = {  # the script, its example and options; then the loss, its gradient, and the losses of the tokens, if known
    "grpo": (
        "grpo", B1, dict(rewards=R01, kl_coef=0.0), GRPO["pg"], GRPO["grad_pg"], GRPO["token_loss"]),
    "grpo with the KL": ("grpo", B1, dict(rewards=R01), GRPO["total_beta004"], None, None),
    "grpo, the KL alone": (
        "grpo", B1, dict(rewards=[0] * 4, kl_coef=1.0), GRPO["kl"], GRPO["grad_kl_only"], GRPO["k3"]),
    "dr_grpo": (
        "dr_grpo", B1, dict(rewards=R01, max_new_tokens=8), ORACLES["drgrpo"]["loss"], ORACLES["drgrpo"]["grad"], None),
    "dapo": (
        "dapo", B1, dict(rewards=RPM), ORACLES["dapo"]["loss"], ORACLES["dapo"]["grad"], ORACLES["dapo"]["token_loss"]),
    "dapo with dual clip": ("dapo", B1, dict(rewards=RPM, dual_clip=3.0), ORACLES["dapo"]["loss_dual3"], None, None),
    "dapo with a filtered row": (
        "dapo", B1, dict(rewards=RPM, without_row=1), ORACLES["overlong_filter_row1"]["token_mean"], None, None),
    "gspo": ("gspo", GSPO, dict(advantages=[[a] for a in GSPO["adv"]]), GSPO["loss"], GSPO["grad"], None),
    "gspo, ratios of tokens": (
        "gspo", GSPO, dict(advantages=[[a] for a in GSPO["adv"]], ratio_level="token"),
        GSPO["loss"], GSPO["grad"], None),
    "gspo, advantages of tokens": (
        "gspo", GSPO, dict(advantages=TOKENS, ratio_level="token"),
        GSPO["token"]["loss"], GSPO["token"]["grad"], None),
    "dcpo": (
        "dcpo", B1, dict(rewards=R01, std_ddof=1, std_eps=1e-6), DCPO["otm"], DCPO["grad_otm"], DCPO["token_loss"]),
    "dcpo, mean over rows": (
        "dcpo", B1, dict(rewards=R01, std_ddof=1, std_eps=1e-6, only_token_mean=False), DCPO["seq_mean"], None, None),
    "ppo with dual clip": (
        "ppo", B1, dict(advantages=PPO["adv"], dual_clip=PPO["c"]),
        PPO["loss_token_mean"], PPO["grad"], PPO["token_loss"]),
    "ppo": ("ppo", B1, dict(advantages=PPO["adv"]), PPO["loss_no_dual"], None, None),
}  # fmt: skip


@DTYPES
@pytest.mark.parametrize("name, example, options, loss, gradient, token_losses", CASES.values(), ids=CASES)
def test_loss_and_gradient(name, example, options, loss, gradient, token_losses, dtype, tolerance):
    found, losses, new = losses_of(name, example, dtype, **options)
    found.backward()
    assert found.item() == pytest.approx(loss, abs=tolerance)
    for values, expected in ((new.grad, gradient), (losses, token_losses)):
        if expected is not None:
            torch.testing.assert_close(values, ragged(expected, dtype)[0], atol=tolerance, rtol=tolerance)


# --- losses of pairs ---

VARIANTS = {
    "dpo": {},
    "cdpo01": dict(label_smoothing=0.1),
    "ipo": dict(loss="ipo"),
    "ipo_lennorm": dict(loss="ipo", ipo_per_token=True),
    "robust01": dict(loss="robust", label_smoothing=0.1),
    "reference_free": dict(reference_free=True),
}


@DTYPES
@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_preference_loss(variant, beta, dtype, tolerance):
    names = "policy_chosen policy_rejected ref_chosen ref_rejected n_chosen n_rejected".split()
    columns, expected = [torch.tensor(DPO[name], dtype=dtype) for name in names], DPO[f"beta{beta}"]
    chosen, rejected = (column.requires_grad_() for column in columns[:2])
    losses = dpo.preference_loss(*columns, dpo.Args(beta=beta, **VARIANTS[variant]))
    assert losses.tolist() == pytest.approx(expected[variant], rel=10 * tolerance, abs=10 * tolerance)
    losses.sum().backward()
    if variant in expected["grad_chosen"]:
        gradient = pytest.approx(expected["grad_chosen"][variant], rel=10 * tolerance, abs=10 * tolerance)
        assert chosen.grad.tolist() == gradient and torch.equal(chosen.grad, -rejected.grad)


@DTYPES
def test_reward_loss(dtype, tolerance):
    example = ORACLES["reward_model"]
    chosen, rejected = (torch.tensor(example[name], dtype=dtype).requires_grad_() for name in ("chosen", "rejected"))
    losses = reward_model.reward_loss(chosen, rejected, reward_model.Args())
    losses.sum().backward()
    assert losses.shape == (3,) and losses.mean().item() == pytest.approx(example["loss"], abs=tolerance)
    torch.testing.assert_close(chosen.grad, -torch.sigmoid(rejected - chosen).detach())
    assert torch.equal(chosen.grad, -rejected.grad)


# --- ppo.py's rewards, advantages, critic and controller ---


def test_rewards_of_tokens():
    mask, truncated = torch.ones(1, 4, dtype=torch.bool), torch.tensor([False])
    kl, score = row(GAE["old"]) - row(GAE["ref"]), torch.tensor([GAE["score"]]).double()
    shaped = ppo.shape_rewards(score, truncated, kl, mask, ppo.Args(), GAE["beta"])
    assert shaped[0].tolist() == pytest.approx(GAE["rewards"], abs=1e-12)  # the KL of the last token is not lost


def test_advantages_and_returns_by_gae():
    rewards, values, mask = row(GAE["rewards"]), row(GAE["values"]), torch.ones(1, 4, dtype=torch.bool)
    advantages, returns = ppo.compute_advantages(rewards, values, mask, ppo.Args(gae_lambda=GAE["lam"]))
    assert advantages[0].tolist() == pytest.approx(GAE["adv"], abs=1e-12)
    assert returns[0].tolist() == pytest.approx(GAE["returns"], abs=1e-12)
    advantages, _ = ppo.compute_advantages(rewards, values, mask, ppo.Args())
    assert advantages[0].tolist() == pytest.approx(GAE["adv_lam1"], abs=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
def test_moments_whiten(ddof):
    values = torch.tensor(GAE["adv"], dtype=torch.float64)
    mean, variance = moments(values, ddof, lambda x: x)
    whitened = (values - mean) / (variance + 1e-8).sqrt()
    assert whitened.tolist() == pytest.approx(GAE[f"whiten_ddof{ddof}"], abs=1e-8)


def test_value_loss():
    new, old, returns = (row(VALUE[name]) for name in ("values", "old_values", "returns"))
    mask = torch.ones(1, 4, dtype=torch.bool)
    losses, stats = ppo.value_loss(new.requires_grad_(), old, returns, mask, ppo.Args(value_clip=VALUE["clip"]))
    losses.mean().backward()
    assert (2 * losses)[0].tolist() == pytest.approx(VALUE["terms"], abs=1e-9)
    assert new.grad[0].tolist() == pytest.approx(VALUE["grad"], abs=1e-9)
    assert stats["clip"][0].tolist() == [True, False, False, False]  # the third is clipped and its own error is larger
    losses, _ = ppo.value_loss(new, old, returns, mask, ppo.Args(value_clip=0.0))
    assert losses.mean().item() == pytest.approx(VALUE["loss_unclipped"], abs=1e-9)


@pytest.mark.parametrize("case", [0, 1])
def test_adaptive_kl(case):
    example = ORACLES["adaptive_kl"]
    args = ppo.Args(kl_coef=example["beta"], kl_target=example["target"], kl_horizon=example["horizon"])
    coefficients = ppo.Coefficients(args)
    coefficients.steer_kl(example["kl"][case], example["n"], args)
    assert coefficients.kl == pytest.approx(example["beta_after"][case], abs=1e-9)


# --- dcpo.py's bounds and visits, dapo.py's punishment, and the estimators of the KL ---


@DTYPES
def test_bounds_of_dcpo(dtype, tolerance):
    q = torch.tensor([[float(q) for q in ORACLES["dac"]]], dtype=dtype)
    low, high = dcpo.clip_bounds(q.log(), torch.ones_like(q).bool(), dcpo.Args())
    expected = torch.tensor(list(ORACLES["dac"].values()), dtype=dtype)
    torch.testing.assert_close(high[0], expected[:, 1], atol=tolerance, rtol=tolerance)
    # Around q = 0.64 the lower bound has the slope of a square root at 0: sqrt(1e-7) in float32.
    allowed = torch.full_like(q[0], tolerance)
    allowed[q[0] == 0.64] = 3e-4 if dtype == torch.float32 else 3e-8
    assert ((low[0] - expected[:, 0]).abs() < allowed).all()


@DTYPES
@pytest.mark.parametrize("ddof", [0, 1])
def test_four_visits_of_dcpo(ddof, dtype, tolerance):
    args, history = dcpo.Args(group_size=4, std_ddof=ddof), torch.zeros(1, 5, dtype=torch.float64)
    for visit in ORACLES[f"sas_ddof{ddof}"]:
        advantages, history = dcpo.compute_advantages(torch.tensor(visit["R"], dtype=dtype), args, history)
        assert advantages[:, 0].tolist() == pytest.approx(visit["A"], abs=tolerance)
        number, mean, variance, low, high = history[0].tolist()
        assert (number, low, high) == (visit["i"], -1, 1) and mean == pytest.approx(visit["mu_tot"], abs=1e-9)
        assert math.sqrt(variance) == pytest.approx(visit["sd_tot"], abs=1e-9)


def test_overlong_punishment_of_dapo():
    # verl#3855 puts the ramp on the wrong side, ms-swift#5557 has another formula, open-r1#567 counts characters.
    args = dapo.Args(overlong="soft", max_new_tokens=10, overlong_cache=4)
    lengths = torch.tensor([int(length) for length in ORACLES["soft_overlong_10_4"]])
    assert dapo.overlong_penalty(lengths, args).tolist() == list(ORACLES["soft_overlong_10_4"].values())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_by_enumeration(estimator):
    # rlhf-book's kl3 and kl1 had the wrong sign; open-instruct#534. Values and expected gradients of a 3-symbol policy.
    example = ORACLES["kl"]
    theta, ref = (torch.tensor(example[name], dtype=torch.float64) for name in ("theta", "ref"))
    policy, mask = theta.requires_grad_().log_softmax(0), torch.ones(1, 3, dtype=torch.bool)
    estimate = kl_estimate(policy[None], ref.log_softmax(0)[None], mask, estimator)[0]
    expectation = (policy.detach().exp() * estimate).sum()  # samples from the policy; the loss sees fixed samples
    assert expectation.item() == pytest.approx(example["expect"][estimator], abs=1e-9)
    (gradient,) = torch.autograd.grad(expectation, theta)
    assert gradient.tolist() == pytest.approx(example["expected_gradient"][estimator], abs=1e-9)
