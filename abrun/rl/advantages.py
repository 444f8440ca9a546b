"""Advantages from rewards."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
NormalizeOver = Literal["group", "batch", "leave_one_out"]
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
    completions of the group (RLOO, arXiv:2402.14740), of the global batch, or 0; std is that of the group, of
    the global batch, or of the other completions of the group (leave_one_out, as NeMo-RL's
    calculate_baseline_and_std_per_prompt). Where the rewards that b or std is taken over are all equal, A is
    exactly 0, whatever the rounding of their mean; but where only the other completions' are, A is R - b,
    undivided, as in NeMo-RL. Computed in float64, which holds the squares of any float32 and the means of
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
    if normalize and normalize_over == "leave_one_out":
        std = _std_of_others(grouped)
        advantages = torch.where(std > 0, advantages / (std + STD_EPSILON), advantages)
    elif normalize:
        values, equal = (grouped, of_group) if normalize_over == "group" else (batch[None], of_batch)
        std = torch.where(equal, 0.0, values.std(dim=1, keepdim=True)) if values.shape[1] > 1 else 0.0
        advantages = advantages / (std + STD_EPSILON)
        silent = silent | equal
    if baseline in ("group_mean", "leave_one_out"):
        silent = silent | of_group
    elif baseline == "batch_mean":
        silent = silent | of_batch
    return torch.where(silent, 0.0, advantages).flatten().to(rewards.dtype)


def overlong_penalties(
    lengths: Tensor,  # [B] completion tokens, the end token included
    *,
    max_new_tokens: int,
    buffer: int,
    factor: float,
) -> Tensor:
    """Penalties [B] to subtract from rewards: factor * max(0, L - (max_new_tokens - buffer)) / buffer.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), as verl's DAPORewardManager and NeMo-RL's
    apply_reward_shaping: 0 up to max_new_tokens - buffer, then linear up to `factor` at max_new_tokens. L
    counts every token that was generated, also of a completion that overlong_filtering masks. float64.
    """
    excess = lengths.double() - (max_new_tokens - buffer)
    return factor * excess.clamp(min=0) / buffer


def _std_of_others(rewards: Tensor) -> Tensor:  # [P, G] float64 -> [P, G]
    """Return the sample std of the other completions of each; exactly 0 where their rewards are equal."""
    group_size = rewards.shape[1]
    others = rewards.expand(group_size, *rewards.shape).movedim(0, 1)  # [P, G, G]
    diagonal = torch.eye(group_size, dtype=torch.bool, device=rewards.device)
    others = others[:, ~diagonal].view(-1, group_size, group_size - 1)
    return torch.where(_all_equal(others.flatten(0, 1)).view(rewards.shape), 0.0, others.std(dim=2))


def _all_equal(rewards: Tensor) -> Tensor:  # [P, G] -> [P, 1] bool
    return (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
