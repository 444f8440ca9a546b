"""Windows of claims, with numbers worked out by hand."""

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.stats.series import build_series, window_bounds

GRID = np.arange(1, 101)


@pytest.mark.parametrize(
    ("window", "bounds"),
    [
        ("all", (1, 100)),
        ("last 20%", (81, 100)),
        ("last 1%", (100, 100)),
        ("last 100%", (1, 100)),
        ("steps 10-50", (10, 50)),
        ("steps 100-100", (100, 100)),
    ],
)
def test_window_bounds(window, bounds):
    assert window_bounds(window, GRID, "m") == bounds


def test_a_share_of_few_steps_is_rounded_up():
    assert window_bounds("last 20%", np.arange(1, 8), "m") == (6, 7)
    assert window_bounds("last 1%", np.array([5]), "m") == (5, 5)


@pytest.mark.parametrize("window", ["steps 50-101", "steps 101-200"])
def test_a_window_beyond_the_runs_is_refused(window):
    with pytest.raises(ComparisonError, match=r"train/reward: window 'steps .*steps 1-100"):
        window_bounds(window, GRID, "train/reward")


@pytest.mark.parametrize("num_passes", [2, 3, 15])
def test_no_more_steps_are_repeated_than_there_are(num_passes):
    steps = np.tile(np.arange(1, 21), num_passes)
    series, num_replaced = build_series(steps, np.arange(20.0 * num_passes))
    assert series.recounted == len(series) == 20
    assert num_replaced == 20 * (num_passes - 1)
    assert series.values.tolist() == list(range(20 * (num_passes - 1), 20 * num_passes))


def test_the_same_value_again_replaces_nothing():
    steps, values = [1, 2, 2, 3, 3, 3, 4, 4], [0.5, 0.6, 0.6, np.nan, np.nan, 0.7, np.nan, np.nan]
    series, num_replaced = build_series(steps, values)
    assert num_replaced == 2  # both NaN of step 3
    assert series.steps.tolist() == [1, 2, 3, 4] and series.value_at(3) == 0.7
