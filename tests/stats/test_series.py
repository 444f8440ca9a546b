"""Windows of claims, with numbers worked out by hand."""

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.stats.series import window_bounds

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
