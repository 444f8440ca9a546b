"""A plan on its way to Ray: one job for all of its runs, followed, cancelled, submitted again."""

import json
import os
import shlex
import sys
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from abrun.errors import LaunchError
from abrun.experiment.plan import Plan
from abrun.experiment.preflight.requirements import anywhere_refusals, foreign_refusals
from abrun.launch.cluster import AT_WORK, ClusterJobs
from abrun.launch.ray import client, record
from abrun.messages.records import printed_reason
from abrun.processes import MODULE
from abrun.reasons import Code, Reason
from abrun.recipe.launcher import Ray
from abrun.runs.records import RunState

KILL_AFTER_S = 20  # runs that do not save in time are killed by the driver before Ray kills the driver


class RayLauncher:
    """Hands the runs of a plan over to a cluster."""

    def __init__(self, settings: Ray, num_jobs: int | None = None) -> None:
        self._settings, self._num_jobs = settings, num_jobs
        self._url: str | None = None

    def refusals(self, plan: Plan) -> list[Reason]:
        """Why no machine could run the plan. Raises LaunchError where no Ray answers."""
        reasons = [*anywhere_refusals(plan), *foreign_refusals(plan)]
        if not reasons:
            self._url = client.dashboard(self._settings.address)
        return list(dict.fromkeys(reasons))

    def scripts(self, plan: Plan, experiment_dir: Path, *, compare: bool) -> dict[str, str]:
        """What the job would be. After `refusals`."""
        said = self._record(experiment_dir, None, compare=compare)
        job = {"url": said["url"], "entrypoint": _entrypoint(experiment_dir, said), **_environment(said)}
        return {said["job"]: json.dumps(job, indent=2)}

    def submit(
        self, plan: Plan, experiment_dir: Path, git: Mapping[str, Any] | None, *, compare: bool
    ) -> list[str]:
        """Submit the job; returns its id."""
        before = record.read_job(experiment_dir)
        said = self._record(experiment_dir, git, compare=compare, before=before)
        _submit(experiment_dir, said, before)
        return [said["job"]]

    def _record(
        self,
        experiment_dir: Path,
        git: Mapping[str, Any] | None,
        *,
        compare: bool,
        before: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        before = before or {}
        name = before.get("name") or f"{experiment_dir.name}-{uuid.uuid4().hex[:6]}"
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        env = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} if any(paths) else {}
        return {
            "name": name,
            "attempt": before.get("attempt", 0) + 1,
            "job": f"{name}-a{before.get('attempt', 0) + 1}",
            "url": self._url,
            "settings": self._settings.model_dump(mode="json"),
            "num_jobs": self._num_jobs,
            "compare": compare,
            "cwd": os.getcwd(),
            "python": self._settings.python or sys.executable,
            "env": {**env, **self._settings.env},
            "git": git,
        }


def _submit(experiment_dir: Path, said: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    record.write_job(experiment_dir, said)  # which its driver reads
    try:
        entrypoint, environment = _entrypoint(experiment_dir, said), _environment(said)
        client.submit(said["url"], said["job"], entrypoint, environment["runtime_env"])
    except BaseException:
        record.write_job(experiment_dir, before)
        raise


def _entrypoint(experiment_dir: Path, said: Mapping[str, Any]) -> str:
    argv = [said["python"], *MODULE, "abrun.launch.ray.driver", str(experiment_dir), said["job"]]
    return f"exec {shlex.join(argv)}"


def _environment(said: Mapping[str, Any]) -> dict[str, Any]:
    wait_s = said["settings"]["save_s"] + KILL_AFTER_S
    return {"runtime_env": {"env_vars": {**said["env"], "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}}}


class RayJobs(ClusterJobs):
    """What Ray, and the driver, know of the job of an experiment."""

    ask_every_s, folder, forgotten = 2.0, record.FOLDER, {"job": ""}  # its id is used up all the same
    read, write = staticmethod(record.read_job), staticmethod(record.write_job)

    def __init__(self, experiment_dir: Path, said: Mapping[str, Any]) -> None:
        super().__init__(experiment_dir, said)
        self._driver: Mapping[str, Any] = {}

    @staticmethod
    def is_handed_over(record: Mapping[str, Any]) -> bool:
        return bool(record.get("job"))

    @property
    def compares(self) -> bool:
        return bool(self._record.get("compare"))

    @property
    def busy(self) -> list[str]:
        known = self._known()
        return [] if known is None or known.over else [self._record["job"]]

    def state_of(self, state: RunState) -> RunState:
        """A run's state, where Ray or the driver knows better than its directory."""
        if state.status == "finished":
            return state
        try:
            known = self._known()
        except LaunchError as error:  # the head is gone, or this machine does not reach it
            return replace(state, reason=state.reason or error.reason)
        job = self._record["job"]
        if known and not known.over:
            return self._of_a_job(state, known)
        if state.status not in AT_WORK:
            return state
        if self._record.get("cancelled") or (known and known.status == "STOPPED"):
            stopped = Code.RESUMABLE(ending=Code.JOB_STOPPED(job=job))
            return replace(state, status="interrupted", reason=stopped)
        if known is None:
            forgotten = Code.RESUMABLE(ending=Code.JOB_FORGOTTEN(job=job, url=self._record["url"]))
            return replace(state, status="failed", reason=forgotten)
        ended = Code.JOB_ENDED(job=job, state=self._last_words(known))
        return replace(state, status="failed", reason=ended)

    def end(self) -> None:
        client.stop(self._record["url"], self._record["job"])

    def revive(self) -> str | None:
        """Submit again the job of a driver that has died, as with its machine, as often as may be."""
        said = record.read_job(self._experiment_dir)
        known, driver = self._known(), record.read_driver(self._experiment_dir, said["job"])
        gone = known is None or known.status == "FAILED"
        if not gone or said.get("cancelled") or not driver or driver.get("ended") is not None:
            return None
        if said["attempt"] > said["settings"]["restarts"]:
            return None
        attempt = said["attempt"] + 1
        again = {**said, "attempt": attempt, "job": f"{said['name']}-a{attempt}"}
        _submit(self._experiment_dir, again, said)
        self._record, self._asked_s = again, None
        return again["job"]

    def _of_a_job(self, state: RunState, known: client.Known) -> RunState:
        """The state of a run whose job waits or works."""
        job, waiting = self._record["job"], self._driver.get("waiting", {})
        name = state.directory.name if state.name.arm == "warm-start" else str(state.name)
        label = f"warm start {name}" if state.name.arm == "warm-start" else name
        if label in waiting:  # the directory may still tell of a machine that is gone
            return replace(state, status="waiting", reason=Code.RUN_WAITS(job=job, why=waiting[label]))
        if not self._driver:
            reason = Code.JOB_STATE(job=job, state=known.status, message=known.message)
            return replace(state, status="waiting", reason=reason)
        return state

    def _last_words(self, known: client.Known) -> Reason | str:
        lines = [line.strip() for line in known.message.splitlines() if line.strip()]
        reasons = list(filter(None, map(printed_reason, lines)))
        return self._driver.get("ended") or next(reversed(reasons or lines), known.status)

    def ask(self) -> client.Known | None:
        said = record.read_job(self._experiment_dir)
        self._record = said if said.get("job") else self._record  # another may have submitted it again
        self._driver = record.read_driver(self._experiment_dir, self._record["job"])
        return client.known(self._record["url"], self._record["job"])
