"""Models: presets with random weights, and Hugging Face checkpoints (a local folder or a hub name)."""

from abrun.recipe.policy import ARCHITECTURES
from abrun.trainer.models.checks import (
    InPlaceCache,
    attention_in_place,
    check_decoding,
    check_network,
    holds_all_tokens,
)
from abrun.trainer.models.families import (
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
from abrun.trainer.models.sources import EOS, PAD, UNKNOWN, CharacterTokenizer, character_tokenizer
from abrun.trainer.models.text import Text, load_text
from abrun.trainer.models.weights import (
    config_of,
    content_of,
    load_network,
    open_network,
    published,
    read_slice,
    save_network,
    sketch_of,
    small_twin,
    weights_hash,
)

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
