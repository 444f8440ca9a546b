"""CUDA's multi-process service (MPS): with it, kernels of several runs execute on one GPU at the same time.

Without it, the GPU switches between them by time slices. A launch whose runs share GPUs starts its own
daemon, unless one is running already. The daemon changes no setting of the GPU. Its keeper,
`python -m abrun.launch.mps FOLDER`, ends it: when the launch ends, or after the launcher has died and its
runs have saved checkpoints.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from abrun import processes
from abrun.recipe.run import RunConfig

# docs.nvidia.com/deploy/mps: the daemon (-f: in the foreground), and its clients' variables
DAEMON = "nvidia-cuda-mps-control"
PIPE_VARIABLE, LOG_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
NO_DAEMON = "/nonexistent"  # as PIPE_VARIABLE: a process that finds no daemon there runs without MPS
PID_FILE = f"{DAEMON}.pid"
START_TIMEOUT_S = 10.0
# Runs that have lost their launcher take up to 30 s to save a checkpoint
CLIENTS_TIMEOUT_S = 40.0
END_TIMEOUT_S = 5.0
POLL_S = 0.05


class MpsService:
    """The daemon of one launch."""

    def __init__(self) -> None:
        """Start the daemon. Raises OSError if it does not start."""
        self._folder = Path(tempfile.mkdtemp(prefix="abrun-mps-"))
        self._keeper: processes.Popen | None = None
        try:
            for name in ("pipes", "logs"):
                (self._folder / name).mkdir()
            self._keeper = processes.start_process(
                [sys.executable, *processes.MODULE_OPTIONS, "abrun.launch.mps", str(self._folder)],
                {**os.environ, **_variables_of(self._folder)},
                death_signal=signal.SIGTERM,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not reach it before the runs have ended
            )
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _has_files(self._folder / "pipes"):
                if self._keeper.poll() is not None or time.monotonic() > deadline:
                    raise OSError(f"{DAEMON} did not start")
                time.sleep(POLL_S)
        except BaseException:
            self.close()
            raise

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that connect a run to the daemon; empty once the daemon has died."""
        is_alive = self._keeper is not None and self._keeper.poll() is None
        return _variables_of(self._folder) if is_alive else {}

    def close(self) -> None:
        if self._keeper:
            self._keeper.terminate()
            timeout_s = CLIENTS_TIMEOUT_S + 2 * END_TIMEOUT_S
            if processes.wait_for_exit(self._keeper, timeout_s, lambda: False) is None:
                processes.kill_all(lambda pid=self._keeper.pid: processes.find_descendants(pid))
                self._keeper.kill()
                self._keeper.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def shares_by_mps(config: RunConfig) -> bool:
    """Return whether a run shares its GPU through MPS.

    Ranks of one run on several GPUs wait for each other in their kernels. Under MPS, waiting kernels of
    several runs could fill the GPUs and block each other for ever; time slices cannot.
    """
    return config.cluster.runs_per_gpu > 1 and config.devices_per_node == 1


@contextlib.contextmanager
def mps_for(configs: Iterable[RunConfig], say: Callable[[str], object]) -> Iterator[MpsService | None]:
    """Serve runs that share GPUs by a daemon. None if none do, if another daemon serves them, or if it
    cannot be started, which is said.
    """
    service = None
    if any(map(shares_by_mps, configs)) and not is_served():
        try:
            if shutil.which(DAEMON) is None:
                raise FileNotFoundError(f"{DAEMON} is not installed")
            service = MpsService()
        except OSError as error:
            say(
                "cluster.runs_per_gpu: runs share GPUs by time slices, without CUDA's multi-process service: "
                f"{error}"
            )
    try:
        yield service
    finally:
        if service:
            service.close()


def is_served(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a process with these variables would connect to a daemon."""
    if PIPE_VARIABLE in env:
        return True
    try:
        return psutil.pid_exists(int((DEFAULT_PIPES / PID_FILE).read_text()))
    except (OSError, ValueError):
        return False


def _has_files(folder: Path) -> bool:
    with contextlib.suppress(OSError):  # removed by a keeper whose daemon has ended
        return any(folder.iterdir())
    return False


def _variables_of(folder: Path) -> dict[str, str]:
    return {PIPE_VARIABLE: str(folder / "pipes"), LOG_VARIABLE: str(folder / "logs")}


def main() -> int:
    """Keep the daemon until SIGTERM, then until no process uses it, and remove the folder."""
    folder, is_stopping = Path(sys.argv[1]), False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        is_stopping = True

    signal.signal(signal.SIGTERM, stop)
    processes.adopt_orphans()  # servers of a daemon that is killed
    # The daemon would number the visible GPUs anew, and runs name them as nvidia-smi does
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    daemon = processes.start_process(
        [DAEMON, "-f"],
        env | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        death_signal=signal.SIGTERM,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        processes.wait_for_exit(daemon, float("inf"), lambda: is_stopping)
        deadline = time.monotonic() + CLIENTS_TIMEOUT_S
        while daemon.poll() is None and time.monotonic() < deadline:
            # What may use the daemon: processes with its variable, without itself and its servers
            users = processes.find_processes_with(PIPE_VARIABLE, _variables_of(folder)[PIPE_VARIABLE])
            if not users - {psutil.Process(), *processes.find_descendants(os.getpid())}:
                break
            time.sleep(10 * POLL_S)
    finally:
        daemon.terminate()
        processes.wait_for_exit(daemon, END_TIMEOUT_S, lambda: False)
        processes.kill_all(lambda: processes.find_descendants(os.getpid()))  # its servers
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
