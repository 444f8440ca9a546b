"""T2: how the arms part, against how the baseline parts from itself, from one that began one ULP away, and
from seed to seed. Diagnostic, never gating."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from abrun.metric_names import STEP_ONE
from abrun.recipe.claims import Claim
from abrun.recorded.experiment import Pair, RecordedRun, stack_pairs, stack_runs
from abrun.stats.equivalence import t_interval
from abrun.stats.series import Array, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class UlpGrowth:
    """What one ULP of the initial weights grows into (controls.ulp_reruns), and the treatment against it.

    Ratios are of mean |treatment - baseline| to mean |moved - baseline|; None where the latter is 0.
    """

    mean_difference: float  # over steps and runs, of |moved - baseline|
    ratio: float | None  # the geometric mean over the seeds that have such a run
    ci95: tuple[float, float] | None  # of that ratio, over seeds; None: fewer than two


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """T2 for one metric: how the arms part, against how same-seed baselines part. Never gating."""

    arm: str
    metric: str
    noise_floor: Literal["measured", "zero", "unknown"]  # zero: the baseline repeats itself bit for bit
    mean_difference: float  # over steps and pairs, of |treatment - baseline|
    aa_mean_difference: float | None
    ratio: float | None
    first_step_apart: int | None  # of any pair, where the baseline repeats itself bit for bit
    ulp: UlpGrowth | None  # None: there is no such run
    seed_spread: float | None  # the baseline's sd over seeds, mean over steps; None: one seed
    share_of_seed_spread: float | None  # the mean difference over that


def divergence(arm: str, pairs: Sequence[Pair], claims: Sequence[Claim]) -> list[Divergence]:
    """T2 for the step-one metrics and the claims, as far as they are recorded."""
    finished = [pair for pair in pairs if pair.finished]
    metrics = dict.fromkeys([*(claim.metric for claim in claims), *STEP_ONE])
    found = (_divergence(arm, finished, metric) for metric in metrics) if finished else ()
    return [one for one in found if one]


def _divergence(arm: str, pairs: Sequence[Pair], metric: str) -> Divergence | None:
    steps, baseline, treatment = stack_pairs(pairs, metric)
    differences = np.abs(treatment - baseline)
    known = np.isfinite(differences).all(axis=0)
    steps, differences = steps[known], differences[:, known]
    if not len(steps):
        return None
    mean = float(differences.mean())
    floors = [far for pair in pairs for far in _distances(pair.baseline, pair.reruns, metric, steps)]
    floor = float(np.mean(floors)) if floors else None
    apart = steps[(differences > 0).any(axis=0)]
    spread = float(baseline[:, known].std(axis=0, ddof=1).mean()) if len(pairs) > 1 else None
    moved = [list(_distances(pair.baseline, pair.moved, metric, steps)) for pair in pairs]
    return Divergence(
        arm=arm,
        metric=metric,
        noise_floor="unknown" if floor is None else "measured" if floor else "zero",
        mean_difference=mean,
        aa_mean_difference=floor,
        ratio=mean / floor if floor else None,
        first_step_apart=int(apart[0]) if len(apart) and floor == 0 else None,
        ulp=_ulp_growth(differences.mean(axis=1), moved) if any(moved) else None,
        seed_spread=spread,
        share_of_seed_spread=mean / spread if spread else None,
    )


def _ulp_growth(treated: Array, moved: Sequence[Sequence[float]]) -> UlpGrowth:
    """Compare each pair's mean distance [P] with those of its baselines that began one ULP away."""
    both = [(of_pair, float(np.mean(far))) for of_pair, far in zip(treated, moved, strict=True) if far]
    logs = np.log([a / b for a, b in both if a > 0 and b > 0])
    known = len(logs) == len(both)
    interval = np.exp(t_interval(logs, 0.95)) if known and len(logs) > 1 else None
    return UlpGrowth(
        mean_difference=float(np.mean([far for _, far in both])),
        ratio=float(np.exp(logs.mean())) if known else None,
        ci95=None if interval is None else (float(interval[0]), float(interval[1])),
    )


def _distances(
    baseline: RecordedRun, repeats: Sequence[RecordedRun], metric: str, steps: Steps
) -> Iterator[float]:
    """Yield the mean distance from the baseline of each repetition that holds numbers at these steps."""
    for repeat in repeats:
        shared, values = stack_runs([baseline, repeat], metric)
        far = np.abs(values[1] - values[0])[np.isin(shared, steps)]
        if repeat.finished and len(far) == len(steps) and np.isfinite(far).all():
            yield float(far.mean())
