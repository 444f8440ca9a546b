"""What an experiment with looks has taken of the runs that it planned, and what stopping early saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from abrun.recorded.experiment import Experiment, RecordedRun
from abrun.verdict.decide import ArmVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Runs, reruns and controls included, and the devices that they occupied."""

    decided_at: int | None  # pairs of the look that decided the last treatment; None: open, or INVALID
    num_pairs: int  # pairs that were begun, of
    num_planned_pairs: int
    num_runs: int  # likewise
    num_planned_runs: int
    device: Literal["GPU", "CPU core"]
    device_hours: float | None  # None: some run does not say how long it took
    device_hours_saved: float | None  # of those never begun, each at the mean of its arm


def spent(experiment: Experiment, arms: Sequence[ArmVerdict]) -> Spent | None:
    """None where no looks were declared, or no runs planned: nothing could be saved."""
    if not experiment.compare.looks or experiment.directory is None:
        return None
    runs = [*experiment.runs.values(), *experiment.controls.values()]
    begun = [run for run in runs if run.status not in ("pending", "missing")]
    taken = [[look.num_pairs for look in arm.looks if look.verdict] for arm in arms]
    decided = all(arm.verdict in ("MATCH", "MISMATCH") for arm in arms) and all(taken)
    seeds = {run.name.seed for run in experiment.arm(experiment.baseline).values()}
    return Spent(
        decided_at=max(looks[-1] for looks in taken) if decided else None,
        num_pairs=len(seeds & {run.name.seed for run in begun}),
        num_planned_pairs=len(seeds),
        num_runs=len(begun),
        num_planned_runs=len(runs),
        device=begun[0].device if begun else "CPU core",
        device_hours=_hours(begun),
        device_hours_saved=_saved_hours(runs, begun),
    )


def _hours(runs: Sequence[RecordedRun]) -> float | None:
    seconds = [run.device_s for run in runs if run.device_s is not None]
    return sum(seconds) / 3600 if len(seconds) == len(runs) else None


def _saved_hours(runs: Sequence[RecordedRun], begun: Sequence[RecordedRun]) -> float | None:
    """Of the runs that were never begun; None where an arm has no run to measure them by."""
    saved, names = 0.0, {run.name for run in begun}
    for arm in {run.name.arm for run in runs}:
        num_saved = sum(run.name.arm == arm and run.name not in names for run in runs)
        of_arm = [run for run in begun if run.name.arm == arm and run.finished]
        hours = _hours(of_arm)
        if num_saved and not (of_arm and hours is not None):
            return None
        saved += num_saved * (hours or 0.0) / max(1, len(of_arm))
    return saved
