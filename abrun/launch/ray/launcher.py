"""Submits a plan to Ray as one job for all of its runs; tracks and cancels it."""

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
from abrun.launch.cluster import ACTIVE_STATUSES, ClusterJobs
from abrun.launch.ray import client, record
from abrun.messages.codes import Code, Reason
from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS
from abrun.runs.experiment import WARM_START
from abrun.runs.records import RunState

# The driver kills runs that do not save in time, before Ray kills the driver.
KILL_AFTER_S = 20


class RayCluster(ClusterJobs):
    """The one Ray job of an experiment."""

    query_interval_s, folder, cleared_fields = 2.0, record.FOLDER, {"job": ""}
    read, write = staticmethod(record.read_job), staticmethod(record.write_job)

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        super().__init__(experiment_dir, settings, num_jobs)
        self._url: str | None = None
        self._driver: Mapping[str, Any] = {}

    @property
    def is_submitted(self) -> bool:
        return bool(self._record.get("job"))

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        """Return why no machine could run the plan. Raises LaunchError if no Ray answers."""
        reasons = anywhere_refusals(plan)
        for cluster in (run.config.cluster for run in plan.runs):
            if cluster.runs_per_gpu > 1 and cluster.gpus_per_node > 1:
                why = f"it divides GPUs only among runs of one GPU (gpus_per_node is {cluster.gpus_per_node})"
                reasons.append(
                    f"cluster.runs_per_gpu: got {cluster.runs_per_gpu}, but runs cannot share GPUs on ray: "
                    f"{why}; use 1"
                )
                break
        if not reasons:
            self._url = client.find_dashboard_url(self._settings.address)
        return reasons

    def render_scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """Return the job that would be submitted. Call `find_problems` first."""
        content = self._new_record({}, None, compare=compare)
        job = {"url": content["url"], "entrypoint": self._entrypoint(content), **_environment(content)}
        return {content["job"]: json.dumps(job, indent=2)}

    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        previous = record.read_job(self._experiment_dir)
        content = self._new_record(previous, git, compare=compare)
        record.write_job(self._experiment_dir, content)  # the job's driver reads it
        try:
            environment = _environment(content)["runtime_env"]
            client.submit_job(content["url"], content["job"], self._entrypoint(content), environment)
        except BaseException:
            record.write_job(self._experiment_dir, previous)
            raise
        return [content["job"]]

    def _new_record(
        self, previous: Mapping[str, Any], git: Mapping[str, Any] | None, *, compare: bool
    ) -> dict[str, Any]:
        name = previous.get("name") or f"{self._experiment_dir.name}-{uuid.uuid4().hex[:6]}"
        attempt = previous.get("attempt", 0) + 1
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
    def active_job_ids(self) -> list[str]:
        ray_job = self._query_cached()
        return [] if ray_job is None or ray_job.is_over else [self._record["job"]]

    def state_of(self, state: RunState) -> RunState:
        """Return a run's state, corrected if Ray or the driver knows more than its directory."""
        if state.status == "finished":
            return state
        try:
            ray_job = self._query_cached()
        except LaunchError as error:  # the head is gone or cannot be reached from here
            return replace(state, reason=state.reason or error.reason)
        job = self._record["job"]
        if ray_job and not ray_job.is_over:
            return self._refine_active_state(state, ray_job)
        if state.status not in ACTIVE_STATUSES:
            return state
        if self._record.get("cancelled") or (ray_job and ray_job.status == "STOPPED"):
            stopped = Code.RESUMABLE(ending=Code.JOB_STOPPED(job=job))
            return replace(state, status="interrupted", reason=stopped)
        if ray_job is None:
            forgotten_job = Code.RESUMABLE(ending=Code.JOB_FORGOTTEN(job=job, url=self._record["url"]))
            return replace(state, status="failed", reason=forgotten_job)
        ended = Code.JOB_ENDED(job=job, state=self._final_message(ray_job))
        return replace(state, status="failed", reason=ended)

    def stop_jobs(self) -> None:
        client.stop_job(self._record["url"], self._record["job"])

    def _refine_active_state(self, state: RunState, ray_job: client.RayJob) -> RunState:
        """Return the state of a run whose job is queued or running."""
        job, waiting = self._record["job"], self._driver.get("waiting", {})
        name = state.directory.name if state.name == WARM_START else str(state.name)
        label = f"warm start {name}" if state.name == WARM_START else name
        if label in waiting:  # the directory's state may still be that of a lost machine
            return replace(state, status="waiting", reason=Code.RUN_WAITS(job=job, why=waiting[label]))
        if not self._driver:
            reason = Code.JOB_STATE(job=job, state=ray_job.status, message=ray_job.message)
            return replace(state, status="waiting", reason=reason)
        return state

    def _final_message(self, ray_job: client.RayJob) -> Reason | str:
        lines = [line.strip() for line in ray_job.message.splitlines() if line.strip()]
        reasons = list(filter(None, map(printed_reason, lines)))
        return self._driver.get("ended") or next(reversed(reasons or lines), ray_job.status)

    def query_jobs(self) -> client.RayJob | None:
        submitted = record.read_job(self._experiment_dir)
        self._record = submitted if submitted.get("job") else self._record  # --resume may have replaced it
        self._driver = record.read_driver(self._experiment_dir, self._record["job"])
        return client.get_job(self._record["url"], self._record["job"])


def _environment(content: Mapping[str, Any]) -> dict[str, Any]:
    wait_s = content["settings"]["save_s"] + KILL_AFTER_S
    return {"runtime_env": {"env_vars": {**content["env"], "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}}}
