"""Ray without one: what is submitted, refused, cancelled, submitted again, with a fake of its client."""

import contextlib
import functools
import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from abrun.errors import LaunchError
from abrun.launch.cluster import cancel_experiment, find_cluster_jobs
from abrun.launch.ray import driver
from abrun.launch.ray import launcher as ray_launcher
from abrun.launch.ray.launcher import RayJob
from abrun.messages.codes import in_words
from abrun.messages.records import encode_reasons
from abrun.runs.launches import begin_launch
from abrun.runs.rundir import RunDir
from abrun.runs.writer import begin_attempt
from tests.launch import fakes
from tests.launch.fakes import FAKE, SMALL, plan_of, run_to_end, seen
from tests.snapshot import Snapshot

URL = "http://head:8265"


class FakeRay:
    """A head: its jobs by id, and what each was submitted with."""

    def __init__(self) -> None:
        self.jobs: dict[str, RayJob] = {}
        self.submitted: list[tuple[str, str, Any]] = []
        self.silent: LaunchError | None = None
        self.refuses = False

    def find_dashboard_url(self, address: str) -> str:
        self._answer()
        return URL

    def ray_client(self, url: str) -> Any:
        self._answer()
        return contextlib.nullcontext(self)

    def submit_job(self, *, submission_id: str, entrypoint: str, runtime_env: Any) -> None:
        if submission_id in self.jobs or self.refuses:
            raise LaunchError(f"ray: {URL}: a job {submission_id} is there already")
        self.submitted.append((submission_id, entrypoint, runtime_env))
        self.jobs[submission_id] = RayJob(status="RUNNING", message="Job is currently running.")

    def get_job(self, url: str, job: str) -> RayJob | None:
        self._answer()
        return self.jobs.get(job)

    def stop_job(self, job: str) -> None:
        self.jobs[job] = RayJob(status="STOPPED", message="Job was intentionally stopped.")

    def _answer(self) -> None:
        if self.silent:
            raise self.silent


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    for name in ("find_dashboard_url", "ray_client", "get_job"):
        monkeypatch.setattr(ray_launcher, name, getattr(fake, name))
    monkeypatch.setattr(ray_launcher.RayCluster, "query_interval_s", -1)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return fake


submit = functools.partial(fakes.submit, launcher="ray")


def jobs_of(experiment_dir: Path) -> Any:
    found = find_cluster_jobs(experiment_dir)
    assert found is not None
    return found


def job_of(experiment_dir: Path) -> str:
    return ray_launcher.read_job(experiment_dir)["job"]


def end(ray: FakeRay, experiment_dir: Path, status: str, message: str = "") -> None:
    ray.jobs[job_of(experiment_dir)] = RayJob(status=status, message=message)


# --- submission and refusals ---


def test_what_was_cancelled_has_not_failed_once_ray_has_forgotten_it(ray: FakeRay, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    jobs_of(experiment_dir).cancel()
    ray.jobs.clear()
    assert seen(experiment_dir).status == "interrupted"


def test_an_experiment_is_one_job(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    experiment_dir = submit(plan_of("launcher={type: ray, save_s: 60, env: {HF_HOME: /models}}"), tmp_path)
    ((job, entrypoint, runtime_env),) = ray.submitted
    assert (
        job.startswith("small-") and job.endswith("-a1") and jobs_of(experiment_dir).active_job_ids == [job]
    )
    assert entrypoint == f"exec {sys.executable} -P -m abrun.launch.ray.driver {experiment_dir} {job}"
    assert runtime_env == {
        "env_vars": {
            "PYTHONPATH": f"{Path.cwd()}/here",
            "HF_HOME": "/models",
            "RAY_JOB_STOP_WAIT_TIME_S": "80",
        }
    }
    assert ray_launcher.read_job(experiment_dir)["url"] == URL


def test_a_refused_job_leaves_nothing(ray: FakeRay, tmp_path: Path) -> None:
    ray.refuses = True
    with pytest.raises(LaunchError) as refusal:
        submit(plan_of(), tmp_path / "runs")
    assert "is there already" in str(refusal.value)
    assert not (tmp_path / "runs" / "small").exists()


def test_a_command_on_several_nodes_is_refused_with_a_way_out(ray: FakeRay, tmp_path: Path) -> None:
    metrics = "{format: csv, path: '{run_dir}/m.csv'}"
    command = f"arms.treatment={{trainer: {{type: command, argv: [x], metrics: {metrics}}}}}"
    with pytest.raises(LaunchError) as refusal:
        submit(plan_of(command, "cluster.nodes=2", "compare.claims=[]"), tmp_path)
    assert "but only Slurm's srun reaches the other nodes; use launcher: slurm" in str(refusal.value)


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_an_address_where_nothing_listens_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Snapshot
) -> None:
    monkeypatch.setattr(ray_launcher, "ray_refusal", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with pytest.raises(LaunchError) as refused:
        submit(plan_of(f"launcher={{type: ray, address: '{url}'}}"), tmp_path / "runs")
    assert str(refused.value) == (
        f"ray: no Ray answers at {url}: [Errno 111] Connection refused; start one with: ray start --head; or "
        "give launcher.address, or RAY_ADDRESS"
    )
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with snapshot.refused(LaunchError):
        submit(plan_of(), tmp_path / "runs")


def test_a_head_that_listens_and_hangs_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own client would wait for ever; this stands in for that, with the request it makes."""

    class Client:
        def __init__(self, address: str) -> None:
            self._address = address

        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return requests.request(method, self._address + endpoint, **options)

        def get_job_info(self, job: str) -> Any:
            return self._do_request("GET", f"/api/jobs/{job}")

    monkeypatch.setitem(sys.modules, "ray.job_submission", SimpleNamespace(JobSubmissionClient=Client))
    monkeypatch.setattr(ray_launcher, "ray_refusal", lambda: None)
    monkeypatch.setattr(ray_launcher, "REQUEST_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(LaunchError, match=f"^ray: {url}: listens, and has not answered"):
            ray_launcher.get_job(url, "job")


# --- what becomes of the job ---


def test_what_the_driver_says_waits_is_waiting(ray: FakeRay, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    job = job_of(experiment_dir)
    assert (seen(experiment_dir).status, seen(experiment_dir).message) == (
        "waiting",
        f"job {job} is RUNNING: {ray.jobs[job].message}",
    )
    ray_launcher.write_driver(experiment_dir, job, {"baseline/seed-0": "for 2 nodes with 1 CPU each"}, None)
    assert seen(experiment_dir).message == f"job {job} waits for 2 nodes with 1 CPU each"
    here = RunDir(experiment_dir / "baseline" / "seed-0")
    begin_launch(here, (), None)
    begin_attempt(here)
    assert seen(experiment_dir).status == "waiting"  # what its directory says is of an attempt before
    ray_launcher.write_driver(experiment_dir, job, {}, None)
    assert seen(experiment_dir).status == "running"


NOT_ON_HEAD = in_words("/x: not on head")


@pytest.mark.parametrize(
    ("status", "message", "as_status", "words"),
    [
        ("STOPPED", "", "interrupted", "was stopped; continue with --resume"),
        (
            "FAILED",
            f"Job failed: exit code 2\nlast logs\n{json.dumps(encode_reasons(NOT_ON_HEAD))}\n",
            "failed",
            "ended: /x: not on h",
        ),
        ("FAILED", "Unexpected error: the supervisor died", "failed", "ended: Unexpected error: the"),
        (None, "", "failed", "is unknown at"),
    ],
)
def test_a_run_without_a_word_is_as_its_job(
    status: str | None, message: str, as_status: str, words: str, ray: FakeRay, tmp_path: Path
) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    ray.jobs.clear()
    if status:
        end(ray, experiment_dir, status, message)
    assert seen(experiment_dir).status == as_status and words in (seen(experiment_dir).message or "")


def test_where_ray_does_not_answer_the_run_directory_does_and_says_so(ray: FakeRay, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    ray.silent = LaunchError("ray: nobody answers")
    assert (seen(experiment_dir).status, seen(experiment_dir).message) == ("pending", str(ray.silent))


def test_cancel_stops_the_job_and_resume_submits_another(ray: FakeRay, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    job = job_of(experiment_dir)
    with pytest.raises(LaunchError, match=rf"--resume: its jobs are still in the queue \({job}\)"):
        submit(plan_of(), tmp_path, resume=True)
    assert cancel_experiment(experiment_dir).startswith(f"cancelled: 1 job ({job})")
    assert cancel_experiment(experiment_dir).startswith("small: no run is active")
    submit(plan_of(), tmp_path, resume=True)
    assert job_of(experiment_dir) == job.replace("-a1", "-a2")
    assert "cancelled" not in ray_launcher.read_job(experiment_dir)


def test_another_launcher_that_goes_on_speaks_for_the_runs(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    end(ray, experiment_dir, "FAILED")
    monkeypatch.setitem(cli_launchers(), *FAKE)
    assert run_to_end(plan_of(), tmp_path, launcher="fake", resume=True).exit_code == 0
    assert find_cluster_jobs(experiment_dir) is None


def cli_launchers() -> dict[str, str]:
    from abrun.recipe.implementations import LOCAL_LAUNCHERS

    return LOCAL_LAUNCHERS


def test_the_last_word_of_a_driver_is_the_end_of_its_runs(ray: FakeRay, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    end(ray, experiment_dir, "FAILED")
    ray_launcher.write_driver(experiment_dir, job_of(experiment_dir), {}, "launcher.save_s: wrong")
    assert seen(experiment_dir).message == f"job {job_of(experiment_dir)} ended: launcher.save_s: wrong"


# --- in the job ---


def test_a_driver_that_does_not_see_the_experiment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", str(tmp_path / "gone"), "job-a1"])
    assert driver.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/gone: does not exist on {socket.gethostname()}, ")


def test_a_driver_whose_place_another_has_taken_keeps_its_words(ray: FakeRay, tmp_path: Path) -> None:
    experiment_dir = submit(plan_of(), tmp_path)
    driver._write_status(experiment_dir, "small-a0", {"baseline/seed-0": "stale"})
    assert not (experiment_dir / "_ray" / "driver.json").exists()
    driver._write_status(experiment_dir, job_of(experiment_dir), {"baseline/seed-0": "for a node"})
    assert ray_launcher.read_driver(experiment_dir, job_of(experiment_dir))["waiting"]


Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, abrun: Cli) -> Cli:
    return lambda *arguments: abrun(*arguments, "--runs-dir", tmp_path / "runs")


def test_the_commands_know_the_job(ray: FakeRay, tmp_path: Path, run: Cli) -> None:
    code, said, _ = run("launch", SMALL, "--launcher", "ray", "--dry-run")
    assert code == 0 and "abrun.launch.ray.driver" in said and URL in said
    assert ray.submitted == [] and not (tmp_path / "runs").exists()
    code, said, _ = run("launch", SMALL, "--launcher", "ray", "--detach")
    assert code == 0 and said.startswith("queued: small-") and "abrun watch" in said
    code, said, _ = run("status", "small")
    assert code == 0 and "4 waiting" in said and "is RUNNING" in said
    assert run("stop", "small")[1].startswith("cancelled: 1 job (small-")
    assert "4 interrupted" in run("status", "small")[1]
    assert "4 interrupted" in run("status")[1]
    ray.silent = LaunchError("ray: nobody answers")
    said = run("status")[1]
    assert "4 pending" in said and str(ray.silent) in said
    assert run("launch", SMALL, "--launcher", "ray")[0] == 2
    assert json.loads((tmp_path / "runs" / "small" / "_ray" / "job.json").read_text())["cancelled"] is True
