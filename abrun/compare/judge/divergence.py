"""T2: how the arms part, against how the baseline parts from itself. Diagnostic, never gating."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.compare.read.experiment import Pair, RecordedRun, stack, stack_pairs
from abrun.metric_names import (
    STEP_ONE,
)
from abrun.recipe import Primary
from abrun.series import Array, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """T2 for one metric: how the arms part, against how same-seed baselines part. Never gating."""

    arm: str
    metric: str
    num_reruns: int
    noise_floor: Literal["measured", "zero", "unknown"]  # zero: the baseline repeats itself bit for bit
    mean_difference: float  # over steps and pairs, of |treatment - baseline|
    aa_mean_difference: float | None
    ratio: float | None
    first_step_outside: int | None  # where the median pair leaves the running maximum of the A/A differences


def divergence(arm: str, pairs: Sequence[Pair], primaries: Sequence[Primary]) -> list[Divergence]:
    """T2 for the step-one metrics and the primaries, as far as they are recorded."""
    finished = [pair for pair in pairs if pair.finished]
    metrics = dict.fromkeys([*(primary.metric for primary in primaries), *STEP_ONE])
    found = (_divergence(arm, finished, metric) for metric in metrics) if finished else ()
    return [one for one in found if one]


def _divergence(arm: str, pairs: Sequence[Pair], metric: str) -> Divergence | None:
    steps, baseline, treatment = stack_pairs(pairs, metric)
    differences = np.abs(treatment - baseline)
    known = np.isfinite(differences).all(axis=0)
    steps, differences = steps[known], differences[:, known]
    if not len(steps):
        return None
    repeats = [(pair.baseline, rerun) for pair in pairs for rerun in pair.reruns if rerun.finished]
    floors = [floor for one in repeats if (floor := _noise(one, metric, steps)) is not None]
    mean = float(differences.mean())
    result = Divergence(
        arm=arm,
        metric=metric,
        num_reruns=len(floors),
        noise_floor="unknown",
        mean_difference=mean,
        aa_mean_difference=None,
        ratio=None,
        first_step_outside=None,
    )
    if not floors:
        return result
    # Both curves start together and part: a later step may by chance be close again, the envelope may not.
    envelope = np.maximum.accumulate(np.max(floors, axis=0))
    outside = steps[np.median(differences, axis=0) > envelope]
    floor = float(np.mean(floors))
    return replace(
        result,
        noise_floor="measured" if floor else "zero",
        aa_mean_difference=floor,
        ratio=mean / floor if floor else None,
        first_step_outside=int(outside[0]) if len(outside) else None,
    )


def _noise(repeat: tuple[RecordedRun, RecordedRun], metric: str, steps: Steps) -> Array | None:
    shared, values = stack(repeat, metric)
    noise = np.abs(values[1] - values[0])
    if not np.isin(steps, shared).all():
        return None
    noise = noise[np.isin(shared, steps)]
    return noise if np.isfinite(noise).all() else None
