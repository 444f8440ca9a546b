"""Advantages from rewards."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
NormalizeOver = Literal["group", "batch", "leave_one_out"]
STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,  # [P * G]: the G completions of a prompt are adjacent
    group_size: int,
    *,
    baseline: Baseline,
    normalize: bool,
    normalize_over: NormalizeOver = "group",
    batch_rewards: Tensor | None = None,  # [N] of the global batch; None: `rewards` are all of it
) -> Tensor:
    """Return advantages [P * G]: A = R - b, divided by (std + 1e-6) if `normalize` (sample std, n - 1).

    The baseline b is the mean of the group (GRPO, arXiv:2402.03300; Dr.GRPO, arXiv:2503.20783, without std),
    the mean of the other completions of the group (RLOO, arXiv:2402.14740), the mean of the global batch, or
    0. The std is over the group, the global batch, or the other completions of the group (leave_one_out, as
    NeMo-RL's calculate_baseline_and_std_per_prompt).

    If all rewards of the group (for batch_mean: of the batch) are equal, or all rewards that a std of the
    group or batch is over, A is exactly 0, independent of rounding. With normalize_over leave_one_out, if
    only the rewards of the other completions are equal, A is R - b without division, as in NeMo-RL. The
    arithmetic is float64, which can hold the square of any float32; the result has the dtype of the rewards.
    For per-token rewards (REINFORCE++) see `values.reward_to_go_advantages`.
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
    is_constant_group = _all_equal(grouped)
    is_constant_batch = _all_equal(batch[None])
    has_no_signal = torch.zeros_like(is_constant_group)
    if normalize and normalize_over == "leave_one_out":
        std = _leave_one_out_std(grouped)
        advantages = torch.where(std > 0, advantages / (std + STD_EPSILON), advantages)
    elif normalize:
        values, is_constant = (
            (grouped, is_constant_group) if normalize_over == "group" else (batch[None], is_constant_batch)
        )
        std = torch.where(is_constant, 0.0, values.std(dim=1, keepdim=True)) if values.shape[1] > 1 else 0.0
        advantages = advantages / (std + STD_EPSILON)
        has_no_signal = has_no_signal | is_constant
    if baseline in ("group_mean", "leave_one_out"):
        has_no_signal = has_no_signal | is_constant_group
    elif baseline == "batch_mean":
        has_no_signal = has_no_signal | is_constant_batch
    return torch.where(has_no_signal, 0.0, advantages).flatten().to(rewards.dtype)


def overlong_penalties(
    lengths: Tensor,  # [B] completion tokens, the end token included
    *,
    max_new_tokens: int,
    buffer: int,
    factor: float,
) -> Tensor:
    """Return penalties [B] to subtract from rewards: factor * max(0, L - (max_new_tokens - buffer)) / buffer.

    This is DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), as in verl's DAPORewardManager
    and NeMo-RL's apply_reward_shaping: 0 up to max_new_tokens - buffer, then linear up to `factor` at
    max_new_tokens. L counts all generated tokens, including those of completions masked by
    overlong_filtering. The result is float64.
    """
    excess = lengths.double() - (max_new_tokens - buffer)
    return factor * excess.clamp(min=0) / buffer


def _leave_one_out_std(rewards: Tensor) -> Tensor:  # [P, G] float64 -> [P, G]
    """Return, for each completion, the sample std of the others in its group; exactly 0 if they are equal."""
    group_size = rewards.shape[1]
    other_rewards = rewards.expand(group_size, *rewards.shape).movedim(0, 1)  # [P, G, G]
    diagonal = torch.eye(group_size, dtype=torch.bool, device=rewards.device)
    other_rewards = other_rewards[:, ~diagonal].view(-1, group_size, group_size - 1)
    return torch.where(
        _all_equal(other_rewards.flatten(0, 1)).view(rewards.shape), 0.0, other_rewards.std(dim=2)
    )


def _all_equal(rewards: Tensor) -> Tensor:  # [P, G] -> [P, 1] bool
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
