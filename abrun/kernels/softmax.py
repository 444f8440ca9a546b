"""What the kernels keep of a softmax: a few numbers a token."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .head import LOWEST_LOGIT, Head


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxSums:
    """Each token's softmax over the logits seen so far, its sums measured from the running maximum.

    Measured so, the largest logit adds exactly 1 to sum_exp: no log-prob exceeds 0, and the entropy
    log(sum_exp) - sum_exp_logit / sum_exp keeps its digits where logits are large. All tensors are updated in
    place: `sums[tile]` are the same sums, of fewer tokens.
    """

    maximum: Tensor  # [N] m, the largest logit
    sum_exp: Tensor  # [N] sum of exp(z - m)
    sum_exp_logit: Tensor | None  # [N] sum of exp(z - m) * (z - m), where the entropy is asked for
    target_logit: Tensor  # [N] the target's z where this shard has it; once reduced z - m, on every shard

    @classmethod
    def of_nothing(cls, target: Tensor, head: Head, *, entropy: bool) -> "SoftmaxSums":
        zeros = torch.zeros(target.shape, dtype=head.result_dtype, device=target.device)
        return cls(
            maximum=torch.full_like(zeros, LOWEST_LOGIT),
            sum_exp=zeros,
            sum_exp_logit=zeros.clone() if entropy else None,
            target_logit=zeros.clone(),
        )

    def __getitem__(self, tile: slice) -> "SoftmaxSums":
        return SoftmaxSums(
            maximum=self.maximum[tile],
            sum_exp=self.sum_exp[tile],
            sum_exp_logit=None if self.sum_exp_logit is None else self.sum_exp_logit[tile],
            target_logit=self.target_logit[tile],
        )

    def raise_maximum(self, candidate: Tensor) -> None:
        """Measure the sums from the larger of the old maximum and the candidate [N]."""
        raised = torch.maximum(self.maximum, candidate)
        drop = self.maximum - raised  # [N], 0 or less
        self.maximum.copy_(raised)
        if self.sum_exp_logit is not None:
            self.sum_exp_logit.add_(self.sum_exp * drop).mul_(drop.exp())
        self.sum_exp.mul_(drop.exp())

    def reduce_over_shards(self, target: Tensor, head: Head) -> None:
        """One MAX and one SUM; afterwards every rank holds the sums over the whole vocabulary."""
        if head.group is None:
            self.target_logit.sub_(self.maximum).clamp_(max=0)
            return
        self.raise_maximum(head.all_reduce(self.maximum.clone(), ReduceOp.MAX))
        row = target - head.first_row
        self.target_logit.sub_(self.maximum).clamp_(max=0)
        self.target_logit.masked_fill_((row < 0) | (row >= head.num_rows), 0.0)
        parts = [self.sum_exp, self.target_logit]
        if self.sum_exp_logit is not None:
            parts.append(self.sum_exp_logit)
        for part, total in zip(parts, head.all_reduce(torch.stack(parts), ReduceOp.SUM), strict=True):
            part.copy_(total)

    def results(self, target: Tensor, head: Head) -> tuple[Tensor, Tensor | None]:
        """Log-probs [N] and entropies [N], from reduced sums."""
        ignored = head.ignored(target)
        log_sum_exp = self.sum_exp.log()
        logprobs = self.target_logit - log_sum_exp
        logprobs.masked_fill_(ignored | head.out_of_vocabulary(target), 0.0)
        if self.sum_exp_logit is None:
            return logprobs, None
        return logprobs, (log_sum_exp - self.sum_exp_logit / self.sum_exp).masked_fill_(ignored, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGradient:
    """The gradient of the projection's output, given those of the log-probs (g) and of the entropies (h).

    With y = z - m, p = exp(y) / sum_exp and E = sum(p * y), dz = g * (onehot - p) + h * p * (E - y).
    Collected per token that is exp(y) * (constant + linear * y) + onehot. The factor logit_scale /
    temperature between the projection's output and z is in all three; the softcap's slope differs by logit
    and is applied last.
    """

    maximum: Tensor  # [N] m
    constant: Tensor  # [N]
    linear: Tensor | None  # [N], where the entropies have a gradient
    onehot: Tensor  # [N]
    target_logit: Tensor  # [N] the target's y

    @classmethod
    def of(
        cls,
        sums: SoftmaxSums,
        grad_logprobs: Tensor | None,  # [N] g
        grad_entropies: Tensor | None,  # [N] h
        target: Tensor,
        head: Head,
    ) -> "LogitGradient":
        ignored = head.ignored(target)
        factor = head.logit_scale / head.temperature
        g = torch.zeros_like(sums.maximum)
        if grad_logprobs is not None:
            g = grad_logprobs.masked_fill(ignored, 0.0) * factor
        constant, linear = -g / sums.sum_exp, None
        if grad_entropies is not None and sums.sum_exp_logit is not None:
            h = grad_entropies.masked_fill(ignored, 0.0) * factor / sums.sum_exp
            constant, linear = constant + h * (sums.sum_exp_logit / sums.sum_exp), -h
        return cls(
            maximum=sums.maximum,
            constant=constant,
            linear=linear,
            onehot=g,
            target_logit=sums.target_logit,
        )

    def __getitem__(self, tile: slice) -> "LogitGradient":
        return LogitGradient(
            maximum=self.maximum[tile],
            constant=self.constant[tile],
            linear=None if self.linear is None else self.linear[tile],
            onehot=self.onehot[tile],
            target_logit=self.target_logit[tile],
        )
