"""Checkpoints: safetensors and JSON only, written atomically and verified by checksums.

    checkpoints/step-000050/state.json              run, step, attempt, ranks, checksums of the files
    checkpoints/step-000050/rank-0.safetensors      this rank's weights, optimizer and random-number states,
                                                    and which slices of full tensors they are

A folder gets its final name by a rename, after every rank has written its file and everything is synced to
disk. A run that is killed at any moment, even by power loss, finds the last complete checkpoint. Data order
and sampling are functions of seed and step, so the step is the only position to save.
"""

import contextlib
import functools
import math
import operator
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from abrun.errors import AbrunError, RecipeError, StoreError
from abrun.runs.files import (
    find_damage,
    fingerprint,
    is_directory,
    is_file,
    make_folder,
    share_new_folder,
    share_written_file,
    sync_file,
    sync_folder,
    wrap_write_errors,
    write_json,
)
from abrun.runs.records import SAVED_STATE, SavedState, StartCheckpoint, list_checkpoints, read_saved_state
from abrun.runs.rundir import RunDir
from abrun.runs.writer import RunWriter
from abrun.trainer.backends.ranks import Ranks
from abrun.trainer.backends.shards import Piece, ShardSpec, specs_from_metadata, specs_to_metadata

T = TypeVar("T")


class Stateful(Protocol):
    """An object whose state a rank saves and restores in place: tensors by name."""

    def local_state(self) -> dict[str, Tensor]: ...

    def load_local_state(self, state: dict[str, Tensor]) -> None: ...

    def shard_specs(self) -> Mapping[str, ShardSpec]: ...


class _DamagedCheckpoint(Exception):
    """A checkpoint differs from what was written; the message says which file, and how."""


def save(
    directory: Path, trained: Stateful, ranks: Ranks, *, step: int, keep: int, writer: RunWriter | None
) -> None:
    """Write the state after `step` below `directory` and drop all but the `keep` newest. Collective.

    Rank 0 has the attempt's `writer`. Its earlier records are synced to disk first, and no checkpoint is
    published once a newer attempt owns the run.
    """
    with _collective_section(ranks, directory) as shared:
        if ranks.is_first:  # named by attempt, because ranks of an older attempt may still be writing
            shared.local = directory / f".step-{step:06d}-{writer.attempt if writer else 0}.partial"
            _empty_folder(shared.local)
    partial = shared.by_rank[0]
    with _removing_on_failure(partial, ranks):
        with _collective_section(ranks, partial) as shared:
            tensors = trained.local_state() | _get_rng_state()
            state = {name: tensor.contiguous() for name, tensor in tensors.items()}
            path = partial / f"rank-{ranks.rank}.safetensors"
            save_file(state, path, specs_to_metadata(trained.shard_specs(), state))
            shared.local = {path.name: _sync_and_fingerprint(path)}
        with _collective_section(ranks, partial):
            if writer:
                files = {name: content for files in shared.by_rank for name, content in files.items()}
                content = SavedState(
                    run=RunDir(writer.path).identity(),
                    step=step,
                    num_ranks=ranks.size,
                    attempt=writer.attempt,
                    files=files,
                )
                write_json(partial / SAVED_STATE, asdict(content))
                writer.sync()
                _publish(partial, directory / f"step-{step:06d}", writer)
                checkpoints = list_checkpoints(directory)
                steps_to_keep = [saved_step for saved_step in checkpoints if saved_step <= step][-keep:]
                # Later steps are removed too: `restore` has skipped their checkpoints.
                for old_step in checkpoints.keys() - steps_to_keep:
                    _remove(checkpoints[old_step])


def restore(
    directory: Path, trained: Stateful, ranks: Ranks, writer: RunWriter | None, *, start_step: int = 0
) -> int:
    """Load the newest checkpoint that is valid on every rank; return its step. Collective.

    Returns `start_step`, the step after which the run began, if there is no checkpoint. Skips checkpoints
    with steps that are not recorded, or were recorded again by a later attempt. Raises StoreError if there
    are checkpoints and all are damaged.
    """
    with _collective_section(ranks, directory) as shared:
        if writer:
            for partial in sorted(directory.glob(".*.partial")):  # of attempts killed while saving
                _remove(partial)
            run_dir = RunDir(writer.path)
            shared.local = list_checkpoints(directory), run_dir.step_attempts(), run_dir.identities()
    checkpoints, recorded, identities = shared.by_rank[0]
    damages: list[str] = []
    for step in sorted(checkpoints, reverse=True):
        tensors, gap, problem = {}, None, None
        try:
            state = _read_state(checkpoints[step], step, ranks.size, identities)
            gap = _find_gap(state, recorded, start_step)
            if gap is None:
                tensors = _read_rank_file(checkpoints[step], state, ranks.rank, trained)
        except _DamagedCheckpoint as error:
            problem = str(error)
        problems = [rank_problem for rank_problem in ranks.all_gather_world(problem) if rank_problem]
        if problems:
            damages.append(f"step {step}: {problems[0]}")
            if writer:
                writer.event("checkpoint_damaged", step=step, reason=problems[0])
        elif gap:
            if writer:
                writer.event("checkpoint_passed_over", step=step, reason=gap)
        else:
            _restore_rng_state(tensors)
            trained.load_local_state(tensors)
            return step
    if damages and len(damages) == len(checkpoints):
        raise StoreError(
            f"{directory}: all checkpoints are damaged ({damages[0]}); "
            "remove this folder to start the run again"
        )
    return start_step


def save_final(final: Path, ranks: Ranks, write: Callable[[Path], None], writer: RunWriter | None) -> Any:
    """Publish a folder atomically; `write`, which is collective, creates its contents. Collective.

    Returns the fingerprint (see abrun.runs.files) of each file on rank 0.
    """
    partial = final.with_name(f".{final.name}.partial")
    with _collective_section(ranks, partial):
        if ranks.is_first:
            _empty_folder(partial)
    fingerprints = {}
    with _removing_on_failure(partial, ranks), _collective_section(ranks, partial):
        write(partial)
        if writer:
            files = sorted(path for path in partial.rglob("*") if is_file(path))
            fingerprints = {str(path.relative_to(partial)): _sync_and_fingerprint(path) for path in files}
            sync_folder(partial)
            _publish(partial, final, writer)
    return fingerprints


# --- writing ---


@dataclass(slots=True)
class _SharedValue:
    """A value that each rank passes to the others at the end of a collective section."""

    local: Any = None
    by_rank: list[Any] = None  # pyright: ignore[reportAssignmentType]  # set at the end of the section


@contextlib.contextmanager
def _collective_section(ranks: Ranks, path: Path) -> Iterator[_SharedValue]:
    """Run a section in which all ranks succeed, or all raise the error of one of them. Collective.

    Yields an _SharedValue: set `local` inside of the section; `by_rank` has the values of all ranks after it.
    """
    shared, local_error = _SharedValue(), None
    try:
        with wrap_write_errors(path):
            try:
                yield shared
            except SafetensorError as error:  # how safetensors reports a full disk
                raise OSError(str(error)) from error
    except AbrunError as error:
        local_error = error
    gathered = ranks.all_gather_world((shared.local, local_error and str(local_error)))
    if local_error:
        raise local_error
    shared.by_rank = [mine for mine, _ in gathered]
    for _, message in gathered:
        if message:
            raise StoreError(message)


def _empty_folder(path: Path) -> None:
    make_folder(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    share_new_folder(path)


@contextlib.contextmanager
def _removing_on_failure(partial: Path, ranks: Ranks) -> Iterator[None]:
    """Remove an incomplete folder if a save fails; by then, all ranks have left the section."""
    try:
        yield
    except Exception:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync_and_fingerprint(path: Path) -> dict[str, Any]:
    """Sync a file to disk, share it with readers of the experiment, and return its fingerprint."""
    share_written_file(path)
    sync_file(path)
    return fingerprint(path)


def _publish(partial: Path, final: Path, writer: RunWriter) -> None:
    """Rename a synced folder to its final name. Raises FencedError if a newer attempt owns the run."""
    writer.check_fence()
    if os.path.lexists(final):
        _remove(final)
    partial.rename(final)
    sync_folder(final.parent)


def _remove(path: Path) -> None:
    """Remove a folder, file or link; the target of a link is kept."""
    if is_directory(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- reading ---


def _read_state(path: Path, step: int, num_ranks: int, identities: Sequence[str]) -> SavedState:
    """Read state.json. Raises _DamagedCheckpoint, and StoreError for a different number of ranks."""
    try:
        state = read_saved_state(path)
    except StoreError as error:
        raise _DamagedCheckpoint(str(error)) from None
    if state.run not in identities:
        got = state.run[:80]
        raise _DamagedCheckpoint(f"{SAVED_STATE} run: got {got!r}; this run is {identities[0]!r}")
    if state.step != step:
        raise _DamagedCheckpoint(f"{SAVED_STATE} step: got {state.step}; the folder is for step {step}")
    if state.num_ranks != num_ranks:
        raise StoreError(
            f"{path}: was written by {state.num_ranks} ranks, but this run has {num_ranks}; resume with "
            f"{state.num_ranks} ranks, or start another run from it (checkpoint.start_from)"
        )
    return state


def _read_rank_file(path: Path, state: SavedState, rank: int, trained: Stateful) -> dict[str, Tensor]:
    """Read and verify the file of a rank. Raises _DamagedCheckpoint."""
    name = f"rank-{rank}.safetensors"
    problem = find_damage(path / name, state.files[name])
    if problem:
        raise _DamagedCheckpoint(f"{name} {problem}")
    try:
        tensors = load_file(path / name)
        _check_rng_state(tensors)
        for key, tensor in trained.local_state().items():
            saved_tensor = tensors[key]
            if (saved_tensor.shape, saved_tensor.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"{key} has the shape {list(saved_tensor.shape)} and is {saved_tensor.dtype}"
                )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        message = " ".join(str(error).split())
        raise _DamagedCheckpoint(f"{name} does not fit: {type(error).__name__}: {message}") from None
    return tensors


def _find_gap(state: SavedState, recorded: Mapping[int, int], start_step: int) -> str | None:
    """Return why the recorded steps do not lead to a checkpoint; None if they do."""
    for step in range(start_step + 1, state.step + 1):
        if step not in recorded:
            return f"step {step} is not recorded in metrics.jsonl"
        if recorded[step] > state.attempt:
            return f"step {step} was recorded again by attempt {recorded[step]}, which began before it"
    return None


# --- random numbers ---


def _get_rng_state() -> dict[str, Tensor]:
    _, python_state, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)["state"]
    state = {
        "rng/torch": torch.get_rng_state(),
        "rng/python": torch.tensor(python_state, dtype=torch.int64),
        "rng/numpy": torch.tensor([*numpy_state["key"].tolist(), numpy_state["pos"]], dtype=torch.int64),
    }
    if torch.cuda.is_available():
        state["rng/cuda"] = torch.cuda.get_rng_state()
    return state


def _check_rng_state(state: Mapping[str, Tensor]) -> None:
    """Set the random-number states of a checkpoint on new generators, before any state changes.

    Raises KeyError, ValueError, TypeError or RuntimeError if they are missing or invalid.
    """
    *key, position = state["rng/numpy"].tolist()
    if not 0 <= position <= len(key):
        raise ValueError(f"rng/numpy: got the position {position}")
    set_cuda = torch.Generator(device="cuda").set_state if "rng/cuda" in state else None
    new_python, new_numpy = random.Random(0), np.random.RandomState(0)
    _set_rng_state(state, torch.Generator().set_state, new_python.setstate, new_numpy.set_state, set_cuda)


def _restore_rng_state(state: Mapping[str, Tensor]) -> None:
    _set_rng_state(state, torch.set_rng_state, random.setstate, np.random.set_state, torch.cuda.set_rng_state)


def _set_rng_state(
    state: Mapping[str, Tensor],
    set_torch: Callable[[Tensor], object],
    set_python: Callable[[Any], object],
    set_numpy: Callable[[Any], object],
    set_cuda: Callable[[Tensor], object] | None,
) -> None:
    *key, position = state["rng/numpy"].tolist()
    set_torch(state["rng/torch"])
    set_python((3, tuple(state["rng/python"].tolist()), None))
    set_numpy({"bit_generator": "MT19937", "state": {"key": np.array(key), "pos": position}})
    if "rng/cuda" in state and set_cuda:
        set_cuda(state["rng/cuda"])


# Start of a run from a checkpoint of another run, in any parallel layout and with either backend.
#
# The files in the checkpoint record which slices of full tensors they contain. Each rank of the new
# run reads only what its own shards need. The step count continues, and with it learning rates,
# sampling and data, which are functions of the step.


def start_from(
    folder: str, trained: Stateful, ranks: Ranks, num_steps: int, field: str = "checkpoint.start_from"
) -> StartCheckpoint:
    """Load weights and optimizer state of a checkpoint into `trained`. Collective.

    Raises RecipeError on all ranks if the checkpoint is missing or does not fit.
    """
    path = Path(folder).expanduser()

    def open_files() -> tuple[list[Path], StartCheckpoint]:
        state, origin = _open_checkpoint(path, ranks, num_steps)
        return [path / name for name in state.files], origin

    return _load_from_any_layout(
        open_files,
        trained,
        ranks,
        lambda problem: f"{field}: got {folder!r}: {problem}; give a checkpoint of a run of the same model",
    )


def load_saved(paths: Sequence[Path], trained: Stateful, ranks: Ranks) -> None:
    """Load weights and optimizer state from the files of all ranks of another layout. Collective.

    Raises RecipeError on all ranks if they are of another model.
    """
    _load_from_any_layout(
        lambda: (paths, None),
        trained,
        ranks,
        lambda problem: f"the arms have different weights: {problem}; compare arms of one model",
    )


def _load_from_any_layout(
    open_files: Callable[[], tuple[Sequence[Path], T]],
    trained: Stateful,
    ranks: Ranks,
    describe: Callable[[str], str],
) -> T:
    """Load the files that `open_files` returns. Collective.

    Raises RecipeError on all ranks, with the description of a problem, if they do not fit.
    """
    problem, loaded = None, None
    wanted_shards = trained.shard_specs()
    shapes = ranks.all_gather_world(
        {name: shard.shape for held in wanted_shards.values() for name, shard in held.pieces}
    )
    try:
        paths, origin = open_files()
        with contextlib.ExitStack() as opened:
            saved = SavedTensors([opened.enter_context(safe_open(path, "pt")) for path in paths])
            _check_fit(saved.shapes(), functools.reduce(operator.or_, shapes))
            loaded = origin, _read_tensors(saved, wanted_shards, trained.local_state())
    except (AbrunError, OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    problems = [rank_problem for rank_problem in ranks.all_gather_world(problem) if rank_problem]
    if problems:
        raise RecipeError(describe(problems[0]))
    assert loaded is not None
    origin, tensors = loaded
    trained.load_local_state(tensors)
    return origin


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
            if None in self.spans:
                full = self.spans[None]()
            else:
                full = torch.cat([self.spans[span]() for span in sorted(span for span in self.spans if span)])
                if len(full) != math.prod(self._held.shape):
                    raise ValueError(f"{self._held.pieces[0][0]} is incomplete")
                full = full.view(self._held.shape)
            self._last_split[key] = self._held.split(full)
        return self._last_split[key][index][slices]


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
