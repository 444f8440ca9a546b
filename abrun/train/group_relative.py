"""GRPO and its family: the advantage of a completion comes from rewards alone."""

import torch
from torch import Tensor

from abrun.recipe import Grpo
from abrun.rl.advantages import group_advantages
from abrun.rl.batch import Batch
from abrun.rl.values import reward_to_go_advantages
from abrun.train.policy_gradient import PolicyGradient
from abrun.train.setup import Setup


class GroupRelative(PolicyGradient):
    """The algorithm of a recipe with `algorithm: {type: grpo}`."""

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.config.algorithm, Grpo)
        super().__init__(setup, setup.config.algorithm)
        self._family = setup.config.algorithm

    def _with_advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """A batch without rewards comes with advantages, in their place."""
        if batch.rewards is None:
            return batch, {}
        family, rewards, metrics = self._family, batch.rewards[:, 0], {}
        penalties = self._penalties(batch)
        if penalties is None:
            penalties = torch.zeros_like(batch.rewards)
        else:
            metrics = self._reward_metrics(rewards, penalties)
        if family.kl_in == "reward_to_go":
            assert family.advantage_baseline in ("batch_mean", "none")
            advantages = reward_to_go_advantages(
                rewards,
                batch.token_mask,
                penalties,
                baseline=family.advantage_baseline,
                normalize=family.normalize_advantages,
                total=self._setup.total,
            )
        else:
            advantages = self._advantages(rewards - penalties.sum(dim=1))
            advantages = advantages[:, None].expand(batch.token_ids.shape)
        return batch.having(advantages=advantages), metrics

    def _advantages(self, rewards: Tensor) -> Tensor:  # [B] -> [B]
        family = self._family
        over_batch = family.advantage_baseline == "batch_mean" or family.normalize_over == "batch"
        return group_advantages(
            rewards,
            family.group_size,
            baseline=family.advantage_baseline,
            normalize=family.normalize_advantages,
            normalize_over=family.normalize_over,
            batch_rewards=rewards.new_tensor(self._setup.gather(rewards.tolist())) if over_batch else None,
        )
