"""Without a GPU the Triton kernels run in Triton's interpreter: said before anything imports triton, and
inherited by every process that a test starts. So is that each has one thread: ranks share few cores; and that
nobody asks a model hub. What needs torch is not loaded here: the core's tests pass without it."""

import atexit
import gc
import importlib.metadata
import importlib.util
import multiprocessing.util
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from abrun import cli
from abrun.experiment.preflight.machine import find_gpus
from abrun.recipe import extras
from abrun.runs import redaction
from tests.snapshot import Snapshot

if not find_gpus():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["ABRUN_POLL_S"] = "0.02"  # launches look this often at their runs
# Hundreds of processes import abrun: compiled once. A container's environment often forbids it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until `pytest_runtestloop`
if "PYTEST_XDIST_WORKER" in os.environ:
    # Called last, so that a worker exits without freeing its modules; and what that would leave out.
    atexit.register(os._exit, 0)
    for cleanup in (
        weakref.finalize._exitfunc,  # pyright: ignore[reportAttributeAccessIssue]
        multiprocessing.util._exit_function,  # pyright: ignore[reportAttributeAccessIssue]
    ):
        atexit.register(cleanup)


@pytest.fixture(autouse=True)
def no_hidden_values():
    """A launch within a test hides values for as long as its process lives."""
    yield
    redaction.forget_hidden_values()


@pytest.fixture
def trainer_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process see the trainer's packages installed, be they or not: for launches of fakes, and for
    what is suggested to somebody who can train."""
    versions = {"torch": "2.11.0", "transformers": "5.17.0", "math-verify": "0.8.0"}
    modules = set(extras.EXTRAS["train"])
    find_spec, find_version = importlib.util.find_spec, importlib.metadata.version

    def spec_of(name: str, package: str | None = None) -> ModuleSpec | None:
        return find_spec(name, package) or (ModuleSpec(name, None) if name in modules else None)

    def version_of(name: str) -> str:
        try:
            return find_version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in versions:
                raise
            return versions[name]

    monkeypatch.setattr(importlib.util, "find_spec", spec_of)
    monkeypatch.setattr(importlib.metadata, "version", version_of)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-snapshots", action="store_true", help="record the sentences that tests check")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Snapshot:
    """Check sentences against those recorded for this test (see tests/snapshot.py)."""
    root = str(Path(__file__).parents[1])
    replaced = {str(tmp_path): "<tmp>", root: "<repository>", sys.executable: "<python>"}
    update = bool(request.config.getoption("--update-snapshots"))
    return Snapshot(request.path, request.node.name, replaced, update)


@pytest.fixture
def abrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`abrun ARGUMENTS` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["abrun", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        output, errors = capsys.readouterr()
        return int(str(exited.value.code or 0)), output, errors

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite on three workers (`-n 0`: on none): a fifth of its time is waiting, which a third
    worker fills on two cores. One process is enough for a folder's tests, for which another's imports do not
    pay, and for those of a GPU, whose memory they measure."""
    whole = config.args_source is config.ArgsSource.TESTPATHS and "not gpu" in config.option.markexpr
    may = getattr(config.option, "numprocesses", 0) is None and not config.option.usepdb
    if whole and may and not hasattr(config, "workerinput"):  # which a worker has
        config.option.numprocesses, config.option.dist = 3, "worksteal"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage during tests, but never look for it in imported modules and collected tests.

    The collection of the whole suite takes 10 CPU seconds a worker, and took 17.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports leaked classes at exit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of megatron-core where this Python has no wheel of it; elsewhere they fail without it."""
    newest = extras.NEWEST_PYTHON["megatron-core"]
    if sys.version_info[:2] <= newest or extras.installed_version("megatron-core"):
        return
    for item in items:
        if "megatron" in item.nodeid or item.get_closest_marker("megatron"):
            item.add_marker(pytest.mark.skip(reason="megatron-core has no wheel for this Python"))


TRITON_ON_CPU = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
needs_interpreter = pytest.mark.skipif(
    not TRITON_ON_CPU,
    reason="needs the package triton and TRITON_INTERPRET=1, which a machine with a GPU does not set",
)


@pytest.fixture
def heard_signals() -> Iterator[None]:
    """SIGINT and SIGHUP as a terminal's program has them, in this process and in those that the test starts.

    A shell script's `&`, nohup and some CI runners start the suite with these ignored.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
