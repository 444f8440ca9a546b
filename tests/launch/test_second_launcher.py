"""A second launcher is one class and one line in LAUNCHERS: nothing else of abrun knows of it."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import pytest

from abrun.errors import LaunchError, RecipeError
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.launch.cluster import make_cluster
from abrun.launch.engine import Devices, Engine
from abrun.recipe import implementations
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.recipe.launcher import resolve_launcher_settings
from abrun.recipe.run import RunConfig
from abrun.recipe.section import Section
from abrun.runs.rundir import RunDir
from tests.launch.fakes import FAKE_TRAINER, run_to_end

RECIPES = Path(__file__).parents[2] / "recipes"


class ToyRun:
    """A process by itself, without torchrun."""

    pid = None  # as of a job on another host
    is_lost = False

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        else:
            self.process.terminate()


class ToyEngine(Engine):
    """One run after the other."""

    trainer = ("-m", "abrun.trainer")

    def __init__(self, num_jobs: int | None) -> None:
        self.started: list[ToyRun] = []

    def find_problems(self, plan: ExperimentPlan) -> list[str]:
        return [] if len(plan.recipe.seeds) == 1 else [f"seeds: got {plan.recipe.seeds}; a toy takes one"]

    def find_devices(self, run: RunDir, config: RunConfig) -> Devices | None:
        return None if any(run.poll() is None for run in self.started) else ("toy",)

    def start(self, run: RunDir, config: RunConfig, place: Devices) -> ToyRun:
        with run.log.open("ab") as log:
            command = [sys.executable, *self.trainer, str(run.path)]
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self.started.append(ToyRun(process))
        return self.started[-1]


class ToyEngineOfFakes(ToyEngine):
    trainer = (str(FAKE_TRAINER),)


def launch_toy(recipe: Path, runs_dir: Path, *overrides: str) -> dict[str, str]:
    plan = make_plan(load_recipe(recipe, ["seeds=[0]", "compare.claims=[]", *overrides]))
    outcome = run_to_end(plan, runs_dir, launcher="toy")
    assert outcome.exit_code == 0
    directory = runs_dir / plan.recipe.name
    starts = {str(name): RunDir(directory / str(name)).launches() for name in outcome.statuses}
    assert all([start.devices for start in of_run] == [("toy",)] for of_run in starts.values())
    return {str(name): status for name, status in outcome.statuses.items()}


@pytest.mark.slow
def test_it_launches_the_quickstart_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "toy", "tests.launch.test_second_launcher:ToyEngine")
    overrides = ("steps=2", "warm_start=null", "controls.aa_reruns=0")
    statuses = launch_toy(RECIPES / "quickstart.yaml", tmp_path, *overrides)
    assert statuses == {"baseline/seed-0": "finished", "treatment/seed-0": "finished"}
    for run in statuses:
        assert len(RunDir(tmp_path / "quickstart" / run).metrics()["train/reward"]) == 2


def test_it_launches_fakes_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "toy", "tests.launch.test_second_launcher:ToyEngineOfFakes")
    statuses = launch_toy(Path(__file__).parent / "small.yaml", tmp_path, "warm_start={steps: 2}")
    assert statuses == {"baseline/seed-0": "finished", "treatment/seed-0": "finished"}


def test_what_it_cannot_run_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, "toy", "tests.launch.test_second_launcher:ToyEngine")
    plan = make_plan(load_recipe(Path(__file__).parent / "small.yaml"))
    with pytest.raises(LaunchError, match=r"small: seeds: got .* toy"):
        run_to_end(plan, tmp_path, launcher="toy")
    with pytest.raises(LaunchError, match=r"--launcher: got 'pbs'; allowed: local, toy, slurm, ray$"):
        run_to_end(plan, tmp_path, launcher="pbs")
    assert not any(tmp_path.iterdir())


class QueueSettings(Section):
    type: Literal["queue"]
    priority: int = 0


class Queue:
    """A cluster of another package, as far as a launch makes it."""

    settings = QueueSettings

    def __init__(self, experiment_dir: Path, given: QueueSettings, num_jobs: int | None) -> None:
        self.given = given


def test_another_package_s_launcher_takes_its_settings_from_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    entry = EntryPoint("queue", "tests.launch.test_second_launcher:Queue", implementations.LAUNCHERS)
    monkeypatch.setattr(implementations, "installed", lambda group: {entry.name: entry})
    profile = tmp_path / "abrun" / "launchers.yaml"
    profile.parent.mkdir()
    profile.write_text("queue: {priority: 3}")
    cluster = make_cluster(resolve_launcher_settings(None, "queue"), tmp_path, None)
    assert isinstance(cluster, Queue) and cluster.given.priority == 3
    profile.write_text("queue: {priorty: 3}")
    with pytest.raises(RecipeError, match="priorty"):
        resolve_launcher_settings(None, "queue")
    assert resolve_launcher_settings(None, "no such launcher") is None
