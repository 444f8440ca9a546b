"""Policy metrics of a step, exact however the global batch is cut into microbatches and spread over ranks.

Letters: B sequences, S positions; g inference, p old, c trainer, r reference log-probs (see `losses`).
<x> is the mean over the completion tokens of the global batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from abrun.rl.batch import TrainBatch
from abrun.rl.losses import PolicyLoss, k3, masked_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricParts:
    """One microbatch's contributions: 0-dim float64 tensors.

    `sums` are already divided by global counts and add up to the metric; `maxima` and `minima` reduce with
    max and min, and are -inf and inf where there is no token to contribute. `ratios` are [2]: numerators and
    denominators add up, and the metric is the one over the other.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]
    minima: dict[str, Tensor]
    ratios: dict[str, Tensor] = field(default_factory=dict)


def merge(parts: Sequence[MetricParts]) -> MetricParts:
    """The contributions of several microbatches together; all have the same keys."""
    first = parts[0]
    for part in parts:
        for values, keys in (
            (part.sums, first.sums),
            (part.maxima, first.maxima),
            (part.minima, first.minima),
            (part.ratios, first.ratios),
        ):
            assert values.keys() == keys.keys(), f"in some microbatches only: {values.keys() ^ keys.keys()}"
    return MetricParts(
        sums={key: torch.stack([part.sums[key] for part in parts]).sum() for key in first.sums},
        maxima={key: torch.stack([part.maxima[key] for part in parts]).amax() for key in first.maxima},
        minima={key: torch.stack([part.minima[key] for part in parts]).amin() for key in first.minima},
        ratios={key: torch.stack([part.ratios[key] for part in parts]).sum(dim=0) for key in first.ratios},
    )


def all_reduce(parts: MetricParts, group: dist.ProcessGroup) -> dict[str, float]:
    """The global metrics from every rank's contributions. Collective; every rank brings the same keys.

    An extreme to which no rank contributed is NaN: there is no such token. The infinity at the other end is a
    value like any other, of a ratio that overflowed.
    """
    metrics: dict[str, float] = {}
    for values, operation, nothing in (
        (parts.sums, dist.ReduceOp.SUM, None),
        (parts.maxima, dist.ReduceOp.MAX, -math.inf),
        (parts.minima, dist.ReduceOp.MIN, math.inf),
    ):
        if values:
            stacked = torch.stack([value.detach().double() for value in values.values()])
            dist.all_reduce(stacked, op=operation, group=group)
            for key, value in zip(values, stacked.tolist(), strict=True):
                metrics[key] = math.nan if value == nothing else value
    if parts.ratios:
        stacked = torch.stack([value.detach().double() for value in parts.ratios.values()])
        dist.all_reduce(stacked, group=group)
        metrics |= dict(zip(parts.ratios, (stacked[:, 0] / stacked[:, 1]).tolist(), strict=True))
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
    """The `train/` metrics of level basic, of one microbatch's tokens; counts are of the global batch.

    `sampling_importance_ratio` is that of the batch's importance weights, where it has some.
    """
    mask = batch.token_mask
    assert batch.old_logprobs is not None
    # Masked entries become 0 before any arithmetic, so that what they hold cannot turn into NaN.
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
    """What level full adds: Fast-LLM's policy metrics, where each document counts the same, and sums.

    A token weighs 1 / (its document's completion tokens * documents of the global batch); a row is a
    document. `train/entropy` is the mean over tokens, so this mean of it is `train/document_entropy`. The
    sums of the ratio are over tokens; of GSPO's they are over sequences, whose number is `train/num_segments`
    (fast_llm/layers/language_model/loss/policy_gradient.py, variance_weight).
    """
    mask = batch.token_mask
    assert batch.old_logprobs is not None
    of_document = mask.double() / mask.sum(dim=1, keepdim=True).clamp(min=1)
    weight = of_document / num_documents
    ratio_weight = of_document if policy_loss.ratio_of_sequence else mask.double()
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
        sums["train/num_segments"] = of_document.sum()
    return MetricParts(
        sums=sums,
        maxima={"train/max_advantage": _extreme(advantages, mask, -math.inf)},
        minima={"train/min_advantage": _extreme(advantages, mask, math.inf)},
    )


def merge_keys(one: MetricParts, other: MetricParts) -> MetricParts:
    """Join contributions to different metrics."""
    return MetricParts(
        sums=one.sums | other.sums,
        maxima=one.maxima | other.maxima,
        minima=one.minima | other.minima,
        ratios=one.ratios | other.ratios,
    )


def _extreme(values: Tensor, mask: Tensor, nothing: float) -> Tensor:
    """The largest (nothing = -inf) or smallest (nothing = inf) counted value."""
    counted = pad(torch.where(mask, values, nothing).flatten(), (0, 1), value=nothing)  # there may be no row
    return counted.amax() if nothing < 0 else counted.amin()
