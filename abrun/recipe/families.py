"""Model families: what `config.json` alone shows that a run would be refused for; read without transformers.

The table is `families.toml`.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.reasons import Code, Reason
from abrun.recipe.policy import Policy

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MULTIMODAL, ENCODER_DECODERS, BIASED_HEADS, STREAMLESS, MIXED, WINDOWED = (
    frozenset(_TABLE[name].split())
    for name in ("multimodal", "encoder_decoders", "biased_heads", "streamless", "mixed", "windowed")
)
# Training draws experts at random, by the gaps between scores that their evaluation depends on too.
SAMPLING_ROUTERS = frozenset({"phimoe"})
SHARED_LAYERS = frozenset({"zamba", "zamba2"})

NO_CAUSAL_LM = "a multimodal model that transformers has no causal LM for"
ENCODER_DECODER = "an encoder-decoder model"
BIASED_HEAD = "an LM head with a bias, which the log-prob kernels do not take"
SAMPLING_ROUTER = "whose router samples experts in training"
SHARES_LAYERS = "whose layers share weights, so that they cannot be sharded one by one"

# Kinds of layers, as `layer_types` names them, that mix sequences or miss some of their tokens.
NOT_FULL = re.compile(r"sliding|chunk|linear|conv|mamba|recurrent|compress|index|hybrid")


def family_refusal(model: Mapping[str, Any]) -> str | None:
    """Return why a model of this configuration (`config.json`) cannot be trained; None if nothing says so."""
    family = model.get("model_type")
    if not isinstance(family, str):
        return None
    reasons = {
        ENCODER_DECODER: ENCODER_DECODERS,
        NO_CAUSAL_LM: MULTIMODAL,
        BIASED_HEAD: BIASED_HEADS,
        SAMPLING_ROUTER: SAMPLING_ROUTERS,
        SHARES_LAYERS: SHARED_LAYERS,
    }
    return next((reason for reason, families in reasons.items() if family in families), None)


def stream_setting(policy: Policy) -> tuple[str, str] | None:
    """Return the setting that puts sequences into streams, as messages name it, and its alternative."""
    ranks = policy.backend.context_parallel
    if policy.packing:
        return "policy.packing: got true", "packing: false"
    if ranks > 1:
        return f"policy.backend.context_parallel: got {ranks}", "context_parallel: 1"
    return None


def stream_misfit(model: Mapping[str, Any], policy: Policy) -> Reason | None:
    """Return why a model cannot be packed or spread over a context; None if nothing says so.

    `model`: fields of a Hugging Face configuration; those that it lacks are not looked at.
    """
    setting, reason = stream_setting(policy), attention_obstacle(model)
    if setting is None or reason is None:
        return None
    asked, instead = setting
    return Code.STREAM_NEEDS_FULL_ATTENTION(
        setting=asked, family=model.get("model_type"), obstacle=reason, instead=instead
    )


def attention_obstacle(model: Mapping[str, Any]) -> str | None:
    """Return what a model has besides full, causal attention in every layer; None if nothing says so."""
    nested = model.get("text_config")
    text = nested if isinstance(nested, Mapping) else model
    families = {name for name in (model.get("model_type"), text.get("model_type")) if isinstance(name, str)}
    if families & STREAMLESS:
        return "whose layers do not take a stream of sequences"
    layer_types, window = text.get("layer_types"), text.get("sliding_window")
    if isinstance(layer_types, list):
        kinds = sorted({str(kind) for kind in layer_types if NOT_FULL.search(str(kind))})
        return f"which has layers of {', '.join(kinds)}" if kinds else None
    no_window = "sliding_window" in text and window is None
    if families & MIXED and not no_window:
        return "not all of whose layers have full attention"
    if isinstance(window, int) and window and _uses_window(text, families):
        return f"whose layers attend to windows of {window} tokens"
    return None


def _uses_window(text: Mapping[str, Any], families: set[str]) -> bool:
    if text.get("use_sliding_window") is not True:
        return bool(families & WINDOWED) and text.get("use_sliding_window") is None
    first, layers = text.get("max_window_layers"), text.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)
