"""The statistics of a mismatch budget, as pure functions of arrays.

Letters: N completion tokens, g the log-probs that the engine recorded, p the trainer's own, c those of the
trainer (or of an engine) with one thing changed. All are natural logarithms, [N] float64.

- error(a, b) = <exp(abs(a - b))>, the mean over tokens: error(g, p) is `train/token_mult_prob_error`.
- A change *lowers the error by* error(g, p) - error(g, c): what would be gained if that alone were changed.
- A change *moves the log-probs by* error(p, c), whatever the engine says.
- Neither adds up over changes.
- Intervals are those of Student's t with a standard error clustered by prompt (Cameron and Miller 2015,
  CR1), as tokens of a sequence, and sequences of a prompt, are no independent samples.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
CONFIDENCE = 0.95
MIN_PROMPTS = 4  # below which nothing is said of the spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tokens; `low` and `high` are None where too few prompts were sampled to know them."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_above_zero(self) -> bool:
        return self.low is not None and self.low > 0


def multiplicative(a: Array, b: Array) -> Array:
    """Return exp(abs(a - b)) of each token: by which factor the one probability is off the other."""
    return np.exp(np.abs(a - b))


def error(a: Array, b: Array) -> float:
    return float(multiplicative(a, b).mean())


class Clusters:
    """Means over tokens, with intervals over prompts.

    `num_intervals`: so many are read together; at `CONFIDENCE` all of them hold (Bonferroni).
    """

    def __init__(self, prompts: NDArray[np.int64], num_intervals: int) -> None:  # [N], each token's prompt
        names, self._prompts = np.unique(prompts, return_inverse=True)
        self.num_prompts = len(names)
        self._level = (1 - CONFIDENCE) / max(num_intervals, 1)

    def mean(self, values: Array, *, least: float = -math.inf) -> Estimate:  # [N]
        """Return the mean of `values`, whose interval ends where they do. `least`: no value can be below."""
        mean, count = float(values.mean()), self.num_prompts
        if count < MIN_PROMPTS:
            return Estimate(value=mean, low=None, high=None)
        # Of what is above the mean: squares of errors of 1e-7 above 1 would be lost beside those of 1.
        sums = np.bincount(self._prompts, values - mean)
        standard_error = math.sqrt(float((sums**2).sum()) * count / (count - 1)) / len(values)
        reach = float(stats.t.ppf(1 - self._level / 2, count - 1)) * standard_error
        least, most = max(least, float(values.min())), float(values.max())
        return Estimate(value=mean, low=max(mean - reach, least), high=min(mean + reach, most))
