"""Whether two captured steps differ by more than rounding, and in which tensor first.

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

NUM_REPLICAS = 19  # the fewest whose largest value is exceeded by one more with a probability of 5 %


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """The difference of a tensor from the baseline's; infinite if it is not finite or has another shape."""

    root_mean_square: float
    largest: float

    @property
    def measures(self) -> tuple[float, float]:
        return self.root_mean_square, self.largest


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTensor:
    """A tensor of both arms."""

    tensor: CapturedTensor
    relative: float  # norm of the difference over the baseline's norm
    ulps: float  # largest difference in ULPs of the baseline's value
    ratio: float  # error over the replicas' mean error: the larger of both measures

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.tensor.name,
            "kind": self.tensor.kind,
            "module": self.tensor.module,
            "relative_error": self.relative,
            "ulps": self.ulps,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """The comparison of one step of two arms."""

    step: int
    num_replicas: int
    limit: float  # of the ratio
    tensors: tuple[JudgedTensor, ...]  # in the order of execution
    missing: tuple[str, ...]  # names of tensors that only one of the arms has

    @property
    def level(self) -> float:
        """Return the probability with which clean arms differ in any tensor, at most."""
        return 1 / (self.num_replicas + 1)

    @property
    def beyond(self) -> tuple[JudgedTensor, ...]:
        """Return the tensors that differ by more than rounding."""
        return tuple(judged for judged in self.tensors if judged.ratio > self.limit)

    @property
    def first(self) -> JudgedTensor | None:
        return next(iter(self.beyond), None)

    @property
    def last_agreeing(self) -> JudgedTensor | None:
        """Return the tensor before the first difference, if there are both."""
        if self.first is None:
            return None
        index = self.tensors.index(self.first)
        return self.tensors[index - 1] if index else None

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "num_replicas": self.num_replicas,
            "level": self.level,
            "limit": self.limit,
            "agrees": self.first is None,
            "first": self.first and self.first.as_json(),
            "last_agreeing": self.last_agreeing and self.last_agreeing.as_json(),
            "num_beyond": len(self.beyond),
            "missing": list(self.missing),
            "tensors": [judged.as_json() for judged in self.tensors],
        }


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
    """Return the error of every tensor that both captures have, by name."""
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
        name: TensorError(**{measure: decode_non_finite(value) for measure, value in error.items()})
        for name, error in content.items()
    }


def judge_trace(
    baseline: Capture, treatment: Capture, replicas: Sequence[Mapping[str, TensorError]]
) -> TraceResult:
    """Compare a captured step of two arms; `replicas` are errors of the baseline's replicas.

    Raises ComparisonError if the captures are of different steps or models, or there are too few replicas.
    """
    _check_comparable(baseline, treatment, replicas)
    errors = measure_errors(baseline, treatment)
    shared = [tensor for tensor in baseline.tensors if tensor.name in errors]
    values = {tensor.name: baseline.read(tensor) for tensor in shared}
    floors = {
        tensor.name: measure_error(np.zeros(tensor.shape), tensor.ulps(values[tensor.name])).measures
        for tensor in shared
    }

    def total(of: Mapping[str, TensorError]) -> np.ndarray:  # [tensors, measures]
        return np.array(
            [np.add(of[tensor.name].measures, floors[tensor.name]) for tensor in shared], np.float64
        )

    ratios, limit = standardise(total(errors), np.stack([total(replica) for replica in replicas]))
    other_tensors = {tensor.name for tensor in treatment.tensors}
    return TraceResult(
        step=baseline.step,
        num_replicas=len(replicas),
        limit=limit,
        tensors=tuple(
            _judged(tensor, values[tensor.name], treatment, errors[tensor.name], float(ratio))
            for tensor, ratio in zip(shared, ratios, strict=True)
        ),
        missing=tuple(sorted({tensor.name for tensor in baseline.tensors} ^ other_tensors)),
    )


def standardise(
    errors: np.ndarray,  # [tensors, measures] of the arm
    spread: np.ndarray,  # [replicas, tensors, measures]
) -> tuple[np.ndarray, float]:  # [tensors]
    """Return the arm's errors in units of the replicas' mean errors, and the limit of the largest of them."""
    others = (spread.sum(axis=0) - spread) / (len(spread) - 1)
    limit = float(_ratios(spread, others).max(initial=0.0))
    return _ratios(errors, spread.mean(axis=0)).max(axis=-1), limit


def _check_comparable(baseline: Capture, treatment: Capture, replicas: Sequence[Any]) -> None:
    for fact in ("step", "model"):
        first, second = getattr(baseline, fact), getattr(treatment, fact)
        if first != second:
            raise ComparisonError(
                f"{treatment.folder}: captured of {fact} {second}, but {baseline.folder} of {first}; capture "
                "both arms again"
            )
    if len(replicas) < 2:
        raise ComparisonError(
            f"{baseline.folder}: {len(replicas)} replicas, which have no spread; capture at least 2, or "
            f"{NUM_REPLICAS} for a level of 5 %"
        )
    if not {tensor.name for tensor in baseline.tensors} & {tensor.name for tensor in treatment.tensors}:
        raise ComparisonError(
            f"{treatment.folder}: no tensor of {baseline.folder}; compare arms of one model"
        )


def _ratios(errors: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return errors over their scale; 0 where both are 0, infinite where only the scale is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)


def _judged(
    tensor: CapturedTensor, values: np.ndarray, treatment: Capture, error: TensorError, ratio: float
) -> JudgedTensor:
    if math.isinf(error.largest):
        return JudgedTensor(tensor=tensor, relative=math.inf, ulps=math.inf, ratio=math.inf)
    other = next(of for of in treatment.tensors if of.name == tensor.name)
    difference = np.abs(treatment.read(other).astype(np.float64) - values)
    size = float(np.sqrt(np.mean(values.astype(np.float64) ** 2))) if values.size else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ulps = np.where(difference == 0, 0.0, difference / tensor.ulps(values))
    relative = 0.0 if error.root_mean_square == 0 else error.root_mean_square / size if size else math.inf
    return JudgedTensor(tensor=tensor, relative=relative, ulps=float(ulps.max(initial=0.0)), ratio=ratio)
