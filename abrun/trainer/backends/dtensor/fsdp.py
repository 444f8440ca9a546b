"""FSDP2 sharding of modules, and AdamW on the shards, for policies and value models.

Master weights and optimizer state are float32; `dtype` is the compute dtype.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.utils import get_total_norm

from abrun.recipe.policy import Dtensor, Optimizer, Policy
from abrun.trainer.backends.policy import empty_adamw_state, sum_of_squares
from abrun.trainer.backends.shards import Piece, ShardSpec, optimizer_specs
from abrun.trainer.models.families import takes_weight_decay

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    dtype: str,
    *,
    reshard_after_forward: bool | None = None,
    cast_inputs: bool = True,
    dim: int = 0,
) -> None:
    """Shard a module's parameters over the mesh; each forward pass of the module gathers them.

    Parameters are sharded along `dim`. Except along dimension 0, their size must be a multiple of the mesh's.
    Gradients are summed over the mesh, not averaged, because the global loss is a sum over all ranks. So no
    factor depends on the shape of the mesh.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
    )
    sharded: Any = fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=(lambda parameter: Shard(dim)) if dim else None,
    )
    if mesh.size() > 1:  # a single rank averages nothing, and would only divide by 1
        sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def shard_layers(layers: nn.ModuleList, mesh: DeviceMesh, dtype: str) -> None:
    """Shard the decoder's layers, each gathered and freed on its own."""
    for layer in layers:
        shard(layer, mesh, dtype)
        for module in layer.modules():
            # In a module with this mark, torch.compile treats the head size as dynamic, and its kernels
            # divide by it. The compiled code runs inside of FSDP's hooks and does not depend on the mark.
            module._is_fsdp_managed_module = False  # pyright: ignore[reportArgumentType]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of one that may be sharded, on every rank of its mesh. Collective.

    Gathers over one mesh dimension at a time, beginning with the first: FSDP shards last, after the others.
    """
    if isinstance(tensor, DTensor):
        placements = list(tensor.placements)
        for dimension in range(len(placements)):
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their common L2 norm is at most `max_norm`; return the norm [] before.

    Collective. torch's clip_grad_norm_ refuses parameters of different meshes, and clipping per mesh would
    scale each mesh by another factor.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local_grads = [_local(grad) for grad in grads]
    total = (_norm_on_cpu if local_grads[0].device.type == "cpu" else _norm_on_gpu)(grads)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(local_grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return total


def _norm_on_gpu(grads: Iterable[Tensor]) -> Tensor:
    grads_by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for grad in grads:
        mesh = grad.device_mesh if isinstance(grad, DTensor) and grad.device_mesh.size() > 1 else None
        grads_by_mesh.setdefault(mesh, []).append(grad if mesh else _local(grad))
    norms = [full_tensor(get_total_norm(mesh_grads)) for mesh_grads in grads_by_mesh.values()]
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm()


def _norm_on_cpu(grads: Iterable[Tensor]) -> Tensor:
    """Return the common L2 norm in float64. Each gradient counts once, however it is replicated."""
    total = torch.zeros((), dtype=torch.float64)
    shards: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[Tensor]] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            shards.setdefault((grad.device_mesh, tuple(grad.placements)), []).append(_local(grad))
        else:
            total += sum_of_squares([grad])
    for (mesh, placements), local_grads in shards.items():
        summed = [placement if placement.is_replicate() else Partial() for placement in placements]
        total += full_tensor(DTensor.from_local(sum_of_squares(local_grads), mesh, summed))
    return total.sqrt()


def materialise(module: nn.Module, network: Any, device: torch.device) -> None:
    """Load the weights of `network`, a part of the sharded `module`: each rank reads its shards, as float32.

    Does nothing if the weights are loaded already.
    """
    checkpoint = getattr(network, "checkpoint", None)
    if checkpoint is None:
        return
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in network.named_parameters():
            local_parameter = _local(parameter)
            # A value model leaves the LM head on the meta device.
            if local_parameter.numel() and not local_parameter.is_meta:
                local_parameter.copy_(checkpoint.read(name, local_slices(parameter)))
    del network.checkpoint  # closes its files


def free_gathered(module: nn.Module) -> None:
    """Free gathered weights that a forward pass without gradient left, because their shards have changed."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def keeps_gathered(policy: Policy) -> bool:
    return isinstance(policy.backend, Dtensor) and policy.backend.keep_gathered


def gather_once(module: nn.Module, microbatches: Iterable[T]) -> Iterator[T]:
    """Yield an update's microbatches such that weights are gathered once and gradients reduced once.

    The first microbatch gathers, layer by layer. The last one reduces over the ranks and frees the weights.
    """
    fsdp_modules = [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]

    def set_last(is_last: bool) -> None:
        for submodule in fsdp_modules:
            submodule.set_requires_gradient_sync(is_last, recurse=False)
            submodule.set_reshard_after_backward(is_last, recurse=False)
            # The backward pass of this microbatch needs the gathered weights as well.
            submodule.set_reshard_after_forward(False, recurse=False)

    remaining = iter(microbatches)
    microbatch = next(remaining)
    set_last(False)
    with module.register_forward_hook(_accumulate_in_compute_dtype):
        for next_microbatch in remaining:
            yield microbatch
            microbatch = next_microbatch
        set_last(True)
        yield microbatch
    for submodule in fsdp_modules:
        submodule.set_reshard_after_forward(submodule is not module, recurse=False)


def _accumulate_in_compute_dtype(module: nn.Module, *_: Any) -> None:
    """Accumulate the gradients of a weight with two uses, as a tied embedding, in the compute dtype.

    torch 2.15 accumulates in float32 in the first of several microbatches only. A tied embedding's gradient
    would then differ from that of microbatches which reduce their gradients separately.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.grad_dtype = None


def local_slices(parameter: Tensor) -> tuple[slice, ...]:
    """Return the slices of the full parameter that this rank holds.

    Later mesh dimensions shard first, and FSDP shards the result. DTensor makes equal shards, the last of
    which are smaller or empty.
    """
    slices = [slice(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dimension, placement in reversed(list(enumerate(parameter.placements))):
            if isinstance(placement, Replicate):
                continue
            shard_placement: Any = placement  # Shard or _StridedShard
            extent, rank = slices[shard_placement.dim], mesh.get_local_rank(dimension)
            size = -(-(extent.stop - extent.start) // mesh.size(dimension))
            start, stop = (min(extent.start + index * size, extent.stop) for index in (rank, rank + 1))
            slices[shard_placement.dim] = slice(start, stop)
    return tuple(slices)


class ShardedParameters:
    """The parameters of sharded modules with their optimizer; without an optimizer they are frozen.

    `prefix` is removed from parameter names to get Hugging Face's.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], optimizer: Optimizer | None, *, prefix: str = ""
    ) -> None:
        self._parameters: dict[str, Any] = parameters
        self._settings, self._prefix = optimizer, prefix
        # AdamW is elementwise, so it can run on plain local tensors. Dispatching its step through DTensor
        # takes as long as the step takes on a GPU.
        self._local_parameters = (
            {name: _local(parameter) for name, parameter in parameters.items()} if optimizer else {}
        )
        self._optimizer = _adamw(self._local_parameters, optimizer) if optimizer else None

    @torch.no_grad()
    def optimizer_step(self, learning_rate: float) -> float:
        """See abrun.trainer.backends.Trainable."""
        assert self._optimizer is not None and self._settings is not None
        norm = clip_gradients(self._parameters.values(), self._settings.max_grad_norm)
        for local_parameter, parameter in zip(
            self._local_parameters.values(), self._parameters.values(), strict=True
        ):
            local_parameter.data = _local(parameter)  # FSDP may have moved it
            local_parameter.grad = None if parameter.grad is None else _local(parameter.grad)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for tensor in (*self._local_parameters.values(), *self._parameters.values()):
            tensor.grad = None
        return float(norm)

    def local_state(self) -> dict[str, Tensor]:
        """See abrun.trainer.backends.Trainable."""
        state = {f"weights/{name}": _local(parameter) for name, parameter in self._parameters.items()}
        if self._optimizer is not None:
            for name, local_parameter in self._local_parameters.items():
                # A parameter that never had a gradient, such as an expert without tokens, has no state.
                for key, value in self._optimizer.state.get(local_parameter, {}).items():
                    state[f"optimizer/{key}/{name}"] = value
        return state

    def shard_specs(self) -> dict[str, ShardSpec]:
        """See abrun.trainer.backends.Trainable."""
        specs = {}
        for name, parameter in self._parameters.items():
            piece = Piece(tuple(parameter.shape), local_slices(parameter))
            spec = ShardSpec.from_piece(name.removeprefix(self._prefix), piece)
            specs[f"weights/{name}"] = spec.with_prefix("weights/")
            if self._optimizer is not None:
                for key, state_spec in optimizer_specs(spec).items():
                    specs[f"optimizer/{key}/{name}"] = state_spec.with_prefix(f"optimizer/{key}/")
        return specs

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """See abrun.trainer.backends.Trainable."""
        if self._optimizer is not None:
            self._optimizer.state.clear()
            for name, local_parameter in self._local_parameters.items():
                if f"optimizer/step/{name}" in state:
                    self._optimizer.state[local_parameter] = empty_adamw_state(local_parameter)
        for name, tensor in self.local_state().items():
            tensor.copy_(state[name])

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each full weight under its Hugging Face name. Collective."""
        for name, parameter in self._parameters.items():
            name = name.removeprefix(self._prefix)
            if isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1:
                yield name, _local(parameter)  # equal to full_tensor, without its 0.1 ms overhead
            else:
                yield name, full_tensor(parameter.detach())

    def resident_tensors(self) -> Sequence[Tensor]:
        """See abrun.trainer.backends.Trainable."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        weights = (_local(parameter) for parameter in self._parameters.values())
        return [*weights, *(tensor for state in states for tensor in state.values())]


def _adamw(parameters: Mapping[str, Tensor], settings: Optimizer) -> torch.optim.AdamW:
    decayed = {name for name, parameter in parameters.items() if takes_weight_decay(name, parameter)}
    groups = [
        {"params": [parameters[name] for name in parameters if name in decayed]},
        {"params": [parameters[name] for name in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def local_shard(parameter: Tensor) -> Tensor:
    """Return the plain tensor that this rank computes with: its shard, or an unsharded parameter itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard without copying it, and without its gradient's history."""
    return local_shard(tensor).detach()
