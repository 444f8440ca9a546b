"""What a checkpoint says of itself: `state.json`, the last of its files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.errors import StoreError
from abrun.reasons import Code
from abrun.regular_files import exists
from abrun.runs.files import read_as
from abrun.runs.schemas import Count, PathText

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a run after a step."""

    run: str  # RunDir.identity
    step: Count
    num_ranks: Count
    attempt: Count  # which wrote it
    files: Mapping[PathText, dict[str, Any]]  # by name, each a store.fingerprint


def saved_state(path: Path) -> SavedState:
    """Of a checkpoint's folder. Raises StoreError, which says no more than what is wrong with the file."""
    if not exists(path / STATE):
        raise StoreError(Code.STATE_MISSING(file=STATE))
    try:
        state = read_as(SavedState, path / STATE)
    except StoreError as error:
        whole = str(path / STATE)
        raise StoreError(error.reason.map_texts(lambda text: STATE if text == whole else text)) from None
    expected = {f"rank-{rank}.safetensors" for rank in range(len(state.files))}
    if state.files.keys() != expected or len(expected) != state.num_ranks:
        raise StoreError(Code.STATE_LACKS_RANKS(file=STATE, files=len(expected), ranks=state.num_ranks))
    return state
