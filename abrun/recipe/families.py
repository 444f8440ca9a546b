"""Model families that a run refuses, as far as `config.json` shows it; needs no transformers.

The table is `families.toml`.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.messages.texts import listed
from abrun.recipe.policy import Policy

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MULTIMODAL, ENCODER_DECODERS, BIASED_HEADS, STREAMLESS, MIXED, WINDOWED = (
    frozenset(_TABLE[name].split())
    for name in ("multimodal", "encoder_decoders", "biased_heads", "streamless", "mixed", "windowed")
)
# In training their routers sample experts at random; the score gaps involved matter in evaluation, too.
SAMPLING_ROUTERS = frozenset({"phimoe"})
SHARED_LAYERS = frozenset({"zamba", "zamba2"})

# Obstacles that a configuration shows here, and a network at loading
ENCODER_DECODER = "an encoder-decoder model"
HEAD_BIASED = "an LM head with a bias, which the log-prob kernels do not support"
ROUTER_SAMPLES = "whose router samples experts in training"
LAYERS_SHARED = "whose layers share weights, so that they cannot be sharded one by one"

# Names in `layer_types` of layers that mix packed sequences or do not attend to all tokens.
PARTIAL_LAYER_PATTERN = re.compile(r"sliding|chunk|linear|conv|mamba|recurrent|compress|index|hybrid")


def family_refusal(model: Mapping[str, Any]) -> str | None:
    """Return why a model with this `config.json` cannot be trained; None if nothing prevents it."""
    family = model.get("model_type")
    if not isinstance(family, str):
        return None
    families_by_obstacle = {
        ENCODER_DECODER: ENCODER_DECODERS,
        "a multimodal model for which transformers has no causal LM": MULTIMODAL,
        HEAD_BIASED: BIASED_HEADS,
        ROUTER_SAMPLES: SAMPLING_ROUTERS,
        LAYERS_SHARED: SHARED_LAYERS,
    }
    return next((why for why, families in families_by_obstacle.items() if family in families), None)


def stream_setting(policy: Policy) -> tuple[str, str] | None:
    """Return the setting that concatenates sequences into one stream, and the setting that avoids it."""
    ranks = policy.backend.context_parallel
    if policy.packing:
        return "policy.packing: got true", "packing: false"
    if ranks > 1:
        return f"policy.backend.context_parallel: got {ranks}", "context_parallel: 1"
    return None


def stream_misfit(model: Mapping[str, Any], policy: Policy) -> str | None:
    """Return why a model cannot use packing or context parallelism; None if nothing prevents it.

    `model`: fields of a Hugging Face configuration; missing fields are not checked.
    """
    setting, obstacle = stream_setting(policy), attention_obstacle(model)
    if setting is None or obstacle is None:
        return None
    field_and_value, instead = setting
    return f"{field_and_value} with a {model.get('model_type')} model, {obstacle}; use {instead}"


def attention_obstacle(model: Mapping[str, Any]) -> str | None:
    """Return why a model lacks full causal attention in every layer; None if it seems to have it."""
    nested = model.get("text_config")
    text = nested if isinstance(nested, Mapping) else model
    families = {name for name in (model.get("model_type"), text.get("model_type")) if isinstance(name, str)}
    if families & STREAMLESS:
        return "whose layers do not support packed sequences"
    layer_types, window = text.get("layer_types"), text.get("sliding_window")
    if isinstance(layer_types, list):
        kinds = sorted({str(kind) for kind in layer_types if PARTIAL_LAYER_PATTERN.search(str(kind))})
        return f"which has layers of {listed(kinds)}" if kinds else None
    no_window = "sliding_window" in text and window is None
    if families & MIXED and not no_window:
        return "some of whose layers lack full attention"
    if isinstance(window, int) and window and _uses_window(text, families):
        return f"whose layers attend to windows of {window} tokens"
    return None


def _uses_window(text: Mapping[str, Any], families: set[str]) -> bool:
    if text.get("use_sliding_window") is not True:
        return bool(families & WINDOWED) and text.get("use_sliding_window") is None
    first_windowed_layer, layers = text.get("max_window_layers"), text.get("num_hidden_layers")
    return not (
        isinstance(first_windowed_layer, int) and isinstance(layers, int) and first_windowed_layer >= layers
    )
