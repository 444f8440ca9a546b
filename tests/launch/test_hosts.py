"""Launches whose runs share an engine host, with a stand-in for vLLM: same metrics, and nothing lives on.

Whichever process dies, a resume ends as if none had. ABRUN_FUZZ_SEED chooses the moments.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from abrun.experiment.plan import make_plan
from abrun.launch import hosts
from abrun.recipe.experiment import load_recipe
from abrun.recipe.implementations import LOCAL_LAUNCHERS
from abrun.runs.experiment import is_experiment
from abrun.runs.rundir import RunDir
from tests.launch.fakes import STAND_IN, STAND_IN_HOST, run_to_end
from tests.launch.test_kills import check_whole, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="engine hosts are Linux's alone"),
]
SEED = int(os.environ.get("ABRUN_FUZZ_SEED", "0"))
SMALL = Path(__file__).parent / "small.yaml"
SETTINGS = (
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "algorithm.entropy_coefficient=0.05",  # gradients that are not 0, whatever the rewards
    "rollout={engine: vllm, max_new_tokens: 6}",
    "steps=3",
    "checkpoint.every=1",
    "compare.claims=[]",
)
Metrics = dict[str, list[tuple[int, str]]]


def launch(runs_dir: Path, *overrides: str, jobs: int = 1) -> int:
    plan = make_plan(load_recipe(SMALL, [*SETTINGS, *overrides]))
    resume = is_experiment(runs_dir / "small")
    return run_to_end(plan, runs_dir, launcher=STAND_IN[0], jobs=jobs, resume=resume).exit_code


def metrics(runs_dir: Path) -> Metrics:
    """Every metric that does not depend on the clock or the allocator, exact to the last bit."""
    values = {}
    for config in sorted((runs_dir / "small").glob("*/*/config.json")):
        name = f"{config.parent.parent.name} {config.parent.name}"
        for key, series in RunDir(config.parent).metrics().items():
            if not key.startswith(("timing/", "memory/", "performance/")):
                pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
                values[f"{name} {key}"] = [(step, value.hex()) for step, value in pairs]
    return values


def processes(runs_dir: Path, *words: str) -> list[int]:
    """The living processes whose command line names something in that folder, and these words."""
    pids = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(runs_dir) in line and all(word in line for word in words):
            pids.append(process.pid)
    return pids


def started(runs_dir: Path) -> dict[str, set[int]]:
    """The processes that made an engine, by run."""
    return {
        f"{log.parent.parent.name} {log.parent.name}": {
            int(line.rsplit(" ", 1)[1])
            for line in log.read_text().splitlines()
            if line.startswith("stand-in started by")
        }
        for log in [*runs_dir.rglob("engine-0.log"), *runs_dir.rglob("stdout.log")]
        if "stand-in started by" in log.read_text()
    }


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(LOCAL_LAUNCHERS, *STAND_IN)
    monkeypatch.setattr(hosts, "HOST_COMMAND", STAND_IN_HOST)
    yield
    assert processes(tmp_path) == []


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """Of runs that each make their own engine."""
    runs_dir = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(LOCAL_LAUNCHERS, *STAND_IN)
        patched.setattr(hosts, "engine_settings", lambda config: None)
        assert launch(runs_dir) == 0
    assert len(started(runs_dir)) == 4 and not [*runs_dir.rglob("engine-0.log")]
    return metrics(runs_dir)


def test_one_engine_serves_all_runs_of_both_arms(tmp_path: Path, expected: Metrics) -> None:
    assert launch(tmp_path) == 0
    assert metrics(tmp_path) == expected
    assert [*started(tmp_path)] == ["baseline seed-0"]  # the first run alone has started one
    assert len([*tmp_path.rglob("engine-0.log")]) == 4


def test_runs_at_the_same_time_and_of_two_ranks_have_hosts_each(tmp_path: Path, expected: Metrics) -> None:
    assert launch(tmp_path / "parallel", jobs=2) == 0
    assert metrics(tmp_path / "parallel") == expected
    assert started(tmp_path / "parallel").keys() == {"baseline seed-0", "treatment seed-0"}
    assert launch(tmp_path / "ranks", "seeds=[0]", "cluster.cpu_ranks=2") == 0
    logs = [*(tmp_path / "ranks").rglob("engine-1.log")]
    assert len(logs) == 2 and sum("stand-in started" in log.read_text() for log in logs) == 1
    found = metrics(tmp_path / "ranks")["baseline seed-0 train/mean_gen_tokens_per_sample"]
    assert found[0] == expected["baseline seed-0 train/mean_gen_tokens_per_sample"][0]


def victims(runs_dir: Path, launcher: int, kind: str) -> list[int]:
    if kind == "launcher":
        return [launcher]
    if kind == "host":
        return processes(Path("/"), " ".join(STAND_IN_HOST), str(runs_dir))
    servers = victims(runs_dir, launcher, "host")
    return [pid for pid in processes(runs_dir, "tests.trainer.rollout.standin") if pid not in servers]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["launcher", "host", "trainer"])
def test_whatever_ends_nothing_lives_on_and_a_resume_is_exact(
    victim: str, end: signal.Signals, tmp_path: Path, expected: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM lets launcher and trainer save; a host ends after the run that it serves."""
    monkeypatch.setenv("STAND_IN_S", "0.02")
    moments = random.Random(f"{SEED} {victim}")
    for attempt in range(3):
        runs_dir = tmp_path / str(attempt)
        runs_dir.mkdir()
        launcher = os.fork()
        if launcher == 0:
            os._exit(launch(runs_dir))
        deadline = time.monotonic() + 120
        while not victims(runs_dir, launcher, victim) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 12))
        for pid in victims(runs_dir, launcher, victim)[:1]:
            os.kill(pid, end)
        wait_for(launcher, timeout_s=300)
        deadline = time.monotonic() + 45
        while processes(runs_dir):
            assert time.monotonic() < deadline, f"{processes(runs_dir)} live on"
            time.sleep(0.05)
        assert launch(runs_dir) == 0
        assert metrics(runs_dir) == expected
        check_whole(runs_dir / "small", victim)


def test_two_experiments_at_once_have_engines_of_their_own(tmp_path: Path, expected: Metrics) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    launchers = []
    for folder in folders:
        launchers.append(os.fork())
        if launchers[-1] == 0:
            os._exit(launch(folder))
    for pid in launchers:
        wait_for(pid, timeout_s=600)
    assert [metrics(folder) for folder in folders] == [expected, expected]
    first, second = (set().union(*started(folder).values()) for folder in folders)
    assert len(first) == len(second) == 1 and first != second
