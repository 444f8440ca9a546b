"""Direct preference optimisation: its loss, and what its metrics report.

Letters: P pairs, B = 2P sequences, S positions; entry t belongs to token t. Rows alternate: 2i is the chosen
completion of pair i, 2i + 1 the rejected one. What a masked position holds (even NaN) reaches neither a loss
nor a gradient.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from abrun.rl.metrics import MetricParts

LogprobReduction = Literal["sum", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss a pair, and what the metrics report about it, without gradient; all [P] float64."""

    loss: Tensor
    chosen_rewards: Tensor  # beta (c - r), reduced over the completion
    rejected_rewards: Tensor
    chosen_logprobs: Tensor  # c, reduced over the completion
    rejected_logprobs: Tensor

    @property
    def margins(self) -> Tensor:
        """By how much the policy, against the reference, prefers the chosen completion."""
        return self.chosen_rewards - self.rejected_rewards


def dpo_loss(
    trainer_logprobs: Tensor,  # [B, S] c
    reference_logprobs: Tensor,  # [B, S] r
    token_mask: Tensor,  # [B, S] bool
    *,
    beta: float,
    logprob_reduction: LogprobReduction,
) -> PreferenceLoss:
    """-log sigmoid(beta ((c_w - r_w) - (c_l - r_l))), w chosen and l rejected (DPO, arXiv:2305.18290, eq. 7).

    c and r are sums over the completion's tokens, or their means (length-normalised, as in Tulu 3,
    arXiv:2411.15124), in float64: a margin is a small difference of large sums. Masked tokens count nowhere.
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


def over_tokens(pair_losses: Tensor, token_mask: Tensor) -> Tensor:  # [P], [B, S] bool -> [B, S] float64
    """Each pair's loss in equal shares at its tokens, which add up to it."""
    shares = token_mask.double().reshape(len(pair_losses), -1)
    shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
    return (pair_losses[:, None] * shares).reshape(token_mask.shape)


def preference_metrics(preference: PreferenceLoss, *, num_pairs: float) -> MetricParts:
    """The `train/` metrics of a microbatch's pairs: means over the pairs of the global batch."""
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
