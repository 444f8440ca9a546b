"""Exports are whole: what a network has no place for comes from its checkpoint's files, unchanged."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from abrun.recipe.policy import Model
from abrun.trainer.models import unread
from abrun.trainer.models.weights import load_network, open_network, save_network
from tests.snapshot import Snapshot
from tests.trainer.models.architectures import tiny_config, tiny_network


def opened(folder: Path) -> Any:
    return open_network(Model(path=str(folder)), weights=None, seed=0, decodes=False)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    found = [load_file(path) for path in files]
    merged = {name: tensor for each in found for name, tensor in each.items()}
    assert len(merged) == sum(map(len, found))  # a tensor lies in two files
    return merged


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def trained_export(network: Any, folder: Path) -> dict[str, Tensor]:
    """Export weights that are all larger by 1 than they were loaded."""
    save_network(network, folder, [(name, p.detach() + 1) for name, p in network.named_parameters()])
    return tensors_of(folder)


@pytest.mark.parametrize("kind", ["qwen3_5", "llama4", "mllama"])
@pytest.mark.parametrize("files", ["one", "several"])
def test_a_multimodal_checkpoint_trained_as_text_is_exported_whole(
    kind: str, files: str, tmp_path: Path
) -> None:
    several = files == "several"
    source, target = tmp_path / "in", tmp_path / "out"
    published: Any = AutoModelForImageTextToText.from_config(tiny_config(kind))
    published.to(torch.bfloat16).save_pretrained(source, max_shard_size="40KB" if several else "1GB")
    (source / "preprocessor_config.json").write_text('{"size": 7}')
    network: Any = load_network(Model(path=str(source)), weights=None, seed=0)
    if several:
        network.save_pretrained = functools.partial(network.save_pretrained, max_shard_size="40KB")
    before, after = tensors_of(source), trained_export(network, target)
    assert (len(list(target.glob("*.safetensors"))) > 1) == several
    assert after.keys() == before.keys()
    trained = {name for name, tensor in after.items() if torch.equal(tensor, before[name].float() + 1)}
    kept = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert trained | kept == before.keys() and not trained & kept
    assert len(trained) == len(list(network.named_parameters()))
    assert any("vis" in name for name in kept) and not any("vis" in name for name in trained)
    old, new = config_of(source), config_of(target)
    assert new["architectures"] == [type(published).__name__] and new["dtype"] == "float32"
    assert {name for name in old if old[name] != new[name]} <= {"dtype", "text_config", "vision_config"}
    assert (target / "preprocessor_config.json").read_text() == '{"size": 7}'
    loaded: Any = AutoModelForImageTextToText.from_pretrained(target, output_loading_info=True)
    info = loaded[1]
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again = dict(load_network(Model(path=str(target)), weights=None, seed=0).named_parameters())
    assert all(torch.equal(p.detach() + 1, again[name]) for name, p in network.named_parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_layers_that_predict_later_tokens_are_kept(kind: str, tmp_path: Path) -> None:
    """Of odd sizes and other dtypes; with a network whose weights are read in parts, and with others."""
    tiny_network(kind).save_pretrained(tmp_path / "in")
    more = {
        "model.layers.2.eh_proj.weight": torch.randn(3, 5).bfloat16(),
        "mtp.bytes": torch.arange(7, dtype=torch.uint8),
        "mtp.norm.weight": torch.randn(3),
        "mtp.none": torch.zeros(0),
    }
    add_tensors(tmp_path / "in", more)
    network = opened(tmp_path / "in")
    if kind != "deepseek_v3":
        assert all(parameter.is_meta for parameter in network.parameters())
        network = load_network(Model(path=str(tmp_path / "in")), weights=None, seed=0)
    after = trained_export(network, tmp_path / "out")
    assert after.keys() == tensors_of(tmp_path / "in").keys()
    for name, tensor in more.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor)
    assert config_of(tmp_path / "out")["model_type"] == kind


def test_an_export_without_a_rest_is_as_it_was(tmp_path: Path) -> None:
    """Neither tied heads nor experts that are stored one by one are taken for unread."""
    for kind in ("qwen2", "mixtral", "gemma3"):
        tiny_network(kind).save_pretrained(tmp_path / kind)
        network = opened(tmp_path / kind)
        assert network.unread.tensors == {} and network.unread.config is None
    assert load_network(Model(preset="qwen2-tiny"), weights=None, seed=0) is not None  # has no checkpoint


def test_no_memory_holds_what_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def anonymous_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def measured(*arguments: Any, **settings: Any) -> None:
        used.append(anonymous_bytes())
        save_file(*arguments, **settings)
        used.append(anonymous_bytes())

    tiny_network("llama").save_pretrained(tmp_path / "in")
    add_tensors(tmp_path / "in", {"tower.weight": torch.ones(2**24)})  # 64 MiB
    network = load_network(Model(path=str(tmp_path / "in")), weights=None, seed=0)
    used: list[int] = []
    monkeypatch.setattr(unread, "save_file", measured)
    before = anonymous_bytes()
    trained_export(network, tmp_path / "out").clear()
    assert len(used) == 2 and max(used) - before < 2**24
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2**26


def test_what_a_quantized_checkpoint_loses_is_named_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: Snapshot
) -> None:
    """Its scales belong to weights that are read; a tower of its own does not."""
    tiny_network("llama").save_pretrained(tmp_path)
    scales = {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}
    add_tensors(tmp_path, scales)
    network = load_network(Model(path=str(tmp_path)), weights=None, seed=0)
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "fp8"}
    for more, lines in (({}, 0), ({"mtp.fc.weight": torch.ones(2, 2)}, 1)):
        add_tensors(tmp_path, more)
        caplog.clear()  # transformers reports, too
        with caplog.at_level(logging.WARNING):
            assert unread.find_unread(network, config, str(tmp_path)) is None
        assert len(caplog.messages) == lines
    snapshot(caplog.text)
