"""The loss of a global batch, its gradient and every metric do not depend on how the batch is cut."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from abrun.trainer.rl.losses import importance_weights, kl_penalty, loss_weights, weighted_losses
from abrun.trainer.rl.metrics import MetricParts, all_reduce, merge
from tests.spawn import run_ranks
from tests.trainer.rl.test_metrics import Tensors, full_parts_of, random_batch, values_of
from tests.trainer.rl.test_policy_losses import LOSSES

REDUCTIONS: list[Any] = ["token_mean", "sequence_mean", "sequence_sum_constant", "document_sum"]
CORRECTIONS: list[Any] = ["truncated", "icepop", "sequence_mask"]
NUM_SEQUENCES = 8


def step(
    batch: Tensors,
    reduction: Any,
    cuts: list[int],
    group: Any = None,
    *,
    loss: str = "clipped",
    correction: Any = "truncated",
) -> dict[str, Any]:
    """One training step over the rows of `batch`, in microbatches of the sizes `cuts`."""
    counts = torch.tensor([batch["mask"].sum(), batch["mask"].any(1).sum()]).double()
    if group is not None:
        dist.all_reduce(counts, group=group)
    num_tokens, num_sequences = counts.tolist()
    parameter = torch.linspace(-0.5, 0.5, 7, dtype=torch.float64, requires_grad=True)
    total, parts = torch.zeros((), dtype=torch.float64), []
    assert sum(cuts) == len(batch["mask"])
    pieces = {name: values.split(cuts) for name, values in batch.items()}
    for index in range(len(cuts)):
        piece = {name: split[index] for name, split in pieces.items()}
        trainer, mask = piece["trainer"] + parameter * 0.3, piece["mask"]
        policy = LOSSES[loss](trainer, piece["old"], piece["advantages"], mask)
        importance = importance_weights(
            piece["old"], piece["inference"], mask, correction=correction, low=0.9, high=1.1
        )
        penalty = kl_penalty(trainer, piece["reference"], mask, estimator="k3")
        weights = loss_weights(
            mask,
            loss_reduction=reduction,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_completion_tokens=9,
        )
        share = weighted_losses(policy.loss * importance + 0.1 * penalty, weights).sum()
        share.backward()
        total += share.detach()
        parts.append(full_parts_of({**piece, "trainer": trainer.detach()}, num_tokens, num_sequences))
    gradient = parameter.grad
    assert gradient is not None
    if group is None:
        metrics = values_of(merge(parts))
    else:
        dist.all_reduce(total, group=group)
        dist.all_reduce(gradient, group=group)
        metrics = all_reduce(merge(parts), group)
    return {"loss": total.item(), "gradient": gradient.tolist(), **metrics}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert other[key] == pytest.approx(value, rel=1e-13, abs=1e-15), key


CASES = [(reduction, "clipped", "truncated") for reduction in REDUCTIONS]
CASES += [("token_mean", loss, correction) for loss in LOSSES for correction in CORRECTIONS]


@pytest.mark.parametrize(("reduction", "loss", "correction"), CASES)
def test_cut_into_microbatches(reduction: Any, loss: str, correction: Any) -> None:
    """The last sequence has no valid token, and so has the second piece of [7, 1]."""
    batch = random_batch(NUM_SEQUENCES)
    whole = step(batch, reduction, [NUM_SEQUENCES], loss=loss, correction=correction)
    assert len(whole) == 32 and any(whole["gradient"])
    for cuts in ([1] * 8, [3, 5], [2, 0, 6], [7, 1]):
        same(whole, step(batch, reduction, cuts, loss=loss, correction=correction))


def test_a_mean_over_each_microbatch_would_be_noticed() -> None:
    """The fault that the global denominator is there to prevent."""
    batch = random_batch(NUM_SEQUENCES)
    whole = step(batch, "token_mean", [NUM_SEQUENCES])
    halves = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 3), slice(3, 8))]
    local = sum(step(half, "token_mean", [len(half["mask"])])["loss"] for half in halves) / 2
    assert abs(local - whole["loss"]) > 1e-3


def _rank_steps(rank: int, world_size: int, splits: list[int]) -> list[dict[str, Any]]:
    start = sum(splits[:rank])
    mine = {
        name: values[start : start + splits[rank]] for name, values in random_batch(NUM_SEQUENCES).items()
    }
    cuts = [1] * splits[rank] or [0]  # a rank without data still takes part, with an empty microbatch
    world = dist.group.WORLD
    return [step(mine, reduction, cuts, world) for reduction in REDUCTIONS] + [
        step(mine, "token_mean", cuts, world, loss=loss, correction="sequence_mask") for loss in LOSSES
    ]


def _all_rank_steps(rank: int, world_size: int) -> tuple[list[list[dict[str, Any]]], dict[str, float]]:
    steps = [_rank_steps(rank, world_size, splits) for splits in ([5, 3], [8, 0], [7, 1])]
    world = dist.group.WORLD
    assert world is not None
    return steps, all_reduce(_extremes(rank), world)


def _extremes(rank: int) -> MetricParts:
    """Of two ranks: both without a token, one with, and with a value that overflowed."""
    lowest, highest = torch.tensor([-math.inf, math.inf], dtype=torch.float64)
    value = torch.tensor(float(rank), dtype=torch.float64)
    return MetricParts(
        sums={"sum": value},
        maxima={"none": lowest, "one": value if rank else lowest, "overflow": highest if rank else value},
        minima={"no_minimum": highest, "one_minimum": highest if rank else value},
    )


def test_spread_over_two_ranks() -> None:
    batch, cuts = random_batch(NUM_SEQUENCES), [NUM_SEQUENCES]
    whole = [step(batch, reduction, cuts) for reduction in REDUCTIONS]
    whole += [step(batch, "token_mean", cuts, loss=loss, correction="sequence_mask") for loss in LOSSES]
    by_rank = run_ranks(_all_rank_steps, 2)
    assert str(by_rank[0]) == str(by_rank[1])  # every rank has the same numbers, to the bit
    steps, extremes = by_rank[0]
    for by_reduction in steps:
        for expected, found in zip(whole, by_reduction, strict=True):
            same(expected, found)
    assert math.isnan(extremes.pop("none")) and math.isnan(extremes.pop("no_minimum"))
    assert extremes == {"sum": 1.0, "one": 1.0, "overflow": math.inf, "one_minimum": 0.0}
