"""The statistics of a mismatch budget, as pure functions of arrays.

Letters: N completion tokens, g the log-probs that the engine recorded, p the trainer's own, c those of the
trainer (or of an engine) with one thing changed. All are natural logarithms, [N] float64.

- error(a, b) = <exp(abs(a - b))>, the mean over tokens: error(g, p) is `train/token_mult_prob_error`.
- A change *lowers the error by* error(g, p) - error(g, c): what would be gained if that alone were changed.
- A change *moves the log-probs by* error(p, c), whatever the engine says.
- Neither adds up over changes. What does: on a path of scorings from p to g, in steps d_1 + ... + d_K = g - p
  of each token, step k contributes (exp(abs(g - p)) - 1) * d_k / (g - p), the Aumann-Shapley value of d_k in
  exp(abs(d)) - 1. Contributions add up to that token by token, so their means add up to error(g, p) - 1. To
  first order a step's is the mean of its projection on the direction of the error: of independent errors each
  contributes in proportion to its variance, whatever their order; an error that trainer and engine share
  contributes nothing; a step that cancels others is negative.
- Intervals are those of the studentised bootstrap (Efron and Tibshirani 1993, chapter 12.5), which resamples
  prompts with all of their completions: tokens of a sequence, and sequences of a prompt, are no independent
  samples. A resample whose prompts all have the same mean, such as one without the only prompt that a change
  touches, has a standard error of 0: none counts as less than `LEAST_SPREAD` of the sample's own. Intervals
  end where the values do: no mean of theirs lies beyond.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 10_000
CONFIDENCE = 0.95
FEWEST_PROMPTS = 4  # below which nothing is said of the spread
LEAST_SPREAD = 0.25  # coverage with it and without: test_intervals_keep_their_coverage


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
    """exp(abs(a - b)) of each token: by which factor the one probability is off the other."""
    return np.exp(np.abs(a - b))


def error(a: Array, b: Array) -> float:
    return float(multiplicative(a, b).mean())


def contributions(difference: Array, steps: Sequence[Array]) -> list[Array]:
    """What each step contributes to exp(abs(difference)) - 1 of each token; see above. [N] each.

    `steps` add up to `difference`. Where that is 0 the steps cancel, and nothing is to be contributed to.
    """
    is_zero = difference == 0
    factor = np.where(is_zero, 0.0, np.expm1(np.abs(difference)) / np.where(is_zero, 1.0, difference))
    return [factor * step for step in steps]


class Resampling:
    """Means over tokens with intervals, all from the same resampled prompts.

    `num_intervals`: so many are read together; at `CONFIDENCE` all of them hold (Bonferroni).
    """

    def __init__(self, prompts: NDArray[np.int64], num_intervals: int) -> None:  # [N], each token's prompt
        names, self._prompts = np.unique(prompts, return_inverse=True)
        self.num_prompts = len(names)
        self._lengths = np.bincount(self._prompts).astype(float)
        rng = np.random.default_rng(0)
        count = self.num_prompts
        self._draws = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(float)
        tail = (1 - CONFIDENCE) / max(num_intervals, 1) / 2
        self._tails = [tail, 1 - tail]

    def mean(self, values: Array, *, least: float = -math.inf) -> Estimate:  # [N]
        """`least`: below which no mean of such values can be."""
        mean, lengths = float(values.mean()), self._lengths
        if self.num_prompts < FEWEST_PROMPTS:
            return Estimate(value=mean, low=None, high=None)
        # Of what is above the mean: squares of errors of 1e-7 above 1 would be lost beside those of 1.
        sums = np.bincount(self._prompts, values - mean).astype(float)
        spread = float(_standard_error(np.ones((1, self.num_prompts)), sums, lengths, np.zeros(1))[0])
        offsets = (self._draws @ sums) / (self._draws @ lengths)
        spreads = _standard_error(self._draws, sums, lengths, offsets)
        if not spread:
            return Estimate(value=mean, low=mean, high=mean)
        low, high = np.quantile(offsets / np.maximum(spreads, LEAST_SPREAD * spread), self._tails)
        least, most = max(least, float(values.min())), float(values.max())
        ends = (min(max(mean - float(end) * spread, least), most) for end in (high, low))
        return Estimate(value=mean, low=next(ends), high=next(ends))


def _standard_error(draws: Array, sums: Array, lengths: Array, means: Array) -> Array:
    """Of a ratio of sums over prompts (linearised): [R, prompts], [prompts], [prompts], [R] -> [R]."""
    count = len(sums)
    # sum of w (s - m l)^2, without an [R, prompts] array for every metric
    squares = draws @ sums**2 - 2 * means * (draws @ (sums * lengths)) + means**2 * (draws @ lengths**2)
    return np.sqrt(np.maximum(squares, 0.0) * count / (count - 1)) / (draws @ lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Tokens that have something in common, from `first` to below `last` of it."""

    first: float
    last: float
    num_tokens: int
    mean: float  # of exp(abs(g - p))
    largest: float


def binned(values: Array, by: Array, edges: Sequence[float]) -> list[Bin]:
    """`values` [N] by where `by` [N] falls between ascending `edges`; bins without tokens are left out."""
    bins = []
    for first, last in pairwise(edges):
        inside = values[(by >= first) & (by < last)]
        if len(inside):
            bins.append(
                Bin(
                    first=first,
                    last=last,
                    num_tokens=len(inside),
                    mean=float(inside.mean()),
                    largest=float(inside.max()),
                )
            )
    return bins
