"""Another user reads an experiment: what may be read is shown, what may not is named, and nothing is written.

The files belong to another user, and the commands run without root's rights over everybody's files.
Where the tests do not run as root, they take away their own right to read.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verdict.simulate import write_experiment

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
# PR_CAPBSET_DROP of CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: what root starts lacks them
AS_ANOTHER_USER = """
import ctypes, os, sys
for capability in range(4) if os.geteuid() == 0 else ():
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, "-m", "abrun", *sys.argv[1:]])
"""


def abrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", AS_ANOTHER_USER, *arguments]
    env = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.fixture
def experiment_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = write_experiment(tmp_path / "runs" / "demo", steps=12, seeds=[0, 1])
    sample = {"prompt": "p", "text": "t", "reward": 1.0, "logprob_error": None, "num_tokens": 1}
    row = {"step": 1, "attempt": 1, "samples": [{**sample, "truncated": False}]}
    (made / "baseline/seed-0/samples.jsonl").write_text(json.dumps(row) + "\n")
    for path in (made, *made.rglob("*")):
        path.chmod(0o750 if path.is_dir() else 0o640)
        if IS_ROOT:
            os.chown(path, NOBODY, 0)
    return made


def close(path: Path) -> None:
    path.chmod((0o700 if path.is_dir() else 0o600) if IS_ROOT else 0)


def statuses() -> dict[str, tuple[str, str | None]]:
    done = abrun("status", "demo", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return {run["run"]: (run["status"], run["message"]) for run in json.loads(done.stdout)["runs"]}


@pytest.mark.slow
def test_another_user_sees_what_is_shared_and_hears_what_is_not(experiment_dir: Path) -> None:
    def entries() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in experiment_dir.rglob("*")}

    before = entries()
    assert {status for status, _ in statuses().values()} == {"finished"}
    done = abrun("compare", "demo", "--output", "report")
    assert done.stderr == "" and json.loads(Path("report/verdict.json").read_text())["num_pairs"] == 2
    assert "No such" not in abrun("completions", "demo/baseline/seed-0").stderr
    if IS_ROOT:
        done = abrun("compare", "demo", "--output", "runs/demo/report")
        assert done.returncode == 2 and "--output: " in done.stderr and "choose another folder" in done.stderr

    run = experiment_dir / "baseline" / "seed-0"
    close(run / "attempts" / "0001.json")
    close(run / "samples.jsonl")
    close(experiment_dir / "treatment" / "seed-0")
    grant = "chmod -R g+rX" if IS_ROOT else "chmod -R u+rX"
    told = statuses()
    for name, closed in (
        ("baseline/seed-0", "baseline/seed-0/attempts/0001.json"),
        ("treatment/seed-0",) * 2,
    ):
        status, message = told[name]
        assert status == "unreadable" and message
        assert message.startswith(f"runs/demo/{closed}: cannot be read: Permission denied; ")
        assert message.endswith(f"{grant} runs/demo")
    assert told["baseline/seed-0-aa1"] == ("finished", None)
    done = abrun("compare", "demo", "--output", "report")
    verdict = json.loads(Path("report/verdict.json").read_text())
    assert verdict["verdict"] == "INVALID" and grant in verdict["reasons"][0], done.stderr
    assert not any("repair or remove" in reason for reason in verdict["reasons"])
    done = abrun("watch", "demo")
    assert "treatment/seed-0: unreadable" in done.stdout and "--resume" not in done.stdout
    done = abrun("completions", "demo/baseline/seed-0")
    assert done.returncode == 2 and "samples.jsonl: cannot be read: Permission denied" in done.stderr
    close(experiment_dir)
    for command in (
        ["status", "demo"],
        ["watch", "demo"],
        ["logs", "demo"],
        ["completions", "demo/baseline/seed-0"],
    ):
        done = abrun(*command)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, command
        assert f"{grant} runs/demo" in done.stderr and "demo: cannot be read" in done.stderr, command
    done = abrun("status")
    assert done.returncode == 0 and "runs/demo: cannot be read: Permission denied" in done.stdout
    experiment_dir.chmod(0o750)
    (run / "attempts" / "0001.json").chmod(0o640)
    (experiment_dir / "treatment" / "seed-0").chmod(0o750)
    assert not IS_ROOT or entries() == before  # who reads writes nothing
