"""Test whether two captured steps differ by more than rounding, and find the first tensor that does.

The tolerance is the baseline's own: replicas of its step, in which every weight, and every module's output
and its gradient, moves by one ULP, up or down at random. An arm that only sums in another order rounds
outputs and gradients of modules differently, by less than a replica moves all three together.

A tensor's error has two measures, the root mean square and the maximum of the absolute differences. One ULP
of the tensor itself is added to both, because its own last rounding is not perturbed. An error counts in
units of the replicas' mean error of the same tensor and measure. The limit is the largest value that any
replica reaches in any tensor, compared with the other replicas. If the arm were one more replica, the largest
of k + 1 exchangeable values would be its own with probability 1 / (k + 1): 5 % for 19 replicas, over all
tensors together, whatever the distribution and the dependence of the errors. A replica is compared with k - 1
others and the arm with k, which makes the limit slightly larger.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from abrun.errors import ComparisonError
from abrun.runs.captures import Capture, CapturedTensor
from abrun.runs.files import decode_non_finite
from abrun.runs.traces import TracedTensor, TraceResult

NUM_REPLICAS = 19  # the fewest whose largest value is exceeded by one more with a probability of 5 %


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """The difference of a tensor from the baseline's; infinite if it is not finite or has another shape."""

    root_mean_square: float
    largest: float

    @property
    def measures(self) -> tuple[float, float]:
        return self.root_mean_square, self.largest


def measure_error(baseline: np.ndarray, other: np.ndarray) -> TensorError:
    """Return the error of a tensor against the baseline's."""
    if baseline.shape != other.shape:
        return TensorError(root_mean_square=math.inf, largest=math.inf)
    same = (baseline == other) | (np.isnan(baseline) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, other.astype(np.float64) - baseline)
    if not np.isfinite(difference).all():
        return TensorError(root_mean_square=math.inf, largest=math.inf)
    if not difference.size:
        return TensorError(root_mean_square=0.0, largest=0.0)
    return TensorError(
        root_mean_square=float(np.sqrt(np.mean(difference**2))), largest=float(np.abs(difference).max())
    )


def measure_errors(baseline: Capture, other: Capture) -> dict[str, TensorError]:
    """Return the error of every tensor that both have, by name."""
    others = {tensor.name: tensor for tensor in other.tensors}
    return {
        tensor.name: measure_error(baseline.read(tensor), other.read(others[tensor.name]))
        for tensor in baseline.tensors
        if tensor.name in others
    }


def errors_to_json(errors: Mapping[str, TensorError]) -> dict[str, Any]:
    return {name: asdict(error) for name, error in errors.items()}


def errors_from_json(content: Mapping[str, Any]) -> dict[str, TensorError]:
    return {
        name: TensorError(**{measure: float(decode_non_finite(value)) for measure, value in error.items()})
        for name, error in content.items()
    }


def judge_trace(
    baseline: Capture, treatment: Capture, replicas: Sequence[Mapping[str, TensorError]]
) -> TraceResult:
    """Compare a captured step of two arms; `replicas` are errors of the baseline's replicas.

    Tensors that a replica lacks are not compared. The smallest detectable error of a tensor is the root mean
    square that would have reached the limit, over the baseline's. Raises ComparisonError if the captures are
    of different steps or models.
    """
    _check_comparable(baseline, treatment)
    others = {tensor.name: tensor for tensor in treatment.tensors}
    of_replicas = [replica.keys() for replica in replicas]
    shared = [
        tensor
        for tensor in baseline.tensors
        if tensor.name in others and all(tensor.name in names for names in of_replicas)
    ]
    if not shared:
        raise ComparisonError(
            f"{treatment.folder}: no tensor in common with {baseline.folder}; trace arms of one model"
        )
    differences = [
        _Difference.measure(tensor, baseline.read(tensor), treatment.read(others[tensor.name]))
        for tensor in shared
    ]
    floors = np.array([difference.ulp.measures for difference in differences])  # [tensors, measures]
    errors = floors + np.array([difference.error.measures for difference in differences])
    spread = np.array([[replica[tensor.name].measures for tensor in shared] for replica in replicas])
    ratios, limit = standardise(errors, floors + spread)
    hidden = limit * (floors + spread.mean(axis=0))[:, 0] - floors[:, 0]
    names = {tensor.name for tensor in shared}
    return TraceResult(
        step=baseline.step,
        num_replicas=len(replicas),
        limit=limit,
        tensors=tuple(
            TracedTensor(
                name=tensor.name,
                relative_error=difference.relative_to_norm(difference.error.root_mean_square),
                ulps=difference.ulps,
                ratio=math.inf if math.isinf(difference.ulps) else float(ratio),
                detectable_error=difference.detectable(hidden[index]),
            )
            for index, (tensor, difference, ratio) in enumerate(zip(shared, differences, ratios, strict=True))
        ),
        missing=tuple(sorted(({tensor.name for tensor in baseline.tensors} | others.keys()) - names)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """A tensor's difference from the baseline's."""

    error: TensorError
    ulp: TensorError  # of one ULP in each value
    norm: float  # root mean square of the baseline's values
    ulps: float

    def relative_to_norm(self, root_mean_square: float) -> float:
        return (
            0.0 if root_mean_square <= 0 else float(root_mean_square / self.norm) if self.norm else math.inf
        )

    def detectable(self, root_mean_square: float) -> float:
        return self.relative_to_norm(root_mean_square) if self.norm else math.inf

    @classmethod
    def measure(cls, tensor: CapturedTensor, values: np.ndarray, other: np.ndarray) -> "_Difference":
        error, sizes = measure_error(values, other), tensor.ulps(values)
        ulp = measure_error(np.zeros(values.shape), sizes)
        norm = float(np.sqrt(np.mean(values.astype(np.float64) ** 2))) if values.size else 0.0
        if math.isinf(error.largest):
            return cls(error=error, ulp=ulp, norm=norm, ulps=math.inf)
        difference = np.where(values == other, 0.0, np.abs(other.astype(np.float64) - values))
        ulps = float(_ratios(np.nan_to_num(difference), sizes).max(initial=0.0))
        return cls(error=error, ulp=ulp, norm=norm, ulps=ulps)


def standardise(
    errors: np.ndarray,  # [tensors, measures] of the arm
    spread: np.ndarray,  # [replicas, tensors, measures]
) -> tuple[np.ndarray, float]:  # [tensors]
    """Return the arm's errors in units of the replicas' mean errors, and the limit of the largest of them."""
    others = (spread.sum(axis=0) - spread) / (len(spread) - 1)
    limit = float(_ratios(spread, others).max(initial=0.0))
    return _ratios(errors, spread.mean(axis=0)).max(axis=-1), limit


def _check_comparable(baseline: Capture, treatment: Capture) -> None:
    for fact in ("step", "model"):
        first, second = getattr(baseline, fact), getattr(treatment, fact)
        if first != second:
            raise ComparisonError(
                f"{treatment.folder}: captured of {fact} {second}, but {baseline.folder} of {first}; capture "
                "both arms again"
            )


def _ratios(errors: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return errors over their scale; 0 where both are 0, infinite where only the scale is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)
