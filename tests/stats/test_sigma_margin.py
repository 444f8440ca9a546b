"""Margins in sigmas of the baseline: level whatever the treatment's own spread, certified bound, power."""

import numpy as np
import pytest

from abrun.stats.sigma_margin import (
    VarianceModel,
    sigma_lower_bound,
    sigma_pairs_needed,
    sigma_power,
    sigma_test,
)


def shifted(num_pairs, ratio, rho, sigmas, num, seed=0):
    """Arms [N, P] that differ by exactly `sigmas` of the baseline, whose treatment's sd is `ratio` x its."""
    rng = np.random.default_rng(seed)
    left, own = rng.standard_normal((2, num, num_pairs))
    return left, sigmas + ratio * (rho * left + np.sqrt(1 - rho**2) * own)


@pytest.mark.parametrize("num_pairs", [3, 5, 10])
@pytest.mark.parametrize(("ratio", "rho"), [(1.0, 0.0), (3.0, 0.0), (1.0, 0.9), (1.0, 0.99), (0.2, 0.5)])
def test_arms_that_differ_by_the_margin_pass_one_time_in_twenty_at_most(num_pairs, ratio, rho):
    arms = shifted(num_pairs, ratio, rho, 1.5, 600)
    tests = [sigma_test(left, right, 1.5) for left, right in zip(*arms, strict=True)]
    allowed = 0.05 + 3.1 * np.sqrt(0.05 * 0.95 / 600)
    assert np.mean([test.equivalent for test in tests]) <= allowed
    assert np.mean([test.p_beyond < 0.05 for test in tests]) <= allowed


def test_the_certified_number_is_where_the_test_turns():
    left, right = np.array([0.1, 0.9, 0.4, 0.6]), np.array([0.2, 0.8, 0.5, 0.7])
    sigmas = sigma_test(left, right, 1.0).certified_sigmas
    assert sigma_test(left, right, 1.001 * sigmas).equivalent
    assert not sigma_test(left, right, 0.999 * sigmas).equivalent


def test_arms_without_spread_are_decided_by_their_value():
    same = sigma_test([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 1.0)
    assert same.equivalent and same.certified_sigmas == 0.0
    other = sigma_test([1.0, 1.0, 1.0], [1.5, 1.5, 1.5], 1.0)
    assert not other.equivalent and other.certified_sigmas == np.inf and other.p_beyond == 0.0


@pytest.mark.parametrize(("num_pairs", "rho"), [(3, 0.8), (5, 0.0), (10, 0.0)])
def test_power_is_how_often_equal_arms_pass(num_pairs, rho):
    left, right = shifted(num_pairs, 1.0, rho, 0.0, 1000, seed=1)
    passed = np.mean([sigma_test(*pair, 1.5).equivalent for pair in zip(left, right, strict=True)])
    assert passed == pytest.approx(
        sigma_power(1.5, num_pairs, VarianceModel(correlation=rho)), abs=4 * np.sqrt(0.25 / 1000)
    )


def test_pairs_needed_reach_the_power():
    law = VarianceModel(correlation=0.5)
    needed = sigma_pairs_needed(1.5, law)
    assert needed and sigma_power(1.5, needed, law) >= 0.8 > sigma_power(1.5, needed - 1, law)


def test_the_lower_bound_covers_nineteen_of_twenty():
    drawn = np.random.default_rng(2).standard_normal((4000, 5)).std(axis=1, ddof=1)
    covered = np.mean([sigma_lower_bound(sd, 5) <= 1 for sd in drawn])
    assert covered == pytest.approx(0.95, abs=4 * np.sqrt(0.05 * 0.95 / 4000))


@pytest.mark.parametrize(("values", "sigmas"), [([1.0], 1.0), ([1.0, np.nan], 1.0), ([1.0, 2.0], 0.0)])
def test_what_cannot_be_tested_is_refused(values, sigmas):
    with pytest.raises(ValueError, match="got"):
        sigma_test(values, values, sigmas)


def test_pairs_needed_count_a_treatment_that_varies_more():
    """Taken for arms of one sigma, the 80 % of a treatment of twice the sigma would be 28 %."""
    rng, law = np.random.default_rng(1), VarianceModel(correlation=0.8, sd_ratio=2.0)
    needed = sigma_pairs_needed(1.5, law)
    assert needed and needed > 2 * (sigma_pairs_needed(1.5, VarianceModel(correlation=0.8)) or 0)
    left, own = rng.standard_normal((2, 1000, needed))
    right = 2 * (0.8 * left + 0.6 * own)
    passed = np.mean([sigma_test(*pair, 1.5).equivalent for pair in zip(left, right, strict=True)])
    assert passed == pytest.approx(sigma_power(1.5, needed, law), abs=4 * np.sqrt(0.16 / 1000))
