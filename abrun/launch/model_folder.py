"""What is wrong with a checkpoint's folder, as far as its files say without the tensors in them."""

import json
import os
from pathlib import Path
from typing import Any

from abrun.regular_files import exists, open_regular, read_regular

LARGEST_CONFIG = 2**24  # bytes of a model's config.json
# Bytes of a list of tensors: an index, or the header of a file, to which the format allows less.
LARGEST_INDEX = 2**27
CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises ValueError or OSError where it is no JSON object, or too large."""
    found = _json(folder / CONFIG, LARGEST_CONFIG)
    if not isinstance(found, dict):
        raise ValueError(f"config.json holds a {type(found).__name__}, not a JSON object")
    return found


def folder_damage(folder: Path) -> str | None:
    """Why the model in a folder cannot load, in a few words; None where its files look whole.

    Weights in other formats than safetensors are not looked at.
    """
    try:
        config_of(folder)
        if exists(folder / WHOLE):
            _names_in(folder / WHOLE)
        elif exists(folder / INDEX):
            _check_index(folder)
    except OSError as error:
        name = Path(os.fsdecode(error.filename)).name if error.filename else folder.name
        return f"{name} cannot be read: {error.strerror or error}"
    except ValueError as error:
        return str(error)
    return None


def _check_index(folder: Path) -> None:
    index = _json(folder / INDEX, LARGEST_INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{INDEX} has no weight_map of tensors to files")
    held = {name: _names_in(folder / name) for name in sorted(set(places.values()))}
    lost = next((tensor for tensor, name in places.items() if tensor not in held[name]), None)
    if lost is not None:
        raise ValueError(f"{places[lost]} lacks {lost!r}, which {INDEX} says is there")


def _names_in(path: Path) -> set[str]:
    """The tensors of a safetensors file, whose size has to be what its header says."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LARGEST_INDEX):
            raise ValueError(f"{path.name} is no safetensors file, or was cut off: it has {size} bytes")
        header = _parsed(file.read(length), path.name)
    try:
        tensors = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max(tensors.values(), default=0)
    except (AttributeError, TypeError, KeyError, IndexError):
        raise ValueError(f"{path.name} has a header that is not one of safetensors") from None
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes, and its header says {expected}")
    return set(tensors)


def _json(path: Path, most_bytes: int) -> Any:
    return _parsed(read_regular(path, most_bytes), path.name)


def _parsed(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
