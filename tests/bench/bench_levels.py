"""Error rates at the edges of what the tests assume, before and after each rule (error-rates.md).

python -m tests.bench.bench_levels

Metrics of few distinct values, margins in sigmas of a baseline that is not normal, limits on skewed values,
two runs of an arm, and runs that fail at random. "Before" is the same test without the rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abrun.logs.recorded.experiment import RecordedRun
from abrun.recipe.claims import Claim
from abrun.runs.layout import RunName
from abrun.stats.equivalence import equivalence_test
from abrun.stats.series import Series
from abrun.verdict.skewness import ARMS, DIFFERENCES, find_skew
from abrun.verdict.summaries import find_resolution
from tests.bench.bench_verdict import beyond, tail, tost, welch_beyond, welch_equivalence
from tests.bench.common import print_table

PAIRS = (3, 5, 8, 10)
ALPHA, ALPHA_DIFFERENCE = 0.05, 0.04
MARGIN = 0.05
Floats = NDArray[np.float64]
Rates = dict[str, list[tuple[float, float]]]  # by kind of error: before and after, for each of PAIRS


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Validations of both arms on few prompts, of which the last `window` are claimed on."""

    number: int
    digits: int | None = None  # of the log; None: all
    window: int = 1
    stay: float = 0.0  # the share of answers that stay from a validation to the next, in the window
    alike: float = 0.9  # the share of answers that both arms have in common

    def curves(self, rng: np.random.Generator, num_pairs: int, lost: float) -> tuple[Floats, Floats]:
        """Accuracies [P, V] that rise from 0.1 to 0.75; the treatment then loses a share of all prompts."""
        before = 4
        chances = np.concatenate([np.linspace(0.1, 0.7, before), np.full(self.window, 0.75)])
        size = (num_pairs, len(chances), self.number)
        left, other = (self._persisting(rng.random(size) < chances[:, None], rng, before) for _ in range(2))
        right = np.where(self._persisting(rng.random(size) < self.alike, rng, before), left, other)
        right[:, before:] &= rng.random((num_pairs, 1, self.number)) >= lost / 0.75
        arms = left.mean(axis=-1), right.mean(axis=-1)
        return (
            arms if self.digits is None else (np.round(arms[0], self.digits), np.round(arms[1], self.digits))
        )

    def _persisting(self, answers: NDArray[np.bool_], rng, before: int) -> NDArray[np.bool_]:
        for step in range(before + 1, answers.shape[1]):
            same = rng.random((answers.shape[0], answers.shape[2])) < self.stay
            answers[:, step] = np.where(same, answers[:, step - 1], answers[:, step])
        return answers

    def old_step(self) -> float:
        """The step before the rule: none of rounded values, and of k validations a k-th."""
        rounded = self.digits is not None and round(1 / self.number, self.digits) != 1 / self.number
        return 0.0 if rounded else 1 / self.number / self.window

    def rates(self, num: int, pairs: Sequence[int] = PAIRS) -> Rates:
        """False matches and mismatches at the margin, and true matches of equal arms."""
        claim = Claim(metric="validation/accuracy", margin=MARGIN)
        found: Rates = {"false match": [], "false mismatch": [], "match of equal arms": []}
        for num_pairs in pairs:
            rng = np.random.default_rng([self.number, self.window, num_pairs])
            for lost, kinds in ((MARGIN, ("false match", "false mismatch")), (0.0, ("match of equal arms",))):
                counts = np.zeros((2, 2))
                for _ in range(num):
                    left, right = self.curves(rng, num_pairs, lost)
                    window = (right - left)[:, -self.window :]
                    for rule, step in enumerate(
                        (self.old_step(), find_resolution(_runs(left, right), claim, window))
                    ):
                        summed = left[:, -self.window :].mean(axis=1), right[:, -self.window :].mean(axis=1)
                        test = equivalence_test(*summed, MARGIN, resolution=step)
                        counts[rule] += (test.equivalent, test.p_beyond < ALPHA_DIFFERENCE)
                for kind, errors in zip(kinds, (counts / num).T, strict=False):
                    found[kind].append((errors[0], errors[1]))
        return found


def _runs(*arms: Floats) -> list[RecordedRun]:
    return [
        RecordedRun(
            name=RunName(arm=name, seed=seed),
            place="simulated",
            status="finished",
            metrics={"validation/accuracy": Series(np.arange(len(values)), values)},
        )
        for name, arm in zip("ab", arms, strict=True)
        for seed, values in enumerate(arm)
    ]


FEW_PROMPTS = {
    "8 prompts, 2 digits": Prompts(number=8, digits=2),
    "12 prompts, 3 digits": Prompts(number=12, digits=3),
    "24 prompts, 3 digits": Prompts(number=24, digits=3),
    "32 prompts, 2 digits": Prompts(number=32, digits=2),
    "8 prompts, 4 validations, the same answers": Prompts(number=8, window=4, stay=1.0),
    "8 prompts, 10 validations, the same answers": Prompts(number=8, window=10, stay=1.0),
    "8 prompts, 4 validations, 90 % of answers stay": Prompts(number=8, window=4, stay=0.9),
    "8 prompts, 4 validations, answers independent": Prompts(number=8, window=4),
    "8 prompts, 10 validations, answers independent": Prompts(number=8, window=10),
}


# --- margins in sigmas, of baselines whose seeds are not normal; the differences are ---

BASELINES: dict[str, Callable[..., Floats]] = {
    "normal": lambda rng, size: rng.standard_normal(size),
    "saturating accuracy": lambda rng, size: 1 - np.exp(-2.5 * np.exp(0.5 * rng.standard_normal(size))),
    "heavy-tailed (t, 3)": lambda rng, size: rng.standard_t(3, size),
    "skewed (exponential)": lambda rng, size: rng.exponential(1.0, size),
    "one seed in ten fails": lambda rng, size: rng.standard_normal(size) - 10 * (rng.random(size) < 0.1),
}


def sigma_rates(law: Callable[..., Floats], num: int, pairs: Sequence[int] = PAIRS) -> Rates:
    """False matches and mismatches at one sigma; then the share of each that is warned of: by the differences
    alone, and by the baseline's seeds too.
    """
    sigma = float(law(np.random.default_rng(1), 2_000_000).std())
    found: Rates = {"false match": [], "false mismatch": [], "warned matches": [], "warned mismatches": []}
    for num_pairs in pairs:
        rng = np.random.default_rng(num_pairs)
        left = law(rng, (num, num_pairs))
        right = left + sigma * (1 + 0.3 * rng.standard_normal(left.shape))
        match, mismatch = (np.array(of) for of in in_sigmas_each(left, right, 1.0))
        least = 0.1 * left.std(axis=1, ddof=1)
        warned = np.array([_warnings(*of) for of in zip(left, right - left, least, strict=True)])
        for kind, wrong in (("match", match), ("mismatch", mismatch)):
            found[f"false {kind}"].append((wrong.mean(), wrong.mean()))
            by_rule = warned[wrong].mean(axis=0) if wrong.any() else np.full(2, np.nan)
            found[f"warned {kind}{'es'}"].append((by_rule[0], by_rule[1]))
    return found


def _warnings(baseline: Floats, differences: Floats, least: float) -> tuple[bool, bool]:
    of_differences = find_skew({DIFFERENCES: differences}, step=0.0, min_sd=least) is not None
    return of_differences, of_differences or find_skew(
        {ARMS[0]: baseline}, step=0.0, min_sd=least
    ) is not None


# --- limits on values that are skewed towards them ---

SKEWED: dict[str, tuple[Callable[..., Floats], float]] = {  # law and its mean
    "exponential": (lambda rng, size: rng.exponential(1.0, size), 1.0),
    "log-normal, sd 1 of the logarithm": (
        lambda rng, size: rng.lognormal(0.0, 1.0, size),
        float(np.exp(0.5)),
    ),
    "log-normal, sd 2": (lambda rng, size: rng.lognormal(0.0, 2.0, size), float(np.exp(2.0))),
    "one pair in ten is far off": (
        lambda rng, size: 0.01 * rng.standard_normal(size) + (rng.random(size) < 0.1),
        0.1,
    ),
}


def limit_rates(
    law: Callable[..., Floats], mean: float, num: int, pairs: Sequence[int] = PAIRS
) -> list[float]:
    """Return how often a limit `below` the true mean is called kept, by the number of pairs."""
    return [float(np.mean(tail(law(np.random.default_rng(n), (num, n)) - mean) < ALPHA)) for n in pairs]


# --- few runs ---

SIZES = ((2, 2), (2, 5), (2, 10), (2, 20), (3, 10), (3, 3), (5, 5))


def welch_rates(sizes: tuple[int, int], ratio: float, num: int) -> Rates:
    """False matches at the margin and false mismatches of equal arms at a small one, of normal arms: the
    second one's sd is `ratio` of the first's. Before: Satterthwaite's freedom, and two runs suffice.
    """
    rng = np.random.default_rng(sizes)
    left, right = rng.standard_normal((num, sizes[0])), ratio * rng.standard_normal((num, sizes[1]))
    margin = 8.0 * np.hypot(1 / np.sqrt(sizes[0]), ratio / np.sqrt(sizes[1]))
    found: Rates = {"false match": [], "false mismatch": []}
    for kind in found:
        rates = []
        for capped in (False, True):
            if kind == "false match":
                wrong = welch_equivalence(left, right + margin, margin, capped=capped) < ALPHA
            else:
                wrong = welch_beyond(left, right, 1e-6, capped=capped) < ALPHA_DIFFERENCE
                wrong &= not capped or min(sizes) > 2
            rates.append(float(wrong.mean()))
        found[kind].append((rates[0], rates[1]))
    return found


def dying_rates(probability: float, num: int, pairs: Sequence[int] = (2, *PAIRS)) -> Rates:
    """False mismatches of equal arms, each of whose runs fails with a probability and ends 0.6 lower."""
    found: Rates = {"false mismatch": []}
    for num_pairs in pairs:
        rng = np.random.default_rng([num_pairs, round(10 * probability)])
        noise = 0.01 * rng.standard_normal((2, num, num_pairs))
        left, right = noise - 0.6 * (rng.random(noise.shape) < probability)
        rate = float(np.mean(beyond(left, right, MARGIN) < ALPHA_DIFFERENCE))
        found["false mismatch"].append((rate, rate if num_pairs > 2 else 0.0))
    return found


def grokking_rates(num: int, pairs: Sequence[int] = (2, *PAIRS)) -> Rates:
    """False matches and mismatches of differences of two outcomes, +-1 and the margin, as likely."""
    found: Rates = {"false match": [], "false mismatch": []}
    for num_pairs in pairs:
        rng = np.random.default_rng(num_pairs)
        left = np.zeros((num, num_pairs))
        right = 4.0 + rng.choice([-1.0, 1.0], left.shape) + 0.1 * rng.standard_normal(left.shape)
        match = float(np.mean(tost(left, right, 4.0) < ALPHA))
        found["false match"].append((match, match))
        rate = float(np.mean(beyond(left, right, 4.0) < ALPHA_DIFFERENCE))
        found["false mismatch"].append((rate, rate if num_pairs > 2 else 0.0))
    return found


def in_sigmas_each(left: Floats, right: Floats, sigmas: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Each experiment's match and mismatch in sigmas."""
    num_pairs = left.shape[1]
    sigma, mean = left.std(axis=1, ddof=1), np.abs((right - left).mean(axis=1))
    error = (right - left).std(axis=1, ddof=1) / np.sqrt(num_pairs)
    freedom = num_pairs - 1
    low, high = (special.chdtri(freedom, level) for level in (ALPHA, 1 - ALPHA_DIFFERENCE))
    reach = np.hypot(
        special.stdtrit(freedom, 1 - ALPHA_DIFFERENCE / 2) * error,
        sigmas * sigma * (np.sqrt(freedom / high) - 1),
    )
    room = sigmas * sigma - np.hypot(
        special.stdtrit(freedom, 1 - ALPHA) * error, sigmas * sigma * (1 - np.sqrt(freedom / low))
    )
    return mean < room, mean > sigmas * sigma + reach


def _print(title: str, columns: Sequence[object], rows: dict[str, Rates]) -> None:
    lines = (
        [name, kind, *(f"{old:.3f} {new:.3f}" for old, new in cells)]
        for name, kinds in rows.items()
        for kind, cells in kinds.items()
    )
    print_table(title, ["", *columns], lines)


def main() -> None:
    few = {name: prompts.rates(1000) for name, prompts in FEW_PROMPTS.items()}
    _print("few prompts, margin 0.05; before, after; pairs:", PAIRS, few)
    sigmas = {name: sigma_rates(law, 4000) for name, law in BASELINES.items()}
    _print("1 sigma of a baseline that is not normal; warned of before, after; pairs:", PAIRS, sigmas)
    limits = ([name, *limit_rates(*law, 100_000)] for name, law in SKEWED.items())
    print_table("limit at the true mean; pairs:", PAIRS, limits)
    for ratio in (1.0, 0.33):
        unpaired = {f"{one}+{other}": welch_rates((one, other), ratio, 100_000) for one, other in SIZES}
        _print(f"unpaired, sd ratio {ratio}; before, after", ["rate"], unpaired)
    dying = {f"runs die with probability {p}": dying_rates(p, 100_000) for p in (0.5, 0.3, 0.1)}
    _print("equal arms whose runs die; before, after; pairs:", (2, *PAIRS), dying)
    _print("two outcomes; before, after; pairs:", (2, *PAIRS), {"two outcomes": grokking_rates(100_000)})


if __name__ == "__main__":
    main()
