"""A curriculum: prompts are drawn by their past pass rates, those nearest to one half most often.

A group that is all right or all wrong teaches nothing, and the signal of a prompt of pass rate p
goes with the variance p (1 - p) (arXiv 2504.03380). So a prompt is drawn with a probability in
proportion to p (1 - p), mixed with a uniform share so that none is forgotten. Its p begins at one
half, and each visit moves it halfway to the share of right completions. No draw has a prompt twice.
This schedule is the project's own, and no paper's.

The rates are the same on all processes and lie in the checkpoint, so a run resumes exactly.
"""

import numpy as np

from common.rewards import correctness
from harness.errors import InputError


class Args:
    uniform_share: float = option(0.1, "share of the draws that ignores pass rates", ge=0, le=1)


LINES = {
    "sampler = PromptSampler(train_prompts, args.seed, run.rank, run.processes)": """
        sampler = Curriculum(train_prompts, args, run.rank, run.processes)
    """,
    'samples.batch["loss_mask"] = samples.batch["completion_mask"]': """
        samples.batch["loss_mask"] = samples.batch["completion_mask"]
        metrics.add("curriculum/pass_rate", sampler.rates[sampler.drawn])  # before this step
        terms = samples.reward_terms
        sampler.observe(accelerator, correctness(prompts, samples.completions, terms))
    """,
}


class Curriculum:
    """Draws prompts, and keeps the pass rate of each: `rates` (prompts,), float64."""

    def __init__(self, prompts, args, rank=0, processes=1):
        self.prompts = prompts
        self.args = args
        self.share = slice(rank, None, processes)
        self.rates = np.full(len(prompts), 0.5)
        self.draws = 0
        self.drawn = []  # the numbers of this process's prompts of the last draw

    def chances(self):
        """The probability of each prompt in a draw of one."""
        weights = np.maximum(
            self.rates * (1 - self.rates), 1e-9
        )  # after 54 right visits a rate is 1.0
        uniform = self.args.uniform_share
        return (1 - uniform) * weights / weights.sum() + uniform / len(weights)

    def draw(self, number):
        """This process's share of `number` prompts, which all differ if there are so many."""
        count = len(self.rates)
        generator = np.random.default_rng([self.args.seed, self.draws])
        self.draws += 1
        chosen = generator.choice(count, number, replace=number > count, p=self.chances())
        self.drawn = chosen[self.share].tolist()
        return [self.prompts[i] for i in self.drawn]

    def observe(self, accelerator, correct):
        """Move the rates of the last draw, on all processes, halfway to those of `correct` (R,)."""
        shares = correct.double().view(len(self.drawn), -1).nanmean(dim=1)  # (R / G,)
        if shares.isnan().all():
            raise InputError("a curriculum needs gold answers: no prompt of this step has one")
        rows = torch.stack([torch.tensor(self.drawn).double(), shares], dim=1)
        for number, share in accelerator.gather(rows.to(accelerator.device)).tolist():
            if share == share:  # not NaN: a prompt may have no gold answer
                self.rates[int(number)] = (self.rates[int(number)] + share) / 2

    def state_dict(self):
        return {"draws": self.draws, "rates": self.rates.tolist()}

    def load_state_dict(self, state):
        self.draws = state["draws"]
        self.rates = np.array(state["rates"])
