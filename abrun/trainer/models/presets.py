"""Configurations of the presets, which have random weights, and the tokenizer that all of them share."""

import string
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from abrun.recipe.policy import Model

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


class CharacterTokenizer(PreTrainedTokenizerFast):
    """A tokenizer with one token for each printable ASCII character.

    It is a class of its own so that saved checkpoints name it.
    """


def character_tokenizer() -> CharacterTokenizer:
    """Return the tokenizer of every preset, which accepts any plain text."""
    characters = [c for c in string.printable if c.isprintable() or c == "\n"]
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return CharacterTokenizer(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def preset_config(model: Model) -> PreTrainedConfig:
    """Return the configuration of a preset's network."""
    assert model.preset is not None
    tokenizer = character_tokenizer()
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    settings: dict[str, Any] = {"vocab_size": len(tokenizer)} | model.architecture | ids
    return AutoConfig.for_model(**settings, bos_token_id=None)
