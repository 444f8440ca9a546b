"""How far apart the arms' weights end: whether at all by their hash, how far by sketches. Never gating."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from abrun.reasons import Code, Reason
from abrun.recorded.experiment import Pair, RecordedRun
from abrun.stats.series import Array

Sketch = Mapping[str, Array]  # tensor -> its numbers [at most 256] float64; abrun.models.sketch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalWeights:
    """The pair that ends farthest apart. Distances are L2 norms, estimated from sketches, within 8 %."""

    arm: str
    num_pairs: int  # of which both runs say what they ended with
    num_equal: int  # of them: the hashes of all weights are the same
    seed: int | None  # None from here on: all are equal, or no unequal pair has sketches
    relative_difference: float | None  # ||treatment - baseline|| / ||baseline||, over all weights
    num_reruns: int
    aa_relative_difference: float | None  # among same-seed baseline reruns; None: there are none
    ulp_relative_difference: float | None  # of baselines that began one ULP away; None: there are none


def final_weights(arm: str, pairs: Sequence[Pair]) -> FinalWeights | None:
    """Return None where no finished pair says what it ended with."""
    known = [
        pair
        for pair in pairs
        if pair.finished and pair.baseline.final_weights_hash and pair.treatment.final_weights_hash
    ]
    if not known:
        return None
    unequal = [pair for pair in known if not _equal(pair.baseline, pair.treatment)]
    distances = [(pair, _relative(pair.baseline, pair.treatment)) for pair in unequal]
    measured = [(pair, distance) for pair, distance in distances if distance is not None]
    pair, farthest = max(measured, key=lambda both: _order(both[1]), default=(None, None))
    reruns = [floor for pair in known for floor in _floors(pair.baseline, pair.reruns)]
    moved = [floor for pair in known for floor in _floors(pair.baseline, pair.moved)]
    return FinalWeights(
        arm=arm,
        num_pairs=len(known),
        num_equal=len(known) - len(unequal),
        seed=pair.seed if pair else None,
        relative_difference=farthest,
        num_reruns=len(reruns),
        aa_relative_difference=max(reruns, key=_order, default=None),
        ulp_relative_difference=max(moved, key=_order, default=None),
    )


def distance(baseline: RecordedRun, treatment: RecordedRun) -> float | Reason:
    """Return ||B - A|| / ||A - A0|| of final weights B of the treatment, A of the baseline, and its first A0.

    L2 norms over all weights, estimated from the sketches. 0 where all weights are the same by their hash.
    Else why it is not known.
    """
    runs, seed = {"baseline": baseline, "treatment": treatment}, baseline.name.seed
    for arm, run in runs.items():
        if not run.final_weights_hash:
            return Code.FINAL_WEIGHTS_NOT_RECORDED(arm=arm, seed=seed)
    if _equal(baseline, treatment):
        return 0.0
    first, left, right = baseline.initial_sketch(), *(run.final_sketch() for run in runs.values())
    if not (_comparable(first, left) and _comparable(left, right)):
        return Code.NO_SKETCHES_IN_COMMON(seed=seed)
    apart, moved = (_square_of_difference(one, left) for one in (right, first))
    if not moved > 0 or not np.isfinite(apart + moved):
        return Code.WEIGHTS_DID_NOT_MOVE(seed=seed)
    return float(np.sqrt(apart / moved))


def _comparable(left: Sketch, right: Sketch) -> bool:
    """Return whether both are there, and of the same tensors."""
    shapes = [{name: one.shape for name, one in sketch.items()} for sketch in (left, right)]
    return bool(left) and shapes[0] == shapes[1]


def _square_of_difference(left: Sketch, right: Sketch) -> float:
    """Return the squared norm of the difference; NaN where one has a NaN that the other has not."""
    total = 0.0
    for name, a in left.items():
        b = right[name]
        with np.errstate(invalid="ignore"):
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, b - a)
        total += float(np.square(apart).sum())
    return total


def _equal(left: RecordedRun, right: RecordedRun) -> bool:
    return left.final_weights_hash == right.final_weights_hash


def _floors(baseline: RecordedRun, repeats: Sequence[RecordedRun]) -> list[float]:
    """Return how far repetitions of a baseline end from it, as far as that is known."""
    ended = [repeat for repeat in repeats if repeat.finished]
    floors = [0.0 if _equal(baseline, repeat) else _relative(baseline, repeat) for repeat in ended]
    return [floor for floor in floors if floor is not None]


def _relative(baseline: RecordedRun, other: RecordedRun) -> float | None:
    """Return the distance in norms of the baseline; None where a sketch is missing, or of other tensors."""
    left, right = baseline.final_sketch(), other.final_sketch()
    if not _comparable(left, right):
        return None
    apart = _square_of_difference(left, right)
    size = sum(square for one in left.values() if np.isfinite(square := float(np.square(one).sum())))
    if apart == 0:
        return 0.0
    return float(np.sqrt(apart / size)) if size > 0 else np.inf


def _order(value: float) -> float:
    return np.inf if np.isnan(value) else value
