"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.scripts);
const main = document.getElementById("main");
const searchBox = document.getElementById("search");

// An element: its attributes, then its children; strings are text, never HTML.
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "html") element.innerHTML = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}
const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const link = (state, text, attributes) => h("a", { href: `#${state}`, ...attributes }, text);
const filesAt = document.querySelector('meta[name="files"]').content; // where the files of docs/ are, if not beside the page
const fileLink = (file, numbers) => {
  const [first, last] = [numbers[0], numbers[numbers.length - 1]];
  return h("a", { href: `../${file}#L${first}-L${last}` }, `${file}, lines ${first} to ${last}`);
};
const unique = (list) => [...new Set(list)];
const allPlaces = unique(names.flatMap((name) => Object.keys(data.scripts[name].places)));
const place = (script, name) => data.scripts[script].places[name];
const sameText = (one, two, name) => place(one, name)?.[0] === place(two, name)?.[0];

// One line of code. `marks` are the [start, end] of the words that differ; names link to their definitions.
function lineOf(id, number, sign, marks, toOwn) {
  const tokens = data.lines[id];
  const code = h("code");
  const indent = /^ */.exec(tokens.length ? tokens[1] : "")[0].length;
  let position = 0;
  for (let i = 0; i < tokens.length; i += 2) {
    const [kind, text] = [tokens[i], tokens[i + 1]];
    const parent = nameElement(kind, text, toOwn);
    let done = 0;
    for (const [start, end] of marks) {
      const [from, to] = [Math.max(Math.max(start, indent) - position, done), Math.min(end - position, text.length)];
      if (to <= from) continue;
      parent.append(text.slice(done, from), h("mark", null, text.slice(from, to)));
      done = to;
    }
    parent.append(text.slice(done));
    code.append(parent);
    position += text.length;
  }
  code.style.setProperty("--hang", `${indent + 4}ch`);
  return h("div", { class: "line" }, h("span", { class: "no" }, String(number)), h("span", { class: "sign" }, sign), code);
}
function nameElement(kind, text, toOwn) {
  if (kind === "C") {
    const found = data.common[text];
    return h("a", { href: `#common/${text}`, title: `${found.file}: ${plain(found.summary)}` });
  }
  if (kind === "O" && toOwn) return h("a", { href: `#${toOwn}/${text}` });
  return h("span", { class: kind && kind !== "O" ? kind : null });
}
const plain = (text) => h("p", { html: text }).textContent;

const textOf = ([block]) => data.blocks[block].lines.map((id) => data.lines[id].filter((_, i) => i % 2).join("")).join("\n");
function copyButton(where, name) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy ${name}` }, "Copy");
  button.addEventListener("click", () => {
    const say = (text) => { button.textContent = text; document.getElementById("status").textContent = text; };
    navigator.clipboard.writeText(`${textOf(where)}\n`).then(() => say("Copied"), () => say("The browser refuses"));
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

// Lines i to end of a place [block, line numbers].
function side([block, numbers], i, end, { sign = " ", kind = "", marks = [], toOwn = null } = {}) {
  const rows = [];
  for (let line = i; line < end; line++) {
    const own = marks.filter((mark) => mark[0] === line - i).map((mark) => mark.slice(1));
    rows.push(lineOf(data.blocks[block].lines[line], numbers[line], sign, own, toOwn));
  }
  return h("div", { class: `side ${kind}` }, rows);
}

// The details of the docs at lines i to end of places; pointing at one shows its lines. Those that begin with the first
// line are about the whole and stand above the code.
function notesOf(places, ranges, whole = false) {
  const found = new Map();
  places.forEach(([block, numbers], which) => {
    for (const [first, last, note] of data.blocks[block].notes) {
      if (whole === (first === 0) && first >= ranges[which][0] && first < ranges[which][1] && !found.has(note)) {
        found.set(note, [numbers[first], numbers[last], which]);
      }
    }
  });
  return found;
}
function notesAbove(places) {
  const found = notesOf(places, places.map(() => [0, 1]), true);
  return found.size ? h("div", { class: "above" }, [...found.keys()].map((id) => noteElement(id, "the whole"))) : null;
}
function noteElement(id, where) {
  const note = data.notes[id];
  return h("details", { class: "note" },
    h("summary", { title: where }, h("span", { class: "label" }, `${note.label} `), h("span", { html: note.title })),
    h("div", { class: "text", html: note.html }));
}
function notes(places, ranges) {
  const box = h("div", { class: "notes" });
  box.at = [];
  for (const [id, [first, last, which]] of notesOf(places, ranges)) {
    const element = noteElement(id, first === last ? `line ${first}` : `lines ${first} to ${last}`);
    const light = (on) => {
      for (const row of sideOf(box, which).children) {
        const number = Number(row.firstChild.textContent);
        row.classList.toggle("lit", on && number >= first && number <= last);
      }
    };
    for (const event of ["mouseenter", "focusin"]) element.addEventListener(event, () => light(true));
    for (const event of ["mouseleave", "focusout"]) element.addEventListener(event, () => light(false));
    box.at.push([element, which, first]);
  }
  const line = ([, which, number]) => number - places[which][1][ranges[which][0]];
  box.at.sort((a, b) => line(a) - line(b));
  box.append(...box.at.map(([element]) => element));
  return box;
}
const sideOf = (box, which) => {
  const sides = box.parentElement.querySelectorAll(":scope > .side");
  return sides[which] || sides[0];
};
// Where there is a margin, each note stands at its first line, or below the note before it.
function align(box) {
  const beside = box.offsetLeft > sideOf(box, 0).offsetLeft;
  let bottom = box.offsetTop;
  for (const [element, which, number] of box.at) {
    const row = [...sideOf(box, which).children].find((line) => Number(line.firstChild.textContent) === number);
    const space = beside ? Math.max(0, row.offsetTop - bottom) : 0;
    element.style.marginTop = `${space}px`;
    bottom += space + element.offsetHeight;
  }
}
// A table that is wider than the window says so, and has a shadow where it goes on.
function sayWhatGoesOn() {
  const wide = main.querySelector(".goes-on + .wide");
  if (!wide) return;
  wide.previousElementSibling.hidden = wide.scrollWidth <= wide.clientWidth;
  wide.classList.toggle("more", wide.scrollWidth - wide.clientWidth - wide.scrollLeft > 1);
}
// What depends on the width of the window.
function fit() {
  sayWhatGoesOn();
  for (const box of main.querySelectorAll(".chunk > .notes:not(:empty)")) if (box.offsetParent) align(box);
}
addEventListener("resize", fit);
main.addEventListener("scroll", sayWhatGoesOn, true);

function formulas(scripts, name) {
  const rows = scripts.flatMap((script) =>
    data.scripts[script].equations.filter(([functions]) => functions.includes(name)).map(([, [text, number]]) =>
      h("div", { class: "formula" }, scripts.length > 1 ? h("b", null, script) : null, equation(text),
        number ? h("span", { class: "number" }, number) : null)));
  return rows.length ? h("div", { class: "formulas" }, rows) : null;
}
function equation(text) {
  const [latex, mathml] = data.math[text] || [];
  return mathml ? h("span", { class: "math", title: latex, html: mathml }) : h("span", { class: "math" }, text);
}
const sentence = (html) => h("p", { class: "why", html });

// The lines up to the one with the name, which are never folded.
const headOf = ([block]) => data.blocks[block].lines.findIndex((id) => !/^[@#]/.test(data.lines[id][1])) + 1;
// A function that both scripts have: equal runs beside changes, each change after its sentence.
function comparison(one, two, name) {
  const [a, b] = [place(one, name), place(two, name)];
  const forward = data.pairs[`${one} ${two}`];
  const changes = forward ? forward[name]
    : data.pairs[`${two} ${one}`][name].map(([i, iEnd, j, jEnd, why, old, fresh, isCode]) => [j, jEnd, i, iEnd, why, fresh, old, isCode]);
  const ends = [data.blocks[a[0]].lines.length, data.blocks[b[0]].lines.length];
  const own = [one, two].find((script) => script !== "grpo");
  const sentences = data.why[own][name] || [];
  const parts = [];
  const against = [one, two].includes("grpo");
  if (!against || changes.every((change) => change[4] < 0)) {
    for (const script of [one, two]) {
      const text = (data.why[script][name] || []).join(" ");
      if (text) parts.push(sentence(against ? text : `<b>${script} against grpo:</b> ${text}`));
    }
  }
  const pair = `${one}-${two}`;
  const equal = (i, j, length) => h("div", { class: "chunk equal" },
    side(a, i, i + length, { toOwn: pair }), side(b, j, j + length, { toOwn: pair }),
    notes([a, b], [[i, i + length], [j, j + length]]));
  function run(i, j, length, isFirst, isLast) {
    const [head, tail] = [isFirst ? headOf(a) : 3, isLast ? 0 : 3];
    if (length <= head + tail + 3) return length ? [equal(i, j, length)] : [];
    const hidden = length - head - tail;
    const inside = notesOf([a, b], [[i + head, i + head + hidden], [j + head, j + head + hidden]]).size;
    return [equal(i, j, head),
      h("details", { class: "fold" },
        h("summary", null, `${hidden} identical lines${inside ? `, ${count(inside, "note")}` : ""}`),
        equal(i + head, j + head, hidden)),
      ...(tail ? [equal(i + head + hidden, j + head + hidden, tail)] : [])];
  }
  let [i, j] = [0, 0];
  for (const [from, to, start, end, why, old, fresh, isCode] of changes) {
    parts.push(...run(i, j, from - i, i === 0, false));
    const change = [against && why >= 0 && sentences[why] ? sentence(sentences[why]) : null, h("div", { class: "chunk" },
      side(a, from, to, { sign: "−", kind: "gone", marks: old, toOwn: pair }),
      side(b, start, end, { sign: "+", kind: "come", marks: fresh, toOwn: pair }),
      notes([a, b], [[from, to], [start, end]]))];
    parts.push(isCode ? change : h("details", { class: "fold" }, h("summary", null, asideOf(name)), change));
    [i, j] = [to, end];
  }
  parts.push(...run(i, j, ends[0] - i, i === 0, true));
  const code = changes.filter((change) => change[7]);
  const sum = (first, last) => code.reduce((total, change) => total + change[last] - change[first], 0);
  return { parts, status: code.length ? `${sum(0, 1)} lines of ${one}.py become ${sum(2, 3)} of ${two}.py` : "the same code" };
}
// What is no code and differs is folded.
const asideOf = (name) => (name === "Args" ? "another help text" : "another docstring");

// Why a note of a third script's page stands in a pair.
function whyHere(script, pair, name) {
  if (!names.includes(script) || pair.includes(script)) return null;
  const same = pair.filter((other) => place(other, name) && sameText(other, script, name));
  if (!same.length) return ` (on ${script}.py)`;
  return same.length === 1 ? ` (${script}.py has the text of ${same[0]}.py)` : ` (${script}.py has this text too)`;
}

// A section of the pair view: its head, and a body that a button opens where both scripts have one text.
function section(id, status, own, { folded = false } = {}, ...body) {
  const [pair, name] = id.split("/");
  const places = own.map((script) => place(script, name));
  const title = h("h2", { tabindex: "-1" }, link(id, name));
  const inside = h("div", { class: "body" }, formulas(own, name), notesAbove(places), body);
  for (const label of inside.querySelectorAll(".note .label")) {
    const text = whyHere(label.textContent.split(" ")[0], pair.split("-"), name);
    if (text) label.parentElement.append(h("span", { class: "status" }, text));
  }
  // Not the state itself: the browser would look for it after the page is drawn, and take the focus away.
  const element = h("section", { id: `at-${id}` }, h("div", { class: "head" }, title, h("span", { class: "status" }, status),
    h("span", { class: "more" }, link(`all/${name}`, "in all scripts"))), inside);
  if (!inside.querySelector(".single > .notes:not(:empty)")) element.classList.add("no-notes");
  if (folded) {
    const button = h("button", { type: "button", "aria-label": `Lines of ${name}` });
    const toggle = (open) => {
      inside.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "Hide" : "Show";
    };
    element.querySelector(".more").append(button);
    element.open = () => toggle(true);
    button.addEventListener("click", () => {
      toggle(inside.hidden);
      fit();
    });
    toggle(false);
  }
  return element;
}
const fileRow = (scripts, name) => h("div", { class: "files" },
  scripts.map((script) => h("div", null, fileLink(`${script}.py`, place(script, name)[1]), copyFrom(script, name))));
// Not of Args: the page has it without its help texts.
const copyFrom = (script, name) => (name === "Args" ? null : copyButton(place(script, name), `${name} of ${script}.py`));

function pairSection(one, two, name) {
  const pair = `${one}-${two}`;
  const id = `${pair}/${name}`;
  const having = [one, two].filter((script) => place(script, name));
  const own = place(having[0], name);
  const length = own[1].length;
  if (having.length === 2 && sameText(one, two, name)) {
    const found = unique(data.blocks[own[0]].notes.map((note) => note[2])).length;
    const status = `identical, ${count(length, "line")}${found ? `, ${count(found, "note")}` : ""}`;
    return section(id, status, having, { folded: true }, fileRow(having, name),
      h("div", { class: "chunk single" }, side(own, 0, length, { toOwn: pair }), notes([own], [[0, length]])));
  }
  if (having.length === 2) {
    const { parts, status } = comparison(one, two, name);
    return section(id, status, having, { folded: name === "imports" }, fileRow(having, name), parts);
  }
  const kind = having[0] === one ? { sign: "−", kind: "gone" } : { sign: "+", kind: "come" };
  const status = `only in ${having[0]}.py, ${count(length, "line")}`;
  const sentences = unique([one, two].flatMap((script) => data.why[script][name] || []));
  return section(id, status, having, {}, sentences.map(sentence), fileRow(having, name),
    h("div", { class: "chunk single" }, side(own, 0, length, { ...kind, toOwn: pair }), notes([own], [[0, length]])));
}

function select(label, value, onChange) {
  const box = h("select", { "aria-label": label }, names.map((name) => h("option", { value: name }, `${name}.py`)));
  box.value = value;
  box.addEventListener("change", () => onChange(box.value));
  return box;
}
// The places of both scripts in the order of the second, those of the first alone after the one before them; the page
// begins with the algorithm, so imports and options come last.
function placesOf(one, two) {
  const order = Object.keys(data.scripts[two].places);
  const first = Object.keys(data.scripts[one].places);
  first.forEach((name, i) => {
    if (!order.includes(name)) order.splice(order.indexOf(first[i - 1]) + 1, 0, name);
  });
  const late = order.filter((name) => ["imports", "Args"].includes(name));
  return [...order.filter((name) => !late.includes(name)), ...late];
}
function pairView(one, two) {
  const go = (a, b, changed) => {
    if (a === b) [a, b] = changed === 0 ? [a, one] : [two, b];
    location.hash = `${a}-${b}`;
  };
  const swap = h("button", { type: "button" }, "Swap");
  swap.addEventListener("click", () => go(two, one));
  const order = placesOf(one, two);
  const chips = order.map((name) => {
    const both = place(one, name) && place(two, name);
    const same = both && sameText(one, two, name);
    const note = same ? "identical" : both ? "differs" : `only in ${place(one, name) ? one : two}`;
    return h("li", { class: same ? "same" : both ? "differs" : "one" },
      link(`${one}-${two}/${name}`, [same ? "= " : both ? "≠ " : place(one, name) ? "− " : "+ ", name], { title: note }));
  });
  const docs = h("section", null, h("details", { class: "same" },
    h("summary", null, "The docstrings: what each algorithm is, its equations, its deviations from the paper"),
    h("div", { class: "two" }, [one, two].map((script) => h("pre", { class: "doc" }, data.scripts[script].docstring)))));
  return [h("h1", { tabindex: "-1" }, `${one}.py and ${two}.py`),
    h("div", { class: "choose" }, select("Left script", one, (value) => go(value, two, 0)), "against",
      select("Right script", two, (value) => go(one, value, 1)), swap),
    h("nav", { "aria-label": "Functions" }, h("ul", { class: "chips" }, chips)),
    docs, order.map((name) => pairSection(one, two, name))];
}

function cardNotes(own) {
  const found = unique(data.blocks[own[0]].notes.map((note) => note[2]));
  return found.length ? h("details", { class: "fold" }, h("summary", null, count(found.length, "note")),
    h("div", { class: "above" }, found.map((id) => noteElement(id, null)))) : null;
}
// One function in all scripts: a card for each of its texts, compared with the first.
function allView(name) {
  const having = names.filter((script) => place(script, name));
  const groups = [];
  for (const script of having) {
    const group = groups.find((other) => sameText(other[0], script, name));
    if (group) group.push(script);
    else groups.push([script]);
  }
  const first = having[0];
  const cards = groups.map((group) => {
    const own = place(group[0], name);
    const changes = group[0] === first ? [] : data.pairs[`${first} ${group[0]}`][name];
    const code = [];
    let done = 0;
    for (const [, , start, end, , , fresh, isCode] of [...changes, [0, 0, own[1].length, own[1].length, -1, [], [], true]]) {
      const head = done === 0 ? headOf(own) : 0;
      const folded = group[0] !== first && start - done - head > 2;
      code.push(side(own, done, folded ? done + head : start));
      if (folded) {
        code.push(h("details", { class: "fold" }, h("summary", null, `${start - done - head} identical lines`),
          side(own, done + head, start)));
      }
      const changed = side(own, start, end, { kind: "come", marks: fresh });
      code.push(isCode || start === end ? changed
        : h("details", { class: "fold" }, h("summary", null, asideOf(name)), changed));
      done = end;
    }
    const title = h("h2", null, group.map((script, k) => [k ? ", " : "", script]));
    const more = h("span", { class: "more" },
      group[0] === first ? fileLink(`${group[0]}.py`, own[1]) : link(`${first}-${group[0]}/${name}`, `beside ${first}`),
      copyFrom(group[0], name));
    const sentences = unique(group.flatMap((script) => data.why[script][name] || []));
    return h("section", { class: "card" }, h("div", { class: "head" }, title,
      group.length > 1 ? h("span", { class: "status" }, "one text") : null, more),
      formulas(group, name), sentences.map(sentence),
      h("div", { class: "body" }, code), cardNotes(own));
  });
  const missing = names.filter((script) => !having.includes(script));
  if (data.elsewhere[name]) {
    cards.push(h("section", { class: "card" }, h("div", { class: "head" }, h("h2", null, missing.join(", ")),
      h("span", { class: "status" }, "without it")), sentence(data.elsewhere[name])));
  }
  const choice = h("select", { "aria-label": "Function" }, allPlaces.map((other) => h("option", { value: other }, other)));
  choice.value = name;
  choice.addEventListener("change", () => { location.hash = `all/${choice.value}`; });
  return [h("div", { class: "choose" }, h("h1", { tabindex: "-1" }, h("code", null, name), " in all scripts"), choice,
      h("span", { class: "status" }, [`${count(groups.length, "text")} in ${count(having.length, "script")}.`,
        groups.length > 1 ? ` Marked is what differs from ${first}.py.` : "",
        missing.length ? ` Not in ${missing.map((script) => `${script}.py`).join(", ")}.` : ""].join(""))),
    h("div", { class: "cards" }, cards)];
}

function mapView() {
  const rows = allPlaces.filter((name) => name !== "imports").map((name) =>
    h("tr", null, h("th", { scope: "row" }, link(`all/${name}`, name)), names.map((script) => {
      if (!place(script, name)) return h("td", null, h("span", { class: "hidden" }, "not there"));
      const first = names.find((other) => place(other, name));
      const same = first !== script && sameText(first, script, name);
      const state = script === "grpo" ? `all/${name}` : `grpo-${script}/${name}`;
      const text = first === script ? count(place(script, name)[1].length, "line") : same ? "=" : "≠";
      const label = first === script ? `${text} in ${script}.py` : `${name} of ${script}.py ${same ? "is the text" : "differs from that"} of ${first}.py`;
      return h("td", { class: first !== script && !same ? "differs" : null }, link(state, text, { "aria-label": label, title: label }));
    })));
  return [h("h1", { tabindex: "-1" }, "What each algorithm changes"),
    h("p", { class: "lead" }, "Every script is complete in itself. A function that stands in several scripts under one name has one text, "
      + "unless the algorithm changes it: = has the text of the first script in its row, ≠ has another. "
      + "Choose a cell to see the change, a column to compare the whole script with grpo.py, or a row to see one function in all scripts."),
    h("p", { class: "lead" }, "To begin: ", link("all/token_weights", "token_weights in all scripts"),
      " is what each algorithm divides the loss by; ", link("grpo-dapo", "grpo.py and dapo.py"), " is one paper's changes in full."),
    h("p", { class: "goes-on", hidden: "" }, `The table goes on to the right, to ${names.at(-1)}: ${count(names.length, "script")}.`),
    h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Functions and scripts" },
      h("table", { class: "map" },
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "function"), names.map((name) =>
          h("th", { scope: "col" }, link(name === "grpo" ? "grpo-dr_grpo" : `grpo-${name}`, name))))),
        h("tbody", null, rows)))];
}

function batchView() {
  function user([name, files]) {
    const scripts = files.filter((file) => !file.includes("/")).map((file) => file.replace(".py", ""));
    const top = name.split(".")[0];
    if (!scripts.length) return link(`common/${top}`, name, { title: files.join(", ") });
    const one = scripts.length === 1 && scripts[0] !== "grpo";
    return [link(one ? `grpo-${scripts[0]}/${top}` : `all/${top}`, name),
      h("span", { class: "status", title: files.join(", ") }, ` (${scripts.length > 2 ? count(scripts.length, "script") : scripts.join(", ")})`)];
  }
  const users = (found) => h("ul", { class: "users" }, Object.entries(found).map((entry) => h("li", null, user(entry))));
  return [h("h1", { tabindex: "-1" }, "The keys of the batch"),
    h("p", { class: "lead" }, "A batch is a dictionary. R rows (prompts times completions), P prompt tokens, T completion tokens; "
      + "a micro-batch has the same keys for some of the rows. Who writes and who reads was found in the code."),
    h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Keys" }, h("table", { class: "keys" },
      h("thead", null, h("tr", null, ["key", "shape", "what it is", "written by", "read by"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", null, data.batch.map((row) => h("tr", { id: `key-${row.key}` }, h("th", { scope: "row" }, row.key),
        h("td", null, h("code", null, row.shape)), h("td", { html: row.what }),
        h("td", { "data-name": "written by" }, users(row.writes)), h("td", { "data-name": "read by" }, users(row.reads)))))))];
}

function commonView(name) {
  if (name) {
    const found = data.common[name];
    const length = found.place[1].length;
    const margin = notes([found.place], [[0, length]]);
    return [h("h1", { tabindex: "-1" }, h("code", null, name)),
      h("p", { class: "status" }, fileLink(found.file, found.place[1]), found.used.length ? `; used by ${found.used.join(", ")}` : "; used inside common/", " ", copyButton(found.place, name)),
      h("section", { class: margin.at.length ? null : "no-notes" }, h("div", { class: "body" }, notesAbove([found.place]),
        h("div", { class: "chunk single" }, side(found.place, 0, length), margin))),
      h("p", null, link("common", "All names of common/"))];
  }
  const byFile = unique(Object.values(data.common).map((entry) => entry.file));
  return [h("h1", { tabindex: "-1" }, "What the scripts take from common/"),
    h("p", { class: "lead" }, "The functions and classes that the scripts import, those that a detail of the docs is about, and those that use the batch."),
    h("div", { class: "list" }, byFile.map((file) => [h("h3", null, h("a", { href: `../${file}` }, file)),
      h("dl", null, Object.entries(data.common).filter(([, entry]) => entry.file === file).map(([own, entry]) =>
        h("div", null, h("dt", null, link(`common/${own}`, own)), h("dd", { html: entry.summary }))))]))];
}

function helpView() {
  return [h("h1", { tabindex: "-1" }, "How to read this page"),
    h("div", { class: "lead", html: `
      <h3>Two scripts</h3>
      <p>The left script's lines are marked − and the right one's +. In a line that the other script has nearly so, the words that
      differ are underlined; any other line differs as a whole. The functions come first, imports and options last. What is
      identical is one line, which opens, and so are a docstring or a help text that differs. Above a change, beside a yellow bar, stands what changes there and why. The sentences
      are those against grpo.py, which <a href="diffs.md">diffs.md</a> has for its siblings too. Between two other scripts, each is compared with grpo.py.</p>
      <p>Left out of the comparison, as there: the help texts of <code>Args</code> (a field is shown with its type and default).
      <b>Copy</b> takes a function as it stands in its file.</p>
      <h3>Equations</h3>
      <p>At the head of a function stands what it computes, from the docstring of the script, with its number in the paper. Pointing at it shows its LaTeX.</p>
      <h3>Margin notes</h3>
      <p>The numbered details of the pages in docs/, such as <code>grpo 7</code> for the seventh of <a href="grpo.md">grpo.md</a>, stand
      below the lines that they are about, or beside them where there is room. Pointing at one shows its lines; opening it shows its text.
      A note from the page of a third script says why it stands there: that script has the same text.</p>
      <h3>Links</h3>
      <p>A dotted underline in code leads to the definition, in this page. Links with file names lead out of this page, into the
      files of the repository that it lies in. Where a repository is shown on the web they lead to the lines; opened from a
      disk, to the file.</p>
      <p>Every state has its own address: <code>#grpo-dapo</code>, <code>#grpo-dapo/policy_loss</code>, <code>#all/token_weights</code>,
      <code>#all/Args/clip_low</code>, <code>#common/log_ratio</code>, <code>#batch</code>. What is nearly one leads there.</p>
      <h3>Keyboard</h3>
      <p><kbd>j</kbd> and <kbd>k</kbd> go to the next and the previous function, <kbd>/</kbd> to the search, <kbd>Enter</kbd> there to the
      first place found, <kbd>?</kbd> to this page. Tab and Enter reach everything.</p>` })];
}

// Everything that the search finds: [name, state, what it is, HTML of what it does].
const index = [
  ...allPlaces.map((name) => [name, `all/${name}`, `in ${names.filter((script) => place(script, name)).join(", ")}`, data.summaries[name]]),
  ...data.options.map(([name, state, value, what]) => [`--${name}`, state, `option, ${plain(value)}`, what]),
  ...Object.entries(data.common).map(([name, entry]) => [name, `common/${name}`, entry.file, entry.summary]),
  ...data.batch.map((row) => [row.key, `batch/${row.key}`, `key of the batch, ${row.shape}`, row.what]),
];
// Those with all words in their name or text: names that begin with what is searched, other names, then texts.
function search(text) {
  const words = text.toLowerCase().split(/[\s\-_]+/).filter(Boolean);
  const simple = (name) => name.toLowerCase().split(/[\s\-_]+/).filter(Boolean).join(" ");
  const rank = ([name, , , what]) => {
    if (simple(name).startsWith(words.join(" "))) return 0;
    if (words.every((word) => simple(name).includes(word))) return 1;
    return words.every((word) => `${simple(name)} ${plain(what || "").toLowerCase()}`.includes(word)) ? 2 : 3;
  };
  return words.length ? [0, 1, 2].flatMap((wanted) => index.filter((entry) => rank(entry) === wanted)) : [];
}
function findView(text) {
  const found = search(text);
  return [h("h1", { tabindex: "-1" }, "Search"),
    h("p", { class: "lead" }, text ? `${count(found.length, "place")} for “${text}”.` : "Functions, options, and keys of the batch.",
      found.length ? null : [" All functions are in the ", link("map", "map"), "."]),
    h("dl", { class: "list found" }, found.map(([name, state, kind, what]) =>
      h("div", null, h("dt", null, link(state, name), h("span", { class: "status" }, ` ${kind}`)), h("dd", { html: what || "" }))))];
}

// The state that an address means. Near misses such as `grpo/dapo`, `GRPO-DAPO`, `dapo/policy_loss` and `policy_loss` lead
// where they mean; of anything else the last word is searched.
function meant(address) {
  const [view, name] = address.split("/");
  if (["", "map", "help", "find", "batch"].includes(view)) return address || "map";
  if (view === "all" ? allPlaces.includes(name) : view === "common" && (!name || data.common[name])) return address;
  const both = view.split("-");
  if (both.length === 2 && both[0] !== both[1] && both.every((script) => names.includes(script))
    && (!name || both.some((script) => place(script, name)))) return address;
  const spelled = names.reduce((text, script) => text.replace(new RegExp(script.replace("_", "[-_. ]?"), "gi"), script),
    address.replace(/\.py\b/g, ""));
  const words = spelled.split(/\W+/).filter(Boolean);
  const [one, two] = unique(words.filter((word) => names.includes(word)));
  const among = (list) => list.find((own) => words.some((word) => word.toLowerCase() === own.toLowerCase()));
  const own = among(allPlaces);
  const pair = two ? `${one}-${two}` : `grpo-${one === "grpo" ? "dr_grpo" : one}`;
  if (one && own && (two || one !== "grpo")) return [one, two || "grpo"].some((script) => place(script, own)) ? `${pair}/${own}` : pair;
  if (own) return `all/${own}`;
  if (one) return pair;
  const called = among(Object.keys(data.common));
  const option = data.options.find(([option]) => option === words.at(-1));
  return called ? `common/${called}` : option ? option[1] : among(["map", "batch", "help", "common"]) || `find/${words.at(-1) || ""}`;
}

function show(address) {
  if (address === "main") return main.focus();
  const state = meant(address);
  if (address && state !== address) history.replaceState(null, "", `#${state}`);
  const [view, name, line] = state.split("/");
  const [one, two] = view.split("-");
  let content;
  let title;
  if (two) {
    if (main.dataset.view === view) return goTo(view, name);
    [content, title] = [pairView(one, two), `${one} and ${two}`];
  } else if (view === "all") [content, title] = [allView(name), `${name} in all scripts`];
  else if (view === "common") [content, title] = [commonView(name), name || "common/"];
  else if (view === "batch") [content, title] = [batchView(), "The keys of the batch"];
  else if (view === "help") [content, title] = [helpView(), "Help"];
  else if (view === "find") [content, title] = [findView(name || ""), "Search"];
  else [content, title] = [mapView(), "Map"];
  main.replaceChildren(...content.flat(Infinity));
  if (filesAt) for (const a of main.querySelectorAll('a:not([href^="#"])')) a.href = new URL(a.getAttribute("href"), filesAt);
  main.dataset.view = two ? view : state;
  document.title = [line || (view === "batch" && name), title, "Side by side"].filter(Boolean).join(" · ");
  const current = two ? 1 : ["map", null, "all", "batch", "common", "help"].indexOf(view);
  document.querySelectorAll("header nav a").forEach((a, i) => {
    if (i === current && (two || view === "all")) a.href = `#${two ? view : `all/${name}`}`;
    if (i === current) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  });
  if (view !== "find") searchBox.value = "";
  goTo(view, two ? name : null);
  light(view === "batch" ? [document.getElementById(`key-${name}`)]
    : [...main.querySelectorAll(".line")].filter((row) => line && row.lastChild.textContent.startsWith(`    ${line}: `)));
}
// Lines that an address names.
function light(rows) {
  const found = rows.filter(Boolean);
  found.forEach((row) => row.classList.add("lit"));
  found[0]?.scrollIntoView({ block: "center" });
}
// Focus the heading of a function, open if it is folded, or that of the page.
let started = false;
function goTo(view, name) {
  const section = name && document.getElementById(`at-${view}/${name}`);
  const heading = section ? section.querySelector("h2") : main.querySelector("h1");
  section?.open?.();
  fit();
  document.querySelectorAll(".chips a").forEach((a) => {
    if (section && a.getAttribute("href") === `#${view}/${name}`) a.setAttribute("aria-current", "true");
    else a.removeAttribute("aria-current");
  });
  if ((started || section) && view !== "find") heading.focus({ preventScroll: true });
  if (section) section.scrollIntoView();
  else if (started) window.scrollTo(0, 0);
  if (section) document.title = `${name} · ${view.replace("-", " and ")} · Side by side`;
  document.getElementById("status").textContent = document.title;
  started = true;
}
main.addEventListener("toggle", fit, true); // a fold was opened
// What j and k go through: the functions of two scripts, of all, or the names of common/; from where the reader is.
function neighbour(step) {
  const [view, name] = main.dataset.view.split("/");
  if (view === "all") return allPlaces[allPlaces.indexOf(name) + step] && `all/${allPlaces[allPlaces.indexOf(name) + step]}`;
  if (view === "common") {
    const all = Object.keys(data.common);
    const next = all[name ? all.indexOf(name) + step : 0];
    return next && `common/${next}`;
  }
  const sections = [...main.querySelectorAll("section[id]")];
  const focused = sections.indexOf(document.activeElement.closest("section[id]"));
  const above = sections.filter((section) => section.getBoundingClientRect().top < 100).length - 1;
  return sections[(focused >= 0 ? focused : above) + step]?.id.replace("at-", "");
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  if (event.key === "/") {
    event.preventDefault();
    searchBox.focus();
  } else if (event.key === "?") location.hash = "help";
  else if (["j", "k"].includes(event.key)) {
    const next = neighbour(event.key === "j" ? 1 : -1);
    if (next) location.hash = next;
  }
});
// The results take the place of the view while one types; the way back leads to it. Enter opens the first.
searchBox.addEventListener("input", () => {
  const change = location.hash.startsWith("#find") ? "replaceState" : "pushState";
  history[change](null, "", `#find/${encodeURIComponent(searchBox.value)}`);
  show(`find/${searchBox.value}`);
});
searchBox.form.addEventListener("submit", (event) => {
  event.preventDefault();
  const [first] = search(searchBox.value);
  if (first) location.hash = first[1];
});

const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
function setTheme(value) {
  if (value) document.documentElement.dataset.theme = value;
  theme.textContent = isDark() ? "Light" : "Dark";
  theme.setAttribute("aria-label", `${theme.textContent} colours`);
}
let stored = null;
try { stored = localStorage.getItem("theme"); } catch { /* a page without storage keeps the system's colours */ }
setTheme(stored);
theme.addEventListener("click", () => {
  setTheme(isDark() ? "light" : "dark");
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* as above */ }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme());
const showAddress = () => show(decodeURIComponent(location.hash.slice(1)));
addEventListener("hashchange", showAddress);
showAddress();
