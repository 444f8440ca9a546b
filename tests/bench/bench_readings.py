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
    print(
        "| first read at | read again with every | same pairs | fresh pairs alone | first or fresh | looks |"
    )
    print("|---|---|---|---|---|---|")
    for start in (3, 5, 8, 10):
        for added in (1, 2):
            rates = " | ".join(f"{rate:.3f}" for rate in repeated(start, added))
            print(f"| {start} pairs | {added} | {rates} |")
    print("\n| pairs | runs differ by | 1 window | 4 windows | 20 windows |")
    print("|---|---|---|---|---|")
    for num_pairs in (3, 5, 8, 10):
        for name, seed_sd in SEED_SDS.items():
            rates = " | ".join(f"{windows_tried(num_pairs, count, seed_sd):.3f}" for count in WINDOWS)
            print(f"| {num_pairs} | {name} | {rates} |")
    print("\n| pairs | correlation | all references | one reference in twenty | some night of 20 |")
    print("|---|---|---|---|---|")
    for num_pairs in (3, 5, 8, 10):
        for correlation in (0.0, 0.5, 0.8):
            rates = " | ".join(f"{rate:.3f}" for rate in rates_given_the_reference(num_pairs, correlation))
            print(f"| {num_pairs} | {correlation} | {rates} |")


if __name__ == "__main__":
    main()
