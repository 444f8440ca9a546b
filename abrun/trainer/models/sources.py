"""Locations of a model's files, and the errors for models that do not load."""

import contextlib
import json
import string
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from abrun.errors import RecipeError
from abrun.recipe.families import family_refusal
from abrun.recipe.policy import Model


def source_of(model: Model, weights: Path | None) -> str | None:
    """Return a checkpoint folder or a hub name; None for a preset with random weights.

    `weights`, a checkpoint folder, replaces the recipe's own initial weights.
    """
    return str(weights) if weights else model.path


@contextlib.contextmanager
def loading(source: str) -> Iterator[None]:
    """Turn any exception raised inside into a RecipeError that names `source`."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:  # config.json chooses the third-party code that runs, and so what it raises
        reason = textwrap.shorten(str(error), 200, placeholder=" ...") or type(error).__name__
        raise RecipeError(
            f"model.path: got {source!r}, which does not load: {reason}; "
            "give a folder with config.json, safetensors weights and a tokenizer, or a hub name"
        ) from error


def read_config(source: str) -> Any:
    """Return a checkpoint's configuration. Raises RecipeError if it does not load or is not a causal LM."""
    with loading(source):
        config = AutoConfig.from_pretrained(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        obstacle = (
            family_refusal({"model_type": config.model_type}) or "which transformers has no causal LM for"
        )
        raise RecipeError(
            f"model.path: got {source!r} of type {config.model_type}, {obstacle}; use a causal language model"
        )
    return config


def weight_files(source: str) -> list[Path]:
    """Return the safetensors files of a folder or a hub name; empty if there are none."""
    single_file = checkpoint_file(source, SAFE_WEIGHTS_NAME)
    if single_file is not None:
        return [single_file]
    index = checkpoint_file(source, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return [path for name in names if (path := checkpoint_file(source, name)) is not None]


def checkpoint_file(source: str, name: str) -> Path | None:
    """Return the local path of a file of a folder or a hub name; None if it does not exist."""
    try:
        path = cached_file(source, name)
    except OSError:
        return None
    return None if path is None else Path(path)


# Configurations of the presets, which have random weights, and the tokenizer that all of them share.

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
