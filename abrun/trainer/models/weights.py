"""Building, loading and saving networks."""

import contextlib
import copy
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from abrun.recipe.families import PLAIN_DECODERS
from abrun.recipe.policy import Model
from abrun.trainer.models.checks import check_decoding, check_network, disable_noise
from abrun.trainer.models.families import facts_of, persistent_buffers
from abrun.trainer.models.sources import loading, preset_config, read_config, source_of, weight_files
from abrun.trainer.models.unread import complete_export, find_unread
from abrun.trainer.seeds import derive_seed

# Networks whose weights are read in slices: no rank holds or reads more of a model than it trains.
#
# Works for plain decoders, whose checkpoints have one tensor per parameter or one per expert.

LARGE = 10**8  # parameters of the embedding from which a preset is never built whole on a CPU
# Parameters that hold all experts of a layer, and the projections that checkpoints hold for each expert.
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
EXPERT_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Checkpoint:
    """Tensors of safetensors files, read in slices by the names of a network's parameters."""

    def __init__(self, paths: Iterable[Path]) -> None:
        opened = [safe_open(path, "pt") for path in paths]  # memory-mapped, not read
        self._files: dict[str, Any] = {}
        for file in opened:
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Return a slice of a parameter, in the file's dtype; every slice has a start and a stop."""
        experts = self._experts(name)
        if experts is None:
            return self._slice(name)[slices]
        prefix, names = experts
        return torch.stack(
            [
                torch.cat([self._slice(f"{prefix}.{number}.{projection}.weight")[:] for projection in names])[
                    slices[1:]
                ]
                for number in range(slices[0].start, slices[0].stop)
            ]
        )

    def has(self, name: str, shape: torch.Size) -> bool:
        """Return True if a parameter of this shape can be read."""
        experts = self._experts(name)
        if experts is None:
            return name in self._files and self._slice(name).get_shape() == list(shape)
        prefix, names = experts
        tensors = [f"{prefix}.{number}.{tensor}.weight" for number in range(shape[0]) for tensor in names]
        rows = [shape[1] // len(names), *shape[2:]]
        return all(tensor in self._files and self._slice(tensor).get_shape() == rows for tensor in tensors)

    def _experts(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        match = None if name in self._files else EXPERTS.fullmatch(name)
        return (match[1], EXPERT_PROJECTIONS[match[2]]) if match else None

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)


class RandomWeights:
    """Random weights in place of a checkpoint, drawn when they are read: equal for every layout."""

    def __init__(self, network: Any, seed: int) -> None:
        self._shapes = {name: weight.shape for name, weight in network.named_parameters()}
        self._seed, self._spread = seed, network.config.initializer_range

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Return a slice of a parameter: matrices are uniform with the usual standard deviation, norms 1."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)[slices]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, name))
        reach = self._spread * 3**0.5  # drawing uniform numbers takes a fifth of the time of normal ones
        return torch.empty(shape).uniform_(-reach, reach, generator=generator)[slices]


def open_parts(source: str) -> Any | None:
    """Return a checkpoint's network on the meta device; None if it has to be loaded whole.

    The attribute `checkpoint` reads the weights. Buffers are computed and dropout is off.
    """
    config = read_config(source)
    plain = config.model_type in PLAIN_DECODERS and getattr(config, "quantization_config", None) is None
    files = weight_files(source) if plain else []
    if not files:
        return None
    checkpoint = Checkpoint(files)
    network = _build_on_meta(config)
    parameters = dict(network.named_parameters())
    untied = any(name in checkpoint for name in network.state_dict().keys() - parameters.keys())
    if untied or not all(checkpoint.has(name, weight.shape) for name, weight in parameters.items()):
        return None
    with contextlib.suppress(OSError):  # a checkpoint may have none
        network.generation_config = GenerationConfig.from_pretrained(source)
    network.checkpoint = checkpoint
    network.unread = find_unread(network, config, source)
    return network


def _build_on_meta(config: Any) -> Any:
    """Return a network without weights; buffers are computed and dropout is off."""
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base = network.base_model
    base.rotary_emb = type(base.rotary_emb)(config=network.config)
    assert not any(buffer.is_meta for buffer in network.buffers()), "a buffer is still on the meta device"
    disable_noise(network)
    return network


def read_slice(network: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    """Return a slice of a network's parameter, from its `checkpoint` if the weights are not loaded."""
    checkpoint = getattr(network, "checkpoint", None)
    return (
        network.get_parameter(name).detach()[slices] if checkpoint is None else checkpoint.read(name, slices)
    )


def small_twin(network: Any) -> Any:
    """Build a small network of the same family and settings, with random weights, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(_small_config(network.config), dtype=torch.float32)


def _small_config(config: Any) -> Any:
    """Return a config of two layers (or one of each kind), few tokens and narrow MLPs; attention is kept."""
    small = copy.deepcopy(config)
    kinds = list(dict.fromkeys(getattr(small, "layer_types", None) or ()))
    if kinds:
        small.layer_types = kinds * 2 if len(kinds) == 1 else kinds
    small.num_hidden_layers, small.pad_token_id = max(2, len(kinds)), None
    small.vocab_size = min(small.vocab_size, 512)
    small.intermediate_size = min(small.intermediate_size, 256)
    if hasattr(small, "num_experts"):
        small.num_experts = min(small.num_experts, 2 * small.num_experts_per_tok)
        small.moe_intermediate_size = min(small.moe_intermediate_size, 256)
    return small


def open_network(model: Model, *, weights: Path | None, seed: int, decodes: bool) -> nn.Module:
    """Return a recipe's network; on the meta device with a `checkpoint` if it can be read in slices.

    With `decodes`, raises RecipeError for a network that cannot decode from a cache, and sets the attribute
    `decodes_in_place`: whether it can decode from a cache filled in place. Otherwise as `load_network`.
    """
    network: Any = None
    source = source_of(model, weights)
    if source is None:
        config: Any = preset_config(model)
        if config.vocab_size * config.hidden_size >= LARGE and config.model_type in PLAIN_DECODERS:
            network = _build_on_meta(config)
            network.checkpoint = RandomWeights(network, seed)
    else:
        with loading(source):
            network = open_parts(source)
    if network is not None:  # a twin is checked, because the network has no weights yet
        twin = small_twin(network)
        check_network(twin, facts_of(twin))
        network.decodes_in_place = decodes and check_decoding(twin, facts_of(twin))
        return network
    network = load_network(model, weights=weights, seed=seed)
    if decodes:
        network.decodes_in_place = check_decoding(network, facts_of(network))
    return network


def load_network(model: Model, *, weights: Path | None, seed: int) -> nn.Module:
    """Return the network of a recipe's model, a transformers `...ForCausalLM`: float32, CPU, no dropout.

    `weights`, a checkpoint folder, replaces the recipe's own initial weights. A preset without `weights` is
    initialised randomly from `seed`, equal on every rank. Raises RecipeError if the checkpoint does not
    exist or the network fails a check (see `checks`).
    """
    transformers_logging.disable_progress_bar()  # keeps stdout.log readable
    source = source_of(model, weights)
    if source is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network: nn.Module = AutoModelForCausalLM.from_config(preset_config(model))
    else:
        network = _from_checkpoint(source)
    check_network(network, facts_of(network))
    return network


def published(network: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a network's `weights` (whole tensors by name) one by one, as its family's checkpoints hold them.

    A layer's experts, one tensor in the network, are one tensor each in a checkpoint.
    """
    nothing: dict[str, Tensor] = {}
    if revert_weight_conversion(network, nothing) is nothing:  # so nothing else needs conversion
        yield from weights  # a call per tensor would walk all modules every time
        return
    for name, weight in weights:
        yield from revert_weight_conversion(network, {name: weight}).items()


def config_of(model: Model) -> Any:
    """Return the configuration of a recipe's model, a `PreTrainedConfig` as in a Hugging Face checkpoint."""
    source = source_of(model, None)
    config = preset_config(model) if source is None else read_config(source)
    if not config.architectures:
        network: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        config.architectures = [network.__name__]
    return config


def save_network(network: nn.Module, directory: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write `weights` (whole, by name), buffers and configuration as a Hugging Face checkpoint (safetensors).

    The configuration has its original dropout. A network loaded from a checkpoint is written with the tensors
    that it does not have itself (see `unread`).
    """
    writable: Any = network
    silenced = getattr(network, "silenced", ())
    for config, name, value in silenced:
        setattr(config, name, value)
    try:
        writable.save_pretrained(directory, state_dict=dict(weights) | dict(persistent_buffers(network)))
    finally:
        for config, name, value in silenced:
            setattr(config, name, type(value)(0))
    unread = getattr(network, "unread", None)
    if unread is not None:
        complete_export(unread, directory)


def _from_checkpoint(source: str) -> nn.Module:
    config = read_config(source)
    with loading(source):
        # Without `config`, older transformers ignore `dtype` for the text part of a multimodal checkpoint.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        network, loading_info = loaded
        if loading_info["missing_keys"]:  # transformers would only warn, and use random numbers
            raise ValueError(f"its weights lack {', '.join(sorted(loading_info['missing_keys']))}")
        network.unread = find_unread(network, config, source)
    return network


# A hash that tells whether two sets of weights are equal, and sketches that estimate how far they differ.
#
# Both describe whole tensors, independent of how they are sharded over ranks.
#
# The hash is the sum modulo 2^64, over all elements, of a mix of the element's bits as float32, its
# tensor's name and shape, and its position. Shards may therefore be added in any order, by any rank. It is
# not cryptographic.

CHUNK = 2**22  # elements mixed at a time on a GPU: 32 MiB for each of a few temporary copies
CPU_CHUNK = 2**18  # these stay in the processor's cache, which is 5 to 10 times as fast
SKETCHED = 256  # numbers in a tensor's sketch
# SplitMix64's (Steele, Lea and Flood, 2014) without their top bit, to fit an int64.
STEP, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def content_of(name: str, weight: Tensor) -> int:
    """Return the hash of one whole tensor, below 2^64. Zeros of opposite signs differ."""
    start, total = _start(name, weight), 0
    for chunk, offset in _chunks(weight):
        position = torch.arange(offset + 1, offset + 1 + len(chunk), device=chunk.device)
        total += int(_mix(chunk.float().view(torch.int32) + position * STEP + start).sum())
    return total % 2**64


def sketch_of(name: str, weight: Tensor) -> Tensor:  # [at most 256] float64, on the CPU
    """Return the count sketch of one whole tensor, or the tensor itself if it is no larger.

    A sketch has signed sums over 256 buckets. An element's sign and bucket follow from the tensor's name and
    shape and the element's flat index. Sketches are linear: the sum of squares of a difference of two is an
    unbiased estimate of that of the tensors' difference; the norm's standard error is 4.4 % (sqrt(1 / 512)).
    """
    if weight.numel() <= SKETCHED:
        return weight.detach().flatten().double().cpu()
    start, device = _start(name, weight), weight.device
    total = torch.zeros(SKETCHED, dtype=torch.float64, device=device)
    column = torch.arange(SKETCHED, device=device)
    for chunk, offset in _chunks(weight):
        position = torch.arange(offset + 1, offset + 1 + len(chunk), device=device)
        values = chunk.double()
        signed = torch.where(_mix(position * STEP + start) < 0, -values, values)
        rows = torch.nn.functional.pad(signed, (0, -len(chunk) % SKETCHED)).view(-1, SKETCHED)
        # 256 neighbouring elements go to 256 different buckets, so that no addition needs to be atomic.
        number = torch.arange(offset // SKETCHED, offset // SKETCHED + len(rows), device=device)
        shift = (_mix(number * STEP + (start ^ FIRST)) >> 40) & (SKETCHED - 1)
        total += rows.gather(1, column ^ shift[:, None]).sum(0)
    return total.cpu()


def weights_hash(contents: Iterable[int]) -> str:
    """Return the hash of a network, from the hashes of its tensors."""
    return f"{sum(contents) % 2**64:016x}"


def _start(name: str, weight: Tensor) -> int:
    digest = hashlib.sha256(f"{name} {list(weight.shape)}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(number: Tensor) -> Tensor:  # int64, both
    mixed = number * FIRST
    return (mixed ^ (mixed >> 31)) * SECOND


def _chunks(weight: Tensor) -> Iterable[tuple[Tensor, int]]:
    flat = weight.detach().contiguous().flatten()
    size = CHUNK if flat.is_cuda else min(CHUNK, CPU_CHUNK)
    return ((flat[offset : offset + size], offset) for offset in range(0, len(flat), size))
