"""Self-checks of a network on a few tokens, before it is trained and sampled from."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from abrun.errors import RecipeError
from abrun.trainer.models.families import Facts, attends_to_all, cache_name, refused

NUM_TOKENS, NUM_COMMON = 8, 5  # tokens of each of two rows; tokens of their common beginning
PROMPT_LENGTHS, NUM_STEPS = (5, 3), 3  # prompt length of each row; decoding steps
# Relative to the largest logit: far above float32 rounding, far below the effect of dropout or another scale.
TOLERANCE = 1e-4
NOISE = re.compile(r"drop|jitter")
# Logits are scaled so that the largest has this value: a soft cap then matters even with random weights.
LARGEST_LOGIT = 30.0
REPEATS = 4  # forward passes of a network that draws random numbers


def check_network(network: nn.Module, facts: Facts) -> None:
    """Disable noise in training, and compare the trainer's logits with the network's own.

    The trainer computes logits in training mode, from `facts`. They must equal those of the network's forward
    pass in evaluation mode, and a token's logits must not depend on later tokens. Leaves weights, buffers,
    modes and the random-number generator unchanged. Raises RecipeError.
    """
    if _merges_weights_on_export(network):
        raise refused(network, "whose checkpoints hold several of its weights as one")
    tokens = draw_plain_tokens(network, facts)
    with restored_afterwards(network), torch.no_grad():
        expected, gain = _network_logits(network, facts, tokens)
        if not expected.isfinite().all():
            raise refused(network, "whose logits are not finite")
        disable_noise(network)
        network.train()
        state = torch.get_rng_state()
        logits = _trainer_logits(network, facts, tokens, gain)
        drew = not torch.equal(state, torch.get_rng_state())
        repeated_logits = [
            _trainer_logits(network, facts, tokens, gain) for _ in range(REPEATS if drew else 0)
        ]
        if not agree(logits, expected, *repeated_logits):
            network.eval()
            evaluated = _trainer_logits(network, facts, tokens, gain)
            if agree(evaluated, expected):
                raise refused(
                    network,
                    "whose log-probs in training mode are not those of evaluation mode: it has dropout or a "
                    "sampling router that cannot be turned off",
                )
            raise refused(
                network,
                f"whose own logits are not those of its last hidden states, its head, logit_scale "
                f"{facts.logit_scale:g} and logit_softcap {facts.logit_softcap}",
            )
    logits_of_row_0, logits_of_row_1 = logits[:, :NUM_COMMON]
    if not agree(logits_of_row_0, logits_of_row_1):
        raise refused(network, "where a token's logits depend on the tokens after it")


def _merges_weights_on_export(network: Any) -> bool:
    """Return True if checkpoints hold several weights as one: these cannot be published one by one."""
    conversions = getattr(network, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(network, add_legacy=False)
    return any(
        isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1
        for conversion in conversions
    )


def check_decoding(network: nn.Module, facts: Facts) -> bool:
    """Compare the torch engine's decoding, from a cache after left-padded prompts, with a single pass.

    Leaves the network unchanged. Returns True if a cache filled in place gives the same hidden states. Raises
    RecipeError if decoding differs.
    """
    tokens, reason = draw_plain_tokens(network, facts), "its hidden states differ from those of one pass"
    with restored_afterwards(network), torch.no_grad():
        network.eval()
        hidden = _forward(network, facts.base, tokens).last_hidden_state
        expected = [row[n - 1 : n - 1 + NUM_STEPS] for row, n in zip(hidden, PROMPT_LENGTHS, strict=True)]
        try:
            if agree(_decode(facts.base, tokens), torch.stack(expected)):
                return _decodes_in_place(network, facts, tokens, torch.stack(expected))
        except Exception as error:  # as in _called
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
    raise RecipeError(
        f"rollout.engine: got 'torch' with {type(network).__name__}, which it cannot decode from a cache: "
        f"{reason}; use another engine, or a causal language model of another family"
    )


def _decodes_in_place(network: Any, facts: Facts, tokens: Tensor, expected: Tensor) -> bool:
    """Return True if `attention_in_place` can replace the network's attention, and it decodes as expected."""
    config = network.config
    if config._attn_implementation != "sdpa" or config.sub_configs or not attends_to_all(config):
        return False
    with attention_in_place(network):
        try:
            return agree(_decode(facts.base, tokens, in_place=True), expected)
        except Exception:  # as in _called: the family is decoded as it is published
            return False


def _decode(base: nn.Module, tokens: Tensor, *, in_place: bool = False) -> Tensor:  # [2, NUM_STEPS, H]
    """Return the last hidden state of left-padded prompts and of the tokens after them."""
    width = max(PROMPT_LENGTHS)
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in PROMPT_LENGTHS])
    inputs = torch.stack(
        [row[:width].roll(width - length) for row, length in zip(tokens, PROMPT_LENGTHS, strict=True)]
    )
    name = cache_name(base)
    cache: Any = None
    hidden = []
    for step in range(NUM_STEPS):
        if in_place and step:
            cache = cache.grown(1) if step > 1 else InPlaceCache(cache, mask[:, :-1].bool(), 1)
            cache.take()
        output = base(
            input_ids=inputs,
            attention_mask=cache.mask if in_place and step else mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0)[:, -inputs.shape[1] :],
            **{name: cache},
            use_cache=True,
        )
        cache = getattr(output, name)
        if in_place and step:
            cache.advance()
        hidden.append(output.last_hidden_state[:, -1])
        inputs = torch.stack([row[n + step] for row, n in zip(tokens, PROMPT_LENGTHS, strict=True)])[:, None]
        mask = nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(hidden, dim=1)


def disable_noise(network: Any) -> None:
    """Turn off dropout, layer drop and router jitter, in modules and in the configurations they read.

    With noise, the trainer's log-probs would follow another distribution than the sampler's. The previous
    values of the configurations are kept in `network.silenced`, for an export.
    """
    configs = {}
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _noise_fields(module):
            setattr(module, name, type(vars(module)[name])(0))
        configs |= {id(config): config for config in nested_configs(getattr(module, "config", None))}
    network.silenced = [
        (config, name, vars(config)[name]) for config in configs.values() for name in _noise_fields(config)
    ]
    for config, name, value in network.silenced:
        setattr(config, name, type(value)(0))


def _noise_fields(owner: Any) -> list[str]:
    return [
        name
        for name, value in vars(owner).items()
        if NOISE.search(name) and isinstance(value, int | float) and value and not isinstance(value, bool)
    ]


def nested_configs(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    if hasattr(config, "to_dict"):
        yield config
        for value in vars(config).values():
            yield from nested_configs(value)


def draw_plain_tokens(network: Any, facts: Facts, *, seed: int = 0) -> Tensor:  # [2, NUM_TOKENS] int64
    """Return two rows of plain text tokens (none stands for an image) with a common beginning."""
    special: set[int] = set()
    for config in nested_configs(network.config):
        for name, value in vars(config).items():
            if "token" in name:
                special.update(value if isinstance(value, list | tuple) else [value])
    size = min(
        facts.head.weight.shape[0], getattr(network.config.get_text_config(decoder=True), "vocab_size", 2**62)
    )
    plain = torch.tensor([token for token in range(size) if token not in special])
    draw = torch.Generator().manual_seed(seed)
    tokens = plain[torch.randint(len(plain), (2, NUM_TOKENS), generator=draw)]
    tokens[1, :NUM_COMMON] = tokens[0, :NUM_COMMON]
    return tokens


def _network_logits(network: nn.Module, facts: Facts, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the network's own logits in evaluation mode, and the gain applied to its head's output."""
    gains: list[float] = []

    def amplify(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        gains.append(gains[0] if gains else LARGEST_LOGIT / (float(output.abs().max()) or 1.0))
        return output * gains[0]

    network.eval()
    hook = facts.head.register_forward_hook(amplify)
    try:
        logits = _forward(network, network, tokens).logits
    finally:
        hook.remove()
    if not gains:
        raise refused(network, "whose forward pass does not call its head")
    return logits.float(), gains[0]


def _trainer_logits(network: nn.Module, facts: Facts, tokens: Tensor, gain: float) -> Tensor:  # [2, S, V]
    """Return the logits that the log-prob kernels compute from the last hidden states, in float32."""
    output = _forward(network, facts.base, tokens)
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None:
        raise refused(network, "whose body has no last_hidden_state")
    return logits_of(facts, hidden, gain)


def logits_of(facts: Facts, hidden: Tensor, gain: float = 1.0) -> Tensor:  # [..., H] -> [..., V] float32
    """Return the logits of last hidden states; `gain` multiplies the head's output."""
    logits = nn.functional.linear(hidden, facts.head.weight).float() * gain * facts.logit_scale
    if facts.logit_softcap is not None:
        logits = facts.logit_softcap * torch.tanh(logits / facts.logit_softcap)
    return logits


def _forward(network: nn.Module, module: nn.Module, tokens: Tensor) -> Any:
    try:
        return module(input_ids=tokens, use_cache=False)
    except Exception as error:  # any of some 200 third-party forward passes, which raise what they like
        reason = f"{type(error).__name__}: {error}"
        raise refused(network, f"which does not take plain text: {' '.join(reason.split())[:160]}") from error


def agree(logits: Tensor, *other_logits: Tensor) -> bool:
    """Return True if logits are equal up to rounding; another number of columns is another vocabulary."""
    return all(
        logits.shape == reference.shape
        and float((logits - reference).abs().max()) <= TOLERANCE * float(reference.abs().max())
        for reference in other_logits
    )


@contextlib.contextmanager
def restored_afterwards(network: nn.Module) -> Iterator[None]:
    """Restore afterwards what forward passes change: modes, buffers and the random-number generator."""
    modes = {module: module.training for module in network.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for buffer, saved in buffers:
                buffer.copy_(saved)


# Decoding from a key-value cache that is allocated once and num_cached in place.
#
# Every step runs the same operators on the same memory, so that a CUDA graph can capture it, and nothing
# is copied as a sequence grows. Letters: B sequences, K slots of the cache, D head dimension.

ATTENTION = "abrun_in_place"
MULTIPLE = 16  # the number of slots is a multiple of this, which GPU attention kernels take without a copy


class InPlaceCache(Cache):
    """The cache, and the attention mask of a step. A row's next token goes into slot `position` [1]."""

    def __init__(
        self,
        cache: Cache,  # its layers are moved one by one, so that only one is in memory twice
        is_token: Tensor,  # [B, S] bool, of the cached tokens: False for padding
        num_new: int,  # tokens to come
    ) -> None:
        assert isinstance(cache, InPlaceCache) or holds_all_tokens(cache)
        num_cached = is_token.shape[1]
        num_slots = -(-(num_cached + num_new) // MULTIPLE) * MULTIPLE
        self.position = torch.tensor([num_cached], device=is_token.device)

        layers: list[Any] = []
        while cache.layers:
            layers.append(_InPlaceLayer(cache.layers.pop(0), num_cached, num_slots, self.position))
        super().__init__(layers=layers)
        # [B, 1, 1, K], additive: transformers uses a mask of four dimensions unchanged.
        self.mask = torch.full(
            (len(is_token), 1, 1, num_slots),
            float("-inf"),
            dtype=layers[0].keys.dtype,
            device=is_token.device,
        )
        self.mask[:, 0, 0, :num_cached].masked_fill_(is_token, 0.0)

    def take(self) -> None:
        """Unmask the slot of the next tokens, which they will fill."""
        self.mask.index_fill_(3, self.position, 0.0)

    def advance(self) -> None:
        self.position += 1

    def grown(self, num_new: int) -> "InPlaceCache":
        """Return a cache with slots for `num_new` more tokens, which replaces this one."""
        return InPlaceCache(self, self.mask[:, 0, 0, : int(self.position)] == 0, num_new)


class _InPlaceLayer(DynamicLayer):
    """Keys and values [B, key heads, K, D]; empty slots are 0, since masked values are still multiplied."""

    def __init__(self, layer: Any, num_cached: int, num_slots: int, position: Tensor) -> None:
        super().__init__()
        self.keys, self.values = (
            _copy_to_slots(old, num_cached, num_slots) for old in (layer.keys, layer.values)
        )
        self.dtype, self.device, self.is_initialized = self.keys.dtype, self.keys.device, True
        self._position = position

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:  # [B, key heads, 1, D] each
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._position, key_states)
        self.values.index_copy_(2, self._position, value_states)
        return self.keys, self.values


def _copy_to_slots(states: Tensor, num_cached: int, num_slots: int) -> Tensor:
    slots = states.new_zeros(*states.shape[:2], num_slots, states.shape[3])
    slots[:, :, :num_cached] = states[:, :, :num_cached]
    return slots


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
