"""Margins of claims in numbers: the largest difference that still counts as equivalent."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Reference, stack_runs, union_steps
from abrun.messages.numbers import margin_of_reference_text, margin_text
from abrun.recipe.claims import Claim, Compare, Unit, describe_margin
from abrun.stats.equivalence import mean_and_sd
from abrun.stats.series import Array, in_window, window_bounds
from abrun.stats.sigma_margin import sigma_lower_bound
from abrun.verdict.summaries import measure_climbs, summarize_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """A number and its unit: the metric's own (""), or the baseline's sigma, level or climb."""

    number: float
    unit: Unit
    text: str


def resolve_margin(claim: Claim, reference: Reference | None) -> Margin:
    """Return a claim's margin; sigmas of a reference become absolute by the lower 95 % bound of its sigma.

    With the estimate itself, every second margin would be wider than declared. Raises ComparisonError if the
    reference does not know its sigma.
    """
    number, unit = claim.margin_in

    def describe(text: str) -> str:
        return describe_margin(claim.difference_kind or "within", text, claim.better_direction)

    if unit != "sigma" or reference is None:
        return Margin(number=number, unit=unit, text=describe(margin_text(*claim.declared_margin_in)))
    if not any(
        (frozen_claim.metric, frozen_claim.window, frozen_claim.transform)
        == (claim.metric, claim.window, claim.transform)
        for frozen_claim in reference.compare.claims
    ):
        claim_names = (f"{frozen.metric} over {frozen.window}" for frozen in reference.compare.claims)
        raise ComparisonError(
            f"{claim.metric}: margin: got {claim.declared_margin!r} over {claim.window!r}, but reference "
            f"{reference.name!r} has no sigma for it; it has: {', '.join(claim_names)}"
        )
    runs = [run for run in reference.runs if not run.name.rerun]
    margin = number * _sigma_lower_bound(claim, runs, f"reference {reference.name!r}")
    return Margin(
        number=margin, unit="", text=describe(margin_of_reference_text(margin, number, reference.name))
    )


def freeze_claims(experiment: RecordedExperiment, arm: str) -> Compare:
    """Return the experiment's comparison with margins in sigmas of `arm` made absolute, as references store
    them.

    A later run is compared with these very seeds. A margin of their own sd would be wider whenever that sd
    is.
    """
    runs = list(experiment.arm(arm).values())
    frozen = []
    for claim in experiment.compare.claims:
        number, unit = claim.margin_in if claim.difference_kind is not None else (0.0, "")
        if unit == "sigma":
            margin = number * _sigma_lower_bound(claim, runs, f"arm {arm} of {experiment.name}")
            claim = claim.with_margin(float(f"{margin:.3g}"))
        frozen.append(claim)
    return experiment.compare.model_copy(update={"claims": frozen})


def _sigma_lower_bound(claim: Claim, runs: list[RecordedRun], source: str) -> float:
    """Return the lower bound of the runs' sigma in units of the transformed metric."""
    values = summarize_window(runs, claim)
    sigma = mean_and_sd(values)[1] if len(values) > 1 else 0.0
    if not sigma > 0:
        raise ComparisonError(
            f"{claim.metric}: margin: got {claim.declared_margin!r}, but {source} has no spread over seeds; "
            "give an absolute margin"
        )
    return sigma_lower_bound(sigma, len(values))


def summarize_window(runs: list[RecordedRun], claim: Claim) -> Array:
    """Return one number per run [R] for a claim's window."""
    grid = union_steps(run.series(claim.metric).steps for run in runs)
    bounds = window_bounds(claim.window, grid, claim.metric)
    steps, values = stack_runs(runs, claim.metric)
    return summarize_runs(values[:, in_window(steps, bounds)], claim)


def measure_yardstick(
    margin: Margin, baseline: Array, baselines: Sequence[RecordedRun], claim: Claim, last_step: int
) -> Array | None:
    """Return each pair's number [P] that a relative margin is a share of, positive in the mean; else None."""
    if margin.unit == "level":
        return baseline * np.sign(baseline.mean())
    if margin.unit == "climb":
        return measure_climbs(baselines, claim, last_step)
    return None
