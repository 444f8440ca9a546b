"""`python -m tests.copied FD MODULE...`: a fork server whose copies do what they are told, by name."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from abrun.processes import forks


def main() -> None:
    asked, *modules = " ".join(sys.argv[1:]).split()
    if "thread" in modules:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if "slow" in modules:
        os.register_at_fork(before=lambda: time.sleep(0.6))
    if "one" in modules:
        os.fork = limited(os.fork, 2)  # with that which the server asks itself
    name, *words = forks.serve(socket.socket(fileno=int(asked)), lambda: "refuses" not in modules)
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


def die(number: str) -> None:
    os.kill(os.getpid(), int(number))


def sleep() -> None:
    print("sleeps", flush=True)
    time.sleep(60)


def start_below() -> None:
    subprocess.run(["sleep", "60"], check=False)


def spares(folder: str, count: str) -> None:
    """Of so many, the last made is told to run a file, the others nothing."""
    made: list[forks.Spare] = []
    for _ in range(int(count)):
        made.append(forks.Spare(lambda words: DEEDS[words[0]](*words[1:]), made))
    Path(folder, "pids").write_text(" ".join(str(spare.pid) for spare in made))
    with Path(folder, "inherited").open("w") as file:
        env = {**os.environ, "SET": "of a spare", "CHANGED": "now"}
        del env["REMOVED"]
        chosen = made[-1].become(["write", str(file.fileno()), folder], env, [file.fileno()])
    while chosen.poll() is None or not Path(folder, "go").exists():
        time.sleep(0.01)
    print("status", chosen.returncode, flush=True)


def write(number: str, folder: str) -> None:
    with os.fdopen(int(number), "w") as file:
        file.write(repr([os.environ.get(name) for name in ("SET", "CHANGED", "REMOVED")]))
    print("a spare prints", flush=True)
    Path(folder, "written").touch()
    sys.exit(7)


DEEDS = {function.__name__: function for function in (tell, end, die, sleep, start_below, spares, write)}

if __name__ == "__main__":
    main()
