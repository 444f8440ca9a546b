// The sections of the page, beginning with the verdict, and the bar at the top.
"use strict";

const VERDICTS = {
  MATCH: ["\u2713", "Every claim and every guard pass."],
  MISMATCH: ["\u2715", "A claim, step one or a guard shows a difference."],
  INCONCLUSIVE: ["?", "Neither equivalence nor a difference is shown."],
  INVALID: ["!", "These runs cannot be compared fairly."],
};
const RESULTS = {
  equivalent: ["good", "\u2713"],
  holds: ["good", "\u2713"],
  pass: ["good", "\u2713"],
  agrees: ["good", "\u2713"],
  different: ["bad", "\u2715"],
  fail: ["bad", "\u2715"],
  deviates: ["bad", "\u2715"],
  "limit broken": ["bad", "\u2715"],
  "not exact": ["bad", "\u2715"],
  undecided: ["open", "?"],
  "baseline too": ["open", "!"],
  open: ["open", "!"],
};

const chip = (result) => {
  const [kind, glyph] = RESULTS[result] || ["plain", "\u2013"];
  return el("span", { class: `chip ${kind}` }, el("span", { "aria-hidden": "true" }, glyph), ` ${result}`);
};
const isDescription = content.verdict === "INCONCLUSIVE" && content.exit_code === 0;
const verdictName = isDescription ? "DESCRIPTION" : content.verdict;
const sections = [];
function section(id, title, ...children) {
  const element = el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    ...children,
  );
  sections.push([id, title]);
  return element;
}

// --- the verdict ---

function banner() {
  const [glyph, outcome] = VERDICTS[content.verdict] || ["?", ""];
  const skippedStepOne = content.verdict === "MATCH" && !(content.step_one || []).length;
    const meaning = isDescription
    ? content.descriptions.some((description) => description.interval)
      ? "No claim was declared: descriptive statistics, no test."
      : "One run per arm: descriptive statistics, no test."
    : skippedStepOne
      ? `${outcome} Step one was not checked.`
      : outcome;
  const planned = Object.values(content.arms || {}).map((arm) => arm.num_planned_pairs);
  const facts = [
    content.paired === false
      ? ["unpaired runs", bothSizes(Object.values(content.arms)[0].num_runs)]
      : [
          "pairs",
          Object.values(content.arms || {}).some((arm) => (arm.interim_analyses || []).length)
            ? `${content.num_pairs} compared, of ${Math.max(...planned)} planned`
            : planned.length
              ? `${content.num_pairs} of ${Math.max(...planned)} finished`
              : String(content.num_pairs),
        ],
    ["arms", [withRole(baselineName(), "baseline"), ...treatments.map((arm) => withRole(arm, "treatment"))].join(" \u00b7 ")],
    ["exit code", String(content.exit_code)],
  ];
  if (content.reference) facts.push(["reference", content.reference]);
  if (context.has_recipe) facts.push(["injected faults", caughtFaultsText()], ["drift relative to one ULP", ulpDriftText()]);
  if (context.time_range) facts.push(["runs", context.time_range]);
  if (context.environment) facts.push(["environment", context.environment]);
  const analyses = Object.entries(content.arms || {}).flatMap(([arm, armSection]) =>
    (armSection.interim_analyses || []).map((analysis) => [arm, analysis]),
  );
  for (const [arm, analysis] of analyses) {
    const decided = content.arms[arm].verdict !== "INCONCLUSIVE";
    const taken = analysis.verdict || (decided ? "not needed" : "not taken yet");
    facts.push([
      `${several ? `${arm}, ` : ""}interim analysis at ${analysis.num_pairs} pairs`,
      `${taken} (one-sided level ${number(analysis.alpha)})`,
    ]);
  }
  return el(
    "section",
    { class: `banner ${content.verdict}`, "aria-label": "Verdict" },
    el("p", { class: "experiment" }, content.experiment),
    el(
      "h1",
      {},
      el("span", { class: "glyph-verdict", "aria-hidden": "true" }, glyph),
      verdictName,
      content.post_hoc ? el("span", { class: "badge" }, "post hoc") : null,
      content.paired === false ? el("span", { class: "badge" }, "unpaired") : null,
    ),
    el("p", { class: "meaning" }, meaning),
    el(
      "ul",
      { class: "reasons" },
      (content.reasons || []).map((reason) => el("li", {}, reason)),
    ),
    levels.length
      ? el(
          "ul",
          { class: "levels" },
          levels.map((level) =>
            el(
              "li",
              {},
              several ? [swatch(arms.indexOf(level.arm)), `${level.arm}, `] : [],
              `${level.where}: `,
              el("b", {}, level.means),
              levels.length > MAX_DETAILED ? null : muted(`; ${level.details}`),
            ),
          ),
        )
      : null,
    several
      ? el(
          "ul",
          { class: "arms-verdicts" },
          Object.entries(content.arms || {}).map(([arm, armSection]) =>
            el("li", {}, swatch(arms.indexOf(arm)), `${arm}: `, el("b", {}, armSection.verdict)),
          ),
        )
      : null,
    el(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
    ),
    (context.next_steps || []).map((step, at) =>
      el("p", { class: "next" }, el("b", {}, at ? "or " : "Next "), step.text, el("code", {}, step.command)),
    ),
  );
}

// Results of the optional controls, for the banner; each links to its table.
function caughtFaultsText() {
  const text = context.injected_faults;
  return content.sensitivity ? el("a", { href: "#sensitivity" }, text) : text;
}

function ulpDriftText() {
  const known = (content.divergence || []).filter((row) => row.ulp && row.ulp.ratio !== null);
  if (!known.length) return "not measured (optional: controls.ulp_reruns)";
  const [first] = known;
  const range = first.ulp.ci95 ? ` ${interval(first.ulp.ci95, 2)}` : "";
  return el("a", { href: "#divergence" }, `${first.metric}: ${number(first.ulp.ratio, 2)}\u00d7${range}`);
}

const treatmentName = () => (several ? "treatment" : treatments[0] || "treatment");
const withRole = (name, role) => (name === role ? name : `${name} (${role})`);
const comparedText = () =>
  `Differences are ${withRole(treatmentName(), "treatment")} minus ${withRole(baselineName(), "baseline")}.`;
const baselineName = () => content.baseline || arms[0];
const context = report.context || {};
// The recipe key of a control, if the runs have a recipe.
const recipeKey = (key) => (context.has_recipe ? ` (${key})` : "");
const levels = context.levels || [];
// With more levels than this, the banner omits their details.
const MAX_DETAILED = 3;

// --- arms without a claim, or with one run each ---

function description() {
  const list = content.descriptions || [];
  if (!list.length) return null;
  const hasOneRunPerArm = list.every((row) => row.interval === null);
  const title = hasOneRunPerArm ? "The two runs" : "The arms";
  const intro = hasOneRunPerArm
    ? "Levels over the window, and the distance of the curves over all steps that both runs recorded. With one run per arm, an effect of the treatment cannot be distinguished from seed noise."
    : "Levels over the window, the difference with its 90 % confidence interval (CI), and the certified bound (the smallest margin that these runs would pass). The suggested margin follows from the baseline alone; the last column is the sample size for 80 % power if the arms are equal.";
  const headings = hasOneRunPerArm
    ? [["mean |difference| over steps", "right"], ["largest", "right"], ["at step", "right"]]
    : [["90 % CI", "right"], ["certified bound", "right"], ["suggested margin", "right"], ["sample size for it", "right"]];
  return section(
    "description",
    title,
    el("p", { class: "intro" }, `${comparedText()} ${intro}`),
    table(
      title,
      [
        ...(several ? [["arm"]] : []),
        ["metric"],
        ["steps", "nowrap"],
        [baselineName(), "right"],
        [treatmentName(), "right"],
        ["difference", "right"],
        ...headings,
      ],
      list.map((row) => [
        ...(several ? [row.arm] : []),
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

const distances = (row) => [
  number(row.mean_distance, 3),
  number(row.largest_distance, 3),
  String(row.largest_at),
];

function takesText(row, counted) {
  if (row.detected && Math.min(...row.interval.map(Math.abs)) > row.margin) return "the difference exceeds it";
  return `${row.runs_needed ?? "more than 1000"} ${counted}${row.detected ? `, but a difference was detected: ${row.detected.direction}` : ""}`;
}

function prospects(row) {
  if (!row.interval) return ["\u2013", "\u2013", "\u2013", "two runs of each arm"];
  const counted = row.paired ? "pairs" : "runs of each arm";
  return [
    outwardInterval(row.interval),
    `\u00b1${boundText(row.certified_bound)}`,
    row.margin === null ? "\u2013" : el("span", { title: row.margin_is }, `\u00b1${number(row.margin, 3)}`),
    row.margin === null ? "\u2013" : takesText(row, counted),
  ];
}

// --- claims ---

function claimsSection() {
  const claims = content.claims || [];
  if (!claims.length)
    return section(
      "claims",
      "Claims",
      el("p", {}, "No claim was declared, so nothing was tested for equivalence."),
    );
  const armHead = several ? [["arm"]] : [];
  const headings = [
    ...armHead,
    ["metric"],
    ["result"],
    [content.paired === false ? "difference" : "paired differences"],
    [measured(claims)],
    ["margin"],
    ["certified bound"],
    ["steps", "nowrap"],
    [content.paired === false ? "runs" : "pairs", "right"],
  ];
  return section(
    "claims",
    "Claims",
    el(
      "p",
      { class: "intro" },
      `${comparedText()} A claim says that the arms agree on a metric within a margin, or that a limit holds. The certified bound is the smallest margin that would have passed.${testedText(claims)}`,
    ),
    forest(claims),
    table(
      "Claims",
      headings,
      claims.map((claim) => [
        ...(several ? [claim.arm] : []),
        [named(claim.metric, "b"), muted(detailOfClaim(claim))],
        [chip(outcomeOf(claim)), muted(outlook(claim))],
        dotPlot(claim),
        [
          typeof claim.limited === "number" ? number(claim.limited, 4) : signed(claim.mean_difference, 3),
          muted(
            claim.limited_interval
              ? `${confidence(claim.alpha)} ${interval(claim.limited_interval, 4)}`
              : claim.interval || claim.ci90
              ? `${confidence(claim.interval ? claim.alpha : 0.05)} ${outwardInterval(claim.interval || claim.ci90)}`
              : "no CI",
          ),
        ],
        marginText(claim),
        [
          el("b", {}, boundText(claim.certified_bound)),
          typeof claim.certified_number === "number" ? muted(certifiedText(claim)) : null,
        ],
        [claim.steps ? `${claim.steps[0]}\u2013${claim.steps[1]}` : "\u2013", muted(claim.window)],
        claim.num_runs ? bothSizes(claim.num_runs) : String(claim.num_pairs),
      ]),
    ),
    el(
      "p",
      { class: "caption" },
      key("margin", "margin"),
      content.paired === false ? null : key("dot", "one pair"),
      key("claim", "mean and its CI"),
    ),
  );
}

// The certified bound in the unit of the margin, as in the other reports.
function certifiedText(claim) {
  if (claim.margin_unit === "sigma") return `${boundText(claim.certified_number)} sigma`;
  if (claim.margin_unit !== "level" && claim.margin_unit !== "climb") return "";
  return `${boundText(100 * claim.certified_number)}\u00a0%${claim.margin_unit === "climb" ? " of climb" : ""}`;
}

// The test level, as in the other reports; with interim analyses, that of the analysis.
function testedText(claims) {
  const levels = claims.filter((claim) => claim.test !== "exact").map((claim) => claim.alpha ?? 0.05);
  if (!levels.length) return "";
  const level = Math.max(...levels);
  const share = (value) => `${number(100 * value, 3)}\u00a0%`;
  return ` Claims are tested one-sided at ${share(1 - level)} confidence, which corresponds to a ${confidence(level)} confidence interval (CI).`;
}

// The heading of the column of means: a limit is on a level or a ratio, not on a difference.
function measured(claims) {
  const tests = new Set(claims.map((claim) => claim.test));
  const named = [];
  if ([...tests].some((test) => !["limit", "ratio limit", "exact"].includes(test))) named.push("mean difference");
  const limited = claims.filter((claim) => claim.test === "limit");
  if (limited.length)
    named.push(limited.every((claim) => claim.metric === "final_weights") ? "distance" : `level of ${treatmentName()}`);
  if (tests.has("ratio limit")) named.push("ratio");
  return named.join(" or ") || "mean difference";
}

function detailOfClaim(claim) {
  return [scaleText(claim.transform), claim.reduction ? `window ${claim.reduction}` : "", claim.test || ""]
    .filter(Boolean)
    .join(", ");
}

const BROKEN = { limit: "limit broken", "ratio limit": "limit broken", exact: "not exact" };
const outcomeOf = (claim) => (claim.result === "different" && BROKEN[claim.test]) || claim.result;

const bothSizes = (runs) => `${runs[0]} and ${runs[1]}`;

const marginText = (claim) =>
  claim.margin_text || (typeof claim.margin === "number" ? `\u00b1${number(claim.margin)}` : "\u2013");

function outlook(claim) {
  if (claim.problem) return claim.problem;
  if (claim.result !== "undecided") return "";
  const many = (size) => (size === null || size === undefined ? "more than 1000" : String(size));
  const range = claim.pairs_needed_range ? ` (${claim.pairs_needed_range.map(many).join(" to ")})` : "";
  const unit = claim.num_runs ? "runs of each arm" : "pairs";
  const excludesZero = claim.interval && (claim.interval[0] > 0 || claim.interval[1] < 0);
  if (excludesZero && claim.margin_unit !== "sigma")
    return Math.abs(claim.mean_difference) >= claim.margin
      ? "difference detected; no sample size shows equivalence at the observed difference"
      : `difference detected; 80\u00a0% power needs ${many(claim.pairs_needed_observed)} ${unit} at the observed difference`;
  return `power now ${percent(claim.power_now)}; 80\u00a0% power needs ${many(claim.pairs_needed)}${range} ${unit}`;
}

// All claims on one scale: each interval in units of its own margin.
function forest(claims) {
  const drawn = claims
    .map((claim, at) => ({ ...claim, levels: levels.find((level) => level.claim === at) }))
    .filter((claim) => claim.margin > 0 && claim.interval?.every(Number.isFinite));
  if (!drawn.length) return null;
  const all = drawn.flatMap((claim) => claim.interval.map((end) => Math.abs(end / claim.margin)));
  const reach = Math.min(4, Math.max(1.3, 1.1 * Math.max(...all)));
  const place = (share) => 50 * (1 + Math.max(-reach, Math.min(reach, share)) / reach);
  const mark = (kind, from, to = from) => {
    const element = el("i", { class: kind });
    element.style.left = `${place(from)}%`;
    element.style.width = `${place(to) - place(from)}%`;
    return element;
  };
  const label = (share, text) => {
    const element = mark("label", share);
    element.append(text);
    return element;
  };
  const rows = drawn.map((claim) => {
    const [low, mean, high] = [claim.interval[0], claim.mean_difference, claim.interval[1]].map((end) => end / claim.margin);
    return [
      el(
        "div",
        {},
        el("b", {}, several ? `${claim.arm}: ${claim.metric}` : claim.metric),
        muted((levels.length > MAX_DETAILED && claim.levels?.details) || `margin ${marginText(claim)}`),
      ),
      el(
        "div",
        {
          class: `track arm-${arms.indexOf(claim.arm) % 6}`,
          role: "img",
          "aria-label": `${claim.metric}: ${number(mean, 2)} margins, interval ${interval([low, high], 2)}`,
        },
        mark("zone", -1, 1),
        mark("zero", 0),
        mark("reach", low, high),
        mark("mean", mean),
      ),
    ];
  });
  const headings = el(
    "div",
    { class: "track heads", "aria-hidden": "true" },
    label(-1, `${MINUS}margin`),
    label(0, "no difference"),
    label(1, "+margin"),
  );
  return el("figure", { class: "forest" }, el("div", {}), headings, ...rows.flat());
}

// The margin, the difference of each pair, and the interval, which must lie inside the margin.
function dotPlot(claim) {
  const ends = [claim.interval || claim.ci90].find((pair) => pair?.every(Number.isFinite));
  const differences = (claim.differences || []).filter((value) => typeof value === "number");
  const shown = [claim.margin, ...(ends || []), ...differences].filter((value) => typeof value === "number");
  if (!ends && !differences.length) return muted("\u2013");
  const reach = 1.12 * Math.max(...shown.map(Math.abs)) || 1;
  const [width, height] = [190, 44];
  const x = (value) => (width * (0.5 + value / reach / 2)).toFixed(1);
  const parts = [];
  if (typeof claim.margin === "number")
    parts.push(
      svg("rect", {
        class: "zone",
        x: x(-claim.margin),
        width: (x(claim.margin) - x(-claim.margin)).toFixed(1),
        y: 0,
        height,
      }),
    );
  parts.push(svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: height }));
  differences.forEach((value, index) =>
    parts.push(
      svg("circle", {
        class: `arm-${arms.indexOf(claim.arm) % 6}`,
        cx: x(value),
        cy: 9 + 3.2 * (index % 4),
        r: 2.6,
      }),
    ),
  );
  if (ends) {
    const [low, high, y] = [x(ends[0]), x(ends[1]), 33];
    const mean = Number(x(claim.mean_difference));
    parts.push(
      svg("path", { class: "reach", d: `M${low} ${y}H${high}M${low} ${y - 4}v8M${high} ${y - 4}v8` }),
    );
    parts.push(svg("path", { class: "mean", d: `M${mean} ${y - 5}l5 5l-5 5l-5 -5z` }));
  }
  const label = `${claim.num_runs ? "Difference" : "Paired differences"} of ${claim.metric}: mean ${number(claim.mean_difference, 3)}, interval ${outwardInterval(ends)}, margin ${marginText(claim)}`;
  return svg(
    "svg",
    { class: "dots", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    ...parts,
  );
}

// --- tables of evidence ---

const withArm = (headings) => (several ? [["arm"], ...headings] : headings);
const armCell = (row) => (several ? [row.arm] : []);

function guards() {
  const list = content.guards || [];
  return section(
    "guards",
    "Guards",
    el("p", { class: "intro" }, "One-sided limits that the treatment must meet at every step."),
    list.length
      ? table(
          "Guards",
          withArm([["guard"], ["result"], ["value", "right"], ["limit", "right"], ["finding"]]),
          list.map((guard) => [
            ...armCell(guard),
            el("span", { class: "name" }, guard.guard.replaceAll("_", " ")),
            chip(guard.result),
            number(guard.value),
            number(guard.limit),
            guard.text,
          ]),
        )
      : el("p", {}, "No guard was checked."),
    report.mismatch
      ? figureOf(report.mismatch, { limit: report.mismatch_limit })
      : el(
          "p",
          { class: "muted" },
          "Train-inference mismatch: train/token_mult_prob_error was not recorded.",
        ),
  );
}

function stepOne() {
  const list = content.step_one || [];
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
    list.length
      ? table(
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
        )
      : el("p", {}, "Step one was not checked."),
  );
}

function finalWeights() {
  const list = content.final_weights || [];
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

function divergence() {
  const list = content.divergence || [];
  const firstDifferentStep = (row) =>
    row.noise_floor !== "zero" ? "" : row.first_step_apart === null ? "never" : String(row.first_step_apart);
  const ratio = (row) =>
    ({ zero: "\u2013", unknown: "unknown" })[row.noise_floor] ||
    `${number(row.ratio, 2)}\u00d7`;
  const ulpRatioText = (row) =>
    row.ulp === null
      ? ""
      : row.ulp.ratio === null
        ? "no ratio"
        : `${number(row.ulp.ratio, 2)}\u00d7 ${row.ulp.ci95 ? interval(row.ulp.ci95) : ""}`;
  const unknown = list.length && list.every((row) => row.noise_floor === "unknown");
  return section(
    "divergence",
    "Divergence",
    el(
      "p",
      { class: "intro" },
      `The distance of the arms, averaged over steps, compared with the distance of baseline reruns of the same seed (the A/A noise floor), with the divergence caused by one ULP in the initial weights${recipeKey("controls.ulp_reruns")}, and with the baseline's sd over seeds. A diagnostic: it does not affect the verdict.`,
    ),
    unknown ? el("p", {}, `Noise floor unknown: no A/A reruns${recipeKey("controls.aa_reruns")}.`) : null,
    list.some((row) => row.noise_floor === "zero")
      ? el("p", {}, "No ratio where baseline reruns are bit-identical: the noise floor is 0.")
      : null,
    list.length
      ? table(
          "Divergence",
          withArm([
            ["metric"],
            ["mean |difference|", "right"],
            ["A/A mean |difference|", "right"],
            ["ratio to A/A", "right"],
            ["ratio to one ULP", "right nowrap"],
            ["ratio to sd over seeds", "right"],
            ["first step that differs", "right"],
          ]),
          list.map((row) => [
            ...armCell(row),
            named(row.metric),
            number(row.mean_difference, 3),
            number(row.aa_mean_difference, 3),
            ratio(row),
            ulpRatioText(row),
            row.share_of_seed_spread === null ? "" : number(row.share_of_seed_spread, 2),
            firstDifferentStep(row),
          ]),
        )
      : el("p", {}, content.paired === false ? "Unpaired runs have no distance." : "No finished pair."),
  );
}

function sensitivity() {
  const found = content.sensitivity;
  if (!found) return null;
  const seen = (fault) =>
    fault.caught_by === "nothing"
      ? fault.verdict === "INVALID" ? "not judged" : "nothing"
      : [fault.caught_by, fault.metric].filter(Boolean).join(": ");
  return section(
    "sensitivity",
    "What this comparison would have caught",
    el(
      "p",
      { class: "intro" },
      "Faults injected into the baseline, each judged like a treatment: " +
        (found.num_judged
          ? `${found.num_caught} of ${found.num_judged} were caught, by ${found.num_pairs} ${content.paired === false ? "runs of each arm" : "pairs"} of ${found.num_steps} steps. A fault with the verdict MATCH would have passed; with INCONCLUSIVE it was left open.`
          : "none could be judged."),
    ),
    table(
      "Injected faults",
      [["fault"], ["size", "right"], ["verdict"], ["caught by"], ["step", "right"], ["figures"], ["pairs", "right"]],
      found.faults.map((fault) => [
        named(fault.fault),
        fault.size === null ? "-" : `${number(fault.size, 3)} ${fault.unit}`,
        fault.verdict,
        seen(fault),
        fault.step === null ? "-" : String(fault.step),
        fault.figures || "-",
        String(fault.num_pairs),
      ]),
    ),
    ...found.faults
      .filter((fault) => fault.advice)
      .map((fault) => el("p", {}, el("b", {}, fault.fault), ` could be seen by ${fault.advice}`)),
  );
}

// --- completions ---

function completions() {
  const found = context.completions;
  if (!found) return null;
  const intro = "Completions of the arms for the same prompts at the same steps: a few prompts and steps of one seed.";
  if (found.problem) return section("completions", "Completions side by side", el("p", {}, found.problem));
  const shown = el("div", { class: "said", role: "region", "aria-live": "polite", "aria-label": "Completions" });
  const steps = found.steps.map(([step]) => step);
  const choose = (at) => {
    shown.replaceChildren(...found.steps[at][1].map((prompt) => exchange(prompt, found.arms)));
    buttons.forEach((stepButton, index) => stepButton.setAttribute("aria-pressed", String(index === at)));
  };
  const buttons = steps.map((step, at) => button(grouped(step), () => choose(at), { "aria-pressed": "false" }));
  choose(steps.length - 1);
  return section(
    "completions",
    "Completions side by side",
    el("p", { class: "intro" }, intro),
    el(
      "div",
      { class: "tools" },
      muted(`seed ${found.seed}, step`),
      buttons,
      found.num_steps > steps.length ? muted(`of ${found.num_steps} steps with recorded completions`) : null,
    ),
    shown,
  );
}

function exchange({ prompt, completions: samples }, armIndices) {
  const rewards = samples.filter(Boolean).map((sample) => sample.reward);
  const differ = new Set(samples.map((sample) => sample && sample.text)).size > 1;
  const facts = (sample) =>
    [
      sample.num_tokens === null ? "" : `${sample.num_tokens} tokens`,
      sample.truncated ? "truncated" : "",
      sample.logprob_error === null ? "" : `log-prob error ${number(sample.logprob_error, 2)}`,
    ]
      .filter(Boolean)
      .join(", ");
  return el(
    "article",
    { class: "exchange" },
    el("pre", { class: "prompt" }, prompt),
    el("p", { class: "caption" }, differ ? "texts differ" : "texts are identical"),
    el(
      "div",
      { class: "columns" },
      samples.map((sample, index) =>
        el(
          "div",
          { class: `column arm-${armIndices[index] % 6}` },
          el(
            "p",
            {},
            swatch(armIndices[index]),
            ` ${arms[armIndices[index]]} `,
            sample
              ? el("b", { class: sample.reward < Math.max(...rewards) ? "lower" : "" }, `reward ${number(sample.reward, 3)}`)
              : null,
          ),
          sample ? el("pre", {}, sample.text) : muted("not recorded"),
          sample ? muted(facts(sample)) : null,
        ),
      ),
    ),
  );
}

function savings() {
  const list = content.savings || [];
  const bytes = (value) =>
    value >= 2 ** 28 ? `${number(value / 2 ** 30, 3)} GiB` : `${number(value / 2 ** 20, 3)} MiB`;
  const shown = (saving, value) =>
    saving.quantity.startsWith("peak memory") ? bytes(value) : `${number(value, 3)} s`;
  return section(
    "cost",
    "Time and memory",
    el(
      "p",
      { class: "intro" },
      `Cost of ${treatmentName()} relative to ${baselineName()}: ${content.paired === false ? "ratio of geometric means" : "geometric mean of paired ratios"}. Not a test of equivalence.`,
    ),
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
      : el("p", {}, "Not every finished run recorded step time or peak memory."),
    report.memory ? memoryBars(report.memory) : null,
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

function bullets(id, title, list, none) {
  return section(
    id,
    title,
    list && list.length
      ? el(
          "ul",
          {},
          list.map((item) => el("li", {}, item)),
        )
      : el("p", {}, none),
  );
}

function configuration() {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const children = Object.entries(content.arms || {}).flatMap(([arm, armSection]) => {
    const rows = Object.entries(armSection.treatment_diff || {});
    return [
      several ? el("h3", {}, arm) : null,
      rows.length
        ? table(
            `Configuration of ${arm}`,
            [["key"], [baselineName()], [arm]],
            rows.map(([name, [old, now]]) => [
              el("code", {}, name),
              el("code", { class: "old" }, text(old)),
              el("code", {}, text(now)),
            ]),
          )
        : el("p", {}, "No difference between the resolved configurations is known."),
    ];
  });
  return section("configuration", "Configuration differences", ...children);
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value))
    return [
      [
        prefix,
        Array.isArray(value)
          ? value.map((member) => (typeof member === "object" ? JSON.stringify(member) : String(member))).join(", ")
          : String(value),
      ],
    ];
  return Object.entries(value).flatMap(([name, member]) => flat(member, prefix ? `${prefix}.${name}` : name));
}

function versions() {
  const environments = (content.environments || []).map((group) => ({
    runs: group.runs,
    values: new Map(flat(group.environment)),
  }));
  const names = [...new Set(environments.flatMap((group) => [...group.values.keys()]))];
  const differs = (name) => new Set(environments.map((group) => group.values.get(name))).size > 1;
  const valueText = (value) => (value === undefined || value === null || value === "null" ? "not present" : value);
  const head = (group) =>
    environments.length === 1
      ? "all runs that recorded it"
      : group.runs.length > 4
        ? `${group.runs.slice(0, 3).join(", ")} and ${group.runs.length - 3} more`
        : group.runs.join(", ");
  return section(
    "versions",
    "Versions and runs",
    environments.length
      ? table(
          "Versions",
          [["item"], ...environments.map((group) => [head(group)])],
          names.map((name) => [
            [el("code", {}, name), differs(name) ? el("span", { class: "chip open" }, "differs") : null],
            ...environments.map((group) => valueText(group.values.get(name))),
          ]),
        )
      : el("p", {}, "No run recorded its versions and devices."),
    el(
      "details",
      { class: "runs" },
      el("summary", {}, `${count(report.runs.length, "run")}`),
      table(
        "Runs",
        [["run"], ["status"], ["steps recorded", "right"], ["last step", "right"], ["failure"]],
        report.runs.map((run) => [
          (content.wandb || {})[run.name]
            ? el("a", { class: "name", href: content.wandb[run.name], rel: "noopener" }, `${run.name} (wandb)`)
            : named(run.name),
          run.status,
          grouped(run.num_steps),
          run.last_step === null ? "\u2013" : grouped(run.last_step),
          run.failure || "",
        ]),
      ),
    ),
    context.command ? el("p", { class: "caption" }, "Command of this report: ", el("code", {}, context.command)) : null,
    (content.notes || []).length
      ? [
          el("h3", {}, "Notes from reading the runs"),
          el(
            "ul",
            {},
            content.notes.map((note) => el("li", {}, note)),
          ),
        ]
      : [],
  );
}

const GUIDE = [
  [
    "Verdict",
    "MATCH: step one, all guards and all claims pass. MISMATCH: step one or a guard fails, a difference is shown to exceed its margin, or a limit is shown to be broken. INCONCLUSIVE: neither equivalence nor a difference beyond the margin is shown. INVALID: the runs cannot be compared fairly.",
  ],
  [
    "Certified bound",
    "The smallest margin that would have passed: the end of the interval that is farther from zero. Compare it with a margin of your own if you find the declared one too wide or too narrow.",
  ],
  [
    "Shaded band",
    "Mean \u00b1 1 standard deviation over the seeds of an arm at each step. It shows the spread and is not a test: overlapping bands do not show that arms agree.",
  ],
  [
    "Paired difference",
    `${treatmentName()} minus ${baselineName()} with the same seed at the same step. \u201cLog ratio\u201d is a difference of logarithms: 0.05 is about 5\u00a0%.`,
  ],
  [
    "Diamond and bar",
    "The claim: mean difference over the window, and the interval that must lie inside the margin (90\u00a0% CI; wider with interim analyses). For a margin in sigmas of the baseline another test decides, and the zone and interval are only a guide.",
  ],
  [
    "Thin bars",
    "Eight windows over the whole run with Bonferroni-t intervals: simultaneous 95\u00a0% coverage of all true window means. They can cross the margin on a MATCH; only the claim is tested.",
  ],
  ["Gaps", "A line breaks where a NaN or infinity was recorded; the notes below the chart count them."],
  [
    "Buckets",
    "Long runs are drawn in buckets of consecutive steps: means and bands as bucket means, seeds and pairs (if switched on) as the smallest and largest value of each bucket. All tests use all steps.",
  ],
  [
    "Controls",
    "Drag across a chart to zoom, double-click to reset. \u201cSmooth\u201d draws means and bands as running means. \u201cCSV\u201d saves the numbers of a chart. The buttons in the top bar show or hide an arm in all charts.",
  ],
];

const guide = () =>
  section(
    "guide",
    "How to read this page",
    el(
      "dl",
      { class: "guide" },
      GUIDE.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))),
    ),
  );

// --- sections that hold charts ---

function curves() {
  const claimed = report.metrics.slice(0, report.num_claimed);
  return claimed.length
    ? section(
        "curves",
        "Curves of the claims",
        claimed.map((metric) => figureOf(metric)),
      )
    : null;
}

function others() {
  const rest = report.metrics
    .map((metric, index) => [metric, index])
    .slice(report.num_claimed)
    .filter(([metric]) => metric !== report.mismatch);
  if (!rest.length) return null;
  const items = rest.map(([metric, index]) => {
    const item = el("details", { class: "metric" }, el("summary", {}, metric));
    item.metric = metric.toLowerCase();
    item.addEventListener("toggle", () => {
      if (item.open && !item.querySelector(".figure"))
        item.append(new Figure(index, { titled: false }).element);
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
        status.textContent = wanted
          ? `${shown} of ${count(items.length, "metric")}`
          : count(items.length, "metric");
      },
    },
  });
  const open = (wanted) => () => {
    for (const item of items) if (!item.hidden) item.open = wanted;
  };
  return section(
    "metrics",
    "All other metrics",
    el(
      "p",
      { class: "intro" },
      `Recorded but not tested: no claim is about them.${report.mismatch ? ` ${report.mismatch} is drawn under Guards.` : ""}`,
    ),
    el(
      "div",
      { class: "tools" },
      filter,
      status,
      el("span", { class: "actions" }, button("Open all", open(true)), button("Close all", open(false))),
    ),
    ...items,
    report.left_out.count ? el("p", { class: "muted" }, leftOut(report.left_out)) : null,
  );
}

function leftOut({ count: num, names }) {
  const more = num > names.length ? `, and ${grouped(num - names.length)} more` : "";
  return `Left out to keep this page small: the curves of ${names.join(", ")}${more}. They are in the logs of the runs; a claim on a metric (--claim) draws it here.`;
}

// --- the bar at the top, theme, print ---

const armToggles = new Map();

function toggleEverywhere(arm) {
  if (hidden.has(arm)) hidden.delete(arm);
  else hidden.add(arm);
  armToggles.get(arm).setAttribute("aria-pressed", String(!hidden.has(arm)));
  for (const figure of figures) {
    figure.hidden.delete(arm);
    figure.apply();
  }
}

const isDark = () =>
  (document.documentElement.dataset.theme ||
    (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  themeButton.setAttribute("aria-pressed", String(isDark()));
  for (const figure of figures) if (figure.plots.length) figure.redraw();
}

const themeButton = button("Dark", () => setTheme(isDark() ? "light" : "dark"), {
  class: "theme",
  "aria-pressed": String(isDark()),
});

function bar() {
  arms.forEach((name, arm) =>
    armToggles.set(
      arm,
      button([swatch(arm), el("span", {}, name)], () => toggleEverywhere(arm), {
        class: "arm",
        title: name,
        "aria-pressed": "true",
      }),
    ),
  );
  return el(
    "header",
    { class: "bar" },
    el(
      "div",
      { class: "inner" },
      el(
        "a",
        { class: "title", href: "#top" },
        el("b", { class: `word ${content.verdict}` }, verdictName),
        el("span", {}, content.experiment),
      ),
      el("div", { class: "toggles", role: "group", "aria-label": "Arms shown in all charts" }, [
        ...armToggles.values(),
      ]),
      themeButton,
    ),
  );
}

// Before printing, draw all charts, in light colours.
let themeBefore;
addEventListener("beforeprint", () => {
  if (printing) return;
  printing = true;
  themeBefore = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  for (const figure of figures) {
    if (figure.data) figure.erase();
    figure.draw();
  }
});
addEventListener("afterprint", () => {
  printing = false;
  for (const figure of figures) figure.erase();
  setTheme(themeBefore);
  for (const figure of figures) figure.draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  setTheme(document.documentElement.dataset.theme),
);

const body = [
  description(),
  claimsSection(),
  sensitivity(),
  curves(),
  divergence(),
  completions(),
  guards(),
  stepOne(),
  finalWeights(),
  savings(),
  others(),
  bullets(
    "not-tested",
    "Not tested",
    content.not_tested,
    `Nothing to list. Only the claims above were tested, on ${context.has_recipe ? "this recipe" : "these runs"} and these steps.`,
  ),
  configuration(),
  versions(),
  guide(),
].filter(Boolean);
const contents = el(
  "nav",
  { class: "contents", "aria-label": "Contents" },
  sections.map(([id, title]) => el("a", { href: `#${id}` }, title)),
);
document.body.append(bar(), el("main", { id: "top" }, banner(), contents, ...body));
