// What was not tested, configurations, versions and runs, and how to read the page.
"use strict";

function notTestedSection() {
  const list = content.not_tested || [];
  return list.length ? section("not-tested", "Not tested", el("ul", {}, list.map((text) => el("li", {}, text)))) : null;
}

// All changed keys; the card shows them unless they are many.
function configurationSection() {
  const changed = Object.entries(content.arms || {}).map(([arm, { treatment_diff: diff }]) => [arm, Object.entries(diff || {})]);
  if (new Set(changed.flatMap(([, rows]) => rows.map(([name]) => name))).size <= MAX_CHANGES) return null;
  const tables = changed
    .filter(([, rows]) => rows.length)
    .flatMap(([arm, rows]) => [
      several ? el("h3", {}, arm) : null,
      table(
        `Configuration of ${arm}`,
        [["key"], [baselineName()], [arm]],
        rows.map(([name, [old, now]]) => [
          el("code", {}, name),
          el("code", { class: "old" }, valueText(old)),
          el("code", {}, valueText(now)),
        ]),
      ),
    ]);
  return section("configuration", "Configuration differences", ...tables);
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

function runsSection() {
  const environments = (content.environments || []).map((group) => ({
    runs: group.runs,
    values: new Map(flat(group.environment)),
  }));
  const names = [...new Set(environments.flatMap((group) => [...group.values.keys()]))];
  const differs = (name) => new Set(environments.map((group) => group.values.get(name))).size > 1;
  const versionText = (value) => (value === undefined || value === null || value === "null" ? "not present" : value);
  const head = (group) =>
    environments.length === 1
      ? "all runs that recorded it"
      : group.runs.length > 4
        ? `${group.runs.slice(0, 3).join(", ")} and ${group.runs.length - 3} more`
        : group.runs.join(", ");
  return section(
    "versions",
    environments.length ? "Versions and runs" : "Runs",
    environments.length
      ? table(
          "Versions",
          [["item"], ...environments.map((group) => [head(group)])],
          names.map((name) => [
            [el("code", {}, name), differs(name) ? el("span", { class: "chip open" }, "differs") : null],
            ...environments.map((group) => versionText(group.values.get(name))),
          ]),
        )
      : null,
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
    context.command ? [el("p", { class: "caption" }, "Command of this report:"), commandLine(context.command)] : [],
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
    "MATCH: step one, all guards and all claims pass. MISMATCH: step one or a guard fails, a difference is shown to exceed its margin, or a limit is shown to be broken. PASS and FAIL: the same if every claim is one-sided (not worse, better, a limit). INCONCLUSIVE: neither that all claims hold nor that one is broken is shown. INVALID: the runs cannot be compared fairly. DESCRIPTION: no claim was declared.",
  ],
  [
    "Claim",
    "A mean difference over a window of steps. Its interval (diamond and bar) must lie inside the margin: a test at 95\u00a0% confidence is a 90\u00a0% interval that lies inside (wider with interim analyses). For a margin in sigmas of the baseline another test decides, and zone and interval are only a guide.",
  ],
  ["Band", "Mean \u00b1 1 standard deviation over the seeds of an arm. It is not a test: overlapping bands do not show that arms agree."],
  [
    "Difference",
    `${treatmentName()} minus ${baselineName()} at the same step${content.paired === false ? "" : " with the same seed"}. \u201cLog ratio\u201d is a difference of logarithms: 0.05 is about 5\u00a0%.`,
  ],
  [
    "Grey bars",
    "Eight windows over the whole run with Bonferroni-t intervals: simultaneous 95\u00a0% coverage of all window means. They can cross the margin on a MATCH; only the claim is tested.",
  ],
  [
    "Lines",
    "A line breaks where a NaN or infinity was recorded. Long runs are drawn in buckets of consecutive steps: means and bands as bucket means, seeds and pairs as smallest and largest value. All tests use all steps.",
  ],
  [
    "Controls",
    "Drag across a chart to zoom, double-click to reset. \u201cSmooth\u201d draws running means. \u201cCSV\u201d saves the numbers of a chart. The buttons in the top bar show or hide an arm in all charts.",
  ],
];

const guideSection = () =>
  section(
    "guide",
    "How to read this page",
    el("dl", { class: "guide" }, GUIDE.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))),
  );
