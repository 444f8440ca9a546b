"""Divergence of the arms, relative to A/A reruns, one-ULP perturbations and seeds. Never gates a verdict."""

from collections.abc import Iterator, Sequence

import numpy as np

from abrun.logs.recorded.experiment import Pair, RecordedRun, stack_pairs, stack_runs
from abrun.recipe.claims import Claim
from abrun.runs.metric_names import STEP_ONE
from abrun.stats.equivalence import t_interval
from abrun.stats.series import Array, Steps
from abrun.verdict.evidence import Evidence


def measure_divergence(arm: str, pairs: Sequence[Pair], claims: Sequence[Claim]) -> list[Evidence]:
    """Return the divergence of the claimed metrics and the step-one metrics, as far as they are recorded."""
    finished = [pair for pair in pairs if pair.finished and pair.baseline.axis == "steps"]
    metrics = dict.fromkeys([*(claim.metric for claim in claims), *STEP_ONE])
    measured = (_measure_metric(arm, finished, metric) for metric in metrics) if finished else ()
    return [metric_divergence for metric_divergence in measured if metric_divergence]


def _measure_metric(arm: str, pairs: Sequence[Pair], metric: str) -> Evidence | None:
    steps, baseline, treatment = stack_pairs(pairs, metric)
    differences = np.abs(treatment - baseline)
    is_finite = np.isfinite(differences).all(axis=0)
    steps, differences = steps[is_finite], differences[:, is_finite]
    if not len(steps):
        return None
    mean = float(differences.mean())
    rerun_distances = [
        distance for pair in pairs for distance in _rerun_distances(pair.baseline, pair.reruns, metric, steps)
    ]
    noise_floor = float(np.mean(rerun_distances)) if rerun_distances else None
    differing_steps = steps[(differences > 0).any(axis=0)]
    spread = float(baseline[:, is_finite].std(axis=0, ddof=1).mean()) if len(pairs) > 1 else None
    ulp_distances = [list(_rerun_distances(pair.baseline, pair.moved, metric, steps)) for pair in pairs]
    values = {
        "metric": metric,
        # Of same-seed baselines; zero: baseline reruns are bit-identical
        "noise_floor": "unknown" if noise_floor is None else "measured" if noise_floor else "zero",
        "mean_difference": mean,  # mean |treatment - baseline| over steps and pairs
        "aa_mean_difference": noise_floor,
        "ratio": mean / noise_floor if noise_floor else None,
        # Of any pair; None unless baseline reruns are bit-identical
        "first_step_apart": int(differing_steps[0]) if len(differing_steps) and noise_floor == 0 else None,
        # None without perturbed runs
        "ulp": _measure_ulp_growth(differences.mean(axis=1), ulp_distances) if any(ulp_distances) else None,
        "seed_spread": spread,  # baseline's sd over seeds, mean over steps; None for one seed
        "share_of_seed_spread": mean / spread if spread else None,
    }
    return Evidence(kind="divergence", arm=arm, values=values)


def _measure_ulp_growth(
    treatment_distances: Array, ulp_distances: Sequence[Sequence[float]]
) -> dict[str, float | list[float] | None]:
    """Compare each pair's mean distance [P] with those of its baselines that started one ULP away.

    The ratio is mean |treatment - baseline| over mean |perturbed - baseline|; None if the latter is 0.
    """
    paired_distances = [
        (treatment_distance, float(np.mean(distances)))
        for treatment_distance, distances in zip(treatment_distances, ulp_distances, strict=True)
        if distances
    ]
    log_ratios = np.log([treatment / ulp for treatment, ulp in paired_distances if treatment > 0 and ulp > 0])
    has_ratios = len(log_ratios) == len(paired_distances)
    has_interval = has_ratios and len(log_ratios) > 1
    return {
        "mean_difference": float(np.mean([distances for _, distances in paired_distances])),
        "ratio": float(np.exp(log_ratios.mean())) if has_ratios else None,  # geometric mean over seeds
        "ci95": np.exp(t_interval(log_ratios, 0.95)).tolist() if has_interval else None,  # over seeds
    }


def _rerun_distances(
    baseline: RecordedRun, reruns: Sequence[RecordedRun], metric: str, steps: Steps
) -> Iterator[float]:
    """Yield the mean distance of each finished rerun from the baseline, if it is finite at these steps."""
    for rerun in reruns:
        shared, values = stack_runs([baseline, rerun], metric)
        distances = np.abs(values[1] - values[0])[np.isin(shared, steps)]
        if rerun.finished and len(distances) == len(steps) and np.isfinite(distances).all():
            yield float(distances.mean())
