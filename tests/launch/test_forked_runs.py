"""Runs that begin as copies of one process with all imports done are those of processes of their own."""

import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from abrun.experiment.plan import make_plan
from abrun.launch import local
from abrun.launch.supervisor import LaunchOutcome
from abrun.processes import ForkedChild, find_children, find_run_processes
from abrun.processes.fork_server import ForkServer
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.runs.rundir import RunDir
from abrun.train import forked
from tests.launch.fakes import FAKE_UNDER_AGENT, Silent, run_to_end
from tests.processes.test_fork_server import lives, until, words_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are Linux's alone")
SMALL = Path(__file__).parent / "small.yaml"
LAUNCHER = """
import sys
from pathlib import Path
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from tests.launch.fakes import FAKE_UNDER_AGENT
from tests.launch.test_forked_runs import launch
LOCAL_LAUNCHERS.update([FAKE_UNDER_AGENT])
launch(Path(sys.argv[1]), "steps=2000", launcher="fake-under-agent")
"""


def launch(
    runs_dir: Path, *overrides: str, launcher: str, tick: Callable[[], object] = lambda: None
) -> LaunchOutcome:
    plan = make_plan(load_recipe(SMALL, overrides))
    return run_to_end(plan, runs_dir, launcher=launcher, observer=Silent(tick), jobs=1)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were forked; no run is started before one could be."""
    found, fork = list[int](), ForkServer.fork

    def forked_at_last(server: ForkServer, *order: object) -> ForkedChild | None:
        made = list[ForkedChild]()
        until(
            lambda: (
                made.extend(filter(None, [fork(server, *order)]))  # pyright: ignore
                or made
                or not servers_below(os.getpid())
            )
        )
        found.extend(copy.pid for copy in made)
        return made[0] if made else None

    monkeypatch.setattr(ForkServer, "fork", forked_at_last)
    return found


def servers_below(pid: int) -> list[int]:
    return [
        child for child in find_children(pid) if local.FORK_MODULE in words_of(child) and not is_copy(child)
    ]


def is_copy(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().startswith("abrun-")


@pytest.mark.slow
def test_they_train_as_processes_of_their_own_bit_for_bit(
    tmp_path: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MIN_WAITING_RUNS", 1)
    small = ("algorithm.prompts_per_step=4", "steps=2", "seeds=[0]")
    overrides = ("cluster.cpu_ranks=2", *small, "compare.claims=[]")
    assert launch(tmp_path / "copies", *overrides, launcher="local").exit_code == 0
    pids = {
        one.pid
        for path in (tmp_path / "copies").rglob("launch.json")
        for one in RunDir(path.parent).launches()
    }
    assert pids == set(copies) and len(copies) == 2
    monkeypatch.setattr(local, "MIN_WAITING_RUNS", math.inf)
    assert launch(tmp_path / "own", *overrides, launcher="local").exit_code == 0
    assert len(copies) == 2
    for arm in ("baseline", "treatment"):
        own, copied = (RunDir(tmp_path / made / "small" / arm / "seed-0") for made in ("own", "copies"))
        expected, found = own.metrics(), copied.metrics()
        assert found.keys() == expected.keys()
        # Seconds, and what of memory is garbage that nobody has looked for yet, are another in each process
        others = ("timing/", "performance/", "memory/")
        for key in (key for key in expected if not key.startswith(others)):
            assert np.array_equal(found[key].values, expected[key].values), key
        expected, found = (run.environment() or {} for run in (own, copied))
        assert found and found == expected
        logs = [(run.path / "stdout.log").read_text() for run in (own, copied)]
        assert len({re.sub("pid [0-9]+", "pid", log) for log in logs}) == 1


@pytest.mark.slow
def test_where_the_server_is_killed_its_runs_go_on_and_later_ones_are_no_copies(
    tmp_path: Path, copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOCAL_LAUNCHERS, *FAKE_UNDER_AGENT)
    monkeypatch.setenv("FAKE_TRAINER", '{"step_s": 0.05}')
    second = RunDir(tmp_path / "small" / "treatment" / "seed-0")

    def kill() -> None:
        if second.exists and second.heartbeat().step > 3:
            for pid in servers_below(os.getpid()):
                os.kill(pid, signal.SIGKILL)

    outcome = launch(tmp_path, "steps=20", launcher="fake-under-agent", tick=kill)
    assert outcome.exit_code == 0 and len(copies) == 2
    for name in outcome.statuses:
        run = RunDir(tmp_path / "small" / str(name))
        assert list(run.metrics()["train/reward"].steps) == [*range(1, 21)]
        assert len(run.launches()) == 1
    assert not servers_below(os.getpid())


def test_a_killed_launcher_leaves_neither_runs_nor_the_server(tmp_path: Path) -> None:
    environment = {**os.environ, "FAKE_TRAINER": '{"step_s": 0.02}'}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], env=environment)
    run = tmp_path / "small" / "baseline" / "seed-0"
    until(lambda: find_run_processes(run) and servers_below(launcher.pid))
    (server,) = servers_below(launcher.pid)
    launcher.kill()
    launcher.wait()
    until(lambda: not find_run_processes(run) and not lives(server))


def test_few_runs_and_runs_with_other_variables_or_modules_are_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[tuple[tuple[str, ...], str]]()

    def server(module: str, modules: tuple[str, ...], env: dict[str, str]) -> ForkServer:
        started.append((modules, env.get("ODD", "")))
        raise OSError("none is started")

    monkeypatch.setattr(local, "ForkServer", server)
    engine = local.LocalEngine(1)

    def expected(*overrides: str) -> list[tuple[tuple[str, ...], str]]:
        plan = make_plan(load_recipe(SMALL, overrides))
        runs = [(RunDir(tmp_path / str(run.name)), run.config) for run in plan.runs]
        started.clear()
        with engine.prepare_for(runs, print):
            return [*started]

    base = ("abrun.train.__main__", "abrun.train.loop", "abrun.train.grpo", "abrun.backends.dtensor")
    assert expected() == [(base, "")]
    assert expected("seeds=[0]", "compare.claims=[]") == []
    odd = "arms={baseline: {}, treatment: {trainer.env: {ODD: odd}, policy.compile: true}}"
    assert expected(odd) == []
    compiled = (*base, "torch._inductor.compile_fx")
    assert sorted(expected(odd, "seeds=[0, 1, 2]")) == [(base, ""), (compiled, "odd")]


@pytest.mark.usefixtures("heard_signals")
def test_being_asked_to_stop_is_heard_while_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*rest: object) -> ForkServer:
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("none is started")

    monkeypatch.setattr(local, "ForkServer", interrupted)
    outcome = launch(tmp_path, launcher="local")
    assert outcome.stopped_by == signal.SIGINT and set(outcome.statuses.values()) == {"pending"}


def test_ranks_draw_other_numbers_where_nobody_has_given_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = tmp_path / "drawn"

    def draw(*words: object, **options: object) -> None:
        with drawn.open("a") as file:
            print(np.random.random(), file=file)

    monkeypatch.setattr(runpy, "run_module", draw)
    ranks = [forked.start_copy(["a module"], dict(os.environ), []) for _ in range(2)]
    until(lambda: all(rank.poll() is not None for rank in ranks))
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(set(drawn.read_text().splitlines())) == 2
