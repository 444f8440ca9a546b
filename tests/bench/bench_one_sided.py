"""Error rates of one-sided claims, simulated at their edge: prints the table of error-rates.md.

python -m tests.bench.bench_one_sided

The laws are those of bench_verdict. The true difference is exactly the margin, so that every pass of
`not_worse` or `better`, and every failure, is an error. Each law is read in both directions (higher is
better, lower is better): one makes the difference a loss, the other a gain.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from abrun.stats.one_sided import improvement_test
from abrun.stats.sequential import interim_level
from abrun.stats.sigma_margin import _max_mean_difference, _min_excess, sigma_improvement_test
from tests.bench.bench_verdict import ALPHA, LAWS, LOOKS, PAIRS, Arms, normal, tail, welch_tail

EXPERIMENTS = 20_000


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


def rates(law: Callable[..., Arms], num: int = EXPERIMENTS) -> dict[str, list[float]]:
    """The share of errors by kind of claim, for each number of pairs; of looks one number."""
    rng = np.random.default_rng(0)
    left, right = law(rng, (1_000_000,))
    gain, spread, level = float((right - left).mean()), float(left.std()), float(left.mean())
    left, right = law(rng, (num, max(PAIRS)))
    found: dict[str, list[float]] = {}
    for sign in (1, -1):
        improvement = sign * gain  # below 0: a loss
        kind = "better" if improvement > 0 else "not_worse"
        for pairs in PAIRS:
            of = left[:, :pairs], right[:, :pairs]
            swapped = (
                of[1],
                of[0],
            )  # a loss above the margin is an improvement of the baseline over the treatment
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
    kinds: dict[str, list[str]] = {}
    for name, law in LAWS.items():
        for kind, row in rates(law).items():
            kinds.setdefault(kind, []).append(f"| {name} | {' | '.join(f'{rate:.3f}' for rate in row)} |")
    for kind, lines in kinds.items():
        columns = len(lines[0].split("|")) - 3
        head = " | ".join(map(str, PAIRS)) if columns == len(PAIRS) else "rate"
        print(f"\n**{kind}**\n\n| | {head} |\n|---|{'---|' * columns}")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
