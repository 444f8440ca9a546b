"""Exact tests of outcomes that are 0 or 1, against enumeration, scipy and statsmodels."""

import math

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats import proportion

from abrun.stats.equivalence import equivalence_test, limit_test
from abrun.stats.one_sided import improvement_test
from abrun.stats.rates import (
    Outcomes,
    are_outcomes,
    fisher_p,
    min_runs_of_difference,
    min_runs_of_rate,
    rate_interval,
    rate_p,
    runs_to_show_rate,
)


@pytest.mark.parametrize(("num_successes", "num_values"), [(0, 5), (3, 10), (17, 20), (20, 20)])
def test_one_rate_is_that_of_the_binomial_test(num_successes, num_values):
    for limit in (0.1, 0.5, 0.85):
        expected = [
            stats.binomtest(num_successes, num_values, limit, alternative=side).pvalue
            for side in ("less", "greater")
        ]
        assert rate_p(num_successes, num_values, limit) == pytest.approx(expected, rel=1e-9)
    assert rate_p(num_successes, num_values, 1.2) == (0.0, 1.0)
    assert rate_p(num_successes, num_values, -0.2) == (1.0, 0.0)
    interval = rate_interval(num_successes, num_values, 0.05)
    clopper_pearson = proportion.proportion_confint(num_successes, num_values, alpha=0.1, method="beta")
    assert interval == pytest.approx(clopper_pearson, abs=1e-9)


def enumerated_p(outcomes: Outcomes, limit: float) -> float:
    """The largest probability of results as extreme, with loops over them and the unknown rate."""
    m, n, paired = outcomes.num_baseline, outcomes.num_treatment, outcomes.paired
    results = [(x, y) for x in range(m + 1) for y in range(n + 1) if not paired or x + y <= n]
    x_values, y_values = (np.array(values) for values in zip(*results, strict=True))
    scores = outcomes._score(x_values, y_values, limit)
    observed = scores[results.index((outcomes.x, outcomes.y))]
    extreme = [result for result, score in zip(results, scores, strict=True) if score <= observed + 1e-9]
    largest = 0.0
    high = (1 - limit) / 2 if paired else min(1.0, 1 - limit)
    for q in np.linspace(max(0.0, -limit), high, 400):
        rates = [q, max(q + limit, 0.0)]
        if paired:
            rates.append(max(0.0, 1 - sum(rates)))
            p = sum(stats.multinomial.pmf([x, y, n - x - y], n, np.array(rates)) for x, y in extreme)
        else:
            p = sum(stats.binom.pmf(x, m, q) * stats.binom.pmf(y, n, min(rates[1], 1.0)) for x, y in extreme)
        largest = max(largest, float(p))
    return largest


@pytest.mark.parametrize(
    ("x", "y", "m", "n", "paired"),
    [(0, 0, 6, 6, True), (2, 1, 7, 7, True), (4, 0, 5, 5, True), (3, 1, 4, 5, False), (2, 2, 6, 3, False)],
)
def test_the_p_value_is_the_largest_over_the_unknown_rate(x, y, m, n, paired):
    outcomes = Outcomes(x, y, m, n, paired)
    for limit in (-0.2, 0.0, 0.15, 0.4):
        assert outcomes.p_below(limit) == pytest.approx(enumerated_p(outcomes, limit), abs=2e-3)


@pytest.mark.parametrize("limit", [-0.3, 0.0, 0.2])
def test_results_are_ordered_by_the_score_statistic(limit):
    """Its variance is at the most likely rates that differ by the limit, found here by a search."""
    x, y, m, n = 3, 6, 9, 11

    def unpaired(q: float) -> float:
        return -stats.binom.logpmf(x, m, q) - stats.binom.logpmf(y, n, q + limit)  # pyright: ignore

    def paired(q: float) -> float:
        return -(x * math.log(q) + y * math.log(q + limit) + (n - x - y) * math.log(1 - 2 * q - limit))

    def most_likely(loss, high: float) -> float:
        bounds = max(0.0, -limit) + 1e-9, high - 1e-9
        return optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x

    base = most_likely(unpaired, min(1.0, 1 - limit))
    variance = base * (1 - base) / m + (base + limit) * (1 - base - limit) / n
    scores = Outcomes(x, y, m, n, False)._score(np.array([x]), np.array([y]), limit)
    assert scores[0] == pytest.approx((y / n - x / m - limit) / math.sqrt(variance), rel=1e-4)
    q = most_likely(paired, (1 - limit) / 2)
    variance = n * (2 * q + limit - limit**2)
    scores = Outcomes(x, y, n, n, True)._score(np.array([x]), np.array([y]), limit)
    assert scores[0] == pytest.approx((y - x - n * limit) / math.sqrt(variance), rel=1e-4)


def test_without_a_limit_two_arms_have_the_test_of_barnard():
    barnard = stats.barnard_exact([[1, 6], [9, 4]], alternative="less")
    assert Outcomes(6, 1, 10, 10, False).p_below(0.0) == pytest.approx(barnard.pvalue, rel=5e-3)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("num", [3, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_no_test_errs_more_often_than_its_level(num, paired):
    """All results of arms that differ by exactly the margin: exact, without a simulation."""
    for margin in (0.2, 0.5):
        for baseline in (0.1, 0.3, 0.5):
            for own in (0.0, 0.2):  # paired: further pairs that the baseline alone wins
                errors = {"match": 0.0, "mismatch": 0.0, "better": 0.0}
                for x in range(num + 1):
                    for y in range(num + 1 - x * paired):
                        treated = baseline + margin
                        if paired:
                            rates = np.array([own * baseline, own * baseline + margin])
                            p = stats.multinomial.pmf([x, y, num - x - y], num, [*rates, 1 - rates.sum()])
                        else:
                            p = stats.binom.pmf(x, num, baseline) * stats.binom.pmf(y, num, treated)
                        test = Outcomes(x, y, num, num, paired)
                        is_below = max(test.p_below(margin), test.reversed.p_below(margin)) < 0.05
                        is_above = test.reversed.p_below(-margin) < 0.05
                        errors["match"] += p * is_below  # pyright: ignore
                        errors["mismatch"] += p * (is_above and test.difference > 0)  # pyright: ignore
                assert max(errors.values()) <= 0.05


def test_tests_of_outcomes_agree_with_their_intervals():
    rng = np.random.default_rng(0)
    for _ in range(10):
        baseline, treatment = (rng.random((2, 12)) < 0.6).astype(float)
        if not are_outcomes(baseline, treatment):
            continue
        for paired in (True, False):
            found = equivalence_test(baseline, treatment, 0.35, paired=paired)
            low, high = found.interval
            assert found.exact and found.equivalent == (low > -0.35 and high < 0.35)
            assert low <= found.mean_difference <= high and found.certified_bound == max(-low, high)
            improvement = improvement_test(baseline, treatment, -0.35, sign=1, paired=paired)
            assert improvement.bound == pytest.approx(low)
            assert (improvement.p_above < 0.05) == (low > -0.35)


def test_other_values_and_estimated_margins_keep_the_t_test():
    values = np.array([0.0, 1.0, 1.0, 0.5])
    assert not equivalence_test(values, values[::-1], 0.3).exact
    assert not equivalence_test([0.0, 0, 1, 1], [1.0, 0, 1, 1], 0.3, yardstick=[0.0, 0, 1, 1]).exact
    assert not limit_test(np.ones(5), 0.5).exact  # a curve at 1 in every step
    assert limit_test(np.ones(5), 0.5, are_scores=True).p_above == pytest.approx(0.5**5)


def test_the_fewest_runs_that_can_show_something():
    assert min_runs_of_rate(0.9, 0.05, below=False) == math.ceil(math.log(0.05) / math.log(0.9))
    assert min_runs_of_rate(0.1, 0.05, below=True) == 29 and min_runs_of_rate(1.0, 0.05, below=False) is None
    assert min_runs_of_difference(-0.1, 0.05, paired=True) == 29  # 0.9**29 < 0.05
    assert min_runs_of_difference(0.0, 0.05, paired=True) == 5  # 0.5**5 < 0.05
    for limit, paired in ((-0.2, True), (-0.2, False), (0.3, True)):
        needed = min_runs_of_difference(limit, 0.05, paired=paired)
        assert needed is not None
        best = [
            Outcomes(0 if limit < 0 else n, 0, n, n, paired).p_below(-limit) for n in (needed - 1, needed)
        ]
        assert best[0] >= 0.05 > best[1]


@pytest.mark.parametrize("baseline", [(2, 6), (0, 5), (7, 9), (5, 5)])
@pytest.mark.parametrize("treatment", [(1, 30), (0, 5), (3, 8), (5, 5)])
def test_equal_rates_have_the_p_value_of_fisher(baseline, treatment):
    table = [[successes, num - successes] for successes, num in (treatment, baseline)]
    _, expected = stats.fisher_exact(table, alternative="less")
    assert fisher_p(baseline, treatment) == pytest.approx(expected)


def test_the_runs_that_show_a_rate_are_the_fewest_that_do():
    assert runs_to_show_rate(0, 0.05, 0.05) == 59 and runs_to_show_rate(0, 1e-7, 0.05) is None
    for num_successes in (0, 1, 4):
        needed = runs_to_show_rate(num_successes, 0.05, 0.05) or 0
        assert rate_p(num_successes, needed, 0.05)[0] < 0.05 <= rate_p(num_successes, needed - 1, 0.05)[0]
