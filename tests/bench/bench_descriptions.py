"""False discovery rate of the metrics that a description says to differ (error-rates.md).

python -m tests.bench.bench_descriptions

70 metrics, of which none or three differ. With several pairs, metrics that share a factor over seeds, with
either sign; with one run of each arm, noise that lasts over steps (first-order autoregressive) and is shared.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.curves import level_shift_p
from abrun.stats.many_tests import benjamini_hochberg
from abrun.verdict.description import FALSE_DISCOVERY_RATE
from tests.bench.common import print_table

Floats = NDArray[np.float64]
NUM_METRICS, NUM_EXPERIMENTS = 70, 1000


def rates_over_pairs(num_pairs: int, shared: float, num_differing: int, num: int) -> tuple[float, float]:
    """Return the false discovery rate and the power; `shared`: correlation of the metrics over seeds."""
    rng = np.random.default_rng([num_pairs, int(10 * shared), num_differing])
    outcomes = []
    for _ in range(num):
        values = _correlate(rng, rng.standard_normal((NUM_METRICS + 1, num_pairs)), shared)
        values[:num_differing] += 20
        error = values.std(axis=1, ddof=1) / np.sqrt(num_pairs)
        p_values = 2 * special.stdtr(num_pairs - 1, -np.abs(values.mean(axis=1)) / error)
        outcomes.append(_count(p_values, num_differing))
    return tuple(np.mean(outcomes, axis=0))


def rates_over_steps(num_steps: int, persistence: float, num_differing: int, num: int) -> tuple[float, float]:
    """Return the false discovery rate and the power with one run of each arm; a shift of 7 sds of a step."""
    rng = np.random.default_rng([num_steps, int(100 * persistence), num_differing])
    outcomes = []
    for _ in range(num):
        noise = rng.standard_normal((NUM_METRICS + 1, num_steps))
        noise[:, 1:] *= np.sqrt(1 - persistence**2)
        for step in range(1, num_steps):
            noise[:, step] += persistence * noise[:, step - 1]
        differences = _correlate(rng, noise, 0.5)
        differences[:num_differing] += 7
        outcomes.append(_count(level_shift_p(differences), num_differing))
    return tuple(np.mean(outcomes, axis=0))


def _correlate(rng: np.random.Generator, values: Floats, shared: float) -> Floats:
    signs = rng.choice([-1.0, 1.0], (NUM_METRICS, 1))
    return np.sqrt(shared) * signs * values[-1] + np.sqrt(1 - shared) * values[:-1]


def _count(p_values: Floats, num_differing: int) -> tuple[float, float]:
    found = np.array(benjamini_hochberg(p_values)) <= FALSE_DISCOVERY_RATE
    return found[num_differing:].sum() / max(found.sum(), 1), found[
        :num_differing
    ].mean() if num_differing else 0


def main() -> None:
    for name, shares, sizes, rates in (
        ("pairs", (0.0, 0.5, 0.9), (3, 5, 10), rates_over_pairs),
        ("steps", (0.0, 0.5, 0.8, 0.9), (20, 60, 200), rates_over_steps),
    ):
        rows = []
        for share in shares:
            found = [
                [rates(size, share, num_differing, NUM_EXPERIMENTS) for num_differing in (0, 3)]
                for size in sizes
            ]
            cells = [f"{max(none[0], some[0]):.3f} ({some[1]:.2f})" for none, some in found]
            rows.append([f"{share:g}", *cells])
        print_table(f"correlation over {name}", [f"{size} {name}" for size in sizes], rows)


if __name__ == "__main__":
    main()
