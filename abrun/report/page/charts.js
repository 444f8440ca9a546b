// A chart with its differences: parsed and drawn when scrolled into view, redrawn on changes of scale or theme.
"use strict";

const hidden = new Set(); // arms that are switched off everywhere
const figures = new Set();
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3], [5, 3], [14, 4]];
const PRINT_WIDTH = 680;
let printing = false;

const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) entry.target.figure.draw();
  },
  { rootMargin: "400px 0px" },
);
const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) if (!printing) entry.target.figure.fit();
});

function figureOf(metric, options) {
  return new Figure(report.metrics.indexOf(metric), options).element;
}

class Figure {
  constructor(index, { limit = null, titled = true } = {}) {
    this.index = index;
    this.metric = report.metrics[index];
    this.limit = limit;
    this.hidden = new Set();
    this.plots = [];
    this.log = false;
    this.smooth = false;
    this.data = null;
    this.element = el(
      "article",
      { class: "figure", "aria-label": this.metric },
      titled ? el("h3", {}, this.metric) : null,
      el("div", { class: "plot curve" }),
    );
    this.element.figure = this;
    figures.add(this);
    watcher.observe(this.element);
  }

  /** Parses the data and builds the controls, once. */
  prepare() {
    if (this.data) return;
    this.data = read(`chart-${this.index}`);
    this.seeds = !this.data.num_buckets; // of many steps they hide the means
    for (const [row, gaps] of Object.entries(this.data.gaps)) {
      const missing = new Set(gaps);
      this.data.rows[row] = this.data.rows[row].map((value, at) =>
        value === null && !missing.has(at) ? undefined : value,
      );
    }
    this.data.rows = this.data.rows.map((row, at) =>
      String(at) in this.data.gaps ? row : row.map((value) => value ?? undefined),
    );
    const { data } = this;
    this.armButtons = new Map(
      data.arms.map((one) => [
        one.arm,
        button([swatch(one.arm), arms[one.arm], muted(this.ofMean(one))], () => this.toggle(one.arm), {
          class: "arm",
        }),
      ]),
    );
    this.positive = data.rows.some((row, at) => this.curveRows().has(at) && row.some((value) => value > 0));
    const flip = (owner, name) => () => {
      owner[name] = !owner[name];
      this.redraw();
    };
    const toggle = (name, label, disabled = false) =>
      button(label, flip(this, name), { "aria-pressed": String(this[name]), disabled });
    this.toggles = {
      seeds: toggle("seeds", "Seeds"),
      smooth: toggle("smooth", "Smooth"),
      log: toggle("log", "Log scale", !this.positive),
    };
    const tools = el(
      "div",
      { class: "tools" },
      [...this.armButtons.values()],
      el(
        "span",
        { class: "actions" },
        ...Object.values(this.toggles),
        button("Reset zoom", () => this.reset()),
        button("CSV", () => this.save(), { "aria-label": `Save the numbers of ${this.metric} as CSV` }),
      ),
    );
    this.box = this.element.querySelector(".plot");
    this.box.before(tools);
    const after = [el("p", { class: "caption" }, this.keys())];
    this.panels = data.differences.map((panel) => this.panel(panel, flip));
    after.push(...this.panels.map((panel) => panel.element));
    if (data.num_buckets) {
      const size = `${grouped(data.num_steps)} steps drawn in ${data.num_buckets} buckets`;
      after.push(el("p", { class: "resolution" }, `${size}: means as bucket means, seeds and pairs as smallest and largest value.`));
    }
    if (data.notes.length) after.push(el("ul", { class: "notes" }, data.notes.map((note) => el("li", {}, note))));
    this.box.after(...after);
  }

  curveRows() {
    return new Set(
      this.data.arms.flatMap((one) => [one.mean, ...(one.band || []), ...one.seeds.map((seed) => seed.row)]),
    );
  }

  ofMean(one) {
    return one.mean === null ? " no mean" : ` mean of ${count(one.count, "seed")}`;
  }

  keys() {
    const banded = this.data.arms.some((one) => one.band);
    return [
      key("bold", "bold: arm mean"),
      key("thin", `thin: one seed${this.data.num_buckets ? ", once switched on" : ""}`),
      banded ? key("band", "band: \u00b11 sd over seeds") : null,
      this.data.windows.length ? key("window", "window of a claim") : null,
      this.limit !== null ? key("limit", `guard: median below ${number(this.limit)}`) : null,
    ];
  }

  panel(panel, flip) {
    const claims = (content.claims || []).filter(
      (one) =>
        one.metric === this.metric &&
        arms.indexOf(one.arm) === panel.arm &&
        (one.transform || panel.transform) === panel.transform,
    );
    const made = { ...panel, claims, full: false };
    made.box = el("div", { class: "plot difference" });
    made.fullButton = button("Full range", flip(made, "full"), { "aria-pressed": "false" });
    made.cut = el("span", { class: "muted" });
    const title = [
      `${arms[panel.arm]} ${MINUS} ${baselineName()}`,
      muted(` ${sampleOf(panel)}${panel.unit ? `, ${panel.unit}` : ""}`),
    ];
    const margin = claims.find((one) => typeof one.margin === "number");
    const level = [...new Set(claims.map((one) => confidence(one.interval ? one.alpha : 0.05)))].join(", ");
    made.element = el(
      "div",
      { class: "panel" },
      el("div", { class: "tools" }, el("h4", {}, title), el("span", { class: "actions" }, made.fullButton)),
      made.box,
      el(
        "p",
        { class: "caption" },
        key("bold", panel.num_runs ? "bold: difference of the means" : "bold: mean of pairs"),
        panel.num_runs
          ? null
          : key("thin", `thin: one pair${this.data.num_buckets ? " (switch on Seeds)" : ""}`),
        panel.reruns.length ? key("rerun", `A/A: rerun ${MINUS} its baseline run`) : null,
        margin ? key("margin", `margin ${marginText(margin)}`) : null,
        claims.some((one) => one.interval || one.ci90)
          ? key("claim", `claim: mean and ${level} CI`)
          : null,
        panel.windows.some((one) => one.interval)
          ? key("bars", `grey: simultaneous 95\u00a0% over ${panel.windows.length} windows, not tested`)
          : null,
        made.cut,
      ),
    );
    return made;
  }

  draw() {
    watcher.unobserve(this.element);
    this.prepare();
    if (this.plots.length || !this.box.clientWidth)
      return this.box.clientWidth ? undefined : watcher.observe(this.element);
    this.plots = [this.curve(), ...this.panels.map((panel) => this.difference(panel))].filter(Boolean);
    this.apply();
    for (const plot of this.plots) {
      plot.root.parentNode.figure = this;
      sizes.observe(plot.root.parentNode);
    }
  }

  /** Returns the row of a mean, smoothed by a running mean over a twentieth of its values if switched on. */
  drawn(row) {
    const values = this.data.rows[row];
    return this.smooth ? runningMean(values) : values;
  }

  /** Saves the numbers of the chart: a line per step, or two per bucket. */
  save() {
    const { data } = this;
    const columns = [["step", data.steps]];
    if (data.num_buckets) columns.push(["steps", data.steps.map((_, at) => data.ends[Math.floor(at / 2)].join("-"))]);
    const add = (name, row) => row !== null && columns.push([name, data.rows[row]]);
    for (const one of data.arms) {
      add(`${arms[one.arm]} mean`, one.mean);
      (one.band || []).forEach((row, end) => add(`${arms[one.arm]} mean ${end ? "+" : "-"} 1 sd`, row));
      for (const seed of one.seeds) add(`${arms[one.arm]} seed ${seed.seed}`, seed.row);
    }
    for (const one of data.differences) {
      const name = `${arms[one.arm]} - ${baselineName()}${one.unit ? ` (${one.unit})` : ""}`;
      add(`${name} mean`, one.mean);
      for (const pair of one.pairs) add(`${name} seed ${pair.seed}`, pair.row);
    }
    saveCsv(`${content.experiment} ${this.metric}`, columns);
  }

  erase() {
    for (const plot of this.plots) {
      sizes.unobserve(plot.root.parentNode);
      plot.destroy();
    }
    this.plots = [];
    for (const box of this.element.querySelectorAll(".plot")) box.replaceChildren();
  }

  redraw() {
    if (!this.data) return;
    const zoom = this.plots.length ? this.zoomed() : null;
    this.erase();
    for (const [name, one] of Object.entries(this.toggles)) one.setAttribute("aria-pressed", String(this[name]));
    for (const panel of this.panels) panel.fullButton.setAttribute("aria-pressed", String(panel.full));
    this.draw();
    if (zoom) for (const plot of this.plots) plot.setScale("x", zoom);
  }

  /** Returns the range of steps shown, or null if all are. */
  zoomed() {
    const { min, max } = this.plots[0].scales.x;
    const { steps } = this.data;
    return min > steps[0] || max < steps[steps.length - 1] ? { min, max } : null;
  }

  reset() {
    const { steps } = this.data;
    for (const plot of this.plots) plot.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
  }

  fit() {
    for (const plot of this.plots) {
      const width = plot.root.parentNode.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  }

  shows(arm) {
    return !hidden.has(arm) && !this.hidden.has(arm);
  }

  toggle(arm) {
    if (this.hidden.has(arm) || hidden.has(arm)) {
      this.hidden.delete(arm);
      if (hidden.has(arm)) toggleEverywhere(arm);
    } else this.hidden.add(arm);
    this.apply();
  }

  apply() {
    if (!this.data) return;
    for (const [arm, one] of this.armButtons) one.setAttribute("aria-pressed", String(this.shows(arm)));
    for (const plot of this.plots)
      plot.batch(() =>
        plot.series.forEach((series, at) => {
          if (at && series.arm !== undefined && series.show !== this.shows(series.arm))
            plot.setSeries(at, { show: this.shows(series.arm) });
        }),
      );
    for (const panel of this.panels) panel.element.hidden = !this.shows(panel.arm);
    this.fit();
  }

  curve() {
    const { data } = this;
    const values = [data.steps];
    const series = [{}];
    const bands = [];
    const color = (arm) => variable(`--arm-${arm % 6}`);
    const add = (arm, row, look, floor) => {
      values.push(
        this.log
          ? row.map((value) =>
              value > 0 || value === undefined ? value : value === null ? null : (floor ?? null),
            )
          : row,
      );
      return (
        series.push({
          arm,
          spanGaps: false,
          points: isolated(values[values.length - 1], look.stroke),
          ...look,
        }) - 1
      );
    };
    for (const one of data.arms) {
      if (!one.band) continue;
      const edge = { stroke: `${color(one.arm)}66`, width: 0.5, points: { show: false } };
      const smallest = this.log ? smallestPositive(one.seeds.map((seed) => data.rows[seed.row])) : undefined;
      const [low, high] = one.band.map((row) => add(one.arm, this.drawn(row), edge, smallest));
      bands.push({ series: [high, low], fill: `${color(one.arm)}1f` });
    }
    for (const one of data.arms)
      for (const seed of this.seeds || one.mean === null ? one.seeds : [])
        add(one.arm, data.rows[seed.row], {
          stroke: `${color(one.arm)}${data.num_buckets ? "38" : "60"}`,
          width: 0.8,
          dash: seed.finished ? [] : [1, 3],
        });
    for (const one of data.arms)
      if (one.mean !== null)
        add(one.arm, this.drawn(one.mean), { stroke: color(one.arm), width: 2.2, dash: DASHES[one.arm % 6] });
    if (!values.slice(1).some((row) => row.some((value) => typeof value === "number"))) {
      this.box.append(el("p", { class: "nothing" }, "No finite value to draw."));
      return null;
    }
    const y = this.log
      ? { distr: 3 }
      : this.limit === null
        ? {}
        : {
            range: (plot, low, high) =>
              uPlot.rangeNum(Math.min(low, this.limit), Math.max(high, this.limit), 0.08, true),
          };
    const label = `${this.metric} over optimizer steps${data.unit ? `, in ${data.unit}` : ""}: ${data.arms.map((one) => `${arms[one.arm]}, ${this.ofMean(one).trim()}`).join("; ")}`;
    return this.plot(this.box, values, series, {
      label,
      bands,
      y,
      height: 310,
      unit: data.unit,
      under: (plot) =>
        data.windows.forEach(([first, last]) => zone(plot, first, last, [null, null], variable("--window"))),
      over: (plot) => {
        if (this.limit !== null) line(plot, this.limit, variable("--ink"), [2, 3]);
      },
      readout: (at) => curveReadout(this, at),
    });
  }

  difference(panel) {
    const { data } = this;
    const base = variable(`--arm-${panel.arm % 6}`);
    const values = [data.steps];
    const series = [{}];
    const add = (row, look) => {
      values.push(row);
      series.push({ points: isolated(row, look.stroke), ...look });
    };
    for (const one of this.seeds ? panel.reruns : [])
      add(data.rows[one.row], { stroke: `${variable("--muted")}70`, width: 0.8, dash: [3, 3] });
    for (const one of this.seeds || panel.mean === null ? panel.pairs : [])
      add(data.rows[one.row], { stroke: `${base}${data.num_buckets ? "1c" : "40"}`, width: 0.8 });
    if (panel.mean !== null)
      add(this.drawn(panel.mean), { stroke: `${base}b0`, width: 1.5 });
    if (!values.slice(1).some((row) => row.some((value) => typeof value === "number"))) {
      panel.box.append(el("p", { class: "nothing" }, "No finite difference to draw."));
      return null;
    }
    const focus = focusOf(panel, panel.mean === null ? [] : this.drawn(panel.mean));
    const all = rangeOf(values.slice(1).flat());
    const outside =
      all[0] < focus[0] ||
      all[1] > focus[1] ||
      panel.windows.some((one) => one.interval && (one.interval[0] < focus[0] || one.interval[1] > focus[1]));
    panel.fullButton.disabled = !outside;
    panel.cut.textContent = outside && !panel.full ? "Lines or bars are cut off at the edge." : "";
    const everything = padded(
      rangeOf([...all, ...focus, ...panel.windows.flatMap((one) => one.interval || [])]),
      0.04,
    );
    const label = `${arms[panel.arm]} minus ${baselineName()}: ${panel.num_runs ? "" : "paired "}difference of ${this.metric}${panel.unit ? `, ${panel.unit}` : ""}`;
    return this.plot(panel.box, values, series, {
      label,
      height: 230,
      unit: panel.unit,
      y: { range: () => (panel.full ? everything : focus) },
      under: (plot) => {
        for (const { steps, margin, accepted } of panel.claims) {
          if (!steps) continue;
          const isKnown = typeof margin === "number";
          const ends = isKnown ? accepted || [-margin, margin] : [null, null];
          zone(plot, ...steps, ends, variable(isKnown ? "--margin" : "--window"));
        }
        windowBars(plot, panel);
      },
      over: (plot) => overlay(plot, panel),
      readout: (at) => differenceReadout(this, panel, at),
    });
  }

  plot(box, values, series, { label, bands = [], y, height, unit, under, over, readout }) {
    const ink = variable("--muted");
    const axis = {
      stroke: ink,
      font: "12px system-ui, sans-serif",
      grid: { stroke: variable("--grid"), width: 1 },
      ticks: { stroke: variable("--grid"), width: 1, size: 5 },
    };
    const width = printing ? PRINT_WIDTH : box.clientWidth;
    const tip = el("div", { class: "tip", hidden: true });
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", label);
    const made = new uPlot(
      {
        width,
        height,
        series,
        bands,
        padding: [10, 14, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
          y,
        },
        axes: [
          {
            ...axis,
            size: 30,
            label: "optimizer step",
            labelSize: 20,
            labelFont: axis.font,
            incrs: [1, 2, 5]
              .flatMap((one) => [...Array(15).keys()].map((power) => one * 10 ** power))
              .sort((a, b) => a - b),
            values: (plot, ticks) => ticks.map(grouped),
          },
          { ...axis, size: 66, values: (plot, ticks) => tickTexts(ticks) },
        ],
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: true },
          sync: { key: `chart-${this.index}` },
        },
        hooks: {
          drawClear: [under],
          draw: [over],
          setCursor: [(plot) => hover(plot, tip, readout)],
        },
      },
      values,
      box,
    );
    if (unit) box.append(el("span", { class: "unit" }, unit));
    made.over.append(tip);
    return made;
  }
}
