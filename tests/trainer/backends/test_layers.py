"""What replaces parts of transformers' layers is the same to the last bit; what compilers know."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.qwen2 import modeling_qwen2

from abrun.recipe.policy import Model
from abrun.trainer.backends.dtensor import layers
from abrun.trainer.models.weights import load_network
from tests.trainer.backends.policies import make_backend, some_batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_position_by_position_to_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    network: Any = load_network(Model(preset="qwen2-tiny"), weights=None, seed=0).to(dtype)
    token_ids = torch.arange(34).view(2, 17) % 20

    def found() -> tuple[Tensor, list[Tensor]]:
        network.zero_grad()
        states = network.model(input_ids=token_ids).last_hidden_state
        states.float().square().sum().backward()
        return states, [each.grad for each in network.model.parameters()]

    family = sys.modules[type(network.model.layers[0]).__module__]
    monkeypatch.setattr(family, "apply_rotary_pos_emb", family.apply_rotary_pos_emb)  # to be put back
    layers._replace_rotation(family)
    states, gradients = found()
    assert family.apply_rotary_pos_emb is layers._apply_rotary
    monkeypatch.undo()
    expected = found()
    assert torch.equal(states, expected[0])
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected[1], strict=True))


@pytest.mark.parametrize("of_table", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_states", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_is_rotated_to_the_same_bits(of_states: torch.dtype, of_table: torch.dtype) -> None:
    """One table for all rows, tables that are scaled, of another dtype, and no positions at all."""
    draw, rotations = torch.Generator().manual_seed(0), [layers.STOCK_ROTATION, layers._apply_rotary]
    for rows, heads, length, half in [(1, 1, 0, 1), (1, 3, 7, 1), (2, 4, 9, 8), (3, 2, 5, 5)]:
        for tables in (1, rows):
            cos, sin = (1.3 * torch.randn(2, tables, length, 2 * half, generator=draw)).to(of_table)
            start = [torch.randn(rows, length, n, 2 * half, generator=draw).to(of_states) for n in (heads, 1)]
            found = []
            for rotate in rotations:
                query, key = states = [each.clone().requires_grad_() for each in start]
                out = rotate(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
                torch.stack([each.float().square().sum() for each in out]).sum().backward()
                found.append([*out, *(each.grad for each in states)])
            assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_rotates_otherwise_is_left_as_it_is() -> None:
    """Cohere's pairs are neighbours, not halves."""
    stock = modeling_cohere.apply_rotary_pos_emb
    layers._replace_rotation(modeling_cohere)
    layers._replace_rotation(torch)
    assert modeling_cohere.apply_rotary_pos_emb is stock is not modeling_qwen2.apply_rotary_pos_emb


def test_a_compiler_takes_lengths_alone_for_numbers_that_change(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's size that it does not know, as FSDP's modules have it, is a division in every kernel."""
    batch, found = some_batch(seed=1), []  # of rows that are not as long as a head

    def seen(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append({str(each.node.expr) for each in inputs if isinstance(each, torch.SymInt)})
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=seen))
    torch.compiler.reset()
    make_backend(compile=True, micro_batch_size=2).compute_logprobs(batch)
    torch.compiler.reset()
    assert found and all(len(symbols) == 2 for symbols in found), found  # rows and their length
