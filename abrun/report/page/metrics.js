// The table of metrics without a claim: levels, differences and small curves; a row unfolds to its chart.
"use strict";

const SMALL = { width: 120, height: 26 };

function smallCurves(row) {
  const { width, height } = SMALL;
  const y = (value) => (height - 2 - ((height - 4) * value) / 100).toFixed(1);
  const lines = row.curves.map(({ arm, points }) => {
    const x = (at) => (points.length > 1 ? (width * at) / (points.length - 1) : width / 2).toFixed(1);
    let isDown = false;
    const path = points.map((value, at) => {
      const command = value === null ? "" : `${isDown ? "L" : "M"}${x(at)} ${y(value)}${isDown ? "" : "h0.1"}`;
      isDown = value !== null;
      return command;
    });
    return svg("path", { class: `arm-${arm % 6}${arm ? " later" : ""}`, d: path.join("") });
  });
  return svg("svg", { class: "small", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, ...lines);
}

const scoreText = ({ difference, score, varies }) => {
  if (typeof difference !== "number") return "\u2013";
  return varies ? number(score, 2) : difference === 0 ? "0" : "no spread";
};

function seedsText({ difference, seeds }) {
  if (!seeds) return null;
  return muted(`${difference < 0 ? "lower" : "higher"} in ${seeds[0]} of ${seeds[1]} seeds`);
}

function metricsSection() {
  const rows = report.metric_rows.filter((row) => row.metric >= report.num_claimed);
  if (!rows.length) return null;
  const cell = (label, ...parts) => el("span", { class: "cell", "data-label": label }, ...parts);
  const change = (comparison) => (comparison ? signed(comparison.difference, 3) : "");
  const shares = (comparison) => muted(`${change(comparison)}, ${scoreText(comparison)}${comparison.varies ? " sd" : ""}`);
  const cells = (row) => {
    const comparisons = treatments.map((_, at) => row.arms.find(({ arm }) => arm === at + 1));
    const levels = comparisons.map((comparison, at) =>
      cell(treatments[at], number(comparison?.level), several && comparison ? shares(comparison) : null),
    );
    const [only] = comparisons;
    const single = [cell("difference", change(only), only ? seedsText(only) : null), cell("/ sd", only ? scoreText(only) : "")];
    return [cell(baselineName(), number(row.baseline)), ...levels, ...(several ? [] : single)];
  };
  const titles = [baselineName(), ...treatments, ...(several ? [] : ["difference", "difference / sd"])];
  const columns = `minmax(170px, 2fr) ${SMALL.width}px repeat(${titles.length}, minmax(76px, 1fr))`;
  const inColumns = (element) => {
    element.style.gridTemplateColumns = columns;
    return element;
  };
  const items = rows.map((row) => {
    const name = report.metrics[row.metric];
    const unit = row.unit ? muted(row.unit) : null;
    const summary = el("summary", {}, el("span", { class: "cell title" }, named(name), unit), smallCurves(row), cells(row));
    const item = el("details", { class: "metric" }, inColumns(summary));
    item.metric = name.toLowerCase();
    item.addEventListener("toggle", () => {
      if (item.open && !item.querySelector(".figure")) item.append(new Figure(row.metric, { titled: false }).element);
    });
    return item;
  });
  const status = el("span", { class: "muted", role: "status" }, count(items.length, "metric"));
  const filter = el("input", {
    type: "search",
    placeholder: "Filter, e.g. entropy",
    "aria-label": "Filter metrics by name",
    on: {
      input: () => {
        const wanted = filter.value.trim().toLowerCase();
        for (const item of items) item.hidden = !item.metric.includes(wanted);
        const shown = items.filter((item) => !item.hidden).length;
        status.textContent = wanted ? `${shown} of ${count(items.length, "metric")}` : count(items.length, "metric");
      },
    },
  });
  const open = (wanted) => () => {
    for (const item of items) if (!item.hidden) item.open = wanted;
  };
  const heads = el(
    "div",
    { class: "metric-heads", "aria-hidden": "true" },
    ["metric", "curve", ...titles].map((title) => el("span", {}, title)),
  );
  return section(
    "metrics",
    report.num_claimed ? "All other metrics" : "All metrics",
    el(
      "p",
      { class: "intro" },
      "Recorded, but no claim is about them, so nothing is tested. Levels are means over the last 20\u00a0% of the steps. Sorted by the difference divided by the sd over seeds (of the arm that varies more). Select a row for its chart.",
    ),
    el(
      "div",
      { class: "tools" },
      filter,
      status,
      el("span", { class: "actions" }, button("Open all", open(true)), button("Close all", open(false))),
    ),
    inColumns(heads),
    ...items,
    report.left_out.count ? el("p", { class: "muted" }, leftOut(report.left_out)) : null,
  );
}

function leftOut({ count: num, names }) {
  const more = num > names.length ? `, and ${grouped(num - names.length)} more` : "";
  return `Left out to keep this page small: the curves of ${names.join(", ")}${more}. They are in the logs of the runs; a claim on a metric (--claim) draws it here.`;
}
