"""The statistics against statsmodels, against the design's table, and against simulation."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_ind
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW, ttost_ind, ttost_paired

from abrun.messages.numbers import bound_text
from abrun.stats.equivalence import equivalence_test, holm, mean_and_sd, t_interval
from abrun.stats.power import (
    pairs_needed,
    pairs_needed_range,
    power_at,
    sd_interval,
    sd_of_difference,
    welch_dof_per_run,
)
from abrun.verdict.skewness import DIFFERENCES, find_skew, outlier_p, skewness_and_p


@pytest.mark.parametrize("num_pairs", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("shift", [0.0, 0.3, -1.2])
def test_tost_agrees_with_statsmodels(num_pairs, shift):
    rng = np.random.default_rng(num_pairs)
    baseline = rng.normal(5, 1, num_pairs)
    treatment = baseline + shift + rng.normal(0, 0.5, num_pairs)
    tost = equivalence_test(baseline, treatment, margin=0.7)
    p, _, _ = ttost_paired(treatment, baseline, -0.7, 0.7)
    assert tost.p_tost == pytest.approx(p, abs=1e-12)
    assert tost.equivalent == (p < 0.05)
    assert tost.pair_correlation == pytest.approx(np.corrcoef(baseline, treatment)[0, 1])


@pytest.mark.parametrize(
    "p_values", [[0.04], [0.03, 0.01, 0.04, 0.01], [0.9, 0.8, 0.0], [0.02, 0.02, 0.02], [1.0, 1.0]]
)
def test_holm_agrees_with_statsmodels(p_values):
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1], abs=1e-15)


def test_holm_of_nothing_is_nothing():
    assert holm([]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=3, max_size=12), st.floats(0.01, 2))
def test_interval_bound_and_p_value_say_the_same(differences, margin):
    tost = equivalence_test(np.zeros(len(differences)), differences, margin)
    low, high = tost.interval
    assert tost.certified_bound == max(abs(low), abs(high))
    if abs(tost.certified_bound - margin) > 1e-9:
        assert tost.equivalent == (tost.certified_bound < margin)
    # The certified bound is the smallest margin that would have passed.
    assert equivalence_test(
        np.zeros(len(differences)), differences, tost.certified_bound * 1.001 + 1e-9
    ).equivalent


def test_the_bound_of_bit_identical_arms_is_zero_in_any_unit():
    values = np.array([0.1, 0.2, 0.31])
    assert equivalence_test(values, values, 0.03, yardstick=values).certified_margin == 0


def test_bit_identical_arms_are_decided_exactly():
    values = np.array([0.1, 0.7, 0.30000000000000004])
    tost = equivalence_test(values, values, margin=1e-9)
    assert tost.interval == (0.0, 0.0) and tost.certified_bound == 0.0
    assert (tost.p_tost, tost.p_difference, tost.pair_correlation) == (0.0, 1.0, 1.0)
    assert tost.equivalent


@pytest.mark.parametrize(("shift", "equivalent"), [(0.25, True), (0.5, False), (0.75, False)])
def test_an_exact_shift_is_decided_by_its_size(shift, equivalent):
    baseline = np.array([1.0, 2.0, 4.0])
    tost = equivalence_test(baseline, baseline + shift, margin=0.5)
    assert tost.sd_difference == 0.0 and tost.interval == (shift, shift)
    assert tost.equivalent is equivalent and tost.p_difference == 0.0


def test_equal_values_have_no_spread_at_all():
    assert mean_and_sd(np.full(7, 0.1)) == (0.1, 0.0)
    assert np.full(7, 0.1).std(ddof=1) > 0  # what summing would have made of them
    assert t_interval(np.full(7, 0.1), 0.95) == (0.1, 0.1)


def test_a_constant_arm_has_no_correlation():
    assert equivalence_test([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], 1.0).pair_correlation is None


@pytest.mark.parametrize(
    ("baseline", "treatment", "margin"),
    [
        ([1.0], [1.0], 1.0),
        ([1.0, 2.0], [1.0], 1.0),
        ([1.0, float("nan")], [1.0, 2.0], 1.0),
        ([1.0, 2.0], [1.0, 2.0], 0.0),
    ],
)
def test_what_cannot_be_tested_is_refused(baseline, treatment, margin):
    with pytest.raises(ValueError):
        equivalence_test(baseline, treatment, margin)


# P(match | truly equal) for one claim with 3, 5 and 10 pairs, simulated when the verdict was designed.
TABLE = [
    (1.0, 0.0, (0.05, 0.09, 0.35), 19),
    (1.0, 0.8, (0.37, 0.79, 1.0), 6),
    (1.5, 0.0, (0.15, 0.35, 0.85), 10),
    (1.5, 0.8, (0.71, 0.99, 1.0), 4),
    (2.0, 0.8, (0.91, 1.0, 1.0), 3),
]


@pytest.mark.parametrize(("margin", "correlation", "powers", "needed"), TABLE)
def test_power_is_that_of_the_design_table(margin, correlation, powers, needed):
    sd = sd_of_difference(1.0, correlation)
    for num_pairs, expected in zip((3, 5, 10), powers, strict=True):
        assert power_at(margin, sd, num_pairs) == pytest.approx(expected, abs=0.01)
    assert pairs_needed(margin, sd) == needed


@pytest.mark.parametrize(
    ("num_pairs", "true_difference"), [(2, 0.0), (4, 0.0), (6, 0.5), (8, 1.0), (30, 0.7)]
)
def test_power_is_what_simulation_finds(num_pairs, true_difference):
    rng = np.random.default_rng(7)
    draws = 40_000
    differences = rng.normal(true_difference, 0.8, (draws, num_pairs))
    mean, sd = differences.mean(axis=1), differences.std(axis=1, ddof=1)
    passed = np.abs(mean) + critical_t(num_pairs) * sd / np.sqrt(num_pairs) < 1.0
    found = power_at(1.0, 0.8, num_pairs, true_difference=true_difference)
    assert found == pytest.approx(passed.mean(), abs=4 * np.sqrt(0.25 / draws))


def critical_t(num_pairs):
    """One-sided 5 % points from a printed table of Student's t."""
    return {1: 6.3138, 3: 2.3534, 5: 2.0150, 7: 1.8946, 29: 1.6991}[num_pairs - 1]


def test_t_interval_is_that_of_the_printed_table():
    low, high = t_interval([1.0, 2.0, 3.0, 6.0], 0.9)  # mean 3, sd sqrt(14 / 3)
    reach = 2.3534 * np.sqrt(14 / 3) / 2
    assert (low, high) == pytest.approx((3 - reach, 3 + reach), abs=1e-3)


def test_at_the_margin_a_match_is_as_rare_as_alpha():
    assert power_at(1.0, 0.5, 10, true_difference=1.0) == pytest.approx(0.05, abs=1e-6)
    assert power_at(1.0, 0.5, 10, alpha=0.01, true_difference=-1.0) == pytest.approx(0.01, abs=1e-6)
    assert power_at(1.0, 0.5, 10, true_difference=2.0) < 1e-6


def test_power_at_its_ends():
    assert power_at(1.0, 0.0, 2) == 1.0
    assert power_at(1.0, 0.0, 2, true_difference=1.0) == 0.0
    assert power_at(1.0, 1.0, 1) == 0.0
    assert power_at(1e-6, 1.0, 3) == pytest.approx(0.0, abs=1e-9)
    assert power_at(1e6, 1.0, 3) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("sd", [0.0, 0.4, 0.9, 2.5])
def test_pairs_needed_is_the_first_that_suffices(sd):
    needed = pairs_needed(1.0, sd)
    assert needed is not None
    assert power_at(1.0, sd, needed) >= 0.8
    assert needed == 2 or power_at(1.0, sd, needed - 1) < 0.8


def test_pairs_needed_gives_up():
    assert pairs_needed(0.01, 1.0) is None
    assert pairs_needed(1.0, 2.0, max_pairs=10) is None


def test_range_of_pairs_needed_holds_the_estimate():
    low, high = pairs_needed_range(1.0, 0.9, num_pairs=5)
    needed = pairs_needed(1.0, 0.9)
    assert low is not None and high is not None and needed is not None
    assert low < needed < high


def test_sd_interval_covers():
    rng = np.random.default_rng(3)
    sds = rng.normal(0, 2.0, (20_000, 5)).std(axis=1, ddof=1)
    low, high = sd_interval(1.0, 5)
    assert np.mean((sds * low < 2.0) & (sds * high > 2.0)) == pytest.approx(0.9, abs=0.01)


# --- arms that are not paired ---


@pytest.mark.parametrize(("num_baselines", "num_treatments"), [(2, 2), (5, 4), (10, 9)])
@pytest.mark.parametrize("shift", [0.0, 0.3, -0.9])
def test_welch_agrees_with_statsmodels(num_baselines, num_treatments, shift):
    rng = np.random.default_rng([num_baselines, num_treatments])
    baseline = rng.normal(5, 1, num_baselines)
    treatment = rng.normal(5 + shift, 2.5, num_treatments)
    tost = equivalence_test(baseline, treatment, margin=0.7, paired=False)
    p, _, _ = ttost_ind(treatment, baseline, -0.7, 0.7, usevar="unequal")
    assert tost.p_tost == pytest.approx(p)
    means = CompareMeans(DescrStatsW(treatment), DescrStatsW(baseline))
    assert tost.interval == pytest.approx(means.tconfint_diff(0.1, usevar="unequal"))
    _, p_difference, freedom = means.ttest_ind(usevar="unequal")
    assert (tost.p_difference, tost.dof) == pytest.approx((p_difference, freedom))
    signed = (
        means if tost.mean_difference >= 0 else CompareMeans(DescrStatsW(baseline), DescrStatsW(treatment))
    )
    limits: list[Any] = [0.7, -0.7]  # statsmodels calls them int
    outer = [signed.ttest_ind("larger", "unequal", limit)[1] for limit in limits]
    assert tost.p_beyond == pytest.approx(sum(outer))
    assert tost.certified_bound == pytest.approx(max(map(abs, tost.interval)))


@pytest.mark.parametrize(("num_baselines", "num_treatments"), [(2, 10), (20, 2), (3, 10)])
def test_welch_has_at_most_twice_the_freedom_of_the_smaller_arm(num_baselines, num_treatments):
    rng = np.random.default_rng(0)
    arms = rng.normal(0, 1, num_baselines), rng.normal(0, 1, num_treatments)
    cap = 2 * (min(num_baselines, num_treatments) - 1)
    larger_varies_more = [(size == max(map(len, arms))) * 9 + 1 for size in map(len, arms)]
    arms = tuple(scale * values for scale, values in zip(larger_varies_more, arms, strict=True))
    assert equivalence_test(*arms, margin=0.7, paired=False).dof == cap
    uncapped: Any = ttest_ind(arms[1], arms[0], equal_var=False)
    assert uncapped.df > cap


def test_a_relative_margin_of_unpaired_arms_is_a_test_against_scaled_baselines():
    rng = np.random.default_rng(3)
    baseline, treatment = rng.normal(10, 1, 6), rng.normal(10.2, 2, 4)
    tost = equivalence_test(baseline, treatment, 0.2, yardstick=baseline, paired=False)
    sides: list[Any] = [
        ttest_ind(treatment, share * baseline, equal_var=False, alternative=side)
        for share, side in ((1.2, "less"), (0.8, "greater"))
    ]
    assert tost.p_tost == pytest.approx(max(one.pvalue for one in sides))
    passing = equivalence_test(
        baseline, treatment, tost.certified_margin * 1.0001, yardstick=baseline, paired=False
    )
    assert passing.equivalent
    assert not equivalence_test(
        baseline, treatment, tost.certified_margin * 0.9999, yardstick=baseline, paired=False
    ).equivalent


def test_unpaired_arms_without_spread_are_decided_by_value():
    same = equivalence_test([1.0, 1.0], [1.0, 1.0, 1.0], 0.1, paired=False)
    assert (same.equivalent, same.p_difference, same.certified_bound) == (True, 1.0, 0.0)
    apart = equivalence_test([1.0, 1.0], [1.5, 1.5, 1.5], 0.1, paired=False)
    assert (apart.equivalent, apart.p_beyond, apart.certified_bound) == (False, 0.0, 0.5)
    with pytest.raises(ValueError, match="of at least 2 values"):
        equivalence_test([1.0], [1.0, 2.0], 0.1, paired=False)


def test_runs_needed_is_what_simulation_finds():
    sd, freedom = np.hypot(0.4, 0.8), welch_dof_per_run((0.4, 0.8))
    needed = pairs_needed(1.0, sd, dof_per_pair=freedom)
    assert needed is not None
    rng = np.random.default_rng(5)

    def passing(runs):
        arms = rng.normal(0, 0.4, (1000, runs)), rng.normal(0, 0.8, (1000, runs))
        return np.mean(
            [equivalence_test(*one, 1.0, paired=False).equivalent for one in zip(*arms, strict=True)]
        )

    assert passing(needed) > 0.77 and passing(needed - 1) < 0.83
    assert pairs_needed(1.0, sd, true_difference=1.0, dof_per_pair=freedom) is None


def test_no_skewness_is_impossible_among_normal_samples():
    found = skewness_and_p([0.0, 0.001, 0.002, 1.0])
    assert found is not None and 0 < found[1] < 0.001


@pytest.mark.parametrize("size", [4, 6, 10])
@pytest.mark.parametrize("sd", [0.4, 0.7, 1.0, 4.0])
def test_symmetric_counts_are_rarely_called_skewed(sd, size):
    """Taken for normal ones, those of few steps were in up to .43."""
    counts = np.round(sd * np.random.default_rng(size).standard_normal((1000, size))) / 16
    found = [skewness_and_p(values) for values in 0.3 + counts]
    assert np.mean([one is not None and one[1] < 0.05 for one in found]) <= 0.07


@pytest.mark.parametrize("size", [4, 5, 12, 20])
def test_normal_values_are_rarely_called_skewed_and_none_hides_by_how_far_off_it_is(size):
    """One 1e9 times as far as the others left these looking like ties, of which nothing is said."""
    samples = np.random.default_rng(size).standard_normal((2000, size))
    alone = [outlier_p(one, 0.0, 0.0) for one in samples]
    assert np.mean([p is not None and p < 0.05 for p in alone]) <= 0.065
    assert (
        np.mean([find_skew({DIFFERENCES: one}, step=0.0, min_sd=0.0) is not None for one in samples]) <= 0.065
    )
    for far in (100.0, 1e8, 1e10, -1e14, 1e300):
        for one in samples[:20]:
            others = [far, *one[1:]]
            assert find_skew({DIFFERENCES: np.array(others)}, step=0.0, min_sd=0.01) is not None, others
    for far in (100.0, 1e10, -1e14) if size > 4 else ():  # two on one side: skewness is silent up to 8 values
        for one in samples[:20]:
            others = [far, 1.1 * far, *one[2:]]
            assert find_skew({DIFFERENCES: np.array(others)}, step=0.0, min_sd=0.01) is not None, others
    for values in (samples, np.random.default_rng(size).standard_t(5, (2000, size))):
        pairs = [outlier_p(one, 0.0, 0.0, 2) for one in values]
        assert np.mean([p is not None and p < 0.05 for p in pairs]) < 0.02
    tied = np.zeros(size)
    for far, said in ((1e-6, False), (1 / 16, False), (0.5, True), (-1e9, True)):
        tied[1] = far
        assert (find_skew({DIFFERENCES: tied}, step=1 / 16, min_sd=0.001) is not None) == said, far


def test_a_bound_is_printed_no_smaller_than_it_is():
    """What is printed must have passed as a margin: 0.0500 where 0.05 did not is an error by rounding."""
    assert [bound_text(one) for one in (0.05002, 0.05, 0.04998, 0.0230001, 12.341, 0.0, float("inf"))] == [
        "0.0501",
        "0.05",
        "0.05",
        "0.0231",
        "12.4",
        "0",
        "inf",
    ]
