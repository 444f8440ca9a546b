"""A run's ranks, and collectives over groups of them. A method is named after its collective and its group.

Groups: `data` (one rank of each replica of the policy), `context`, `replica` (all ranks of one replica), and
`world`. Every rank of a group has to call its collective; two groups mixed up are a deadlock.

Every rank of a replica of the policy holds the same rows of the batch, whole: tensor, context and pipeline
parallelism cut a row only inside the model. So samples, counts and metrics are shared, added up and gathered
over the data-parallel ranks alone, and each sample counts once.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage]
    DistError,
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from abrun.errors import LaunchError
from abrun.processes import progress
from abrun.reasons import Code, Reason
from abrun.recipe.policy import DIMENSIONS

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a hang is noticed sooner by the agents: see abrun.train.agent
MEETING_TIMEOUT = timedelta(minutes=5)  # from one rank's start to the last one's: imports differ in time
LOST = r"[Tt]imed out|Connection closed by peer|Connection reset by peer|Broken pipe|unreachable"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank's view of all of them. A group that would hold this rank alone is None."""

    device: torch.device  # of this rank
    rank: int
    size: int
    mesh: DeviceMesh  # data_parallel, and those of DIMENSIONS whose size is above 1
    data: ProcessGroup  # one rank of each replica: they hold different samples
    weights: DeviceMesh  # data x context: the ranks that a parameter and its gradient are spread over
    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    expert: ProcessGroup | None = None  # of those of `weights`: a layer's experts are spread over them
    experts: DeviceMesh | None = None  # copies x expert: of those of `weights`, which hold other tokens each

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def data_slice(self, num_rows: int) -> slice:
        """Return this rank's consecutive rows of `num_rows` of the global batch."""
        count = num_rows // self.data.size()
        return slice(self.data.rank() * count, (self.data.rank() + 1) * count)

    def all_reduce_sum_data(self, *values: float) -> list[float]:
        """Sum each value over the data-parallel ranks, so over the global batch; float64. Collective."""
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals, group=self.data)
        return totals.tolist()

    def all_gather_data(self, values: Sequence[T]) -> list[T]:
        """Join the lists of the data-parallel ranks, in the order of the global batch. Collective."""
        return gathered(values, self.data)

    def context_slice(self, num_rows: int) -> slice:
        """Return this rank's consecutive rows of those that all ranks of its context hold; can be none."""
        if self.context is None:
            return slice(0, num_rows)
        count = -(-num_rows // self.context.size())
        return slice(self.context.rank() * count, (self.context.rank() + 1) * count)

    def all_gather_context(self, values: Sequence[T]) -> list[T]:
        """Join the lists of this context's ranks, in their order. Collective."""
        return list(values) if self.context is None else gathered(values, self.context)

    def replica_slice(self, num_rows: int) -> slice:
        """Return this rank's consecutive rows of those that all ranks of its replica hold; can be none."""
        size, index = 1, 0
        for group in self._of_replica:
            index, size = index + group.rank() * size, size * group.size()
        count = -(-num_rows // size)
        return slice(index * count, (index + 1) * count)

    def all_gather_replica(self, values: Sequence[T]) -> list[T]:
        """Join the lists of this replica's ranks, in their order. Collective."""
        found = list(values)
        for group in self._of_replica:
            found = gathered(found, group)
        return found

    @property
    def _of_replica(self) -> list[ProcessGroup]:
        """The groups that make up a replica, each of whole ones of those before it."""
        return [group for group in (self.tensor, self.context, self.pipeline) if group is not None]

    def all_reduce_max_world(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all ranks; float64. Collective."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

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
        """Return the group of all ranks."""
        group: Any = dist.group.WORLD
        return group

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()


def gathered(values: Sequence[T], group: ProcessGroup) -> list[T]:
    """Join the lists of a group's ranks, in their order. Collective."""
    if group.size() == 1:
        return list(values)
    by_rank: list[Sequence[T]] = [[] for _ in range(group.size())]
    dist.all_gather_object(by_rank, values, group=group)
    return [value for of_rank in by_rank for value in of_rank]


def make_ranks(device: torch.device, shape: Mapping[str, int], *, expert_parallel: int = 1) -> Ranks:
    """Cut the process group's ranks into groups. Collective.

    `shape` has the sizes of a replica (tensor_parallel, ...); their product divides the number of ranks, and
    the rest are data-parallel replicas. `expert_parallel` divides the number of ranks of a weight's mesh.
    """
    size = dist.get_world_size()
    sizes = {name: shape.get(name, 1) for name in DIMENSIONS}
    sizes["data_parallel"] = size // torch.Size(sizes.values()).numel()
    names = [name for name in DIMENSIONS if sizes[name] > 1 or name == "data_parallel"]
    mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names))
    context = "context_parallel" in names
    experts = _experts_mesh(device, sizes, expert_parallel) if expert_parallel > 1 else None
    return Ranks(
        device=device,
        rank=dist.get_rank(),
        size=size,
        mesh=mesh,
        data=mesh.get_group("data_parallel"),
        weights=mesh["data_parallel", "context_parallel"]._flatten() if context else mesh["data_parallel"],
        expert=experts.get_group("expert") if experts else None,
        experts=experts,
        **{name.removesuffix("_parallel"): mesh.get_group(name) for name in names if name != "data_parallel"},
    )


def _experts_mesh(device: torch.device, sizes: Mapping[str, int], expert_parallel: int) -> DeviceMesh:
    """The ranks of a weight's mesh, cut into groups of neighbours, each of which has all experts."""
    pipeline, data, context, tensor = (sizes[name] for name in DIMENSIONS)
    shape = (pipeline, data * context // expert_parallel, expert_parallel, tensor)
    names = ("pipeline", "copies", "expert", "tensor")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)["copies", "expert"]
    mesh._flatten()  # a norm over both is one collective
    return mesh


def join_ranks(cluster: Mapping[str, int], timeout: timedelta = COLLECTIVE_TIMEOUT) -> torch.device:
    """Join the process group of the run's ranks and return this rank's device.

    `timeout`: how long a collective waits for a rank.
    """
    on_gpu = cluster["gpus_per_node"] > 0
    if on_gpu and not torch.cuda.is_available():
        raise LaunchError(
            "cluster.gpus_per_node: no CUDA device is visible here; use 0 to train on CPU cores"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the order of float sums, and so every metric's last bits, depend on it
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(
            backend,
            store=_meet(timeout),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    expected = cluster["nodes"] * (cluster["gpus_per_node"] or cluster["cpu_ranks"])
    if dist.get_world_size() != expected:
        raise LaunchError(f"cluster: asks for {expected} ranks and {dist.get_world_size()} were started")
    return device


def _meet(timeout: timedelta) -> Store:
    """The store of all ranks: torchrun's, where it says so, or else the first one's.

    That one serves it at the socket that an agent has given it, if any.
    """
    listening = os.environ.pop(progress.LISTENING_FD_VARIABLE, None)
    if listening is not None:
        os.set_inheritable(int(listening), False)  # what this rank starts does not keep the port
    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    rank, address, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        with progress.waiting_for_ranks():
            store = TCPStore(
                address,
                port,
                int(os.environ["WORLD_SIZE"]),
                is_master=listening is not None or (rank == 0 and not torchruns),
                timeout=MEETING_TIMEOUT,
                master_listen_fd=None if listening is None else int(listening),
            )
    except DistError as error:
        said = " ".join(str(error).split())[:300]
        raise LaunchError(Code.RANKS_NOT_FOUND(rank=rank, address=f"{address}:{port}", error=said)) from None
    store.set_timeout(timeout)
    return store


def lost_ranks(error: RuntimeError, timeout: timedelta) -> Reason | None:
    """Say that a collective failed for want of other ranks, or of the way to them; None: it did not."""
    said = " ".join(str(error).split())
    if not isinstance(error, DistError) and "gloo" not in said:
        return None
    if not re.search(LOST, said):
        return None
    waited_s = timeout.total_seconds() if "imed out" in said else None
    return Code.RANKS_LOST(waited_s=waited_s, doing=progress.current_activity(), error=said[:300])
