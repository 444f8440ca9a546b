"""One step of a policy gradient: sample completions, judge them, and update the policy.

The log-probs at the start of the step are fixed before its first update, so with several updates a step
(epochs, minibatches) the importance ratio leaves 1 and clipping acts.

A completion that was truncated at `rollout.max_new_tokens` counts in every metric and in the loss like any
other, with the reward that the verifier gives to its text; `train/truncation_rate` says how many there were.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from abrun.recipe import Grpo, Ppo
from abrun.rl.batch import Batch
from abrun.rl.importance import importance_weights
from abrun.rl.losses import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    gspo_loss,
    kl_penalty,
    loss_weights,
    reinforce_loss,
    weighted,
)
from abrun.rl.metrics import MetricParts, document_metrics, policy_metrics, together
from abrun.train.rollouts import Rollouts
from abrun.train.setup import Setup


class PolicyGradient(ABC):
    """What GRPO's family and PPO share: a subclass says where advantages come from."""

    def __init__(self, setup: Setup, settings: Grpo | Ppo) -> None:
        self._setup = setup
        self._settings = settings
        self._rollouts = Rollouts(setup, settings)
        self._reference = setup.make_reference() if settings.kl_coefficient > 0 else None

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        batch, rollout_metrics = self._rollouts.collect(step)
        return {**rollout_metrics, **self.update(batch, step)}

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Everything after the rollouts: log-probs of this rank's `batch`, advantages, gradients, updates."""
        batch = self._with_logprobs(batch)
        batch, metrics = self._with_advantages(batch)
        if self._setup.config.planted_fault == "flipped_advantages":
            assert batch.advantages is not None
            batch = batch.having(advantages=_flipped(batch.advantages))
        batch = self._with_importance_weights(batch)
        minibatches = list(_minibatches(batch, self._settings))
        counts = [float(count) for part in minibatches for count in (part.token_mask.sum(), len(part))]
        totals = self._setup.total(*counts)
        updates = list(self._updates(minibatches, totals)) * self._settings.epochs_per_step
        return self._train(updates, step) | {
            **metrics,
            "train/num_valid_samples": sum(totals[1::2]),
            "train/global_valid_toks": sum(totals[::2]),
        }

    @abstractmethod
    def _with_advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages, and metrics of how they came about. Collective."""

    def _train(self, updates: list[tuple[Batch, "PolicyObjective"]], step: int) -> dict[str, float]:
        return self._setup.train_on_each(updates, step)

    def _with_logprobs(self, batch: Batch) -> Batch:
        setup, phases = self._setup, self._setup.phases
        with phases("logprobs"):
            batch = batch.having(old_logprobs=setup.backend.logprobs(batch))
        if self._reference is not None:
            with phases("reference_logprobs"):
                reference = self._reference.logprobs(batch)
            batch = batch.having(reference_logprobs=reference)
        return batch

    def _penalties(self, batch: Batch) -> Tensor | None:
        """What each token's KL to the reference takes off the reward [B, S]; None: nothing does."""
        settings = self._settings
        if self._reference is None or settings.kl_in == "loss":
            return None
        assert batch.old_logprobs is not None and batch.reference_logprobs is not None
        return settings.kl_coefficient * kl_penalty(
            batch.old_logprobs, batch.reference_logprobs, batch.token_mask, estimator=settings.kl_estimator
        )

    def _reward_metrics(self, rewards: Tensor, penalties: Tensor) -> dict[str, float]:
        """Means over sequences of the reward [B] with and without the penalties [B, S], and of the KL."""
        penalty = penalties.sum(dim=1)
        each = (rewards - penalty, rewards, penalty / self._settings.kl_coefficient)
        count, *totals = self._setup.total(len(rewards), *(float(one.double().sum()) for one in each))
        keys = ("train/reward", "train/reward_before_kl", "train/kl_penalty")
        return {key: total / count for key, total in zip(keys, totals, strict=True)}

    def _with_importance_weights(self, batch: Batch) -> Batch:
        correction = self._settings.importance_correction
        if correction is None:
            return batch
        assert batch.old_logprobs is not None and batch.inference_logprobs is not None
        weights = importance_weights(
            batch.old_logprobs,
            batch.inference_logprobs,
            batch.token_mask,
            correction=correction.type,
            low=correction.low,
            high=correction.high,
        )
        return batch.having(importance_weights=weights)

    def _updates(
        self, minibatches: list[Batch], totals: list[float]
    ) -> Iterator[tuple[Batch, "PolicyObjective"]]:
        """The updates of one epoch; `totals` are the tokens and sequences of each minibatch on all ranks."""
        settings = self._settings
        for minibatch, num_tokens, num_sequences in zip(minibatches, totals[::2], totals[1::2], strict=True):
            weights = loss_weights(
                minibatch.token_mask,
                loss_reduction=settings.loss_reduction,
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                max_completion_tokens=self._setup.config.rollout.max_new_tokens,
            )
            yield (
                minibatch.having(loss_weights=weights),
                PolicyObjective(
                    settings=settings,
                    num_tokens=sum(totals[::2]) * settings.epochs_per_step,
                    num_sequences=sum(totals[1::2]) * settings.epochs_per_step,
                    num_updates=len(minibatches) * settings.epochs_per_step,
                ),
            )


def _minibatches(batch: Batch, settings: Grpo | Ppo) -> Iterator[Batch]:
    """Whole groups, dealt out in turn: so a minibatch does not depend on how many ranks share the step."""
    num_parts = settings.minibatches_per_step
    if num_parts == 1:
        yield batch
        return
    part = torch.arange(len(batch), device=batch.token_ids.device) // settings.group_size % num_parts
    for index in range(num_parts):
        rows = (part == index).nonzero()[:, 0]
        if len(rows):  # a memory profile may have fewer sequences than a step
            yield batch[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The recipe's policy loss, with a KL penalty and an entropy bonus where the recipe has them.

    See abrun.backends.Objective. The counts are what the metrics are means over: the global batches of all
    updates of a step. What a token counts in the loss of its update is in the batch.
    """

    settings: Grpo | Ppo
    num_tokens: float
    num_sequences: float
    num_updates: int = 1

    def losses(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        shares = self._shares(batch, logprobs, entropy)
        divisor = self.settings.grad_divisor
        return shares if divisor is None else shares / divisor

    def metrics(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> MetricParts:
        parts = self._policy_metrics(batch, logprobs, entropy)
        if self._kl_in_loss(batch):
            assert batch.loss_weights is not None
            penalty = weighted(self._kl_penalty(batch, logprobs), batch.loss_weights)
            parts.sums["train/kl_penalty"] = penalty.sum() / self.num_updates
        parts.sums["train/loss"] = self._shares(batch, logprobs, entropy).sum() / self.num_updates
        return parts

    def _shares(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        """What each token adds to the reported loss."""
        settings = self.settings
        losses = self._policy_loss(batch, logprobs).loss
        if batch.importance_weights is not None:
            losses = losses * batch.importance_weights
        if self._kl_in_loss(batch):
            losses = losses + settings.kl_coefficient * self._kl_penalty(batch, logprobs)
        if settings.entropy_coefficient:
            losses = losses - settings.entropy_coefficient * entropy
        assert batch.loss_weights is not None
        return weighted(losses, batch.loss_weights)

    def _policy_metrics(self, batch: Batch, logprobs: Tensor, entropy: Tensor) -> MetricParts:
        if self.settings.metrics == "none":
            return MetricParts(sums={}, maxima={}, minima={})
        policy_loss = self._policy_loss(batch, logprobs)
        basic = policy_metrics(
            batch,
            logprobs,
            entropy,
            policy_loss,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
        )
        if self.settings.metrics == "basic":
            return basic
        return together(
            basic,
            document_metrics(batch, logprobs, entropy, policy_loss, num_documents=self.num_sequences),
        )

    def _policy_loss(self, batch: Batch, logprobs: Tensor) -> PolicyLoss:
        settings = self.settings
        assert batch.old_logprobs is not None and batch.advantages is not None
        old_logprobs = logprobs.detach() if settings.ratio == "on_policy" else batch.old_logprobs
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

    def _kl_in_loss(self, batch: Batch) -> bool:
        return batch.reference_logprobs is not None and self.settings.kl_in == "loss"

    def _kl_penalty(self, batch: Batch, logprobs: Tensor) -> Tensor:
        assert batch.reference_logprobs is not None
        return kl_penalty(
            logprobs, batch.reference_logprobs, batch.token_mask, estimator=self.settings.kl_estimator
        )


def _flipped(advantages: Tensor) -> Tensor:  # [B, S]
    """The planted fault: the wrong sign at every second position."""
    sign = torch.ones(advantages.shape[1], device=advantages.device)
    sign[::2] = -1
    return advantages * sign
