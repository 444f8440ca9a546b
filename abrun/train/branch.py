"""A run that begins where a checkpoint of another one stopped, in whichever layout, by either backend.

The files of the checkpoint's ranks say which pieces of whole tensors they hold; each rank of this run reads
what its own pieces need, and nothing else. Learning rates, sampling and data are functions of the step,
which goes on.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from abrun.backends.pieces import Held, Piece, held_in
from abrun.backends.ranks import Ranks
from abrun.errors import AbrunError, RecipeError, StoreError
from abrun.reasons import Code
from abrun.runs.files import find_damage, fingerprint
from abrun.runs.records import SAVED_STATE, SavedState, read_saved_state
from abrun.train.checkpoint import Stateful


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a run began: as its `environment.json` says, and the same in both runs of a pair."""

    run: str
    step: int
    sha256: str  # of the checkpoint's state.json, which has the checksums of all else

    def recorded(self) -> dict[str, Any]:
        return asdict(self)


def start_from(
    folder: str, trained: Stateful, ranks: Ranks, num_steps: int, field: str = "checkpoint.start_from"
) -> Origin:
    """Give `trained` the weights and the optimizer state of a checkpoint. Collective.

    Raises RecipeError, on every rank alike, where there is none, or one that does not fit.
    """
    path, wrong, found = Path(folder).expanduser(), None, None
    wanted = trained.pieces()
    shapes = ranks.all_gather_world(
        {name: piece.shape for held in wanted.values() for name, piece in held.pieces}
    )
    try:
        state, origin = _opened(path, ranks, num_steps)
        with contextlib.ExitStack() as opened:
            saved = _Saved([opened.enter_context(safe_open(path / name, "pt")) for name in state.files])
            _check_fit(saved.shapes(), functools.reduce(operator.or_, shapes))
            found = _tensors_of(saved, wanted, trained.local_state())
    except (AbrunError, OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        wrong = " ".join(str(error).split()) or type(error).__name__
    words = next((each for each in ranks.all_gather_world(wrong) if each), None)
    if words:
        raise RecipeError(Code.START_DOES_NOT_FIT(field=field, folder=folder, problem=words))
    assert found is not None
    trained.load_local_state(found)
    return origin


def _opened(path: Path, ranks: Ranks, num_steps: int) -> tuple[SavedState, Origin]:
    """Its files, of which this rank has checked some, are as they were written."""
    state = read_saved_state(path)
    if state.step >= num_steps:
        raise StoreError(f"it is of step {state.step}, and steps is {num_steps}")
    for name in list(state.files)[ranks.rank :: ranks.size]:
        wrong = find_damage(path / name, state.files[name])
        if wrong:
            raise StoreError(f"{name} {wrong}")
    digest = fingerprint(path / SAVED_STATE)["sha256"]
    return state, Origin(run=state.run, step=state.step, sha256=digest)


def _tensors_of(saved: "_Saved", wanted: Mapping[str, Held], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `load_local_state` takes. Raises ValueError."""
    return {
        name: saved.read_held(held, own[name].dtype if name in own else None)
        for name, held in wanted.items()
        if held.pieces[0][0] in saved  # a parameter that never had a gradient has no optimizer state
    }


class _Saved:
    """The tensors of all ranks' files, as pieces of whole ones."""

    def __init__(self, files: list[Any]) -> None:
        # By the whole's name and where the piece is: of ranks that have the same, one is as good as another.
        self._places: dict[str, dict[str, tuple[Piece, Callable[[tuple[slice, ...]], Tensor]]]] = {}
        joined: dict[str, _Joined] = {}
        latest: dict[str, list[Tensor]] = {}
        for file in files:
            for name, held in held_in(file.metadata()).items():
                if not held.is_piece:
                    one = joined.setdefault(repr(held.pieces), _Joined(held, latest))
                    one.spans[held.span] = partial(file.get_tensor, name)
                for index, (whole, piece) in enumerate(held.pieces):
                    read = partial(_part_of_file, file, name)
                    if not held.is_piece:
                        read = partial(joined[repr(held.pieces)].read, index)
                    self._places.setdefault(whole, {}).setdefault(repr(piece.slices), (piece, read))

    def __contains__(self, whole: str) -> bool:
        return whole in self._places

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: next(iter(there.values()))[0].shape for name, there in self._places.items()}

    def read_held(self, held: Held, dtype: torch.dtype | None) -> Tensor:
        """`dtype`: which it has to be in; None: as saved."""
        exact = None if held.rounded else dtype
        found = held.joined([self._read(name, piece, exact) for name, piece in held.pieces])
        return found if dtype is None else found.to(dtype)

    def _read(self, name: str, wanted: Piece, dtype: torch.dtype | None) -> Tensor:
        """One piece, put together."""
        own: Tensor | None = None
        num_read = 0
        for piece, read in self._places[name].values():
            part = piece.common(wanted)
            if part is None:
                continue
            there = read(piece.inside(part))
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


class _Joined:
    """A tensor of several pieces, or of whose elements each of some files has a span.

    `latest` is shared by all of them: what one was split into last. Its pieces are mostly asked for together.
    """

    def __init__(self, held: Held, latest: dict[str, list[Tensor]]) -> None:
        self._held, self._latest = held, latest
        self.spans: dict[tuple[int, int] | None, Callable[[], Tensor]] = {}

    def read(self, index: int, part: tuple[slice, ...]) -> Tensor:
        key = repr(self._held.pieces)
        if key not in self._latest:
            self._latest.clear()
            self._latest[key] = self._held.split(self._whole())
        return self._latest[key][index][part]

    def _whole(self) -> Tensor:
        if None in self.spans:
            return self.spans[None]()
        flat = torch.cat([self.spans[span]() for span in sorted(span for span in self.spans if span)])
        if len(flat) != math.prod(self._held.shape):
            raise ValueError(f"{self._held.pieces[0][0]} is not whole")
        return flat.view(self._held.shape)


def _part_of_file(file: Any, name: str, part: tuple[slice, ...]) -> Tensor:
    return file.get_slice(name)[part] if part else file.get_tensor(name)


def _check_fit(saved: Mapping[str, tuple[int, ...]], run: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError where the two are of other models, or another algorithm's parts."""
    there, here = ({name for name in names if "weights/" in name} for names in (saved, run))
    for names, words in ((there - here, "which this run lacks"), (here - there, "which it lacks")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"this run and it train other weights: {min(names)}{more}, {words}")
    for name, shape in run.items():
        if name in saved and saved[name] != shape:
            raise ValueError(f"{name} has the shape {list(saved[name])}, and {list(shape)} in this run")
