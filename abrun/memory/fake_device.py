"""A fake GPU: the trainer's own step on tensors that have shapes and lifetimes, and no values.

Inside of `hollow_gpu` every float tensor is torch's FakeTensor, which takes no memory, while the few integers
and masks that decide shapes are computed. The tensors are on "cpu" and say that they are `is_cuda`. Triton's
kernels and collectives do nothing; attention never holds the scores. So the lifetimes are those of the real
modules, FSDP's hooks, activation checkpoints and losses, on the first rank of as many as are asked for.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork  # pyright: ignore[reportMissingImports]
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from abrun.backends.head import LmHead
from abrun.memory.account import Account, local
from abrun.memory.compiled import partitioned
from abrun.models.checks import disable_noise
from abrun.models.presets import preset_config
from abrun.models.sources import read_config
from abrun.recipe.policy import Model
from abrun.train.phases import find_overwritten_storage

aten: Any = torch.ops.aten
HOPPER = 132, 227 * 2**10  # a GPU's processors and bytes of shared memory, for the grids of Triton's kernels
# cuBLAS asks torch's allocator for it (on Hopper; torch/aten/src/ATen/cuda/CublasHandlePool.cpp).
CUBLAS_WORKSPACE_BYTES = 32 * 2**20

WEIGHTS, GATHERED, GRADIENTS = "weights", "gathered weights", "gradients"
OPTIMIZER, LOGPROBS, BACKWARD = "optimizer state", "log-probs", "backward"
REFERENCE, LIBRARIES = "reference weights", "cuBLAS"
FSDP_KINDS = {"unshard": GATHERED, "wait_for_unshard": GATHERED, "post_backward": GRADIENTS}

MAKES_INTEGERS = (aten.arange, aten.randint, aten.scalar_tensor)  # without being asked for a dtype


class HollowTensors(TorchDispatchMode):
    """Runs operators on fake floats and real integers, and puts what they return to an account."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._of_dtensors: Any = None  # an operator that they are about to call with the plain tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            self._of_dtensors = func
            return NotImplemented  # they come back with the plain tensors inside
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # somebody asks for shapes alone, as DTensor does
        is_of_dtensors = func is self._of_dtensors  # which autograd never overwrites
        self._of_dtensors = None if is_of_dtensors else self._of_dtensors
        with self._of_backward():
            result = self._run(func, args, kwargs, inputs)
            predecessor = None if is_of_dtensors else find_overwritten_storage(func, args, result)
            if predecessor is not None:
                self._account.see_overwriting(predecessor, result.untyped_storage())
                return result
            outputs = (result,) if isinstance(result, Tensor) else tree_leaves((result, kwargs.get("out")))
            beside = _held_inside(func, inputs)
            for leaf in outputs:
                if isinstance(leaf, Tensor) and (isinstance(leaf, FakeTensor) or not leaf.is_meta):
                    self._account.see(leaf.untyped_storage(), beside=beside)
        return result

    def _of_backward(self) -> Any:
        if self._account.now == "activations" and torch._C._current_autograd_node() is not None:
            return self._account.kind(BACKWARD)
        return contextlib.nullcontext()

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        if func.namespace == "c10d":
            return _collective(func, args)
        fake = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if fake and func in UNKNOWN:
            return UNKNOWN[func](func, self._fake, *args, **kwargs)
        if fake or self._makes_floats(func, kwargs, inputs):
            with self._fake:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _makes_floats(self, func: Any, kwargs: Any, inputs: list[Tensor]) -> bool:
        """Return True if floats are made of no values; floats that integers give are computed."""
        if str(kwargs.get("device")) == "meta" or func.namespace != "aten":
            return False
        if inputs:
            on_meta = all(tensor.is_meta for tensor in inputs)
            return on_meta and kwargs.get("device") is not None
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return dtype.is_floating_point and func.overloadpacket not in MAKES_INTEGERS


def _scalar(func: Any, fake: FakeTensorMode, tensor: Tensor) -> Any:
    """Return a number in the place of one that a step reads, such as the gradient's norm."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _balanced(func: Any, fake: FakeTensorMode, scores: Tensor, k: int, *args: Any) -> tuple[Tensor, Tensor]:
    """Choose each expert as often as any other."""
    with fake:
        values, _ = func(scores, k, *args)
    count = values.numel()
    return values, (torch.arange(count) % scores.shape[-1]).view(values.shape)


def _wide_product(func: Any, fake: FakeTensorMode, *args: Any, out: Tensor | None = None, **_: Any) -> Tensor:
    """Return a matmul's result in a wider dtype: torch 2.11 takes that dtype for a factor of fake tensors."""
    left, right, dtype = args[-3:]
    if out is not None:
        return out
    with fake:
        return left.new_empty(left.shape[0], right.shape[1], dtype=dtype)


def _grouped_product(
    func: Any,
    fake: FakeTensorMode,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the experts' matmuls, whose shapes torch 2.11 knows in bfloat16 alone."""
    is_stacked = left.ndim == right.ndim  # a matmul an expert, and not rows one after the other
    experts = () if not is_stacked else left.shape[:1] if offs is None else (len(offs),)
    with fake:
        return left.new_empty(*experts, left.shape[-2], right.shape[-1])


UNKNOWN = {
    aten._grouped_mm.default: _grouped_product,
    aten._local_scalar_dense.default: _scalar,
    aten.topk.default: _balanced,
    **dict.fromkeys(
        (aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out), _wide_product
    ),
}


def _collective(func: Any, args: Any) -> Any:
    """Send nothing: what would arrive is this rank's own, or what the output holds."""
    name, work = func.overloadpacket.__name__, FakeWork().boxed()
    if name == "barrier":
        return work
    if name == "alltoall_base_":
        if not isinstance(args[0], FakeTensor):
            args[0].copy_(args[1])
        return work
    if name == "allgather_":
        for outputs, source in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(source)
    return args[0], work


def _held_inside(func: Any, inputs: list[Tensor]) -> int:
    """Return the bytes that a GPU's kernel holds while it runs, besides its inputs and outputs."""
    if func.overloadpacket.__name__ not in ATTENTION_BACKWARD:
        return 0
    # FlashAttention sums d_query in float32, and expands the keys' gradients to the queries' heads.
    query, key = inputs[1], inputs[2]
    wide = query.numel() * 4
    return wide + (2 * query.numel() * query.itemsize if key.shape != query.shape else 0)


ATTENTION_BACKWARD = ("_scaled_dot_product_flash_attention_for_cpu_backward", "_varlen_attn_backward")


class NoKernel:
    """Stands for each of Triton's kernels: launched, it does nothing."""

    def __getattr__(self, name: str) -> "NoKernel":
        return self

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def hollow_gpu(num_ranks: int, master_dtype: torch.dtype = torch.float32) -> Iterator[Account]:
    """Make this process the first of `num_ranks`, each with a fake GPU, while entered.

    `master_dtype`: of weights, gradients and AdamW's moments. abrun trains with float32 ones.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    account = Account({LIBRARIES: CUBLAS_WORKSPACE_BYTES})
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for stand_in in _stand_ins(account, master_dtype):
            stack.enter_context(stand_in)
        stack.enter_context(HollowTensors(account))
        yield account


def _stand_ins(account: Account, master_dtype: torch.dtype) -> Iterator[Any]:
    """Yield the patches by which a step runs on such a machine."""
    for kind in (FakeTensor, FunctionalTensor):
        yield patch.object(kind, "is_cuda", property(lambda _: True), create=True)
    yield patch.object(FakeTensor, "data_ptr", lambda _: 0)
    yield patch("abrun.backends.open_network", functools.partial(hollow_network, dtype=master_dtype))
    yield patch(
        "abrun.backends.attention.measure_stream_deviation", lambda *_, **__: None
    )  # nothing to compare
    yield patch("abrun.backends.dtensor.fsdp.MixedPrecisionPolicy", _reducing_in(master_dtype))
    yield patch("torch.compile", partitioned)
    yield patch.object(torch.UntypedStorage, "resize_", _seen(account, torch.UntypedStorage.resize_))
    yield patch.object(LmHead, "compute_logprobs", _judging(account, LmHead.compute_logprobs))
    for method, kind in FSDP_KINDS.items():
        in_kind = account.kind(kind)(getattr(FSDPParamGroup, method))
        yield patch.object(FSDPParamGroup, method, in_kind)
    with contextlib.suppress(ImportError):
        from abrun.kernels import triton_tiles

        yield patch.object(triton_tiles, "kernels", NoKernel())
        yield patch.object(triton_tiles, "_query_device_limits", lambda _: HOPPER)


def hollow_network(model: Model, *, dtype: torch.dtype = torch.float32, **_: Any) -> Any:
    """Make a recipe's network from its configuration alone: no weight is read."""
    config = preset_config(model) if model.path is None else read_config(model.path)
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base = network.base_model
    if hasattr(base, "rotary_emb"):
        base.rotary_emb = type(base.rotary_emb)(config=network.config)
    disable_noise(network)
    network.checkpoint = NoCheckpoint()
    network.decodes_in_place = False
    return network


def _reducing_in(dtype: torch.dtype) -> Callable[..., MixedPrecisionPolicy]:
    """Return what makes FSDP's policy with gradients summed over ranks in `dtype`."""
    make: Any = MixedPrecisionPolicy
    return lambda **settings: make(**settings | {"reduce_dtype": dtype})


class NoCheckpoint:
    """The checkpoint of a network without weights."""

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        return torch.empty([bounds.stop - bounds.start for bounds in part])


def _seen(account: Account, resize: Any) -> Any:
    """Count the storages that FSDP empties and refills by hand."""

    @functools.wraps(resize)
    def run(storage: Any, size: int) -> Any:
        resized = resize(storage, size)
        account.see(storage)
        return resized

    return run


def _judging(account: Account, judge: Any) -> Any:
    """Attribute allocations during the head's forward and backward passes to the log-probs."""

    @functools.wraps(judge)
    def run(head: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        before, account.now = account.now, LOGPROBS

        def done(gradient: Tensor | None = None) -> None:
            account.now = before

        if hidden.requires_grad:
            hidden.register_hook(done)
        try:
            return judge(head, hidden, *args, **kwargs)
        finally:
            if not hidden.requires_grad:
                done()

    return run


def resident(named: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the tensors of a backend's `local_state` by kind."""
    by_kind: dict[str, list[Tensor]] = {WEIGHTS: [], OPTIMIZER: []}
    for name, tensor in named.items():
        by_kind[WEIGHTS if "weights/" in name else OPTIMIZER].append(local(tensor))
    return by_kind
