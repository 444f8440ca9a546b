"""Advantages by hand, against Python's statistics module, and where a group says nothing."""

import statistics
from functools import partial
from typing import Any

import pytest
import torch

from abrun.trainer.rl.advantages import group_advantages, overlong_penalties


def advantages(
    rewards: list[float],
    group_size: int,
    baseline: Any,
    normalize: bool = True,
    over: Any = "group",
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    settings: Any = {"baseline": baseline, "normalize": normalize, "normalize_over": over}
    return group_advantages(torch.tensor(rewards, dtype=dtype), group_size, **settings).tolist()


def test_grpo_by_hand() -> None:
    # Mean 2, sample variance (1 + 0 + 1) / 2 = 1.
    assert advantages([1.0, 2.0, 3.0], 3, "group_mean", True) == pytest.approx([-1.0, 0.0, 1.0], abs=2e-6)
    assert advantages([1.0, 2.0, 3.0], 3, "group_mean", False) == [-1.0, 0.0, 1.0]


def test_the_epsilon_is_added_to_the_standard_deviation() -> None:
    values = advantages([0.0, 2e-6], 2, "group_mean")
    std = 2**0.5 * 1e-6
    assert values == pytest.approx([-1e-6 / (std + 1e-6), 1e-6 / (std + 1e-6)], rel=1e-12)


OTHERS = ("leave_one_out", True, "leave_one_out")


def test_others_of_equal_rewards_leave_an_advantage_undivided() -> None:
    """NeMo-RL's calculate_baseline_and_std_per_prompt and GRPOAdvantageEstimator: no std, no division."""
    others_of_the_rest = -1 / 3 / ((1 / 3) ** 0.5 + 1e-6)  # of 1, 0, 0
    assert advantages([1.0, 0.0, 0.0, 0.0], 4, *OTHERS) == pytest.approx([1.0] + [others_of_the_rest] * 3)
    # 0.1 three times has a mean that is not 0.1, and no std all the same.
    assert advantages([0.7, 0.1, 0.1, 0.1], 4, *OTHERS)[0] == pytest.approx(0.6, rel=1e-12)


def test_leave_one_out_with_its_std_agrees_with_plain_loops() -> None:
    rewards = torch.randn(20, generator=torch.Generator().manual_seed(8), dtype=torch.float64).tolist()
    expected = []
    for start in range(0, 20, 5):
        for index in range(5):
            others = [rewards[start + other] for other in range(5) if other != index]
            centred = rewards[start + index] - statistics.mean(others)
            expected.append(centred / (statistics.stdev(others) + 1e-6))
    assert advantages(rewards, 5, *OTHERS) == pytest.approx(expected, rel=1e-12)
    for reward in (0.0, 0.1, 1e6 / 3):
        assert advantages([reward] * 5, 5, *OTHERS) == [0.0] * 5


def penalties(lengths: list[int], *, most: int = 20, buffer: int = 8, factor: float = 1.0) -> list[float]:
    found = overlong_penalties(torch.tensor(lengths), max_new_tokens=most, buffer=buffer, factor=factor)
    return found.tolist()


def test_overlong_penalties_by_hand() -> None:
    """Up to 12 tokens nothing, then an eighth a token, and the whole of it at 20."""
    assert penalties([1, 12, 13]) == [0.0, 0.0, 0.125]
    assert penalties([14, 16, 20]) == [0.25, 0.5, 1.0]
    assert penalties([14, 16, 20], factor=0.5) == [0.125, 0.25, 0.5]
    assert penalties([0, 10, 20], buffer=20) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
def test_agrees_with_plain_loops(baseline: Any, normalize: bool) -> None:
    rewards = torch.randn(20, generator=torch.Generator().manual_seed(5), dtype=torch.float64).tolist()
    expected = []
    for start in range(0, 20, 5):
        group = rewards[start : start + 5]
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            value = (
                reward
                - {
                    "group_mean": statistics.mean(group),
                    "leave_one_out": statistics.mean(others),
                    "none": 0.0,
                }[baseline]
            )
            expected.append(value / (statistics.stdev(group) + 1e-6) if normalize else value)
    assert advantages(rewards, 5, baseline, normalize) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
def test_equal_rewards_give_exactly_zero(baseline: Any, dtype: torch.dtype) -> None:
    # 0.1 and 0.7 have no exact sum: the mean of seven of them need not be the reward itself.
    for reward in (0.0, 0.1, 0.7, 1e6 / 3):
        assert advantages([reward] * 7, 7, baseline, dtype=dtype) == [0.0] * 7
        if baseline != "none":
            assert advantages([reward] * 7, 7, baseline, False, dtype=dtype) == [0.0] * 7


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean"])
def test_large_rewards_keep_their_differences(baseline: Any) -> None:
    """float32 holds 10,000,000 to 10,000,002, and neither their sum nor their mean."""
    in_float32 = partial(advantages, dtype=torch.float32)
    small = in_float32([0.0, 1.0, 2.0, 0.0], 4, baseline)
    assert in_float32([1e7, 1e7 + 1, 1e7 + 2, 1e7], 4, baseline) == small
    assert statistics.fmean(small) == pytest.approx(0, abs=1e-7) and small[2] > 1
    # The largest of float32: squares and sums of them are far outside.
    assert in_float32([0.0, 1e38, 2e38, 0.0], 4, baseline) == pytest.approx(small, rel=1e-5)
    assert in_float32([3e38, -3e38, 3e38, -3e38], 4, baseline) == pytest.approx(
        [
            advantage * 4 / 3 if baseline == "leave_one_out" else advantage
            for advantage in (0.866, -0.866) * 2
        ],
        rel=1e-3,
    )


# --- relative to the global batch ---


def test_batch_mean_by_hand() -> None:
    # Mean 2, sample variance (1 + 1 + 4 + 4) / 3 = 10 / 3, whatever the groups.
    rewards = [1.0, 3.0, 0.0, 4.0]
    assert advantages(rewards, 2, "batch_mean", False, "group") == [-1.0, 1.0, -2.0, 2.0]
    std = (10 / 3) ** 0.5 + 1e-6
    expected = [-1 / std, 1 / std, -2 / std, 2 / std]
    for group_size in (1, 2, 4):  # REINFORCE++ needs no groups
        assert advantages(rewards, group_size, "batch_mean", True, "batch") == pytest.approx(expected)


def test_group_mean_over_the_std_of_the_batch_by_hand() -> None:
    # Group means 2 and 2; the std is that of the four rewards, not of what is left of them.
    std = (10 / 3) ** 0.5 + 1e-6
    found = advantages([1.0, 3.0, 0.0, 4.0], 2, "group_mean", True, "batch")
    assert found == pytest.approx([-1 / std, 1 / std, -2 / std, 2 / std])
    std = (11 / 3) ** 0.5 + 1e-6  # of 0, 0, 2, 4: mean 1.5, squares 2.25 + 2.25 + 0.25 + 6.25
    found = advantages([0.0, 0.0, 2.0, 4.0], 2, "leave_one_out", True, "batch")
    assert found == pytest.approx([0.0, 0.0, -2 / std, 2 / std])


def test_a_rank_normalises_over_the_batch_of_all_ranks() -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    settings: Any = {"baseline": "batch_mean", "normalize": True, "normalize_over": "batch"}
    whole = group_advantages(rewards, 3, **settings)
    ranks = [group_advantages(part, 3, **settings, batch_rewards=rewards) for part in rewards.split(6)]
    assert torch.equal(torch.cat(ranks), whole)


@pytest.mark.parametrize(
    ("baseline", "normalize", "over"),
    [("batch_mean", False, "group"), ("batch_mean", True, "batch"), ("none", True, "batch")],
)
def test_a_group_of_equal_rewards_has_a_signal_in_a_batch_that_differs(
    baseline: Any, normalize: bool, over: Any
) -> None:
    found = advantages([0.1, 0.1, 0.7, 0.3], 2, baseline, normalize, over)
    assert found[0] == found[1] != 0
    for reward in (0.1, 0.7, 1e6 / 3):
        assert advantages([reward] * 6, 2, baseline, normalize, over) == [0.0] * 6
    assert advantages([0.3], 1, baseline, normalize, over) == [0.0]  # a batch of one sample
