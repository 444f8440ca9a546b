"""How often the drift is beyond what a ledger says: the figures of docs/how-to/track-drift.md.

python -m tests.bench.bench_ledger

A chain of changes, each truly `step` away from the one before. A change is added where it matches within the
margin; a change that does not match is followed by another one of the same size, and counted. Three models of
a change's noise, which the difference of a pair has in each:

- "fresh": noise of single runs, and the runs of a link are made again as the next one's baseline;
- "shared": noise of single runs, and the runs of a link are the next one's baseline;
- "walk": a change moves each seed by an amount of its own that stays in every later link.

"last entry's tries" divides the direct bound's level by the tries of the last entry alone; "tries uncounted"
counts one for each entry.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from abrun.logs.recorded.ledger import Entry, Ledger
from abrun.stats.equivalence import t_interval
from abrun.tools.drift.chain import drift_of
from tests.bench.common import print_table

SEED_SD, MARGIN = 0.03, 0.02
MOST_TRIED, BATCH = 5000, 64
EMPTY = {"date": "", "experiment": "", "runs_sha256": "", "arm": "", "treatment": {}, "commit": None}
EMPTY |= {"environment_sha256": "", "moved": None, "margin": "", "interim": [], "difference": 0.0}
EMPTY |= {"interval": (0.0, 0.0), "certified_bound": 0.0, "drift": 0.0, "previous": "", "sha256": ""}
LEDGER = {"metric": "train/reward", "window": "last 20%", "steps": (33, 40), "transform": "identity"}
LEDGER |= {"budget": 0.05, "alpha": 0.05, "commit": None}


def one_chain(
    rng: np.random.Generator,
    *,
    length: int,
    step: float,
    noise: float,
    runs: str,
    pairs: int,
) -> tuple[Ledger, dict[int, float], float]:
    """A ledger whose rule is the smaller bound, the anchor's levels by seed, and the true drift."""
    seeds = SEED_SD * rng.standard_normal(pairs)
    of_run = 0.0 if runs == "walk" else noise / math.sqrt(2)
    of_change = noise if runs == "walk" else 0.0

    def measured(level: np.ndarray) -> np.ndarray:
        return level + of_run * rng.standard_normal(level.shape)

    anchor = link = measured(seeds)
    level, entries = seeds, []
    for _ in range(length):
        tried = 0
        while tried < MOST_TRIED:
            changed = level + step + of_change * rng.standard_normal((BATCH, pairs))
            treatments = measured(changed)
            baselines = link if runs == "shared" else measured(np.broadcast_to(level, changed.shape))
            passed = equivalent(treatments - baselines)
            if passed.any():
                break
            tried += BATCH
        else:
            raise ValueError("no change of this size is ever accepted")
        first = int(passed.argmax())
        tried += first + 1
        differences = (treatments - baselines)[first]
        level, link = changed[first], treatments[first]
        entries.append(
            Entry.model_validate(
                EMPTY
                | {"seeds": range(pairs), "differences": differences.tolist()}
                | {"levels": link.tolist(), "tried": tried}
            )
        )
    ledger = Ledger.model_validate(LEDGER | {"rule": "smaller", "entries": entries})
    return ledger, dict(enumerate(anchor.tolist())), length * step


def equivalent(differences: np.ndarray) -> np.ndarray:
    """The changes [N] whose 90 % interval over pairs [N, P] lies within the margin."""
    pairs = differences.shape[1]
    error = differences.std(axis=1, ddof=1) / math.sqrt(pairs)
    reach = special.stdtrit(pairs - 1, 0.95) * error
    return np.abs(differences.mean(axis=1)) + reach < MARGIN


def beyond(
    *,
    chains: int,
    seed: int,
    length: int = 10,
    step: float = 0.004,
    noise: float = 0.004,
    runs: str = "shared",
    pairs: int = 5,
) -> dict[str, tuple[float, float]]:
    """The share of chains whose drift is beyond the bound, and the median bound, by the way of counting."""
    rng = np.random.default_rng(seed)
    bounds: dict[str, list[float]] = {label: [] for label in COUNTS}
    errors = dict.fromkeys(COUNTS, 0)
    for _ in range(chains):
        ledger, anchor, truth = one_chain(rng, length=length, step=step, noise=noise, runs=runs, pairs=pairs)
        for label, bound_of in COUNTS.items():
            bound = bound_of(ledger, anchor)
            errors[label] += abs(truth) > bound
            bounds[label].append(bound)
    return {label: (errors[label] / chains, float(np.median(bounds[label]))) for label in COUNTS}


def smaller(ledger: Ledger, anchor: dict[int, float]) -> float:
    return drift_of(ledger, anchor).bound


def chain_alone(ledger: Ledger, anchor: dict[int, float], **entry: int) -> float:
    entries = tuple(each.model_copy(update=entry) for each in ledger.entries)
    return drift_of(ledger.model_copy(update={"rule": "chain", "entries": entries}), anchor).bound


def tries_uncounted(ledger: Ledger, anchor: dict[int, float]) -> float:
    return chain_alone(ledger, anchor, tried=1)


def last_tries(ledger: Ledger, anchor: dict[int, float]) -> float:
    """The smaller bound where the direct one counts the tries of the last entry alone."""
    chain, last = max(map(abs, drift_of(ledger, anchor).chain)), ledger.entries[-1]
    differences = np.array(last.levels) - np.array([anchor[seed] for seed in last.seeds])
    return min(chain, max(map(abs, t_interval(differences, 1 - ledger.alpha / last.tried))))


COUNTS: dict[str, Callable[[Ledger, dict[int, float]], float]] = {
    "the smaller": smaller,
    "last entry's tries": last_tries,
    "chain alone": chain_alone,
    "chain alone, tries uncounted": tries_uncounted,
}
CHAINS = (
    (1, 0.004, 0.004),
    (10, 0.004, 0.004),
    (10, 0.0, 0.004),
    (10, 0.01, 0.008),
    (10, 0.012, 0.012),
    (3, 0.022, 0.012),
)


def row(*cells: object, **options: Any) -> list[object]:
    rates = beyond(seed=0, chains=2000, **options).values()
    return [*cells, *(f"{share:.3f} (±{bound:.3f})" for share, bound in rates)]


def main() -> None:
    print_table(
        "chains of so many changes, each drifts by",
        ["each drifts", "sd of a pair", "runs", *COUNTS],
        (
            row(length, f"{step}", f"{noise}", runs, length=length, step=step, noise=noise, runs=runs)
            for length, step, noise in CHAINS
            # One link by chance far off would stay so
            for runs in ("shared", "fresh", "walk")[noise > MARGIN / 2 :]
        ),
    )
    # The margin is as hard to show at any number of pairs
    noises = {pairs: 0.0054 * math.sqrt(pairs) for pairs in (3, 5, 8, 10)}
    print_table(
        "pairs, each change drifts by 0.012",
        ["sd of a pair", *COUNTS],
        (row(n, noise, step=0.012, noise=noise, runs="walk", pairs=n) for n, noise in noises.items()),
    )


if __name__ == "__main__":
    main()
