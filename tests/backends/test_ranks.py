"""Which ranks share what: samples go to replicas, and each sample counts once, whatever a replica's shape."""

from typing import Any

import torch

from abrun.backends.ranks import make_ranks
from tests.spawn import run_ranks

CPU = torch.device("cpu")


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
        rows = list(range(12))[ranks.share(12)]
        groups = ranks.tensor, ranks.context, ranks.pipeline
        found.append(
            {
                "rows": rows,
                "total": ranks.total(len(rows), sum(rows)),
                "gathered": ranks.gather(rows),
                "largest": ranks.largest([rank, -rank]),
                "all": ranks.of_all(rank),
                "weights": ranks.weights.size(),
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
