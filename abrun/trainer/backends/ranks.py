"""A run's ranks, and collectives over groups of them. A method is named after its collective and its group.

Groups: `data` (one rank of each replica of the policy), `context`, `replica` (all ranks of one replica), and
`world`. Every rank of a group has to call its collective; two groups mixed up are a deadlock.

Every rank of a replica holds the same full rows of the batch. Tensor, context and pipeline parallelism shard
a row only inside the model. Samples, counts and metrics are therefore distributed, summed and gathered over
the data-parallel ranks alone, and each sample counts once.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage]
    DistError,
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from abrun.errors import LaunchError
from abrun.messages.codes import Code, Reason
from abrun.processes import progress
from abrun.recipe.policy import DIMENSIONS
from abrun.recipe.run import share_of_device

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # agents detect a hang sooner: see abrun.launch.agent
RENDEZVOUS_TIMEOUT = timedelta(minutes=5)  # from the first rank's start to the last one's; import times vary
LOST_RANK_PATTERN = r"[Tt]imed out|Connection closed by peer|Connection reset by peer|Broken pipe|unreachable"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank's device, position and process groups. A group of this rank alone is None."""

    device: torch.device
    rank: int
    size: int
    mesh: DeviceMesh  # dimensions: data_parallel, and all other DIMENSIONS of more than one rank
    data: ProcessGroup  # one rank of each replica; they hold different samples
    weight_mesh: DeviceMesh  # data x context: the ranks that FSDP shards a parameter over
    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    expert: ProcessGroup | None = None  # ranks of `weight_mesh` that a layer's experts are distributed over
    expert_mesh: DeviceMesh | None = None  # copies x expert: `weight_mesh`, divided into such groups

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes files."""
        return self.rank == 0

    def data_slice(self, num_rows: int) -> slice:
        """Return this rank's slice of the global batch's `num_rows` rows."""
        count = num_rows // self.data.size()
        return slice(self.data.rank() * count, (self.data.rank() + 1) * count)

    def all_reduce_sum_data(self, *values: float) -> list[float]:
        """Sum each value over the data-parallel ranks, which is the global batch, in float64. Collective."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.data)
        return totals.tolist()

    def all_gather_data(self, values: Sequence[T]) -> list[T]:
        """Join the lists of the data-parallel ranks, in the order of the global batch. Collective."""
        return all_gather_lists(values, self.data)

    def context_slice(self, num_rows: int) -> slice:
        """Return this rank's share of the rows that all ranks of its context hold; may be empty."""
        return _share_rows(num_rows, [] if self.context is None else [self.context])

    def all_gather_context(self, values: Sequence[T]) -> list[T]:
        """Join the lists of this context's ranks, in their order. Collective."""
        return list(values) if self.context is None else all_gather_lists(values, self.context)

    def replica_slice(self, num_rows: int) -> slice:
        """Return this rank's share of the rows that all ranks of its replica hold; may be empty."""
        return _share_rows(num_rows, self._replica_groups)

    def all_gather_replica(self, values: Sequence[T]) -> list[T]:
        """Join the lists of this replica's ranks, in their order. Collective."""
        gathered = list(values)
        for group in self._replica_groups:
            gathered = all_gather_lists(gathered, group)
        return gathered

    @property
    def _replica_groups(self) -> list[ProcessGroup]:
        """Return the groups whose product is a replica, the innermost first."""
        return [group for group in (self.tensor, self.context, self.pipeline) if group is not None]

    def all_reduce_max_world(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks; float64. Collective."""
        maxima = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return maxima.tolist()

    def all_gather_world(self, value: T) -> list[T]:
        """Return the value of every rank, in the order of ranks. Collective."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_world(self, value: T | None) -> T:
        """Return the value of rank 0. Collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return cast(T, values[0])

    @property
    def world(self) -> ProcessGroup:
        group: Any = dist.group.WORLD
        return group

    def barrier(self) -> None:
        dist.barrier()


def _share_rows(num_rows: int, groups: Sequence[ProcessGroup]) -> slice:
    """Return this rank's share of rows divided over the product of the groups, the innermost first."""
    size, index = 1, 0
    for group in groups:
        index, size = index + group.rank() * size, size * group.size()
    count = -(-num_rows // size)
    return slice(index * count, (index + 1) * count)


def all_gather_lists(values: Sequence[T], group: ProcessGroup) -> list[T]:
    """Join the lists of a group's ranks, in their order. Collective."""
    if group.size() == 1:
        return list(values)
    by_rank: list[Sequence[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(by_rank, values, group=group)
    return [value for rank_values in by_rank for value in rank_values]


def make_ranks(device: torch.device, shape: Mapping[str, int], *, expert_parallel: int = 1) -> Ranks:
    """Divide the ranks of the process group into groups. Collective.

    `shape` has the sizes of a replica's dimensions (tensor_parallel, ...). Their product divides the number
    of ranks; the quotient is the number of data-parallel replicas. `expert_parallel` divides the size of the
    weight mesh.
    """
    size = dist.get_world_size()
    sizes = {name: shape.get(name, 1) for name in DIMENSIONS}
    sizes["data_parallel"] = size // torch.Size(sizes.values()).numel()
    names = [name for name in DIMENSIONS if sizes[name] > 1 or name == "data_parallel"]
    mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    context = "context_parallel" in names
    expert_mesh = _make_expert_mesh(device, sizes, expert_parallel) if expert_parallel > 1 else None
    return Ranks(
        device=device,
        rank=dist.get_rank(),
        size=size,
        mesh=mesh,
        data=mesh.get_group("data_parallel"),
        weight_mesh=mesh["data_parallel", "context_parallel"]._flatten()
        if context
        else mesh["data_parallel"],
        expert=expert_mesh.get_group("expert") if expert_mesh else None,
        expert_mesh=expert_mesh,
        **{name.removesuffix("_parallel"): mesh.get_group(name) for name in names if name != "data_parallel"},
    )


def _make_expert_mesh(device: torch.device, sizes: Mapping[str, int], expert_parallel: int) -> DeviceMesh:
    """Divide the weight mesh into groups of neighbouring ranks, each of which holds all experts."""
    pipeline, data, context, tensor = (sizes[name] for name in DIMENSIONS)
    shape = (pipeline, data * context // expert_parallel, expert_parallel, tensor)
    names = ("pipeline", "copies", "expert", "tensor")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)["copies", "expert"]
    mesh._flatten()  # so that a norm over both dimensions is one collective
    return mesh


def join_ranks(cluster: Mapping[str, int], timeout: timedelta = COLLECTIVE_TIMEOUT) -> torch.device:
    """Join the process group of the run's ranks and return this rank's device.

    `timeout` limits how long a collective waits for a rank.
    """
    on_gpu, runs_per_gpu = cluster["gpus_per_node"] > 0, cluster.get("runs_per_gpu", 1)
    if on_gpu and not torch.cuda.is_available():
        raise LaunchError("cluster.gpus_per_node: no CUDA device is visible; use 0 to train on CPU cores")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        limit_memory(device, runs_per_gpu)
    else:
        torch.set_num_threads(1)  # the order of float sums, and so the last bits of metrics, depend on it
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) > 1:
            progress.report("rendezvous of the ranks", in_every_step=False)
        dist.init_process_group(
            backend,
            store=_open_store(timeout),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    expected = cluster["nodes"] * (cluster["gpus_per_node"] or cluster["cpu_ranks"])
    if dist.get_world_size() != expected:
        raise LaunchError(f"cluster: needs {expected} ranks, but {dist.get_world_size()} were started")
    return device


def limit_memory(device: torch.device, runs_per_gpu: int, *, unmapped_bytes: int = 0) -> None:
    """Limit this process to its share of a GPU that several runs use, so that none can take another's.

    `unmapped_bytes`: memory that torch's allocator counts although it is free; negative: memory of the run
    that it does not count. Raises LaunchError if the share is empty.
    """
    if runs_per_gpu == 1:
        return
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    share = share_of_device(device_bytes, runs_per_gpu)
    if share <= 0:
        gib = device_bytes / 2**30
        raise LaunchError(
            f"cluster.runs_per_gpu: got {runs_per_gpu}, but a GPU of {gib:.0f} GiB has no memory for so many "
            "shares; use fewer"
        )
    fraction = min(max((share + unmapped_bytes) / device_bytes, 0.0), 1.0)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def _open_store(timeout: timedelta) -> Store:
    """Connect to the ranks' key-value store: torchrun's if it provides one, else rank 0's.

    Rank 0 serves its store on the listening socket that its agent passed to it, if any.
    """
    listening_fd = os.environ.pop(progress.LISTENING_FD_VARIABLE, None)
    if listening_fd is not None:
        os.set_inheritable(int(listening_fd), False)  # child processes must not keep the port
    is_torchrun_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        with progress.waiting_for_ranks():
            store = TCPStore(
                address,
                port,
                int(os.environ["WORLD_SIZE"]),
                is_master=listening_fd is not None or (rank == 0 and not is_torchrun_store),
                timeout=RENDEZVOUS_TIMEOUT,
                master_listen_fd=None if listening_fd is None else int(listening_fd),
            )
    except DistError as error:
        message = " ".join(str(error).split())[:300]
        raise LaunchError(
            Code.RANKS_NOT_FOUND(rank=rank, address=f"{address}:{port}", error=message)
        ) from None
    store.set_timeout(timeout)
    return store


def explain_lost_ranks(error: RuntimeError, timeout: timedelta) -> Reason | None:
    """Return the reason if a collective failed because ranks were lost or unreachable, else None."""
    message = " ".join(str(error).split())
    if not isinstance(error, DistError) and "gloo" not in message:
        return None
    if not re.search(LOST_RANK_PATTERN, message):
        return None
    waited_s = timeout.total_seconds() if "imed out" in message else None
    return Code.RANKS_LOST(waited_s=waited_s, doing=progress.current_activity(), error=message[:300])


# Collectives along any dimension of a tensor, for torch 2.11 to 2.13, which name them differently.

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(shard: Tensor, dim: int, group: ProcessGroup) -> Tensor:  # [..., n, ...] -> [..., P * n, ...]
    """Concatenate the shards of all ranks of the group along `dim`, in rank order."""
    size, dim = group.size(), dim % shard.dim()
    by_rank = shard.new_empty(size * shard.shape[0], *shard.shape[1:])  # concatenated along dimension 0
    _all_gather(by_rank, shard.contiguous(), group=group)
    return by_rank.unflatten(0, (size, shard.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(
    full: Tensor, dim: int, group: ProcessGroup
) -> Tensor:  # [..., P * n, ...] -> [..., n, ...]
    """Return this rank's shard, along `dim`, of the sum over all ranks of the group."""
    size, dim = group.size(), dim % full.dim()
    by_rank = full.unflatten(dim, (size, full.shape[dim] // size)).movedim(dim, 0).contiguous()
    shard = by_rank.new_empty(by_rank.shape[1:])
    _reduce_scatter(shard, by_rank.flatten(0, 1), group=group)
    return shard


def all_reduce_sum(partial: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over all ranks of the group."""
    total = partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
