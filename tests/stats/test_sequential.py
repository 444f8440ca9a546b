"""Levels of looks: known values, and what they hold over simulated experiments."""

import numpy as np
import pytest
from scipy import stats

from abrun.stats.sequential import interim_level, interim_levels


def test_one_look_has_the_whole_level():
    assert interim_level([5]) == interim_level([]) == 0.05
    assert interim_level([7], 0.01) == 0.01


def test_a_look_at_one_pair_spends_nothing():
    """As `abrun bisect --seeds 0` has it for `exact: true`: one pair has no t statistic."""
    assert interim_level([1, 2]) == pytest.approx(0.05, abs=0.001)


@pytest.mark.parametrize("counts", [(3, 5), (4, 8, 12), (2, 3, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("level", [0.05, 0.013])
def test_looks_together_err_as_often_as_one(counts, level):
    rng = np.random.default_rng(7)
    values = rng.standard_normal((20_000, counts[-1]))
    nominal = interim_level(counts, level)
    p = [stats.ttest_1samp(values[:, :n], 0, axis=1, alternative="greater")[1] for n in counts]
    called = np.mean(np.array(p, float).min(axis=0) < nominal)
    assert called == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 20_000))
    assert level / len(counts) < nominal < level


def test_the_design_s_figure():
    assert interim_level((4, 7, 10)) == pytest.approx(0.0221, abs=1.5e-3)


@pytest.mark.parametrize("counts", [(3, 5), (3, 5, 8, 10), (4, 8, 12), tuple(range(4, 13))])
@pytest.mark.parametrize("level", [0.05, 0.04, 0.01])
@pytest.mark.parametrize("spending", ["rising", "obrien_fleming"])
def test_late_levels_err_together_as_often_as_one(counts, level, spending):
    """Match and mismatch alike: both are one-sided tests at the edge of the margin."""
    differences = np.random.default_rng(11).standard_normal((40_000, counts[-1]))
    levels = interim_levels(counts, level, spending)
    p = [stats.ttest_1samp(differences[:, :n], 0, axis=1, alternative="less")[1] for n in counts]
    smaller = np.array(levels) > np.array(p, float).T
    called = smaller.any(axis=1).mean()
    assert called == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 40_000))
    shares = np.array(counts) / counts[-1]
    limits = stats.norm.isf(levels[-1]) / np.sqrt(shares)
    expected = {"rising": levels[-1] * shares, "obrien_fleming": stats.norm.sf(limits)}
    assert levels == pytest.approx(expected[spending].tolist())


def test_late_levels_have_more_power_where_margins_are_tight():
    """At 4, 8 and 12 pairs: .0109, .0218, .0327 instead of .0223 each."""
    counts = (4, 8, 12)
    assert interim_levels(counts, spending="rising") == pytest.approx([0.0109, 0.0218, 0.0327], abs=4e-4)
    assert interim_levels(counts) == [interim_level(counts)] * 3
    differences = np.random.default_rng(5).standard_normal((20_000, 12))
    matched = {}
    for spending in ("equal", "rising", "obrien_fleming"):
        passed = np.zeros(len(differences), bool)
        for n, level in zip(counts, interim_levels(counts, spending=spending), strict=True):
            first = differences[:, :n]
            reach = stats.t.ppf(1 - level, n - 1) * first.std(axis=1, ddof=1) / np.sqrt(n)
            passed |= np.abs(first.mean(axis=1)) + reach < 1.0
        matched[spending] = passed.mean()
    assert matched["equal"] == pytest.approx(0.764, abs=0.012)
    assert matched["rising"] == pytest.approx(0.829, abs=0.012)
    assert matched["obrien_fleming"] == pytest.approx(0.87, abs=0.012)
