// The card at the top: the verdict, the finding, what the arms are, facts and next commands.
"use strict";

const VERDICTS = {
  MATCH: ["\u2713", "Every claim and every guard passes."],
  PASS: ["\u2713", "Every claim and every guard passes; the claims are one-sided."],
  MISMATCH: ["\u2715", failedText()],
  FAIL: ["\u2715", failedText()],
  INCONCLUSIVE: ["?", "Neither that the claims hold nor that one is broken is shown."],
  INVALID: ["!", "These runs cannot be compared fairly."],
  DESCRIPTION: ["\u2261", "No claim was declared: descriptive statistics, no test."],
};
const MAX_CHANGES = 5; // changed keys in the card; the section has all
const MAX_LEVELS = 4;
const MAX_INTERVALS = 6;
const verdictName = report.title;
const isDescription = verdictName === "DESCRIPTION";

function verdictCard() {
  const [glyph, outcome] = VERDICTS[verdictName] || ["?", ""];
  const skippedStepOne = ["MATCH", "PASS"].includes(content.verdict) && !evidenceOf("step one").length;
  const described = isDescription ? evidenceOf("description") : [];
  const alone = evidenceOf("seed noise").length > 0;
  const oneRunPerArm = described.length > 0 && described.every((description) => !description.interval);
  const meaning = alone && (content.claims || []).length
    ? "One arm alone: claims on its own level are tested, and its spread from run to run is measured."
    : alone
    ? "One arm alone: its spread from run to run, no test."
    : isDescription && evidenceOf("new run").length
    ? "One run beside the spread of several: no verdict on the arms."
    : oneRunPerArm
    ? "One run per arm: descriptive statistics, no test."
    : `${outcome}${skippedStepOne ? " Step one was not checked." : ""}`;
  const [firstReason, ...otherReasons] = content.reasons || [];
  const headline = isDescription ? describedFinding() : finding();
  // The first reason of a description is its finding; without a deciding claim it is the headline.
  const reasons = isDescription || !headline ? otherReasons : content.reasons.filter((_, at) => !isInHeadline(content.reason_codes[at]));
  return el(
    "section",
    { class: `banner ${verdictName}`, "aria-label": "Verdict" },
    el("p", { class: "experiment" }, content.experiment),
    el(
      "h1",
      {},
      el("span", { class: "glyph-verdict", "aria-hidden": "true" }, glyph),
      verdictName,
      report.qualifiers.map((qualifier) => el("span", { class: "badge" }, qualifier)),
    ),
    headline || firstReason ? el("p", { class: "finding" }, headline || firstReason) : null,
    el("p", { class: "meaning" }, meaning),
    armsTable(),
    drawnClaims().length <= MAX_INTERVALS ? forest() : null,
    reasons.length ? el("ul", { class: "reasons" }, reasons.map((reason) => el("li", {}, reason))) : null,
    el("dl", { class: "facts" }, facts().map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    (context.next_steps || []).map((step, at) =>
      el("div", { class: "next" }, el("b", {}, at ? "or " : "Next "), step.text, commandLine(step.command)),
    ),
  );
}

const seedsAgreeing = (detected) =>
  detected &&
  `${detected.direction} in ${detected.num_agreeing} of ${detected.num_compared} ${detected.paired ? "seeds" : "runs"}`;

function describedFinding() {
  if (evidenceOf("new run").length) return null;
  const described = evidenceOf("description");
  const [row] = described;
  // A ratio that holds at every step comes first, as a reason
  if (!row || !row.detected || described.some((one) => one.ratio_at_each_step)) return null;
  return [
    el("b", {}, `${row.metric} is ${number(Math.abs(row.difference), 3)} ${row.detected.direction} in ${row.arm}`),
    `: ${number(row.treatment)} against ${number(row.baseline)} in ${baselineName()}; ${seedsAgreeing(row.detected)}.`,
  ];
}

// What fails, counted: 2 step-one checks and 1 claim fail.
function failedText() {
  const failed = (list, noun) => {
    const size = list.filter(({ result }) => ["fail", "different"].includes(result)).length;
    return size ? [[size, count(size, noun)]] : [];
  };
  const groups = [
    ...failed(evidenceOf("step one"), "step-one check"),
    ...failed(evidenceOf("guard"), "guard"),
    ...failed(content.claims || [], "claim"),
  ];
  const fails = groups.length === 1 && groups[0][0] === 1 ? "fails" : "fail";
  return groups.length ? `${groups.map(([, text]) => text).join(" and ")} ${fails}.` : "";
}

function decidingClaims() {
  const deciding = { MATCH: "equivalent", MISMATCH: "different", INCONCLUSIVE: "undecided" }[content.verdict];
  return (content.claims || []).filter((claim) => claim.result === deciding);
}

// The headline and the intervals below it say all that the first deciding claim's reason does, but for its warnings.
function isInHeadline(reason) {
  const [{ code, values }, [claim]] = [reason || {}, decidingClaims()];
  return (
    ["claim_equivalent", "claim_differs"].includes(code) &&
    !values.warnings?.length && values.metric === claim.metric && values.arm === claim.arm
  );
}

// The finding of the claim that decides, with its direction; null if a claim is not what decides.
function finding() {
  const claims = decidingClaims();
  const [claim] = claims;
  if (!claim || (claim.kind ?? "within") !== "within") return null; // a one-sided claim has its reason as the finding
  if (typeof claim.mean_difference !== "number" || typeof claim.limited === "number") return null;
  if (claim.margin === null || claim.treatment_mean == null || claim.baseline_mean == null) return null;
  if (content.verdict === "MATCH" && claims.length > 1)
    return [el("b", {}, `All ${content.claims.length} claims hold`), `: the arms agree within every margin.`];
  const level = (value) =>
    number(claim.transform === "identity" ? value : Math.exp(value) + (claim.transform === "log_excess"), 4);
  const unit = scaleText(claim.transform) ? ` (${scaleText(claim.transform)})` : "";
  const [baseline, treatment] = [level(claim.baseline_mean), level(claim.treatment_mean)];
  const seeds = seedsAgreeing(claim.detected);
  if (claim.result === "different") {
    const size = `${number(Math.abs(claim.mean_difference), 3)}${unit} ${claim.mean_difference < 0 ? "lower" : "higher"}`;
    return [
      el("b", {}, `${claim.metric} is ${size} in ${claim.arm}`),
      `: ${[`${treatment} against ${baseline} in ${baselineName()}`, seeds].filter(Boolean).join(", ")}. The margin is ${marginText(claim)}.`,
    ];
  }
  const difference = [`${signed(claim.mean_difference, 3)}${unit}`, seeds].filter(Boolean).join(", ");
  const place = claim.result === "equivalent" ? "is within" : "is neither shown to be within nor beyond";
  return [
    el("b", {}, `${claim.metric}: ${claim.arm} ${treatment}, ${baselineName()} ${baseline}`),
    `. The difference (${difference}) ${place} the margin ${marginText(claim)}.`,
  ];
}

const valueText = (value) => (typeof value === "string" ? value : value === null ? "\u2013" : JSON.stringify(value));

// What the arms are and what they reached: an arm per column.
function armsTable() {
  const sectionsByArm = content.arms || {};
  const changes = Object.entries(sectionsByArm).flatMap(([arm, { treatment_diff: diff }]) =>
    Object.entries(diff || {}).map(([name, values]) => [arm, name, values]),
  );
  const names = [...new Set(changes.map(([, name]) => name))];
  const configRow = (name) => {
    const [, , [old]] = changes.find(([, changed]) => changed === name);
    const changed = (arm) => changes.find((change) => change[0] === arm && change[1] === name);
    return [
      el("code", {}, named(name)),
      ...arms.map((arm) => el("code", { class: changed(arm) ? "" : "old" }, valueText(changed(arm)?.[2][1] ?? old))),
    ];
  };
  const rows = names.slice(0, MAX_CHANGES).map(configRow);
  if (names.length > MAX_CHANGES)
    rows.push([el("a", { href: "#configuration" }, `and ${names.length - MAX_CHANGES} more keys`), ...arms.map(() => "")]);
  const verdicts = arms.map((arm) => sectionsByArm[arm]?.verdict || "");
  if (several) rows.push(["verdict", ...verdicts.map((verdict) => el("b", { class: `word ${verdict}` }, verdict))]);
  rows.push(...levelRows());
  if (!rows.length) return null;
  const heads = [[""], ...arms.map((name, arm) => [[swatch(arm), ` ${name}`]])];
  return el("div", { class: "arms" }, table("Arms", heads, rows));
}

function levelRows() {
  const records = isDescription ? evidenceOf("description") : content.claims || [];
  const level = (record, which) => {
    const value = record[isDescription ? which : `${which}_mean`];
    if (typeof value !== "number") return null;
    return number(isDescription || record.transform === "identity" ? value : Math.exp(value) + (record.transform === "log_excess"));
  };
  const rows = new Map();
  for (const record of records) {
    const [baseline, treatment] = [level(record, "baseline"), level(record, "treatment")];
    if (baseline === null || treatment === null || !record.steps) continue;
    const name = `${record.metric} ${record.steps}`;
    if (!rows.has(name))
      rows.set(name, [[named(record.metric), muted(stepsText(record.steps))], el("b", {}, baseline), ...treatments.map(() => "")]);
    rows.get(name)[1 + arms.indexOf(record.arm)] = el("b", {}, treatment);
  }
  return [...rows.values()].slice(0, MAX_LEVELS);
}

function facts() {
  const armSections = Object.values(content.arms || {});
  const planned = Math.max(...armSections.map((arm) => arm.num_planned_pairs));
  const hasAnalyses = armSections.some((arm) => (arm.interim_analyses || []).length);
  const pairs = hasAnalyses ? `compared, of ${planned} planned` : `of ${planned} finished`;
  const noise = evidenceOf("seed noise");
  const list = [
    noise.length
      ? ["runs of the arm", String(Object.keys(noise[0].levels).length)]
      : content.paired === false
      ? ["unpaired runs", bothSizes(armSections[0].num_runs)]
      : ["pairs", armSections.length ? `${content.num_pairs} ${pairs}` : String(content.num_pairs)],
  ];
  if (content.reference) list.push(["reference", content.reference]);
  if (evidenceOf("injected fault").length)
    list.push(["injected faults", el("a", { href: "#sensitivity" }, context.injected_faults || "see below")]);
  const drift = evidenceOf("divergence").find((row) => row.ulp && row.ulp.ratio !== null);
  if (drift) {
    const range = drift.ulp.ci95 ? ` ${interval(drift.ulp.ci95)}` : "";
    const text = `${drift.metric}: ${number(drift.ulp.ratio, 2)}\u00d7${range}`;
    list.push(["drift relative to one ULP", el("a", { href: "#divergence" }, text)]);
  }
  if (context.time_range) list.push(["runs", context.time_range]);
  if (context.environment) list.push(["environment", context.environment]);
  for (const [arm, { verdict, interim_analyses: analyses }] of Object.entries(content.arms || {}))
    for (const analysis of analyses || []) {
      const taken = analysis.verdict || (["INCONCLUSIVE", "DESCRIPTION"].includes(verdict) ? "not taken yet" : "not needed");
      list.push([
        `${several ? `${arm}, ` : ""}interim analysis at ${analysis.num_pairs} pairs`,
        `${taken} (one-sided level ${number(analysis.alpha)})`,
      ]);
    }
  return list;
}

// --- all claims on one scale: each interval in units of its own margin ---

const drawnClaims = () =>
  (content.claims || []).filter(
    (claim) => claim.margin > 0 && claim.interval?.every(Number.isFinite) && claim.result !== "not tested",
  );

const beyondText = (mean) => {
  const size = `${number(Math.abs(mean), 2)} margins`;
  return el("b", {}, mean < 0 ? `\u25c2 ${size}` : `${size} \u25b8`);
};

// What a claim accepts, in units of its margin.
const zoneOf = (claim, reach) =>
  accepted(claim).map((end, side) => (end === null ? (side ? reach : -reach) : end / claim.margin));

function forest() {
  const drawn = drawnClaims();
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
    const element = mark(Math.abs(share) < reach ? "label" : `label ${share < 0 ? "first" : "last"}`, share);
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
        muted(`${signed(claim.mean_difference, 3)} ${interval(claim.interval)}, margin ${marginText(claim)}`),
      ),
      el(
        "div",
        {
          class: `track arm-${arms.indexOf(claim.arm) % 6}`,
          role: "img",
          "aria-label": `${claim.metric}: ${number(mean, 2)} margins, interval ${interval([low, high])}`,
        },
        mark("zone", ...zoneOf(claim, reach)),
        mark("zero", 0),
        Math.abs(mean) > reach ? label(Math.sign(mean) * reach, beyondText(mean)) : [mark("reach", low, high), mark("mean", mean)],
      ),
    ];
  });
  const heads = el(
    "div",
    { class: "track heads", "aria-hidden": "true" },
    label(-1, `${MINUS}margin`),
    label(0, reach > 2 ? "0" : "no difference"),
    label(1, "+margin"),
  );
  const corner = muted(several ? `difference from ${baselineName()}` : `${treatmentName()} ${MINUS} ${baselineName()}`);
  return el("figure", { class: "forest" }, el("div", {}, corner), heads, ...rows.flat());
}
