"""How far arms may differ and still be called equivalent: a claim's margin in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.errors import ComparisonError
from abrun.messages.numbers import margin_of_reference_text, margin_text
from abrun.reasons import Code
from abrun.recipe.claims import Claim, Compare, Unit
from abrun.recorded.experiment import RecordedExperiment, RecordedRun, Reference, stack_runs, union_steps
from abrun.stats.equivalence import mean_and_sd
from abrun.stats.series import Array, window_bounds
from abrun.stats.sigma_margin import sigma_lower_bound
from abrun.verdict.summaries import climbs, summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """A number and what it is in: the metric's own unit (""), the baseline's sigma, level or climb."""

    number: float
    unit: Unit
    text: str


def resolved_margin(claim: Claim, reference: Reference | None) -> Margin:
    """A claim's margin. Sigmas of a reference become absolute, by the lower 95 % bound of its sigma: were the
    estimate taken as it is, every second margin would be wider than what was declared.

    Raises ComparisonError where the reference does not know its sigma.
    """
    number, unit = claim.margin_in
    if unit != "sigma" or reference is None:
        return Margin(number=number, unit=unit, text=margin_text(number, unit))
    if not any(
        (c.metric, c.window, c.transform) == (claim.metric, claim.window, claim.transform)
        for c in reference.compare.claims
    ):
        raise ComparisonError(
            Code.SIGMA_UNKNOWN(
                metric=claim.metric,
                margin=claim.margin,
                window=claim.window,
                reference=reference.name,
                known=[f"{c.metric} over {c.window}" for c in reference.compare.claims],
            )
        )
    runs = [run for run in reference.runs if not run.name.rerun]
    margin = number * _sigma_bound(claim, runs, {"reference": reference.name})
    return Margin(number=margin, unit="", text=margin_of_reference_text(margin, number, reference.name))


def frozen_claims(experiment: RecordedExperiment, arm: str) -> Compare:
    """An experiment's comparison with margins in sigmas of `arm` made absolute, as a reference keeps them.

    A later run is compared with these very seeds: a margin of their own sd would be wider whenever it is.
    """
    runs = list(experiment.arm(arm).values())
    kept = []
    for claim in experiment.compare.claims:
        number, unit = claim.margin_in if claim.margin is not None else (0.0, "")
        if unit == "sigma":
            margin = number * _sigma_bound(claim, runs, {"arm": arm, "experiment": experiment.name})
            claim = claim.model_copy(update={"margin": float(f"{margin:.3g}")})
        kept.append(claim)
    return experiment.compare.model_copy(update={"claims": kept})


def _sigma_bound(claim: Claim, runs: list[RecordedRun], whose: dict[str, str]) -> float:
    """Return the lower bound of the runs' sigma in units of the transformed metric."""
    values = window_summaries(runs, claim)
    sigma = mean_and_sd(values)[1] if len(values) > 1 else 0.0
    if not sigma > 0:
        raise ComparisonError(Code.NO_SPREAD(metric=claim.metric, margin=claim.margin, whose=whose))
    return sigma_lower_bound(sigma, len(values))


def window_summaries(runs: list[RecordedRun], claim: Claim) -> Array:
    """A claim's window of every run, one number a run [R]."""
    grid = union_steps(run.series(claim.metric).steps for run in runs)
    first, last = window_bounds(claim.window, grid, claim.metric)
    steps, values = stack_runs(runs, claim.metric)
    return summaries(values[:, (first <= steps) & (steps <= last)], claim)


def yardstick(
    margin: Margin, baseline: Array, baselines: Sequence[RecordedRun], claim: Claim, last: int
) -> Array | None:
    """What a relative margin is a share of, one number a pair [P], above 0 in the mean; None: it has none."""
    if margin.unit == "level":
        return baseline * np.sign(baseline.mean())
    if margin.unit == "climb":
        return climbs(baselines, claim, last)
    return None
