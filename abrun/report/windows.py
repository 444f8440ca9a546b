"""Prices of a claim's window: the pairs and GPU hours that measured runs predict for several windows."""

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
Plan = Callable[[Claim], tuple[Spread | None, ClaimPower | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedWindow:
    """What a claim would need over another window."""

    window: str
    sd_difference: float
    is_flat: bool  # the baseline's halves of the window differ by less than the margin
    pairs_needed: int | None  # None: more than 1000
    hours: float | None  # of GPUs (without any, of machines) for all arms of these pairs; None: unknown


def price_windows(
    earlier: RecordedExperiment, claim: Claim, plan: Plan, margin: float, pair_hours: float
) -> list[PricedWindow]:
    """Return the claim's window, the last 20 % and 50 %, and the longest that is flat, the cheapest first.

    `margin` is in units of the metric. A longer window averages more steps, but where the baseline still
    learns it compares how fast arms learn, and is no substitute.
    """
    runs = [run for run in earlier.arm(earlier.baseline).values() if run.finished]
    longer = (f"last {percent}%" for percent in range(90, 50, -10))
    longest = next((window for window in longer if _is_flat(runs, claim, window, margin)), claim.window)
    priced = []
    for window in dict.fromkeys([claim.window, *WINDOWS, longest]):
        spread, power = plan(claim.model_copy(update={"window": window}))
        if spread and power:
            needed, is_flat = power.pairs_needed, _is_flat(runs, claim, window, margin)
            hours = needed * pair_hours if needed and math.isfinite(pair_hours) else None
            values = {"sd_difference": spread.sd_difference, "pairs_needed": needed, "hours": hours}
            priced.append(PricedWindow(window=window, is_flat=is_flat, **values))
    cost = {row.window: (not row.is_flat, row.pairs_needed or math.inf) for row in priced}
    # As cheap as another, the declared window stays
    return sorted(priced, key=lambda row: (*cost[row.window], row.window != claim.window, row.sd_difference))


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
