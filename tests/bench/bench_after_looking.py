"""Margins chosen after looking, and spreads as claims: prints two sections of error-rates.md.

python -m tests.bench.bench_after_looking

An adversary sees every number of pairs from 2 to 30 and claims the smallest margin at the one it likes best;
the claim is false if the true difference is beyond it. Seven laws of a difference, skewed ones in both
directions. Then the threshold of `abrun.stats.anytime`: how often normal differences reach it at any of 1,000
numbers of pairs, plus a bound on all later ones.

Then spreads: both arms have one law and the treatment's sd is exactly 1.5 times the baseline's, so that each
pass is an error; and how often 1.5x and 2x are shown of arms with equal sds.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.anytime import TAU, THRESHOLD, anytime_evidence, anytime_quantile
from abrun.stats.spread import spread_test
from tests.bench.common import print_table

Array = NDArray[np.float64]
EXPERIMENTS = 20_000
CALIBRATING = 100_000
SPREADS, SPREAD_PAIRS, CORRELATION = (1.5, 2.0), (5, 8, 10, 20), 0.5
PAIRS, MAX_PAIRS, LAST = (3, 4, 5, 8, 10), 30, 1_000

# Mean 0; [E, n]
SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "heavy-tailed (t, 3)": lambda rng, size: rng.standard_t(3, size),
    "uniform": lambda rng, size: rng.uniform(-1, 1, size),
    "exponential": lambda rng, size: rng.exponential(1, size) - 1,
    "log-normal": lambda rng, size: rng.lognormal(0, 1, size) - np.exp(0.5),
    "two outcomes": lambda rng, size: rng.choice([-1.0, 1.0], size),
    "one seed in ten fails": lambda rng, size: rng.standard_normal(size) + 10 * (rng.random(size) < 0.1) - 1,
}
SKEWED = ("exponential", "log-normal", "one seed in ten fails")


def running(values: Array) -> Iterator[tuple[int, Array, Array]]:
    """Yield n, and the mean and standard error of the first n values [E, N], for every n from 2 on."""
    total, squares = values[:, 0].copy(), values[:, 0] ** 2
    for num in range(2, values.shape[1] + 1):
        total += values[:, num - 1]
        squares += values[:, num - 1] ** 2
        mean = total / num
        variance = np.maximum((squares - num * mean**2) / (num - 1), 0.0)
        variance[variance < 1e-12] = 0.0
        yield num, mean, np.sqrt(variance / num)


def false_claims(values: Array) -> dict[str, float]:
    """Return how often some printed margin lies below the true difference, whose estimates end too low."""
    one_reading, any_naive, anytime = {}, np.zeros(len(values), bool), np.zeros(len(values), bool)
    for num, mean, error in running(values):
        is_false = mean + special.stdtrit(num - 1, 0.95) * error < 0
        any_naive |= is_false
        if num in PAIRS:
            one_reading[f"read once, {num} pairs"] = float(is_false.mean())
        if np.isfinite(quantile := anytime_quantile(num)):
            anytime |= (error > 0) & (mean + quantile * error < 0)
    most = {"read at every number, t": float(any_naive.mean()), "anytime": float(anytime.mean())}
    return {**one_reading, **most}


def length_ratios(rng: np.random.Generator) -> list[object]:
    """Return the median ratio of the anytime margin to that of one reading, by pairs, if arms are equal."""
    ratios: list[object] = []
    for num, mean, error in running(rng.standard_normal((EXPERIMENTS, max(PAIRS)))):
        if num in PAIRS:
            once = np.abs(mean) + special.stdtrit(num - 1, 0.95) * error
            ratios.append(float(np.median((np.abs(mean) + anytime_quantile(num) * error) / once)))
    return ratios


def evidence(num: int, t: Array) -> Array:
    """The vectorised logarithm of `anytime_evidence`."""
    growth = 1 + num * TAU**2
    r = t / np.sqrt(num - 1 + t * t)
    rest = 1 - (1 - 1 / growth) * r * r
    chance = special.stdtr(num, np.sqrt(num * (1 - 1 / growth) / rest) * r)
    return np.log(2) - 0.5 * np.log(growth) - 0.5 * num * np.log(rest) + np.log(np.maximum(chance, 1e-300))


def crossing_rates(rng: np.random.Generator) -> tuple[float, float]:
    """Return P(normal differences reach THRESHOLD at up to LAST pairs), and a bound on all later ones.

    Given E at LAST, a later crossing has probability E / THRESHOLD at most (Ville).
    """
    total, squares = np.zeros(CALIBRATING), np.zeros(CALIBRATING)
    crossed, latest = np.zeros(CALIBRATING, bool), np.zeros(CALIBRATING)
    for num in range(1, LAST + 1):
        drawn = rng.standard_normal(CALIBRATING)
        total += drawn
        squares += drawn**2
        if num > 1:
            variance = (squares - total**2 / num) / (num - 1)
            latest = evidence(num, total / np.sqrt(num * variance))
            crossed |= latest >= np.log(THRESHOLD)
    rest = np.where(crossed, 0.0, np.exp(latest)).mean() / THRESHOLD
    return float(crossed.mean()), float(rest)


def spread_p(baseline: Array, treatment: Array, limit: float) -> Array:
    """The vectorised p of `spread_test` for a ratio below a limit, [E]."""
    base, treated = (np.abs(arm - np.median(arm, axis=1, keepdims=True)) for arm in (baseline, treatment))
    values, num = treated - limit * base, base.shape[1]
    error = np.maximum(values.std(axis=1, ddof=1) / np.sqrt(num), 1e-300)
    return special.stdtr(num - 1, values.mean(axis=1) / error)


def variance_p(baseline: Array, treatment: Array, limit: float) -> Array:
    """The p of the F test for a ratio of sds below a limit, [E]."""
    ratio = treatment.var(axis=1, ddof=1) / np.maximum(baseline.var(axis=1, ddof=1), 1e-300)
    dof = baseline.shape[1] - 1
    return special.fdtr(dof, dof, ratio / limit**2)


def spread_rates(law: Callable[..., Array], rho: float) -> list[list[object]]:
    """Return false passes of the spread test and of the F test, and the power of each limit, by pairs."""
    found: list[list[object]] = [["Levene"], ["F"], *([f"power, {limit:g}x"] for limit in SPREADS)]
    for num in SPREAD_PAIRS:
        shared, *own = (law(np.random.default_rng([num, seed]), (EXPERIMENTS, num)) for seed in range(3))
        arms = [np.sqrt(rho) * shared + np.sqrt(1 - rho) * values for values in own]
        for row, test in zip(found, (spread_p, variance_p), strict=False):
            row.append(float(np.mean(test(arms[0], 1.5 * arms[1], 1.5) < 0.05)))
        for row, limit in zip(found[2:], SPREADS, strict=True):
            row.append(float(np.mean(spread_p(arms[0], arms[1], limit) < 0.05)))
    return found


def main() -> None:
    sample = np.random.default_rng(0).standard_normal((2, 7))
    expected = spread_test(sample[0], sample[1], 1.5, 0.05).p_below
    assert np.isclose(spread_p(sample[:1], sample[1:], 1.5)[0], expected)
    for num, t in ((4, 2.0), (9, -1.0), (30, 3.0)):
        assert np.isclose(np.exp(evidence(num, np.array([t])))[0], anytime_evidence(num, t))
    rows, columns = [], []
    for name, law in SHAPES.items():
        values = law(np.random.default_rng(3), (EXPERIMENTS, MAX_PAIRS))
        for sign in (1, -1) if name in SKEWED else (1,):
            rates = false_claims(sign * values)
            columns = list(rates)
            rows.append([f"{name}{', other tail' * (sign < 0)}", *rates.values()])
    print_table(f"false margins, {EXPERIMENTS:,} experiments, 2 to {MAX_PAIRS} pairs", columns, rows)
    print_table("anytime / one reading", PAIRS, [["median", *length_ratios(np.random.default_rng(4))]])
    spreads = [
        [f"{name}, correlation {rho}: {row[0]}", *row[1:]]
        for name, law in SHAPES.items()
        for rho in (0, CORRELATION)
        for row in spread_rates(law, rho)
    ]
    print_table(f"spreads at 1.5x, {EXPERIMENTS:,} experiments", SPREAD_PAIRS, spreads)
    crossed, rest = crossing_rates(np.random.default_rng(5))
    print(f"\nthreshold {THRESHOLD}: {crossed:.4f} up to {LAST} pairs, {rest:.4f} later at most")


if __name__ == "__main__":
    main()
