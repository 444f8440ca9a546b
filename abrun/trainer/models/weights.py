"""Building, loading and saving networks."""

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
from abrun.trainer.models.presets import preset_config
from abrun.trainer.models.sources import loading, read_config, source_of
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
