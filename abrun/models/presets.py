"""Architectures with random weights, and the tokenizer that reads for all of them."""

import string
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

# Every preset reads with the character tokenizer below; a larger vocabulary has tokens that no text contains.
# `model_type` is transformers' name of the family, qwen2 where none is given.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2-tiny": {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "qwen3-moe-tiny": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
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


def preset_config(name: str) -> PreTrainedConfig:
    """The configuration of a preset's network."""
    tokenizer = character_tokenizer()
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings = {"model_type": "qwen2", "vocab_size": len(tokenizer)} | ARCHITECTURES[name] | ids
    return AutoConfig.for_model(**settings, bos_token_id=None)
