"""Float64 arrays with bounds on what another program may have computed in a narrower type.

A `Bounded` is an interval [low, high] for each element. Every operation maps it by interval arithmetic and
then widens it by the rounding of one operation in the type that torch would compute in: the wider of the two
operands'. So the width of a result is a forward error analysis of the formula (Higham, "Accuracy and
Stability of Numerical Algorithms", chapters 2 to 4), and no tolerance is chosen anywhere. An order of
operations other than the formula's changes the rounding but hardly its size: `SLACK` allows for it, and for
the float64 arithmetic of the audit itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Precision:
    unit: float  # unit roundoff u: a result is x (1 + d), |d| <= u
    underflow: float  # half the smallest subnormal number


PRECISIONS = {
    "float64": Precision(2.0**-53, 0.0),
    "float32": Precision(2.0**-24, 2.0**-150),
    "float16": Precision(2.0**-11, 2.0**-25),
    "bfloat16": Precision(2.0**-8, 2.0**-134),
}
SINGLE = PRECISIONS["float32"]  # torch adds up narrower types in float32
SLACK = 2.0
FUNCTION_ULPS = 4.0  # exp and log of GPUs are good to 2 ULPs, and 1 ULP is 2 u
# A sum of n terms errs by at most (n - 1) u sum|x|, and by more than 6 sqrt(n) u sum|x| with probability
# below 2 exp(-18) if roundings are independent (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019)
SUM_DEVIATIONS = 6.0


def wider(a: Precision, b: Precision) -> Precision:
    """Return the type that an operation on two types computes in."""
    return a if a.unit <= b.unit else b


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Elements between `low` and `high`, of a program that computes in `precision`."""

    low: Array
    high: Array
    precision: Precision

    @classmethod
    def exact(cls, values: ArrayLike, precision: Precision = SINGLE) -> "Bounded":
        array = np.asarray(values, np.float64)
        return cls(array, array, precision)

    def __getitem__(self, index: Any) -> "Bounded":
        return Bounded(self.low[index], self.high[index], self.precision)

    def rounded(self, precision: Precision, ulps: float = 1.0, scale: Array | float = 0.0) -> "Bounded":
        """Widen by a rounding to `precision` of a result that is as large as itself, or as `scale`."""
        size = np.maximum(np.maximum(np.abs(self.low), np.abs(self.high)), scale)
        error = np.where(size == 0, 0.0, SLACK * (ulps * precision.unit * size + precision.underflow))
        return Bounded(self.low - error, self.high + error, precision)

    def _operand(self, operand: "Bounded | ArrayLike") -> "Bounded":
        return operand if isinstance(operand, Bounded) else Bounded.exact(operand, self.precision)

    def __neg__(self) -> "Bounded":
        return Bounded(-self.high, -self.low, self.precision)

    def __add__(self, operand: "Bounded | ArrayLike") -> "Bounded":
        operand = self._operand(operand)
        precision = wider(self.precision, operand.precision)
        return Bounded(self.low + operand.low, self.high + operand.high, precision).rounded(precision)

    def __sub__(self, operand: "Bounded | ArrayLike") -> "Bounded":
        return self + -self._operand(operand)

    def __mul__(self, operand: "Bounded | ArrayLike") -> "Bounded":
        return self._between_corners(self._operand(operand), np.multiply)

    def __truediv__(self, operand: "Bounded | ArrayLike") -> "Bounded":
        """Divide by positive numbers."""
        return self._between_corners(self._operand(operand), np.divide)

    def _between_corners(self, operand: "Bounded", operation: Callable[[Array, Array], Array]) -> "Bounded":
        with np.errstate(divide="ignore", invalid="ignore"):
            corners = [operation(a, b) for a in (self.low, self.high) for b in (operand.low, operand.high)]
        precision = wider(self.precision, operand.precision)
        return Bounded(np.min(corners, axis=0), np.max(corners, axis=0), precision).rounded(precision)

    def increasing(self, function: Callable[[Array], Array], ulps: float = FUNCTION_ULPS) -> "Bounded":
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            result = Bounded(function(self.low), function(self.high), self.precision)
        return result.rounded(self.precision, ulps)

    def exp(self) -> "Bounded":
        return self.increasing(np.exp)

    def sqrt(self) -> "Bounded":
        return self.increasing(lambda values: np.sqrt(np.maximum(values, 0.0)))

    def square(self) -> "Bounded":
        low, high = np.abs(self.low), np.abs(self.high)
        spans_zero = (self.low <= 0) & (self.high >= 0)
        lowest = np.where(spans_zero, 0.0, np.minimum(low, high))
        return Bounded(lowest**2, np.maximum(low, high) ** 2, self.precision).rounded(self.precision)

    def clip(self, low: float, high: float) -> "Bounded":
        # a bound of the program is itself rounded to its type
        return self.increasing(lambda values: np.clip(values, low, high), ulps=1.0)

    def maximum(self, operand: "Bounded | ArrayLike") -> "Bounded":
        operand = self._operand(operand)
        precision = wider(self.precision, operand.precision)
        return Bounded(np.maximum(self.low, operand.low), np.maximum(self.high, operand.high), precision)

    def minimum(self, operand: "Bounded | ArrayLike") -> "Bounded":
        return -((-self).maximum(-self._operand(operand)))

    def where(self, condition: ArrayLike, otherwise: "Bounded | ArrayLike" = 0.0) -> "Bounded":
        operand = self._operand(otherwise)
        precision = wider(self.precision, operand.precision)
        low = np.where(condition, self.low, operand.low)
        high = np.where(condition, self.high, operand.high)
        return Bounded(low, high, precision)

    def hull(self, operand: "Bounded | ArrayLike") -> "Bounded":
        """Return the least interval with both: the program may have taken either."""
        operand = self._operand(operand)
        return Bounded(np.minimum(self.low, operand.low), np.maximum(self.high, operand.high), self.precision)

    def choose(self, condition: "Trilean", otherwise: "Bounded | ArrayLike") -> "Bounded":
        """Return self where a condition surely holds, `otherwise` where it cannot, and their hull between."""
        chosen = self.where(condition.surely, otherwise)
        return self.hull(otherwise).where(condition.possibly & ~condition.surely, chosen)

    def sum(self, axis: int | None = None, keepdims: bool = False) -> "Bounded":
        size = np.maximum(np.abs(self.low), np.abs(self.high))
        count = np.count_nonzero(size, axis=axis, keepdims=keepdims)
        steps = np.minimum(np.maximum(count - 1, 0), SUM_DEVIATIONS * np.sqrt(count))
        accumulator = wider(self.precision, SINGLE)
        error = SLACK * steps * accumulator.unit * size.sum(axis=axis, keepdims=keepdims)
        low, high = (bound.sum(axis=axis, keepdims=keepdims) for bound in (self.low, self.high))
        return Bounded(low - error, high + error, self.precision).rounded(self.precision)

    def __gt__(self, operand: "Bounded | ArrayLike") -> "Trilean":
        operand = self._operand(operand)
        return Trilean(self.low > operand.high, self.high > operand.low)

    def __lt__(self, operand: "Bounded | ArrayLike") -> "Trilean":
        return self._operand(operand) > self


@dataclass(frozen=True, slots=True)
class Trilean:
    """Truth of each element where rounding may decide."""

    surely: NDArray[np.bool_]
    possibly: NDArray[np.bool_]

    def __or__(self, operand: "Trilean") -> "Trilean":
        return Trilean(self.surely | operand.surely, self.possibly | operand.possibly)

    def __and__(self, operand: "Trilean") -> "Trilean":
        return Trilean(self.surely & operand.surely, self.possibly & operand.possibly)

    def __invert__(self) -> "Trilean":
        return Trilean(~self.possibly, ~self.surely)
