"""Ratios that hold at every step: a factor is told from a shift, and neither is seen on flat curves."""

import numpy as np
import pytest

from abrun.stats.curves import is_factor, ratio_at_each_step

STEPS = np.arange(60)


def loss(seed, noise=0.02):
    rng = np.random.default_rng(seed)
    return 1.2 * np.exp(-STEPS / 40) + 0.55 + noise * rng.standard_normal((4, 60))


def explains(baseline, treatment):
    ratio = ratio_at_each_step(baseline, treatment)
    assert ratio is not None
    return is_factor(ratio, baseline, treatment)


def test_the_ratio_by_hand():
    baseline = np.full((1, 10), 2.0)
    treatment = np.array([[3.0, 12.0, *[6.0] * 8]])
    assert ratio_at_each_step(baseline, treatment) == pytest.approx((3.0, 1.5, 6.0))
    assert not explains(baseline, treatment)


@pytest.mark.parametrize(
    ("baseline", "treatment"),
    [
        (np.full((1, 9), 2.0), np.full((1, 9), 3.0)),  # too few steps
        (np.full((1, 10), 2.0), np.full((2, 10), 3.0)),
        (np.full((1, 10), -2.0), np.full((1, 10), 3.0)),
        (loss(0), 1.0006 * loss(0)),
        (loss(0), loss(1)),  # they cross
        (loss(0), loss(0)),
    ],
)
def test_no_ratio(baseline, treatment):
    assert ratio_at_each_step(baseline, treatment) is None


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("factor", [1.08, 1 / 1.08, 3.0, 1024.0])
def test_a_factor_explains_another_scale(factor, noise):
    rng = np.random.default_rng(7)
    treatment = factor * loss(0) * np.exp(noise * rng.standard_normal((4, 60)))
    assert explains(loss(0), treatment) and explains(treatment, loss(0))


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("shift", [0.08, 0.2])
def test_a_factor_does_not_explain_a_shift(shift, noise):
    rng = np.random.default_rng(7)
    treatment = loss(0) + shift + noise * rng.standard_normal((4, 60))
    assert not explains(loss(0), treatment) and not explains(treatment, loss(0))


@pytest.mark.parametrize("noise", [0.0, 1e-15, 1e-7, 0.01])
def test_flat_curves_do_not_tell_a_factor_from_a_shift(noise):
    rng = np.random.default_rng(7)
    baseline, treatment = (level + noise * rng.standard_normal((4, 60)) for level in (71.0, 75.0))
    assert not explains(baseline, treatment) and not explains(treatment, baseline)
