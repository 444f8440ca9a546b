"""Unused seeds of a reference as a control variate: the level that is kept, and the power that is won."""

import numpy as np
import pytest
from scipy import stats

from abrun.stats.control_variate import control_variate_tost, estimate
from abrun.stats.equivalence import paired_tost
from abrun.verdict.unused_seeds import has_use

NUM_EXPERIMENTS = 20_000
FROZEN = 10
CHANCE = 4 * np.sqrt(0.05 * 0.95 / NUM_EXPERIMENTS)


def simulated(num_pairs, correlation, *, frozen=FROZEN, spread=1.0, shift=0.0, law="normal", seed=0):
    """Return baselines [E, n], treatments [E, n] of sd `spread`, and unused seeds [E, m]."""
    rng = np.random.default_rng([seed, num_pairs, frozen])

    def draw(*shape):
        return rng.standard_normal(shape) if law == "normal" else rng.exponential(size=shape) - 1

    reference, fresh = draw(NUM_EXPERIMENTS, frozen), draw(NUM_EXPERIMENTS, num_pairs)
    shared = correlation * reference[:, :num_pairs] + np.sqrt(1 - correlation**2) * fresh
    return reference[:, :num_pairs], spread * shared + shift, reference[:, num_pairs:]


def passes(mean, error, freedom, margin):
    return np.abs(mean) + stats.t.ppf(0.95, freedom) * error < margin


def paired_passes(baseline, treatment, margin):
    differences = treatment - baseline
    num = differences.shape[1]
    error = differences.std(axis=1, ddof=1) / np.sqrt(num)
    return passes(differences.mean(axis=1), error, num - 1, margin)


@pytest.mark.parametrize("num_pairs", [2, 3, 5, 8])
@pytest.mark.parametrize("spread", [1 / 3, 1, 3])
def test_the_level_is_kept(num_pairs, spread):
    """At the edge of a margin that is wide: every match is an error."""
    for correlation in (0.0, 0.35, 0.8, 0.95):
        data = simulated(num_pairs, correlation, spread=spread, shift=9.0)
        rate = passes(*estimate(*data), 9.0).mean()
        assert rate < 0.05 + CHANCE, (correlation, rate)


@pytest.mark.parametrize(("num_pairs", "more"), [(3, 0.07), (5, 0.08), (8, 0.01)])
def test_unused_seeds_add_power(num_pairs, more):
    for correlation in (0.0, 0.35):
        data = simulated(num_pairs, correlation)
        before, after = paired_passes(*data[:2], 1.5).mean(), passes(*estimate(*data), 1.5).mean()
        assert after > before + more, (correlation, before, after)


@pytest.mark.parametrize(("num_pairs", "most"), [(3, 0.20), (5, 0.24), (8, 0.05)])
def test_arms_that_correlate_closely_keep_most_of_their_power(num_pairs, most):
    for correlation, margin in ((0.95, 0.6), (0.99, 0.6)):
        data = simulated(num_pairs, correlation)
        before, after = paired_passes(*data[:2], margin).mean(), passes(*estimate(*data), margin).mean()
        assert after > before - most, (correlation, before, after)
        at_margin = simulated(num_pairs, correlation, shift=9.0)
        assert passes(*estimate(*at_margin), 9.0).mean() < 0.05 + CHANCE


@pytest.mark.parametrize("num_pairs", [3, 5])
def test_skewed_seeds_err_no_more_often_than_pairs_do_at_their_worst(num_pairs):
    rates = []
    for correlation in (0.0, 0.35, 0.8, 0.95):
        baseline, treatment, unused = (
            values[:2000] for values in simulated(num_pairs, correlation, shift=9.0, law="exponential")
        )
        pairs = paired_passes(baseline, treatment, 9.0)
        helped = passes(*estimate(baseline, treatment, unused), 9.0)
        used = [has_use(*sample) for sample in zip(baseline, treatment, unused, strict=True)]
        rates.append((pairs.mean(), np.where(used, helped, pairs).mean()))
        assert 0.25 < np.mean(used) < 0.45  # of ten exponential seeds
    worst_of_pairs, worst = np.max(rates, axis=0)
    assert worst < worst_of_pairs + 0.01, rates


def test_later_runs_that_repeat_their_seeds_are_compared_as_pairs():
    rng = np.random.default_rng(3)
    reference = rng.standard_normal(10)
    while not has_use(reference[:3], reference[:3] + 0.5, reference[3:]):
        reference = rng.standard_normal(10)
    assert not has_use(reference[:3], reference[:3] + 1e-4, reference[3:])
    assert not has_use(reference[:3], reference[:3] + 0.5, reference[:0])
    assert not has_use(reference[:1], reference[:1] + 0.5, reference[1:])


def test_one_estimate_by_hand():
    baseline, treatment, unused = np.array([1.0, 2.0, 4.0]), np.array([2.0, 2.5, 4.5]), np.array([3.0, 5.0])
    c = 3 / 5 + 2 / 5 * 0.5
    adjusted, reference = treatment - c * baseline, np.concatenate([baseline, unused])
    tost = control_variate_tost(baseline, treatment, unused, margin=4.0)
    assert tost.mean_difference == pytest.approx(adjusted.mean() - (1 - c) * 4.0)
    variances = adjusted.var(ddof=1) / 3, (1 - c) ** 2 * reference.var(ddof=1) / 2
    assert tost.standard_error == pytest.approx(np.sqrt(sum(variances)))
    assert tost.freedom == pytest.approx(
        min(2.2, sum(variances) ** 2 / (variances[0] ** 2 / 2 + variances[1] ** 2 / 4))
    )
    reach = stats.t.ppf(0.95, tost.freedom) * tost.standard_error
    assert tost.certified_bound == pytest.approx(abs(tost.mean_difference) + reach)
    assert tost.sd_difference == paired_tost(baseline, treatment, 4.0).sd_difference
    assert tost.equivalent == (tost.certified_bound < 4.0)


def test_close_pairs_are_taken_alone_with_a_wider_error():
    baseline, unused = np.array([1.0, 2.0, 4.0]), np.array([3.0, 5.0])
    differences = np.array([0.1, 0.2, 0.15])
    tost = control_variate_tost(baseline, baseline + differences, unused, margin=4.0)
    assert tost.mean_difference == pytest.approx(differences.mean())
    assert tost.standard_error == pytest.approx(1.5 * differences.std(ddof=1) / np.sqrt(3))
    assert tost.freedom == 2
