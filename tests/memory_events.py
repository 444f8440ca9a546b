"""Peak memory of a CPU pass by the allocator's own reports, as an oracle for what counts storages."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that were allocated at once while `run` ran, above what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events: Any = recorded.profiler.kineto_results.events()  # pyright: ignore
    return max(accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0))
