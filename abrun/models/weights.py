"""Networks: built or loaded before training, and written as a checkpoint after it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from abrun.models.checks import check_decoding, check_network
from abrun.models.families import facts_of, persistent_buffers
from abrun.models.parts import check_twin, open_parts, random_parts
from abrun.models.presets import preset_config
from abrun.models.sources import loading, read_config, source_of
from abrun.models.unread import complete_export, find_unread
from abrun.recipe.policy import Model


def open_network(model: Model, *, weights: Path | None, seed: int, decodes: bool) -> nn.Module:
    """As `load_network`; on the meta device, with a `checkpoint` to read from, where it can be read in parts.

    With `decodes`, also raises RecipeError for a network that cannot be decoded from a cache, and notes in
    `decodes_in_place` whether it can from one that is filled in place.
    """
    network: Any = None
    source = source_of(model, weights)
    if source is None:
        network = random_parts(preset_config(model), seed)
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
    """The network of a recipe's model, a transformers `...ForCausalLM`: float32, on the CPU, without dropout.

    `weights`, a checkpoint folder, replaces the recipe's own initial weights. A preset without `weights` is
    initialised randomly from `seed`, alike on every rank. Raises RecipeError where there is no such
    checkpoint, and for a network that would not be trained as it is published (see `checks`).
    """
    transformers_logging.disable_progress_bar()  # stdout.log is read by people
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
    """A network's `weights` (whole, by name) as its family's checkpoints hold them, one after the other.

    A layer's experts, which are one tensor here, are a tensor each there.
    """
    nothing: dict[str, Tensor] = {}
    if revert_weight_conversion(network, nothing) is nothing:  # nor is anything else to be converted
        yield from weights  # asked for each, it would go through all modules each time
        return
    for name, weight in weights:
        yield from revert_weight_conversion(network, {name: weight}).items()


def config_of(model: Model) -> Any:
    """The configuration of a recipe's model, as a Hugging Face checkpoint has it: a `PreTrainedConfig`."""
    source = source_of(model, None)
    config = preset_config(model) if source is None else read_config(source)
    if not config.architectures:
        network: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        config.architectures = [network.__name__]
    return config


def save_network(network: nn.Module, directory: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Write `weights` (whole, by name), buffers and configuration as a Hugging Face checkpoint (safetensors).

    The configuration says of dropout what it said before training. A network that was loaded from a
    checkpoint is written as that checkpoint, with the tensors that it has no place for (see unread).
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
        # Without `config`, older transformers drop `dtype` for the text part of a multimodal checkpoint.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
        network, found = loaded
        if found["missing_keys"]:  # transformers fills them with random numbers, and warns
            raise ValueError(f"its weights lack {', '.join(sorted(found['missing_keys']))}")
        network.unread = find_unread(network, config, source)
    return network
