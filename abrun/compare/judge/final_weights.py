"""How far apart the arms' weights end: by their hash, all of them; by their sample, how far. Never gating."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from abrun.compare.read.experiment import Pair, RecordedRun
from abrun.series import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalWeights:
    """The pair that ends farthest apart. Differences are of sampled weights, float32, without unit."""

    arm: str
    num_pairs: int  # of which both runs say what they ended with
    num_equal: int  # of them: the hashes of all weights are the same
    seed: int | None  # None from here on: all are equal, or no unequal pair has samples
    num_sampled: int | None
    largest_difference: float | None  # |treatment - baseline|
    relative_difference: float | None  # the largest over tensors, relative to the tensor's largest weight
    tensor: str | None  # that has the relative one
    num_reruns: int
    aa_largest_difference: float | None  # among same-seed baseline reruns; None: there are none
    ulp_largest_difference: float | None  # of baselines that began one ULP away; None: there are none


class _Distance(NamedTuple):
    num_sampled: int
    largest: float
    relative: float
    tensor: str


def final_weights(arm: str, pairs: Sequence[Pair]) -> FinalWeights | None:
    """None where no finished pair says what it ended with."""
    known = [
        pair
        for pair in pairs
        if pair.finished and pair.baseline.final_weights_hash and pair.treatment.final_weights_hash
    ]
    if not known:
        return None
    unequal = [pair for pair in known if not _equal(pair.baseline, pair.treatment)]
    found = [(one, pair) for pair in unequal if (one := _distance(pair.baseline, pair.treatment))]
    farthest, of = max(found, key=lambda both: _order(both[0].largest), default=(None, None))
    floors = [floor for pair in known for floor in _floors(pair.baseline, pair.reruns)]
    moved = [floor for pair in known for floor in _floors(pair.baseline, pair.moved)]
    return FinalWeights(
        arm=arm,
        num_pairs=len(known),
        num_equal=len(known) - len(unequal),
        seed=of.seed if of else None,
        num_sampled=farthest.num_sampled if farthest else None,
        largest_difference=farthest.largest if farthest else None,
        relative_difference=farthest.relative if farthest else None,
        tensor=farthest.tensor if farthest else None,
        num_reruns=len(floors),
        aa_largest_difference=max(floors, key=_order, default=None),
        ulp_largest_difference=max(moved, key=_order, default=None),
    )


def distance(baseline: RecordedRun, treatment: RecordedRun) -> float | str:
    """||B - A|| / ||A - A0||: final weights B of the treatment and A of the baseline, which began with A0.

    L2 norms over all weights, estimated from the samples: a tensor's part is that of its sample, times its
    size. 0 where all weights are the same by their hash. Else why it is not known.
    """
    runs, seed = {"baseline": baseline, "treatment": treatment}, baseline.name.seed
    for arm, run in runs.items():
        if not run.final_weights_hash:
            return f"the {arm} of seed {seed} does not say what weights it ended with"
    if _equal(baseline, treatment):
        return 0.0
    first, left, right = baseline.initial_sample(), *(run.final_sample() for run in runs.values())
    sizes = baseline.weight_sizes()
    shapes = [{name: one.shape for name, one in sample.items()} for sample in (first, left, right)]
    if not shapes[0] or shapes[0] != shapes[1] or shapes[0] != shapes[2] or shapes[0].keys() != sizes.keys():
        return (
            f"the runs of seed {seed} keep no samples of the same first and last weights; abrun's own "
            "trainer does, of this version: launch them again"
        )
    apart, moved = (_squared(one, left, sizes) for one in (right, first))
    if not moved > 0 or not np.isfinite(apart + moved):
        return f"the baseline of seed {seed} ended with the weights that it began with, or with no numbers"
    return float(np.sqrt(apart / moved))


def _squared(left: Mapping[str, Array], right: Mapping[str, Array], sizes: Mapping[str, int]) -> float:
    """The squared distance of all weights, as far as samples tell."""
    return sum(
        float(np.square(left[name].astype(np.float64) - right[name]).mean()) * sizes[name]
        for name in left
        if left[name].size
    )


def _equal(left: RecordedRun, right: RecordedRun) -> bool:
    return left.final_weights_hash == right.final_weights_hash


def _floors(baseline: RecordedRun, repeats: Sequence[RecordedRun]) -> list[float]:
    """How far repetitions of a baseline end from it, as far as that is known."""
    found = []
    for repeat in repeats:
        if repeat.finished and repeat.final_weights_hash and _equal(baseline, repeat):
            found.append(0.0)
        elif repeat.finished and (distance := _distance(baseline, repeat)):
            found.append(distance.largest)
    return found


def _distance(baseline: RecordedRun, treatment: RecordedRun) -> _Distance | None:
    """None where one of them has no sample, or the two are of other tensors."""
    left, right = baseline.final_sample(), treatment.final_sample()
    if not left or {name: one.shape for name, one in left.items()} != {
        name: one.shape for name, one in right.items()
    }:
        return None
    largest, relative = _largest(left, right), _largest(left, right, relative=True)
    tensor = max(relative, key=lambda name: _order(relative[name]))
    return _Distance(
        num_sampled=sum(one.size for one in left.values()),
        largest=max(largest.values(), key=_order),
        relative=relative[tensor],
        tensor=tensor,
    )


def _largest(
    left: Mapping[str, Array], right: Mapping[str, Array], *, relative: bool = False
) -> dict[str, float]:
    """By tensor; NaN where one of them has a NaN that the other has not."""
    found = {}
    for name, a in left.items():
        a, b = a.astype(np.float64), right[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(b - a))
        difference = float(apart.max(initial=0.0))
        size = float(np.abs(np.concatenate([a, b])).max(initial=0.0)) if relative and difference else 1.0
        found[name] = difference / size if difference else 0.0
    return found


def _order(value: float) -> float:
    return np.inf if np.isnan(value) else value
