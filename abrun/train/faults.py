"""Faults planted on purpose, by the names that a recipe gives them: what a comparison must find."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from abrun.rl.batch import PolicyBatch

Batch = TypeVar("Batch", bound=PolicyBatch)


def with_fault(name: str | None, batch: Batch) -> Batch:
    """The batch that a step trains on, with the recipe's `planted_fault` in it, if any."""
    return batch if name is None else replace(batch, advantages=OF_ADVANTAGES[name](batch.advantages))


def flipped_advantages(advantages: Tensor) -> Tensor:  # [B, S] -> [B, S]
    """The wrong sign at every second position."""
    sign = torch.ones(advantages.shape[1], device=advantages.device)
    sign[::2] = -1
    return advantages * sign


OF_ADVANTAGES = {"flipped_advantages": flipped_advantages}
