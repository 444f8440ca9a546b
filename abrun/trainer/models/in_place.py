"""Decoding from a key-value cache that is allocated once and filled in place.

Every step runs the same operators on the same memory, so that a CUDA graph can capture it, and nothing is
copied as a sequence grows. Letters: B sequences, K slots of the cache, D head dimension.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from abrun.trainer.models.families import attends_to_all

ATTENTION = "abrun_in_place"
MULTIPLE = 16  # the number of slots is a multiple of this, which GPU attention kernels take without a copy


class InPlaceCache(Cache):
    """The cache, and the attention mask of a step. A row's next token goes into slot `cursor`."""

    def __init__(
        self,
        cache: Cache,  # its layers are moved one by one, so that only one is in memory twice
        real: Tensor,  # [B, filled] bool: True for tokens that are not padding
        room: int,  # number of tokens to come
    ) -> None:
        assert isinstance(cache, InPlaceCache) or holds_all_tokens(cache)
        filled = real.shape[1]
        places = -(-(filled + room) // MULTIPLE) * MULTIPLE
        self.cursor = torch.tensor([filled], device=real.device)
        layers: list[Any] = []
        while cache.layers:
            layers.append(_Layer(cache.layers.pop(0), filled, places, self.cursor))
        super().__init__(layers=layers)
        # [B, 1, 1, K], additive: transformers uses a mask of four dimensions unchanged.
        self.mask = torch.full(
            (len(real), 1, 1, places), float("-inf"), dtype=layers[0].keys.dtype, device=real.device
        )
        self.mask[:, 0, 0, :filled].masked_fill_(real, 0.0)

    def take(self) -> None:
        """Unmask the slot of the next tokens, which they will fill."""
        self.mask.index_fill_(3, self.cursor, 0.0)

    def advance(self) -> None:
        self.cursor += 1

    def grown(self, room: int) -> "InPlaceCache":
        """Return a cache with slots for `room` more tokens, which replaces this one."""
        return InPlaceCache(self, self.mask[:, 0, 0, : int(self.cursor)] == 0, room)


class _Layer(DynamicLayer):
    """Keys and values [B, key heads, K, D]; empty slots are 0, since masked values are still multiplied."""

    def __init__(self, layer: Any, filled: int, places: int, cursor: Tensor) -> None:
        super().__init__()
        self.keys, self.values = (_with_room(old, filled, places) for old in (layer.keys, layer.values))
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True
        self._cursor = cursor

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:  # [B, key heads, 1, D] each
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._cursor, key_states)
        self.values.index_copy_(2, self._cursor, value_states)
        return self.keys, self.values


def _with_room(states: Tensor, filled: int, places: int) -> Tensor:
    roomy = states.new_zeros(*states.shape[:2], places, states.shape[3])
    roomy[:, :, :filled] = states[:, :, :filled]
    return roomy


def supports_in_place_attention(network: Any) -> bool:
    """Return True if `attention_in_place` can replace the network's attention."""
    config = network.config
    return config._attn_implementation == "sdpa" and not config.sub_configs and attends_to_all(config)


def holds_all_tokens(cache: Any) -> bool:
    """Return True if each layer of a cache holds keys and values of all tokens, as `InPlaceCache` needs."""
    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
    )


@contextlib.contextmanager
def attention_in_place(network: Any) -> Iterator[None]:
    """Use `_attention` inside: the stock attention, except for how heads of a single token share keys."""
    implementation = network.config._attn_implementation
    network.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        network.set_attn_implementation(implementation)


def _attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, key heads, K, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:  # [B, S, heads, D]
    """Attend as transformers does; for a single token, treat heads that share keys as several queries.

    Some versions of the stock attention repeat keys and values for each of these heads, so that a decoding
    step reads several times the memory.
    """
    (rows, heads, length, size), key_heads = query.shape, key.shape[1]
    if length > 1 or heads == key_heads or settings.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    query = query.reshape(rows, key_heads, heads // key_heads, size)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
