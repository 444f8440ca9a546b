"""Stand-ins around a launch: a quiet observer, and the local engine with a fake trainer."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import ExperimentPlan, make_plan
from abrun.launch.cluster import find_cluster_jobs, make_cluster
from abrun.launch.engine import Devices, make_engine
from abrun.launch.local import LocalEngine
from abrun.launch.supervisor import GRACE_S, LaunchOutcome, Observer, run_plan, submit_plan
from abrun.messages.codes import Reason
from abrun.processes import MODULE_OPTIONS, Popen
from abrun.recipe.experiment import load_recipe
from abrun.recipe.launcher import resolve_launcher_settings
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.experiment import read_run_state
from abrun.runs.layout import RunName
from abrun.runs.rundir import RunDir
from abrun.runs.state import RunState
from tests.launch.forked import SHARED_SERVER

FAKE_TRAINER = Path(__file__).parent / "fake_trainer.py"
FAKE_MODULE = "tests.launch.fake_trainer"
FAKE = ("fake", "tests.launch.fakes:FakeEngine")  # to be set in LAUNCHERS
FRESH_FAKES = "tests.launch.fakes:FreshFakes"  # to be set as "fake" in LAUNCHERS
FORKING = "tests.launch.fakes:ForkingEngine"  # to be set as "local" in LAUNCHERS
FAKE_UNDER_AGENT = ("fake-under-agent", "tests.launch.fakes:FakesUnderAgent")
STAND_IN = ("stand-in", "tests.launch.fakes:StandInForVllm")
STAND_IN_HOST = ("tests.trainer.rollout.standin", "host")  # to be set as abrun.launch.hosts.HOST_COMMAND


SMALL = Path(__file__).parent / "small.yaml"


def plan_of(*overrides: str) -> ExperimentPlan:
    """The plan of the small recipe with these settings."""
    return make_plan(load_recipe(SMALL, overrides))


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Silent:
    """An observer that keeps what it is told."""

    def __init__(self, tick: Callable[[], object] = lambda: None) -> None:
        self.said: list[str] = []
        self.tick = tick

    def follow(self, experiment_dir: Path) -> None:
        pass

    def say(self, line: str) -> None:
        self.said.append(line)


def run_to_end(
    plan: ExperimentPlan,
    runs_dir: Path,
    *,
    observer: Observer | None = None,
    launcher: str = "local",
    grace_s: float = GRACE_S,
    **options: Any,
) -> LaunchOutcome:
    """Run a plan on an engine of its own; `options` are those of a launch."""
    asked = LaunchOptions(runs_dir=runs_dir, launcher=launcher, **options)
    engine = make_engine(launcher, asked.jobs)
    return run_plan(plan, asked, engine=engine, observer=observer or Silent(), grace_s=grace_s)


def submit(plan: ExperimentPlan, runs_dir: Path, launcher: str, **options: Any) -> Path:
    """Hand a plan over to a cluster; returns the experiment's directory."""
    settings = resolve_launcher_settings(plan.recipe.launcher, launcher)
    cluster = make_cluster(settings, runs_dir / plan.recipe.name, None)
    assert cluster is not None
    submit_plan(plan, LaunchOptions(runs_dir=runs_dir, **options), cluster=cluster, observer=Silent())
    return runs_dir / plan.recipe.name


def seen(experiment_dir: Path, arm: str = "baseline", seed: int = 0) -> RunState:
    """Return a run's state as its cluster knows it."""
    jobs = find_cluster_jobs(experiment_dir)
    assert jobs is not None
    return jobs.state_of(read_run_state(experiment_dir, RunName(arm=arm, seed=seed)))


class ForkingEngine(LocalEngine):
    """Starts Python modules as forks of a server that the whole test session shares."""

    @contextlib.contextmanager
    def prepare_for(
        self, runs: Sequence[tuple[RunDir, RunConfig]], say: Callable[[str], object]
    ) -> Iterator[None]:
        with SHARED_SERVER.in_use(), super().prepare_for(runs, say):
            yield

    def _start_process(self, run: RunDir, command: list[str], env: Mapping[str, str]) -> Popen:
        start = [sys.executable, *MODULE_OPTIONS]
        if command[: len(start)] != start:
            return super()._start_process(run, command, env)
        return SHARED_SERVER.start(run, command[len(start) :], env)


class FakeEngine(ForkingEngine):
    """Starts the fake trainer in place of ours; foreign ones as ever."""

    def command(self, run: RunDir, config: RunConfig, place: Devices) -> list[str]:
        if isinstance(config, OwnRunConfig):
            return [sys.executable, *MODULE_OPTIONS, FAKE_MODULE, str(run.path)]
        return super().command(run, config, place)


class FreshFakes(FakeEngine):
    """Starts each fake trainer in a new interpreter, as the product does."""

    _start_process = LocalEngine._start_process


class FakesUnderAgent(LocalEngine):
    def command(self, run: RunDir, config: RunConfig, place: Devices) -> list[str]:
        command = super().command(run, config, place)
        if not isinstance(config, OwnRunConfig):
            return command
        assert command[-2:] == ["abrun.trainer", str(run.path)]
        return [*command[:-2], "tests.launch.fake_trainer", str(run.path)]


class StandInForVllm(LocalEngine):
    """Our own trainer, in which tests.trainer.rollout.standin takes the place of vLLM."""

    def find_problems(self, plan: ExperimentPlan) -> list[Reason]:
        return []  # vLLM may be missing

    def command(self, run: RunDir, config: RunConfig, place: Devices) -> list[str]:
        return [*super().command(run, config, place)[:-2], "tests.trainer.rollout.standin", str(run.path)]
