// The evidence besides the claims, in tables: guards, step one, divergence, injected faults, time and memory.
"use strict";

function guardsSection() {
  const list = evidenceOf("guard");
  const isChecked = (guard) => guard.result !== "not recorded";
  const checked = list.filter(isChecked);
  if (!checked.length && !report.mismatch) return null;
  const nameOf = (guard) => guard.guard.replaceAll("_", " ");
  const missing = [...new Set(list.filter((guard) => !isChecked(guard)).map(nameOf))];
  return section(
    "guards",
    "Guards",
    el("p", { class: "intro" }, "One-sided limits that the treatment must meet at every step."),
    checked.length
      ? table(
          "Guards",
          withArm([["guard"], ["result"], ["value", "right"], ["limit", "right"], ["finding"]]),
          checked.map((guard) => [
            ...armCell(guard),
            el("span", { class: "name" }, nameOf(guard)),
            chip(guard.result),
            number(guard.value),
            number(guard.limit),
            guard.reason,
          ]),
        )
      : null,
    missing.length ? el("p", { class: "caption" }, `Not checked, because the runs did not record it: ${missing.join(", ")}.`) : null,
    report.mismatch ? figureOf(report.mismatch, { limit: report.mismatch_limit }) : null,
  );
}

function stepOneSection() {
  const list = evidenceOf("step one");
  if (!list.length) return null;
  const meter = (check) => {
    const share =
      typeof check.deviation === "number" && check.tolerance ? check.deviation / check.tolerance : Infinity;
    const bar = el(
      "span",
      { class: `meter ${check.result === "pass" ? "" : "over"}`, "aria-hidden": "true" },
      el("i", {}),
    );
    bar.firstChild.style.width = `${Math.min(100, 100 * share)}%`;
    return [
      bar,
      muted(
        share === Infinity
          ? "not finite"
          : `${share < 0.01 && share > 0 ? "below 1" : number(100 * share, 2)}\u00a0%`,
      ),
    ];
  };
  return section(
    "step-one",
    "Step one",
    el(
      "p",
      { class: "intro" },
      "Before the first update can show an effect of the treatment, the arms must agree up to rounding. Each row is the pair " +
        "with the largest deviation. The deviation is relative to the scale given below it: the metric's size, or the size of " +
        "the terms that cancel in it.",
    ),
    table(
          "Step one",
          withArm([
            ["metric"],
            ["result"],
            [baselineName(), "right"],
            [treatmentName(), "right"],
            ["relative deviation", "right"],
            ["tolerance"],
            ["share of tolerance"],
            ["A/A deviation", "right"],
            ["seed", "right"],
          ]),
          list.map((check) => [
            ...armCell(check),
            named(check.metric),
            chip({ pass: "agrees", fail: "deviates" }[check.result] || check.result),
            number(check.baseline, 6),
            number(check.treatment, 6),
            [number(check.deviation, 2), muted(`relative to ${check.scale_from} (${number(check.scale, 3)})`)],
            [number(check.tolerance, 2), muted(check.tolerance_from)],
            meter(check),
            number(check.aa_deviation, 2),
            String(check.seed),
          ]),
    ),
  );
}

function finalWeightsSection() {
  const list = evidenceOf("final weights");
  if (!list.length) return null;
  return section(
    "final-weights",
    "Final weights",
    el(
      "p",
      { class: "intro" },
      "Bitwise equality of the trained weights, by a hash of all of them; if they differ, their distance relative to the norm of the baseline's weights, estimated within 8 % from sketches. A diagnostic: it does not affect the verdict unless a claim limits the distance. Reinforcement learning amplifies rounding, so large distances are expected even if the arms are equivalent.",
    ),
    table(
      "Final weights",
      withArm([
        ["bit-identical pairs"],
        ["relative distance", "right"],
        ["A/A", "right"],
        ["seed", "right"],
      ]),
      list.map((row) => [
        ...armCell(row),
        `${row.num_equal} of ${row.num_pairs}`,
        number(row.relative_difference, 2),
        number(row.aa_relative_difference, 2),
        row.seed === null ? "" : String(row.seed),
      ]),
    ),
  );
}

function traceSection() {
  const [trace] = evidenceOf("trace");
  if (!trace) return null;
  return section(
    "trace",
    "Trace",
    el("p", { class: "intro" }, `${trace.reason}. A diagnostic: it does not affect the verdict.`),
    table(
      trace.first ? "Tensors around the first difference, in the order of execution" : "Tensors with the largest errors",
      [["tensor"], ["relative error", "right"], ["ULPs", "right"], ["share of limit", "right"], ["finding"]],
      trace.tensors.map((tensor) => [
        named(tensor.name),
        number(tensor.relative_error, 2),
        number(tensor.ulps, 2),
        number(typeof tensor.ratio === "number" ? tensor.ratio / trace.limit : tensor.ratio, 2),
        tensor.name === trace.first ? "first" : tensor.ratio === "Infinity" || tensor.ratio > trace.limit ? "differs" : "",
      ]),
    ),
    el(
      "p",
      { class: "caption" },
      `Arm ${trace.arm}. The limit comes from repeats of the baseline's step perturbed by one ULP; arms that agree exceed it with a probability of at most ${number(100 * trace.level, 2)}\u00a0%.`,
    ),
  );
}

function divergenceSection() {
  const list = evidenceOf("divergence");
  if (!list.length) return null;
  const firstDifferentStep = (row) =>
    row.noise_floor !== "zero" ? "" : row.first_step_apart === null ? "never" : String(row.first_step_apart);
  const ulpRatioText = ({ ulp }) =>
    ulp === null ? "" : ulp.ratio === null ? "no ratio" : `${number(ulp.ratio, 2)}\u00d7 ${ulp.ci95 ? interval(ulp.ci95) : ""}`;
  const isKnown = list.some((row) => row.noise_floor !== "unknown");
  const hasUlp = list.some((row) => row.ulp !== null);
  const compared = [
    isKnown ? "with the distance of baseline reruns of the same seed (the A/A noise floor)" : "",
    hasUlp ? "with the divergence caused by one ULP in the initial weights" : "",
    "with the baseline's sd over seeds",
  ];
  return section(
    "divergence",
    "Divergence",
    el(
      "p",
      { class: "intro" },
      `The distance of the arms, averaged over steps, compared ${compared.filter(Boolean).join(", and ")}. A diagnostic: it does not affect the verdict.`,
      isKnown ? "" : ` The noise floor is unknown, because there are no A/A reruns${recipeKey("controls.aa_reruns")}.`,
      list.some((row) => row.noise_floor === "zero") ? " There is no ratio to A/A where baseline reruns are bit-identical." : "",
    ),
    table(
      "Divergence",
      withArm([
        ["metric"],
        ["mean |difference|", "right"],
        ["A/A mean |difference|", "right"],
        ["ratio to A/A", "right"],
        ["ratio to one ULP", "right nowrap"],
        ["ratio to sd over seeds", "right"],
        ["first step that differs in any bit", "right"],
      ]),
      list.map((row) => [
        ...armCell(row),
        named(row.metric),
        number(row.mean_difference, 3),
        number(row.aa_mean_difference, 3),
        row.noise_floor === "measured" ? `${number(row.ratio, 2)}\u00d7` : "",
        ulpRatioText(row),
        row.share_of_seed_spread === null ? "" : number(row.share_of_seed_spread, 2),
        firstDifferentStep(row),
      ]),
    ),
  );
}

function sensitivitySection() {
  const faults = evidenceOf("injected fault");
  if (!faults.length) return null;
  const judged = faults.filter((fault) => fault.result !== "INVALID");
  const numCaught = judged.filter((fault) => fault.caught_by !== "nothing").length;
  const numPairs = Math.max(...faults.map((fault) => fault.num_pairs));
  const seen = (fault) =>
    fault.caught_by === "nothing"
      ? fault.result === "INVALID" ? "not judged" : "nothing"
      : [fault.caught_by, fault.metric].filter(Boolean).join(": ");
  return section(
    "sensitivity",
    "What this comparison would have caught",
    el(
      "p",
      { class: "intro" },
      "Faults injected into the baseline, each judged like a treatment: " +
        (judged.length
          ? `${numCaught} of ${judged.length} were caught, by ${numPairs} ${content.paired === false ? "runs of each arm" : "pairs"} of ${faults[0].num_steps} steps. A fault with the verdict MATCH or PASS would have passed; with INCONCLUSIVE it was left open.`
          : "none could be judged."),
    ),
    table(
      "Injected faults",
      [["fault"], ["size", "right"], ["verdict"], ["caught by"], ["step", "right"], ["figures"], ["pairs", "right"]],
      faults.map((fault) => [
        named(fault.fault),
        fault.size === null ? "-" : `${number(fault.size, 3)} ${fault.unit}`,
        fault.result,
        seen(fault),
        fault.step === null ? "-" : String(fault.step),
        fault.figures || "-",
        String(fault.num_pairs),
      ]),
    ),
    ...faults
      .filter((fault) => fault.advice)
      .map((fault) => el("p", {}, el("b", {}, fault.fault), ` could be seen by ${fault.advice}`)),
  );
}

function costSection() {
  const list = evidenceOf("cost");
  if (!list.length && !report.memory) return null;
  const bytes = (value) =>
    value >= 2 ** 28 ? `${number(value / 2 ** 30, 3)} GiB` : `${number(value / 2 ** 20, 3)} MiB`;
  const shown = (saving, value) =>
    saving.quantity.startsWith("peak memory") ? bytes(value) : `${number(value, 3)} s`;
  return section(
    "cost",
    "Time and memory",
    list.length || report.memory
      ? el(
          "p",
          { class: "intro" },
          `Cost of ${treatmentName()} relative to ${baselineName()}: ${content.paired === false ? "ratio of geometric means" : "geometric mean of paired ratios"}. Not a test of equivalence.`,
        )
      : null,
    list.length
      ? table(
          "Time and memory",
          withArm([
            ["quantity"],
            [baselineName(), "right"],
            [treatmentName(), "right"],
            ["ratio", "right"],
            ["95\u00a0% CI", "right"],
            [content.paired === false ? "runs" : "pairs", "right"],
          ]),
          list.map((saving) => [
            ...armCell(saving),
            saving.quantity,
            shown(saving, saving.baseline),
            shown(saving, saving.treatment),
            el("b", {}, number(saving.ratio, 3)),
            interval(saving.ci95),
            saving.num_runs ? bothSizes(saving.num_runs) : String(saving.num_pairs),
          ]),
        )
      : null,
    report.memory ? memoryBars(report.memory) : null,
  );
}

// Kinds of evidence that have no section of their own: all their values.
const SECTIONS = ["seed noise", "new run", "description", "injected fault", "guard", "step one", "divergence", "trace", "final weights", "cost"];

function otherSections() {
  const others = [...new Set(content.evidence.map((item) => item.kind))].filter((kind) => !SECTIONS.includes(kind));
  return others.map((kind) => {
    const list = content.evidence.filter((item) => item.kind === kind);
    const names = Object.keys(list[0].values);
    const shown = (value) => (typeof value === "string" ? value : Array.isArray(value) ? interval(value) : number(value));
    return section(
      kind.replaceAll(" ", "-"),
      kind,
      table(
        kind,
        [["arm"], ["result"], ...names.map((name) => [name.replaceAll("_", " ")]), ["finding"]],
        list.map((item) => [item.arm, item.result, ...names.map((name) => shown(item.values[name])), item.reason || ""]),
      ),
    );
  });
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
