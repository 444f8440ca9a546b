"""Device time that an experiment spent, by purpose."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal

from abrun.messages.costs import PARTS
from abrun.reasons import Code, Reason
from abrun.recorded.experiment import RecordedExperiment, RecordedRun
from abrun.runs.owner import Owner
from abrun.runs.usage import Split, Start

# Between two runs of a launch; longer, it is another launch of the same process
MAX_PAUSE_S = 120.0
CPU = "cpu"  # the name of any CPU core in a launch; a GPU has its own name


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Device seconds of an experiment. Apart from `generation_s`, the parts add up to `held_s`."""

    device: Literal["GPU", "CPU core"]
    held_s: float  # by its runs, or between them by a launch on this machine
    useful_share: float | None  # steps_s / held_s; None if a run records no step times
    steps_s: float  # steps of runs that are compared
    generation_s: float  # of rollouts, within steps_s
    start_up_s: float  # of these runs, from their start to their first step
    other_s: float  # their checkpoints, validation and ends
    unknown_s: float  # runs that record no step times
    controls_s: float  # A/A reruns, one-ULP reruns and injected faults
    warm_starts_s: float
    lost_s: float  # failed starts, repeated steps, and runs whose partner did not finish
    idle_s: float  # devices, and shares of them, that a launch held while no run was on them

    @property
    def reason(self) -> Reason:
        parts = {key: value for key, value in asdict(self).items() if key in PARTS}
        return Code.SPENT(device=self.device, held_s=self.held_s, parts=parts)


def measure_spent(experiment: RecordedExperiment) -> Spent | None:
    """Return the device time of an experiment; None if its runs do not say, as those of other trainers."""
    runs = [*experiment.runs.values(), *experiment.controls.values()]
    starts = [start for run in runs for start in run.starts] + [*experiment.warm_starts]
    compared = {id(run) for run in _compared_runs(experiment)}
    split, controls_s, lost_s = Split(), 0.0, 0.0
    for run in runs:
        is_control = run.name.rerun or run.name in experiment.controls
        for start in run.starts:
            if is_control:
                controls_s += start.held_s
            elif id(run) in compared:
                split = split.plus(start.seconds.times(start.num_devices))
            else:
                lost_s += start.held_s
    warm_starts_s = sum(start.held_s for start in experiment.warm_starts)
    idle_s = measure_idle(starts)
    held_s = split.total_s + controls_s + lost_s + warm_starts_s + idle_s
    if experiment.directory is None or held_s <= 0:
        return None
    return Spent(
        device="GPU" if any(start.on_gpus for start in starts) else "CPU core",
        held_s=held_s,
        useful_share=None if split.unknown_s else split.steps_s / held_s,
        steps_s=split.steps_s,
        generation_s=split.generation_s,
        start_up_s=split.start_up_s,
        other_s=split.other_s,
        unknown_s=split.unknown_s,
        controls_s=controls_s,
        warm_starts_s=warm_starts_s,
        lost_s=split.lost_s + lost_s,
        idle_s=idle_s,
    )


def _compared_runs(experiment: RecordedExperiment) -> list[RecordedRun]:
    """Return the runs that finished pairs consist of; without pairing, every run that finished."""
    sides = [experiment.sides(arm).finished for arm in experiment.treatments]
    return [run for side in sides for run in side.runs]


def measure_idle(starts: Iterable[Start]) -> float:
    """Return the device seconds that launches held while no run was on the device or on a share of it.

    A launch holds the devices on which it placed runs, from its first start to the end of its last run; of
    CPU cores, the most that were taken at the same time. Devices that a scheduler assigned are not known.
    """
    launches: dict[tuple[Owner, bool], list[Start]] = {}
    for start in starts:
        if start.launcher is not None and start.devices:
            launches.setdefault((start.launcher, CPU in start.devices), []).append(start)
    return sum(
        _idle_of_launch(launched, on_cpu)
        for (_, on_cpu), by_process in launches.items()
        for launched in _split_at_pauses(by_process)
    )


def _split_at_pauses(starts: list[Start]) -> list[list[Start]]:
    """Return the starts of each launch of one process, such as a notebook's: between them no run was on."""
    groups, busy_until_s = list[list[Start]](), -math.inf
    for start in sorted(starts, key=lambda start: start.began_s):
        if start.began_s > busy_until_s + MAX_PAUSE_S:
            groups.append([])
        groups[-1].append(start)
        busy_until_s = max(busy_until_s, start.ended_s)
    return groups


def _idle_of_launch(starts: list[Start], on_cpu: bool) -> float:
    num_devices: float = len({device for start in starts for device in start.devices})
    if on_cpu:
        # An end before a start at the same time: its cores are free again.
        changes = [(start.began_s, start.num_devices) for start in starts]
        changes += [(start.ended_s, -start.num_devices) for start in starts]
        num_devices = max(accumulate(change for _, change in sorted(changes)))
    span_s = max(start.ended_s for start in starts) - min(start.began_s for start in starts)
    return max(0.0, span_s * num_devices - sum(start.held_s for start in starts))
