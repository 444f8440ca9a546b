"""Networks loaded and saved: the weights that a recipe asked for, and all that a checkpoint needs."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import Chunk, WeightConverter

from abrun.errors import RecipeError
from abrun.recipe.policy import Model
from abrun.trainer.models import weights
from abrun.trainer.models.checks import check_network
from abrun.trainer.models.families import facts_of, persistent_buffers
from abrun.trainer.models.text import load_text
from abrun.trainer.models.weights import load_network, open_network, save_network
from tests.snapshot import Snapshot
from tests.trainer.models.architectures import tiny_network


def preset(seed: int = 0) -> Any:
    return load_network(Model(preset="qwen2-tiny"), weights=None, seed=seed)


def from_path(path: Path) -> Any:
    return load_network(Model(path=str(path)), weights=None, seed=0)


def test_the_seed_decides_the_presets_weights_and_nothing_else() -> None:
    torch.manual_seed(5)
    expected_draw = torch.rand(())
    torch.manual_seed(5)
    first = preset(3).state_dict()
    assert torch.rand(()) == expected_draw  # loading a model must not consume the global generator
    torch.rand(100)
    again, other = preset(3).state_dict(), preset(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_saved_preset_loads_through_its_path(tmp_path: Path) -> None:
    network, text, folder = preset(7), load_text(Model(preset="qwen2-tiny"), weights=None), tmp_path / "saved"
    weights = {name: p.detach() + 0.25 for name, p in network.named_parameters()}
    save_network(network, folder, weights.items())
    text.save(folder)
    assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    loaded, loaded_text = from_path(folder), load_text(Model(path=str(folder)), weights=None)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert (loaded_text.end_ids, loaded_text.pad_id, loaded_text.max_positions) == (
        text.end_ids,
        text.pad_id,
        text.max_positions,
    )
    characters = "".join(chr(code) for code in range(33, 127))
    assert loaded_text.encode_prompts([f" {characters} \n "]) == text.encode_prompts([f" {characters} \n "])
    # transformers alone puts Qwen2's splitting around the vocabulary, which loses white space only.
    plain = AutoTokenizer.from_pretrained(folder)
    assert [plain(characters)["input_ids"]] == text.encode_prompts([characters])
    again = load_network(Model(preset="qwen2-tiny"), weights=folder, seed=0)
    assert torch.equal(again.state_dict()["model.norm.weight"], weights["model.norm.weight"])


def test_a_real_checkpoint_loads_with_its_own_weights(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    parameters = dict(from_path(checkpoint).named_parameters())
    assert parameters.keys() == stored.keys() and "lm_head.weight" in stored
    assert all(torch.equal(parameter, stored[name]) for name, parameter in parameters.items())
    assert not torch.equal(parameters["lm_head.weight"], parameters["model.embed_tokens.weight"])


def test_dropout_is_off_and_an_export_says_what_the_checkpoint_said(checkpoint: Path, tmp_path: Path) -> None:
    network = from_path(checkpoint)
    token_ids = torch.arange(9)[None]
    trained = network.train()(token_ids).logits
    assert torch.equal(trained, network.eval()(token_ids).logits)
    save_network(network, tmp_path / "saved", network.named_parameters())
    assert AutoConfig.from_pretrained(tmp_path / "saved").attention_dropout == 0.1
    assert torch.equal(network.train()(token_ids).logits, trained)


@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_a_routers_correction_bias_is_loaded_and_exported(kind: str, tmp_path: Path) -> None:
    """A persistent buffer, of which a list of parameters knows nothing."""
    network = tiny_network(kind, first_k_dense_replace=1)
    buffers = dict(persistent_buffers(network))
    assert [name.rsplit(".")[-1] for name in buffers] == ["e_score_correction_bias"]
    for buffer in buffers.values():
        buffer.copy_(torch.arange(4))
    network.save_pretrained(tmp_path / "published")
    trained = from_path(tmp_path / "published")
    save_network(trained, tmp_path / "saved", trained.named_parameters())
    for loaded in (from_path(tmp_path / "saved"), AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        assert {name: buffer.tolist() for name, buffer in persistent_buffers(loaded)} == {
            name: [0, 1, 2, 3] for name in buffers
        }
        stored = dict(network.named_parameters())
        assert all(torch.equal(parameter, stored[name]) for name, parameter in loaded.named_parameters())


@pytest.mark.parametrize("kind", ["falcon", "persimmon", "fuyu", "llama4_text", "doge", "gpt_oss"])
def test_a_family_with_ways_of_its_own_loads(kind: str, tmp_path: Path) -> None:
    tiny_network(kind).save_pretrained(tmp_path)
    assert type(from_path(tmp_path)) is type(tiny_network(kind))


@pytest.mark.parametrize("kind", ["phimoe", "gptj"])
def test_a_family_that_is_not_handled_is_one_line(kind: str, tmp_path: Path) -> None:
    tiny_network(kind).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"^model(\.path)?: got ") as raised:
        from_path(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("broken", ["nowhere", "empty", "no weights", "garbage", "config", "half"])
def test_a_checkpoint_that_does_not_load_is_one_line(broken: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    if broken != "nowhere":
        folder.mkdir()
    if broken not in ("nowhere", "empty"):
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    if broken == "no weights":
        (folder / "model.safetensors").unlink()
    elif broken == "garbage":
        (folder / "model.safetensors").write_bytes(b"garbage" * 50)
    elif broken == "half":
        stored = load_file(folder / "model.safetensors")
        del stored["model.layers.1.mlp.up_proj.weight"]
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    elif broken == "config":
        (folder / "config.json").write_text("{")
    model = Model(path=str(folder))
    for load in (load_network, partial(open_network, decodes=True)):
        with pytest.raises(RecipeError) as raised:
            load(model, weights=None, seed=0)
        message = str(raised.value)
        assert message.startswith(f"model.path: got {str(folder)!r}") and "\n" not in message


@pytest.mark.parametrize("kind", ["mistral3", "qwen2_5_vl", "qwen3_vl"])
def test_a_multimodal_model_without_a_causal_lm_is_named_so(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    for load in (load_network, partial(open_network, decodes=False)):
        with pytest.raises(RecipeError) as raised:
            load(Model(path=str(tmp_path)), weights=None, seed=0)
        message = str(raised.value)
        assert message.startswith(f"model.path: got {str(tmp_path)!r} of type {kind}, a multimodal model ")


def test_weights_that_a_checkpoint_holds_together_are_refused(snapshot: Snapshot) -> None:
    """As HrmText's: one by one each would be published under the name of all, and the last one win."""
    network = tiny_network("llama")
    parts = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    network._weight_conversions = [
        WeightConverter("mlp.gate_up_proj.weight", parts, operations=[Chunk(dim=0)])
    ]
    named = dict(network.named_parameters())
    assert len(dict(weights.published(network, named.items()))) < len(named)
    with pytest.raises(RecipeError) as refusal:
        check_network(network, facts_of(network))
    snapshot(refusal.value)


def test_weights_that_are_published_as_they_are_cost_one_look_at_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one for each of them, of 340 in a model of 1.5B parameters and before every rollout."""
    network, looks = preset(), []
    look = weights.revert_weight_conversion
    monkeypatch.setattr(weights, "revert_weight_conversion", lambda *of: looks.append(of) or look(*of))
    named = dict(network.named_parameters())
    found = dict(weights.published(network, named.items()))
    assert found.keys() == named.keys() and all(found[name] is named[name] for name in named)
    assert len(looks) == 1


def test_pickled_weights_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(from_path(checkpoint).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(RecipeError):
        from_path(folder)
