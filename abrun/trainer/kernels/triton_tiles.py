"""Tiles of logits in Triton: `impl: triton`, on a GPU, or on a CPU in Triton's interpreter.

bfloat16 and float16 are multiplied inside the kernels, so their logits exist in registers only. Tensor cores
do not support float32, so its logits come from torch's matmul, with torch's TF32 setting. The same holds for
heads whose rows the copy engine (TMA) cannot address, and for GPUs with less shared memory than Hopper's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from . import triton_kernels
from .head import Cost, LogitGradient, ResolvedHead, SoftmaxSums, matmul

kernels: Any = triton_kernels  # launched by Triton's rules, not by Python's

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_ROWS = 256  # the same in every kernel, because sums are kept per block
# For the kernels that multiply. Shared memory holds four stages of such blocks, or three and a tile to store.
BLOCK_TOKENS, BLOCK_HIDDEN, GROUP = 128, 64, 16
SHARED_MEMORY_BYTES = 212 * 2**10


_Source = Tensor | tuple[Tensor, Tensor]  # a kernel's input: logits, or the operands to multiply


@dataclass(frozen=True, slots=True)
class _SavedLogits:
    # [n, v] logits or, where the kernels multiply, their exp from each block's maximum
    values: Tensor
    maxima: Tensor  # [b, n]


class TritonTiles:
    """See linear.Tiles. Raises ValueError if these kernels cannot run."""

    def __init__(self, head: ResolvedHead, weight: Tensor) -> None:
        if not weight.is_cuda and not knobs.runtime.interpret:
            raise ValueError(
                f"impl: 'triton' needs a CUDA device, got {weight.device.type!r}; use impl 'chunked', or set "
                "TRITON_INTERPRET=1 in the environment to use Triton's interpreter"
            )
        if head.projection_dtype not in DTYPES:
            raise ValueError(
                f"impl: 'triton' supports bfloat16, float16 and float32, got {head.projection_dtype}"
            )
        self._head = head
        self._num_processors, shared_memory_bytes = _query_device_limits(weight.device)
        itemsize = head.projection_dtype.itemsize
        # The copy engine (TMA) needs rows that start at multiples of 16 bytes.
        addressable = weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0
        self._multiplies = itemsize == 2 and addressable and shared_memory_bytes >= SHARED_MEMORY_BYTES
        block_sums = 3 * 4 / BLOCK_ROWS
        logits = 0 if self._multiplies else head.logits_dtype.itemsize
        d_logits = 0 if itemsize == logits else itemsize  # overwrites logits of the same size
        self.sums_cost = Cost(logit=logits + block_sums)
        self.gradient_cost = Cost(logit=logits + d_logits)
        self.saved_cost = Cost(logit=logits + d_logits + block_sums)
        self._rounds = head.logits_dtype != torch.float32

    def add(
        self,
        sums: SoftmaxSums,
        hidden: Tensor,
        rows: Tensor,
        target: Tensor,
        first_row: int,
        *,
        keep: bool = False,
    ) -> _SavedLogits | None:
        num_tokens, num_blocks = len(hidden), triton.cdiv(len(rows), BLOCK_ROWS)
        has_entropy = sums.sum_exp_logit is not None
        blocks = torch.empty(2 + has_entropy, num_blocks, num_tokens, device=hidden.device)
        block_sums = (blocks[0], blocks[1], blocks[2] if has_entropy else None)
        source = self._source(hidden, rows)
        saved, saved_blocks = (source, None) if isinstance(source, Tensor) else (None, None)
        if keep and saved is None:
            saved, saved_blocks = _allocate_blocks(hidden, rows)
        self._launch(kernels.softmax_sums_kernel, source, (*block_sums, saved_blocks))
        kernels.target_logit_kernel[triton.cdiv(num_tokens, 64),](
            *(hidden, rows, source if isinstance(source, Tensor) else None, target, sums.target_logit),
            *(num_tokens, len(rows), hidden.shape[1], hidden.stride(0), rows.stride(0), first_row),
            *(self._head.inner, self._head.logit_softcap is not None, self._rounds),
            BLOCK_TOKENS=64,
            BLOCK_HIDDEN=128,
        )
        kernels.merge_sums_kernel[triton.cdiv(num_tokens, 8),](
            *(*block_sums, sums.maximum, sums.sum_exp, sums.sum_exp_logit, num_tokens, num_blocks),
            self._head.outer,
            BLOCK_TOKENS=8,
            BLOCK_BLOCKS=128,
        )
        return _SavedLogits(saved, blocks[0]) if keep and saved is not None else None

    def gradient(
        self, gradient: LogitGradient, hidden: Tensor, rows: Tensor, target: Tensor, first_row: int
    ) -> Tensor:
        source = self._source(hidden, rows)
        if isinstance(source, Tensor):
            d_logits = self._gradient_from_logits(gradient, source)
        else:
            d_logits, blocks = _allocate_blocks(hidden, rows)
            self._launch(kernels.gradient_kernel, source, (*_coefficients(gradient), blocks))
        return self._add_target_gradient(d_logits[:, : len(rows)], gradient, target, first_row)

    def gradient_from_saved(
        self, gradient: LogitGradient, saved: _SavedLogits, num_rows: int, target: Tensor, first_row: int
    ) -> Tensor:
        if not self._multiplies:
            d_logits = self._gradient_from_logits(gradient, saved.values)
        else:
            d_logits = saved.values
            num_tokens, num_columns = d_logits.shape
            grid = triton.cdiv(num_columns, BLOCK_ROWS), triton.cdiv(num_tokens, 16)
            kernels.gradient_from_saved_kernel[grid](
                *(d_logits, saved.maxima, *_coefficients(gradient), num_tokens, num_columns),
                *self._scales()[1:],
                BLOCK_TOKENS=16,
                BLOCK_ROWS=BLOCK_ROWS,
            )
        return self._add_target_gradient(d_logits[:, :num_rows], gradient, target, first_row)

    def scale(self, values: Tensor, factor: Tensor) -> Tensor:
        num_programs = min(triton.cdiv(values.numel(), 4096), self._num_processors * 8)
        kernels.scale_kernel[max(num_programs, 1),](values, factor, values.numel(), BLOCK=4096)
        return values

    def _gradient_from_logits(self, gradient: LogitGradient, logits: Tensor) -> Tensor:
        dtype = self._head.projection_dtype
        d_logits = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        self._launch(kernels.gradient_kernel, logits, (*_coefficients(gradient), d_logits))
        return d_logits

    def _add_target_gradient(
        self, d_logits: Tensor, gradient: LogitGradient, target: Tensor, first_row: int
    ) -> Tensor:
        num_tokens, num_rows = d_logits.shape
        kernels.gradient_at_target_kernel[triton.cdiv(num_tokens, 128),](
            *(d_logits, target, gradient.target_logit, *_coefficients(gradient), gradient.onehot),
            *(num_tokens, num_rows, d_logits.stride(0), first_row),
            *self._scales()[1:],
            BLOCK_TOKENS=128,
        )
        return d_logits

    def _source(self, hidden: Tensor, rows: Tensor) -> _Source:
        return (hidden, rows) if self._multiplies else matmul(hidden, rows.t(), self._head.logits_dtype)

    def _launch(self, kernel: Any, source: _Source, arguments: tuple) -> None:
        if isinstance(source, Tensor):
            (num_tokens, num_rows), hidden_size, block_tokens = source.shape, 0, 16
            operands = (None, None, source)
        else:
            hidden, rows = source
            (num_tokens, hidden_size), num_rows, block_tokens = hidden.shape, len(rows), BLOCK_TOKENS
            operands = (
                TensorDescriptor.from_tensor(
                    hidden if hidden.data_ptr() % 16 == 0 else hidden.clone(), [BLOCK_TOKENS, BLOCK_HIDDEN]
                ),
                TensorDescriptor.from_tensor(rows, [BLOCK_ROWS, BLOCK_HIDDEN]),
                None,
            )
        num_tiles = triton.cdiv(num_tokens, block_tokens) * triton.cdiv(num_rows, BLOCK_ROWS)
        num_programs = min(num_tiles, self._num_processors * (8 if isinstance(source, Tensor) else 1))
        stores_tiles = isinstance(arguments[-1], TensorDescriptor)
        kernel[num_programs,](
            *(*operands, *arguments, num_tokens, num_rows, hidden_size, *self._scales(), self._rounds),
            BLOCK_TOKENS=block_tokens,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_HIDDEN=BLOCK_HIDDEN,
            GROUP=GROUP,
            NUM_PROGRAMS=num_programs,
            num_warps=8,
            num_stages=3 if stores_tiles else 4,
        )

    def _scales(self) -> tuple[float, float, bool]:
        """Return the kernels' inner, outer and SOFTCAP."""
        return self._head.inner, self._head.outer, self._head.logit_softcap is not None


def _query_device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory per block."""
    if device.type != "cuda":
        return 2, SHARED_MEMORY_BYTES  # arbitrary: the interpreter runs programs one after the other
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _coefficients(gradient: LogitGradient) -> tuple[Tensor, Tensor, Tensor | None]:
    return gradient.maximum, gradient.constant, gradient.linear


def _allocate_blocks(hidden: Tensor, rows: Tensor) -> tuple[Tensor, TensorDescriptor]:
    """Return [n, v] in hidden's dtype, with v rounded up to full blocks, and a descriptor of its blocks."""
    values = hidden.new_empty(len(hidden), triton.cdiv(len(rows), BLOCK_ROWS) * BLOCK_ROWS)
    return values, TensorDescriptor.from_tensor(values, [BLOCK_TOKENS, BLOCK_ROWS])
