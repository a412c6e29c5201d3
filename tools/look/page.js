"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const steps = data.steps;
const main = document.getElementById("main");
const tip = document.getElementById("tip");
const LONG = 700; // A row with more tokens is folded: its first HEAD and its last TAIL tokens are drawn.
const HEAD = 450;
const TAIL = 150;
const state = { step: 0, colour: "change", scale: "run", breaks: false, prompt: 0, opened: new Set(), chosen: null };

// --- elements and numbers ---

// An element with its attributes and children. Strings among the children are text, never HTML.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity));
  return made;
}
const button = (text, pressed, act) => element("button", { type: "button", "aria-pressed": pressed, click: act }, text);
const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const minus = (text) => text.replace("-", "−");
const digits = (x, n = 3) => (x === null ? "none" : minus(String(Number(x.toPrecision(n)))));
const signed = (x, n = 3) => (x > 0 ? "+" : "") + digits(x, n);
const direction = (x) => (x > 0 ? "up" : x < 0 ? "down" : "");
const signColoured = (x, text) => element("span", { class: direction(x) }, text);
const dim = (...children) => element("span", { class: "dim" }, children);
const tint = (x) => `var(--${x < 0 ? "down" : "up"})`;

// What a log-prob is as a probability; null stands for a number that is not finite.
const chance = (logprob) => (logprob === null ? null : Math.exp(logprob));
const added = (a, b) => (a === null || b === null ? null : a + b);

// A probability in percent, with more digits near 0 and near 100.
function percent(p) {
  if (p === null) return "none";
  const far = 100 * Math.min(p, 1 - p);
  if (far < 0.0005) return p < 0.5 ? "< 0.001" : "> 99.999";
  return (100 * p).toFixed(far >= 1 ? 1 : far >= 0.1 ? 2 : 3);
}

// How many times as likely e^x is.
function times(x) {
  if (x === null) return "none";
  const factor = Math.exp(x);
  return `×${factor >= 1000 || factor < 0.001 ? minus(factor.toExponential(1)) : factor.toPrecision(3)}`;
}

// --- text of tokens ---

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u00a0\u115f\u1160\u3164\uffa0]/u;

// Text with a sign for each character that cannot be seen or that would turn the text around.
function visible(text, breaks) {
  const parts = [];
  let plain = "";
  for (const character of text) {
    let sign = "";
    if (character === "\n") sign = breaks ? "↵\n" : "↵";
    else if (character === "\t") sign = "⇥\t";
    else if (HIDDEN.test(character)) sign = `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`;
    if (!sign) {
      plain += character;
      continue;
    }
    parts.push(plain, element("span", { class: "sign" }, sign));
    plain = "";
  }
  return [...parts, plain].filter((part) => part !== "");
}

// A token on one line, in which spaces can be seen.
const named = (text) => (text === "" ? ["a part of a character"] : visible(text.replaceAll(" ", "␣"), false));

// --- rows ---

// Those of ppo.py have no advantage: its are of single tokens, and are not recorded.
const haveAdvantages = steps.every((step) => step.rows.every((row) => row.advantage !== undefined));

// Equal completions of a step become one row with a count; the best come first.
function merged(rows) {
  const found = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.prompt, row.tokens, row.reward]);
    if (found.has(key)) {
      found.get(key).count += 1;
      continue;
    }
    found.set(key, { ...row, count: 1, total: row.change.reduce(added, 0) });
  }
  return [...found.values()].sort((a, b) => b.reward - a.reward || b.total - a.total);
}
for (const step of steps) {
  step.size = step.rows.length;
  step.rows = merged(step.rows);
  step.samePrompt = step.rows.every((row) => row.prompt === step.rows[0].prompt);
}

// What the colours can show: {name: [what it is, value of a token, whether it has two signs]}.
const COLOURS = {
  change: ["change of the log-prob", (row, i) => row.change[i], true],
  logprob: ["surprise: −log-prob before", (row, i) => -row.logprob[i], false],
  entropy: ["entropy after", (row, i) => row.entropy[i], false],
};
if (haveAdvantages) COLOURS.advantage = ["advantage", (row) => row.advantage, true];

// The value of the deepest colour, below which 99 % of the tokens are: of all steps, or of the one that is shown.
function deepest() {
  const [, value] = COLOURS[state.colour];
  const values = [];
  for (const step of state.scale === "run" ? steps : [steps[state.step]]) {
    for (const row of step.rows) row.tokens.forEach((_, i) => values.push(Math.abs(value(row, i))));
  }
  values.sort((a, b) => a - b);
  return values[Math.floor(0.99 * (values.length - 1))] || Math.max(values.at(-1), 1e-9);
}
const strength = (x, most) => 100 * Math.sqrt(Math.min(1, Math.abs(x) / most));

// --- the tokens of a step ---

function tokenOf(row, number, i, most) {
  const [, value, hasTwoSigns] = COLOURS[state.colour];
  const x = value(row, i);
  const attributes = { class: "token", "data-row": number, "data-token": i };
  attributes["--tint"] = hasTwoSigns ? tint(x) : "var(--heat)";
  attributes["--strength"] = `${strength(x, most).toFixed(1)}%`;
  const isPart = row.tokens[i] === "";
  return element("span", attributes, isPart ? element("span", { class: "sign" }, "·") : visible(row.tokens[i], state.breaks));
}

function rowOf(row, number, step, most) {
  const length = row.tokens.length;
  const isFolded = length > LONG && !state.opened.has(number);
  const text = element("div", { class: "text" });
  for (let i = 0; i < length; i++) {
    if (isFolded && i === HEAD) {
      const open = () => {
        state.opened.add(number);
        showStep();
      };
      text.append(element("button", { type: "button", class: "more", click: open }, `${length - HEAD - TAIL} more tokens`));
      i = length - TAIL;
    }
    text.append(tokenOf(row, number, i, most));
  }
  const asked = element("div", { class: "text asked" }, element("span", {}, visible(row.prompt, true)));
  return element("div", { class: "row" }, step.samePrompt ? [] : asked, aboutRow(row), text);
}

// A disc that is full for a reward of 1 and empty for one of 0.
function dot(reward) {
  if (reward === null) return element("span", { class: "dot none" });
  return element("span", { class: "dot", "--part": Math.min(1, Math.max(0, reward)) });
}
function aboutRow(row) {
  const reward = element("b", {}, `reward ${digits(row.reward)}`);
  const advantage = haveAdvantages ? ["advantage ", signColoured(row.advantage, signed(row.advantage, 2))] : [];
  const title = "how likely the whole answer is after the update, over how likely it was before";
  return element("div", { class: "about" },
    element("div", {}, dot(row.reward), reward, row.count > 1 ? ` × ${row.count}` : ""),
    element("div", {}, advantage),
    element("div", { title }, "whole answer ", signColoured(row.total, times(row.total))),
    element("div", {}, row.truncated ? "cut off" : ""));
}

// Each place where a completion goes on with a token, with the rows that do: their log-probs are the same.
function placesOf(step) {
  const found = [];
  const roots = new Map();
  for (const row of step.rows) {
    if (!roots.has(row.prompt)) roots.set(row.prompt, new Map());
    let next = roots.get(row.prompt);
    row.tokens.forEach((text, i) => {
      if (!next.has(text)) {
        const before = chance(row.logprob[i]);
        const after = chance(added(row.logprob[i], row.change[i]));
        const context = row.tokens.slice(Math.max(0, i - 12), i).join("");
        next.set(text, { text, i, context, before, after, count: 0, rewards: [], next: new Map() });
        found.push(next.get(text));
      }
      const place = next.get(text);
      place.count += row.count;
      place.rewards.push(...Array(row.count).fill(row.reward));
      next = place.next;
    });
  }
  return found;
}

function moveOf(place) {
  const [low, high] = [place.before, place.after].sort((a, b) => a - b).map((p) => 100 * p);
  const change = place.after - place.before;
  const mean = sum(place.rewards) / place.rewards.length;
  const context = place.i ? ["…", visible(place.context, false)] : "at the start ";
  return element("div", { class: "move", "--tint": tint(change) },
    element("div", { class: "code" }, dim(context), element("b", {}, named(place.text))),
    element("div", { class: "track" },
      element("i", { style: `left:0;width:${low}%` }),
      element("b", { style: `left:${low}%;width:${high - low}%` })),
    element("div", { class: "numbers" },
      element("span", {}, `${percent(place.before)} → `, signColoured(change, `${percent(place.after)} %`)),
      dim(count(place.count, "answer"), `, reward ${digits(mean, 2)}`)));
}

function moves(step) {
  const size = (place) => (place.after === null ? 0 : Math.abs(place.after - place.before));
  const largest = placesOf(step).sort((a, b) => size(b) - size(a)).slice(0, 6).filter((place) => size(place) > 1e-5);
  const shown = largest.map(moveOf);
  if (!shown.length) return [];
  return [element("div", { class: "moves" }, element("h3", {}, "The largest moves of a probability"), shown)];
}

// The step in sentences.
function saying(step) {
  const rows = step.rows.flatMap((row) => Array(row.count).fill(row));
  if (rows.some((row) => row.total === null)) {
    return element("p", { class: "said" }, "Some of these numbers are not finite: there is no summary.");
  }
  const sizes = rows.flatMap((row) => row.change.map(Math.abs)).sort((a, b) => b - a);
  const all = sum(sizes);
  let few = 0;
  for (let part = 0; part < 0.8 * all; few++) part += sizes[few];
  const said = [];
  if (all) said.push(element("b", {}, `${few} of these ${sizes.length} tokens`), " carry 80 % of their change. ");
  for (const [sign, word] of haveAdvantages ? [[1, "positive"], [-1, "negative"]] : []) {
    const group = rows.filter((row) => sign * row.advantage > 0);
    if (!group.length) continue;
    const mean = sum(group.map((row) => row.total)) / group.length;
    said.push(`On average an answer with a ${word} advantage is now `, signColoured(mean, times(mean)), " as likely. ");
  }
  if (rows.every((row) => row.advantage === 0)) {
    said.push("All advantages here are 0: other prompts of the batch, and the KL if there is one, moved these tokens. ");
  }
  return element("p", { class: "said" }, said);
}

const EXPLAINED = {
  change: "Blue tokens are more likely after the update than before, red ones less likely; the deeper, the larger the " +
    "change. It is the change by the whole batch, with all its prompts, and the KL if there is one, not by this row alone.",
  logprob: "The deeper a token, the less likely it was before the update.",
  entropy: "The deeper a token, the less sure the model is of what comes here, after the update.",
  advantage: "Blue: the update should make the token more likely. Red: less likely.",
};

// What the colours mean, and what they do not.
function legend(most) {
  const [what, , hasTwoSigns] = COLOURS[state.colour];
  const marks = hasTwoSigns ? [-1, -0.5, -0.25, -0.05, 0, 0.05, 0.25, 0.5, 1] : [0, 0.05, 0.25, 0.5, 1];
  const stops = marks.map((x) => {
    const colour = hasTwoSigns ? tint(x) : "var(--heat)";
    return `color-mix(in oklab, ${colour} ${strength(x, 1).toFixed(0)}%, var(--paper)) ${hasTwoSigns ? 50 + 50 * x : 100 * x}%`;
  });
  const ramp = element("span", { class: "ramp", style: `background: linear-gradient(90deg, ${stops.join(", ")})` });
  const ends = hasTwoSigns ? [signed(-most, 2), signed(most, 2)] : ["0", digits(most, 2)];
  return element("div", { class: "legend" },
    element("p", {}, EXPLAINED[state.colour]),
    element("div", { class: "scale" }, `${what}:`, element("span", { class: "ends" }, ends[0], ramp, ends[1]),
      dim("Hover over a token, or tap it, for its numbers. The arrow keys change the step.")));
}

function goldOf({ answer }) {
  if (answer === null || answer === undefined) return "";
  return element("span", { class: "dim gold" }, "gold answer ", element("b", { class: "code" }, visible(answer, false)));
}

function promptOf(step) {
  if (!step.samePrompt) return element("div", { class: "prompt" }, `${count(step.size, "completion")} of several prompts`);
  const [row] = step.rows;
  const differ = step.rows.some((other) => other.reward !== row.reward);
  const group = differ ? "of the first group whose rewards differ" : "of the first group";
  return element("div", { class: "prompt" }, element("code", {}, visible(row.prompt, true)),
    dim(`${count(step.size, "completion")} ${group}`));
}

function choice(label, name, options) {
  const list = element("select", { change: () => {
    state[name] = list.value;
    showStep();
  } }, Object.entries(options).map(([value, text]) => element("option", { value }, text)));
  list.value = state[name];
  return element("label", {}, `${label} `, list);
}
const view = element("div", { class: "body" });
const title = element("h2", {});
const chips = element("div", { class: "chips", role: "group", "aria-label": "steps" });
function tokensSection() {
  chips.append(...steps.map((step, i) => button(String(step.step), false, () => go(i))));
  const breaks = element("input", { type: "checkbox", change: () => {
    state.breaks = breaks.checked;
    showStep();
  } });
  breaks.checked = state.breaks;
  const colours = Object.fromEntries(Object.entries(COLOURS).map(([name, [what]]) => [name, what]));
  const choices = element("div", { class: "choices" }, choice("colour", "colour", colours),
    choice("scale of", "scale", { run: "the run", step: "this step" }), element("label", {}, breaks, " break lines"));
  const note = data.left_out ? `${count(data.left_out, "step")} of tokens.jsonl left out, for the size of this page` : "";
  return element("section", {}, element("div", { class: "head" }, title, dim(note)),
    element("div", { class: "controls" }, dim("step"), chips, choices), view);
}

// What stands in the place of the tokens of a run that recorded none.
function noTokensSection() {
  title.textContent = "What updates did to each token";
  const how = data.has_pairs ? `${data.script}.py trains on pairs and records no tokens.`
    : "This run recorded no tokens. Train with --record_tokens to see them here.";
  view.append(element("p", {}, how));
  return element("section", {}, element("div", { class: "head" }, title), view);
}

function showStep() {
  hideTip();
  const step = steps[state.step];
  const most = deepest();
  const isLong = step.rows.some((row) => row.tokens.length > 150);
  title.textContent = `What the update of step ${step.step} did to each token`;
  [...chips.children].forEach((chip, i) => chip.setAttribute("aria-pressed", i === state.step));
  const chip = chips.children[state.step];
  chips.scrollLeft = chip.offsetLeft - chips.offsetLeft - chips.clientWidth / 2;
  const rows = element("div", { class: isLong ? "long" : "" }, step.rows.map((row, number) => rowOf(row, number, step, most)));
  view.replaceChildren(legend(most), promptOf(step), saying(step), element("div", { class: "two" }, rows, ...moves(step)));
  drawCurves();
}
function go(i) {
  if (!steps.length) return;
  state.step = Math.min(steps.length - 1, Math.max(0, i));
  state.opened.clear();
  history.replaceState(null, "", `#${steps[state.step].step}`);
  showStep();
}

// Which of the steps is nearest to one of this number.
function nearest(number) {
  const distances = steps.map((step) => Math.abs(step.step - number));
  return distances.indexOf(Math.min(...distances));
}

// --- the numbers of a token, beside it ---

function showTip(span) {
  const row = steps[state.step].rows[span.dataset.row];
  const i = Number(span.dataset.token);
  const before = row.logprob[i];
  const change = row.change[i];
  const after = added(before, change);
  const line = (name, ...value) => element("tr", {}, element("td", {}, name), element("td", {}, value));
  tip.replaceChildren(
    element("div", {}, element("code", {}, named(row.tokens[i])), dim(` token ${i + 1} of ${row.tokens.length}`)),
    element("table", {},
      line("probability", `${percent(chance(before))} → ${percent(chance(after))} %`),
      line("log-prob", `${digits(before, 4)} → ${digits(after, 4)}`),
      line("change", signColoured(change, signed(change, 4)), change === null ? "" : `, ratio ${Math.exp(change).toPrecision(4)}`),
      line("entropy after", digits(row.entropy[i])),
      haveAdvantages ? line("advantage", signed(row.advantage, 4)) : ""));
  tip.hidden = false;
  const place = [...span.getClientRects()].at(-1);
  const size = tip.getBoundingClientRect();
  const isBelow = place.bottom + 8 + size.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left - 12, innerWidth - size.width - 8))}px`;
  tip.style.top = `${isBelow ? place.bottom + 8 : Math.max(8, place.top - size.height - 8)}px`;
}
function hideTip() {
  tip.hidden = true;
  state.chosen?.classList.remove("chosen");
  state.chosen = null;
}
function choose(span) {
  hideTip();
  state.chosen = span;
  span.classList.add("chosen");
  showTip(span);
}
const tokenAt = (event) => event.target.closest?.(".token");
view.addEventListener("pointerover", (event) => {
  if (tokenAt(event) && event.pointerType === "mouse" && !state.chosen) showTip(tokenAt(event));
});
view.addEventListener("pointerout", () => {
  if (!state.chosen) tip.hidden = true;
});
document.addEventListener("click", (event) => {
  const span = tokenAt(event);
  if (span && span !== state.chosen) choose(span);
  else hideTip();
});
addEventListener("scroll", hideTip, { passive: true });
document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") hideTip();
  const isOurs = event.target.tagName !== "SELECT" && !event.altKey && !event.ctrlKey && !event.metaKey;
  if (by && isOurs) go(state.step + by);
});

// --- curves ---

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const panels = data.curves.map((panel) => {
  const numbers = element("span", { class: "dim" });
  return { ...panel, numbers, picture: svg("svg", { role: "img", "aria-label": panel.title }) };
});
function curvesSection() {
  const drawn = panels.map((panel) => {
    panel.picture.addEventListener("click", (event) => {
      go(nearest(panel.stepAt(event.clientX - panel.picture.getBoundingClientRect().left)));
    });
    return element("div", { class: "curve" }, element("div", {}, element("h3", {}, panel.title), panel.numbers), panel.picture);
  });
  return element("section", {}, element("div", { class: "curves" }, drawn));
}
function drawCurves() {
  for (const panel of panels) drawCurve(panel, steps.length ? steps[state.step].step : data.step);
}
function drawCurve(panel, now) {
  const width = panel.picture.clientWidth || 240;
  const height = panel.picture.clientHeight || 110;
  const [left, right, top, bottom] = [36, 8, 8, 18];
  const values = panel.lines.flatMap((line) => line.points.map(([, value]) => value));
  const last = Math.max(data.step, 1);
  const most = Math.max(...values);
  const least = Math.min(0, ...values);
  const low = least > -1e-6 * Math.abs(most) ? 0 : least; // Rounding does not move the axis.
  const high = most > low ? most : low + 1;
  const x = (step) => left + (width - left - right) * step / last;
  const y = (value) => height - bottom - (height - top - bottom) * (value - low) / (high - low);
  panel.stepAt = (place) => (place - left) / (width - left - right) * last;
  const drawn = [];
  for (const value of low < 0 ? [low, 0, high] : [low, high]) {
    drawn.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawn.push(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, digits(value, 2)));
  }
  drawn.push(svg("text", { x: left, y: height - 3 }, "0"));
  drawn.push(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, `step ${data.step}`));
  drawn.push(svg("line", { class: "now", x1: x(now), x2: x(now), y1: top - 4, y2: height - bottom }));
  panel.numbers.replaceChildren();
  for (const line of panel.lines) {
    const place = line.points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    drawn.push(svg("path", { class: line.name, d: place.join("") }));
    const isSparse = line.name === "held-out" && line.points.length < 60;
    if (isSparse) for (const [step, value] of line.points) drawn.push(svg("circle", { cx: x(step), cy: y(value), r: 3 }));
    const point = line.points.findLast(([step]) => step <= now);
    if (!point) continue;
    const age = point[0] === now ? "" : ` (step ${point[0]})`; // The last evaluation may be an earlier one.
    const note = line.name === "held-out" ? ` held-out${age}` : "";
    const between = panel.numbers.hasChildNodes() ? " · " : "";
    panel.numbers.append(between, element("span", { class: line.name }, digits(point[1]) + note));
  }
  panel.picture.replaceChildren(...drawn);
}

// --- answers to evaluation prompts ---

const answers = element("div", { class: "body" });
const prompts = element("div", { class: "chips", role: "group", "aria-label": "evaluation prompts" });
function answersSection() {
  prompts.append(...data.evaluations.map(({ prompt }, i) => button(prompt.replace(/\s+/g, " ").slice(0, 60), false, () => {
    state.prompt = i;
    showAnswers();
  })));
  const head = element("div", { class: "head" }, element("h2", {}, "One held-out prompt along the run"), prompts);
  return element("section", {}, head, answers);
}
function columnOf({ step, reward, answers: given }) {
  const mean = reward === null ? "" : `reward ${digits(reward)}`;
  return element("div", { class: "column" },
    element("h3", {}, element("span", {}, `step ${step}`), element("span", {}, mean)), given.map(answerOf));
}
function answerOf(answer) {
  const reward = answer.reward === null ? "no reward" : digits(answer.reward);
  const times = answer.count > 1 ? ` × ${answer.count}` : "";
  return element("div", { class: "answer" },
    element("div", { class: "dim" }, dot(answer.reward), reward, times, answer.truncated ? ", cut off" : ""),
    element("div", { class: "code" }, visible(answer.text.trimEnd() || "(nothing)", true)));
}
function showAnswers() {
  const entry = data.evaluations[state.prompt];
  [...prompts.children].forEach((chip, i) => chip.setAttribute("aria-pressed", i === state.prompt));
  const columns = entry.evaluations.map(columnOf);
  answers.replaceChildren(element("div", { class: "prompt" }, element("code", {}, visible(entry.prompt, true)), goldOf(entry)),
    element("div", { class: "columns", tabindex: 0, role: "group", "aria-label": "evaluations" }, columns));
}

// --- the page ---

const word = (value) => (Array.isArray(value) ? value.join(" ") : String(value));
document.title = `${data.run} · look into a run`;
document.getElementById("title").textContent = `${data.script ? `${data.script}.py` : data.run} on ${word(data.dataset)}`;
const end = data.max_steps > 0 ? ` of ${data.max_steps}` : "";
const facts = [`run ${data.run}`, `model ${word(data.model_name_or_path)}`, `step ${data.step}${end}`, `learning rate ${data.learning_rate}`];
document.getElementById("facts").textContent = facts.join(", ");
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const sections = [];
if (panels.length) sections.push(curvesSection());
sections.push(steps.length ? tokensSection() : noTokensSection());
if (data.evaluations.length) sections.push(answersSection());
main.replaceChildren(...sections);
state.step = location.hash ? nearest(Number(location.hash.slice(1)) || 0) : 0;
state.breaks = steps.some((step) => step.rows.some((row) => row.tokens.length > 150));
if (steps.length) {
  view.closest("section").querySelector("input").checked = state.breaks;
  showStep();
} else {
  drawCurves();
}
if (data.evaluations.length) showAnswers();
addEventListener("resize", () => {
  drawCurves();
  hideTip();
});
