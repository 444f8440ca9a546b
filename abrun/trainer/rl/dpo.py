"""Loss and metrics of direct preference optimisation (DPO).

Dimensions: P pairs, B = 2P sequences, S positions; entry t belongs to token t. Row 2i is the chosen
completion of pair i, row 2i + 1 the rejected one. Values at masked positions, even NaN, affect neither loss
nor gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from abrun.trainer.rl.metrics import MetricParts

LogprobReduction = Literal["sum", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """The loss of each pair and, without gradient, the values for its metrics; all [P] float64."""

    loss: Tensor
    chosen_rewards: Tensor  # beta (c - r), reduced over the completion
    rejected_rewards: Tensor
    chosen_logprobs: Tensor  # c, reduced over the completion
    rejected_logprobs: Tensor

    @property
    def margins(self) -> Tensor:
        """Chosen minus rejected reward."""
        return self.chosen_rewards - self.rejected_rewards


def dpo_loss(
    trainer_logprobs: Tensor,  # [B, S] c
    reference_logprobs: Tensor,  # [B, S] r
    token_mask: Tensor,  # [B, S] bool
    *,
    beta: float,
    logprob_reduction: LogprobReduction,
) -> PreferenceLoss:
    """Return -log sigmoid(beta ((c_w - r_w) - (c_l - r_l))), w chosen, l rejected (arXiv:2305.18290, eq. 7).

    c and r are sums over the tokens of the completion, or means (length-normalised, as in Tulu 3,
    arXiv:2411.15124). The sums are float64, because a margin is a small difference of large sums. Masked
    tokens are ignored.
    """
    num_tokens = token_mask.sum(dim=1).clamp(min=1) if logprob_reduction == "mean" else 1

    def reduced(values: Tensor) -> Tensor:  # [B, S] -> [B]
        return torch.where(token_mask, values, 0.0).double().sum(dim=1) / num_tokens

    rewards = beta * reduced(trainer_logprobs - reference_logprobs)
    logprobs = reduced(trainer_logprobs.detach())
    return PreferenceLoss(
        loss=-logsigmoid(rewards[::2] - rewards[1::2]),
        chosen_rewards=rewards[::2].detach(),
        rejected_rewards=rewards[1::2].detach(),
        chosen_logprobs=logprobs[::2],
        rejected_logprobs=logprobs[1::2],
    )


def spread_over_tokens(
    pair_losses: Tensor, token_mask: Tensor
) -> Tensor:  # [P], [B, S] bool -> [B, S] float64
    """Divide the loss of each pair equally among its tokens."""
    shares = token_mask.double().reshape(len(pair_losses), -1)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
    return (pair_losses[:, None] * shares).reshape(token_mask.shape)


def preference_metrics(preference: PreferenceLoss, *, num_pairs: float) -> MetricParts:
    """Return the contribution of a microbatch to the `train/` metrics, means over the global batch."""
    means = {
        "rewards/chosen": preference.chosen_rewards,
        "rewards/rejected": preference.rejected_rewards,
        "rewards/margin": preference.margins,
        "rewards/accuracy": (preference.margins > 0).double(),
        "logprobs/chosen": preference.chosen_logprobs,
        "logprobs/rejected": preference.rejected_logprobs,
    }
    sums = {f"train/{key}": values.sum() / num_pairs for key, values in means.items()}
    return MetricParts(sums=sums, maxima={}, minima={})
