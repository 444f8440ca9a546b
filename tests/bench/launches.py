"""`abrun launch` as a user starts it, from this checkout, and what its runs recorded."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abrun.processes import start_process
from abrun.runs.experiment import planned_runs, read_run_state, run_dir
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir

REPOSITORY = Path(__file__).parents[2]
STEP_TIME = "timing/train/total_step_time_s"
VERDICT_EXIT_CODES = (0, 3, 4, 5)
# Each launch compiles anew: one that follows another would profit from its work
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
# Position of a row, and metrics of time, throughput and device memory
IGNORED_KEYS, CLOCK_PREFIXES = ("step", "attempt", "time_s"), ("timing/", "performance/", "memory/")
MAX_LOG_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one `abrun launch`."""

    wall_s: float
    exit_code: int  # the verdict's; negative: the limit was reached

    @property
    def is_complete(self) -> bool:
        return self.exit_code in VERDICT_EXIT_CODES


def launch(arguments: Sequence[str], *, work: Path, limit_s: float | None = None) -> Outcome:
    """Run `abrun launch` with the code of this checkout; at the limit it saves checkpoints and stops.

    Its experiments are in work/runs, its caches in work/cache, its output in work/launch.log.
    """
    work.mkdir(parents=True, exist_ok=True)
    folders = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    caches = {name: str(work / "cache" / name.lower()) for name in CACHES}
    env = {**os.environ, **caches, "HF_HOME": home, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-P", "-m", "abrun", "launch", "--runs-dir", str(work / "runs"), *arguments]
    began_s = time.monotonic()
    with (work / "launch.log").open("ab") as log:
        process = start_process(command, env, death_signal=signal.SIGTERM, stdout=log, stderr=log)
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
            exit_code = -signal.SIGTERM
    return Outcome(wall_s=time.monotonic() - began_s, exit_code=exit_code)


def last_log_lines(work: Path) -> list[str]:
    """Return the end of the launch's output."""
    lines = (work / "launch.log").read_text(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-MAX_LOG_LINES:]


# --- records of runs ---


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSeconds:
    """Seconds of one run, of its first start and of all its starts."""

    name: str
    began_s: float  # since the epoch
    first_step_s: float | None  # from the start to the end of the first step
    whole_s: float  # from start to end, of all starts


def finished_runs(directory: Path) -> list[RunName]:
    """Return the finished runs of an experiment, in launch order."""
    names = planned_runs(directory)
    return [name for name in names if read_run_state(directory, name).status == "finished"]


def run_seconds(directory: Path) -> list[RunSeconds]:
    """Return the seconds of the finished runs of an experiment, by their start."""
    seconds = []
    for name in finished_runs(directory):
        run = RunDir(run_dir(directory, name))
        launches = run.launches()
        row_times = [row["time_s"] for row in run.metrics_reader().read() if "time_s" in row]
        seconds.append(
            RunSeconds(
                name=str(name),
                began_s=launches[0].started_s,
                first_step_s=min(row_times) - launches[0].started_s if row_times else None,
                whole_s=sum((start.ended_s or start.started_s) - start.started_s for start in launches),
            )
        )
    return sorted(seconds, key=lambda run: run.began_s)


def first_and_later(seconds: Iterable[float | None]) -> str:
    """Format the seconds of the first run and the median of the later ones."""
    first, *later = [*seconds] or [None]
    medians = [statistics.median(known)] if (known := [value for value in later if value is not None]) else []
    return ", ".join("-" if value is None else f"{value:.1f}" for value in (first, *medians))


def clockless_rows(run: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a run's metrics by step, without what depends on time or on the device's memory."""
    rows: dict[int, dict[str, Any]] = {}
    for row in RunDir(run).metrics_reader().read():
        kept = {k: v for k, v in row.items() if k not in IGNORED_KEYS and not k.startswith(CLOCK_PREFIXES)}
        rows[row["step"]] = rows.get(row["step"], {}) | kept
    return rows


def first_difference(run: Path, other_run: Path) -> str | None:
    """Return the first value that two runs' metrics do not share to the last bit; None if they are equal."""
    rows, other_rows = clockless_rows(run), clockless_rows(other_run)
    for step in sorted(rows.keys() | other_rows.keys()):
        row, other_row = rows.get(step, {}), other_rows.get(step, {})
        for key in sorted(row.keys() | other_row.keys()):
            values = [json.dumps(side.get(key)) for side in (row, other_row)]
            if values[0] != values[1]:
                return f"step {step}, {key}: {values[0]} and {values[1]}"
    return None
