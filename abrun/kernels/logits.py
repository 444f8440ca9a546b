"""The dense path: all logits at once, plain autograd. The baseline of every comparison.

At the peak of its backward pass it holds three copies of the logits [N, V] in the results' dtype, as many as
`log_softmax` and `gather` do, the stock path of most frameworks: the exponentials, their gradient, and the
one-hot gradient of the target's logit.
"""

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .head import LOWEST_LOGIT, ResolvedHead
from .matmul import project

# Entropies without a gradient take the rows in so many parts, each a sixteenth of a copy of the logits.
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
    shifted = _shifted_logits(hidden, weight, head)
    exponentials = shifted.exp()
    sums = [exponentials.sum(1), _target_logit(shifted, target, head)]
    if entropy:
        sums.append(_weighted_sum(exponentials, shifted, entropy_gradient))
    del shifted, exponentials  # autograd keeps what it needs
    sum_exp, target_logit, *sum_exp_logit = _SumOverShards.apply(torch.stack(sums), head)

    logprobs = target_logit - sum_exp.log()
    # Outside the vocabulary the target's logit is the constant 0: what is left is the gradient of
    # -log(sum_exp).
    logprobs = torch.where(head.is_out_of_vocabulary(target), logprobs - logprobs.detach(), logprobs)
    ignored = head.ignored(target)
    logprobs = logprobs.masked_fill(ignored, 0.0)
    if not entropy:
        return logprobs, None
    entropies = (sum_exp.log() - sum_exp_logit[0] / sum_exp).masked_fill(ignored, 0.0)
    return logprobs, entropies if entropy_gradient else entropies.detach()


def _shifted_logits(hidden: Tensor, weight: Tensor, head: ResolvedHead) -> Tensor:  # [N, V/P]
    """Logits less the largest of their row over all shards.

    The log of their exponentials' sum is then at least 0 and the target's logit at most 0, so no log-prob
    exceeds 0, and the entropy does not lose its digits as lse - sum(p * z) does where logits are large.
    """
    u = _unscaled_logits(hidden, weight, head)
    largest = u.detach().amax(1) if head.num_rows else u.new_full(hidden.shape[:1], LOWEST_LOGIT)
    shifted = u - head.all_reduce(largest, ReduceOp.MAX)[:, None]
    del u  # before another tensor of its size is made
    return shifted if head.outer == 1.0 else shifted * head.outer


def _unscaled_logits(hidden: Tensor, weight: Tensor, head: ResolvedHead) -> Tensor:  # [N, V/P]
    factors = hidden.to(head.projection_dtype), weight[: head.num_rows].to(head.projection_dtype)
    output = project(*factors, head.logits_dtype).to(head.result_dtype)
    return output if head.logit_softcap is None else torch.tanh(output * head.inner)


def _weighted_sum(exponentials: Tensor, logits: Tensor, differentiable: bool) -> Tensor:  # [N, V/P] -> [N]
    """Row sums of exp(y) * y. Makes logits of -inf finite in place: these add 0 to the sums."""
    logits.detach().clamp_(min=LOWEST_LOGIT)
    if differentiable:
        return (exponentials * logits).sum(1)
    with torch.no_grad():
        pairs = zip(
            exponentials.tensor_split(ENTROPY_SPLITS), logits.tensor_split(ENTROPY_SPLITS), strict=True
        )
        return torch.cat([(exponential * logit).sum(1) for exponential, logit in pairs])


def _target_logit(shifted: Tensor, target: Tensor, head: ResolvedHead) -> Tensor:
    """The target's logit where this shard has it and 0 elsewhere: summed over the shards it is on every
    rank."""
    if head.num_rows == 0:
        return shifted.sum(1)
    row = target - head.first_row
    is_local = (row >= 0) & (row < head.num_rows)
    starts = torch.arange(len(target), device=target.device) * head.num_rows
    # Unlike gather, index_select does not keep the logits for its backward pass.
    target_logits = shifted.flatten().index_select(0, starts + row.clamp(0, head.num_rows - 1))
    return target_logits.masked_fill(~is_local, 0.0)


class _SumOverShards(torch.autograd.Function):
    """Sum over the vocabulary shards. Every rank computes the same loss from the result, so each rank already
    holds the whole gradient of the sum: the backward pass is the identity, not another all-reduce."""

    @staticmethod
    def forward(ctx, values: Tensor, head: ResolvedHead) -> Tensor:
        return head.all_reduce(values.clone(), ReduceOp.SUM)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None
