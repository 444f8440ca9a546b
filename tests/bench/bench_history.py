"""Error and power of tests that borrow the noise of earlier experiments, and of spendings (error-rates.md).

python -m tests.bench.bench_history

Vectorised, with its own fit of the prior; `leave_one_out` uses the product's test on docs/evidence. The sds
of experiments are log-normal around 1 (spread 0.35 of the logarithm). Every earlier experiment had 5 pairs.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.equivalence import equivalence_test
from abrun.stats.many_tests import predict_variance
from tests.bench.common import print_table

Floats = NDArray[np.float64]
NUM, MARGIN, SPREAD, EARLIER_PAIRS = 20_000, 2.0, 0.35, 5
HALVES = np.geomspace(1e-3, 1e4, 4000)
SHAPES = ("normal", "exponential", "t (3)", "fails in 1 of 10")


def fit(variances: Floats, dof: float) -> tuple[Floats, Floats]:
    """Return the predicted variance and its degrees of freedom, of earlier variances [E, K]."""
    logs = np.log(variances) - special.digamma(dof / 2) + np.log(dof / 2)
    noise, count = special.polygamma(1, dof / 2), logs.shape[1]
    excess = np.maximum((logs.var(axis=1, ddof=1) if count > 1 else 0.0) - noise, 0.2)
    total = excess + (excess + noise) / count
    halves = np.interp(-total, -special.polygamma(1, HALVES), HALVES)
    return np.exp(logs.mean(axis=1) + special.digamma(halves)) / halves, np.minimum(2 * halves, 4.0)


def earlier(rng: np.random.Generator, count: int, num: int = NUM, spread: float = SPREAD) -> Floats:
    dof = EARLIER_PAIRS - 1
    sds = np.exp(spread * rng.standard_normal((num, count)))
    return sds**2 * rng.chisquare(dof, (num, count)) / dof


def draw(rng: np.random.Generator, shape: str, size: tuple[int, int]) -> Floats:
    """Return differences of mean 0 and sd 1; most of a skewed sample is nearer to 0 than its mean."""
    if shape == "exponential":
        return rng.exponential(size=size) - 1
    if shape == "t (3)":
        return rng.standard_t(3, size) / np.sqrt(3)
    if shape == "fails in 1 of 10":
        return ((rng.random(size) < 0.1) - 0.1) * 4.0 + 0.3 * rng.standard_normal(size)
    return rng.standard_normal(size)


def moderate(x: Floats, prior: tuple[Floats, Floats] | None) -> tuple[Floats, Floats, Floats]:
    """Return mean, standard error and degrees of freedom of differences [E, n]."""
    count = x.shape[1]
    own, dof = x.var(axis=1, ddof=1), np.full(len(x), count - 1.0)
    if prior is not None:
        variance, weight = prior
        like = own <= special.fdtri(count - 1, weight, 0.95) * variance
        own = np.where(like, (weight * variance + dof * own) / (weight + dof), own)
        dof = np.where(like, weight + dof, dof)
    return x.mean(axis=1), np.sqrt(own / count), dof


def passes(x: Floats, prior: tuple[Floats, Floats] | None, margin: float, level: float = 0.05) -> NDArray:
    mean, error, dof = moderate(x, prior)
    return np.abs(mean) + special.stdtrit(dof, 1 - level) * error < margin


def rates(
    num_pairs: int,
    count: int,
    *,
    noisier: float = 1.0,
    shape: str = "normal",
    shared: bool = False,
    quieter: float = 0.0,
):
    """Return errors at the margin and power of equal arms, each without and with the history."""
    rng = np.random.default_rng([num_pairs, count, int(noisier), SHAPES.index(shape), shared])
    sds = noisier * np.exp(SPREAD * rng.standard_normal((NUM, 1)))
    x, variances, dof = draw(rng, shape, (NUM, num_pairs)), earlier(rng, count), EARLIER_PAIRS - 1
    if shared:  # bit-identical runs of one baseline in all experiments: half of every difference
        baseline, others = rng.standard_normal((NUM, 1, num_pairs)), (NUM, count + 1, num_pairs)
        both = (rng.standard_normal(others) - baseline) / np.sqrt(2)
        x, variances, dof = both[:, 0], both[:, 1:].var(axis=2, ddof=1), num_pairs - 1
    if quieter:  # half of the earlier experiments are of another kind
        variances = variances * np.where(rng.random(variances.shape) < 0.5, quieter**-2.0, 1.0)
    variances *= 0.3**2 if shape == SHAPES[-1] else 1.0  # no earlier run failed
    margin, prior = MARGIN * noisier, fit(variances, dof)
    at_margin = [passes(margin + sds * x, law, margin).mean() for law in (None, prior)]
    return *at_margin, *(passes(sds * x, law, margin).mean() for law in (None, prior))


def final_levels(counts: list[int], spending: str) -> Floats:
    """Return the level of each analysis, 0.05 in all, for plain t statistics; by bisection."""
    rng, shares = np.random.default_rng(0), np.array(counts) / counts[-1]
    x = rng.standard_normal((200_000, counts[-1]))
    p_values = [
        special.stdtr(n - 1, moderate(x[:, :n], None)[0] / moderate(x[:, :n], None)[1]) for n in counts
    ]
    low, high = 1.2, 4.0
    for _ in range(40):
        z = (low + high) / 2
        levels = (
            special.ndtr(-z / np.sqrt(shares))
            if spending == "O'Brien-Fleming"
            else special.ndtr(-z) + 0 * shares
        )
        is_over = np.any([p < level for p, level in zip(p_values, levels, strict=True)], axis=0).mean() > 0.05
        low, high = (z, high) if is_over else (low, z)
    return levels


def stages(counts: list[int], levels: Floats, margin: float, *, history: bool, shift: float = 0.0) -> tuple:
    """Return P(match) and the expected pairs; two pairs, and all others, can match."""
    rng = np.random.default_rng([7, int(10 * margin)])
    x = np.exp(SPREAD * history * rng.standard_normal((NUM, 1))) * rng.standard_normal((NUM, counts[-1]))
    prior = fit(earlier(rng, 10), EARLIER_PAIRS - 1) if history else None
    decided = np.array(
        [passes(x[:, :n] + shift, prior, margin, level) for n, level in zip(counts, levels, strict=True)]
    )
    at = np.where(decided.any(axis=0), decided.argmax(axis=0), len(counts) - 1)
    return decided.any(axis=0).mean(), np.array(counts)[at].mean()


def leave_one_out() -> dict[str, list[tuple[str, int, float, float]]]:
    """Return, by claim of the published rewards, P(match) of subsets of the pairs without and with a prior.

    The prior is fitted to all other experiments on train/reward.
    """
    claims: dict[str, list[dict]] = {}
    for path in sorted(Path("docs/evidence").glob("*/verdict.json")):
        for claim in json.loads(path.read_text())["claims"]:
            if claim["metric"] == "train/reward" and claim["differences"]:
                claims.setdefault(path.parent.name, []).append(claim)
    records = {
        name: (np.mean([c["sd_difference"] ** 2 for c in rows]), len(rows[0]["differences"]) - 1.0)
        for name, rows in claims.items()
    }
    found: dict[str, list[tuple[str, int, float, float]]] = {}
    for name, rows in claims.items():
        prior = predict_variance(*zip(*(r for other, r in records.items() if other != name), strict=True))
        for claim in rows:
            differences, margin = np.array(claim["differences"]), claim["margin"]
            for count in (2, 3, 4):
                tests = [
                    [
                        equivalence_test(np.zeros(count), differences[list(chosen)], margin, prior=law)
                        for chosen in combinations(range(len(differences)), count)
                    ]
                    for law in (None, prior)
                ]
                matches = [float(np.mean([test.equivalent for test in row])) for row in tests]
                beyond = [float(np.mean([test.p_beyond < 0.04 for test in row])) for row in tests]
                rate = beyond if claim["result"] == "different" else matches
                row = (f"{name} {claim['arm']}", count, rate[0], rate[1])
                found.setdefault(claim["result"], []).append(row)
    return found


def main() -> None:
    cells: list[tuple[str, dict[str, Any]]] = [("alike", {"count": count}) for count in (1, 2, 3, 10, 30)]
    cells += [(f"{factor}x noisier", {"count": 10, "noisier": factor}) for factor in (2, 3, 5)]
    cells += [(shape, {"count": 10, "shape": shape}) for shape in SHAPES[1:]]
    cells += [("one shared baseline", {"count": 10, "shared": True})]
    cells += [("half of them 10x quieter", {"count": 10, "quieter": 10.0})]
    rows = []
    for name, options in cells:
        found = [rates(num_pairs, **options) for num_pairs in (2, 3, 5)]
        errors = [f"{before:.3f} -> {after:.3f}" for before, after, _, _ in found]
        powers = [f"{before:.2f} -> {after:.2f}" for _, _, before, after in found]
        rows.append([f"{name}, {options['count']} earlier", *errors, *powers])
    print_table("history", [f"{what}, {n} pairs" for what in ("error", "power") for n in (2, 3, 5)], rows)
    rows, margins = [], (1.0, 1.5, 2.0, 3.0)
    designs = [([5], True), ([2, 3, 5], True), ([5], False), ([4, 8, 12], False), ([*range(4, 13)], False)]
    for counts, history in designs:
        for spending in ("equal", "O'Brien-Fleming")[: 1 if len(counts) == 1 else 2]:
            levels = final_levels(counts, spending) if len(counts) > 1 else np.array([0.05])
            error = stages(counts, levels, 2.0, history=history, shift=2.0)[0]
            found = [stages(counts, levels, margin, history=history) for margin in margins]
            label = f"{counts if len(counts) < 9 else 'every pair from 4'}{', history' * history}, {spending}"
            rows.append([label, float(error), *(f"{match:.2f}, {pairs:.2f}" for match, pairs in found)])
    print_table("looks", ["error", *(f"margin {margin:g}" for margin in margins)], rows)
    for result, claims in leave_one_out().items():
        for count in (2, 3, 4):
            pairs = [(before, after) for _, n, before, after in claims if n == count]
            before, after = np.mean(pairs, axis=0)
            print(f"{result} ({len(pairs)} claims), {count} pairs: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
