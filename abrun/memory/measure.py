"""`python -m abrun.memory.measure JOB_DIR`: one rank that measures one cell, an arm at one size.

Microbatches of random tokens take the place of the rollouts; everything after them is the trainer's own code.
The first step, a short one unless layers are compiled, makes the optimizer's state and is not reported. What
samples completions does so once, as the recipe says, between the two. Each rank writes a row, also one that
runs out of memory.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from abrun.backends.ranks import join_ranks
from abrun.errors import AbrunError
from abrun.experiment.probe import read_job, refuse, row_writer
from abrun.memory.peak import SNAPSHOT, PeakHistory
from abrun.memory.step import num_rows, of_size
from abrun.messages import sentence
from abrun.models.parts import RandomWeights
from abrun.processes import progress
from abrun.recipe.algorithms import Dpo, PolicyGradientSettings, Sft
from abrun.recipe.run import OwnRunConfig
from abrun.rl.batch import Sequences, random_rollouts
from abrun.train.__main__ import ran_out
from abrun.train.data import check_length
from abrun.train.loop import Algorithm, make_algorithm
from abrun.train.phases import LiveTensors
from abrun.train.rollouts import Rollouts
from abrun.train.setup import Setup, make_setup

OUT_OF_MEMORY = 4  # exit code
PEERS_S = 3.0  # that ranks have to run out of memory likewise, before the first one ends them
WARM_UP = 1024  # tokens of a sequence of the first step, where they may be fewer than those that are measured
WHOLE = "forward_backward"  # the trainer's phase, told apart here


def main() -> int:
    progress.join()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    config = OwnRunConfig.model_validate(job.pop("config"))
    rank = os.environ.get("RANK", "0")
    snapshot = directory / (SNAPSHOT if rank == "0" else f"rank-{rank}-{SNAPSHOT}")
    try:
        row = Cell(config, join_ranks(config.cluster.model_dump()), snapshot, **job).measured()
    except AbrunError as error:
        return refuse(error)
    row_writer(directory, rank).write(row)
    if row["out_of_memory"]:
        if config.cluster.ranks > 1:
            time.sleep(PEERS_S)
        os._exit(OUT_OF_MEMORY)  # the other ranks may wait for this one for ever
    dist.destroy_process_group()
    return 0


class Budget:
    """Limit of a rank's memory: `asked` bytes; None: all that a GPU has, and no limit on CPU cores."""

    def __init__(self, device: torch.device, asked: int | None) -> None:
        self.total_bytes = asked
        if device.type == "cuda":
            available = torch.cuda.get_device_properties(device).total_memory
            self.total_bytes = min(asked or available, available)
            if self.total_bytes < available:
                torch.cuda.set_per_process_memory_fraction(self.total_bytes / available, device)

    def hold(self, tracker: LiveTensors | None) -> None:
        """Have the tracker of a CPU, which has no allocator to refuse anything, raise OutOfMemoryError."""
        if tracker is None or self.total_bytes is None:
            return
        total_bytes = self.total_bytes

        def change(storage: int, num_bytes: int) -> None:
            if num_bytes > 0 and tracker.live_bytes > total_bytes:
                raise torch.OutOfMemoryError(f"{num_bytes} bytes more exceed the budget of {total_bytes}")

        tracker.on_change = change


class Cell:
    """One arm at one size, on one rank."""

    def __init__(
        self,
        config: OwnRunConfig,
        device: torch.device,
        snapshot: Path,
        *,
        length: int,
        num_sequences: int,
        rollouts: bool = True,
        budget_bytes: int | None = None,
    ) -> None:
        self._length, self._num_sequences = length, num_sequences
        self._config, self._own_algorithm = of_size(config, num_sequences), config.algorithm
        self._rollouts = rollouts and isinstance(config.algorithm, PolicyGradientSettings)
        self._device, self._budget = device, Budget(device, budget_bytes)
        self._snapshot = snapshot
        self._setup: Setup | None = None
        self._held: dict[str, int] = {}
        self._device_used: dict[str, int] = {}
        self._history: PeakHistory | None = None

    def measured(self) -> dict[str, Any]:
        """What rank by rank a cell's row holds; `out_of_memory` is the phase that memory ended, or None."""
        ran_out_in = reason = None
        try:
            self._run()
        except (RuntimeError, MemoryError) as error:
            reason = ran_out(error)
            if reason is None:
                raise
            ran_out_in = (self._setup.phases.interrupted if self._setup else None) or "weights"
        return {
            "out_of_memory": ran_out_in,
            "said": reason and sentence(reason),
            "total_bytes": self._budget.total_bytes,
            "held": self._held,
            "device_used": self._device_used,
            "metrics": self._peaks(),
            "peak": self._history.peak() if self._history else None,
        }

    def _run(self) -> None:
        with _weights_made_on(self._device):
            setup = self._setup = make_setup(self._config, 0, None, self._device)
            phases = setup.phases
            self._hold("weights")
            self._budget.hold(phases.tracker)
            algorithm = make_algorithm(setup)
        self._hold("reference_weights")
        setup.policy.around_forward = self._around_forward
        check_length(setup.data.text, self._length, f"--lengths: got {self._length}")
        # What is compiled is compiled for a length
        self._update(algorithm, self._length if self._config.policy.compile else min(self._length, WARM_UP))
        self._hold("optimizer_state")
        try:
            phases.collect()
            if self._rollouts:
                self._sample(setup)
            self._history = PeakHistory(setup.phases, self._snapshot)
            with self._history:
                self._update(algorithm, self._length)
        finally:
            self._note_use("training")
            setup.sampler.close()

    def _update(self, algorithm: Algorithm, length: int) -> None:
        """A step's update on random tokens: as many microbatches as it takes to have one after another."""
        setup, algorithm_settings = self._setup, self._config.algorithm
        assert setup is not None
        batch: Any = random_rollouts(
            num_rows(self._config, self._num_sequences),
            length,
            len(setup.data.text.tokenizer),
            self._device,
            rows_together=2 if isinstance(algorithm_settings, Dpo) else 1,
        )
        if isinstance(algorithm_settings, Sft | Dpo):
            batch = batch.with_fields(Sequences)
        algorithm.update(batch, step=1)

    def _sample(self, setup: Setup) -> None:
        """The rollouts of a step, as the recipe says; the engine sleeps afterwards."""
        settings: Any = self._own_algorithm  # with its groups
        with setup.sampler.awake() as engine:
            Rollouts(setup, settings).fetch(engine, 1, 0)
            self._note_use("sampling")

    @contextlib.contextmanager
    def _around_forward(self) -> Iterator[None]:
        assert self._setup is not None
        self._setup.phases.part("forward")
        yield
        self._setup.phases.part("backward")

    def _hold(self, name: str) -> None:
        """Note by how much more has come to live between steps."""
        assert self._setup is not None
        held = _num_bytes(self._setup.phases.resident_tensors()) - sum(self._held.values())
        if held:
            self._held[name] = held

    def _note_use(self, doing: str) -> None:
        """What all of the device's users have of it, engines and libraries with other allocators too."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._device_used[doing] = total - free

    def _peaks(self) -> dict[str, float]:
        """Metrics as runs record them, with the forward passes apart from the backward passes."""
        if self._setup is None:
            if self._device.type != "cuda":
                return {}
            return {
                "memory/weights/peak_allocated_bytes": float(torch.cuda.max_memory_allocated(self._device)),
                "memory/weights/peak_reserved_bytes": float(torch.cuda.max_memory_reserved(self._device)),
            }
        peaks = self._setup.phases.collect()[1]
        for key in [key for key in peaks if f"/{WHOLE}/" in key]:
            forward = key.replace(f"/{WHOLE}/", "/forward/")
            if forward in peaks:  # what precedes the first forward pass is its own
                peaks[forward] = max(peaks[forward], peaks.pop(key))
        return peaks


@contextlib.contextmanager
def _weights_made_on(device: torch.device) -> Iterator[None]:
    """Inside, a large preset's random matrices are made on the device: a CPU takes minutes for 8B, so as to
    have the same ones for every layout, and memory does not ask for values."""
    made_alike = RandomWeights.read

    def read(weights: RandomWeights, name: str, part: tuple[slice, ...]) -> Tensor:
        if len(part) == 1:
            return made_alike(weights, name, part)
        return torch.empty([each.stop - each.start for each in part], device=device).uniform_(-0.03, 0.03)

    with patch.object(RandomWeights, "read", read):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what it took to make them


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    sys.exit(main())
