"""Submits a plan to Ray as one job for all of its runs; tracks and cancels it."""

import contextlib
import json
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from abrun.errors import LaunchError
from abrun.experiment.plan import ExperimentPlan
from abrun.experiment.preflight.checks import anywhere_refusals, lone_command_refusal
from abrun.experiment.preflight.settings import ray_refusal
from abrun.launch.cluster import ACTIVE_STATUSES, ClusterJobs
from abrun.messages.codes import in_words
from abrun.messages.records import printed_reason
from abrun.processes import MODULE_OPTIONS
from abrun.runs.experiment import WARM_START
from abrun.runs.files import read_json_or_empty, write_json
from abrun.runs.records import Git
from abrun.runs.redaction import shortened
from abrun.runs.schemas import Count, Flag, Seconds, checked
from abrun.runs.state import RunState

CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 20.0  # a hanging head may still accept connections
MAX_MESSAGE_CHARS = 300
# Ray's client prefers these variables to its argument.
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
START_HINT = "start one with: ray start --head; or give launcher.address, or RAY_ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """Ray's state of a job."""

    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED
    message: str

    @property
    def is_over(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


def find_dashboard_url(address: str) -> str:
    """Return the URL at which a cluster accepts jobs. Raises LaunchError if no Ray answers there."""
    refusal = ray_refusal()
    if refusal:
        raise LaunchError(refusal)
    configured = None if address == "auto" else address
    configured = configured or next(filter(None, map(os.environ.get, ADDRESS_VARIABLES)), None)
    scheme, _, rest = (configured or "").rpartition("://")
    if scheme not in ("", "http", "https"):
        raise LaunchError(
            f"RAY_ADDRESS: got {shortened(configured)}; allowed: http://HEAD:8265 or HEAD:6379; or set "
            "launcher.address"
        )
    if rest and rest != "auto":
        _check_reachable(configured or "")
    with _raise_launch_errors(configured or "this machine"):
        return _make_client(configured).get_address()


@contextlib.contextmanager
def ray_client(url: str) -> Iterator[Any]:
    """Yield a client of the cluster at a dashboard's URL. Raises LaunchError for its errors."""
    _check_reachable(url)
    with _raise_launch_errors(url):
        yield _make_client(url)


def get_job(url: str, job: str) -> RayJob | None:
    """Return a job, or None if Ray does not know it, as after a restart of its head."""
    with ray_client(url) as client:
        try:
            details = client.get_job_info(job)
        except RuntimeError as error:
            if "status code 404" in str(error):
                return None
            raise
    return RayJob(status=details.status.value, message=details.message or "")


def _make_client(address: str | None) -> Any:
    from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]

    hidden = (
        {name: os.environ.pop(name) for name in ADDRESS_VARIABLES if name in os.environ} if address else {}
    )

    class TimeoutClient(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **options: Any) -> Any:  # Ray's own waits for ever
            return super()._do_request(*arguments, **{"timeout": REQUEST_TIMEOUT_S, **options})

    try:
        return TimeoutClient(address)
    finally:
        os.environ.update(hidden)


def _check_reachable(address: str) -> None:
    """Raise LaunchError if nothing listens there; Ray's client would wait for minutes."""
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = url.port or {"https": 443, "http": 80}.get(url.scheme, 6379)
        socket.create_connection((url.hostname or "", port), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise LaunchError(f"ray: no Ray answers at {address}: {error}; {START_HINT}") from None


@contextlib.contextmanager
def _raise_launch_errors(address: str) -> Iterator[None]:
    if missing := ray_refusal():
        raise LaunchError(missing)
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())[:MAX_MESSAGE_CHARS]
        if isinstance(error, ConnectionError):
            raise LaunchError(f"ray: no Ray answers at {address}: {message}; {START_HINT}") from None
        from requests import ReadTimeout  # Ray's client imports it

        if isinstance(error, ReadTimeout):
            seconds = f"{REQUEST_TIMEOUT_S:g} s"
            message = f"listens, and has not answered for {seconds}; its dashboard seems to hang"
        raise LaunchError(f"ray: {address}: {message}") from None


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


# The driver kills runs that do not save in time, before Ray kills the driver.
KILL_AFTER_S = 20


class RayCluster(ClusterJobs):
    """The one Ray job of an experiment."""

    query_interval_s, cleared_fields = 2.0, {"job": ""}
    folder, record_name, read = FOLDER, JOB, staticmethod(read_job)
    job_fields = ("job",)

    def __init__(self, experiment_dir: Path, settings: Any = None, num_jobs: int | None = None) -> None:
        super().__init__(experiment_dir, settings, num_jobs)
        self._url: str | None = None
        self._driver: Mapping[str, Any] = {}

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        """Return why no machine could run the plan. Raises LaunchError if no Ray answers."""
        refusals = (lone_command_refusal(run.config) for run in plan.runs)
        reasons = [*anywhere_refusals(plan), *dict.fromkeys(filter(None, refusals))]
        for cluster in (run.config.cluster for run in plan.runs):
            if cluster.runs_per_gpu > 1 and cluster.gpus_per_node > 1:
                why = f"it divides GPUs only among runs of one GPU (gpus_per_node is {cluster.gpus_per_node})"
                reasons.append(
                    f"cluster.runs_per_gpu: got {cluster.runs_per_gpu}, but runs cannot share GPUs on ray: "
                    f"{why}; use 1"
                )
                break
        if not reasons:
            self._url = find_dashboard_url(self._settings.address)
        return reasons

    def render_scripts(self, plan: ExperimentPlan, *, compare: bool) -> dict[str, str]:
        """Return the job that would be submitted. Call `find_problems` first."""
        content = self._new_record({}, None, compare=compare)
        job = {"url": content["url"], "entrypoint": self._entrypoint(content), **_environment(content)}
        return {content["job"]: json.dumps(job, indent=2)}

    def submit(self, plan: ExperimentPlan, git: Mapping[str, Any] | None, *, compare: bool) -> list[str]:
        previous = read_job(self._experiment_dir)
        content = self._new_record(previous, git, compare=compare)
        self.write(content)  # the job's driver reads it
        try:
            job = {"entrypoint": self._entrypoint(content), **_environment(content)}
            with ray_client(content["url"]) as client:
                client.submit_job(submission_id=content["job"], **job)
        except BaseException:
            self.write(previous)
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
            waiting, name = self._driver.get("waiting", {}), str(state.name)
            label = f"warm start {state.directory.name}" if state.name == WARM_START else name
            if label in waiting:  # the directory's state may still be that of a lost machine
                reason = in_words(f"job {job} waits {waiting[label]}")
            elif not self._driver:
                reason = in_words(f"job {job} is {ray_job.status}: {ray_job.message}")
            else:
                return state
            return replace(state, status="waiting", reason=reason)
        if state.status not in ACTIVE_STATUSES:
            return state
        if self._record.get("cancelled") or (ray_job and ray_job.status == "STOPPED"):
            stopped = in_words(f"job {job} was stopped; continue with --resume")
            return replace(state, status="interrupted", reason=stopped)
        if ray_job is None:
            head = f"at {self._record['url']} (was the Ray head restarted?)"
            forgotten = in_words(f"job {job} is unknown {head}; continue with --resume")
            return replace(state, status="failed", reason=forgotten)
        lines = [line.strip() for line in ray_job.message.splitlines() if line.strip()]
        printed = list(filter(None, map(printed_reason, lines)))
        message = self._driver.get("ended") or next(reversed(printed or lines), ray_job.status)
        return replace(state, status="failed", reason=in_words(f"job {job} ended: {message}"))

    def stop_jobs(self) -> None:
        with ray_client(self._record["url"]) as client:
            # Its driver receives SIGTERM and has the time that was set at submission
            client.stop_job(self._record["job"])

    def query_jobs(self) -> RayJob | None:
        submitted = read_job(self._experiment_dir)
        self._record = submitted if submitted.get("job") else self._record  # --resume may have replaced it
        self._driver = read_driver(self._experiment_dir, self._record["job"])
        return get_job(self._record["url"], self._record["job"])


def _environment(content: Mapping[str, Any]) -> dict[str, Any]:
    wait_s = content["settings"]["save_s"] + KILL_AFTER_S
    return {"runtime_env": {"env_vars": {**content["env"], "RAY_JOB_STOP_WAIT_TIME_S": str(wait_s)}}}
