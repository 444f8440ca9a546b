"""What a rank does before and beside its imports leaves everything as the imports alone would."""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from abrun.processes import progress
from abrun.trainer.loop import startup
from tests.trainer.loop.runs import single_rank, train_here
from tests.written_runs import make_run, run_config

ENDS = """
from abrun.trainer.loop import startup
driver = startup.begin()
import triton.compiler, triton.language
startup.finish(driver)
"""
CONTEXT = """
import ctypes, torch
from abrun.trainer.loop import startup
startup.finish(startup.begin())
flags, active = ctypes.c_uint(), ctypes.c_int()
assert not torch.cuda.is_initialized()
state = ctypes.CDLL(startup.DRIVER).cuDevicePrimaryCtxGetState
assert state(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 1
assert torch.ones(3, device="cuda").sum() == 3
"""


class Driver:
    """Stands in for CUDA's; device N is N + 40 to it."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[Any] = []

    def __call__(self, library: str) -> "Driver":
        self.calls.append(library)
        return self

    def cuInit(self, flags: int) -> int:
        self.calls.append(("initialised", flags))
        return self.status

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number + 40
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.calls.append(("context", device.value))
        return 0


@pytest.mark.parametrize("status", [0, 100])
def test_the_driver_comes_up_beside_the_imports_on_the_ranks_own_gpu(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    driver = Driver(status)
    monkeypatch.setattr(ctypes, "CDLL", driver)
    monkeypatch.setenv("LOCAL_RANK", "3")
    finish(startup.begin())
    assert driver.calls == [startup.DRIVER, ("initialised", 0), *([("context", 43)] if status == 0 else [])]


def test_garbage_is_looked_for_after_the_imports_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "DRIVER", "libnone.so.1")  # as where there is no GPU
    assert gc.isenabled()
    driver = startup.begin()
    assert not gc.isenabled()
    kept = gc.get_freeze_count()
    startup.finish(driver)
    try:
        assert gc.isenabled() and gc.get_freeze_count() > kept
    finally:
        gc.unfreeze()


def test_nothing_is_said_of_classes_that_outlive_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "nanobind" not in ran(ENDS)


@pytest.mark.gpu
def test_torch_finds_the_context_that_came_up() -> None:
    ran(CONTEXT)


def finish(driver: Any) -> None:
    startup.finish(driver)
    gc.unfreeze()


def ran(code: str) -> str:
    """What it has said to stderr."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_garbage_is_not_looked_for_in_what_the_first_step_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(progress, "report_step", lambda: frozen.append(gc.get_freeze_count()))
    with single_rank():
        train_here(make_run(tmp_path / "run", run_config("steps=3")))
    assert len(frozen) == 4 and frozen[0] < min(frozen[1:])
    assert gc.get_freeze_count() == 0
