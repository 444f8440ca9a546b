"""Matmuls that accumulate in a wider dtype than that of their operands."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def matmul(lhs: Tensor, rhs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return lhs @ rhs, accumulated in `dtype`: the operands' or a wider one."""
    if lhs.dtype == rhs.dtype == dtype:
        return lhs @ rhs
    if lhs.is_cuda:
        return torch.mm(lhs, rhs, out_dtype=dtype)
    # On a CPU, a float32 matmul of the converted operands is equivalent, because bfloat16 products are exact
    # in float32.
    return lhs.to(dtype) @ rhs.to(dtype)


def add_matmul(out: Tensor, lhs: Tensor, rhs: Tensor, *, wide: torch.dtype, overwrite: bool = False) -> None:
    """Compute out += lhs @ rhs, or out = lhs @ rhs, summed in `wide` and rounded once to out's dtype."""
    if overwrite and lhs.dtype == rhs.dtype == out.dtype:
        torch.mm(lhs, rhs, out=out)
    elif lhs.is_cuda and out.dtype in (lhs.dtype, wide):
        # Passed only if it differs, because torch accepts it for 16-bit operands alone.
        options: dict[str, Any] = {} if out.dtype == lhs.dtype else {"out_dtype": out.dtype}
        if overwrite:
            torch.mm(lhs, rhs, **options, out=out)
        else:
            torch.addmm(out, lhs, rhs, **options, out=out)
    elif overwrite:
        out.copy_(matmul(lhs, rhs, wide))
    else:
        out.add_(matmul(lhs, rhs, wide))


def project(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # [..., H], [V, H] -> [..., V]
    """Return hidden @ weight.T, rounded to `dtype`: the operands' or a wider one. Differentiable."""
    if dtype == weight.dtype:
        return F.linear(hidden, weight)
    rows: Any = _WideMatmul.apply(hidden.flatten(0, -2), weight, dtype)
    return rows.unflatten(0, hidden.shape[:-1])


class _WideMatmul(torch.autograd.Function):
    """lhs @ rhs.T in a wider dtype than its operands. Gradients are matmuls in the operands' dtype."""

    @staticmethod
    def forward(ctx, lhs: Tensor, rhs: Tensor, dtype: torch.dtype) -> Tensor:  # [n, k], [m, k] -> [n, m]
        ctx.save_for_backward(lhs, rhs)
        return matmul(lhs, rhs.t(), dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        lhs, rhs = ctx.saved_tensors
        grad = grad.to(lhs.dtype)
        d_lhs = grad @ rhs if ctx.needs_input_grad[0] else None
        d_rhs = grad.t() @ lhs if ctx.needs_input_grad[1] else None
        return d_lhs, d_rhs, None
