"""Checks of a run's model by its files' headers and the hub, without reading tensors."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from abrun.experiment.preflight.hub import CONFIG_FILE
from abrun.recipe.policy import Model
from abrun.recipe.run import OwnRunConfig
from abrun.runs.regular_files import exists, is_directory, open_regular, read_regular

MAX_CONFIG_BYTES = 2**24  # bytes of a model's config.json
# Bytes of an index or a file header; the format's own limit for headers is lower.
MAX_INDEX_BYTES = 2**27
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# Variables that change a run's hub or cache location
HUB_VARIABLES = re.compile(r"(HF|HUGGINGFACE|TRANSFORMERS|XDG)_|HOME$|.*_proxy$", re.IGNORECASE)


class DamagedFile(ValueError):
    """Error of a model file that is damaged or has the wrong format."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json. Raises DamagedFile or OSError if too large or not an object."""
    content = _read_json(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    if not isinstance(content, dict):
        raise DamagedFile(f"config.json holds a {type(content).__name__}, not a JSON object")
    return content


def model_shape(model: Model) -> Mapping[str, Any]:
    """Return the configuration of a preset or a folder; empty for a hub model."""
    if model.preset:
        return model.architecture
    try:
        return read_model_config(Path(model.path or "").expanduser())
    except (OSError, ValueError):  # which is said with what else is wrong with the folder, or by the trainer
        return {}


def folder_refusal(model: Model) -> str | None:
    """Return why the model of a folder cannot load; None if it can, or is not in a folder."""
    if not model.path or not _is_folder(model.path):
        return None
    folder = Path(model.path).expanduser()
    if not is_directory(folder):
        return (
            f"model.path: got {model.path!r}, which is not a folder here; give a checkpoint's folder, or "
            "a hub name"
        )
    damage = folder_damage(folder)
    return damage and (
        f"model.path: got {model.path!r}, which cannot load: {damage}; give a folder with config.json, whole "
        "safetensors files and a tokenizer"
    )


def hub_model_refusal(config: OwnRunConfig, ask: Callable[[str], str | None]) -> str | None:
    """Return why a hub model is unavailable; None if it is, or if the run's env changes the hub access."""
    weights = config.model.path
    if not weights or _is_folder(weights) or any(map(HUB_VARIABLES.match, config.trainer.env)):
        return None
    problem = ask(weights)
    return problem and (
        f"model.path: got {weights!r}, which is not a folder here, and {problem}; give a checkpoint's "
        "folder, or the name of a hub model that is reachable or cached (hf download)"
    )


def _is_folder(weights: str) -> bool:
    """Return whether a path is a folder; NAME and OWNER/NAME are hub names unless such a folder exists."""
    return weights[0] in "/.~" or weights.count("/") > 1 or is_directory(Path(weights))


def folder_damage(folder: Path) -> str | None:
    """Return why the model in a folder cannot load; None if its files look complete.

    Weights in formats other than safetensors are not checked.
    """
    try:
        read_model_config(folder)
        if exists(folder / SINGLE_FILE):
            _read_tensor_names(folder / SINGLE_FILE)
        elif exists(folder / INDEX_FILE):
            _check_index(folder)
    except OSError as error:
        name = Path(os.fsdecode(error.filename)).name if error.filename else folder.name
        return f"{name} cannot be read: {error.strerror or str(error)}"
    except DamagedFile as error:
        return str(error)
    return None


def _check_index(folder: Path) -> None:
    index = _read_json(folder / INDEX_FILE, MAX_INDEX_BYTES)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise DamagedFile(f"{INDEX_FILE} has no weight_map of tensors to files")
    tensors_by_file = {name: _read_tensor_names(folder / name) for name in sorted(set(places.values()))}
    missing_tensor = next(
        (tensor for tensor, name in places.items() if tensor not in tensors_by_file[name]), None
    )
    if missing_tensor is not None:
        raise DamagedFile(
            f"{places[missing_tensor]} lacks the tensor {missing_tensor!r} that {INDEX_FILE} lists"
        )


def _read_tensor_names(path: Path) -> set[str]:
    """Return a safetensors file's tensor names. Raises DamagedFile unless its size matches the header."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_INDEX_BYTES):
            raise DamagedFile(f"{path.name} is not a safetensors file, or was truncated: it has {size} bytes")
        header = _parse_json(file.read(length), path.name)
    try:
        tensors = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max(tensors.values(), default=0)
    except (AttributeError, TypeError, KeyError, IndexError):
        raise DamagedFile(f"{path.name} has no valid safetensors header") from None
    if size != expected:
        raise DamagedFile(f"{path.name} has {size} bytes, but its header says {expected}")
    return set(tensors)


def _read_json(path: Path, max_bytes: int) -> Any:
    return _parse_json(read_regular(path, max_bytes), path.name)


def _parse_json(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{name} is not JSON: {error}") from None
