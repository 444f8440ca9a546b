"""Which ranks share what: samples go to replicas, and each sample counts once, whatever a replica's shape."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import placement_types

from abrun.launch.agent import is_in_torch
from abrun.messages.codes import Code, Reason
from abrun.processes import progress
from abrun.trainer.backends import ranks as ranks_module
from abrun.trainer.backends.ranks import _open_store, explain_lost_ranks, make_ranks
from tests.spawn import run_ranks

CPU = torch.device("cpu")
SECOND = timedelta(seconds=1)


SHAPES: list[tuple[dict[str, int], list[int], int, list[int | None]]] = [
    # shape of a replica, whose replica each rank is, ranks that a weight is spread over, sizes of the groups
    ({}, [0, 1, 2, 3], 4, [None, None, None]),
    ({"tensor_parallel": 2}, [0, 0, 1, 1], 2, [2, None, None]),
    ({"context_parallel": 2}, [0, 0, 1, 1], 4, [None, 2, None]),
    ({"context_parallel": 2, "tensor_parallel": 2}, [0, 0, 0, 0], 2, [2, 2, None]),
    ({"pipeline_parallel": 2}, [0, 1, 0, 1], 2, [None, None, 2]),
]


def on_four_ranks(rank: int, world_size: int) -> list[dict[str, Any]]:
    found = []
    for shape, *_ in SHAPES:
        ranks = make_ranks(CPU, shape)
        rows = list(range(12))[ranks.data_slice(12)]
        groups = ranks.tensor, ranks.context, ranks.pipeline
        found.append(
            {
                "rows": rows,
                "total": ranks.all_reduce_sum_data(len(rows), sum(rows)),
                "gathered": ranks.all_gather_data(rows),
                "largest": ranks.all_reduce_max_world([rank, -rank]),
                "all": ranks.all_gather_world(rank),
                "weights": ranks.weight_mesh.size(),
                "sizes": [None if each is None else each.size() for each in groups],
                "first": ranks.is_first,
            }
        )
    return found


def test_samples_belong_to_replicas() -> None:
    for rank, of_rank in enumerate(run_ranks(on_four_ranks, 4)):
        for found, (_, replica_of, weights, sizes) in zip(of_rank, SHAPES, strict=True):
            count = 12 // (max(replica_of) + 1)
            start = replica_of[rank] * count
            assert found["rows"] == list(range(start, start + count))
            assert found["total"] == [12, 66] and found["gathered"] == list(range(12))
            assert found["largest"] == [3, 0] and found["all"] == [0, 1, 2, 3]
            assert (found["weights"], found["sizes"], found["first"]) == (weights, sizes, rank == 0)


EXPERTS: list[tuple[dict[str, int], int, list[list[int]]]] = [
    # shape of a replica, expert_parallel, the ranks that each rank shares experts with
    ({}, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ({}, 4, [[0, 1, 2, 3]] * 4),
    ({"context_parallel": 2}, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ({"tensor_parallel": 2}, 2, [[0, 2], [1, 3], [0, 2], [1, 3]]),  # its own have the same tokens
    ({"pipeline_parallel": 2}, 2, [[0, 1], [0, 1], [2, 3], [2, 3]]),
]


def experts_on_four_ranks(rank: int, world_size: int) -> list[tuple[list[int], int]]:
    found = []
    for shape, expert_parallel, _ in EXPERTS:
        ranks = make_ranks(CPU, shape, expert_parallel=expert_parallel)
        assert ranks.expert is not None and ranks.expert_mesh is not None
        assert ranks.expert_mesh.size() == ranks.weight_mesh.size()
        found.append((dist.get_process_group_ranks(ranks.expert), ranks.expert_mesh["copies"].size()))
    return found


def test_experts_are_shared_by_ranks_with_other_tokens_each() -> None:
    for rank, of_rank in enumerate(run_ranks(experts_on_four_ranks, 4)):
        for (group, copies), (shape, size, expected) in zip(of_rank, EXPERTS, strict=True):
            replica = shape.get("tensor_parallel", 1) * shape.get("pipeline_parallel", 1)
            assert group == expected[rank] and copies == 4 // replica // size


def _wait_in_vain(rank: int, world_size: int) -> Reason | str | None:
    group: Any = dist.new_group(timeout=SECOND)
    progress.report("logprobs")
    if rank == 1:
        time.sleep(2.5)
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return explain_lost_ranks(error, SECOND)
    return "it worked"


def test_a_collective_that_waits_too_long_says_where_and_how_long() -> None:
    reason, _ = run_ranks(_wait_in_vain, 2)
    assert (reason.code, reason["waited_s"], reason["doing"]) == (Code.RANKS_LOST, 1.0, "logprobs")


def test_other_errors_are_not_taken_for_lost_ranks() -> None:
    assert explain_lost_ranks(RuntimeError("CUDA error: the launch timed out"), timedelta(seconds=1)) is None
    assert (
        explain_lost_ranks(
            RuntimeError("[gloo/x.cc:9] op.preamble.length <= op.nbytes"), timedelta(seconds=1)
        )
        is None
    )
    lost = explain_lost_ranks(
        RuntimeError("[gloo/pair.cc:9] Connection closed by peer"), timedelta(seconds=1)
    )
    assert lost and (lost.code, lost["waited_s"]) == (Code.RANKS_LOST, None)


@pytest.mark.parametrize("by_agent", [True, False])
def test_the_first_rank_serves_the_store_unless_torchrun_does(
    by_agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an agent it inherits the socket, which none of its own children shall keep."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        inherited = os.dup(listening.fileno())
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if by_agent:
        os.set_inheritable(inherited, True)
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, progress.LISTENING_FD_VARIABLE: inherited}
    else:
        os.close(inherited)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    store = _open_store(SECOND)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert progress.LISTENING_FD_VARIABLE not in os.environ
    assert not by_agent or not os.get_inheritable(inherited)


def test_a_rank_that_meets_the_others_says_that_it_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs: list[progress.RankStatus] = []
    with progress.open_status_lines(tmp_path, range(1)) as lines:
        monkeypatch.setattr(progress._status_line, "file", lines[0])

        def meet(*_: object, **__: object) -> Mock:
            signs.append(progress.read_statuses(lines)[0])
            return Mock()

        monkeypatch.setattr(ranks_module, "TCPStore", meet)
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "h", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        progress.report("starting")
        _open_store(SECOND)
        signs.append(progress.read_statuses(lines)[0])
    assert [sign.is_waiting for sign in signs] == [True, False]
    assert signs[0].time_s == signs[1].time_s  # waiting is no sign of life


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        (dist.distributed_c10d.__file__, True),
        (placement_types.__file__, True),
        ("/home/me/torch/abrun/progress.py", False),
        ("/home/torch/rewards/grade.py", False),
        ("/home/me/mytorch/grade.py", False),
    ],
)
def test_a_rank_waits_in_the_installed_torch_alone(tmp_path: Path, file: str, waits: bool) -> None:
    """Any folder may be named torch, and torch's own files lie up to five folders deep."""
    stack = tmp_path / "rank-0.stack"
    stack.write_text(f'Current thread 0x1:\n  File "{file}", line 7 in wait\n')
    place = progress._locate(os.getpid(), stack)
    assert str(place) == f"wait ({'/'.join(file.split('/')[-3:])}:7)"
    assert is_in_torch(place) == waits
