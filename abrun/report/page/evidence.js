// The evidence besides the claims: a section for each kind, with what only some kinds add to it.
"use strict";

const DIAGNOSTIC = "A diagnostic: it does not affect the verdict.";
// Title, introduction, and headings of values; tables of other kinds come as texts.
const KINDS = {
  "seed noise": {
    leads: true,
    title: "Seed noise",
    intro:
      "Level and standard deviation (sd) over runs, with 90 % confidence intervals. The gap is the largest between two runs that seed noise alone explains (95 %). Shown by N pairs: the smallest difference that so many pairs of runs detect with 80 % power.",
  },
  "new run": {
    leads: true,
    title: "One run beside several",
    intro:
      "The level of a single run beside those of several, and the interval of 95 of 100 further runs (prediction interval of Student\u2019s t); p is corrected over the claimed metrics, or over all others (Holm).",
  },
  description: {
    leads: true,
    title: "Description",
    intro:
      "Levels over the window, and the difference. With one run per arm, an effect of the treatment cannot be distinguished from seed noise. With several, the certified bound is the smallest margin that these runs would pass; the suggested margin follows from the baseline alone.",
  },
  "injected fault": {
    title: "What this comparison would have caught",
    intro:
      "Faults injected into the baseline, each judged like a treatment. One with the verdict MATCH or PASS would have passed; with INCONCLUSIVE it was left open.",
  },
  guard: {
    title: "Guards",
    intro: "One-sided limits that the treatment must meet at every step.",
    values: { guard: "guard", result: "result", value: "value", limit: "limit", finding: "reason" },
  },
  "step one": {
    title: "Step one",
    intro:
      "Before the first update can show an effect of the treatment, the arms must agree up to rounding. Each row is the pair with the largest deviation, relative to the metric's size or to the size of the terms that cancel in it.",
    values: { metric: "metric", result: "result", BASELINE: "baseline", TREATMENT: "treatment", "relative deviation": "deviation", "relative to": "scale", "which is": "scale_from", tolerance: "tolerance", "from": "tolerance_from", "A/A deviation": "aa_deviation", seed: "seed" },
  },
  divergence: {
    title: "Divergence",
    intro: `The distance of the arms, averaged over steps, relative to that of baseline reruns of the same seed (the A/A noise floor), to the divergence caused by one ULP in the initial weights, and to the baseline's sd over seeds, as far as they were measured. ${DIAGNOSTIC}`,
    values: { metric: "metric", "mean |difference|": "mean_difference", "A/A mean |difference|": "aa_mean_difference", "noise floor": "noise_floor", "ratio to A/A": "ratio", "ratio to one ULP": "ulp_ratio", "its 95\u00a0% CI": "ulp_ci95", "ratio to sd over seeds": "share_of_seed_spread", "first step that differs in any bit": "first_step_apart" },
  },
  trace: {
    title: "Trace",
    intro: `Tensors around the first difference, or those with the largest errors. ${DIAGNOSTIC}`,
    values: { tensor: "name", "relative error": "relative_error", ULPs: "ulps", "share of limit": "share", finding: "finding" },
  },
  "final weights": {
    title: "Final weights",
    intro:
      "Bitwise equality of the trained weights, by a hash of all of them; if they differ, their distance relative to the norm of the baseline's weights, estimated within 8 % from sketches. A diagnostic: it does not affect the verdict unless a claim limits the distance. Reinforcement learning amplifies rounding, so large distances are expected even if the arms are equivalent.",
    values: { "bit-identical": "num_equal", pairs: "num_pairs", "relative distance": "relative_difference", "A/A": "aa_relative_difference", "one ULP": "ulp_relative_difference", seed: "seed" },
  },
  cost: {
    title: "Time and memory",
    intro: "Geometric means, and their ratio. Not a test of equivalence.",
    values: { quantity: "quantity", BASELINE: "baseline", TREATMENT: "treatment", ratio: "ratio", "95\u00a0% CI": "ci95", pairs: "num_pairs", runs: "num_runs" },
  },
};
// Reasons, a chart of the mismatch that a guard limits, what could show a missed fault, bars of peaks of memory.
const reasonsOf = (kind) => {
  const list = evidenceOf(kind).filter((row) => row.reason);
  return list.length && el("ul", { class: "notes" }, list.map(({ metric, reason }) => el("li", {}, metric ? `${metric}: ${reason}` : reason)));
};
const EXTRAS = {
  trace: () => reasonsOf("trace"),
  "seed noise": () => reasonsOf("seed noise"),
  guard: () => report.mismatch && figureOf(report.mismatch, { limit: report.mismatch_limit }),
  "injected fault": () => report.advice.length && el("ul", { class: "notes" }, report.advice.map((text) => el("li", {}, text))),
  cost: () => report.memory && memoryBars(report.memory),
};
const NAMES = ["metric", "guard", "tensor", "fault", "quantity"];

// Rows whose values stand in the columns: parts of some evidence are rows or values of their own.
function rowsOf(kind) {
  const rows = evidenceOf(kind);
  if (kind === "divergence") return rows.map((row) => ({ ...row, ulp_ratio: row.ulp?.ratio, ulp_ci95: row.ulp?.ci95 }));
  if (kind === "cost") return rows.map((row) => ({ ...row, baseline: amount(row, row.baseline), treatment: amount(row, row.treatment) }));
  if (kind !== "trace") return rows;
  return rows.flatMap((row) =>
    row.tensors.map((tensor) => ({
      ...tensor,
      share: typeof tensor.ratio === "number" ? tensor.ratio / row.limit : tensor.ratio,
      finding: tensor.name === row.first ? "first" : tensor.ratio === "Infinity" || tensor.ratio > row.limit ? "differs" : "",
    })),
  );
}

function amount({ quantity }, value) {
  if (!quantity.startsWith("peak memory")) return `${number(value, 3)} s`;
  return value >= 2 ** 28 ? `${number(value / 2 ** 30, 3)} GiB` : `${number(value / 2 ** 20, 3)} MiB`;
}

// A kind that has no entry is shown with all its values.
function evidenceSections(leads) {
  const others = [...new Set(content.evidence.map((item) => item.kind))].filter((kind) => !(kind in KINDS));
  const known = Object.keys(KINDS).filter((kind) => Boolean(KINDS[kind].leads) === leads);
  return [...known, ...(leads ? [] : others)].map(evidenceSection);
}

function evidenceSection(kind) {
  const told = KINDS[kind] || { title: kind, intro: "" };
  const tables = (report.tables[kind] || []).map(({ columns, rows }) => [columns, rows]);
  const rows = rowsOf(kind);
  if (rows.length && !tables.length && !told.leads) {
    const values = told.values || Object.fromEntries(Object.keys(content.evidence.find((item) => item.kind === kind).values).map((name) => [name, name]));
    const heads = Object.keys(values).map((head) => ({ BASELINE: baselineName(), TREATMENT: treatmentName() })[head] || head);
    const cells = (row) => Object.values(values).map((name) => row[name]);
    tables.push([[...(several ? ["arm"] : []), ...heads], rows.map((row) => [...armCell(row), ...cells(row)])]);
  }
  const extra = EXTRAS[kind]?.();
  if (!tables.length && !extra) return null;
  return section(
    kind.replaceAll(" ", "-"),
    told.title,
    el("p", { class: "intro" }, told.intro),
    ...tables.map(([heads, cells]) => evidenceTable(told.title, heads, cells)),
    extra || null,
  );
}

function evidenceTable(title, heads, rows) {
  const isNumeric = (value) => typeof value !== "string" || /^[-+\u00b1[\d]|^$/.test(value);
  const shown = (value, at) => {
    if (NAMES.includes(heads[at]) && typeof value === "string") return named(value, at ? "span" : "b");
    if (heads[at] === "result") return chip(value);
    if (Array.isArray(value)) return interval(value);
    return typeof value === "string" ? value.replace(/(^|[[( ])-(?=\d)/g, `$1${MINUS}`) : number(value);
  };
  const columns = heads.map((head, at) => [head, rows.every((row) => isNumeric(row[at])) ? "right" : ""]);
  return table(title, columns, rows.map((row) => row.map(shown)));
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
