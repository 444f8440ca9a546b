"""Fingerprints of runs in a ledger, by which their numbers are recognised under another name."""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from abrun.metric_names import find_metric, is_learned
from abrun.recorded.experiment import RecordedRun
from abrun.runs.layout import RunName
from abrun.runs.schemas import Count, Items
from abrun.stats.series import Series

NUM_POINTS = 50  # kept of a curve
MIN_DISTINCT = 10  # numbers; two runs of a coarse metric share fewer by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """One run: its name, and a curve that no other run has; none if it recorded too few numbers for one.

    That curve is some points of the claimed metric. If the metric is coarse or diverged, it is the bytes of a
    hash of all that the run learned, which only exact copies share.
    """

    name: str
    seed: Count
    steps: Items[Count] = ()
    values: Items[Annotated[float, Field(allow_inf_nan=False)]] = ()

    def restore(self, arm: str, metric: str) -> RecordedRun:
        """Return the run with that curve as its log of the metric, under the arm's name in the ledger."""
        curve = Series(np.array(self.steps, np.int64), np.array(self.values))
        name = RunName(arm=arm, seed=self.seed)
        return RecordedRun(name=name, place=self.name, status="finished", metrics={metric: curve})


def remember_run(run: RecordedRun, metric: str) -> KnownRun:
    """Return what recognises a run later. Values have seven digits: more do not survive every log."""
    curve = run.series(metric)
    kept = np.unique(np.linspace(0, len(curve) - 1, min(NUM_POINTS, len(curve))).astype(int))
    steps, values = curve.steps[kept], curve.values[kept]
    if len(np.unique(values)) < MIN_DISTINCT or not np.isfinite(values).all():
        values = _hash_learned_numbers(run)
        steps = np.arange(len(values))
    known_values = tuple(float(f"{value:.7g}") for value in values)
    return KnownRun(name=str(run), seed=run.name.seed, steps=tuple(steps.tolist()), values=known_values)


def _hash_learned_numbers(run: RecordedRun) -> bytes:
    """Return a hash of all metrics that depend on the run; empty if they have too few distinct numbers."""
    learned = {name: series for name, series in sorted(run.metrics.items()) if _depends_on_run(name, series)}
    if sum(len(np.unique(series.values)) for series in learned.values()) < MIN_DISTINCT:
        return b""
    numbers = hashlib.sha256()
    for name, series in learned.items():
        arrays = series.steps.tobytes() + series.values.tobytes()
        numbers.update(name.encode("utf-8", "surrogateescape") + arrays)
    return numbers.digest()


def _depends_on_run(metric: str, series: Series) -> bool:
    """Return False for times, memory, configured schedules and counters, which only rise or fall."""
    definition, changes = find_metric(metric), np.diff(series.values)
    is_configured = definition is not None and "configured" in definition.roles
    is_counter = len(changes) > 1 and bool((changes >= 0).all() or (changes <= 0).all())
    return is_learned(metric) and not is_configured and not is_counter
