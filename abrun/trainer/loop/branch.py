"""Start of a run from a checkpoint of another run, in any parallel layout and with either backend.

The files in the checkpoint record which slices of full tensors they contain. Each rank of the new run reads
only what its own shards need. The step count continues, and with it learning rates, sampling and data, which
are functions of the step.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from abrun.errors import AbrunError, RecipeError, StoreError
from abrun.runs.files import find_damage, fingerprint
from abrun.runs.records import SAVED_STATE, SavedState, StartCheckpoint, read_saved_state
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.shards import Piece, ShardSpec, specs_from_metadata
from abrun.trainer.loop.checkpoint import Stateful


def start_from(
    folder: str, trained: Stateful, ranks: Ranks, num_steps: int, field: str = "checkpoint.start_from"
) -> StartCheckpoint:
    """Load weights and optimizer state of a checkpoint into `trained`. Collective.

    Raises RecipeError on all ranks if the checkpoint is missing or does not fit.
    """
    path, problem, tensors = Path(folder).expanduser(), None, None
    wanted_shards = trained.shard_specs()
    shapes = ranks.all_gather_world(
        {name: shard.shape for held in wanted_shards.values() for name, shard in held.pieces}
    )
    try:
        state, origin = _open_checkpoint(path, ranks, num_steps)
        with contextlib.ExitStack() as opened:
            saved = SavedTensors([opened.enter_context(safe_open(path / name, "pt")) for name in state.files])
            _check_fit(saved.shapes(), functools.reduce(operator.or_, shapes))
            tensors = _read_tensors(saved, wanted_shards, trained.local_state())
    except (AbrunError, OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    first_problem = next(
        (rank_problem for rank_problem in ranks.all_gather_world(problem) if rank_problem), None
    )
    if first_problem:
        raise RecipeError(
            f"{field}: got {folder!r}: {first_problem}; give a checkpoint of a run of the same model"
        )
    assert tensors is not None
    trained.load_local_state(tensors)
    return origin


def load_saved(paths: Sequence[Path], trained: Stateful, ranks: Ranks) -> None:
    """Load weights and optimizer state from the files of all ranks of another layout. Collective.

    Raises RecipeError on all ranks if they are of another model.
    """
    problem, tensors = None, None
    wanted_shards = trained.shard_specs()
    shapes = ranks.all_gather_world(
        {name: shard.shape for held in wanted_shards.values() for name, shard in held.pieces}
    )
    try:
        with contextlib.ExitStack() as opened:
            saved = SavedTensors([opened.enter_context(safe_open(path, "pt")) for path in paths])
            _check_fit(saved.shapes(), functools.reduce(operator.or_, shapes))
            tensors = _read_tensors(saved, wanted_shards, trained.local_state())
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    problems = [rank_problem for rank_problem in ranks.all_gather_world(problem) if rank_problem]
    if problems:
        raise RecipeError(f"the arms have different weights: {problems[0]}; compare arms of one model")
    assert tensors is not None
    trained.load_local_state(tensors)


def _open_checkpoint(path: Path, ranks: Ranks, num_steps: int) -> tuple[SavedState, StartCheckpoint]:
    """Read the state of a checkpoint and verify this rank's share of its files. Raises StoreError."""
    state = read_saved_state(path)
    if state.step >= num_steps:
        raise StoreError(f"the checkpoint is at step {state.step}, but steps is {num_steps}")
    for name in list(state.files)[ranks.rank :: ranks.size]:
        problem = find_damage(path / name, state.files[name])
        if problem:
            raise StoreError(f"{name} {problem}")
    digest = fingerprint(path / SAVED_STATE)["sha256"]
    return state, StartCheckpoint(run=state.run, step=state.step, sha256=digest)


def _read_tensors(
    saved: "SavedTensors", wanted_shards: Mapping[str, ShardSpec], current: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors for `load_local_state`. Raises ValueError."""
    return {
        name: saved.read_held(held, current[name].dtype if name in current else None)
        for name, held in wanted_shards.items()
        if held.pieces[0][0] in saved  # a parameter that never had a gradient has no optimizer state
    }


class SavedTensors:
    """The full tensors of a checkpoint, readable by slices from the files of all ranks."""

    def __init__(self, files: list[Any]) -> None:
        # Keyed by full name and slices: if several ranks have the same shard, any of them will do.
        self._sources: dict[str, dict[str, tuple[Piece, Callable[[tuple[slice, ...]], Tensor]]]] = {}
        assembled: dict[str, _AssembledTensor] = {}
        last_split: dict[str, list[Tensor]] = {}
        for file in files:
            for name, held in specs_from_metadata(file.metadata()).items():
                if not held.is_single_piece:
                    assembled_tensor = assembled.setdefault(
                        repr(held.pieces), _AssembledTensor(held, last_split)
                    )
                    assembled_tensor.spans[held.flat_range] = partial(file.get_tensor, name)
                for index, (full_name, shard) in enumerate(held.pieces):
                    read = partial(_read_slice, file, name)
                    if not held.is_single_piece:
                        read = partial(assembled[repr(held.pieces)].read, index)
                    self._sources.setdefault(full_name, {}).setdefault(repr(shard.slices), (shard, read))

    def __contains__(self, full_name: str) -> bool:
        return full_name in self._sources

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: next(iter(sources.values()))[0].shape for name, sources in self._sources.items()}

    def read_held(self, held: ShardSpec, dtype: torch.dtype | None) -> Tensor:
        """Read a local tensor as `dtype`; None keeps the saved dtype. Raises ValueError on another dtype."""
        required_dtype = None if held.is_rounded_copy else dtype
        tensor = held.assemble([self._read(name, shard, required_dtype) for name, shard in held.pieces])
        return tensor if dtype is None else tensor.to(dtype)

    def _read(self, name: str, wanted_shard: Piece, dtype: torch.dtype | None) -> Tensor:
        """Read one shard, assembled from all saved shards that overlap with it."""
        tensor: Tensor | None = None
        num_read = 0
        for shard, read in self._sources[name].values():
            overlap = shard.intersect(wanted_shard)
            if overlap is None:
                continue
            values = read(shard.relative_to(overlap))
            if dtype is not None and values.dtype != dtype:
                raise ValueError(f"{name} is {values.dtype}, but {dtype} in this run")
            tensor = torch.zeros(wanted_shard.local_shape, dtype=values.dtype) if tensor is None else tensor
            tensor[wanted_shard.relative_to(overlap)] = values
            num_read += values.numel()
        if tensor is None:
            tensor = torch.zeros(wanted_shard.local_shape, dtype=dtype or torch.float32)
        if num_read != tensor.numel():
            raise ValueError(f"{name} is incomplete")
        return tensor


class _AssembledTensor:
    """A saved tensor that holds several shards, or of which each file holds a span of elements.

    `last_split` is shared by all instances and caches the most recent split, because shards of one tensor are
    mostly read in succession.
    """

    def __init__(self, held: ShardSpec, last_split: dict[str, list[Tensor]]) -> None:
        self._held, self._last_split = held, last_split
        self.spans: dict[tuple[int, int] | None, Callable[[], Tensor]] = {}

    def read(self, index: int, slices: tuple[slice, ...]) -> Tensor:
        key = repr(self._held.pieces)
        if key not in self._last_split:
            self._last_split.clear()
            self._last_split[key] = self._held.split(self._assemble())
        return self._last_split[key][index][slices]

    def _assemble(self) -> Tensor:
        if None in self.spans:
            return self.spans[None]()
        flat = torch.cat([self.spans[span]() for span in sorted(span for span in self.spans if span)])
        if len(flat) != math.prod(self._held.shape):
            raise ValueError(f"{self._held.pieces[0][0]} is incomplete")
        return flat.view(self._held.shape)


def _read_slice(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    return file.get_slice(name)[slices] if slices else file.get_tensor(name)


def _check_fit(saved: Mapping[str, tuple[int, ...]], run: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if checkpoint and run have different weights or shapes."""
    saved_names, run_names = ({name for name in names if "weights/" in name} for names in (saved, run))
    for names, place in (
        (saved_names - run_names, "missing in this run"),
        (run_names - saved_names, "missing in the checkpoint"),
    ):
        if names:
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"its weights differ from this run's: {min(names)}{rest} {place}")
    for name, shape in run.items():
        if name in saved and saved[name] != shape:
            raise ValueError(f"{name} has the shape {list(saved[name])}, but {list(shape)} in this run")
