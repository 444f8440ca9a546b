"""Margins in sigmas: whether arms differ by less than k standard deviations of the baseline over seeds.

The baseline's sigma alone is the yardstick, and is estimated from the same seeds as the difference. The mean
difference is independent of every sample variance (normal seeds), so that an interval of |difference| -
k sigma follows from one of each by the method of variance estimates recovery (MOVER: Zou and Donner 2008,
doi:10.1002/sim.3095; for reference-scaled bioequivalence Hyslop, Hsuan and Holder 2000), whatever the
treatment's own sigma and the correlation of the arms are. Its level is simulated in
`tests/stats/test_sigma_margin.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from abrun.stats.equivalence import ALPHA, difference, mean_and_sd, two_samples
from abrun.stats.power import MOST_PAIRS, fewest

_DRAWS = 8192  # of a power: its error is below 0.005
_SMALLEST_P = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmaTest:
    """What two arms say about |mean difference| against k sigma, sigma the baseline's over seeds."""

    sigma: float  # the baseline's, n - 1 in the denominator
    p_equivalence: float
    p_beyond: float  # of a difference that is no larger than k sigma
    certified_sigmas: float  # the smallest k that would have passed; inf where no k would
    equivalent: bool


def sigma_test(
    baseline: ArrayLike,
    treatment: ArrayLike,
    sigmas: float,
    alpha: float = ALPHA,
    resolution: float = 0.0,
    *,
    paired: bool = True,
) -> SigmaTest:
    """Equivalent iff the upper 1 - alpha bound of |mean difference| - k sigma is below 0.

    Of independent arms the difference has Welch's error and degrees of freedom, the sigma its own.
    `resolution`, and the ValueError, as of `abrun.stats.equivalence.equivalence_test`.
    """
    left, right = two_samples(baseline, treatment, sigmas, paired=paired)
    mean, error, freedom = difference(left, right, resolution, paired=paired)
    return _sigma_test(mean_and_sd(left)[1], len(left), (abs(mean), error, freedom), sigmas, alpha)


def _sigma_test(
    sigma: float, num_seeds: int, found: tuple[float, float, float], sigmas: float, alpha: float
) -> SigmaTest:
    """`found`: the size of the mean difference, its standard error and degrees of freedom."""
    mean, error, freedom = found
    if sigma == 0:
        p_equivalence, p_beyond = float(mean != 0 or error != 0), float(mean == 0 or error != 0)
        certified = 0.0 if mean == 0 and error == 0 else math.inf
    else:
        p_equivalence = _p_value(lambda a: _room(sigma, error, num_seeds, sigmas, a, freedom) > mean)
        p_beyond = _p_value(
            lambda a: mean > sigmas * sigma + _reach(sigma, error, num_seeds, sigmas, a, freedom)
        )
        certified = _certified(mean, sigma, error, num_seeds, alpha, freedom)
    return SigmaTest(
        sigma=sigma,
        p_equivalence=p_equivalence,
        p_beyond=p_beyond,
        certified_sigmas=certified,
        equivalent=p_equivalence < alpha,
    )


def sigma_lower_bound(sigma: float, num_seeds: int, alpha: float = ALPHA) -> float:
    """Lower 1 - alpha bound of a standard deviation estimated from `num_seeds` normal summaries."""
    return sigma * math.sqrt((num_seeds - 1) / float(special.chdtri(num_seeds - 1, alpha)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Of arms with one mean, paired: what the power of a margin in sigmas depends on."""

    correlation: float = 0.0
    ratio: float = 1.0  # the treatment's sigma over the baseline's
    widened: float = 1.0  # the sd of the difference, by this factor: towards an end of its interval

    @property
    def spread(self) -> float:
        """Sd of the difference, in the baseline's sigmas."""
        return self.widened * math.sqrt(max(0.0, 1 + self.ratio**2 - 2 * self.ratio * self.correlation))


def sigma_power(sigmas: float, num_pairs: int, law: Law, alpha: float = ALPHA) -> float:
    """P(`sigma_test` passes) for equal normal arms.

    The mean difference is integrated out; the sample variances are drawn (Bartlett), the same for every call.
    """
    if num_pairs < 2:
        return 0.0
    freedom = num_pairs - 1
    rng = np.random.default_rng(0)
    u = np.sqrt(rng.chisquare(freedom, _DRAWS))
    v = rng.standard_normal(_DRAWS)
    rest = rng.chisquare(freedom - 1, _DRAWS) if freedom > 1 else 0.0
    own = law.ratio * math.sqrt(1 - law.correlation**2)
    shared = law.ratio * law.correlation - 1
    of_difference = shared**2 * u**2 + 2 * shared * own * u * v + own**2 * (v**2 + rest)
    error = law.widened * np.sqrt(np.maximum(of_difference, 0) / freedom / num_pairs)
    room = _room(u / math.sqrt(freedom), error, num_pairs, sigmas, alpha)
    spread = max(law.spread / math.sqrt(num_pairs), 1e-300)  # 0 where arms move as one
    return float(np.mean(2 * special.ndtr(np.maximum(room, 0) / spread) - 1))


def sigma_matches(
    sigmas: float, counts: Sequence[int], law: Law, levels: Sequence[float]
) -> NDArray[np.bool_]:
    """Whether `sigma_test` passes at each of `counts` pairs [C, N], over simulated pairs of equal arms."""
    rng = np.random.default_rng(0)
    left = rng.standard_normal((_DRAWS, counts[-1]))
    own = math.sqrt(1 - law.correlation**2) * rng.standard_normal(left.shape)
    differences = law.widened * (law.ratio * (law.correlation * left + own) - left)
    passes = []
    for count, alpha in zip(counts, levels, strict=True):
        difference = differences[:, :count]
        error = difference.std(axis=1, ddof=1) / math.sqrt(count)
        room = _room(left[:, :count].std(axis=1, ddof=1), error, count, sigmas, alpha)
        passes.append(np.abs(difference.mean(axis=1)) < room)
    return np.array(passes)


def sigma_pairs_needed(
    sigmas: float, law: Law, target: float = 0.8, alpha: float = ALPHA, most: int = MOST_PAIRS
) -> int | None:
    """The fewest pairs for which `sigma_power` is at least `target`; None beyond `most`."""
    return fewest(lambda pairs: sigma_power(sigmas, pairs, law, alpha), target, most)


def _room(sigma, error, num_seeds: int, sigmas: float, alpha: float, freedom=None):
    """How large |mean difference| may be for the upper bound to stay below 0; arrays or numbers.

    `num_seeds`: of sigma. `freedom`: of the error of the difference; None: of as many pairs.
    """
    of_sigma = num_seeds - 1
    below = 1 - math.sqrt(of_sigma / float(special.chdtri(of_sigma, alpha)))
    quantile = special.stdtrit(of_sigma if freedom is None else freedom, 1 - alpha)
    return sigmas * sigma - np.hypot(quantile * error, sigmas * sigma * below)


def _reach(
    sigma: float, error: float, num_seeds: int, sigmas: float, alpha: float, freedom: float | None = None
) -> float:
    """By how much |mean difference| must exceed k sigma for the lower bound to be above 0; both tails."""
    of_sigma = num_seeds - 1
    above = math.sqrt(of_sigma / float(special.chdtri(of_sigma, 1 - alpha))) - 1
    quantile = float(special.stdtrit(of_sigma if freedom is None else freedom, 1 - alpha / 2))
    return math.hypot(quantile * error, sigmas * sigma * above)


def _certified(
    mean: float, sigma: float, error: float, num_seeds: int, alpha: float, freedom: float
) -> float:
    """The k at which `_room` is the mean difference: a root of a quadratic, as in Fieller's theorem."""
    of_sigma = num_seeds - 1
    share = 1 - math.sqrt(of_sigma / float(special.chdtri(of_sigma, alpha)))
    reach = float(special.stdtrit(freedom, 1 - alpha)) * error
    a = sigma**2 * (1 - share**2)
    inside = (sigma * mean) ** 2 - a * (mean**2 - reach**2)
    return (sigma * mean + math.sqrt(max(inside, 0.0))) / a


def _p_value(rejects: Callable[[float], bool]) -> float:
    """The smallest level at which a test rejects, by bisection; 1 where it does not at 0.5."""
    low, high = _SMALLEST_P, 0.5
    if not rejects(high):
        return 1.0
    if rejects(low):
        return low
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high
