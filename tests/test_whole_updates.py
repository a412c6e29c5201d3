"""Compare whole updates of every script with a second, literal implementation of its paper.

The script runs as a user runs it, `main` with options. Only its samples are written down here, so that both sides
train on the same completions. The other side is a plain loop: one row at a time, no padding, all logits, float64,
autograd and `torch.optim.AdamW`. It shares nothing with the project but the initial weights and the tokenizer. After
four rollouts of two epochs of two minibatches in unequal micro-batches, with warm-up and a linear schedule, weight
decay, a gradient clip that acts, a KL and temperature 1.3, weights and metrics must be equal.
"""

import json
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common.load import EMBEDDED
from testbed import script

START = EMBEDDED["embedded"]
LIMIT = 20  # max_new_tokens: a completion of so many tokens and no stop token was cut

OPTIMIZER = dict(
    learning_rate=3e-3,
    lr_scheduler="linear",
    warmup_steps=2,
    max_steps=4,
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.95,
    max_grad_norm=0.1,
)
ROLLOUTS = OPTIMIZER | dict(
    prompts_per_step=4,
    group_size=4,
    num_epochs=2,
    num_minibatches=2,
    micro_batch_size=3,  # the 8 rows of a minibatch go in forwards of 3, 3 and 2
    temperature=1.3,
    max_new_tokens=LIMIT,
    clip_low=0.2,
    clip_high=0.25,
    kl_coef=0.1,
    reward=["accuracy", f"{__name__}:equations"],
    reward_weights=[1.0, 0.5],
    eval_every=0,
    eval_samples=1,
    eval_k=1,
)


# --- what is sampled ---

PROBLEMS = {"7+2?": 9, "1+4+1+2?": 8, "8-3?": 5, "2+2-1?": 3, "9-1?": 8, "3+3?": 6}
HELD_OUT = "5+1?"

GROUPS = [
    ("steps", "short", "wrong", "cut"),
    ("wrong", "wrong", "wrong", "wrong"),  # rewards that agree
    ("short", "no answer", "late", "steps"),
    ("wrong", "steps", "no answer", "no answer"),
    ("short", "wrong", "short", "late"),
]


def completion(question, kind):
    """Return the text of a completion, and whether its stop token follows."""
    terms, answer = question[:-1], PROBLEMS.get(question, 0)
    return {
        "steps": (f"{terms}={answer}\n#### {answer}", True),
        "short": (f"#### {answer}", True),
        "wrong": (f"#### {answer + 1}", True),
        "no answer": (f"{terms}={answer}", True),
        "cut": ((f"{terms}={answer} " * LIMIT)[:LIMIT], False),
        "late": (("1+1=2 " * LIMIT)[: LIMIT - 6] + f"#### {answer}", False),  # half of a longer number, perhaps
    }[kind]


def equations(completions, **columns):
    """A reward of the user's own, beside the accuracy."""
    return [text.count("=") / 4 for text in completions]


class Sampler:
    """Replace a script's `rollout`: return the completions above, and record them."""

    def __init__(self, tokenizer):
        self.tokenizer, self.visits, self.draws, self.seeds = tokenizer, Counter(), [], []

    def __call__(self, lm, tokenizer, prompts, n, temperature, top_p, seed, args):
        training = prompts[0].prompt != HELD_OUT
        groups = [self.group(prompt.prompt) if training else [completion(HELD_OUT, "short")] * n for prompt in prompts]
        if training:
            self.draws.append([(prompt.prompt, group) for prompt, group in zip(prompts, groups, strict=True)])
            self.seeds.append(seed)
        ids = [prompt.ids for prompt in prompts for _ in range(n)]
        tokens = [tokens_of(self.tokenizer, *sample) for group in groups for sample in group]
        P, T = max(map(len, ids)), max(map(len, tokens))
        mask = torch.arange(T) < torch.tensor([[len(row)] for row in tokens])
        return {
            "prompts": torch.tensor([[0] * (P - len(row)) + row for row in ids]),
            "prompt_mask": torch.tensor([[False] * (P - len(row)) + [True] * len(row) for row in ids]),
            "completions": torch.tensor([row + [0] * (T - len(row)) for row in tokens]),
            "completion_mask": mask,
            "truncated": torch.tensor([not ended for group in groups for _, ended in group]),
        }

    def group(self, question):
        """Return the four completions of this visit."""
        number = list(PROBLEMS).index(question) + 3 * self.visits[question]
        self.visits[question] += 1
        return [completion(question, kind) for kind in GROUPS[number % len(GROUPS)]]


def tokens_of(tokenizer, text, ended):
    return tokenizer(text).input_ids + ended * [tokenizer.eos_token_id]


# --- the script's side ---


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder with a random, far from uniform one-layer model, and the embedded model's tokenizer."""
    return save_random(AutoModelForCausalLM, tmp_path_factory.mktemp("start"))


def save_random(auto_class, folder, **changes):
    small = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=48, initializer_range=0.3)
    config = AutoConfig.from_pretrained(START, **small, **changes)
    torch.manual_seed(1)
    auto_class.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(START).save_pretrained(folder)
    return folder


def run_script(module, folder, start, options):
    """Run the script's `main`; return the lines of metrics.jsonl by step. The model is in folder/run/model."""
    argv = ["--output_dir", str(folder / "run"), "--model_name_or_path", str(start)]
    for name, value in options.items():
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no_{name}")
        else:
            argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    module.main(argv)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row for row in rows}


def run_sampled(module, folder, start, options, monkeypatch):
    """`run_script` on the problems above; what was sampled, and the largest ratio of each forward with a loss."""
    sampler, ratios, policy_loss = Sampler(AutoTokenizer.from_pretrained(start)), [], module.policy_loss

    def spy(*arguments, **keywords):
        losses, stats = policy_loss(*arguments, **keywords)
        ratios.append(float(stats["ratio_max"].detach().max()))
        return losses, stats

    monkeypatch.setattr(module, "rollout", sampler)
    monkeypatch.setattr(module, "policy_loss", spy)
    return run_script(module, folder, start, {"dataset": write_problems(folder), **options}), sampler, ratios


def write_problems(folder):
    write(folder / "test.jsonl", [{"question": HELD_OUT, "answer": "#### 6"}])
    return write(folder / "train.jsonl", [{"question": q, "answer": f"#### {a}"} for q, a in PROBLEMS.items()]).parent


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def assert_same(rows, logs):
    """Each metric that the plain loop notes down is logged by the script with the same value."""
    assert sorted(rows)[-len(logs) :] == list(range(1, len(logs) + 1))
    for step, log in enumerate(logs, start=1):
        expected = log.summary()
        assert {name: rows[step].get(name) for name in expected} == pytest.approx(expected, rel=2e-4, abs=2e-5), step


def assert_happens(log, *shares):
    """The run exercises what both sides must agree on: clipping, truncation and others."""
    assert all(0 < log.summary()[name] < 1 for name in shares)


def assert_same_weights(folder, start, plain, auto_class=AutoModelForCausalLM):
    """The script's weights equal the plain loop's, to within 5e-4 of their change."""
    trained = auto_class.from_pretrained(folder / "run" / "model").state_dict()
    before, apart, moved = AutoModelForCausalLM.from_pretrained(start).state_dict(), 0.0, 0.0
    for name, weight in plain.state_dict().items():
        apart += float((trained[name] - weight).square().sum())
        moved += float((weight - before.get(name, 0.0)).square().sum())  # a new head starts at 0
    assert apart**0.5 < 5e-4 * moved**0.5


# --- the plain loops: what they share ---


def load(folder, auto_class=AutoModelForCausalLM, **options):
    return auto_class.from_pretrained(folder, dtype=torch.float64, **options)


def rows_of(draw, tokenizer, o):
    """The groups of one call of `rollout`: a row is a completion with what is known of it. `o.frame` is the text around
    a question."""
    groups = []
    for question, samples in draw:
        prompt = tokenizer(o.frame.format(question)).input_ids
        group = [SimpleNamespace(question=question, text=text, ended=ended, prompt=prompt) for text, ended in samples]
        for row in group:
            row.group = group
            row.tokens = tokens_of(tokenizer, row.text, row.ended)
            row.right = row.ended and row.text.endswith(f"#### {PROBLEMS[question]}")
            row.equations = row.text.count("=") / 4
        groups.append(group)
    return groups


def read(model, row, temperature=1.0):
    """Log-probs of the tokens of a completion (T,), and the entropies of the distributions they come from (T,)."""
    logits = model(torch.tensor([row.prompt + row.tokens])).logits[0] / temperature
    logprobs = logits[len(row.prompt) - 1 : -1].log_softmax(dim=1)  # (T, V), for the token after each position
    return logprobs[range(len(row.tokens)), row.tokens], -(logprobs.exp() * logprobs).sum(dim=1)


def weighted_reward(row):
    """Return the weighted sum of the two --reward functions."""
    return 1.0 * row.right + 0.5 * row.equations


def k3(logprobs, other):
    """Schulman's estimate of KL(pi || other) at each token, from tokens of pi."""
    return (other - logprobs).exp() - 1 - (other - logprobs)


def adamw(*parameters, o):
    groups = [{"params": list(group)} for group in parameters]
    return torch.optim.AdamW(groups, betas=(o.adam_beta1, o.adam_beta2), weight_decay=o.weight_decay)


def step_of(optimizer, o, *models, frozen=()):
    """Clip the gradients of each model by a norm of its own, and step; return the norms before that."""
    for weight in frozen:
        weight.grad = None  # Adam does not count the step
    norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm) for model in models]
    optimizer.step()
    optimizer.zero_grad()
    return norms


def rate(step, o):
    """Return the learning rate of a step, counted from 0: a linear warm-up, then a line to 0 at max_steps."""
    left = (o.max_steps - step) / (o.max_steps - o.warmup_steps)
    return o.learning_rate * min((step + 1) / o.warmup_steps, left, 1)


def flat(lists):
    return [x for part in lists for x in part]


def cut(rows, parts):
    size = len(rows) // parts
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def mean(values):
    return sum(values) / len(values)


def deviation(values, ddof):
    return (sum((x - mean(values)) ** 2 for x in values) / (len(values) - ddof)) ** 0.5


class Log(defaultdict):
    """What a plain loop logs in a step: all values of `group/name`, to be averaged, or the largest one."""

    def __init__(self):
        super().__init__(list)

    def note(self, group, **values):
        for name, value in values.items():
            self[f"{group}/{name}"] += torch.as_tensor(value, dtype=torch.float64).detach().flatten().tolist()

    def summary(self):
        return {name: max(values) if name.endswith("_max") else mean(values) for name, values in self.items()}


# --- the group-relative family ---


class GRPO:
    """DeepSeekMath, arXiv 2402.03300, Eq. 3, with the advantages of outcome supervision (4.1.2)."""

    def __init__(self, o):
        self.o = o

    def rollouts(self, draws):
        """The rows of each step, with their rewards and advantages."""
        for groups in draws:
            self.judge(groups)
            yield flat(groups)

    def judge(self, groups):
        for group in groups:
            rewards = [self.reward(row) for row in group]
            for row, reward, advantage in zip(group, rewards, self.advantages(rewards), strict=True):
                row.reward, row.advantage = reward, advantage

    def reward(self, row):
        return weighted_reward(row)

    def advantages(self, rewards):
        if min(rewards) == max(rewards):
            return [0.0] * len(rewards)
        return [(x - mean(rewards)) / (deviation(rewards, ddof=1) + 1e-6) for x in rewards]

    def ratio(self, new, row):
        return (new - row.old).exp()

    def bounds(self, row):
        return 1 - self.o.clip_low, 1 + self.o.clip_high

    def objective(self, ratio, row):
        """min(r A, clip(r) A), to be maximized."""
        return torch.minimum(ratio * row.advantage, ratio.clamp(*self.bounds(row)) * row.advantage)

    def weight(self, row, minibatch):
        """Return the weight of a token of this row: the mean over rows of the mean over tokens."""
        return 1 / len(row.tokens) / len(minibatch)


class DrGRPO(GRPO):
    """Understanding R1-Zero-Like Training, arXiv 2503.20783, 3.2: GRPO without its two divisions."""

    def reward(self, row):
        return super().reward(row) if row.ended else 0.0

    def advantages(self, rewards):
        return [x - mean(rewards) for x in rewards]

    def weight(self, row, minibatch):
        return 1 / LIMIT / len(minibatch)


class DAPO(GRPO):
    """arXiv 2503.14476: dynamic sampling (Algorithm 1), soft overlong punishment (Eq. 13), token mean (Eq. 8)."""

    def rollouts(self, draws):
        kept = []
        for groups in draws:
            kept += [group for group in groups if 0 < sum(row.right for row in group) < len(group)]
            if len(kept) >= self.o.prompts_per_step:
                self.judge(kept)
                yield flat(kept[: self.o.prompts_per_step])
                kept = []  # one step later the surplus would be off-policy

    def reward(self, row):
        reward, room = (1.0 if row.right else -1.0) + 0.5 * row.equations, LIMIT - self.o.overlong_cache
        return reward - max(0, len(row.tokens) - room) / self.o.overlong_cache

    def weight(self, row, minibatch):
        return 1 / sum(len(other.tokens) for other in minibatch)


class GSPO(GRPO):
    """arXiv 2507.18071, Eq. 5-7: one ratio for a sequence, the geometric mean of those of its tokens."""

    def ratio(self, new, row):
        return (new - row.old).mean().exp()


class DCPO(GRPO):
    """arXiv 2509.02333: bounds by each token's old probability (Eq. 27), advantages smoothed over visits (A.7)."""

    def rollouts(self, draws):
        history = {}  # {question: the rewards of each of its visits}
        for groups in draws:
            visits = {}
            for group in groups:
                question, rewards = group[0].question, [self.reward(row) for row in group]
                earlier = history.get(question, [])
                visits[question] = [*earlier, rewards]  # drawn twice in a step: the last group counts
                i, everything = len(earlier) + 1, flat(visits[question])
                for row, reward in zip(group, rewards, strict=True):
                    new, total = standardize(reward, rewards), standardize(reward, everything)
                    smooth_new, smooth_total = (i - 1) / i * new + total / i, new / i + (i - 1) / i * total
                    row.reward = reward
                    row.advantage = smooth_new if abs(smooth_new) < abs(smooth_total) else smooth_total
            history |= visits
            yield flat(groups)

    def reward(self, row):
        """Eq. 15: -1 without an answer, and an answer at the very end of what was cut is none."""
        answered = row.ended and "####" in row.text
        return (1.0 if row.right else 0.0 if answered else -1.0) + 0.5 * row.equations

    def bounds(self, row):
        q = row.old.exp()
        low = 0.5 + 0.5 * (1 - 4 * self.o.clip_low / q).clamp(min=0).sqrt()
        high = 0.5 + 0.5 * (1 + 4 * self.o.clip_high / q).sqrt()
        return low, high.clamp(max=self.o.max_ratio)

    def objective(self, ratio, row):
        objective = super().objective(ratio, row)
        return objective.clamp(min=self.o.max_ratio * row.advantage) if row.advantage < 0 else objective

    def weight(self, row, minibatch):
        return 1 / len(row.tokens) / (len(minibatch) / self.o.group_size)  # sum over the group, mean over prompts


def standardize(x, values):
    return 0.0 if min(values) == max(values) else (x - mean(values)) / deviation(values, ddof=0)


def train_family(start, rollouts, paper, o):
    """Return the policy after these rollouts, and a log of each."""
    policy, reference, logs = load(start), load(start), []
    optimizer = adamw(policy.parameters(), o=o)
    for step, rows in enumerate(rollouts):
        logs.append(log := Log())
        optimizer.param_groups[0]["lr"] = rate(step, o)
        log.note("optim", lr=rate(step, o))
        log.note("reward", mean=[row.reward for row in rows])
        with torch.no_grad():
            for row in rows:
                row.old, row.ref = read(policy, row, o.temperature)[0], read(reference, row, o.temperature)[0]
        for _ in range(o.num_epochs):
            for minibatch in cut(rows, o.num_minibatches):
                step_loss = 0.0
                for row in minibatch:
                    new, entropy = read(policy, row, o.temperature)
                    ratio, kl, (low, high) = paper.ratio(new, row), k3(new, row.ref), paper.bounds(row)
                    gain = paper.objective(ratio, row) - o.kl_coef * kl
                    loss = -(gain * paper.weight(row, minibatch)).sum()
                    loss.backward()
                    step_loss += float(loss.detach())
                    log.note("policy", clip_fraction_low=(row.advantage < 0) & (ratio < low), ratio_max=ratio)
                    log.note("policy", clip_fraction_high=(row.advantage > 0) & (ratio > high), mean_prob=row.old.exp())
                    log.note("policy", kl_ref=kl, approx_kl=k3(row.old, new), entropy=entropy)
                (norm,) = step_of(optimizer, o, policy)
                log.note("optim", loss=step_loss, grad_norm=norm)
    return policy, logs


@pytest.mark.parametrize(
    "name, paper, own",
    [
        ("grpo", GRPO, {}),
        ("dr_grpo", DrGRPO, {}),
        ("dapo", DAPO, dict(overlong="soft", overlong_cache=8)),
        ("gspo", GSPO, dict(clip_low=0.1, clip_high=0.2)),
        ("dcpo", DCPO, dict(max_ratio=3.0)),
    ],
)
def test_group_relative(name, paper, own, start, tmp_path, monkeypatch):
    options = ROLLOUTS | own
    o = SimpleNamespace(**options, frame="{}")
    rows, sampler, ratios = run_sampled(script(name), tmp_path, start, options, monkeypatch)
    first, second = ([question for question, _ in draw] for draw in sampler.draws[:2])
    assert len(set(second)) == 3 and set(first) & set(second)  # one is drawn twice, one comes back: DCPO remembers
    draws, paper = [rows_of(draw, sampler.tokenizer, o) for draw in sampler.draws], paper(o)
    policy, logs = train_family(start, paper.rollouts(draws), paper, o)
    assert max(ratios[:3]) == 1 < max(ratios[3:6])  # of the first and the second minibatch
    assert_happens(logs[0], "policy/clip_fraction_low", "policy/clip_fraction_high")
    assert min(logs[0]["optim/grad_norm"]) > o.max_grad_norm
    assert_same(rows, logs)
    assert_same_weights(tmp_path, start, policy)


# --- ppo ---


def recipe(name):
    """Return the module of a recipe, put into its script."""
    import recipes  # from examples/, which a fork may lack

    return recipes.load(recipes.made(name), name)


class Critic(torch.nn.Module):
    """The policy's backbone again, and a head of zeros."""

    def __init__(self, folder):
        super().__init__()
        self.backbone = load(folder, AutoModel)
        self.weight = torch.nn.Parameter(torch.zeros(self.backbone.config.hidden_size, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def values(self, row):
        """Return the values before each token of the completion (T,)."""
        hidden = self.backbone(torch.tensor([row.prompt + row.tokens])).last_hidden_state[0]
        return hidden[len(row.prompt) - 1 : -1] @ self.weight + self.bias


def generalized_advantages(rewards, values, gamma, lam):
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv 1506.02438)."""
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        advantages.insert(0, advantage)
    return torch.tensor(advantages, dtype=torch.float64)


def judge_ppo(rows, o, kl_coef, log):
    """Old advantages and returns of each token; the advantages are whitened over the tokens of all rows."""
    for row in rows:
        rewards = -kl_coef * (row.old - row.ref) if o.kl_in == "reward" else torch.zeros_like(row.old)
        rewards[-1] += row.reward
        row.advantages = generalized_advantages(rewards, row.old_values, o.gamma, o.gae_lambda)
        row.returns = row.advantages + row.old_values
        log.note("reward", mean=row.reward, shaped=rewards.sum())
        log.note("policy", kl_old_ref=(row.old - row.ref).mean())
    tokens = torch.cat([row.advantages for row in rows])
    for row in rows:
        row.advantages = (row.advantages - tokens.mean()) / (tokens.var(correction=1) + 1e-8).sqrt()
    returns, old_values = torch.cat([row.returns for row in rows]), torch.cat([row.old_values for row in rows])
    log.note("value", explained_variance=1 - (returns - old_values).var() / returns.var())


def train_ppo(start, rollouts, o):
    """Schulman et al., arXiv 1707.06347, Eq. 7, with a critic and, as in RLHF, a KL to the reference."""
    policy, reference, critic, logs = load(start), load(start), Critic(start), []
    optimizer = adamw(policy.parameters(), critic.parameters(), o=o)
    kl_coef, penalty = o.kl_coef, getattr(o, "penalty_coef", 0.0)
    kl_target, warmup = getattr(o, "kl_target", 0.0), getattr(o, "critic_warmup_steps", 0)
    for step, rows in enumerate(rollouts):
        logs.append(log := Log())
        warm = step < warmup  # only the critic
        rates = 0.0 if warm else rate(step, o), rate(step, o) / o.learning_rate * o.critic_learning_rate
        for group, group_rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = group_rate
        log.note("optim", lr=rates[0], critic_lr=rates[1])
        with torch.no_grad():
            for row in rows:
                row.old, row.ref = read(policy, row, o.temperature)[0], read(reference, row, o.temperature)[0]
                row.old_values = critic.values(row)
            judge_ppo(rows, o, kl_coef, log)
        for _ in range(o.num_epochs):
            for minibatch in cut(rows, o.num_minibatches):
                count = sum(len(row.tokens) for row in minibatch)
                step_loss = 0.0
                for row in minibatch:
                    new, entropy = read(policy, row, o.temperature)
                    ratio, values, kl = (new - row.old).exp(), critic.values(row), k3(new, row.ref)
                    if penalty:  # Eq. 8
                        gain = ratio * row.advantages - penalty * (row.old - new)
                    else:
                        gain = clipped_gain(ratio, row.advantages, o, log)
                    if o.kl_in == "loss":
                        gain = gain - o.kl_coef * kl
                        log.note("policy", kl_ref=kl)
                    near = values.clamp(row.old_values - o.value_clip, row.old_values + o.value_clip)
                    errors, near_errors = (values - row.returns) ** 2, (near - row.returns) ** 2
                    value_loss = torch.maximum(errors, near_errors) / 2
                    loss = (o.value_coef * value_loss - gain - o.entropy_coef * entropy).sum() / count
                    loss.backward()
                    step_loss += float(loss.detach())
                    log.note("policy", ratio_max=ratio, approx_kl=k3(row.old, new), entropy=entropy)
                    log.note("value", mean=values, loss=value_loss, clip=near_errors > errors)
                frozen = policy.parameters() if warm else ()
                norm, critic_norm = step_of(optimizer, o, policy, critic, frozen=frozen)
                log.note("optim", loss=step_loss, grad_norm=norm, critic_grad_norm=critic_norm)
        if kl_target:  # Ziegler et al., arXiv 1909.08593, 2.2
            log.note("policy", kl_coef=kl_coef)
            error = mean(log["policy/kl_old_ref"]) / kl_target - 1
            kl_coef *= 1 + min(max(error, -0.2), 0.2) * len(rows) / o.kl_horizon
        if penalty:  # Section 4
            with torch.no_grad():
                log.note("policy", kl_old_new=torch.cat([k3(r.old, read(policy, r, o.temperature)[0]) for r in rows]))
            log.note("policy", penalty_coef=penalty)
            distance = mean(log["policy/kl_old_new"])
            penalty *= 2 if distance > 1.5 * o.penalty_target else 0.5 if distance < o.penalty_target / 1.5 else 1
    return policy, logs


def clipped_gain(ratio, advantages, o, log):
    """Eq. 7, and the dual clip of arXiv 1912.09729, Eq. 5."""
    bounds, bad = (1 - o.clip_low, 1 + o.clip_high), advantages < 0
    gain = torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
    if o.dual_clip:
        gain = torch.where(bad, torch.maximum(gain, o.dual_clip * advantages), gain)
    log.note("policy", clip_fraction_low=bad & (ratio < bounds[0]))
    log.note("policy", clip_fraction_high=(advantages > 0) & (ratio > bounds[1]))
    log.note("policy", dual_clip=bad & (ratio > (o.dual_clip or torch.inf)))
    return gain


PPO = ROLLOUTS | dict(
    critic_learning_rate=1e-2,
    value_coef=0.7,
    value_clip=0.1,
    gamma=0.99,
    gae_lambda=0.9,
    kl_in="reward",
    entropy_coef=0.02,
    dual_clip=0.0,
)


@pytest.mark.parametrize("own", [{}, dict(kl_in="loss", dual_clip=1.2)], ids=["kl_in_reward", "kl_in_loss"])
def test_ppo(own, start, tmp_path, monkeypatch):
    logs = check_ppo(script("ppo"), PPO | own, start, tmp_path, monkeypatch)
    happens = ["value/clip", "policy/clip_fraction_low", "policy/clip_fraction_high"]
    assert_happens(logs[0], *happens, *(["policy/dual_clip"] if "dual_clip" in own else []))


@pytest.mark.beside("examples")
@pytest.mark.parametrize(
    "name, without, own",
    [
        ("ppo_penalty", ["clip_low", "clip_high", "dual_clip"], dict(penalty_coef=0.5, penalty_target=0.02)),
        ("ppo_adaptive_kl", ["kl_in"], dict(kl_target=0.05, kl_horizon=20.0)),  # a rollout moves beta by a sixth
        ("critic_warmup", [], dict(critic_warmup_steps=1)),
    ],
)
def test_recipes_over_ppo(name, without, own, start, tmp_path, monkeypatch):
    logs = check_ppo(recipe(name), PPO | own, start, tmp_path, monkeypatch, without)
    for coefficient in ("policy/penalty_coef", "policy/kl_coef"):
        assert coefficient not in logs[0] or len({log[coefficient][0] for log in logs}) > 1


def check_ppo(module, options, start, tmp_path, monkeypatch, without=()):
    o = SimpleNamespace(**options, frame="{}")
    given = {name: value for name, value in options.items() if name not in without}
    rows, sampler, ratios = run_sampled(module, tmp_path, start, given, monkeypatch)
    rollouts = [flat(rows_of(draw, sampler.tokenizer, o)) for draw in sampler.draws]
    for row in flat(rollouts):
        row.reward = weighted_reward(row)
    policy, logs = train_ppo(start, rollouts, o)
    first = 12 * getattr(o, "critic_warmup_steps", 0)  # forwards of a step
    assert max(ratios[: first + 3]) == 1 < max(ratios[first + 3 : first + 6])
    assert_same(rows, logs)
    assert_same_weights(tmp_path, start, policy)
    return logs


def test_ppo_with_a_reward_model(start, tmp_path, monkeypatch):
    """It scores text in the training format: the prompt in the run's template, the completion, and EOS if it ended."""
    scorer = save_random(AutoModelForSequenceClassification, tmp_path / "scorer", num_labels=1)
    own = dict(reward=[f"rm:{scorer}"], system_prompt="1+1=2", prompt_template="= {prompt}", max_steps=1)
    options = {name: value for name, value in PPO.items() if not name.startswith("reward")} | own
    rows, sampler, _ = run_sampled(script("ppo"), tmp_path, start, options, monkeypatch)
    o, model = SimpleNamespace(frame="1+1=2\n\n= {}"), load(scorer, AutoModelForSequenceClassification)
    groups = rows_of(sampler.draws[0], sampler.tokenizer, o)
    with torch.no_grad():
        scores = [float(model(torch.tensor([row.prompt + row.tokens])).logits) for row in flat(groups)]
    assert rows[1]["reward/mean"] == pytest.approx(mean(scores), abs=1e-5)
    assert rows[1]["reward/std"] == pytest.approx(deviation(scores, ddof=0), abs=1e-5)
    assert rows[1]["reward/std"] > 0.1


# --- preference pairs ---


PAIRS = OPTIMIZER | dict(
    pairs_per_step=4,
    num_epochs=2,
    micro_batch_size=6,  # the 4 pairs of a step go in forwards of 3 and 1
    max_grad_norm=0.02,
    eval_every=1,
    warmup_steps=1,
    max_steps=3,  # the steps that the pairs fill
)


def write_pairs(folder, tokenizer):
    """A dataset of six pairs and a held-out one: the file and the training pairs as (chosen, rejected) rows."""
    kinds = [("steps", "wrong"), ("short", "no answer"), ("steps", "short")] * 2
    rows = [
        {"prompt": question, "chosen": completion(question, good)[0], "rejected": completion(question, bad)[0]}
        for question, (good, bad) in zip(PROBLEMS, kinds, strict=True)
    ]
    held_out = {"prompt": HELD_OUT, "chosen": "5+1=6\n#### 6", "rejected": "#### 7"}
    write(folder / "test.jsonl", [held_out])
    pairs = [rows_of_pair(row, tokenizer) for row in rows]
    return write(folder / "train.jsonl", rows).parent, pairs, rows_of_pair(held_out, tokenizer)


def rows_of_pair(pair, tokenizer):
    prompt = tokenizer(pair["prompt"]).input_ids
    return [SimpleNamespace(prompt=prompt, tokens=tokens_of(tokenizer, pair[x], True)) for x in ("chosen", "rejected")]


def passes(pairs, o, seed=0):
    """The pairs of each optimizer step: permutations without end, cut into steps; what fills none is left out."""
    order = [i for epoch in range(o.num_epochs) for i in np.random.default_rng([seed, epoch]).permutation(len(pairs))]
    steps = len(order) // o.pairs_per_step
    return [[pairs[i] for i in order[s * o.pairs_per_step : (s + 1) * o.pairs_per_step]] for s in range(steps)]


def take_step(model, optimizer, losses, step, o, log):
    """One optimizer step: the mean loss of the pairs, clipped gradients, AdamW."""
    optimizer.param_groups[0]["lr"] = rate(step, o)
    loss = sum(losses) / len(losses)
    loss.backward()
    (norm,) = step_of(optimizer, o, model)
    log.note("optim", loss=loss, grad_norm=norm, lr=rate(step, o))


def train_on_pairs(model, pair_loss, pairs, held_out, o):
    """Return a log of each step. The clip acts, and the held-out pair is evaluated after each step."""
    optimizer, logs = adamw(model.parameters(), o=o), []
    for step, step_pairs in enumerate(passes(pairs, o)):
        logs.append(log := Log())
        take_step(model, optimizer, [pair_loss(*pair, log=log) for pair in step_pairs], step, o, log)
        assert log["optim/grad_norm"][0] > o.max_grad_norm
        with torch.no_grad():
            log.note("eval", loss=pair_loss(*held_out, log=Log()))
    return logs


def dpo_loss(policy, chosen, rejected, o, log):
    """arXiv 2305.18290, Eq. 7, with a share of labels taken to be wrong (cDPO) and the likelihood of the chosen one."""
    logps = [read(policy, row)[0].sum() for row in (chosen, rejected)]
    rewards = [o.beta * (logp - row.ref) for logp, row in zip(logps, (chosen, rejected), strict=True)]
    margin, e = rewards[0] - rewards[1], o.label_smoothing
    loss = -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)
    log.note("logps", chosen=logps[0], rejected=logps[1])
    log.note("rewards", chosen=rewards[0], rejected=rewards[1], margin=margin)
    if margin != 0:  # before the first step its sign is rounding
        log.note("rewards", accuracy=margin > 0)
    return loss - o.nll_coef * logps[0] / len(chosen.tokens)


def remember(reference, pairs):
    with torch.no_grad():
        for row in flat(pairs):
            row.ref = read(reference, row)[0].sum()


DPO = PAIRS | dict(beta=0.4, label_smoothing=0.1, nll_coef=0.2)


def test_dpo(start, tmp_path):
    o, tokenizer = SimpleNamespace(**DPO), AutoTokenizer.from_pretrained(start)
    data, pairs, held_out = write_pairs(tmp_path, tokenizer)
    policy = load(start)
    remember(policy, [*pairs, held_out])
    logs = train_on_pairs(policy, lambda *pair, log: dpo_loss(policy, *pair, o, log), pairs, held_out, o)
    assert_same(run_script(script("dpo"), tmp_path, start, {"dataset": data, **DPO, "max_steps": -1}), logs)
    assert_same_weights(tmp_path, start, policy)


@pytest.mark.beside("examples")
def test_online_dpo(start, tmp_path, monkeypatch):
    """Each round draws other prompts, and its reference is the policy that samples them; the optimizer goes on."""
    module, tokenizer = recipe("online_dpo"), AutoTokenizer.from_pretrained(start)
    own = dict(pair_prompts=3, pair_samples=4, pairs_per_step=2, num_epochs=2, max_new_tokens=LIMIT)
    options = (
        DPO | own | dict(pair_temperature=1.3, warmup_steps=2, max_steps=6, eval_every=0, eval_samples=1, eval_k=1)
    )
    options |= {name: ROLLOUTS[name] for name in ("reward", "reward_weights")}
    o, sampler = SimpleNamespace(**options, frame="{}"), Sampler(tokenizer)
    monkeypatch.setattr(module, "rollout", sampler)
    rows = run_script(module, tmp_path, start, {"dataset": write_problems(tmp_path), **options})
    assert len(sampler.draws) > 1 and len(sampler.draws) == len(set(sampler.seeds))
    assert {question for draw in sampler.draws[:2] for question, _ in draw} == set(PROBLEMS)  # three and three

    policy, logs = load(start), []
    optimizer = adamw(policy.parameters(), o=o)
    for draw in sampler.draws:
        pairs = []
        for group in rows_of(draw, tokenizer, o):
            group = [row for row in group if row.ended]  # in a file of pairs the others would look finished
            best, worst = max(group, key=weighted_reward), min(group, key=weighted_reward)
            if weighted_reward(best) > weighted_reward(worst):
                pairs.append([best, worst])
        remember(policy, pairs)
        for step_pairs in passes(pairs, o)[: o.max_steps - len(logs)]:
            logs.append(log := Log())
            take_step(policy, optimizer, [dpo_loss(policy, *p, o, log) for p in step_pairs], len(logs) - 1, o, log)
    assert_same(rows, logs)
    assert_same_weights(tmp_path, start, policy)


def test_reward_model(start, tmp_path):
    """InstructGPT Eq. 1 on pairs, with (r_w + r_l)^2: a head of zeros on the language model, read at EOS."""
    options = PAIRS | dict(center_coef=0.05)
    o, tokenizer = SimpleNamespace(**options), AutoTokenizer.from_pretrained(start)
    data, pairs, held_out = write_pairs(tmp_path, tokenizer)
    model = load(start, AutoModelForSequenceClassification, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)

    def pair_loss(chosen, rejected, log):
        good, bad = (
            model.model(torch.tensor([row.prompt + row.tokens])).last_hidden_state[0, -1] @ model.score.weight[0]
            for row in (chosen, rejected)
        )
        log.note("rewards", chosen=good, rejected=bad, margin=good - bad, accuracy=((good - bad).sign() + 1) / 2)
        return -logsigmoid(good - bad) + o.center_coef * (good + bad) ** 2

    logs = train_on_pairs(model, pair_loss, pairs, held_out, o)
    assert_same(
        run_script(script("reward_model"), tmp_path, start, {"dataset": data, **options, "max_steps": -1}), logs
    )
    assert_same_weights(tmp_path, start, model, AutoModelForSequenceClassification)
