"""Loss and metrics of a policy gradient on one microbatch; see abrun.trainer.rl for the formulas."""

from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from abrun.recipe.algorithms import Grpo, Ppo
from abrun.trainer.backends.head import EntropyMode
from abrun.trainer.rl.batch import ScoredBatch, TrainBatch
from abrun.trainer.rl.losses import (
    PolicyLoss,
    TokenLosses,
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
    importance_weights,
    kl_penalty,
    reinforce_loss,
    weighted_losses,
)
from abrun.trainer.rl.metrics import MetricParts, document_metrics, merge_keys, policy_metrics

AnyBatch = TypeVar("AnyBatch", ScoredBatch, TrainBatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLosses(TokenLosses):
    """Token losses [...] of a policy objective, with the values for its metrics."""

    batch: TrainBatch  # with old log-probs
    policy_loss: PolicyLoss
    kl_penalty: Tensor | None  # [...]; None: not part of the loss
    reported_shares: Tensor  # [...] float64: `shares` without `gradient_factor`; their sum is train/loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The policy loss of a recipe, with its KL penalty and entropy bonus, if any.

    See trainer.backends.Objective. Metrics are means over the counts, which cover the global batches of all
    updates in a step. The weight of a token in the loss of its update comes with the batch.
    """

    settings: Grpo | Ppo
    num_tokens: float
    num_sequences: float
    num_updates: int = 1
    gradient_factor: float = 1.0  # scales the gradient of the loss, for the recipe's grad_divisor

    @property
    def entropies(self) -> EntropyMode:
        if self.settings.entropy_coefficient:
            return "gradient"
        return "none" if self.settings.metrics == "none" else "value"

    def losses(self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> PolicyLosses:
        batch = self.with_old_logprobs(batch, logprobs)
        policy_loss, penalty = self.policy_loss(batch, logprobs), self.kl_penalty(batch, logprobs)
        losses = policy_loss.loss
        if batch.importance_weights is not None:
            losses = losses * batch.importance_weights
        if penalty is not None:
            losses = losses + self.settings.kl_coefficient * penalty
        if self.settings.entropy_coefficient:
            assert entropy is not None
            losses = losses - self.settings.entropy_coefficient * entropy
        reported_shares = weighted_losses(losses, batch.loss_weights)
        return PolicyLosses(
            shares=reported_shares * self.gradient_factor,
            reported_shares=reported_shares,
            batch=batch,
            policy_loss=policy_loss,
            kl_penalty=penalty,
        )

    def metrics(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, losses: PolicyLosses
    ) -> MetricParts:
        batch = losses.batch  # with the old log-probs of this pass
        contribution = MetricParts(sums={}, maxima={}, minima={})
        if self.settings.metrics != "none":
            assert entropy is not None
            tensors = batch, logprobs, entropy, losses.policy_loss
            counts = {"num_tokens": self.num_tokens, "num_sequences": self.num_sequences}
            contribution = policy_metrics(*tensors, **counts)
            if self.settings.metrics == "full":
                contribution = merge_keys(
                    contribution, document_metrics(*tensors, num_documents=self.num_sequences)
                )
        if losses.kl_penalty is not None:
            weights = batch.token_mask.double() / self.num_tokens  # a mean over tokens under any reduction
            contribution.sums["train/kl_penalty"] = weighted_losses(losses.kl_penalty, weights).sum()
        contribution.sums["train/loss"] = losses.reported_shares.sum() / self.num_updates
        return contribution

    def with_old_logprobs(self, batch: TrainBatch, logprobs: Tensor) -> TrainBatch:
        """Return the batch with these log-probs as the old ones, unless an earlier pass has set them."""
        if batch.old_logprobs is not None:
            return batch
        return with_old_logprobs(batch, logprobs.detach(), self.settings)

    def policy_loss(self, batch: TrainBatch, logprobs: Tensor) -> PolicyLoss:
        settings = self.settings
        assert batch.old_logprobs is not None
        old_logprobs = logprobs.detach() if settings.on_policy else batch.old_logprobs
        tensors = logprobs, old_logprobs, batch.advantages, batch.token_mask
        if settings.loss == "reinforce":
            return reinforce_loss(*tensors)
        if settings.loss == "cispo":
            return cispo_loss(*tensors, clip_low=settings.clip_low, clip_high=settings.clip_high)
        clipped = gspo_loss if settings.loss == "gspo" else clipped_policy_loss
        return clipped(
            *tensors,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
        )

    def kl_penalty(self, batch: TrainBatch, logprobs: Tensor) -> Tensor | None:
        """Return the KL penalty of each token [...]; None if it is not part of the loss."""
        if batch.reference_logprobs is None or self.settings.kl_in != "loss":
            return None
        return kl_penalty(
            logprobs, batch.reference_logprobs, batch.token_mask, estimator=self.settings.kl_estimator
        )


def with_old_logprobs(batch: AnyBatch, old_logprobs: Tensor, settings: Grpo | Ppo) -> AnyBatch:
    """Set old log-probs [...] and, if the recipe has a correction, the resulting importance weights."""
    weights, correction = None, settings.importance_correction
    if correction is not None:
        weights = importance_weights(
            old_logprobs,
            batch.inference_logprobs,
            batch.token_mask,
            correction=correction.type,
            low=correction.low,
            high=correction.high,
        )
    return replace(batch, old_logprobs=old_logprobs, importance_weights=weights)
