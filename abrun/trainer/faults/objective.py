"""Faults in the loss, and in the accumulation over microbatches."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.faults.site import FaultSite, SizedObjective, Updates, partly_detached, wrap_method
from abrun.trainer.loop.grpo import PolicyLosses, PolicyObjective
from abrun.trainer.rl.batch import TrainBatch
from abrun.trainer.rl.losses import PolicyLoss, TokenLosses
from abrun.trainer.rl.metrics import MetricParts


def microbatch_mean(site: FaultSite) -> None:
    """Give the loss weights of each microbatch the same sum, the mean over all microbatches."""

    def forward_backward(inner, batch: TrainBatch, objective: PolicyObjective) -> MetricParts:
        microbatches = site.cut(batch)
        sums = [float(microbatch.loss_weights.sum()) for microbatch, _ in microbatches]
        mean = sum(sums) / len(sums)
        factors = [1 + site.size * (mean / weight_sum - 1) if weight_sum else 1.0 for weight_sum in sums]
        scaled = [
            microbatch.loss_weights * factor
            for (microbatch, _), factor in zip(microbatches, factors, strict=True)
        ]
        return inner(replace(batch, loss_weights=microbatches.gather_rows(scaled)), objective)

    wrap_method(site.setup.policy, "forward_backward", forward_backward)


def rank_mean(site: FaultSite) -> None:
    """Give the loss weights of each rank the same sum, the mean over all ranks."""
    ranks = site.setup.ranks

    def change(updates: Updates, step: int) -> Updates:
        changed = []
        for batch, objective in updates:
            local_sum = float(batch.loss_weights.sum())
            mean = ranks.all_reduce_sum_data(local_sum)[0] / ranks.data.size()
            factor = 1 + site.size * (mean / local_sum - 1) if local_sum else 1.0
            changed.append((replace(batch, loss_weights=batch.loss_weights * factor), objective))
        return changed

    site.on_updates(change)


def last_microbatch_only(site: FaultSite) -> None:
    def forward_backward(inner, batch: TrainBatch, objective: PolicyObjective) -> MetricParts:
        return inner(batch, _LastMicrobatchOnly(objective, len(site.cut(batch)), site.size))

    wrap_method(site.setup.policy, "forward_backward", forward_backward)


class _LastMicrobatchOnly:
    """Objective that keeps the losses of the last microbatch only; see abrun.trainer.backends.Objective.

    It counts microbatches by their calls of `metrics`, which follow their losses.
    """

    def __init__(self, inner: PolicyObjective, num_microbatches: int, share: float) -> None:
        self._inner, self._left, self._share = inner, num_microbatches, share

    @property
    def entropies(self) -> EntropyMode:
        return self._inner.entropies

    def losses(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> "_Scaled":
        losses = self._inner.losses(batch, logprobs, entropy)
        factor = 1.0 if self._left == 1 else 1 - self._share
        return _Scaled(shares=losses.shares * factor, inner=losses)

    def metrics(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, losses: "_Scaled"
    ) -> MetricParts:
        self._left -= 1
        return self._inner.metrics(batch, logprobs, entropy, losses.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled(TokenLosses):
    inner: PolicyLosses  # unscaled, for the metrics


class _KlWithoutGradient(SizedObjective):
    def kl_penalty(self, batch: TrainBatch, logprobs: Tensor) -> Tensor | None:
        penalty = super().kl_penalty(batch, logprobs)
        return None if penalty is None else partly_detached(penalty, self.size)


def kl_without_gradient(site: FaultSite) -> None:
    site.on_objectives(_KlWithoutGradient)


def kl_sign(site: FaultSite) -> None:
    def change(updates: Updates, step: int) -> Updates:
        changed = []
        for batch, objective in updates:
            penalised: Any = objective.settings
            coefficient = {"kl_coefficient": -penalised.kl_coefficient}
            changed.append((batch, replace(objective, settings=penalised.model_copy(update=coefficient))))
        return changed

    site.on_updates(change)


class _RatioToItself(SizedObjective):
    def policy_loss(self, batch: TrainBatch, logprobs: Tensor) -> PolicyLoss:
        assert batch.old_logprobs is not None
        old = torch.lerp(batch.old_logprobs, logprobs.detach(), self.size)
        return super().policy_loss(replace(batch, old_logprobs=old), logprobs)


def old_logprobs_from_current(site: FaultSite) -> None:
    site.on_objectives(_RatioToItself)


class _DualClipEverywhere(SizedObjective):
    def policy_loss(self, batch: TrainBatch, logprobs: Tensor) -> PolicyLoss:
        loss = super().policy_loss(batch, logprobs)
        max_loss = -torch.where(batch.token_mask, batch.advantages, 0.0) * self.size
        return replace(
            loss, loss=torch.minimum(loss.loss, max_loss), clipped=loss.clipped | (loss.loss > max_loss)
        )


def dual_clip_everywhere(site: FaultSite) -> None:
    site.on_objectives(_DualClipEverywhere)


class _MeanWithPadding(SizedObjective):
    def policy_loss(self, batch: TrainBatch, logprobs: Tensor) -> PolicyLoss:
        """Return the loss with sequence means that count padding.

        The means are over all padded positions [B, S] from the first completion token on.
        """
        assert batch.old_logprobs is not None
        tokens = batch.token_mask.sum(dim=1, keepdim=True)
        positions = batch.token_mask.cummax(dim=1).values.sum(dim=1, keepdim=True)
        share = tokens / (tokens + self.size * (positions - tokens)).clamp(min=1)
        old = logprobs.detach() if self.settings.on_policy else batch.old_logprobs
        return super().policy_loss(replace(batch, old_logprobs=old), old + share * (logprobs - old))


def gspo_padding(site: FaultSite) -> None:
    site.on_objectives(_MeanWithPadding)


class _WeightedBySum(SizedObjective):
    def with_old_logprobs(self, batch: TrainBatch, logprobs: Tensor) -> TrainBatch:
        complete, correction = super().with_old_logprobs(batch, logprobs), self.settings.importance_correction
        assert complete.old_logprobs is not None and correction is not None
        gap = complete.old_logprobs - complete.inference_logprobs
        gap = torch.where(complete.token_mask, gap, 0.0)
        product = gap.sum(dim=1, keepdim=True).exp()
        is_kept = complete.token_mask & (product >= correction.low) & (product <= correction.high)
        return replace(complete, importance_weights=torch.where(is_kept, gap.exp(), 0.0))


def sequence_weight_sum(site: FaultSite) -> None:
    site.on_objectives(_WeightedBySum)
