"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");

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
const button = (text, act) => element("button", { type: "button", "aria-pressed": false, click: act }, text);
const minus = (text) => text.replace("-", "−");
const digits = (x, n = 3) => (x === null ? "none" : minus(String(Number(x.toPrecision(n)))));

// --- text ---

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u00a0\u115f\u1160\u3164\uffa0]/u;

// Text with a sign for each character that cannot be seen or that would turn the text around.
function visible(text) {
  const parts = [];
  let plain = "";
  for (const character of text) {
    let sign = "";
    if (character === "\n") sign = "↵\n";
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
  const drawn = panels.map((panel) =>
    element("div", { class: "curve" }, element("div", {}, element("h3", {}, panel.title), panel.numbers), panel.picture));
  return element("section", {}, element("div", { class: "curves" }, drawn));
}
function drawCurve(panel) {
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
  const drawn = [];
  for (const value of low < 0 ? [low, 0, high] : [low, high]) {
    drawn.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawn.push(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, digits(value, 2)));
  }
  drawn.push(svg("text", { x: left, y: height - 3 }, "0"));
  drawn.push(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, `step ${data.step}`));
  panel.numbers.replaceChildren();
  for (const line of panel.lines) {
    const place = line.points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    drawn.push(svg("path", { class: line.name, d: place.join("") }));
    const isSparse = line.name === "held-out" && line.points.length < 60;
    if (isSparse) for (const [step, value] of line.points) drawn.push(svg("circle", { cx: x(step), cy: y(value), r: 3 }));
    const point = line.points.at(-1);
    const age = point[0] === data.step ? "" : ` (step ${point[0]})`; // The last evaluation may be an earlier one.
    const note = line.name === "held-out" ? ` held-out${age}` : "";
    const between = panel.numbers.hasChildNodes() ? " · " : "";
    panel.numbers.append(between, element("span", { class: line.name }, digits(point[1]) + note));
  }
  panel.picture.replaceChildren(...drawn);
}

// --- answers to evaluation prompts ---

// A disc that is full for a reward of 1 and empty for one of 0.
function dot(reward) {
  if (reward === null) return element("span", { class: "dot none" });
  return element("span", { class: "dot", "--part": Math.min(1, Math.max(0, reward)) });
}
function goldOf({ answer }) {
  if (answer === null || answer === undefined) return "";
  return element("span", { class: "dim gold" }, "gold answer ", element("b", { class: "code" }, visible([answer].flat().join(" or "))));
}
const answers = element("div", { class: "body" });
const prompts = element("div", { class: "chips", role: "group", "aria-label": "evaluation prompts" });
function answersSection() {
  prompts.append(...data.evaluations.map(({ prompt }, i) => button(prompt.replace(/\s+/g, " ").slice(0, 60), () => showAnswers(i))));
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
    element("div", { class: "code" }, visible(answer.text.trimEnd() || "(nothing)")));
}
function showAnswers(number) {
  const entry = data.evaluations[number];
  [...prompts.children].forEach((chip, i) => chip.setAttribute("aria-pressed", i === number));
  const columns = entry.evaluations.map(columnOf);
  answers.replaceChildren(element("div", { class: "prompt" }, element("code", {}, visible(entry.prompt)), goldOf(entry)),
    element("div", { class: "columns", tabindex: 0, role: "group", "aria-label": "evaluations" }, columns));
}

// --- the page ---

const word = (value) => (Array.isArray(value) ? value.join(" ") : String(value));
document.title = `${data.run} · look into a run`;
document.getElementById("title").textContent = `${data.run} on ${word(data.dataset)}`;
const end = data.max_steps > 0 ? ` of ${data.max_steps}` : "";
const facts = [`model ${word(data.model_name_or_path)}`, `step ${data.step}${end}`, `learning rate ${data.learning_rate}`];
document.getElementById("facts").textContent = facts.join(", ");
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
const sections = [];
if (panels.length) sections.push(curvesSection());
if (data.evaluations.length) sections.push(answersSection());
main.replaceChildren(...sections);
panels.forEach(drawCurve);
if (data.evaluations.length) showAnswers(0);
addEventListener("resize", () => panels.forEach(drawCurve));
