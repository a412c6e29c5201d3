// The tab "One group": the rewards and lengths of eight completions, and what each row learns.

const ROWS = [1, 2, 3, 4, 5, 6, 7, 8];
const GROUP_ALGORITHMS = [
  { id: "grpo", title: "GRPO", mean: "rows", formula: "A = (r − mean) / std; weight = 1 / (8 · length)",
    code: "all/token_weights",
    note: "Each row has an eighth of the loss, and its tokens share it: a token of a short row weighs more." },
  { id: "dr_grpo", title: "Dr. GRPO", mean: "constant", formula: "A = r − mean; weight = 1 / (8 · C)",
    code: "grpo-dr_grpo/token_weights",
    note: "All tokens weigh the same. C, max_new_tokens, only scales the gradient. Nothing divides by the deviation." },
  { id: "dapo", title: "DAPO", mean: "tokens", formula: "A = (r − mean) / std; weight = 1 / all tokens",
    code: "grpo-dapo/token_weights",
    note: "All tokens weigh the same: a long row pushes more. The group stands for the step. Its rewards are 1 and −1, which changes no advantage." },
  { id: "gspo", title: "GSPO", mean: "rows", formula: "A = (r − mean) / std; weight = 1 / (8 · length)",
    code: "grpo-gspo/policy_loss",
    note: "At the first update it is GRPO. Later its ratio, and with it its clip, is that of a whole row." },
  { id: "dcpo", title: "DCPO", mean: "prompts", formula: "A also by earlier visits; weight = 1 / length",
    code: "grpo-dcpo/smoothed_advantages",
    note: "The rows of a group are added up, where GRPO takes their mean. The deviation has ddof 0." },
];
const GROUP_SCENES = [
  ["One right of eight", "reward1=1&reward2=0&reward3=0"],
  ["One wrong of eight", "reward4=1&reward5=1&reward6=1&reward7=1"],
  ["Long wrong answers", "length1=8&length2=8&length3=8&length4=60&length5=60&length6=60&length7=60&length8=60"],
  ["One long right answer", "length1=60&reward2=0&reward3=0&length2=8&length3=8&length4=8&length5=8&length6=8&length7=8&length8=8"],
  ["All right", "reward4=1&reward5=1&reward6=1&reward7=1&reward8=1"],
  ["All right, after four visits", "reward4=1&reward5=1&reward6=1&reward7=1&reward8=1&visits=4&earlier=0.5"],
];

// What the sliders of this tab begin with.
function startGroup() {
  const start = { constant: Number(data.scripts.dr_grpo.defaults.max_new_tokens), visits: 0, earlier: 0.5 };
  const lengths = [12, 16, 20, 6, 9, 30, 40, 24];
  for (const row of ROWS) {
    start[`reward${row}`] = row <= 3 ? 1 : 0;
    start[`length${row}`] = lengths[row - 1];
  }
  return start;
}

// [{advantage, weight, push}] of the rows; the push of a row is what its tokens add to the gradient.
function groupRows({ id, mean }) {
  const rewards = ROWS.map((row) => state[`reward${row}`]);
  const lengths = ROWS.map((row) => state[`length${row}`]);
  const { visits, earlier, constant } = state;
  // The earlier rewards were 0 or 1, which gives their variance.
  const smoothed = smoothedAdvantages(rewards, { visits, mean: earlier, variance: earlier * (1 - earlier) });
  const { normalize_std, std_eps } = data.scripts[id].defaults;
  const options = { deviation: normalize_std === "True" ? "group" : "none", std_ddof: 1, std_eps: Number(std_eps) };
  const advantages = id === "dcpo" ? smoothed.advantages : groupAdvantages(rewards, options);
  const weights = tokenWeights(lengths, { mean, constant });
  return ROWS.map((row, i) => {
    const [advantage, weight] = [advantages[i], weights[i]];
    return { advantage, weight, push: advantage * weight * lengths[i] };
  });
}

// What stands out in the numbers of one algorithm, in one sentence.
function whyGroup({ id }, rows) {
  const isSilent = rows.every(({ advantage }) => advantage === 0);
  if (isSilent && id === "dapo") return "All rewards are equal: the group is thrown away, and another prompt is sampled.";
  if (isSilent) return "All rewards are equal: no row learns anything.";
  if (id === "dcpo" && state.visits) {
    return `Mean reward of earlier visits: ${say(state.earlier)}, over ${state.visits}; their deviation counts, too.`;
  }
  const byLength = rows.toSorted((one, two) => two.weight - one.weight);
  const times = say(byLength[0].weight / byLength.at(-1).weight);
  if (["grpo", "gspo", "dcpo"].includes(id)) {
    if (times === "1") return "All rows have one length, so all tokens weigh the same.";
    return `A token of the shortest row weighs ${times} times one of the longest, and a row's push does not depend on its length.`;
  }
  const lengths = ROWS.map((row) => state[`length${row}`]);
  const factor = say(Math.max(...lengths) / Math.min(...lengths));
  if (factor === "1") return "All rows have one length, so the length changes no push.";
  return `At the same advantage the longest row pushes ${factor} times as much as the shortest.`;
}

function groupTable(rows) {
  const most = Math.max(...rows.map(({ push }) => Math.abs(push))) || 1;
  const names = ["row", "advantage", "weight of a token", "push of the row", ""];
  const cells = rows.map(({ advantage, weight, push }, i) => {
    const share = (50 * Math.abs(push)) / most; // of the cell; the zero is in its middle
    const bar = element("i", { style: `width:${share}%;left:${push < 0 ? 50 - share : 50}%` });
    const numbers = [advantage, weight, push].map((number) => element("td", {}, say(number)));
    return element("tr", {}, element("th", { scope: "row" }, String(ROWS[i])), numbers,
      element("td", { class: push < 0 ? "bar down" : "bar" }, bar));
  });
  return [element("tr", {}, names.map((name) => element("th", { scope: "col" }, name))), ...cells];
}

function groupCard(algorithm) {
  const { id, title, formula, code, note } = algorithm;
  const [status, reason, table] = [element("span", { class: "status" }), element("p", {}), element("table", {})];
  redraws.push(() => {
    const rows = groupRows(algorithm);
    const total = (sign) => rows.reduce((sum, { push }) => sum + Math.max(0, sign * push), 0);
    const isSilent = rows.every(({ push }) => push === 0);
    status.className = isSilent ? "status silent" : "status";
    status.textContent = `up ${say(total(1))}, down ${say(total(-1))}`;
    reason.textContent = whyGroup(algorithm, rows);
    table.replaceChildren(...groupTable(rows));
  });
  const heading = element("h2", {}, title, " ", link(code, "its code", { class: "more" }));
  return element("section", { class: `card ${id}` }, element("div", { class: "head" }, heading, status),
    element("p", { class: "dim" }, note), element("div", { class: "equations" }, element("p", {}, formula)), table, reason);
}

const GROUP_HELP = [
  "These are the numbers of the first update, where every ratio is 1 and nothing clips.",
  "A row's push is its advantage times the weight of a token times its length: what its tokens add to the gradient.",
  "Only DCPO looks at earlier visits. It takes their rewards to have been 0 or 1.",
  "DAPO turns a right and a wrong answer into 1 and -1, and its advantages stay the same.",
  "Left out are Dr. GRPO's reward of truncated rows and DAPO's overlong penalty.",
];
function groupView() {
  redraws.length = 0;
  const rows = ROWS.map((row) => [
    slider(`reward${row}`, `reward of row ${row}`, [0, 1, 0.1], () => say(state[`reward${row}`])),
    slider(`length${row}`, "tokens", [1, 64, 1], () => say(state[`length${row}`])),
  ]);
  const others = [
    slider("constant", "C of Dr. GRPO", [8, 256, 8], () => say(state.constant)),
    slider("visits", "earlier visits", [0, 20, 1], () => say(state.visits)),
    slider("earlier", "their mean reward", [0, 1, 0.125], () => say(state.earlier)),
  ];
  const scenes = GROUP_SCENES.map(([name, settings]) => element("li", {}, link(`group/${settings}`, name)));
  return [element("h1", {}, "One group: what does each row learn?"),
    element("p", {}, "A prompt has eight completions. Give each its reward and its length, and compare the algorithms."),
    element("ul", { class: "chips" }, scenes),
    element("div", { class: "eight" },
      element("div", { class: "controls" }, rows, element("div", { class: "others" }, others)),
      element("div", { class: "plays" }, GROUP_ALGORITHMS.map(groupCard))),
    element("p", { class: "dim" }, GROUP_HELP.join(" "))];
}
