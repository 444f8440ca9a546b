"""Levels of looks: known values, and what they hold over simulated experiments."""

import numpy as np
import pytest
from scipy import stats

from abrun.looks import level_of_a_look


def test_one_look_has_the_whole_level():
    assert level_of_a_look([5]) == level_of_a_look([]) == 0.05
    assert level_of_a_look([7], 0.01) == 0.01


def test_a_look_at_one_pair_spends_nothing():
    """As `abrun bisect --seeds 0` has it for `exact: true`: one pair has no t statistic."""
    assert level_of_a_look([1, 2]) == pytest.approx(0.05, abs=0.001)


@pytest.mark.parametrize("counts", [(3, 5), (4, 8, 12), (2, 3, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("level", [0.05, 0.013])
def test_looks_together_err_as_often_as_one(counts, level):
    rng = np.random.default_rng(7)
    values = rng.standard_normal((20_000, counts[-1]))
    nominal = level_of_a_look(counts, level)
    p = [stats.ttest_1samp(values[:, :n], 0, axis=1, alternative="greater")[1] for n in counts]
    called = np.mean(np.array(p, float).min(axis=0) < nominal)
    assert called == pytest.approx(level, abs=4 * np.sqrt(level * (1 - level) / 20_000))
    assert level / len(counts) < nominal < level


def test_the_design_s_figure():
    assert level_of_a_look((4, 7, 10)) == pytest.approx(0.0221, abs=1.5e-3)
