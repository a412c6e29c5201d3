// Run in the page by test_side_by_side_in_browser.py.
const wrong = [];

// Every state is opened, and what is wrong with it is said.
function openEvery(states) {
  const known = new Set(states);
  const files = new Set();
  let last = null;
  for (const state of states) {
    show(state);
    const say = (text) => wrong.push(`#${state}: ${text}`);
    const [view, name] = state.split("/");
    const focused = document.activeElement;
    const id = document.getElementById(`at-${state}`);
    if (view.includes("-") && name) {
      if (!id || !id.contains(focused) || focused.tagName !== "H2") say("the function's heading has no focus");
      if (id?.querySelector(".body")?.hidden) say("the function is folded");
    } else if (state !== states[0] && focused.tagName !== "H1") say("the heading has no focus");
    if (!document.title.includes("Side by side") || document.title.startsWith("undefined")) say(document.title);
    if (name && !document.title.includes(name)) say(`the title is ${document.title}`);
    if (main.dataset.view === last) continue; // another function of the same two scripts: the rest is as it was
    last = main.dataset.view;
    if (document.querySelectorAll("h1").length !== 1) say("not one h1");
    if (/\[object |undefined/.test(main.textContent)) say("a value that is none");
    for (const a of document.querySelectorAll("main a, header a")) {
      const target = a.getAttribute("href");
      if (!target) say(`a link to nothing: ${a.textContent}`);
      else if (target.startsWith("#")) {
        if (!known.has(target.slice(1))) say(`a dead link: ${target}`);
      } else files.add(target);
      if (!(a.textContent.trim() || a.getAttribute("aria-label"))) say(`a link without a text: ${target}`);
    }
  }
  return { wrong, files: [...files] };
}

// Texts whose contrast with what lies behind them is below 4.5, and what is wider than the window.
function look() {
  const rgb = (text) => (/^color\(srgb/.test(text)
    ? text.match(/[\d.]+/g).map((part, i) => (i < 3 ? part * 255 : Number(part)))
    : text.match(/[\d.]+/g).map(Number));
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const seen = new Map();
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = rgb(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, style, .skip")) continue;
    const [one, two] = [light(rgb(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (contrast < 4.5) seen.set(`${element.tagName}.${element.className}`, contrast.toFixed(2));
  }
  const width = document.documentElement.clientWidth;
  const wide = document.documentElement.scrollWidth > width ? [`${document.documentElement.scrollWidth} > ${width}`] : [];
  return { contrast: [...seen], wide };
}
