"""The statistics of a budget: identities, and the coverage of intervals."""

import math

import numpy as np
import pytest

from abrun.tools.logprob_diff.budget import Array, Clusters, error
from abrun.tools.logprob_diff.findings import rerouted

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each test, whichever others have run in its process."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(5))


def test_the_error_is_the_metric_of_training() -> None:
    assert error(np.array([-1.0, -2.0]), np.array([-1.1, -1.9])) == pytest.approx(math.exp(0.1))
    assert error(np.array([-1.0]), np.array([-1.0])) == 1.0


def heavy_tailed(rng: np.random.Generator, num_prompts: int = 16) -> tuple[Array, np.ndarray]:
    """Sequences of a prompt share their scale, and errors have heavy tails."""
    scale = 0.02 * np.exp(rng.normal(0, 0.7, num_prompts))
    prompts = np.repeat(np.arange(num_prompts), rng.integers(80, 400, num_prompts))
    return np.expm1(np.abs(rng.standard_t(4, len(prompts)) * scale[prompts])), prompts


def touching_some(rng: np.random.Generator, share: float) -> tuple[Array, np.ndarray]:
    """A change that touches a share of 16 prompts alone."""
    prompts = np.repeat(np.arange(16), rng.integers(20, 80, 16))
    touched = (rng.random(16) < share)[prompts]
    values = rng.normal(1, 0.2, 16)[prompts] + rng.normal(0, 1, len(prompts))
    return np.where(touched, values, 0.0), prompts


@pytest.mark.parametrize(("share", "least"), [(0.5, 0.9), (0.8, 0.88), (1.0, 0.9), (None, 0.82)])
def test_intervals_keep_their_coverage(share: float | None, least: float) -> None:
    """Of 16 prompts' 95 % intervals 94, 91 and 95 % hold, and of heavy tails 88 %, by 200 samples of each."""
    rng, covered = np.random.default_rng(3), []
    truth = float(heavy_tailed(rng, 4_000)[0].mean()) if share is None else share
    for _ in range(200):
        values, prompts = heavy_tailed(rng) if share is None else touching_some(rng, share)
        interval = Clusters(prompts, num_intervals=1).mean(values)
        assert interval.low is not None and interval.high is not None
        covered.append(interval.low <= truth <= interval.high)
    print("coverage", np.mean(covered))
    assert least <= np.mean(covered) <= 1


def test_more_intervals_are_wider_and_equal_values_have_none() -> None:
    prompts = np.repeat(np.arange(12), 30)
    values = RNG.normal(0.1, 1, len(prompts))
    one, many = (Clusters(prompts, num_intervals=count).mean(values) for count in (1, 20))
    assert one.low is not None and many.low is not None and many.low < one.low < one.value == many.value
    same = Clusters(prompts, num_intervals=1).mean(np.zeros(len(prompts)))
    assert (same.value, same.low, same.high) == (0, 0, 0)
    few = Clusters(prompts[prompts < 3], num_intervals=1).mean(values[prompts < 3])
    assert few.low is None and few.high is None


@pytest.mark.parametrize("scale", [1e-3, 1e-7, 1e-9])
def test_intervals_are_as_wide_however_small_the_errors_are(scale: float) -> None:
    """Errors of float32 are 1e-7 above 1, and their intervals those of the same errors, enlarged."""
    prompts = np.repeat(np.arange(16), 500)
    errors = np.abs(RNG.normal(0, 1, len(prompts))) * np.exp(RNG.normal(0, 0.7, 16))[prompts]
    clusters = Clusters(prompts, num_intervals=10)
    large, small = clusters.mean(errors), clusters.mean(1 + scale * errors, minimum=1.0)
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
    values, prompts = touching(touched, 8)
    found = Clusters(prompts, num_intervals).mean(sign * values)
    assert found.low is not None and found.high is not None
    assert min(sign * values) <= found.low <= found.value <= found.high <= max(sign * values)
    reach = max(found.value - found.low, found.high - found.value)
    assert reach <= 5 * abs(found.value) + 1e-12 or touched > 4  # t of 7 degrees, 20 intervals: 4.8


def test_a_change_of_most_prompts_but_not_all_is_above_zero() -> None:
    for touched, num_prompts, num_intervals in ((7, 8, 20), (11, 12, 20), (14, 16, 20)):
        values, prompts = touching(touched, num_prompts)
        assert Clusters(prompts, num_intervals).mean(values).is_above_zero
    for touched in (5, 6):  # a change of few prompts, among more that it leaves alone
        values, prompts = touching(touched, 16)
        assert Clusters(prompts, num_intervals=1).mean(values).is_above_zero
    values, prompts = touching(1, 8)
    assert not Clusters(prompts, num_intervals=1).mean(values).is_above_zero


def test_the_order_of_experts_is_no_other_route() -> None:
    one = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])  # two tokens, two layers
    other = np.array([[[2, 1], [3, 4]], [[1, 2], [3, 5]]])
    assert rerouted(one, other) == [0.0, 0.5]
    assert rerouted(None, other) is None
