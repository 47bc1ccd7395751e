"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);

// --- Tables

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
  for (const line of document.querySelectorAll("#runs .run > .scroll tbody tr")) {
    const fits = words.every((word) => line.textContent.toLowerCase().includes(word));
    line.hidden = !fits;
    shown += fits; all += 1;
  }
  for (const run of document.querySelectorAll("#runs .run")) {
    run.hidden = words.length > 0 && !run.querySelector(":scope > .scroll tbody tr:not([hidden])");
    if (words.length) run.open = !run.hidden;
  }
  at("count").textContent = words.length ? `${shown} of ${all} rows` : "";
}

// --- Making elements

function element(name, text, kind) {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function listed(lines) {
  const made = element("ul", "", "small");
  made.append(...lines.map((line) => element("li", line)));
  return made;
}

function tableOf(head, lines) {
  const around = element("div", "", "scroll"), table = document.createElement("table");
  around.tabIndex = 0;
  if (head) table.createTHead().insertRow().append(...head.map((text) => Object.assign(element("th", text, "word"), {scope: "col"})));
  const body = table.createTBody();
  for (const [name, ...cells] of lines) {
    const row = body.insertRow();
    row.append(Object.assign(element("th", name, "word"), {scope: "row"}), ...cells.map((text) => element("td", text, "word")));
  }
  around.append(table);
  return around;
}

function drawn(name, values, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- The chart: a line for each row, with a bar or points, intervals and a text

const WIDE = 640;  // pixels: in a narrower chart names stand above their bars
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "13px system-ui, sans-serif";
const lengthOf = (text) => ruler.measureText(text ?? "").width;

function shortened(text, width) {
  if (lengthOf(text) <= width) return text;
  let kept = text;
  while (kept.length > 1 && lengthOf(`${kept}\u2026`) > width) kept = kept.slice(0, -1);
  return `${kept}\u2026`;
}

// rows: {name, bar, points: [[value, low, high, shape]], text, kind, says, pick}. unit: what the axis shows. wide:
// whether values that lie far apart have a logarithmic scale. ratios: whether 1 is shown. band: from and to of what is within noise.
// limit: a value that is marked across all rows.
function chart(place, rows, {unit, wide = false, ratios = false, band = null, limit = null, label}) {
  if (limit > 3 * Math.max(...rows.map((row) => row.bar ?? 0))) limit = null;  // it would leave the bars no room
  const redraw = () => {
    const width = place.clientWidth;
    if (!width) return;
    const narrow = width < WIDE, high = narrow ? 40 : 26, name = narrow ? 0 : Math.min(width * 0.36, 12 + Math.max(...rows.map((row) => lengthOf(row.name))));
    const ends = [...rows.flatMap((row) => [row.bar, ...(row.points ?? []).flatMap((point) => point.slice(0, 3))]), ...(ratios ? [1, ...(band ?? [])] : []), limit].filter((x) => typeof x === "number" && x > 0);
    if (!ends.length) return;
    const most = Math.max(...ends, 0), few = Math.min(...ends), bars = rows.some((row) => row.bar);
    const log = wide && (!bars || most > 5 * few), least = log ? (bars ? 10 ** Math.floor(Math.log10(few * 0.9)) : few * 0.9) : 0;
    const texts = rows.map((row) => lengthOf(row.text) + 14);
    const room = Math.max(60, width - name - Math.min(Math.max(...texts), narrow ? width * 0.55 : width * 0.4));
    const x = (value) => name + room * (log ? Math.log(value / least) / Math.log(most / least || 1) : value / (most || 1));
    const svg = drawn("svg", {class: "chart", viewBox: `0 0 ${width} ${rows.length * high + 34}`, role: "group", "aria-label": label});
    const foot = rows.length * high;
    if (band) svg.append(drawn("rect", {class: "noise", x: x(band[0]), y: 0, width: x(band[1]) - x(band[0]), height: foot}));
    let last = -Infinity;
    for (const value of ticks(least, most, log, bars)) {
      svg.append(drawn("path", {class: "axis", d: `M${x(value)} 0V${foot + 4}`, "stroke-dasharray": value === 1 && band ? "none" : "1 4"}));
      const half = lengthOf(value.toLocaleString("en")) / 2;
      if (x(value) + half > width || x(value) - half < Math.max(last, 0)) continue;
      last = x(value) + half + 8;
      svg.append(drawn("text", {class: "key", x: x(value), y: foot + 16, "text-anchor": "middle"}, value.toLocaleString("en")));
    }
    if (limit) {
      svg.append(drawn("path", {class: "limit", d: `M${x(limit)} 0V${foot + 4}`}));
      svg.append(drawn("text", {class: "key", x: x(limit), y: foot + 31, "text-anchor": "middle"}, `limit ${Math.round(limit).toLocaleString("en")}`));
    }
    svg.append(drawn("text", {class: "key", x: name, y: foot + 31}, `${unit}${log ? bars ? ", each line ten times the one before" : ", logarithmic scale" : ""}`));
    rows.forEach((row, number) => {
      const top = number * high, middle = narrow ? top + 28 : top + 13, tall = narrow ? 16 : 18;
      const group = drawn("g", row.says ? {role: "button", tabindex: 0, "aria-label": row.says} : {role: "img", "aria-label": `${row.name}: ${row.text}`});
      group.append(drawn("rect", {x: 0, y: top, width, height: high}));
      if (!row.says) group.firstChild.setAttribute("fill", "none");
      group.classList.toggle("on", place.chosen === number);
      const title = shortened(row.name, narrow ? width : name - 8);
      group.append(drawn("text", narrow ? {x: 0, y: top + 15} : {x: name - 8, y: middle + 4, "text-anchor": "end"}, title));
      let end = name;
      if (row.bar) {
        end = x(row.bar);
        group.append(drawn("rect", {class: row.kind ?? "bar", x: name, y: middle - tall / 2, width: Math.max(1, end - name), height: tall}));
      }
      for (const [value, low, up, shape] of row.points ?? []) {
        if (low && up) {
          const offset = middle + (shape ?? 0) * 5;
          group.append(drawn("path", {class: "interval", d: `M${x(low)} ${offset}H${x(up)}`}));
          end = Math.max(end, x(up));
        }
        if (shape !== undefined) group.append(drawn(...mark(shape, x(value), middle + shape * 5)));
        end = Math.max(end, x(value));
      }
      // In a narrow chart what finds no room beside its bar stands beside the name, if there is room.
      const text = row.text ?? "", clipped = lengthOf(text) > width - end - 6;
      group.append(narrow && clipped && lengthOf(title) + lengthOf(text) + 12 < width ? drawn("text", {x: width, y: top + 15, "text-anchor": "end"}, text)
        : drawn("text", {x: end + 6, y: middle + 4}, shortened(text, width - end - 6)));
      if (row.says) {
        const say = () => { if (place === at("climbed")) at("said").textContent = row.says; };
        for (const event of ["mouseenter", "focus"]) group.addEventListener(event, say);
        const pick = () => { place.chosen = number; redraw(); row.pick(number); };
        group.addEventListener("click", pick);
        group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); } });
      }
      svg.append(group);
    });
    place.replaceChildren(svg);
  };
  place.redraw = redraw;
  redraw();
}

function mark(shape, x, y) {
  if (shape < 0) return ["circle", {class: "bar", cx: x, cy: y, r: 4}];
  if (shape === 0) return ["rect", {class: "bar", x: x - 4, y: y - 4, width: 8, height: 8}];
  return ["path", {class: "bar", d: `M${x} ${y - 5}l5 5l-5 5l-5 -5z`}];
}

// Round values between two, at most six or so.
function ticks(least, most, log, bars) {
  if (!(most > 0)) return [];
  const found = [];
  if (log) {
    const decades = Math.log10(most / least), steps = bars || decades > 2.5 ? [1] : decades > 1 ? [1, 3] : [1, 1.2, 1.5, 2, 3, 5, 7];
    for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++)
      for (const step of steps) found.push(Number((step * 10 ** power).toPrecision(3)));
    return found.filter((value) => value >= least && value <= most);
  }
  const size = 10 ** Math.floor(Math.log10(most / 4)), step = size * [1, 2, 5, 10].find((n) => n * size >= most / 5);
  for (let value = step; value <= most; value += step) found.push(Number(value.toPrecision(6)));
  return found;
}

// --- The tabs' contents, each made when it is first shown for a run

let run = data.runs[data.chosen];

const KINDS = {faster: "green: faster than the rung before", slower: "orange: slower", same: "grey: no difference, or unclear (not wholly beyond the noise floor)",
  failed: "dashed: does not count, and the text says why", other: "outlined: another trainer"};

function kindOf(row) {
  if (row.other_trainer) return "other";
  return row.sound ? {faster: "faster", slower: "slower", unclear: "same", same: "same"}[row.verdict] ?? "bar" : "failed";
}

function climb() {
  at("answer").replaceChildren(...run.answer.map(([figure, what]) => {
    const made = document.createElement("div");
    made.append(element("b", figure), element("span", what));
    return made;
  }));
  at("about").textContent = run.about;
  at("said").textContent = matchMedia("(hover: none)").matches ? "Tap a bar for its figures and all that is known of its rung."
    : "Point at a bar for its figures; click it for all that is known of its rung.";
  const kinds = run.rows.map(kindOf);
  const key = Object.keys(KINDS).filter((kind) => kinds.includes(kind)).map((kind) => KINDS[kind]);
  const colours = key.length ? `${key.join("; ").replace(/^./, (first) => first.toUpperCase())}.` : "";
  at("key").textContent = [run.keeps, run.swept ? "" : "A factor is over the rung before, or the last before that which had an effect.", colours].filter(Boolean).join(" ");
  const file = run.ladder === "quick" ? "bench quick" : `bench run ${run.ladder}`;
  at("yours").replaceChildren("Your machine: ", element("code", "make bench"), " in a checkout of gpt2-bench, then ", element("code", "source .venv/bin/activate; "), element("code", run.swept ? "bench ladders" : file), "; ", element("code", "bench doctor"), " says what would disturb it.");
  at("findings").replaceChildren(...run.findings.map((line) => element("li", line)));
  if (run.elsewhere) {
    const other = data.runs[run.elsewhere.run], line = element("li", ""), link = element("a", other.ladder);
    link.href = `#climb=${other.address}`;
    link.addEventListener("click", (event) => { event.preventDefault(); take(run.elsewhere.run); at("tab-climb").focus(); });
    line.append(run.elsewhere.said, link, ".");
    at("findings").firstChild ? at("findings").firstChild.after(line) : at("findings").append(line);
  }
  at("warned").hidden = !run.warnings.length;
  const [first, ...others] = run.warnings;
  at("warned").classList.toggle("alone", !others.length);
  at("warned").firstChild.textContent = `Warning: ${first}${others.length ? ` (${others.length} more)` : ""}`;
  at("warned").lastElementChild.replaceChildren(...others.map((line) => element("li", line)));
  at("rung").hidden = true;
  at("climbed").chosen = null;
  chart(at("climbed"), run.rows.map((row) => ({
    name: row.label,
    bar: row.tps?.[0],
    points: row.tps ? [row.tps] : [],
    text: row.words || row.said,
    kind: kindOf(row),
    says: [`${row.name}:`, Object.entries(row.figures).map(([what, text]) => `${what} ${text}`).join(", ")].join(" "),
    pick: (number) => detail(row, number),
  })), {unit: "tokens per second", limit: run.limit, label: `Tokens per second of ${run.title}`});
}

// number: of the row's bar, to which closing the detail leads back.
function detail(row, number) {
  const place = at("rung"), add = (heading, ...parts) => place.append(element("h3", heading), ...parts);
  const close = () => {
    place.hidden = true;
    at("climbed").chosen = null;
    at("climbed").redraw();
    const bar = at("climbed").querySelectorAll("g")[number];
    bar.focus({preventScroll: true});
    bar.scrollIntoView({block: "center"});
  };
  const back = element("button", "Back to the chart");
  back.type = "button";
  back.addEventListener("click", close);
  place.onkeydown = (event) => { if (event.key === "Escape") close(); };
  place.replaceChildren(back, element("h2", row.name));
  place.append(tableOf(null, Object.entries(row.figures)));
  if (row.error) add("Why it has no figures, or none that count", element("pre", row.error));
  if (row.caveats.length) add("What speaks against it", listed(row.caveats));
  if (row.changed.length) add("What it changes", listed(row.changed));
  if (row.proofs.length) add("Did it take effect?", tableOf(null, row.proofs));
  if (row.work.length) {
    const work = document.createElement("div");
    add("Where the time of a step goes", work);
    place.hidden = false;
    chart(work, row.work.map(([name, bar, text]) => ({name, bar, text})), {unit: "milliseconds of one step", label: "Milliseconds by kind of work"});
  }
  if (row.blocks.length) add("Raw measurements", tableOf(["Round", "Tokens per second", "Seconds of each block"], row.blocks));
  add("Run it again", element("pre", row.command));
  place.hidden = false;
  place.focus({preventScroll: true});
  place.scrollIntoView({block: "start"});
}

function machines() {
  const place = at("compared-machines");
  place.replaceChildren();
  for (const group of data.machines) {
    const chartPlace = document.createElement("div");
    place.append(element("h2", group.title), chartPlace);
    chart(chartPlace, group.rows.map((row) => ({name: row.name, bar: row.tps[0], points: [row.tps], text: row.said, ...(row.run === undefined
      ? {kind: "open"} : {says: `${row.name}: ${row.said}; shows its climb`, pick: () => { chartPlace.chosen = null; take(row.run); toTab("climb"); at("tab-climb").focus(); }})})),
      {unit: "tokens per second", wide: true, label: `Tokens per second of ${group.title} by machine`});
  }
}

function attribution() {
  const place = at("attributed"), chartPlace = document.createElement("div");
  const measured = run.attribution.length > 0, labels = run.gains;
  const rows = measured ? run.attribution : run.rows.filter((row) => row.gain && row.sound).map((row) => ({name: row.name, agreement: "", gains: [{ratio: row.gain, said: row.figures["over the rung before"]}]}));
  place.replaceChildren(element("h2", `What each change buys: ${run.title}`),
    element("p", measured
      ? `Circle: ${labels[0]}; square: ${labels[1]}; diamond: ${labels[2]}. Right of 1: more tokens per second.`
      : "Each change added to those above it, over the rung before; right of 1: more tokens per second. This run did not measure each change alone and left out (bench run --ablate).", "small"), chartPlace);
  if (run.band) place.append(element("p", `Grey: within the noise floor of ${run.noise}.`, "small"));
  if (measured) place.append(tableOf(["Rung", ...labels, "Direction"], rows.map((each) => [each.name, ...each.gains.map((gain) => gain.said), each.agreement])));
  if (rows.length) chart(chartPlace, rows.map((each) => ({
    name: each.name,
    points: each.gains.map((gain, number) => gain.ratio && [...gain.ratio, measured ? number - 1 : 0]).filter(Boolean),
    text: measured ? each.agreement : each.gains[0].said,
  })), {unit: "times as many tokens per second", wide: true, ratios: true, band: run.band, label: `What each change buys in ${run.title}`});
}

// Those that took turns with ours on this machine, and those of the run, or else of one on the same machine.
function trainers() {
  const place = at("beside"), has = (other) => other.rows.some((row) => row.other_trainer);
  const shown = has(run) ? run : data.runs.find((other) => other.machine === run.machine && other.task.join() === run.task.join() && has(other));
  const turns = data.turns.filter((each) => each.machine === run.machine && (each.task ?? run.task).join() === run.task.join());
  place.replaceChildren();
  if (!shown && !turns.length) {
    const machines = new Set(data.turns.map((each) => each.machine)), named = new Set();
    const others = [...data.runs.entries()].filter(([, other]) => other.machine !== run.machine && (has(other) || machines.has(other.machine)) && !named.has(other.machine) && named.add(other.machine));
    place.append(element("p", `No other trainer was measured on this machine with this model.${others.length ? " On these it was:" : ""}`));
    for (const [number, other] of others) {
      const button = element("button", other.hardware);
      button.type = "button";
      button.addEventListener("click", () => take(number));
      place.append(button, " ");
    }
    return;
  }
  for (const each of turns) {
    const chartPlace = document.createElement("div");
    place.append(element("h2", `Ours over other trainers, in turn: ${each.title}`), element("p", `How many times as fast as each other trainer ours was; right of 1 ours was faster. Both took turns of a few steps, so a drift of the machine slows both. After each ratio: tokens per second of ours against its. ${each.about}.`, "small"), chartPlace);
    chart(chartPlace, each.rows.map((row) => ({name: row.name, points: [[...row.ratio, 0]], text: row.said})),
      {unit: "times as many tokens per second", wide: true, ratios: true, label: `Ours over other trainers, in turn: ${each.title}`});
  }
  if (!shown) return;
  const chartPlace = document.createElement("div");
  const rows = shown.rows.filter((row) => row.tps).sort((a, b) => b.tps[0] - a.tps[0]);
  place.append(element("h2", `Other trainers beside ours: ${shown.title}`), element("p", `${shown === run ? "" : `The chosen run measured none; these are of another one on its machine, ${shown.title}. `}Filled: rungs of this code. Outlined: other trainers, timed by the arrival of their progress lines, in rounds with ours. Ours over it: the ratio of our fastest rung${shown.ours ? ` (${shown.ours})` : ""}.`, "small"), chartPlace);
  chart(chartPlace, rows.map((row) => ({name: row.name, bar: row.tps[0], points: [row.tps], text: row.figures["ours over it"] ? `${row.figures["tokens/s"]}; ours over it ${row.figures["ours over it"]}` : row.figures["tokens/s"], kind: row.other_trainer ? "other" : row.sound ? "bar" : "failed"})),
    {unit: "tokens per second", label: `Tokens per second of trainers in ${shown.title}`});
}

function published() {
  const place = at("others");
  place.replaceChildren();
  for (const series of data.published) {
    if (series.rows.length < 2) continue;
    const chartPlace = document.createElement("div");
    place.append(element("h2", series.title), chartPlace);
    chart(chartPlace, series.rows.map((row) => ({name: row.name, bar: row.tps[0], text: row.said, kind: "open"})),
      {unit: "tokens per second", wide: true, label: series.title});
  }
}

const TABS = {climb, machines, attribution, trainers, published, runs: () => {}};
let made = new Set();

function show(name) {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    at(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (made.has(name)) for (const place of at(name).querySelectorAll("div")) place.redraw?.();  // the window may be wider now
  else if (run || ["machines", "published"].includes(name)) TABS[name]();
  made.add(name);
}

const shownTab = () => document.querySelector("[role=tab][aria-selected=true]").id.slice(4);

function choose(number) {
  run = data.runs[number];
  made = new Set([...made].filter((name) => name === "machines" || name === "published"));
  toTab(shownTab());
}

function take(number) {
  at("run").value = number;
  choose(number);
}

// The page's address names the tab and the run, so that a link leads to what is shown: #trainers=MACHINE-LADDER
function toTab(name) {
  show(name);
  const chosen = run && run !== data.runs[data.chosen] ? `=${run.address}` : "";
  history.replaceState(null, "", `#${name}${chosen}`);
}

function fromAddress() {
  const [tab, address] = location.hash.slice(1).split("=");
  const found = data.runs.find((each) => each.address === address) ?? data.runs[data.chosen];
  if (found !== run) {
    run = found;
    at("run").value = data.runs.indexOf(run);
    made = new Set();
  }
  show(Object.hasOwn(TABS, tab) ? tab : run ? "climb" : "published");
  if (address && run?.address !== address) at("said").textContent = "The run that the address names is not on this page.";
}

document.querySelector("[role=tablist]").hidden = false;
for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => toTab(tab.id.slice(4)));
  tab.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], tabs = [...document.querySelectorAll("[role=tab]")];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    toTab(next.id.slice(4));
  });
}
window.addEventListener("hashchange", () => { if (Object.hasOwn(TABS, location.hash.slice(1).split("=")[0])) fromAddress(); });
at("run")?.addEventListener("change", (event) => choose(Number(event.target.value)));
for (const button of document.querySelectorAll("table.sortable thead button")) button.addEventListener("click", () => sort(button.closest("th")));
at("filter").addEventListener("input", (event) => filter(event.target.value.toLowerCase().split(/\s+/).filter(Boolean)));
window.addEventListener("beforeprint", () => { for (const table of document.querySelectorAll("details.table")) table.open = true; });
for (const event of ["resize", "beforeprint"]) window.addEventListener(event, () => show(shownTab()));
fromAddress();
