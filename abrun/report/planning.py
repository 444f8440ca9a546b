"""`abrun power`: power and sample size of the declared claims before launch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.experiment.designs import Designs, PairCost, design_reason, propose_designs
from abrun.experiment.power import ASSURANCE, ClaimPower, Spread, assumed_spread, plan_claim_power
from abrun.messages import sentence
from abrun.messages.costs import device_time_text
from abrun.messages.numbers import pairs_or_more_text, percent_text, sample_unit
from abrun.messages.records import encode_reasons
from abrun.present.tables import Table, columns
from abrun.recipe.claims import Claim, Compare, describe_claim
from abrun.recipe.experiment import BASELINE, ExperimentDeclaration
from abrun.recipe.reading import dotted
from abrun.recorded.experiment import RecordedExperiment
from abrun.redaction import display_safe_tree, shortened
from abrun.stats.power import pairs_needed, power_at, sd_of_difference
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
        source=(
            f"measured in {experiment.name} over {count} {sample_unit(paired=paired)}"
            f"{_steps_text(tested.steps)}"
        ),
        level=estimate.baseline_mean,
        climb=estimate.climb,
    )


def pilot_differences_text(recipe: ExperimentDeclaration, earlier: RecordedExperiment) -> str | None:
    """Return a note on settings that differ from the pilot's and may change the spread, if any do."""
    pilot_config = next((run.config for run in earlier.arm(earlier.baseline).values() if run.config), None)
    if pilot_config is None:
        return None
    config = recipe.with_auto_values().run_config(BASELINE)
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


def _steps_text(steps: tuple[int, int] | None) -> str:
    """Return the steps of a pilot: the spread of a shorter one may differ."""
    return f", steps {steps[0]}-{steps[1]}" if steps else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedClaim:
    """A claim, the spread assumed for it, and the resulting power; None if unknown or without a margin."""

    claim: Claim
    spread: Spread | None
    power: ClaimPower | None


def _plan_claims(
    compare: Compare, earlier: RecordedExperiment | None, sigma: float | None, correlation: float | None
) -> Iterator[PlannedClaim]:
    alpha = _alpha_levels(compare)[-1]
    for claim in compare.claims:
        spread = _claim_spread(claim, compare, earlier, sigma, correlation) if claim.difference_kind else None
        measured_nothing = spread is not None and spread.num_pairs and not spread.sd_difference > 0
        power = None if measured_nothing else plan_claim_power(claim, compare, spread, alpha)
        yield PlannedClaim(claim=claim, spread=spread, power=power)


def _alpha_levels(compare: Compare) -> list[float]:
    """Return the test level at each interim analysis; without any, that of the comparison."""
    return interim_levels(compare.interim, compare.alpha, compare.alpha_spending) or [compare.alpha]


def _level_text(compare: Compare) -> str:
    levels = [f"{level:.3g}" for level in _alpha_levels(compare)]
    if compare.alpha_spending == "equal":
        return f"each tests at level {levels[0]}"
    return f"they test at levels {', '.join(levels)} (the table uses the last)"


def _interim_line(compare: Compare) -> str:
    counts = ", ".join(map(str, compare.interim))
    return f"Interim analyses at {counts} pairs: {_level_text(compare)} instead of {compare.alpha:g}."


def _propose(
    compare: Compare, num_pairs: int, plans: Sequence[PlannedClaim], num_treatments: int
) -> Designs | None:
    """Return both designs, with the power of claims at alpha instead of at the level of an analysis."""
    powers = [
        plan_claim_power(plan.claim, compare, plan.spread, compare.alpha) if plan.power is not None else None
        for plan in plans
    ]
    return propose_designs(compare, num_pairs, powers, num_treatments)


def _render_designs(
    compare: Compare, seeds: Sequence[int], designs: Designs, cost: PairCost | None
) -> list[RenderableType]:
    """Return the expected cost of both designs, and which one is cheaper."""
    headings = ["design", f"P({_pass_word(compare)})", "pairs if equal", "pairs at the margin"]
    counts = ", ".join(map(str, designs.interim))
    rows = [
        [f"interim analyses at {counts} pairs", percent_text(designs.power)],
        ["one analysis", percent_text(designs.power)],
    ]
    numbers = [(designs.pairs_if_equal, designs.pairs_at_margin), (designs.fixed_pairs, designs.fixed_pairs)]
    for row, pairs in zip(rows, numbers, strict=True):
        row += [f"{number:.3g}" for number in pairs]
        row += [device_time_text(number * cost.device_s, cost.device) for number in pairs] if cost else []
    headings += ["cost if equal", "cost at the margin"] if cost else []
    return [
        Text("\nExpected cost with and without interim analyses", style="bold"),
        Table(columns(*headings, numeric=headings[1:]), rows),
        Text(sentence(design_reason(compare, seeds, designs))),
    ]


def render_plan(
    name: str,
    compare: Compare,
    num_pairs: int,
    *,
    earlier: RecordedExperiment | None = None,
    assuming: str = "abrun power RECIPE --sigma X",
    sigma: float | None = None,
    correlation: float | None = None,
    seeds: Sequence[int] = (),
    num_treatments: int = 1,
    cost: PairCost | None = None,
) -> RenderableType:
    """Return the plan of each claim: its spread and source, the power by pairs, the pairs for 80 % power.

    `sigma` and `correlation` replace what the recipe assumes; `earlier` measures instead, and `assuming` is
    the command that plans without it. `cost` of a pair, if it is known, prices the designs.
    """
    if not compare.claims:
        return Text(
            f"{name}: no claim declared (compare.claims): only step one and the guards will be judged"
        )
    unit = sample_unit(paired=compare.paired)
    lines: list[RenderableType] = [Text(f"{name}: {num_pairs} {unit} planned", style="bold"), Text("")]
    plans = list(_plan_claims(compare, earlier, sigma, correlation))
    powers = [plan.power for plan in plans if plan.power]
    counts, rows = sorted({*COUNTS, num_pairs, *compare.interim}), []
    for plan in plans:
        claim, spread, power = plan.claim, plan.spread, plan.power
        if claim.difference_kind is None:
            lines.append(Text(f"{claim.metric} over {claim.window}: {describe_claim(claim)}: not planned"))
            continue
        spread_text = _spread_text(spread, claim, compare, earlier, assuming)
        lines.append(Text(f"{claim.metric} over {claim.window}: {spread_text}"))
        if claim.better == 0 and claim.improvement is None:
            lines.append(Text("  not planned: set the claim's improvement, the true gain to plan for"))
        if power:
            cells = (percent_text(power.power(count)) for count in counts)
            margin = str(claim.margin) if isinstance(claim.margin, str) else describe_claim(claim)
            rows.append((claim.metric, margin, *cells, _pairs_needed_text(power, unit)))
    if powers:
        has_gain = any(plan.claim.kind == "better" and plan.power for plan in plans)
        gain = ", or better by the claim's improvement (default: twice its margin)" * has_gain
        by_number = f"\nP({_pass_word(compare)}) if the arms are truly equal{gain}, by number of {unit}"
        numbers = [*(f"n={count}" for count in counts), "80 % power at"]
        table = Table(columns("claim", "margin", *numbers, numeric=numbers), rows)
        lines += [Text(by_number, style="bold"), table]
    if len(powers) > 1:
        min_power = max(0.0, 1 - sum(1 - plan.power(num_pairs) for plan in powers))
        lines.append(
            Text(
                f"All {len(powers)} claims must pass: at least {percent_text(min_power)} with {num_pairs} "
                f"{unit}."
            )
        )
    if compare.interim:
        lines.append(Text(_interim_line(compare)))
    if designs := _propose(compare, num_pairs, plans, num_treatments):
        lines += _render_designs(compare, seeds or range(num_pairs), designs, cost)
    if compare.paired and any(plan.claim.kind == "within" and plan.power is None for plan in plans):
        lines += [Text(""), *_sigma_margins_table()]
    return Group(*lines)


def plan_json(
    name: str,
    compare: Compare,
    num_pairs: int,
    *,
    earlier: RecordedExperiment | None = None,
    sigma: float | None = None,
    correlation: float | None = None,
    seeds: Sequence[int] = (),
    num_treatments: int = 1,
    cost: PairCost | None = None,
) -> dict[str, Any]:
    """Return the plan as JSON; None for unknown values and claims that cannot be planned."""
    counts = sorted({*COUNTS, num_pairs, *compare.interim})
    claims, plans = [], list(_plan_claims(compare, earlier, sigma, correlation))
    designs = _propose(compare, num_pairs, plans, num_treatments)
    for plan in plans:
        claim, spread, power = plan.claim, plan.spread, plan.power
        claims.append(
            {
                "metric": claim.metric,
                "window": claim.window,
                "claim": describe_claim(claim),
                "spread": asdict(spread) if spread else None,
                "power": {str(count): power.power(count) for count in counts} if power else None,
                "power_now": power.power(num_pairs) if power else None,
                "pairs_needed": power.pairs_needed if power else None,
                "pairs_needed_range": power.pairs_needed_range if power else None,
            }
        )
    return {
        "recipe": name,
        "num_pairs": num_pairs,
        "interim": list(compare.interim),
        "alpha": _alpha_levels(compare)[-1],
        "levels": _alpha_levels(compare),
        "claims": claims,
        "designs": designs and asdict(designs),
        "design_code": designs and encode_reasons(design_reason(compare, seeds or range(num_pairs), designs)),
        "pair_cost": cost and asdict(cost),
    }


def _claim_spread(
    claim: Claim,
    compare: Compare,
    earlier: RecordedExperiment | None,
    sigma: float | None,
    correlation: float | None,
) -> Spread | None:
    if earlier is not None:
        return measure_spread(earlier, claim, paired=compare.paired)
    overrides = {"sigma": sigma, "correlation": correlation}
    claim = claim.model_copy(update={key: value for key, value in overrides.items() if value is not None})
    return assumed_spread(claim, compare.reference is not None, paired=compare.paired)


def _spread_text(
    spread: Spread | None, claim: Claim, compare: Compare, earlier: RecordedExperiment | None, assuming: str
) -> str:
    rho = spread.correlation if spread else claim.correlation
    pairing_text = f"pair correlation {rho:.2f}" if compare.paired else "unpaired"
    if claim.sigma_margin is not None and not compare.reference:
        is_measured = spread is not None and spread.num_pairs
        planning_note = (
            f" (planned with the upper {percent_text(ASSURANCE)} bound of the sd; {COMPARE_NOTE})"
            if is_measured
            else ""
        )
        return f"margin in sigmas of the baseline, {pairing_text}{planning_note}"
    if spread is None and earlier is not None:
        return f"{earlier.name} did not measure sigma over seeds; assume one: {assuming}"
    if spread is None:
        return (
            "sigma over seeds unknown: give --sigma, --from an earlier experiment, or compare.claims.0.sigma"
        )
    sigma = "" if spread.sigma is None else f"sigma {spread.sigma:.3g}, "
    difference = f"sd of a difference {spread.sd_difference:.3g}"
    planning_note = ""
    if spread.num_pairs and not spread.sd_difference > 0:
        problem = f": its {'pairs' if compare.paired else 'runs'} do not differ at all"
        planning_note = (
            f"{problem}, so nothing can be planned; run a longer pilot, or assume a spread: {assuming}"
        )
    elif spread.num_pairs:
        bound = f"its upper {percent_text(ASSURANCE)} bound, {spread.planned_sd:.3g}"
        planning_note = f"; planned with {bound}; {COMPARE_NOTE}"
    return f"{sigma}{pairing_text}, {difference} ({spread.source}{planning_note})"


def _pass_word(compare: Compare) -> str:
    return "pass" if all(claim.is_one_sided for claim in compare.claims) else "match"


def _pairs_needed_text(power: ClaimPower, unit: str) -> str:
    needed = f"{pairs_or_more_text(power.pairs_needed)} {unit}"
    if power.pairs_needed_range is None:
        return needed
    low, high = map(pairs_or_more_text, power.pairs_needed_range)
    return f"{needed} ({low} to {high})"


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
