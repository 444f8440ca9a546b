"""Checkpoints that are read in parts: the same network as one that transformers loads whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from abrun.recipe.policy import Model
from abrun.trainer.models import weights as parts
from abrun.trainer.models.weights import load_network, open_network, save_network
from tests.trainer.models.architectures import tiny_network
from tests.trainer.models.conftest import TINY

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "vocab_size": 70}


def opened(path: Path, *, decodes: bool = True) -> Any:
    return open_network(Model(path=str(path)), weights=None, seed=0, decodes=decodes)


def filled(network: Any) -> Any:
    """The network with its weights, each read in two parts."""
    assert all(parameter.is_meta for parameter in network.parameters())
    buffers = dict(network.named_buffers())
    found = {}
    for name, parameter in network.named_parameters():
        half = parameter.shape[0] // 2
        rest = [slice(0, size) for size in parameter.shape[1:]]
        rows = slice(0, half), slice(half, parameter.shape[0])
        found[name] = torch.cat([network.checkpoint.read(name, (part, *rest)) for part in rows]).float()
    network.to_empty(device="cpu").load_state_dict(found, strict=False)
    for name, buffer in network.named_buffers():
        buffer.copy_(buffers[name])
    return network


@pytest.mark.parametrize("files", ["one", "several"])
def test_it_is_the_network_that_transformers_loads(files: str, checkpoint: Path, tmp_path: Path) -> None:
    folder, tokens = tmp_path / "saved", torch.arange(5, 20)[None]
    whole: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    whole.generation_config.eos_token_id = 7
    whole.save_pretrained(folder, max_shard_size="20KB" if files == "several" else "1GB")
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (files == "several")
    expected, network = load_network(Model(path=str(folder)), weights=None, seed=0), filled(opened(folder))
    stored = dict(expected.named_parameters())
    assert {name for name, _ in network.named_parameters()} == stored.keys()
    assert all(torch.equal(weight, stored[name]) for name, weight in network.named_parameters())
    with torch.no_grad():
        assert torch.equal(network.eval()(tokens).logits, expected.eval()(tokens).logits)
    for one, name in ((network, "ours"), (expected, "theirs")):
        save_network(one, tmp_path / name, one.named_parameters())
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()


def test_experts_are_read_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = TINY | EXPERTS
    whole = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, pad_token_id=0))
    whole.save_pretrained(tmp_path)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    network = opened(tmp_path)
    part = (slice(1, 3), slice(5, 12), slice(0, 16))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(network.checkpoint.read(name, part), dict(whole.named_parameters())[name][part])
    stored = dict(whole.named_parameters())
    assert all(torch.equal(weight, stored[name]) for name, weight in filled(network).named_parameters())


def test_what_cannot_be_read_in_parts_is_loaded_whole(checkpoint: Path, tmp_path: Path) -> None:
    """A preset; another family; a tied head that the file has beside the embedding."""
    assert not any(
        p.is_meta
        for p in open_network(Model(preset="qwen2-tiny"), weights=None, seed=0, decodes=True).parameters()
    )
    tiny_network("falcon").save_pretrained(tmp_path / "falcon")
    assert not any(p.is_meta for p in opened(tmp_path / "falcon").parameters())
    network: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    network.config.tie_word_embeddings = True
    network.save_pretrained(tmp_path / "both")
    both = opened(tmp_path / "both")
    assert not any(p.is_meta for p in both.parameters())


def test_a_large_models_checks_are_of_a_small_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    state = torch.get_rng_state()

    def check(network: Any, facts: Any) -> None:
        seen.append(sum(parameter.numel() for parameter in network.parameters()))

    monkeypatch.setattr(parts, "check_network", check)
    monkeypatch.setattr(parts, "check_decoding", check)
    opened(checkpoint)
    opened(checkpoint, decodes=False)
    assert len(seen) == 3 and torch.equal(torch.get_rng_state(), state)


def test_a_large_preset_is_never_made_whole() -> None:
    """The shape of Qwen3-8B, 8.19 billion parameters; its weights are made as they are read."""
    network: Any = open_network(Model(preset="qwen3-8b"), weights=None, seed=3, decodes=False)
    assert all(parameter.is_meta for parameter in network.parameters())
    assert sum(parameter.numel() for parameter in network.parameters()) == 8_190_735_360
    weights, name = network.checkpoint, "model.layers.7.self_attn.k_proj.weight"
    whole = weights.read(name, (slice(0, 1024), slice(0, 4096)))
    part = weights.read(name, (slice(100, 200), slice(8, 4096)))
    assert torch.equal(part, whole[100:200, 8:4096])
    assert float(whole.std()) == pytest.approx(0.02, rel=0.01) and abs(float(whole.mean())) < 1e-4
    assert not torch.equal(whole, weights.read(name.replace(".7.", ".8."), (slice(0, 1024), slice(0, 4096))))
    assert weights.read("model.norm.weight", (slice(0, 9),)).tolist() == [1.0] * 9


def test_a_preset_s_shape_is_what_the_recipe_says() -> None:
    shape = {"vocab_size": 500, "num_hidden_layers": 2, "intermediate_size": 64}
    model = Model.model_validate({"preset": "qwen2-tiny", "shape": shape})
    network: Any = open_network(model, weights=None, seed=0, decodes=False)
    assert network.get_input_embeddings().weight.shape == (500, 96)
    assert len(network.model.layers) == 2 and network.model.layers[0].mlp.up_proj.weight.shape == (64, 96)
    with pytest.raises(ValueError, match=r"model.shape.vocab_size: got 500 with model.path"):
        Model.model_validate({"path": "x", "shape": {"vocab_size": 500}})
