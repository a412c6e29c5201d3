// The tab "One token": sliders, two curves for each algorithm, and how far a token may move.

const TOKEN_AXIS = { moves: "ratio", from: 0.25, to: 4, ticks: [0.5, 1, 2, 4], digits: 3 };
const ROW_AXIS = { moves: "rowRatio", from: 0.999, to: 1.001, ticks: [0.9995, 1, 1.0005], digits: 5 };
const CLIP = { clip_low: [0.01, 0.9, 0.01], clip_high: [0.01, 1, 0.01] }; // least, most and step of a slider
const ALGORITHMS = [
  { id: "grpo", title: "PPO, GRPO", compute: grpo, equation: "clip", axis: TOKEN_AXIS, code: "all/policy_loss",
    sliders: CLIP,
    note: "One range for all tokens, in Dr. GRPO too: one that has moved far enough rests until the next rollout." },
  { id: "dapo", title: "DAPO", compute: grpo, equation: "clip", axis: TOKEN_AXIS, sliders: CLIP, code: "grpo-dapo/Args",
    note: "Clip higher: the upper end is further out, so that rare tokens that are right can grow." },
  { id: "dcpo", title: "DCPO", compute: dcpo, equation: "dcpo", axis: TOKEN_AXIS, code: "grpo-dcpo/clip_bounds",
    sliders: { ...CLIP, max_ratio: [1.5, 10, 0.5] },
    note: "The bounds follow the old probability q: the rarer the token, the further it may move. " +
      "lo(q) has 1 − 4ϵ/q under the root, and at least 0." },
  { id: "sapo", title: "SAPO", compute: sapo, equation: "sapo", axis: TOKEN_AXIS,
    sliders: { tau_positive: [0.25, 6, 0.05], tau_negative: [0.25, 6, 0.05] },
    note: "No clip: a sigmoid lets the gradient fade on both sides. Its code is examples/recipes/sapo.py." },
  { id: "dual", title: "Dual clip", compute: dualClip, equation: "dual", axis: TOKEN_AXIS, code: "grpo-ppo/policy_loss",
    sliders: { ...CLIP, dual_clip: [1.5, 4, 0.1] },
    note: "Where A < 0, GRPO's range does not stop a ratio that grows. The bound c does." },
  { id: "gspo", title: "GSPO", compute: gspo, equation: "gspo", axis: ROW_AXIS, code: "grpo-gspo/policy_loss",
    sliders: { clip_low: [1e-4, 9e-4, 1e-5], clip_high: [1e-4, 9e-4, 1e-5] },
    note: "All tokens of a row share the ratio s, the geometric mean of theirs, and move alike." },
];
const SCENES = [
  ["The first update", "ratio=1&rowRatio=1"],
  ["A clipped token", "old=0.2&ratio=1.35&rowRatio=1.0006"],
  ["A rare token", "old=0.01&ratio=1.6"],
  ["A common token", "old=0.85&ratio=1.1"],
  ["A bad token that falls", "advantage=-1&old=0.2&ratio=0.7&rowRatio=0.9995"],
  ["A bad token that rises", "advantage=-1&old=0.2&ratio=3.4&rowRatio=1.0008"],
];

const state = {}; // what the sliders show; an option of an algorithm is "dapo.clip_high"
const limits = {}; // the least and the most that a slider shows
const redraws = []; // each brings one part of the tab up to date

// The options begin with the scripts' defaults, SAPO's with those of its paper, and c with the usual 3.
function startState() {
  const start = { old: 0.05, ratio: 1.24, advantage: 1, rowRatio: 1.0003 };
  const ranges = Object.fromEntries(scripts.map((script) => [script, data.scripts[script].ranges]));
  ranges.sapo = { tau_positive: 1, tau_negative: 1.05 };
  ranges.dual = { ...ranges.grpo, dual_clip: 3 };
  for (const { id, sliders } of ALGORITHMS) {
    for (const option of Object.keys(sliders)) start[`${id}.${option}`] = ranges[id][option];
  }
  return { ...start, ...startGroup() };
}

// The address keeps what differs from the start, so that it can be shown to others.
function readAddress(settings) {
  Object.assign(state, startState());
  for (const [key, value] of new URLSearchParams(settings)) {
    if (key in limits && Number.isFinite(Number(value))) state[key] = clamp(Number(value), ...limits[key]);
  }
}
function writeAddress() {
  const start = startState();
  const changed = Object.entries(state).filter(([key, value]) => value !== start[key]);
  const settings = changed.map(([key, value]) => `${key}=${Number(value.toPrecision(5))}`).join("&");
  history.replaceState(null, "", settings ? `#${shown}/${settings}` : `#${shown}`);
}
function redraw() {
  for (const part of redraws) part();
}

const say = (number, digits = 3) => String(Number(number.toPrecision(digits))).replace("-", "−");
const clamp = (number, low, high) => Math.min(Math.max(number, low), high);
const highestRatio = () => Math.min(TOKEN_AXIS.to, 1 / state.old); // a probability is at most 1
function token() {
  const { old, rowRatio, advantage } = state;
  return { old, rowRatio, advantage, ratio: Math.min(state.ratio, highestRatio()) };
}
function at({ id, compute, sliders }, changes = {}) {
  const options = Object.fromEntries(Object.keys(sliders).map((option) => [option, state[`${id}.${option}`]]));
  return compute({ ...token(), ...changes }, options);
}

// A slider of state[key]. Of one with logarithms each step is a factor.
function slider(key, label, [least, most, step], words, isLog = false) {
  const position = isLog ? Math.log : (number) => number;
  const input = element("input", { type: "range", min: position(least), max: position(most), step });
  const output = element("output", {});
  limits[key] = [least, most];
  input.addEventListener("input", () => {
    state[key] = isLog ? Math.exp(input.valueAsNumber) : input.valueAsNumber;
    redraw();
  });
  input.addEventListener("change", writeAddress);
  redraws.push(() => {
    if (key === "ratio") input.max = Math.log(highestRatio());
    input.value = position(state[key]);
    output.textContent = words();
    input.setAttribute("aria-valuetext", words());
  });
  return element("label", { class: "slider" }, element("span", {}, label, " ", output), input);
}

// Why the gradient is what it is, in one sentence.
function why({ id, axis }, { gradient, low, high, cap }) {
  const { old, advantage, [axis.moves]: ratio } = token();
  const isRow = axis === ROW_AXIS;
  const number = (value) => say(value, axis.digits);
  const nothing = `${isRow ? "no token of this row learns anything" : "this token learns nothing"} in this update`;
  if (advantage === 0) return `The advantage is 0: ${nothing}.`;
  if (id === "sapo") {
    const left = say((100 * gradient) / (ratio * advantage));
    return `No ratio stops this token: at ${number(ratio)}, ${left} % of the unclipped gradient is left.`;
  }
  const subject = `The ratio ${isRow ? "of the row " : ""}${number(ratio)}`;
  const isAbove = `${subject} is above ${number(high)}`;
  const isBelow = `${subject} is below ${number(low)}`;
  if (gradient === 0 && advantage > 0) return `${isAbove} and A > 0: clipped, ${nothing}.`;
  if (gradient === 0 && ratio < low) return `${isBelow} and A < 0: clipped, ${nothing}.`;
  if (gradient === 0) return `${subject} is above the cap ${number(cap)} and A < 0: ${nothing}.`;
  const unclipped = `the minimum is ${isRow ? "s" : "r"} A`;
  if (advantage > 0 && ratio < low) return `${isBelow}, but A > 0: ${unclipped}, and the gradient brings it back.`;
  if (advantage < 0 && ratio > high) {
    const end = cap * old < 1 ? `only the cap ${number(cap)} stops it` : "the gradient grows with the ratio";
    return `${isAbove}, but A < 0: ${unclipped}, and ${end}.`;
  }
  const bound = advantage > 0 ? high : low;
  const learner = isRow ? "All tokens of this row learn alike" : "This token learns";
  const probability = isRow ? "" : `, which is the probability ${say(bound * old)}`;
  if (!isRow && bound * old >= 1) {
    return `Nothing clips this token: ${number(bound)} times its old probability is above 1.`;
  }
  return `${learner}${advantage > 0 ? "" : " to be rarer"} up to the ratio ${number(bound)}${probability}.`;
}

// Pictures are SVG of this width; a part of one is a string.
const WIDTH = 340;
const LEFT = 46;
const RIGHT = 332;
const PANELS = { objective: { top: 15, bottom: 101 }, gradient: { top: 119, bottom: 205 } };
const svg = (height, label, parts) =>
  `<svg viewBox="0 0 ${WIDTH} ${height}" role="img" aria-label="${label}">${parts.flat(Infinity).join("")}</svg>`;
const text = (x, y, words, kind) => `<text x="${x}" y="${y}" class="${kind}">${words}</text>`;
const line = (x1, y1, x2, y2, kind) => `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${kind}"/>`;
const dot = (x, y, kind) => `<circle cx="${x}" cy="${y}" r="5" class="${kind}"/>`;
function path(points, kind) {
  const places = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  return places && `<path d="M${places}" class="${kind}"/>`;
}
function area(left, right, { top }, { bottom }, kind) {
  return path([[left, top], [right, top], [right, bottom], [left, bottom]], kind);
}
// From a number to its place; in a picture y goes down.
const linearScale = (from, to, start, end) => (number) => start + ((end - start) * (number - from)) / (to - from);
function logScale(from, to, start, end) {
  const scale = linearScale(Math.log(from), Math.log(to), start, end);
  return (number) => scale(Math.log(number));
}
const along = (from, to) => Array.from({ length: 301 }, (_, i) => from * (to / from) ** (i / 300));

// The heights that a panel shows: from 0 to `most`, or down to its negative, and somewhat beyond 0.
function heights(most, isUp) {
  const step = Math.ceil(most / 4);
  const ticks = [0, 1, 2, 3].map((i) => i * step).filter((tick) => tick < most);
  if (isUp) return { from: -0.12 * most, to: most, ticks };
  return { from: -most, to: 0.12 * most, ticks: ticks.map((tick) => -tick) };
}
function objectiveHeights({ id }, samples) {
  const { advantage } = state;
  if (id === "gspo" && advantage !== 0) { // s moves by some 0.001, so only the neighbourhood of A is of interest
    const [from, to] = [0.9989 * advantage, 1.0011 * advantage].sort((a, b) => a - b);
    return { from, to, ticks: ROW_AXIS.ticks.map((tick) => tick * advantage) };
  }
  const highest = Math.max(...samples.map(({ objective }) => Math.abs(objective)));
  return heights(id === "sapo" ? Math.max(3.3, 1.1 * highest) : 3.3, advantage >= 0);
}

// The stretches of the axis where the gradient is 0: [first ratio, last ratio].
function silentStretches(samples) {
  const stretches = [];
  let isOpen = false;
  for (const { ratio, gradient } of samples) {
    if (gradient !== 0) isOpen = false;
    else if (isOpen) stretches.at(-1)[1] = ratio;
    else {
      stretches.push([ratio, ratio]);
      isOpen = true;
    }
  }
  return stretches;
}

// One of the two curves of a card, with its marker. The dashed line is r A + `shift`.
function panel(name, { from, to, ticks }, x, samples, now, shift, digits) {
  const { top, bottom } = PANELS[name];
  const y = linearScale(from, to, bottom, top);
  const curve = (height) => samples.map((sample) => [sample.ratio, height(sample)])
    .filter(([, value]) => value >= from && value <= to)
    .map(([ratio, value]) => [x(ratio), y(value)]);
  const [left, level] = [x(now.ratio), y(clamp(now[name], from, to))];
  const isLeft = left > 250; // there the number stands on the left of the marker
  const wordsAt = clamp(level + (state.advantage < 0 ? 14 : -8), top + 9, bottom - 3);
  return [
    ticks.map((tick) => line(LEFT, y(tick), RIGHT, y(tick), tick === 0 ? "zero" : "grid")),
    ticks.map((tick) => text(LEFT - 5, y(tick) + 3.5, say(tick, 5), "end dim")),
    text(LEFT, top - 4, name, "name"),
    path(curve(({ ratio }) => ratio * state.advantage + shift), "unclipped"),
    path(curve((sample) => sample[name]), "curve"),
    dot(left, level, now.gradient === 0 ? "silent" : "learns"),
    text(left + (isLeft ? -10 : 10), wordsAt, say(now[name], digits), isLeft ? "end value" : "value"),
  ];
}

// The numbers below both panels: the bounds that act, and ticks where these leave `room`.
function ticksBelow({ axis }, height, x, bounds, room, label) {
  const end = axis === ROW_AXIS ? axis.to : highestRatio();
  const isFree = (tick) => tick <= end && bounds.every((bound) => Math.abs(x(bound) - x(tick)) > room);
  const kind = (tick) => (tick === axis.to ? "end dim" : "middle dim");
  return [
    axis.ticks.filter(isFree).map((tick) => text(x(tick), height, label(tick), kind(tick))),
    bounds.map((bound) => text(x(bound), height, label(bound), "middle bound")),
  ];
}
function axes(algorithm, x, bounds) {
  const { digits } = algorithm.axis;
  const ratio = (value) => say(value, digits);
  const probability = (value) => say(value * state.old);
  if (algorithm.axis === ROW_AXIS) {
    return [text(0, 218, "ratio s", "dim"), ticksBelow(algorithm, 218, x, bounds, 40, ratio)];
  }
  return [
    text(0, 218, "ratio", "dim"), ticksBelow(algorithm, 218, x, bounds, 24, ratio),
    text(0, 233, "new prob.", "dim"), ticksBelow(algorithm, 233, x, bounds, 40, probability),
  ];
}

function drawCard(algorithm) {
  const { axis, title } = algorithm;
  const { advantage, [axis.moves]: chosen } = token();
  const end = axis === ROW_AXIS ? axis.to : highestRatio();
  const ratios = along(axis.from, end);
  const samples = ratios.map((ratio) => ({ ratio, ...at(algorithm, { [axis.moves]: ratio }) }));
  const now = { ratio: clamp(chosen, axis.from, end), ...at(algorithm) };
  const x = logScale(axis.from, axis.to, LEFT, RIGHT);
  const acting = advantage > 0 ? [now.high] : [now.low, now.cap];
  const bounds = acting.filter((bound) => bound > axis.from && bound < end);
  const silent = silentStretches(samples).map(([from, to]) => [x(from), x(to)]);
  const { objective, gradient } = PANELS;
  const level = advantage < 0 ? gradient.bottom - 6 : objective.bottom - 16; // no curve passes there
  const wide = silent.filter(([from, to]) => to - from > 75);
  // A constant has no gradient. This one lets r A meet SAPO's curve at r = 1; for the others it is 0.
  const shift = at(algorithm, { [axis.moves]: 1 }).objective - advantage;
  return svg(axis === ROW_AXIS ? 223 : 238, `${title}: objective and gradient over the ratio`, [
    silent.map(([from, to]) => area(from, to, objective, gradient, "shaded")),
    area(x(end), RIGHT, objective, gradient, "impossible"),
    RIGHT - x(end) > 110 ? text((x(end) + RIGHT) / 2, level, "probability above 1", "middle dim") : "",
    line(x(now.ratio), objective.top, x(now.ratio), gradient.bottom, "now"),
    panel("objective", objectiveHeights(algorithm, samples), x, samples, now, shift, axis.digits),
    panel("gradient", heights(3.3, advantage >= 0), x, samples, now, 0, 3),
    wide.map(([from, to]) => text((from + to) / 2, level, "learns nothing", "middle words")),
    axes(algorithm, x, bounds),
  ]);
}

// Drag in a picture: `moved(x, y)` gets the place in the picture's own units.
function draggable(moved) {
  const picture = element("div", { class: "picture" });
  const follow = ({ clientX, clientY }) => {
    const box = picture.firstChild.getBoundingClientRect();
    moved(((clientX - box.left) * WIDTH) / box.width, ((clientY - box.top) * WIDTH) / box.width);
    redraw();
  };
  picture.addEventListener("pointerdown", (event) => {
    picture.setPointerCapture(event.pointerId);
    follow(event);
  });
  picture.addEventListener("pointermove", (event) => {
    if (picture.hasPointerCapture(event.pointerId)) follow(event);
  });
  picture.addEventListener("pointerup", writeAddress);
  return picture;
}

// The ratio of GSPO's row has a slider of its own.
function rowSlider() {
  const { moves, from, to } = ROW_AXIS;
  return slider(moves, "ratio s of the row", [from, to, 1e-5], () => say(state[moves], 5));
}
// What the token of the other cards does to a row.
function alone() {
  return `Alone in a row of 500, the token of the other cards gives s = ${say(token().ratio ** (1 / 500), 5)}.`;
}
function card(algorithm) {
  const { id, title, axis, equation, sliders, code, note } = algorithm;
  const isRow = axis === ROW_AXIS;
  const [status, reason, about] = [element("span", {}), element("p", {}), element("p", { class: "dim" })];
  const picture = draggable((x) => {
    const part = clamp((x - LEFT) / (RIGHT - LEFT), 0, 1);
    state[axis.moves] = axis.from * (axis.to / axis.from) ** part;
  });
  redraws.push(() => {
    const now = at(algorithm);
    status.className = now.gradient === 0 ? "status silent" : "status";
    status.textContent = `gradient ${say(now.gradient)}`;
    about.textContent = isRow ? `${note} ${alone()}` : note;
    reason.textContent = why(algorithm, now);
    picture.innerHTML = drawCard(algorithm);
  });
  const ranges = Object.entries(sliders).map(([option, range]) => {
    const key = `${id}.${option}`;
    return slider(key, option, range, () => say(state[key]));
  });
  const heading = element("h2", {}, title, code ? [" ", link(code, "its code", { class: "more" })] : []);
  return element("section", { class: `card ${id}` }, element("div", { class: "head" }, heading, status), about,
    element("div", { class: "equations" }, element("p", { html: data.play[equation] })), picture, reason,
    element("div", { class: "ranges" }, isRow ? rowSlider() : [], ranges));
}

// How far a token may move: the bounds of the ratio over the old probability.
const MAP = { top: 8, bottom: 238, least: 0.25, most: 12, rarest: 0.001 };
const movers = ALGORITHMS.filter(({ axis }) => axis === TOKEN_AXIS);
function boundCurve(algorithm, bound, x, y) {
  const points = along(MAP.rarest, 1).map((old) => [old, at(algorithm, { old })[bound]]);
  const inside = points.filter(([old, ratio]) => ratio >= MAP.least && ratio <= Math.min(MAP.most, 1 / old));
  return path(inside.map(([old, ratio]) => [x(old), y(ratio)]), `curve ${algorithm.id}`);
}
function drawMap() {
  const { old, ratio, advantage } = token();
  const x = logScale(MAP.rarest, 1, LEFT, RIGHT);
  const y = logScale(MAP.least, MAP.most, MAP.bottom, MAP.top);
  const bounds = advantage < 0 ? ["low", "cap"] : ["high"];
  const probabilityOne = [[x(1 / MAP.most), MAP.top], [x(1), y(1)], [RIGHT, MAP.top]];
  return svg(272, "The ratio at which each algorithm clips, over the old probability", [
    [0.5, 1, 2, 4, 8].map((tick) => line(LEFT, y(tick), RIGHT, y(tick), tick === 1 ? "zero" : "grid")),
    [0.5, 1, 2, 4, 8].map((tick) => text(LEFT - 5, y(tick) + 3.5, say(tick), "end dim")),
    [0.001, 0.01, 0.1, 1].map((tick) => text(x(tick), MAP.bottom + 14, say(tick), "middle dim")),
    text((LEFT + RIGHT) / 2, MAP.bottom + 29, "old probability", "middle dim"),
    text(0, MAP.bottom - 4, "ratio", "dim"),
    path(probabilityOne, "impossible"),
    text(RIGHT - 4, MAP.top + 11, "probability above 1", "end dim"),
    movers.toReversed().map((algorithm) => bounds.map((bound) => boundCurve(algorithm, bound, x, y))),
    line(x(old), MAP.top, x(old), MAP.bottom, "now"),
    dot(x(old), y(ratio), "learns"),
  ]);
}

// How many rollouts it takes from the old probability to `target`, if each goes just to its bound.
function rolloutsTo(target, algorithm) {
  const isUp = target > state.old;
  let probability = state.old;
  let count = 0;
  while (isUp ? probability < target : probability > target) {
    const { low, high } = at(algorithm, { old: probability });
    probability *= isUp ? high : low;
    count += 1;
  }
  return count;
}
function reach(algorithm, target) {
  const { low, high } = at(algorithm);
  const bound = state.advantage < 0 ? low : high;
  const probability = bound * state.old;
  if (algorithm.id === "sapo") return ["fades", "–", "–"];
  const rollouts = String(rolloutsTo(target, algorithm));
  if (probability >= 1) return ["never", "–", rollouts];
  return [say(bound), say(probability), rollouts];
}
function drawTable() {
  const { old, advantage } = state;
  const higher = old < 0.5 ? 0.5 : 1;
  const target = advantage < 0 ? old / 10 : higher;
  const names = ["", "stops at the ratio", "probability", `rollouts to ${say(target)}`];
  const rows = movers.map((algorithm) => element("tr", {},
    element("th", { class: algorithm.id, scope: "row" }, algorithm.title),
    reach(algorithm, target).map((cell) => element("td", {}, cell))));
  return [element("tr", {}, names.map((name) => element("th", { scope: "col" }, name))), ...rows];
}
function mapSection() {
  const picture = draggable((x, y) => {
    const old = MAP.rarest ** (1 - (x - LEFT) / (RIGHT - LEFT));
    const ratio = MAP.least * (MAP.most / MAP.least) ** ((MAP.bottom - y) / (MAP.bottom - MAP.top));
    state.old = clamp(old, ...limits.old);
    state.ratio = clamp(ratio, ...limits.ratio);
  });
  const table = element("table", {});
  redraws.push(() => {
    picture.innerHTML = drawMap();
    table.replaceChildren(...drawTable());
  });
  const notes = [
    "At 0.01 the ratio 1.2 adds 0.002 to the probability; at 0.9 it would pass 1, so it never clips.",
    "So a fixed range holds back rare tokens most.",
    "DAPO raises its upper end, DCPO opens it the more, the rarer the token is, and SAPO has none.",
    "The last column counts as if each rollout moved the token just to its bound.",
    "GSPO bounds the ratio of a row and not that of a token, so it has no line here.",
  ];
  const besidesIt = element("div", {}, table, element("p", {}, notes.join(" ")));
  const title = "How far may a token move in one rollout?";
  return section("map", title, "", element("div", { class: "map" }, picture, besidesIt));
}

const HELP = [
  "The objective is that of one token, before any mean; the loss is its negative.",
  "The gradient is by the token's new log-prob. So it is the slope of the curve above it, whose axis is logarithmic.",
  "GSPO's gradient is by the mean log-prob of the row, and each token gets an equal share of it.",
  "The dashed line is r A, without a clip; for SAPO it is moved to touch the curve at r = 1.",
  "The slider of the old probability keeps the ratio.",
];
function newProbability() {
  const { old, ratio } = token();
  return `${say(old * ratio)}, ratio ${say(ratio)}`;
}
function playView() {
  redraws.length = 0;
  const scenes = SCENES.map(([name, settings]) => element("li", {}, link(`play/${settings}`, name)));
  const { from, to } = TOKEN_AXIS;
  return [element("h1", {}, "One token: what does it learn?"),
    element("p", {}, "The old policy wrote a token; updates move its probability. Drag in a picture or use the sliders."),
    element("ul", { class: "chips" }, scenes),
    element("div", { class: "controls" },
      slider("old", "old probability", [MAP.rarest, 0.99, 0.01], () => say(state.old), true),
      slider("ratio", "new probability", [from, to, 0.01], newProbability, true),
      slider("advantage", "advantage A", [-2, 2, 0.05], () => say(state.advantage))),
    element("div", { class: "plays" }, ALGORITHMS.map(card)),
    element("p", { class: "dim" }, HELP.join(" ")),
    mapSection()];
}
