"""PPO: advantages are against a value model, which learns from the same completions."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from abrun.backends import ValueModel
from abrun.recipe.algorithms import Ppo
from abrun.rl.batch import ActorCriticBatch, Scored
from abrun.rl.losses import weighted
from abrun.rl.metrics import MetricParts, all_reduce, merge
from abrun.rl.values import (
    ValueLoss,
    generalized_advantages,
    token_rewards,
    token_statistics,
    value_loss,
    value_loss_metrics,
    value_statistics,
    whitened,
)
from abrun.train.learner import learning_rate_at
from abrun.train.policy_gradient import PolicyGradient, PolicyObjective
from abrun.train.setup import Setup


class PpoAlgorithm(PolicyGradient[Ppo, ActorCriticBatch]):
    """The algorithm of a recipe with `algorithm: {type: ppo}`."""

    def __init__(self, setup: Setup, settings: Ppo, value_model: ValueModel) -> None:
        super().__init__(setup, settings)
        self._value_model = value_model

    def _with_advantages(self, batch: Scored, rewards: Tensor) -> tuple[ActorCriticBatch, dict[str, float]]:
        """By GAE, whitened over the tokens of the global batch."""
        ppo, mask, total = self._settings, batch.token_mask, self._setup.ranks.total
        with self._setup.phases("values"):
            values = self._value_model.values(batch)
        penalties = self._penalties(batch)
        metrics = {} if penalties is None else self._penalty_metrics(penalties, batch.token_mask)
        advantages, returns = generalized_advantages(
            token_rewards(rewards, mask, penalties),
            values,
            mask,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
        )
        metrics |= value_statistics(values, returns, mask, total)
        if ppo.normalize_advantages:
            found = token_statistics(advantages, mask, total)
            advantages = whitened(advantages, mask, mean=found.mean, std=found.std)
        return batch.at(ActorCriticBatch, advantages=advantages, old_values=values, returns=returns), metrics

    def _train(self, updates: list[tuple[ActorCriticBatch, PolicyObjective]], step: int) -> dict[str, float]:
        """Each update of the policy after one of the value model on the same minibatch."""
        setup, value_model, settings = self._setup, self._value_model, self._settings
        learning_rate = learning_rate_at(step, settings.value_optimizer, setup.config.steps)
        objectives = iter([ValueObjective.for_update(objective) for _, objective in updates])
        parts, norms = [], []

        def update_value_model(batch: ActorCriticBatch) -> None:
            with setup.phases("value_forward_backward"):
                parts.append(value_model.forward_backward(batch, next(objectives)))
            with setup.phases("value_optimizer"):
                norms.append(value_model.optimizer_step(learning_rate))

        metrics = setup.learner.update_on_each(updates, step, before_each=update_value_model)
        return {
            **metrics,
            **all_reduce(merge(parts), setup.ranks.data),
            "train/critic/grad_norm": sum(norms) / len(norms),
            "train/critic/lr": learning_rate,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """PPO's value loss; a token counts in it what it counts in the policy's. See abrun.backends."""

    clip_range: float | None
    num_tokens: float  # of the global batches of all updates of a step, which the metrics are means over
    num_updates: int = 1
    gradient_factor: float = 1.0  # of the loss, for its gradient

    @classmethod
    def for_update(cls, policy: PolicyObjective) -> Self:
        """Return the value loss of the policy's update, with its counts.

        A grad_divisor of the recipe scales the gradient of a shared backbone, policy and value loss alike, so
        that value_coefficient keeps its meaning; a backbone of its own has its own optimizer.
        """
        settings = policy.settings
        assert isinstance(settings, Ppo)
        return cls(
            clip_range=settings.value_clip_range,
            num_tokens=policy.num_tokens,
            num_updates=policy.num_updates,
            gradient_factor=policy.gradient_factor if settings.value_backbone == "shared" else 1.0,
        )

    def losses(self, batch: ActorCriticBatch, values: Tensor) -> Tensor:
        return weighted(self._value_loss(batch, values).loss, batch.loss_weights) * self.gradient_factor

    def metrics(self, batch: ActorCriticBatch, values: Tensor) -> MetricParts:
        return value_loss_metrics(
            self._value_loss(batch, values),
            batch.token_mask,
            batch.loss_weights,
            num_tokens=self.num_tokens,
            num_updates=self.num_updates,
        )

    def _value_loss(self, batch: ActorCriticBatch, values: Tensor) -> ValueLoss:
        return value_loss(
            values, batch.old_values, batch.returns, batch.token_mask, clip_range=self.clip_range
        )
