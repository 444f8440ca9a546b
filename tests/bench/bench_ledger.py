"""How often the drift is beyond what a ledger says: prints the table of docs/ledger.md.

python tests/bench/bench_ledger.py

A chain of changes, each truly `step` away from the one before, over five pairs. A change is added where it
matches within the margin; what does not match is tried again as another change of the same size, and counted.
"Shared": the runs of a link are the next one's baseline, so that neighbouring differences hang together.
The uncorrected rows count as if neither bound were corrected: 95 % intervals of each entry, and the smaller
of chain and direct at 95 % each.
"""

import math
from typing import Any

import numpy as np

from abrun.compare.judge.ledger import drift_of
from abrun.compare.read.ledger import Entry, Ledger
from abrun.equivalence import paired_tost, t_interval

PAIRS, SEED_SD, MARGIN = 5, 0.03, 0.02
MOST_TRIED = 5000
EMPTY = {"date": "", "experiment": "", "runs_sha256": "", "arm": "", "treatment": {}, "commit": None}
EMPTY |= {"environment_sha256": "", "moved": None, "margin": "", "looks": [], "difference": 0.0}
EMPTY |= {"interval": (0.0, 0.0), "certified_bound": 0.0, "drift": 0.0, "previous": "", "sha256": ""}
LEDGER = {"metric": "train/reward", "window": "last 20%", "steps": (33, 40), "transform": "identity"}
LEDGER |= {"budget": 0.05, "alpha": 0.05, "commit": None}


def one_chain(
    rng: np.random.Generator,
    *,
    length: int,
    step: float,
    noise: float,
    shared: bool,
    rule: str,
    count_all: bool,
) -> tuple[Ledger, dict[int, float], float]:
    """A ledger, the anchor's levels by seed, and the true drift."""
    seeds = SEED_SD * rng.standard_normal(PAIRS)

    def runs(level: float) -> np.ndarray:
        return level + seeds + noise / math.sqrt(2) * rng.standard_normal(PAIRS)

    anchor, level = runs(0.0), 0.0
    link, entries = anchor, []
    for _ in range(length):
        tried = 0
        while tried < MOST_TRIED:
            tried += 1
            baseline = link if shared else runs(level)
            treatment = runs(level + step)
            if paired_tost(baseline, treatment, MARGIN).equivalent:
                break
        else:
            raise ValueError("no change of this size is ever accepted")
        level, link = level + step, treatment
        entries.append(
            Entry.model_validate(
                EMPTY
                | {"seeds": range(PAIRS), "differences": (treatment - baseline).tolist()}
                | {"levels": treatment.tolist(), "tried": tried if count_all else 1}
            )
        )
    ledger = Ledger.model_validate(LEDGER | {"rule": rule, "entries": entries})
    return ledger, dict(enumerate(anchor.tolist())), level


def beyond(
    *,
    chains: int,
    seed: int,
    length: int = 10,
    step: float = 0.004,
    noise: float = 0.004,
    shared: bool = True,
    rule: str = "smaller",
    count_all: bool = True,
    corrected: bool = True,
) -> tuple[float, float]:
    """The share of chains whose drift is beyond the bound, and the median bound."""
    rng, bounds, errors = np.random.default_rng(seed), [], 0
    for _ in range(chains):
        ledger, anchor, truth = one_chain(
            rng, length=length, step=step, noise=noise, shared=shared, rule=rule, count_all=count_all
        )
        bound = drift_of(ledger, anchor).bound if corrected else uncorrected(ledger, anchor)
        errors += abs(truth) > bound
        bounds.append(bound)
    return errors / chains, float(np.median(bounds))


def uncorrected(ledger: Ledger, anchor: dict[int, float]) -> float:
    """The smaller of two bounds that each would hold, were it for one change alone."""
    intervals = [t_interval(one.differences, 0.9) for one in ledger.entries]
    last = ledger.entries[-1]
    direct = t_interval(np.array(last.levels) - np.array([anchor[seed] for seed in last.seeds]), 0.9)
    chain = sum(low for low, _ in intervals), sum(high for _, high in intervals)
    return min(max(map(abs, chain)), max(map(abs, direct)))


ROWS: dict[str, dict[str, Any]] = {
    "the smaller": {},
    "chain alone": {"rule": "chain"},
    "chain alone, tries uncounted": {"rule": "chain", "count_all": False},
    "the smaller, uncorrected": {"corrected": False},
}


def main() -> None:
    print("| changes | each drifts | sd of a pair | runs | counts | drift beyond the bound | median bound |")
    print("|---|---|---|---|---|---|---|")
    for length, step, noise in (
        (1, 0.004, 0.004),
        (10, 0.004, 0.004),
        (10, 0.0, 0.004),
        (10, 0.01, 0.008),
        (3, 0.022, 0.012),
    ):
        for shared in (True, False)[step > MARGIN :]:  # one link by chance far off would stay so
            for label, options in ROWS.items():
                share, bound = beyond(
                    chains=1000, seed=0, length=length, step=step, noise=noise, shared=shared, **options
                )
                made = "shared" if shared else "fresh"
                cells = (length, step, noise, made, label, f"{share:.3f}", f"{bound:.3f}")
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
