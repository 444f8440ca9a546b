"""The state that the kernels keep of a softmax: a few numbers per token."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from .head import LOWEST_LOGIT, ResolvedHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of N tokens. `targets[tile]` selects some of the tokens."""

    ids: Tensor  # [N] int64
    ignored: Tensor  # [N] bool
    has_no_logprob: Tensor  # [N] bool: ignored or outside the vocabulary, so the log-prob is 0

    @classmethod
    def from_ids(cls, ids: Tensor, head: ResolvedHead) -> "Targets":
        ignored = head.ignored(ids)
        return cls(ids=ids, ignored=ignored, has_no_logprob=ignored | head.is_out_of_vocabulary(ids))

    def __getitem__(self, tile: slice) -> "Targets":
        return Targets(
            ids=self.ids[tile], ignored=self.ignored[tile], has_no_logprob=self.has_no_logprob[tile]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxSums:
    """Each token's online softmax over the logits added so far, relative to the running maximum.

    Relative to it, the largest logit adds exactly 1 to sum_exp. So no log-prob exceeds 0, and the entropy
    log(sum_exp) - sum_exp_logit / sum_exp keeps its precision for large logits. u and outer are defined in
    `ResolvedHead`. All tensors are updated in place, and `sums[tile]` is a view of some of the tokens.
    """

    maximum: Tensor  # [N] m, the largest u
    sum_exp: Tensor  # [N] sum of exp(y), where y = outer * (u - m)
    sum_exp_logit: Tensor | None  # [N] sum of exp(y) * y; None without entropy
    target_logit: Tensor  # [N] the target's u if this shard has it; after the reduction its y, on every shard

    @classmethod
    def empty(cls, target: Tensor, head: ResolvedHead, *, entropy: bool) -> "SoftmaxSums":
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

    def raise_maximum(self, candidate: Tensor, head: ResolvedHead) -> None:
        """Rescale the sums to the larger of the old maximum and the candidate [N]."""
        raised = torch.maximum(self.maximum, candidate)
        drop = (self.maximum - raised).mul_(head.outer).clamp_(min=LOWEST_LOGIT)  # [N], 0 or less
        self.maximum.copy_(raised)
        if self.sum_exp_logit is not None:
            self.sum_exp_logit.add_(self.sum_exp * drop).mul_(drop.exp())
        self.sum_exp.mul_(drop.exp())

    def reduce_over_shards(self, targets: Targets, head: ResolvedHead) -> None:
        """Reduce over the vocabulary shards, by one MAX and one SUM; every rank then has the full sums."""
        if head.group is not None:
            self.raise_maximum(head.all_reduce(self.maximum.clone(), ReduceOp.MAX), head)
        self.target_logit.sub_(self.maximum).mul_(head.outer).clamp_(max=0)
        if head.group is None:
            return
        row = targets.ids - head.first_row
        self.target_logit.masked_fill_((row < 0) | (row >= head.num_rows), 0.0)
        local_sums = [self.sum_exp, self.target_logit]
        if self.sum_exp_logit is not None:
            local_sums.append(self.sum_exp_logit)
        for local_sum, total in zip(
            local_sums, head.all_reduce(torch.stack(local_sums), ReduceOp.SUM), strict=True
        ):
            local_sum.copy_(total)

    def results(self, targets: Targets) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [N] and entropies [N], from reduced sums."""
        log_sum_exp = self.sum_exp.log()
        logprobs = (self.target_logit - log_sum_exp).masked_fill_(targets.has_no_logprob, 0.0)
        if self.sum_exp_logit is None:
            return logprobs, None
        entropies = log_sum_exp.sub_(self.sum_exp_logit / self.sum_exp)
        return logprobs, entropies.masked_fill_(targets.ignored, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGradient:
    """Coefficients of the projection output's gradient, from those of log-probs (g) and entropies (h).

    With y = outer * (u - m), p = exp(y) / sum_exp and E = sum(p * y): dz = g * (onehot - p) + h * p * (E -
    y). Per token this equals onehot - exp(y) * (constant + linear * y). All three coefficients include the
    factor logit_scale / temperature between the projection's output and z. The softcap's slope differs by
    logit and is applied last.
    """

    maximum: Tensor  # [N] m, of u
    constant: Tensor  # [N]
    linear: Tensor | None  # [N]; None if the entropies have no gradient
    onehot: Tensor  # [N]
    target_logit: Tensor  # [N] the target's y

    @classmethod
    def from_sums(
        cls,
        sums: SoftmaxSums,
        grad_logprobs: Tensor | None,  # [N] g
        grad_entropies: Tensor | None,  # [N] h
        targets: Targets,
        head: ResolvedHead,
    ) -> "LogitGradient":
        factor = head.logit_scale / head.temperature

        def scale_by_logit_factor(gradient: Tensor) -> Tensor:
            # Filled, not multiplied by 0, because a loss of ignored tokens can be NaN.
            gradient = gradient.masked_fill(targets.ignored, 0.0)
            return gradient if factor == 1 else gradient.mul_(factor)

        onehot = (
            torch.zeros_like(sums.maximum) if grad_logprobs is None else scale_by_logit_factor(grad_logprobs)
        )
        constant, linear = onehot, None
        if grad_entropies is not None and sums.sum_exp_logit is not None:
            h = scale_by_logit_factor(grad_entropies)
            constant = torch.addcmul(onehot, h, sums.sum_exp_logit / sums.sum_exp, value=-1)
            linear = h.div_(sums.sum_exp)
        return cls(
            maximum=sums.maximum,
            constant=constant / sums.sum_exp,
            linear=linear,
            onehot=onehot.contiguous(),
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
