"""The ratio of spreads, by hand and against its own test at the interval's ends."""

import numpy as np
import pytest
from scipy import stats

from abrun.stats.spread import spread_test


def test_a_ratio_of_spreads_is_that_of_mean_deviations_from_the_medians():
    baseline, treatment = [1.0, 2.0, 4.0, 9.0, 3.0], [10.0, 14.0, 11.0, 12.0, 18.0]
    base, treated = np.array([2, 1, 1, 6, 0]), np.array([2, 2, 1, 0, 6])
    found = spread_test(baseline, treatment, 1.5, 0.05)
    assert found.mean == pytest.approx(11 / 10)
    expected = float(np.asarray(stats.ttest_1samp(treated - 1.5 * base, 0, alternative="less"))[1])
    assert found.p_below == pytest.approx(expected) and found.p_above == pytest.approx(1 - expected)


def test_the_interval_holds_the_ratios_that_are_not_rejected_and_scales_with_the_treatment():
    baseline, treatment = np.random.default_rng(0).standard_normal((2, 12))
    low, high = spread_test(baseline, treatment, 1.0, 0.05).interval
    for limit, below in ((high * 1.001, True), (high * 0.999, False)):
        assert (spread_test(baseline, treatment, limit, 0.05).p_below < 0.05) == below
    assert spread_test(baseline, treatment, low * 0.999, 0.05).p_above < 0.05
    scaled = spread_test(7 + baseline, 3 * treatment - 5, 3.0, 0.05)
    assert scaled.interval == pytest.approx((3 * low, 3 * high))


def test_equal_treated_values_have_no_spread():
    found = spread_test([1.0, 2.0, 3.0, 4.0, 5.5, 8.0], [2.0] * 6, 1.0, 0.05)
    assert found.mean == 0 and found.p_below < 0.05 and found.interval == pytest.approx((0.0, 0.0), abs=1e-9)
