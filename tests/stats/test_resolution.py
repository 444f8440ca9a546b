"""The step in which values move, and values that agree by more than chance."""

import numpy as np
import pytest

from abrun.stats.resolution import agree_beyond_chance, smallest_step

ARMS = ["dense"] * 3 + ["chunked"] * 3


@pytest.mark.parametrize("jitter", [0.0, 0.01])
@pytest.mark.parametrize("levels", [(75.02, 71.0), (0.52, 0.38)])
def test_the_distance_of_two_arms_is_no_step(levels: tuple[float, float], jitter: float) -> None:
    """Two constants of 75.02 and 71 were taken for counts that move by 4.02; so were utilisations."""
    rng = np.random.default_rng(0)
    curves = [
        np.round(level + jitter * rng.integers(0, 2, 20).astype(np.float64), 2)
        for level in levels
        for _ in range(3)
    ]
    assert smallest_step(ARMS, curves) == pytest.approx(jitter)


def test_scores_that_are_no_multiples_of_the_arms_distance_have_no_step() -> None:
    assert smallest_step(ARMS, [np.array([score]) for score in [0.4213] * 3 + [0.3807] * 3]) == 0


def test_shares_of_prompts_have_the_distance_of_the_arms_as_a_step() -> None:
    curves = [np.full(1, 8 / 8)] * 3 + [np.full(1, 7 / 8)] * 3
    assert smallest_step(ARMS, curves) == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("pairs", "agree"),
    [
        ([(0.3123, 0.3123), (0.3451, 0.3451)], True),
        ([(0.3123, 0.3129), (0.3251, 0.3251)], False),  # apart
        ([(0.31, 0.31), (0.33, 0.33), (0.32, 0.32), (0.3, 0.3)], False),  # two digits make values equal
        ([(0.3123, 0.3123), (0.3123, 0.3123)], False),  # one value for all pairs
    ],
)
def test_values_agree_if_the_log_could_tell_them_apart(pairs: list[tuple[float, float]], agree: bool) -> None:
    assert agree_beyond_chance(np.array(pairs)) == agree
