"""First code of a process that `start_process` starts: tie it to its parent's life, then exec the command.

A preexec_fn would run in a forked copy in which another thread may hold a lock forever. This file is run by
`python -IS`, so it may import only the standard library.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    death_signal, parent_pid, error_fd = map(int, sys.argv[1:4])
    command = sys.argv[4:]
    # Closed by exec, which tells the parent that the command has started.
    os.set_inheritable(error_fd, False)
    # Exec has removed the parent's handlers, but ignored and blocked signals would stay so.
    default_signals = {death_signal} - {signal.SIGKILL}
    # Without its own group, a SIGINT (Ctrl-C) is meant for the parent's group.
    if os.getpgrp() == os.getpid():
        default_signals |= {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    for number in default_signals:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, default_signals)
    # Python ignores these two.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
    # The parent died before prctl.
    if os.getppid() != parent_pid:
        os._exit(128 + death_signal)
    # os.environ is not the environment that was passed on: Python adds LC_CTYPE.
    with open("/proc/self/environ", "rb") as file:
        variables = file.read().split(b"\0")
    environment = dict(number.split(b"=", 1) for number in variables if b"=" in number)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(error_fd, str(error.errno).encode())


if __name__ == "__main__":
    main()
