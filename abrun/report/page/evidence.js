// The evidence besides the claims: a section with tables for each kind, and what only some kinds add to it.
"use strict";

// A chart of the mismatch that a guard limits, and bars of the peaks of memory.
const EXTRAS = {
  guard: () => report.mismatch && figureOf(report.mismatch, { limit: report.mismatch_limit }),
  cost: () => report.memory && memoryBars(report.memory),
};
const NAMES = ["metric", "guard", "tensor", "fault", "quantity"];
const isNumeric = (text) => /^[-+\u00b1\u2212[\d]|^$/.test(text);

function evidenceSections(leads) {
  return report.sections.filter((told) => told.leads === leads).map(evidenceSection);
}

function evidenceSection({ kind, title, intro, tables }) {
  const extra = EXTRAS[kind]?.();
  if (!tables.length && !extra) return null;
  return section(
    kind.replaceAll(" ", "-"),
    title,
    el("p", { class: "intro" }, intro),
    ...tables.map(({ columns, rows }) => {
      const heads = columns.map((name, at) => [name, rows.every((row) => isNumeric(row[at])) ? "right" : ""]);
      const cell = (text, at) =>
        NAMES.includes(columns[at])
          ? named(text, at ? "span" : "b")
          : columns[at] === "result"
            ? chip(text)
            : text.replace(/(^|[[( ])-(?=\d)/g, `$1${MINUS}`);
      return table(title, heads, rows.map((row) => row.map(cell)));
    }),
    extra || null,
  );
}

function memoryBars(memory) {
  const most = Math.max(...memory.means.flat().filter((value) => typeof value === "number"), 1e-12);
  const bar = (arm, phase) => {
    const value = memory.means[arm] && memory.means[arm][phase];
    const fill = el("i", { class: `fill arm-${arm % 6}` });
    fill.style.width = `${(75 * (value || 0)) / most}%`;
    return el(
      "div",
      { class: "bar-row", "data-arm": String(arm) },
      fill,
      el("span", {}, `${number(value, 3)} ${memory.unit}`, el("span", { class: "muted" }, ` ${arms[arm]}`)),
    );
  };
  return el(
    "figure",
    { class: "memory" },
    el("h3", {}, `Peak memory by phase`, muted(` ${memory.counter}, mean over seeds`)),
    memory.phases.map((phase, index) =>
      el(
        "div",
        { class: "phase" },
        el("div", { class: "phase-name" }, phase),
        el(
          "div",
          { class: "phase-bars" },
          arms.map((_, arm) => bar(arm, index)),
        ),
      ),
    ),
    el("p", {}, "Phase of the peak: ", groupByPhase(arms.map((name, arm) => [name, memory.held_by[arm]])), "."),
  );
}

// Groups arms whose peak is in the same phase.
function groupByPhase(holders) {
  const known = holders.filter(([, phase]) => phase);
  const phases = [...new Set(known.map(([, phase]) => phase))];
  const named = (phase) => known.filter(([, holder]) => holder === phase).map(([name]) => name).join(", ");
  return phases.map((phase) => `${phase} (${named(phase)})`).join("; ");
}
