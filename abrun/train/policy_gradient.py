"""One step of a policy gradient: sample completions, judge them, and update the policy.

With several updates a step (epochs, minibatches) the log-probs at its start are fixed by a pass before the
first of them, so that the importance ratio leaves 1 and clipping acts. One update has them from its own pass.

A completion that was truncated at `rollout.max_new_tokens` counts in every metric and in the loss like any
other, with the reward that the verifier gives to its text; `train/truncation_rate` says how many there were.
With `overlong_filtering` its reward counts, for the baseline of its group, too, and none of its tokens does.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from abrun.backends.head import Entropies
from abrun.metric_names import REWARD
from abrun.recipe.algorithms import Grpo, Ppo
from abrun.rl.batch import PolicyBatch, Sampled, Scored
from abrun.rl.importance import importance_weights
from abrun.rl.losses import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    gradient_factor,
    gspo_loss,
    kl_penalty,
    loss_weights,
    reinforce_loss,
    weighted,
)
from abrun.rl.metrics import MetricParts, document_metrics, policy_metrics, together
from abrun.runs.samples import Sample
from abrun.train.batches import BatchSource
from abrun.train.rollouts import Rollouts
from abrun.train.samples import is_due, samples_of
from abrun.train.setup import Setup, make_reference

Settings = TypeVar("Settings", Grpo, Ppo)
Batch = TypeVar("Batch", bound=PolicyBatch)
Stage = TypeVar("Stage", bound=Scored)
Rows = slice | Tensor


class PolicyGradient(ABC, Generic[Settings, Batch]):
    """What GRPO's family and PPO share: a subclass says where advantages come from."""

    def __init__(self, setup: Setup, settings: Settings) -> None:
        self._setup, self._settings = setup, settings
        self._source: BatchSource = Rollouts(setup, settings)
        self._reference = make_reference(setup) if settings.kl_coefficient > 0 else None
        self.samples: Sequence[Sample] = []  # some completions of the last step, this rank's

    def step(self, step: int) -> dict[str, float]:
        """Run one step on all ranks and return its metrics, the same on every rank."""
        batch, drawn = self._source.collect(step)
        self.samples = []
        if is_due(self._setup.config.keep_samples, step):
            self.samples = samples_of(self._setup, batch, self._settings.group_size)
        metrics = {**drawn, **self.update(batch, step)}
        penalty = metrics.get("train/kl_penalty_sum_per_sequence")
        if penalty is None:
            return metrics
        # Rewards are of all that was drawn, with a KL in them as without: what dynamic_sampling chooses of
        # it depends on them. The KL is known of what is trained on.
        before = metrics[REWARD]
        return metrics | {
            REWARD: before - self._settings.kl_coefficient * penalty,
            "train/reward_before_kl": before,
        }

    def update(self, batch: Sampled, step: int) -> dict[str, float]:
        """Everything after the rollouts: log-probs of this rank's `batch`, advantages, gradients, updates."""
        parts = list(_minibatches(batch, self._settings))
        counts = [float(count) for part in parts for count in _counts(batch[part])]
        totals = self._setup.ranks.total(*counts)
        reductions = [
            {
                "loss_reduction": self._settings.loss_reduction,
                "num_tokens": max(num_tokens, 1.0),  # all may have been filtered
                "num_sequences": max(num_sequences, 1.0),
                "max_completion_tokens": self._setup.config.rollout.max_new_tokens,
            }
            for num_tokens, num_sequences in zip(totals[::2], totals[1::2], strict=True)
        ]
        scored = self._scored(batch, _loss_weights(batch, parts, reductions))
        judged, metrics = self._with_advantages(scored, batch.rewards)
        epochs = self._settings.epochs_per_step
        updates = [
            (
                judged[part],
                PolicyObjective(
                    settings=self._settings,
                    num_tokens=max(sum(totals[::2]), 1.0) * epochs,
                    num_sequences=max(sum(totals[1::2]), 1.0) * epochs,
                    num_updates=len(parts) * epochs,
                    gradient_factor=gradient_factor(self._settings.grad_divisor, **reduction),
                ),
            )
            for part, reduction in zip(parts, reductions, strict=True)
        ]
        return self._train(updates * epochs, step) | {
            **metrics,
            "train/num_valid_samples": sum(totals[1::2]),
            "train/global_valid_toks": sum(totals[::2]),
        }

    @abstractmethod
    def _with_advantages(self, batch: Scored, rewards: Tensor) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages from rewards [B], and metrics of how they came about. Collective."""

    def _train(self, updates: list[tuple[Batch, "PolicyObjective"]], step: int) -> dict[str, float]:
        return self._setup.learner.update_on_each(updates, step)

    def _scored(self, batch: Sampled, weights: Tensor) -> Scored:
        phases, policy, old, routes, reference = self._setup.phases, self._setup.policy, None, None, None
        if self._needs_old_logprobs:
            with phases("logprobs"):
                if self._setup.config.policy.replay_routing:
                    old, routes = policy.routed_logprobs(batch)
                else:
                    old = policy.logprobs(batch)
        if self._reference is not None:
            with phases("reference_logprobs"):
                reference = self._reference.logprobs(batch)
        scored = batch.at(
            Scored,
            old_logprobs=None,
            reference_logprobs=reference,
            importance_weights=None,
            loss_weights=weights,
            routes=routes,
        )
        return scored if old is None else with_old_logprobs(scored, old, self._settings)

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether something asks for the log-probs of the step's start before the update's own pass."""
        settings, policy = self._settings, self._setup.config.policy
        correction = settings.importance_correction
        return (
            not settings.on_policy
            or policy.replay_routing
            or (self._reference is not None and settings.kl_in != "loss")
            # One pass knows its tokens alone, and never a sequence.
            or (policy.logprobs.one_pass and correction is not None and correction.type == "sequence_mask")
        )

    def _penalties(self, batch: Scored) -> Tensor | None:
        """What each token's KL to the reference takes off the reward [B, S]; None: nothing does."""
        settings = self._settings
        if batch.reference_logprobs is None or settings.kl_in == "loss":
            return None
        assert batch.old_logprobs is not None
        return settings.kl_coefficient * kl_penalty(
            batch.old_logprobs, batch.reference_logprobs, batch.token_mask, estimator=settings.kl_estimator
        )

    def _penalty_metrics(self, penalties: Tensor, mask: Tensor) -> dict[str, float]:
        """The KL [B, S] that the reward has, before its coefficient: the mean over tokens, as where it is in
        the loss, and that of the sequences' sums."""
        num_tokens, num_sequences, total = self._setup.ranks.total(
            float(mask.sum()),
            len(mask),
            float(penalties.sum(dtype=torch.float64)) / self._settings.kl_coefficient,
        )
        return {
            "train/kl_penalty": total / max(num_tokens, 1.0),
            "train/kl_penalty_sum_per_sequence": total / num_sequences,
        }


def with_old_logprobs(batch: Stage, old_logprobs: Tensor, settings: Grpo | Ppo) -> Stage:
    """And with the importance weights that they give, where the recipe corrects."""
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


def _minibatches(batch: Sampled, settings: Grpo | Ppo) -> Iterator[Rows]:
    """Whole groups, dealt out in turn: so a minibatch does not depend on how many ranks share the step."""
    num_parts = settings.minibatches_per_step
    if num_parts == 1:
        yield slice(None)
        return
    part = torch.arange(len(batch), device=batch.token_ids.device) // settings.group_size % num_parts
    for index in range(num_parts):
        rows = (part == index).nonzero()[:, 0]
        if len(rows):  # a memory profile may have fewer sequences than a step
            yield rows


def _loss_weights(batch: Sampled, parts: list[Rows], reductions: list[dict[str, Any]]) -> Tensor:  # [B, S]
    """Of each minibatch's tokens in the loss of its own global batch, whose counts these are."""
    weights = torch.zeros(batch.token_mask.shape, dtype=torch.float64, device=batch.token_mask.device)
    for part, reduction in zip(parts, reductions, strict=True):
        weights[part] = loss_weights(batch.token_mask[part], **reduction)
    return weights


def _counts(batch: Sampled) -> tuple[Tensor, Tensor]:
    """Completion tokens, and sequences that have some."""
    return batch.token_mask.sum(), batch.token_mask.any(dim=1).sum()


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
    gradient_factor: float = 1.0  # what the recipe's grad_divisor makes of the loss for its gradient

    @property
    def entropies(self) -> Entropies:
        if self.settings.entropy_coefficient:
            return "gradient"
        return "none" if self.settings.metrics == "none" else "value"

    def losses(self, batch: PolicyBatch, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        return self._shares(self._complete(batch, logprobs), logprobs, entropy) * self.gradient_factor

    def metrics(self, batch: PolicyBatch, logprobs: Tensor, entropy: Tensor | None) -> MetricParts:
        batch = self._complete(batch, logprobs)
        parts = self._policy_metrics(batch, logprobs, entropy)
        penalty = self._kl_penalty(batch, logprobs)
        if penalty is not None:
            weights = batch.token_mask.double() / self.num_tokens  # a mean over tokens under any reduction
            parts.sums["train/kl_penalty"] = weighted(penalty, weights).sum()
        parts.sums["train/loss"] = self._shares(batch, logprobs, entropy).sum() / self.num_updates
        return parts

    def _complete(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """With this pass's own log-probs as those of old, where no pass before it has told them."""
        if batch.old_logprobs is not None:
            return batch
        return with_old_logprobs(batch, logprobs.detach(), self.settings)

    def _shares(self, batch: PolicyBatch, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """What each token adds to the reported loss."""
        settings = self.settings
        losses = self._policy_loss(batch, logprobs).loss
        if batch.importance_weights is not None:
            losses = losses * batch.importance_weights
        penalty = self._kl_penalty(batch, logprobs)
        if penalty is not None:
            losses = losses + settings.kl_coefficient * penalty
        if settings.entropy_coefficient:
            assert entropy is not None
            losses = losses - settings.entropy_coefficient * entropy
        return weighted(losses, batch.loss_weights)

    def _policy_metrics(self, batch: PolicyBatch, logprobs: Tensor, entropy: Tensor | None) -> MetricParts:
        if self.settings.metrics == "none":
            return MetricParts(sums={}, maxima={}, minima={})
        assert entropy is not None
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

    def _policy_loss(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyLoss:
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

    def _kl_penalty(self, batch: PolicyBatch, logprobs: Tensor) -> Tensor | None:
        """Of each token; None where the loss has none."""
        if batch.reference_logprobs is None or self.settings.kl_in != "loss":
            return None
        return kl_penalty(
            logprobs, batch.reference_logprobs, batch.token_mask, estimator=self.settings.kl_estimator
        )
