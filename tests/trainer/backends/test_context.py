"""Context parallelism against one process: the same gradients and values, wherever the border falls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from abrun.trainer.backends import context as context_module
from abrun.trainer.backends.attention import _varlen_attention
from abrun.trainer.backends.context import ContextSplit, make_context_split, make_spans
from abrun.trainer.backends.microbatches import make_packing
from abrun.trainer.rl.losses import clipped_policy_loss, gspo_loss, loss_weights
from tests.spawn import run_ranks
from tests.trainer.backends.policies import CPU, WeightedLoss, gradients, make_backend, rows, some_batch
from tests.trainer.backends.test_dtensor import LEARNING_RATES, OPTIMIZER, assert_same
from tests.trainer.backends.test_value_model import head_gradients, make_critic, objective


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


# --- on two ranks ---

CUTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed": {"packing": True, "micro_batch_tokens": 25, "activation_checkpointing": True},
    "chunked": {"logprobs": {"impl": "chunked", "chunk_size": 40}, "micro_batch_size": 3},
    "one pass": {"logprobs": {"impl": "chunked", "one_pass": True}},
}
KINDS = ("llama", "tied", "granite")


def measured(backend: dict[str, int], share: slice = slice(None)) -> dict[str, Any]:
    """What a policy and value models of its make of a batch, and of three steps."""
    found: dict[str, Any] = {}
    batch = some_batch()
    for name, cut in CUTS.items():
        for kind in KINDS if name == "rows" else KINDS[:1]:
            policy = make_backend(kind, temperature=0.7, backend=backend, **cut)
            parts = policy.forward_backward(
                rows(batch, share.start or 0, share.stop or len(batch)), loss_of(0)
            )
            found[f"{name}, {kind}"] = gradients(policy)
            found[f"{name}, {kind}, loss"] = {"loss": summed(parts.sums["loss"], policy.ranks.data)}
    policy = make_backend(backend=backend)
    found["logprobs"] = {"logprobs": policy.compute_logprobs(batch)}
    for backbone in ("own", "shared"):
        for right_shift in (True, False):
            _, critic = make_critic(
                policy={"backend": backend, "packing": right_shift},
                value_backbone=backbone,
                right_shift=right_shift,
            )
            name = f"values, {backbone}, {right_shift}"
            found[name] = {"values": torch.where(batch.token_mask, critic.compute_values(batch), 0.0)}
            critic.forward_backward(batch[share], objective(batch))
            found[f"{name}, gradients"] = head_gradients(critic)
    policy = make_backend(backend=backend, optimizer=OPTIMIZER, micro_batch_size=3)
    norms = []
    for step, learning_rate in enumerate(LEARNING_RATES):
        policy.forward_backward(some_batch(step)[share], loss_of(step))
        norms.append(policy.optimizer_step(learning_rate))
    found["norms"] = {"norms": torch.tensor(norms)}
    found["weights"] = {name: weight.clone() for name, weight in policy.gather_weights()}
    return found


def loss_of(step: int) -> WeightedLoss:
    return WeightedLoss(float(some_batch(step).token_mask.sum()))


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(value, group=group)
    return value


def on_ranks(rank: int, world_size: int, context: int) -> dict[str, Any]:
    replicas = world_size // context
    count = len(some_batch()) // replicas
    replica = rank // context
    return measured({"context_parallel": context}, slice(replica * count, (replica + 1) * count))


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        try:
            assert_same(found[name], values, rtol=1e-4, atol=2e-6 if name != "weights" else 1e-5)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_two_ranks_do_what_one_does(group: None) -> None:
    expected = measured({})
    for found in run_ranks(on_ranks, 2, 2):
        check(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("context", [2, 4])
def test_four_ranks_do_what_one_does(context: int, group: None) -> None:
    expected = measured({})
    for found in run_ranks(on_ranks, 4, context):
        check(found, expected)


# --- what such a comparison would miss, were it blind ---


def gather_that_sums(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    whole = grads[0].clone()
    dist.all_reduce(whole, group=ctx.split.group)
    return whole[..., ctx.split.local_positions], None


def keys_of_own_loss_alone(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    return grads[0][..., ctx.split.local_positions, :], None


def in_the_order_of_ranks(own: Tensor, split: ContextSplit) -> Tensor:
    return GATHERED(own, replace(split, stream_order=torch.arange(len(split.rank_order))))


def positions_from_0(split: ContextSplit, values: Tensor, fill: float = 0) -> Tensor:
    cut = CUT(split, values, fill)
    starts = values.ndim == 2 and values.dtype == torch.int64 and int(values[0, 0]) == 0 and fill == 0
    return torch.arange(cut.shape[1])[None] if starts else cut


GATHERED, CUT = context_module._gather_in_order, ContextSplit.to_local
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "every rank's loss counted": (context_module._GatherTokens, "backward", staticmethod(gather_that_sums)),
    "keys without reduce-scatter": (
        context_module._GatherKeys,
        "backward",
        staticmethod(keys_of_own_loss_alone),
    ),
    "keys in the order of ranks": (context_module, "_gather_in_order", in_the_order_of_ranks),
    "positions from 0": (ContextSplit, "to_local", positions_from_0),
}


def with_a_fault(rank: int, world_size: int, fault: str | None) -> dict[str, Tensor]:
    if fault:
        owner, name, wrong = FAULTS[fault]
        setattr(owner, name, wrong)
    policy = make_backend(backend={"context_parallel": 2})
    policy.forward_backward(some_batch(), loss_of(0))
    return gradients(policy)


def all_with_faults(rank: int, world_size: int) -> dict[str | None, dict[str, Tensor]]:
    found = {}
    for fault in (None, *FAULTS):
        owner, name, _ = FAULTS[fault] if fault else (context_module, "_gather_in_order", None)
        right = owner.__dict__[name]
        found[fault] = with_a_fault(rank, world_size, fault)
        setattr(owner, name, right)
    return found


def test_what_is_wrong_is_seen(group: None) -> None:
    policy = make_backend()
    policy.forward_backward(some_batch(), loss_of(0))
    expected = gradients(policy)
    largest = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    found = run_ranks(all_with_faults, 2)[0]
    for fault, faulty in found.items():
        off = max(float((faulty[name] - expected[name]).abs().max()) / largest[name] for name in expected)
        assert off > 0.02 if fault else off < 1e-5, (fault, off)


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
