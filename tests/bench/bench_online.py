"""Online procedures and rules of thumb on the same candidates: why `abrun gate` uses LORD++.

python -m tests.bench.bench_online [NUM_CAMPAIGNS]

Campaigns of 100 candidates against one incumbent of 16 runs, each judged once at n seeds; 85 % change
nothing, the others improve by 0.5 to 3 sd; normal noise. Procedures for p-values: LOND (Javanmard and
Montanari 2015, arXiv:1502.06197), LORD++ (Ramdas et al. 2017, arXiv:1710.00499), SAFFRON (Ramdas et al.
2018, arXiv:1802.09098), ADDIS (Tian and Ramdas 2019, arXiv:1905.11465). For e-values: e-LOND (Xu and Ramdas
2024, arXiv:2311.06412) and, once all candidates are known, e-BH (Wang and Ramdas 2022, arXiv:2009.02824).
The e-value is the likelihood ratio of an improvement of 2 sd, with the noise taken as known, which favours
it.

Two rules of thumb: keep whatever looks better in one run, and the rule of karpathy/autoresearch pull request
560: the difference of two runs of the first baseline is the noise floor, and an improvement of twice that is
kept. The incumbent of these two is the single run that was kept last.

Result: with p-values, LORD++ keeps as much as any other. SAFFRON, which spends more on the assumption that
p-values are independent, exceeds 5 % where all candidates share the incumbent. ADDIS needs a final p-value of
each candidate, which an open candidate does not have. E-values would allow any dependence and any number of
readings, but keep less: LORD++ with its level shared over the readings keeps more at 3 to 8 seeds.
"""

import sys
from collections.abc import Callable

import numpy as np
from scipy import special

from abrun.stats.online import ALPHA, Noise, Sample, lord_level, read_candidate

NUM_CANDIDATES, INCUMBENT_SEEDS, NULL_SHARE = 100, 16, 0.85
Decisions = np.ndarray  # [T], which candidates are kept


def gamma(exponent: float) -> np.ndarray:
    return np.arange(1, NUM_CANDIDATES + 1) ** -exponent / special.zeta(exponent)


def lond(p: np.ndarray) -> Decisions:
    kept = np.zeros(len(p), bool)
    for t, share in enumerate(gamma(1.3)):
        kept[t] = p[t] <= ALPHA * share * (kept[:t].sum() + 1)
    return kept


def lord(p: np.ndarray) -> Decisions:
    kept, times = np.zeros(len(p), bool), []
    for t in range(len(p)):
        kept[t] = p[t] <= lord_level(t + 1, times)
        times += [t + 1] * int(kept[t])
    return kept


def addis(p: np.ndarray, discard: float = 0.5, candidate: float = 0.25, exponent: float = 1.6) -> Decisions:
    """ADDIS; SAFFRON if nothing is discarded (`discard` 1)."""
    shares, initial = gamma(exponent), ALPHA / 2
    kept = np.zeros(len(p), bool)
    ages = [0]  # for the start and each discovery: tests since then that count
    for t in range(len(p)):
        rewards = [initial, ALPHA - initial, *[ALPHA] * len(ages)]
        wealth = sum(reward * shares[age] for reward, age in zip(rewards, ages, strict=False))
        kept[t] = p[t] <= min(candidate, (discard - candidate) * wealth)
        ages = [age + int(candidate < p[t] <= discard) for age in ages] + [0] * int(kept[t])
    return kept


def saffron(p: np.ndarray) -> Decisions:
    return addis(p, discard=1.0, candidate=0.5)


def e_lond(e: np.ndarray) -> Decisions:
    kept = np.zeros(len(e), bool)
    for t, share in enumerate(gamma(1.3)):
        kept[t] = e[t] * ALPHA * share * (kept[:t].sum() + 1) >= 1
    return kept


def e_bh(e: np.ndarray) -> Decisions:
    order = np.argsort(-e)
    passes = np.arange(1, len(e) + 1) * e[order] >= len(e) / ALPHA
    kept = np.zeros(len(e), bool)
    kept[order[: int(passes.nonzero()[0].max(initial=-1)) + 1]] = True
    return kept


def rates(kept: np.ndarray, effect: np.ndarray) -> tuple[float, float, float]:
    """Return the false discovery rate, its standard error, and the share of 2 sd or more that is kept."""
    false = (kept & (effect <= 0)).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
    error = float(np.std(false)) / len(false) ** 0.5
    return float(np.mean(false)), error, float(np.mean(kept[effect >= 2]))


def draw_effects(rng: np.random.Generator, num_campaigns: int) -> np.ndarray:
    size = num_campaigns, NUM_CANDIDATES
    return np.where(rng.random(size) < NULL_SHARE, 0.0, rng.uniform(0.5, 3, size))


def compare_procedures(num_seeds: int, num_campaigns: int) -> dict[str, tuple[float, float, float]]:
    rng = np.random.default_rng(num_seeds)
    effect = draw_effects(rng, num_campaigns)
    values = effect[..., None] + rng.standard_normal((*effect.shape, num_seeds))
    incumbent = Sample.of(rng.standard_normal((num_campaigns, 1, INCUMBENT_SEEDS)))
    samples = Sample.of(values)
    noise = Noise(
        squares=np.cumsum(samples.squares, axis=1) - samples.squares,
        dof=np.arange(NUM_CANDIDATES, dtype=np.float64) * (num_seeds - 1.0),
    )
    reading = read_candidate(samples, incumbent, noise, level=0.0, worth=2.0)
    shift = 2 * reading.sd
    e = np.exp((shift * reading.improvement - shift**2 / 2) / reading.error**2)
    by_p: dict[str, Callable[[np.ndarray], Decisions]] = {
        "LOND": lond,
        "LORD++": lord,
        "SAFFRON": saffron,
        "ADDIS": addis,
        "5 % each": lambda p: p <= ALPHA,
    }
    by_e: dict[str, Callable[[np.ndarray], Decisions]] = {"e-LOND": e_lond, "e-BH": e_bh}
    decided = {name: np.array([rule(row) for row in reading.p]) for name, rule in by_p.items()}
    decided |= {name: np.array([rule(row) for row in e]) for name, rule in by_e.items()}
    return {name: rates(kept, effect) for name, kept in decided.items()}


def rule_of_thumb(num_floors: float, num_campaigns: int) -> tuple[float, float, float]:
    """Return the rates of keeping a run that is better by `num_floors` times the difference of two runs."""
    rng = np.random.default_rng(0)
    effect = draw_effects(rng, num_campaigns)
    first, second = rng.standard_normal((2, num_campaigns))
    true_level, incumbent, floor = np.zeros(num_campaigns), first, np.abs(first - second)
    kept = np.zeros(effect.shape, bool)
    for t in range(NUM_CANDIDATES):
        run = true_level + effect[:, t] + rng.standard_normal(num_campaigns)
        kept[:, t] = run - incumbent > num_floors * floor
        incumbent = np.where(kept[:, t], run, incumbent)
        true_level += np.where(kept[:, t], effect[:, t], 0)
    return rates(kept, effect)


def main() -> None:
    num_campaigns = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for num_seeds in (3, 5, 8):
        for name, (fdr, error, kept) in compare_procedures(num_seeds, num_campaigns).items():
            print(f"{num_seeds} seeds  {name:10} FDR {fdr:.3f} +- {error:.3f}  kept of 2 sd {kept:.2f}")
    for name, num_floors in {"any improvement": 0.0, "pull request 560": 2.0}.items():
        fdr, error, kept = rule_of_thumb(num_floors, num_campaigns)
        print(f"1 seed   {name:16} FDR {fdr:.3f} +- {error:.3f}  kept of 2 sd {kept:.2f}")


if __name__ == "__main__":
    main()
