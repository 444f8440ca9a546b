"""Presets and checkpoints: the weights, tokens and end tokens that a recipe asked for."""

import json
import shutil
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from abrun.errors import RecipeError
from abrun.models import LanguageModel, character_tokenizer, load_model
from abrun.recipe import Model

PRINTABLE = "".join(chr(code) for code in range(32, 127))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def preset(seed: int = 0) -> LanguageModel:
    return load_model(Model(preset="qwen2-tiny"), weights=None, seed=seed)


def from_path(path: Path) -> LanguageModel:
    return load_model(Model(path=str(path)), weights=None, seed=0)


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained here: what published checkpoints have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["What is the sum of two numbers? The answer is 42.", TEMPLATE], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def checkpoint(
    request: pytest.FixtureRequest, bpe: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A checkpoint as Hugging Face has them, made by transformers alone, with a head of its own."""
    kind, config_kind = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    }[request.param]
    torch.manual_seed(1)
    settings = TINY | {"vocab_size": len(bpe), "tie_word_embeddings": False, "attention_dropout": 0.1}
    network = kind(config_kind(**settings))
    network.generation_config.eos_token_id = [
        bpe.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    ]
    folder = tmp_path_factory.mktemp(request.param)
    network.save_pretrained(folder)
    bpe.save_pretrained(folder)
    return folder


def test_the_preset_is_tiny_and_tied() -> None:
    network = preset().network
    assert 200_000 < sum(p.numel() for p in network.parameters()) < 500_000
    assert network.get_output_embeddings().weight is network.get_input_embeddings().weight  # pyright: ignore
    assert {p.dtype for p in network.parameters()} == {torch.float32}


def test_the_seed_decides_the_presets_weights_and_nothing_else() -> None:
    torch.manual_seed(5)
    expected_draw = torch.rand(())
    torch.manual_seed(5)
    first = preset(3).network.state_dict()
    assert torch.rand(()) == expected_draw, "loading a model must not consume the global generator"
    torch.rand(100)
    again, other = preset(3).network.state_dict(), preset(4).network.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_every_printable_character_is_a_token_and_comes_back() -> None:
    model = preset()
    text = PRINTABLE + "\n"
    token_ids = model.encode_prompt(text)
    assert len(token_ids) == len(set(token_ids)) == len(text)
    assert model.decode(token_ids) == text
    for one in ("  two  spaces ", "don't , really !", "##x ##y", "a\n\nb"):
        assert model.decode(model.encode_prompt(one)) == one
    assert max(token_ids) < model.network.config.vocab_size == len(model.tokenizer)  # pyright: ignore


def test_a_character_the_preset_does_not_know_is_one_token() -> None:
    model = preset()
    assert len(model.encode_prompt("aé☃b")) == 4
    assert model.decode(model.encode_prompt("aé☃b")) == "ab"


def test_a_completion_ends_with_the_end_token() -> None:
    model = preset()
    *tokens, end = model.encode_completion("12")
    assert end == model.tokenizer.eos_token_id and model.end_ids == {end}
    assert tokens == model.encode_prompt("12")
    assert model.decode([*tokens, end]) == "12"
    assert model.pad_id not in {end, *tokens}


def test_a_saved_preset_loads_through_its_path(tmp_path: Path) -> None:
    model = preset(7)
    weights = {name: p.detach() + 0.25 for name, p in model.network.named_parameters()}
    model.save(tmp_path / "saved", dict(weights))
    assert not [path for path in (tmp_path / "saved").iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    loaded = from_path(tmp_path / "saved")
    for name, parameter in loaded.network.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    assert loaded.network.get_output_embeddings().weight is loaded.network.get_input_embeddings().weight  # pyright: ignore
    assert (loaded.end_ids, loaded.pad_id) == (model.end_ids, model.pad_id)
    text = string.printable.replace("\t", "").replace("\r", "").replace("\x0b", "").replace("\x0c", "")
    assert loaded.encode_prompt(text) == model.encode_prompt(text)
    # transformers alone puts Qwen2's splitting around the vocabulary, which loses white space only.
    plain, dense = AutoTokenizer.from_pretrained(tmp_path / "saved"), PRINTABLE.replace(" ", "")
    assert plain(dense)["input_ids"] == model.encode_prompt(dense)
    again = load_model(Model(preset="qwen2-tiny"), weights=tmp_path / "saved", seed=0)
    assert torch.equal(again.network.state_dict()["model.norm.weight"], weights["model.norm.weight"])


def test_a_real_checkpoint_loads_with_its_own_weights(checkpoint: Path) -> None:
    model = from_path(checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    parameters = dict(model.network.named_parameters())
    assert parameters.keys() == stored.keys() and "lm_head.weight" in stored
    assert all(torch.equal(parameter, stored[name]) for name, parameter in parameters.items())
    assert not torch.equal(parameters["lm_head.weight"], parameters["model.embed_tokens.weight"])


def test_a_half_precision_checkpoint_trains_in_float32(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "half")
    network = from_path(checkpoint).network.to(torch.bfloat16)
    network.save_pretrained(folder)  # pyright: ignore
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in from_path(folder).network.parameters()} == {torch.float32}


def test_the_chat_template_is_applied_with_the_generation_prompt(checkpoint: Path) -> None:
    model = from_path(checkpoint)
    expected = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    token_ids = model.encode_prompt("What is 1+1?")
    assert model.tokenizer.decode(token_ids) == expected
    assert token_ids.count(model.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2  # pyright: ignore
    assert all(isinstance(token_id, int) for token_id in token_ids)
    assert model.decode(model.encode_completion("It is 2 — really")) == "It is 2 — really"


def test_every_end_token_of_the_generation_config_ends(checkpoint: Path) -> None:
    model = from_path(checkpoint)
    end_of_turn, end_of_text = (
        model.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")
    )
    assert model.end_ids == {end_of_turn, end_of_text}
    assert model.pad_id == end_of_text
    assert model.encode_completion("x")[-1] == end_of_turn


def test_without_a_pad_token_padding_is_an_end_token(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "no-pad")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    model = from_path(folder)
    assert model.tokenizer.pad_token_id is None and model.pad_id in model.end_ids


def test_dropout_is_off(checkpoint: Path) -> None:
    model = from_path(checkpoint)
    assert model.network.config.attention_dropout == 0.1  # pyright: ignore  # as the checkpoint says
    token_ids = torch.tensor([model.encode_prompt("What is the sum?")])
    model.network.train()
    trained = model.network(token_ids).logits
    model.network.eval()
    assert torch.equal(trained, model.network(token_ids).logits)


@pytest.mark.parametrize(
    "broken", ["nowhere", "empty", "no weights", "no tokenizer", "garbage", "config", "half"]
)
def test_a_checkpoint_that_does_not_load_is_one_line(broken: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    if broken != "nowhere":
        folder.mkdir()
    if broken not in ("nowhere", "empty"):
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    if broken == "no weights":
        (folder / "model.safetensors").unlink()
    elif broken == "no tokenizer":
        for path in folder.glob("*token*"):
            path.unlink()
    elif broken == "garbage":
        (folder / "model.safetensors").write_bytes(b"garbage" * 50)
    elif broken == "half":
        stored = load_file(folder / "model.safetensors")
        del stored["model.layers.1.mlp.up_proj.weight"]
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    elif broken == "config":
        (folder / "config.json").write_text("{")
    with pytest.raises(RecipeError) as raised:
        from_path(folder)
    message = str(raised.value)
    assert message.startswith(f"model.path: got {str(folder)!r}") and "\n" not in message


def test_pickled_weights_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(from_path(checkpoint).network.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(RecipeError):
        from_path(folder)


def test_the_character_tokenizer_pads_left() -> None:
    tokenizer = character_tokenizer()
    encoded = tokenizer(["1", "123"], padding=True)
    assert encoded["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
