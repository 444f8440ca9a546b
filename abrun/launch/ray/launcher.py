"""A plan on its way to Ray: one job for all of its runs, followed, cancelled."""

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
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import anywhere_refusals
from abrun.launch.cluster import AT_WORK, Cluster
from abrun.launch.ray import client, record
from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS
from abrun.reasons import Code, Reason
from abrun.runs.records import RunState

KILL_AFTER_S = 20  # runs that do not save in time are killed by the driver before Ray kills the driver


class RayCluster(Cluster):
    """The one job of an experiment on Ray, and what Ray and the job's driver know of it."""

    ask_every_s, folder, forgotten = 2.0, record.FOLDER, {"job": ""}  # its id is used up all the same
    read, write = staticmethod(record.read_job), staticmethod(record.write_job)

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        super().__init__(experiment_dir, settings, num_jobs)
        self._url: str | None = None
        self._driver: Mapping[str, Any] = {}

    @property
    def is_handed_over(self) -> bool:
        return bool(self._record.get("job"))

    def refusals(self, plan: ExperimentPlan) -> list[Reason]:
        """Why no machine could run the plan. Raises LaunchError where no Ray answers."""
        reasons = anywhere_refusals(plan)
        if not reasons:
            self._url = client.dashboard(self._settings.address)
        return reasons

    def scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """What the job would be. After `refusals`."""
        content = self._new_record({}, None, compare=compare)
        job = {"url": content["url"], "entrypoint": self._entrypoint(content), **_environment(content)}
        return {content["job"]: json.dumps(job, indent=2)}

    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        """Submit the job; returns its id."""
        before = record.read_job(self._experiment_dir)
        content = self._new_record(before, git, compare=compare)
        record.write_job(self._experiment_dir, content)  # which its driver reads
        try:
            environment = _environment(content)["runtime_env"]
            client.submit(content["url"], content["job"], self._entrypoint(content), environment)
        except BaseException:
            record.write_job(self._experiment_dir, before)
            raise
        return [content["job"]]

    def _new_record(
        self, before: Mapping[str, Any], git: Mapping[str, Any] | None, *, compare: bool
    ) -> dict[str, Any]:
        name = before.get("name") or f"{self._experiment_dir.name}-{uuid.uuid4().hex[:6]}"
        attempt = before.get("attempt", 0) + 1
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        env = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))} if any(paths) else {}
        return {
            "name": name,
            "attempt": attempt,
            "job": f"{name}-a{attempt}",
            "url": self._url,
            "settings": self._settings.model_dump(mode="json"),
            "num_jobs": self._num_jobs,
            "compare": compare,
            "cwd": os.getcwd(),
            "python": self._settings.python or sys.executable,
            "env": {**env, **self._settings.env},
            "git": git,
        }

    def _entrypoint(self, content: Mapping[str, Any]) -> str:
        module = [*MODULE_OPTIONS, "abrun.launch.ray.driver", str(self._experiment_dir), content["job"]]
        return f"exec {shlex.join([content['python'], *module])}"

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
        submitted = record.read_job(self._experiment_dir)
        self._record = submitted if submitted.get("job") else self._record  # --resume may have replaced it
        self._driver = record.read_driver(self._experiment_dir, self._record["job"])
        return client.known(self._record["url"], self._record["job"])


def _environment(content: Mapping[str, Any]) -> dict[str, Any]:
    wait_s = content["settings"]["save_s"] + KILL_AFTER_S
    return {"runtime_env": {"env_vars": {**content["env"], "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}}}
