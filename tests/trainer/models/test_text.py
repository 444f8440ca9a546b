"""Prompts and completions as tokens: what a tokenizer, its template and the checkpoint's end tokens say."""

import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CodeLlamaTokenizer

from abrun.errors import RecipeError
from abrun.recipe.policy import Model
from abrun.trainer.models.families import max_positions_of
from abrun.trainer.models.sources import CharacterTokenizer, character_tokenizer
from abrun.trainer.models.text import Text, load_text
from tests.snapshot import Snapshot
from tests.trainer.models.architectures import tiny_config, tiny_network

PRINTABLE = "".join(chr(code) for code in range(32, 127))


def preset() -> Text:
    return load_text(Model(preset="qwen2-tiny"), weights=None)


def from_path(path: Path) -> Text:
    return load_text(Model(path=str(path)), weights=None)


def end_ids_of(text: Text) -> list[int]:
    tokenizer: Any = text.tokenizer
    return tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_longrope_is_taken_up_to_its_original_positions() -> None:
    """Longer sequences rotate all tokens of a batch otherwise, those that were already drawn, too."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    settings = {"original_max_position_embeddings": 16, "max_position_embeddings": 64, "sliding_window": None}
    network = tiny_network("phi3", rope_parameters={"rope_type": "longrope"} | factors, **settings)
    positions = max_positions_of(network.config)
    assert positions == 16
    tokens = torch.arange(positions + 1)[None] % 90 + 3
    with torch.no_grad():
        network.eval()
        longer, most, fewer = (
            network(tokens[:, :length]).logits[0, : positions - 1]
            for length in (positions + 1, positions, positions - 1)
        )
    torch.testing.assert_close(most, fewer)
    assert float((longer - most).abs().max()) > 1e-4
    assert max_positions_of(tiny_config("qwen2")) == 64 and max_positions_of(tiny_config("mamba")) is None


def encoded(text: Text, prompt: str) -> list[int]:
    return text.encode_prompts([prompt])[0]


def test_every_printable_character_is_a_token_and_comes_back() -> None:
    text, characters = preset(), PRINTABLE + "\n"
    token_ids = encoded(text, characters)
    assert len(token_ids) == len(set(token_ids)) == len(characters)
    assert text.decode([token_ids]) == [characters]
    for one in ("  two  spaces ", "don't , really !", "##x ##y", "a\n\nb"):
        assert text.decode([encoded(text, one)]) == [one]


def test_a_completion_ends_with_the_end_token() -> None:
    text = preset()
    ((*tokens, end),) = text.encode_completions(["12"])
    assert end == text.tokenizer.eos_token_id and text.end_ids == {end}
    assert tokens == encoded(text, "12")
    assert text.decode([[*tokens, end]]) == ["12"]
    assert text.pad_id not in {end, *tokens}


@pytest.mark.parametrize("chat", [False, True])
def test_texts_are_encoded_together_as_each_by_itself(checkpoint: Path, chat: bool) -> None:
    text = from_path(checkpoint)
    if not chat:
        text.tokenizer.chat_template = None
    texts = ["What is 1+1?", "a", "What is 1+1?", "a  longer — one, of several words\n" * 20]
    assert text.encode_prompts(texts) == [encoded(text, one) for one in texts]
    assert text.encode_completions([*texts, ""]) == [
        *(text.encode_completions([one])[0] for one in texts),
        [text.tokenizer.eos_token_id],
    ]
    assert text.encode_prompts([]) == text.encode_completions([]) == []


def test_a_system_prompt_is_the_first_turn(checkpoint: Path, snapshot: Snapshot) -> None:
    text = load_text(Model(path=str(checkpoint), system_prompt="Be brief."), weights=None)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.tokenizer.decode(encoded(text, "1+1?")) == expected
    with pytest.raises(RecipeError) as refusal:
        load_text(Model(preset="qwen2-tiny", system_prompt="Be brief."), weights=None)
    snapshot(refusal.value)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "nowhere"])
def test_end_tokens_are_those_of_the_network_that_transformers_builds(
    where: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "ends")
    if where != "generation_config.json":
        (folder / "generation_config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        ends = end_ids_of(from_path(folder))[1] if where == "config.json" else None
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    text = from_path(folder)
    network: Any = AutoModelForCausalLM.from_pretrained(folder)
    ends = network.generation_config.eos_token_id
    built = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    tokenizer: Any = text.tokenizer
    assert text.end_ids == built | {tokenizer.eos_token_id}
    assert len(text.end_ids) == (1 if where == "nowhere" else 2)


def test_without_a_pad_token_padding_is_an_end_token(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "no-pad")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    text = from_path(folder)
    assert text.tokenizer.pad_token_id is None and text.pad_id in text.end_ids


@pytest.mark.parametrize("broken", ["nowhere", "empty", "no tokenizer", "config"])
def test_a_text_that_does_not_load_is_one_line(broken: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    if broken != "nowhere":
        folder.mkdir()
    if broken in ("no tokenizer", "config"):
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    if broken == "no tokenizer":
        for path in folder.glob("*token*"):
            path.unlink()
    elif broken == "config":
        (folder / "config.json").write_text("{")
    with pytest.raises(RecipeError) as raised:
        from_path(folder)
    message = str(raised.value)
    assert message.startswith(f"model.path: got {str(folder)!r}") and "\n" not in message


def test_a_tokenizer_is_asked_by_one_thread_at_a_time() -> None:
    """As Rust's refuse it: `Already borrowed`."""

    class Alone:
        chat_template = eos_token_id = pad_token_id = None
        asked = False

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": self.answered([len(text)])}

        def decode(self, token_ids: list[int], **_: Any) -> str:
            return self.answered("text")

        def answered(self, answer: Any) -> Any:
            assert not self.asked
            self.asked = True
            time.sleep(0.002)
            self.asked = False
            return answer

    tokenizer: Any = Alone()
    text = Text(tokenizer=tokenizer, end_ids=frozenset(), max_positions=None)
    with ThreadPoolExecutor(3) as threads:
        asked: list[Future[Any]] = []
        for _ in range(10):
            asked.append(threads.submit(text.encode_prompts, ["1"]))
            asked.append(threads.submit(text.encode_completions, ["2"]))
            asked.append(threads.submit(text.decode, [[3]]))
        for one in asked:
            one.result()


@pytest.mark.parametrize("cleans", [False, True])
def test_texts_are_decoded_together_as_transformers_decodes_each(cleans: bool) -> None:
    text = preset()
    text.tokenizer.clean_up_tokenization_spaces = cleans
    end = text.tokenizer.eos_token_id
    said = [*text.encode_completions(["So , it is 2 .", "", "a  b"]), [end, end], [], encoded(text, "x ?")]
    each = [text.tokenizer.decode(one, skip_special_tokens=True) for one in said]
    assert text.decode(said) == each and (each[0] == "So, it is 2.") == cleans
    assert text.decode([]) == []


def test_a_tokenizer_that_takes_one_text_otherwise_is_asked_for_each() -> None:
    """CodeLlama's fills in the middle of one text, and of no list."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>", "<FILL_ME>"]
    vocabulary = {token: at for at, token in enumerate([*tokens, "\u2581", "a", "b", "c"])}
    tokenizer: Any = CodeLlamaTokenizer(vocab=vocabulary, merges=[])
    text = Text(tokenizer=tokenizer, end_ids=frozenset({2}), max_positions=None)
    texts = ["ab <FILL_ME> c", "abc"]
    each = [tokenizer(one)["input_ids"] for one in texts]
    assert text.encode_prompts(texts) == each and vocabulary["\u2581<PRE>"] in each[0]
    assert tokenizer(texts)["input_ids"] != each


def test_a_tokenizer_that_decodes_one_text_otherwise_is_asked_for_each() -> None:
    class Stripping(CharacterTokenizer):
        def decode(self, token_ids: Any, *_: Any, **settings: Any) -> Any:
            return str(super().decode(token_ids, **settings)).strip()

    rust = character_tokenizer().backend_tokenizer
    tokenizer = Stripping(tokenizer_object=rust, eos_token="<eos>")
    text = Text(tokenizer=tokenizer, end_ids=frozenset({1}), max_positions=None)
    assert text.decode(text.encode_completions([" a ", "b"])) == ["a", "b"]


def test_no_network_is_built(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.Module.__init__", None)
    folder = shutil.copytree(checkpoint, tmp_path / "text")
    (folder / "model.safetensors").unlink()
    assert from_path(folder).max_positions == 128
    assert load_text(Model(preset="qwen2.5-1.5b"), weights=None).max_positions == 32_768


def test_what_a_tokenizer_pads_and_cuts_by_itself_is_neither() -> None:
    text = preset()
    rust: Any = text.tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    rust.enable_padding(length=16, direction="left")
    rust.enable_truncation(5)
    assert list(map(len, text.encode_prompts(["a", "abcdefg"]))) == [1, 7]
