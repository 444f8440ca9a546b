"""GRPO and its family: the advantage of a completion comes from rewards alone."""

import torch
from torch import Tensor

from abrun.recipe.algorithms import Grpo
from abrun.rl.advantages import group_advantages
from abrun.rl.batch import PolicyBatch, Scored
from abrun.rl.values import reward_to_go_advantages
from abrun.train.policy_gradient import PolicyGradient


class GrpoAlgorithm(PolicyGradient[Grpo, PolicyBatch]):
    """The algorithm of a recipe with `algorithm: {type: grpo}`."""

    def _with_advantages(self, batch: Scored, rewards: Tensor) -> tuple[PolicyBatch, dict[str, float]]:
        family, penalties, metrics = self._settings, self._penalties(batch), {}
        rewards = rewards.double()  # float32 would lose a small penalty in a large reward
        if penalties is None:
            penalties = torch.zeros_like(batch.inference_logprobs)
        else:
            metrics = self._penalty_metrics(penalties, batch.token_mask)
        if family.kl_in == "reward_to_go":
            assert family.advantage_baseline in ("batch_mean", "none")
            advantages = reward_to_go_advantages(
                rewards,
                batch.token_mask,
                penalties,
                baseline=family.advantage_baseline,
                normalize=family.normalize_advantages,
                total=self._setup.ranks.total,
            ).float()
        else:
            advantages = self._advantages(rewards - penalties.sum(dim=1, dtype=rewards.dtype))
            advantages = advantages.float()[:, None].expand(batch.token_ids.shape)
        return batch.at(PolicyBatch, advantages=advantages), metrics

    def _advantages(self, rewards: Tensor) -> Tensor:  # [B] -> [B]
        family = self._settings
        over_batch = family.advantage_baseline == "batch_mean" or family.normalize_over == "batch"
        batch_rewards = rewards.new_tensor(self._setup.ranks.gather(rewards.tolist())) if over_batch else None
        return group_advantages(
            rewards,
            family.group_size,
            baseline=family.advantage_baseline,
            normalize=family.normalize_advantages,
            normalize_over=family.normalize_over,
            batch_rewards=batch_rewards,
        )
