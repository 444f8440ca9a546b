"""Packed sequences against padded ones: the same log-probs and gradients, and nothing across a border."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import MistralConfig, MistralForCausalLM

from abrun.backends.dtensor import DtensorBackend
from abrun.backends.packing import at_least, filled, microbatches, packing_of
from abrun.backends.ranks import make_ranks
from abrun.errors import RecipeError
from abrun.recipe import Policy
from tests.backends.policies import (
    CPU,
    TINY,
    Advised,
    WeightedLoss,
    gradients,
    make_backend,
    plain_logprobs,
    some_batch,
    tiny,
)
from tests.backends.test_dtensor import IMPLS, ONE_PASS, assert_same
from tests.spawn import run_ranks

MICROBATCHES = [{}, {"micro_batch_size": 3}, {"micro_batch_tokens": 25}]


def test_a_stream_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    packing = packing_of(mask)
    assert packing.starts == (0, 3, 7, 9) and packing.spans.longest_query == 4
    assert packing.spans.query_starts.tolist() == packing.spans.key_starts.tolist() == [0, 3, 7, 9]
    assert packing.spans.key_index is None
    assert packing.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    rows = torch.arange(12.0).view(3, 4)
    stream = packing.pack(rows)
    assert stream.tolist() == [[0, 1, 2, 4, 5, 6, 7, 8, 9]]
    assert packing.unpack(stream).tolist() == [[0, 1, 2, 0], [4, 5, 6, 7], [8, 9, 0, 0]]


@pytest.mark.parametrize("kind", ["llama", "tied", "experts", "granite", "cohere"])
@pytest.mark.parametrize("cut", MICROBATCHES, ids=str)
def test_packed_logprobs_are_those_of_each_sequence_alone(
    kind: str, cut: dict[str, Any], group: None
) -> None:
    batch = some_batch()
    with torch.no_grad():
        expected, _ = plain_logprobs(tiny(kind), batch, 1.3)
    backend = make_backend(kind, temperature=1.3, packing=True, **cut)
    torch.testing.assert_close(backend.logprobs(batch), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("logprobs", [*IMPLS, *ONE_PASS])
@pytest.mark.parametrize("cut", [{}, {"micro_batch_tokens": 25}], ids=str)
def test_packed_gradients_are_those_of_padded_rows(
    logprobs: dict[str, Any], cut: dict[str, int], group: None
) -> None:
    batch, found = some_batch(), []
    loss = WeightedLoss(float(batch.token_mask.sum()))
    for packed in ({}, {"packing": True, "activation_checkpointing": bool(cut), **cut}):
        backend = make_backend(temperature=0.7, logprobs=logprobs, **packed)
        parts = backend.forward_backward(batch, loss)
        found.append(gradients(backend) | {"loss": parts.sums["loss"]})
    assert_same(*found, rtol=1e-4, atol=1e-6)


def test_padded_rows_would_be_told_from_packed_ones(group: None) -> None:
    """What the tests above could miss: without borders in the attention the log-probs are others."""
    batch = some_batch()
    backend = make_backend(packing=True)
    packing = packing_of(batch.token_mask)
    token_ids, token_mask = packing.pack(batch.token_ids), packing.pack(batch.token_mask)
    with torch.no_grad():
        right, _ = backend.module(token_ids, token_mask, packing=packing)
        whole, _ = backend.module(token_ids, token_mask)  # one sequence of all tokens
    second = packing.starts[1]
    torch.testing.assert_close(whole[:, :second], right[:, :second], atol=2e-5, rtol=1e-5)
    assert float((whole - right)[:, second:].abs().max()) > 0.1


def test_a_packed_policy_still_samples(group: None) -> None:
    """Generation pads on the left: its masks are those of the stock attention."""
    logits = []
    for packing in (False, True):
        backend = make_backend(packing=packing)
        with torch.no_grad(), backend.decoding() as decoder:
            one, _ = decoder(
                torch.tensor([[0, 0, 7, 8], [5, 6, 7, 8]]),
                torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
                torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]]),
                None,
            )
            logits.append(one)
    assert torch.equal(*logits)


def test_a_sliding_window_is_refused(group: None) -> None:
    settings = {key: value for key, value in TINY.items() if key != "pad_token_id"}
    network = MistralForCausalLM(MistralConfig(**settings, sliding_window=4))
    with pytest.raises(RecipeError, match=r"policy\.packing: got true with MistralForCausalLM") as caught:
        DtensorBackend(lambda: network, Policy(packing=True), make_ranks(CPU, {}))
    assert len(str(caught.value).splitlines()) == 1 and "packing: false" in str(caught.value)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 40))
@settings(deadline=None)
def test_microbatches_of_tokens(lengths: list[int], max_tokens: int, count: int) -> None:
    sizes = filled(lengths, max_tokens)
    assert sum(sizes) == len(lengths) and min(sizes) >= 1
    start = 0
    for size in sizes:
        rows = lengths[start : start + size]
        assert size == 1 or sum(rows) <= max_tokens
        if start + size < len(lengths):
            assert sum(rows) + lengths[start + size] > max_tokens, "the next one would have fitted"
        start += size
    count = min(count, len(lengths))
    more = at_least(count, sizes)
    assert len(more) == max(count, len(sizes)) and sum(more) == len(lengths) and min(more) >= 1


def test_pairs_are_never_cut(group: None) -> None:
    policy = Policy(packing=True, micro_batch_tokens=15)
    batch = some_batch()
    pairs = replace(batch, rows_together=2)
    backend = make_backend()
    sizes = [len(part) for part in microbatches(pairs, policy, backend.ranks.data)]
    assert sum(sizes) == 8 and len(sizes) > 1 and all(size % 2 == 0 for size in sizes)


def test_two_ranks_that_need_different_numbers_of_microbatches(group: None) -> None:
    batch = uneven_batch()
    backend = make_backend()
    backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    expected = gradients(backend)
    ranks = run_ranks(on_two_ranks, 2)
    assert ranks[0]["count"] == ranks[1]["count"] > ranks[1]["needed"]
    for rank, found in enumerate(ranks):
        assert_same(found["gradients"], expected, rtol=1e-4, atol=1e-6)
        logprobs: Tensor = backend.logprobs(batch)[rank * 4 : rank * 4 + 4]
        torch.testing.assert_close(found["logprobs"], logprobs, atol=2e-5, rtol=1e-5)


def uneven_batch() -> Advised:
    """The second half of the rows is short."""
    batch = some_batch()
    batch.token_mask[4:, 4:] = False
    batch.token_mask[4:, 3] = True
    return batch


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    whole = uneven_batch()
    batch, policy = whole[rank * 4 : rank * 4 + 4], {"packing": True, "micro_batch_tokens": 16}
    backend = make_backend(**policy)
    parts = list(microbatches(batch, backend.settings, backend.ranks.data))
    lengths = packing_of(batch.token_mask).starts
    found: dict[str, Any] = {"count": len(parts)}
    found["needed"] = len(filled([b - a for a, b in pairwise(lengths)], 16))
    found["logprobs"] = backend.logprobs(batch)
    backend.forward_backward(batch, WeightedLoss(float(whole.token_mask.sum())))
    found["gradients"] = gradients(backend)
    return found


@pytest.fixture
def both_devices() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", ["logits", "triton"])
def test_on_a_gpu(dtype: str, impl: str, both_devices: None) -> None:
    """FlashAttention's kernel in bfloat16, sequence by sequence in float32: no worse than padding."""
    gpu, batch = torch.device("cuda", 0), some_batch(size=32)
    exact, loss = make_backend(), WeightedLoss(float(batch.token_mask.sum()))
    exact.forward_backward(batch, loss)
    expected, logprobs = gradients(exact), exact.logprobs(batch)
    errors = {}
    for name, packing in (("padded", {}), ("packed", {"packing": True, "micro_batch_tokens": 100})):
        policy = Policy.model_validate({"dtype": dtype, "logprobs": {"impl": impl}} | packing)
        backend = DtensorBackend(tiny, policy, make_ranks(gpu, {}))
        found = backend.logprobs(batch.to(gpu)).cpu()
        backend.forward_backward(batch.to(gpu), loss)
        worst = max(
            float((gradient.cpu() - expected[key]).norm() / expected[key].norm())
            for key, gradient in gradients(backend).items()
        )
        errors[name] = (float((found - logprobs).abs().mean()), worst)
    print(dtype, impl, errors)
    for packed, padded in zip(errors["packed"], errors["padded"], strict=True):
        assert packed <= 1.2 * padded + 1e-5
