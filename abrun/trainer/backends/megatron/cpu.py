"""megatron-core without CUDA: inside `emulate_cuda`, its calls to CUDA run on the CPU.

megatron-core hard-codes the CUDA device. For runs on GPUs this module does nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from abrun.trainer.backends.policy import sum_of_squares

CPU = torch.device("cpu")


@contextlib.contextmanager
def emulate_cuda(device: torch.device) -> Iterator[None]:
    """Redirect CUDA calls to the CPU while the context is open, unless `device` is a GPU. Reentrant."""
    if device.type == "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, value in _replacements():
            stack.enter_context(_replace_attribute(owner, name, value))
        stack.enter_context(_CudaMeansCpu())
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces CUDA devices by the CPU in torch calls, and reports CPU tensor types as CUDA types."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)  # optimizers group parameters by type
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if func is Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _NoOpStream:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *arguments: Any, **settings: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **settings: _NoOpStream()


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    def do_nothing(*arguments: Any, **settings: Any) -> None: ...

    def make_null_context(*arguments: Any, **settings: Any) -> Any:
        return contextlib.nullcontext()

    cuda = torch.cuda
    yield cuda, "current_device", lambda: CPU
    yield cuda, "synchronize", do_nothing
    yield cuda.nvtx, "range_push", do_nothing
    yield cuda.nvtx, "range_pop", do_nothing
    yield cuda, "Stream", _NoOpStream
    yield cuda, "Event", _NoOpStream
    yield cuda, "current_stream", _NoOpStream
    yield cuda, "stream", make_null_context

    from megatron.core.tensor_parallel import random

    # Models have no dropout, so the CUDA generators are never used.
    yield random, "_get_cuda_rng_state", lambda *arguments, **settings: torch.get_rng_state()
    yield random, "_set_cuda_rng_state", do_nothing
    yield random.CudaRNGStatesTracker, "fork", make_null_context

    from megatron.core.optimizer import optimizer

    yield optimizer, "get_grad_norm_fp32", _compute_grad_norm

    from megatron.core.transformer.moe import token_dispatcher

    yield token_dispatcher, "maybe_move_tensor_to_cpu", _keep_on_cpu


def _compute_grad_norm(grads: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> float:
    """Return the L2 norm of the ranks' gradients; megatron-core's version adds in float32."""
    assert norm_type == 2
    total = sum_of_squares([grads] if isinstance(grads, Tensor) else grads)
    torch.distributed.all_reduce(total, group=grad_stats_parallel_group)
    return float(total.sqrt())


def _keep_on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return token counts as the dispatcher needs them; megatron-core's version handles GPU tensors only."""
    return tensor.detach().numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextlib.contextmanager
def _replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
