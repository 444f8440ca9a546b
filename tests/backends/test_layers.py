"""What replaces parts of transformers' layers is the same to the last bit."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.cohere import modeling_cohere
from transformers.models.qwen2 import modeling_qwen2

from abrun.backends.dtensor import layers
from abrun.models import load_network
from abrun.recipe import Model


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
    layers._rotate_position_by_position(family)
    states, gradients = found()
    assert family.apply_rotary_pos_emb is layers._rotated
    monkeypatch.undo()
    expected = found()
    assert torch.equal(states, expected[0])
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected[1], strict=True))


def test_what_rotates_otherwise_is_left_as_it_is() -> None:
    """Cohere's pairs are neighbours, not halves."""
    stock = modeling_cohere.apply_rotary_pos_emb
    layers._rotate_position_by_position(modeling_cohere)
    layers._rotate_position_by_position(torch)
    assert modeling_cohere.apply_rotary_pos_emb is stock is not modeling_qwen2.apply_rotary_pos_emb
