"""Distance of the arms' final weights: equality by hash, size by sketch. Never gates a verdict."""

from collections.abc import Mapping, Sequence

import numpy as np

from abrun.logs.recorded.experiment import Pair, RecordedRun
from abrun.messages.codes import Code, Reason
from abrun.stats.series import Array
from abrun.verdict.evidence import Evidence

Sketch = Mapping[str, Array]  # tensor name -> float64 [up to 256], see abrun.trainer.models.weights.sketch_of


def compare_final_weights(arm: str, pairs: Sequence[Pair]) -> list[Evidence]:
    """Return the largest distance over pairs; empty if no finished pair recorded its final weights.

    Distances are L2 norms, estimated from sketches within 8 %.
    """
    recorded_pairs = [
        pair
        for pair in pairs
        if pair.finished and pair.baseline.final_weights_hash and pair.treatment.final_weights_hash
    ]
    if not recorded_pairs:
        return []
    unequal = [pair for pair in recorded_pairs if not _is_equal(pair.baseline, pair.treatment)]
    distances = [(pair, _relative_distance(pair.baseline, pair.treatment)) for pair in unequal]
    measured = [(pair, distance) for pair, distance in distances if distance is not None]
    pair, farthest = max(
        measured, key=lambda pair_distance: _sort_key(pair_distance[1]), default=(None, None)
    )
    aa_distances = [
        rerun_distance
        for pair in recorded_pairs
        for rerun_distance in _rerun_distances(pair.baseline, pair.reruns)
    ]
    ulp_distances = [
        rerun_distance
        for pair in recorded_pairs
        for rerun_distance in _rerun_distances(pair.baseline, pair.moved)
    ]
    values = {
        "num_pairs": len(recorded_pairs),  # in which both runs recorded their final weights
        "num_equal": len(recorded_pairs) - len(unequal),  # with equal hashes of all weights
        # None, as below, if all are equal or no unequal pair has sketches
        "seed": pair.seed if pair else None,
        "relative_difference": farthest,  # ||treatment - baseline|| / ||baseline|| over all weights
        "num_reruns": len(aa_distances),
        "aa_relative_difference": max(aa_distances, key=_sort_key, default=None),  # largest of the reruns
        "ulp_relative_difference": max(ulp_distances, key=_sort_key, default=None),
    }
    return [Evidence(kind="final weights", arm=arm, values=values)]


def measure_weight_distance(baseline: RecordedRun, treatment: RecordedRun) -> float | Reason:
    """Return ||B - A|| / ||A - A0||, or the reason why it is unknown.

    B are the treatment's final weights, A the baseline's, A0 the baseline's initial ones. L2 norms over all
    weights, estimated from the sketches. Exactly 0 if the hashes of all weights are equal.
    """
    runs, seed = {"baseline": baseline, "treatment": treatment}, baseline.name.seed
    for arm, run in runs.items():
        if not run.final_weights_hash:
            return Code.FINAL_WEIGHTS_NOT_RECORDED(arm=arm, seed=seed)
    if _is_equal(baseline, treatment):
        return 0.0
    initial, baseline_sketch, treatment_sketch = (
        baseline.initial_sketch(),
        *(run.final_sketch() for run in runs.values()),
    )
    if not (_is_comparable(initial, baseline_sketch) and _is_comparable(baseline_sketch, treatment_sketch)):
        return Code.NO_SKETCHES_IN_COMMON(seed=seed)
    difference, movement = (
        _square_of_difference(sketch, baseline_sketch) for sketch in (treatment_sketch, initial)
    )
    if not movement > 0 or not np.isfinite(difference + movement):
        return Code.WEIGHTS_DID_NOT_MOVE(seed=seed)
    return float(np.sqrt(difference / movement))


def _is_comparable(baseline: Sketch, treatment: Sketch) -> bool:
    """Return True if both sketches exist and are of the same tensors."""
    shapes = [{name: numbers.shape for name, numbers in sketch.items()} for sketch in (baseline, treatment)]
    return bool(baseline) and shapes[0] == shapes[1]


def _square_of_difference(baseline: Sketch, treatment: Sketch) -> float:
    """Return the squared norm of the difference; NaN if only one of them has a NaN somewhere."""
    total = 0.0
    for name, a in baseline.items():
        b = treatment[name]
        with np.errstate(invalid="ignore"):
            difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, b - a)
        total += float(np.square(difference).sum())
    return total


def _is_equal(baseline: RecordedRun, treatment: RecordedRun) -> bool:
    return baseline.final_weights_hash == treatment.final_weights_hash


def _rerun_distances(baseline: RecordedRun, reruns: Sequence[RecordedRun]) -> list[float]:
    """Return the known distances of a baseline's finished reruns from it."""
    finished = [rerun for rerun in reruns if rerun.finished]
    distances = [
        0.0 if _is_equal(baseline, rerun) else _relative_distance(baseline, rerun) for rerun in finished
    ]
    return [distance for distance in distances if distance is not None]


def _relative_distance(baseline: RecordedRun, run: RecordedRun) -> float | None:
    """Return the distance relative to the baseline's norm; None if sketches are missing or differ."""
    baseline_sketch, run_sketch = baseline.final_sketch(), run.final_sketch()
    if not _is_comparable(baseline_sketch, run_sketch):
        return None
    difference = _square_of_difference(baseline_sketch, run_sketch)
    size = sum(
        square
        for numbers in baseline_sketch.values()
        if np.isfinite(square := float(np.square(numbers).sum()))
    )
    if difference == 0:
        return 0.0
    return float(np.sqrt(difference / size)) if size > 0 else np.inf


def _sort_key(value: float) -> float:
    return np.inf if np.isnan(value) else value
