"""PPO: advantages are against a value model, which learns from the same completions."""

from dataclasses import dataclass

from torch import Tensor

from abrun.recipe import Ppo
from abrun.rl.batch import Batch
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
from abrun.train.policy_gradient import PolicyGradient, PolicyObjective
from abrun.train.setup import Setup, learning_rate_at


class ActorCritic(PolicyGradient):
    """The algorithm of a recipe with `algorithm: {type: ppo}`."""

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.config.algorithm, Ppo) and setup.critic is not None
        super().__init__(setup, setup.config.algorithm)
        self._ppo, self._critic = setup.config.algorithm, setup.critic

    def _with_advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """By GAE, whitened over the tokens of the global batch. A batch without rewards has rewards of 0."""
        setup, ppo, mask = self._setup, self._ppo, batch.token_mask
        with setup.phases("values"):
            values = self._critic.values(batch)
        rewards = values.new_zeros(len(batch)) if batch.rewards is None else batch.rewards[:, 0]
        penalties = self._penalties(batch)
        metrics = {} if penalties is None else self._reward_metrics(rewards, penalties)
        advantages, returns = generalized_advantages(
            token_rewards(rewards, mask, penalties),
            values,
            mask,
            gamma=ppo.gamma,
            gae_lambda=ppo.gae_lambda,
        )
        metrics |= value_statistics(values, returns, mask, setup.total)
        if ppo.normalize_advantages:
            found = token_statistics(advantages, mask, setup.total)
            advantages = whitened(advantages, mask, mean=found.mean, std=found.std)
        return batch.having(advantages=advantages, old_values=values, returns=returns), metrics

    def _train(self, updates: list[tuple[Batch, PolicyObjective]], step: int) -> dict[str, float]:
        """Each update of the policy after one of the value model on the same minibatch."""
        setup, critic = self._setup, self._critic
        learning_rate = learning_rate_at(step, self._ppo.value_optimizer)
        parts, norms = [], []

        def update_critic(batch: Batch) -> None:
            with setup.phases("value_forward_backward"):
                parts.append(critic.forward_backward(batch, objective))
            with setup.phases("value_optimizer"):
                norms.append(critic.optimizer_step(learning_rate))

        objective = ValueObjective(clip_range=self._ppo.value_clip_range, num_tokens=updates[0][1].num_tokens)
        metrics = setup.train_on_each(updates, step, before_each=update_critic)
        return {
            **metrics,
            **all_reduce(merge(parts), setup.backend.group),
            "train/critic/grad_norm": sum(norms) / len(norms),
            "train/critic/lr": learning_rate,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """PPO's value loss; a token counts in it what it counts in the policy's. See abrun.backends."""

    clip_range: float | None
    num_tokens: float  # of the global batches of all updates of a step, which the metrics are means over

    def losses(self, batch: Batch, values: Tensor) -> Tensor:
        assert batch.loss_weights is not None
        return weighted(self._value_loss(batch, values).loss, batch.loss_weights)

    def metrics(self, batch: Batch, values: Tensor) -> MetricParts:
        found = self._value_loss(batch, values)
        return value_loss_metrics(found, batch.token_mask, num_tokens=self.num_tokens)

    def _value_loss(self, batch: Batch, values: Tensor) -> ValueLoss:
        assert batch.old_values is not None and batch.returns is not None
        return value_loss(
            values, batch.old_values, batch.returns, batch.token_mask, clip_range=self.clip_range
        )
