"""Facts about a model family that the trainer needs, read from its configuration and its modules.

A published model is more than weights: its logits may be scaled or soft-capped, its decoder may be one of
several towers. This module only reads; `checks` compares the facts with what the network computes.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from abrun.errors import RecipeError
from abrun.recipe.families import (
    ENCODER_DECODER,
    HEAD_BIASED,
    LAYERS_SHARED,
    ROUTER_SAMPLES,
    SAMPLING_ROUTERS,
)

# Fields of a text configuration that multiply or divide the head's logits.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
# Families that multiply by logits_scaling, although Granite divides by it.
MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# Parameters that are not matrices, whatever their shape: biases of all experts or heads, norms of each head,
# and a state-space layer's decay and skip.
NO_MATRIX = re.compile(r"(bias|[Nn]orm[^.]*\.(weight|scale)|(^|\.)(A_log|D))$")

# Families whose routers take a single top-k of the softmax over all experts.
SOFTMAX_ROUTERS = (
    "flex_olmo",
    "mellum",
    "minimax",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The parts of a causal language model; its logits are softcap(logit_scale * hidden @ head.weight.T)."""

    base: nn.Module  # yields `last_hidden_state`
    layers: nn.ModuleList  # of the decoder below the head
    head: nn.Linear  # without a bias
    logit_scale: float
    logit_softcap: float | None  # softcap(z) = logit_softcap * tanh(z / logit_softcap)


def facts_of(network: Any) -> Facts:
    """Return the facts of a transformers network. Raises RecipeError for a family that cannot be trained."""
    if network.config.is_encoder_decoder:
        raise refused(network, ENCODER_DECODER)
    config = network.config.get_text_config(decoder=True)
    if config.model_type in SAMPLING_ROUTERS:
        raise refused(network, ROUTER_SAMPLES)
    base = _base(network)
    return Facts(
        base=base,
        layers=_layers(network, base, config),
        head=_head(network),
        logit_scale=_logit_scale(config),
        logit_softcap=next((cap for name in SOFTCAPS if (cap := getattr(config, name, None))), None),
    )


def refused(network: nn.Module, obstacle: str) -> RecipeError:
    """Return the error, one line, for a network of a family that cannot be trained."""
    kind = type(network).__name__.removeprefix("FSDP")
    return RecipeError(f"model: got {kind}, {obstacle}; use a causal language model of another family")


def persistent_buffers(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint that are not parameters, such as a router's correction bias."""
    # `state_dict` would wrap every parameter, which is too slow before every rollout.
    transient = {
        f"{path}.{name}".removeprefix(".")
        for path, module in network.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in network.named_buffers() if name not in transient)


def takes_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return True for a parameter that AdamW decays: a matrix that is neither bias nor norm."""
    return parameter.ndim >= 2 and NO_MATRIX.search(name) is None


def cache_name(network: nn.Module) -> str:
    """Return the network's name for the key-value cache, an argument and an output of its forward pass.

    transformers 5.24 renamed it, and warns about the old name.
    """
    return "cache" if "cache" in inspect.signature(type(network).forward).parameters else "past_key_values"


def attends_to_all(config: Any) -> bool:
    """Return True if every layer has full causal attention: no sliding window, no linear attention."""
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def max_positions_of(config: Any) -> int | None:
    """Return the largest number of tokens of a sequence; None if no limit is known.

    LongRoPE (arXiv:2402.13753) changes the rotation of a whole batch once one of its sequences exceeds the
    original positions: beyond these, a token's logits would depend on later tokens.
    """
    config = config.get_text_config(decoder=True)
    rotations = getattr(config, "rope_parameters", None) or {}
    layer_rotations = [rotation for rotation in rotations.values() if isinstance(rotation, dict)]
    limits = [
        getattr(config, "max_position_embeddings", None),
        *(
            rotation.get("original_max_position_embeddings")
            for rotation in (rotations, *layer_rotations)
            if rotation.get("rope_type") == "longrope"
        ),
    ]
    return min((positions for positions in limits if isinstance(positions, int)), default=None)


def experts_of(network: nn.Module) -> list[Any]:
    """Return each layer's experts, in order, if they are one module: each parameter is [num_experts, ...].

    The module is called with hidden states [N, H], the experts of each token [N, K], and their weights [N,
    K].
    """
    return [module for name, module in network.named_modules() if _are_experts(name, module)]


def routers_of(network: Any) -> list[Any]:
    """Return the routers of `experts_of` if they choose by the probabilities of all experts; else none.

    A router is called with hidden states; it chooses by `torch.topk` of the probabilities [T, E].
    """
    if network.config.get_text_config(decoder=True).model_type not in SOFTMAX_ROUTERS:
        return []
    return [module for module in network.modules() if type(module).__name__.endswith("TopKRouter")]


def _are_experts(name: str, module: nn.Module) -> bool:
    count, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    return (
        name.endswith(".experts")
        and len(inspect.signature(module.forward).parameters) == 3
        and bool(parameters)
        and all(len(parameter) == count for parameter in parameters)
    )


def _base(network: Any) -> Any:
    # Llama 4 and Mllama declare a prefix that only their multimodal wrappers have.
    base = network.base_model if network.base_model is not network else getattr(network, "model", None)
    if base is None:
        raise refused(network, "whose head and body are one module")
    return base


def _head(network: Any) -> nn.Linear:
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise refused(network, f"whose LM head is {type(head).__name__} and not one matrix")
    if head.bias is not None:
        raise refused(network, HEAD_BIASED)
    return head


def _layers(network: nn.Module, base: Any, config: Any) -> nn.ModuleList:
    """Return the decoder's repeated blocks, not those of a vision tower nor lists of smaller modules."""
    count = getattr(config, "num_hidden_layers", None)
    layers = max(
        _outermost_lists(base.get_decoder()),
        key=lambda candidate: (len(candidate) == count, sum(p.numel() for p in candidate.parameters())),
        default=None,
    )
    if layers is None:
        raise refused(network, "which has no list of layers to shard")
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    if len(parameters) != len(set(parameters)):
        raise refused(network, LAYERS_SHARED)
    return layers


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _logit_scale(config: Any) -> float:
    scale = 1.0
    for name in (*MULTIPLIERS, *DIVISORS):
        value = getattr(config, name, None)
        if value is None:
            continue
        divides = name in DIVISORS and config.model_type not in MULTIPLIES_BY_LOGITS_SCALING
        scale = scale / value if divides else scale * value
    return scale
