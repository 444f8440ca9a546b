"""The dense implementation: all logits at once, with plain autograd. It is the baseline for the others.

Its backward pass peaks at three copies of the logits [N, V] in the results' dtype: the exponentials, their
gradient, and the one-hot gradient of the target's logit. `log_softmax` and `gather` need as many.
"""

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .head import LOWEST_LOGIT, ResolvedHead, project

# Entropies without gradient process the rows in this many splits, so they need a sixteenth of a logits copy.
ENTROPY_SPLITS = 16


def dense_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V/P, H]
    target: Tensor,  # [N]
    head: ResolvedHead,
    *,
    entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:  # [N], [N]
    shifted = _shift_logits(hidden, weight, head)
    exponentials = shifted.exp()
    sums = [exponentials.sum(1), _select_target_logit(shifted, target, head)]
    if entropy:
        sums.append(_sum_weighted(exponentials, shifted, entropy_gradient))
    del shifted, exponentials  # autograd keeps what it needs
    sum_exp, target_logit, *sum_exp_logit = _SumOverShards.apply(torch.stack(sums), head)

    logprobs = target_logit - sum_exp.log()
    # The log-prob of a target outside the vocabulary is 0; only the gradient of -log(sum_exp) remains.
    logprobs = torch.where(head.is_out_of_vocabulary(target), logprobs - logprobs.detach(), logprobs)
    ignored = head.ignored(target)
    logprobs = logprobs.masked_fill(ignored, 0.0)
    if not entropy:
        return logprobs, None
    entropies = (sum_exp.log() - sum_exp_logit[0] / sum_exp).masked_fill(ignored, 0.0)
    return logprobs, entropies if entropy_gradient else entropies.detach()


def _shift_logits(hidden: Tensor, weight: Tensor, head: ResolvedHead) -> Tensor:  # [N, V/P]
    """Return the logits minus the maximum of their row over all shards.

    The log-sum-exp is then at least 0 and the target's logit at most 0, so no log-prob exceeds 0. The entropy
    keeps its precision for large logits, unlike lse - sum(p * z).
    """
    u = _compute_unscaled_logits(hidden, weight, head)
    largest = u.detach().amax(1) if head.num_rows else u.new_full(hidden.shape[:1], LOWEST_LOGIT)
    shifted = u - head.all_reduce(largest, ReduceOp.MAX)[:, None]
    del u  # before another tensor of its size is made
    return shifted if head.outer == 1.0 else shifted * head.outer


def _compute_unscaled_logits(hidden: Tensor, weight: Tensor, head: ResolvedHead) -> Tensor:  # [N, V/P]
    factors = hidden.to(head.projection_dtype), weight[: head.num_rows].to(head.projection_dtype)
    output = project(*factors, head.logits_dtype).to(head.result_dtype)
    return output if head.logit_softcap is None else torch.tanh(output * head.inner)


def _sum_weighted(exponentials: Tensor, logits: Tensor, differentiable: bool) -> Tensor:  # [N, V/P] -> [N]
    """Return row sums of exp(y) * y. Makes logits of -inf finite in place, so that they add 0."""
    logits.detach().clamp_(min=LOWEST_LOGIT)
    if differentiable:
        return (exponentials * logits).sum(1)
    with torch.no_grad():
        pairs = zip(
            exponentials.tensor_split(ENTROPY_SPLITS), logits.tensor_split(ENTROPY_SPLITS), strict=True
        )
        return torch.cat([(exponential * logit).sum(1) for exponential, logit in pairs])


def _select_target_logit(shifted: Tensor, target: Tensor, head: ResolvedHead) -> Tensor:
    """Return the target's logit if this shard has it, else 0, so that the sum over shards is the logit."""
    if head.num_rows == 0:
        return shifted.sum(1)
    row = target - head.first_row
    is_local = (row >= 0) & (row < head.num_rows)
    starts = torch.arange(len(target), device=target.device) * head.num_rows
    # Unlike gather, index_select does not keep the logits for its backward pass.
    target_logits = shifted.flatten().index_select(0, starts + row.clamp(0, head.num_rows - 1))
    return target_logits.masked_fill(~is_local, 0.0)


class _SumOverShards(torch.autograd.Function):
    """Sums over the vocabulary shards. Backward is the identity, not another all-reduce.

    Every rank computes the same loss from the sum, so each rank already has its full gradient.
    """

    @staticmethod
    def forward(ctx, values: Tensor, head: ResolvedHead) -> Tensor:
        return head.all_reduce(values.clone(), ReduceOp.SUM)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None
