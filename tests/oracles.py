"""The worked examples of oracles.json, computed from the papers' formulas by loops over lists: no tensors, and nothing
of this project.

    python tests/oracles.py            writes tests/oracles.json

Tests hold the project's functions to these numbers, and test_oracles.py holds the file to this page. A table is a list
of rows of unequal lengths. Gradients stand here in closed form and are checked against central differences.
"""

import functools
import json
import math
import pathlib

FILE = pathlib.Path(__file__).with_suffix(".json")
B1 = {  # log-probs of four completions, and their rewards as 1/0 and as +1/-1
    "old": [[-0.5, -1.2, -0.3], [-2.0, -0.1, -0.7, -1.5, -0.4], [-0.9, -3.0], [-0.05, -0.6, -1.1, -0.2]],
    "new": [[-0.2, -1.3, -0.35], [-2.5, -0.12, -0.4, -1.5, -0.9], [-0.3, -1.5], [-0.04, -0.9, -1.0, -0.21]],
    "ref": [[-0.6, -1.1, -0.3], [-1.8, -0.2, -0.7, -1.4, -0.5], [-1.0, -2.5], [-0.1, -0.6, -1.2, -0.2]],
    "R01": [1, 0, 0, 1],
    "Rpm": [1, -1, -1, 1],
}
OLD, NEW, REF = B1["old"], B1["new"], B1["ref"]
TOKENS = sum(map(len, NEW))


# --- what the examples share ---


def rounded(how, values):
    """Numbers in nested lists, each rounded by `how`."""
    return [rounded(how, value) for value in values] if isinstance(values, list | tuple) else how(values)


decimals = functools.partial(rounded, lambda x: round(float(x), 9))
digits = functools.partial(rounded, lambda x: float(f"{x:.12g}"))


def each(function, *tables):
    """A table of `function` of the cells of tables of one shape."""
    return [[function(*cells) for cells in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]


def spread(values, table):
    """A table of the shape of `table` that has one value in each row."""
    return [[value] * len(row) for value, row in zip(values, table, strict=True)]


def check_gradient(function, place, gradient):
    """Whether the gradient of a function of a number is that of central differences."""
    assert abs((function(place + 1e-6) - function(place - 1e-6)) / 2e-6 - gradient) < 1e-7


def mean(values):
    return sum(values) / len(values)


def variance(values, ddof):
    return sum((value - mean(values)) ** 2 for value in values) / (len(values) - ddof)


def group_advantages(rewards, ddof=1, eps=1e-6):
    return [(reward - mean(rewards)) / (math.sqrt(variance(rewards, ddof)) + eps) for reward in rewards]


def clip(value, bounds):
    return min(max(value, bounds[0]), bounds[1])


def token_loss(new, old, advantage, bounds, dual=None):
    """PPO's clipped objective with a minus; `dual` caps the ratio where the advantage is negative."""
    ratio = math.exp(new - old)
    objective = min(ratio * advantage, clip(ratio, bounds) * advantage)
    return -max(objective, dual * advantage) if dual and advantage < 0 else -objective


def token_gradient(new, old, advantage, bounds, weight, dual=None):
    """By the new log-prob, of the loss above times `weight`: 0 where a bound acts."""
    ratio = math.exp(new - old)
    above, below = advantage > 0 and ratio > bounds[1], advantage < 0 and ratio < bounds[0]
    if above or below or (dual and advantage < 0 and ratio > dual):
        return 0.0
    gradient = -advantage * ratio
    check_gradient(lambda x: token_loss(x, old, advantage, bounds, dual), new, gradient)
    return weight * gradient


def losses(advantages, bounds, dual=None):
    """The table of the losses of B1."""
    return each(functools.partial(token_loss, dual=dual), NEW, OLD, advantages, bounds)


def loss_gradients(advantages, bounds, weights, dual=None):
    return each(functools.partial(token_gradient, dual=dual), NEW, OLD, advantages, bounds, weights)


def fixed(low, high):
    """The bounds of the ratio, 1 - low and 1 + high, of each token of B1."""
    return each(lambda _: (1 - low, 1 + high), NEW)


def token_mean(table):
    return sum(map(sum, table)) / sum(map(len, table))


def sum_of_means(table):
    return sum(map(mean, table))


def mean_of_means(table):
    return sum_of_means(table) / len(table)


def k3(logprob, ref):
    return math.exp(ref - logprob) - (ref - logprob) - 1


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# --- the policy's loss ---


def ppo_policy():
    advantages = [[0.5, -0.3, 1.0], [-1.0, 0.4, -0.6, 0.2, -0.8], [-1.2, -0.7], [0.9, 0.9, -0.1, 0.3]]
    bounds, weights = fixed(0.2, 0.2), each(lambda _: 1 / TOKENS, NEW)
    table = losses(advantages, bounds, dual=3.0)
    return {
        "adv": advantages,
        "eps": 0.2,
        "c": 3.0,
        "token_loss": decimals(table),
        "loss_token_mean": decimals(token_mean(table)),
        "loss_no_dual": decimals(token_mean(losses(advantages, bounds))),
        "grad": decimals(loss_gradients(advantages, bounds, weights, dual=3.0)),
    }


def grpo():
    advantages = group_advantages(B1["R01"])
    bounds, weights = fixed(0.2, 0.2), each(lambda _: 0.25, NEW)
    weights = [[weight / len(row) for weight in row] for row in weights]
    table, kl = losses(spread(advantages, NEW), bounds), each(k3, NEW, REF)
    kl_gradient = each(lambda new, ref, weight: (1 - math.exp(ref - new)) * weight, NEW, REF, weights)
    return {
        "adv": decimals(advantages),
        "token_loss": decimals(table),
        "k3": decimals(kl),
        "pg": decimals(mean_of_means(table)),
        "kl": decimals(mean_of_means(kl)),
        "total_beta004": decimals(mean_of_means(table) + 0.04 * mean_of_means(kl)),
        "grad_pg": decimals(loss_gradients(spread(advantages, NEW), bounds, weights)),
        "grad_kl_only": decimals(kl_gradient),
        "agg": {
            "token_mean": decimals(token_mean(table)),
            "seq_mean_token_mean": decimals(mean_of_means(table)),
            "seq_mean_token_sum": decimals(mean(list(map(sum, table)))),
            "drgrpo_const8": decimals(mean([sum(row) / 8 for row in table])),
            "otm": decimals(sum_of_means(table)),
        },
    }


def dapo():
    advantages = group_advantages(B1["Rpm"])
    rows, bounds = spread(advantages, NEW), fixed(0.2, 0.28)
    table, weights = losses(rows, bounds), each(lambda _: 1 / TOKENS, NEW)
    return {
        "adv": decimals(advantages),
        "token_loss": decimals(table),
        "loss": decimals(token_mean(table)),
        "loss_dual3": decimals(token_mean(losses(rows, bounds, dual=3.0))),
        "grad": decimals(loss_gradients(rows, bounds, weights)),
    }


def drgrpo():
    advantages = [reward - mean(B1["R01"]) for reward in B1["R01"]]
    rows, bounds, weights = spread(advantages, NEW), fixed(0.2, 0.2), each(lambda _: 1 / 32, NEW)
    return {
        "adv": decimals(advantages),
        "const": 8,
        "loss": decimals(mean([sum(row) / 8 for row in losses(rows, bounds)])),
        "grad": decimals(loss_gradients(rows, bounds, weights)),
    }


def dynamic_bounds(probability):
    """DCPO's bounds of the ratio of a token of this old probability, for epsilons 0.16 and 0.2, at most 10."""
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / probability, 0))
    return low, min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / probability), 10.0)


def dcpo_loss():
    advantages = group_advantages(B1["R01"])
    rows, bounds = spread(advantages, NEW), each(lambda old: dynamic_bounds(math.exp(old)), OLD)
    table, weights = losses(rows, bounds, dual=10.0), [[1 / len(row)] * len(row) for row in NEW]
    return {
        "adv": decimals(advantages),
        "bounds": decimals(bounds),
        "token_loss": decimals(table),
        "otm": decimals(sum_of_means(table)),
        "seq_mean": decimals(mean_of_means(table)),
        "token_mean": decimals(token_mean(table)),
        "sum_over_G": decimals(mean(list(map(sum, table)))),
        "grad_otm": decimals(loss_gradients(rows, bounds, weights, dual=10.0)),
    }


def smooth_advantages(ddof):
    """DCPO's smooth advantage standardization over four visits of a prompt; ddof 1 is that of the official code."""
    visits, total_mean, total_variance, results = 0, 0.0, 0.0, []
    for rewards in ([1, 0, 0, -1], [1, 1, 1, 1], [1, 1, 0, 1], [0, 0, 0, 1]):
        rewards, i = list(map(float, rewards)), visits + 1
        new_mean, new_variance = mean(rewards), variance(rewards, ddof)
        between = visits / i * (new_mean - total_mean) ** 2
        total_variance = (visits * total_variance + new_variance + between) / i
        total_mean = (visits * total_mean + new_mean) / i
        advantages = []
        for reward in rewards:
            new = (reward - new_mean) / math.sqrt(new_variance) if new_variance else 0.0
            total = (reward - total_mean) / math.sqrt(total_variance) if total_variance else 0.0
            towards_new, towards_total = (visits * new + total) / i, (new + visits * total) / i
            advantages.append(towards_new if abs(towards_new) < abs(towards_total) else towards_total)
        results.append({
            "R": rewards,
            "i": i,
            "mu_new": decimals(new_mean),
            "sd_new": decimals(math.sqrt(new_variance)),
            "mu_tot": decimals(total_mean),
            "sd_tot": decimals(math.sqrt(total_variance)),
            "A": decimals(advantages),
        })  # fmt: skip
        visits = i
    return results


def gspo():
    old = [[-0.5, -1.2, -0.3], [-2.0, -0.1, -0.7, -1.5], [-0.9, -3.0], [-0.05, -0.6, -1.1, -0.2, -0.4]]
    change = [
        [0.0009, -0.0003, 0.0009], [0.0004, -0.0010, 0.0002, -0.0012], [0.0012, -0.0004],
        [-0.0010, 0.0005, 0.0, 0.0006, 0.0004],
    ]  # fmt: skip
    advantages, bounds = decimals(group_advantages(B1["R01"])), (1 - 3e-4, 1 + 4e-4)
    logs = list(map(mean, change))  # the log of a row's ratio
    weights = [[0.25 / len(row)] * len(row) for row in old]
    row_losses = [token_loss(log, 0.0, advantage, bounds) for log, advantage in zip(logs, advantages, strict=True)]
    gradient = functools.partial(token_gradient, old=0.0, bounds=bounds)
    active = [gradient(log, advantage=a, weight=1.0) for log, a in zip(logs, advantages, strict=True)]
    token_advantages = [[0.5, -0.3, 1], [-1, 0.4, -0.6, 0.2], [-1.2, -0.7], [0.9, 0.9, -0.1, 0.3, 0.2]]
    ratios = spread(logs, old)
    return {
        "old": old,
        "diff": change,
        "adv": advantages,
        "s": decimals([math.exp(log) for log in logs]),
        "loss": digits(mean(row_losses)),
        "grad": digits(each(lambda slope, weight: slope * weight, spread(active, old), weights)),
        "clipped": [slope == 0 for slope in active],
        "token": {
            "adv": token_advantages,
            "loss": digits(
                mean_of_means(each(lambda log, a: token_loss(log, 0.0, a, bounds), ratios, token_advantages))
            ),
            "grad": digits(
                each(lambda log, a, w: gradient(log, advantage=a, weight=w), ratios, token_advantages, weights)
            ),
        },
    }


def soft_overlong(length):
    """DAPO's punishment for at most 10 tokens, of which the last 4 cost."""
    return clip((6 - length) / 4, (-1.0, 0.0))


def overlong_filter(table):
    """DAPO's losses without row 1: what is counted is 3 of 4 rows."""
    kept = [table[i] for i in (0, 2, 3)]
    return {"token_mean": digits(token_mean(kept)), "seq_mean_counted": digits(sum_of_means(kept) / 4)}


# --- PPO's other parts ---


def gae():
    old, ref, values = [-1.0, -0.5, -2.0, -0.1], [-1.2, -0.4, -1.5, -0.1], [0.2, 0.1, 0.4, 0.5]
    rewards = [-0.1 * (a - b) for a, b in zip(old, ref, strict=True)]
    rewards[-1] += 1.0  # the score, on the last token

    def advantages(lam):
        found, advantage, next_value = [], 0.0, 0.0
        for reward, value in zip(rewards[::-1], values[::-1], strict=True):
            advantage = reward + next_value - value + lam * advantage
            next_value = value
            found.insert(0, advantage)
        return found

    def whitened(ddof):
        scale = math.sqrt(variance(advantages(0.95), ddof) + 1e-8)
        return [(advantage - mean(advantages(0.95))) / scale for advantage in advantages(0.95)]

    return {
        "old": old,
        "ref": ref,
        "values": values,
        "score": 1.0,
        "beta": 0.1,
        "gamma": 1.0,
        "lam": 0.95,
        "rewards": decimals(rewards),
        "adv": decimals(advantages(0.95)),
        "returns": decimals([a + value for a, value in zip(advantages(0.95), values, strict=True)]),
        "whiten_ddof1": decimals(whitened(1)),
        "whiten_ddof0": decimals(whitened(0)),
        "adv_lam1": decimals(advantages(1.0)),
    }


def value_loss():
    values, old_values, returns, gradients = [0.9, 0.15, -0.3, 0.5], [0.5, 0.1, 0.2, 0.5], [1, 0, 0.4, 0.8], []
    around = [
        (value, (old - 0.2, old + 0.2), target) for value, old, target in zip(values, old_values, returns, strict=True)
    ]
    plain = [(value - target) ** 2 for value, _, target in around]
    clipped = [(clip(value, bounds) - target) ** 2 for value, bounds, target in around]
    for (value, bounds, target), a, b in zip(around, plain, clipped, strict=True):
        inside = bounds[0] <= value <= bounds[1]
        gradients.append(value - target if a >= b or inside else 0.0)
    return {
        "values": values,
        "old_values": old_values,
        "returns": returns,
        "clip": 0.2,
        "terms": digits(list(map(max, plain, clipped))),
        "loss": digits(mean(list(map(max, plain, clipped))) / 2),
        "grad": digits([gradient / 4 for gradient in gradients]),
        "clipfrac": mean([b > a for a, b in zip(plain, clipped, strict=True)]),
        "loss_unclipped": digits(mean(plain) / 2),
    }


def adaptive_kl():
    measured = [9, 5.4]
    after = [0.2 * (1 + clip(kl / 6 - 1, (-0.2, 0.2)) * 256 / 10000) for kl in measured]
    return {"beta": 0.2, "target": 6, "horizon": 10000, "n": 256, "kl": measured, "beta_after": digits(after)}


def kl_estimators():
    """The three estimators over a vocabulary of three, and their gradients by the policy's logits, in expectation."""
    theta, ref_theta = [0.3, -0.2, 0.1], [0, 0.5, -0.4]

    def softmax(logits):
        return [math.exp(x - math.log(sum(map(math.exp, logits)))) for x in logits]

    p, q = softmax(theta), softmax(ref_theta)
    d = [math.log(b) - math.log(a) for a, b in zip(p, q, strict=True)]
    estimates = {"k1": [-x for x in d], "k2": [x * x / 2 for x in d], "k3": [math.exp(x) - x - 1 for x in d]}
    slopes = {"k1": [1.0] * 3, "k2": [-x for x in d], "k3": [1 - math.exp(x) for x in d]}  # by the token's log-prob

    def expected(values):
        return sum(a * value for a, value in zip(p, values, strict=True))

    def expected_gradient(slopes):
        return [expected([slope * ((v == j) - p[j]) for v, slope in enumerate(slopes)]) for j in range(3)]

    return {
        "theta": theta,
        "ref": ref_theta,
        "kl_policy_ref": digits(sum(a * -x for a, x in zip(p, d, strict=True))),
        "kl_ref_policy": digits(sum(b * x for b, x in zip(q, d, strict=True))),
        "expect": {name: digits(expected(values)) for name, values in estimates.items()},
        "expected_gradient": {name: digits(expected_gradient(values)) for name, values in slopes.items()},
    }


# --- preference pairs ---


def dpo():
    chosen, rejected, ref_chosen, ref_rejected = [-12.0, -30.5], [-15.0, -28.0], [-13.0, -31.0], [-14.0, -29.5]
    lengths = ([10, 20], [8, 25])
    pairs = list(zip(chosen, rejected, ref_chosen, ref_rejected, strict=True))
    margins = [(a - b) - (c - d) for a, b, c, d in pairs]

    def smoothed(beta, smoothing):
        return lambda h: -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)

    def robust(beta):
        return lambda h: (-0.9 * log_sigmoid(beta * h) + 0.1 * log_sigmoid(-beta * h)) / 0.8

    def of_beta(beta):
        functions = {
            "dpo": smoothed(beta, 0.0),
            "cdpo01": smoothed(beta, 0.1),
            "ipo": lambda h: (h - 1 / (2 * beta)) ** 2,
            "robust01": robust(beta),
        }
        slopes = {
            "dpo": lambda h: -beta * sigmoid(-beta * h),
            "cdpo01": lambda h: -beta * (0.9 * sigmoid(-beta * h) - 0.1 * sigmoid(beta * h)),
            "ipo": lambda h: 2 * (h - 1 / (2 * beta)),
            "robust01": lambda h: -beta * (0.9 * sigmoid(-beta * h) + 0.1 * sigmoid(beta * h)) / 0.8,
        }
        for name, slope in slopes.items():
            for margin in margins:
                check_gradient(functions[name], margin, slope(margin))
        per_token = [
            ((a - c) / n - (b - d) / m - 1 / (2 * beta)) ** 2
            for (a, b, c, d), n, m in zip(pairs, *lengths, strict=True)
        ]
        return {
            **{name: decimals(list(map(functions[name], margins))) for name in ("dpo", "cdpo01", "ipo")},
            "ipo_lennorm": decimals(per_token),
            "robust01": digits(list(map(functions["robust01"], margins))),
            "reference_free": digits([-log_sigmoid(beta * (a - b)) for a, b, _, _ in pairs]),
            "grad_chosen": {name: digits(list(map(slope, margins))) for name, slope in slopes.items()},
            "rewards_chosen": digits([beta * (a - c) for a, _, c, _ in pairs]),
            "rewards_rejected": digits([beta * (b - d) for _, b, _, d in pairs]),
        }

    return {
        "policy_chosen": chosen,
        "policy_rejected": rejected,
        "ref_chosen": ref_chosen,
        "ref_rejected": ref_rejected,
        "n_chosen": lengths[0],
        "n_rejected": lengths[1],
        "h": margins,
        "beta0.1": of_beta(0.1),
        "beta0.5": of_beta(0.5),
    }


def reward_model():
    chosen, rejected = [1.2, -0.3, 4.0], [0.7, 0.4, -2.0]
    loss = -mean([log_sigmoid(a - b) for a, b in zip(chosen, rejected, strict=True)])
    return {"chosen": chosen, "rejected": rejected, "loss": digits(loss), "accuracy": 2 / 3}


def examples():
    """All of them, {name: {name: numbers}}."""
    return {
        "B1": B1,
        "ppo_policy": ppo_policy(),
        "grpo": grpo(),
        "dapo": dapo(),
        "drgrpo": drgrpo(),
        "dcpo_loss": dcpo_loss(),
        "sas_ddof0": smooth_advantages(0),
        "sas_ddof1": smooth_advantages(1),
        "dac": {str(q): decimals(dynamic_bounds(q)) for q in (1.0, 0.9, 1 / 1.2, 0.64, 0.5, 0.1, 0.01, 1 / 450, 0.001)},
        "gspo": gspo(),
        "soft_overlong_10_4": {str(length): decimals(soft_overlong(length)) for length in range(5, 12)},
        "dpo": dpo(),
        "gae": gae(),
        "value_loss": value_loss(),
        "adaptive_kl": adaptive_kl(),
        "overlong_filter_row1": overlong_filter(dapo()["token_loss"]),
        "kl": kl_estimators(),
        "reward_model": reward_model(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(examples(), indent=1), encoding="utf-8", newline="\n")
