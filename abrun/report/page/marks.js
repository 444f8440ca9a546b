// Marks on a chart's canvas other than its lines, and the ranges of its axes.
"use strict";

// A value between two gaps has no line, so it is drawn as a point.
function isolated(row, stroke) {
  const alone = [];
  let before = null;
  const known = (value) => typeof value === "number";
  const next = (at, step) => {
    let to = at + step;
    while (to >= 0 && to < row.length && row[to] === undefined) to += step;
    return row[to];
  };
  row.forEach((value, at) => {
    if (known(value)) {
      if (!known(before) && !known(next(at, 1))) alone.push(at);
    }
    if (value !== undefined) before = value;
  });
  return { show: alone.length > 0, size: 4, width: 0, fill: stroke, filter: () => alone };
}

function runningMean(row) {
  const known = [...row.keys()].filter((at) => typeof row[at] === "number");
  const reach = Math.max(1, Math.round(known.length / 40));
  const smoothed = [...row];
  known.forEach((at, index) => {
    const near = known.slice(Math.max(0, index - reach), index + reach + 1);
    smoothed[at] = near.reduce((sum, one) => sum + row[one] / near.length, 0);
  });
  return smoothed;
}

function tickTexts(ticks) {
  const shown = ticks.filter((tick) => tick !== null);
  const most = Math.max(...shown.map(Math.abs), 0);
  const gap =
    shown.length > 1 ? Math.min(...shown.slice(1).map((tick, at) => Math.abs(tick - shown[at]))) : most;
  const even = most < 1e5 && gap >= 1e-4;
  const decimals = Math.max(
    0,
    Math.ceil(-Math.log10(gap) - 1e-9) + (String(gap.toPrecision(2)).includes("25") ? 1 : 0),
  );
  return ticks.map((tick) =>
    tick === null
      ? ""
      : even && most / gap < 1e3
        ? tick.toFixed(Math.min(decimals, 6)).replace("-", MINUS)
        : number(tick, 3),
  );
}

function rangeOf(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values)
    if (typeof value === "number") {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  return low > high ? [0, 0] : [low, high];
}

function smallestPositive(rows) {
  let smallest = Infinity;
  for (const row of rows) for (const value of row) if (value > 0 && value < smallest) smallest = value;
  return smallest === Infinity ? null : smallest;
}

const padded = ([low, high], share) => {
  const room = share * (high - low) || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
};

const acceptedEnds = ({ accepted, margin }) =>
  (accepted || [-margin, margin]).filter((end) => typeof end === "number");

// The range that a panel must show: claims, margins, and the mean without its extremes.
function focusOf(panel, mean) {
  const sorted = mean.filter((value) => typeof value === "number").sort((a, b) => a - b);
  const shown = [0, sorted[Math.floor(0.02 * sorted.length)], sorted[Math.floor(0.98 * (sorted.length - 1))]];
  for (const one of panel.claims)
    shown.push(
      ...(typeof one.margin === "number" ? acceptedEnds(one) : []),
      ...(one.interval || one.ci90 || []),
    );
  return padded(rangeOf(shown), 0.12);
}

const inside = (plot, step) => plot.scales.x.min <= step && step <= plot.scales.x.max;

function clipped(plot, room, draw) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - room, bbox.top, bbox.width + 2 * room, bbox.height);
  ctx.clip();
  draw(ctx, uPlot.pxRatio, bbox);
  ctx.restore();
}

// A window of steps, as high as the accepted differences; an end that is null lies at the edge.
function zone(plot, first, last, [low, high], fill) {
  clipped(plot, 0, (ctx, ratio, bbox) => {
    const [left, right] = [first, last].map((step) => plot.valToPos(step, "x", true));
    const top = high === null ? bbox.top : plot.valToPos(high, "y", true);
    const bottom = low === null ? bbox.top + bbox.height : plot.valToPos(low, "y", true);
    ctx.fillStyle = fill;
    ctx.fillRect(left, top, Math.max(right - left, 2 * ratio), bottom - top);
  });
}

function line(plot, value, color, dash, ends = null) {
  clipped(plot, 0, (ctx, ratio, bbox) => {
    const y = plot.valToPos(value, "y", true);
    const [left, right] = ends
      ? ends.map((step) => plot.valToPos(step, "x", true))
      : [bbox.left, bbox.left + bbox.width];
    ctx.strokeStyle = color;
    ctx.lineWidth = ratio;
    ctx.setLineDash(dash.map((one) => one * ratio));
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(right, y);
    ctx.stroke();
  });
}

// The simultaneous intervals of the windows: behind the lines, because nothing is tested by them.
function windowBars(plot, panel) {
  clipped(plot, 0, (ctx, ratio) => {
    for (const { steps, interval: ends } of panel.windows) {
      const step = (steps[0] + steps[1]) / 2;
      if (ends && inside(plot, step)) errorBar(plot, ctx, ratio, plot.valToPos(step, "x", true), ends, variable("--bars"), 1, 3);
    }
  });
}

function overlay(plot, panel) {
  line(plot, 0, variable("--axis"), []);
  for (const one of panel.claims) {
    if (!one.steps || typeof one.margin !== "number") continue;
    for (const edge of acceptedEnds(one))
      line(plot, edge, variable("--margin-edge"), [4, 3], one.steps);
  }
  clipped(plot, 7 * uPlot.pxRatio, (ctx, ratio) => {
    for (const one of panel.claims) {
      const ends = one.interval || one.ci90;
      if (!ends || !one.steps) continue;
      const last = Math.min(one.steps[1], plot.data[0][plot.data[0].length - 1]); // the metric may end earlier
      if (!inside(plot, last)) continue;
      const x = plot.valToPos(last, "x", true);
      const y = plot.valToPos(one.mean_difference, "y", true);
      errorBar(plot, ctx, ratio, x, ends, variable("--ink"), 2.2, 5);
      ctx.fillStyle = variable("--ink");
      ctx.beginPath();
      ctx.moveTo(x, y - 5 * ratio);
      ctx.lineTo(x + 5 * ratio, y);
      ctx.lineTo(x, y + 5 * ratio);
      ctx.lineTo(x - 5 * ratio, y);
      ctx.fill();
    }
  });
}

// An edge in the page's colour sets marks off from the lines behind them.
function errorBar(plot, ctx, ratio, x, [low, high], color, width, cap) {
  const [bottom, top] = [plot.valToPos(low, "y", true), plot.valToPos(high, "y", true)];
  ctx.setLineDash([]);
  for (const [style, extra] of [
    [variable("--page"), 2.5],
    [color, 0],
  ]) {
    ctx.strokeStyle = style;
    ctx.lineWidth = (width + extra) * ratio;
    ctx.beginPath();
    ctx.moveTo(x, bottom);
    ctx.lineTo(x, top);
    for (const y of [bottom, top]) {
      ctx.moveTo(x - cap * ratio, y);
      ctx.lineTo(x + cap * ratio, y);
    }
    ctx.stroke();
  }
}
