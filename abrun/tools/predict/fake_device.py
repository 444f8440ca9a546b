"""Fake GPU: runs a real training step on tensors with shapes and lifetimes, but without values.

In `fake_gpu`, float tensors are torch's FakeTensors, which take no memory. Integers and masks are real,
because they decide shapes. The tensors are on "cpu" but report `is_cuda`. Triton kernels and collectives do
nothing, and attention never stores its scores. Tensor lifetimes are therefore those of the real modules, FSDP
hooks, activation checkpoints and losses, as on the first of the requested ranks.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, fx, nn
from torch._C._distributed_c10d import FakeWork  # pyright: ignore[reportMissingImports]
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoModelForCausalLM

from abrun.recipe.policy import Model
from abrun.trainer.backends.head import LmHead
from abrun.trainer.loop.phases import find_overwritten_storage
from abrun.trainer.models.checks import disable_noise
from abrun.trainer.models.sources import preset_config, read_config

aten: Any = torch.ops.aten
# Streaming multiprocessors and bytes of shared memory, from which Triton's grids are computed
HOPPER_LIMITS = 132, 227 * 2**10
# On Hopper; taken from torch's allocator (torch/aten/src/ATen/cuda/CublasHandlePool.cpp).
CUBLAS_WORKSPACE_BYTES = 32 * 2**20

WEIGHTS, GATHERED, GRADIENTS = "weights", "gathered weights", "gradients"
OPTIMIZER, LOGPROBS, BACKWARD = "optimizer state", "log-probs", "backward"
REFERENCE, LIBRARIES = "reference weights", "cuBLAS"
FSDP_KINDS = {"unshard": GATHERED, "wait_for_unshard": GATHERED, "post_backward": GRADIENTS}

INTEGER_FACTORIES = (aten.arange, aten.randint, aten.scalar_tensor)  # without a dtype argument


# Simulated allocator statistics of a device: live bytes by kind, and their peak.

BLOCK_BYTES = 512  # torch's CUDA allocator rounds sizes up to this
ACTIVATIONS = "activations"


class PendingReplacement(NamedTuple):
    """A new storage that may have overwritten an old one.

    It has if the old storage is freed before the next storage is counted. Both then count once.
    """

    replaced_key: int  # key of the old storage
    storage: weakref.ref[UntypedStorage]
    kind: str
    live_by_kind: Mapping[str, int]  # bytes, without the new storage


class AllocationTracker:
    """Tracker of live storages: each counts under one kind until it is freed.

    The kind is `current_kind` when the storage is first counted; `assign_kind` changes it.
    """

    def __init__(self, constant_bytes: Mapping[str, int]) -> None:
        self.current_kind = ACTIVATIONS
        self._live_by_kind: Counter[str] = Counter(constant_bytes)
        self.peak_bytes = sum(constant_bytes.values())
        self.peak_by_kind: Mapping[str, int] = dict(constant_bytes)  # bytes by kind, at the peak
        self._records: dict[int, tuple[weakref.ref[UntypedStorage], int, str]] = {}
        self._pending: PendingReplacement | None = None

    @contextlib.contextmanager
    def counting_as(self, kind: str) -> Iterator[None]:
        """Count new storages under this kind while entered."""
        previous_kind, self.current_kind = self.current_kind, kind
        try:
            yield
        finally:
            self.current_kind = previous_kind

    def count_storage(self, storage: UntypedStorage, *, workspace_bytes: int = 0) -> None:
        """Count a storage that may be new or resized.

        `workspace_bytes`: what the operator that returned it held temporarily.
        """
        self.resolve_replacement()
        self._update_storage(storage, workspace_bytes)

    def count_replacement(self, replaced_storage: UntypedStorage, storage: UntypedStorage) -> None:
        """Hold back a new storage that may overwrite an old one (phases.find_overwritten_storage)."""
        self.resolve_replacement()
        self._pending = PendingReplacement(
            replaced_storage._cdata, weakref.ref(storage), self.current_kind, dict(self._live_by_kind)
        )

    def resolve_replacement(self) -> None:
        """Count the storage that was held back, if there is one."""
        replacement, self._pending = self._pending, None
        storage = replacement.storage() if replacement else None
        if replacement is None or storage is None:
            return
        with self.counting_as(replacement.kind):
            num_bytes = self._update_storage(storage)
        self._note_peak(replacement.live_by_kind, replacement.kind, num_bytes)

    def _update_storage(self, storage: UntypedStorage, workspace_bytes: int = 0) -> int:
        """Count a storage and return the number of bytes by which it has grown."""
        key, num_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        record = self._records.get(key)
        reference, counted_bytes, kind = record or (
            weakref.ref(storage, lambda _: self._remove_storage(key)),
            0,
            self.current_kind,
        )
        if num_bytes == counted_bytes and record:
            return 0
        self._records[key] = reference, num_bytes, kind
        self._add_bytes(kind, num_bytes - counted_bytes)
        self._note_peak(self._live_by_kind, self.current_kind, workspace_bytes)
        return num_bytes - counted_bytes

    def _note_peak(self, live_by_kind: Mapping[str, int], kind: str, additional_bytes: int) -> None:
        """Update the peak if the live bytes, plus `additional_bytes` of `kind`, exceed it."""
        if (live_bytes := sum(live_by_kind.values()) + additional_bytes) > self.peak_bytes:
            self.peak_bytes, self.peak_by_kind = (
                live_bytes,
                {**live_by_kind, kind: live_by_kind.get(kind, 0) + additional_bytes},
            )

    def assign_kind(self, tensors: Iterable[Any], kind: str) -> None:
        """Count the storages of these tensors under another kind from now on."""
        for tensor in tensors:
            storage = to_local_shard(tensor).untyped_storage()
            self.count_storage(storage)
            reference, num_bytes, previous_kind = self._records[storage._cdata]
            self._records[storage._cdata] = reference, num_bytes, kind
            self._add_bytes(previous_kind, -num_bytes)
            self._add_bytes(kind, num_bytes)

    def reset_peak(self) -> None:
        self.resolve_replacement()
        self.peak_bytes, self.peak_by_kind = sum(self._live_by_kind.values()), dict(self._live_by_kind)

    def _remove_storage(self, key: int) -> None:
        _, num_bytes, kind = self._records.pop(key)
        self._add_bytes(kind, -num_bytes)
        if self._pending is not None and self._pending.replaced_key == key:  # the old storage was overwritten
            self._pending = self._pending._replace(live_by_kind=dict(self._live_by_kind))
            self.resolve_replacement()

    def _add_bytes(self, kind: str, num_bytes: int) -> None:
        self._live_by_kind[kind] += num_bytes


def to_local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FakeDeviceMode(TorchDispatchMode):
    """Dispatch mode that runs operators on fake floats and real integers, and counts their results."""

    def __init__(self, allocations: AllocationTracker) -> None:
        super().__init__()
        self._allocations = allocations
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Operator that a DTensor is about to call again with its plain tensors
        self._dtensor_operator: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(tensor_type, DTensor | AsyncCollectiveTensor) for tensor_type in types):
            self._dtensor_operator = func
            return NotImplemented  # the subclass calls the operator again with plain tensors
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # only for shapes, as in DTensor's sharding propagation
        # Autograd never overwrites the inputs of these
        is_dtensor_operator = func is self._dtensor_operator
        self._dtensor_operator = None if is_dtensor_operator else self._dtensor_operator
        with self._count_as_backward():
            result = self._run(func, args, kwargs, inputs)
            replaced_storage = None if is_dtensor_operator else find_overwritten_storage(func, args, result)
            if replaced_storage is not None:
                self._allocations.count_replacement(replaced_storage, result.untyped_storage())
                return result
            outputs = (result,) if isinstance(result, Tensor) else tree_leaves((result, kwargs.get("out")))
            workspace_bytes = _estimate_workspace(func, inputs)
            for leaf in outputs:
                if isinstance(leaf, Tensor) and (isinstance(leaf, FakeTensor) or not leaf.is_meta):
                    self._allocations.count_storage(leaf.untyped_storage(), workspace_bytes=workspace_bytes)
        return result

    def _count_as_backward(self) -> Any:
        if self._allocations.current_kind == "activations" and torch._C._current_autograd_node() is not None:
            return self._allocations.counting_as(BACKWARD)
        return contextlib.nullcontext()

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        if func.namespace == "c10d":
            return _run_fake_collective(func, args)
        has_fake_input = any(isinstance(tensor, FakeTensor) for tensor in inputs)
        if has_fake_input and func in OPERATOR_OVERRIDES:
            return OPERATOR_OVERRIDES[func](func, self._fake_mode, *args, **kwargs)
        if has_fake_input or self._makes_floats(func, kwargs, inputs):
            with self._fake_mode:
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _makes_floats(self, func: Any, kwargs: Any, inputs: list[Tensor]) -> bool:
        """Return True if the operator creates floats without inputs; floats from integers are computed."""
        if str(kwargs.get("device")) == "meta" or func.namespace != "aten":
            return False
        if inputs:
            all_on_meta = all(tensor.is_meta for tensor in inputs)
            return all_on_meta and kwargs.get("device") is not None
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return dtype.is_floating_point and func.overloadpacket not in INTEGER_FACTORIES


def _return_placeholder(func: Any, fake_mode: FakeTensorMode, tensor: Tensor) -> Any:
    """Return True, 1.0 or 1 for a scalar that the step reads, such as the gradient norm."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _choose_experts_evenly(
    func: Any, fake_mode: FakeTensorMode, scores: Tensor, k: int, *args: Any
) -> tuple[Tensor, Tensor]:
    """Return a top-k that chooses all experts equally often."""
    with fake_mode:
        values, _ = func(scores, k, *args)
    count = values.numel()
    return values, (torch.arange(count) % scores.shape[-1]).view(values.shape)


def _run_wide_matmul(
    func: Any, fake_mode: FakeTensorMode, *args: Any, out: Tensor | None = None, **_: Any
) -> Tensor:
    """Return the output of a matmul with an output dtype, which torch 2.11 lacks for fake tensors."""
    lhs, rhs, dtype = args[-3:]
    if out is not None:
        return out
    with fake_mode:
        return lhs.new_empty(lhs.shape[0], rhs.shape[1], dtype=dtype)


def _run_grouped_matmul(
    func: Any,
    fake_mode: FakeTensorMode,
    lhs: Tensor,
    rhs: Tensor,
    offs: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the output of a grouped matmul; torch 2.11 infers its shape only for bfloat16."""
    is_stacked = lhs.ndim == rhs.ndim  # one matrix per expert, not rows of all experts concatenated
    expert_dims = () if not is_stacked else lhs.shape[:1] if offs is None else (len(offs),)
    with fake_mode:
        return lhs.new_empty(*expert_dims, lhs.shape[-2], rhs.shape[-1])


OPERATOR_OVERRIDES = {
    aten._grouped_mm.default: _run_grouped_matmul,
    aten._local_scalar_dense.default: _return_placeholder,
    aten.topk.default: _choose_experts_evenly,
    **dict.fromkeys(
        (aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out), _run_wide_matmul
    ),
}


def _run_fake_collective(func: Any, args: Any) -> Any:
    """Return the result of a collective without communication: outputs get this rank's data or stay as is."""
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


def _estimate_workspace(func: Any, inputs: list[Tensor]) -> int:
    """Return the bytes of workspace that a GPU kernel allocates, apart from inputs and outputs."""
    if func.overloadpacket.__name__ not in ATTENTION_BACKWARD:
        return 0
    # FlashAttention accumulates d_query in float32 and expands key gradients to the query heads.
    query, key = inputs[1], inputs[2]
    float32_query_bytes = query.numel() * 4
    return float32_query_bytes + (2 * query.numel() * query.itemsize if key.shape != query.shape else 0)


ATTENTION_BACKWARD = ("_scaled_dot_product_flash_attention_for_cpu_backward", "_varlen_attn_backward")


class NoOpKernel:
    """Replacement of every Triton kernel: a launch does nothing."""

    def __getattr__(self, name: str) -> "NoOpKernel":
        return self

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def fake_gpu(num_ranks: int, master_dtype: torch.dtype = torch.float32) -> Iterator[AllocationTracker]:
    """Make this process the first of `num_ranks` ranks with a fake GPU each, while entered.

    `master_dtype`: dtype of weights, gradients and AdamW moments. abrun itself uses float32.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    allocations = AllocationTracker({LIBRARIES: CUBLAS_WORKSPACE_BYTES})
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for patcher in _make_patches(allocations, master_dtype):
            stack.enter_context(patcher)
        stack.enter_context(FakeDeviceMode(allocations))
        yield allocations


def _make_patches(allocations: AllocationTracker, master_dtype: torch.dtype) -> Iterator[Any]:
    """Yield the patches that let a training step run on the fake GPU."""
    make_policy: Any = MixedPrecisionPolicy
    for tensor_type in (FakeTensor, FunctionalTensor):
        yield patch.object(tensor_type, "is_cuda", property(lambda _: True), create=True)
    yield patch.object(FakeTensor, "data_ptr", lambda _: 0)
    yield patch(
        "abrun.trainer.backends.open_network", functools.partial(make_fake_network, dtype=master_dtype)
    )
    # Compares values, which fake tensors do not have
    yield patch("abrun.trainer.backends.attention.measure_stream_deviation", lambda *_, **__: None)
    yield patch(
        "abrun.trainer.backends.dtensor.fsdp.MixedPrecisionPolicy",
        lambda **settings: make_policy(**settings | {"reduce_dtype": master_dtype}),
    )
    yield patch("torch.compile", partition_layer)
    yield patch.object(
        torch.UntypedStorage, "resize_", _count_resizes(allocations, torch.UntypedStorage.resize_)
    )
    yield patch.object(LmHead, "compute_logprobs", _count_as_logprobs(allocations, LmHead.compute_logprobs))
    for method, tensor_type in FSDP_KINDS.items():
        counted_method = allocations.counting_as(tensor_type)(getattr(FSDPParamGroup, method))
        yield patch.object(FSDPParamGroup, method, counted_method)
    with contextlib.suppress(ImportError):
        from abrun.trainer.kernels import triton_tiles

        yield patch.object(triton_tiles, "kernels", NoOpKernel())
        yield patch.object(triton_tiles, "_query_device_limits", lambda _: HOPPER_LIMITS)


def make_fake_network(model: Model, *, dtype: torch.dtype = torch.float32, **_: Any) -> Any:
    """Make a recipe's network from its configuration, without reading weights."""
    config = preset_config(model) if model.path is None else read_config(model.path)
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base = network.base_model
    if hasattr(base, "rotary_emb"):
        base.rotary_emb = type(base.rotary_emb)(config=network.config)
    disable_noise(network)
    network.checkpoint = EmptyCheckpoint()
    network.decodes_in_place = False
    return network


class EmptyCheckpoint:
    """Checkpoint that returns uninitialized weights."""

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        return torch.empty([bounds.stop - bounds.start for bounds in slices])


def _count_resizes(allocations: AllocationTracker, resize: Any) -> Any:
    """Wrap UntypedStorage.resize_ so that storages which FSDP frees and refills are counted."""

    @functools.wraps(resize)
    def counted_resize(storage: Any, size: int) -> Any:
        resized = resize(storage, size)
        allocations.count_storage(storage)
        return resized

    return counted_resize


def _count_as_logprobs(allocations: AllocationTracker, compute_logprobs: Any) -> Any:
    """Wrap the LM head so that allocations in its forward and backward pass count as log-probs."""

    @functools.wraps(compute_logprobs)
    def counted_compute(head: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        previous_kind, allocations.current_kind = allocations.current_kind, LOGPROBS

        def restore_kind(gradient: Tensor | None = None) -> None:
            allocations.current_kind = previous_kind

        if hidden.requires_grad:
            hidden.register_hook(restore_kind)
        try:
            return compute_logprobs(head, hidden, *args, **kwargs)
        finally:
            if not hidden.requires_grad:
                restore_kind()

    return counted_compute


def group_by_kind(tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Group the tensors of a backend's `local_state` into weights and optimizer state."""
    by_kind: dict[str, list[Tensor]] = {WEIGHTS: [], OPTIMIZER: []}
    for name, tensor in tensors.items():
        by_kind[WEIGHTS if "weights/" in name else OPTIMIZER].append(to_local_shard(tensor))
    return by_kind


# Stand-in for torch.compile that saves the activations a compiled layer would save.
#
# Inductor partitions the joint forward-backward graph of a layer by a min cut: it saves the fewest bytes
# and recomputes the rest in the backward pass (torch._functorch.partitioners). This module uses the same
# partition and decompositions. It then runs the two graphs operator by operator, which takes slightly more
# memory within a layer than fused kernels.

ATTENTION = ("torch_attn::_varlen_attn", "aten::_scaled_dot_product_flash_attention_for_cpu")

_TENSOR = object()  # placeholder for a tensor in a layer's arguments
_graphs: dict[Any, Callable[..., Any]] = {}  # shared by layers of equal type and shapes


def partition_layer(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Return a partitioned version of a layer's bound `forward`, as a replacement of torch.compile."""
    module: nn.Module = forward.__self__  # pyright: ignore[reportFunctionMemberAccess]

    def run_layer(*inputs: Any, **keyword_inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **keyword_inputs)
        parameters = dict(module.named_parameters())
        leaves, spec = tree_flatten((inputs, keyword_inputs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        saves_attention_only = functorch_config.activation_memory_budget == 0.0
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in (*parameters.values(), *tensors))
        key = (type(module), saves_attention_only, shapes)
        if key not in _graphs:
            other_leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            _graphs[key] = _partition_graph(
                module, forward, list(parameters), other_leaves, spec, saves_attention_only
            )
        return _graphs[key](list(parameters.values()), tensors)

    return run_layer


def _partition_graph(
    module: nn.Module,
    forward: Any,
    parameter_names: list[str],
    leaves: list[Any],
    spec: Any,
    saves_attention_only: bool,
) -> Callable[..., Any]:
    def call_layer(weights: list[Tensor], tensors: list[Tensor]) -> Any:
        remaining_tensors = iter(tensors)
        filled_leaves = [next(remaining_tensors) if leaf is _TENSOR else leaf for leaf in leaves]
        inputs, keyword_inputs = tree_unflatten(filled_leaves, spec)
        with torch.nn.utils.stateless._reparametrize_module(
            module, dict(zip(parameter_names, weights, strict=True))
        ):
            return forward(*inputs, **keyword_inputs)

    return aot_function(
        call_layer,
        fw_compiler=_run_graph_as_is,
        bw_compiler=_run_graph_as_is,
        partition_fn=_partition_around_attention
        if saves_attention_only
        else min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def _run_graph_as_is(gm: fx.GraphModule, example_inputs: Any) -> Any:
    return make_boxed_func(gm.forward)


def _partition_around_attention(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Partition a layer for selective checkpointing: save only attention and its inputs and outputs.

    abrun.trainer.backends.dtensor.layers does the same in real training.
    """
    backward_nodes: set[fx.Node] = set()
    saved_nodes: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if (node.op == "placeholder" and "tangents" in node.name) or not backward_nodes.isdisjoint(
            node.all_input_nodes
        ):
            backward_nodes.add(node)
        elif getattr(getattr(node.target, "_schema", None), "name", "") in ATTENTION:
            saved_nodes |= {node, *node.users, *map(_find_storage_owner, node.all_input_nodes)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in backward_nodes:
            policy = CheckpointPolicy.MUST_SAVE if node in saved_nodes else CheckpointPolicy.MUST_RECOMPUTE
            node.meta["recompute"] = policy
    with functorch_config.patch(activation_memory_budget=1.0):
        return min_cut_rematerialization_partition(joint, *args, **options)


def _find_storage_owner(node: fx.Node) -> fx.Node:
    """Return the node that owns the storage of a view, or the node itself."""
    while node.op == "call_function" and get_default_op_list().is_view(node):
        node = node.all_input_nodes[0]
    return node
