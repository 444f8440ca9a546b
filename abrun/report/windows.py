"""Prices of a claim's window: the pairs and GPU hours that measured runs predict for several windows."""

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
MAX_PERCENT = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedWindow:
    """What a claim would need over another window."""

    window: str
    sd_difference: float
    is_flat: bool  # the baseline's halves of the window differ by less than the margin
    pairs_needed: int | None  # None: more than 1000
    hours: float | None  # of GPUs (without any, of machines) for all arms of these pairs; None: unknown


def price_windows(
    earlier: RecordedExperiment,
    claim: Claim,
    plan: Callable[[Claim], tuple[Spread | None, ClaimPower | None]],
    margin: float,
    hours: float | None,
) -> list[PricedWindow]:
    """Return the claim's window, the last 20 % and 50 %, and the longest that is flat, the cheapest first.

    `plan` gives spread and power of a claim, `margin` is that of the claim in units of its metric, `hours`
    those of one pair with all arms. A longer window averages more steps; while the baseline still learns, it
    compares how fast arms learn, and is no substitute.
    """
    runs = [run for run in earlier.arm(earlier.baseline).values() if run.finished]
    longer = (f"last {percent}%" for percent in range(MAX_PERCENT, 50, -10))
    longest = next((window for window in longer if _is_flat(runs, claim, window, margin)), claim.window)
    priced = []
    for window in dict.fromkeys([claim.window, *WINDOWS, longest]):
        spread, power = plan(claim.model_copy(update={"window": window}))
        if spread is None or power is None:
            continue
        needed = power.pairs_needed
        priced.append(
            PricedWindow(
                window=window,
                sd_difference=spread.sd_difference,
                is_flat=_is_flat(runs, claim, window, margin),
                pairs_needed=needed,
                hours=None if hours is None or needed is None else needed * hours,
            )
        )
    return sorted(priced, key=lambda row: (not row.is_flat, row.pairs_needed or np.inf, row.sd_difference))


def pair_hours(experiment: RecordedExperiment) -> float | None:
    """Return the GPU hours of a run of each arm (machine hours without GPUs), from the recorded durations."""
    means = []
    for arm in experiment.arms:
        runs = [run for run in experiment.arm(arm).values() if run.finished]
        hours = [_device_hours(run) for run in runs if run.span_s is not None]
        if not hours:
            return None
        means.append(np.mean(hours))
    return float(np.sum(means))


def _device_hours(run: RecordedRun) -> float:
    assert run.span_s is not None
    config = run.config or {}
    devices = config.get("cluster.nodes", 1) * (config.get("cluster.gpus_per_node") or 1)
    return (run.span_s[1] - run.span_s[0]) / 3600 * devices / run.runs_per_gpu


def _is_flat(runs: Sequence[RecordedRun], claim: Claim, window: str, margin: float) -> bool:
    steps, values = stack_runs(runs, claim.metric)
    inside = values[:, in_window(steps, window_bounds(window, steps, claim.metric))] if len(steps) else values
    transform = claim.transform or default_transform(claim.metric)
    if inside.shape[-1] < 2 or find_outside_domain(inside, transform):
        return False
    curve = transform_values(inside, transform, claim.metric).mean(axis=0)
    halves = np.array_split(curve, 2)
    return bool(abs(halves[1].mean() - halves[0].mean()) < margin)
