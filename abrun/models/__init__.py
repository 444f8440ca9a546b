"""Models: presets with random weights, and Hugging Face checkpoints (a local folder or a hub name)."""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from abrun.errors import RecipeError
from abrun.recipe import Model

# Architectures, with random weights. Every preset reads with the character tokenizer below; a larger
# vocabulary has tokens that no text contains.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen2-tiny": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    # As much LM head for its body as a real small model has: what memory-profile can show on a laptop.
    "qwen2-wide-vocab": {
        "vocab_size": 32_768,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    # The shape of Qwen2.5-1.5B, for measurements on a GPU without its weights.
    "qwen2.5-1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
    },
}
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A causal language model in float32 on the CPU, and its tokenizer."""

    network: nn.Module  # a transformers `...ForCausalLM`
    tokenizer: PreTrainedTokenizerBase

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a completion: the tokenizer's and those of the checkpoint's generation config."""
        configured = getattr(getattr(self.network, "generation_config", None), "eos_token_id", None)
        ids: list[Any] = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    @property
    def pad_id(self) -> int:
        """Fills up batches; never attended to and never a target."""
        pad: Any = self.tokenizer.pad_token_id
        return pad if pad is not None else min(self.end_ids, default=0)

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt, as a user's turn where the tokenizer has a chat template; at least one.

        Raises RecipeError where there is none: nothing would stand before the completion's first token.
        """
        if self.tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            encoded: Any = self.tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_dict=True
            )
        else:
            encoded = self.tokenizer(prompt)
        if not encoded["input_ids"]:
            raise RecipeError(f"task: got the prompt {prompt!r}, which has no tokens; remove or correct it")
        return list(encoded["input_ids"])

    def encode_completion(self, completion: str) -> list[int]:
        """Token ids of a completion, with the token that ends it."""
        token_ids = list(self.tokenizer(completion, add_special_tokens=False)["input_ids"])  # pyright: ignore
        end = self.tokenizer.eos_token_id
        return [*token_ids, end] if isinstance(end, int) else token_ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of a completion, without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def save(self, directory: Path, weights: dict[str, torch.Tensor]) -> None:
        """Write `weights`, configuration and tokenizer as a Hugging Face checkpoint (safetensors)."""
        self.network.save_pretrained(directory, state_dict=weights)  # pyright: ignore[reportCallIssue]
        self.tokenizer.save_pretrained(directory)


def load_model(config: Model, *, weights: Path | None, seed: int) -> LanguageModel:
    """The model of a recipe. `weights`, a checkpoint folder, replaces the recipe's own initial weights.

    A preset without `weights` is initialised randomly from `seed`, alike on every rank.
    Raises RecipeError where there is no such checkpoint.
    """
    transformers_logging.disable_progress_bar()  # stdout.log is read by people
    source = str(weights) if weights else config.path
    if source is None:
        assert config.preset is not None
        return _preset(config.preset, seed)
    try:
        tokenizer = _load_tokenizer(source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
        )
        network, found = loaded
        if found["missing_keys"]:  # transformers fills them with random numbers, and warns
            raise ValueError(f"its weights lack {', '.join(sorted(found['missing_keys']))}")
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecipeError(
            f"model.path: got {source!r}, which does not load: {reason}; "
            "give a folder with config.json, safetensors weights and a tokenizer, or a hub name"
        ) from error
    return LanguageModel(network=_without_dropout(network), tokenizer=tokenizer)


class CharacterTokenizer(PreTrainedTokenizerFast):
    """One token for each printable ASCII character.

    A class of its own only for its name in saved checkpoints.
    """


def character_tokenizer() -> CharacterTokenizer:
    """The tokenizer of every preset: it reads any plain text."""
    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return CharacterTokenizer(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def _load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    # AutoTokenizer would put Qwen2's own splitting of words around the vocabulary of a saved preset.
    saved = get_tokenizer_config(source).get("tokenizer_class")
    kind = CharacterTokenizer if saved == CharacterTokenizer.__name__ else AutoTokenizer
    tokenizer = kind.from_pretrained(source)
    if not tokenizer("1", add_special_tokens=False)["input_ids"]:  # what transformers makes of missing files
        raise ValueError("its tokenizer knows no tokens")
    return tokenizer


def _preset(name: str, seed: int) -> LanguageModel:
    tokenizer = character_tokenizer()
    architecture: dict[str, Any] = {"vocab_size": len(tokenizer)} | PRESETS[name]
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(**architecture, **ids, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen2ForCausalLM(config)
    return LanguageModel(network=_without_dropout(network), tokenizer=tokenizer)


def _without_dropout(network: nn.Module) -> nn.Module:
    """Dropout would make the trainer's log-probs another distribution than the sampler's."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0  # pyright: ignore[reportArgumentType]
    return network
