"""T2: how the arms part, against how the baseline parts from itself, from one that began one ULP away, and
from seed to seed. Diagnostic, never gating."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from abrun.metric_names import STEP_ONE
from abrun.recipe.claims import Primary
from abrun.recorded.experiment import Pair, RecordedRun, stack, stack_pairs
from abrun.stats.equivalence import t_interval
from abrun.stats.series import Array, Steps

MOST_BUCKETS = 20  # of steps, that ratios are given for


@dataclass(frozen=True, slots=True, kw_only=True)
class UlpGrowth:
    """What one ULP of the initial weights grows into (controls.ulp_reruns), and the treatment against it.

    Ratios are of mean |treatment - baseline| to mean |moved - baseline|; None where the latter is 0.
    """

    num_reruns: int
    mean_difference: float  # over steps and runs, of |moved - baseline|
    ratio: float | None  # the geometric mean over the seeds that have such a run
    ci95: tuple[float, float] | None  # of that ratio, over seeds; None: fewer than two
    by_steps: list[tuple[int, int, float | None]]  # first step, last step, the ratio in between


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
    first_step_apart: int | None  # of any pair, where the baseline repeats itself bit for bit
    # How likely it is that the treatment parts further than every rerun of its seed, in every seed that has
    # any, if it is but another rerun; 1: it does not in some; None: no seed has one
    p_beyond: float | None
    ulp: UlpGrowth | None  # None: there is no such run
    seed_spread: float | None  # the baseline's sd over seeds, mean over steps; None: one seed
    share_of_seed_spread: float | None  # the mean difference over that


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
        first_step_apart=None,
        p_beyond=_p_beyond(pairs, metric, steps),
        ulp=_ulp_growth(pairs, metric, steps),
        seed_spread=None,
        share_of_seed_spread=None,
    )
    if len(pairs) > 1:
        spread = float(baseline[:, known].std(axis=0, ddof=1).mean())
        result = replace(result, seed_spread=spread, share_of_seed_spread=mean / spread if spread else None)
    if not floors:
        return result
    apart = steps[(differences > 0).any(axis=0)]
    floor = float(np.mean(floors))
    return replace(
        result,
        noise_floor="measured" if floor else "zero",
        aa_mean_difference=floor,
        ratio=mean / floor if floor else None,
        first_step_apart=int(apart[0]) if len(apart) and not floor else None,
    )


def _p_beyond(pairs: Sequence[Pair], metric: str, steps: Steps) -> float | None:
    """A sign test of mean |difference|: of k reruns and the treatment each is the furthest once in k + 1.

    Exact for curves of any kind: runs of one seed are exchangeable where the treatment does nothing.
    """
    p_value, seen = 1.0, False
    for pair in pairs:
        repeats = [
            float(noise.mean())
            for rerun in pair.reruns
            if rerun.finished and (noise := _noise((pair.baseline, rerun), metric, steps)) is not None
        ]
        of_treatment = _noise((pair.baseline, pair.treatment), metric, steps)
        if repeats and of_treatment is not None:
            seen = True
            if of_treatment.mean() <= max(repeats):
                return 1.0
            p_value /= len(repeats) + 1
    return p_value if seen else None


def _ulp_growth(pairs: Sequence[Pair], metric: str, steps: Steps) -> UlpGrowth | None:
    treated, moved = [], []  # of each pair that has a moved run: differences [S]
    num_reruns = 0
    for pair in pairs:
        runs = [run for run in pair.moved if run.finished]
        of_moved = [one for run in runs if (one := _noise((pair.baseline, run), metric, steps)) is not None]
        of_treatment = _noise((pair.baseline, pair.treatment), metric, steps)
        if of_moved and of_treatment is not None:
            treated.append(of_treatment)
            moved.append(np.mean(of_moved, axis=0))
            num_reruns += len(of_moved)
    if not num_reruns:
        return None
    both = [(float(a.mean()), float(b.mean())) for a, b in zip(treated, moved, strict=True)]
    logs = np.log([a / b for a, b in both if a > 0 and b > 0])
    known = len(logs) == len(both)
    interval = np.exp(t_interval(logs, 0.95)) if known and len(logs) > 1 else None
    buckets = np.array_split(np.arange(len(steps)), min(MOST_BUCKETS, len(steps)))
    a, b = np.mean(treated, axis=0), np.mean(moved, axis=0)
    return UlpGrowth(
        num_reruns=num_reruns,
        mean_difference=float(np.mean(moved)),
        ratio=float(np.exp(logs.mean())) if known else None,
        ci95=None if interval is None else (float(interval[0]), float(interval[1])),
        by_steps=[
            (
                int(steps[part[0]]),
                int(steps[part[-1]]),
                float(a[part].mean() / b[part].mean()) if b[part].mean() > 0 else None,
            )
            for part in buckets
        ],
    )


def _noise(repeat: tuple[RecordedRun, RecordedRun], metric: str, steps: Steps) -> Array | None:
    shared, values = stack(repeat, metric)
    noise = np.abs(values[1] - values[0])
    if not np.isin(steps, shared).all():
        return None
    noise = noise[np.isin(shared, steps)]
    return noise if np.isfinite(noise).all() else None
