"""What an experiment's directory says of its job of Ray.

_ray/job.json      {name, attempt, job, url, settings, git, ..., cancelled}: whoever submits writes it
_ray/driver.json   {job, waiting: {run: why}, ended: null, or its last word}: the driver writes it
_ray/driver.log    what the driver has to say
_ray/compare.log   what the comparison at the end has printed
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from abrun import store
from abrun.errors import StoreError

FOLDER = "_ray"  # of an experiment; no arm can be called so
JOB, DRIVER, LOG, COMPARED = "job.json", "driver.json", "driver.log", "compare.log"


def write_job(experiment_dir: Path, content: Mapping[str, Any]) -> None:
    store.write_json(experiment_dir / FOLDER / JOB, content)


def read_job(experiment_dir: Path) -> dict[str, Any]:
    """Empty where nothing was submitted. Raises StoreError where it does not read."""
    path = experiment_dir / FOLDER / JOB
    content = store.read_json(path) if path.is_file() else {}
    texts = all(isinstance(content.get(key, ""), str) for key in ("job", "url"))
    if not (texts and isinstance(content.get("attempt", 0), int)):
        raise StoreError(f"{path}: got another form than this abrun's; restore the file, or remove it")
    return content


def write_driver(experiment_dir: Path, job: str, waiting: Mapping[str, str], ended: str | None) -> None:
    content = {"job": job, "waiting": waiting, "ended": ended}
    store.write_json(experiment_dir / FOLDER / DRIVER, content)


def read_driver(experiment_dir: Path, job: str) -> dict[str, Any]:
    """What the driver of a job says; empty where it has said nothing yet."""
    path = experiment_dir / FOLDER / DRIVER
    content = store.read_json(path) if path.is_file() else {}
    return content if content.get("job") == job and isinstance(content.get("waiting"), dict) else {}
