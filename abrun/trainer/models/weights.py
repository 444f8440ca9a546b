"""Building, loading and saving networks."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from abrun.recipe.policy import Model
from abrun.trainer.models.checks import check_decoding, check_network
from abrun.trainer.models.families import facts_of, persistent_buffers
from abrun.trainer.models.parts import check_twin, open_parts, open_random_parts
from abrun.trainer.models.sources import loading, preset_config, read_config, source_of
from abrun.trainer.models.unread import complete_export, find_unread


def open_network(model: Model, *, weights: Path | None, seed: int, decodes: bool) -> nn.Module:
    """Return a recipe's network; on the meta device with a `checkpoint` if it can be read in slices.

    With `decodes`, raises RecipeError for a network that cannot decode from a cache, and sets the attribute
    `decodes_in_place`: whether it can decode from a cache filled in place. Otherwise as `load_network`.
    """
    network: Any = None
    source = source_of(model, weights)
    if source is None:
        network = open_random_parts(preset_config(model), seed)
    else:
        with loading(source):
            network = open_parts(source)
    if network is not None:
        network.decodes_in_place = check_twin(network, decodes=decodes)
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
