"""Modules whose parameters are spread over all ranks (FSDP2), and their AdamW: of policy and critic alike.

Master weights and optimizer state are float32; `dtype` is what the products compute in.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import get_total_norm

from abrun.backends.pieces import Held, Piece, of_optimizer
from abrun.models import takes_weight_decay
from abrun.recipe.policy import Dtensor, Optimizer, Policy

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
    """Spread a module's parameters over the mesh, to be gathered for each of its forward passes.

    Each is cut along `dim`, which its size there allows: any along 0, else a multiple of the mesh's.
    Gradients are summed over the mesh, as the global loss is a sum over all ranks: there is no average to be
    cancelled, and so no factor that a mesh of another shape could get wrong.
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
    if mesh.size() > 1:  # one rank has nothing to average over, and would divide by the factor
        sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def shard_layers(layers: nn.ModuleList, mesh: DeviceMesh, dtype: str) -> None:
    """The decoder's repeated blocks: gathered and freed one by one."""
    for layer in layers:
        shard(layer, mesh, dtype)
        for module in layer.modules():
            # In a module marked so, a compiler takes a head's size for a number that may change, and its
            # kernels divide by it. What is compiled is inside of FSDP's hooks, and need not know of them.
            module._is_fsdp_managed_module = False  # pyright: ignore[reportArgumentType]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over a mesh, on every rank of it. Collective.

    The mesh's dimensions one after the other, the first first: FSDP shards what the others have left.
    """
    if isinstance(tensor, DTensor):
        placements = list(tensor.placements)
        for dimension in range(len(placements)):
            placements[dimension] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients by what brings their common L2 norm down to `max_norm`; returns that norm [].

    torch's own refuses parameters of several meshes, and one norm a mesh would clip each by another factor.
    Collective.
    """
    of_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    own = []
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter, "device_mesh", None)
            own.append(_local(parameter.grad))
            alone = mesh is None or mesh.size() == 1
            of_mesh.setdefault(None if alone else mesh, []).append(own[-1] if alone else parameter.grad)
    norms = [whole(get_total_norm(grads)) for grads in of_mesh.values()]
    total = norms[0] if len(norms) == 1 else torch.stack(norms).norm()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(own, factor)  # pyright: ignore[reportPrivateImportUsage]
    return total


def materialise(module: nn.Module, network: Any, device: torch.device) -> None:
    """Read the weights of `network`, inside the sharded `module`: each rank its own parts, into float32.

    Nothing where they are there already.
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
            own = _local(parameter)
            if own.numel() and not own.is_meta:  # a value model leaves the head where it is
                own.copy_(checkpoint.read(name, own_slices(parameter)))
    del network.checkpoint  # and its files


def forget_gathered(module: nn.Module) -> None:
    """Drop whole weights that a forward pass without gradient left here: their parts have changed."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def keeps_gathered(policy: Policy) -> bool:
    return isinstance(policy.backend, Dtensor) and policy.backend.keep_gathered


def gathered_once(module: nn.Module, microbatches: Iterable[T]) -> Iterator[T]:
    """The microbatches of an update, that between them gather weights once and reduce gradients once.

    The first gathers, layer by layer; the last reduces over ranks and frees what was gathered.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]

    def set_last(is_last: bool) -> None:
        for part in sharded:
            part.set_requires_gradient_sync(is_last, recurse=False)
            part.set_reshard_after_backward(is_last, recurse=False)
            # What was gathered for this pass its own backward pass needs, too.
            part.set_reshard_after_forward(False, recurse=False)

    following = iter(microbatches)
    microbatch = next(following)
    set_last(False)
    with module.register_forward_hook(_add_uses_as_computed):
        for after in following:
            yield microbatch
            microbatch = after
        set_last(True)
        yield microbatch
    for part in sharded:
        part.set_reshard_after_forward(part is not module, recurse=False)


def _add_uses_as_computed(module: nn.Module, *_: Any) -> None:
    """Let the backward pass add the gradients of a weight with two uses in the dtype of its products.

    torch 2.15 adds them in float32 in the first microbatch of several, and in no other: a tied embedding then
    gets another gradient than where each microbatch reduces its own.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.grad_dtype = None


def own_slices(parameter: Tensor) -> tuple[slice, ...]:
    """What this rank holds of a parameter: of what the mesh's later dimensions cut, FSDP cuts the rest.

    DTensor cuts into equal parts, of which the last are smaller or empty.
    """
    slices = [slice(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dimension, placement in reversed(list(enumerate(parameter.placements))):
            if isinstance(placement, Replicate):
                continue
            of_dim: Any = placement  # a shard, strided or not
            old, rank = slices[of_dim.dim], mesh.get_local_rank(dimension)
            size = -(-(old.stop - old.start) // mesh.size(dimension))
            start, stop = (min(old.start + place * size, old.stop) for place in (rank, rank + 1))
            slices[of_dim.dim] = slice(start, stop)
    return tuple(slices)


class ShardedParameters:
    """The parameters of sharded modules with their optimizer; `optimizer` None: frozen.

    `prefix`: of the parameters' names, which Hugging Face's lack.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], optimizer: Optimizer | None, *, prefix: str = ""
    ) -> None:
        self._parameters: dict[str, Any] = parameters
        self._settings, self._prefix = optimizer, prefix
        # What the optimizer sees of them, as it takes each number by itself: DTensor needs as long to hand on
        # its step as a GPU to do it.
        self._own = {name: _local(parameter) for name, parameter in parameters.items()} if optimizer else {}
        self._optimizer = _adamw(self._own, optimizer) if optimizer else None

    @torch.no_grad()
    def optimizer_step(self, learning_rate: float) -> float:
        """See abrun.backends.Trained."""
        assert self._optimizer is not None and self._settings is not None
        norm = clip_gradients(self._parameters.values(), self._settings.max_grad_norm)
        for own, parameter in zip(self._own.values(), self._parameters.values(), strict=True):
            own.data = _local(parameter)  # which FSDP may have moved
            own.grad = None if parameter.grad is None else _local(parameter.grad)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for tensor in (*self._own.values(), *self._parameters.values()):
            tensor.grad = None
        return float(norm)

    def local_state(self) -> dict[str, Tensor]:
        """See abrun.backends.Trained."""
        state = {f"weights/{name}": _local(parameter) for name, parameter in self._parameters.items()}
        if self._optimizer is not None:
            for name, own in self._own.items():
                # A parameter that has never had a gradient, as an expert that no token met, has none.
                for key, value in self._optimizer.state.get(own, {}).items():
                    state[f"optimizer/{key}/{name}"] = value
        return state

    def pieces(self) -> dict[str, Held]:
        """See abrun.backends.Trained."""
        found = {}
        for name, parameter in self._parameters.items():
            piece = Piece(tuple(parameter.shape), own_slices(parameter))
            own = Held.one(name.removeprefix(self._prefix), piece)
            found[f"weights/{name}"] = own.under("weights/")
            if self._optimizer is not None:
                for key, held in of_optimizer(own).items():
                    found[f"optimizer/{key}/{name}"] = held.under(f"optimizer/{key}/")
        return found

    def load_local_state(self, state: dict[str, Tensor]) -> None:
        """See abrun.backends.Trained."""
        if self._optimizer is not None:
            self._optimizer.state.clear()
            for name, own in self._own.items():
                if f"optimizer/step/{name}" not in state:
                    continue
                self._optimizer.state[own] = {
                    "step": torch.zeros((), device=own.device),  # where the fused AdamW wants it
                    "exp_avg": torch.zeros_like(own),
                    "exp_avg_sq": torch.zeros_like(own),
                }
        for name, tensor in self.local_state().items():
            tensor.copy_(state[name])

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by Hugging Face's names, whole, one after the other. Collective."""
        for name, parameter in self._parameters.items():
            name = name.removeprefix(self._prefix)
            if isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1:
                yield name, _local(parameter)  # as `whole` has it, without the 0.1 ms that DTensor takes
            else:
                yield name, whole(parameter.detach())

    def resident_tensors(self) -> Sequence[Tensor]:
        """See abrun.backends.Trained."""
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


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
