"""How often runs are called a match falsely where they are compared more than once: error-rates.md.

python -m tests.bench.bench_readings

The true difference is exactly the margin, so that every match is an error. First table: pairs are added until
a verdict matches. Second table: windows are tried on the same pairs until one matches. Third table: new runs
are compared with one frozen reference every night.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.equivalence import ALPHA
from abrun.stats.sequential import interim_level
from tests.bench.common import print_table

EXPERIMENTS = 20_000
MAX_ADDED = 7  # pairs after the first reading
STEPS = 100
WINDOWS = {1: (20,), 4: (10, 20, 30, 50), 20: tuple(range(5, 105, 5))}  # last percent of the steps
SEED_SDS = {"step noise": 0.0, "both": 0.1, "seeds": 1.0}  # of a pair's difference; step noise has 1


def matches(differences: NDArray[np.float64], level: float = ALPHA) -> NDArray[np.bool_]:
    """Experiments [N] that are called a match: differences [N, P] less the margin, which is the true one."""
    num_pairs = differences.shape[1]
    error = differences.std(axis=1, ddof=1) / np.sqrt(num_pairs)
    return differences.mean(axis=1) > special.stdtrit(num_pairs - 1, 1 - level) * error


def first_match(differences: NDArray[np.float64], counts: Sequence[int], level: float = ALPHA) -> float:
    """How often some reading of the first `counts` pairs is a match."""
    return float(np.any([matches(differences[:, :count], level) for count in counts], axis=0).mean())


def repeated(start: int, added: int) -> tuple[float, float, float, float]:
    """The rates of the first table, where the same pairs are read again with every `added` pairs."""
    rng = np.random.default_rng([start, added])
    counts = range(start, start + MAX_ADDED + 1, added)
    differences = rng.standard_normal((EXPERIMENTS, counts[-1]))
    fresh = matches(rng.standard_normal((EXPERIMENTS, max(start, MAX_ADDED))))
    level = interim_level(counts)
    return (
        first_match(differences, counts),
        float(fresh.mean()),
        float((matches(differences[:, :start]) | fresh).mean()),
        first_match(differences, counts, level),
    )


def windows_tried(num_pairs: int, num_windows: int, seed_sd: float) -> float:
    """How often some window of the same pairs is a match; each window's true difference is its margin."""
    rng = np.random.default_rng([num_pairs, num_windows])
    curves = rng.standard_normal((EXPERIMENTS // 4, num_pairs, STEPS))
    curves += seed_sd * rng.standard_normal((len(curves), num_pairs, 1))
    matched = [matches(curves[:, :, -last * STEPS // 100 :].mean(axis=2)) for last in WINDOWS[num_windows]]
    return float(np.any(matched, axis=0).mean())


def rates_given_the_reference(num_pairs: int, correlation: float, nights: int = 20) -> tuple[float, ...]:
    """False matches by reference: their mean, the rate of one reference in twenty, and over `nights`."""
    rng = np.random.default_rng([num_pairs, round(10 * correlation)])
    rates = []
    for frozen in rng.standard_normal((400, num_pairs)):  # runs of the reference, of sd 1
        later = np.sqrt(1 - correlation**2) * rng.standard_normal((2000, num_pairs))
        rates.append(float(matches(later - (1 - correlation) * frozen).mean()))
    found = np.array(rates)
    any_night = 1 - (1 - found) ** nights
    return float(found.mean()), float(np.quantile(found, 0.95)), float(any_night.mean())


def main() -> None:
    pairs = (3, 5, 8, 10)
    print_table(
        "first read at so many pairs, again with every so many",
        ["again", "same pairs", "fresh pairs alone", "first or fresh", "looks"],
        ([start, added, *repeated(start, added)] for start in pairs for added in (1, 2)),
    )
    print_table(
        "windows tried on so many pairs, whose runs differ by",
        ["runs differ by", *(f"{count} windows" for count in WINDOWS)],
        (
            [num_pairs, name, *(windows_tried(num_pairs, count, seed_sd) for count in WINDOWS)]
            for num_pairs in pairs
            for name, seed_sd in SEED_SDS.items()
        ),
    )
    print_table(
        "one reference of so many pairs",
        ["correlation", "all references", "one reference in twenty", "some night of 20"],
        (
            [num_pairs, f"{correlation:.1f}", *rates_given_the_reference(num_pairs, correlation)]
            for num_pairs in pairs
            for correlation in (0.0, 0.5, 0.8)
        ),
    )


if __name__ == "__main__":
    main()
