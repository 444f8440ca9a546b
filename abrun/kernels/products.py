"""Matrix products that accumulate wider than their factors are."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, accumulated and returned in `dtype`, the factors' own or a wider one."""
    if left.dtype == right.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    # On a CPU the product of the same numbers held in float32 is the same thing: bfloat16 factors multiply
    # exactly there.
    return left.to(dtype) @ right.to(dtype)


def add_product(
    out: Tensor, left: Tensor, right: Tensor, *, wide: torch.dtype, overwrite: bool = False
) -> None:
    """out += left @ right, or out = left @ right: summed in `wide` and rounded once, to out's dtype."""
    if overwrite and left.dtype == right.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda and out.dtype in (left.dtype, wide):
        # Named only where it differs: other dtypes than 16-bit ones have no such argument.
        options: dict[str, Any] = {} if out.dtype == left.dtype else {"out_dtype": out.dtype}
        if overwrite:
            torch.mm(left, right, **options, out=out)
        else:
            torch.addmm(out, left, right, **options, out=out)
    elif overwrite:
        out.copy_(product(left, right, wide))
    else:
        out.add_(product(left, right, wide))


def project(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:  # [..., H], [V, H] -> [..., V]
    """hidden @ weight.T, rounded to `dtype`: the factors' own, or a wider one. Differentiable."""
    if dtype == weight.dtype:
        return F.linear(hidden, weight)
    rows: Any = _WideProduct.apply(hidden.flatten(0, -2), weight, dtype)
    return rows.unflatten(0, hidden.shape[:-1])


class _WideProduct(torch.autograd.Function):
    """left @ right.T in a wider dtype than its factors'. The gradients are products in the factors' dtype."""

    @staticmethod
    def forward(ctx, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:  # [n, k], [m, k] -> [n, m]
        ctx.save_for_backward(left, right)
        return product(left, right.t(), dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        left, right = ctx.saved_tensors
        grad = grad.to(left.dtype)
        d_left = grad @ right if ctx.needs_input_grad[0] else None
        d_right = grad.t() @ left if ctx.needs_input_grad[1] else None
        return d_left, d_right, None
