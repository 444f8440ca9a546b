"""Where the time of a training step goes, whoever trains: which part runs, and whether the GPU works."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

PARTS = (
    "generation",
    "rewards",
    "log-probs",
    "forward",
    "head",
    "backward",
    "optimizer",
    "sync",
    "all else",
    "idle",
)
ALL_ELSE = "all else"
ON_THE_CPU = "rewards"  # whose seconds are its own, whatever the GPU does meanwhile
WARM_UP = 2  # steps, which compile and capture graphs
STEPS = WARM_UP + 3 + 1  # the last is looked into
Interval = tuple[int, int]  # nanoseconds of time.time_ns()


class Steps:
    """The steps of one process: told of each when it begins and ends, and between them which part runs.

    A part ends when the device has done it. Parts inside of the forward and backward pass are told apart in
    the last step alone, in which the GPU's kernels are recorded, too: a wait after each of them costs time.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu, self._running, self._since = device == "cuda", [ALL_ELSE], 0
        self._segments: list[tuple[str, int, int]] = []
        self._profiler: Any = None
        self.rows: list[dict[str, float]] = []  # of each step that has ended, the seconds of its parts
        self.busy: dict[str, float] | None = None  # seconds in which the GPU works for each part
        self.note = ""

    @property
    def looks(self) -> bool:
        """Whether this step is the last one."""
        return len(self.rows) == STEPS - 1

    @property
    def runs(self) -> str:
        return self._running[-1]

    def begin(self) -> None:
        if self.looks and self._on_gpu:
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()  # takes its time, before the step
        self._segments, self._since = [], self._now()

    def end(self) -> None:
        self._turn()
        self.rows.append(_seconds(self._segments))
        if self._profiler is not None:
            try:
                self._profiler.stop()
                kernels = _kernels(self._profiler)
            except (RuntimeError, AttributeError) as error:  # what else was measured stands
                self.note = f"kernels not recorded: {' '.join(str(error).split())[:100]}"
            else:
                self.busy = busy_seconds(self._segments, kernels)

    @contextlib.contextmanager
    def part(self, name: str | None, *, inner: bool = False) -> Iterator[None]:
        """What runs inside counts as `name`, if there is one, and the step tells such parts apart."""
        if name is None or (inner and not self.looks):
            yield
            return
        self._turn()
        self._running.append(name)
        try:
            yield
        finally:
            self._turn()
            self._running.pop()

    def follow(
        self,
        owner: Any,
        method: str,
        name: str,
        *,
        inner: bool = False,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        """From now on each call of the method is a part, when it is."""
        call = getattr(owner, method)

        def followed(*args: Any, **settings: Any) -> Any:
            with self.part(name if when() else None, inner=inner):
                return call(*args, **settings)

        setattr(owner, method, followed)

    def row(self) -> dict[str, Any]:
        """Return the parts of the step of median length, and what the last step has shown."""
        usual, last = sorted(self.rows[WARM_UP:-1], key=lambda row: sum(row.values())), self.rows[-1]
        median = usual[len(usual) // 2]
        return {
            "step": sum(median.values()),
            "parts": median,
            "last": last,
            "busy": self.busy,
            "note": self.note,
        }

    def _turn(self) -> None:
        now = self._now()
        self._segments.append((self.runs, self._since, now))
        self._since = now

    def _now(self) -> int:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.time_ns()


def _seconds(segments: list[tuple[str, int, int]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, start, end in segments:
        found[name] = found.get(name, 0.0) + (end - start) / 1e9
    return found


def _kernels(profiler: Any) -> list[Interval]:
    """When the device worked: raw events, as hundreds of thousands of them are quick only so."""
    events = profiler.profiler.kineto_results.events()
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    ]


def busy_seconds(segments: list[tuple[str, int, int]], kernels: list[Interval]) -> dict[str, float]:
    """Of each part, the seconds in which one kernel at least runs; of what lies outside of all, all else."""
    merged: list[list[int]] = []
    for start, end in sorted(kernels):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    found, at = dict.fromkeys((name for name, _, _ in segments), 0.0) | {ALL_ELSE: 0.0}, 0
    for name, start, end in segments:
        while at < len(merged) and merged[at][1] <= start:
            at += 1
        inside = at
        while inside < len(merged) and merged[inside][0] < end:
            found[name] += (min(end, merged[inside][1]) - max(start, merged[inside][0])) / 1e9
            inside += 1
    whole = sum(end - start for start, end in merged) / 1e9
    found[ALL_ELSE] += whole - sum(found.values())
    return found


def shares(row: dict[str, Any]) -> dict[str, float]:
    """The seconds of a usual step by part: how long the GPU works for each, and how long for none."""
    if row["busy"] is None:
        return {name: row["last"].get(name, 0.0) for name in PARTS}
    found = {name: row["busy"].get(name, 0.0) for name in PARTS}
    found[ON_THE_CPU] = row["parts"].get(ON_THE_CPU, 0.0)
    return found | {"idle": max(row["step"] - sum(found.values()), 0.0)}
