"""Records of an experiment's Ray job.

_ray/job.json      {name, attempt, job, url, settings, git, ..., cancelled}: written at submission
_ray/driver.json   {job, waiting: {run: why}, ended: null or the final message}: written by the driver
_ray/driver.log    notes of the driver
_ray/compare.log   output of the comparison at the end
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abrun.runs.files import read_json_or_empty, write_json
from abrun.runs.records import Git
from abrun.runs.schemas import Count, Flag, Seconds, checked

FOLDER = "_ray"  # folder in an experiment; no arm can have this name
JOB, DRIVER, LOG = "job.json", "driver.json", "driver.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithdrawnJobRecord:
    """Fields of a withdrawn job, from which later jobs get their names."""

    job: str = ""
    name: str = ""
    attempt: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SettingsRecord:
    restarts: Count
    save_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRecord:
    """Fields of a submitted job."""

    job: str
    name: str
    attempt: Count
    url: str
    settings: _SettingsRecord
    cwd: str
    python: str
    env: Mapping[str, str]
    num_jobs: Count | None = None
    compare: Flag = False
    git: Git | None = None
    cancelled: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _DriverRecord:
    """Fields of the driver's status."""

    job: str = ""
    waiting: Mapping[str, str] = field(default_factory=dict)
    ended: str | None = None


def write_job(experiment_dir: Path, content: Mapping[str, Any]) -> None:
    write_json(experiment_dir / FOLDER / JOB, content)


def read_job(experiment_dir: Path) -> dict[str, Any]:
    """Return the job's record, or {} if nothing was submitted. Raises StoreError if it is unreadable."""
    path = experiment_dir / FOLDER / JOB
    content = read_json_or_empty(path)
    checked(_JobRecord if content.get("job") else _WithdrawnJobRecord, content, path)
    return content


def write_driver(experiment_dir: Path, job: str, waiting: Mapping[str, str], ended: str | None) -> None:
    content = {"job": job, "waiting": waiting, "ended": ended}
    write_json(experiment_dir / FOLDER / DRIVER, content)


def read_driver(experiment_dir: Path, job: str) -> dict[str, Any]:
    """Return the status that the driver of `job` has written, or {}."""
    path = experiment_dir / FOLDER / DRIVER
    content = read_json_or_empty(path)
    checked(_DriverRecord, content, path)
    return content if content.get("job") == job else {}
