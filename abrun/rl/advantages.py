"""Advantages from rewards."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
NormalizeOver = Literal["group", "batch"]
STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,  # [P * G]: the G completions of a prompt stand together
    group_size: int,
    *,
    baseline: Baseline,
    normalize: bool,
    normalize_over: NormalizeOver = "group",
    batch_rewards: Tensor | None = None,  # [N] of the global batch; None: `rewards` are all of it
) -> Tensor:
    """Advantages [P * G]: A = R - b, over (std + 1e-6) where `normalize`; std of rewards, with n - 1.

    b is the mean of the group (GRPO, arXiv:2402.03300; Dr.GRPO, arXiv:2503.20783, without std), of the other
    completions of the group (RLOO, arXiv:2402.14740), of the global batch, or 0; std is that of the group or
    of the global batch. Where the rewards that b or std is taken over are all equal, A is exactly 0, whatever
    the rounding of their mean. Computed in float64, which holds the squares of any float32 and the means of
    large ones, and returned in the rewards' dtype. REINFORCE++ has rewards of tokens:
    `values.reward_to_go_advantages`.
    """
    grouped = rewards.double().view(-1, group_size)
    batch = rewards.double() if batch_rewards is None else batch_rewards.double()
    mean = grouped.mean(dim=1, keepdim=True)
    if baseline == "group_mean":
        advantages = grouped - mean
    elif baseline == "leave_one_out":
        advantages = (grouped - mean) * (group_size / (group_size - 1))
    elif baseline == "batch_mean":
        advantages = grouped - batch.mean()
    else:
        advantages = grouped.clone()
    of_group = _all_equal(grouped)
    of_batch = _all_equal(batch[None])
    silent = torch.zeros_like(of_group)
    if normalize:
        values, equal = (grouped, of_group) if normalize_over == "group" else (batch[None], of_batch)
        std = torch.where(equal, 0.0, values.std(dim=1, keepdim=True)) if values.shape[1] > 1 else 0.0
        advantages = advantages / (std + STD_EPSILON)
        silent = silent | equal
    if baseline in ("group_mean", "leave_one_out"):
        silent = silent | of_group
    elif baseline == "batch_mean":
        silent = silent | of_batch
    return torch.where(silent, 0.0, advantages).flatten().to(rewards.dtype)


def _all_equal(rewards: Tensor) -> Tensor:  # [P, G] -> [P, 1] bool
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
