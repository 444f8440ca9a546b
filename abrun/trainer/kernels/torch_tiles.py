"""Tiles of logits in plain PyTorch, on any device: `impl: chunked`."""

import torch
from torch import Tensor

from .grid import Cost
from .head import LOWEST_LOGIT, ResolvedHead, matmul
from .softmax import LogitGradient, SoftmaxSums


class TorchTiles:
    """See linear.Tiles."""

    def __init__(self, head: ResolvedHead) -> None:
        self._head = head
        wide = head.result_dtype.itemsize
        copy = head.projection_dtype.itemsize if head.projection_dtype != head.result_dtype else 0
        softcap_slope = wide if head.logit_softcap is not None else 0
        self.sums_cost = Cost(logit=2 * wide)
        self.gradient_cost = Cost(logit=2 * wide + softcap_slope + copy)
        self.saved_cost = Cost(logit=3 * wide + softcap_slope + copy)

    def add(
        self,
        sums: SoftmaxSums,
        hidden: Tensor,
        rows: Tensor,
        target: Tensor,
        first_row: int,
        *,
        keep: bool = False,
    ) -> Tensor | None:
        u = self._compute_unscaled_logits(hidden, rows)
        column, is_local = _locate_target(target, first_row, len(rows))
        target_logits = u.gather(1, column).squeeze(1)
        sums.target_logit.copy_(torch.where(is_local, target_logits, sums.target_logit))
        sums.raise_maximum(u.amax(1), self._head)
        shifted = self._scaled(u - sums.maximum[:, None] if keep else u.sub_(sums.maximum[:, None]))
        if sums.sum_exp_logit is None:
            sums.sum_exp.add_(shifted.exp_().sum(1))
        else:
            exponentials = shifted.exp()
            sums.sum_exp.add_(exponentials.sum(1))
            shifted.clamp_(min=LOWEST_LOGIT)  # 0 times -inf is no number
            sums.sum_exp_logit.add_(exponentials.mul_(shifted).sum(1))
        return u if keep else None

    def gradient(
        self, gradient: LogitGradient, hidden: Tensor, rows: Tensor, target: Tensor, first_row: int
    ) -> Tensor:
        return self.gradient_from_saved(
            gradient, self._compute_unscaled_logits(hidden, rows), len(rows), target, first_row
        )

    def gradient_from_saved(
        self, gradient: LogitGradient, saved: Tensor, num_rows: int, target: Tensor, first_row: int
    ) -> Tensor:
        softcap_slope = None  # derivative of tanh: 1 - tanh^2
        if self._head.logit_softcap is not None:
            softcap_slope = saved.square().neg_().add_(1.0)
        shifted = self._scaled(saved.sub_(gradient.maximum[:, None]))
        if gradient.linear is None:
            d_logits = shifted.exp_().mul_(-gradient.constant[:, None])
        else:
            d_logits = shifted.exp()
            shifted.clamp_(min=LOWEST_LOGIT)  # 0 times -inf is no number
            d_logits.mul_(shifted.mul_(-gradient.linear[:, None]).sub_(gradient.constant[:, None]))
        column, is_local = _locate_target(target, first_row, num_rows)
        d_logits.scatter_add_(1, column, gradient.onehot.masked_fill(~is_local, 0.0)[:, None])
        if softcap_slope is not None:
            d_logits.mul_(softcap_slope)
        return d_logits.to(self._head.projection_dtype)

    def scale(self, values: Tensor, factor: Tensor) -> Tensor:
        return values.mul_(factor)

    def _compute_unscaled_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:  # [n, H], [v, H] -> [n, v]
        output = matmul(hidden, rows.t(), self._head.logits_dtype).to(self._head.result_dtype)
        return output if self._head.logit_softcap is None else output.mul_(self._head.inner).tanh_()

    def _scaled(self, differences: Tensor) -> Tensor:
        return differences if self._head.outer == 1.0 else differences.mul_(self._head.outer)


def _locate_target(target: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:  # [n, 1], [n]
    """Return the target's column among these rows, 0 if it is not there, and whether it is there."""
    column = target - first_row
    is_local = (column >= 0) & (column < num_rows)
    return column.masked_fill(~is_local, 0)[:, None], is_local
