const data = JSON.parse(document.getElementById("data").textContent);
const scripts = Object.keys(data.scripts);
const functions = [...new Set(scripts.flatMap((script) => Object.keys(data.scripts[script].places)))];
const main = document.getElementById("main");
const place = (script, name) => data.scripts[script].places[name];
const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

// An element with its attributes and children. Strings among the children are text, never HTML.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "html") made.innerHTML = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity));
  return made;
}
const link = (state, text, attributes = {}) => element("a", { href: `#${state}`, ...attributes }, text);

// One line of code; `marks` are the [start, end] of the words that differ.
function lineOf(tokens, number, sign, marks) {
  const code = element("code", {});
  const indent = tokens.length ? /^ */.exec(tokens[1])[0].length : 0;
  let position = 0;
  for (let i = 0; i < tokens.length; i += 2) {
    const text = tokens[i + 1];
    const span = element("span", { class: tokens[i] });
    let done = 0;
    for (const [start, end] of marks) {
      const from = Math.max(start - position, done);
      const to = Math.min(end - position, text.length);
      if (to <= from) continue;
      span.append(text.slice(done, from), element("mark", {}, text.slice(from, to)));
      done = to;
    }
    span.append(text.slice(done));
    code.append(span);
    position += text.length;
  }
  code.style.setProperty("--hang", `${indent + 4}ch`); // where a long line goes on
  return element("div", { class: "line" }, element("span", { class: "number" }, number), element("span", { class: "sign" }, sign), code);
}

// The lines from `start` to `end` of a place. `kind`: gone, come, or nothing for lines that both scripts have.
function side({ text, numbers }, start, end, kind = "", marks = []) {
  const sign = { gone: "−", come: "+" }[kind] || " ";
  const rows = [];
  for (let row = start; row < end; row++) {
    const own = marks.filter((mark) => mark[0] === row - start).map((mark) => mark.slice(1));
    rows.push(lineOf(data.texts[text][row], String(numbers[row]), sign, own));
  }
  return element("div", { class: `side ${kind}` }, rows);
}

// The changes from one text to another; they are stored in one direction.
function changesOf(a, b) {
  const stored = data.changes[`${a} ${b}`];
  if (stored) return stored;
  return data.changes[`${b} ${a}`].map(([i, iEnd, j, jEnd, old, fresh]) => [j, jEnd, i, iEnd, fresh, old]);
}

// A run of equal lines: `show(from, to)` makes those from `start` to `end`; what is far from a change is folded.
function equalRun(start, end, isFirst, isLast, show) {
  const head = isFirst ? 1 : 3;
  const tail = isLast ? 0 : 3;
  const hidden = end - start - head - tail;
  if (hidden < 4) return end > start ? [show(start, end)] : [];
  const fold = element("details", {}, element("summary", {}, `${hidden} identical lines`), show(start + head, end - tail));
  return [show(start, start + head), fold, ...(tail ? [show(end - tail, end)] : [])];
}

// A place that two scripts have in different texts: `row(i, iEnd, j, jEnd, old marks, new marks)` makes a change, and
// `same(i, iEnd, j)` equal lines.
function compare(a, b, row, same) {
  const parts = [];
  let [i, j] = [0, 0];
  for (const [start, end, newStart, newEnd, old, fresh] of changesOf(a.text, b.text)) {
    const shift = j - i;
    parts.push(...equalRun(i, start, i === 0, false, (from, to) => same(from, to, from + shift)));
    parts.push(row(start, end, newStart, newEnd, old, fresh));
    [i, j] = [end, newEnd];
  }
  const shift = j - i;
  parts.push(...equalRun(i, a.numbers.length, i === 0, true, (from, to) => same(from, to, from + shift)));
  return parts;
}
const columns = (...sides) => element("div", { class: "columns" }, sides);
function besides(a, b) {
  return compare(a, b,
    (i, iEnd, j, jEnd, old, fresh) => columns(side(a, i, iEnd, "gone", old), side(b, j, jEnd, "come", fresh)),
    (i, iEnd, j) => columns(side(a, i, iEnd), side(b, j, j + iEnd - i)));
}
function changedIn(a, b) {
  return compare(a, b,
    (i, iEnd, j, jEnd, old, fresh) => side(b, j, jEnd, "come", fresh),
    (i, iEnd, j) => side(b, j, j + iEnd - i));
}

function equations(names, name) {
  const rows = names.flatMap((script) => (data.scripts[script].equations[name] || []).map(([html, number]) =>
    element("p", {}, element("b", {}, `${script} `), element("span", { html }), element("span", { class: "dim" }, ` ${number || ""}`))));
  return rows.length ? [element("div", { class: "equations" }, rows)] : [];
}
function section(id, title, status, ...body) {
  return element("section", { id }, element("div", { class: "head" }, element("h2", {}, title), element("span", { class: "dim" }, status)), body);
}
const linesOf = ({ numbers }) => `lines ${numbers[0]} to ${numbers.at(-1)}`;
const fileNames = (names, name) => columns(names.map((script) => element("div", { class: "file dim" }, `${script}.py, ${linesOf(place(script, name))}`)));

// `normalize_std True → False` of the options that a function of two scripts reads, where their defaults differ;
// of Args those of common/run.py too.
function otherDefaults(one, two, name) {
  const [a, b] = [one, two].map((script) => data.scripts[script].defaults);
  const read = name === "Args" ? Object.keys(a) : [one, two].flatMap((script) => data.reads[place(script, name).text]);
  const found = [...new Set(read)].filter((option) => option in a && option in b && a[option] !== b[option]);
  return found.map((option) => `${option} ${a[option]} → ${b[option]}`).join(", ");
}

// One function of two scripts.
function pairSection(one, two, name) {
  const id = `${one}-${two}/${name}`;
  const names = [one, two].filter((script) => place(script, name));
  const [a, b] = names.map((script) => place(script, name));
  const title = [link(id, name), " ", link(`all/${name}`, "in all scripts", { class: "more" })];
  const formulas = equations(names, name);
  if (!b) {
    const code = side(a, 0, a.numbers.length, names[0] === one ? "gone" : "come");
    return section(id, title, `only in ${names[0]}.py, ${linesOf(a)}`, formulas, element("div", { class: "code" }, code));
  }
  const other = otherDefaults(one, two, name);
  if (a.text !== b.text) {
    return section(id, title, other ? `differs; other default: ${other}` : "differs", formulas, element("div", { class: "code" }, fileNames(names, name), besides(a, b)));
  }
  const code = element("div", { class: "code" }, fileNames(names, name), side(a, 0, a.numbers.length));
  return section(id, title, other ? `same code, other default: ${other}` : "identical", formulas,
    element("details", {}, element("summary", {}, count(a.numbers.length, "line")), code));
}

// The places of both scripts in the order of the second, options first and imports, which are no algorithm, last.
function placesOf(one, two) {
  const order = Object.keys(data.scripts[two].places);
  const first = Object.keys(data.scripts[one].places);
  first.forEach((name, i) => {
    if (!order.includes(name)) order.splice(order.indexOf(first[i - 1]) + 1, 0, name);
  });
  return ["Args", ...order.filter((name) => !["Args", "imports"].includes(name)), "imports"];
}
// A docstring for a column of any width: the browser breaks a paragraph, and what is indented keeps its lines.
function unwrapped(docstring) {
  return docstring.replace(/^(\S.*)\n(?=\S)/gm, "$1 ").replace(/(\S) {3,}/g, "$1   ");
}
function pairView(one, two) {
  const order = placesOf(one, two);
  const chips = order.map((name) => {
    const [a, b] = [place(one, name), place(two, name)];
    const isSame = a && b && a.text === b.text;
    const sign = !b ? "−" : !a ? "+" : !isSame ? "≠" : otherDefaults(one, two, name) ? "≈" : "=";
    return element("li", {}, link(`${one}-${two}/${name}`, `${sign} ${name}`, { class: sign === "=" ? "" : "differs" }));
  });
  const docstrings = [one, two].map((script) => element("pre", {}, unwrapped(data.scripts[script].docstring)));
  return [element("h1", {}, `${one}.py and ${two}.py`),
    element("p", { class: "dim" }, "≠ differs, = is identical, ≈ has the same code and reads an option with another default, − is only on the left, + is only on the right. Where two lines are almost the same, only the differing words are underlined."),
    element("ul", { class: "chips" }, chips),
    element("section", {}, equations([one, two], ""),
      element("details", {}, element("summary", {}, "What each algorithm is, its equations, and how it deviates from the paper"), columns(docstrings))),
    order.map((name) => pairSection(one, two, name))];
}

// One function in all scripts: each of its texts once, compared with the first.
function allView(name) {
  const groups = new Map();
  for (const script of scripts.filter((script) => place(script, name))) {
    const { text } = place(script, name);
    groups.set(text, [...(groups.get(text) || []), script]);
  }
  const first = place([...groups.values()][0][0], name);
  const cards = [...groups.values()].map((names) => {
    const own = place(names[0], name);
    const code = own.text === first.text ? side(own, 0, own.numbers.length) : changedIn(first, own);
    return section(`all/${name}/${names[0]}`, names.join(", "), names.length > 1 ? "one text" : linesOf(own),
      equations(names, name), element("div", { class: "code" }, code));
  });
  const without = scripts.filter((script) => !place(script, name));
  return [element("h1", {}, `${name} in all scripts`),
    element("p", { class: "dim" }, `${count(groups.size, "text")}; marked is what differs from the first. ${without.length ? `Not in ${without.join(", ")}.` : ""}`),
    element("div", { class: "cards" }, cards)];
}

// Show what the address names: `#grpo-dapo`, `#grpo-dapo/policy_loss`, `#all/policy_loss`, `#play` or `#group`.
const TABS = { play: ["One token", playView], group: ["One group", groupView] };
let shown = "";
function show() {
  const [view, name] = decodeURIComponent(location.hash.slice(1) || data.start).split("/");
  const panel = TABS[view];
  document.body.className = panel ? `panel ${view}` : "code";
  if (panel) showPanel(view, name, ...panel);
  else showCode(view, name);
}
function showPanel(view, settings, title, make) {
  if (shown !== view) main.replaceChildren(...make().flat(Infinity));
  if (shown !== view) scrollTo(0, 0);
  shown = view;
  document.title = `${title} · side by side`;
  readAddress(settings);
  redraw();
}
function showCode(view, name) {
  const isAll = view === "all" && functions.includes(name);
  let [one, two] = view.split("-");
  if (!data.scripts[one] || !data.scripts[two] || one === two) [one, two] = data.pair.split("-");
  const state = isAll ? `all/${name}` : `${one}-${two}`;
  if (state !== shown) main.replaceChildren(...(isAll ? allView(name) : pairView(one, two)).flat(Infinity));
  if (state !== shown) scrollTo(0, 0);
  shown = state;
  document.getElementById("tab-code").href = `#${state}`;
  document.title = `${isAll ? name : `${one} and ${two}`} · side by side`;
  chosen.one.value = one;
  chosen.two.value = two;
  chosen.function.value = isAll ? name : "";
  document.getElementById(`${state}/${name}`)?.scrollIntoView();
}
const chosen = Object.fromEntries(["one", "two", "function"].map((id) => [id, document.getElementById(id)]));
const go = (one, two) => { location.hash = `${one}-${two}`; };
for (const id of ["one", "two"]) {
  chosen[id].append(...scripts.map((script) => element("option", { value: script }, `${script}.py`)));
  chosen[id].addEventListener("change", () => go(chosen.one.value, chosen.two.value));
}
chosen.function.append(...["", ...functions].map((name) => element("option", { value: name }, name || "one function")));
chosen.function.addEventListener("change", () => { location.hash = chosen.function.value ? `all/${chosen.function.value}` : ""; });
document.getElementById("swap").addEventListener("click", () => go(chosen.two.value, chosen.one.value));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
document.getElementById("tab-code").href = `#${data.pair}`;
addEventListener("hashchange", show);
show();
