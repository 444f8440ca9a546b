// The sections of the page, the verdict first, and the bar above them.
"use strict";

const VERDICTS = {
  MATCH: ["\u2713", "Every claim and every guard pass."],
  MISMATCH: ["\u2715", "A claim, step one or a guard shows a difference."],
  INCONCLUSIVE: ["?", "Neither equivalence nor a difference is shown."],
  INVALID: ["!", "These runs cannot be compared."],
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
const described = (content.descriptions || []).length > 0 && content.verdict === "INCONCLUSIVE";
const verdictName = described ? "DESCRIPTION" : content.verdict;
const sections = [];
function section(id, title, ...children) {
  const made = el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    ...children,
  );
  sections.push([id, title]);
  return made;
}

// --- the verdict ---

function banner() {
  const [glyph, outcome] = VERDICTS[content.verdict] || ["?", ""];
  const unread = content.verdict === "MATCH" && !(content.step_one || []).length;
    const meaning = described
    ? content.descriptions.some((one) => one.interval)
      ? "Nothing is claimed: a description, not a test."
      : "One run of each arm: a description, not a test."
    : unread
      ? `${outcome} Step one was not looked at.`
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
    ["arms", [baselineName(), ...treatments].join(" \u00b7 ")],
    ["exit code", String(content.exit_code)],
  ];
  if (content.reference) facts.push(["reference", content.reference]);
  if (context.has_recipe) facts.push(["injected faults", caughtText()], ["drift against one ULP", grownText()]);
  if (context.time_range) facts.push(["runs", context.time_range]);
  if (context.environment) facts.push(["on", context.environment]);
  const analyses = Object.entries(content.arms || {}).flatMap(([arm, one]) =>
    (one.interim_analyses || []).map((analysis) => [arm, analysis]),
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
          levels.map((one) =>
            el(
              "li",
              {},
              several ? [swatch(arms.indexOf(one.arm)), `${one.arm}, `] : [],
              `${one.where}: `,
              el("b", {}, one.means),
              levels.length > MOST_DETAILED ? null : muted(`; ${one.details}`),
            ),
          ),
        )
      : null,
    several
      ? el(
          "ul",
          { class: "arms-verdicts" },
          Object.entries(content.arms || {}).map(([arm, one]) =>
            el("li", {}, swatch(arms.indexOf(arm)), `${arm}: `, el("b", {}, one.verdict)),
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

// What the experiment could have seen, and how its drift compares: in the head, each a link to its table.
function caughtText() {
  const text = context.injected_faults;
  return content.sensitivity ? el("a", { href: "#sensitivity" }, text) : text;
}

function grownText() {
  const known = (content.divergence || []).filter((one) => one.ulp && one.ulp.ratio !== null);
  if (!known.length) return "not measured (controls.ulp_reruns)";
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
const asked = (key) => (context.has_recipe ? ` (${key})` : ""); // where a recipe could ask for it
const levels = context.levels || [];
const MOST_DETAILED = 3; // levels in the head

// --- arms without a claim, or with one run each ---

function description() {
  const list = content.descriptions || [];
  if (!list.length) return null;
  const two = list.every((one) => one.interval === null);
  const title = two ? "The two runs" : "The arms";
  const intro = two
    ? "Levels over the window, and how far apart the curves lie over all steps that both recorded. Two runs cannot tell what the treatment does from what a seed does."
    : "Levels over the window, the difference with its 90 % interval, the smallest margin that these runs would certify, and what a margin that follows from the baseline alone would take, with 80 % power, were the arms equal.";
  const heads = two
    ? [["mean |difference| over steps", "right"], ["largest", "right"], ["at step", "right"]]
    : [["90 % interval", "right"], ["smallest margin shown", "right"], ["a margin of", "right"], ["takes, were the arms equal", "right"]];
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
        ...heads,
      ],
      list.map((one) => [
        ...(several ? [one.arm] : []),
        named(one.metric, "b"),
        `${one.steps[0]}\u2013${one.steps[1]}`,
        number(one.baseline, 4),
        number(one.treatment, 4),
        signed(one.difference, 3),
        ...(two ? distances(one) : prospects(one)),
      ]),
    ),
  );
}

const distances = (one) => [
  number(one.mean_distance, 3),
  number(one.largest_distance, 3),
  String(one.largest_at),
];

function takesText(one, counted) {
  if (one.detected && Math.min(...one.interval.map(Math.abs)) > one.margin) return "the difference is beyond it";
  return `${one.runs_needed ?? "more than 1000"} ${counted}${one.detected ? `, but it is ${one.detected.direction}` : ""}`;
}

function prospects(one) {
  if (!one.interval) return ["\u2013", "\u2013", "\u2013", "two runs of each arm"];
  const counted = one.paired ? "pairs" : "runs of each arm";
  return [
    outward(one.interval),
    `\u00b1${boundText(one.certified_bound)}`,
    one.margin === null ? "\u2013" : el("span", { title: one.margin_is }, `\u00b1${number(one.margin, 3)}`),
    one.margin === null ? "\u2013" : takesText(one, counted),
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
  const heads = [
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
      `${comparedText()} Each claim says that the arms agree on a metric within a margin, or keep a limit. The certified bound is the smallest margin that would have passed.${testedText(claims)}`,
    ),
    forest(claims),
    table(
      "Claims",
      heads,
      claims.map((one) => [
        ...(several ? [one.arm] : []),
        [named(one.metric, "b"), muted(detailOfClaim(one))],
        [chip(outcomeOf(one)), muted(outlook(one))],
        dotPlot(one),
        [
          typeof one.limited === "number" ? number(one.limited, 4) : signed(one.mean_difference, 3),
          muted(
            one.limited_interval
              ? `${confidence(one.alpha)} ${interval(one.limited_interval)}`
              : one.interval || one.ci90
              ? `${confidence(one.interval ? one.alpha : 0.05)} ${outward(one.interval || one.ci90)}`
              : "no interval",
          ),
        ],
        marginText(one),
        [
          el("b", {}, boundText(one.certified_bound)),
          typeof one.certified_number === "number" ? muted(certifiedText(one)) : null,
        ],
        [one.steps ? `${one.steps[0]}\u2013${one.steps[1]}` : "\u2013", muted(one.window)],
        one.num_runs ? bothSizes(one.num_runs) : String(one.num_pairs),
      ]),
    ),
    el(
      "p",
      { class: "caption" },
      key("margin", "margin"),
      content.paired === false ? null : key("dot", "one pair"),
      key("claim", "mean and its interval"),
    ),
  );
}

// The bound in the unit of a measured margin, as the other reports give it.
function certifiedText(claim) {
  if (claim.margin_unit === "sigma") return `${boundText(claim.certified_number)} sigma`;
  if (claim.margin_unit !== "level" && claim.margin_unit !== "climb") return "";
  return `${boundText(100 * claim.certified_number)}%${claim.margin_unit === "climb" ? " of climb" : ""}`;
}

// As the other reports say it: with interim analyses, at the level of the analysis.
function testedText(claims) {
  const levels = claims.filter((one) => one.test !== "exact").map((one) => one.alpha ?? 0.05);
  if (!levels.length) return "";
  const level = Math.max(...levels);
  const share = (value) => `${number(100 * value, 3)}\u00a0%`;
  return ` Claims are tested at ${share(1 - level)} confidence: ${share(level)} lie beyond each end of a ${confidence(level)} interval.`;
}

// What the column of means holds: a limit is of a level or a ratio, and not of a difference.
function measured(claims) {
  const tests = new Set(claims.map((one) => one.test));
  const named = [];
  if ([...tests].some((test) => !["limit", "ratio limit", "exact"].includes(test))) named.push("mean difference");
  if (tests.has("limit")) named.push(`level of ${treatmentName()}`);
  if (tests.has("ratio limit")) named.push("ratio");
  return named.join(" or ") || "mean difference";
}

function detailOfClaim(one) {
  return [scaleText(one.transform), one.reduction ? `window ${one.reduction}` : "", one.test || ""]
    .filter(Boolean)
    .join(", ");
}

const BROKEN = { limit: "limit broken", "ratio limit": "limit broken", exact: "not exact" };
const outcomeOf = (one) => (one.result === "different" && BROKEN[one.test]) || one.result;

const bothSizes = (runs) => `${runs[0]} and ${runs[1]}`;

const marginText = (one) =>
  one.margin_text || (typeof one.margin === "number" ? `\u00b1${number(one.margin)}` : "\u2013");

function outlook(one) {
  if (one.problem) return one.problem;
  if (one.result !== "undecided") return "";
  const many = (size) => (size === null || size === undefined ? "more than 1000" : String(size));
  const range = one.pairs_needed_range ? ` (${one.pairs_needed_range.map(many).join(" to ")})` : "";
  const unit = one.num_runs ? "runs of each arm" : "pairs";
  const excludesZero = one.interval && (one.interval[0] > 0 || one.interval[1] < 0);
  if (excludesZero && one.margin_unit !== "sigma")
    return Math.abs(one.mean_difference) >= one.margin
      ? "interval without zero; no number of runs shows equivalence at the observed difference"
      : `interval without zero; 80\u00a0% takes ${many(one.pairs_needed_observed)} ${unit} at the observed difference`;
  return `power now ${percent(one.power_now)}; 80\u00a0% takes ${many(one.pairs_needed)}${range} ${unit}`;
}

// All claims on one scale: how far each interval reaches, in units of its own margin.
function forest(claims) {
  const drawn = claims
    .map((one, at) => ({ ...one, levels: levels.find((level) => level.claim === at) }))
    .filter((one) => one.margin > 0 && one.interval?.every(Number.isFinite));
  if (!drawn.length) return null;
  const all = drawn.flatMap((one) => one.interval.map((end) => Math.abs(end / one.margin)));
  const reach = Math.min(4, Math.max(1.3, 1.1 * Math.max(...all)));
  const place = (share) => 50 * (1 + Math.max(-reach, Math.min(reach, share)) / reach);
  const mark = (kind, from, to = from) => {
    const made = el("i", { class: kind });
    made.style.left = `${place(from)}%`;
    made.style.width = `${place(to) - place(from)}%`;
    return made;
  };
  const label = (share, text) => {
    const made = mark("label", share);
    made.append(text);
    return made;
  };
  const rows = drawn.map((one) => {
    const [low, mean, high] = [one.interval[0], one.mean_difference, one.interval[1]].map((end) => end / one.margin);
    return [
      el(
        "div",
        {},
        el("b", {}, several ? `${one.arm}: ${one.metric}` : one.metric),
        muted((levels.length > MOST_DETAILED && one.levels?.details) || `margin ${marginText(one)}`),
      ),
      el(
        "div",
        {
          class: `track arm-${arms.indexOf(one.arm) % 6}`,
          role: "img",
          "aria-label": `${one.metric}: ${number(mean, 2)} margins, interval ${interval([low, high], 2)}`,
        },
        mark("zone", -1, 1),
        mark("zero", 0),
        mark("reach", low, high),
        mark("mean", mean),
      ),
    ];
  });
  const heads = el(
    "div",
    { class: "track heads", "aria-hidden": "true" },
    label(-1, `${MINUS}margin`),
    label(0, "no difference"),
    label(1, "+margin"),
  );
  return el("figure", { class: "forest" }, el("div", {}), heads, ...rows.flat());
}

// How sure, at a glance: the margin zone, each pair's difference, and the interval that must lie inside.
function dotPlot(one) {
  const ends = [one.interval || one.ci90].find((pair) => pair?.every(Number.isFinite));
  const differences = (one.differences || []).filter((value) => typeof value === "number");
  const shown = [one.margin, ...(ends || []), ...differences].filter((value) => typeof value === "number");
  if (!ends && !differences.length) return muted("\u2013");
  const reach = 1.12 * Math.max(...shown.map(Math.abs)) || 1;
  const [width, height] = [190, 44];
  const x = (value) => (width * (0.5 + value / reach / 2)).toFixed(1);
  const parts = [];
  if (typeof one.margin === "number")
    parts.push(
      svg("rect", {
        class: "zone",
        x: x(-one.margin),
        width: (x(one.margin) - x(-one.margin)).toFixed(1),
        y: 0,
        height,
      }),
    );
  parts.push(svg("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: height }));
  differences.forEach((value, index) =>
    parts.push(
      svg("circle", {
        class: `arm-${arms.indexOf(one.arm) % 6}`,
        cx: x(value),
        cy: 9 + 3.2 * (index % 4),
        r: 2.6,
      }),
    ),
  );
  if (ends) {
    const [low, high, y] = [x(ends[0]), x(ends[1]), 33];
    const mean = Number(x(one.mean_difference));
    parts.push(
      svg("path", { class: "reach", d: `M${low} ${y}H${high}M${low} ${y - 4}v8M${high} ${y - 4}v8` }),
    );
    parts.push(svg("path", { class: "mean", d: `M${mean} ${y - 5}l5 5l-5 5l-5 -5z` }));
  }
  const label = `${one.num_runs ? "Difference" : "Paired differences"} of ${one.metric}: mean ${number(one.mean_difference, 3)}, interval ${outward(ends)}, margin ${marginText(one)}`;
  return svg(
    "svg",
    { class: "dots", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    ...parts,
  );
}

// --- tables of evidence ---

const withArm = (heads) => (several ? [["arm"], ...heads] : heads);
const armCell = (one) => (several ? [one.arm] : []);

function guards() {
  const list = content.guards || [];
  return section(
    "guards",
    "Guards",
    el("p", { class: "intro" }, "One-sided limits that a treatment must keep, at every step."),
    list.length
      ? table(
          "Guards",
          withArm([["guard"], ["result"], ["value", "right"], ["limit", "right"], ["what was found"]]),
          list.map((one) => [
            ...armCell(one),
            el("span", { class: "name" }, one.guard.replaceAll("_", " ")),
            chip(one.result),
            number(one.value),
            number(one.limit),
            one.text,
          ]),
        )
      : el("p", {}, "No guard was read."),
    report.mismatch
      ? figureOf(report.mismatch, { limit: report.mismatch_limit })
      : el(
          "p",
          { class: "muted" },
          "Trainer against rollout engine: train/token_mult_prob_error is not recorded.",
        ),
  );
}

function stepOne() {
  const list = content.step_one || [];
  const meter = (one) => {
    const share =
      typeof one.deviation === "number" && one.tolerance ? one.deviation / one.tolerance : Infinity;
    const bar = el(
      "span",
      { class: `meter ${one.result === "pass" ? "" : "over"}`, "aria-hidden": "true" },
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
      "Before any treated update can have had an effect, both arms must agree up to rounding. A deviation is a share of " +
        "the scale beside it: the metric's size, or that of the terms that cancel in it. It is of the pair that deviates " +
        "most; what lies within the tolerance is taken for rounding.",
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
            ["of tolerance"],
            ["A/A deviation", "right"],
            ["seed", "right"],
          ]),
          list.map((one) => [
            ...armCell(one),
            named(one.metric),
            chip({ pass: "agrees", fail: "deviates" }[one.result] || one.result),
            number(one.baseline, 6),
            number(one.treatment, 6),
            [number(one.deviation, 2), muted(`of ${one.scale_from} (${number(one.scale, 3)})`)],
            [number(one.tolerance, 2), muted(one.tolerance_from)],
            meter(one),
            number(one.aa_deviation, 2),
            String(one.seed),
          ]),
        )
      : el("p", {}, "Step one was not read."),
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
      "Whether the trained weights are equal bit for bit, by a hash of all of them; if not, how far apart they end, estimated from sketches of all weights. This is a diagnosis and decides no verdict, unless a claim limits the distance.",
    ),
    table(
      "Final weights",
      withArm([
        ["pairs equal bit for bit"],
        ["distance / baseline's norm (from a sketch, within 8 %)", "right"],
        ["A/A", "right"],
        ["seed", "right"],
      ]),
      list.map((one) => [
        ...armCell(one),
        `${one.num_equal} of ${one.num_pairs}`,
        number(one.relative_difference, 2),
        number(one.aa_relative_difference, 2),
        one.seed === null ? "" : String(one.seed),
      ]),
    ),
  );
}

function divergence() {
  const list = content.divergence || [];
  const apart = (one) =>
    one.noise_floor !== "zero" ? "" : one.first_step_apart === null ? "never" : String(one.first_step_apart);
  const ratio = (one) =>
    ({ zero: "\u2013", unknown: "unknown" })[one.noise_floor] ||
    `${number(one.ratio, 2)}\u00d7`;
  const grown = (one) =>
    one.ulp === null
      ? ""
      : one.ulp.ratio === null
        ? "no ratio"
        : `${number(one.ulp.ratio, 2)}\u00d7 ${one.ulp.ci95 ? interval(one.ulp.ci95) : ""}`;
  const unknown = list.length && list.every((one) => one.noise_floor === "unknown");
  return section(
    "divergence",
    "Divergence",
    el(
      "p",
      { class: "intro" },
      `How far the arms part, step by step, against how far baselines with one and the same seed part (the A/A noise floor), against what one ULP of the initial weights grows into${asked("controls.ulp_reruns")}, and against the spread over seeds. This is a diagnosis; no verdict hangs on it.`,
    ),
    unknown ? el("p", {}, `Noise floor unknown: there are no A/A reruns${asked("controls.aa_reruns")}.`) : null,
    list.some((one) => one.noise_floor === "zero")
      ? el("p", {}, "No ratio is given where reruns of the baseline repeat it bit for bit: the noise floor is 0.")
      : null,
    list.length
      ? table(
          "Divergence",
          withArm([
            ["metric"],
            ["mean |difference|", "right"],
            ["A/A mean |difference|", "right"],
            ["ratio", "right"],
            ["against one ULP", "right nowrap"],
            ["of the spread over seeds", "right"],
            ["apart from step", "right"],
          ]),
          list.map((one) => [
            ...armCell(one),
            named(one.metric),
            number(one.mean_difference, 3),
            number(one.aa_mean_difference, 3),
            ratio(one),
            grown(one),
            one.share_of_seed_spread === null ? "" : number(one.share_of_seed_spread, 2),
            apart(one),
          ]),
        )
      : el("p", {}, content.paired === false ? "Runs that are not paired have no distance." : "No finished pair."),
  );
}

function sensitivity() {
  const found = content.sensitivity;
  if (!found) return null;
  const seen = (one) =>
    one.caught_by === "nothing"
      ? one.verdict === "INVALID" ? "not judged" : "nothing"
      : [one.caught_by, one.metric].filter(Boolean).join(": ");
  return section(
    "sensitivity",
    "What it would have caught",
    el(
      "p",
      { class: "intro" },
      "Faults injected in the baseline, each judged as a treatment is: " +
        (found.num_judged
          ? `${found.num_caught} of ${found.num_judged} were caught, by ${found.num_pairs} ${content.paired === false ? "runs of each arm" : "pairs"} of ${found.num_steps} steps. A fault not caught would have passed where its verdict is MATCH, and was left open where it is INCONCLUSIVE.`
          : "none of them could be judged."),
    ),
    table(
      "Injected faults",
      [["fault"], ["size", "right"], ["verdict"], ["caught by"], ["step", "right"], ["figures"], ["pairs", "right"]],
      found.faults.map((one) => [
        named(one.fault),
        one.size === null ? "-" : `${number(one.size, 3)} ${one.unit}`,
        one.verdict,
        seen(one),
        one.step === null ? "-" : String(one.step),
        one.figures || "-",
        String(one.num_pairs),
      ]),
    ),
    ...found.faults
      .filter((one) => one.advice)
      .map((one) => el("p", {}, el("b", {}, one.fault), ` could be seen by ${one.advice}`)),
  );
}

// --- what the arms said ---

function completions() {
  const found = context.completions;
  if (!found) return null;
  const intro = "What the arms said to the same prompts at the same steps: of one seed, a few prompts and steps.";
  if (found.problem) return section("completions", "Completions side by side", el("p", {}, found.problem));
  const shown = el("div", { class: "said", role: "region", "aria-live": "polite", "aria-label": "Completions" });
  const steps = found.steps.map(([step]) => step);
  const choose = (at) => {
    shown.replaceChildren(...found.steps[at][1].map((one) => exchange(one, found.arms)));
    buttons.forEach((one, index) => one.setAttribute("aria-pressed", String(index === at)));
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
      found.num_steps > steps.length ? muted(`of ${found.num_steps} steps that kept some`) : null,
    ),
    shown,
  );
}

function exchange({ prompt, said }, of) {
  const rewards = said.filter(Boolean).map((one) => one.reward);
  const apart = new Set(said.map((one) => one && one.text)).size > 1;
  const facts = (one) =>
    [
      one.num_tokens === null ? "" : `${one.num_tokens} tokens`,
      one.truncated ? "truncated" : "",
      one.logprob_error === null ? "" : `log-prob error ${number(one.logprob_error, 2)}`,
    ]
      .filter(Boolean)
      .join(", ");
  return el(
    "article",
    { class: "exchange" },
    el("pre", { class: "prompt" }, prompt),
    el("p", { class: "caption" }, apart ? "the texts differ" : "the texts agree"),
    el(
      "div",
      { class: "columns" },
      said.map((one, at) =>
        el(
          "div",
          { class: `column arm-${of[at] % 6}` },
          el(
            "p",
            {},
            swatch(of[at]),
            ` ${arms[of[at]]} `,
            one ? el("b", { class: one.reward < Math.max(...rewards) ? "lower" : "" }, `reward ${number(one.reward, 3)}`) : null,
          ),
          one ? el("pre", {}, one.text) : muted("not kept"),
          one ? muted(facts(one)) : null,
        ),
      ),
    ),
  );
}

function savings() {
  const list = content.savings || [];
  const bytes = (value) =>
    value >= 2 ** 28 ? `${number(value / 2 ** 30, 3)} GiB` : `${number(value / 2 ** 20, 3)} MiB`;
  const shown = (one, value) =>
    one.quantity.startsWith("peak memory") ? bytes(value) : `${number(value, 3)} s`;
  return section(
    "cost",
    "Time and memory",
    el(
      "p",
      { class: "intro" },
      `What the treatment costs relative to the baseline: ${content.paired === false ? "ratio of geometric means" : "geometric mean of paired ratios"}. A ratio is no claim of equivalence.`,
    ),
    list.length
      ? table(
          "Time and memory",
          withArm([
            ["quantity"],
            [baselineName(), "right"],
            [treatmentName(), "right"],
            ["ratio", "right"],
            ["95\u00a0% interval", "right"],
            [content.paired === false ? "runs" : "pairs", "right"],
          ]),
          list.map((one) => [
            ...armCell(one),
            one.quantity,
            shown(one, one.baseline),
            shown(one, one.treatment),
            el("b", {}, number(one.ratio, 3)),
            interval(one.ci95),
            one.num_runs ? bothSizes(one.num_runs) : String(one.num_pairs),
          ]),
        )
      : el("p", {}, "Neither step time nor peak memory was recorded by every finished run."),
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
    el("h3", {}, `Peak memory by phase`, muted(` ${memory.counter}, mean over the seeds of an arm`)),
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
    el("p", {}, "The peak is in ", joined(arms.map((name, arm) => [name, memory.held_by[arm]])), "."),
  );
}

// Arms whose peak is in the same phase are named together.
function joined(holders) {
  const known = holders.filter(([, phase]) => phase);
  const phases = [...new Set(known.map(([, phase]) => phase))];
  const named = (phase) => known.filter(([, one]) => one === phase).map(([name]) => name).join(", ");
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
          list.map((one) => el("li", {}, one)),
        )
      : el("p", {}, none),
  );
}

function configuration() {
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const made = Object.entries(content.arms || {}).flatMap(([arm, one]) => {
    const rows = Object.entries(one.treatment_diff || {});
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
        : el("p", {}, "No difference between the resolved configurations is declared or known."),
    ];
  });
  return section("configuration", "Resolved configuration: what differs", ...made);
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value))
    return [
      [
        prefix,
        Array.isArray(value)
          ? value.map((one) => (typeof one === "object" ? JSON.stringify(one) : String(one))).join(", ")
          : String(value),
      ],
    ];
  return Object.entries(value).flatMap(([name, one]) => flat(one, prefix ? `${prefix}.${name}` : name));
}

function versions() {
  const environments = (content.environments || []).map((one) => ({
    runs: one.runs,
    values: new Map(flat(one.environment)),
  }));
  const names = [...new Set(environments.flatMap((one) => [...one.values.keys()]))];
  const differs = (name) => new Set(environments.map((one) => one.values.get(name))).size > 1;
  const said = (value) => (value === undefined || value === null || value === "null" ? "not there" : value);
  const head = (one) =>
    environments.length === 1
      ? "all runs that state it"
      : one.runs.length > 4
        ? `${one.runs.slice(0, 3).join(", ")} and ${one.runs.length - 3} more`
        : one.runs.join(", ");
  return section(
    "versions",
    "Versions and runs",
    environments.length
      ? table(
          "Versions",
          [["what"], ...environments.map((one) => [head(one)])],
          names.map((name) => [
            [el("code", {}, name), differs(name) ? el("span", { class: "chip open" }, "differs") : null],
            ...environments.map((one) => said(one.values.get(name))),
          ]),
        )
      : el("p", {}, "No run states its versions and devices."),
    el(
      "details",
      { class: "runs" },
      el("summary", {}, `${count(report.runs.length, "run")}`),
      table(
        "Runs",
        [["run"], ["status"], ["steps recorded", "right"], ["last step", "right"], ["how it failed"]],
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
    context.command ? el("p", { class: "caption" }, "Report made by ", el("code", {}, context.command)) : null,
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
    "MATCH: step one, all guards and all claims pass. MISMATCH: step one or a guard fails, a difference is shown to exceed its margin, or a limit to be broken. INCONCLUSIVE: neither equivalence nor a difference beyond the margin is shown; each claim says what is. INVALID: the runs are no fair pair.",
  ],
  [
    "Certified bound",
    "The smallest margin that would have passed; for the paired test that is the end of the interval that lies farther from zero. Whoever finds the margin too wide, or too narrow, can compare their own with it.",
  ],
  [
    "Shaded band",
    "Mean \u00b1 1 standard deviation over the seeds of an arm, step by step. It is a picture of the spread, not a test: overlapping bands do not show that arms agree.",
  ],
  [
    "Paired difference",
    "Treatment minus baseline of one seed, at the same step. \u201cLog ratio\u201d means the difference of logarithms: 0.05 is about 5\u00a0%.",
  ],
  [
    "Diamond and bar",
    "The claim: mean difference of the window\u2019s summaries and the interval that must lie inside the margin (90\u00a0% for one analysis, wider for several). Where the margin is in sigmas of the baseline, a test of its own decides, and zone and interval are for orientation.",
  ],
  [
    "Thin bars",
    "Eight windows over the whole run, Bonferroni-t: together they cover all the true window means with 95\u00a0%.",
  ],
  ["Gaps", "A line is interrupted where a NaN or an infinity was recorded; each is counted below its chart."],
  [
    "Buckets",
    "Long runs are drawn as buckets of consecutive steps: means and bands by the mean of each, seeds and pairs by its smallest and its largest value, once they are switched on. Every test was computed from all steps.",
  ],
  [
    "Controls",
    "Drag across a chart to zoom, double-click to see everything again. \u201cSmooth\u201d draws means and bands as running means. \u201cCSV\u201d saves the numbers that a chart is drawn from. The arms in the bar at the top are shown or hidden everywhere.",
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
    el("p", { class: "intro" }, "Recorded, and not tested: no claim was made about them."),
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
  return `Left out, to keep this page small: the curves of ${names.join(", ")}${more}. They are in the runs\u2019 own logs; a claim on a metric (--claim) draws it here.`;
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

// Paper shows what the page would on being scrolled through, in light colours.
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
    "What was not tested",
    content.not_tested,
    `The report lists nothing here; still, only the claims above were tested, on ${context.has_recipe ? "this recipe" : "these runs"} and these steps.`,
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
