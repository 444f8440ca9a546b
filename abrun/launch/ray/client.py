"""The jobs of a Ray cluster, through Ray's own client. What it refuses is a LaunchError of one line."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from abrun.errors import LaunchError
from abrun.experiment.preflight.settings import ray_refusal
from abrun.reasons import Code
from abrun.redaction import shortened

ANSWER_S = 5.0  # for a connection
REQUEST_S = 20.0  # for what is asked over it: a head may hang that still listens
MOST_WORDS = 300
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # which Ray's client puts above what it is given
START = "start one with: ray start --head; or give launcher.address, or RAY_ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What Ray knows of a job."""

    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED
    message: str

    @property
    def over(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


def dashboard(address: str) -> str:
    """The URL at which a cluster takes jobs. Raises LaunchError where no Ray answers there."""
    wrong = ray_refusal()
    if wrong:
        raise LaunchError(wrong)
    named = None if address == "auto" else address
    named = named or next(filter(None, map(os.environ.get, ADDRESSES)), None)
    scheme, _, rest = (named or "").rpartition("://")
    if scheme not in ("", "http", "https"):
        raise LaunchError(Code.SETTING_REFUSED(field="RAY_ADDRESS", got=shortened(named)))
    if rest and rest != "auto":
        _refuse_silent(named or "")
    with _in_words(named or "this machine"):
        return _client(named).get_address()


def submit(url: str, job: str, entrypoint: str, runtime_env: Mapping[str, Any]) -> None:
    _refuse_silent(url)
    with _in_words(url):
        _client(url).submit_job(entrypoint=entrypoint, submission_id=job, runtime_env=dict(runtime_env))


def known(url: str, job: str) -> Known | None:
    """None where Ray knows no such job, as after its head has been started again."""
    _refuse_silent(url)
    with _in_words(url):
        client = _client(url)
        try:
            details = client.get_job_info(job)
        except RuntimeError as error:
            if "status code 404" in str(error):
                return None
            raise
    return Known(status=details.status.value, message=details.message or "")


def stop(url: str, job: str) -> None:
    """Ask a job to end: its driver gets SIGTERM, and as long as was agreed when it was submitted."""
    _refuse_silent(url)
    with _in_words(url):
        _client(url).stop_job(job)


def _client(address: str | None) -> Any:
    from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]

    hidden = {name: os.environ.pop(name) for name in ADDRESSES if name in os.environ} if address else {}

    class Bounded(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **options: Any) -> Any:  # Ray's own waits for ever
            return super()._do_request(*arguments, **{"timeout": REQUEST_S, **options})

    try:
        return Bounded(address)
    finally:
        os.environ.update(hidden)


def _refuse_silent(address: str) -> None:
    """Raises LaunchError where nothing listens: Ray's client itself would wait for minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 6379)
        socket.create_connection((parts.hostname or "", port), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise LaunchError(Code.RAY_SILENT(address=address, error=str(error), remedy=START)) from None


@contextlib.contextmanager
def _in_words(address: str) -> Iterator[None]:
    if missing := ray_refusal():
        raise LaunchError(missing)
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        words = " ".join(str(error).split())[:MOST_WORDS]
        if isinstance(error, ConnectionError):
            raise LaunchError(Code.RAY_SILENT(address=address, error=words, remedy=START)) from None
        if "Read timed out" in words:
            words = f"listens, and has not answered for {REQUEST_S:g} s; its dashboard seems to hang"
        raise LaunchError(Code.RAY_FAILED(address=address, answer=words)) from None
