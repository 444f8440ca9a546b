"""Error rates of one-sided claims, simulated at their edge: prints the table of error-rates.md.

python -m tests.bench.bench_one_sided

The laws are those of bench_verdict. The true difference is exactly the margin, so that every pass of
`not_worse` or `better`, and every failure, is an error: the treatment is shifted to where its improvement is
minus, or plus, the law's own mean difference. Each law is read in both directions. If higher is better, the
tail of the last two laws is a loss: a seed in ten fails. If lower is better, it is a gain.

Then what no law has: a shock that all pairs share, such as the data order or the node of one arm; and times
to a target whose ratio is not the same in all seeds.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.stats.one_sided import improvement_test
from abrun.stats.sequential import interim_level
from abrun.stats.sigma_margin import _max_mean_difference, _min_excess, sigma_improvement_test
from tests.bench.bench_verdict import ALPHA, LAWS, LOOKS, PAIRS, Arms, beyond, normal, tail, tost, welch_tail
from tests.bench.common import print_table

EXPERIMENTS = 20_000
SHOCK = 0.5  # sd of a shock that all pairs share, in sd of a difference


def exceeds(left, right, share, yardstick, sign) -> NDArray[np.float64]:
    """The p-values of an improvement above share * yardstick, over many experiments [N, P]."""
    return tail(share * yardstick - sign * (right - left))


def exceeds_sigmas(left, right, sigmas, sign, alpha=ALPHA) -> NDArray[np.bool_]:
    """Whether the improvement is shown to be above so many sigmas of the baseline; negative: a loss below."""
    pairs, difference = left.shape[1], sign * (right - left)
    sigma, mean = left.std(axis=1, ddof=1), difference.mean(axis=1)
    error = difference.std(axis=1, ddof=1) / np.sqrt(pairs)
    if sigmas < 0:
        return -mean < _max_mean_difference(sigma, error, pairs, -sigmas, alpha)
    return mean > sigmas * sigma + _min_excess(sigma, error, pairs, sigmas, alpha, tails=1)


def rates(law: Callable[..., Arms], num: int = EXPERIMENTS, sign: int = 1) -> dict[str, list[float]]:
    """The share of errors by kind of claim, for each number of pairs; of looks one number."""
    rng = np.random.default_rng(0)
    left, right = law(rng, (1_000_000,))
    gain, spread, level = float((right - left).mean()), float(left.std()), float(left.mean())
    left, unshifted = law(rng, (num, max(PAIRS)))
    found: dict[str, list[float]] = {}
    for kind, improvement in (("not_worse", -abs(gain)), ("better", abs(gain))):
        right = unshifted + sign * improvement - gain
        for pairs in PAIRS:
            of = left[:, :pairs], right[:, :pairs]
            # A loss above the margin is an improvement of the baseline over the treatment
            swapped = of[1], of[0]
            apart = welch_tail(sign * of[1], sign * rng.permuted(of[0], axis=0) + improvement)
            row = {
                f"{kind} passes": np.mean(exceeds(*of, improvement, 1.0, sign) < ALPHA),
                f"{kind} passes, sigmas": np.mean(exceeds_sigmas(*of, improvement / spread, sign)),
                f"{kind} passes, % of level": np.mean(exceeds(*of, improvement / level, of[0], sign) < ALPHA),
                f"{kind} passes, unpaired": np.mean(apart < ALPHA),
                f"{kind} fails": np.mean(exceeds(*swapped, -improvement, 1.0, sign) < ALPHA),
                f"{kind} fails, sigmas": np.mean(exceeds_sigmas(*of, -improvement / spread, -sign)),
            }
            for name, rate in row.items():
                found.setdefault(name, []).append(float(rate))
        nominal = interim_level(LOOKS)
        passes = [exceeds(left[:, :n], right[:, :n], improvement, 1.0, sign) < nominal for n in LOOKS]
        found[f"{kind} passes at an interim analysis"] = [float(np.mean(np.any(passes, axis=0)))]
    return found


def shared_shock_rates(num: int = EXPERIMENTS) -> dict[str, list[float]]:
    """The share of false matches and mismatches if all differences of an experiment share a shock.

    Differences are normal with sd 1 about the margin, plus one normal number of sd SHOCK for all pairs of an
    experiment. The mean over experiments is the margin; more pairs do not average the shock.
    """
    rng = np.random.default_rng(2)
    differences = 3 + rng.standard_normal((num, max(PAIRS))) + SHOCK * rng.standard_normal((num, 1))
    found: dict[str, list[float]] = {"false match": [], "false mismatch": []}
    for pairs in PAIRS:
        arms = np.zeros((num, pairs)), differences[:, :pairs]
        found["false match"].append(float(np.mean(tost(*arms, 3.0) < ALPHA)))
        found["false mismatch"].append(float(np.mean(beyond(*arms, 3.0) < ALPHA - 0.01)))
    return found


def check() -> None:
    """That what is vectorised here is what the verdict computes."""
    left, right = normal(np.random.default_rng(1), (50, 5))
    for sign in (1, -1):
        for share in (-0.7, 0.0, 0.4):
            passes = exceeds(left, right, share, 1.0, sign)
            relative = exceeds(left, right, share / 10, left, sign)
            in_sigmas = exceeds_sigmas(left, right, share, sign)
            several = zip(left, right, passes, relative, in_sigmas, strict=True)
            for index, (one, other, p_value, p_relative, shown) in enumerate(several):
                found = improvement_test(one, other, share, sign=sign)
                assert np.isclose(found.p_above, p_value) and np.isclose(found.p_below, 1 - p_value)
                assert (found.bound > share) == (p_value < ALPHA)
                found = improvement_test(one, other, share / 10, yardstick=one, sign=sign)
                assert np.isclose(found.p_above, p_relative)
                assert (found.bound > share / 10) == (p_relative < ALPHA)
                found = sigma_improvement_test(one, other, share, sign=sign)
                assert (found.p_above < ALPHA) == shown and (found.bound > share) == shown
                found = improvement_test(one, other[:4], share, sign=sign, paired=False)
                of = sign * right[index : index + 1, :4], sign * left[index : index + 1] + share
                assert np.isclose(found.p_above, welch_tail(*of)[0])


def main() -> None:
    check()
    print(f"{EXPERIMENTS:,} experiments a cell; {', '.join(map(str, PAIRS))} pairs\n")
    kinds: dict[str, list[list[Any]]] = {}
    for (name, law), sign in product(LAWS.items(), (1, -1)):
        label = f"{name}, {'higher' if sign > 0 else 'lower'} is better"
        for kind, row in rates(law, sign=sign).items():
            kinds.setdefault(kind, []).append([label, *row])
    for kind, rows in kinds.items():
        print_table(kind, PAIRS if len(rows[0]) > 2 else ["rate"], rows)
    shocks = ([kind, *row] for kind, row in shared_shock_rates().items())
    print_table(f"a shock of {SHOCK} sd of a difference that all pairs share", PAIRS, shocks)


if __name__ == "__main__":
    main()
