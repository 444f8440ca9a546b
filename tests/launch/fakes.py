"""Stand-ins around a launch: a quiet observer, and the local engine with a fake trainer."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from abrun.experiment.options import LaunchOptions
from abrun.experiment.plan import Plan
from abrun.launch.engine import Place, make_engine
from abrun.launch.local import LocalEngine
from abrun.launch.supervisor import GRACE_S, Observer, Outcome, run_plan
from abrun.recipe.run import OwnRunConfig, RunConfig
from abrun.runs.rundir import RunDir

FAKE_TRAINER = Path(__file__).parent / "fake_trainer.py"
FAKE = ("fake", "tests.launch.fakes:FakeEngine")  # to be set in LAUNCHERS
FAKE_UNDER_AGENT = ("fake-under-agent", "tests.launch.fakes:FakesUnderAgent")


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
    plan: Plan,
    runs_dir: Path,
    *,
    observer: Observer | None = None,
    launcher: str = "local",
    grace_s: float = GRACE_S,
    **options: Any,
) -> Outcome:
    """Run a plan on an engine of its own; `options` are those of a launch."""
    asked = LaunchOptions(runs_dir=runs_dir, launcher=launcher, **options)
    engine = make_engine(launcher, asked.jobs)
    return run_plan(plan, asked, engine=engine, observer=observer or Silent(), grace_s=grace_s)


class FakeEngine(LocalEngine):
    """Starts the fake trainer in place of ours; foreign ones as ever."""

    def command(self, run: RunDir, config: RunConfig, place: Place) -> list[str]:
        if isinstance(config, OwnRunConfig):
            return [sys.executable, str(FAKE_TRAINER), str(run.path)]
        return super().command(run, config, place)


class FakesUnderAgent(LocalEngine):
    def command(self, run: RunDir, config: RunConfig, place: Place) -> list[str]:
        command = super().command(run, config, place)
        if not isinstance(config, OwnRunConfig):
            return command
        assert command[-2:] == ["abrun.train", str(run.path)]
        return [*command[:-2], "tests.launch.fake_trainer", str(run.path)]
