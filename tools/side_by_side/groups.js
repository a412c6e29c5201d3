// One group at the first update, where every ratio is 1: its advantages and the weights of its tokens.
//
// The gradient by a token's log-prob is then its weight times its advantage. Options have the names that
// they have in vectors/, with which the tests compare these.

const meanOf = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
function varianceOf(numbers, ddof) {
  const center = meanOf(numbers);
  return (meanOf(numbers.map((number) => (number - center) ** 2)) * numbers.length) / (numbers.length - ddof);
}

// DeepSeekMath, 4.1.2; Dr. GRPO divides by no deviation. Rewards that are equal but for their rounding have 0.
function groupAdvantages(rewards, { deviation, std_ddof, std_eps }) {
  const size = Math.max(1, ...rewards.map(Math.abs));
  const isEqual = Math.max(...rewards) - Math.min(...rewards) <= 1e-9 * size;
  if (isEqual) return rewards.map(() => 0);
  const divisor = deviation === "none" ? 1 : Math.sqrt(varianceOf(rewards, std_ddof)) + std_eps;
  return rewards.map((reward) => (reward - meanOf(rewards)) / divisor);
}

// DCPO, A.7: of two mixtures of this visit and of all visits the one that is nearer to 0.
// `history` has the visits before this one, and the mean and the variance of their rewards.
function smoothedAdvantages(rewards, history) {
  const visits = history.visits + 1;
  const own = { mean: meanOf(rewards), variance: varianceOf(rewards, 0) };
  const between = (history.visits / visits) * (own.mean - history.mean) ** 2;
  const all = {
    visits,
    mean: (history.visits * history.mean + own.mean) / visits,
    variance: (history.visits * history.variance + own.variance + between) / visits,
  };
  const standardized = (reward, { mean, variance }) => {
    const std = Math.sqrt(variance);
    return std <= 1e-9 * Math.max(1, Math.abs(mean)) ? 0 : (reward - mean) / std;
  };
  const advantages = rewards.map((reward) => {
    const [now, ever] = [standardized(reward, own), standardized(reward, all)];
    const nearNow = (history.visits * now + ever) / visits;
    const nearEver = (now + history.visits * ever) / visits;
    return Math.abs(nearNow) < Math.abs(nearEver) ? nearNow : nearEver;
  });
  return { advantages, history: all };
}

// The weight of each token of a row, for rows of these lengths.
function tokenWeights(lengths, { mean, constant, prompts = 1 }) {
  const tokens = lengths.reduce((sum, length) => sum + length, 0);
  const weights = {
    rows: (length) => 1 / length / lengths.length, // DeepSeekMath Eq. 3
    constant: () => 1 / constant / lengths.length, // Dr. GRPO, Listing 1
    tokens: () => 1 / tokens, // DAPO, Section 3.3
    prompts: (length) => 1 / length / prompts, // DCPO Eq. 8
  };
  return lengths.map(weights[mean]);
}
