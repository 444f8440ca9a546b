"""With the kernel's attention a compiled layer is one graph for streams of any length.

A processor has no such kernel: what stands in for it here is written out.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from abrun.recipe.policy import Model, Policy
from abrun.trainer.backends import attention
from abrun.trainer.backends.dtensor.layers import prepare_layers
from abrun.trainer.backends.microbatches import make_packing
from abrun.trainer.models.weights import load_network
from tests.spawn import run_ranks

KEYS = "model.layers.0.self_attn.k_proj.weight"
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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen._varlen_attn.register_kernel("cpu")(stand_in_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(stand_in_backward)
    monkeypatch.setattr(attention, "_can_use_varlen_kernel", lambda query: True)


def gradients(prepare: Callable[[Any], None], shared: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    network: Any = load_network(Model.model_validate({"preset": "qwen2-tiny"}), weights=None, seed=0)
    policy = Policy.model_validate({"packing": True, "micro_batch_tokens": 64})
    attention.enable_streams(network, policy)
    prepare(network.model.layers)
    states = []
    for lengths in LENGTHS[shared]:
        prefixes = [3 * (shared and row > 0) for row in range(len(lengths))]
        packing = make_packing(lengths, max(lengths), torch.device("cpu"), shared=prefixes)
        token_ids = torch.arange(packing.num_local_tokens)[None] % 20 + 3
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

    def whole(layers: Any) -> None:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True)

    expected = gradients(lambda layers: None, shared)
    stand_in(monkeypatch)
    torch.compiler.reset()
    counters.clear()
    found = gradients(whole, shared)
    assert counters["stats"]["unique_graphs"] == 1
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).norm() / gradient.norm()) < 1e-3, name


def _cached(rank: int, world_size: int, cache: Path, other_way_back: bool) -> tuple[dict[str, int], float]:
    """What torch's cache did for layers that share prompts, in a process of their own; a gradient's norm."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from torch._dynamo.utils import counters

    way_back = attention._SelectKeys.backward

    def doubled(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *others = way_back(context, *gradients)
        assert gradient is not None
        return 2 * gradient, *others

    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        if other_way_back:
            monkeypatch.setattr(attention._SelectKeys, "backward", staticmethod(doubled))
        policy = Policy.model_validate({"compile": True})
        norm = gradients(partial(prepare_layers, policy=policy), True)[1][KEYS].norm()
    return {key: count for key, count in counters["aot_autograd"].items() if "cache" in key}, float(norm)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shared_prompts_come_from_the_cache_until_their_way_back_is_another(tmp_path: Path) -> None:
    counts, norms = zip(
        *(run_ranks(_cached, 1, tmp_path, other, timeout_s=300)[0] for other in (False, False, True)),
        strict=True,
    )
    made = {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert counts == (made, {"autograd_cache_hit": 1}, made)
    assert norms[0] == norms[1] != norms[2]
