"""The pool of probes: side by side, each once, and none that nobody waits for."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abrun.errors import LaunchError
from abrun.tools.predict import probes
from abrun.tools.predict.probes import Probe, ProbePool, TracingProcesses

CONFIG: Any = None
SOON_S = 30


def probe(name: str) -> Probe:
    return Probe(kind="predicted", key=name, arm=name, config=CONFIG, job={})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Probes that a process answers, as they start: "waits" until cancelled, "pair-N" until both run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(probes, "usable_cores", lambda: 2)
    names: list[str] = []
    pair = threading.Barrier(2)

    def do_job(
        _: TracingProcesses, directory: Path, config: Any, job: Any, is_cancelled: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        names.append(directory.name)
        if directory.name == "waits":
            threading.Event().wait(0.01)
            while not is_cancelled():
                threading.Event().wait(0.01)
            raise LaunchError("cancelled")
        if directory.name.startswith("pair"):
            pair.wait(SOON_S)
        if directory.name == "fails":
            raise LaunchError("no such kernel")
        return [{"answer": directory.name}]

    monkeypatch.setattr(TracingProcesses, "do_job", do_job)
    return names


def test_probes_run_side_by_side_each_once_and_are_kept_for_later_launches(started: list[str]) -> None:
    both = [probe("pair-0"), probe("pair-1")]
    for _ in range(2):
        with ProbePool() as pool:
            assert pool.answer_all([*both, *both]) == 2 * [{"answer": "pair-0"}, {"answer": "pair-1"}]
    assert sorted(started) == ["pair-0", "pair-1"]
    assert not pool.has_started and pool.days.keys() == {"pair-0", "pair-1"}


def test_a_failure_is_that_of_whoever_waits_for_it(started: list[str]) -> None:
    with ProbePool() as pool:
        failing = pool.ask(probe("fails"))
        assert pool.answer_all([probe("a")]) == [{"answer": "a"}]
        with pytest.raises(LaunchError, match="no such kernel"):
            failing.result(SOON_S)


def test_what_nobody_waits_for_ends_and_can_be_asked_again(started: list[str], tmp_path: Path) -> None:
    with ProbePool() as pool:
        for name in ("waits", "waits too", "late"):
            pool.ask(probe(name.split()[0]))
        pool.cancel()
        assert pool.ask(probe("a")).result(SOON_S) == {"answer": "a"}
        pool.ask(probe("waits"))
    assert started.count("waits") <= 2 and not list(tmp_path.glob("abrun-memory-*"))
