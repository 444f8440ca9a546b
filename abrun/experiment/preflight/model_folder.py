"""What is wrong with a checkpoint's folder, as far as its files say without the tensors in them."""

import json
import os
from pathlib import Path
from typing import Any

from abrun.reasons import Code, Reason
from abrun.regular_files import exists, open_regular, read_regular

LARGEST_CONFIG = 2**24  # bytes of a model's config.json
# Bytes of a list of tensors: an index, or the header of a file, to which the format allows less.
LARGEST_INDEX = 2**27
CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class DamagedFile(ValueError):
    """A file of a model that cannot be read as what it should be."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def config_of(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises DamagedFile or OSError where it is no JSON object, or too large."""
    found = _json(folder / CONFIG, LARGEST_CONFIG)
    if not isinstance(found, dict):
        raise DamagedFile(Code.MODEL_CONFIG_INVALID(type=type(found).__name__))
    return found


def folder_damage(folder: Path) -> Reason | None:
    """Return why the model in a folder cannot load; None where its files look whole.

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
        return Code.MODEL_FILE_UNREADABLE(file=name, error=error.strerror or str(error))
    except DamagedFile as error:
        return error.reason
    return None


def _check_index(folder: Path) -> None:
    index = _json(folder / INDEX, LARGEST_INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise DamagedFile(Code.MODEL_INDEX_INVALID(file=INDEX))
    held = {name: _names_in(folder / name) for name in sorted(set(places.values()))}
    lost = next((tensor for tensor, name in places.items() if tensor not in held[name]), None)
    if lost is not None:
        raise DamagedFile(Code.MODEL_TENSOR_MISSING(file=places[lost], tensor=lost, index=INDEX))


def _names_in(path: Path) -> set[str]:
    """The tensors of a safetensors file, whose size has to be what its header says."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LARGEST_INDEX):
            raise DamagedFile(Code.MODEL_FILE_TRUNCATED(file=path.name, bytes=size))
        header = _parsed(file.read(length), path.name)
    try:
        tensors = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max(tensors.values(), default=0)
    except (AttributeError, TypeError, KeyError, IndexError):
        raise DamagedFile(Code.MODEL_FILE_HEADER_INVALID(file=path.name)) from None
    if size != expected:
        raise DamagedFile(Code.MODEL_FILE_SIZE_WRONG(file=path.name, bytes=size, expected=expected))
    return set(tensors)


def _json(path: Path, most_bytes: int) -> Any:
    return _parsed(read_regular(path, most_bytes), path.name)


def _parsed(content: bytes, name: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(Code.MODEL_FILE_NOT_JSON(file=name, error=str(error))) from None
