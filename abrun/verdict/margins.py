"""How far arms may differ and still be called equivalent: a claim's margin in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from abrun.errors import ComparisonError
from abrun.messages.numbers import margin_of_reference_text, margin_text
from abrun.reasons import Code
from abrun.recipe.claims import Compare, Primary, Unit
from abrun.recorded.experiment import Experiment, RecordedRun, Reference, stack, union
from abrun.stats.equivalence import mean_and_sd
from abrun.stats.series import Array, window_bounds
from abrun.stats.sigma_margin import sigma_lower_bound
from abrun.verdict.summaries import measure_climbs, summarize_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """A number and what it is in: the metric's own unit (""), the baseline's sigma, level or climb."""

    number: float
    unit: Unit
    text: str


def resolve_margin(primary: Primary, reference: Reference | None) -> Margin:
    """A claim's margin. Sigmas of a reference become absolute, by the lower 95 % bound of its sigma: were the
    estimate taken as it is, every second margin would be wider than what was declared.

    Raises ComparisonError where the reference does not know its sigma.
    """
    number, unit = primary.margin_in
    if unit != "sigma" or reference is None:
        return Margin(number=number, unit=unit, text=margin_text(number, unit))
    if not any(
        (frozen_claim.metric, frozen_claim.window, frozen_claim.transform)
        == (primary.metric, primary.window, primary.transform)
        for frozen_claim in reference.compare.primary
    ):
        raise ComparisonError(
            Code.SIGMA_UNKNOWN(
                metric=primary.metric,
                margin=primary.margin,
                window=primary.window,
                reference=reference.name,
                known=[f"{claim.metric} over {claim.window}" for claim in reference.compare.primary],
            )
        )
    runs = [run for run in reference.runs if not run.name.rerun]
    margin = number * _sigma_lower_bound(primary, runs, {"reference": reference.name})
    return Margin(number=margin, unit="", text=margin_of_reference_text(margin, number, reference.name))


def freeze_claims(experiment: Experiment, arm: str) -> Compare:
    """An experiment's comparison with margins in sigmas of `arm` made absolute, as a reference keeps them.

    A later run is compared with these very seeds: a margin of their own sd would be wider whenever it is.
    """
    runs = list(experiment.arm(arm).values())
    frozen = []
    for primary in experiment.compare.primary:
        number, unit = primary.margin_in if primary.margin is not None else (0.0, "")
        if unit == "sigma":
            margin = number * _sigma_lower_bound(primary, runs, {"arm": arm, "experiment": experiment.name})
            primary = primary.model_copy(update={"margin": float(f"{margin:.3g}")})
        frozen.append(primary)
    return experiment.compare.model_copy(update={"primary": frozen})


def _sigma_lower_bound(primary: Primary, runs: list[RecordedRun], source: dict[str, str]) -> float:
    """Return the lower bound of the runs' sigma in units of the transformed metric."""
    values = summarize_window(runs, primary)
    sigma = mean_and_sd(values)[1] if len(values) > 1 else 0.0
    if not sigma > 0:
        raise ComparisonError(Code.NO_SPREAD(metric=primary.metric, margin=primary.margin, whose=source))
    return sigma_lower_bound(sigma, len(values))


def summarize_window(runs: list[RecordedRun], primary: Primary) -> Array:
    """A claim's window of every run, one number a run [R]."""
    grid = union(run.series(primary.metric).steps for run in runs)
    first_step, last_step = window_bounds(primary.window, grid, primary.metric)
    steps, values = stack(runs, primary.metric)
    return summarize_runs(values[:, (first_step <= steps) & (steps <= last_step)], primary)


def measure_yardstick(
    margin: Margin, baseline: Array, baselines: Sequence[RecordedRun], primary: Primary, last_step: int
) -> Array | None:
    """What a relative margin is a share of, one number a pair [P], above 0 in the mean; None: it has none."""
    if margin.unit == "level":
        return baseline * np.sign(baseline.mean())
    if margin.unit == "climb":
        return measure_climbs(baselines, primary, last_step)
    return None
