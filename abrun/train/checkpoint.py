"""Training state on disk: safetensors and JSON only, complete or not there.

    checkpoints/step-000050/state.json              step and number of ranks
    checkpoints/step-000050/rank-0.safetensors      this rank's weights, optimizer and random-number states

A folder gets its name by a rename after every rank has written its file, so a run killed at any moment finds
the last complete one. Data order and sampling are functions of seed and step (abrun.train.seeds): the step is
their whole position.
"""

import random
import re
import shutil
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from abrun import store
from abrun.errors import StoreError


class Stateful(Protocol):
    """What a rank saves of a run and gets back: tensors in place, by name."""

    def local_state(self) -> dict[str, Tensor]: ...

    def load_local_state(self, state: dict[str, Tensor]) -> None: ...


def save(directory: Path, trained: Stateful, step: int, keep: int) -> None:
    """Write the state after `step` below `directory` and drop all but the `keep` newest. Collective."""
    rank = dist.get_rank()
    final = directory / f"step-{step:06d}"
    partial = directory / f".step-{step:06d}.partial"
    with store.explained(partial):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        state = {name: tensor.contiguous() for name, tensor in (trained.local_state() | _rng_state()).items()}
        try:
            save_file(state, partial / f"rank-{rank}.safetensors")
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        dist.barrier()
        if rank == 0:
            store.write_json(partial / "state.json", {"step": step, "num_ranks": dist.get_world_size()})
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in _complete(directory)[:-keep]:
                shutil.rmtree(old)
    dist.barrier()


def restore(directory: Path, trained: Stateful) -> int:
    """Load the newest complete checkpoint. Returns its step, or 0 where there is none. Collective."""
    found = _complete(directory)
    if not found:
        return 0
    newest = found[-1]
    state = store.read_json(newest / "state.json")
    if state["num_ranks"] != dist.get_world_size():
        raise StoreError(
            f"{newest}: was written by {state['num_ranks']} ranks and this run has {dist.get_world_size()}; "
            "resume with as many, or remove the checkpoint to start again"
        )
    file = newest / f"rank-{dist.get_rank()}.safetensors"
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{file}: does not load: {error}; remove {newest} to resume from the one before"
        ) from error
    _restore_rng(tensors)
    trained.load_local_state(tensors)
    return state["step"]


def _complete(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if re.fullmatch(r"step-\d+", path.name))


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


def _restore_rng(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["rng/torch"])
    random.setstate((3, tuple(state["rng/python"].tolist()), None))
    *key, position = state["rng/numpy"].tolist()
    np.random.set_state({"bit_generator": "MT19937", "state": {"key": np.array(key), "pos": position}})
    if "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"])
