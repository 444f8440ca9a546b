"""Statistics of a mismatch budget, as pure functions of arrays.

Letters: N completion tokens; g the engine's recorded log-probs, p the trainer's, c the trainer's (or an
engine's) with one setting changed. All are natural logarithms, [N] float64.

- error(a, b) = <exp(abs(a - b))>, the mean over tokens: error(g, p) is `train/token_mult_prob_error`.
- A change *lowers the error by* error(g, p) - error(g, c): the gain if only that setting were changed.
- A change *moves the log-probs by* error(p, c), independent of the engine.
- Neither is additive over changes.
- Confidence intervals are Student's t with a standard error clustered by prompt (Cameron and Miller 2015,
CR1),   since tokens of a sequence, and sequences of a prompt, are not independent.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
CONFIDENCE = 0.95
MIN_PROMPTS = 4  # fewer prompts give no interval


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredMean:
    """A mean over tokens with its confidence interval, which is None if too few prompts were sampled."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_above_zero(self) -> bool:
        return self.low is not None and self.low > 0


def probability_factors(a: Array, b: Array) -> Array:
    """Return exp(|a - b|) for each token: the factor between the two probabilities."""
    return np.exp(np.abs(a - b))


def error(a: Array, b: Array) -> float:
    return float(probability_factors(a, b).mean())


class Clusters:
    """Means over tokens, with confidence intervals clustered by prompt.

    All `num_intervals` intervals together hold with probability `CONFIDENCE` (Bonferroni).
    """

    def __init__(self, prompts: NDArray[np.int64], num_intervals: int) -> None:  # [N], each token's prompt
        names, self._prompts = np.unique(prompts, return_inverse=True)
        self.num_prompts = len(names)
        self._level = (1 - CONFIDENCE) / max(num_intervals, 1)

    def mean(self, values: Array, *, minimum: float = -math.inf) -> ClusteredMean:  # [N]
        """Return the mean of `values`, its interval clipped to their range; no value is below `minimum`."""
        mean, count = float(values.mean()), self.num_prompts
        if count < MIN_PROMPTS:
            return ClusteredMean(value=mean, low=None, high=None)
        # Centred first: an excess of 1e-7 over 1 would be lost in the square of uncentred values.
        sums = np.bincount(self._prompts, values - mean)
        standard_error = math.sqrt(float((sums**2).sum()) * count / (count - 1)) / len(values)
        reach = float(stats.t.ppf(1 - self._level / 2, count - 1)) * standard_error
        minimum, maximum = max(minimum, float(values.min())), float(values.max())
        return ClusteredMean(value=mean, low=max(mean - reach, minimum), high=min(mean + reach, maximum))
