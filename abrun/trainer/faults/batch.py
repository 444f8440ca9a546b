"""Faults in the data of a step: rewards, advantages, masks, weights. Dimensions: B sequences, S positions."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.faults.site import FaultSite, Updates, leading_rows, wrap_method
from abrun.trainer.rl.batch import RolloutBatch, ScoredBatch, TrainBatch

T = TypeVar("T")
Collected = tuple[RolloutBatch, dict[str, float]]
Advantages = tuple[TrainBatch, dict[str, float]]


def flipped_advantages(site: FaultSite) -> None:
    def flip(advantages: Tensor) -> Tensor:  # [B, S] -> [B, S]
        sign = torch.ones(advantages.shape[1], device=advantages.device)
        sign[::2] = -1
        return advantages * sign

    def advantages(inner, batch: ScoredBatch) -> Advantages:
        train_batch, metrics = inner(batch)
        return replace(train_batch, advantages=flip(train_batch.advantages)), metrics

    wrap_method(site.algorithm, "advantages", advantages)


def rewards_of_other_rows(site: FaultSite) -> None:
    """Give rows the rewards of rows about half a batch further, which belong to other prompts."""

    def collect(inner, step: int) -> Collected:
        batch, metrics = inner(step)
        rows = leading_rows(site.size, len(batch))
        rewards = batch.rewards.clone()
        rewards[rows] = rewards[rows].roll(rows.stop // 2 + 1)
        return replace(batch, rewards=rewards), metrics

    wrap_method(site.algorithm.rollouts, "collect", collect)


def misgrouped(site: FaultSite) -> None:
    def advantages(inner, batch: ScoredBatch) -> Advantages:
        num_rows = int(site.size)
        train_batch, metrics = inner(replace(batch, rewards=batch.rewards.roll(-num_rows)))
        return replace(train_batch, advantages=train_batch.advantages.roll(num_rows, 0)), metrics

    wrap_method(site.algorithm, "advantages", advantages)


class _SingleRank(Ranks):
    """Ranks whose data collectives return only this rank's share."""

    def all_reduce_sum_data(self, *values: float) -> list[float]:
        return list(values)

    def all_gather_data(self, values: Sequence[T]) -> list[T]:
        return list(values)


def whiten_per_rank(site: FaultSite) -> None:
    """Compute advantages from each rank's share of the batch; the metrics remain those of the whole batch."""
    algorithm, run_setup = site.algorithm, site.setup
    single_rank = _SingleRank(
        **{field.name: getattr(run_setup.ranks, field.name) for field in fields(run_setup.ranks)}
    )

    def advantages(inner, batch: ScoredBatch) -> Advantages:
        train_batch, metrics = inner(batch)
        algorithm.setup = replace(run_setup, ranks=single_rank)
        local_batch, _ = inner(batch)
        algorithm.setup = run_setup
        return replace(train_batch, advantages=local_batch.advantages), metrics

    wrap_method(algorithm, "advantages", advantages)


def first_rollout_stats(site: FaultSite) -> None:
    size = site.setup.config.algorithm.group_size  # pyright: ignore[reportAttributeAccessIssue]

    def advantages(inner, batch: ScoredBatch) -> Advantages:
        train_batch, metrics = inner(batch)
        grouped = batch.rewards.view(-1, size)
        groups = leading_rows(site.size, len(grouped))
        changed = train_batch.advantages.clone().unflatten(0, (-1, size))
        changed[groups] = (grouped - grouped[:, :1])[groups][..., None]
        return replace(train_batch, advantages=changed.flatten(0, 1)), metrics

    wrap_method(site.algorithm, "advantages", advantages)


def eos_not_trained(site: FaultSite) -> None:
    ends = sorted(site.setup.data.text.end_ids)

    def collect(inner, step: int) -> Collected:
        batch, metrics = inner(step)
        rows = leading_rows(site.size, len(batch))
        is_end = torch.isin(batch.token_ids, torch.tensor(ends, device=batch.token_ids.device))
        mask = batch.token_mask.clone()
        mask[rows] &= ~is_end[rows]
        return replace(batch, token_mask=mask), metrics

    wrap_method(site.algorithm.rollouts, "collect", collect)


def late_half_batch(site: FaultSite) -> None:
    def change(updates: Updates, step: int) -> Updates:
        if step == 1:
            return updates
        changed = []
        for batch, objective in updates:
            weights = batch.loss_weights.clone()
            weights[len(batch) - leading_rows(site.size, len(batch)).stop :] = 0
            changed.append((replace(batch, loss_weights=weights), objective))
        return changed

    site.on_updates(change)


def padding_in_denominator(site: FaultSite) -> None:
    """Count padding in the token mean: all positions [B, S] from the first completion token on."""

    def change(updates: Updates, step: int) -> Updates:
        changed = []
        for batch, objective in updates:
            is_from_completion = batch.token_mask.cummax(dim=1).values
            tokens, positions = site.setup.ranks.all_reduce_sum_data(
                float(batch.token_mask.sum()), float(is_from_completion.sum())
            )
            factor = tokens / max(tokens + site.size * (positions - tokens), 1.0)
            changed.append((replace(batch, loss_weights=batch.loss_weights * factor), objective))
        return changed

    site.on_updates(change)
