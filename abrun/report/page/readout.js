// The box beside the pointer in a chart: the numbers at one step, or of one bucket.
"use strict";

function hover(plot, tip, readout) {
  const { idx, left } = plot.cursor;
  tip.hidden = idx === null || idx === undefined || left < 0;
  if (tip.hidden) return;
  tip.replaceChildren(...readout(idx));
  const room = plot.over.clientWidth;
  const right = left > room / 2;
  tip.style.left = right ? "auto" : `${left + 14}px`;
  tip.style.right = right ? `${room - left + 14}px` : "auto";
  tip.style.maxWidth = `${Math.max(130, Math.max(left, room - left) - 20)}px`;
}

function stepLabel({ data }, at) {
  return data.num_buckets ? stepsText(data.ends[Math.floor(at / 2)]) : `step ${grouped(data.steps[at])}`;
}

// The value at one step, or the range over the two positions of a bucket.
function valueAt({ data }, row, at, show = number) {
  const values = data.num_buckets ? data.rows[row].slice(at - (at % 2), at - (at % 2) + 2) : [data.rows[row][at]];
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return values.some((value) => value === null) ? "NaN" : "\u2013";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? show(low) : `${show(low)} to ${show(high)}`;
}

const seedValues = (figure, lines, at, show) =>
  el("div", { class: "tip-seeds" }, lines.map((seed) => el("span", {}, muted(`${seed.seed}: `), valueAt(figure, seed.row, at, show))));

function curveReadout(figure, at) {
  const shown = figure.data.arms.filter((one) => figure.shows(one.arm));
  const lines = shown.flatMap((one) => [
    el(
      "div",
      { class: "tip-arm" },
      swatch(one.arm),
      arms[one.arm],
      el("b", {}, one.mean === null ? "" : ` ${valueAt(figure, one.mean, at)}`),
    ),
    seedValues(figure, one.seeds, at),
  ]);
  return [el("b", {}, stepLabel(figure, at)), ...lines];
}

function differenceReadout(figure, panel, at) {
  const show = (value) => signed(value, 3);
  const lines = [el("b", {}, stepLabel(figure, at))];
  if (panel.mean !== null)
    lines.push(el("div", { class: "tip-arm" }, "mean", el("b", {}, ` ${valueAt(figure, panel.mean, at, show)}`)));
  lines.push(seedValues(figure, panel.pairs, at, show));
  const step = figure.data.steps[at];
  const window = panel.windows.find((one) => one.steps[0] <= step && step <= one.steps[1]);
  if (window && window.interval)
    lines.push(el("div", { class: "muted" }, `window ${stepsText(window.steps)}: ${interval(window.interval)}`));
  return lines;
}
