"""Jobs of a Ray cluster, through Ray's own client. Errors are raised as LaunchError in one line."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from abrun.errors import LaunchError
from abrun.experiment.preflight.settings import ray_refusal
from abrun.runs.redaction import shortened

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


def submit_job(url: str, job: str, entrypoint: str, runtime_env: Mapping[str, Any]) -> None:
    _check_reachable(url)
    with _raise_launch_errors(url):
        _make_client(url).submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=dict(runtime_env))


def get_job(url: str, job: str) -> RayJob | None:
    """Return a job, or None if Ray does not know it, as after a restart of its head."""
    _check_reachable(url)
    with _raise_launch_errors(url):
        client = _make_client(url)
        try:
            details = client.get_job_info(job)
        except RuntimeError as error:
            if "status code 404" in str(error):
                return None
            raise
    return RayJob(status=details.status.value, message=details.message or "")


def stop_job(url: str, job: str) -> None:
    """Ask a job to end: its driver receives SIGTERM and has the time that was set at submission."""
    _check_reachable(url)
    with _raise_launch_errors(url):
        _make_client(url).stop_job(job)


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
