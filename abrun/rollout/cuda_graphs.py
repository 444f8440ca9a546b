"""CUDA graphs for a decoding step that always runs the same operators on the same memory.

A small step on a GPU is bound by its thousands of kernel launches; a CUDA graph needs one launch. The graph
is captured by hand, which costs about two steps. torch.compile would take longer to start than most rollouts.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Step = Callable[[], None]


@contextlib.contextmanager
def run_unrecorded(step: Step) -> Iterator[Step]:
    """Yield the step unchanged, without a CUDA graph."""
    yield step


class GraphReplayer:
    """Captures steps as CUDA graphs on one device; each graph has its own memory pool, freed at the end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # cuBLAS keeps a workspace for each stream; allocate it now, not from a pool that is freed later.
            torch.mm(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))

    @contextlib.contextmanager
    def __call__(self, step: Step) -> Iterator[Step]:
        """Yield a callable that runs `step` on its first call, captures and replays it on its second, and
        replays it from then on.

        If the first run synchronizes with the device, it fails halfway and is repeated, and `step` is never
        captured. So `step` must have no side effects before its end.
        """
        outer_stream, replayed_step = torch.cuda.current_stream(), _ReplayedStep(step)
        self._stream.wait_stream(outer_stream)
        try:
            with torch.cuda.stream(self._stream):
                yield replayed_step
        finally:
            outer_stream.wait_stream(self._stream)
            self._stream.synchronize()
            replayed_step.close()  # drops graph and pool: the last reference to the pool frees its memory


class _ReplayedStep:
    """A step that runs, is captured and is replayed on successive calls; see GraphReplayer."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tried, self._waits = False, False

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self._waits:
            self._step()
        elif not self._tried:
            self._try()
        else:
            self._graph = self._record_graph()
            self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._pool = None

    def _try(self) -> None:
        """Run the step once, so that libraries initialise, and detect whether it synchronizes."""
        assert self._pool is not None
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.use_mem_pool(self._pool):
                self._step()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            self._waits = True
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        self._tried = True
        if self._waits:
            self._step()

    def _record_graph(self) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph, which empties the allocator's cache, including the trainer's, every time.
        assert self._pool is not None
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._pool.id
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._step()
        finally:
            graph.capture_end()
        return graph
