// The data of the page, and helpers for elements and number formats. Names come from untrusted runs: they become
// text nodes and are never parsed as HTML. The scripts share one scope.
"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const report = read("report");
const { content, arms } = report;
const treatments = arms.slice(1);
// The evidence of one kind, with its values as fields.
const evidenceOf = (kind) =>
  content.evidence.filter((item) => item.kind === kind).map((item) => ({ ...item, ...item.values }));
const MINUS = "\u2212";
function el(name, properties, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key === "on")
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value !== "number") return String(value); // "NaN" and "Infinity" are text in verdict.json
  const size = Math.abs(value);
  const scientific = value !== 0 && (size >= 1e7 || size < 1e-4);
  const text = scientific
    ? value.toExponential(Math.min(digits, 3) - 1)
    : String(Number(value.toPrecision(size >= 1e4 ? 7 : digits)));
  return text.replaceAll("-", MINUS);
}

// An upper bound in three digits, rounded up as in the other reports.
function boundText(bound) {
  return bound > 0 ? roundedText(bound, Math.ceil) : number(bound, 3);
}

function roundedText(value, toInteger) {
  if (typeof value !== "number" || value === 0) return number(value, 3);
  const unit = 10 ** (Math.floor(Math.log10(Math.abs(value))) - 2);
  return number(toInteger(Number((value / unit).toFixed(6))) * unit, 3);
}

// An interval in three digits, rounded outward, so that its wider end equals the certified bound.
const interval = (ends) =>
  ends ? `[${roundedText(ends[0], Math.floor)}, ${roundedText(ends[1], Math.ceil)}]` : "\u2013";

const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);
const percent = (share) => (typeof share === "number" ? `${Math.round(100 * share)}\u00a0%` : "unknown");
const sampleOf = (panel) =>
  panel.num_runs
    ? `unpaired difference, ${panel.num_runs[0]} and ${panel.num_runs[1]} runs`
    : `paired difference, ${count(panel.num_pairs, "pair")}`;
const count = (size, noun) => `${size} ${noun}${size === 1 ? "" : "s"}`;
const grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");
const stepsText = (ends) =>
  ends[0] === ends[1] ? `step ${grouped(ends[0])}` : `steps ${grouped(ends[0])}\u2013${grouped(ends[1])}`;
const scaleText = (transform) =>
  ({ log: "log ratio", log_excess: "log ratio of the excess over 1" })[transform] || "";
const confidence = (alpha) => `${number(100 * (1 - 2 * (alpha ?? 0.05)), 3)}\u00a0%`;
const several = treatments.length > 1;

const muted = (...text) => el("span", { class: "muted" }, ...text);
// A long name may wrap after a separator, and within a part that is itself too long.
const named = (name, tag = "span") =>
  el(tag, { class: "name" }, name.match(/[^/_.-]*[/_.-]?/g).flatMap((part) => [part, el("wbr")]));
const key = (kind, text) =>
  el("span", { class: "key" }, el("i", { class: `glyph ${kind}`, "aria-hidden": "true" }), text);
const swatch = (arm) => el("i", { class: `swatch arm-${arm % 6}`, "aria-hidden": "true" });
const button = (label, listener, properties) =>
  el("button", { type: "button", on: { click: listener }, ...properties }, label);

// Quotes cells that a spreadsheet would read as a formula, because names come from untrusted runs.
function saveCsv(name, columns) {
  const cell = (value) => {
    if (typeof value === "number") return String(value);
    const text = String(value ?? "");
    return `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  };
  const lines = [columns.map(([head]) => cell(head))];
  columns[0][1].forEach((_, at) => lines.push(columns.map(([, values]) => (values[at] == null ? "" : cell(values[at])))));
  const link = el("a", {
    href: URL.createObjectURL(new Blob([`${lines.map((line) => line.join(",")).join("\r\n")}\r\n`], { type: "text/csv" })),
    download: `${name.replace(/[^\w]+/g, "-")}.csv`,
  });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// A column without any content is left out. On a phone, rows of more than two columns become blocks of labelled cells;
// two arms side by side, whose first column has no title, stay a table.
function table(label, heads, rows) {
  const isBlank = (cell) => [cell].flat().every((part) => ["", "\u2013", null, undefined].includes(part));
  const shown = heads.map((_, at) => at).filter((at) => !rows.length || rows.some((row) => !isBlank(row[at])));
  const labelOf = ([title]) => [title].flat().filter((part) => typeof part === "string").join("");
  const cell = (name, row) => (at) =>
    el(
      name,
      { class: heads[at][1] || null, scope: name === "th" ? "col" : null, "data-label": name === "td" ? labelOf(heads[at]) : null },
      ...[row[at]].flat(),
    );
  const titles = heads.map(([title]) => title);
  return el(
    "div",
    { class: `scroll${shown.length > (heads[0][0] ? 2 : 3) ? " stack" : ""}`, tabindex: "0", role: "region", "aria-label": label },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, shown.map(cell("th", titles)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, shown.map(cell("td", row))))),
    ),
  );
}

// A command line with a button that copies it; a page from a file may have no clipboard, so it falls back to a selection.
function commandLine(text) {
  const code = el("code", {}, text);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    copyButton.textContent = "Copied";
    setTimeout(() => (copyButton.textContent = "Copy"), 1500);
  };
  const copyButton = button("Copy", copy, { "aria-label": `Copy the command ${text}` });
  return el("div", { class: "command" }, code, copyButton);
}

// --- names of arms, sections ---

const context = report.context || {};
const baselineName = () => content.baseline || arms[0];
const treatmentName = () => (several ? "treatment" : treatments[0] || baselineName());
const withRole = (name, role) => (name === role ? name : `${name} (${role})`);
const comparedText = () =>
  !treatments.length ? "" : `Differences are ${withRole(treatmentName(), "treatment")} minus ${withRole(baselineName(), "baseline")}.`;
const withArm = (headings) => (several ? [["arm"], ...headings] : headings);
const armCell = (row) => (several ? [row.arm] : []);
// The recipe key of a control, if the runs have a recipe.
const recipeKey = (key) => (context.has_recipe ? ` (${key})` : "");

const sections = [];
function section(id, title, ...children) {
  sections.push([id, title]);
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}

const RESULTS = {
  equivalent: ["good", "\u2713"],
  holds: ["good", "\u2713"],
  pass: ["good", "\u2713"],
  agrees: ["good", "\u2713"],
  different: ["bad", "\u2715"],
  fail: ["bad", "\u2715"],
  deviates: ["bad", "\u2715"],
  "limit broken": ["bad", "\u2715"],
  "not exact": ["bad", "\u2715"],
  undecided: ["open", "?"],
  "baseline too": ["open", "!"],
  open: ["open", "!"],
};

function chip(result) {
  const [kind, glyph] = RESULTS[result] || ["plain", "\u2013"];
  return el("span", { class: `chip ${kind}` }, el("span", { "aria-hidden": "true" }, glyph), ` ${result}`);
}
