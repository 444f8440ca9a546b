"""`abrun power`: power and sample size of the declared claims before launch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.experiment.power import (
    ASSURANCE,
    ClaimPower,
    Designs,
    Spread,
    assumed_spread,
    design_reason,
    plan_claim_power,
    propose_designs,
)
from abrun.logs.recorded.experiment import RecordedExperiment
from abrun.messages.numbers import pairs_or_more_text, percent_text, sample_unit
from abrun.recipe.claims import Claim, Compare, describe_claim
from abrun.recipe.experiment import ExperimentDeclaration
from abrun.recipe.reading import dotted
from abrun.report.designs import PricedDesign, measure_pair_hours, price_designs
from abrun.report.present.tables import Table, columns
from abrun.runs.metric_names import DIVERGENCE_RATE
from abrun.runs.redaction import display_safe_tree, shortened
from abrun.stats.power import pairs_needed, power_at, sd_of_difference
from abrun.stats.rates import runs_to_show_rate
from abrun.stats.sequential import interim_levels
from abrun.verdict.claims import judge_equivalence
from abrun.verdict.margins import resolve_margin

COUNTS = (2, 3, 4, 5, 6, 8, 10, 15, 20)
SPREAD_KEYS = ("trainer.type", "model.", "algorithm.", "task.")  # recipe keys that determine the spread most
MAX_NAMED_KEYS = 3
COMPARE_NOTE = "abrun compare uses the measured sd"


@np.errstate(all="ignore")
def measure_spread(experiment: RecordedExperiment, claim: Claim, *, paired: bool = True) -> Spread | None:
    """Measure the spread in an earlier experiment, by pairs or by runs; of several treatments, the widest."""
    experiment = replace(experiment, compare=experiment.compare.model_copy(update={"paired": paired}))
    grid = experiment.metric_steps(claim.metric)
    results = [
        judge_equivalence(arm, experiment.sides(arm), claim, resolve_margin(claim, None), grid)
        for arm in experiment.treatments
    ]
    measured_results = [result for result in results if result.estimate.sd_difference is not None]
    if not measured_results:
        return None
    widest = max(measured_results, key=lambda result: result.estimate.sd_difference or 0.0)
    tested, estimate = widest.claim, widest.estimate
    sd = estimate.sd_difference if estimate.sd_at_margin is None else estimate.sd_at_margin
    assert sd is not None
    count = min(tested.num_runs) if tested.num_runs else tested.num_pairs
    return Spread(
        sigma=estimate.baseline_sd,
        correlation=estimate.pair_correlation or 0.0,
        sd_difference=sd,
        num_pairs=count,
        # The spread of a shorter pilot may differ
        source=f"measured in {experiment.name} over {count} {sample_unit(paired=paired)}"
        + (f", steps {tested.steps[0]}-{tested.steps[1]}" if tested.steps else ""),
        level=estimate.baseline_mean,
        climb=estimate.climb,
    )


def pilot_differences_text(recipe: ExperimentDeclaration, earlier: RecordedExperiment) -> str | None:
    """Return a note on settings that differ from the pilot's and may change the spread, if any do."""
    pilot_config = next((run.config for run in earlier.arm(earlier.baseline).values() if run.config), None)
    if pilot_config is None:
        return None
    config = recipe.with_auto_values().run_config(recipe.baseline)
    planned_config = display_safe_tree(dotted(config.model_dump(mode="json")))
    keys = [key for key in {**pilot_config, **planned_config} if key.startswith(SPREAD_KEYS)]
    differing = [key for key in keys if pilot_config.get(key) != planned_config.get(key)]
    type_keys = [key for key in differing if key.endswith(".type")]
    # A differing type explains the differing keys of its section
    other_keys = [key for key in differing if f"{key.split('.')[0]}.type" not in type_keys]
    keys_to_name = [*type_keys, *other_keys]
    if not keys_to_name:
        return None
    clauses = [
        f"{key}: {shortened(pilot_config.get(key))} in the pilot, {shortened(planned_config.get(key))} here"
        for key in keys_to_name[:MAX_NAMED_KEYS]
    ]
    clauses += [f"{len(keys_to_name) - MAX_NAMED_KEYS} more"] if len(keys_to_name) > MAX_NAMED_KEYS else []
    return (
        f"--from: {earlier.name} was trained differently from {recipe.name} ({'; '.join(clauses)}), which "
        "can change the spread over seeds; treat the numbers of pairs as a first estimate"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedClaim:
    """A claim, the spread assumed for it, and the resulting power; None if unknown or without a margin."""

    claim: Claim
    spread: Spread | None
    power: ClaimPower | None


@dataclass(frozen=True)
class PowerPlan:
    """The power of a recipe's claims, with an assumed spread or one that an earlier experiment measured."""

    name: str
    compare: Compare
    num_pairs: int
    _: KW_ONLY
    earlier: RecordedExperiment | None = None  # measures the spread
    variants: Sequence[RecordedExperiment] = ()  # of other settings, measured to price them
    assuming: str = "abrun power RECIPE --sigma X"  # the command that plans without `earlier`
    sigma: float | None = None  # these two replace what the recipe assumes
    correlation: float | None = None
    seeds: Sequence[int] = ()
    num_treatments: int = 1
    hours: float | None = None  # of one run and its devices; None: those of the earlier runs

    @cached_property
    def claims(self) -> list[PlannedClaim]:
        planned = []
        for claim in self.compare.claims:
            spread = self._spread(claim) if claim.difference_kind else None
            measured_nothing = spread is not None and spread.num_pairs and not spread.sd_difference > 0
            power = None
            if not measured_nothing:
                power = plan_claim_power(claim, self.compare, spread, self._levels[-1])
            planned.append(PlannedClaim(claim=claim, spread=spread, power=power))
        return planned

    @cached_property
    def designs(self) -> Designs | None:
        """Both designs, with the power of claims at alpha instead of at the level of an analysis."""
        powers = [
            plan.power and plan_claim_power(plan.claim, self.compare, plan.spread, self.compare.alpha)
            for plan in self.claims
        ]
        return propose_designs(self.compare, self.num_pairs, powers, self.num_treatments)

    def render(self) -> RenderableType:
        """Return each claim's spread and its source, the power by pairs, and the pairs for 80 % power."""
        if not self.compare.claims:
            unclaimed = "no claim declared (compare.claims): only step one and the guards will be judged"
            return Text(f"{self.name}: {unclaimed}")
        title = f"{self.name}: {self.num_pairs} {self._unit} planned"
        lines: list[RenderableType] = [Text(title, style="bold"), Text("")]
        for plan in self.claims:
            lines += map(Text, self._claim_lines(plan))
        powers = [plan.power for plan in self.claims if plan.power]
        if powers:
            lines += self._power_table()
        if len(powers) > 1:
            power = percent_text(max(0.0, 1 - sum(1 - power.power(self.num_pairs) for power in powers)))
            size = f"{self.num_pairs} {self._unit}"
            lines.append(Text(f"All {len(powers)} claims must pass: at least {power} with {size}."))
        lines += [table for plan in self.claims for table in self._render_priced(plan)]
        if self.compare.interim:
            lines.append(Text(self._interim_line()))
        if self.designs:
            lines += self._render_designs(self.designs)
        is_unknown = any(plan.claim.kind == "within" and plan.power is None for plan in self.claims)
        if self.compare.paired and is_unknown:
            lines += [Text(""), *_sigma_margins_table()]
        return Group(*lines)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON; None for unknown values and claims that cannot be planned."""
        return {
            "recipe": self.name,
            "num_pairs": self.num_pairs,
            "interim": list(self.compare.interim),
            "alpha": self._levels[-1],
            "levels": self._levels,
            "claims": [self._claim_json(plan) for plan in self.claims],
            "pair_hours": self._pair_hours,
            "designs": self.designs and asdict(self.designs),
        }

    def _claim_json(self, plan: PlannedClaim) -> dict[str, Any]:
        claim, power = plan.claim, plan.power
        return {
            "metric": claim.metric,
            "window": claim.window,
            "claim": describe_claim(claim),
            "spread": plan.spread and asdict(plan.spread),
            "power": power and {str(count): power.power(count) for count in self._counts},
            "power_now": power and power.power(self.num_pairs),
            "pairs_needed": power and power.pairs_needed,
            "pairs_needed_range": power and power.pairs_needed_range,
            "windows": [asdict(window) for window in self.priced(plan)],
        }

    @property
    def _unit(self) -> str:
        return sample_unit(paired=self.compare.paired)

    @property
    def _counts(self) -> list[int]:
        return sorted({*COUNTS, self.num_pairs, *self.compare.interim})

    @cached_property
    def _levels(self) -> list[float]:
        """The test level at each interim analysis; without any, that of the comparison."""
        compare = self.compare
        return interim_levels(compare.interim, compare.alpha, compare.spending) or [compare.alpha]

    @property
    def _pass_word(self) -> str:
        return "pass" if all(claim.is_one_sided for claim in self.compare.claims) else "match"

    def _interim_line(self) -> str:
        levels = [f"{level:.3g}" for level in self._levels]
        text = f"they test at levels {', '.join(levels)} (the table uses the last)"
        if self.compare.spending == "equal":
            text = f"each tests at level {levels[0]}"
        counts = ", ".join(map(str, self.compare.interim))
        return f"Interim analyses at {counts} pairs: {text} instead of {self.compare.alpha:g}."

    def _claim_lines(self, plan: PlannedClaim) -> Iterator[str]:
        claim = plan.claim
        if claim.difference_kind is None:
            planned, limit = "not planned", claim.limit
            if claim.metric == DIVERGENCE_RATE and limit:
                needed = runs_to_show_rate(0, limit[0], self.compare.alpha)
                planned = f"{pairs_or_more_text(needed)} runs of a treatment show it if none diverges"
            yield f"{claim.metric} over {claim.window}: {describe_claim(claim)}: {planned}"
            return
        yield f"{claim.metric} over {claim.window}: {self._spread_text(plan.spread, claim)}"
        if claim.better == 0 and claim.improvement is None:
            yield "  not planned: set the claim's improvement, the true gain to plan for"

    def _power_table(self) -> list[RenderableType]:
        rows = []
        for claim, power in ((plan.claim, plan.power) for plan in self.claims):
            if power:
                cells = (percent_text(power.power(count)) for count in self._counts)
                margin = claim.margin if isinstance(claim.margin, str) else describe_claim(claim)
                needed = f"{pairs_or_more_text(power.pairs_needed)} {self._unit}"
                if power.pairs_needed_range:
                    low, high = map(pairs_or_more_text, power.pairs_needed_range)
                    needed += f" ({low} to {high})"
                rows.append((claim.metric, margin, *cells, needed))
        has_gain = any(plan.claim.kind == "better" and plan.power for plan in self.claims)
        gain = ", or better by the claim's improvement (default: twice its margin)" * has_gain
        heading = f"\nP({self._pass_word}) if the arms are truly equal{gain}, by number of {self._unit}"
        numbers = [*(f"n={count}" for count in self._counts), "80 % power at"]
        table = Table(columns("claim", "margin", *numbers, numeric=numbers), rows)
        return [Text(heading, style="bold"), table]

    @property
    def _pair_hours(self) -> float | None:
        """GPU hours of a run of each arm, as given or recorded; None if unknown."""
        if self.hours is not None:
            return self.hours * (1 + self.num_treatments)
        recorded = measure_pair_hours(self.earlier) if self.earlier else math.nan
        return recorded if math.isfinite(recorded) else None

    @property
    def _hours_unit(self) -> str:
        """GPU hours, or hours if no earlier run held a GPU."""
        configs = (run.config or {} for run in self.earlier.runs.values()) if self.earlier else ()
        has_gpus = any(config.get("cluster.gpus_per_node") for config in configs)
        return "GPU hours" if has_gpus or self.hours is not None else "hours"

    def priced(self, plan: PlannedClaim) -> list[PricedDesign]:
        """Return what the claim would need in the earlier runs' windows and settings, the cheapest first."""
        if self.earlier is None or plan.power is None or plan.claim.margin_in[1] != "":
            return []

        def price(experiment: RecordedExperiment, claim: Claim) -> tuple[Spread | None, ClaimPower | None]:
            spread = self._measured_spread(experiment, claim)
            return spread, plan_claim_power(claim, self.compare, spread, self._levels[-1])

        margin = plan.claim.margin_in[0] or plan.claim.improvement or 0.0
        hours = None if self.hours is None else self._pair_hours
        return price_designs([self.earlier, *self.variants], plan.claim, price, margin, hours)

    def _render_priced(self, plan: PlannedClaim) -> Iterator[RenderableType]:
        """Yield a table of windows and settings, and the cheapest over which the baseline's curve is flat."""
        priced = self.priced(plan)
        if self.variants and not priced:
            yield Text(f"{plan.claim.metric}: settings are priced for margins in the metric's unit only")
        rows = [
            (
                *([row.experiment] if self.variants else []),
                row.window,
                "yes" if row.is_flat else "no, it still learns",
                f"{row.sd_difference:.3g}",
                f"{pairs_or_more_text(row.pairs_needed)} {self._unit}",
                "unknown" if row.hours is None else f"{row.hours:.2g}",
            )
            for row in priced
        ]
        if len(rows) < 2:
            return
        numbers = ("sd of a difference", "80 % power at", self._hours_unit)
        what = "windows and settings" if self.variants else "windows"
        yield Text(f"\n{plan.claim.metric}: what other {what} would need", style="bold")
        titles = [*(["as in"] if self.variants else []), "window", "flat", *numbers]
        yield Table(columns(*titles, numeric=numbers), rows)
        if priced[0].is_flat and priced[0].pairs_needed:
            settings = f", trained as {priced[0].experiment}" if self.variants else ""
            yield Text(f"Cheapest that decides: window: {priced[0].window}{settings}")

    def _render_designs(self, designs: Designs) -> list[RenderableType]:
        """Return the expected cost of both designs, and which one is cheaper."""
        headings, hours = [f"P({self._pass_word})", "pairs if equal", "pairs at the margin"], self._pair_hours
        headings += [] if hours is None else [f"{self._hours_unit} if equal"]
        staged = f"interim analyses at {', '.join(map(str, designs.interim))} pairs"
        pairs_of = {staged: (designs.pairs_if_equal, designs.pairs_at_margin)}
        pairs_of["one analysis"] = designs.fixed_pairs, designs.fixed_pairs
        rows = []
        for design, pairs in pairs_of.items():
            numbers = [*pairs, *([] if hours is None else [pairs[0] * hours])]
            rows.append([design, percent_text(designs.power), *(f"{number:.3g}" for number in numbers)])
        return [
            Text("\nExpected cost with and without interim analyses", style="bold"),
            Table(columns("design", *headings, numeric=headings), rows),
            Text(design_reason(self.compare, self.seeds or range(self.num_pairs), designs)),
        ]

    def _spread(self, claim: Claim) -> Spread | None:
        if self.earlier is not None:
            return self._measured_spread(self.earlier, claim)
        overrides = {"sigma": self.sigma, "correlation": self.correlation}
        claim = claim.model_copy(update={key: value for key, value in overrides.items() if value is not None})
        priors, has_reference = self.compare.noise_priors, self.compare.reference is not None
        return assumed_spread(claim, has_reference, paired=self.compare.paired, priors=priors)

    def _measured_spread(self, experiment: RecordedExperiment, claim: Claim) -> Spread | None:
        paired = self.compare.paired
        measured = measure_spread(experiment, claim, paired=paired)
        # The history is that of the planned settings
        priors = self.compare.noise_priors if experiment is self.earlier else ()
        assumed = assumed_spread(claim, False, paired=paired, priors=priors)
        return measured and replace(measured, prior=assumed and assumed.prior)

    def _spread_text(self, spread: Spread | None, claim: Claim) -> str:
        rho = spread.correlation if spread else claim.correlation
        pairing_text = f"pair correlation {rho:.2f}" if self.compare.paired else "unpaired"
        bound = f"upper {percent_text(ASSURANCE)} bound"
        if claim.sigma_margin is not None and not self.compare.reference:
            is_measured = spread is not None and spread.num_pairs
            note = f" (planned with the {bound} of the sd; {COMPARE_NOTE})" if is_measured else ""
            return f"margin in sigmas of the baseline, {pairing_text}{note}"
        if spread is None and self.earlier is not None:
            return f"{self.earlier.name} did not measure sigma over seeds; assume one: {self.assuming}"
        if spread is None:
            remedies = "give --sigma, --from an earlier experiment, or compare.claims.0.sigma"
            return f"sigma over seeds unknown: {remedies}"
        sigma = "" if spread.sigma is None else f"sigma {spread.sigma:.3g}, "
        difference = f"sd of a difference {spread.sd_difference:.3g}"
        note = ""
        if spread.num_pairs and not spread.sd_difference > 0:
            note = (
                f": its {'pairs' if self.compare.paired else 'runs'} do not differ at all, so nothing can be "
                f"planned; run a longer pilot, or assume a spread: {self.assuming}"
            )
        elif spread.num_pairs:
            note = f"; planned with its {bound}, {spread.planned_sd:.3g}; {COMPARE_NOTE}"
        return f"{sigma}{pairing_text}, {difference} ({spread.source}{note})"


def _sigma_margins_table() -> Iterator[RenderableType]:
    """Yield a table of power by margin in sigmas and pair correlation, for use without a known sigma."""
    yield Text("P(match) by margin and pair correlation, in sigmas over seeds", style="bold")
    titles = ("margin", "correlation", *(f"n={count}" for count in COUNTS), "80 % power at")
    rows = []
    for margin in (1.0, 1.5, 2.0):
        for correlation in (0.0, 0.5, 0.8):
            sd = sd_of_difference(1.0, correlation)
            cells = [percent_text(power_at(margin, sd, count)) for count in COUNTS]
            needed = pairs_needed(margin, sd)
            rows.append((f"{margin:g} sigma", f"{correlation:g}", *cells, f"{needed} pairs"))
    yield Table(columns(*titles, numeric=titles), rows)
