"""Models that a run, a backend or an engine refuses, as far as `config.json` shows it; needs no transformers.

The table of families is `families.toml`. `model`: fields of a Hugging Face configuration; a missing one
prevents nothing.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun.messages.numbers import listed
from abrun.recipe.policy import Dtensor, Megatron, Policy

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

# Families with the same structure: an embedding; layers of norms, self_attn (q_proj ... o_proj) and mlp
# (gate_proj, up_proj, down_proj, or experts); a norm and a head; no buffers but the rotary embedding's.
# Tensor parallelism supports these, and megatron-core's GPTModel computes the same; remaining differences are
# checked at loading.
PLAIN_DECODERS = ("llama", "qwen2", "qwen3", "qwen3_moe")
MEGATRON_DIVISIONS = (  # number of ranks, the model dimension that must be its multiple, what it counts
    ("tensor_parallel", "num_attention_heads", "attention heads"),
    ("tensor_parallel", "num_key_value_heads", "key and value heads"),
    ("tensor_parallel", "intermediate_size", "columns of its MLP"),
    ("pipeline_parallel", "num_hidden_layers", "layers"),
    ("expert_parallel", "num_experts", "experts"),
    ("expert_parallel", "num_local_experts", "experts"),  # name in transformers 5
)
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
    """Return why a model cannot use packing or context parallelism; None if nothing prevents it."""
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


def dtensor_misfit(model: Mapping[str, Any], settings: Dtensor) -> str | None:
    """Return why the dtensor backend cannot shard a model so; None if nothing prevents it."""
    size, experts = settings.tensor_parallel, settings.expert_parallel
    family = model.get("model_type")
    if size > 1 and family is not None and family not in PLAIN_DECODERS:
        return (
            f"policy.backend.tensor_parallel: got {size} with a {family} model, which has no tensor-parallel "
            f"plan; use 1, or a model of {listed(PLAIN_DECODERS)}"
        )
    if misfit := heads_misfit(model, size):
        return misfit
    number = model.get("num_experts") or model.get("num_local_experts")  # the latter in transformers 5
    if isinstance(number, int) and number % experts:
        return (
            f"policy.backend.expert_parallel: got {experts} with a model whose layers have {number} experts; "
            f"use a divisor of {number}"
        )
    return None


def vllm_misfit(model: Mapping[str, Any], size: int) -> str | None:
    """Return why vLLM cannot shard a model over `size` ranks; None if nothing prevents it."""
    field = "rollout.tensor_parallel"
    if misfit := heads_misfit(model, size, field):
        return misfit
    for name in ("intermediate_size", "moe_intermediate_size"):
        width = model.get(name)
        if isinstance(width, int) and width % size:
            return f"{field}: got {size} with {name} {width}; use a divisor of {width}"
    return None


def heads_misfit(
    model: Mapping[str, Any], size: int, field: str = "policy.backend.tensor_parallel"
) -> str | None:
    """Return why a model's attention heads cannot be sharded over `size` ranks; None if they can."""
    heads, shared = model.get("num_attention_heads"), model.get("num_key_value_heads")
    if not isinstance(heads, int) or not isinstance(shared, int) or shared < 1:
        return None
    if heads % size or (shared % size and size % shared):
        return (
            f"{field}: got {size} with {heads} attention heads and {shared} key-value heads; use a divisor "
            f"of {heads} that divides {shared} or is a multiple of it"
        )
    return None


def megatron_misfit(model: Mapping[str, Any], settings: Megatron) -> str | None:
    """Return why megatron-core cannot build and shard a model so; None if nothing prevents it."""
    family, experts = model.get("model_type"), settings.expert_parallel
    got = f"policy.backend.type: got 'megatron' with a {family} model"
    if family is not None and family not in PLAIN_DECODERS:
        decoders = listed(PLAIN_DECODERS)
        return f"{got}, which it does not support; use type: dtensor, or a model of {decoders}"
    if (obstacle := attention_obstacle(model)) is not None:
        return f"{got}, {obstacle}, but it only supports full attention; use type: dtensor"
    if family == "qwen3_moe" and settings.tensor_parallel > 1 and experts == 1:
        return (
            f"policy.backend.expert_parallel: got 1 with tensor_parallel {settings.tensor_parallel}, but "
            "experts are not sharded by tensor parallelism; use 2 or more, or tensor_parallel: 1"
        )
    if family not in (None, "qwen3_moe") and experts > 1:
        why = f"with a {family} model, which has no experts"
        return f"policy.backend.expert_parallel: got {experts} {why}; use 1"
    for name, dimension, units in MEGATRON_DIVISIONS:
        ranks, size = getattr(settings, name), model.get(dimension)
        if isinstance(size, int) and size % ranks:
            field = f"policy.backend.{name}"
            return f"{field}: got {ranks} with a model of {size} {units}; use a divisor of {size}"
    return None
