"""Networks whose weights are read in slices: no rank holds or reads more of a model than it trains.

Works for plain decoders, whose checkpoints have one tensor per parameter or one per expert.
"""

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from abrun.recipe.families import PLAIN_DECODERS
from abrun.trainer.models.checks import check_decoding, check_network, disable_noise
from abrun.trainer.models.families import facts_of
from abrun.trainer.models.sources import read_config, weight_files
from abrun.trainer.models.unread import find_unread
from abrun.trainer.seeds import derive_seed

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


def open_random_parts(config: Any, seed: int) -> Any | None:
    """Return a large network with random weights, on the meta device with a `checkpoint`; None if small."""
    if config.vocab_size * config.hidden_size < LARGE or config.model_type not in PLAIN_DECODERS:
        return None
    network = _build_on_meta(config)
    network.checkpoint = RandomWeights(network, seed)
    return network


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
    if (generation := _generation(source)) is not None:
        network.generation_config = generation
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


def check_twin(network: Any, *, decodes: bool) -> bool:
    """Run `check_network` on a small twin of `network`, which has no weights yet.

    With `decodes`, returns the result of `check_decoding`.
    """
    twin = small_twin(network)
    check_network(twin, facts_of(twin))
    return decodes and check_decoding(twin, facts_of(twin))


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


def _generation(source: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return None
