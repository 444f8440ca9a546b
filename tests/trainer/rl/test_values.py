"""PPO's value side by hand, against plain loops, by what must hold of any values, and with garbage masked."""

import itertools
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from abrun.trainer.rl.advantages import (
    AllReduceSum,
    TokenStatistics,
    generalized_advantages,
    reward_to_go_advantages,
    shift_right,
    token_rewards,
    token_statistics,
    value_loss,
    value_loss_metrics,
    value_statistics,
    whiten,
)

T = TypeVar("T")
GARBAGE = [math.nan, math.inf, -math.inf]


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def mask_of(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.bool)


def normal(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(num_rows: int, length: int, seed: int = 5) -> Tensor:
    """Completions with holes; the last row has no completion token."""
    mask = torch.rand(num_rows, length, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[-1] = False
    return mask


def close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, row(*expected), rtol=1e-12, atol=1e-14)


def alone(*values: float) -> list[float]:
    """The sums over one rank."""
    return list(values)


def on_ranks(function: Callable[[Any, AllReduceSum], T], pieces: Sequence[Any]) -> list[T]:
    """`function(piece, total)` of a rank a piece, at once; `total` sums over them, as an all-reduce does."""
    barrier = threading.Barrier(len(pieces), timeout=30)
    given: list[tuple[float, ...]] = [()] * len(pieces)

    def of_rank(rank: int) -> T:
        def total(*values: float) -> list[float]:
            given[rank] = values
            barrier.wait()
            sums = [sum(each, start=0.0) for each in zip(*given, strict=True)]
            barrier.wait()
            return sums

        return function(pieces[rank], total)

    with ThreadPoolExecutor(len(pieces)) as ranks:
        return list(ranks.map(of_rank, range(len(pieces))))


# --- where values and rewards stand ---


def test_values_move_along_their_own_row() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])
    assert shift_right(values).tolist() == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]
    assert shift_right(values[:, :1]).tolist() == [[0.0], [0.0]]


def test_the_reward_stands_at_the_last_completion_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert token_rewards(rewards, mask).tolist() == [
        [0.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 2.0],
        [3.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    penalties = torch.full((4, 4), 0.25)
    assert token_rewards(rewards, mask, penalties).tolist() == [
        [0.0, -0.25, 0.75, 0.0],
        [0.0, -0.25, 0.0, 1.75],
        [2.75, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ]


# --- advantages ---


def test_three_tokens_by_hand() -> None:
    # Backwards: delta 2 - 3 = -1; 0 + 0.5 * 3 - 2 = -0.5; -1 + 0.5 * 2 - 1 = -1; and gamma lambda is 0.25.
    advantages, returns = generalized_advantages(
        row(-1, 0, 2), row(1, 2, 3), mask_of(1, 1, 1), gamma=0.5, gae_lambda=0.5
    )
    close(advantages, -1.1875, -0.75, -1.0)
    close(returns, -0.1875, 1.25, 2.0)


def test_masked_tokens_inside_a_completion_are_no_steps() -> None:
    hole, every = mask_of(0, 1, 0, 0, 1, 1, 0), mask_of(1, 1, 1)
    for garbage in (9.0, *GARBAGE):
        x = garbage
        found = generalized_advantages(
            row(x, -1, x, x, 0, 2, x), row(x, 1, x, x, 2, 3, x), hole, gamma=0.5, gae_lambda=0.5
        )
        expected = generalized_advantages(row(-1, 0, 2), row(1, 2, 3), every, gamma=0.5, gae_lambda=0.5)
        for with_hole, without in zip(found, expected, strict=True):
            assert torch.equal(with_hole[hole], without[every]) and not with_hole[~hole].any()
        rewards = token_rewards(row(2.0)[0], hole, row(x, 1, x, x, 0, 0, x))
        assert rewards.tolist() == [[0, -1, 0, 0, 0, 2, 0]]


def loop_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> list[list[float]]:
    """The definition: a sum over what follows, token by token, on the completion tokens of a row alone."""
    found = []
    for r, v, m in zip(rewards.tolist(), values.tolist(), mask.tolist(), strict=True):
        steps = [t for t, counted in enumerate(m) if counted]
        of_row = [0.0] * len(m)
        for index, t in enumerate(steps):
            for power, s in enumerate(steps[index:]):
                later = steps[index + power + 1 :]
                delta = r[s] + (gamma * v[later[0]] if later else 0.0) - v[s]
                of_row[t] += (gamma * gae_lambda) ** power * delta
        found.append(of_row)
    return found


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.7), (0.99, 1.0), (1.0, 0.0)])
def test_against_the_definition_in_loops(gamma: float, gae_lambda: float) -> None:
    rewards, values, mask = normal(6, 9, seed=1), normal(6, 9, seed=2), random_mask(6, 9)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    expected = torch.tensor(loop_advantages(rewards, values, mask, gamma, gae_lambda), dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(returns, expected + values * mask, rtol=1e-12, atol=1e-14)
    assert advantages[:-1].any(dim=1).all() and not advantages[-1].any() and not advantages[~mask].any()
    single = generalized_advantages(rewards.float(), values.float(), mask, gamma=gamma, gae_lambda=gae_lambda)
    for each, exact in zip(single, (advantages, returns), strict=True):
        assert each.dtype == torch.float32
        torch.testing.assert_close(each.double(), exact, rtol=1e-5, atol=1e-6)


# --- statistics of the global batch ---


def test_statistics_and_whitening_by_hand() -> None:
    # Of 1, 2 and 6: mean 3, squares 4 + 1 + 9 over n - 1 = 2.
    values, mask = row(1, math.nan, 2, 6), mask_of(1, 0, 1, 1)
    found = token_statistics(values, mask, alone)
    assert (found.mean, found.variance) == (3.0, 7.0) and found.std == 7**0.5
    scale = 7**0.5 + 1e-6
    close(whiten(values, mask, mean=3.0, std=found.std), -2 / scale, 0.0, -1 / scale, 3 / scale)
    close(whiten(values, mask, mean=3.0, std=None), -2.0, 0.0, -1.0, 3.0)
    close(whiten(values, mask, mean=0.0, std=found.std), 1 / scale, 0.0, 2 / scale, 6 / scale)
    assert token_statistics(values, mask_of(0, 0, 1, 0), alone) == TokenStatistics(mean=2.0, variance=0.0)


@given(
    value=st.floats(-1e6, 1e6),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=60, deadline=None)
def test_equal_advantages_are_exactly_zero(value: float, counts: list[int], dtype: torch.dtype) -> None:
    """0.1 and 0.7 have no exact sum, and ranks add up theirs in another order."""

    def of_rank(count: int, total: AllReduceSum) -> tuple[TokenStatistics, list[Tensor]]:
        values, mask = torch.full((1, count), value, dtype=dtype), torch.ones(1, count, dtype=torch.bool)
        found = token_statistics(values, mask, total)
        means = [found.mean] * 2 + [0.0]  # a baseline and a scale, either alone
        stds = [found.std, None, found.std]
        return found, [
            whiten(values, mask, mean=mean, std=std) for mean, std in zip(means, stds, strict=True)
        ]

    for found, advantages in on_ranks(of_rank, counts):
        assert found.mean == torch.tensor(value, dtype=dtype).item() and found.variance == 0
        assert not any(each.any() for each in advantages)


def test_the_variance_of_large_values_keeps_its_digits() -> None:
    """Raw squares are multiples of 128 near 1e18: the variance from their sums would have no digit."""
    values = 1e9 + torch.tensor([[-1.0, 0.0, 1.0] * 50], dtype=torch.float64)
    found = token_statistics(values, torch.ones_like(values, dtype=torch.bool), alone)
    assert found.mean == 1e9 and found.variance == pytest.approx(100 / 149, rel=1e-12)


@given(
    seed=st.integers(0, 999),
    cuts=st.sets(st.integers(1, 6), max_size=4),
    offset=st.sampled_from([0.0, 3.0, 1e6]),
    garbage=st.sampled_from([0.0, *GARBAGE]),
)
@settings(max_examples=60, deadline=None)
def test_how_the_batch_is_spread_changes_no_statistic(
    seed: int, cuts: set[int], offset: float, garbage: float
) -> None:
    mask = random_mask(7, 5, seed)
    mask[0, 0] = True
    old_values = (offset + normal(7, 5, seed=seed)).masked_fill(~mask, garbage)
    returns = (old_values + normal(7, 5, seed=seed + 1)).masked_fill(~mask, garbage)
    bounds = [0, *sorted(cuts), 7]
    rows = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def of_rank(part: slice, total: AllReduceSum) -> tuple[TokenStatistics, dict[str, float]]:
        pieces = old_values[part], returns[part], mask[part]
        return token_statistics(pieces[1], pieces[2], total), value_statistics(*pieces, total)

    (whole, critic), *_ = on_ranks(of_rank, [slice(None)])
    by_rank = on_ranks(of_rank, rows)
    assert all(each == by_rank[0] for each in by_rank)  # every rank has the same numbers, to the bit
    spread, of_spread = by_rank[0]
    counted = returns[mask].tolist()
    assert whole.mean == pytest.approx(statistics.fmean(counted), rel=1e-12, abs=1e-12)
    variance = statistics.variance(counted) if len(counted) > 1 else 0.0
    for found in (whole, spread):
        assert found.variance == pytest.approx(variance, rel=1e-8, abs=1e-12)
    assert spread.mean == pytest.approx(whole.mean, rel=1e-12, abs=1e-12)
    for key, value in critic.items():
        assert of_spread[key] == pytest.approx(value, rel=1e-8, abs=1e-8), key


# --- REINFORCE++ ---


@pytest.mark.parametrize("baseline", ["batch_mean", "none"])
def test_reward_to_go_counts_tokens_of_all_ranks(baseline: Any) -> None:
    """A mean over sequences, or over each rank's tokens, would be another: lengths differ."""
    mask, penalties, rewards = random_mask(7, 6), 0.1 * normal(7, 6, seed=1), normal(7, seed=2)

    def of_rank(rows: slice, total: AllReduceSum) -> Tensor:
        return reward_to_go_advantages(
            rewards[rows],
            mask[rows],
            penalties[rows],
            baseline=baseline,
            normalize=True,
            all_reduce_sum=total,
        )

    (whole,) = on_ranks(of_rank, [slice(None)])
    for cuts in ([slice(0, 3), slice(3, 7)], [slice(0, 6), slice(6, 7)], [slice(0, 0), slice(0, 7)]):
        torch.testing.assert_close(torch.cat(on_ranks(of_rank, cuts)), whole, rtol=1e-12, atol=1e-14)
    counted = whole[mask]
    to_go = [
        rewards[row].item() - sum(penalties[row, s].item() for s in range(t, 6) if mask[row, s])
        for row, t in mask.nonzero().tolist()
    ]
    offset = statistics.fmean(to_go) if baseline == "batch_mean" else 0.0
    scale = statistics.stdev(to_go) + 1e-6
    assert counted.tolist() == pytest.approx([(value - offset) / scale for value in to_go], rel=1e-9)


# --- the critic ---


def test_value_loss_by_hand() -> None:
    # Errors 3 - 1 = 2 against 1.5 - 1 (the value may move 0.5 from 1); 1 - 3 against the same; 0 against 0.5.
    values = row(3, 1, 2).requires_grad_()
    returns, old = row(1, 3, 2), row(1, 1, 1)
    found = value_loss(values, old, returns, mask_of(1, 1, 1), clip_range=0.5)
    close(found.loss, 2.0, 2.0, 0.125)
    close(torch.autograd.grad(found.loss.sum(), values)[0], 2.0, -2.0, 0.0)
    assert found.clipped.tolist() == [[False, False, True]]
    plain = value_loss(values, old, returns, mask_of(1, 1, 1), clip_range=None)
    close(plain.loss, 2.0, 2.0, 0.0)
    close(torch.autograd.grad(plain.loss.sum(), values)[0], 2.0, -2.0, 0.0)
    assert not plain.clipped.any() and plain.clipped.dtype == torch.bool
    at_bounds = row(1.5, 0.5, 1).requires_grad_()
    found_there = value_loss(at_bounds, old, row(3, 3, 3), mask_of(1, 1, 1), clip_range=0.5)
    close(torch.autograd.grad(found_there.loss.sum(), at_bounds)[0], -1.5, -2.5, -2.0)
    # A batch of six tokens over two updates: the loss by its reduction's weights, the fraction by tokens.
    weights = row(0.5, 0.25, 0.25)
    parts = value_loss_metrics(found, mask_of(1, 1, 1), weights, num_tokens=6.0, num_updates=2)
    assert parts.sums["train/critic/loss"].item() == (0.5 * 2 + 0.25 * 2 + 0.25 * 0.125) / 2
    assert parts.sums["train/critic/clip_fraction"].item() == 1 / 6


def loop_value_loss(value: float, old: float, target: float, clip_range: float | None) -> tuple[float, bool]:
    errors = [(value - target) ** 2]
    if clip_range is not None:
        errors.append((min(max(value, old - clip_range), old + clip_range) - target) ** 2)
    return 0.5 * max(errors), errors[-1] > errors[0]


@pytest.mark.parametrize("clip_range", [None, 0.2, 0.5, 100.0])
def test_value_loss_against_loops_and_by_finite_differences(clip_range: float | None) -> None:
    values, old, returns = (normal(6, 9, seed=seed) for seed in (1, 2, 3))
    mask = random_mask(6, 9)
    found = value_loss(values, old, returns, mask, clip_range=clip_range)
    columns = zip(*(each.flatten().tolist() for each in (values, old, returns, mask)), strict=True)
    expected = [loop_value_loss(v, o, r, clip_range) if m else (0.0, False) for v, o, r, m in columns]
    torch.testing.assert_close(
        found.loss.flatten(), torch.tensor([loss for loss, _ in expected], dtype=torch.float64)
    )
    assert found.clipped.flatten().tolist() == [clipped for _, clipped in expected]
    if clip_range is not None and clip_range < 1:
        assert 0.1 < found.clipped[mask].double().mean() < 0.9
    # Kinks: at the bounds, and where the two errors are equal with the value outside of them.
    moved = (values - old).abs()
    assert clip_range is None or (moved - clip_range).abs().min() > 1e-4
    values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda each: value_loss(each, old, returns, mask, clip_range=clip_range).loss, values
    )


def test_what_is_masked_reaches_no_value_and_no_gradient() -> None:
    clean = [normal(6, 9, seed=seed) for seed in (1, 2, 3)]
    mask = random_mask(6, 9)

    def found(tensors: list[Tensor]) -> list[Any]:
        values, old, returns = tensors
        values = values.clone().requires_grad_()
        loss = value_loss(values, old, returns, mask, clip_range=0.3)
        parts = value_loss_metrics(loss, mask, mask / 20.0, num_tokens=20.0, num_updates=1)
        (gradient,) = torch.autograd.grad(loss.loss.sum(), values)
        assert not gradient[~mask].any() and not loss.loss[~mask].any() and not loss.clipped[~mask].any()
        return [
            loss.loss.tolist(),
            gradient.tolist(),
            {key: each.item() for key, each in parts.sums.items()},
            value_statistics(old, returns, mask, alone),
            whiten(returns, mask, mean=0.5, std=2.0).tolist(),
        ]

    expected = found(clean)
    for garbage, index in itertools.product(GARBAGE, range(3)):
        dirty = [each.masked_fill(~mask, garbage) if index == i else each for i, each in enumerate(clean)]
        assert found(dirty) == expected


def test_explained_variance_by_hand() -> None:
    returns, mask = row(1, 2, 6, math.nan), mask_of(1, 1, 1, 0)
    # Errors 1, 0 and 2: mean 1, variance 1, where the returns' is 7.
    found = value_statistics(row(0, 2, 4, 99), returns, mask, alone)
    assert found == {
        "train/critic/values_mean": 2.0,
        "train/critic/returns_mean": 3.0,
        "train/critic/explained_var": 1 - 1 / 7,
    }
    explained = {
        "perfect": value_statistics(returns, returns, mask, alone),
        "off by one": value_statistics(returns + 1, returns, mask, alone),
        "blind": value_statistics(row(4, 4, 4, 4), returns, mask, alone),
        "worse": value_statistics(-returns, returns, mask, alone),
        "nothing to explain": value_statistics(row(1, 1, 2, 0), row(5, 5, 5, 5), mask, alone),
    }
    values = {name: found["train/critic/explained_var"] for name, found in explained.items()}
    assert (values["perfect"], values["off by one"], values["blind"]) == (1.0, 1.0, 0.0)
    assert values["worse"] == -3.0  # errors are twice the returns
    assert values["nothing to explain"] == pytest.approx(1 - (1 / 3) / 1e-8)
