"""Error and power of tests that use runs beside the pairs (error-rates.md).

python -m tests.bench.bench_spare_runs

Runs of both arms have one law, sd 1 and the correlation rho; the true difference is the margin, 1.5 sds of a
run for a reference's further seeds, and 2 sds of a difference for A/A reruns. Vectorised, with its own code.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tests.bench.bench_after_looking import EXPERIMENTS, SHAPES
from tests.bench.common import print_table

Floats = NDArray[np.float64]
PAIRS, LEVEL = (2, 3, 5), 0.05


def standardised(shape: str, rng: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return values of mean 0 and sd 1, as the law's own sd scales them."""
    many = SHAPES[shape](np.random.default_rng(0), (1000, 1000))
    return (SHAPES[shape](rng, size) - many.mean()) / many.std()


def matches(mean: Floats, error: Floats, dof: Floats | float, margin: float) -> NDArray[np.bool_]:
    return np.abs(mean) + special.stdtrit(dof, 1 - LEVEL) * error < margin


def with_further(baseline: Floats, treatment: Floats, margin: float) -> tuple[NDArray, NDArray]:
    """Return which experiments match by their pairs [E, n] alone, and with all baselines [E, n + U]."""
    num_pairs, num_all = treatment.shape[1], baseline.shape[1]
    paired, further = baseline[:, :num_pairs], baseline[:, num_pairs:]
    differences, freedom = treatment - paired, num_pairs - 1.0
    variance, all_variance = differences.var(axis=1, ddof=1), baseline.var(axis=1, ddof=1)
    alone = matches(differences.mean(axis=1), np.sqrt(variance / num_pairs), freedom, margin)
    if num_all == num_pairs:
        return alone, alone
    weight = 0.5 + 0.5 * num_pairs / num_all
    adjusted = treatment - weight * paired
    mean = adjusted.mean(axis=1) - (1 - weight) * further.mean(axis=1)
    first = adjusted.var(axis=1, ddof=1) / num_pairs
    second = (1 - weight) ** 2 * all_variance / (num_all - num_pairs)
    dof = (first + second) ** 2 / np.maximum(first**2 / freedom + second**2 / (num_all - 1), 1e-300)
    used = matches(mean, np.sqrt(first + second), np.minimum(dof, 1.25 * freedom), margin)
    is_alike = variance > special.fdtri(freedom, num_all - 1, 0.001) * all_variance
    return alone, np.where(is_alike, used, alone)


def further_rates(shape: str, num_pairs: int, num_further: int, rho: float) -> tuple[Floats, Floats]:
    """Return P(match) at the margin (the worse of both sides) and of equal arms, without and with them."""
    rng = np.random.default_rng([num_pairs, num_further, int(100 * rho)])
    baseline = standardised(shape, rng, (EXPERIMENTS, num_pairs + num_further))
    own = standardised(shape, rng, (EXPERIMENTS, num_pairs))
    treatment = rho * baseline[:, :num_pairs] + np.sqrt(1 - rho**2) * own
    at = [np.mean(with_further(baseline, treatment + shift, 1.5), axis=1) for shift in (-1.5, 1.5, 0.0)]
    return np.maximum(at[0], at[1]), at[2]


def rerun_rates(shape: str, num_pairs: int, num_reruns: int, noisier: float) -> tuple[Floats, Floats]:
    """Return the same with reruns; the treatment's own noise is `noisier` times the baseline's."""
    rng = np.random.default_rng([num_pairs, num_reruns, int(10 * noisier)])
    first, second = (standardised(shape, rng, (EXPERIMENTS, num_pairs)) for _ in range(2))
    differences = (noisier * second - first) / np.sqrt(1 + noisier**2)
    reruns = standardised(shape, rng, (EXPERIMENTS, num_reruns))
    reruns = (reruns - standardised(shape, rng, (EXPERIMENTS, num_reruns))) / np.sqrt(1 + noisier**2)
    own, prior, freedom = differences.var(axis=1, ddof=1), (reruns**2).mean(axis=1), num_pairs - 1.0
    low, high = (special.fdtri(freedom, num_reruns, p) * prior for p in (0.001, 0.95))
    is_like = (low < own) & (own <= high)
    both = np.where(is_like, (num_reruns * prior + freedom * own) / (num_reruns + freedom), own)
    dof = np.where(is_like, num_reruns + freedom, freedom)
    found = []
    for shift in (-2.0, 2.0, 0.0):
        mean = differences.mean(axis=1) + shift
        tests = (own, np.full_like(own, freedom)), (both, dof)
        found.append([matches(mean, np.sqrt(v / num_pairs), d, 2.0).mean() for v, d in tests])
    at = np.array(found)
    return np.maximum(at[0], at[1]), at[2]


def row_of(name: str, rates: list[tuple[Floats, Floats]]) -> list[object]:
    errors = [f"{error[0]:.3f} -> {error[1]:.3f}" for error, _ in rates]
    return [name, *errors, *(f"{power[0]:.2f} -> {power[1]:.2f}" for _, power in rates)]


def main() -> None:
    columns = [f"{what}, {n} pairs" for what in ("error", "power") for n in PAIRS]
    cells = [("normal", num, rho) for num in (2, 10) for rho in (0.0, 0.35, 0.8, 0.95)]
    cells += [(shape, 5, 0.35) for shape in SHAPES]
    rows = (
        row_of(f"{shape}, {num} further, rho {rho}", [further_rates(shape, n, num, rho) for n in PAIRS])
        for shape, num, rho in cells
    )
    print_table("further seeds of a reference", columns, rows)
    cells = [("normal", num, noisier) for num in (1, 2, 4) for noisier in (1.0, 1.5, 2.0, 3.0)]
    cells += [(shape, 2, 1.0) for shape in [*SHAPES][1:]]
    rows = (
        row_of(f"{shape}, {num} reruns, {noisier}x", [rerun_rates(shape, n, num, noisier) for n in PAIRS])
        for shape, num, noisier in cells
    )
    print_table("A/A reruns", columns, rows)


if __name__ == "__main__":
    main()
