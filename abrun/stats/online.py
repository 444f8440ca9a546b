"""Many candidates against an incumbent: levels of an online procedure (LORD++), and the test of a candidate.

Each candidate is one hypothesis: it is not better than the incumbent. LORD++ gives it a level alpha_t when it
is first judged, from the discoveries so far (Javanmard and Montanari 2018, arXiv:1603.09000; the rule with
all discoveries: Ramdas et al. 2017, arXiv:1710.00499). The levels assigned up to any candidate sum to at most
alpha * max(1, discoveries), which bounds the false discovery rate for independent p-values. Candidates may
still be open when others start: a level depends only on discoveries already made (Zrnic, Ramdas and Jordan
2021, arXiv:1812.05068).

A round runs candidate and incumbent on the same seeds, machines and days, so that whatever the environment
adds to both falls out of the differences of pairs. Only pairs show an improvement. The incumbent's earlier
runs can only discard a candidate, where an error costs power and no false discovery; they weigh less the
more the environment has moved between rounds.

Readings share a candidate's level by alpha spending (Lan and DeMets 1983, doi:10.1093/biomet/70.3.659): the
share (n / max) ** 3 has been spent after n pairs. `SPENDING` times the level is spent so, because most
candidates that change nothing are discarded before their last reading; `tests/bench/bench_gate.py` simulates
what all of this adds up to. The noise is pooled over all candidates. A candidate's own variance counts where
it is larger, shrunk towards the pooled one (Smyth 2004, doi:10.2202/1544-6115.1027), or in full if an F-test
at 2 % finds it larger. Shapes: any leading ones that broadcast, such as one per simulated campaign. Imports
scipy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

Array = NDArray[np.float64]

ALPHA = 0.05  # false discovery rate
MIN_SEEDS = 3  # for BETTER; fewer do not show a candidate's own variance
MAX_SEEDS = 100
NUM_OLD = 8  # last runs of the incumbent; earlier ones are of another time
MISS_RATE = 0.25  # bound on the probability to discard an improvement of `worth`; Bonferroni over readings
WORSE_ALPHA = 0.05
SPENDING = 2.5  # times a candidate's level, over all of its readings
OLD_RUNS_SD = 0.25  # assumed of the environment if no pairs show it, in standard deviations of a run
_INITIAL_SHARE = 0.9  # of alpha, spent until the first discovery
_DECAY = 1.3  # gamma_j is proportional to j ** -_DECAY
_PRIOR_DOF = 4  # weight of the pooled variance beside a larger variance of its own
_VARIANCE_LEVEL = 0.02
_SHIFT_SHOWN = 6.63  # chi square of one degree of freedom at 1 %
_PRIOR_ROUNDS, _PRIOR_ENVIRONMENT = 4, 0.25**2  # rounds' worth of a guess, in variances of a run
_PLANNED_LEVEL, _PLANNED_POWER = 0.0005, 0.8  # of a candidate in the middle of a campaign


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A pooled sum of squared deviations, and its degrees of freedom."""

    squares: Array | float = 0.0
    dof: Array | float = 0.0

    @property
    def variance(self) -> Array:
        return np.asarray(self.squares / self.dof)

    def __add__(self, noise: "Noise") -> "Noise":
        return Noise(squares=self.squares + noise.squares, dof=self.dof + noise.dof)

    @classmethod
    def of(cls, values: ArrayLike) -> "Noise":
        """Return the noise of values [..., n] about their mean."""
        array = np.asarray(values, float)
        squares = ((array - array.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1)
        return cls(squares=squares, dof=float(array.shape[-1] - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What earlier rounds say beside a candidate's own runs."""

    old_mean: Array | float = 0.0  # of the incumbent's last runs
    num_old: Array | float = 0.0
    runs: Noise  # of single runs
    pairs: Noise  # of differences within pairs
    environment: Array | float = 0.0  # variance of a round's environment, in variances of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Test of a candidate at its present number of seeds; positive improvements are better."""

    improvement: Array
    error: Array  # standard error of the improvement
    dof: Array
    sd: Array  # pooled, of one run
    p: Array  # one-sided, of no improvement above the margin
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


def spent_level(level: ArrayLike, num_seeds: int, max_seeds: int) -> Array:
    """Return how much of a candidate's level its readings up to `num_seeds` may have spent."""
    share = (num_seeds / max_seeds) ** 3 if MIN_SEEDS <= num_seeds <= max_seeds else 0.0
    spending = SPENDING if max_seeds < MAX_SEEDS else 1.0  # too few pairs for `worth` discard too late
    return spending * share * np.asarray(level)


def reading_sizes(num_before: int, num_seeds: int, max_seeds: int) -> list[int]:
    """Return the numbers of seeds at which a candidate is read, after `num_before`, up to `num_seeds`.

    The schedule doubles from 1, as simulated; a candidate that has all its seeds at once is read at each.
    """
    sizes, size = [], 1
    while size < num_seeds:
        sizes.append(size)
        size += seeds_to_add(size, max_seeds) or num_seeds
    return [size for size in (*sizes, num_seeds) if size > num_before]


def plan_seeds(worth: float) -> int:
    """Return the pairs that keep 4 of 5 improvements of `worth` standard deviations of a run."""
    quantiles = special.ndtri(1 - _PLANNED_LEVEL * SPENDING) + special.ndtri(_PLANNED_POWER)
    return min(MAX_SEEDS, max(MIN_SEEDS + 1, math.ceil(2 * (quantiles / worth) ** 2)))


def seeds_to_add(num_seeds: int, max_seeds: int) -> int:
    """Return how many seeds to add to an open candidate: as many as it has, up to the maximum."""
    return min(num_seeds, max_seeds - num_seeds)


def environment_excess(controls: ArrayLike, memory: Memory) -> Array:
    """Return the squared shift of a round's controls from the incumbent's last runs, beyond its expectation.

    In variances of a run; without old runs NaN. Its mean over rounds estimates the environment's variance.
    """
    fresh = np.asarray(controls, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = 1 / fresh.shape[-1] + 1 / np.asarray(memory.num_old, float)
        return (fresh.mean(axis=-1) - memory.old_mean) ** 2 / memory.runs.variance - expected


def estimate_environment(excesses: ArrayLike) -> Array:
    """Return the variance of a round's environment from the excesses of earlier rounds [..., R]."""
    array = np.asarray(excesses, float)
    total = np.nansum(array, axis=-1) + _PRIOR_ROUNDS * _PRIOR_ENVIRONMENT
    return np.maximum(total / (np.isfinite(array).sum(axis=-1) + _PRIOR_ROUNDS), 0.0)


def read_candidate(
    candidate: ArrayLike,  # [..., n]
    controls: ArrayLike | None,  # of the same seeds; None: there are only the incumbent's earlier runs
    memory: Memory,
    *,
    level: ArrayLike,
    worth: ArrayLike,
    in_sds: bool = False,
    margin: float = 0.0,
    max_seeds: int = 8,
) -> Reading:
    """Test a candidate; values are oriented so that higher is better.

    `level` is this reading's, `margin` the improvement that BETTER must exceed and `worth` the one that must
    not be missed, in units of the values or `in_sds` in pooled standard deviations. A candidate is either
    better, alike or worse, or none of them (open). Old runs weigh less the farther the environment moved: as
    in earlier rounds, or as this one's controls show (z test at 1 %); without them by `OLD_RUNS_SD` or more.
    """
    values = np.asarray(candidate, float)
    num_seeds, variance = values.shape[-1], memory.runs.variance
    num_readings = math.ceil(math.log2(max_seeds)) + 1
    num_old = np.asarray(memory.num_old, float)
    moved = np.asarray(memory.environment)
    if controls is None:
        moved = np.maximum(moved, OLD_RUNS_SD**2)
    else:
        excess = environment_excess(controls, memory)
        with np.errstate(divide="ignore"):
            is_shown = excess > (_SHIFT_SHOWN - 1) * (1 / num_seeds + 1 / num_old)
        moved = np.where(is_shown, np.fmax(moved, excess), moved)
    with np.errstate(divide="ignore"):
        old_weight = 1 / (variance * (1 / num_old + moved))  # 0 without old runs
    level_of_incumbent, weight = np.asarray(memory.old_mean, float), old_weight
    if controls is not None:
        fresh = np.asarray(controls, float)
        weight = old_weight + num_seeds / variance
        fresh_share = num_seeds / variance / weight
        level_of_incumbent = fresh_share * fresh.mean(axis=-1) + (1 - fresh_share) * level_of_incumbent
    difference = values.mean(axis=-1) - level_of_incumbent
    error = np.sqrt(variance / num_seeds + 1 / weight)
    dof = np.asarray(memory.runs.dof, float)
    upper = difference + special.stdtrit(dof, 1 - MISS_RATE / num_readings) * error
    worse = _p_above(-difference, error, dof) <= WORSE_ALPHA / num_readings

    # BETTER: by the differences of pairs alone, whatever the environment did
    if controls is None:
        squared, own_dof = _squared_error(values, memory.runs)
        improvement, own_error = difference, np.sqrt(squared + 1 / weight)
    else:
        squared, own_dof = _squared_error(values - fresh, memory.pairs)
        improvement, own_error = (values - fresh).mean(axis=-1), np.sqrt(squared)
    p = _p_above(improvement - margin, own_error, own_dof)
    better = (p <= np.asarray(level)) & (num_seeds >= MIN_SEEDS)
    smallest = np.asarray(worth) * (np.sqrt(variance) if in_sds else 1.0)
    return Reading(
        improvement=improvement,
        error=own_error,
        dof=own_dof,
        sd=np.sqrt(variance),
        p=p,
        upper=upper,
        better=better,
        alike=~better & ~worse & (upper < smallest),
        worse=worse & ~better,
    )


def _gamma(distance: int) -> float:
    return float(distance**-_DECAY / special.zeta(_DECAY))


def _p_above(difference: Array, error: Array, dof: Array) -> Array:
    """Return the probability of a larger t than observed; without any spread 0, 0.5 or 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where((error > 0) | (difference != 0), difference / error, 0.0)
    return special.stdtr(dof, -t)


def _squared_error(values: Array, noise: Noise) -> tuple[Array, Array]:
    """Return the squared error of the mean of values [..., n], and its degrees of freedom.

    The variance is the one pooled over the noise and these values, or the values' own if that is larger.
    """
    num, own = values.shape[-1], Noise.of(values)
    pooled = noise + own
    if num == 1:
        return pooled.variance, np.asarray(pooled.dof, float)
    shrunk = (_PRIOR_DOF * pooled.variance + own.squares) / (_PRIOR_DOF + num - 1)
    critical = special.fdtri(num - 1, pooled.dof, 1 - _VARIANCE_LEVEL)
    is_larger = own.variance > critical * pooled.variance
    variance = np.where(is_larger, own.variance, np.maximum(pooled.variance, shrunk))
    return variance / num, np.where(is_larger, num - 1.0, pooled.dof)
