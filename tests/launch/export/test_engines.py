"""Exported manifests taken at their word: SkyPilot parses its tasks; what pods would run is run here, and
ends as under the local launcher."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from abrun.experiment.plan import make_plan
from abrun.launch.export.command import export_plan
from abrun.launch.export.manifest import PORT
from abrun.recipe.experiment import load_recipe
from abrun.runs.rundir import RunDir
from tests.launch.test_local import SMALL

pytestmark = pytest.mark.slow

SKY = os.environ.get("ABRUN_SKY_PYTHON") or (shutil.which("sky") and sys.executable)
PARSE = """
import sys, yaml, sky
for path in sys.argv[1:]:
    task = sky.Task.from_yaml_config(yaml.safe_load(open(path)), secrets_overrides=[('TOKEN', 'x')])
    print(task.num_nodes, [str(each.image_id) for each in task.resources], sorted(task.envs))
"""
POD = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # an agent ends what it sees of its run
WHATEVER_ELSE = ("timing/", "performance/", "memory/")


def exported(folder: Path, engine: str, settings: list[str]) -> None:
    export_plan(make_plan(load_recipe(SMALL, settings)), engine, folder, "small")


def parsed(folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """What SkyPilot makes of the tasks in a folder, in a home of its own."""
    if not SKY:
        pytest.skip("no skypilot: pip install skypilot, and set ABRUN_SKY_PYTHON to the Python that has it")
    files = sorted(map(str, folder.glob("*.yaml")))
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        [SKY, "-c", PARSE, *files], env=env, capture_output=True, text=True, check=False, timeout=200
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_itself_parses_the_tasks(tmp_path: Path, nodes: int) -> None:
    settings = ["launcher={type: skypilot, image: 'reg/abrun:1', volume: rl, secrets: [TOKEN]}"]
    exported(tmp_path / "out", "skypilot", [*settings, f"cluster.nodes={nodes}", "warm_start={steps: 3}"])
    done = parsed(tmp_path / "out", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = f"{nodes} [\"{{None: 'docker:reg/abrun:1'}}\"] ['ABRUN_RECIPE']"
    assert done.stdout.splitlines() == [runs.replace(str(nodes), "1", 1), *[runs] * 5]


def test_skypilot_refuses_what_is_injected(tmp_path: Path) -> None:
    exported(tmp_path / "out", "skypilot", ["launcher={type: skypilot, secrets: [TOKEN]}"])
    path = tmp_path / "out" / "run-baseline-seed-0.yaml"
    path.write_text(path.read_text().replace("num_nodes:", "numnodes:"))
    done = parsed(tmp_path / "out", tmp_path)
    assert done.returncode and "numnodes" in done.stderr


def test_the_pods_of_two_nodes_train_what_the_local_launcher_does(tmp_path: Path) -> None:
    """All pods of all JobSets as processes, in the order of submit.sh, the first node's name being here."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root, unshare")
    python, runs = sys.executable, tmp_path / "runs"
    jobset = f"launcher={{type: jobset, image: x, claim: y, runs_dir: {runs}, python: {python}}}"
    common = ["warm_start={steps: 3}", "compare.claims=[]", "seeds=[0]"]
    exported(tmp_path / "out", "jobset", [jobset, "cluster.nodes=2", *common])
    for file in ("warm-start-0", "pair-seed-0", "pair-seed-0", "compare"):  # the pair is begun again
        begun = [pod for job in jobs_in(tmp_path / "out" / f"{file}.yaml") for pod in started(job)]
        for pod in begun:
            output, _ = pod.communicate(timeout=250)
            assert pod.returncode in ((0, 4) if file == "compare" else (0,)), output
    assert (runs / "small" / "report" / "verdict.json").exists()
    local = [
        python,
        "-m",
        "abrun",
        "launch",
        str(SMALL),
        "--runs-dir",
        str(tmp_path / "local"),
        "--no-compare",
    ]
    for change in (*common, "cluster.cpu_ranks=2"):
        local += ["--set", change]
    subprocess.run(local, check=True, capture_output=True, timeout=250)
    for arm in ("baseline", "treatment"):
        here, there = (RunDir(folder / "small" / arm / "seed-0") for folder in (runs, tmp_path / "local"))
        assert here.last_attempt == 1  # the second start found it finished
        assert rows_of(here) == rows_of(there) and len(rows_of(here)) == 3


def jobs_in(path: Path) -> list[dict[str, Any]]:
    return [job["template"]["spec"] for job in yaml.safe_load(path.read_text())["spec"]["replicatedJobs"]]


def started(job: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """The pods of a Job as processes of this machine, which meet on a free port of it."""
    (container,) = job["template"]["spec"]["containers"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    *shell, script = container["command"]
    words = [f'"127.0.0.1:{port}"' if str(PORT) in word else word for word in script.split(" ")]
    env = {**os.environ, **{each["name"]: each["value"] for each in container.get("env", [])}}
    return [
        subprocess.Popen(
            [*POD, *shell, " ".join(words)],
            env={**env, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(job["completions"])
    ]


def rows_of(run: RunDir) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith((*WHATEVER_ELSE, "time_s"))}
        for row in run.metrics_reader().read()
    ]
