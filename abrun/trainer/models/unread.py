"""Tensors of a checkpoint that the trained network does not have, such as a vision tower.

A text-only network is trained without them, yet an export contains them: they are copied from the
checkpoint's memory-mapped files, so that they never occupy memory.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from abrun.runs.files import exists
from abrun.trainer.models.sources import checkpoint_file, weight_files

DTYPES = ("dtype", "torch_dtype")  # names of a configuration's dtype field
# Files that describe how a multimodal checkpoint reads images or sound.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """Files and tensors that an export copies from the checkpoint that the network was loaded from."""

    tensors: dict[str, Path]  # tensor name in the checkpoint -> its file
    prefix: str  # which the checkpoint puts before the names that the network publishes
    config: Path | None  # config.json, if the network is of another class than the checkpoint
    processors: tuple[Path, ...]


def find_unread(network: Any, config: Any, source: str) -> Unread | None:
    """Find the tensors that a loaded network left in its checkpoint, whose configuration is `config`.

    Logs one line and returns None if an export cannot reproduce that checkpoint.
    """
    stored = dict(_tensor_files(weight_files(source)))
    targets, state = _targets(network, stored), network.state_dict()
    unread = {name for name, target in targets.items() if target not in state}
    if getattr(config, "quantization_config", None) is not None:
        modules = dict(network.named_modules())  # to which scales of quantized weights belong
        unread = {name for name in unread if targets[name].rpartition(".")[0] not in modules}
        if unread:
            _warn(source, unread, "is quantized, and an export is not")
        return None
    is_composite, prefix = network.config.model_type != config.model_type, ""
    if is_composite:
        names, prefixes = _exported_names(network), ("", f"{network.base_model_prefix}.")
        fitting = [prefix for prefix in prefixes if {prefix + name for name in names} <= stored.keys()]
        if not fitting:
            _warn(source, unread, f"is of type {config.model_type}, and an export is not")
            return None
        prefix = fitting[0]
    return Unread(
        tensors={name: stored[name] for name in sorted(unread)},
        prefix=prefix,
        config=checkpoint_file(source, CONFIG_NAME) if is_composite else None,
        processors=tuple(path for name in PROCESSORS if (path := checkpoint_file(source, name)) is not None),
    )


def complete_export(unread: Unread, directory: Path) -> None:
    """Add the unread tensors and files, and the checkpoint's own configuration, to an export."""
    for path in unread.processors:
        shutil.copyfile(path, directory / path.name)
    if unread.config is not None:
        _restore_config(unread.config, directory / CONFIG_NAME)
    if unread.tensors or unread.prefix:
        _add_tensors(unread, directory)


def _tensor_files(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        with safe_open(path, "pt") as file:
            yield from ((name, path) for name in file.keys())  # noqa: SIM118 (it is no mapping)


def _targets(network: Any, names: Iterable[str]) -> dict[str, str]:
    """Return the network's name for each tensor of a checkpoint, by transformers' conversion rules."""
    conversions = getattr(network, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(network)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    state, prefix, targets = network.state_dict(), network.base_model_prefix, dict[str, str]()
    for name in names:
        targets[name] = rename_source_key(name, renamings, converters, prefix, state)[0]
        if targets[name] not in state:  # some tensors keep their name
            plain = rename_source_key(name, [], [], prefix, state)[0]
            targets[name] = plain if plain in state else targets[name]
    return targets


def _exported_names(network: Any) -> set[str]:
    hollow = {name: torch.empty_like(tensor, device="meta") for name, tensor in network.state_dict().items()}
    for name in getattr(network, "all_tied_weights_keys", {}):
        hollow.pop(name, None)
    return set(revert_weight_conversion(network, hollow))


def _warn(source: str, unread: Iterable[str], why: str) -> None:
    groups = sorted({re.split(r"\.\d+\.|\.(?=[^.]*$)", name)[0] for name in unread})
    what = f"{', '.join(groups[:3])}{' ...' if len(groups) > 3 else ''}"
    logger.warning("model.path: %r %s: %s will be missing in final_weights", source, why, what or "its type")


def _restore_config(source: Path, target: Path) -> None:
    """Replace the network's configuration with the checkpoint's, with the dtype that was exported."""
    exported, config = (json.loads(path.read_text()) for path in (target, source))
    dtype = exported.get("dtype", exported.get("torch_dtype"))
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        section |= {name: dtype for name in DTYPES if name in section}
    target.write_text(json.dumps(config, indent=2) + "\n")


def _add_tensors(unread: Unread, directory: Path) -> None:
    """Write the tensors into an export's last file and its index; all other names get the prefix."""
    index_path = directory / SAFE_WEIGHTS_INDEX_NAME
    index = json.loads(index_path.read_text()) if exists(index_path) else None
    files = sorted(set(index["weight_map"].values())) if index else [SAFE_WEIGHTS_NAME]
    added = dict(_read(unread.tensors))
    places: dict[str, str] = {}
    for name in files:
        tensors = {unread.prefix + key: tensor for key, tensor in _tensors(directory / name)}
        if name == files[-1]:
            tensors |= added
        if name == files[-1] or unread.prefix:
            partial = directory / f"{name}.partial"
            save_file(tensors, partial, metadata={"format": "pt"})
            partial.replace(directory / name)
        places |= dict.fromkeys(tensors, name)
    if index:
        index["weight_map"] = places
        added_bytes = sum(tensor.nbytes for tensor in added.values())
        index["metadata"]["total_size"] = index["metadata"].get("total_size", 0) + added_bytes
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _read(places: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(set(places.values())):
        yield from ((name, tensor) for name, tensor in _tensors(path) if places.get(name) == path)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a safetensors file's tensors by name, memory-mapped."""
    with safe_open(path, "pt") as file:
        yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (it is no mapping)
