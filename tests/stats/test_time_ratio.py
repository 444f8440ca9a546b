"""Rank tests of times to a target: null distributions, cross-checks, unfavourable ends, and level."""

import math
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from abrun.stats.time_ratio import TimeRatioResult, min_sample_size, sample_size, time_ratio_test

LIMIT, TARGET = 1.1, 0.6
Times = NDArray[np.float64]


def exactly(times: Sequence[float] | Times) -> tuple[Times, Times]:
    """Times that are known to the last digit."""
    by = np.asarray(times, np.float64)
    return by * (1 - 1e-13), by


def between(*ranges: tuple[float, float]) -> tuple[Times, Times]:
    low, high = np.array(ranges).T
    return low, high


def signed_rank_p(differences: Sequence[float]) -> float:
    """P(as few or fewer positive Walsh averages), over all signs of the ranks."""
    count = sum(differences[i] + differences[j] > 0 for i in range(len(differences)) for j in range(i + 1))
    sums = [sum(r for r, s in enumerate(signs, 1) if s) for signs in product((0, 1), repeat=len(differences))]
    return sum(total <= count for total in sums) / len(sums)


def rank_sum_p(baseline: Sequence[float], treatment: Sequence[float]) -> float:
    """P(as few or fewer pairs with the treated run later), over all arrangements."""
    count = sum(t > b for t in treatment for b in baseline)
    size = len(baseline) + len(treatment)
    totals = []
    for treated in combinations(range(size), len(treatment)):
        totals.append(sum(t > b for t in treated for b in set(range(size)) - {*treated}))
    return sum(total <= count for total in totals) / len(totals)


@pytest.mark.parametrize("num", [1, 3, 4, 5, 7])
def test_p_values_are_those_of_all_permutations(num: int) -> None:
    rng = np.random.default_rng(num)
    for _ in range(20):
        before = rng.lognormal(4, 0.3, num)
        after = before * rng.lognormal(0, 0.2, num)
        result = time_ratio_test(exactly(before), exactly(after), LIMIT)
        differences = (np.log(after / before) - math.log(LIMIT)).tolist()
        assert result.p_below == pytest.approx(signed_rank_p(differences))
        assert result.p_above == pytest.approx(signed_rank_p([-d for d in differences]))
        shorter = after[: max(1, num - 2)]
        unpaired = time_ratio_test(exactly(before), exactly(shorter), LIMIT, paired=False)
        assert unpaired.p_below == pytest.approx(rank_sum_p((before * LIMIT).tolist(), shorter.tolist()))


@pytest.mark.parametrize("num", [12, 40, 90])
def test_p_values_agree_with_scipy(num: int) -> None:
    rng = np.random.default_rng(num)
    before = rng.lognormal(4, 0.3, num)
    after = before * rng.lognormal(0.05, 0.2, num)
    ratios = np.log(after / before) - math.log(LIMIT)
    for paired, expected in [
        (True, stats.wilcoxon(ratios, alternative="less")[1]),
        (False, stats.mannwhitneyu(np.log(after / LIMIT), np.log(before), alternative="less")[1]),
    ]:
        result = time_ratio_test(exactly(before), exactly(after), LIMIT, paired=paired)
        assert result.p_below == pytest.approx(expected, rel=2e-2, abs=1e-9)  # exact against normal


def test_the_interval_is_the_set_of_limits_that_are_not_rejected() -> None:
    rng = np.random.default_rng(1)
    for paired, num in product((True, False), (5, 8, 11)):
        before, after = (rng.integers(8, 14, num).astype(np.float64) for _ in range(2))
        arms = (before - 1, before), (after - 1, after)
        low, high = time_ratio_test(*arms, 1.0, paired=paired).interval
        for limit in np.exp(rng.uniform(-1, 1, 30)):
            result = time_ratio_test(*arms, limit, paired=paired)
            assert (result.is_below, result.is_above) == (high < limit, low > limit)
            assert (result.p_below <= 0.05, result.p_above <= 0.05) == (result.is_below, result.is_above)


def test_times_are_taken_at_their_unfavourable_ends() -> None:
    ties = between(*[(90, 100)] * 5)
    result = time_ratio_test(ties, ties, LIMIT)
    assert result.interval == pytest.approx((0.9, 100 / 90)) and not result.is_below  # 1.11x is open
    assert time_ratio_test(ties, ties, 1.12).is_below
    assert result.estimate == 1
    # a treated run that never reaches the target counts as infinitely slow, a baseline as barely slower
    unreached = between(*[(90, 100)] * 5, (100, math.inf))
    reached = between(*[(90, 100)] * 6)
    assert time_ratio_test(reached, unreached, 1.12).p_below == 14 / 64  # rank 6 of 6
    assert time_ratio_test(unreached, reached, 1.12).p_below == 1 / 64
    assert time_ratio_test(unreached, unreached, 1.12).p_below == 14 / 64
    assert time_ratio_test(between(*[(100, math.inf)] * 6), reached, 1.01).is_below
    assert time_ratio_test(between(*[(100, math.inf)] * 6), reached, 1.01).estimate is None


def test_a_ratio_at_the_limit_counts_against_the_claim() -> None:
    before, after = np.full(5, 100.0), np.full(5, 110.0)
    result = time_ratio_test(exactly(before), exactly(after), LIMIT)
    assert not result.is_below and not result.is_above and result.p_below == 1


def test_smallest_samples() -> None:
    assert [min_sample_size(alpha) for alpha in (0.05, 0.1, 0.025)] == [5, 4, 6]
    assert [min_sample_size(alpha, paired=False) for alpha in (0.05, 0.1, 0.01)] == [3, 3, 5]
    for paired in (True, False):
        num = min_sample_size(paired=paired)
        before, after = exactly(np.full(num, 100.0)), exactly(np.full(num, 50.0))
        assert time_ratio_test(before, after, 1.0, paired=paired).is_below
        smaller = tuple(bound[1:] for bound in before), tuple(bound[1:] for bound in after)
        assert not time_ratio_test(smaller[0], smaller[1], 1.0, paired=paired).is_below  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("baseline", "treatment"),
    [
        (between((1, 2)), between((1, 2), (1, 2))),
        (between((2, 2)), between((1, 2))),
        (between((-1, 2)), between((1, 2))),
        ((np.empty(0), np.empty(0)), (np.empty(0), np.empty(0))),
    ],
)
def test_ranges_that_cannot_be_tested_are_refused(
    baseline: tuple[Times, Times], treatment: tuple[Times, Times]
) -> None:
    with pytest.raises(ValueError, match="expected"):
        time_ratio_test(baseline, treatment, LIMIT)


# --- level: the treatment is slower by exactly the limit, so that both conclusions are errors ---


def draw_speeds(rng: np.random.Generator, kind: str, size: tuple[int, int]) -> Times:
    """How long runs take, over seeds."""
    if kind == "skewed":
        return 0.7 + rng.exponential(0.3, size)
    if kind == "bounded":
        return 1 + 0.4 * (rng.random(size) - 0.5)
    if kind == "two speeds":
        return np.where(rng.random(size) < 0.3, 2.0, 1.0) * np.exp(0.02 * rng.normal(size=size))
    return np.exp(0.15 * rng.normal(size=size))


def simulate_times(
    rng: np.random.Generator, kind: str, size: tuple[int, int], every: int, last: int, prompts: int | None
) -> list[tuple[Times, Times]]:
    """Both arms' times to the target [E, N]: curves that climb to 0.9 and pass it at their latent time."""
    shared = draw_speeds(rng, kind, size)
    grid = np.arange(every, last + 1, every)
    arms = []
    for factor in (1.0, LIMIT):
        latent = 100 * factor * np.sqrt(shared * draw_speeds(rng, kind, size))
        accuracy = 0.9 * (1 - np.exp(-math.log(3) * grid / latent[..., None]))
        if prompts:
            accuracy = rng.binomial(prompts, accuracy) / prompts
        reached = accuracy >= TARGET
        first = grid[reached.argmax(-1)].astype(float)
        is_reached = reached.any(-1)
        arms.append((np.where(is_reached, first - every, last), np.where(is_reached, first, np.inf)))
    return arms


def error_rates(kind: str, num: int, experiments: int, *, paired: bool, **grid: int | None) -> list[float]:
    rng = np.random.default_rng([num, len(kind), paired])
    every, last = grid.get("every") or 1, grid.get("last") or 400
    baseline, treatment = simulate_times(rng, kind, (experiments, num), every, last, grid.get("prompts"))
    results: list[TimeRatioResult] = [
        time_ratio_test(
            (baseline[0][i], baseline[1][i]), (treatment[0][i], treatment[1][i]), LIMIT, paired=paired
        )
        for i in range(experiments)
    ]
    return [float(np.mean([r.is_below for r in results])), float(np.mean([r.is_above for r in results]))]


def test_level_at_five_pairs() -> None:
    rates = error_rates("normal", 5, 300, paired=True) + error_rates("skewed", 5, 300, paired=True, last=110)
    assert max(rates) <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / 300)
    assert sum(rates) > 0


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("kind", ["normal", "skewed", "bounded", "two speeds"])
@pytest.mark.parametrize(
    "grid",
    [
        {"every": 1, "last": 400},
        {"every": 1, "last": 110},  # a third of the runs do not get there
        {"every": 10, "last": 120},
        {"every": 25, "last": 400},  # most pairs tie
        {"every": 10, "last": 400, "prompts": 64},
    ],
)
def test_level(paired: bool, kind: str, grid: dict[str, int]) -> None:
    experiments = 400
    for num in (3, 4, 5, 8, 10):
        rates = error_rates(kind, num, experiments, paired=paired, **grid)
        assert max(rates) <= 0.05 + 2.5 * math.sqrt(0.05 * 0.95 / experiments), (num, rates)


@pytest.mark.parametrize(("paired", "effect"), [(True, 0.8), (False, 1.0)])
def test_the_sample_size_has_its_power(paired: bool, effect: float) -> None:
    rng = np.random.default_rng(3)
    # the mean of two pairs, or the difference of two runs, of log ratios with sd 1
    share = stats.norm.cdf(effect * math.sqrt(2) if paired else effect / math.sqrt(2))
    num = sample_size(float(share), paired=paired)
    assert num
    shown = []
    for _ in range(200):
        before = rng.lognormal(4, 0.1, num)
        after = np.exp(rng.normal(-0.1 * effect, 0.1, num)) * (before if paired else math.exp(4))
        shown.append(time_ratio_test(exactly(before), exactly(after), 1.0, paired=paired).is_below)
    assert 0.72 < np.mean(shown) < 0.97
    assert sample_size(0.5, paired=paired) is None and sample_size(1.0, paired=paired) == (9 if paired else 5)
