"""Context parallelism against one process: the same gradients and values, wherever the border falls."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from abrun.trainer.backends.attention import _varlen_attention
from abrun.trainer.backends.context import ContextSplit, make_context_split, make_spans
from abrun.trainer.backends.microbatches import make_packing
from abrun.trainer.rl.losses import clipped_policy_loss, gspo_loss, loss_weights
from tests.spawn import run_ranks
from tests.trainer.backends.policies import CPU


class Group:
    """A rank's view of a group that is never talked to."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def split_of(starts: Sequence[int], size: int, rank: int) -> ContextSplit:
    group: Any = Group(size, rank)
    return make_context_split(starts, group, CPU)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(2, 4))
@settings(deadline=None)
def test_each_token_sees_its_sequence_up_to_itself(lengths: list[int], size: int) -> None:
    starts = [0, *accumulate(lengths)]
    sequence = [number for number, length in enumerate(lengths) for _ in range(length)]
    seen = dict[int, list[int]]()
    for rank in range(size):
        split = split_of(starts, size, rank)
        spans = make_spans(split.spans, CPU)
        index = spans.key_index
        keys = torch.arange(len(split.rank_order)) if index is None else index
        bounds = zip(pairwise(spans.query_starts.tolist()), pairwise(spans.key_starts.tolist()), strict=True)
        for (query, query_stop), (key, key_stop) in bounds:  # as the kernel reads them: bottom-right causal
            for place in range(query, query_stop):
                last = key_stop - (query_stop - place) + 1
                seen[int(split.local_positions[place])] = keys[key:last].tolist()
        assert spans.longest_query == max(
            stop - start for start, stop in pairwise(spans.query_starts.tolist())
        )
    assert sorted(seen) == list(range(len(seen))) and len(seen) % (2 * size) == 0
    for token, number in enumerate(sequence):
        assert seen[token] == [other for other in range(token + 1) if sequence[other] == number]


def test_the_work_of_a_long_sequence_is_even() -> None:
    pairs = []
    for rank in range(4):
        split = split_of([0, 64], 4, rank)
        pairs.append(sum(int(place) + 1 for place in split.local_positions))
    assert len(set(pairs)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_kernel_ends_each_span_with_its_last_key(size: int) -> None:
    """On a GPU: causal from the end of query and key, as the spans say, with shared key heads."""
    gpu, draw = torch.device("cuda", 0), torch.Generator("cuda").manual_seed(0)
    lengths = [300, 2, 517, 64, 141]
    starts = [0, *accumulate(lengths)]
    query, key, value = (
        torch.randn(1, heads, 1024, 64, device=gpu, generator=draw, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    whole = []
    for start, stop in pairwise(starts):
        q, k, v = (states[:, :, start:stop].float() for states in (query, key, value))
        whole.append(attend(q, k, v))
    expected = torch.cat(whole, dim=2)[0].transpose(0, 1)  # [T, heads, D]
    for rank in range(size):
        group: Any = Group(size, rank)
        split = make_context_split(starts, group, gpu)
        found = _varlen_attention(
            query[:, :, split.local_positions], key, value, make_spans(split.spans, gpu), None
        )
        assert float((found - expected[split.local_positions]).abs().max()) < 0.02
        found.float().square().sum().backward()
    assert query.grad is not None and key.grad is not None
    found = [states.grad.float() for states in (query, key, value)]  # pyright: ignore
    expected.square().sum().backward()
    for twice, sharded in zip((query, key, value), found, strict=True):
        assert twice.grad is not None
        right = twice.grad.float() - sharded
        assert float((sharded - right).norm() / right.norm()) < 0.02


@pytest.mark.gpu
def test_the_kernel_with_shared_prefixes() -> None:
    """Against each sequence alone, its prefix in front of it; gradients repeat to the last bit."""
    gpu, draw = torch.device("cuda", 0), torch.Generator("cuda").manual_seed(0)
    lengths, shared = [300, 290, 517, 64, 141, 200], [0, 250, 250, 0, 0, 100]
    packing = make_packing(lengths, max(lengths), gpu, shared=shared)
    query, key, value = (
        torch.randn(1, heads, packing.num_local_tokens, 64, device=gpu, generator=draw, dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    )
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def gradients(of_all: Any, as_float: bool) -> tuple[Tensor, ...]:
        dtype = torch.float32 if as_float else torch.bfloat16
        states = [each.detach().clone().to(dtype).requires_grad_() for each in (query, key, value)]
        found = of_all(*states)
        found.float().square().sum().backward()
        return found, *(each.grad for each in states if each.grad is not None)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for span in packing.spans.spans:
            before, own = slice(span.prefix_start, span.prefix_stop), slice(span.key_start, span.key_stop)
            whole: Any = [torch.cat([each[:, :, before], each[:, :, own]], dim=2) for each in (q, k, v)]
            outputs.append(attend(*whole)[:, :, span.prefix_stop - span.prefix_start :])
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)

    def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _varlen_attention(q, k, v, packing.spans, None)

    expected, found = gradients(one_by_one, True), gradients(by_kernel, False)
    for right, one, other in zip(expected, found, gradients(by_kernel, False), strict=True):
        assert float((one.float() - right).norm() / right.norm()) < 0.02
        assert torch.equal(one, other) or right.shape == query.shape


# --- losses: to the bit ---

REDUCTIONS = ("token_mean", "sequence_mean", "sequence_sum_constant", "document_sum")


def losses_by_rank(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    """Whether the gradient of own log-probs, and the loss, are to the bit those of one process; float64."""
    draw = torch.Generator().manual_seed(3)
    lengths, width = torch.tensor([40, 7, 48, 2]), 48
    mask = torch.arange(width).expand(4, width) < lengths[:, None]
    mask = mask & (torch.arange(width) > 0)
    old, noise, advantages = (torch.randn(4, width, generator=draw).double() for _ in range(3))
    split = make_context_split([0, width], dist.group.WORLD, CPU)  # pyright: ignore[reportArgumentType]
    counts: Any = {"num_tokens": float(mask.sum()), "num_sequences": 4, "max_completion_tokens": 48}
    agree = {}
    for loss, reduction in (
        *((clipped_policy_loss, each) for each in REDUCTIONS),
        (gspo_loss, "sequence_mean"),
    ):
        weights = loss_weights(mask, loss_reduction=reduction, **counts)  # pyright: ignore[reportArgumentType]

        def total(logprobs: Tensor, loss: Any = loss, weights: Tensor = weights) -> Tensor:
            settings: Any = {"clip_low": 0.2, "clip_high": 0.2}
            return (loss(logprobs, old, advantages, mask, **settings).loss * weights).sum()

        one = (old + 0.2 * noise).requires_grad_()
        own = one.detach()[:, split.local_positions].clone().requires_grad_()
        whole, cut = total(one), total(split.to_full(own))
        (whole + cut).backward()
        assert one.grad is not None and own.grad is not None
        agree[f"{loss.__name__}, {reduction}"] = (
            torch.equal(own.grad, one.grad[:, split.local_positions]),
            torch.equal(whole, cut),
        )
    return agree


def test_losses_are_to_the_bit_those_of_one_process() -> None:
    for agree in run_ranks(losses_by_rank, 2):
        assert len(agree) == 5 and set(agree.values()) == {(True, True)}, agree
