"""PPO: advantages relative to a value model, which is trained on the same completions."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from abrun.recipe.algorithms import Ppo
from abrun.trainer.backends import ValueModel
from abrun.trainer.loop.grpo import Metrics, PolicyGradient, PolicyObjective
from abrun.trainer.loop.setup import RunSetup, learning_rate_at
from abrun.trainer.rl.advantages import (
    ValueLoss,
    generalized_advantages,
    token_rewards,
    token_statistics,
    value_loss,
    value_loss_metrics,
    value_statistics,
    whiten,
)
from abrun.trainer.rl.batch import ActorCriticBatch, ScoredBatch
from abrun.trainer.rl.losses import TokenLosses, weighted_losses
from abrun.trainer.rl.metrics import MetricParts, all_reduce, merge


class PpoAlgorithm(PolicyGradient[Ppo, ActorCriticBatch]):
    """PPO, for `algorithm: {type: ppo}`."""

    def __init__(self, setup: RunSetup, settings: Ppo, value_model: ValueModel) -> None:
        super().__init__(setup, settings)
        self._value_model = value_model

    def advantages(self, batch: ScoredBatch) -> tuple[ActorCriticBatch, Metrics]:
        """Add GAE advantages, whiten over the tokens of the global batch, old values and returns."""
        ppo, mask, all_reduce_sum = self._settings, batch.token_mask, self.setup.ranks.all_reduce_sum_data
        with self.setup.phases("values"):
            values = self._value_model.compute_values(batch)
        penalties, metrics = self._kl_in_reward(batch)
        advantages, returns = generalized_advantages(
            token_rewards(batch.rewards, mask, penalties),
            values,
            mask,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
        )
        metrics |= value_statistics(values, returns, mask, all_reduce_sum)
        if ppo.normalize_advantages:
            statistics = token_statistics(advantages, mask, all_reduce_sum)
            advantages = whiten(advantages, mask, mean=statistics.mean, std=statistics.std)
        train_batch = batch.with_fields(
            ActorCriticBatch, advantages=advantages, old_values=values, returns=returns
        )
        return train_batch, metrics

    def train(self, updates: list[tuple[ActorCriticBatch, PolicyObjective]], step: int) -> Metrics:
        """Update the value model, then the policy, on each minibatch. Collective."""
        setup, value_model, settings = self.setup, self._value_model, self._settings
        learning_rate = learning_rate_at(step, settings.value_optimizer, setup.config.steps)
        objectives = iter([PpoValueObjective.for_update(objective) for _, objective in updates])
        contributions, norms = [], []

        def update_value_model(batch: ActorCriticBatch) -> None:
            with setup.phases("value_forward_backward"):
                contributions.append(value_model.forward_backward(batch, next(objectives)))
            with setup.phases("value_optimizer"):
                norms.append(value_model.optimizer_step(learning_rate))

        metrics = setup.learner.update_on_each(updates, step, before_each=update_value_model)
        return {
            **metrics,
            **all_reduce(merge(contributions), setup.ranks.data),
            "train/critic/grad_norm": sum(norms) / len(norms),
            "train/critic/lr": learning_rate,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLosses(TokenLosses):
    """Token losses [B, S] of the value model, with the values for their metrics."""

    value_loss: ValueLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoValueObjective:
    """PPO's value loss, with the same token weights as the policy loss. See abrun.trainer.backends."""

    clip_range: float | None
    num_tokens: float  # in the global batches of all updates of a step
    num_updates: int = 1
    gradient_factor: float = 1.0  # scales the gradient of the loss

    @classmethod
    def for_update(cls, policy: PolicyObjective) -> Self:
        """Return the value loss for a policy update, with its counts.

        The recipe's grad_divisor scales the gradient of a shared backbone for policy and value loss alike, so
        that value_coefficient keeps its meaning. A separate backbone has its own optimizer and is not scaled.
        """
        settings = policy.settings
        assert isinstance(settings, Ppo)
        return cls(
            clip_range=settings.value_clip_range,
            num_tokens=policy.num_tokens,
            num_updates=policy.num_updates,
            gradient_factor=policy.gradient_factor if settings.value_backbone == "shared" else 1.0,
        )

    def losses(self, batch: ActorCriticBatch, values: Tensor) -> ValueLosses:
        loss = value_loss(
            values, batch.old_values, batch.returns, batch.token_mask, clip_range=self.clip_range
        )
        shares = weighted_losses(loss.loss, batch.loss_weights) * self.gradient_factor
        return ValueLosses(shares=shares, value_loss=loss)

    def metrics(self, batch: ActorCriticBatch, values: Tensor, losses: ValueLosses) -> MetricParts:
        return value_loss_metrics(
            losses.value_loss,
            batch.token_mask,
            batch.loss_weights,
            num_tokens=self.num_tokens,
            num_updates=self.num_updates,
        )
