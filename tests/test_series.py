"""Windows of claims, with numbers worked out by hand."""

import numpy as np
import pytest

from abrun.errors import ComparisonError
from abrun.series import window_bounds, window_problem

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
    with pytest.raises(ComparisonError, match=r"train/reward: window: got 'steps .*steps 1-100"):
        window_bounds(window, GRID, "train/reward")


@pytest.mark.parametrize("window", ["all", "last 20%", "steps 10-60"])
def test_a_window_within_the_run_is_no_problem(window):
    assert window_problem(window, num_steps=60) is None


def test_a_window_beyond_the_last_step_is_known_before_the_runs():
    said = window_problem("steps 50-80", num_steps=60)
    assert said == "got 'steps 50-80', and the runs end at step 60; use a window inside them, or 'last 20%'"
