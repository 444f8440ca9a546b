"""Networks whose weights are read in parts: no rank ever holds, or reads, more of a model than it trains.

For families of one structure, whose checkpoints have a tensor for each parameter, or one for each expert.
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

from abrun.models.checks import check_decoding, check_network, silence
from abrun.models.families import facts_of
from abrun.models.sources import read_config, weight_files
from abrun.models.unread import find_unread
from abrun.recipe.model_fit import PLAIN_DECODERS
from abrun.seeds import derive_seed

LARGE = 10**8  # parameters of an embedding: a preset of that size is never made whole on a CPU
# Of one layer's experts: the parameters that hold all of them, and what checkpoints have of each expert.
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
OF_AN_EXPERT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Checkpoint:
    """The tensors of safetensors files, read in part, under the names of a network's parameters."""

    def __init__(self, paths: Iterable[Path]) -> None:
        opened = [safe_open(path, "pt") for path in paths]  # mapped, not read
        self._files: dict[str, Any] = {}
        for file in opened:
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A part of a parameter, in the file's dtype; each slice has a start and a stop."""
        experts = self._experts(name)
        if experts is None:
            return self._slice(name)[part]
        prefix, names = experts
        return torch.stack(
            [
                torch.cat([self._slice(f"{prefix}.{number}.{one}.weight")[:] for one in names])[part[1:]]
                for number in range(part[0].start, part[0].stop)
            ]
        )

    def has(self, name: str, shape: torch.Size) -> bool:
        """Whether a parameter of this shape can be read."""
        experts = self._experts(name)
        if experts is None:
            return name in self._files and self._slice(name).get_shape() == list(shape)
        prefix, names = experts
        tensors = [f"{prefix}.{number}.{one}.weight" for number in range(shape[0]) for one in names]
        rows = [shape[1] // len(names), *shape[2:]]
        return all(one in self._files and self._slice(one).get_shape() == rows for one in tensors)

    def _experts(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        found = None if name in self._files else EXPERTS.fullmatch(name)
        return (found[1], OF_AN_EXPERT[found[2]]) if found else None

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)


class RandomWeights:
    """Random values instead of a checkpoint's, made as they are read: alike for every layout."""

    def __init__(self, network: Any, seed: int) -> None:
        self._shapes = {name: weight.shape for name, weight in network.named_parameters()}
        self._seed, self._spread = seed, network.config.initializer_range

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """A part of a parameter: matrices are uniform, of the usual standard deviation; norms are 1."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)[part]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, name))
        reach = self._spread * 3**0.5  # uniform numbers take a fifth of the time of normal ones
        return torch.empty(shape).uniform_(-reach, reach, generator=generator)[part]


def random_parts(config: Any, seed: int) -> Any | None:
    """A large network with random weights, on the meta device with a `checkpoint`; None where it is small."""
    if config.vocab_size * config.hidden_size < LARGE or config.model_type not in PLAIN_DECODERS:
        return None
    network = _on_meta(config)
    network.checkpoint = RandomWeights(network, seed)
    return network


def open_parts(source: str) -> Any | None:
    """The network of a checkpoint, on the meta device; None where it has to be loaded whole.

    Its `checkpoint` has the weights. Buffers are there, dropout is off.
    """
    config = read_config(source)
    plain = config.model_type in PLAIN_DECODERS and getattr(config, "quantization_config", None) is None
    files = weight_files(source) if plain else []
    if not files:
        return None
    checkpoint = Checkpoint(files)
    network = _on_meta(config)
    parameters = dict(network.named_parameters())
    untied = any(name in checkpoint for name in network.state_dict().keys() - parameters.keys())
    if untied or not all(checkpoint.has(name, weight.shape) for name, weight in parameters.items()):
        return None
    if (generation := _generation(source)) is not None:
        network.generation_config = generation
    network.checkpoint = checkpoint
    network.unread = find_unread(network, config, source)
    return network


def _on_meta(config: Any) -> Any:
    """A network without weights; buffers are there, dropout is off."""
    with torch.device("meta"):
        network: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base = network.base_model
    base.rotary_emb = type(base.rotary_emb)(config=network.config)
    assert not any(buffer.is_meta for buffer in network.buffers()), "buffers are computed, not read"
    silence(network)
    return network


def part_of(network: Any, name: str, part: tuple[slice, ...]) -> Tensor:
    """A part of a network's parameter; read, where it is in the network's `checkpoint` yet."""
    checkpoint = getattr(network, "checkpoint", None)
    return network.get_parameter(name).detach()[part] if checkpoint is None else checkpoint.read(name, part)


def check_twin(network: Any, *, decodes: bool) -> bool:
    """Try out a family on a small network with random weights: the checks need one that computes.

    With `decodes`, see check_decoding.
    """
    twin = small_twin(network)
    check_network(twin, facts_of(twin))
    return decodes and check_decoding(twin, facts_of(twin))


def small_twin(network: Any) -> Any:
    """Build a small network of the same family and settings, with random weights, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(_small(network.config), dtype=torch.float32)


def _small(config: Any) -> Any:
    """Return settings for two layers, or one of each kind, few tokens, narrow products; attention is kept."""
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
