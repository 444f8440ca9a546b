"""Pairs and GPU hours to a verdict for four typical questions, without and with what earlier runs tell.

python -m tests.bench.bench_questions

Before: a fixed number of pairs, the last 20 %, no history. Now: interim analyses, the last 50 % where the
curve is flat (half of the variance: 2.05 is the median of 13 rewards in docs/evidence), the noise of ten
earlier experiments, or a reference's further seeds. Of all designs with 80 % power, the one of the fewest
expected pairs; error is the rate at which arms that differ by the margin match. Sds of experiments are
log-normal (0.35 of the logarithm) and margins in their median, over the last 20 %.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from tests.bench.bench_history import EARLIER_PAIRS, NUM, SPREAD, earlier, final_levels, fit, moderate
from tests.bench.bench_spare_runs import with_further
from tests.bench.common import print_table

RUN_HOURS = 8.0  # GPU hours of a run
POWER, MISMATCH_LEVEL, FLAT = 0.8, 0.04, 2.05
FIXED = [(count,) for count in range(2, 40)]
LOOKS = [(2, 3, 5), (2, 4, 6), (3, 5, 8), (4, 6, 8), (4, 8, 12), (6, 12, 18), (8, 16, 24)]
Decisions = tuple[NDArray[np.bool_], NDArray[np.bool_]]  # which experiments match, and mismatch [C, E]


def decide(counts: tuple[int, ...], margin: float, shift: float, *, flat: bool, history: bool) -> Decisions:
    """Return what experiments decide at each count, all at a familywise 5 % (4 % for a mismatch)."""
    rng = np.random.default_rng([len(counts), counts[-1]])
    scale = FLAT**-0.5 if flat else 1.0
    sds = scale * np.exp(SPREAD * rng.standard_normal((NUM, 1)))
    x = shift + sds * rng.standard_normal((NUM, counts[-1]))
    prior = fit(scale**2 * earlier(rng, 10), EARLIER_PAIRS - 1) if history else None
    spending = "equal" if counts[0] < 4 else "O'Brien-Fleming"
    levels = final_levels([*counts], spending) if len(counts) > 1 else np.array([0.05])
    matches, mismatches = [], []
    for count, level in zip(counts, levels, strict=True):
        mean, error, dof = moderate(x[:, :count], prior)
        matches.append(np.abs(mean) + special.stdtrit(dof, 1 - level) * error < margin)
        tails = [special.stdtr(dof, (end * margin - np.abs(mean)) / error) for end in (1, -1)]
        mismatches.append((np.add(*tails) < level * MISMATCH_LEVEL / 0.05) & (count >= 3))
    return np.array(matches), np.array(mismatches)


def measure(counts: tuple[int, ...], decided: Decisions, *, mismatch: bool = False) -> tuple[float, float]:
    """Return P(the right verdict), and the expected pairs until any."""
    is_over = decided[0] | decided[1]
    at = np.where(is_over.any(axis=0), is_over.argmax(axis=0), len(counts) - 1)
    right = decided[1 if mismatch else 0][at, np.arange(len(at))]
    return float(right.mean()), float(np.array(counts)[at].mean())


def cheapest(designs: list[tuple[int, ...]], rates: Callable[..., tuple[float, float]]) -> tuple[Any, ...]:
    """Return the counts, power and expected pairs of the cheapest design that has the power."""
    found = ((counts, *rates(counts)) for counts in designs)
    return min((row for row in found if row[1] >= POWER), key=lambda row: row[2])


def of_pairs(margin: float, shift: float, *, flat: bool) -> Iterator[tuple[Any, ...]]:
    """Yield counts, error, power and expected pairs of two new arms, before and now."""
    for designs, options in ((FIXED, {}), ([*FIXED, *LOOKS], {"flat": flat, "history": True})):
        given = {"flat": False, "history": False, **options}

        def rates(counts: tuple[int, ...], given: dict[str, bool] = given) -> tuple[float, float]:
            return measure(counts, decide(counts, margin, shift, **given), mismatch=shift > 0)

        counts, power, pairs = cheapest(designs, rates)
        error = measure(counts, decide(counts, margin, margin, **given))[0]
        yield counts, error, power, pairs


def of_reference(margin: float, seeds: int, correlation: float) -> Iterator[tuple[Any, ...]]:
    """Yield the same of later runs against a reference; the curve is flat."""
    for scale, uses_further in ((1.0, False), (FLAT**-0.5, True)):

        def matches(count: int, shift: float, scale: float = scale, further: bool = uses_further) -> float:
            rng = np.random.default_rng([count, seeds])
            baseline = rng.standard_normal((NUM, seeds))
            own = np.sqrt(1 - correlation**2) * rng.standard_normal((NUM, count))
            treatment = correlation * baseline[:, :count] + own
            found = with_further(scale * baseline, scale * treatment + shift, margin)
            return float(np.mean(found[further]))

        counts, power, pairs = cheapest(
            [(count,) for count in range(2, seeds + 1)], lambda counts: (matches(counts[0], 0.0), counts[0])
        )
        yield counts, matches(counts[0], margin), power, pairs


def main() -> None:
    questions = {
        "equal arms, margin 2, flat curve": of_pairs(2.0, 0.0, flat=True),
        "equal arms, margin 1.5, still learning": of_pairs(1.5, 0.0, flat=False),
        "worse by 2 margins of 1.5, flat curve": of_pairs(1.5, 3.0, flat=True),
        "later run, margin 1.5, reference of 10 seeds": of_reference(1.5, 10, 0.35),
    }
    rows = []
    for question, found in questions.items():
        runs = 1 if "reference" in question else 2
        for label, (counts, error, power, pairs) in zip(("before", "now"), found, strict=True):
            at = ", ".join(map(str, counts))
            hours = f"{pairs * runs * RUN_HOURS:.0f}"
            rows.append([f"{question}: {label}", at, error, f"{power:.2f}", f"{pairs:.1f}", hours])
    print_table("questions", ["pairs at", "error", "power", "expected pairs", "GPU hours"], rows)


if __name__ == "__main__":
    main()
