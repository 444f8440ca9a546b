"""Training state on disk: safetensors and JSON only, complete or not there, and known to be what was written.

    checkpoints/step-000050/state.json              run, step, attempt, ranks, checksums of the files
    checkpoints/step-000050/rank-0.safetensors      this rank's weights, optimizer and random-number states;
                                                    which pieces of whole tensors these are

A folder gets its name by a rename after every rank has written its file and all of it is on the disk, so a
run killed at any moment, with the power or without, finds the last complete one. Data order and sampling are
functions of seed and step: the step is their whole position.
"""

import contextlib
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from abrun.backends.pieces import Held, as_metadata
from abrun.backends.ranks import Ranks
from abrun.errors import AbrunError, StoreError
from abrun.regular_files import is_directory, is_file
from abrun.runs.access import share_new_folder
from abrun.runs.files import (
    find_damage,
    fingerprint,
    make_folder,
    share_written_file,
    sync_file,
    sync_folder,
    wrap_write_errors,
    write_json,
)
from abrun.runs.records import SAVED_STATE, SavedState, read_saved_state
from abrun.runs.rundir import RunDir
from abrun.runs.writer import RunWriter


class Stateful(Protocol):
    """What a rank saves of a run and gets back: tensors in place, by name."""

    def local_state(self) -> dict[str, Tensor]: ...

    def load_local_state(self, state: dict[str, Tensor]) -> None: ...

    def pieces(self) -> Mapping[str, Held]: ...


class _Unsound(Exception):
    """A checkpoint is not what was written: which file, and why."""


def save(
    directory: Path, trained: Stateful, ranks: Ranks, *, step: int, keep: int, writer: RunWriter | None
) -> None:
    """Write the state after `step` below `directory` and drop all but the `keep` newest. Collective.

    Rank 0 has the attempt's `writer`: what it has written of the steps before is on the disk first, and no
    checkpoint appears once a newer attempt owns the run.
    """
    with _together(ranks, directory) as begun:
        if ranks.is_first:  # a folder of this attempt's own: ranks of an older one may be at it still
            begun.mine = directory / f".step-{step:06d}-{writer.attempt if writer else 0}.partial"
            _empty_folder(begun.mine)
    partial = begun.of_all[0]
    with _swept(partial, ranks):
        _save_into(partial, directory, trained, ranks, step=step, keep=keep, writer=writer)


def _save_into(
    partial: Path,
    directory: Path,
    trained: Stateful,
    ranks: Ranks,
    *,
    step: int,
    keep: int,
    writer: RunWriter | None,
) -> None:
    with _together(ranks, partial) as shared:
        state = {name: tensor.contiguous() for name, tensor in (trained.local_state() | _rng_state()).items()}
        path = partial / f"rank-{ranks.rank}.safetensors"
        save_file(state, path, as_metadata(trained.pieces(), state))
        shared.mine = {path.name: _synced(path)}
    with _together(ranks, partial):
        if writer:
            files = {name: of for by_name in shared.of_all for name, of in by_name.items()}
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
            complete = _complete(directory)
            kept = [each for each in complete if each <= step][-keep:]
            for old in complete.keys() - kept:  # those after this step, too: restore has passed them over
                _remove(complete[old])


def restore(
    directory: Path, trained: Stateful, ranks: Ranks, writer: RunWriter | None, *, first: int = 0
) -> int:
    """Load the newest checkpoint that every rank finds sound; `first` is the step that the run began after.

    Returns its step, or `first` where there is none. Collective.

    One whose steps are not all recorded, or were recorded anew by a later attempt, is passed over. Raises
    StoreError where there are checkpoints and none of them is sound.
    """
    with _together(ranks, directory) as shared:
        if writer:
            _remove_partial(directory)
            here = RunDir(writer.path)
            shared.mine = _complete(directory), here.step_attempts(), here.identity()
    complete, recorded, run = shared.of_all[0]
    damages: list[str] = []
    for step in sorted(complete, reverse=True):
        tensors, unrecorded, wrong = {}, None, None
        try:
            state = _state_of(complete[step], step, ranks.size, run)
            unrecorded = _unrecorded(state, recorded, first)
            if unrecorded is None:
                tensors = _tensors_of(complete[step], state, ranks.rank, trained)
        except _Unsound as error:
            wrong = str(error)
        found = [each for each in ranks.all_gather_world(wrong) if each]
        if found:
            damages.append(f"step {step}: {found[0]}")
            _say(writer, "checkpoint_damaged", step, found[0])
        elif unrecorded:
            _say(writer, "checkpoint_passed_over", step, unrecorded)
        else:
            _restore_rng(tensors)
            trained.load_local_state(tensors)
            return step
    if damages and len(damages) == len(complete):
        raise StoreError(
            f"{directory}: no checkpoint here is sound ({damages[0]}); "
            "remove this folder to start the run again"
        )
    return first


def save_final(final: Path, ranks: Ranks, write: Callable[[Path], None], writer: RunWriter | None) -> Any:
    """Make a folder appear whole, with what `write`, which is collective, puts there. Collective.

    Returns a store.fingerprint of each of its files on rank 0.
    """
    partial = final.with_name(f".{final.name}.partial")
    with _together(ranks, partial):
        if ranks.is_first:
            _empty_folder(partial)
    fingerprints = {}
    with _swept(partial, ranks), _together(ranks, partial):
        write(partial)
        if writer:
            files = sorted(path for path in partial.rglob("*") if is_file(path))
            fingerprints = {str(path.relative_to(partial)): _synced(path) for path in files}
            sync_folder(partial)
            _publish(partial, final, writer)
    return fingerprints


# --- writing ---


@dataclass(slots=True)
class _Shared:
    """What each rank has to tell the others at the end of a part that all of them go through."""

    mine: Any = None
    of_all: list[Any] = None  # pyright: ignore[reportAssignmentType]  # there after the part


@contextlib.contextmanager
def _together(ranks: Ranks, path: Path) -> Iterator[_Shared]:
    """A part in which all ranks succeed, or all of them raise what one of them met. Collective."""
    shared, met = _Shared(), None
    try:
        with wrap_write_errors(path):
            try:
                yield shared
            except SafetensorError as error:  # how safetensors reports a full disk
                raise OSError(str(error)) from error
    except AbrunError as error:
        met = error
    told = ranks.all_gather_world((shared.mine, met and str(met)))
    if met:
        raise met
    shared.of_all = [mine for mine, _ in told]
    for _, words in told:
        if words:
            raise StoreError(words)


def _empty_folder(path: Path) -> None:
    make_folder(path.parent)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    share_new_folder(path)


@contextlib.contextmanager
def _swept(partial: Path, ranks: Ranks) -> Iterator[None]:
    """Remove a folder that will never be whole: where a save fails, all ranks have ended their part of it."""
    try:
        yield
    except Exception:
        if ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _synced(path: Path) -> dict[str, Any]:
    """The fingerprint of a file that is on the disk, for the readers of its experiment."""
    share_written_file(path)
    sync_file(path)
    return fingerprint(path)


def _publish(partial: Path, final: Path, writer: RunWriter) -> None:
    """Give a folder, all of which is on the disk, its name; raises FencedError in an older attempt."""
    writer.check_fence()
    if os.path.lexists(final):
        _remove(final)
    partial.rename(final)
    sync_folder(final.parent)


def _remove(path: Path) -> None:
    """A folder, or what lies in its place; of a link not what it leads to."""
    if is_directory(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_partial(directory: Path) -> None:
    """What attempts before this one left when they were killed as they saved."""
    for name in _names_in(directory):
        if name.startswith(".") and name.endswith(".partial"):
            _remove(directory / name)


# --- reading ---


def _names_in(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _complete(directory: Path) -> dict[int, Path]:
    """The checkpoints by step, ascending."""
    steps = sorted(int(name[5:]) for name in _names_in(directory) if re.fullmatch(r"step-\d{6,18}", name))
    named = {step: directory / f"step-{step:06d}" for step in steps}
    return {step: path for step, path in named.items() if os.path.lexists(path)}


def _state_of(path: Path, step: int, num_ranks: int, run: str) -> SavedState:
    """Raises _Unsound, and StoreError where as it says it is another number of ranks' own."""
    try:
        state = read_saved_state(path)
    except StoreError as error:
        raise _Unsound(str(error)) from None
    if state.run != run:
        raise _Unsound(f"{SAVED_STATE} run: got {state.run[:80]!r}; this run is {run!r}")
    if state.step != step:
        raise _Unsound(f"{SAVED_STATE} step: got {state.step}; the folder is of step {step}")
    if state.num_ranks != num_ranks:
        raise StoreError(
            f"{path}: was written by {state.num_ranks} ranks and this run has {num_ranks}; resume with as "
            "many, or begin another run from it (checkpoint.start_from)"
        )
    return state


def _tensors_of(path: Path, state: SavedState, rank: int, trained: Stateful) -> dict[str, Tensor]:
    """A rank's file, which is as it was written, and fits. Raises _Unsound."""
    name = f"rank-{rank}.safetensors"
    wrong = find_damage(path / name, state.files[name])
    if wrong:
        raise _Unsound(f"{name} {wrong}")
    try:
        tensors = load_file(path / name)
        _rng_of(tensors)
        for key, tensor in trained.local_state().items():
            there = tensors[key]
            if (there.shape, there.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{key} has the shape {list(there.shape)} and is {there.dtype}")
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        words = " ".join(str(error).split())
        raise _Unsound(f"{name} does not fit: {type(error).__name__}: {words}") from None
    return tensors


def _unrecorded(state: SavedState, recorded: Mapping[int, int], first: int) -> str | None:
    """Why what is recorded of the steps is not what led to a checkpoint; None where it is."""
    for step in range(first + 1, state.step + 1):
        if step not in recorded:
            return f"step {step} is not recorded in metrics.jsonl"
        if recorded[step] > state.attempt:
            return f"step {step} was recorded again by attempt {recorded[step]}, which began before it"
    return None


def _say(writer: RunWriter | None, event: str, step: int, reason: str) -> None:
    if writer:
        writer.event(event, step=step, reason=reason)


# --- random numbers ---


@dataclass(frozen=True, slots=True)
class _RandomNumbers:
    torch: Tensor
    python: tuple[Any, ...]
    numpy: dict[str, Any]
    cuda: Tensor | None


def _rng_state() -> dict[str, Tensor]:
    _, words, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)["state"]
    state = {
        "rng/torch": torch.get_rng_state(),
        "rng/python": torch.tensor(words, dtype=torch.int64),
        "rng/numpy": torch.tensor([*numpy_state["key"].tolist(), numpy_state["pos"]], dtype=torch.int64),
    }
    if torch.cuda.is_available():
        state["rng/cuda"] = torch.cuda.get_rng_state()
    return state


def _rng_of(state: Mapping[str, Tensor]) -> _RandomNumbers:
    """The states that a checkpoint holds. Raises KeyError, ValueError, TypeError or RuntimeError for none."""
    *key, position = state["rng/numpy"].tolist()
    if not 0 <= position <= len(key):
        raise ValueError(f"rng/numpy: got the position {position}")
    found = _RandomNumbers(
        torch=state["rng/torch"],
        python=(3, tuple(state["rng/python"].tolist()), None),
        numpy={"bit_generator": "MT19937", "state": {"key": np.array(key), "pos": position}},
        cuda=state.get("rng/cuda"),
    )
    torch.Generator().set_state(found.torch)  # generators of their own, to see whether they take it
    random.Random(0).setstate(found.python)
    np.random.RandomState(0).set_state(found.numpy)
    if found.cuda is not None:
        torch.Generator(device="cuda").set_state(found.cuda)
    return found


def _restore_rng(state: Mapping[str, Tensor]) -> None:
    found = _rng_of(state)
    torch.set_rng_state(found.torch)
    random.setstate(found.python)
    np.random.set_state(found.numpy)
    if found.cuda is not None:
        torch.cuda.set_rng_state(found.cuda)
