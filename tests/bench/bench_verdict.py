"""Error rates of every kind of claim, simulated at its edge: prints the table of error-rates.md.

python -m tests.bench.bench_verdict

Each law draws the window summaries of paired arms whose true difference is exactly the margin (or whose level
is exactly the limit): every "match", and every "mismatch", is then an error. The curves are those a training
has: bounded, saturating, heavy-tailed, spiky, seeds of different speed; the last two break what the t-test
assumes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.stats.equivalence import equivalence_test, limit_test
from abrun.stats.sequential import interim_level
from abrun.stats.sigma_margin import _max_mean_difference, _min_excess, sigma_test
from tests.bench.common import print_table

EXPERIMENTS = 20_000
PAIRS = (3, 4, 5, 8, 10)
LOOKS = (4, 7, 10)
STAGES = ((3, 8, 12), (4, 8, 12), tuple(range(3, 13)))  # of launch --until-decided; and every pair
UNPAIRED = ((3, 3), (5, 4), (3, 10), (10, 3), (10, 10))  # runs of the baseline, of the treatment
ALPHA = 0.05
Arms = tuple[NDArray[np.float64], NDArray[np.float64]]  # baseline, treatment: [N, P]


def paired(rng: np.random.Generator, size: tuple[int, ...], rho: float) -> Arms:
    """Standard normal numbers of both arms, correlated over the seeds that they share."""
    shared = rng.standard_normal(size)
    own = rng.standard_normal((2, *size))
    left, right = np.sqrt(rho) * shared + np.sqrt(1 - rho) * own
    return left, right


def normal(rng, size, rho=0.8) -> Arms:
    left, right = paired(rng, size, rho)
    return 10 + left, 11 + right


def noisier(rng, size) -> Arms:
    left, right = paired(rng, size, 0.0)
    return 10 + left, 11 + 3 * right


def bounded(rng, size) -> Arms:
    """An accuracy over 200 prompts, near 0.9."""
    left, right = paired(rng, size, 0.6)
    chances = special.expit(2.2 + 0.5 * left), special.expit(1.9 + 0.5 * right)
    return rng.binomial(200, chances[0]) / 200, rng.binomial(200, chances[1]) / 200


def saturating(rng, size) -> Arms:
    """1 - exp(-speed) at the end of the run: most seeds near their ceiling."""
    left, right = paired(rng, size, 0.7)
    return 1 - np.exp(-2.5 * np.exp(0.3 * left)), 1 - np.exp(-2.0 * np.exp(0.3 * right))


def heavy_tailed(rng, size) -> Arms:
    shared, own = rng.standard_normal(size), rng.standard_t(3, (2, *size))
    return 10 + shared + 0.5 * own[0], 11 + shared + 0.5 * own[1]


def spiky(rng, size) -> Arms:
    """The median over twelve steps of which one in ten is a spike."""
    left, right = paired(rng, size, 0.8)
    steps = np.exp(0.3 * rng.standard_normal((2, *size, 12)))
    steps *= np.where(rng.random((2, *size, 12)) < 0.1, 20, 1)
    medians = np.log(np.median(steps, axis=-1))
    return 10 + left + medians[0], 11 + right + medians[1]


def different_speed(rng, size) -> Arms:
    """Logistic curves in the middle of their climb: a seed is early or late, the treatment later."""
    left, right = paired(rng, size, 0.8)
    return special.expit(1.0 + 1.5 * left), special.expit(0.5 + 1.5 * right)


def exponential(rng, size) -> Arms:
    left, _ = paired(rng, size, 0.0)
    return 10 + left, 12 + left - rng.exponential(1.0, size)


def one_in_ten_fails(rng, size) -> Arms:
    left, right = paired(rng, size, 0.9)
    return 10 + left, 10 + right - 10 * (rng.random(size) < 0.1)


LAWS: dict[str, Callable[..., Arms]] = {
    "normal, correlation .8": normal,
    "normal, treatment's sd 3 x": noisier,
    "bounded (accuracy)": bounded,
    "saturating": saturating,
    "heavy-tailed (t, 3)": heavy_tailed,
    "spiky, by the median": spiky,
    "seeds of different speed": different_speed,
    "skewed (exponential)": exponential,
    "one seed in ten fails": one_in_ten_fails,
}


def far(rng, size) -> Arms:
    left, right = paired(rng, size, 0.0)
    return 20 + left, 24 + right


def far_and_noisier(rng, size) -> Arms:
    left, right = paired(rng, size, 0.0)
    return 40 + left, 52 + 3 * right


# Where a match is within reach of 3 + 3 runs: the level shows.
WIDE: dict[str, Callable[..., Arms]] = {
    "normal, margin 4 sd": far,
    "treatment's sd 3 x, margin 12 sd": far_and_noisier,
}


def tail(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """As in abrun.stats.equivalence, over many experiments [N, P]."""
    sd = np.maximum(values.std(axis=1, ddof=1), 1e-300)
    return special.stdtr(values.shape[1] - 1, values.mean(axis=1) * np.sqrt(values.shape[1]) / sd)


def tost(left, right, margin: float, yardstick: float | NDArray[np.float64] = 1.0) -> NDArray[np.float64]:
    return np.maximum(tail(right - left - margin * yardstick), tail(left - right - margin * yardstick))


def beyond(left, right, margin) -> NDArray[np.float64]:
    difference = (right - left) * np.sign((right - left).mean(axis=1, keepdims=True))
    return tail(margin - difference) + tail(-difference - margin)


def in_sigmas(left, right, sigmas) -> tuple[float, float]:
    pairs, difference = left.shape[1], right - left
    sigma, mean = left.std(axis=1, ddof=1), np.abs(difference.mean(axis=1))
    error = difference.std(axis=1, ddof=1) / np.sqrt(pairs)
    reach = np.array(
        [_min_excess(s, e, pairs, sigmas, ALPHA) for s, e in zip(sigma[:5000], error, strict=False)]
    )
    above = mean[:5000] > sigmas * sigma[:5000] + reach
    return float(np.mean(mean < _max_mean_difference(sigma, error, pairs, sigmas, ALPHA))), float(
        above.mean()
    )


def rates(law: Callable[..., Arms], num: int = EXPERIMENTS) -> dict[str, list[float]]:
    """The share of errors by kind of claim, for each number of pairs; of looks one number."""
    rng = np.random.default_rng(0)
    left, right = law(rng, (1_000_000,))
    margin, level = abs(float(right.mean() - left.mean())), float(right.mean())
    sigmas, share = margin / float(left.std()), margin / float(left.mean())
    left, right = law(rng, (num, max(PAIRS)))
    found: dict[str, list[float]] = {}
    for pairs in PAIRS:
        of = left[:, :pairs], right[:, :pairs]
        equivalent, exceeded = in_sigmas(*of, sigmas)
        row = {
            "match, absolute margin": np.mean(tost(*of, margin) < ALPHA),
            "match, sigmas of the baseline": equivalent,
            "match, % of the level": np.mean(tost(*of, share, of[0]) < ALPHA),
            "mismatch, absolute margin": np.mean(beyond(*of, margin) < ALPHA),
            "mismatch, sigmas": exceeded,
            "limit claimed": np.mean(tail(of[1] - level) < ALPHA),
            "limit called broken": np.mean(tail(level - of[1]) < ALPHA),
        }
        for kind, rate in row.items():
            found.setdefault(kind, []).append(float(rate))
    nominal = interim_level(LOOKS)
    looks = [tost(left[:, :n], right[:, :n], margin) < nominal for n in LOOKS]
    found[f"match at looks {', '.join(map(str, LOOKS))}"] = [float(np.mean(np.any(looks, axis=0)))]
    exceeded = [beyond(left[:, :n], right[:, :n], margin) < nominal for n in LOOKS]
    found["mismatch at looks"] = [float(np.mean(np.any(exceeded, axis=0)))]
    return found


def stopped(law: Callable[..., Arms], looks: tuple[int, ...], num: int = EXPERIMENTS) -> list[float]:
    """Of experiments that stop at the first look which decides, at the edge of the margin: the shares of
    matches, of mismatches and of matches in sigmas; and the pairs they took.
    """
    rng = np.random.default_rng(0)
    left, right = law(rng, (1_000_000,))
    margin, sigmas = abs(float(right.mean() - left.mean())), abs(float((right - left).mean() / left.std()))
    left, right = law(rng, (num, looks[-1]))
    level, level_beyond = interim_level(looks), interim_level(looks, ALPHA - 0.01)
    decided = np.full(num, "open    ")
    took = np.full(num, looks[-1])
    in_sigmas = np.zeros(num, bool)
    for n in looks:
        of = left[:, :n], right[:, :n]
        is_open = decided == "open    "
        beyond_it = is_open & (beyond(*of, margin) < level_beyond)
        within = is_open & ~beyond_it & (tost(*of, margin) < level)
        decided[beyond_it], decided[within] = "mismatch", "match"
        took[beyond_it | within] = n
        difference = of[1] - of[0]
        error = difference.std(axis=1, ddof=1) / np.sqrt(n)
        room = _max_mean_difference(of[0].std(axis=1, ddof=1), error, n, sigmas, level)
        in_sigmas |= np.abs(difference.mean(axis=1)) < room
    shares = [decided == "match", decided == "mismatch", in_sigmas, took]
    return [float(np.mean(one)) for one in shares]


def of_stopping(looks: tuple[int, ...], margin: float, shift: float) -> tuple[float, float]:
    """The pairs taken by an experiment of differences of sd 1 about `shift`, and how often it is right."""
    differences = shift + np.random.default_rng(1).standard_normal((EXPERIMENTS, looks[-1]))
    none, is_open = np.zeros_like(differences), np.ones(EXPERIMENTS, bool)
    took, right = np.full(EXPERIMENTS, looks[-1]), np.zeros(EXPERIMENTS, bool)
    for n in looks:
        of = none[:, :n], differences[:, :n]
        matches = is_open & (tost(*of, margin) < interim_level(looks))
        differs = is_open & (beyond(*of, margin) < interim_level(looks, ALPHA - 0.01))
        took[matches | differs] = n
        right |= matches if shift < margin else differs
        is_open &= ~(matches | differs)
    return float(took.mean()), float(right.mean())


def welch_tail(left, right, capped: bool = True) -> NDArray[np.float64]:
    """Of so small a mean(right) - mean(left), over many experiments [N, M] and [N, K]."""
    parts = [one.var(axis=1, ddof=1) / one.shape[1] for one in (left, right)]
    error, freedom = np.sqrt(np.maximum(sum(parts), 1e-300)), _freedom(left, right, capped)
    return special.stdtr(freedom, (right.mean(axis=1) - left.mean(axis=1)) / error)


def _freedom(left, right, capped: bool = True) -> NDArray[np.float64]:
    parts = [one.var(axis=1, ddof=1) / one.shape[1] for one in (left, right)]
    weights = [one / np.maximum(sum(parts), 1e-300) for one in parts]
    sizes = left.shape[1], right.shape[1]
    shares = sum(weight**2 / (size - 1) for weight, size in zip(weights, sizes, strict=True))
    freedom = 1 / np.maximum(shares, 1 / sum(sizes))  # arms without any spread
    return np.minimum(freedom, 2 * (min(sizes) - 1)) if capped else freedom


def welch_equivalence(left, right, margin, yardstick=None, capped: bool = True) -> NDArray[np.float64]:
    unit = np.ones_like(left) if yardstick is None else yardstick
    ends = welch_tail(left + margin * unit, right, capped), welch_tail(right, left - margin * unit, capped)
    return np.maximum(*ends)


def welch_beyond(left, right, margin, capped: bool = True) -> NDArray[np.float64]:
    rises = right.mean(axis=1) >= left.mean(axis=1)
    exceeds = welch_tail(right, left + margin, capped), welch_tail(right, left - margin, capped)
    falls = welch_tail(left - margin, right, capped), welch_tail(left + margin, right, capped)
    return np.where(rises, sum(exceeds), sum(falls))


def welch_in_sigmas(left, right, sigmas) -> tuple[float, float]:
    parts = [one.var(axis=1, ddof=1) / one.shape[1] for one in (left, right)]
    error, freedom = np.sqrt(sum(parts)), _freedom(left, right)
    sigma, mean = left.std(axis=1, ddof=1), np.abs(right.mean(axis=1) - left.mean(axis=1))
    several = zip(sigma[:5000], error, freedom, strict=False)
    reach = np.array([_min_excess(s, e, left.shape[1], sigmas, ALPHA, f) for s, e, f in several])
    equivalent = mean < _max_mean_difference(sigma, error, left.shape[1], sigmas, ALPHA, freedom)
    return float(np.mean(equivalent)), float(np.mean(mean[:5000] > sigmas * sigma[:5000] + reach))


def unpaired_rates(law: Callable[..., Arms], num: int = EXPERIMENTS) -> dict[str, list[float]]:
    """The same of independent runs, for each of UNPAIRED: no seed is in both arms."""
    rng = np.random.default_rng(1)
    left, right = law(rng, (1_000_000,))
    margin = abs(float(right.mean() - left.mean()))
    sigmas, share = margin / float(left.std()), margin / float(left.mean())
    found: dict[str, list[float]] = {}
    for sizes in UNPAIRED:
        of = law(rng, (num, sizes[0]))[0], law(rng, (num, sizes[1]))[1]
        equivalent, exceeded = welch_in_sigmas(*of, sigmas)
        row = {
            "unpaired: match, absolute margin": np.mean(welch_equivalence(*of, margin) < ALPHA),
            "unpaired: match, sigmas of the baseline": equivalent,
            "unpaired: match, % of the level": np.mean(welch_equivalence(*of, share, of[0]) < ALPHA),
            "unpaired: mismatch, absolute margin": np.mean(welch_beyond(*of, margin) < ALPHA),
            "unpaired: mismatch, sigmas": exceeded,
        }
        for kind, rate in row.items():
            found.setdefault(kind, []).append(float(rate))
    return found


def check() -> None:
    """That what is vectorised here is what the verdict computes."""
    left, right = normal(np.random.default_rng(1), (50, 5))
    for one, other, p, q in zip(left, right, tost(left, right, 1.0), beyond(left, right, 1.0), strict=True):
        found = equivalence_test(one, other, 1.0)
        assert np.allclose((found.p_tost, found.p_beyond), (p, min(q, 1)))
        assert np.isclose(limit_test(other, 11.0).p_below, tail(other[None] - 11.0)[0])
        error = (other - one).std(ddof=1) / np.sqrt(5)
        room = _max_mean_difference(one.std(ddof=1), error, 5, 1.0, ALPHA)
        assert sigma_test(one, other, 1.0).equivalent == bool(abs((other - one).mean()) < room)
    right = right[:, :4]
    exceeds = welch_beyond(left, right, 1.0)
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        found, of = (
            equivalence_test(one, other, 1.0, paired=False),
            (left[index : index + 1], right[index : index + 1]),
        )
        assert np.allclose(
            (found.p_tost, found.p_beyond), (welch_equivalence(*of, 1.0)[0], min(exceeds[index], 1))
        )
        share = equivalence_test(one, other, 0.1, yardstick=one, paired=False)
        assert np.isclose(share.p_tost, welch_equivalence(*of, 0.1, of[0])[0])
        assert sigma_test(one, other, 1.0, paired=False).equivalent == bool(welch_in_sigmas(*of, 1.0)[0])


def main() -> None:
    check()
    print(f"{EXPERIMENTS:,} experiments a cell; 3, 4, 5, 8, 10 pairs\n")
    print("Unpaired: " + ", ".join(f"{one} and {other}" for one, other in UNPAIRED) + " runs\n")
    kinds: dict[str, list[list[Any]]] = {}
    for name, law in (LAWS | WIDE).items():
        for kind, row in ((rates(law) if name in LAWS else {}) | unpaired_rates(law)).items():
            kinds.setdefault(kind, []).append([name, *row])
    for kind, rows in kinds.items():
        sizes = [f"{one}+{other}" for one, other in UNPAIRED] if kind.startswith("unpaired") else PAIRS
        print_table(kind, sizes if len(rows[0]) > 2 else ["rate"], rows)
    print_table(
        "stopped at the first look that decides: match, mismatch, match in sigmas, pairs taken",
        ["every pair from 3 to 12" if len(looks) > 3 else looks for looks in STAGES],
        (
            [name, *(" ".join(f"{one:.3f}" for one in stopped(law, looks)) for looks in STAGES)]
            for name, law in LAWS.items()
        ),
    )
    truths = ((1, 0), (1.5, 0), (2.5, 0), (1, 2), (1, 3))
    print_table(
        "what stopping costs and saves: expected pairs, P(the right verdict), of margin and difference",
        truths,
        (
            [looks, *("{:.1f}, {:.2f}".format(*of_stopping(looks, *truth)) for truth in truths)]
            for looks in ((12,), (6, 12), (4, 8, 12), (4, 6, 8, 10, 12), tuple(range(4, 13)))
        ),
    )


if __name__ == "__main__":
    main()
