"""A curriculum: prompts are drawn by their past pass rates, those closest to one half most often.

A group that is all right or all wrong teaches nothing, and the signal of a prompt with pass rate p
grows with the variance p (1 - p) (arXiv 2504.03380). So a prompt is drawn with a probability
proportional to p (1 - p), mixed with a uniform share so that none is forgotten. Each p starts at
one half, and each visit moves it halfway to the share of right completions. No draw holds a prompt
twice. This schedule is our own; no paper has it.

The rates are the same on all processes and are part of the checkpoint, so a run resumes exactly.
"""


class Args:
    uniform_share: float = option(0.1, "share of the draws that ignores pass rates", ge=0, le=1)


LINES = {
    "sampler = PromptSampler(train_prompts, args.seed, accelerator)": """
        sampler = Curriculum(train_prompts, args, accelerator)
    """,
    "run.add_samples(metrics, samples, args.group_size)": """
        run.add_samples(metrics, samples, args.group_size)
        metrics.add("curriculum/pass_rate", sampler.rates[sampler.drawn])  # before this step
        sampler.observe(accelerator, samples.correct)
    """,
}


class Curriculum:
    """Draws prompts, and tracks the pass rate of each in `rates` (prompts,), float64."""

    def __init__(self, prompts, args, accelerator):
        self.prompts = prompts
        self.args = args
        self.shard = slice(accelerator.process_index, None, accelerator.num_processes)
        self.rates = np.full(len(prompts), 0.5)
        self.draws = 0
        self.drawn = []  # indices of this process's prompts in the last draw

    def probabilities(self):
        """Return the probability of each prompt in a draw of one."""
        variances = self.rates * (1 - self.rates)
        weights = np.maximum(variances, 1e-9)  # a rate rounds to 1 after 54 right visits
        uniform = self.args.uniform_share
        return (1 - uniform) * weights / weights.sum() + uniform / len(weights)

    def draw(self, number):
        """Return this process's share of `number` prompts, distinct if there are that many."""
        count = len(self.rates)
        generator = np.random.default_rng([self.args.seed, self.draws])
        self.draws += 1
        chosen = generator.choice(count, number, replace=number > count, p=self.probabilities())
        self.drawn = chosen[self.shard].tolist()
        return [self.prompts[i] for i in self.drawn]

    def observe(self, accelerator, correct):
        """Move the rates of the last draw, over all processes, halfway to those of `correct` (R,).

        Raise Exit if no prompt of the draw has a gold answer.
        """
        shares = correct.double().view(len(self.drawn), -1).nanmean(dim=1)  # (R / G,)
        rows = torch.stack([torch.tensor(self.drawn).double(), shares], dim=1)
        rows = accelerator.gather(rows.to(accelerator.device))
        if rows[:, 1].isnan().all():
            raise Exit("a curriculum needs gold answers: no prompt of this step has one")
        for index, share in rows.tolist():
            if share == share:  # not NaN: a prompt may lack a gold answer
                self.rates[int(index)] = (self.rates[int(index)] + share) / 2

    def state_dict(self):
        return {"draws": self.draws, "rates": self.rates.tolist()}

    def load_state_dict(self, state):
        self.draws = state["draws"]
        self.rates = np.array(state["rates"])
