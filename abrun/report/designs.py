"""Pairs and GPU hours that measured runs predict for a claim, by their settings and by window."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from abrun.experiment.power import ClaimPower, Spread
from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, stack_runs
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import default_transform
from abrun.stats.series import in_window, window_bounds
from abrun.verdict.summaries import find_outside_domain, transform_values

WINDOWS = ("last 20%", "last 50%")
Plan = Callable[[RecordedExperiment, Claim], tuple[Spread | None, ClaimPower | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedDesign:
    """What a claim would need over another window, or with another experiment's settings."""

    experiment: str  # that measured it
    window: str
    sd_difference: float
    is_flat: bool  # the baseline's halves of the window differ by less than the margin
    pairs_needed: int | None  # None: more than 1000
    hours: float | None  # of GPUs (without any, of machines) for all arms of these pairs; None: unknown


def price_designs(
    measured: Sequence[RecordedExperiment], claim: Claim, plan: Plan, margin: float, pair_hours: float | None
) -> list[PricedDesign]:
    """Return the claim's window, the last 20 % and 50 %, and the longest that is flat, the cheapest first.

    By GPU hours if those of all experiments are known, else by pairs; `pair_hours` replaces the recorded ones
    of a run of each arm. `margin` is in units of the metric. A longer window averages more steps, but where
    the baseline still learns it compares how fast arms learn, and is no substitute.
    """
    priced = []
    for experiment in measured:
        runs = [run for run in experiment.arm(experiment.baseline).values() if run.finished]
        cost = measure_pair_hours(experiment) if pair_hours is None else pair_hours
        longer = (f"last {percent}%" for percent in range(90, 50, -10))
        longest = next((window for window in longer if _is_flat(runs, claim, window, margin)), claim.window)
        for window in dict.fromkeys([claim.window, *WINDOWS, longest]):
            spread, power = plan(experiment, claim.model_copy(update={"window": window}))
            if spread and power:
                needed = power.pairs_needed
                design = PricedDesign(
                    experiment=experiment.name,
                    window=window,
                    sd_difference=spread.sd_difference,
                    is_flat=_is_flat(runs, claim, window, margin),
                    pairs_needed=needed,
                    hours=needed * cost if needed and math.isfinite(cost) else None,
                )
                priced.append(design)
    has_hours = all(row.hours is not None for row in priced if row.pairs_needed)

    def cost_of(row: PricedDesign) -> tuple[object, ...]:
        price = row.hours if has_hours else row.pairs_needed
        # As cheap as another, the declared window stays
        return not row.is_flat, price or math.inf, row.window != claim.window, row.sd_difference

    return sorted(priced, key=cost_of)


def measure_pair_hours(experiment: RecordedExperiment) -> float:
    """Return the GPU hours of a run of each arm (machine hours without GPUs); NaN if not recorded."""
    runs = [[run for run in experiment.arm(arm).values() if run.finished] for arm in experiment.arms]
    return sum(float(np.mean([*map(_device_hours, arm_runs)])) if arm_runs else math.nan for arm_runs in runs)


def _device_hours(run: RecordedRun) -> float:
    start, end = run.span_s or (math.nan, math.nan)
    config = run.config or {}
    devices = config.get("cluster.nodes", 1) * (config.get("cluster.gpus_per_node") or 1)
    return (end - start) / 3600 * devices / run.runs_per_gpu


def _is_flat(runs: Sequence[RecordedRun], claim: Claim, window: str, margin: float) -> bool:
    steps, values = stack_runs(runs, claim.metric)
    inside = values[:, in_window(steps, window_bounds(window, steps, claim.metric))] if len(steps) else values
    transform = claim.transform or default_transform(claim.metric)
    if inside.shape[-1] < 2 or find_outside_domain(inside, transform):
        return False
    halves = np.array_split(transform_values(inside, transform, claim.metric).mean(axis=0), 2)
    return bool(abs(halves[1].mean() - halves[0].mean()) < margin)
