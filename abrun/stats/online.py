"""Many candidates against an incumbent: levels of an online procedure (LORD++), and the test of a candidate.

Each candidate is one hypothesis: it is not better than the incumbent. LORD++ gives it a level alpha_t when it
is first judged, from the discoveries so far (Javanmard and Montanari 2018, arXiv:1603.09000; the rule with
all discoveries: Ramdas et al. 2017, arXiv:1710.00499). The levels assigned up to any candidate sum to at most
alpha * max(1, discoveries), which bounds the false discovery rate for independent p-values. Candidates may
still be open when others start: a level depends only on discoveries already made (Zrnic, Ramdas and Jordan
2021, arXiv:1812.05068).

A candidate is judged again whenever it has more seeds. Its level is shared over all numbers of seeds from
MIN_SEEDS to the maximum in proportion to n ** 3 (Bonferroni), so any number of readings is paid for in
advance, also if incumbent or noise estimate change in between. All candidates share the incumbent's runs,
which no theorem above covers: `tests/stats/test_online.py` simulates it.

Noise is pooled over all runs of the campaign. The candidate's and the incumbent's own variance count where
they are larger, shrunk towards the pooled one (Smyth 2004, doi:10.2202/1544-6115.1027), or in full if
an F-test at 2 % finds them larger. Shapes: any that broadcast, such as one element per simulated campaign.
Imports scipy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

ALPHA = 0.05  # false discovery rate
MAX_SEEDS = 8
MIN_SEEDS = 3  # for BETTER; fewer do not show a candidate's own variance
MISS_RATE = 0.25  # bound on the probability to discard an improvement of `worth`; Bonferroni over readings
WORSE_ALPHA = 0.05
_INITIAL_SHARE = 0.9  # of alpha, spent until the first discovery
_DECAY = 1.3  # gamma_j is proportional to j ** -_DECAY
_PRIOR_DOF = 4  # weight of the pooled variance beside a larger variance of its own
_VARIANCE_LEVEL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Number, mean and sum of squared deviations of the values of one arm, one value a run."""

    count: Array
    mean: Array
    squares: Array

    @classmethod
    def of(cls, values: ArrayLike) -> "Sample":
        array = np.asarray(values, float)
        mean = array.mean(axis=-1)
        squares = ((array - mean[..., None]) ** 2).sum(axis=-1)
        return cls(count=np.full(mean.shape, float(array.shape[-1])), mean=mean, squares=squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Noise of the other candidates and earlier incumbents: sum of squared deviations, degrees of freedom."""

    squares: Array | float = 0.0
    dof: Array | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Test of a candidate at its present number of seeds; positive improvements are better."""

    improvement: Array
    error: Array  # standard error of the improvement
    dof: Array
    sd: Array  # pooled, of one run
    p: Array  # one-sided, of no improvement above the margin
    level: Array  # share of the candidate's level that this number of seeds has
    upper: Array  # upper bound of the improvement, for ALIKE
    better: NDArray[np.bool_]
    alike: NDArray[np.bool_]  # an improvement of `worth` is ruled out
    worse: NDArray[np.bool_]

    def interval(self, level: float = 0.05) -> tuple[Array, Array]:
        """Return the confidence interval of the improvement, `level` on each side, of this reading alone."""
        half_width = special.stdtrit(self.dof, 1 - level) * self.error
        return self.improvement - half_width, self.improvement + half_width


def lord_level(number: int, discoveries: Sequence[int], alpha: float = ALPHA) -> float:
    """Return the level of candidate `number`, counted from 1.

    `discoveries`: for each discovery, in order, the number of candidates that had a level when it was made;
    each is below `number`. LORD++: gamma_t w0 + gamma_{t - tau_1} (alpha - w0) + alpha sum gamma_{t - tau_j}.
    """
    initial = _INITIAL_SHARE * alpha
    rewards = [alpha - initial, *[alpha] * len(discoveries)][: len(discoveries)]
    later = sum(
        reward * _gamma(number - made_at) for reward, made_at in zip(rewards, discoveries, strict=True)
    )
    return initial * _gamma(number) + later


def level_share(num_seeds: ArrayLike, max_seeds: int = MAX_SEEDS) -> Array:
    """Return the share of a candidate's level that a reading at `num_seeds` may spend."""
    counts = np.asarray(num_seeds, float)
    total = sum(count**3 for count in range(MIN_SEEDS, max_seeds + 1))
    return np.where((counts >= MIN_SEEDS) & (counts <= max_seeds), counts**3 / total, 0.0)


def read_candidate(
    candidate: Sample,
    incumbent: Sample,
    noise: Noise,
    *,
    level: ArrayLike,
    worth: ArrayLike,
    in_sds: bool = False,
    margin: float = 0.0,
    max_seeds: int = MAX_SEEDS,
) -> Reading:
    """Test a candidate; its samples are oriented so that higher is better.

    `level` is its LORD++ level, `margin` the improvement that BETTER must exceed and `worth` the one that
    must not be missed, in units of the values or `in_sds` in pooled standard deviations. The incumbent needs
    at least two runs. A candidate is either better, alike or worse, or none of them (open).
    """
    pooled_dof = np.asarray(noise.dof + incumbent.count - 1 + candidate.count - 1)
    variance = (noise.squares + incumbent.squares + candidate.squares) / pooled_dof
    errors, dofs = zip(
        *(_squared_error(sample, variance, pooled_dof) for sample in (candidate, incumbent)), strict=True
    )
    error = np.sqrt(errors[0] + errors[1])
    with np.errstate(invalid="ignore"):  # Satterthwaite 1946, doi:10.2307/3002019
        dof = error**4 / (errors[0] ** 2 / dofs[0] + errors[1] ** 2 / dofs[1])
    dof = np.where(error > 0, np.minimum(dof, pooled_dof), pooled_dof)
    improvement = candidate.mean - incumbent.mean
    p = _p_above(improvement - margin, error, dof)
    share = np.asarray(level) * level_share(candidate.count, max_seeds)
    better = p <= share
    upper = improvement + special.stdtrit(dof, 1 - MISS_RATE / max_seeds) * error
    smallest = np.asarray(worth) * (np.sqrt(variance) if in_sds else 1.0)
    worse = ~better & (_p_above(-improvement, error, dof) <= WORSE_ALPHA / max_seeds)
    return Reading(
        improvement=improvement,
        error=error,
        dof=dof,
        sd=np.sqrt(variance),
        p=p,
        level=share,
        upper=upper,
        better=better,
        alike=~better & ~worse & (upper < smallest),
        worse=worse,
    )


def seeds_to_add(
    candidate: Sample, incumbent: Sample, noise: Noise, *, max_seeds: int = MAX_SEEDS, **settings: Any
) -> NDArray[np.int64]:
    """Return how many seeds to add to an open candidate before it is judged again.

    This is half of the fewest seeds that would decide it if its mean and variance stayed the same, or half of
    those left up to the maximum, rounded up: readings cost nothing, and most candidates drift away from the
    incumbent sooner. `settings` as of `read_candidate`.
    """
    own_dof = candidate.count - 1
    pooled = (noise.squares + incumbent.squares + candidate.squares) / (
        noise.dof + incumbent.count - 1 + own_dof
    )
    variance = np.where(own_dof > 0, candidate.squares / np.maximum(own_dof, 1), pooled)
    num_added = np.maximum(max_seeds - candidate.count, 0)
    for added in range(max_seeds - 1, 0, -1):
        count = candidate.count + added
        longer = Sample(count=count, mean=candidate.mean, squares=variance * (count - 1))
        reading = read_candidate(longer, incumbent, noise, max_seeds=max_seeds, **settings)
        is_decided = (reading.better | reading.alike | reading.worse) & (count <= max_seeds)
        num_added = np.where(is_decided, added, num_added)
    return -(-num_added.astype(np.int64) // 2)


def _gamma(distance: int) -> float:
    return float(distance**-_DECAY / special.zeta(_DECAY))


def _p_above(difference: Array, error: Array, dof: Array) -> Array:
    """Return the probability of a larger t than observed; without any spread 0, 0.5 or 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where((error > 0) | (difference != 0), difference / error, 0.0)
    return special.stdtr(dof, -t)


def _squared_error(sample: Sample, pooled: Array, pooled_dof: Array) -> tuple[Array, Array]:
    """Return the squared error of a mean and its degrees of freedom.

    The variance is the pooled one, or the sample's own if that is larger.
    """
    own_dof = np.maximum(sample.count - 1, 1)
    own = sample.squares / own_dof
    shrunk = (_PRIOR_DOF * pooled + sample.squares) / (_PRIOR_DOF + sample.count - 1)
    critical = special.fdtri(own_dof, pooled_dof, 1 - _VARIANCE_LEVEL)
    is_larger = (sample.count > 1) & (own > critical * pooled)
    variance = np.where(is_larger, own, np.maximum(pooled, shrunk))
    return variance / sample.count, np.where(is_larger, own_dof, pooled_dof)
