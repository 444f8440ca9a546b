"""Intervals that hold at all numbers of pairs, against integration and simulated readers who stop at will."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from abrun.stats.anytime import (
    MIN_PAIRS,
    TAU,
    THRESHOLD,
    anytime_evidence,
    anytime_interval,
    anytime_quantile,
)
from tests.bench.bench_after_looking import false_claims, spread_p


@pytest.mark.parametrize(("num_pairs", "t"), [(4, 5.0), (5, -1.2), (12, 0.0), (30, 2.5)])
def test_the_evidence_is_the_mean_likelihood_ratio_of_half_normal_effects(num_pairs, t):
    def ratio(effect):
        likelihood = stats.nct.pdf(t, num_pairs - 1, effect * math.sqrt(num_pairs))
        return stats.halfnorm.pdf(effect, scale=TAU) * likelihood / stats.t.pdf(t, num_pairs - 1)

    assert anytime_evidence(num_pairs, t) == pytest.approx(integrate.quad(ratio, 0, 10)[0], rel=1e-6)


def test_an_interval_is_where_the_evidence_stays_below_its_threshold():
    for num_pairs in (MIN_PAIRS, 5, 8, 30, 1000):
        c = anytime_quantile(num_pairs)
        assert anytime_evidence(num_pairs, c - 1e-6) < THRESHOLD <= anytime_evidence(num_pairs, c + 1e-6)
        assert anytime_interval(0.2, 0.1, num_pairs) == pytest.approx((0.2 - 0.1 * c, 0.2 + 0.1 * c))
    assert anytime_evidence(MIN_PAIRS - 1, math.inf) < THRESHOLD
    for mean, error, num_pairs in ((0.2, 0.1, 3), (0.2, 0.1, 1), (0.2, 0.0, 30), (0.0, 0.0, 0)):
        assert anytime_interval(mean, error, num_pairs) == (-math.inf, math.inf)


@pytest.mark.parametrize("law", ["normal", "t", "uniform"])
def test_a_reader_who_stops_at_will_claims_too_small_a_margin_in_at_most_5_percent(law):
    rng = np.random.default_rng(0)
    draws = {"normal": rng.standard_normal, "uniform": lambda size: rng.uniform(-1, 1, size)}
    values = draws.get(law, lambda size: rng.standard_t(3, size))((10_000, 30))
    rates = false_claims(values)
    assert rates["anytime"] < 0.05 < 0.2 < rates["read at every number, t"]


def test_a_spread_at_its_limit_is_claimed_in_at_most_5_percent_whatever_the_law():
    rng = np.random.default_rng(0)
    for draw in (rng.standard_normal, lambda size: rng.standard_t(3, size), rng.standard_exponential):
        baseline, treatment = draw((10_000, 8)), 1.5 * draw((10_000, 8))
        p_values = spread_p(baseline, treatment, 1.5)
        assert np.mean(p_values < 0.05) < 0.055 and np.mean(p_values > 0.95) < 0.055
