"""An engine host serves one run after the other; a run that finds none or loses it goes on with its own.

With a stand-in for vLLM. tests/launch/test_hosts.py launches whole experiments with it.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from abrun.errors import LaunchError
from abrun.launch import hosts as launching
from abrun.launch import local
from abrun.launch.hosts import EngineHosts, HostSet, engine_hosts_for, engine_settings
from abrun.processes import ENGINE_HOST_VARIABLE, RUN_DIR_VARIABLE, progress, start_process
from abrun.recipe.run import OwnRunConfig
from abrun.runs.rundir import RunDir
from abrun.trainer.rollout import Completion
from abrun.trainer.rollout.vllm import engines as colocated
from abrun.trainer.rollout.vllm import engines as library
from abrun.trainer.rollout.vllm.engines import HostedEngine
from tests.launch.fakes import STAND_IN_HOST
from tests.trainer.loop.runs import single_rank
from tests.trainer.rollout.forked_hosts import start_forked_host, started
from tests.trainer.rollout.standin import StandIn
from tests.trainer.rollout.vllm_sampling import PROMPTS, TEXT, draws
from tests.written_runs import make_run, run_config

CONFIG = run_config("rollout={engine: vllm, max_new_tokens: 8}")


class Weights:
    """A policy of two tensors, in place of a backend."""

    def __init__(self, ranks: Any) -> None:
        self.ranks, self.scale = ranks, 1.0

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.arange(6.0).reshape(2, 3) * self.scale
        yield "b", torch.full((), self.scale)


@pytest.fixture
def policy() -> Iterator[Any]:
    from abrun.trainer.backends.ranks import make_ranks

    with single_rank():
        yield Weights(make_ranks(torch.device("cpu"), {}))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "HOST_COMMAND", STAND_IN_HOST)
    monkeypatch.setattr(launching.processes, "start_process", start_forked_host)
    monkeypatch.setattr(colocated, "VllmInstance", StandIn)


class Launch:
    """A launcher of three equal runs, each of which is a `rank` in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "hosts").mkdir()
        self._monkeypatch = monkeypatch
        self.runs = [RunDir(make_run(folder / str(index), CONFIG)) for index in range(3)]
        self.hosts = EngineHosts([(run, CONFIG) for run in self.runs], folder / "hosts")

    def begin(self, index: int) -> None:
        run, env = self.runs[index], {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        env.pop(ENGINE_HOST_VARIABLE, None)
        env[RUN_DIR_VARIABLE] = str(run.path)
        variables = self.hosts.lend(run, CONFIG, ("cpu",), env)
        self._monkeypatch.setenv(RUN_DIR_VARIABLE, str(run.path))
        self._monkeypatch.setenv(ENGINE_HOST_VARIABLE, variables.get(ENGINE_HOST_VARIABLE, ""))

    def end(self, index: int, *, finished: bool = True) -> None:
        self.hosts.take_back(self.runs[index], finished=finished)

    @property
    def host(self) -> HostSet:
        (host,) = [*self.hosts._lent.values(), *self.hosts._idle]
        return host

    @property
    def pid(self) -> int:
        return self.host.processes[0].pid


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    launch = Launch(tmp_path, monkeypatch)
    yield launch
    launch.hosts.close()
    living = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in living if "standin" in " ".join(child.cmdline())]
    assert all(host.poll() is not None for host in started)


def sampled(engine: Any, policy: Any) -> list[list[Completion]]:
    """What a run of three steps samples, the second of which changes no weights."""
    completions = []
    for scale in (1.0, 1.0, 2.0):
        if engine.wake() or scale != policy.scale or not completions:
            policy.scale = scale
            engine.sync(policy.gather_weights())
        completions.append(engine.generate(PROMPTS, draws()))
        completions.append(engine.generate(PROMPTS, draws(), temperature=0.0))
        assert engine.sleep() == 0
    return completions


def hosted(policy: Any, config: OwnRunConfig = CONFIG) -> HostedEngine:
    engine = library.make_engine(config, policy, TEXT)
    assert isinstance(engine, HostedEngine)
    return engine


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def expected(policy: Any) -> list[list[Completion]]:
    return sampled(colocated.ColocatedEngine(CONFIG, policy, TEXT), policy)


def test_one_process_serves_run_after_run_and_ends_with_the_last(
    launch: Launch, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launching.processes, "start_process", start_process
    )  # a new interpreter, as for a user
    right, pids = expected(policy), []
    for index in range(3):
        launch.begin(index)
        pids.append(launch.pid)
        engine = hosted(policy)
        assert sampled(engine, policy) == right
        engine.close(finished=True)
        assert engine._own is None
        log = (launch.runs[index].path / "engine-0.log").read_text()
        assert log.count("stand-in started") == (index == 0)
        launch.end(index)
    assert len({*pids}) == 1
    until(lambda: not psutil.pid_exists(pids[0]))  # no run waits that could use it


def test_a_run_that_does_not_finish_takes_its_host_with_it(launch: Launch, policy: Any) -> None:
    launch.begin(0)
    first, engine = launch.host.processes[0], hosted(policy)
    engine.sync(policy.gather_weights())
    engine.close()
    assert first.wait(20) == 0
    launch.end(0, finished=False)
    launch.begin(1)
    assert launch.pid != first.pid
    engine = hosted(policy)
    assert sampled(engine, policy) == expected(policy) and engine._own is None


@pytest.mark.parametrize(
    "when",
    [
        "generate",
        *(pytest.param(when, marks=pytest.mark.slow) for when in ("before", "idle", "sync", "sleep")),
    ],
)
def test_a_host_that_is_killed_is_replaced_by_an_engine_of_the_run(
    when: str, launch: Launch, policy: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launch.begin(0)
    right = expected(policy)

    def kill() -> None:
        launch.host.processes[0].kill()
        launch.host.processes[0].wait()

    if when == "before":
        kill()
    engine = hosted(policy)
    if when == "idle":
        kill()
    elif when == "sync":
        gather = policy.gather_weights
        monkeypatch.setattr(policy, "gather_weights", lambda: killing(gather(), kill))
    elif when == "generate":  # called as it is heard, which is as it samples
        monkeypatch.setattr(progress, "report", lambda *_, **__: engine._host._transfer and kill())
    elif when == "sleep":
        request = engine._host.request
        monkeypatch.setattr(engine._host, "request", lambda *words: (kill(), request(*words))[1])
    assert sampled(engine, policy) == right
    assert engine._own is not None
    engine.close(finished=True)
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("rollout.engine:")]  # not of imports
    assert line.endswith("continuing with an engine in this process")
    launch.end(0)
    monkeypatch.undo()


def killing(weights: Iterator[tuple[str, Tensor]], kill: Any) -> Iterator[tuple[str, Tensor]]:
    yield next(weights)
    kill()
    yield from weights


def test_a_socket_at_which_nobody_listens_is_no_host(
    tmp_path: Path, policy: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    for path in (stale, tmp_path / "none"):
        monkeypatch.setenv(ENGINE_HOST_VARIABLE, str(path))
        assert sampled(hosted(policy), policy) == expected(policy)
        assert "does not serve this run" in capfd.readouterr().err


def test_a_host_that_hangs_ends_the_run_before_its_stall_limit(
    launch: Launch, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.begin(0)
    engine = hosted(policy)
    engine.sync(policy.gather_weights())
    engine._host.silence_s = 1.0
    os.kill(launch.pid, signal.SIGSTOP)
    with pytest.raises(LaunchError, match=r"the engine host \(engine-0.log\) was silent for \d+ s after"):
        engine.generate(PROMPTS, draws())
    engine.close()
    launch.end(0, finished=False)  # a stopped process too is killed


def test_while_it_samples_it_is_heard(launch: Launch, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_S", "0.25")
    launch.begin(0)
    engine = hosted(policy)
    engine.sync(policy.gather_weights())
    engine._host.silence_s, heard = 1.5, []
    monkeypatch.setattr(progress, "report", lambda *_, **__: heard.append(time.monotonic()))
    assert len(engine.generate(PROMPTS, draws())) == len(PROMPTS)  # 2 s
    assert len(heard) >= 3


@pytest.mark.parametrize("serving", [False, True])
def test_without_its_launcher_a_host_ends_after_the_run_that_it_serves(
    serving: bool, launch: Launch, policy: Any
) -> None:
    """The launcher's death sends SIGTERM."""
    launch.begin(0)
    host, engine = launch.host.processes[0], hosted(policy)
    if not serving:
        engine.close(finished=True)
        launch.end(0)
    host.send_signal(signal.SIGTERM)
    if serving:
        time.sleep(0.5)
        assert sampled(engine, policy) == expected(policy) and engine._own is None
        engine.close(finished=True)
    assert host.wait(10) == 0


def test_which_runs_share_a_host() -> None:
    settings = engine_settings(CONFIG)
    assert settings
    equal = ("policy.logprobs.impl=chunked", "steps=3", "validation={every: 2, num_prompts: 4}")
    for override in equal:
        assert engine_settings(run_config("rollout={engine: vllm, max_new_tokens: 8}", override)) == settings
    other = ("rollout.temperature=0.7", "rollout.max_new_tokens=9", "algorithm.prompts_per_step=8")
    for override in (*other, "policy.dtype=bfloat16", "cluster.cpu_ranks=2"):
        run = run_config("rollout={engine: vllm, max_new_tokens: 8}", override)
        assert engine_settings(run) not in (None, settings), override
    alone = ("rollout.engine=torch", "rollout.devices=1", "rollout.tensor_parallel=2 cluster.cpu_ranks=2")
    for override in (*alone, "injected_fault=copied_completions"):
        run = run_config("rollout={engine: vllm, max_new_tokens: 8}", *override.split(" "))
        assert engine_settings(run) is None, override


def test_runs_without_an_equal_neighbour_have_no_host(tmp_path: Path) -> None:
    other = run_config("rollout={engine: vllm, max_new_tokens: 9}")
    runs = [(RunDir(tmp_path / str(index)), config) for index, config in enumerate((CONFIG, other))]
    with engine_hosts_for(runs) as hosts:
        assert hosts is None
    with engine_hosts_for([*runs, (RunDir(tmp_path / "2"), CONFIG)]) as hosts:
        assert hosts is not None
        assert hosts.lend(*runs[1], ("cpu",), {"CUDA_VISIBLE_DEVICES": ""}) == {}


def test_idle_hosts_leave_a_gpu_to_runs_that_cannot_use_them(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, environment = engine_settings(CONFIG) or "", {"CUDA_VISIBLE_DEVICES": "1"}
    ended = list[Any]()
    monkeypatch.setattr(HostSet, "end", lambda hosts: ended.append(hosts))
    monkeypatch.setattr(HostSet, "is_alive", True)
    kept, idle = (HostSet(settings, env, (), ()) for env in ({"CUDA_VISIBLE_DEVICES": "0"}, environment))
    launch.hosts._idle += [kept, idle]
    other = run_config("rollout={engine: vllm, max_new_tokens: 9}")
    assert launch.hosts.lend(RunDir(Path("x")), other, ("1",), environment) == {}
    assert launch.hosts._idle == [kept] and ended[0] is idle
    assert launch.hosts.lend(launch.runs[0], CONFIG, ("0",), {"CUDA_VISIBLE_DEVICES": "0"})
    assert launch.hosts._idle == [] and launch.host is kept


def test_a_start_that_fails_takes_its_host_back(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local.LocalEngine()
    engine._hosts = launch.hosts

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(local.processes, "start_process", fail)
    with pytest.raises(OSError, match="no more processes"):
        engine.start(launch.runs[0], CONFIG, ("cpu",))
    assert launch.hosts._lent == {} and launch.hosts._idle == []
