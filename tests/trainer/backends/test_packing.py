"""Packed sequences against padded ones: the same log-probs and gradients, and nothing across a border."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from abrun.errors import RecipeError
from abrun.recipe.policy import Policy
from abrun.trainer.backends import attention
from abrun.trainer.backends.context import Span
from abrun.trainer.backends.dtensor import DtensorBackend
from abrun.trainer.backends.microbatches import (
    Packing,
    _assign_rows,
    _RowLengths,
    assign_samples,
    make_packing,
    shared_prefix_lengths,
)
from abrun.trainer.backends.ranks import make_ranks
from abrun.trainer.rl.batch import Sequences, collate, sequence_lengths
from tests.trainer.backends.policies import (
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
from tests.trainer.backends.test_dtensor import IMPLS, ONE_PASS, assert_same
from tests.trainer.pairwise import pairwise

MICROBATCHES = [{}, {"micro_batch_size": 3}, {"micro_batch_tokens": 25}]


def lengths(batch: Sequences) -> Tensor:
    return sequence_lengths(batch.token_mask)


def stream_of(mask: Tensor) -> Packing:
    return make_packing(sequence_lengths(mask).tolist(), mask.shape[1], mask.device)


def test_layers_are_handed_one_packing(monkeypatch: pytest.MonkeyPatch, group: None) -> None:
    """FSDP goes through a dataclass among a layer's arguments, and copies it with all of its tensors."""
    seen, apart = list[Any](), attention._eager_attention

    def noted(*given: Any, **more: Any) -> Any:
        seen.append(given[5])
        return apart(*given, **more)

    backend = make_backend(packing=True)
    monkeypatch.setattr(attention, "_eager_attention", noted)
    backend.compute_logprobs(some_batch())
    assert len(seen) > 1 and isinstance(seen[0], Packing) and all(one is seen[0] for one in seen)


def test_a_stream_by_hand() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    packing = stream_of(mask)
    assert packing.starts == (0, 3, 7, 9) and packing.spans.longest_query == 4
    assert packing.spans.query_starts.tolist() == packing.spans.key_starts.tolist() == [0, 3, 7, 9]
    assert packing.spans.key_index is None
    assert packing.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    rows = torch.arange(12.0).view(3, 4)
    stream = packing.pack(rows)
    assert stream.tolist() == [[0, 1, 2, 4, 5, 6, 7, 8, 9]]
    assert packing.unpack(stream).tolist() == [[0, 1, 2, 0], [4, 5, 6, 7], [8, 9, 0, 0]]


def of_prompts(groups: list[tuple[int, list[int]]], seed: int = 0) -> Advised:
    """Sequences of prompts of so many tokens, each with completions of these."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 99, (length,), generator=draw).tolist()

    prompts, completions = [], []
    for length, sizes in groups:
        prompts += [tokens(length)] * len(sizes)
        completions += [tokens(each) for each in sizes]
    batch = collate(prompts, completions, pad_id=0)
    return batch.with_fields(Advised, advantages=torch.randn(batch.token_ids.shape, generator=draw))


GROUPS = [(5, [3, 8, 1, 4]), (1, [2, 6]), (9, [5]), (7, [7, 1, 2])]


def test_a_stream_of_shared_prompts_by_hand() -> None:
    batch = of_prompts([(3, [1, 2]), (1, [1, 1]), (2, [2, 1])])
    shared = shared_prefix_lengths(batch.token_ids, batch.token_mask).tolist()
    assert shared == [0, 2, 0, 0, 0, 1]
    packing = make_packing(lengths(batch).tolist(), 5, CPU, shared=shared)
    of_prompts_too = packing.unpack_with_prompts(packing.pack(batch.token_ids))
    assert torch.equal(of_prompts_too, batch.token_ids)  # whose padding is 0
    assert packing.starts == (0, 4, 7, 9, 11, 15, 17)
    assert packing.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 0, 1, 0, 1, 2, 3, 1, 2]]
    spans = packing.spans
    assert spans.spans[1] == Span(4, 7, 4, 7, 0, 2) and spans.spans[5] == Span(15, 17, 15, 17, 11, 12)
    keys = [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 11, 15, 16]
    assert spans.key_index is not None and spans.key_index.tolist() == keys
    assert spans.key_starts.tolist() == [0, 4, 9, 11, 13, 17, 20] and spans.longest_key == 5
    assert spans.repeated is not None and spans.repeated.repeated_keys.tolist() == [0, 1, 11]
    assert spans.repeated.repeat_positions.tolist() == [[4, -1], [5, -1], [17, -1]]
    assert [keys[place] for place in spans.repeated.first_positions] == list(range(17))


def test_sequences_of_one_shape_are_attended_to_at_once() -> None:
    """One call for each number of queries and keys, with the results and gradients of one call a sequence."""
    lengths, shared = [7, 5, 7, 9, 9, 5, 9], [0, 0, 0, 0, 4, 0, 4]
    packing = make_packing(lengths, max(lengths), torch.device("cpu"), shared=shared)
    calls = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        calls.append(tuple(q.shape))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        ).transpose(1, 2)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for span in packing.spans.spans:
            parts = slice(span.prefix_start, span.prefix_stop), slice(span.key_start, span.key_stop)
            keys, values = (torch.cat([each[:, :, part] for part in parts], dim=2) for each in (k, v))
            causal = torch.ones(span.num_queries, span.num_keys).tril(span.num_keys - span.num_queries) > 0
            outputs.append(attend(q[:, :, span.query_start : span.query_stop], keys, values, causal))
        return torch.cat(outputs, dim=1)

    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, packing.num_local_tokens, 8, generator=draw) for heads in (4, 2, 2)]

    def with_gradients(attend_all: Any) -> tuple[Tensor, ...]:
        leaves = [each.clone().requires_grad_() for each in states]
        output = attend_all(*leaves)
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    found = with_gradients(lambda q, k, v: attention.attend_in_stream(q, k, v, packing, None, attend))
    assert sorted(calls) == [(1, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 7, 8)]
    for one, other in zip(found, with_gradients(one_by_one), strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_no_common_prompt_is_not_shared() -> None:
    batch = of_prompts([(4, [2, 3, 1, 2])])
    ids, mask = batch.token_ids.clone(), batch.token_mask.clone()
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 3, 3, 3]
    mask[1] = False  # filtered: no token of it is trained on
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 0, 3, 3]
    mask[2] = False
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 0, 0, 3]
    mask[0] = False
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 0, 0, 0]
    mask = batch.token_mask.clone()
    ids[2, 1] = ids[1, 1] % 90 + 1  # another prompt
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 3, 0, 0]
    mask[1:3] = False
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 0, 0, 3]
    ids[3, 0] = ids[3, 0] % 90 + 1  # another first token
    assert shared_prefix_lengths(ids, mask).tolist() == [0, 0, 0, 0]
    longer = batch.token_mask.clone()
    longer[2, 4] = False  # its completion had one token
    assert shared_prefix_lengths(batch.token_ids, longer).tolist() == [0, 3, 0, 3]
    longer[1, 4] = False  # which is then one of the prompt
    assert shared_prefix_lengths(batch.token_ids, longer).tolist() == [0, 0, 0, 0]
    gap = batch.token_mask.clone()
    gap[1, 5] = False  # a tool's answer inside a completion
    assert shared_prefix_lengths(batch.token_ids, gap).tolist() == [0, 3, 3, 3]


def test_a_shared_prompt_goes_through_the_model_once(group: None) -> None:
    batch, widths = of_prompts(GROUPS), []
    backend = make_backend(packing=True, share_prompts=True)
    backend.module.network.model.embed_tokens.register_forward_hook(
        lambda module, args, output: widths.append(output.shape[1])
    )
    backend.compute_logprobs(batch)
    batch.token_mask[[0, 2, 8]] = False  # filtered, before and between others
    backend.compute_logprobs(batch)
    assert widths == [91 - 3 * 4 - 2 * 6, (2 + 13 + 2 + 9 - 4) + 10 + 14 + (14 + 2 + 9 - 6)]


@pytest.mark.timeout(5)  # which what is quadratic in rows exceeds by far
def test_a_large_batch_is_dealt_out_at_once() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(900, 1900) for _ in range(2**14)]
    by_rank = _assign_rows(_RowLengths(lengths, [800 * (row % 16 > 0) for row in range(2**14)]), 1, 32768, 8)
    assert sorted(row for parts in by_rank for part in parts for row in part) == list(range(2**14))


@given(
    st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 12), min_size=4, max_size=4)), min_size=1),
    st.integers(1, 120),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
)
@settings(deadline=None)
def test_microbatches_of_shared_prompts(
    groups: list[tuple[int, list[int]]], max_tokens: int, num_ranks: int, together: int
) -> None:
    """Each row once, a prompt once a microbatch, within the budget where it can be, and no longer a way than
    without sharing. Completions of 0 tokens are filtered."""
    of_rows, shared, prompts = [], [], []
    for number, (prompt, sizes) in enumerate(groups * num_ranks):
        for place, size in enumerate(sizes):
            of_rows.append(prompt + size if size else 2)
            shared.append((prompt - 1) * any(sizes[:place]) * (size > 0))
            prompts.append((number, prompt - 1) if size else (None, 0))

    def tokens_of(part: list[int]) -> int:
        return sum(of_rows[row] for row in part) - sum(
            prefix * (sum(prompts[row][0] == number for row in part) - 1)
            for number, prefix in {prompts[row] for row in part}
        )

    def longest(by_rank: list[list[list[int]]], rows: _RowLengths) -> int:
        turns = zip(*([rows.select(part).num_tokens for part in parts] for parts in by_rank), strict=True)
        return sum(max(turn) for turn in turns)

    rows, alone = _RowLengths(of_rows, shared), _RowLengths(of_rows, [0] * len(of_rows))
    by_rank = _assign_rows(rows, together, max_tokens, num_ranks)
    parts = [part for parts in by_rank for part in parts]
    assert sorted(row for part in parts for row in part) == list(range(len(of_rows)))
    for part in parts:
        assert part == sorted(part) and rows.select(part).num_tokens == tokens_of(part)
        assert len(part) == together or tokens_of(part) <= max_tokens
        assert together == 1 or all(row ^ 1 in part for row in part)
    if together == 1:
        assert longest(by_rank, rows) <= longest(_assign_rows(alone, together, max_tokens, num_ranks), alone)


@pytest.mark.parametrize(
    "kind, cut, shared",
    pairwise(["llama", "tied", "experts", "granite", "cohere"], MICROBATCHES, [False, True]),
)
def test_logprobs_of_a_stream_are_those_of_each_sequence_alone(
    kind: str, cut: dict[str, Any], shared: bool, group: None
) -> None:
    batch = of_prompts(GROUPS) if shared else some_batch()
    with torch.no_grad():
        expected, _ = plain_logprobs(tiny(kind), batch, 1.3)
    backend = make_backend(kind, temperature=1.3, packing=True, share_prompts=shared, **cut)
    torch.testing.assert_close(backend.compute_logprobs(batch), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "logprobs, cut, shared", pairwise([*IMPLS, *ONE_PASS], [{}, {"micro_batch_tokens": 25}], [False, True])
)
def test_gradients_of_a_stream_are_those_of_padded_rows(
    logprobs: dict[str, Any], cut: dict[str, int], shared: bool, group: None
) -> None:
    batch, found = some_batch(), []
    if shared:
        batch = of_prompts(GROUPS)
        batch.token_mask[[0, 2, 8]] = False  # filtered
    loss = WeightedLoss(float(batch.token_mask.sum()))
    stream = {"packing": True, "share_prompts": shared, "activation_checkpointing": bool(cut), **cut}
    for policy in ({}, stream):
        backend = make_backend(temperature=0.7, logprobs=logprobs, **policy)
        parts = backend.forward_backward(batch, loss)
        found.append(gradients(backend) | {"loss": parts.sums["loss"]})
    assert_same(*found, rtol=1e-4, atol=1e-6)


def test_padded_rows_would_be_told_from_packed_ones(group: None) -> None:
    """What the tests above could miss: without borders in the attention the log-probs are others."""
    batch = some_batch()
    backend = make_backend(packing=True)
    packing = stream_of(batch.token_mask)
    token_ids, token_mask = packing.pack(batch.token_ids), packing.pack(batch.token_mask)
    with torch.no_grad():
        right = backend.module(token_ids, token_mask, "none", packing=packing).logprobs
        whole = backend.module(token_ids, token_mask, "none").logprobs  # one sequence of all tokens
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


def test_attention_that_cannot_take_a_stream_is_refused(group: None) -> None:
    settings = {key: value for key, value in TINY.items() if key != "pad_token_id"}
    sliding = MistralForCausalLM(MistralConfig(**settings, sliding_window=4))
    own = BloomForCausalLM(BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=4))
    for network in (sliding, own):
        message = rf"policy\.packing: got true with {type(network).__name__}"
        with pytest.raises(RecipeError, match=message) as caught:
            DtensorBackend(lambda network=network: network, Policy(packing=True), make_ranks(CPU, {}))
        assert len(str(caught.value).splitlines()) == 1 and "packing: false" in str(caught.value)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 40), st.integers(1, 4))
@settings(deadline=None)
def test_microbatches_of_tokens(lengths: list[int], max_tokens: int, num_ranks: int) -> None:
    lengths = lengths * num_ranks
    by_rank = assign_samples(lengths, max_tokens, num_ranks)
    assert len(by_rank) == num_ranks and len({len(parts) for parts in by_rank}) == 1
    parts = [part for parts in by_rank for part in parts]
    assert sorted(sample for part in parts for sample in part) == list(range(len(lengths)))
    assert all(part and (len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens) for part in parts)
    # Dealt to the emptiest, parts are no further apart than one sample that the fullest of them has.
    tokens = [sum(lengths[i] for i in part) for part in parts]
    fullest = parts[tokens.index(max(tokens))]
    assert max(tokens) - min(tokens) <= min(lengths[i] for i in fullest)


def test_samples_of_two_ranks_by_hand() -> None:
    """28 tokens in four parts of at most 10: 9, 8, 4 + 2 and 3 + 2, the fullest with the emptiest."""
    assert assign_samples([9, 8, 2, 3, 4, 2], 10, 2) == [[[0], [2, 3]], [[1], [4, 5]]]


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
    expected, logprobs = gradients(exact), exact.compute_logprobs(batch)
    errors = {}
    for name, packing in (("padded", {}), ("packed", {"packing": True, "micro_batch_tokens": 100})):
        policy = Policy.model_validate({"dtype": dtype, "logprobs": {"impl": impl}} | packing)
        backend = DtensorBackend(tiny, policy, make_ranks(gpu, {}))
        found = backend.compute_logprobs(batch.to(gpu)).cpu()
        backend.forward_backward(batch.to(gpu), loss)
        worst = max(
            float((gradient.cpu() - expected[key]).norm() / expected[key].norm())
            for key, gradient in gradients(backend).items()
        )
        errors[name] = (float((found - logprobs).abs().mean()), worst)
    print(dtype, impl, errors)
    for packed, padded in zip(errors["packed"], errors["padded"], strict=True):
        assert packed <= 1.2 * padded + 1e-5


def test_gradients_of_a_repeated_key_are_summed_in_the_precision_of_the_input() -> None:
    keys = torch.zeros(2, 1, 1, dtype=torch.float64, requires_grad=True)
    layout = [torch.tensor(positions) for positions in ([0, 1, 0], [0, 1], [0], [[2]])]
    selected = attention._SelectKeys.apply(keys, *layout)
    selected.backward(torch.tensor([1.0, 5.0, 1e-12], dtype=torch.float64)[:, None, None])
    assert keys.grad is not None and keys.grad.flatten().tolist() == [1.0 + 1e-12, 5.0]
