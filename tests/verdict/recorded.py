"""Recorded runs made of curves, without files."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from abrun.logs.recorded.experiment import RecordedExperiment, RecordedRun, Sides
from abrun.recipe.claims import Compare
from abrun.runs.layout import RunName
from abrun.stats.series import Series


def run_of(metrics: Mapping[str, Any], arm: str = "baseline", seed: int = 0, **fields: Any) -> RecordedRun:
    """A finished run. A metric's values are those of steps 1, 2 ..., unless it is (steps, values)."""
    series = {}
    for metric, one in metrics.items():
        steps, values = one if isinstance(one, tuple) else (np.arange(1, len(one) + 1), one)
        series[metric] = Series(np.asarray(steps, np.int64), np.asarray(values, np.float64))
    name = RunName(arm=arm, seed=seed)
    return RecordedRun(
        **{"name": name, "place": "simulated", "status": "finished", "metrics": series, **fields}
    )


def runs_of(arm: str, metrics: Mapping[str, Any], **fields: Any) -> tuple[RecordedRun, ...]:
    """Runs of curves [R, S] by metric."""
    curves = zip(*metrics.values(), strict=True)
    return tuple(
        run_of(dict(zip(metrics, values, strict=True)), arm, seed, **fields)
        for seed, values in enumerate(curves)
    )


def sides_of(baseline: Mapping[str, Any], treatment: Mapping[str, Any], *, paired: bool = True) -> Sides:
    return Sides(
        baselines=runs_of("baseline", baseline), treatments=runs_of("treatment", treatment), paired=paired
    )


def experiment_of(*arms: tuple[RecordedRun, ...], **compare: Any) -> RecordedExperiment:
    """Arms as they were launched with a section `compare`; the first is the baseline."""
    return RecordedExperiment(
        name="simulated",
        arms=tuple(runs[0].name.arm for runs in arms),
        compare=Compare(**compare),
        runs={run.name: run for runs in arms for run in runs},
    )
