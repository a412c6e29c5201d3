"use strict";
// One token's objective in each algorithm, before any mean, and its gradient; the loss is its negative.
//
// The gradient is by the token's new log-prob. The ratio r is new / old probability, and its slope
// is r: where the objective is r A the gradient is r A too, and where it is a constant it is 0.
// Options have the names that they have in the scripts. The tests compare these with vectors/.

// min(r A, clip(r, low, high) A), and where A < 0 at least cap A.
function clippedObjective(ratio, advantage, low, high, cap = Infinity) {
  const unclipped = ratio * advantage;
  const clipped = Math.min(Math.max(ratio, low), high) * advantage;
  let objective = Math.min(unclipped, clipped);
  if (advantage < 0) objective = Math.max(objective, cap * advantage);
  const gradient = objective === unclipped ? unclipped : 0;
  return { objective, gradient, low, high, cap };
}

// PPO Eq. 7, DeepSeekMath Eq. 3. DAPO has another default of clip_high.
function grpo({ ratio, advantage }, { clip_low, clip_high }) {
  return clippedObjective(ratio, advantage, 1 - clip_low, 1 + clip_high);
}

// Dual-clip PPO: a bound for a ratio that grows under a negative advantage.
function dualClip({ ratio, advantage }, { clip_low, clip_high, dual_clip }) {
  return clippedObjective(ratio, advantage, 1 - clip_low, 1 + clip_high, dual_clip);
}

// GSPO Eq. 5. `rowRatio` is the geometric mean of the row's ratios; the gradient is by the row's
// mean log-prob, of which each token of the row has the same share.
function gspo({ rowRatio, advantage }, { clip_low, clip_high }) {
  return clippedObjective(rowRatio, advantage, 1 - clip_low, 1 + clip_high);
}

// DCPO Eq. 4, 8 and 27: the bounds are where |r - 1| r q = eps, and max_ratio limits both signs.
function dcpo({ old, ratio, advantage }, { clip_low, clip_high, max_ratio }) {
  const low = 0.5 + 0.5 * Math.sqrt(Math.max(0, 1 - (4 * clip_low) / old));
  const high = 0.5 + 0.5 * Math.sqrt(1 + (4 * clip_high) / old);
  return clippedObjective(ratio, advantage, low, Math.min(high, max_ratio), max_ratio);
}

// SAPO Eq. 5 and 6: the slope, 4 gate (1 - gate), is 1 at r = 1 and falls on both sides.
function sapo({ ratio, advantage }, { tau_positive, tau_negative }) {
  const tau = advantage > 0 ? tau_positive : tau_negative;
  const gate = 1 / (1 + Math.exp(-tau * (ratio - 1)));
  const objective = (4 / tau) * gate * advantage;
  const gradient = 4 * gate * (1 - gate) * ratio * advantage;
  return { objective, gradient, low: 0, high: Infinity, cap: Infinity };
}
