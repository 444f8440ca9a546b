// The data of the page, and helpers for elements and number formats. Names come from untrusted runs: they become
// text nodes and are never parsed as HTML. The scripts share one scope, in the order elements, marks, charts, page.
"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const report = read("report");
const { content, arms } = report;
const treatments = arms.slice(1);
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
const outwardInterval = (ends) =>
  ends ? `[${roundedText(ends[0], Math.floor)}, ${roundedText(ends[1], Math.ceil)}]` : "\u2013";

const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);
const interval = (ends, digits = 3) =>
  ends ? `[${number(ends[0], digits)}, ${number(ends[1], digits)}]` : "\u2013";
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

function table(label, heads, rows) {
  const cell = (name) => (content, index) =>
    el(name, { class: heads[index][1] || null, scope: name === "th" ? "col" : null }, ...[content].flat());
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, heads.map((head) => head[0]).map(cell("th")))),
      el(
        "tbody",
        {},
        rows.map((row) => el("tr", {}, row.map(cell("td")))),
      ),
    ),
  );
}
