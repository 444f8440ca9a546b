"""Models: presets with random weights, and Hugging Face checkpoints (a local folder or a hub name)."""

from abrun.models.checks import check_decoding, check_network
from abrun.models.content import content_of, sketch_of, weights_hash
from abrun.models.families import (
    Facts,
    attends_to_all,
    cache_name,
    experts_of,
    facts_of,
    max_positions_of,
    persistent_buffers,
    routers_of,
    takes_weight_decay,
)
from abrun.models.in_place import InPlaceCache, attention_in_place, holds_all_tokens
from abrun.models.parts import read_slice, small_twin
from abrun.models.presets import EOS, PAD, UNKNOWN, CharacterTokenizer, character_tokenizer
from abrun.models.text import Text, load_text
from abrun.models.weights import config_of, load_network, open_network, published, save_network
from abrun.recipe.presets import ARCHITECTURES

__all__ = [
    "ARCHITECTURES",
    "EOS",
    "PAD",
    "UNKNOWN",
    "CharacterTokenizer",
    "Facts",
    "InPlaceCache",
    "Text",
    "attends_to_all",
    "attention_in_place",
    "cache_name",
    "character_tokenizer",
    "check_decoding",
    "check_network",
    "config_of",
    "content_of",
    "experts_of",
    "facts_of",
    "holds_all_tokens",
    "load_network",
    "load_text",
    "max_positions_of",
    "open_network",
    "persistent_buffers",
    "published",
    "read_slice",
    "routers_of",
    "save_network",
    "sketch_of",
    "small_twin",
    "takes_weight_decay",
    "weights_hash",
]
