"""`python -m abrun.trainer.memory.measure JOB_DIR`: measures one cell (an arm at one size) on one rank.

Micro-batches of random tokens replace the rollouts; everything else is the trainer's own code. A first step
creates the optimizer state and is not reported; it is short unless layers are compiled. Recipes with rollouts
then sample once. The second step is measured. Each rank writes a row, even if it runs out of memory.
"""

import contextlib
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from abrun.errors import AbrunError
from abrun.experiment.probe import open_row_writer, read_job, report_refusal
from abrun.messages import sentence
from abrun.processes import progress
from abrun.recipe.algorithms import Dpo, PolicyGradientSettings, Sft
from abrun.recipe.run import OwnRunConfig, num_rows, set_microbatch_size, share_of_device
from abrun.trainer.__main__ import out_of_memory_reason
from abrun.trainer.backends.ranks import join_ranks
from abrun.trainer.loop.data import check_length
from abrun.trainer.loop.grpo import Rollouts
from abrun.trainer.loop.phases import LiveTensors, Phases
from abrun.trainer.loop.setup import RunSetup, make_setup
from abrun.trainer.models.weights import RandomWeights
from abrun.trainer.rl.batch import RolloutBatch, Sequences
from abrun.trainer.training import make_algorithm

OUT_OF_MEMORY = 4  # exit code
# Seconds for the other ranks to report their own OOM before the first rank to fail exits
PEER_GRACE_S = 3.0
WARM_UP_TOKENS = 1024  # maximum sequence length of the first step, unless layers are compiled
FORWARD_BACKWARD = "forward_backward"  # phase of the trainer, reported here as forward and backward


def main() -> int:
    progress.report_to_agent()
    directory = Path(sys.argv[1])
    job = read_job(directory)
    config = OwnRunConfig.model_validate(job.pop("config"))
    rank = os.environ.get("RANK", "0")
    snapshot = directory / (SNAPSHOT if rank == "0" else f"rank-{rank}-{SNAPSHOT}")
    try:
        row = Measurement(config, join_ranks(config.cluster.model_dump()), snapshot, **job).measure()
    except AbrunError as error:
        return report_refusal(error)
    open_row_writer(directory, rank).write(row)
    if row["out_of_memory"]:
        if config.cluster.ranks > 1:
            time.sleep(PEER_GRACE_S)
        os._exit(OUT_OF_MEMORY)  # a normal exit could wait for the other ranks forever
    dist.destroy_process_group()
    return 0


class Measurement:
    """Measurement of one arm at one size on one rank; `budget_bytes` limits the device memory."""

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
        self._config, self._run_algorithm = set_microbatch_size(config, num_sequences), config.algorithm
        self._rollouts = rollouts and isinstance(config.algorithm, PolicyGradientSettings)
        self._device, self._snapshot = device, snapshot
        self._total_bytes = _limit_allocator(device, budget_bytes, config.cluster.runs_per_gpu)
        self._setup: RunSetup | None = None
        self._resident_bytes: dict[str, int] = {}
        self._device_used: dict[str, int] = {}
        self._recorder: AllocationRecorder | None = None

    def measure(self) -> dict[str, Any]:
        """Measure and return this rank's row; `out_of_memory` is the phase of an OOM, or None."""
        failed_phase = reason = None
        try:
            self._run()
        except (RuntimeError, MemoryError) as error:
            reason = out_of_memory_reason(error)
            if reason is None:
                raise
            failed_phase = (self._setup.phases.interrupted if self._setup else None) or "weights"
        return {
            "out_of_memory": failed_phase,
            "said": reason and sentence(reason),
            "total_bytes": self._total_bytes,
            "held": self._resident_bytes,
            "device_used": self._device_used,
            "metrics": self._collect_peaks(),
            "peak": self._recorder.summarize() if self._recorder else None,
        }

    def _run(self) -> None:
        config = self._config
        with _make_weights_on(self._device):
            setup = self._setup = make_setup(config, 0, None, self._device)
            self._record_resident_bytes(setup, "weights")
            _limit_tracker(setup.phases.tracker, self._total_bytes)
            algorithm = make_algorithm(setup)
        self._record_resident_bytes(setup, "reference_weights")
        setup.policy.around_forward = lambda: _label_forward_and_backward(setup)
        text = setup.data.text
        check_length(text, self._length, f"--lengths: got {self._length}")

        def update(length: int) -> None:
            vocab_size = len(text.tokenizer)
            batch = make_random_batch(config, length, self._num_sequences, vocab_size, self._device)
            algorithm.update(batch, step=1)

        # Compiled layers need the full length: another one would recompile them
        update(self._length if config.policy.compile else min(self._length, WARM_UP_TOKENS))
        self._record_resident_bytes(setup, "optimizer_state")
        try:
            setup.phases.collect()
            if self._rollouts:
                self._sample(setup)
            self._recorder = AllocationRecorder(setup.phases, self._snapshot)
            with self._recorder:
                update(self._length)
        finally:
            self._record_device_use("training")
            setup.sampler.close()

    def _sample(self, setup: RunSetup) -> None:
        """Sample the rollouts of one step, then put the engine to sleep."""
        settings: Any = self._run_algorithm  # not resized: keeps its groups
        with setup.sampler.awake() as engine:
            Rollouts(setup, settings).fetch(engine, 1, 0)
            self._record_device_use("sampling")

    def _record_resident_bytes(self, setup: RunSetup, name: str) -> None:
        """Record the bytes of resident tensors that are new since the last call."""
        storages = (tensor.untyped_storage() for tensor in setup.phases.resident_tensors())
        num_bytes = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        if new_bytes := num_bytes - sum(self._resident_bytes.values()):
            self._resident_bytes[name] = new_bytes

    def _record_device_use(self, activity: str) -> None:
        """Record the device memory in use by all processes and allocators, such as vLLM and NCCL."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._device_used[activity] = total - free

    def _collect_peaks(self) -> dict[str, float]:
        """Return the memory metrics of a run, with forward and backward as separate phases."""
        if self._setup is None:
            if self._device.type != "cuda":
                return {}
            return {
                "memory/weights/peak_allocated_bytes": float(torch.cuda.max_memory_allocated(self._device)),
                "memory/weights/peak_reserved_bytes": float(torch.cuda.max_memory_reserved(self._device)),
            }
        peaks = self._setup.phases.collect()[1]
        for key in [key for key in peaks if f"/{FORWARD_BACKWARD}/" in key]:
            forward = key.replace(f"/{FORWARD_BACKWARD}/", "/forward/")
            if forward in peaks:  # memory before the first forward label counts as forward
                peaks[forward] = max(peaks[forward], peaks.pop(key))
        return peaks


def make_random_batch(
    config: OwnRunConfig, length: int, num_sequences: int, vocab_size: int, device: torch.device
) -> Any:
    """Return a random batch for one step of a rank, with one prompt token per row and no padding."""
    shape = num_rows(config, num_sequences), length
    generator = torch.Generator().manual_seed(length)
    token_mask = torch.ones(shape, dtype=torch.bool)
    token_mask[:, 0] = False
    rollout_batch = RolloutBatch(
        token_ids=torch.randint(vocab_size, shape, generator=generator),
        token_mask=token_mask,
        inference_logprobs=torch.full(shape, -1.0),
        rewards=torch.randn(shape[0], generator=generator),
        rows_per_sample=2 if isinstance(config.algorithm, Dpo) else 1,
    ).to(device)
    return rollout_batch.with_fields(Sequences) if isinstance(config.algorithm, Sft | Dpo) else rollout_batch


def _limit_allocator(device: torch.device, budget_bytes: int | None, runs_per_gpu: int) -> int | None:
    """Limit the CUDA allocator and return the memory that a run may use; None on CPU without a budget."""
    if device.type != "cuda":
        return budget_bytes
    device_bytes = torch.cuda.get_device_properties(device).total_memory
    available = share_of_device(device_bytes, runs_per_gpu)
    total_bytes = min(budget_bytes or available, available)
    if total_bytes < device_bytes:
        torch.cuda.set_per_process_memory_fraction(total_bytes / device_bytes, device)
    return total_bytes


def _limit_tracker(tracker: LiveTensors | None, total_bytes: int | None) -> None:
    """Make the CPU tracker raise OutOfMemoryError above `total_bytes`; a CPU has no allocator limit."""
    if tracker is None or total_bytes is None:
        return

    def check_budget(storage: int, num_bytes: int) -> None:
        if num_bytes > 0 and tracker.live_bytes > total_bytes:
            raise torch.OutOfMemoryError(
                f"allocating {num_bytes} bytes exceeds the budget of {total_bytes} bytes"
            )

    tracker.on_change = check_budget


@contextlib.contextmanager
def _label_forward_and_backward(setup: RunSetup) -> Iterator[None]:
    setup.phases.label_memory("forward")
    yield
    setup.phases.label_memory("backward")


@contextlib.contextmanager
def _make_weights_on(device: torch.device) -> Iterator[None]:
    """Create random weight matrices on the device while entered.

    The usual ones are made on the CPU to be equal for every layout, which takes minutes for 8B weights.
    Memory does not depend on the values.
    """
    read_cpu_weights = RandomWeights.read

    def read_on_device(weights: RandomWeights, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        if len(slices) == 1:
            return read_cpu_weights(weights, name, slices)
        shape = [bounds.stop - bounds.start for bounds in slices]
        return torch.empty(shape, device=device).uniform_(-0.03, 0.03)

    with patch.object(RandomWeights, "read", read_on_device):
        yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Source lines that allocated the memory held at a step's peak.
#
# On CUDA the allocation history of the step is also written as torch's memory snapshot, for
# https://pytorch.org/memory_viz. Recording takes host memory and time, but no device memory.

SNAPSHOT = "memory-snapshot.pickle"
MAX_SITES = 8  # in the table
MAX_EVENTS = 500_000  # in the allocator's history
MAX_FRAMES = 60
AUTOGRAD = "autograd"  # stands for the file name in frames of autograd nodes
LIBRARIES = re.compile(r"(^|/)torch/|(^|/)triton/|<|importlib|abrun/trainer/(memory|loop/phases)\b")
PACKAGE = re.compile(r".*/(?:site-packages|dist-packages)/|.*/(?=abrun/)")


class AllocationSite(NamedTuple):
    """Source line and phase of an allocation."""

    line: str  # empty: C++ code without a Python frame
    phase: str


class AllocationEvent(NamedTuple):
    """Growth (positive) or shrinkage (negative) of a block of memory, in bytes."""

    block: Hashable
    num_bytes: int
    site: AllocationSite | None  # None: the block shrank


class AllocationRecorder:
    """Context manager that records the allocations of a rank's device.

    `snapshot` is the file for torch's memory snapshot, written only on CUDA.
    """

    def __init__(self, phases: Phases, snapshot: Path) -> None:
        self._phases, self._snapshot = phases, snapshot
        self._events: list[AllocationEvent] = []
        self._phase_starts: list[tuple[int, str]] = []  # (microseconds, phase)
        self._base_bytes = 0

    def __enter__(self) -> "AllocationRecorder":
        self._stack = contextlib.ExitStack()
        self._stack.callback(setattr, self._phases, "on_memory_label", self._phases.on_memory_label)
        self._phases.on_memory_label = lambda phase: self._phase_starts.append(
            (time.time_ns() // 1000, phase)
        )
        if self._phases.tracker is None:
            self._base_bytes = torch.cuda.memory_allocated() - self._phases.absent_bytes
            self._stack.callback(self._stop_recording)
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True
            )
        else:
            self._record_tracker(self._phases.tracker)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def summarize(self) -> dict[str, Any] | None:
        """Return the result of `summarize_peak`, or None if nothing was recorded."""
        return summarize_peak(self._events, self._base_bytes) if self._events else None

    def _record_tracker(self, tracker: Any) -> None:
        tracker.follow(self._phases.resident_tensors())
        tracker.reset_peak()
        self._base_bytes = tracker.live_bytes
        on_change: Callable[[int, int], None] = tracker.on_change

        def record_event(storage: int, num_bytes: int) -> None:
            phase = self._phase_starts[-1][1] if self._phase_starts else ""
            site = AllocationSite(find_source_line(_iterate_frames()), phase) if num_bytes > 0 else None
            self._events.append(AllocationEvent(storage, num_bytes, site))
            on_change(storage, num_bytes)

        tracker.on_change = record_event
        self._stack.callback(setattr, tracker, "on_change", on_change)

    def _stop_recording(self) -> None:
        """Save the allocator's history and stop it, also after an OOM."""
        snapshot: Any = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        with self._snapshot.open("wb") as file:  # as torch.cuda.memory._dump_snapshot does
            pickle.dump(snapshot, file)
        trace = snapshot["device_traces"][torch.cuda.current_device()]
        self._events = list(parse_trace(trace, self._phase_starts))


def parse_trace(
    trace: Iterable[Mapping[str, Any]], phase_starts: Sequence[tuple[int, str]]
) -> Iterator[AllocationEvent]:
    """Yield the allocations and frees in `device_traces[i]` of torch's snapshot.

    `phase_starts`: (microseconds, phase) of each start, in order.
    """
    phase, pending_starts = "", list(reversed(phase_starts))
    for record in trace:
        while pending_starts and pending_starts[-1][0] <= record["time_us"]:
            phase = pending_starts.pop()[1]
        if record["action"] == "alloc":
            yield AllocationEvent(
                record["addr"],
                record["size"],
                AllocationSite(find_source_line(record.get("frames", ())), phase),
            )
        elif record["action"] == "free_requested":
            yield AllocationEvent(record["addr"], -record["size"], None)


def summarize_peak(events: Sequence[AllocationEvent], base_bytes: int) -> dict[str, Any]:
    """Summarize the memory held at the peak.

    Returns `peak_bytes`, `before_bytes` (the part allocated before recording began) and `sites`, largest
    first. A site has `line`, `phase`, `bytes` and `count` (its number of blocks).
    """
    live_bytes = peak_bytes = base_bytes
    num_peak_events = 0
    for index, event in enumerate(events, 1):
        live_bytes += event.num_bytes
        if live_bytes > peak_bytes:
            peak_bytes, num_peak_events = live_bytes, index
    blocks: dict[Hashable, tuple[int, AllocationSite]] = {}
    for block, num_bytes, site in events[:num_peak_events]:
        block_bytes, block_site = blocks.pop(block, (0, site))
        if block_site is not None and block_bytes + num_bytes > 0:
            blocks[block] = block_bytes + num_bytes, site or block_site
    sites: dict[AllocationSite, tuple[int, int]] = {}
    for num_bytes, site in blocks.values():
        site_bytes, count = sites.get(site, (0, 0))
        sites[site] = site_bytes + num_bytes, count + 1
    largest = sorted(sites.items(), key=lambda item: -item[1][0])[:MAX_SITES]
    return {
        "peak_bytes": peak_bytes,
        "before_bytes": peak_bytes - sum(num_bytes for num_bytes, _ in blocks.values()),
        "sites": [
            {**site._asdict(), "bytes": num_bytes_at_site, "count": count}
            for site, (num_bytes_at_site, count) in largest
        ],
    }


def find_source_line(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost frame outside torch as `package/file.py:12 function`, or an empty string.

    For code that autograd runs itself, return the name of the autograd node.
    """
    for frame in frames:
        path = PACKAGE.sub("", str(frame["filename"]))  # the folder of a checkout may be named torch
        if path == AUTOGRAD:
            return str(frame["name"])
        if not LIBRARIES.search(path) and path.endswith(".py"):
            return f"{path}:{frame['line']} {frame['name']}"
    return ""


def _iterate_frames() -> Iterator[dict[str, Any]]:
    """Yield the frames of the caller, innermost first; in a backward pass the last is the autograd node."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                yield {"filename": AUTOGRAD, "name": node.name()}
            return
        yield {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
        frame = frame.f_back


if __name__ == "__main__":
    sys.exit(main())
