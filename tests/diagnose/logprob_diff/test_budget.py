"""The statistics of a budget: identities, what is known of normal errors, and the coverage of intervals."""

import math

import numpy as np
import pytest

from abrun.diagnose.logprob_diff.budget import Array, Resampling, binned, contributions, error
from abrun.diagnose.logprob_diff.findings import rerouted

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each test, whichever others have run in its process."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(5))


N = 200_000


def by_quadrature(steps: list[float], points: int = 20_000) -> list[float]:
    """The Aumann-Shapley values of exp(abs(d)) - 1 at d = sum(steps): the straight line, by midpoints."""
    d = sum(steps)
    slopes = [math.copysign(math.exp(abs(t * d)), t * d) for t in (np.arange(points) + 0.5) / points]
    return [sum(slopes) / points * step for step in steps]


@pytest.mark.parametrize("steps", [[0.3, -0.1, 0.05], [-1.5, 0.2], [2.0, 1.0, -0.5, 0.25]])
def test_contributions_are_aumann_shapley_values(steps: list[float]) -> None:
    parts = contributions(np.array([sum(steps)]), [np.array([step]) for step in steps])
    assert [float(part[0]) for part in parts] == pytest.approx(by_quadrature(steps), rel=1e-6)
    assert sum(float(part[0]) for part in parts) == pytest.approx(math.expm1(abs(sum(steps))), rel=1e-12)


def test_steps_that_cancel_contribute_nothing() -> None:
    parts = contributions(np.array([0.0]), [np.array([0.25]), np.array([-0.25])])
    assert [part.tolist() for part in parts] == [[0.0], [0.0]]


def shares(*steps: Array) -> list[float]:
    parts = contributions(sum(steps[1:], steps[0]), steps)
    return [float(part.mean()) / float(sum(part.mean() for part in parts)) for part in parts]


def test_independent_errors_contribute_by_their_variances_in_any_order() -> None:
    one, two = RNG.normal(0, 0.01, N), RNG.normal(0, 0.02, N)
    assert shares(one, two) == pytest.approx([0.2, 0.8], abs=0.01)
    assert shares(two, one) == pytest.approx([0.8, 0.2], abs=0.01)


def test_an_error_that_both_share_contributes_nothing() -> None:
    """Trainer and engine are off float32 by the same, and the engine by a little more."""
    shared, engine = RNG.normal(0, 0.02, N), RNG.normal(0, 0.005, N)
    to_float32, to_engine = -shared, shared + engine
    assert shares(to_float32, to_engine) == pytest.approx([0.0, 1.0], abs=0.03)


def test_the_error_is_the_metric_of_training() -> None:
    assert error(np.array([-1.0, -2.0]), np.array([-1.1, -1.9])) == pytest.approx(math.exp(0.1))
    assert error(np.array([-1.0]), np.array([-1.0])) == 1.0


def test_intervals_are_as_wide_as_they_say() -> None:
    """Sequences of a prompt share their scale, errors have heavy tails: of 95 % intervals 88 % and more hold.

    The truth is the mean of many more prompts, drawn alike.
    """
    rng = np.random.default_rng(1)

    def sample(num_prompts: int) -> tuple[Array, np.ndarray]:
        scale = 0.02 * np.exp(rng.normal(0, 0.7, num_prompts))
        prompts = np.repeat(np.arange(num_prompts), rng.integers(80, 400, num_prompts))
        return np.expm1(np.abs(rng.standard_t(4, len(prompts)) * scale[prompts])), prompts

    truth = float(sample(4_000)[0].mean())
    held = []
    for _ in range(60):
        values, prompts = sample(16)
        found = Resampling(prompts, num_intervals=1).mean(values)
        assert found.low is not None and found.high is not None
        held.append(found.low <= truth <= found.high)
    print("coverage", np.mean(held))
    assert 0.88 <= np.mean(held) <= 0.99


def test_more_intervals_are_wider_and_equal_values_have_none() -> None:
    prompts = np.repeat(np.arange(12), 30)
    values = RNG.normal(0.1, 1, len(prompts))
    one, many = (Resampling(prompts, num_intervals=count).mean(values) for count in (1, 20))
    assert one.low is not None and many.low is not None and many.low < one.low < one.value == many.value
    same = Resampling(prompts, num_intervals=1).mean(np.zeros(len(prompts)))
    assert (same.value, same.low, same.high) == (0, 0, 0)
    few = Resampling(prompts[prompts < 3], num_intervals=1).mean(values[prompts < 3])
    assert few.low is None and few.high is None


@pytest.mark.parametrize("scale", [1e-3, 1e-7, 1e-9])
def test_intervals_are_as_wide_however_small_the_errors_are(scale: float) -> None:
    """Errors of float32 are 1e-7 above 1, and their intervals those of the same errors, enlarged."""
    prompts = np.repeat(np.arange(16), 500)
    errors = np.abs(RNG.normal(0, 1, len(prompts))) * np.exp(RNG.normal(0, 0.7, 16))[prompts]
    resampling = Resampling(prompts, num_intervals=10)
    large, small = resampling.mean(errors), resampling.mean(1 + scale * errors, least=1.0)
    assert large.low is not None and large.high is not None and small.low is not None and small.high
    for one, other in ((large.value, small.value), (large.low, small.low), (large.high, small.high)):
        assert (other - 1) / scale == pytest.approx(one, rel=1e-4)


def touching(touched: int, num_prompts: int, size: float = 1e-3) -> tuple[Array, np.ndarray]:
    """A change of so many prompts that leaves the others as they are, to the bit; each token's prompt."""
    prompts = np.repeat(np.arange(num_prompts), RNG.integers(40, 48, num_prompts))
    return np.where(prompts < touched, np.abs(RNG.normal(size, size / 5, len(prompts))), 0.0), prompts


@pytest.mark.parametrize("num_intervals", [1, 20])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("touched", [1, 2, 6, 7])
def test_intervals_end_where_the_values_do(touched: int, sign: int, num_intervals: int) -> None:
    """Many resamples have none of the touched prompts, or only those: no standard error of their own."""
    values, prompts = touching(touched, 8)
    found = Resampling(prompts, num_intervals).mean(sign * values)
    assert found.low is not None and found.high is not None
    assert min(sign * values) <= found.low <= found.value <= found.high <= max(sign * values)
    reach = max(found.value - found.low, found.high - found.value)
    assert reach <= 4 * abs(found.value) + 1e-12 or touched > 4


def test_a_change_of_most_prompts_but_not_all_is_above_zero() -> None:
    for touched, num_prompts, num_intervals in ((7, 8, 20), (11, 12, 20), (14, 16, 20)):
        values, prompts = touching(touched, num_prompts)
        assert Resampling(prompts, num_intervals).mean(values).is_above_zero
    for touched in (3, 5):  # a change of few prompts, among more that it leaves alone
        values, prompts = touching(touched, 16)
        assert Resampling(prompts, num_intervals=1).mean(values).is_above_zero
    values, prompts = touching(1, 8)
    assert not Resampling(prompts, num_intervals=1).mean(values).is_above_zero


@pytest.mark.parametrize(("share", "least"), [(0.5, 0.93), (0.8, 0.9), (1.0, 0.9)])
def test_intervals_keep_their_coverage(share: float, least: float) -> None:
    """Of changes that touch some prompts alone, 16 of them: 98 %, 96 % and 94 % of 95 % intervals hold.

    By 400 samples of each kind: 98, 97 and 94 % without a least spread, and lows below every value.
    """
    rng, held = np.random.default_rng(3), []
    for _ in range(100):
        prompts = np.repeat(np.arange(16), rng.integers(20, 80, 16))
        touched = (rng.random(16) < share)[prompts]
        values = np.where(touched, rng.normal(1, 0.2, 16)[prompts] + rng.normal(0, 1, len(prompts)), 0.0)
        found = Resampling(prompts, num_intervals=1).mean(values)
        assert found.low is not None and found.high is not None
        held.append(found.low <= share <= found.high)
    print("coverage", np.mean(held))
    assert least <= np.mean(held) <= 1


def test_bins_hold_each_token_once() -> None:
    bins = binned(np.array([1.0, 2.0, 4.0]), np.array([0.0, 0.5, 7.0]), [0, 1, 2, 8])
    assert [(each.first, each.num_tokens, each.mean, each.largest) for each in bins] == [
        (0, 2, 1.5, 2),
        (2, 1, 4, 4),
    ]


def test_the_order_of_experts_is_no_other_route() -> None:
    one = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])  # two tokens, two layers
    other = np.array([[[2, 1], [3, 4]], [[1, 2], [3, 5]]])
    assert rerouted(one, other) == [0.0, 0.5]
    assert rerouted(None, other) is None
