"""What the trainer has to know of a model family, read from its configuration and its modules.

A published model is more than weights: its logits may be scaled or soft-capped, its decoder may be one of
several towers. Nothing here is tried out; `checks` compares it with what the network itself computes.
"""

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from abrun.errors import RecipeError
from abrun.recipe.families import (
    BIASED_HEAD,
    ENCODER_DECODER,
    SAMPLING_ROUTER,
    SAMPLING_ROUTERS,
    SHARES_LAYERS,
)

# Fields of a (text) configuration that the head's logits are multiplied with, or divided by.
MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
# Where Granite divides by it.
MULTIPLIES_BY_LOGITS_SCALING = ("hyperclovax",)
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

# Names of parameters that are no matrices, whatever their shape: biases of all experts or heads, norms of
# each head, and a state-space layer's decay and skip.
NO_MATRIX = re.compile(r"(bias|[Nn]orm[^.]*\.(weight|scale)|(^|\.)(A_log|D))$")

# Families whose routers choose once, among probabilities (softmax) of all experts.
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
    layers: nn.ModuleList  # of the decoder that the head stands on
    head: nn.Linear  # without a bias
    logit_scale: float
    logit_softcap: float | None  # softcap(z) = logit_softcap * tanh(z / logit_softcap)


def facts_of(network: Any) -> Facts:
    """The facts of a transformers network. Raises RecipeError where the trainer cannot handle its family."""
    if network.config.is_encoder_decoder:
        raise refused(network, ENCODER_DECODER)
    config = network.config.get_text_config(decoder=True)
    if config.model_type in SAMPLING_ROUTERS:
        raise refused(network, SAMPLING_ROUTER)
    base = _base(network)
    return Facts(
        base=base,
        layers=_layers(network, base, config),
        head=_head(network),
        logit_scale=_logit_scale(config),
        logit_softcap=next((cap for name in SOFTCAPS if (cap := getattr(config, name, None))), None),
    )


def refused(network: nn.Module, why: str) -> RecipeError:
    """The error that says in one line why a network of this family cannot be trained."""
    kind = type(network).__name__.removeprefix("FSDP")
    return RecipeError(f"model: got {kind}, {why}; use a causal language model of another family")


def persistent_buffers(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that are not parameters, such as a router's correction bias."""
    # Not asked of `state_dict`, which wraps every parameter: this runs before every rollout.
    transient = {
        f"{path}.{name}".removeprefix(".")
        for path, module in network.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in network.named_buffers() if name not in transient)


def takes_weight_decay(name: str, parameter: Tensor) -> bool:
    """Return True for a parameter that AdamW decays: a matrix, and no bias or norm."""
    return parameter.ndim >= 2 and NO_MATRIX.search(name) is None


def cache_name(network: nn.Module) -> str:
    """What a network calls the keys and values of earlier tokens, among its arguments and its outputs."""
    return _cache_name(type(network))


@functools.cache
def _cache_name(kind: type[nn.Module]) -> str:
    """transformers 5.24 has another name for it than before, and warns of the old one."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def attends_to_all(config: Any) -> bool:
    """Return True if every layer's attention is full: each token to itself and to all before it."""
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None


def positions_of(config: Any) -> int | None:
    """How many tokens a sequence may have; None: no limit is known.

    LongRoPE (arXiv:2402.13753) rotates all tokens of a batch otherwise once one of its sequences is longer
    than the original positions: beyond these a token's logits would depend on the tokens after it.
    """
    config = config.get_text_config(decoder=True)
    rotations = getattr(config, "rope_parameters", None) or {}
    of_layers = [each for each in rotations.values() if isinstance(each, dict)]
    known = [
        getattr(config, "max_position_embeddings", None),
        *(
            each.get("original_max_position_embeddings")
            for each in (rotations, *of_layers)
            if each.get("rope_type") == "longrope"
        ),
    ]
    return min((positions for positions in known if isinstance(positions, int)), default=None)


def experts_of(network: nn.Module) -> list[Any]:
    """Each layer's experts, in order, where they are one module: each parameter is [num_experts, ...].

    Called with hidden states [N, H], the experts that each goes to [N, K], and their weights [N, K].
    """
    return [module for name, module in network.named_modules() if _are_experts(name, module)]


def routers_of(network: Any) -> list[Any]:
    """The routers of `experts_of`, where they choose among probabilities of all experts; else none.

    Called with hidden states, and `torch.topk` of the probabilities [T, E] inside is the choice.
    """
    if network.config.get_text_config(decoder=True).model_type not in SOFTMAX_ROUTERS:
        return []
    return [module for module in network.modules() if type(module).__name__.endswith("TopKRouter")]


def _are_experts(name: str, module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    return (
        name.endswith(".experts")
        and len(inspect.signature(module.forward).parameters) == 3
        and bool(own)
        and all(len(parameter) == count for parameter in own)
    )


def _base(network: Any) -> Any:
    # Llama 4 and Mllama name a prefix that only their multimodal wrappers have.
    base = network.base_model if network.base_model is not network else getattr(network, "model", None)
    if base is None:
        raise refused(network, "whose head and body are one module")
    return base


def _head(network: Any) -> nn.Linear:
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise refused(network, f"whose LM head is {type(head).__name__} and not one matrix")
    if head.bias is not None:
        raise refused(network, BIASED_HEAD)
    return head


def _layers(network: nn.Module, base: Any, config: Any) -> nn.ModuleList:
    """The decoder's repeated blocks: not a vision tower's, and not lists of smaller parts beside them."""
    count = getattr(config, "num_hidden_layers", None)
    layers = max(
        _outermost_lists(base.get_decoder()),
        key=lambda found: (len(found) == count, sum(p.numel() for p in found.parameters())),
        default=None,
    )
    if layers is None:
        raise refused(network, "which has no list of layers to shard")
    each = [parameter for layer in layers for parameter in layer.parameters()]
    if len(each) != len(set(each)):
        raise refused(network, SHARES_LAYERS)
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
