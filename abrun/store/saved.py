"""What a checkpoint says of itself: `state.json`, the last of its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from abrun.errors import StoreError
from abrun.store.files import read_json

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a run after a step."""

    run: str  # RunDir.identity
    step: int
    num_ranks: int
    attempt: int  # which wrote it
    files: dict[str, dict[str, Any]]  # by name, each a store.fingerprint


def saved_state(path: Path) -> SavedState:
    """Of a checkpoint's folder. Raises StoreError, which says no more than what is wrong with the file."""
    if not (path / STATE).exists():
        raise StoreError(f"{STATE} no such file")
    try:
        state = _JSON.validate_python(read_json(path / STATE))
    except StoreError as error:
        raise StoreError(f"{STATE} {str(error).removeprefix(f'{path / STATE}: ')}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"{STATE} {field}: got {str(first['input'])[:80]!r}; {first['msg']}") from None
    expected = {f"rank-{rank}.safetensors" for rank in range(len(state.files))}
    if state.files.keys() != expected or len(expected) != state.num_ranks:
        raise StoreError(f"{STATE} files: got {len(expected)} for {state.num_ranks} ranks")
    return state


_JSON = TypeAdapter(SavedState)
