"""The dense path: all logits at once, plain autograd. The baseline of every comparison."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ReduceOp

from .head import LOWEST_LOGIT, Head


def dense_logprobs(
    hidden: Tensor,  # [N, H]
    weight: Tensor,  # [V/P, H]
    target: Tensor,  # [N]
    head: Head,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:  # [N], [N]
    u = _unscaled_logits(hidden, weight, head)  # [N, V/P]
    local_max = u.detach().amax(1) if head.num_rows else u.new_full(target.shape, LOWEST_LOGIT)
    maximum = head.all_reduce(local_max, ReduceOp.MAX)
    # Everything is measured from the maximum. log(sum_exp) is then at least 0 and the target's logit at most
    # 0, so no log-prob exceeds 0, and the entropy does not lose its digits as lse - sum(p * z) does where
    # logits are large.
    shifted = u - maximum[:, None]
    if head.outer != 1.0:
        shifted = shifted * head.outer
    exponentials = shifted.exp()
    parts = [exponentials.sum(1), _target_logit(shifted, target, head)]
    if entropy:
        parts.append((exponentials * shifted).sum(1))
    sums = _SumOverShards.apply(torch.stack(parts), head)
    sum_exp, target_logit = sums[0], sums[1]

    logprobs = target_logit - sum_exp.log()
    # Outside the vocabulary the target's logit is the constant 0: what is left is the gradient of
    # -log(sum_exp).
    logprobs = torch.where(head.out_of_vocabulary(target), logprobs - logprobs.detach(), logprobs)
    ignored = head.ignored(target)
    logprobs = logprobs.masked_fill(ignored, 0.0)
    if not entropy:
        return logprobs, None
    return logprobs, (sum_exp.log() - sums[2] / sum_exp).masked_fill(ignored, 0.0)


def _unscaled_logits(hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
    rows = weight[: head.num_rows]
    output = F.linear(hidden.to(head.projection_dtype), rows.to(head.projection_dtype)).to(head.result_dtype)
    return output if head.logit_softcap is None else torch.tanh(output * head.inner)


def _target_logit(shifted: Tensor, target: Tensor, head: Head) -> Tensor:
    """The target's logit where this shard has it and 0 elsewhere: summed over the shards it is on every
    rank."""
    if head.num_rows == 0:
        return shifted.sum(1)
    row = target - head.first_row
    here = (row >= 0) & (row < head.num_rows)
    picked = shifted.gather(1, row.clamp(0, head.num_rows - 1)[:, None]).squeeze(1)
    return picked.masked_fill(~here, 0.0)


class _SumOverShards(torch.autograd.Function):
    """Sum over the vocabulary shards. Every rank computes the same loss from the result, so each rank already
    holds the whole gradient of the sum: the backward pass is the identity, not another all-reduce."""

    @staticmethod
    def forward(ctx, values: Tensor, head: Head) -> Tensor:
        return head.all_reduce(values.clone(), ReduceOp.SUM)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None
