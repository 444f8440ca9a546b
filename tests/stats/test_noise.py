"""Seed noise against simulated runs: every stated rate is counted with plain loops or plain draws."""

import math

import numpy as np
import pytest
from scipy import stats

from abrun.experiment.power import ASSURANCE
from abrun.stats.noise import (
    detectable_difference,
    find_outliers,
    further_run_p,
    gap_of_two_runs,
    passing_margin,
    prediction_half_width,
    two_groups,
)
from abrun.stats.power import sd_interval, sd_upper_bound

SIZES = (3, 5, 8)
NUM = 20_000  # experiments; a share of 0.95 is then known to 0.0015, one of 0.8 to 0.0028


def normal_runs(size: int, num: int = NUM) -> np.ndarray:
    return np.random.default_rng(size).normal(0.5, 0.03, (num, size))


@pytest.mark.parametrize("size", SIZES)
def test_intervals_and_gaps_hold_as_often_as_they_say(size: int) -> None:
    runs, further = normal_runs(size), np.random.default_rng(99).normal(0.5, 0.03, (NUM, 2))
    means = sum(runs[:, index] for index in range(size)) / size
    sds = np.sqrt(sum((runs[:, index] - means) ** 2 for index in range(size)) / (size - 1))
    low, high = sd_interval(1.0, size)  # all bounds are multiples of the sd
    gap, reach = gap_of_two_runs(1.0, size, 0.95), prediction_half_width(1.0, size, 0.95)
    distances = np.abs(further[:, 0] - means)
    assert ((low * sds <= 0.03) & (high * sds >= 0.03)).mean() == pytest.approx(0.90, abs=0.007)
    assert (np.abs(further[:, 0] - further[:, 1]) <= gap * sds).mean() == pytest.approx(0.95, abs=0.006)
    assert (distances <= reach * sds).mean() == pytest.approx(0.95, abs=0.006)
    assert further_run_p(reach, 1.0, size) == pytest.approx(0.05, rel=1e-6)
    assert further_run_p(distances[0], 0.0, size) == 0


@pytest.mark.parametrize("size", SIZES)
def test_gaps_of_skewed_and_bounded_levels_hold_nine_times_of_ten(size: int) -> None:
    rng, shape = np.random.default_rng(size), (NUM, size + 2)
    laws = {"skewed": -rng.exponential(1, shape), "bounded": rng.beta(8, 2, shape), "flat": rng.random(shape)}
    gap, reach = gap_of_two_runs(1.0, size, 0.95), prediction_half_width(1.0, size, 0.95)
    for law, levels in laws.items():
        runs, one, two = levels[:, :size], levels[:, size], levels[:, size + 1]
        sds = runs.std(axis=1, ddof=1)
        held = (
            (np.abs(one - two) <= gap * sds).mean(),
            (np.abs(one - runs.mean(axis=1)) <= reach * sds).mean(),
        )
        assert min(held) > (0.89 if law == "skewed" else 0.93), (law, held)


@pytest.mark.parametrize("num_pairs", [3, 5, 8, 10])
def test_pairs_detect_the_detectable_difference_four_times_of_five(num_pairs: int) -> None:
    rng, sd = np.random.default_rng(num_pairs), 0.04
    difference = detectable_difference(sd, num_pairs)
    pairs = rng.normal(difference, sd, (100_000, num_pairs))
    error = pairs.std(axis=1, ddof=1) / math.sqrt(num_pairs)
    low = pairs.mean(axis=1) - stats.t.ppf(0.95, num_pairs - 1) * error
    assert (low > 0).mean() == pytest.approx(0.8, abs=0.005)
    margin = passing_margin(sd, num_pairs)
    equal = pairs - difference
    reach = np.abs(equal.mean(axis=1)) + stats.t.ppf(0.95, num_pairs - 1) * error
    assert (reach < margin).mean() == pytest.approx(0.8, abs=0.005)


@pytest.mark.parametrize("size", SIZES)
def test_a_planned_difference_is_large_enough_in_four_of_five_pilots(size: int) -> None:
    """The sd of the pilot is uncertain: the difference is planned with its upper bound."""
    true_difference = detectable_difference(math.sqrt(2) * 0.03, 5)
    sds = normal_runs(size).std(axis=1, ddof=1)
    planned = detectable_difference(math.sqrt(2) * sd_upper_bound(1.0, size, ASSURANCE), 5) * sds
    assert np.mean(planned >= true_difference) == pytest.approx(ASSURANCE, abs=0.012)


def test_two_groups_are_told_from_one() -> None:
    split = two_groups([0.31, 0.70, 0.30, 0.71, 0.29, 0.69])
    assert split is not None and 0.31 < split[0] < 0.69 and split[1] < 0.001
    p_values = [found[1] for levels in normal_runs(6, 1000) if (found := two_groups(levels))]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.02)
    assert two_groups([0.1, 0.2, 0.3, 0.4]) is None and two_groups([0.3] * 6) is None


def test_outliers_are_far_from_most_values_and_beyond_their_error() -> None:
    levels = np.array([0.62, 0.63, 0.77, 0.775, 0.78, 0.785, 0.79])
    assert find_outliers(levels, np.full(7, 0.01)).tolist() == [True, True, *[False] * 5]
    assert not find_outliers(levels, np.full(7, 0.2)).any()
    assert find_outliers(np.array([1.0, 1, 1, 2]), np.zeros(4)).tolist() == [False, False, False, True]
