"""A step that always runs the same operators on the same memory, recorded once and launched as a whole.

On a GPU a small step takes as long as its some thousand launches take on the CPU; a CUDA graph has one. It is
recorded by hand, which takes as long as two steps: a compiler's start takes longer than most rollouts.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Step = Callable[[], None]


@contextlib.contextmanager
def as_it_is(step: Step) -> Iterator[Step]:
    """Run every time."""
    yield step


class Replays:
    """Makes steps replayable on one device, each with memory of its own that it gives back at the end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # cuBLAS keeps a workspace for each stream, and must not take it from memory that is given back.
            torch.mm(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))

    @contextlib.contextmanager
    def __call__(self, step: Step) -> Iterator[Step]:
        """`step`, run once, then recorded, then replayed; as it is where it waits for the device.

        It must leave no trace before its end, as it is begun again where it turns out to wait.
        """
        outer, replayed = torch.cuda.current_stream(), _Replayed(step)
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                yield replayed
        finally:
            outer.wait_stream(self._stream)
            self._stream.synchronize()
            replayed.close()  # before the pool, which gives its memory back as the last that holds it


class _Replayed:
    """See Replays."""

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
            self._graph = self._recorded()
            self._graph.replay()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._pool = None

    def _try(self) -> None:
        """A first run, for what libraries set up, and to see whether the CPU waits for the device inside."""
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

    def _recorded(self) -> torch.cuda.CUDAGraph:
        # Not by torch.cuda.graph, which empties the allocator's cache, and so the trainer's, every time.
        assert self._pool is not None
        graph = torch.cuda.CUDAGraph()
        pool: Any = self._pool.id
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._step()
        finally:
            graph.capture_end()
        return graph
