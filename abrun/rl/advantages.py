"""Advantages from rewards."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out", "none"]
STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,  # [P * G]: the G completions of a prompt stand together
    group_size: int,
    *,
    baseline: Baseline,
    normalize: bool,
) -> Tensor:
    """Advantages [P * G] relative to the completions of the same prompt.

    A = R - b, over (std + 1e-6) where `normalize` (GRPO, arXiv:2402.03300; std with n - 1); without it this
    is Dr.GRPO (arXiv:2503.20783), and with b the mean of the other completions RLOO (arXiv:2402.14740). A
    group of equal rewards gives exactly 0 with either baseline, whatever the rounding of its mean.
    """
    grouped = rewards.view(-1, group_size)
    mean = grouped.mean(dim=1, keepdim=True)
    if baseline == "group_mean":
        advantages = grouped - mean
    elif baseline == "leave_one_out":
        advantages = (grouped - mean) * (group_size / (group_size - 1))
    else:
        advantages = grouped.clone()
    equal = (grouped == grouped[:, :1]).all(dim=1, keepdim=True)
    if normalize:
        std = torch.where(equal, 0.0, grouped.std(dim=1, keepdim=True)) if group_size > 1 else 0.0
        advantages = advantages / (std + STD_EPSILON)
    if baseline != "none" or normalize:
        advantages = torch.where(equal, 0.0, advantages)
    return advantages.flatten()
