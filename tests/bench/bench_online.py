"""Rules of thumb for which of many candidates to keep, and what of it is noise.

python -m tests.bench.bench_online [NUM_CAMPAIGNS]

Campaigns of 100 candidates, one run each; 85 % change nothing, the others improve by 0.5 to 3 sd; normal
noise. One rule keeps whatever looks better than the run that was kept last. The other is that of
karpathy/autoresearch pull request 560: the difference of two runs of the first baseline is the noise floor,
and an improvement of twice that is kept. What `abrun gate` does instead: bench_gate.

Tried for it, on p-values of 3 to 8 seeds against one incumbent of 16 runs: LOND (arXiv:1502.06197) and LORD++
(arXiv:1710.00499), of which LORD++ keeps as much as any other. SAFFRON (arXiv:1802.09098), which spends more
on the assumption that p-values are independent, exceeds 5 % where all candidates share the incumbent. ADDIS
(arXiv:1905.11465) needs a final p-value of each candidate, which an open candidate does not have. E-values
(e-LOND, arXiv:2311.06412; e-BH, arXiv:2009.02824) would allow any dependence and any number of readings, but
keep less: LORD++ with its level shared over the readings keeps more.
"""

import sys

import numpy as np

NUM_CANDIDATES, NULL_SHARE = 100, 0.85


def rule_of_thumb(num_floors: float, num_campaigns: int) -> tuple[float, float, float]:
    """Return the rates of keeping a run that is better by `num_floors` times the difference of two runs.

    The false discovery rate, its standard error, and the share of improvements of 2 sd or more that is kept.
    """
    rng = np.random.default_rng(0)
    size = num_campaigns, NUM_CANDIDATES
    effect = np.where(rng.random(size) < NULL_SHARE, 0.0, rng.uniform(0.5, 3, size))
    first, second = rng.standard_normal((2, num_campaigns))
    true_level, incumbent, floor = np.zeros(num_campaigns), first, np.abs(first - second)
    kept = np.zeros(size, bool)
    for t in range(NUM_CANDIDATES):
        run = true_level + effect[:, t] + rng.standard_normal(num_campaigns)
        kept[:, t] = run - incumbent > num_floors * floor
        incumbent = np.where(kept[:, t], run, incumbent)
        true_level += np.where(kept[:, t], effect[:, t], 0)
    false = (kept & (effect <= 0)).sum(axis=1) / np.maximum(kept.sum(axis=1), 1)
    return float(np.mean(false)), float(np.std(false)) / num_campaigns**0.5, float(np.mean(kept[effect >= 2]))


def main() -> None:
    num_campaigns = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for name, num_floors in {"any improvement": 0.0, "pull request 560": 2.0}.items():
        fdr, error, kept = rule_of_thumb(num_floors, num_campaigns)
        print(f"{name:16} FDR {fdr:.3f} +- {error:.3f}  kept of 2 sd {kept:.2f}")


if __name__ == "__main__":
    main()
