"""What an experiment's directory says of its job of Ray.

_ray/job.json      {name, attempt, job, url, settings, git, ..., cancelled}: whoever submits writes it
_ray/driver.json   {job, waiting: {run: why}, ended: null, or its last word}: the driver writes it
_ray/driver.log    what the driver has to say
_ray/compare.log   what the comparison at the end has printed
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abrun.runs.files import read_json_or_empty, write_json
from abrun.runs.records import Git
from abrun.runs.schemas import Count, Flag, Seconds, checked

FOLDER = "_ray"  # of an experiment; no arm can be called so
JOB, DRIVER, LOG = "job.json", "driver.json", "driver.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class _WithdrawnJobRecord:
    """The fields of a job that was taken back, after which others are called."""

    job: str = ""
    name: str = ""
    attempt: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SettingsRecord:
    restarts: Count
    save_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRecord:
    """The fields of a job that was submitted."""

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
    """The fields of the driver's word."""

    job: str = ""
    waiting: Mapping[str, str] = field(default_factory=dict)
    ended: str | None = None


def write_job(experiment_dir: Path, content: Mapping[str, Any]) -> None:
    write_json(experiment_dir / FOLDER / JOB, content)


def read_job(experiment_dir: Path) -> dict[str, Any]:
    """Empty where nothing was submitted. Raises StoreError where it does not read."""
    path = experiment_dir / FOLDER / JOB
    content = read_json_or_empty(path)
    checked(_JobRecord if content.get("job") else _WithdrawnJobRecord, content, path)
    return content


def write_driver(experiment_dir: Path, job: str, waiting: Mapping[str, str], ended: str | None) -> None:
    content = {"job": job, "waiting": waiting, "ended": ended}
    write_json(experiment_dir / FOLDER / DRIVER, content)


def read_driver(experiment_dir: Path, job: str) -> dict[str, Any]:
    """What the driver of a job says; empty where it has said nothing yet."""
    path = experiment_dir / FOLDER / DRIVER
    content = read_json_or_empty(path)
    checked(_DriverRecord, content, path)
    return content if content.get("job") == job else {}
