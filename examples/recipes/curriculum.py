"""A curriculum: prompts are drawn by their past pass rates, those nearest to one half most often.

A group that is all right or all wrong teaches nothing, and the signal of a prompt of pass rate p
goes with the variance p (1 - p) (arXiv 2504.03380). So a prompt is drawn with a probability in
proportion to p (1 - p), mixed with a uniform share so that none is forgotten. Its p begins at one
half, and each visit moves it halfway to the share of right completions. No draw has a prompt twice.
This schedule is the project's own, and no paper's.

The rates are the same on all processes and lie in the checkpoint, so a run resumes exactly.
"""

import numpy as np


class Args:
    uniform_share: float = option(0.1, "share of the draws that ignores the pass rates (1: no curriculum)", ge=0, le=1)


LINES = {
    "sampler = PromptSampler(train_prompts, args.seed)": """
        sampler = Curriculum(len(train_prompts), args)
    """,
    'rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])': """
        rewards, correct, parts = compute_rewards(reward_functions, prompts, texts, batch["truncated"])
        metrics.add("curriculum/pass_rate", sampler.rates[drawn])  # of the drawn prompts, before this step
        sampler.observe(accelerator, drawn, correct)
    """,
}


class Curriculum:
    """Draws indices of prompts, and keeps the pass rate of each: `rates` (prompts,), float64."""

    def __init__(self, prompts, args):
        self.rates = np.full(prompts, 0.5)
        self.uniform_share = args.uniform_share
        self.seed = args.seed
        self.draws = 0

    def chances(self):
        """The probability of each prompt in a draw of one."""
        weights = np.maximum(self.rates * (1 - self.rates), 1e-9)  # after 54 right visits a rate is 1.0
        return (1 - self.uniform_share) * weights / weights.sum() + self.uniform_share / len(weights)

    def draw(self, k):
        """k indices of prompts, all different if there are k, and the same ones on all processes."""
        prompts = len(self.rates)
        generator = np.random.default_rng([self.seed, self.draws])
        self.draws += 1
        return generator.choice(prompts, k, replace=k > prompts, p=self.chances()).tolist()

    def observe(self, accelerator, drawn, correct):
        """Move the rates of `drawn`, this process's prompts, halfway to those of `correct` (R,)."""
        if correct is None:
            raise InputError("a curriculum needs gold answers: no prompt has one")
        shares = correct.double().view(len(drawn), -1).nanmean(dim=1)  # (R / G,)
        rows = torch.stack([torch.tensor(drawn).double(), shares], dim=1).to(accelerator.device)
        for index, share in accelerator.gather(rows).tolist():
            if share == share:  # not NaN: a prompt may have no gold answer
                self.rates[int(index)] = (self.rates[int(index)] + share) / 2

    def state_dict(self):
        return {"draws": self.draws, "rates": self.rates.tolist()}

    def load_state_dict(self, state):
        self.draws = state["draws"]
        self.rates = np.array(state["rates"])
