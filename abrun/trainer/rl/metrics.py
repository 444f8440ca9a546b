"""Policy metrics of a step, independent of how microbatches and ranks split the global batch.

Dimensions: B sequences, S positions. Log-probs: g inference, p old, c trainer, r reference (see `losses`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from abrun.trainer.rl.batch import TrainBatch
from abrun.trainer.rl.losses import PolicyLoss, PreferenceLoss, k3, masked_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricParts:
    """The contributions of one microbatch to the metrics: 0-dim float64 tensors.

    `sums` are already divided by global counts and add up to the metric. `maxima` and `minima` are reduced by
    max and min; they are -inf and inf if the microbatch has no tokens. `ratios` are [2], numerator and
    denominator: both are summed before the division.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    minima: dict[str, Tensor]
    ratios: dict[str, Tensor] = field(default_factory=dict)


def merge(contributions: Sequence[MetricParts]) -> MetricParts:
    """Combine the contributions of several microbatches, which must have the same keys."""
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "sums": Tensor.sum,
        "maxima": Tensor.amax,
        "minima": Tensor.amin,
        "ratios": lambda ratios: ratios.sum(dim=0),
    }
    merged: dict[str, dict[str, Tensor]] = {}
    for kind, reduce in reductions.items():
        shares: list[dict[str, Tensor]] = [getattr(contribution, kind) for contribution in contributions]
        keys = shares[0].keys()
        for part in shares:
            assert part.keys() == keys, f"in some microbatches only: {part.keys() ^ keys}"
        merged[kind] = {key: reduce(torch.stack([part[key] for part in shares])) for key in keys}
    return MetricParts(**merged)


def all_reduce(contribution: MetricParts, group: dist.ProcessGroup) -> dict[str, float]:
    """Return global metrics from the contributions of all ranks. Collective; all ranks need the same keys.

    A maximum of -inf or a minimum of inf becomes NaN, because no rank had a token. The opposite infinity is
    kept: it is the value of a ratio that overflowed.
    """
    metrics: dict[str, float] = {}
    for values, operation, empty_value in (
        (contribution.sums, dist.ReduceOp.SUM, None),
        (contribution.maxima, dist.ReduceOp.MAX, -math.inf),
        (contribution.minima, dist.ReduceOp.MIN, math.inf),
    ):
        if values:
            stacked = torch.stack([value.detach().double() for value in values.values()])
            dist.all_reduce(stacked, op=operation, group=group)
            for key, value in zip(values, stacked.tolist(), strict=True):
                metrics[key] = math.nan if value == empty_value else value
    if contribution.ratios:
        stacked = torch.stack([value.detach().double() for value in contribution.ratios.values()])
        dist.all_reduce(stacked, group=group)
        metrics |= dict(zip(contribution.ratios, (stacked[:, 0] / stacked[:, 1]).tolist(), strict=True))
    return metrics


@torch.no_grad()
def policy_metrics(
    batch: TrainBatch,
    trainer_logprobs: Tensor,  # [B, S]
    entropy: Tensor,  # [B, S] exact, nats
    policy_loss: PolicyLoss,
    *,
    num_tokens: float,
    num_sequences: float,
) -> MetricParts:
    """Return the contributions of a microbatch to the `train/` metrics of level basic.

    The counts are of the global batch. `sampling_importance_ratio` is the mean importance weight of the batch
    if it has weights, otherwise the mean of exp(p - g).
    """
    mask = batch.token_mask
    assert batch.old_logprobs is not None
    # Masked entries become 0 before any arithmetic, so that they cannot produce NaN.
    inference = torch.where(mask, batch.inference_logprobs, 0.0).double()  # g
    old = torch.where(mask, batch.old_logprobs, 0.0).double()  # p
    trainer = torch.where(mask, trainer_logprobs, 0.0).double()  # c
    advantages = torch.where(mask, batch.advantages, 0.0).double()

    mult_prob_error = (inference - old).abs().exp()
    mixture = torch.logaddexp(old, inference) - math.log(2)
    means = {
        "token_mult_prob_error": mult_prob_error,
        "gen_kl_error": k3(old - inference),
        "policy_kl_error": k3(inference - old),
        "js_divergence_error": (k3(old - mixture) + k3(inference - mixture)) / 2,
        "sampling_importance_ratio": (
            (old - inference).exp() if batch.importance_weights is None else batch.importance_weights.double()
        ),
        "probs_ratio": policy_loss.ratio.double(),
        "probs_ratio_clamped": policy_loss.clipped_ratio.double(),
        "clip_fraction": policy_loss.clipped.double(),
        "approx_entropy": -(trainer - inference).exp() * trainer,
        "entropy": entropy.double(),
        "advantages/mean": advantages,
    }
    sums = {f"train/{key}": masked_mean(value, mask, num_tokens) for key, value in means.items()}

    lengths = mask.sum(dim=1)
    counted = lengths > 0
    per_sequence = torch.where(mask, mult_prob_error, 0.0).sum(dim=1) / lengths.clamp(min=1)  # [B]
    sums["train/mean_seq_mult_prob_error"] = masked_mean(per_sequence, counted, num_sequences)
    ratio = policy_loss.ratio.double()
    return MetricParts(
        sums=sums,
        maxima={
            "train/probs_ratio_max": _extreme(ratio, mask, -math.inf),
            "train/advantages/max": _extreme(advantages, mask, -math.inf),
            "train/max_seq_mult_prob_error": _extreme(per_sequence, counted, -math.inf),
        },
        minima={
            "train/probs_ratio_min": _extreme(ratio, mask, math.inf),
            "train/advantages/min": _extreme(advantages, mask, math.inf),
            "train/min_seq_mult_prob_error": _extreme(per_sequence, counted, math.inf),
        },
    )


@torch.no_grad()
def document_metrics(
    batch: TrainBatch,
    trainer_logprobs: Tensor,  # [B, S]
    entropy: Tensor,  # [B, S] exact, nats
    policy_loss: PolicyLoss,
    *,
    num_documents: float,
) -> MetricParts:
    """Return the metrics that level full adds: Fast-LLM's policy metrics, which weight documents equally.

    Each row is a document. A token has the weight 1 / (completion tokens of its document * documents of the
    global batch). `train/document_entropy` is the entropy under these weights; `train/entropy` is the mean
    over tokens. The sums of the ratio are over tokens. For GSPO they are over sequences, counted by
    `train/num_segments` (fast_llm/layers/language_model/loss/policy_gradient.py, variance_weight).
    """
    mask = batch.token_mask
    assert batch.old_logprobs is not None
    document_share = mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1)
    weight = document_share / num_documents
    ratio_weight = document_share if policy_loss.ratio_of_sequence else mask.double()
    advantages, ratio = batch.advantages.double(), policy_loss.ratio.double()
    weighted_means = {
        "old_logprobs": batch.old_logprobs,
        "new_logprobs": trainer_logprobs,
        "ratio_new_old": ratio,
        "kl_new_old": k3(policy_loss.log_ratio.double()),
        "clipped_ratio_fraction": policy_loss.clipped_ratio != policy_loss.ratio,
        "advantage": advantages,
        "document_entropy": entropy,
    }
    counted_ratio = torch.where(mask, ratio, 0.0)
    sums = {
        f"train/{key}": (torch.where(mask, value.double(), 0.0) * weight).sum()
        for key, value in weighted_means.items()
    } | {
        "train/ratio_new_old_sum": (counted_ratio * ratio_weight).sum(),
        "train/ratio_new_old_squared_sum": (counted_ratio.square() * ratio_weight).sum(),
        "train/num_tokens": mask.double().sum(),
    }
    if policy_loss.ratio_of_sequence:
        sums["train/num_segments"] = document_share.sum()
    return MetricParts(
        sums=sums,
        maxima={"train/max_advantage": _extreme(advantages, mask, -math.inf)},
        minima={"train/min_advantage": _extreme(advantages, mask, math.inf)},
    )


def merge_keys(metrics: MetricParts, more_metrics: MetricParts) -> MetricParts:
    """Return the union of contributions to different metrics."""
    kinds = (field.name for field in fields(MetricParts))
    return MetricParts(**{kind: getattr(metrics, kind) | getattr(more_metrics, kind) for kind in kinds})


def _extreme(values: Tensor, mask: Tensor, empty_value: float) -> Tensor:
    """Return the largest (empty_value = -inf) or smallest (empty_value = inf) unmasked value."""
    # Add one empty value, because there may be no row
    counted = pad(torch.where(mask, values, empty_value).flatten(), (0, 1), value=empty_value)
    return counted.amax() if empty_value < 0 else counted.amin()


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
