"use strict";
const rungs = JSON.parse(document.getElementById("rungs").textContent);

const SECONDS = {s: 1, min: 60, h: 3600, days: 86400};

// A figure's first number, without its thousands separators, times in seconds; words sort as words, absent cells last.
function value(cell) {
  const text = cell.textContent.trim();
  if (text === "-" || text === "") return null;
  const number = text.replace(/,/g, "").match(/^[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
  if (!number || cell.classList.contains("word")) return text.toLowerCase();
  return Number(number[0]) * (SECONDS[text.split(" ")[1]] ?? 1);
}

function sort(header) {
  const row = header.parentElement, table = header.closest("table"), body = table.tBodies[0];
  const place = [...row.children].indexOf(header);
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const other of row.children) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const lines = [...body.rows].map((line) => [value(line.cells[place]), line]);
  lines.sort(([a, one], [b, two]) => {
    if ("beneath" in one.dataset !== "beneath" in two.dataset) return "beneath" in one.dataset ? 1 : -1;
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
    return down ? -order : order;
  });
  body.append(...lines.map(([, line]) => line));
}

function filter(words) {
  let shown = 0, all = 0;
  for (const line of document.querySelectorAll("section table.sortable tbody tr")) {
    if (line.closest("details")) continue;
    const fits = words.every((word) => line.textContent.toLowerCase().includes(word));
    line.hidden = !fits;
    shown += fits; all += 1;
  }
  document.getElementById("count").textContent = words.length ? `${shown} of ${all} rows` : "";
}

// Student's t quantiles for a 95 % interval, by degrees of freedom; beyond them the normal distribution's is near.
const T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131,
  2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042];

function moments(values) {
  const logs = values.map(Math.log), mean = logs.reduce((a, b) => a + b, 0) / logs.length;
  const spread = logs.reduce((sum, x) => sum + (x - mean) ** 2, 0) / Math.max(1, logs.length - 1);
  return {mean, error: spread / logs.length, n: logs.length};
}

// As bench.stats: paired within rounds of one run, Welch's interval between two.
function ratio(a, b) {
  let difference, error, freedom;
  if (a.run === b.run) {
    const paired = Object.keys(b.tps).filter((round) => round in a.tps).map((round) => b.tps[round] / a.tps[round]);
    if (!paired.length) return null;
    const found = moments(paired);
    [difference, error, freedom] = [found.mean, found.error, found.n - 1];
    if (found.n < 3) error = null;
  } else {
    const [x, y] = [moments(Object.values(a.tps)), moments(Object.values(b.tps))];
    difference = y.mean - x.mean;
    error = Math.min(x.n, y.n) < 3 ? null : x.error + y.error;
    freedom = error ? error ** 2 / (x.error ** 2 / (x.n - 1) + y.error ** 2 / (y.n - 1)) : 1;
  }
  const t = T[Math.max(1, Math.floor(freedom)) - 1] ?? 1.96;
  return {value: Math.exp(difference), half: error === null ? null : Math.exp(t * Math.sqrt(error)) - 1};
}

function element(name, text, kind) {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function compare() {
  const [a, b] = ["a", "b"].map((id) => rungs[Number(document.getElementById(id).value)]);
  const place = document.getElementById("compared");
  place.replaceChildren();
  if (!a || !b) return;
  const unlike = Object.keys(a.task).filter((key) => a.task[key] !== b.task[key]);
  const bad = [a, b].filter((each) => !["ok", "inert", "external"].includes(each.status));
  const found = !unlike.length && !bad.length ? ratio(a, b) : null;
  if (found) {
    const text = `B is ${found.value.toFixed(2)} times as fast as A` +
      (found.half === null ? " (too few rounds for an interval)." : ` ±${(100 * found.half).toFixed(1)} %.`);
    place.append(element("p", text, found.half !== null && Math.abs(Math.log(found.value)) > Math.log1p(found.half)
      ? (found.value > 1 ? "good" : "bad") : ""));
  } else {
    const why = unlike.length ? `another task: ${unlike.join(", ")}` : bad.map((each) => each.status).join(", ") || "no round has both";
    place.append(element("p", `These two do not rank: ${why}.`));
  }
  const keys = [...new Set([...Object.keys(a.facts), ...Object.keys(b.facts)])].filter((key) => a.facts[key] !== b.facts[key]);
  const table = document.createElement("table"), body = document.createElement("tbody");
  const head = document.createElement("tr");
  for (const name of ["What differs", "A", "B"]) { const cell = element("th", name, "word"); cell.scope = "col"; head.append(cell); }
  for (const key of keys) {
    const line = document.createElement("tr"), name = element("th", key, "word");
    name.scope = "row";
    line.append(name, element("td", a.facts[key] ?? "-", "word"), element("td", b.facts[key] ?? "-", "word"));
    body.append(line);
  }
  const top = document.createElement("thead");
  top.append(head); table.append(top, body);
  const around = element("div", "", "scroll");
  around.tabIndex = 0; around.append(table); place.append(around);
}

for (const button of document.querySelectorAll("table.sortable thead button")) button.addEventListener("click", () => sort(button.closest("th")));
document.getElementById("filter").addEventListener("input", (event) => filter(event.target.value.toLowerCase().split(/\s+/).filter(Boolean)));
for (const id of ["a", "b"]) document.getElementById(id).addEventListener("change", compare);
compare();
