"""One step of a policy gradient: sample groups of completions, judge them, and update the policy.

The log-probs at the start of the step are fixed before its first update, so with several updates a step
(epochs, minibatches) the importance ratio leaves 1 and clipping acts. Left out: a value model.

A completion that was truncated at `rollout.max_new_tokens` counts in every metric and in the loss like any
other, with the reward that the verifier gives to its text; `train/truncation_rate` says how many there were.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from abrun.recipe import Grpo
from abrun.rl.advantages import group_advantages
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


class PolicyGradient:
    """The algorithm of a recipe with `algorithm: {type: grpo}`."""

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.config.algorithm, Grpo)
        self._setup = setup
        self._settings = setup.config.algorithm
        self._rollouts = Rollouts(setup)
        self._reference = setup.make_reference() if self._settings.kl_coefficient > 0 else None

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        batch, rollout_metrics = self._rollouts.collect(step)
        return {**rollout_metrics, **self.update(batch, step)}

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Everything after the rollouts: log-probs of this rank's `batch`, advantages, gradients, updates.

        A batch without rewards comes with advantages, in their place.
        """
        setup = self._setup
        batch = self._with_logprobs(batch)
        metrics = {}
        if batch.rewards is not None:
            batch, metrics = self._with_advantages(batch)
        batch = self._with_importance_weights(batch)
        minibatches = list(_minibatches(batch, self._settings))
        counts = [float(count) for part in minibatches for count in (part.token_mask.sum(), len(part))]
        totals = setup.total(*counts)
        updates = list(self._updates(minibatches, totals)) * self._settings.epochs_per_step
        return setup.train_on_each(updates, step) | {
            **metrics,
            "train/num_valid_samples": sum(totals[1::2]),
            "train/global_valid_toks": sum(totals[::2]),
        }

    def _with_logprobs(self, batch: Batch) -> Batch:
        setup, phases = self._setup, self._setup.phases
        with phases("logprobs"):
            batch = batch.having(old_logprobs=setup.backend.logprobs(batch))
        if self._reference is not None:
            with phases("reference_logprobs"):
                reference = self._reference.logprobs(batch)
            batch = batch.having(reference_logprobs=reference)
        return batch

    def _with_advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Advantages of the rewards, less the KL penalty where it is in them, and what that did to them."""
        setup, settings = self._setup, self._settings
        assert batch.rewards is not None
        rewards, metrics = batch.rewards[:, 0], {}
        if self._reference is not None and settings.kl_in == "reward":
            assert batch.old_logprobs is not None and batch.reference_logprobs is not None
            penalty = kl_penalty(
                batch.old_logprobs,
                batch.reference_logprobs,
                batch.token_mask,
                estimator=settings.kl_estimator,
            ).sum(dim=1)
            unshaped, rewards = rewards, rewards - settings.kl_coefficient * penalty
            sums = (float(values.double().sum()) for values in (rewards, unshaped, penalty))
            count, *totals = setup.total(len(batch), *sums)
            keys = ("train/reward", "train/reward_before_kl", "train/kl_penalty")
            metrics = {key: total / count for key, total in zip(keys, totals, strict=True)}
        over_batch = settings.advantage_baseline == "batch_mean" or settings.normalize_over == "batch"
        advantages = group_advantages(
            rewards,
            settings.group_size,
            baseline=settings.advantage_baseline,
            normalize=settings.normalize_advantages,
            normalize_over=settings.normalize_over,
            batch_rewards=rewards.new_tensor(setup.gather(rewards.tolist())) if over_batch else None,
        )
        per_token = advantages[:, None].expand(batch.token_ids.shape)
        if setup.config.planted_fault == "flipped_advantages":
            per_token = _flipped(per_token)
        return batch.having(advantages=per_token), metrics

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
    ) -> Iterator[tuple[Batch, "GrpoObjective"]]:
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
                GrpoObjective(
                    settings=settings,
                    num_tokens=sum(totals[::2]) * settings.epochs_per_step,
                    num_sequences=sum(totals[1::2]) * settings.epochs_per_step,
                    num_updates=len(minibatches) * settings.epochs_per_step,
                ),
            )


def _minibatches(batch: Batch, settings: Grpo) -> Iterator[Batch]:
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
class GrpoObjective:
    """The recipe's policy loss, with a KL penalty and an entropy bonus where the recipe has them.

    See abrun.backends.Objective. The counts are what the metrics are means over: the global batches of all
    updates of a step. What a token counts in the loss of its update is in the batch.
    """

    settings: Grpo
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
