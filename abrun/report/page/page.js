// The bar at the top, theme and print, and the order of the sections.
"use strict";

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
        el("b", { class: `word ${verdictName}` }, verdictName),
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
  noiseSection(),
  newRunsSection(),
  descriptionSection(),
  claimsSection(),
  sensitivitySection(),
  curvesSection(),
  metricsSection(),
  completionsSection(),
  guardsSection(),
  stepOneSection(),
  divergenceSection(),
  traceSection(),
  finalWeightsSection(),
  costSection(),
  ...otherSections(),
  notTestedSection(),
  configurationSection(),
  runsSection(),
  guideSection(),
].filter(Boolean);
const contents = el(
  "nav",
  { class: "contents", "aria-label": "Contents" },
  sections.map(([id, title]) => el("a", { href: `#${id}` }, title)),
);
document.body.append(bar(), el("main", { id: "top" }, verdictCard(), contents, ...body));
