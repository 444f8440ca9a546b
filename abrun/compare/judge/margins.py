"""How far arms may differ and still be called equivalent: a claim's margin in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.compare.judge.summaries import climbs, summaries
from abrun.compare.read.experiment import Experiment, RecordedRun, Reference, stack, union
from abrun.equivalence import mean_and_sd
from abrun.errors import ComparisonError
from abrun.recipe import Compare, Primary
from abrun.recipe.claims import Unit
from abrun.series import Array, window_bounds
from abrun.sigmas import sigma_lower_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """A number and what it is in: the metric's own unit (""), the baseline's sigma, level or climb."""

    number: float
    unit: Unit
    text: str


def resolved_margin(primary: Primary, reference: Reference | None) -> Margin:
    """A claim's margin. Sigmas of a reference become absolute, by the lower 95 % bound of its sigma: were the
    estimate taken as it is, every second margin would be wider than what was declared.

    Raises ComparisonError where the reference does not know its sigma.
    """
    number, unit = primary.margin_in
    if unit == "":
        return Margin(number=number, unit="", text=f"±{number:g}")
    if unit in ("level", "climb"):
        return Margin(number=number, unit=unit, text=f"±{100 * number:g} % of the baseline's {unit}")
    if reference is None:
        return Margin(number=number, unit="sigma", text=f"±{number:g} sigma of the baseline")
    if not any(
        (c.metric, c.window, c.transform) == (primary.metric, primary.window, primary.transform)
        for c in reference.compare.primary
    ):
        known = ", ".join(f"{claim.metric} over {claim.window}" for claim in reference.compare.primary)
        raise ComparisonError(
            f"{primary.metric}: margin: got {primary.margin!r} over {primary.window!r}, of which the "
            f"reference {reference.name!r} knows no sigma; it holds: {known}"
        )
    runs = [run for run in reference.runs if not run.name.rerun]
    margin = _of_sigma(number, primary, runs, f"the reference {reference.name!r}")
    return Margin(
        number=margin,
        unit="",
        text=f"±{margin:.3g} ({number:g} x the lower bound of sigma of {reference.name})",
    )


def frozen_claims(experiment: Experiment, arm: str) -> Compare:
    """An experiment's comparison with margins in sigmas of `arm` made absolute, as a reference keeps them.

    A later run is compared with these very seeds: a margin of their own sd would be wider whenever it is.
    """
    runs = list(experiment.arm(arm).values())
    kept = []
    for primary in experiment.compare.primary:
        number, unit = primary.margin_in if primary.margin is not None else (0.0, "")
        if unit == "sigma":
            margin = _of_sigma(number, primary, runs, f"arm {arm} of {experiment.name}")
            primary = primary.model_copy(update={"margin": float(f"{margin:.3g}")})
        kept.append(primary)
    return experiment.compare.model_copy(update={"primary": kept})


def _of_sigma(number: float, primary: Primary, runs: list[RecordedRun], whose: str) -> float:
    """Sigmas as a margin in units of the transformed metric."""
    values = window_summaries(runs, primary)
    sigma = mean_and_sd(values)[1] if len(values) > 1 else 0.0
    if not sigma > 0:
        raise ComparisonError(
            f"{primary.metric}: margin: got {primary.margin!r}, and {whose} has no spread over seeds to "
            "measure it in; give an absolute margin"
        )
    return number * sigma_lower_bound(sigma, len(values))


def window_summaries(runs: list[RecordedRun], primary: Primary) -> Array:
    """A claim's window of every run, one number a run [R]."""
    grid = union(run.series(primary.metric).steps for run in runs)
    first, last = window_bounds(primary.window, grid, primary.metric)
    steps, values = stack(runs, primary.metric)
    return summaries(values[:, (first <= steps) & (steps <= last)], primary)


def yardstick(
    margin: Margin, baseline: Array, baselines: Sequence[RecordedRun], primary: Primary, last: int
) -> Array | None:
    """What a relative margin is a share of, one number a pair [P], above 0 in the mean; None: it has none."""
    if margin.unit == "level":
        return baseline * np.sign(baseline.mean())
    if margin.unit == "climb":
        return climbs(baselines, primary, last)
    return None
