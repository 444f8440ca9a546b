// Completions of the arms for the same prompts, side by side.
"use strict";

function completionsSection() {
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
