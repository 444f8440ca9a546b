// The claims and their curves, or the description of arms without a claim.
"use strict";

const distances = (row) => [number(row.mean_distance, 3), number(row.largest_distance, 3), String(row.largest_at)];

function takesText(row, counted) {
  if (row.detected && Math.min(...row.interval.map(Math.abs)) > row.margin) return "the difference exceeds it";
  return `${row.runs_needed ?? "more than 1000"} ${counted}${row.detected ? `, but a difference was detected: ${row.detected.direction}` : ""}`;
}

function prospects(row) {
  if (!row.interval) return ["\u2013", "\u2013", "\u2013", "two runs of each arm"];
  return [
    interval(row.interval),
    `\u00b1${boundText(row.certified_bound)}`,
    row.margin === null ? "\u2013" : el("span", { title: row.margin_is }, `\u00b1${number(row.margin, 3)}`),
    row.margin === null ? "\u2013" : takesText(row, row.paired ? "pairs" : "runs of each arm"),
  ];
}

function descriptionSection() {
  const single = new Set(evidenceOf("new run").map((row) => row.arm));
  const list = evidenceOf("description").filter((row) => !single.has(row.arm));
  if (!list.length) return null;
  const hasOneRunPerArm = list.every((row) => row.interval === null);
  const intro = hasOneRunPerArm
    ? "Levels over the window, and the distance of the curves over all steps that both runs recorded. With one run per arm, an effect of the treatment cannot be distinguished from seed noise."
    : "Levels over the window, and the difference with its 90 % confidence interval (CI). The certified bound is the smallest margin that these runs would pass. The suggested margin follows from the baseline alone; the last column is the sample size for 80 % power if the arms are equal.";
  const headings = hasOneRunPerArm
    ? [["mean |difference| over steps", "right"], ["largest", "right"], ["at step", "right"]]
    : [["90 % CI", "right nowrap"], ["certified bound", "right"], ["suggested margin", "right"], ["sample size for it", "right"]];
  const title = hasOneRunPerArm ? "The two runs" : "Differences";
  return section(
    "description",
    title,
    el("p", { class: "intro" }, `${comparedText()} ${intro}`),
    table(
      title,
      [
        ...withArm([["metric"]]),
        ["steps", "nowrap"],
        [baselineName(), "right"],
        [treatmentName(), "right"],
        ["difference", "right"],
        ...headings,
      ],
      list.map((row) => [
        ...armCell(row),
        named(row.metric, "b"),
        `${row.steps[0]}\u2013${row.steps[1]}`,
        number(row.baseline, 4),
        number(row.treatment, 4),
        signed(row.difference, 3),
        ...(hasOneRunPerArm ? distances(row) : prospects(row)),
      ]),
    ),
  );
}

// One arm alone: the spread from run to run, and what pairs of runs would show.
function noiseSection() {
  const list = evidenceOf("seed noise");
  if (!list.length) return null;
  const counts = (list.find((row) => row.prospects.length) || { prospects: [] }).prospects.map((row) => row.num_pairs);
  const range = (ends) => (ends ? interval(ends) : "\u2013");
  const intro = "Level and standard deviation (sd) over runs, with 90 % confidence intervals. The gap is the largest between two runs that seed noise alone explains (95 %). The last columns are the smallest differences that so many pairs of runs detect with 80 % power, planned with the upper 80 % bound of the sd.";
  return section(
    "noise",
    "Seed noise",
    el("p", { class: "intro" }, intro),
    table(
      "Seed noise",
      [
        ["metric"],
        ["steps", "nowrap"],
        ["runs", "right"],
        ["level", "right"],
        ["sd over runs", "right"],
        ["gap", "right"],
        ...counts.map((count) => [`shown by ${count} pairs`, "right"]),
      ],
      list.map((row) => [
        [named(row.metric, "b"), muted([row.claim, row.transform === "identity" ? "" : scaleText(row.transform), row.reason].filter(Boolean).join("; "))],
        row.steps ? `${row.steps[0]}\u2013${row.steps[1]}` : "\u2013",
        String(Object.keys(row.levels).length),
        [number(row.mean, 4), muted(range(row.mean_interval))],
        [number(row.sd, 3), muted(range(row.sd_interval))],
        number(row.gap, 3),
        ...counts.map((_, at) => [
          number(row.prospects[at]?.difference, 3),
          typeof row.prospects[at]?.match_power === "number" ? muted(`P(match) ${percent(row.prospects[at].match_power)}`) : null,
        ]),
      ]),
    ),
  );
}

// A single run beside several runs of the other arm.
function newRunsSection() {
  const list = evidenceOf("new run");
  if (!list.length) return null;
  const [first] = list;
  const heads = several ? [["run"]] : [];
  return section(
    "new-run",
    "One run beside several",
    el(
      "p",
      { class: "intro" },
      `The level of a single run beside those of several. 95 of 100 further runs of ${first.several} would be in the interval (prediction interval of Student\u2019s t); p is corrected over the claimed metrics, or over all others (Holm).`,
    ),
    table(
      "One run beside several",
      [
        ...heads,
        ["metric"],
        ["steps", "nowrap"],
        ["several runs", "right"],
        [several ? "single run" : first.run, "right"],
        ["difference", "right"],
        ["in sds", "right"],
        ["95 of 100 further runs", "right nowrap"],
        ["p (Holm)", "right"],
      ],
      list.map((row) => [
        ...heads.map(() => row.run),
        named(row.metric, "b"),
        row.steps ? `${row.steps[0]}\u2013${row.steps[1]}` : "\u2013",
        [number(row.mean, 4), muted(`${row.num_runs} runs, sd ${number(row.sd, 3)}`)],
        number(row.level, 4),
        signed(row.difference, 3),
        number(row.num_sds, 2),
        interval(row.interval),
        number(row.p_holm, 2),
      ]),
    ),
  );
}

function claimsSection() {
  const claims = content.claims || [];
  if (!claims.length) return null;
  const unpaired = content.paired === false || !treatments.length;
  const details = (context.levels || []).filter((level) => level.details);
  return section(
    "claims",
    "Claims",
    el(
      "p",
      { class: "intro" },
      `${comparedText()} A claim says that the arms agree on a metric within a margin, that one is not worse or is better, or that a limit holds. The certified bound is the smallest margin that would have passed (of \u201cbetter\u201d: the largest).${testedText(claims)}`,
    ),
    drawnClaims().length > MAX_INTERVALS ? forest() : null,
    table(
      "Claims",
      [
        ...withArm([["metric"]]),
        ["result"],
        [unpaired ? "difference" : "paired differences"],
        [measured(claims)],
        ["margin"],
        ["certified bound"],
        ["steps", "nowrap"],
        [unpaired ? "runs" : "pairs", "right"],
      ],
      claims.map((claim) => [
        ...armCell(claim),
        [named(claim.metric, "b"), muted(detailOfClaim(claim))],
        [chip(outcomeOf(claim)), muted(outlook(claim))],
        dotPlot(claim),
        estimateCell(claim),
        marginText(claim),
        [
          el("b", {}, certifiedBound(claim)),
          typeof claim.certified_number === "number" && claim.certified_number >= 0 ? muted(certifiedText(claim)) : null,
        ],
        [claim.steps ? `${claim.steps[0]}\u2013${claim.steps[1]}` : "\u2013", muted(claim.window)],
        claim.num_runs ? bothSizes(claim.num_runs) : String(claim.num_pairs),
      ]),
    ),
    el(
      "p",
      { class: "caption" },
      key("margin", "margin"),
      unpaired ? null : key("dot", "one pair"),
      key("claim", "mean and its CI"),
    ),
    details.length
      ? el(
          "ul",
          { class: "notes" },
          details.map((level) => el("li", {}, `${several ? `${level.arm}, ` : ""}${level.where}: ${level.details}`)),
        )
      : null,
  );
}

function estimateCell(claim) {
  if (typeof claim.limited === "number")
    return [
      number(claim.limited, 4),
      muted(claim.limited_interval ? `${confidence(claim.alpha)} [${claim.limited_interval.map((end) => number(end, 4)).join(", ")}]` : "no CI"),
    ];
  const ends = claim.interval || claim.ci90;
  return [
    signed(claim.mean_difference, 3),
    muted(ends ? `${confidence(claim.interval ? claim.alpha : 0.05)} ${interval(ends)}` : "no CI"),
  ];
}

// A treatment that is better is not worse by any margin; one that is worse is better by none.
const certifiedBound = (claim) =>
  claim.certified_bound < 0 ? (claim.kind === "better" ? "none" : "any") : boundText(claim.certified_bound);

// The certified bound in the unit of the margin, as in the other reports.
function certifiedText(claim) {
  if (claim.margin_unit === "sigma") return `${boundText(claim.certified_number)} sigma`;
  if (claim.margin_unit !== "level" && claim.margin_unit !== "climb") return "";
  return `${boundText(100 * claim.certified_number)}\u00a0%${claim.margin_unit === "climb" ? " of climb" : ""}`;
}

// The test level, as in the other reports; with interim analyses, that of the analysis.
function testedText(claims) {
  const alphas = claims.filter((claim) => claim.test !== "exact").map((claim) => claim.alpha ?? 0.05);
  if (!alphas.length) return "";
  const alpha = Math.max(...alphas);
  return ` Claims are tested one-sided at ${number(100 * (1 - alpha), 3)}\u00a0% confidence, which corresponds to a ${confidence(alpha)} confidence interval (CI).`;
}

// The heading of the column of means: a limit is on a level or a ratio, not on a difference.
function measured(claims) {
  const tests = new Set(claims.map((claim) => claim.test));
  const limited = claims.filter((claim) => claim.test === "limit");
  const level = limited.every((claim) => claim.metric === "final_weights") ? "distance" : `level of ${treatmentName()}`;
  const kinds = [
    [...tests].some((test) => !["limit", "ratio limit", "exact"].includes(test)) ? "mean difference" : "",
    limited.length ? level : "",
    tests.has("ratio limit") ? "ratio" : "",
  ];
  return kinds.filter(Boolean).join(" or ") || "mean difference";
}

const detailOfClaim = (claim) =>
  [scaleText(claim.transform), claim.reduction ? `window ${claim.reduction}` : "", claim.test || ""].filter(Boolean).join(", ");

const BROKEN = { limit: "limit broken", exact: "not exact", not_worse: "worse", better: "not better" };
const outcomeOf = (claim) => (claim.result === "different" && BROKEN[claim.kind]) || claim.result;
// The ends of the differences that a claim accepts; null for an open end.
function accepted(claim) {
  if ((claim.kind ?? "within") === "within") return [-claim.margin, claim.margin];
  const threshold = claim.kind === "not_worse" ? -claim.margin : claim.margin;
  return claim.better === "lower" ? [null, -threshold] : [threshold, null];
}
const bothSizes = (runs) => runs.filter(Boolean).join(" and "); // one arm alone has no baseline
const marginText = (claim) =>
  claim.margin_text || (typeof claim.margin === "number" ? `\u00b1${number(claim.margin)}` : "\u2013");

function outlook(claim) {
  if (claim.problem) return claim.problem;
  if (claim.result !== "undecided") return "";
  const many = (size) => (size === null || size === undefined ? "more than 1000" : String(size));
  const range = claim.pairs_needed_range ? ` (${claim.pairs_needed_range.map(many).join(" to ")})` : "";
  const unit = claim.num_runs ? "runs of each arm" : "pairs";
  if (claim.kind === "limit")
    return claim.pairs_needed_observed
      ? `80\u00a0% power needs ${claim.pairs_needed_observed} ${unit} at the observed times`
      : "more seeds narrow the interval";
  const excludesZero = claim.interval && (claim.interval[0] > 0 || claim.interval[1] < 0);
  if (excludesZero && claim.margin_unit !== "sigma" && (claim.kind ?? "within") === "within")
    return Math.abs(claim.mean_difference) >= claim.margin
      ? "difference detected; no sample size shows equivalence at the observed difference"
      : `difference detected; 80\u00a0% power needs ${many(claim.pairs_needed_observed)} ${unit} at the observed difference`;
  return `power now ${percent(claim.power_now)}; 80\u00a0% power needs ${many(claim.pairs_needed)}${range} ${unit}`;
}

// The margin, the difference of each pair, and the interval, which must lie inside the margin.
function dotPlot(claim) {
  const ends = [claim.interval || claim.ci90].find((pair) => pair?.every(Number.isFinite));
  const differences = (claim.differences || []).filter((value) => typeof value === "number");
  const shown = [claim.margin, ...(ends || []), ...differences].filter((value) => typeof value === "number");
  if (!ends && !differences.length) return "";
  const reach = 1.12 * Math.max(...shown.map(Math.abs)) || 1;
  const [width, height] = [190, 44];
  const x = (value) => (width * (0.5 + value / reach / 2)).toFixed(1);
  const parts = [];
  if (typeof claim.margin === "number") {
    const [low, high] = accepted(claim);
    const [left, right] = [x(low ?? -reach), x(high ?? reach)];
    parts.push(svg("rect", { class: "zone", x: left, width: (right - left).toFixed(1), y: 0, height }));
  }
  parts.push(svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: height }));
  const color = `arm-${arms.indexOf(claim.arm) % 6}`;
  differences.forEach((value, index) =>
    parts.push(svg("circle", { class: color, cx: x(value), cy: 9 + 3.2 * (index % 4), r: 2.6 })),
  );
  if (ends) {
    const [low, high, y] = [x(ends[0]), x(ends[1]), 33];
    const mean = Number(x(claim.mean_difference));
    parts.push(svg("path", { class: "reach", d: `M${low} ${y}H${high}M${low} ${y - 4}v8M${high} ${y - 4}v8` }));
    parts.push(svg("path", { class: "mean", d: `M${mean} ${y - 5}l5 5l-5 5l-5 -5z` }));
  }
  const label = `${claim.num_runs ? "Difference" : "Paired differences"} of ${claim.metric}: mean ${number(claim.mean_difference, 3)}, interval ${interval(ends)}, margin ${marginText(claim)}`;
  return svg(
    "svg",
    { class: "dots", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    ...parts,
  );
}

// The curves of claimed metrics; without a claim, that of the metric that describes the arms best.
function curvesSection() {
  const claimed = report.metrics.slice(0, report.num_claimed);
  if (claimed.length) return section("curves", "Curves of the claims", claimed.map((metric) => figureOf(metric)));
  const described = ["new run", "seed noise", "description"]
    .flatMap((kind) => evidenceOf(kind).map((row) => row.metric))
    .find((metric) => report.metrics.includes(metric));
  return described ? section("curves", "Curve", figureOf(described)) : null;
}
