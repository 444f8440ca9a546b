"""The audit of an acceptance rule: what it rejects among equal runs, and among runs with a known fault.

The rule is anybody's: a script, a threshold, a comparison with a golden file. It gets a folder and accepts by
exit code 0. The folder has `baseline/seed-N.csv` and `candidate/seed-N.csv`, each half of the seeds, so that
no run is on both sides: `candidate` are other runs of the baseline (A/A), or of an arm that differs. Splits
share runs, so the counts vary more than those of as many new runs.
"""

import csv
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from abrun.errors import ComparisonError
from abrun.logs.recorded.experiment import RecordedRun, union_steps
from abrun.logs.recorded.selection import ReadingOptions
from abrun.logs.recorded.sources import open_sources
from abrun.messages.numbers import counted
from abrun.report.present.tables import Table, columns

_NUM_SPLITS = 20  # of the seeds into two halves, for each arm
_MIN_SEEDS = 4  # two on each side
_TIMEOUT_S = 600.0
_SHELL_FAILS = 126  # exit codes from here on: not found, not executable, killed
_RUNS = "{runs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How often the rule rejected one arm: false alarms if the arm is the baseline, else detections."""

    arm: str
    is_changed: bool
    num_rejected: int
    num_asked: int


def audit_rule(command: str, source: str, reading: ReadingOptions) -> list[Score]:
    """Ask the rule about splits of every arm's seeds, the baseline first. Raises AbrunError."""
    if _RUNS not in command:
        raise ComparisonError(
            f"--audit: got {command!r} without {_RUNS}; put it where the rule takes a folder with the "
            "subfolders baseline and candidate"
        )
    experiment = open_sources([source], reading)
    arms = {arm: list(experiment.arm(arm).values()) for arm in experiment.arms}
    for name, run in experiment.controls.items():
        arms.setdefault(name.arm, []).append(run)
    baselines = arms[experiment.baseline]
    if len(baselines) < _MIN_SEEDS:
        raise ComparisonError(
            f"{experiment.name}: {experiment.baseline} has {counted(baselines, 'run')}; an audit splits at "
            f"least {_MIN_SEEDS} into two halves: add seeds"
        )
    return [_score(command, baselines, candidates, arm) for arm, candidates in arms.items()]


def _score(
    command: str, baselines: Sequence[RecordedRun], candidates: Sequence[RecordedRun], arm: str
) -> Score:
    seeds = [run.name.seed for run in baselines]
    halves = list(combinations(seeds, len(seeds) // 2)) if len(seeds) <= 16 else []
    rng = np.random.default_rng(0)
    while len(halves) < _NUM_SPLITS and len(seeds) > 16:
        halves.append(tuple(rng.permutation(seeds)[: len(seeds) // 2].tolist()))
    answers = []
    for index in rng.permutation(len(halves))[:_NUM_SPLITS]:
        chosen = [run for run in candidates if run.name.seed in halves[index]]
        rest = [run for run in baselines if run.name.seed not in halves[index]]
        if chosen:
            answers.append(_accepts(command, {"baseline": rest, "candidate": chosen}))
    return Score(
        arm=arm,
        is_changed=candidates is not baselines,
        num_rejected=answers.count(False),
        num_asked=len(answers),
    )


def _accepts(command: str, sides: Mapping[str, Sequence[RecordedRun]]) -> bool:
    """Write the runs and return whether the rule ends with 0. Raises ComparisonError if it cannot be run."""
    with tempfile.TemporaryDirectory() as folder:
        for side, runs in sides.items():
            (Path(folder) / side).mkdir()
            for run in runs:
                _write_csv(run, Path(folder) / side / f"seed-{run.name.seed}.csv")
        words = [word.replace(_RUNS, folder) for word in shlex.split(command)]
        try:
            ended = subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ComparisonError(f"--audit: {words[0]} cannot be asked: {error}; repair the rule") from None
    if ended.returncode < 0 or ended.returncode >= _SHELL_FAILS:
        raise ComparisonError(f"--audit: {words[0]} ended with exit code {ended.returncode}; repair the rule")
    return ended.returncode == 0


def _write_csv(run: RecordedRun, path: Path) -> None:
    """Write every metric of a run by step, empty where it was not recorded."""
    steps = union_steps(series.steps for series in run.metrics.values())
    cells = {
        name: dict(zip(log.steps.tolist(), log.values.tolist(), strict=True))
        for name, log in run.metrics.items()
    }
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *cells])
        writer.writerows(
            [step, *(values.get(step, "") for values in cells.values())] for step in steps.tolist()
        )


def render_scores(scores: Sequence[Score]) -> Table:
    """Return false alarms and detections as one table."""
    rows = [
        (
            score.arm if score.is_changed else f"{score.arm} (A/A)",
            f"{score.num_rejected} of {score.num_asked}",
            "detected" if score.is_changed else "false alarms",
        )
        for score in scores
    ]
    return Table(columns("runs", "rejected", "which are"), rows)


def summary_text(scores: Sequence[Score]) -> str:
    """Return the rates of false alarms and of detections in one sentence."""
    same = [score for score in scores if not score.is_changed]
    changed = [score for score in scores if score.is_changed]
    alarms = sum(score.num_rejected for score in same) / max(1, sum(score.num_asked for score in same))
    text = f"the rule rejects {100 * alarms:.3g} % of equal runs"
    if not changed:
        return f"{text}; no arm differs, so nothing is known of what it detects: abrun faults run RECIPE"
    detected = sum(score.num_rejected for score in changed) / max(
        1, sum(score.num_asked for score in changed)
    )
    num_missed = sum(score.num_rejected == 0 for score in changed)
    missed = f", and never detects {num_missed} of the {len(changed)} arms" if num_missed else ""
    return f"{text}, and {100 * detected:.3g} % of runs that differ{missed}"
