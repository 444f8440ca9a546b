"""Exact tests of rates: samples of outcomes that are 0 or 1 (solved, reached the target, diverged).

A t-test of such outcomes errs too often: of 3 pairs that differ by 1 or not at all, a test at 0.05 errs in
0.13. One rate has the binomial test and Clopper and Pearson's interval (1934, doi:10.1093/biomet/26.4.404).

The difference d = treatment - baseline of two rates has the exact unconditional test (Chan 1998,
doi:10.1002/(SICI)1097-0258(19980630)17:12<1403::AID-SIM834>3.0.CO;2-X; its interval: Chan and Zhang 1999,
doi:10.1111/j.0006-341X.1999.01202.x). With x baseline successes and y treated ones, unpaired,

    P(x, y) = Bin(x; M, q) * Bin(y; N, q + d)

and for pairs, with x pairs won by the baseline alone and y by the treatment alone,

    P(x, y) = Bin(x; N, q) * Bin(y; N - x, (q + d) / (1 - q)).

Results are ordered by the score statistic of d: Farrington and Manning (1990, doi:10.1002/sim.4780091208),
for pairs Tango (1998, doi:10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B). The p-value is
the largest probability, over the unknown q, of a result that is at least as extreme. Every set of extreme
results is enlarged until it contains, with a result, all with fewer treated and more baseline successes
(Barnard's convexity), so that the largest probability under d >= limit is that at d = limit.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]
_NUM_RATES = 100  # values of the unknown rate q at which the largest probability is searched
_PRECISION = 1e-4  # of an interval's end
MAX_RUNS = 1001  # larger sample sizes are not searched
MAX_LISTED = 100_000
_TIE = 1e-9  # statistics this close are equal


def are_outcomes(*samples: ArrayLike) -> bool:
    """Return True if all values are 0 or 1, and both occur: equal values may be of any metric."""
    values = np.concatenate([np.asarray(sample, float) for sample in samples])
    return set(np.unique(values).tolist()) == {0.0, 1.0}


def rate_p(num_successes: int, num_values: int, limit: float) -> tuple[float, float]:
    """Return the one-sided p-values that a rate is below, and above, a limit (binomial test)."""
    if not 0 <= limit <= 1:
        return (0.0, 1.0) if limit > 1 else (1.0, 0.0)
    below = float(special.bdtr(num_successes, num_values, limit))
    return below, float(special.bdtrc(num_successes - 1, num_values, limit)) if num_successes else 1.0


def rate_interval(num_successes: int, num_values: int, alpha: float) -> tuple[float, float]:
    """Return the interval of a rate at level 1 - 2 alpha (Clopper and Pearson 1934)."""
    x, n = num_successes, num_values
    low = float(special.betaincinv(x, n - x + 1, alpha)) if x else 0.0
    return low, float(special.betaincinv(x + 1, n - x, 1 - alpha)) if x < n else 1.0


def min_runs_of_rate(limit: float, alpha: float, *, below: bool) -> int | None:
    """Return the number of runs from which on some result shows a rate below (above) a limit, or None."""
    chance = 1 - limit if below else limit  # of the most extreme outcome, if the rate is at its limit
    return math.floor(math.log(alpha) / math.log(chance)) + 1 if 0 < chance < 1 else None


def runs_to_show_rate(num_successes: int, limit: float, alpha: float) -> int | None:
    """Return the number of runs in all that shows a rate below a limit if none of the others succeeds.

    None above MAX_LISTED.
    """
    shown = np.asarray(special.bdtr(float(num_successes), np.arange(MAX_LISTED + 1), limit)) < alpha
    return int(shown.argmax()) if shown.any() else None


def fisher_p(baseline: tuple[int, int], treatment: tuple[int, int]) -> float:
    """Return Fisher's (1935) one-sided p-value that the treated rate is lower; both are (successes, all)."""
    (x, m), (y, n) = baseline, treatment
    counts = np.arange(max(0, x + y - m), min(n, x + y) + 1)  # of the treatment, given all successes
    logs = _log_binomial(n, counts) + _log_binomial(m, x + y - counts)
    weights = np.exp(logs - logs.max())
    return float(weights[counts <= y].sum() / weights.sum())


def _log_binomial(n: int, k: NDArray[np.int64]) -> Array:
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of two arms as counts; see the module for x and y."""

    x: int
    y: int
    num_baseline: int
    num_treatment: int
    paired: bool

    @classmethod
    def count(cls, baseline: Array, treatment: Array, *, paired: bool) -> "Outcomes":
        """Count the successes of both arms, or the pairs that one arm alone wins."""
        if paired:
            x, y = int((baseline > treatment).sum()), int((treatment > baseline).sum())
        else:
            x, y = int(baseline.sum()), int(treatment.sum())
        return cls(x, y, len(baseline), len(treatment), paired)

    @property
    def reversed(self) -> "Outcomes":
        """The same results with both arms exchanged."""
        return Outcomes(self.y, self.x, self.num_treatment, self.num_baseline, self.paired)

    @property
    def difference(self) -> float:
        return self.y / self.num_treatment - self.x / self.num_baseline

    def p_below(self, limit: float) -> float:
        """Return the p-value that the difference of the rates is below a limit in (-1, 1)."""
        if abs(limit) >= 1:
            return float(self.difference >= limit) if limit > 0 else 1.0
        angles = np.linspace(0, np.pi / 2, _NUM_RATES)
        low, high = max(0.0, -limit), (1 - limit) / 2 if self.paired else min(1.0, 1 - limit)
        rates = low + (high - low) * np.sin(angles) ** 2  # [G], denser at both ends
        return float(min(1.0, self._tail(rates, limit).max()))

    def upper_bound(self, alpha: float) -> float:
        """Return the upper bound of the difference at confidence 1 - alpha."""
        near = self.difference + 5 / math.sqrt(min(self.num_baseline, self.num_treatment))
        low, high = self.difference, near if near < 1 and self.p_below(near) < alpha else 1.0
        while high - low > _PRECISION:
            middle = (low + high) / 2
            low, high = (low, middle) if self.p_below(middle) < alpha else (middle, high)
        return high

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the interval of the difference at level 1 - 2 alpha."""
        return -self.reversed.upper_bound(alpha), self.upper_bound(alpha)

    def _tail(self, rates: Array, limit: float) -> Array:
        """Return P(a result as extreme as this) for each unknown rate q [G] at the difference `limit`."""
        x_values = np.arange(self.num_baseline + 1)
        num_y = self.num_treatment - x_values if self.paired else np.full_like(x_values, self.num_treatment)
        largest_y = self._largest_extreme_y(x_values, num_y, limit)  # [M + 1], -1: none
        # Binomial probabilities beyond 8 standard deviations are left out
        width = min(self.num_baseline, int(4 * math.sqrt(self.num_baseline)) + 8)
        middle = np.rint(rates * self.num_baseline).astype(np.int64)
        x = middle[:, None] + np.arange(-width, width + 1)
        inside = (x >= 0) & (x <= self.num_baseline)
        x = np.clip(x, 0, self.num_baseline)
        q = rates[:, None]
        log_choose = _log_binomial(self.num_baseline, x)
        weights = np.exp(log_choose + special.xlogy(x, q) + special.xlog1py(self.num_baseline - x, -q))
        success = np.clip((q + limit) / np.maximum(1 - q, 1e-300) if self.paired else q + limit, 0.0, 1.0)
        extreme, number = largest_y[x], num_y[x]
        below = special.bdtr(
            np.clip(extreme, 0, None).astype(float), number, np.broadcast_to(success, x.shape)
        )
        below = np.where(extreme >= number, 1.0, np.where(extreme < 0, 0.0, below))
        return np.asarray(np.where(inside, weights * below, 0.0).sum(axis=1))

    def _largest_extreme_y(self, x: NDArray[np.int64], num_y: NDArray[np.int64], limit: float) -> NDArray:
        """Return, for each x, the largest y whose statistic is at most the observed one."""
        observed = float(self._score(np.array([self.x]), np.array([self.y]), limit)[0]) + _TIE
        low, high = np.full_like(x, -1), num_y.copy()
        while (low < high).any():  # the statistic grows with y
            middle = (low + high + 1) // 2
            is_extreme = self._score(x, np.maximum(middle, 0), limit) <= observed
            low, high = np.where(is_extreme, middle, low), np.where(is_extreme, high, middle - 1)
        largest = np.maximum.accumulate(low)
        largest[self.x] = max(largest[self.x], self.y)
        return np.minimum(np.maximum.accumulate(largest), num_y)

    def _score(self, x: NDArray, y: NDArray, limit: float) -> Array:
        """Return the score statistic of results: (d - limit) by its standard error at that limit."""
        m, n = self.num_baseline, self.num_treatment
        if self.paired:
            excess = y - x - n * limit
            q = _restricted_discordance(x, y, n, limit)
            variance = n * (2 * q + limit * (1 - limit))
        else:
            excess = y / n - x / m - limit
            treated = _restricted_rate(x / m, y / n, m / n, limit)
            base = np.clip(treated - limit, 0.0, 1.0)
            variance = treated * (1 - treated) / n + base * (1 - base) / m
        error = np.sqrt(np.maximum(variance, 0.0))
        is_point = error < 1e-12
        return np.where(
            is_point, np.sign(np.round(excess, 12)) * 1e12, excess / np.where(is_point, 1.0, error)
        )


def _restricted_discordance(x: Array, y: Array, n: int, limit: float) -> Array:
    """Return the most likely rate of pairs that the baseline wins, if the treatment's is `limit` higher.

    Tango (1998): the larger root of 2n q**2 + b q + c.
    """
    b = (2 * n - y + x) * limit - x - y
    c = -x * limit * (1 - limit)
    return np.maximum((np.sqrt(np.maximum(b * b - 8 * n * c, 0.0)) - b) / (4 * n), max(0.0, -limit))


def _restricted_rate(baseline: Array, treatment: Array, ratio: float, limit: float) -> Array:
    """Return the most likely treated rate if it is `limit` higher than the baseline's.

    Farrington and Manning (1990): the root of a cubic; `ratio` is M / N.
    """
    a = 1 + ratio
    b = -(1 + ratio + treatment + ratio * baseline + limit * (ratio + 2))
    c = limit**2 + limit * (2 * treatment + ratio + 1) + treatment + ratio * baseline
    d = -treatment * limit * (1 + limit)
    v = (b / (3 * a)) ** 3 - b * c / (6 * a * a) + d / (2 * a)
    u = np.where(v < 0, -1.0, 1.0) * np.sqrt(np.maximum((b / (3 * a)) ** 2 - c / (3 * a), 0.0))
    cosine = np.clip(v / np.where(u == 0, 1.0, u**3), -1.0, 1.0)
    root = 2 * u * np.cos((np.pi + np.arccos(cosine)) / 3) - b / (3 * a)
    return np.clip(root, max(0.0, limit), min(1.0, 1 + limit))


def min_runs_of_difference(limit: float, alpha: float, *, paired: bool) -> int | None:
    """Return the number of pairs (runs of each arm) that can show a difference above a limit.

    A negative limit is a margin that equal arms keep. None above MAX_RUNS.
    """
    low, high = 0, MAX_RUNS
    while low + 1 < high:
        count = (low + high) // 2
        best = Outcomes(0 if limit < 0 else count, 0, count, count, paired)
        low, high = (low, count) if best.p_below(-limit) < alpha else (count, high)
    return high if high < MAX_RUNS else None
