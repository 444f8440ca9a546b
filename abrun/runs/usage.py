"""Device time of a run: when each of its starts held devices, and what the seconds were spent on.

Everything comes from records that a run leaves anyway: the launches, the attempts and the rows of metrics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abrun.runs.durations import MAX_START_S, is_plausible
from abrun.runs.metrics import StepTimes
from abrun.runs.owner import Owner
from abrun.runs.records import Attempt, Launch
from abrun.runs.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Seconds by purpose. `generation_s` is within `steps_s`; the others add up to the whole."""

    steps_s: float = 0.0  # steps that count, without checkpoints
    generation_s: float = 0.0
    start_up_s: float = 0.0  # from the start to the first step
    other_s: float = 0.0  # checkpoints, validation, the end of the run
    lost_s: float = 0.0  # failed starts, steps that a later start repeated
    unknown_s: float = 0.0  # of runs that record no step time

    @property
    def total_s(self) -> float:
        return self.steps_s + self.start_up_s + self.other_s + self.lost_s + self.unknown_s

    def times(self, factor: float) -> "Split":
        return Split(**{field.name: factor * getattr(self, field.name) for field in fields(self)})

    def plus(self, other: "Split") -> "Split":
        return Split(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run: the devices that it held, from when to when, and its seconds by purpose."""

    began_s: float
    ended_s: float  # or the last sign of life, if the end was not recorded
    devices: tuple[str, ...]  # as the launcher named them; empty if a scheduler assigned them
    num_devices: float  # of which it held this many: a GPU that N runs share counts as 1/N
    on_gpus: bool
    launcher: Owner | None  # None: started by a scheduler
    seconds: Split

    @property
    def held_s(self) -> float:
        """Device seconds."""
        return (self.ended_s - self.began_s) * self.num_devices


def read_starts(
    run: RunDir, config: Mapping[str, Any], num_devices: int | None, times: StepTimes
) -> list[Start]:
    """Return the starts of a run that held devices, oldest first. Raises StoreError.

    `config` is the run's configuration as stored, `num_devices` the number of its devices on all nodes; if
    it is unknown, only starts count whose launcher named their devices. A start without a recorded end
    lasted until its last row.
    """
    cluster = config.get("cluster")
    on_gpus = isinstance(cluster, Mapping) and bool(cluster.get("gpus_per_node"))
    starts = []
    for launch, attempts in _group_attempts(run.launches(), run.attempts()):
        devices = launch.devices if launch else ()
        record = launch or attempts[0]
        if record.started_s is None or not (devices or (attempts and num_devices)):
            continue  # failed before it had a process
        is_row = np.isin(times.attempts, [attempt.number for attempt in attempts])
        row_times = times.time_s[is_row & np.isfinite(times.time_s)].tolist()
        ends = [record.ended_s, *(attempt.ended_s for attempt in attempts[::-1]), *row_times[-1:]]
        ended_s = next((end for end in ends if end is not None), record.started_s)
        if not is_plausible(ended_s - record.started_s):
            recorded = times.step_s, times.checkpoint_s, times.validation_s
            recorded_s = sum(np.nansum(seconds[is_row]) for seconds in recorded)
            ended_s = record.started_s + float(np.clip(recorded_s, 0.0, MAX_START_S))
        statuses = {record.status, *(attempt.status for attempt in attempts)}
        starts.append(
            Start(
                began_s=record.started_s,
                ended_s=ended_s,
                devices=devices,
                num_devices=(len(devices) or num_devices or 0) / max(1, launch.runs_per_gpu if launch else 1),
                on_gpus=on_gpus,
                launcher=launch.launcher if launch else None,
                seconds=split_seconds(
                    record.started_s, ended_s, times, is_row, has_failed="finished" not in statuses
                ),
            )
        )
    return starts


def _group_attempts(
    launches: Sequence[Launch], attempts: Sequence[Attempt]
) -> list[tuple[Launch | None, list[Attempt]]]:
    """Return each launch with the attempts that began after it and before the next one.

    An attempt that no launcher recorded is a group of its own.
    """
    groups: list[tuple[Launch | None, list[Attempt]]] = [(launch, []) for launch in launches]
    for attempt in attempts:
        earlier = [
            group
            for launch, group in groups[: len(launches)]
            if launch and launch.started_s <= (attempt.started_s or math.inf)
        ]
        if earlier:
            earlier[-1].append(attempt)
        else:
            groups.append((None, [attempt]))
    return groups


def split_seconds(
    began_s: float, ended_s: float, times: StepTimes, is_row: NDArray[np.bool_], *, has_failed: bool
) -> Split:
    """Return the seconds of one start by purpose; `is_row` [R] selects its rows.

    Clocks can be set: steps take what was recorded, and the rest gets what is left of the start.
    """
    left_s = ended_s - began_s
    is_timed = is_row & np.isfinite(times.step_s)
    if not is_row.any():
        return Split(lost_s=left_s) if has_failed else Split(start_up_s=left_s)
    if not is_timed.any():
        return Split(unknown_s=left_s)
    if not (is_timed & times.counts).any():
        return Split(lost_s=left_s)
    first = int(np.argmax(is_timed))
    first_step_s = times.time_s[first] - times.step_s[first] - times.checkpoint_s[first]
    validated_s = times.validation_s[is_row & (np.arange(len(is_row)) <= first)].sum()
    recorded = {
        "steps_s": times.step_s[is_timed & times.counts].sum(),
        "other_s": times.checkpoint_s[is_row].sum() + times.validation_s[is_row].sum(),
        "lost_s": times.step_s[is_timed & ~times.counts].sum(),
        "start_up_s": np.nan_to_num(first_step_s - validated_s - began_s),
    }
    seconds: dict[str, float] = {}
    for name, value in recorded.items():
        seconds[name] = float(min(max(value, 0.0), left_s))
        left_s -= seconds[name]
    seconds["lost_s" if has_failed else "other_s"] += left_s
    generation_s = float(min(times.generation_s[is_timed & times.counts].sum(), seconds["steps_s"]))
    return Split(generation_s=generation_s, **seconds)
