// The claims and their curves.
"use strict";

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
      muted(claim.limited_interval ? `${confidence(claim.alpha)} ${interval(claim.limited_interval, 4)}` : "no CI"),
    ];
  const ends = claim.interval || claim.ci90;
  return [
    signed(claim.mean_difference, 3),
    muted(ends ? `${confidence(claim.interval ? claim.alpha : 0.05)} ${outwardInterval(ends)}` : "no CI"),
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
    [...tests].some((test) => !["limit", "ratio limit", "time to target", "exact"].includes(test)) ? "mean difference" : "",
    limited.length ? level : "",
    tests.has("ratio limit") ? "ratio" : "",
    tests.has("time to target") ? "ratio of times" : "",
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
  const label = `${claim.num_runs ? "Difference" : "Paired differences"} of ${claim.metric}: mean ${number(claim.mean_difference, 3)}, interval ${outwardInterval(ends)}, margin ${marginText(claim)}`;
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
