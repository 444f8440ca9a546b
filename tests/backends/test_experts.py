"""A mixture of experts on the dtensor backend: what it exports, and its experts over several ranks."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from abrun.models import load_network
from abrun.recipe import Model
from tests.backends.policies import WeightedLoss, make_backend, parameters, some_batch

NUM_EXPERTS = 8


def test_an_export_is_a_published_checkpoint(group: None, tmp_path: Path) -> None:
    """Of every expert a tensor each, though they train as one; what is loaded is what was saved."""
    backend, batch = make_backend("experts"), some_batch()
    backend.forward_backward(batch, WeightedLoss(float(batch.token_mask.sum())))
    backend.optimizer_step(0.01)
    trained: dict[str, Any] = {name: weight.clone() for name, weight in parameters(backend).items()}
    backend.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    weights = dict(backend.weights())
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    fused = trained["model.layers.1.mlp.experts.gate_up_proj"]  # [E, gate rows and up rows, H]
    for expert in range(NUM_EXPERTS):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        gate, up = fused[expert].chunk(2)
        assert torch.equal(stored[f"{prefix}.gate_proj.weight"], gate)
        assert torch.equal(stored[f"{prefix}.up_proj.weight"], up)
        down = trained["model.layers.1.mlp.experts.down_proj"][expert]
        assert torch.equal(stored[f"{prefix}.down_proj.weight"], down)
    loaded = load_network(Model(path=str(tmp_path)), weights=None, seed=0)
    for network in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path)):
        found = dict(network.named_parameters())
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], weight) for name, weight in trained.items())
