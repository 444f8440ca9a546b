"""`python -m tests.copied FD WORD...`: a fork server whose copies do what they are told, by name."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from abrun.processes import fork_server


def main() -> None:
    asked, *words = sys.argv[1:]
    if "thread" in words:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if "slow" in words:
        os.register_at_fork(before=lambda: time.sleep(0.6))
    if "one" in words:
        os.fork = limited(os.fork, 2)  # with that which the server asks itself: a copy's second is its own
    name, *words = fork_server.serve_forks(socket.socket(fileno=int(asked)), lambda: "refuses" not in words)
    DEEDS[name](*words)


def limited(fork: Callable[[], int], most: int) -> Callable[[], int]:
    left = iter(range(most))

    def limited_fork() -> int:
        if next(left, None) is None:
            raise BlockingIOError(errno.EAGAIN, "as many processes as are allowed")
        return fork()

    return limited_fork


def tell(*names: str) -> None:
    print([os.environ.get(name) for name in names], file=sys.stderr, flush=True)
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    ours = [file for file in files if "libffi" not in file]  # Debian's keeps its own file open
    print(os.getsid(0) == os.getpid(), len(ours), flush=True)


def end(status: str) -> None:
    sys.exit(int(status))


def sleep() -> None:
    time.sleep(60)


def start_below() -> None:
    if os.fork() == 0:  # and runs no other program, so that its environment is not its own
        time.sleep(60)
    subprocess.run(["sleep", "60"], check=False)


def fork_children(folder: str) -> None:
    """One that writes and fails, and one that waits; neither does what this one does at its end."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        failing = fork_server.fork_child(lambda: fail(folder), signal.SIGKILL)
        waiting = fork_server.fork_child(lambda: time.sleep(60), signal.SIGKILL)
        Path(folder, "pids").write_text(f"{waiting.pid} {failing.pid}")
        while failing.poll() is None or not Path(folder, "go").exists():
            time.sleep(0.01)
        print("status", failing.returncode, flush=True)
        waiting.terminate()
        while waiting.poll() is None:
            time.sleep(0.01)
        print("status", waiting.returncode, flush=True)
    finally:
        print("the end of", os.getpid(), flush=True)


def fail(folder: str) -> None:
    import atexit

    atexit.register(lambda: print("at its exit", flush=True))
    sys.exit(7)


DEEDS = {function.__name__: function for function in (tell, end, sleep, start_below, fork_children)}

if __name__ == "__main__":
    main()
