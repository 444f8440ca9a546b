"""With the kernel's attention a compiled layer is one graph for streams of any length.

A processor has no such kernel: what stands in for it here is written out.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from abrun.backends import attention
from abrun.backends.packing import packing_of
from abrun.models import load_network
from abrun.recipe import Model, Policy

LENGTHS = {False: ([5, 9, 7], [12, 3], [4, 4, 4, 6], [20]), True: ([5, 9, 7], [12, 4], [4, 5, 4, 6])}


def masked(starts: Tensor, key_starts: Tensor) -> Tensor:  # [T, K] bool: what a token does not see
    span, place = places(starts)
    key_span, key_place = places(key_starts)
    return (span[:, None] != key_span) | (place[:, None] < key_place)


def places(starts: Tensor) -> tuple[Tensor, Tensor]:  # of each token: its span, and how far before its end
    tokens = torch.arange(int(starts[-1]))
    span = torch.bucketize(tokens, starts[1:], right=True)
    return span, tokens - starts[1:][span]


def stand_in_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, starts, key_starts, _, _, _, scale = inputs[:9]
    shared = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(shared, 1)) * scale
    weights = scores.masked_fill(masked(starts, key_starts), -torch.inf).softmax(-1)
    output = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(shared, 1))
    sums = torch.zeros(query.shape[1], len(query))
    return torch.empty_like(query).copy_(output), sums, torch.zeros(2, dtype=torch.uint64)


def stand_in_backward(*inputs: Any) -> tuple[Tensor, ...]:
    gradient, query, key, value, _, _, starts, key_starts, _, _, _, _, scale = inputs[:13]
    shared = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(shared, 1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    weights = scores.masked_fill(masked(starts, key_starts), -torch.inf).softmax(-1)
    of_weights = torch.einsum("qhd,khd->hqk", gradient, values)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    found = (
        torch.einsum("hqk,khd->qhd", of_scores, keys),
        torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (-1, shared)).sum(2),
        torch.einsum("hqk,qhd->khd", weights, gradient).unflatten(1, (-1, shared)).sum(2),
    )
    return tuple(
        torch.empty_like(like).copy_(each) for like, each in zip((query, key, value), found, strict=True)
    )


def gradients(layers_are: Any, shared: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    network: Any = load_network(Model.model_validate({"preset": "qwen2-tiny"}), weights=None, seed=0)
    policy = Policy.model_validate({"packing": True, "micro_batch_tokens": 64})
    attention.enable_streams(network, policy)
    for layer in network.model.layers:
        layer.forward = layers_are(layer.forward)
    states = []
    for lengths in LENGTHS[shared]:
        prefixes = [3 * (shared and row > 0) for row in range(len(lengths))]
        packing = packing_of(lengths, max(lengths), torch.device("cpu"), shared=prefixes)
        token_ids = torch.arange(packing.num_own)[None] % 20 + 3
        states.append(attention.hidden_states(network.model, token_ids, packing))
        states[-1].square().sum().backward()
    weights = network.named_parameters()
    return states, {name: weight.grad for name, weight in weights if weight.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_compiled_layer_is_one_graph_for_streams_of_any_length(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    expected = gradients(lambda forward: forward, shared)
    varlen._varlen_attn.register_kernel("cpu")(stand_in_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(stand_in_backward)
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    torch.compiler.reset()
    counters.clear()
    found = gradients(lambda forward: torch.compile(forward, dynamic=True, fullgraph=True), shared)
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).norm() / gradient.norm()) < 1e-3, name
