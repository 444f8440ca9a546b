"""How often a bisection excludes the candidate that broke it: the figures of docs/how-to/find-the-commit.md.

python -m tests.bench.bench_bisect

Good's runs are drawn once and shared by all tests, as they are on disk. "At the margin": all candidates but
the last differ by exactly the margin, so that every mismatch before the fault is an error, and every match
after it. The judge's tests, at its levels, on window summaries.
"""

import time

import numpy as np

from abrun.stats.equivalence import equivalence_test
from abrun.stats.sequential import interim_level
from abrun.tools.bisect.search import Answer, Design, pair_counts, search

MARGIN = 1.0
SHARE_OF_CLAIMS = 0.8  # of the level of a mismatch; the guards have the rest
LAST = 4 * MARGIN  # the last candidate differs by this at least
# law -> true difference before and after the fault, sd of the difference of a pair
LAWS = {
    "at the margin": (MARGIN, MARGIN, 0.5),
    "half, then one and a half": (0.5 * MARGIN, 1.5 * MARGIN, 0.3),
    "twice the margin": (0.0, 2 * MARGIN, 0.3),
    "noisy, twice the margin": (0.0, 2 * MARGIN, 0.8),
}


def wrong_and_named(
    law: str, *, num_candidates: int, searches: int, seed: int, alpha: float = 0.05, spare: int = 1
) -> tuple[float, float]:
    """Shares of the searches whose answer excludes the truth, and that name one candidate alone."""
    rng = np.random.default_rng(seed)
    design = Design(num_candidates=num_candidates, alpha=alpha, spare=spare, counts=pair_counts(5, 10))
    match = interim_level(design.counts, design.level)
    mismatch = interim_level(design.counts, SHARE_OF_CLAIMS * design.level)
    before, after, sd = LAWS[law]
    wrong = named = 0
    for _ in range(searches):
        first_bad = int(rng.integers(1, num_candidates + 1))
        good = sd / np.sqrt(2) * rng.standard_normal(design.counts[-1])

        def test(index: int, first_bad: int = first_bad, good: np.ndarray = good) -> Answer:
            shift = after if index >= first_bad else before
            shift = max(shift, LAST) if index == num_candidates else shift
            other = shift + sd / np.sqrt(2) * rng.standard_normal(len(good))
            for count in design.counts:
                found = equivalence_test(good[:count], other[:count], MARGIN, match)
                if found.equivalent:
                    return "good"
                if found.p_beyond < mismatch:
                    return "bad"
            return "undecided"

        found = search(design, test)
        wrong += first_bad not in found.suspects
        named += found.endpoint == "bad" and len(found.suspects) == 1
    return wrong / searches, named / searches


def main() -> None:
    print("| candidates | true differences | the truth excluded | one named |\n|---|---|---|---|")
    began = time.monotonic()
    for num_candidates in (3, 12, 100):
        for law in LAWS:
            wrong, named = wrong_and_named(law, num_candidates=num_candidates, searches=4000, seed=0)
            print(f"| {num_candidates} | {law} | {wrong:.4f} | {named:.3f} |", flush=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
