"""A run that begins where a checkpoint of another one stopped, in whichever layout that was saved.

The files of the checkpoint's ranks say which piece of each whole tensor they hold; each rank of this run
reads what its own pieces need, and nothing else. Learning rates, sampling and data are functions of the step,
which goes on.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from abrun import store
from abrun.backends.pieces import Piece, pieces_in
from abrun.backends.ranks import Ranks
from abrun.errors import AbrunError, RecipeError, StoreError
from abrun.train.checkpoint import Stateful

FIELD = "checkpoint.start_from"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run began: as its `environment.json` says, and the same in both runs of a pair."""

    run: str
    step: int
    sha256: str  # of the checkpoint's state.json, which has the checksums of all else

    def recorded(self) -> dict[str, Any]:
        return asdict(self)


def start_from(folder: str, trained: Stateful, ranks: Ranks, num_steps: int) -> Origin:
    """Give `trained` the weights and the optimizer state of a checkpoint. Collective.

    Raises RecipeError, on every rank alike, where there is none, or one that does not fit.
    """
    path, wrong, found = Path(folder).expanduser(), None, None
    try:
        state, origin = _opened(path, ranks, num_steps)
        found = _tensors_of([path / name for name in state.files], trained)
    except (AbrunError, OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        wrong = " ".join(str(error).split()) or type(error).__name__
    words = next((each for each in ranks.of_all(wrong) if each), None)
    if words:
        raise RecipeError(f"{FIELD}: got {folder!r}: {words}; give a checkpoint of a run of the same model")
    assert found is not None
    trained.load_local_state(found)
    return origin


def _opened(path: Path, ranks: Ranks, num_steps: int) -> tuple[store.SavedState, Origin]:
    """Its files, of which this rank has checked some, are as they were written."""
    state = store.saved_state(path)
    if state.step >= num_steps:
        raise StoreError(f"it is of step {state.step}, and steps is {num_steps}")
    for name in list(state.files)[ranks.rank :: ranks.size]:
        wrong = store.damage(path / name, state.files[name])
        if wrong:
            raise StoreError(f"{name} {wrong}")
    digest = store.fingerprint(path / store.SAVED_STATE)["sha256"]
    return state, Origin(run=state.run, step=state.step, sha256=digest)


def _tensors_of(paths: list[Path], trained: Stateful) -> dict[str, Tensor]:
    """What `load_local_state` takes, from the pieces in these files. Raises ValueError for other models."""
    pieces = trained.pieces()
    if pieces is None:
        raise ValueError("policy.backend.type 'megatron' cannot begin from a checkpoint yet")
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(safe_open(path, "pt")) for path in paths]
        saved = _Saved(files)
        _check_fit(saved.shapes(), pieces)
        held = trained.local_state()
        return {
            name: saved.read(name, piece, held[name].dtype if name in held else None)
            for name, piece in pieces.items()
            if name in saved.places  # a parameter that never had a gradient has no optimizer state
        }


class _Saved:
    """The tensors of all ranks' files, as pieces of whole ones."""

    def __init__(self, files: list[Any]) -> None:
        self.places: dict[str, dict[str, tuple[Piece, Any]]] = {}
        for file in files:
            for name, piece in pieces_in(file.metadata()).items():
                # Of ranks that have the same piece, one is as good as another
                self.places.setdefault(name, {}).setdefault(repr(piece.slices), (piece, file))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: next(iter(held.values()))[0].shape for name, held in self.places.items()}

    def read(self, name: str, wanted: Piece, dtype: torch.dtype | None) -> Tensor:
        """One piece, put together. `dtype`: which it has to be in; None: as saved."""
        own: Tensor | None = None
        num_read = 0
        for piece, file in self.places[name].values():
            part = piece.common(wanted)
            if part is None:
                continue
            there = file.get_slice(name)[piece.inside(part)] if part else file.get_tensor(name)
            if dtype is not None and there.dtype != dtype:
                raise ValueError(f"{name} is {there.dtype}, and {dtype} in this run")
            own = torch.zeros(wanted.size, dtype=there.dtype) if own is None else own
            own[wanted.inside(part)] = there
            num_read += there.numel()
        if own is None:
            own = torch.zeros(wanted.size, dtype=dtype or torch.float32)
        if num_read != own.numel():
            raise ValueError(f"{name} is not whole")
        return own


def _check_fit(saved: Mapping[str, tuple[int, ...]], pieces: Mapping[str, Piece]) -> None:
    """Raises ValueError where the two are of other models, or another algorithm's parts."""
    there = {name for name in saved if "weights/" in name}
    here = {name for name in pieces if "weights/" in name}
    for names, words in ((there - here, "which this run lacks"), (here - there, "which it lacks")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"this run and it train other weights: {min(names)}{more}, {words}")
    for name, piece in pieces.items():
        if name in saved and saved[name] != piece.shape:
            raise ValueError(f"{name} has the shape {list(saved[name])}, and {list(piece.shape)} in this run")
