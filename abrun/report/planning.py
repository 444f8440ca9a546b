"""`abrun plan`: how many seeds the declared margins take, before any GPU is spent."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from abrun.experiment.power import ASSURANCE, ClaimPower, Spread, assumed_spread, claim_power
from abrun.messages.numbers import pairs_or_more_text, units
from abrun.present.tables import Table, columns
from abrun.recipe.claims import Claim, Compare, claim_text
from abrun.recipe.experiment import BASELINE, Declared
from abrun.recipe.reading import dotted
from abrun.recorded.experiment import RecordedExperiment
from abrun.redaction import shortened, shown_tree
from abrun.stats.equivalence import ALPHA
from abrun.stats.power import pairs_needed, power_at, sd_of_difference
from abrun.stats.sequential import interim_levels
from abrun.verdict.claims import judge_equivalence
from abrun.verdict.margins import resolved_margin

COUNTS = (2, 3, 4, 5, 6, 8, 10, 15, 20)
WHAT_LEARNS_WHAT = ("trainer.type", "model.", "algorithm.", "task.")  # keys that a spread depends on most
MOST_NAMED = 3
OF_COMPARE = "abrun compare takes the sd as measured"


@np.errstate(all="ignore")
def measured_spread(experiment: RecordedExperiment, claim: Claim, *, paired: bool = True) -> Spread | None:
    """From an earlier experiment, by pairs or by runs; of several treatments, the one that varies most."""
    experiment = replace(experiment, compare=experiment.compare.model_copy(update={"paired": paired}))
    grid = experiment.metric_steps(claim.metric)
    results = [
        judge_equivalence(arm, experiment.sides(arm), claim, resolved_margin(claim, None), grid)
        for arm in experiment.treatments
    ]
    known = [result for result in results if result.estimate.sd_difference is not None]
    if not known:
        return None
    widest = max(known, key=lambda result: result.estimate.sd_difference or 0.0)
    tested, estimate = widest.claim, widest.estimate
    sd = estimate.sd_difference if estimate.sd_at_margin is None else estimate.sd_at_margin
    assert sd is not None
    count = min(tested.num_runs) if tested.num_runs else tested.num_pairs
    return Spread(
        sigma=estimate.baseline_sd,
        correlation=estimate.pair_correlation or 0.0,
        sd_difference=sd,
        num_pairs=count,
        source=f"measured in {experiment.name} over {count} {units(paired=paired)}{_where(tested.steps)}",
        level=estimate.baseline_mean,
        climb=estimate.climb,
    )


def other_than_measured(recipe: Declared, earlier: RecordedExperiment) -> str | None:
    """A line on what an earlier experiment trained otherwise, and its spread may be another by; else None."""
    there = next((run.config for run in earlier.arm(earlier.baseline).values() if run.config), None)
    if there is None:
        return None
    config = recipe.closed().run_config(BASELINE)
    here = shown_tree(dotted(config.model_dump(mode="json")))
    keys = [key for key in {**there, **here} if key.startswith(WHAT_LEARNS_WHAT)]
    differing = [key for key in keys if there.get(key) != here.get(key)]
    types = [key for key in differing if key.endswith(".type")]
    others = [key for key in differing if f"{key.split('.')[0]}.type" not in types]  # other keys are a type's
    named = [*types, *others]
    if not named:
        return None
    said = [
        f"{key} {shortened(there.get(key))} there and {shortened(here.get(key))} here"
        for key in named[:MOST_NAMED]
    ]
    said += [f"{len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return (
        f"--from: {earlier.name} trained otherwise than {recipe.name} will ({'; '.join(said)}), and the "
        "spread over seeds depends on that: take its numbers of pairs for a first guess"
    )


def _where(steps: tuple[int, int] | None) -> str:
    """Its steps: of a pilot that was shorter than the plan the spread is another."""
    return f", steps {steps[0]}-{steps[1]}" if steps else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A claim, the spread that it is planned with, and what that gives; None: not known, or no margin."""

    claim: Claim
    spread: Spread | None
    power: ClaimPower | None


def _planned(
    compare: Compare, earlier: RecordedExperiment | None, sigma: float | None, correlation: float | None
) -> Iterator[Planned]:
    alpha = _levels(compare)[-1]
    for claim in compare.claims:
        spread = _spread(claim, compare, earlier, sigma, correlation) if claim.margin is not None else None
        measured_nothing = spread is not None and spread.num_pairs and not spread.sd_difference > 0
        power = None if measured_nothing else claim_power(claim, compare, spread, alpha)
        yield Planned(claim=claim, spread=spread, power=power)


def _levels(compare: Compare) -> list[float]:
    """Return the level of a match at each interim analysis; without any, the whole."""
    return interim_levels(compare.interim, ALPHA, compare.alpha_spending) or [ALPHA]


def _level_text(compare: Compare) -> str:
    levels = [f"{level:.3g}" for level in _levels(compare)]
    if compare.alpha_spending == "equal":
        return f"each tests at level {levels[0]}"
    return f"they test at levels {', '.join(levels)} (the table: at the last)"


def _interim_lines(compare: Compare, planned: Sequence[Planned]) -> Iterator[str]:
    counts, levels = ", ".join(map(str, compare.interim)), _levels(compare)
    yield f"Interim analyses at {counts} pairs: {_level_text(compare)} instead of {ALPHA:g}."
    for one in planned:
        if one.power:
            pairs, chance = one.power.expected_with_interim(compare.interim, levels)
            stopped = f"stopped at a match, {pairs:.1f} pairs are expected if the arms are truly equal"
            yield f"  {one.claim.metric}: {stopped}; P(match at any of them) {chance:.0%}"


def plan_report(
    name: str,
    compare: Compare,
    num_pairs: int,
    *,
    earlier: RecordedExperiment | None = None,
    assuming: str = "abrun plan RECIPE --sigma X",
    sigma: float | None = None,
    correlation: float | None = None,
) -> RenderableType:
    """For each claim: its spread and where that is from, the power by pairs, and the pairs for 80 %.

    `sigma` and `correlation` replace what the recipe assumes; `earlier` measures instead, and `assuming` is
    the command that plans without it.
    """
    if not compare.claims:
        return Text(
            f"{name}: no claim declared (compare.claims): step one and the guards alone will be judged"
        )
    counted = units(paired=compare.paired)
    lines: list[RenderableType] = [Text(f"{name}: {num_pairs} {counted} planned", style="bold"), Text("")]
    planned = list(_planned(compare, earlier, sigma, correlation))
    powers = [one.power for one in planned if one.power]
    counts, rows = sorted({*COUNTS, num_pairs, *compare.interim}), []
    for one in planned:
        claim, spread, expected = one.claim, one.spread, one.power
        if claim.margin is None:
            lines.append(Text(f"{claim.metric} over {claim.window}: {claim_text(claim)}: not planned"))
            continue
        about = _about(spread, claim, compare, earlier, assuming)
        lines.append(Text(f"{claim.metric} over {claim.window}: {about}"))
        if expected:
            cells = (f"{expected.power(count):.0%}" for count in counts)
            margin = claim.margin if isinstance(claim.margin, str) else f"±{claim.margin:g}"
            rows.append((claim.metric, margin, *cells, _needed(expected, counted)))
    if powers:
        by_number = f"\nP(match) if the arms are truly equal, by number of {counted}"
        numbers = [*(f"n={count}" for count in counts), "80 % at"]
        table = Table(columns("claim", "margin", *numbers, numeric=numbers), rows)
        lines += [Text(by_number, style="bold"), table]
    if len(powers) > 1:
        least = max(0.0, 1 - sum(1 - one.power(num_pairs) for one in powers))
        lines.append(
            Text(f"All {len(powers)} claims must pass: at least {least:.0%} with {num_pairs} {counted}.")
        )
    if compare.interim:
        lines += map(Text, _interim_lines(compare, planned))
    if compare.paired and any(one.claim.margin is not None and one.power is None for one in planned):
        lines += [Text(""), *_without_sigma()]
    return Group(*lines)


def plan_json(
    name: str,
    compare: Compare,
    num_pairs: int,
    *,
    earlier: RecordedExperiment | None = None,
    sigma: float | None = None,
    correlation: float | None = None,
) -> dict[str, Any]:
    """The same for machines; what is not known, or cannot be planned, is None."""
    counts = sorted({*COUNTS, num_pairs, *compare.interim})
    claims = []
    for one in _planned(compare, earlier, sigma, correlation):
        claim, spread, expected = one.claim, one.spread, one.power
        claims.append(
            {
                "metric": claim.metric,
                "window": claim.window,
                "claim": claim_text(claim),
                "spread": asdict(spread) if spread else None,
                "power": {str(count): expected.power(count) for count in counts} if expected else None,
                "power_now": expected.power(num_pairs) if expected else None,
                "pairs_needed": expected.pairs_needed if expected else None,
                "pairs_needed_range": expected.pairs_needed_range if expected else None,
            }
        )
    return {
        "recipe": name,
        "num_pairs": num_pairs,
        "interim": list(compare.interim),
        "alpha": _levels(compare)[-1],
        "levels": _levels(compare),
        "claims": claims,
    }


def _spread(
    claim: Claim,
    compare: Compare,
    earlier: RecordedExperiment | None,
    sigma: float | None,
    correlation: float | None,
) -> Spread | None:
    if earlier is not None:
        return measured_spread(earlier, claim, paired=compare.paired)
    given = {"sigma": sigma, "correlation": correlation}
    claim = claim.model_copy(update={key: value for key, value in given.items() if value is not None})
    return assumed_spread(claim, compare.reference is not None, paired=compare.paired)


def _about(
    spread: Spread | None, claim: Claim, compare: Compare, earlier: RecordedExperiment | None, assuming: str
) -> str:
    rho = spread.correlation if spread else claim.correlation
    correlated = f"pair correlation {rho:.2f}" if compare.paired else "unpaired"
    if claim.sigmas is not None and not compare.reference:
        measured = spread is not None and spread.num_pairs
        planned = (
            f" (planned with the upper {ASSURANCE:.0%} bound of the sd; {OF_COMPARE})" if measured else ""
        )
        return f"margin in sigmas of the baseline, {correlated}{planned}"
    if spread is None and earlier is not None:
        return f"{earlier.name} has not measured its sigma over seeds; assume one: {assuming}"
    if spread is None:
        return (
            "sigma over seeds unknown: give --sigma, --from an earlier experiment, or compare.claims.0.sigma"
        )
    sigma = "" if spread.sigma is None else f"sigma {spread.sigma:.3g}, "
    difference = f"sd of a difference {spread.sd_difference:.3g}"
    planned = ""
    if spread.num_pairs and not spread.sd_difference > 0:
        same = f": its {'pairs' if compare.paired else 'runs'} do not differ at all"
        planned = f"{same}, which plans nothing; take a longer pilot, or assume a spread: {assuming}"
    elif spread.num_pairs:
        bound = f"its upper {ASSURANCE:.0%} bound, {spread.planned_sd:.3g}"
        planned = f"; planned with {bound}; {OF_COMPARE}"
    return f"{sigma}{correlated}, {difference} ({spread.source}{planned})"


def _needed(expected: ClaimPower, counted: str) -> str:
    needed = f"{pairs_or_more_text(expected.pairs_needed)} {counted}"
    if expected.pairs_needed_range is None:
        return needed
    low, high = map(pairs_or_more_text, expected.pairs_needed_range)
    return f"{needed} ({low} to {high})"


def _without_sigma() -> Iterator[RenderableType]:
    """For want of a sigma: margins in sigmas against correlations."""
    yield Text("P(match) by margin and pair correlation, in sigmas over seeds", style="bold")
    titles = ("margin", "correlation", *(f"n={count}" for count in COUNTS), "80 % at")
    rows = []
    for margin in (1.0, 1.5, 2.0):
        for correlation in (0.0, 0.5, 0.8):
            sd = sd_of_difference(1.0, correlation)
            cells = [f"{power_at(margin, sd, count):.0%}" for count in COUNTS]
            needed = pairs_needed(margin, sd)
            rows.append((f"{margin:g} sigma", f"{correlation:g}", *cells, f"{needed} pairs"))
    yield Table(columns(*titles, numeric=titles), rows)
